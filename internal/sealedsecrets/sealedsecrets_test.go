package sealedsecrets

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// testKeyBits is the shortest RSA key that Go allows, because it is made quickly.
const testKeyBits = 1024

func newKey(t testing.TB) *rsa.PrivateKey {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, testKeyBits)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// seal encodes a value in the format. It is written from the format's description.
func seal(t testing.TB, key *rsa.PrivateKey, label, value string) string {
	t.Helper()
	session := make([]byte, 32)
	rand.Read(session)
	return encode(t, key, session, label, value)
}

func encode(t testing.TB, key *rsa.PrivateKey, session []byte, label, value string) string {
	t.Helper()
	wrapped, err := rsa.EncryptOAEP(sha256.New(), rand.Reader, &key.PublicKey, session, []byte(label))
	if err != nil {
		t.Fatal(err)
	}
	block, err := aes.NewCipher(session)
	if err != nil {
		t.Fatal(err)
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		t.Fatal(err)
	}
	out := append([]byte{byte(len(wrapped) >> 8), byte(len(wrapped))}, wrapped...)
	out = append(out, gcm.Seal(nil, make([]byte, 12), []byte(value), nil)...)
	return base64.StdEncoding.EncodeToString(out)
}

// manifest returns a manifest of shop/db with one value.
func manifest(annotations, value string) string {
	return fmt.Sprintf(`apiVersion: bitnami.com/v1alpha1
kind: SealedSecret
metadata:
  name: db
  namespace: shop
  creationTimestamp: null
  annotations: {%s}
spec:
  encryptedData:
    password: %s
  template:
    metadata: {name: db, namespace: shop, labels: {app: shop}}
    type: Opaque
`, annotations, value)
}

func one(t testing.TB, doc string) *SealedSecret {
	t.Helper()
	found, others, err := Parse([]byte(doc))
	if err != nil || others != 0 || len(found) != 1 {
		t.Fatalf("%d SealedSecrets, %d others, %v", len(found), others, err)
	}
	return found[0]
}

const (
	namespaceAnnotation = `sealedsecrets.bitnami.com/namespace-wide: "true"`
	clusterAnnotation   = `sealedsecrets.bitnami.com/cluster-wide: "true"`
)

// Every scope in the manifest against every scope that a value was sealed with: a value opens with
// its own scope only.
func TestAValueOpensWithItsOwnScopeOnly(t *testing.T) {
	key := newKey(t)
	labels := map[v1beta1.Scope]string{v1beta1.ScopeStrict: "shop/db", v1beta1.ScopeNamespace: "shop", v1beta1.ScopeCluster: ""}
	annotations := map[string]v1beta1.Scope{
		"": v1beta1.ScopeStrict,
		`sealedsecrets.bitnami.com/namespace-wide: "yes"`: v1beta1.ScopeStrict,
		`sealedsecrets.bitnami.com/cluster-wide: "false"`: v1beta1.ScopeStrict,
		namespaceAnnotation: v1beta1.ScopeNamespace,
		clusterAnnotation:   v1beta1.ScopeCluster,
		clusterAnnotation + ", " + namespaceAnnotation: v1beta1.ScopeCluster,
	}
	for annotation, scope := range annotations {
		for sealedWith, label := range labels {
			s := one(t, manifest(annotation, seal(t, key, label, "tr0ub4dor")))
			if s.Scope() != scope {
				t.Fatalf("%s is scope %s", annotation, s.Scope())
			}
			values, err := s.Open([]*rsa.PrivateKey{key})
			if (err == nil) != (scope == sealedWith) {
				t.Errorf("%s: a value of scope %s: %v", annotation, sealedWith, err)
			}
			if err == nil && (len(values) != 1 || string(values["password"]) != "tr0ub4dor") {
				t.Errorf("%s: other values", annotation)
			}
		}
	}
	// The template's annotations have no influence on the scope.
	doc := strings.Replace(manifest("", seal(t, key, "", "x")), "labels: {app: shop}", "annotations: {"+clusterAnnotation+"}", 1)
	if _, err := one(t, doc).Open([]*rsa.PrivateKey{key}); err == nil {
		t.Error("the template's annotation widened the scope")
	}
}

func TestNamesCannotImitateAnotherScope(t *testing.T) {
	key := newKey(t)
	for name, s := range map[string]*SealedSecret{
		"strict value as namespace-wide": {Metadata: Metadata{Namespace: "shop/db", Name: "x", Annotations: map[string]string{namespaceWide: "true"}},
			Spec: Spec{EncryptedData: map[string]string{"k": seal(t, key, "shop/db", "v")}}},
		"cluster-wide value as namespace-wide": {Metadata: Metadata{Name: "x", Annotations: map[string]string{namespaceWide: "true"}},
			Spec: Spec{EncryptedData: map[string]string{"k": seal(t, key, "", "v")}}},
		"strict without a namespace": {Metadata: Metadata{Name: "x"}, Spec: Spec{EncryptedData: map[string]string{"k": seal(t, key, "/x", "v")}}},
		"strict without a name":      {Metadata: Metadata{Namespace: "shop"}, Spec: Spec{EncryptedData: map[string]string{"k": seal(t, key, "shop/", "v")}}},
		"name with a slash":          {Metadata: Metadata{Namespace: "a", Name: "b/c"}, Spec: Spec{EncryptedData: map[string]string{"k": seal(t, key, "a/b/c", "v")}}},
	} {
		if _, err := s.Open([]*rsa.PrivateKey{key}); err == nil || !strings.Contains(err.Error(), "metadata.") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEveryKeyIsTried(t *testing.T) {
	older, newer, foreign := newKey(t), newKey(t), newKey(t)
	long, err := rsa.GenerateKey(rand.Reader, 2048) // another size of the RSA part
	if err != nil {
		t.Fatal(err)
	}
	keys := []*rsa.PrivateKey{newer, long, older}
	for name, key := range map[string]*rsa.PrivateKey{"older": older, "newer": newer, "long": long} {
		values, err := one(t, manifest("", seal(t, key, "shop/db", ""))).Open(keys)
		if err != nil || len(values) != 1 || len(values["password"]) != 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := one(t, manifest("", seal(t, foreign, "shop/db", "v"))).Open(keys); err == nil || !strings.Contains(err.Error(), `"password"`) {
		t.Errorf("a foreign key: %v", err)
	}
}

func TestDamagedValuesDoNotOpen(t *testing.T) {
	key := newKey(t)
	good, err := base64.StdEncoding.DecodeString(seal(t, key, "shop/db", "v"))
	if err != nil {
		t.Fatal(err)
	}
	change := func(i int) []byte {
		b := slices.Clone(good)
		b[i] ^= 1
		return b
	}
	for name, data := range map[string][]byte{
		"nothing":              {},
		"half a length":        good[:1],
		"a length alone":       good[:2],
		"half an RSA part":     good[:60],
		"an RSA part alone":    good[:2+testKeyBits/8],
		"half a tag":           good[:len(good)-1],
		"more behind it":       append(slices.Clone(good), 0),
		"a changed length":     change(1),
		"a changed RSA part":   change(2),
		"a changed ciphertext": change(len(good) - 17),
		"a changed tag":        change(len(good) - 1),
		"a length too large":   {0xff, 0xff, 1},
	} {
		if _, err := one(t, manifest("", base64.StdEncoding.EncodeToString(data))).Open([]*rsa.PrivateKey{key}); err == nil {
			t.Errorf("%s opens", name)
		}
	}
	for _, text := range []string{"''", "'%%%'", encode(t, key, make([]byte, 16), "shop/db", "v")} {
		if _, err := one(t, manifest("", text)).Open([]*rsa.PrivateKey{key}); err == nil {
			t.Errorf("%.20s opens", text)
		}
	}
}

func TestWhenOneValueFailsNoneIsGiven(t *testing.T) {
	key := newKey(t)
	s := &SealedSecret{Metadata: Metadata{Namespace: "shop", Name: "db"}, Spec: Spec{EncryptedData: map[string]string{
		"good": seal(t, key, "shop/db", "tr0ub4dor"), "bad-1": seal(t, key, "shop", "v"), "bad-2": "x"}}}
	values, err := s.Open([]*rsa.PrivateKey{key})
	if values != nil || err == nil || !strings.Contains(err.Error(), `"bad-1", "bad-2"`) || strings.Contains(err.Error(), "good") {
		t.Errorf("%v, %v", slices.Sorted(maps.Keys(values)), err)
	}
	for want, spec := range map[string]Spec{"spec.data": {Data: "AAAA"}, "no values": {}} {
		if _, err := (&SealedSecret{Metadata: s.Metadata, Spec: spec}).Open([]*rsa.PrivateKey{key}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestParseReadsListsAndCountsOthers(t *testing.T) {
	const list = `{"apiVersion": "v1", "kind": "List", "items": [
		{"apiVersion": "bitnami.com/v1alpha1", "kind": "SealedSecret", "metadata": {"namespace": "a", "name": "one"},
		 "spec": {"encryptedData": {"k": "AA=="}, "template": {"type": "kubernetes.io/tls", "immutable": true, "data": {"x": "{{ .k }}", "y": null}}}},
		{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}},
		{"apiVersion": "bitnami.com/v1beta1", "kind": "SealedSecret", "metadata": {"namespace": "a", "name": "new"}},
		{"apiVersion": "bitnami.com/v1alpha1", "kind": "SealedSecret", "metadata": {"name": "broken"}, "spec": {"encryptedData": {"k": {"tr0ub4dor": 1}}}},
		{"apiVersion": "bitnami.com/v1alpha1", "kind": "SealedSecret", "metadata": {"name": "two"}, "spec": {"encrypteddata": {"k": "AA=="}}}]}`
	found, others, err := Parse([]byte(list))
	if len(found) != 2 || others != 1 || found[0].Title() != "a/one" || found[1].Title() != "two" {
		t.Fatalf("%d found, %d others", len(found), others)
	}
	template := found[0].Spec.Template
	if template.Type != "kubernetes.io/tls" || !template.Immutable || len(template.Data) != 2 || template.Data["y"] != nil {
		t.Errorf("the template is read as %+v", template)
	}
	if len(found[1].Spec.EncryptedData) != 0 {
		t.Error("a field is found whatever its case")
	}
	if err == nil || !strings.Contains(err.Error(), "a/new: is of another version") || !strings.Contains(err.Error(), "broken: is not a valid") {
		t.Error(err)
	}
	if strings.Contains(err.Error(), "tr0ub4dor") {
		t.Error("the message quotes the input")
	}
}

func TestUnreadableDocumentsAreNotQuoted(t *testing.T) {
	for doc, want := range map[string]string{
		"password: tr0ub4dor\npassword: tr0ub4dor": "not well-formed YAML or JSON (line 2)",
		"\ttr0ub4dor":       "not well-formed",
		"tr0ub4dor":         "not a Kubernetes object",
		"{kind: tr0ub4dor}": "not a Kubernetes object",
		"[tr0ub4dor]":       "not a Kubernetes object",
		"{apiVersion: v1, kind: List, items: [{kind: tr0ub4dor}]}":             "items[0] is not",
		"{apiVersion: v1, kind: List, items: [tr0ub4dor]}":                     "items[0] is not",
		"{apiVersion: v1, kind: List, items: tr0ub4dor}":                       "not a Kubernetes object",
		"{apiVersion: v1, kind: Secret, metadata: {labels: {a: [tr0ub4dor]}}}": "not a Kubernetes object",
	} {
		_, _, err := Parse([]byte(doc))
		_, keyErr := ParseKeys([]byte(doc))
		for _, err := range []error{err, keyErr} {
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "tr0ub4dor") {
				t.Errorf("%q: %v, not %q", doc, err, want)
			}
		}
	}
}

// keySecret returns a Secret as a backup contains it.
func keySecret(label, kind string, der []byte) string {
	file := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Secret","type":"kubernetes.io/tls","metadata":{"namespace":"kube-system","name":"sealed-secrets-key1","labels":{%q:"active"}},`+
		`"data":{"tls.crt":"","tls.key":%q}}`, label, base64.StdEncoding.EncodeToString(file))
}

func TestParseKeys(t *testing.T) {
	key := newKey(t)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	pkcs1 := x509.MarshalPKCS1PrivateKey(key)
	a, b := keySecret(KeyLabel, "RSA PRIVATE KEY", pkcs1), keySecret(KeyLabel, "PRIVATE KEY", pkcs8)
	for doc, want := range map[string]int{
		a: 1,
		b: 1,
		`{"apiVersion":"v1","kind":"List","items":[` + a + `,` + b + `]}`:     2,
		`{"apiVersion":"v1","kind":"SecretList","items":[` + a + `]}`:         1,
		`{"apiVersion":"v1","kind":"List","items":[]}`:                        0,
		keySecret("another", "RSA PRIVATE KEY", pkcs1):                        0,
		strings.Replace(a, `"kind":"Secret"`, `"kind":"ConfigMap"`, 1):        0,
		strings.Replace(a, `"apiVersion":"v1"`, `"apiVersion":"other/v1"`, 1): 0,
	} {
		keys, err := ParseKeys([]byte(doc))
		if err != nil || len(keys) != want {
			t.Errorf("%.80s: %d keys, not %d: %v", doc, len(keys), want, err)
		}
		for _, k := range keys {
			if !k.Equal(key) {
				t.Errorf("%.80s: another key", doc)
			}
		}
	}
	for doc, want := range map[string]string{
		keySecret(KeyLabel, "RSA PRIVATE KEY", pkcs8):                   "kube-system/sealed-secrets-key1: has no RSA private key",
		keySecret(KeyLabel, "PRIVATE KEY", []byte("tr0ub4dor")):         "has no RSA private key",
		keySecret(KeyLabel, "CERTIFICATE", pkcs1):                       "has no RSA private key",
		strings.Replace(a, `"tls.key"`, `"tls.pem"`, 1):                 "has no RSA private key",
		strings.Replace(a, `"tls.crt":""`, `"tls.crt":"tr0ub4dor%"`, 1): "its data is not base64",
	} {
		keys, err := ParseKeys([]byte(doc))
		if len(keys) != 0 || err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "tr0ub4dor") {
			t.Errorf("%v, not %q", err, want)
		}
	}
}

// FuzzParse checks for every input: all methods of a parsed manifest work, nothing opens with a key
// that sealed nothing, and parsing is repeatable.
func FuzzParse(f *testing.F) {
	key := newKey(f)
	f.Fuzz(func(t *testing.T, doc []byte) {
		found, others, err := Parse(slices.Clone(doc))
		again, othersAgain, errAgain := Parse(doc)
		if len(found) != len(again) || others != othersAgain || (err == nil) != (errAgain == nil) {
			t.Fatal("the same input is read differently")
		}
		for _, s := range found {
			if values, err := s.Open([]*rsa.PrivateKey{key}); err == nil || values != nil {
				t.Fatal("a forgery opens")
			}
		}
		if keys, _ := ParseKeys(doc); slices.Contains(keys, nil) {
			t.Fatal("a key that is none")
		}
	})
}
