package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
)

// paced is a store whose copies the test paces.
type paced struct {
	Store
	copy func(ctx context.Context, emit func(key, value []byte) error) error
}

func (p *paced) Copy(ctx context.Context, emit func(key, value []byte) error) error {
	return p.copy(ctx, emit)
}

// withCopy makes a service whose copies are what copy makes of those of its store.
func withCopy(t *testing.T, make func(real Store) func(context.Context, func(key, value []byte) error) error) *service {
	t.Helper()
	return assemble(t, func(c *Config) { c.Store = &paced{c.Store, make(c.Store)} })
}

// large are rows enough for the first byte to leave.
func large(emit func(key, value []byte) error) error {
	return emit([]byte("large"), make([]byte, 1<<20))
}

var kept = sync.OnceValues(backup.NewIdentity)

// keeper is the identity that opens the tests' backups.
func keeper(t testing.TB) backup.Identity {
	t.Helper()
	i, err := kept()
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// backupBody asks for a backup for the keeper.
func backupBody(t testing.TB) string {
	t.Helper()
	return marshal(t, map[string]string{"recipient": keeper(t).Recipient().String()})
}

// decrypted returns what is inside an answer, as the age tool would.
func decrypted(t testing.TB, answer []byte) []byte {
	t.Helper()
	all, err := age.ParseIdentities(bytes.NewReader(keeper(t).File(time.Now())))
	if err != nil {
		t.Fatal(err)
	}
	plain, err := age.Decrypt(backup.Split(bytes.NewReader(answer)), all...)
	if err != nil {
		t.Fatal(err)
	}
	inside, err := io.ReadAll(plain)
	if err != nil {
		t.Fatal(err)
	}
	return inside
}

// takeBackup asks for a backup and returns the answer with its body open.
func (s *service) takeBackup(url, key string) *http.Response {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, url+"/api/v2/system/backup", strings.NewReader(backupBody(s.t)))
	if err != nil {
		s.t.Fatal(err)
	}
	r.Header.Set("X-API-Key", key)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = answer.Body.Close() })
	return answer
}

// backups returns the outcomes of the entries about backups.
func (s *service) backups() (outcomes string) {
	s.t.Helper()
	for _, e := range s.records(1) {
		if e.EventType == audit.BackupTaken {
			if e.Outcome == audit.Success && (e.Attributes["recipient"] != keeper(s.t).Recipient().ID() || e.Attributes["kms_key"] != "false") {
				s.t.Errorf("the entry says %v", e.Attributes)
			}
			if e.Resource.Type != audit.BackupResource || e.Resource.ID != "" || (e.Outcome == audit.Denied) == (e.TenantID == string(authz.SystemTenant)) {
				s.t.Errorf("%+v", e)
			}
			outcomes += string(e.Outcome) + e.Attributes[audit.AttributeReason] + " "
		}
	}
	return outcomes
}

// The entry is durable before the first byte leaves, bytes leave before the last
// row is read, and neither a server's limits on an answer nor its one second of
// patience cut a backup. Meanwhile nobody else takes one.
func TestABackupIsStreamedAndRecordedBefore(t *testing.T) {
	goOn := make(chan struct{})
	s := withCopy(t, func(real Store) func(context.Context, func(key, value []byte) error) error {
		return func(ctx context.Context, emit func(key, value []byte) error) error {
			if _, limited := ctx.Deadline(); limited {
				t.Error("a backup has a deadline")
			}
			if err := large(emit); err != nil {
				return err
			}
			<-goOn
			return real.Copy(ctx, emit)
		}
	})
	h := httptest.NewUnstartedServer(s.server.engine)
	h.Config.WriteTimeout = time.Nanosecond // of an ordinary answer
	h.Start()
	t.Cleanup(h.Close)
	other := httptest.NewServer(s.server.engine)
	t.Cleanup(other.Close)

	key := s.systemKey()
	answer := s.takeBackup(h.URL, key)
	first := make([]byte, 1)
	if _, err := io.ReadFull(answer.Body, first); err != nil || answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != "application/octet-stream" {
		t.Fatal(answer.Status, err)
	}
	if got := s.backups(); got != "success " {
		t.Errorf("entries while the first bytes are here: %s", got)
	}
	if second := s.takeBackup(other.URL, key); second.StatusCode != http.StatusConflict {
		t.Error("a second one: ", second.Status)
	}
	if denied := s.takeBackup(other.URL, s.key); denied.StatusCode != http.StatusForbidden {
		t.Error("a tenant's key: ", denied.Status)
	}
	close(goOn)
	in, err := backup.Open(backup.Split(io.MultiReader(bytes.NewReader(first), answer.Body)), []backup.Identity{keeper(t)})
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
	if err != nil || entries == 0 || in.Header.Identity.ID() != s.keys.Identity().ID() || in.Header.Program != "test" {
		t.Errorf("%d entries, header %+v, %v", entries, in.Header, err)
	}
	if got := s.backups(); got != "success failurein_progress deniedmissing_scope " {
		t.Errorf("entries: %s", got)
	}
	if again := s.takeBackup(other.URL, key); again.StatusCode != http.StatusOK {
		t.Error("the next one: ", again.Status)
	}
}

// The key of a KMS that is a file leaves the server inside a backup and nowhere
// else, and one that cannot be read makes no backup without it.
func TestABackupCarriesTheKMSKey(t *testing.T) {
	const file = "latticekeep-kms-key-1:c2VjcmV0"
	gone := errors.New("the volume is gone")
	var fails error
	s := assemble(t, func(c *Config) {
		c.KMSKeys = func(context.Context) ([][]byte, error) { return [][]byte{[]byte(file), []byte("a former one")}, fails }
	})
	h := httptest.NewServer(s.server.engine)
	t.Cleanup(h.Close)
	answer, err := io.ReadAll(s.takeBackup(h.URL, s.systemKey()).Body)
	if err != nil {
		t.Fatal(err)
	}
	in, err := backup.Open(backup.Split(bytes.NewReader(answer)), []backup.Identity{keeper(t)})
	if err != nil {
		t.Fatal(err)
	}
	if len(in.KMSKeys) != 2 || string(in.KMSKeys[0]) != file || string(in.KMSKeys[1]) != "a former one" || bytes.Contains(answer, []byte("kms-key")) {
		t.Errorf("%q", in.KMSKeys)
	}
	fails = gone
	for range 2 { // it is not in the way of the next
		if failed := s.takeBackup(h.URL, s.systemKey()); failed.StatusCode != http.StatusServiceUnavailable {
			t.Error(failed.Status)
		}
	}
	var said string
	for _, e := range s.records(1) {
		if e.EventType == audit.BackupTaken {
			said += string(e.Outcome) + e.Attributes["kms_key"] + e.Attributes[audit.AttributeReason] + " "
		}
	}
	if said != "successtrue failureno_kms_key failureno_kms_key " {
		t.Error(said)
	}
	if strings.Contains(s.log.String(), "c2VjcmV0") {
		t.Error("the key is in the log")
	}
}

// Whoever names a recipient that a quantum computer opens gets no backup, and is
// told why.
func TestABackupIsForPostQuantumRecipientsOnly(t *testing.T) {
	s := newService(t)
	for recipient, says := range map[string]string{
		"age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p": "quantum computer",
		"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ":                         "quantum computer",
		keeper(t).Recipient().String()[:100]:                             "damaged",
		"AGE-SECRET-KEY-PQ-1XYZ":                                         "keep it to yourself",
	} {
		got := s.call(request{method: "POST", path: "/api/v2/system/backup", key: s.systemKey(), body: marshal(t, map[string]string{"recipient": recipient})})
		if message := got.message(t, http.StatusUnprocessableEntity); !strings.Contains(message, says) || strings.Contains(message, recipient[5:]) {
			t.Errorf("%.30s: %s", recipient, message)
		}
	}
}

// Whoever takes a backup without the program can tell its two parts apart.
func TestTheContractSaysHowLongAStatementIs(t *testing.T) {
	if want := fmt.Sprintf("The last %d bytes are not of the age file", backup.StatementSize); !strings.Contains(openapi.V2(), want) {
		t.Errorf("it does not say %q", want)
	}
}

// A backup that fails in the middle does not look whole to HTTP either, and the
// log says why; one that fails before is an error like any other.
func TestABackupThatFailsIsBrokenOff(t *testing.T) {
	begun := false
	s := withCopy(t, func(Store) func(context.Context, func(key, value []byte) error) error {
		return func(_ context.Context, emit func(key, value []byte) error) error {
			if begun {
				if err := large(emit); err != nil {
					return err
				}
			}
			return errors.New("the disk is gone")
		}
	})
	key := s.systemKey()
	for name, http2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		t.Run(name, func(t *testing.T) {
			handled := make(chan struct{})
			h := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				s.server.engine.ServeHTTP(w, r)
				go func() { handled <- struct{}{} }() // and logged
			}))
			h.EnableHTTP2 = http2
			h.StartTLS()
			t.Cleanup(h.Close)
			ask := func() *http.Response {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+"/api/v2/system/backup", strings.NewReader(backupBody(t)))
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
	for _, line := range s.lines("request") {
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
	s := withCopy(t, func(Store) func(context.Context, func(key, value []byte) error) error {
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
	go func() { done <- s.server.Serve(ctx, l) }()
	answer := s.takeBackup("http://"+l.Addr().String(), s.systemKey())
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
