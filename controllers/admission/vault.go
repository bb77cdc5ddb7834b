package admission

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// asker asks the vault whether it would accept an object.
type asker struct {
	url, caFile, tokenFile string
	timeout                time.Duration
	connections            int // idle connections to keep, one for each review in progress

	mu     sync.Mutex
	ca     []byte // CA certificates that client trusts
	client *client.Client
}

// The causes of trouble.
const (
	causeUnreachable = "unreachable" // no answer in time, or none at all
	causeBusy        = "busy"        // 429 and 503
	causeFailed      = "failed"      // any other failure to answer
	causeForbidden   = "forbidden"   // 401 and 403
)

// trouble is a failure of the vault to answer.
type trouble struct {
	cause   string
	warning string // for the object's author
	err     error
}

func newAsker(url, caFile, tokenFile string, timeout time.Duration, connections int) (*asker, error) {
	a := &asker{url: url, caFile: caFile, tokenFile: tokenFile, timeout: timeout, connections: connections}
	_, err := a.connect(nil) // finds an invalid URL at the start
	return a, err
}

// questionOf returns everything in an object that the vault judges.
func questionOf(o *v1beta1.SealedCredential) v2.CheckRequest {
	q := v2.CheckRequest{Namespace: o.Namespace, Name: o.Name, CredentialType: o.Spec.CredentialType}
	if days := int(o.Spec.TTLDays); days != 0 {
		q.TtlDays = &days
	}
	sealed := o.Spec.Sealed
	if sealed == nil {
		return q
	}
	q.Sealed = &v2.SealedValues{
		Version: v2.SealedValuesVersion(sealed.Version), Suite: string(sealed.Suite), KeyId: sealed.KeyID,
		Values: make(map[string]v2.SealedValue, len(sealed.Values)),
	}
	if sealed.Scope != "" {
		scope := v2.SealedValuesScope(sealed.Scope)
		q.Sealed.Scope = &scope
	}
	if sealed.AllowOlder {
		q.AllowOlder = &sealed.AllowOlder
	}
	for k, v := range sealed.Values {
		q.Sealed.Values[k] = v2.SealedValue{Data: v.Data, SealedAt: v.SealedAt.UTC()}
	}
	return q
}

const misconfigured = "the webhook cannot call the vault (its administrator finds the cause in its log)"

// ask returns the vault's answer, or why there is none.
func (a *asker) ask(ctx context.Context, q v2.CheckRequest) (*v2.CheckAnswer, *trouble) {
	vault, err := a.current()
	if err != nil {
		return nil, &trouble{causeFailed, misconfigured, err}
	}
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	answer, err := vault.V2.CheckManifest(ctx, q)
	var reply *client.Error
	var file *fs.PathError
	switch {
	case err == nil:
		return answer, nil
	case errors.Is(err, client.ErrUnauthenticated), errors.Is(err, client.ErrForbidden):
		return nil, &trouble{causeForbidden, "the vault refuses to answer this webhook (its administrator finds the cause in its log)",
			fmt.Errorf("is the token of --token-file for the audience latticekeep, and may its ServiceAccount check sealedcredentials? %w", err)}
	case errors.Is(err, client.ErrRateLimited), errors.Is(err, client.ErrUnavailable):
		return nil, &trouble{causeBusy, "the vault is busy or not ready", err}
	case errors.As(err, &file):
		return nil, &trouble{causeFailed, misconfigured, err}
	case errors.As(err, &reply):
		return nil, &trouble{causeFailed, "the vault failed to answer", err}
	}
	return nil, &trouble{causeUnreachable, "the vault could not be reached", err}
}

// current returns a client that trusts the certificate authorities now in the file.
func (a *asker) current() (*client.Client, error) {
	if a.caFile == "" {
		return a.connect(nil)
	}
	ca, err := os.ReadFile(a.caFile)
	if err != nil {
		return nil, fmt.Errorf("reading the vault's CA: %w", err)
	}
	return a.connect(ca)
}

func (a *asker) connect(ca []byte) (*client.Client, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.client != nil && bytes.Equal(ca, a.ca) {
		return a.client, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13}
	if ca != nil {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(ca) {
			return nil, fmt.Errorf("reading the vault's CA: %s holds no certificate in PEM", a.caFile)
		}
	}
	c, err := client.New(a.url, client.WithRetries(1), client.WithHTTPClient(&http.Client{Transport: &bearer{
		tokenFile: a.tokenFile,
		// Ignore proxies from the environment.
		next: &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: a.connections, IdleConnTimeout: time.Minute},
	}}))
	if err != nil {
		return nil, err
	}
	a.ca, a.client = ca, c
	return c, nil
}

// bearer adds the token in a file to requests. It reads the file for each request, because kubelet
// replaces the token before it expires.
type bearer struct {
	tokenFile string
	next      http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (b *bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	if b.tokenFile == "" {
		return b.next.RoundTrip(r)
	}
	token, err := os.ReadFile(b.tokenFile)
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, fmt.Errorf("reading the token: %w", err)
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	return b.next.RoundTrip(r)
}

// remedies are the messages for answers that have none.
var remedies = map[v2.CheckAnswerCode]string{
	v2.CheckAnswerCodeMalformed:   "the manifest is malformed; seal the values again (latticekeep seal)",
	v2.CheckAnswerCodeUnknownKey:  "this deployment has no such sealing key; seal the values again with its current key (latticekeep seal)",
	v2.CheckAnswerCodeRetiredKey:  "the sealing key is retired; seal the values again with the current key (latticekeep seal, or latticekeep reseal)",
	v2.CheckAnswerCodeDoesNotOpen: "a value does not open here; restore the manifest as it was sealed, or seal the values again for this object (latticekeep seal)",
	v2.CheckAnswerCodeOlderValue:  "a value is older than the last accepted one; apply the newer manifest, or set spec.sealed.allowOlder to go back on purpose",
	v2.CheckAnswerCodePolicy:      "the deployment's policy does not allow it; ask its administrator what is allowed",
}

func codeOf(a *v2.CheckAnswer) string {
	if a.Code == nil || !a.Code.Valid() {
		return "other"
	}
	return string(*a.Code)
}

func messageOf(a *v2.CheckAnswer) string {
	switch {
	case a.Message != nil && *a.Message != "":
		return *a.Message
	case a.Code != nil && remedies[*a.Code] != "":
		return remedies[*a.Code]
	}
	return "the vault does not accept it; `latticekeep validate` may say more"
}
