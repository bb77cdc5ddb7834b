package cli

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers/admission"
	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// hook is a running webhook.
type hook struct {
	t                   *testing.T
	address, operations string
	log                 said
	end                 func()
}

// startWebhook runs latticekeep webhook with the flags, on free ports, and returns once it listens.
func startWebhook(t *testing.T, flags ...string) *hook {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	h := &hook{t: t, log: make(said, 10_000)}
	done := make(chan error, 1)
	cmd := Command()
	cmd.SetArgs(append([]string{"webhook", "--drain", "0s", "--listen", "127.0.0.1:0", "--operations-listen", "127.0.0.1:0"}, flags...))
	cmd.SetOut(io.Discard)
	cmd.SetErr(h.log)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	ended := false
	h.end = func() {
		t.Helper()
		if stop(); !ended {
			ended = true
			if err := <-done; err != nil {
				t.Error("ending the webhook: ", err)
			}
		}
	}
	t.Cleanup(h.end)
	var line struct{ Address, Operations string }
	if err := json.Unmarshal([]byte(h.log.await(t, `"listening"`)), &line); err != nil {
		t.Fatal(err)
	}
	h.address, h.operations = line.Address, "http://"+line.Operations
	return h
}

// get sends a GET to the plain port.
func (h *hook) get(path string) (int, string) {
	h.t.Helper()
	r, err := http.Get(h.operations + path)
	if err != nil {
		h.t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

// reviews returns the number of reviews, whatever their verdict.
func (h *hook) reviews() (n int) {
	h.t.Helper()
	_, text := h.get("/metrics")
	lintMetrics(h.t, text)
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "latticekeep_admission_reviews_total{") {
			var of int
			if _, err := fmt.Sscan(line[strings.LastIndex(line, " "):], &of); err != nil {
				h.t.Fatal(err)
			}
			n += of
		}
	}
	return n
}

// apply applies an object and returns kubectl's output.
func (c *cluster) apply(o *v1beta1.SealedCredential) (string, error) {
	c.t.Helper()
	text, err := json.Marshal(o)
	if err != nil {
		c.t.Fatal(err)
	}
	return c.try(string(text), "apply", "-f", "-")
}

// secret writes the files of a Secret into a folder.
func (c *cluster) secret(name, folder string) {
	c.t.Helper()
	c.kubectl("", "wait", "--for=create", "--timeout=60s", "-n", "latticekeep-system", "secret/"+name)
	var s struct{ Data map[string][]byte }
	if err := json.Unmarshal([]byte(c.kubectl("", "get", "secret", "-n", "latticekeep-system", name, "-o", "json")), &s); err != nil {
		c.t.Fatal(err)
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		c.t.Fatal(err)
	}
	for _, file := range slices.Sorted(maps.Keys(s.Data)) {
		machine.WriteFile(c.t, filepath.Join(folder, file), s.Data[file])
	}
}

// webhookManifests are the objects of a webhook installation. Its Service leads to this machine.
const webhookManifests = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: latticekeep-webhook, namespace: latticekeep-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: latticekeep-webhook}
rules: [{apiGroups: [latticekeep.dev], resources: [sealedcredentials], verbs: [check]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: latticekeep-webhook}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: latticekeep-webhook}
subjects: [{kind: ServiceAccount, name: latticekeep-webhook, namespace: latticekeep-system}]
---
apiVersion: v1
kind: Service
metadata: {name: latticekeep-webhook, namespace: latticekeep-system}
spec: {type: ExternalName, externalName: localhost, ports: [{port: %[1]s}]}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: latticekeep-webhook}
webhooks:
- name: sealedcredentials.latticekeep.dev
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  timeoutSeconds: 10
  clientConfig: {service: {namespace: latticekeep-system, name: latticekeep-webhook, path: /validate, port: %[1]s}}
  rules: [{apiGroups: [latticekeep.dev], apiVersions: [v1alpha1, v1beta1], operations: [CREATE, UPDATE], resources: [sealedcredentials], scope: Namespaced}]
  matchConditions:
  - {name: spec-changed, expression: "oldObject == null || object.spec != oldObject.spec"}
  - {name: not-deleted, expression: "!has(object.metadata.deletionTimestamp)"}
`

// Tests an installation without pods: API server, webhook, and production server with the operator,
// which makes all certificates.
func TestTheWebhookRefusesAtApplyAndSaysWhatToDo(t *testing.T) {
	t.Parallel()
	c := &cluster{t, kubetest.ForTest(t)}
	for _, namespace := range []string{"latticekeep-system", "shop", "bank"} {
		c.kubectl("", "create", "namespace", namespace)
	}
	s := newSite(t, closed)
	config, err := os.ReadFile(s.file)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(config)) {
		if !strings.HasPrefix(line, "tls:") && !strings.HasPrefix(line, "publicURL:") {
			lines = append(lines, line)
		}
	}
	machine.WriteFile(t, s.file, fmt.Appendf(nil, `%s
publicURL: https://localhost:8200
tls: {secretName: latticekeep-tls}
kubernetes: {kubeconfig: %s, namespace: latticekeep-system, policy: {maxTTLDays: 60, scopes: [Strict, Namespace]}}
`, strings.Join(lines, ""), c.plane.Kubeconfig))
	line, stop := s.serve()
	url := strings.Replace(line.BaseURL, "127.0.0.1", "localhost", 1)

	folder := t.TempDir()
	in := func(name string) string { return filepath.Join(folder, name) }
	h := startWebhook(t, "--url", url, "--ca-file", in("server/ca.crt"), "--token-file", in("token"),
		"--cert-file", in("webhook/tls.crt"), "--key-file", in("webhook/tls.key"))
	h.log.await(t, "waiting for the TLS certificate")
	if status, _ := h.get("/readyz"); status != http.StatusServiceUnavailable {
		t.Error("it is ready without a certificate:", status)
	}
	if status, _ := h.get("/healthz"); status != http.StatusOK {
		t.Error("it is not healthy:", status)
	}
	c.secret("latticekeep-webhook-tls", in("webhook"))
	h.log.await(t, `"ready"`)
	if status, _ := h.get("/readyz"); status != http.StatusOK {
		t.Error("it is not ready:", status)
	}
	c.secret("latticekeep-tls", in("server"))
	_, port, err := net.SplitHostPort(h.address)
	if err != nil {
		t.Fatal(err)
	}
	// While no webhook refused them, older values came after newer ones.
	c.kubectl("", "wait", "--for=create", "--timeout=60s", "-n", "latticekeep-system", "configmap/latticekeep-sealing-key")
	published := c.kubectl("", "get", "configmap", "-n", "latticekeep-system", "latticekeep-sealing-key", "-o", `jsonpath={.data.sealing-key\.json}`)
	key, err := sealing.ParseDocument([]byte(published))
	if err != nil {
		t.Fatal(err)
	}
	aged := func(name string, age time.Duration) *v1beta1.SealedCredential {
		t.Helper()
		o, err := sealing.Seal(key.Key(), sealing.Request{Namespace: "shop", Name: name, CredentialType: "database", TTLDays: 30,
			Values: map[string]secret.Bytes{"password": secret.Bytes(name + age.String())}}, time.Now().Add(-age))
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	stale, older := aged("stale", 0), aged("stale", time.Hour)
	for _, step := range []struct {
		o    *v1beta1.SealedCredential
		then string
	}{{stale, "condition=Ready"}, {older, "condition=Stalled"}} {
		if out, err := c.apply(step.o); err != nil {
			t.Fatal(out, err)
		}
		c.kubectl("", "wait", "--for="+step.then, "--timeout=60s", "-n", "shop", "sealedcredential/stale")
	}
	c.kubectl(fmt.Sprintf(webhookManifests, port), "apply", "-f", "-")
	token := c.kubectl("", "create", "token", "latticekeep-webhook", "-n", "latticekeep-system", "--audience", "latticekeep", "--duration", "1h")
	machine.WriteFile(t, in("token"), []byte(token))
	c.kubectl("", "wait", "--for=jsonpath={.webhooks[0].clientConfig.caBundle}", "--timeout=60s", "validatingwebhookconfiguration/latticekeep-webhook")

	s.awaitLog("using the TLS certificate of the Secret")
	ca, err := os.ReadFile(in("server/ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	s.roots = x509.NewCertPool()
	s.roots.AppendCertsFromPEM(ca)
	document := func() sealing.Document {
		t.Helper()
		_, text := s.ask(s.client(), "GET", url+"/api/v2/sealing-key", "", "")
		d, err := sealing.ParseDocument([]byte(text))
		if err != nil {
			t.Fatal(err, text)
		}
		return d
	}
	var canaries []string
	seal := func(d sealing.Document, change func(*sealing.Request)) *v1beta1.SealedCredential {
		t.Helper()
		canary := "canary-" + rand.Text()
		canaries = append(canaries, canary)
		r := sealing.Request{Namespace: "shop", Name: "db", CredentialType: "database", TTLDays: 30,
			Values: map[string]secret.Bytes{"user": secret.Bytes("app" + canary), "password": secret.Bytes(canary)}}
		if change != nil {
			change(&r)
		}
		o, err := sealing.Seal(d.Key(), r, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	first := document()
	name := func(n string) func(*sealing.Request) { return func(r *sealing.Request) { r.Name = n } }
	with := func(o *v1beta1.SealedCredential, change func(*v1beta1.SealedCredential)) *v1beta1.SealedCredential {
		o = o.DeepCopy()
		change(o)
		return o
	}
	inAlpha := func(o *v1beta1.SealedCredential) { o.APIVersion = v1alpha1.GroupVersion.String() }
	swap := func(o *v1beta1.SealedCredential) {
		v := o.Spec.Sealed.Values
		v["user"], v["password"] = v["password"], v["user"]
	}

	// The API server needs some time to notice the configuration.
	probe := with(seal(first, name("probe")), func(o *v1beta1.SealedCredential) {
		o.Spec.Sealed.Values["user"] = v1beta1.SealedValue{SealedAt: o.Spec.Sealed.Values["user"].SealedAt, Data: "AQID"}
	})
	text, err := json.Marshal(probe)
	if err != nil {
		t.Fatal(err)
	}
	var out string
	for deadline := time.Now().Add(time.Minute); !strings.Contains(out, "denied the request"); {
		if out, err = c.try(string(text), "apply", "--dry-run=server", "-f", "-"); time.Now().After(deadline) {
			t.Fatal("the webhook is not called: ", out, err)
		}
	}

	// An object that has older values can be changed in all other ways, and gets the newer ones back.
	// An older manifest is refused for an object that exists, and a warning for a new one.
	at := func(o *v1beta1.SealedCredential) string {
		return o.Spec.Sealed.Values["password"].SealedAt.UTC().Format(time.RFC3339)
	}
	for _, patch := range []string{
		`{"metadata":{"labels":{"team":"payments"}}}`, `{"metadata":{"finalizers":["latticekeep.dev/vault-entry","example.com/held"]}}`,
		`{"spec":{"suspend":true}}`, `{"spec":{"ttlDays":40}}`, `{"metadata":{"finalizers":["latticekeep.dev/vault-entry"]},"spec":{"suspend":false}}`,
	} {
		if out, err := c.try("", "patch", "-n", "shop", "sealedcredential/stale", "--type=merge", "--patch", patch); err != nil || strings.Contains(out, "Warning") {
			t.Errorf("%s of a stale object: %v %s", patch, err, out)
		}
	}
	oldest := aged("stale", 2*time.Hour)
	if out, err := c.apply(oldest); err == nil || !strings.Contains(out, "denied the request") || !strings.Contains(out, at(oldest)) || !strings.Contains(out, at(stale)) ||
		!strings.Contains(out, "allowOlder") {
		t.Errorf("an older value over a stale one: %v %s", err, out)
	}
	if out, err := c.apply(with(stale, func(o *v1beta1.SealedCredential) { o.Spec.TTLDays = 40 })); err != nil || strings.Contains(out, "Warning") {
		t.Errorf("the newer manifest is put back: %v %s", err, out)
	}
	c.kubectl("", "wait", "--for=condition=Ready", "--timeout=60s", "-n", "shop", "sealedcredential/stale")
	if out, err := c.apply(older); err == nil || !strings.Contains(out, "denied the request") || !strings.Contains(out, at(older)) || !strings.Contains(out, at(stale)) {
		t.Errorf("an older value: %v %s", err, out)
	}
	if out, err := c.apply(with(older, func(o *v1beta1.SealedCredential) { o.Spec.Sealed.AllowOlder = true })); err != nil || strings.Contains(out, "Warning") {
		t.Errorf("an older value on purpose: %v %s", err, out)
	}
	c.kubectl("", "wait", "--for=jsonpath={.status.version}=3", "--timeout=60s", "-n", "shop", "sealedcredential/stale")
	c.kubectl("", "delete", "--timeout=60s", "-n", "shop", "sealedcredential/stale")

	retired := seal(first, name("retired"))
	systemKey := s.systemKey()
	for _, path := range []string{"/rotate", "/" + first.Key().ID() + "/retire"} {
		if status, body := s.ask(s.client(), "POST", url+"/api/v2/system/sealing-keys"+path, systemKey, ""); status != http.StatusOK && status != http.StatusCreated {
			t.Fatal(path, status, body)
		}
	}
	d := document()
	for what, refusal := range map[string]struct {
		object *v1beta1.SealedCredential
		says   string
	}{
		"malformed": {with(seal(d, name("malformed")), func(o *v1beta1.SealedCredential) {
			o.Spec.Sealed.Values["user"] = v1beta1.SealedValue{SealedAt: o.Spec.Sealed.Values["user"].SealedAt, Data: "AQID"}
		}), "seal the value again"},
		"for another namespace": {with(seal(d, nil), func(o *v1beta1.SealedCredential) { o.Namespace = "bank" }), "seal"},
		"for another name":      {with(seal(d, nil), func(o *v1beta1.SealedCredential) { o.Name = "other" }), "seal"},
		"a widened scope":       {with(seal(d, name("wide")), func(o *v1beta1.SealedCredential) { o.Spec.Sealed.Scope = v1beta1.ScopeNamespace }), "seal"},
		"an unknown key":        {with(seal(d, name("unknown")), func(o *v1beta1.SealedCredential) { o.Spec.Sealed.KeyID = strings.Repeat("ab", 32) }), "seal"},
		"a retired key":         {retired, "retired"},
		"values swapped":        {with(seal(d, name("swapped")), swap), "seal"},
		"the version of before": {with(seal(d, func(r *sealing.Request) { r.Name, r.TTLDays = "alpha", 61 }), inAlpha), "ttlDays"},
		"a TTL out of bounds":   {seal(d, func(r *sealing.Request) { r.Name, r.TTLDays = "long", 61 }), "ttlDays"},
		"a scope out of bounds": {seal(d, func(r *sealing.Request) { r.Name, r.Scope = "cluster", v1beta1.ScopeCluster }), "scope"},
	} {
		t.Run(what, func(t *testing.T) {
			c := &cluster{t, c.plane}
			out, err := c.apply(refusal.object)
			const hook = `admission webhook "sealedcredentials.latticekeep.dev" denied the request: `
			_, message, denied := strings.Cut(out, hook)
			if err == nil || !denied || !strings.Contains(message, refusal.says) {
				t.Fatalf("%v: %s", err, out)
			}
			t.Log(strings.TrimSpace(message))
		})
	}

	marked := with(seal(d, name("marked")), func(o *v1beta1.SealedCredential) {
		o.Annotations = map[string]string{"latticekeep.dev/restart-on": "db"}
	})
	if out, err := c.apply(marked); err != nil || !strings.Contains(out, `Warning: latticekeep: metadata.annotations: "latticekeep.dev/restart-on" has no meaning`) {
		t.Errorf("an unknown annotation: %v %s", err, out)
	}
	c.kubectl("", "wait", "--for=condition=Ready", "--timeout=60s", "-n", "shop", "sealedcredential/marked")
	c.kubectl("", "delete", "--timeout=60s", "-n", "shop", "sealedcredential/marked")

	good := seal(d, nil)
	if out, err := c.apply(good); err != nil || strings.Contains(out, "Warning") {
		t.Fatal(out, err)
	}
	c.kubectl("", "wait", "--for=condition=Ready", "--timeout=60s", "-n", "shop", "sealedcredential/db")
	before := h.reviews()
	c.kubectl("", "label", "-n", "shop", "sealedcredential/db", "team=payments")
	if after := h.reviews(); after != before {
		t.Errorf("a label is reviewed: %d reviews, then %d", before, after)
	}
	if out, err := c.apply(with(good, swap)); err == nil || !strings.Contains(out, "denied the request") {
		t.Error("an update:", out, err)
	}

	key = d
	oldest = aged("again", time.Hour)
	if out, err := c.apply(aged("again", 0)); err != nil {
		t.Fatal(out, err)
	}
	c.kubectl("", "wait", "--for=condition=Ready", "--timeout=60s", "-n", "shop", "sealedcredential/again")
	// The API server asks before it looks whether there is one of that name.
	oldestText, err := json.Marshal(oldest)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := c.try(string(oldestText), "create", "-f", "-"); err == nil || !strings.Contains(out, "AlreadyExists") ||
		!strings.Contains(out, "Warning: latticekeep: an object with this name has newer values") || !strings.Contains(out, at(oldest)) {
		t.Errorf("an older manifest is created: %v %s", err, out)
	}
	c.kubectl("", "delete", "--timeout=60s", "-n", "shop", "sealedcredential/again")

	stop() // the vault stops
	out, err = c.apply(seal(d, name("unchecked")))
	if err != nil || !strings.Contains(out, "Warning: latticekeep: the vault could not be reached") {
		t.Error(out, err)
	}
	if out, err = c.try(string(text), "apply", "-f", "-"); err == nil || !strings.Contains(out, "denied the request") {
		t.Error("malformed, while the vault is down:", out, err)
	}
	h.end()
	said := s.log.String()
	for len(h.log) > 0 {
		said += <-h.log
	}
	for _, canary := range append(canaries, token) {
		if strings.Contains(said, canary) {
			t.Error("the log holds a secret")
		}
	}
	c.uninstall()
}

// uninstall releases the cluster of an installation whose server has stopped.
func (c *cluster) uninstall() {
	c.t.Helper()
	out, err := run(c.t, "uninstall", "--kubeconfig", c.plane.Kubeconfig, "--webhook-configuration", "latticekeep-webhook")
	if err != nil || !strings.Contains(out, "webhook configuration latticekeep-webhook: removed") || !strings.Contains(out, "1 released") {
		c.t.Error(out, err)
	}
	c.kubectl("", "delete", "--timeout=30s", "-n", "shop", "sealedcredential/db") // no finalizer blocks the deletion
}

// awaitLog waits until the server has logged words.
func (s *site) awaitLog(words string) {
	s.t.Helper()
	patience := time.After(time.Minute)
	for !strings.Contains(s.log.String(), words) {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-patience:
			s.t.Fatalf("waited in vain for %q: %s", words, s.log.String())
		}
	}
}

// issuer signs certificates of clients and servers.
type issuer struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newIssuer(t *testing.T) *issuer {
	t.Helper()
	i := &issuer{t: t}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "issuer"}, NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true}
	var der []byte
	var err error
	if i.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err == nil {
		der, err = x509.CreateCertificate(rand.Reader, template, template, i.key.Public(), i.key)
	}
	if err == nil {
		i.cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	i.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return i
}

func (i *issuer) client(name string) tls.Certificate {
	i.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		i.t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, i.cert, key.Public(), i.key)
	if err != nil {
		i.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// With --client-ca-file, the webhook serves only clients with a certificate of that authority and a
// permitted name.
func TestTheWebhookTalksToTheAPIServerAlone(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile, roots := machine.WriteCertificate(t, dir, 1)
	authority, other := newIssuer(t), newIssuer(t)
	file := filepath.Join(dir, "clients.crt")
	h := startWebhook(t, "--url", "https://127.0.0.1:1", "--token-file", filepath.Join(dir, "token"), "--cert-file", certFile, "--key-file", keyFile,
		"--client-ca-file", file, "--client-name", "kube-apiserver", "--client-name", "front")
	post := func(certs ...tls.Certificate) error {
		c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certs}, DisableKeepAlives: true}}
		r, err := c.Post("https://"+h.address+"/validate", "application/json", strings.NewReader("{}"))
		if err != nil {
			return err
		}
		defer r.Body.Close()
		if r.StatusCode != http.StatusBadRequest || r.TLS.CurveID != tls.X25519MLKEM768 || r.TLS.Version != tls.VersionTLS13 || r.ProtoMajor != 1 {
			t.Errorf("%d over %s with %s", r.StatusCode, r.Proto, r.TLS.CurveID)
		}
		return nil
	}
	h.log.await(t, "waiting for")
	if err := post(authority.client("kube-apiserver")); err == nil {
		t.Error("it serves before it knows whom")
	}
	machine.WriteFile(t, file, authority.pem)
	h.log.await(t, `"ready"`)
	for name, c := range map[string]struct {
		certs []tls.Certificate
		let   bool
	}{
		"the API server":         {[]tls.Certificate{authority.client("kube-apiserver")}, true},
		"its other name":         {[]tls.Certificate{authority.client("front")}, true},
		"nobody":                 {nil, false},
		"another client":         {[]tls.Certificate{authority.client("pod")}, false},
		"the name of another CA": {[]tls.Certificate{other.client("kube-apiserver")}, false},
	} {
		if err := post(c.certs...); (err == nil) != c.let {
			t.Errorf("%s: %v", name, err)
		}
	}
	machine.WriteFile(t, file, other.pem) // the authority is replaced
	if err := post(authority.client("kube-apiserver")); err == nil {
		t.Error("the former authority counts")
	}
	if err := post(other.client("kube-apiserver")); err != nil {
		t.Error(err)
	}
	if _, text := h.get("/metrics"); !strings.Contains(text, `latticekeep_tls_handshakes_total{group="X25519MLKEM768"}`) {
		t.Error("handshakes are not counted")
	}
	h.end()
}

// The API server sends reviews until it has noticed that a webhook is stopping.
func TestAWebhookThatEndsServesUntilNobodyAsks(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile, roots := machine.WriteCertificate(t, dir, 1)
	drained := make(chan time.Time)
	h := &hook{t: t, log: make(said, 10_000)}
	o := app.Webhook{
		Listen: "127.0.0.1:0", Operations: "127.0.0.1:0", CertFile: certFile, KeyFile: keyFile,
		Vault: admission.Options{URL: "https://127.0.0.1:1"}, Drain: time.Hour, Stderr: h.log,
	}
	draining := make(chan struct{})
	o.After = func(time.Duration) <-chan time.Time {
		close(draining)
		return drained
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- o.Run(ctx) }()
	var line struct{ Address, Operations string }
	if err := json.Unmarshal([]byte(h.log.await(t, `"listening"`)), &line); err != nil {
		t.Fatal(err)
	}
	h.operations = "http://" + line.Operations
	h.log.await(t, `"ready"`)
	stop()
	<-draining
	if status, _ := h.get("/readyz"); status != http.StatusServiceUnavailable {
		t.Error("it is ready for more:", status)
	}
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}}
	r, err := c.Post("https://"+line.Address+"/validate", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal("it does not serve any more: ", err)
	}
	r.Body.Close()
	close(drained)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if r, err := c.Get("https://" + line.Address); err == nil {
		r.Body.Close()
		t.Error("it goes on")
	}
}

func TestTheWebhooksFlagsAreChecked(t *testing.T) {
	good := []string{"webhook", "--url", "https://vault.example.org", "--token-file", "t", "--cert-file", "c", "--key-file", "k"}
	for says, args := range map[string][]string{
		"set --url or LATTICEKEEP_URL":  {"webhook", "--token-file", "t", "--cert-file", "c", "--key-file", "k"},
		`--token-file is needed`:        {"webhook", "--url", "https://vault.example.org", "--cert-file", "c", "--key-file", "k"},
		"--ca-file is empty":            append(slices.Clone(good), "--ca-file="),
		"log.level: give debug":         append(slices.Clone(good), "--log-level", "trace"),
		"log.format: give json":         append(slices.Clone(good), "--log-format", "logfmt"),
		"--client-name needs":           append(slices.Clone(good), "--client-name", "x"),
		"plain HTTP to another machine": append(slices.Clone(good), "--url", "http://vault.example.org"),
		"the base URL is not one like":  append(slices.Clone(good), "--url", "vault"),
		"listening: ":                   append(slices.Clone(good), "--listen", "no address"),
		"unexpected argument \"and\"":   append(slices.Clone(good), "and", "more"),
	} {
		if _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
}

// A client that uses all connections of one address leaves the webhook available to the API server.
func TestAPodThatTakesAllConnectionsDoesNotStopTheWebhook(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile, roots := machine.WriteCertificate(t, dir, 1)
	h := startWebhook(t, "--url", "https://127.0.0.1:1", "--token-file", filepath.Join(dir, "token"), "--cert-file", certFile, "--key-file", keyFile)
	h.log.await(t, `"ready"`)
	closed := func() bool {
		_, text := h.get("/metrics")
		return !strings.Contains(text, "latticekeep_admission_connections_closed_total 0")
	}
	for deadline := time.Now().Add(time.Minute); !closed(); {
		if time.Now().After(deadline) {
			t.Fatal("one address has as many connections as it likes")
		}
		for range 64 { // as many as one address may open
			machine.DialFrom(t, "127.0.0.2", h.address)
		}
	}
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true}}
	r, err := c.Post("https://"+h.address+"/validate", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
}
