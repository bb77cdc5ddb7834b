package kmstest

import (
	"bytes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// NewVault starts a server with the API of the Transit engine of Vault and OpenBao, mounted at
// transit.
func NewVault(options ...Option) (*Server, error) {
	s, err := start(func(s *Server) http.Handler { return http.HandlerFunc(s.vault) }, options)
	if err != nil {
		return nil, err
	}
	s.token = "s." + rand.Text()
	s.url = func(name string) string { return "hashivault://" + name + "?address=" + url.QueryEscape(s.base()) }
	s.env = func() []string { return []string{"VAULT_TOKEN=" + s.Token()} }
	s.AddKey(DefaultKey, "")
	return s, nil
}

// Token returns the token that Vault accepts.
func (s *Server) Token() (token string) {
	s.locked(func() { token = s.token })
	return token
}

// SetToken replaces the token that Vault accepts.
func (s *Server) SetToken(token string) { s.locked(func() { s.token = token }) }

// SetSealed seals or unseals a Vault.
func (s *Server) SetSealed(on bool) { s.locked(func() { s.sealed = on }) }

// SetNamespace makes a Vault answer only calls that name this namespace.
func (s *Server) SetNamespace(name string) { s.locked(func() { s.namespace = name }) }

// SetDerived makes a key require a context with each call, like a key created with derived=true.
func (s *Server) SetDerived(name string) { s.locked(func() { s.keys[name].derived = true }) }

// SetDeletable sets deletion_allowed of a key.
func (s *Server) SetDeletable(name string, on bool) { s.locked(func() { s.keys[name].deletable = on }) }

// vaultError is a response with a status and a list of errors.
type vaultError struct {
	status int
	text   string
}

func (e *vaultError) Error() string { return e.text }

func refused(status int, text string) error { return &vaultError{status, text} }

// Error messages as Vault sends them.
var (
	errPermission = refused(http.StatusForbidden, "1 error occurred:\n\t* permission denied\n\n")
	errSealed     = refused(http.StatusServiceUnavailable, "Vault is sealed")
	errNoKey      = refused(http.StatusBadRequest, "encryption key not found")
	errMethod     = refused(http.StatusMethodNotAllowed, "1 error occurred:\n\t* unsupported operation\n\n")
)

func (s *Server) vault(w http.ResponseWriter, r *http.Request) {
	path, ok := strings.CutPrefix(r.URL.Path, "/v1/transit/")
	if !ok {
		answerVault(w, nil, refused(http.StatusNotFound, fmt.Sprintf("no handler for route %q. route entry not found.", strings.TrimPrefix(r.URL.Path, "/v1/"))))
		return
	}
	operation, name, _ := strings.Cut(path, "/")
	name, sub, _ := strings.Cut(name, "/")
	counted := operation
	switch {
	case operation == "keys" && r.Method == http.MethodGet:
		counted = "describe"
	case operation == "keys" && r.Method == http.MethodDelete:
		counted = "delete"
	case operation == "keys":
		counted = "keys/" + sub
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 32<<20))
	if err != nil {
		return
	}
	done, err := s.befall(r.Context(), counted)
	defer done()
	switch {
	case errors.Is(err, errDropped):
		hangUp(w)
		return
	case errors.Is(err, errThrottled):
		w.Header().Set("Retry-After", "1")
		err = refused(http.StatusTooManyRequests, fmt.Sprintf("request path %q: rate limit quota exceeded", "transit/"+path))
	case errors.Is(err, errFailing):
		err = refused(http.StatusInternalServerError, "internal error")
	case errors.Is(err, errForbidden):
		err = errPermission
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var data map[string]any
	if err == nil || s.sealed { // a sealed Vault knows no tokens
		data, err = s.transit(r, operation, name, sub, body)
	}
	answerVault(w, data, err)
}

// transit handles one call. The caller holds mu.
func (s *Server) transit(r *http.Request, operation, name, sub string, body []byte) (map[string]any, error) {
	k := s.keys[name]
	switch {
	case s.sealed:
		return nil, errSealed
	case subtle.ConstantTimeCompare([]byte(r.Header.Get("X-Vault-Token")), []byte(s.token)) != 1,
		r.Header.Get("X-Vault-Namespace") != s.namespace, k != nil && k.disabled:
		return nil, errPermission
	}
	write := r.Method == http.MethodPost || r.Method == http.MethodPut
	var in vaultRequest
	if write {
		if err := json.Unmarshal(body, &in); len(body) > 0 && err != nil {
			return nil, refused(http.StatusBadRequest, "error parsing JSON")
		}
	}
	switch {
	case operation == "keys" && sub == "" && r.Method == http.MethodGet:
		if k == nil {
			return nil, refused(http.StatusNotFound, "")
		}
		return k.describe(), nil
	case operation == "keys" && sub == "" && r.Method == http.MethodDelete:
		return nil, s.deleteTransit(name)
	case operation == "keys" && write:
		return s.writeKey(name, sub, in)
	case !write:
		return nil, errMethod
	case operation == "encrypt":
		if k == nil { // Vault answers so to a token that may create keys
			k = newKey(name, in.Type)
			k.derived = in.Context != ""
			s.keys[name] = k
		}
		return k.encrypt(in)
	case k == nil:
		return nil, errNoKey
	case operation == "decrypt":
		data, err := k.decrypt(in)
		if err == nil && s.garbling {
			data["plaintext"] = base64.StdEncoding.EncodeToString(make([]byte, 32))
		}
		return data, err
	case operation == "rewrap":
		data, err := k.decrypt(in)
		if err != nil {
			return nil, err
		}
		in.Plaintext = new(data["plaintext"].(string))
		return k.encrypt(in)
	}
	return nil, refused(http.StatusNotFound, "1 error occurred:\n\t* unsupported path\n\n")
}

type vaultRequest struct {
	Type                 string  `json:"type"`
	Derived              bool    `json:"derived"`
	DeletionAllowed      *bool   `json:"deletion_allowed"`
	MinDecryptionVersion *int    `json:"min_decryption_version"`
	Plaintext            *string `json:"plaintext"`
	Ciphertext           string  `json:"ciphertext"`
	Context              string  `json:"context"`
	AssociatedData       string  `json:"associated_data"`
}

func (s *Server) writeKey(name, sub string, in vaultRequest) (map[string]any, error) {
	k := s.keys[name]
	switch {
	case sub == "":
		if k == nil {
			k = newKey(name, in.Type)
			k.derived = in.Derived
			s.keys[name] = k
		}
	case k == nil:
		return nil, refused(http.StatusBadRequest, "no existing key named "+name+" could be found")
	case sub == "rotate":
		k.rotate()
	case sub == "config":
		if in.DeletionAllowed != nil {
			k.deletable = *in.DeletionAllowed
		}
		if in.MinDecryptionVersion != nil {
			k.oldest = max(1, *in.MinDecryptionVersion)
		}
	default:
		return nil, errMethod
	}
	return k.describe(), nil
}

func (s *Server) deleteTransit(name string) error {
	switch k := s.keys[name]; {
	case k == nil:
		return refused(http.StatusBadRequest, "error deleting policy "+name+": could not delete key; not found")
	case !k.deletable:
		return refused(http.StatusBadRequest, "error deleting policy "+name+": deletion is not allowed for this key")
	}
	delete(s.keys, name)
	return nil
}

// vaultKind returns the key's type as Transit names it.
func (k *key) vaultKind() string {
	if k.kind == "" {
		return "aes256-gcm96"
	}
	return k.kind
}

func (k *key) symmetric() bool {
	kind := k.vaultKind()
	return strings.Contains(kind, "-gcm96") || strings.Contains(kind, "chacha20")
}

func (k *key) describe() map[string]any {
	versions := make(map[string]any)
	for v := k.oldest; v <= k.latest; v++ {
		versions[strconv.Itoa(v)] = k.created.Unix()
	}
	rsa := strings.HasPrefix(k.vaultKind(), "rsa-")
	data := map[string]any{
		"name": k.name, "type": k.vaultKind(), "derived": k.derived, "deletion_allowed": k.deletable, "exportable": false,
		"allow_plaintext_backup": false, "auto_rotate_period": 0, "imported_key": false, "keys": versions, "latest_version": k.latest,
		"min_available_version": 0, "min_decryption_version": k.oldest, "min_encryption_version": 0, "supports_encryption": k.symmetric() || rsa,
		"supports_decryption": k.symmetric() || rsa, "supports_signing": !k.symmetric(), "supports_derivation": k.symmetric(),
	}
	if k.derived {
		data["kdf"], data["convergent_encryption"] = "hkdf_sha256", false
	}
	return data
}

// prepare returns the cipher for a version and the associated data. For a derived key the cipher
// depends on the context. AES-256-GCM stands in for every symmetric type.
func (k *key) prepare(version int, in vaultRequest) (cipher.AEAD, []byte, error) {
	if !k.symmetric() {
		return nil, nil, refused(http.StatusBadRequest, "message encryption not supported for key type "+k.vaultKind())
	}
	ad, err := base64.StdEncoding.DecodeString(in.AssociatedData)
	if err != nil {
		return nil, nil, refused(http.StatusBadRequest, err.Error())
	}
	context, err := base64.StdEncoding.DecodeString(in.Context)
	switch {
	case err != nil:
		return nil, nil, refused(http.StatusBadRequest, err.Error())
	case !k.derived:
		return newAEAD(k.versions[version]), ad, nil
	case len(context) == 0:
		return nil, nil, refused(http.StatusBadRequest, "missing 'context' for key derivation; the key was created using a derived key, which means "+
			"additional, per-request information must be included in order to perform operations with the key")
	}
	derived, err := hkdf.Key(sha256.New, k.versions[version], nil, string(context), 32)
	if err != nil {
		return nil, nil, err
	}
	return newAEAD(derived), ad, nil
}

func (k *key) encrypt(in vaultRequest) (map[string]any, error) {
	if in.Plaintext == nil {
		return nil, refused(http.StatusBadRequest, "missing plaintext to encrypt")
	}
	plaintext, err := base64.StdEncoding.DecodeString(*in.Plaintext)
	if err != nil {
		return nil, refused(http.StatusBadRequest, err.Error())
	}
	aead, ad, err := k.prepare(k.latest, in)
	if err != nil {
		return nil, err
	}
	sealed := aead.Seal(nil, nil, plaintext, ad)
	return map[string]any{"ciphertext": fmt.Sprintf("vault:v%d:%s", k.latest, base64.StdEncoding.EncodeToString(sealed)), "key_version": k.latest}, nil
}

func (k *key) decrypt(in vaultRequest) (map[string]any, error) {
	if in.Ciphertext == "" {
		return nil, refused(http.StatusBadRequest, "missing ciphertext to decrypt")
	}
	rest, ok := strings.CutPrefix(in.Ciphertext, "vault:v")
	if !ok {
		return nil, refused(http.StatusBadRequest, "invalid ciphertext: no prefix")
	}
	number, encoded, ok := strings.Cut(rest, ":")
	if !ok {
		return nil, refused(http.StatusBadRequest, "invalid ciphertext: wrong number of fields")
	}
	version, err := strconv.Atoi(number)
	switch {
	case err != nil:
		return nil, refused(http.StatusBadRequest, "invalid ciphertext: version number could not be decoded")
	case version > k.latest:
		return nil, refused(http.StatusBadRequest, "invalid ciphertext: version is too new")
	case version < k.oldest:
		return nil, refused(http.StatusBadRequest, "ciphertext or signature version is disallowed by policy (too old)")
	}
	sealed, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil, refused(http.StatusBadRequest, "invalid ciphertext: could not decode base64")
	}
	aead, ad, err := k.prepare(version, in)
	if err != nil {
		return nil, err
	}
	plaintext, err := aead.Open(nil, nil, sealed, ad)
	if err != nil {
		return nil, refused(http.StatusBadRequest, err.Error())
	}
	return map[string]any{"plaintext": base64.StdEncoding.EncodeToString(plaintext)}, nil
}

func answerVault(w http.ResponseWriter, data map[string]any, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	var body any
	status := http.StatusOK
	if e := new(vaultError); errors.As(err, &e) {
		status = e.status
		texts := []string{}
		if e.text != "" {
			texts = append(texts, e.text)
		}
		body = map[string]any{"errors": texts}
	} else if data == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	} else {
		body = map[string]any{
			"request_id": rand.Text(), "lease_id": "", "renewable": false, "lease_duration": 0, "data": data,
			"wrap_info": nil, "warnings": nil, "auth": nil, "mount_type": "transit",
		}
	}
	var out bytes.Buffer
	_ = json.NewEncoder(&out).Encode(body) // contains only strings, numbers and maps
	w.WriteHeader(status)
	_, _ = w.Write(out.Bytes())
}
