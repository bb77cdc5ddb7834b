package dashboard_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// program is the whole program, a development server, for one test: its mails are files below dir.
type program struct {
	t    testing.TB
	url  string
	dir  string
	said protocol
	late atomic.Int64 // how far its clock is ahead, in nanoseconds
}

// start runs the program until the test has ended. The test is skipped before where Chromium is not installed.
func start(t testing.TB) *program { t.Helper(); return startAt(t, 0) }

// startAt is start with a clock that is ahead of the real one.
func startAt(t testing.TB, ahead time.Duration) *program {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs Chromium")
	}
	if _, err := inBrowser(); errors.Is(err, errNoChromium) {
		t.Skip(err)
	}
	p := &program{t: t, dir: t.TempDir()}
	p.advance(ahead)
	ctx, stop := context.WithCancel(context.Background())
	ready, line := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := app.Dev(ctx, app.DevConfig{DataDir: p.dir, Listen: "127.0.0.1:0", Stdout: line, Stderr: &p.said, Patience: servertest.Patience,
			Now: func() time.Time { return time.Now().Add(time.Duration(p.late.Load())) }})
		line.CloseWithError(errors.Join(err, io.EOF))
		done <- err
	}()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("the program: %v", err)
		}
		if t.Failed() {
			t.Logf("the program says:\n%s", p.said.tail(20))
		}
	})
	var first struct {
		BaseURL string `json:"base_url"`
	}
	if err := json.NewDecoder(ready).Decode(&first); err != nil {
		t.Fatalf("the program is not ready: %v\n%s", err, p.said.tail(20))
	}
	p.url = first.BaseURL
	return p
}

// tab opens a tab of the size of a desk.
func (p *program) tab() *tab {
	p.t.Helper()
	b := newTab(p.t, p.url)
	b.size(1280, 900)
	return b
}

// advance moves the clock of the program, though not of the browser.
func (p *program) advance(d time.Duration) { p.late.Add(int64(d)) }

// protocol is what a program says on standard error.
type protocol struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *protocol) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *protocol) tail(n int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	lines := strings.SplitAfter(s.b.String(), "\n")
	return strings.Join(lines[max(0, len(lines)-n-1):], "")
}

// owner is the first user of an organisation, with a client of the interface that acts as it.
type owner struct {
	*client.V2
	email, password string
}

// newClient returns a client of the program, with an API key or without any credential.
func (p *program) newClient(options ...client.Option) *client.V2 {
	p.t.Helper()
	c, err := client.New(p.url, options...)
	if err != nil {
		p.t.Fatal(err)
	}
	return c.V2
}

// register makes an organisation by the interface.
func (p *program) register(organisation, email string) owner {
	p.t.Helper()
	o := owner{p.newClient(), email, "correct horse battery staple"}
	_, err := o.RegisterUser(p.t.Context(), v2.RegisterRequest{Email: email, Password: o.password, TenantName: organisation})
	if err != nil {
		p.t.Fatal(err)
	}
	p.must(o.Login(p.t.Context(), v2.LoginRequest{Email: email, Password: o.password}))
	return o
}

// verify shows that the owner's address is theirs.
func (p *program) verify(o owner) {
	p.t.Helper()
	_, token, _ := strings.Cut(p.link(o.email, "/verify"), "#token=")
	if err := o.VerifyEmail(p.t.Context(), v2.TokenRequest{Token: token}); err != nil {
		p.t.Fatal(err)
	}
}

var systemKey = regexp.MustCompile(`SYSTEM_KEY=(lk_\S+)`)

// operator is a client of whoever operates the service.
func (p *program) operator() *client.V2 {
	p.t.Helper()
	p.wait("the system key", func() bool { return systemKey.MatchString(p.said.tail(1000)) })
	return p.newClient(client.WithAPIKey(systemKey.FindStringSubmatch(p.said.tail(1000))[1]))
}

// tenant returns the id of the owner's organisation.
func (p *program) tenant(o owner) string {
	p.t.Helper()
	account, err := o.GetAccount(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	return account.Tenant.TenantId
}

// wait waits for something that the program does by itself.
func (p *program) wait(what string, done func() bool) {
	p.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(hangs); !done(); {
		select {
		case <-tick.C:
		case <-deadline:
			p.t.Fatalf("waiting in vain for %s", what)
		}
	}
}

func (p *program) must(_ any, err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// seal makes a credential with one value and returns its id.
func (p *program) seal(o owner, name, kind, key, value string, days int) string {
	p.t.Helper()
	c, err := o.SealCredential(p.t.Context(), v2.SealRequest{Name: name, CredentialType: kind, Values: map[string]string{key: value}, TtlDays: &days}, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	return c.CredentialId
}

var mailed = regexp.MustCompile(`\s(http://\S+)`)

// link waits for a mail to an address and returns the link to a page of the dashboard in it.
func (p *program) link(address, page string) (link string) {
	p.t.Helper()
	p.wait("a mail to "+address+" with a link to "+page, func() bool {
		files, err := filepath.Glob(filepath.Join(p.dir, "mail", "*.eml"))
		if err != nil {
			p.t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				p.t.Fatal(err)
			}
			m := mailed.FindSubmatch(text)
			if m != nil && bytes.Contains(text, []byte("<"+address+">")) && strings.HasPrefix(string(m[1]), p.url+page) {
				link = string(m[1])
			}
		}
		return link != ""
	})
	return link
}
