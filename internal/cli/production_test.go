package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/emersion/go-smtp"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/test/machine"
)

// site is the machine of a production server: its files and its certificate.
type site struct {
	t     *testing.T
	dir   string
	file  string // configuration file
	roots *x509.CertPool
	log   machine.Log
}

// newSite writes a configuration with TLS on a free port. more is appended to it.
func newSite(t *testing.T, more string) *site {
	t.Helper()
	s := &site{t: t, dir: t.TempDir()}
	s.file = s.path("config.yaml")
	certFile, keyFile, roots := machine.WriteCertificate(t, s.dir, 1)
	s.roots = roots
	if err := os.Mkdir(s.path("keys"), 0o700); err != nil {
		t.Fatal(err)
	}
	machine.WriteFile(t, s.file, fmt.Appendf(nil, `
listen: 127.0.0.1:0
publicURL: https://127.0.0.1:8200
dataDir: %s
tls: {certFile: %s, keyFile: %s}
kms: {url: "file://%s"}
systemKeyFile: %s
%s`, s.path("data"), certFile, keyFile, s.path("keys/kms.key"), s.path("system.key"), more))
	return s
}

const closed = "registration: {closed: true}\n"

func (s *site) path(name string) string { return filepath.Join(s.dir, name) }

// serve runs the server through its command line. It returns the server's line and a function that
// stops it.
func (s *site) serve() (app.Ready, func()) {
	s.t.Helper()
	return s.serveIn(s.t.Context())
}

// serveIn is serve until ctx ends.
func (s *site) serveIn(ctx context.Context) (app.Ready, func()) {
	s.t.Helper()
	ctx, stop := context.WithCancel(ctx)
	stdout, line := io.Pipe()
	done := make(chan error, 1)
	go func() {
		cmd := Command()
		cmd.SetArgs([]string{"server", "--config", s.file})
		cmd.SetOut(line)
		cmd.SetErr(&s.log)
		err := cmd.ExecuteContext(ctx)
		line.CloseWithError(errors.Join(err, io.EOF))
		done <- err
	}()
	s.t.Cleanup(stop)
	var r app.Ready
	decoder := json.NewDecoder(stdout)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&r); err != nil {
		s.t.Fatal("no ready line: ", err)
	}
	return r, func() {
		s.t.Helper()
		stop()
		if err := <-done; err != nil {
			s.t.Fatal(err)
		}
	}
}

// client returns a client that trusts the site's certificate and offers the groups, by default
// Go's.
func (s *site) client(groups ...tls.CurveID) *http.Client {
	t := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: s.roots, CurvePreferences: groups}, ForceAttemptHTTP2: true, DisableKeepAlives: true}
	return &http.Client{Transport: t}
}

// ask sends a request and returns the answer with its body.
func (s *site) ask(c *http.Client, method, url, key, body string) (status int, text string) {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	if key != "" {
		request.Header.Set("X-API-Key", key)
	}
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	if key == "" { // the call may wait for a password to be hashed
		c = &http.Client{Transport: machine.Patient{RoundTripper: c.Transport}}
	}
	answer, err := c.Do(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.TLS != nil && answer.ProtoMajor != 2 {
		s.t.Errorf("%s over TLS", answer.Proto)
	}
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return answer.StatusCode, string(b)
}

func (s *site) systemKey() string {
	s.t.Helper()
	info, err := os.Stat(s.path("system.key"))
	if err != nil {
		s.t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		s.t.Error("the system key's file has mode", info.Mode())
	}
	key, err := os.ReadFile(s.path("system.key"))
	if err != nil {
		s.t.Fatal(err)
	}
	return strings.TrimSpace(string(key))
}

// An empty machine becomes a server with a tenant and a credential, and works again after a
// restart.
func TestAProductionServerStartsEmptyAndIsOperatedByItsSystemKey(t *testing.T) {
	s := newSite(t, closed)
	line, stop := s.serve()
	key := s.systemKey()
	if !strings.HasPrefix(line.BaseURL, "https://127.0.0.1:") || line.DataDir != s.path("data") || len(line.Chain) != 64 || len(line.Identity) != 64 {
		t.Fatalf("%+v", line)
	}
	c := s.client()
	status, body := s.ask(c, "POST", line.BaseURL+"/api/v2/system/tenants", key, `{"name":"shop"}`)
	if status != http.StatusCreated {
		t.Fatal(status, body)
	}
	tenant := field(t, body, "tenant_id")
	status, body = s.ask(c, "POST", line.BaseURL+"/api/v2/system/tenants/"+tenant+"/api-keys", key, `{"name":"first","scopes":["vault:read","vault:write"]}`)
	if status != http.StatusCreated {
		t.Fatal(status, body)
	}
	tenantKey := field(t, body, "api_key")
	status, body = s.ask(c, "POST", line.BaseURL+"/api/v2/vault/seal", tenantKey, sealBody)
	if status != http.StatusCreated {
		t.Fatal(status, body)
	}
	id := field(t, body, "credential_id")
	if status, body := s.ask(c, "POST", line.BaseURL+"/api/v2/auth/register", "",
		`{"email":"a@example.org","password":"a long password","tenant_name":"t"}`); status != http.StatusForbidden {
		t.Error("registration is closed:", status, body)
	}
	stop()

	if err := os.Remove(s.path("system.key")); err != nil { // as administrators should
		t.Fatal(err)
	}
	line, stop = s.serve()
	if status, body := s.ask(c, "GET", line.BaseURL+"/api/v2/vault/"+id, tenantKey, ""); status != http.StatusOK || !strings.Contains(body, "s3cret") {
		t.Error(status, body)
	}
	if status, body := s.ask(c, "GET", line.BaseURL+"/api/v2/system/tenants", key, ""); status != http.StatusOK {
		t.Error("the system key after a restart:", status, body)
	}
	stop()
	if _, err := os.Stat(s.path("system.key")); err == nil {
		t.Error("a second system key was written")
	}
	for _, secret := range []string{key, tenantKey, "s3cret"} {
		if strings.Contains(s.log.String(), secret) {
			t.Error("the log holds a secret")
		}
	}
	for _, file := range []string{"keys/kms.key", "data/" + offline.DatabaseFile} {
		if _, err := os.Stat(s.path(file)); err != nil {
			t.Error(err)
		}
	}
	for entry := range strings.Lines(s.log.String()) {
		if !json.Valid([]byte(entry)) {
			t.Errorf("not a JSON line: %s", entry)
		}
	}
}

var fieldPattern = regexp.MustCompile(`"(\w+)":\s*"([^"]+)"`)

// field returns the string field with this name at any depth of a body.
func field(t *testing.T, body, name string) string {
	t.Helper()
	for _, m := range fieldPattern.FindAllStringSubmatch(body, -1) {
		if m[1] == name {
			return m[2]
		}
	}
	t.Fatalf("%s is not in %s", name, body)
	return ""
}

func TestHandshakesAreCountedByGroup(t *testing.T) {
	s := newSite(t, closed)
	line, stop := s.serve()
	defer stop()
	_, made := s.ask(s.client(tls.X25519), "POST", line.BaseURL+"/api/v2/api-keys", s.systemKey(), `{"name":"prometheus","scopes":["metrics:read"]}`)
	_, metrics := s.ask(s.client(), "GET", line.BaseURL+"/metrics", field(t, made, "api_key"), "")
	for _, want := range []string{`latticekeep_tls_handshakes_total{group="X25519"} 1`, `latticekeep_tls_handshakes_total{group="X25519MLKEM768"} 1`} {
		if !strings.Contains(metrics, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
}

func TestAProductionServerRefusesAnUnsafePlace(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(s *site)
		variable,
		says string
	}{
		"the KMS key in the data directory": {variable: "LATTICEKEEP_KMS_URL=file://{dir}/data/kms.key", says: "kms.url lies in dataDir"},
		"the KMS key below it":              {variable: "LATTICEKEEP_KMS_URL=file://{dir}/data/a/b/kms.key", says: "kms.url lies in dataDir"},
		"by a link to the folder": {func(s *site) {
			s.t.Helper()
			if err := errors.Join(os.Mkdir(s.path("data"), 0o700), os.Symlink(s.path("data"), s.path("link"))); err != nil {
				s.t.Fatal(err)
			}
		}, "LATTICEKEEP_KMS_URL=file://{dir}/link/kms.key", "kms.url lies in dataDir"},
		"by a link of the key": {func(s *site) {
			s.t.Helper()
			if err := os.Mkdir(s.path("data"), 0o700); err != nil {
				s.t.Fatal(err)
			}
			machine.WriteFile(s.t, s.path("data/real.key"), nil)
			if err := os.Symlink(s.path("data/real.key"), s.path("keys/kms.key")); err != nil {
				s.t.Fatal(err)
			}
		}, "", "kms.url lies in dataDir"},
		"a system key that is there": {func(s *site) { machine.WriteFile(s.t, s.path("system.key"), []byte("precious")) }, "", "systemKeyFile exists already"},
		"no folder for it":           {variable: "LATTICEKEEP_SYSTEM_KEY_FILE={dir}/none/system.key", says: "creating systemKeyFile"},
		"no certificate":             {variable: "LATTICEKEEP_TLS_CERT_FILE={dir}/none", says: "TLS certificate"},
		"no mail password": {variable: "LATTICEKEEP_MAIL_SMTP_PASSWORD_FILE={dir}/none,LATTICEKEEP_MAIL_SMTP_USERNAME=u," +
			"LATTICEKEEP_MAIL_SMTP_ADDRESS=localhost:25,LATTICEKEEP_MAIL_FROM=a@b.example", says: "mail.smtp.passwordFile"},
		"an unknown variable": {variable: "LATTICEKEEP_TSL_CERT_FILE=x", says: "LATTICEKEEP_TSL_CERT_FILE"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, closed)
			if c.prepare != nil {
				c.prepare(s)
			}
			for _, pair := range strings.FieldsFunc(strings.ReplaceAll(c.variable, "{dir}", s.dir), func(r rune) bool { return r == ',' }) {
				name, value, _ := strings.Cut(pair, "=")
				t.Setenv(name, value)
			}
			if _, err := run(t, "server", "--config", s.file); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%v, want %q", err, c.says)
			}
			if b, _ := os.ReadFile(s.path("system.key")); strings.Contains(c.says, "exists") && string(b) != "precious" {
				t.Error("the file was overwritten")
			}
		})
	}
}

// A first start that is interrupted after the key was written leaves a key that was never valid,
// and says what to do.
func TestAFirstStartThatWasCutOffIsRepeatedWithoutItsFile(t *testing.T) {
	s := newSite(t, closed)
	machine.WriteFile(t, s.path("system.key"), []byte("lk_live_never_stored\n"))
	if _, err := run(t, "server", "--config", s.file); err == nil || !strings.Contains(err.Error(), "Move it away and start again") {
		t.Fatal(err)
	}
	if err := os.Remove(s.path("system.key")); err != nil {
		t.Fatal(err)
	}
	line, stop := s.serve()
	defer stop()
	if status, body := s.ask(s.client(), "GET", line.BaseURL+"/api/v2/system/tenants", s.systemKey(), ""); status != http.StatusOK {
		t.Error(status, body)
	}
}

// Scripts read the line on stdout, whatever the log says.
func TestALogThatSaysLittleLeavesTheReadyLine(t *testing.T) {
	s := newSite(t, closed+"log: {level: error, format: text}\n")
	_, stop := s.serve()
	stop()
	if said := s.log.String(); said != "" {
		t.Errorf("nothing is wrong, and it logs\n%s", said)
	}
}

func TestDevAndConfigExcludeEachOther(t *testing.T) {
	s := newSite(t, closed)
	if _, err := run(t, "server", "--dev", "--config", s.file); err == nil || !strings.Contains(err.Error(), "dev") {
		t.Fatal(err)
	}
}

func TestADevelopmentServerReadsNoConfiguration(t *testing.T) {
	t.Setenv("LATTICEKEEP_LISTEN", "this is no address")
	t.Setenv("LATTICEKEEP_UNKNOWN", "x")
	start(t, "").end()
}

// mailbox is an SMTP server on loopback that accepts everything.
type mailbox struct{ mails chan string }

func (m mailbox) NewSession(*smtp.Conn) (smtp.Session, error) { return m, nil }

func (m mailbox) Reset() {}

func (m mailbox) Logout() error { return nil }

func (m mailbox) Mail(string, *smtp.MailOptions) error { return nil }

func (m mailbox) Rcpt(string, *smtp.RcptOptions) error { return nil }

func (m mailbox) Data(r io.Reader) error {
	b, err := io.ReadAll(r)
	m.mails <- string(b)
	return err
}

func TestAVerificationMailArrivesAndItsTokenCounts(t *testing.T) {
	box := mailbox{make(chan string, 1)}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	mails := smtp.NewServer(box)
	mails.Domain = "localhost"
	go func() { _ = mails.Serve(l) }() // ends with Close
	t.Cleanup(func() { _ = mails.Close() })
	s := newSite(t, "mail: {from: keeper@example.org, smtp: {address: '"+l.Addr().String()+"', security: none}}\n")
	line, stop := s.serve()
	defer stop()
	status, body := s.ask(s.client(), "POST", line.BaseURL+"/api/v2/auth/register", "",
		`{"email":"user@example.org","password":"a long password","tenant_name":"Canary Ltd"}`)
	if status != http.StatusCreated {
		t.Fatal(status, body)
	}
	text := <-box.mails
	if !strings.Contains(text, "https://127.0.0.1:8200/api/v2/auth/verify-email") || strings.Contains(text, "Canary") {
		t.Fatal(text)
	}
	if status, body := s.ask(s.client(), "POST", line.BaseURL+"/api/v2/auth/verify-email", "", `{"token":"`+field(t, text, "token")+`"}`); status != http.StatusOK {
		t.Error(status, body)
	}
	for _, canary := range []string{"user@example.org", "Canary", field(t, text, "token")} {
		if strings.Contains(s.log.String(), canary) {
			t.Error("the log holds", canary)
		}
	}
}

func TestADevelopmentServerWritesMailsToItsDataDirectory(t *testing.T) {
	r := start(t, filepath.Join(t.TempDir(), "data"))
	status, answer := r.call("POST", "/api/v2/auth/register", `{"email":"user@example.org","password":"a long password","tenant_name":"t"}`)
	if status != http.StatusCreated {
		t.Fatal(status, answer)
	}
	patience := time.After(time.Minute)
	for { // the e-mail is sent in the background
		files, err := filepath.Glob(filepath.Join(r.DataDir, "mail", "*.eml"))
		if err != nil {
			t.Fatal(err)
		}
		if len(files) > 0 {
			text, err := os.ReadFile(files[0])
			if err != nil || !slices.ContainsFunc(strings.Fields(string(text)), func(w string) bool { return w == r.BaseURL+"/api/v2/auth/verify-email" }) {
				t.Fatal(string(text), err)
			}
			break
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-patience:
			t.Fatal("no mail")
		}
	}
	r.end()
}
