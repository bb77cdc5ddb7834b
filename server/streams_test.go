package server_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// paced is a store whose copies the test paces.
type paced struct {
	server.Store
	copy func(ctx context.Context, emit func(key, value []byte) error) error
}

func (p *paced) Copy(ctx context.Context, emit func(key, value []byte) error) error {
	return p.copy(ctx, emit)
}

// withCopy makes a service whose copies are what change makes of those of its store.
func withCopy(t *testing.T, change func(server.Store) func(context.Context, func(key, value []byte) error) error) *service {
	t.Helper()
	return assemble(t, func(c *server.Config) { c.Store = &paced{c.Store, change(c.Store)} })
}

// large are rows enough for the first byte to leave.
func large(emit func(key, value []byte) error) error {
	return emit([]byte("large"), make([]byte, 1<<20))
}

// The entry is durable before the first byte leaves, bytes leave before the last
// row is read, and neither a server's limits on an answer nor its one second of
// patience cut a backup. Meanwhile nobody else takes one.
func TestABackupIsStreamedAndRecordedBefore(t *testing.T) {
	goOn := make(chan struct{})
	s := withCopy(t, func(inner server.Store) func(context.Context, func(key, value []byte) error) error {
		return func(ctx context.Context, emit func(key, value []byte) error) error {
			if _, limited := ctx.Deadline(); limited {
				t.Error("a backup has a deadline")
			}
			if err := large(emit); err != nil {
				return err
			}
			<-goOn
			return inner.Copy(ctx, emit)
		}
	})
	h := httptest.NewUnstartedServer(s.Server.Engine())
	h.Config.WriteTimeout = time.Nanosecond // of an ordinary answer
	h.Start()
	t.Cleanup(h.Close)
	other := httptest.NewServer(s.Server.Engine())
	t.Cleanup(other.Close)

	key := s.SystemKey()
	answer := s.TakeBackup(h.URL, key)
	first := make([]byte, 1)
	if _, err := io.ReadFull(answer.Body, first); err != nil || answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != "application/octet-stream" {
		t.Fatal(answer.Status, err)
	}
	if got := s.BackupOutcomes(); got != "success " {
		t.Errorf("entries while the first bytes are here: %s", got)
	}
	if second := s.TakeBackup(other.URL, key); second.StatusCode != http.StatusConflict {
		t.Error("a second one: ", second.Status)
	}
	if denied := s.TakeBackup(other.URL, s.Key); denied.StatusCode != http.StatusForbidden {
		t.Error("a tenant's key: ", denied.Status)
	}
	close(goOn)
	in, err := backup.Open(backup.Split(io.MultiReader(bytes.NewReader(first), answer.Body)), []backup.Identity{servertest.BackupIdentity(t)})
	if err != nil {
		t.Fatal(err)
	}
	entries := 0
	_, err = in.Rows(func(key, _ []byte) error {
		if strings.HasPrefix(string(key), "audit/entry/") {
			entries++
		}
		return nil
	})
	if err != nil || entries == 0 || in.Header.Identity.ID() != s.Keys.Identity().ID() || in.Header.Program != "test" {
		t.Errorf("%d entries, header %+v, %v", entries, in.Header, err)
	}
	if got := s.BackupOutcomes(); got != "success failurein_progress deniedmissing_scope " {
		t.Errorf("entries: %s", got)
	}
	if again := s.TakeBackup(other.URL, key); again.StatusCode != http.StatusOK {
		t.Error("the next one: ", again.Status)
	}
}

// A backup that fails in the middle does not look whole to HTTP either, and the
// log says why; one that fails before is an error like any other.
func TestABackupThatFailsIsBrokenOff(t *testing.T) {
	begun := false
	s := withCopy(t, func(server.Store) func(context.Context, func(key, value []byte) error) error {
		return func(_ context.Context, emit func(key, value []byte) error) error {
			if begun {
				if err := large(emit); err != nil {
					return err
				}
			}
			return errors.New("the disk is gone")
		}
	})
	key := s.SystemKey()
	for name, http2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		t.Run(name, func(t *testing.T) {
			handled := make(chan struct{})
			h := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				s.Server.Engine().ServeHTTP(w, r)
				go func() { handled <- struct{}{} }() // and logged
			}))
			h.EnableHTTP2 = http2
			h.StartTLS()
			t.Cleanup(h.Close)
			ask := func() *http.Response {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+"/api/v2/system/backup", strings.NewReader(servertest.BackupBody(t)))
				if err != nil {
					t.Fatal(err)
				}
				r.Header.Set("X-API-Key", key)
				r.Header.Set("Content-Type", "application/json")
				answer, err := h.Client().Do(r)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = answer.Body.Close() })
				return answer
			}
			begun = false
			if answer := ask(); answer.StatusCode != http.StatusInternalServerError || answer.Header.Get("Content-Type") != "application/json; charset=utf-8" {
				t.Error(answer.Status, answer.Header)
			}
			<-handled
			begun = true
			answer := ask()
			if answer.Proto != name {
				t.Error(answer.Proto)
			}
			if _, err := io.Copy(io.Discard, answer.Body); err == nil {
				t.Error("the answer ends as if it were whole")
			}
			<-handled
		})
	}
	broken := 0
	for _, line := range s.LogLines("request") {
		if why, _ := line["error"].(string); line["status"] == 200.0 && strings.Contains(why, "the disk is gone") {
			broken++
		}
	}
	if broken != 2 {
		t.Errorf("%d lines say why a backup was broken off", broken)
	}
}

// A server that ends does not wait for a backup, which can be taken again.
func TestAServerThatEndsBreaksOffABackup(t *testing.T) {
	ended := make(chan struct{})
	s := withCopy(t, func(server.Store) func(context.Context, func(key, value []byte) error) error {
		return func(ctx context.Context, emit func(key, value []byte) error) error {
			if err := large(emit); err != nil {
				return err
			}
			<-ctx.Done()
			close(ended)
			return ctx.Err()
		}
	})
	ctx, stop := context.WithCancel(t.Context())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Server.Serve(ctx, l) }()
	answer := s.TakeBackup("http://"+l.Addr().String(), s.SystemKey())
	if _, err := io.ReadFull(answer.Body, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	stop()
	<-ended
	if _, err := io.Copy(io.Discard, answer.Body); err == nil {
		t.Error("the answer ends as if it were whole")
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// slow is an answer whose reader takes nothing until it is told to.
type slow struct {
	*httptest.ResponseRecorder
	began, goOn chan struct{}
}

func (w *slow) Write(b []byte) (int, error) {
	if w.began != nil {
		close(w.began)
		w.began = nil
	}
	<-w.goOn
	return w.ResponseRecorder.Write(b)
}

// One export at a time: it verifies the log while it writes it.
func TestOneExportIsWrittenAtATime(t *testing.T) {
	s := assemble(t)
	key := s.SystemKey()
	ask := func(w http.ResponseWriter) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/api/v2/system/audit/export", nil)
		r.Header.Set("X-API-Key", key)
		s.Server.Engine().ServeHTTP(w, r)
	}
	began, done := make(chan struct{}), make(chan struct{})
	first := &slow{httptest.NewRecorder(), began, make(chan struct{})}
	go func() { defer close(done); ask(first) }()
	<-began
	second := httptest.NewRecorder()
	if ask(second); second.Code != http.StatusConflict {
		t.Error(second.Code, second.Body)
	}
	close(first.goOn)
	<-done
	if _, err := verify.Export(first.Body, verify.Options{}); err != nil || first.Code != http.StatusOK {
		t.Error(first.Code, err)
	}
	third := httptest.NewRecorder()
	if ask(third); third.Code != http.StatusOK {
		t.Error(third.Code, third.Body)
	}
	outcomes := ""
	for _, e := range s.AllEntries(1) {
		if e.EventType == audit.AuditExported {
			outcomes += string(e.Outcome) + e.Attributes[audit.AttributeReason] + " "
		}
	}
	if outcomes != "success failurein_progress success " {
		t.Error(outcomes)
	}
}
