package agent_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/agent"
	"github.com/latticekeep/latticekeep/internal/delivery"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// pod is a pod with an agent.
type pod struct {
	*servertest.Service
	*agent.Agent
	pods      *servertest.Pods
	dir       string
	tokenFile string
	logged    *servertest.Buffer
}

// newPod returns a pod whose agent reads from a server at a URL; "" is that of the pod.
func newPod(t *testing.T, url, files string) *pod {
	p := &pod{Service: servertest.Start(t), dir: t.TempDir(), tokenFile: filepath.Join(t.TempDir(), "token"), logged: new(servertest.Buffer)}
	p.pods = p.UsePods(p.Tenant)
	p.pods.Allow(servertest.AllowOnly("unseal"))
	must(t, os.WriteFile(p.tokenFile, []byte(servertest.OrdersToken+"\n"), 0o600))
	if url == "" {
		url = p.URL
	}
	server, err := delivery.NewServer(url, "")
	must(t, err)
	plan, err := delivery.Parse(files, 0o440)
	must(t, err)
	p.Agent, err = agent.New(agent.Config{Server: server, TokenFile: p.tokenFile, Plan: plan, Dir: p.dir, Logger: slog.New(slog.NewTextHandler(p.logged, nil))})
	must(t, err)
	t.Cleanup(func() { must(t, p.Close()) })
	return p
}

// newPodBehind returns a pod whose agent reads a folder through a proxy, which changes requests and answers.
func newPodBehind(t *testing.T, request func(*httputil.ProxyRequest), answer func(*http.Response) error) *pod {
	var target *url.URL
	proxy := httptest.NewServer(&httputil.ReverseProxy{ModifyResponse: answer, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		request(r)
	}})
	t.Cleanup(proxy.Close)
	p := newPod(t, proxy.URL, folder)
	var err error
	target, err = url.Parse(p.URL)
	must(t, err)
	return p
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// follow follows until the test ends, and returns the changes.
func (p *pod) follow(t *testing.T) <-chan struct{} {
	ctx, stop := context.WithCancel(t.Context())
	changed, ended := make(chan struct{}, 100), make(chan struct{})
	go func() {
		defer close(ended)
		p.Follow(ctx, func() { changed <- struct{}{} })
	}()
	t.Cleanup(func() {
		stop()
		<-ended
	})
	return changed
}

func (p *pod) sealPair(t *testing.T, n int) string {
	return p.Post("/api/v2/vault/seal", fmt.Sprintf(`{"name":"db","credential_type":"t","values":{"user":"u%d","password":"p%d"}}`, n, n)).Want(t, http.StatusCreated)["credential_id"].(string)
}

func (p *pod) replacePair(t *testing.T, id, values string) {
	p.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/" + id, Key: p.Key, Body: `{"values":{` + values + `}}`}).Want(t, http.StatusOK)
}

func (p *pod) read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(p.dir, path))
	must(t, err)
	return string(b)
}

func (p *pod) untilLogged(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !strings.Contains(p.logged.String(), text); {
		if time.Now().After(deadline) {
			t.Fatalf("%s is not in the log:\n%s", text, p.logged)
		}
	}
}

const folder = "- {path: db, credential: db}\n"

// A program that reads in a loop sees each file whole, and both of one version.
func TestFilesFollowTheirCredential(t *testing.T) {
	p := newPod(t, "", folder)
	id := p.sealPair(t, 1)
	must(t, p.Write(t.Context()))
	if info, err := os.Stat(filepath.Join(p.dir, "db/user")); err != nil || info.Mode() != 0o440 {
		t.Error(info.Mode(), err)
	}
	changed := p.follow(t)
	stop, read := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				read <- nil
				return
			default:
			}
			data, err := os.OpenRoot(filepath.Join(p.dir, "..data")) // one version, also while another one comes
			if err != nil {
				read <- err
				return
			}
			user, err := data.ReadFile("db/user")
			password, err2 := data.ReadFile("db/password")
			_ = data.Close()
			if err == nil && err2 == nil && string(user[1:]) != string(password[1:]) {
				read <- fmt.Errorf("%s with %s", user, password)
				return
			}
		}
	}()
	for n := 2; n <= 4; n++ {
		p.replacePair(t, id, fmt.Sprintf(`"user":"u%d","password":"p%d"`, n, n))
		<-changed
		if got := p.read(t, "db/user") + p.read(t, "db/password"); got != fmt.Sprintf("u%dp%d", n, n) {
			t.Error(got)
		}
	}
	close(stop)
	must(t, <-read)
	p.replacePair(t, id, `"user":"u5"`)
	<-changed
	if _, err := os.Lstat(filepath.Join(p.dir, "db/password")); !errors.Is(err, os.ErrNotExist) {
		t.Error("the file of a value that is gone stays:", err)
	}
	entries, err := os.ReadDir(p.dir)
	must(t, err)
	if len(entries) != 3 { // the link to the data, the data, and the link to db
		t.Error(entries)
	}
}

// What cannot be read any more stays, and the log says why, once.
func TestFilesStayWhileNothingCanBeRead(t *testing.T) {
	p := newPod(t, "", folder)
	id := p.sealPair(t, 1)
	must(t, p.Write(t.Context()))
	changed := p.follow(t)
	p.pods.Allow(servertest.AllowNothing)
	p.replacePair(t, id, `"user":"u2"`)
	p.untilLogged(t, "ServiceAccount shop/orders lacks unseal on it: kubectl create role unseal-db-orders ")
	if got := p.read(t, "db/user"); got != "u1" {
		t.Error(got)
	}
	p.pods.Allow(servertest.AllowOnly("unseal"))
	<-changed
	if got := p.read(t, "db/user"); got != "u2" {
		t.Error(got)
	}
	if text := p.logged.String(); strings.Count(text, "lacks unseal") != 1 || strings.Count(text, "can be read again") != 1 || strings.Contains(text, servertest.OrdersToken) {
		t.Error(text)
	}
}

// Whatever a proxy takes away, the agent does not ask in a loop, and writes only what is new.
func TestAgentIsPatientBehindAProxy(t *testing.T) {
	noTag := func(r *http.Response) error { r.Header.Del("ETag"); return nil }
	for name, proxy := range map[string]struct {
		spoil  func(*httputil.ProxyRequest)
		answer func(*http.Response) error
	}{
		"no wait":       {func(r *httputil.ProxyRequest) { r.Out.URL.RawQuery = "" }, nil},
		"no condition":  {func(r *httputil.ProxyRequest) { r.Out.URL.RawQuery = ""; r.Out.Header.Del("If-None-Match") }, nil},
		"no entity tag": {func(*httputil.ProxyRequest) {}, noTag},
	} {
		t.Run(name, func(t *testing.T) {
			var reads atomic.Int32
			p := newPodBehind(t, func(r *httputil.ProxyRequest) { reads.Add(1); proxy.spoil(r) }, proxy.answer)
			id := p.sealPair(t, 1)
			must(t, p.Write(t.Context()))
			ctx, end := context.WithTimeout(t.Context(), 2*time.Second)
			defer end()
			p.Follow(ctx, func() { t.Error("a change that there is not") })
			if n := reads.Load(); n < 2 || n > 5 { // one to write, and then after 0, 1 and 2 s, of which a half is random
				t.Error(n, "reads")
			}
			p.replacePair(t, id, `"user":"u2"`) // before it looks: without a wait it looks a minute later
			<-p.follow(t)
			if got := p.read(t, "db/user"); got != "u2" {
				t.Error(got)
			}
		})
	}
}

// A failure that comes again is said once, though each answer names another request.
func TestAnOutageIsSaidOnce(t *testing.T) {
	var down atomic.Bool
	failed := make(chan struct{}, 1000)
	p := newPodBehind(t, func(*httputil.ProxyRequest) {}, func(r *http.Response) error {
		if down.Load() {
			r.StatusCode, r.Header["X-Request-Id"] = http.StatusServiceUnavailable, []string{"req_" + rand.Text()}
			failed <- struct{}{}
		}
		return nil
	})
	id := p.sealPair(t, 1)
	must(t, p.Write(t.Context()))
	down.Store(true)
	changed := p.follow(t)
	p.replacePair(t, id, `"user":"u2"`)
	<-failed
	<-failed
	down.Store(false)
	<-changed
	if text := p.logged.String(); strings.Count(text, "the files that are there stay") != 1 || !strings.Contains(text, "req_") {
		t.Error(text)
	}
}

// A version that the plan does not fit is passed over, and not read again and again.
func TestAVersionWithoutItsKeyIsPassedOver(t *testing.T) {
	p := newPod(t, "", "- {path: password, credential: db, key: password}\n")
	id := p.sealPair(t, 1)
	must(t, p.Write(t.Context()))
	changed := p.follow(t)
	p.replacePair(t, id, `"user":"u2"`)
	p.untilLogged(t, "has no value password; it has user")
	if strings.Contains(p.logged.String(), "can be read again") {
		t.Error("the log says that all is well")
	}
	p.replacePair(t, id, `"password":"p3"`)
	<-changed
	if got := p.read(t, "password"); got != "p3" {
		t.Error(got)
	}
	if got := len(p.Entries("event_type=CREDENTIAL_UNSEALED")); got != 3 {
		t.Error(got, "reads of three versions")
	}
}

func TestWriteSaysWhyNothingIsThere(t *testing.T) {
	p := newPod(t, "", folder)
	if err := p.Write(t.Context()); !errors.Is(err, fault.Forbidden) || !strings.Contains(err.Error(), "kubectl create role") {
		t.Error(err)
	}
	must(t, os.Remove(p.tokenFile))
	ctx, end := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer end()
	if err := p.Write(ctx); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "--token-file") {
		t.Error(err)
	}
	down := newPod(t, "http://127.0.0.1:1", folder)
	ctx, end = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer end()
	if err := down.Write(ctx); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "http://127.0.0.1:1 does not answer") {
		t.Error(err)
	}
	if entries, err := os.ReadDir(p.dir); err != nil || len(entries) != 0 {
		t.Error(entries, err)
	}
}

// An agent takes over from one that was killed, and touches nothing that none of them made.
func TestAnAgentTidiesUpAfterAnother(t *testing.T) {
	p := newPod(t, "", folder)
	p.sealPair(t, 1)
	left := filepath.Join(p.dir, "..2026_11_21_10_00_00.000000000")
	must(t, os.Mkdir(left, 0o755))
	must(t, os.WriteFile(filepath.Join(left, "half"), []byte("s3cret"), 0o600))
	must(t, os.Symlink("..2026_11_21_10_00_00.000000000", filepath.Join(p.dir, "..data_next")))
	must(t, os.Symlink("..data/gone", filepath.Join(p.dir, "gone")))
	must(t, os.WriteFile(filepath.Join(p.dir, "mine"), nil, 0o600))
	must(t, os.Symlink("mine", filepath.Join(p.dir, "my-link")))
	must(t, p.Write(t.Context()))
	must(t, p.Write(t.Context()))
	var names []string
	entries, err := os.ReadDir(p.dir)
	must(t, err)
	for _, e := range entries[1:] { // but the folder of the data
		names = append(names, e.Name())
	}
	if got := fmt.Sprint(names); got != "[..data db mine my-link]" {
		t.Error(got)
	}
	blocked := newPod(t, "", folder)
	blocked.sealPair(t, 1)
	must(t, os.Mkdir(filepath.Join(blocked.dir, "db"), 0o755))
	if err := blocked.Write(t.Context()); err == nil || !strings.Contains(err.Error(), "db is in the way") {
		t.Error(err)
	}
}

// Of more credentials than may be waited for, the others are read now and then; all are written.
func TestMoreCredentialsThanWaits(t *testing.T) {
	var list bytes.Buffer
	p := newPod(t, "", "- {path: a, credential: a}\n")
	for i := range 6 {
		fmt.Fprintf(&list, "- {path: f%d, credential: c%d}\n", i, i)
		p.Post("/api/v2/vault/seal", fmt.Sprintf(`{"name":"c%d","credential_type":"t","values":{"k":"v"}}`, i)).Want(t, http.StatusCreated)
	}
	plan, err := delivery.Parse(list.String(), 0o440)
	must(t, err)
	server, err := delivery.NewServer(p.URL, "")
	must(t, err)
	if _, err := agent.New(agent.Config{Server: server, Plan: plan, Dir: p.dir}); err == nil || !strings.Contains(err.Error(), "another agent writes there") {
		t.Error(err)
	}
	p.dir = t.TempDir()
	a, err := agent.New(agent.Config{Server: server, TokenFile: p.tokenFile, Plan: plan, Dir: p.dir, Logger: slog.New(slog.NewTextHandler(p.logged, nil))})
	must(t, err)
	defer a.Close()
	must(t, a.Write(t.Context()))
	ctx, end := context.WithTimeout(t.Context(), 2*time.Second)
	defer end()
	a.Follow(ctx, func() { t.Error("a change that there is not") })
	if got := p.read(t, "f5/k"); got != "v" {
		t.Error(got)
	}
	if e := p.Entries("outcome=failure"); len(e) > 0 {
		t.Error("the server refused:", e)
	}
}

// Where the server has no place for a wait, the agent reads without one.
func TestAnAgentWithoutAPlaceReadsAllTheSame(t *testing.T) {
	p := newPod(t, "", folder)
	id := p.sealPair(t, 1)
	must(t, p.Write(t.Context()))
	server, err := delivery.NewServer(p.URL, "")
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var waits sync.WaitGroup
	defer func() {
		stop()
		waits.Wait()
	}()
	p.Post("/api/v2/vault/seal", `{"name":"other","credential_type":"t","values":{"k":"v"}}`).Want(t, http.StatusCreated)
	refused := make(chan struct{}, 5)
	for range 5 {
		waits.Go(func() {
			if _, err := server.Read(ctx, servertest.OrdersToken, "other", client.OtherThan("*"), client.Wait(55)); errors.Is(err, fault.Exhausted) {
				refused <- struct{}{}
			}
		})
	}
	<-refused // the four others have all places of the pod
	p.replacePair(t, id, `"user":"u2"`)
	<-p.follow(t)
	if got := p.read(t, "db/user"); got != "u2" {
		t.Error(got)
	}
}
