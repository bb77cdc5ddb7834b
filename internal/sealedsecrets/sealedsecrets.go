// Package sealedsecrets reads the manifests of Bitnami's Sealed Secrets and opens their values with
// a backup of the old controller's keys. Then the values can be sealed again for the vault. The
// package writes nothing in that format.
//
// A value is the length of the RSA part (2 bytes, big-endian), the RSA part, and AES-256-GCM
// ciphertext under a session key that is used once, with a nonce of zeros and no associated data.
// The RSA part is the session key under RSA-OAEP with SHA-256. The OAEP label is the scope:
// "namespace/name", "namespace", or nothing. The annotations that name a scope only decide which
// label is tried, so a changed annotation opens nothing and widens nothing.
//
// The package is pure. Its errors address the person who runs the import. They name objects and
// data keys. They never quote a value, a key or unreadable input, which may be either.
package sealedsecrets

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	utiljson "k8s.io/apimachinery/pkg/util/json" // case-sensitive, as in Kubernetes
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Names that have a meaning in Sealed Secrets.
const (
	Domain      = "sealedsecrets.bitnami.com/"         // prefix of all of them
	KeyLabel    = Domain + "sealed-secrets-key"        // label of a Secret that holds a sealing key; its value does not matter
	KeepSecret  = Domain + "skip-set-owner-references" // annotation of a template: the Secret outlives its SealedSecret
	PatchSecret = Domain + "patch"                     // annotation of a template: values are merged into an existing Secret
)

const (
	group      = "bitnami.com"
	apiVersion = group + "/v1alpha1"

	clusterWide   = Domain + "cluster-wide"
	namespaceWide = Domain + "namespace-wide"

	sessionKeySize = 32
)

// SealedSecret is a manifest of Sealed Secrets.
type SealedSecret struct {
	Metadata Metadata `json:"metadata"`
	Spec     Spec     `json:"spec"`
}

// Metadata is the metadata of a manifest or its template.
type Metadata struct {
	Namespace   string            `json:"namespace"`
	Name        string            `json:"name"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// Spec is the spec of a manifest.
type Spec struct {
	EncryptedData map[string]string `json:"encryptedData"` // base64 by data key
	Data          string            `json:"data"`          // a whole Secret in one value, the format before encryptedData
	Template      Template          `json:"template"`
}

// Template describes the Secret that the controller made.
type Template struct {
	Metadata  Metadata           `json:"metadata"`
	Type      string             `json:"type"`
	Immutable bool               `json:"immutable"`
	Data      map[string]*string `json:"data"` // templates with functions, by data key; null removes a key
}

// Scope says how far the values may be moved.
func (s *SealedSecret) Scope() v1beta1.Scope {
	switch {
	case s.Metadata.Annotations[clusterWide] == "true":
		return v1beta1.ScopeCluster
	case s.Metadata.Annotations[namespaceWide] == "true":
		return v1beta1.ScopeNamespace
	default:
		return v1beta1.ScopeStrict
	}
}

// Parse reads one YAML or JSON document: a SealedSecret, a list, or another object, which is only
// counted. The error joins the mistakes in single objects. Parse returns the other objects together
// with it.
func Parse(doc []byte) (found []*SealedSecret, others int, err error) {
	var problems []error
	err = each(doc, func(t typeMeta, object []byte) error {
		if t.Kind != "SealedSecret" || !strings.HasPrefix(t.APIVersion, group+"/") {
			others++
			return nil
		}
		s, err := parse(t, object)
		if err != nil {
			problems = append(problems, err)
			return nil
		}
		found = append(found, s)
		return nil
	})
	return found, others, errors.Join(append(problems, err)...)
}

func parse(t typeMeta, object []byte) (*SealedSecret, error) {
	name := "SealedSecret " + t.Metadata.title()
	if t.APIVersion != apiVersion {
		return nil, fmt.Errorf("%s: is of another version than %s", name, apiVersion)
	}
	s := new(SealedSecret)
	if err := utiljson.Unmarshal(object, s); err != nil { // the cause may quote a template
		return nil, fmt.Errorf("%s: is not a valid SealedSecret: spec.encryptedData holds base64 text by data key", name)
	}
	return s, nil
}

// typeMeta holds the fields that every object and list has.
type typeMeta struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   Metadata          `json:"metadata"`
	Items      []json.RawMessage `json:"items"`
}

// title names an object as kubectl does. Nothing has checked the name yet, so control characters
// for a terminal are escaped.
func (m Metadata) title() string {
	title := m.Name
	if m.Namespace != "" {
		title = m.Namespace + "/" + m.Name
	}
	quoted := strconv.QuoteToGraphic(title)
	return quoted[1 : len(quoted)-1]
}

// Title names s as kubectl does, safe for a terminal.
func (s *SealedSecret) Title() string { return s.Metadata.title() }

// yamlLine matches the place in an error of the YAML parser.
var yamlLine = regexp.MustCompile(`line [0-9]+`)

// each calls f for the object in a document, or for every object if the document is a list.
func each(doc []byte, f func(t typeMeta, object []byte) error) error {
	object, err := yaml.YAMLToJSONStrict(doc)
	if err != nil { // the cause may quote a value
		where := ""
		if line := yamlLine.FindString(err.Error()); line != "" {
			where = " (" + line + ")"
		}
		return errors.New("is not well-formed YAML or JSON" + where)
	}
	defer clear(object)
	var t typeMeta
	if err := utiljson.Unmarshal(object, &t); err != nil || t.APIVersion == "" || t.Kind == "" {
		return errors.New("is not a Kubernetes object: it needs apiVersion, kind and metadata")
	}
	if !strings.HasSuffix(t.Kind, "List") {
		return f(t, object)
	}
	for i, item := range t.Items {
		var t typeMeta
		if err := utiljson.Unmarshal(item, &t); err != nil || t.APIVersion == "" || t.Kind == "" {
			return fmt.Errorf("items[%d] is not a Kubernetes object: it needs apiVersion, kind and metadata", i)
		}
		err := f(t, item)
		clear(item)
		if err != nil {
			return err
		}
	}
	return nil
}

// Open opens all values of s and tries every key. The caller owns the values and zeroes them.
func (s *SealedSecret) Open(keys []*rsa.PrivateKey) (map[string]secret.Bytes, error) {
	if s.Spec.Data != "" {
		return nil, errors.New("spec.data is an old format that is not read here: seal the Secret itself (latticekeep seal)")
	}
	if len(s.Spec.EncryptedData) == 0 {
		return nil, errors.New("spec.encryptedData has no values")
	}
	label, err := s.label()
	if err != nil {
		return nil, err
	}
	values := make(map[string]secret.Bytes, len(s.Spec.EncryptedData))
	var failed []string
	for _, k := range slices.Sorted(maps.Keys(s.Spec.EncryptedData)) {
		v, ok := open(keys, label, s.Spec.EncryptedData[k])
		if !ok {
			failed = append(failed, fmt.Sprintf("%.64q", k))
			continue
		}
		values[k] = v
	}
	if len(failed) > 0 {
		for _, v := range values {
			v.Zero()
		}
		return nil, fmt.Errorf("no key of the backup opens spec.encryptedData of %s: either a sealing key is missing in the "+
			"backup, or the values were sealed for another scope, namespace or name, or were changed", strings.Join(failed, ", "))
	}
	return values, nil
}

// label returns the OAEP label of the scope. It checks namespace and name, because a slash in one
// of them or an empty one would give the label of another scope.
func (s *SealedSecret) label() ([]byte, error) {
	namespace, name := s.Metadata.Namespace, s.Metadata.Name
	if strings.Contains(namespace, "/") || strings.Contains(name, "/") || name == "" {
		return nil, errors.New("metadata.name or metadata.namespace is not the name of an object")
	}
	scope := s.Scope()
	if scope == v1beta1.ScopeCluster {
		return nil, nil
	}
	if namespace == "" {
		return nil, errors.New("metadata.namespace is missing: the values are bound to it")
	}
	if scope == v1beta1.ScopeNamespace {
		return []byte(namespace), nil
	}
	return []byte(namespace + "/" + name), nil
}

// open opens one value. It does not say why a value fails to open, because an honest caller has no
// use for the reason.
func open(keys []*rsa.PrivateKey, label []byte, text string) (secret.Bytes, bool) {
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(data) < 2 {
		return nil, false
	}
	n := int(binary.BigEndian.Uint16(data))
	if data = data[2:]; len(data) < n {
		return nil, false
	}
	wrapped, sealed := data[:n], data[n:]
	for _, key := range keys {
		if n != key.Size() {
			continue
		}
		session, err := rsa.DecryptOAEP(sha256.New(), nil, key, wrapped, label)
		if err != nil {
			continue
		}
		value, err := openGCM(session, sealed)
		clear(session)
		if err == nil {
			return value, true
		}
	}
	return nil, false
}

func openGCM(session, sealed []byte) (secret.Bytes, error) {
	if len(session) != sessionKeySize {
		return nil, errors.New("not a session key")
	}
	block, err := aes.NewCipher(session)
	if err != nil {
		return nil, err
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		return nil, err
	}
	if len(sealed) < gcm.Overhead() {
		return nil, errors.New("too short")
	}
	return gcm.Open(make([]byte, 0, len(sealed)-gcm.Overhead()), make([]byte, gcm.NonceSize()), sealed, nil)
}
