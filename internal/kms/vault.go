package kms

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/hashicorp/vault/api"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// vault is a key of the Transit engine of Vault or OpenBao.
type vault struct {
	address, engine, name string
	tokenFile             string
	transport             transport
	accepted              atomic.Pointer[[sha256.Size]byte] // hash of the token of the last call that succeeded
}

// vaultName matches what Transit accepts as the name of a key. vaultEngine matches the path of a
// mount.
var (
	vaultName   = regexp.MustCompile(`^\w(([\w-.]+)?\w)?$`)
	vaultEngine = regexp.MustCompile(`^\w[\w./-]*\w$`)
)

// symmetricKinds lists the types of Transit keys with 256 bits and authentication.
var symmetricKinds = []string{"aes256-gcm96", "chacha20-poly1305", "xchacha20-poly1305"}

// openVault opens hashivault://NAME. Parameters: engine, default transit; address, default
// VAULT_SERVER_URL or VAULT_ADDR; host, the name of the service in the key's id, default the host
// of the address, so that the service can move. All other settings come from the environment, as in
// Vault's own client.
func openVault(ctx context.Context, u *url.URL, o Options) (*Key, error) {
	values, err := parameters(u, "engine", "address", "host")
	if err != nil {
		return nil, err
	}
	v := &vault{address: values["address"], engine: values["engine"], name: u.Host, tokenFile: o.TokenFile}
	for _, variable := range []string{"VAULT_SERVER_URL", "VAULT_ADDR"} {
		if v.address == "" {
			v.address = os.Getenv(variable)
		}
	}
	if v.engine == "" {
		v.engine = "transit"
	}
	address, err := url.Parse(v.address)
	switch {
	case v.address == "":
		return nil, unfit("the address of Vault is not known: set VAULT_ADDR")
	case err != nil:
		return nil, unfit("VAULT_ADDR is no URL: give https://host:8200")
	case !vaultName.MatchString(v.name) || strings.Trim(u.Path, "/") != "" || !vaultEngine.MatchString(v.engine):
		return nil, unfit("name the key of Transit as hashivault://NAME, and the path of its engine, if it is not transit, as ?engine=PATH")
	}
	if err := checkAddress(address); err != nil {
		return nil, err
	}
	config := api.DefaultConfig()
	if config.Error != nil {
		return nil, fault.Wrap(fault.Invalid, "the environment variables of Vault's client cannot be used", config.Error)
	}
	base := config.HttpClient.Transport.(*http.Transport)
	if base.TLSClientConfig.InsecureSkipVerify {
		return nil, unfit("VAULT_SKIP_VERIFY gives the keys to whoever answers: unset it, and name the authority in VAULT_CACERT")
	}
	v.transport = newTransport(base, o)
	host := values["host"]
	if host == "" {
		host = address.Host
	}
	k := &Key{id: "hashivault:" + path.Join(host, os.Getenv(api.EnvVaultNamespace), v.engine, v.name), service: v}
	if err := try(ctx, o.Logger, "reading the key's type", v.check); err != nil {
		_ = v.close()
		return nil, needs("read on "+v.engine+"/keys/"+v.name, err)
	}
	return k, nil
}

// check verifies that the key exists and is symmetric.
func (v *vault) check(ctx context.Context) error {
	client, err := v.client()
	if err != nil {
		return err
	}
	secret, err := client.Logical().ReadWithContext(ctx, v.engine+"/keys/"+v.name)
	if err := v.judge(client, err); err != nil {
		return err
	}
	if secret == nil || secret.Data == nil {
		return unfit("Vault has no key %s: make it with vault write -f %s/keys/%s", v.name, v.engine, v.name)
	}
	kind, _ := secret.Data["type"].(string)
	derived, _ := secret.Data["derived"].(bool)
	switch {
	case strings.HasPrefix(kind, "rsa-"), strings.HasPrefix(kind, "ecdsa-"), kind == "ed25519":
		return unfit("the key %s is of type %s: RSA and EC wrapping is opened by a quantum computer; make a key of type aes256-gcm96", v.name, kind)
	case kind == "aes128-gcm96":
		return unfit("the key %s is of type aes128-gcm96, which is too short: make a key of type aes256-gcm96", v.name)
	case !slices.Contains(symmetricKinds, kind):
		return unfit("the key %s is of a type that does not serve: make a key of type aes256-gcm96", v.name)
	case derived:
		return unfit("the key %s was made with derived=true and wants a context with each call: make one without", v.name)
	}
	return nil
}

// client returns a client for one call, with the current token.
func (v *vault) client() (*api.Client, error) {
	token, err := v.token()
	if err != nil {
		return nil, err
	}
	client, err := api.NewClient(&api.Config{
		Address: v.address, HttpClient: &http.Client{Transport: v.transport, CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // the client follows one redirect itself
		}},
	})
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, "the environment variables of Vault's client cannot be used", err)
	}
	client.SetToken(token)
	return client, nil
}

func (v *vault) token() (string, error) {
	if v.tokenFile == "" {
		for _, variable := range []string{"VAULT_SERVER_TOKEN", "VAULT_TOKEN"} {
			if token := os.Getenv(variable); token != "" {
				return token, nil
			}
		}
		return "", unfit("there is no token for Vault: name a file that holds one as kms.tokenFile, or set VAULT_TOKEN")
	}
	text, err := os.ReadFile(v.tokenFile)
	if err != nil { // an agent may be writing the token at this moment
		return "", credentials(fault.Outage(fault.ReasonKMS, "kms.tokenFile cannot be read", err))
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return "", credentials(fault.Outage(fault.ReasonKMS, "kms.tokenFile is empty", nil))
	}
	return token, nil
}

func (v *vault) encrypt(ctx context.Context, plaintext []byte) ([]byte, error) {
	ciphertext, err := v.transit(ctx, "encrypt", "plaintext", base64.StdEncoding.EncodeToString(plaintext), "ciphertext")
	return []byte(ciphertext), err
}

func (v *vault) decrypt(ctx context.Context, ciphertext []byte) ([]byte, error) {
	text, err := v.transit(ctx, "decrypt", "ciphertext", string(ciphertext), "plaintext")
	// The same status also reports a deleted key and a version below min_decryption_version.
	if e := new(api.ResponseError); errors.As(err, &e) && e.StatusCode == http.StatusBadRequest &&
		!strings.Contains(e.Error(), "key not found") && !strings.Contains(e.Error(), "disallowed by policy") {
		return nil, ErrForeign
	} else if err != nil {
		return nil, err
	}
	plaintext, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, errNotTransit
	}
	return plaintext, nil
}

// errNotTransit is the error for an answer of another server, such as a proxy.
var errNotTransit = fault.Outage(fault.ReasonKMS, "what answers at the address of Vault is not Transit", nil)

// transit calls an operation of the engine with one argument, and returns one field of the answer.
func (v *vault) transit(ctx context.Context, operation, argument, value, result string) (string, error) {
	client, err := v.client()
	if err != nil {
		return "", err
	}
	secret, err := client.Logical().WriteWithContext(ctx, path.Join(v.engine, operation, v.name), map[string]any{argument: value})
	if err := v.judge(client, err); err != nil {
		return "", err
	}
	if secret == nil {
		return "", errNotTransit
	}
	text, ok := secret.Data[result].(string)
	if !ok {
		return "", errNotTransit
	}
	return text, nil
}

// judge returns the error of a call as vaultFailed does. A token that is refused lies with this process
// if it is not the one that the service last accepted: somebody has put another one into the file. The
// same token was revoked at the service, or a policy there no longer permits the key, which all replicas
// may share.
func (v *vault) judge(client *api.Client, err error) error {
	token := sha256.Sum256([]byte(client.Token()))
	if err == nil {
		v.accepted.Store(&token)
		return nil
	}
	err = vaultFailed(err)
	if last := v.accepted.Load(); fault.Of(err) == fault.Forbidden && (last == nil || *last != token) {
		return credentials(err)
	}
	return err
}

// vaultFailed gives an error of Vault's client its kind:
// https://developer.hashicorp.com/vault/api-docs#http-status-codes
func vaultFailed(err error) error {
	e := new(api.ResponseError)
	if !errors.As(err, &e) {
		var syntax *json.SyntaxError
		return failed(err, !errors.As(err, &syntax))
	}
	if e.StatusCode == http.StatusForbidden || e.StatusCode == http.StatusUnauthorized {
		return forbidden(err)
	}
	return failed(err, e.StatusCode >= 500 || e.StatusCode == http.StatusTooManyRequests || e.StatusCode == http.StatusPreconditionFailed)
}

func (v *vault) destroy(ctx context.Context) (Destruction, error) {
	client, err := v.client()
	if err != nil {
		return Destruction{}, err
	}
	_, err = client.Logical().DeleteWithContext(ctx, v.engine+"/keys/"+v.name)
	refusal := ""
	if e := new(api.ResponseError); errors.As(err, &e) && e.StatusCode == http.StatusBadRequest {
		refusal = e.Error()
	}
	switch {
	case strings.Contains(refusal, "deletion is not allowed"):
		return Destruction{}, fault.Wrap(fault.Forbidden,
			"Vault does not let the key be deleted: run vault write "+v.engine+"/keys/"+v.name+"/config deletion_allowed=true, and try again", err)
	case strings.Contains(refusal, "could not delete key; not found"): // deleted earlier, and the answer was lost
	case err != nil:
		return Destruction{}, vaultFailed(err)
	}
	return Destruction{Left: "snapshots and backups of Vault's storage"}, nil
}

func (v *vault) close() error {
	v.transport.CloseIdleConnections()
	return nil
}
