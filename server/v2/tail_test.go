package v2_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// tail is one that a test reads.
type tail struct {
	t      *testing.T
	answer *http.Response
	lines  *bufio.Reader
}

// told is an event of a tail.
type told struct {
	sequence uint64
	json     string
	entry    map[string]any
}

// tailAt opens a tail. A test that waits for what never comes fails after a minute.
func tailAt(t *testing.T, url string, header http.Header, query string) *tail {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/api/v2/audit/tail"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header = header
	answer, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = answer.Body.Close() })
	return &tail{t, answer, bufio.NewReader(answer.Body)}
}

func (s *service) tail(t *testing.T, key, query string) *tail {
	t.Helper()
	of := tailAt(t, s.URL, http.Header{"X-Api-Key": {key}}, query)
	if of.answer.StatusCode != http.StatusOK {
		t.Fatal(of.answer.Status)
	}
	return of
}

// next returns the next event; ok is false when the tail has ended as it should.
func (of *tail) next() (e told, ok bool) {
	of.t.Helper()
	for {
		line, err := of.lines.ReadString('\n')
		if err == io.EOF && line == "" {
			return e, false
		}
		if err != nil {
			of.t.Fatalf("the tail was broken off: %v", err)
		}
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "" && e.json != "":
			return e, true
		case strings.HasPrefix(line, "id: "):
			e.sequence, err = strconv.ParseUint(line[4:], 10, 64)
		case strings.HasPrefix(line, "data: "):
			e.json = line[6:]
			err = json.Unmarshal([]byte(e.json), &e.entry)
		case line != "" && !strings.HasPrefix(line, ":") && !strings.HasPrefix(line, "retry: "):
			of.t.Fatalf("line %q", line)
		}
		if err != nil {
			of.t.Fatal(err)
		}
	}
}

// drain reads until the tail ends. Its place is free by then.
func (of *tail) drain() {
	of.t.Helper()
	for more := true; more; {
		_, more = of.next()
	}
}

// expect reads on until an event of a type.
func (of *tail) expect(event string) told {
	of.t.Helper()
	for {
		e, ok := of.next()
		if !ok {
			of.t.Fatalf("it ended without %s", event)
		}
		if e.entry["event_type"] == event {
			return e
		}
	}
}

func TestATailTellsOfEntriesAsTheyCome(t *testing.T) {
	s := newService(t)
	of := s.tail(t, s.Key, "")
	if h := of.answer.Header; h.Get("Content-Type") != "text/event-stream; charset=utf-8" || h.Get("Cache-Control") != "no-store" ||
		h.Get("X-Accel-Buffering") != "no" || h.Get("X-Request-ID") == "" || h.Get("X-RateLimit-Limit") == "" {
		t.Error(h)
	}
	first, _ := of.next()
	if first.entry["event_type"] != "AUDIT_READ" || first.entry["request_id"] != of.answer.Header.Get("X-Request-ID") {
		t.Error("it does not begin with its own entry:", first.json)
	}
	s.Get("/api/v2/vault/list").Want(t, http.StatusOK)
	if in := s.Metrics(); !strings.Contains(in, "\nlatticekeep_http_requests_in_flight 0\n") {
		t.Error("a tail that waits holds a place")
	}
	listed := of.expect("CREDENTIAL_LISTED")
	if uint64(listed.entry["sequence"].(float64)) != listed.sequence {
		t.Error("another id:", listed.sequence, listed.json)
	}
	one := s.Get("/api/v2/audit/entries/"+strconv.FormatUint(listed.sequence, 10)).Want(t, http.StatusOK)["entry"]
	if servertest.Marshal(t, one) != servertest.Marshal(t, listed.entry) {
		t.Errorf("%v, and by itself %v", listed.entry, one)
	}
	if read := of.expect("AUDIT_READ"); read.sequence <= listed.sequence {
		t.Error("who else reads is not told:", read.json)
	}
	_, err := s.Identity.NamespaceTenant(context.Background(), "cluster", "another") // whose entries are nobody else's
	if err != nil {
		t.Fatal(err)
	}
	s.Get("/api/v2/vault/list").Want(t, http.StatusOK)
	if e, _ := of.next(); e.entry["event_type"] != "CREDENTIAL_LISTED" || e.entry["tenant_id"] != string(s.Tenant) {
		t.Error(e.json)
	}
}

func TestATailGoesOnBehindWhatWasRead(t *testing.T) {
	s := newService(t)
	for range 70 { // more than are read at once
		s.Get("/api/v2/vault/list").Want(t, http.StatusOK)
	}
	read := func(header http.Header, query string) (all []uint64) {
		t.Helper()
		header.Set("X-API-Key", s.Key)
		of := tailAt(t, s.URL, header, query)
		for e, ok := of.next(); ok; e, ok = of.next() {
			all = append(all, e.sequence)
		}
		return all
	}
	whole := read(http.Header{}, "?wait=0&after=0")
	middle := strconv.FormatUint(whole[10], 10)
	for name, rest := range map[string][]uint64{
		"after": read(http.Header{}, "?wait=0&after="+middle), "the last id": read(http.Header{"Last-Event-Id": {middle}}, "?wait=0&after=1"),
	} {
		if len(whole) < 70 || len(rest) < 60 || rest[0] != whole[11] {
			t.Errorf("%s: %v behind %s of %v", name, rest, middle, whole)
		}
	}
	if now := read(http.Header{}, "?wait=0"); len(now) != 1 {
		t.Error("from now:", now)
	}
}

// A tail reads nothing that is written after who opened it may no longer read.
func TestATailEndsWithItsCredential(t *testing.T) {
	s := newService(t)
	user := s.RegisterVerified("reader@example.org")
	tenant := s.TenantOf(user)
	key := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/api-keys", Bearer: user.Access, Body: `{"name":"reader","scopes":["audit:read"]}`}).Want(t, http.StatusCreated)
	ended := map[string]struct {
		header http.Header
		end    servertest.Request
	}{
		"the key":     {http.Header{"X-Api-Key": {key["api_key"].(string)}}, servertest.Request{Method: "DELETE", Path: "/api/v2/api-keys/" + key["key_id"].(string), Bearer: user.Access}},
		"the session": {servertest.Cookies("accessToken", user.Access), servertest.Request{Method: "POST", Path: "/api/v2/auth/logout", Bearer: user.Access}},
	}
	for _, name := range []string{"the key", "the session"} {
		of := tailAt(t, s.URL, ended[name].header, "")
		if _, ok := of.next(); !ok {
			t.Fatal(name, of.answer.Status)
		}
		if r := s.Call(ended[name].end); r.Status != http.StatusOK {
			t.Fatal(name, r.Status)
		}
		s.GrantKeyIn(tenant, authz.VaultRead) // an entry that it may not see
		for e, ok := of.next(); ok; e, ok = of.next() {
			if e.entry["event_type"] == "API_KEY_CREATED" {
				t.Error(name, "is gone, and was shown", e.json)
			}
		}
	}
}

// One caller leaves room for the others of its tenant, and a tenant for other tenants.
func TestACallerAndATenantHaveFewTailsOpen(t *testing.T) {
	s := newService(t)
	user := s.Register("owner@example.org")
	second, third := s.GrantKey(authz.AuditRead), s.GrantKey(authz.AuditRead)
	var all []*tail
	for _, key := range []string{s.Key, second} {
		for range 4 {
			of := s.tail(t, key, "")
			of.expect("AUDIT_READ")
			all = append(all, of)
		}
		if key == s.Key {
			s.tail(t, third, "?wait=0").drain() // while the first key has all of its own
		}
		r := s.Get("/api/v2/audit/tail")
		r.Message(t, http.StatusTooManyRequests)
		if r.Header.Get("Retry-After") == "" {
			t.Error("it is not told when to come again")
		}
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/audit/tail", Key: third}).Message(t, http.StatusTooManyRequests) // the tenant has its maximum
	tailAt(t, s.URL, http.Header{"Authorization": {"Bearer " + user.Access}}, "?wait=0").expect("AUDIT_READ")
	if e := s.Entries("outcome=failure"); len(e) != 3 || e[0]["attributes"].(map[string]any)["reason"] != "too_many_tails" {
		t.Error(e)
	}
	other := s.GrantKeyIn(s.TenantOf(s.Register("other@example.org")), authz.AuditRead)
	s.tail(t, other, "?wait=0")
	if err := all[0].answer.Body.Close(); err != nil { // who hangs up makes room
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; {
		if r := s.Get("/api/v2/audit/tail?wait=0"); r.Status == http.StatusOK {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("no place was given back")
		}
	}
}

// Eight tenants hold all places. Others get theirs of the tenant that has most, whose clients go on.
func TestTenantsWithManyTailsGiveWayToAnother(t *testing.T) {
	s := newService(t)
	key := func(i int) string {
		return s.GrantKeyIn(s.TenantOf(s.Register("owner"+strconv.Itoa(i)+"@example.org")), authz.AuditRead)
	}
	var first, last *tail
	for i := range 8 {
		tenant := s.TenantOf(s.Register("holder" + strconv.Itoa(i) + "@example.org"))
		for range 2 {
			holder := s.GrantKeyIn(tenant, authz.AuditRead)
			for range 4 {
				last = s.tail(t, holder, "")
				if first == nil {
					first = last
				}
			}
		}
	}
	for i := range 2 {
		s.tail(t, key(i), "").expect("AUDIT_READ")
	}
	first.drain() // it has ended as it should
	last.expect("AUDIT_READ")
}

func TestATailEndsWithTheServer(t *testing.T) {
	s := newService(t)
	ctx, stop := context.WithCancel(t.Context())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Server.Serve(ctx, l) }()
	of := tailAt(t, "http://"+l.Addr().String(), http.Header{"X-Api-Key": {s.Key}}, "")
	of.expect("AUDIT_READ")
	stop()
	of.drain()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
