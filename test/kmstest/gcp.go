package kmstest

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// gcpRing is the resource name of the key ring.
const gcpRing = "projects/test/locations/europe-west1/keyRings/latticekeep/cryptoKeys/"

// NewGCP starts a server with the REST API of Google Cloud KMS. With TLS it requires credentials,
// as Google does. Without TLS it does not, because clients send none then.
func NewGCP(options ...Option) (*Server, error) {
	s, err := start(func(s *Server) http.Handler { return http.HandlerFunc(s.google) }, options)
	if err != nil {
		return nil, err
	}
	s.url = func(name string) string {
		return "gcpkms://" + gcpRing + name + "?endpoint=" + url.QueryEscape(s.base())
	}
	s.env = func() []string { return nil }
	s.AddKey(DefaultKey, "")
	return s, nil
}

// googleStatus is an error in the format of Google's APIs.
type googleStatus struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
	Status  string `json:"status"`
}

func (e *googleStatus) Error() string { return e.Message }

// googleCodes are the HTTP codes of Google's statuses: https://cloud.google.com/apis/design/errors
var googleCodes = map[string]int{
	"INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "NOT_FOUND": 404,
	"RESOURCE_EXHAUSTED": 429, "INTERNAL": 500,
}

func googleRefuses(status, format string, args ...any) error {
	return &googleStatus{googleCodes[status], fmt.Sprintf(format, args...), status}
}

// googleMethods maps the method in a request's path to the name in Server.CallsOf and the
// permission.
var googleMethods = map[string]struct{ operation, permission string }{
	"GET":          {"describe", "cryptoKeys.get"},
	"GET versions": {"listcryptokeyversions", "cryptoKeyVersions.list"},
	"POST encrypt": {"encrypt", "cryptoKeyVersions.useToEncrypt"},
	"POST decrypt": {"decrypt", "cryptoKeyVersions.useToDecrypt"},
	"POST destroy": {"delete", "cryptoKeyVersions.destroy"},
}

// google handles every call.
func (s *Server) google(w http.ResponseWriter, r *http.Request) {
	resource, isOfAPI := strings.CutPrefix(r.URL.Path, "/v1/")
	resource, verb, _ := strings.Cut(resource, ":")
	name, version, hasVersions := strings.Cut(resource, "/cryptoKeyVersions")
	method := r.Method
	switch {
	case verb != "":
		method += " " + verb
	case hasVersions:
		method += " versions"
	}
	called, ok := googleMethods[method]
	if !ok || !isOfAPI {
		answerGoogle(w, nil, googleRefuses("NOT_FOUND", "Method not found."))
		return
	}
	// net/http cancels the context of a request when the client leaves, but only after the body was
	// read.
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
	if err != nil {
		answerGoogle(w, nil, googleRefuses("INVALID_ARGUMENT", "Request is too large."))
		return
	}
	done, err := s.befall(r.Context(), called.operation)
	defer done()
	switch {
	case errors.Is(err, errDropped):
		hangUp(w)
		return
	case errors.Is(err, errThrottled):
		err = googleRefuses("RESOURCE_EXHAUSTED",
			"Quota exceeded for quota metric 'Cryptographic requests' and limit 'Cryptographic requests per minute'")
	case errors.Is(err, errFailing):
		err = googleRefuses("INTERNAL", "Internal error encountered.")
	case errors.Is(err, errForbidden):
		err = googleRefuses("PERMISSION_DENIED", "Permission 'cloudkms.%s' denied on resource (or it may not exist).", called.permission)
	case s.tls != nil && !strings.HasPrefix(r.Header.Get("Authorization"), "Bearer "):
		err = googleRefuses("UNAUTHENTICATED", "Request is missing required authentication credential.")
	}
	if err != nil {
		answerGoogle(w, nil, err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	answer, err := s.googleCall(called.operation, name, strings.TrimPrefix(version, "/"), r.URL.Query(), body)
	answerGoogle(w, answer, err)
}

func answerGoogle(w http.ResponseWriter, answer any, err error) {
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	if refusal := new(googleStatus); errors.As(err, &refusal) {
		w.WriteHeader(refusal.Code)
		answer = map[string]any{"error": refusal}
	}
	_ = json.NewEncoder(w).Encode(answer)
}

// googleMessage is a request or a response. Bytes are base64, and 64-bit numbers are strings.
type googleMessage struct {
	Name              string `json:"name,omitempty"`
	Plaintext         []byte `json:"plaintext,omitempty"`
	PlaintextCRC32C   string `json:"plaintextCrc32c,omitempty"`
	VerifiedPlaintext bool   `json:"verifiedPlaintextCrc32c,omitempty"`
	Ciphertext        []byte `json:"ciphertext,omitempty"`
	CiphertextCRC32C  string `json:"ciphertextCrc32c,omitempty"`
	AdditionalData    []byte `json:"additionalAuthenticatedData,omitempty"`
	ProtectionLevel   string `json:"protectionLevel,omitempty"`
	UsedPrimary       bool   `json:"usedPrimary,omitempty"`
}

// googleCall handles a call. The caller holds mu.
func (s *Server) googleCall(operation, name, version string, query url.Values, body []byte) (any, error) {
	k := s.keys[strings.TrimPrefix(name, gcpRing)]
	if k == nil || !strings.HasPrefix(name, gcpRing) {
		return nil, googleRefuses("NOT_FOUND", "CryptoKey %s not found.", name)
	}
	var in googleMessage
	if len(body) > 0 {
		if err := json.Unmarshal(body, &in); err != nil {
			return nil, googleRefuses("INVALID_ARGUMENT", "Invalid JSON payload received.")
		}
	}
	switch operation {
	case "describe":
		return k.google(), nil
	case "encrypt":
		return k.googleEncrypt(in)
	case "decrypt":
		return k.googleDecrypt(in)
	case "delete":
		return k.googleDestroy(version)
	}
	return k.googleVersions(query)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) string {
	return strconv.FormatUint(uint64(crc32.Checksum(b, castagnoli)), 10)
}

func (k *key) googleEncrypt(in googleMessage) (any, error) {
	switch {
	case k.kind != "":
		return nil, googleRefuses("INVALID_ARGUMENT", "CryptoKey purpose is not ENCRYPT_DECRYPT.")
	case k.state(k.latest) != "ENABLED":
		return nil, googleRefuses("FAILED_PRECONDITION", "%s is not enabled, current state is: %s.", k.versionName(k.latest), k.state(k.latest))
	case len(in.Plaintext) > 64<<10:
		return nil, googleRefuses("INVALID_ARGUMENT", "The plaintext is too long.")
	case in.PlaintextCRC32C != "" && in.PlaintextCRC32C != checksum(in.Plaintext):
		return nil, googleRefuses("INVALID_ARGUMENT", "The checksum in field plaintext_crc32c did not match the data in field plaintext.")
	}
	sealed := newAEAD(k.versions[k.latest]).Seal(binary.BigEndian.AppendUint32(nil, uint32(k.latest)), nil, in.Plaintext, in.AdditionalData)
	return googleMessage{
		Name: k.versionName(k.latest), Ciphertext: sealed, CiphertextCRC32C: checksum(sealed),
		VerifiedPlaintext: in.PlaintextCRC32C != "", ProtectionLevel: "SOFTWARE",
	}, nil
}

func (k *key) googleDecrypt(in googleMessage) (any, error) {
	invalid := googleRefuses("INVALID_ARGUMENT", "Decryption failed: the ciphertext is invalid.")
	switch {
	case k.kind != "":
		return nil, googleRefuses("INVALID_ARGUMENT", "CryptoKey purpose is not ENCRYPT_DECRYPT.")
	case len(in.Ciphertext) < 4:
		return nil, invalid
	}
	version := int(binary.BigEndian.Uint32(in.Ciphertext))
	material, ok := k.versions[version]
	if !ok {
		return nil, invalid
	}
	if state := k.state(version); state != "ENABLED" {
		return nil, googleRefuses("FAILED_PRECONDITION", "%s is not enabled, current state is: %s.", k.versionName(version), state)
	}
	plaintext, err := newAEAD(material).Open(nil, nil, in.Ciphertext[4:], in.AdditionalData)
	if err != nil {
		return nil, invalid
	}
	return googleMessage{
		Plaintext: plaintext, PlaintextCRC32C: checksum(plaintext), UsedPrimary: version == k.latest, ProtectionLevel: "SOFTWARE",
	}, nil
}

// google returns the description of a key.
func (k *key) google() map[string]any {
	c := map[string]any{"name": gcpRing + k.name, "purpose": "ENCRYPT_DECRYPT", "createTime": k.created.UTC()}
	if k.kind != "" { // asymmetric keys have no primary version
		c["purpose"] = "ASYMMETRIC_DECRYPT"
		return c
	}
	c["primary"] = k.googleVersion(k.latest)
	return c
}

func (k *key) googleVersions(query url.Values) (any, error) {
	size, _ := strconv.Atoi(query.Get("pageSize"))
	first, _ := strconv.Atoi(query.Get("pageToken"))
	versions, next := []any(nil), ""
	for v := max(first, 1); v <= k.latest; v++ {
		if size > 0 && len(versions) == size {
			next = strconv.Itoa(v)
			break
		}
		versions = append(versions, k.googleVersion(v))
	}
	return map[string]any{"cryptoKeyVersions": versions, "totalSize": k.latest, "nextPageToken": next}, nil
}

func (k *key) googleDestroy(number string) (any, error) {
	version, _ := strconv.Atoi(number)
	if _, ok := k.versions[version]; !ok {
		return nil, googleRefuses("NOT_FOUND", "CryptoKeyVersion %s not found.", number)
	}
	if !k.destroyed[version].IsZero() {
		return nil, googleRefuses("FAILED_PRECONDITION", "%s is not in a state that can be destroyed: %s.", k.versionName(version), k.state(version))
	}
	k.destroyed[version] = time.Now().AddDate(0, 0, 30).Truncate(time.Second)
	return k.googleVersion(version), nil
}

func (k *key) state(version int) string {
	switch {
	case !k.destroyed[version].IsZero():
		return "DESTROY_SCHEDULED"
	case k.disabled:
		return "DISABLED"
	}
	return "ENABLED"
}

func (k *key) versionName(version int) string {
	return fmt.Sprintf("%s%s/cryptoKeyVersions/%d", gcpRing, k.name, version)
}

func (k *key) googleVersion(version int) map[string]any {
	v := map[string]any{
		"name": k.versionName(version), "state": k.state(version), "protectionLevel": "SOFTWARE",
		"algorithm": "GOOGLE_SYMMETRIC_ENCRYPTION", "createTime": k.created.UTC(),
	}
	if at := k.destroyed[version]; !at.IsZero() {
		v["destroyTime"] = at.UTC()
	}
	return v
}
