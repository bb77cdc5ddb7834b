package mail

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

func TestAMailWaitsTwiceAsLongAfterEachFailure(t *testing.T) {
	f := newFixture(t)
	f.post(Message{Kind: Invite, To: recipient, Token: token})
	tries := 0
	c := f.courier(sendFunc(func(context.Context, Envelope) error {
		tries++
		return errors.New("connection refused")
	}))
	for n, want := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600} {
		want *= time.Second
		if f.pass(c); tries != n+1 {
			t.Fatalf("%d tries, want %d", tries, n+1)
		}
		if wait := f.pass(c); wait != min(want, pollInterval) || tries != n+1 {
			t.Errorf("after %d failures: looks again in %v, with %d tries", n+1, wait, tries)
		}
		f.advance(want - time.Millisecond)
		if f.pass(c); tries != n+1 {
			t.Errorf("after %d failures: tried before %v", n+1, want)
		}
		f.advance(time.Millisecond)
	}
}

func TestAMailIsGivenUpWhenItsTimeIsOver(t *testing.T) {
	for kind, lasts := range map[Kind]time.Duration{
		VerifyEmail: 48 * time.Hour, ResetPassword: time.Hour, Invite: 72 * time.Hour, PasswordChanged: 72 * time.Hour,
	} {
		t.Run(string(kind), func(t *testing.T) {
			f := newFixture(t)
			id := f.post(Message{Kind: kind, To: recipient, Token: token})
			tries := 0
			c := f.courier(sendFunc(func(context.Context, Envelope) error {
				tries++
				return errors.New("connection refused")
			}))
			f.advance(lasts)
			f.pass(c)
			if tries != 1 || f.stored() != 1 {
				t.Fatalf("in time: %d tries, %d stored", tries, f.stored())
			}
			f.advance(time.Hour)
			f.pass(c)
			if tries != 1 || f.stored() != 0 || !strings.Contains(f.log.String(), "giving up") || !strings.Contains(f.log.String(), id) {
				t.Fatalf("too late: %d tries, %d stored, log %s", tries, f.stored(), f.log)
			}
		})
	}
}

func TestAMailWithoutARecipientIsDroppedUnsent(t *testing.T) {
	f := newFixture(t)
	f.post(Message{Kind: ResetPassword, Token: token})
	f.pass(f.courier(sendFunc(func(context.Context, Envelope) error {
		t.Error("it was sent")
		return nil
	})))
	if f.stored() != 0 || f.log.String() != "" {
		t.Fatal(f.stored(), f.log)
	}
}

func TestARestartKeepsAMailAndItsIdentity(t *testing.T) {
	f := newFixture(t)
	id := f.post(Message{Kind: VerifyEmail, To: recipient, Token: token})
	var seen []Envelope
	failing := true
	transport := sendFunc(func(_ context.Context, e Envelope) error {
		seen = append(seen, e)
		if failing {
			return errors.New("connection refused")
		}
		return nil
	})
	f.pass(f.courier(transport))
	must(t, f.store.Close())
	f.open()
	failing = false
	f.pass(f.courier(transport))
	if len(seen) != 2 || seen[0] != seen[1] || seen[1].ID != id || seen[1].To != recipient || f.stored() != 0 {
		t.Fatalf("%+v", seen)
	}
}

// A second courier on the same rows does what follows a crash between sending and deleting. The
// mail is sent again under the same id when the claim on it is over, and is not lost.
func TestAMailThatCouldNotBeDeletedIsSentAgain(t *testing.T) {
	f := newFixture(t)
	f.post(Message{Kind: VerifyEmail, To: recipient, Token: token})
	var sent []string
	f.pass(f.courier(sendFunc(func(_ context.Context, e Envelope) error {
		sent = append(sent, e.ID)
		return f.store.Close() // makes the deletion fail
	})))
	f.open()
	c := f.courier(sendFunc(func(_ context.Context, e Envelope) error {
		sent = append(sent, e.ID)
		return nil
	}))
	for f.pass(c); len(sent) == 1; f.pass(c) {
		f.advance(2 * sendTimeout)
	}
	if len(sent) != 2 || sent[0] != sent[1] || f.stored() != 0 {
		t.Fatal(sent, f.stored())
	}
}

func TestADamagedRowIsGivenUp(t *testing.T) {
	damage := map[string]func(row []byte) []byte{
		"flipped":          func(b []byte) []byte { b[len(b)-1] ^= 1; return b },
		"cut":              func(b []byte) []byte { return b[:3] },
		"empty":            func([]byte) []byte { return nil },
		"of another mail":  nil,
		"no longer sealed": func([]byte) []byte { return []byte("\x00\x00\x00\x01{}") },
	}
	for name, change := range damage {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			p, err := f.outbox.Prepare(t.Context(), Message{Kind: Invite, To: recipient, Token: token})
			must(t, err)
			if change == nil {
				p.key = append(p.key[:len(p.key)-1], 'x')
			} else {
				p.row = change(p.row)
			}
			must(t, f.store.Update(t.Context(), p.Put))
			f.pass(f.courier(sendFunc(func(context.Context, Envelope) error {
				t.Error("it was sent")
				return nil
			})))
			if f.stored() != 0 || !strings.Contains(f.log.String(), "giving up") {
				t.Error(f.stored(), f.log)
			}
		})
	}
}

func TestAddressAndTokenAreNowhereInTheOpen(t *testing.T) {
	f := newFixture(t)
	f.post(Message{Kind: VerifyEmail, To: recipient, Token: token})
	f.pass(f.courier(sendFunc(func(context.Context, Envelope) error { return errors.New("connection refused") })))
	for _, canary := range []string{recipient, token, "canary"} {
		if bytes.Contains(f.files(), []byte(canary)) {
			t.Errorf("the database holds %q", canary)
		}
		if strings.Contains(f.log.String(), canary) {
			t.Errorf("the log holds %q", canary)
		}
	}
}

func TestTextsCarryTheTokenAndTheConfiguredAddress(t *testing.T) {
	for kind, paths := range map[Kind]struct{ page, path, field string }{
		VerifyEmail:     {"/verify", "/api/v2/auth/verify-email", `{"token":"` + token + `"}`},
		ResetPassword:   {"/reset", "/api/v2/auth/reset-password", `{"token":"` + token + `","new_password":"`},
		Invite:          {"/join", "/api/v2/auth/accept-invitation", `{"token":"` + token + `","password":"`},
		PasswordChanged: {"", "/api/v2/auth/forgot-password", `{"email":"`},
	} {
		for _, base := range []string{"https://vault.example.com", "https://vault.example.com/"} {
			e := render("mail_x", stored{Kind: kind, To: recipient, Token: token}, Options{PublicURL: base, From: "a@b.example"})
			if !strings.Contains(e.Text, "https://vault.example.com"+paths.path+" ") || !strings.Contains(e.Text, paths.field) ||
				strings.Contains(e.Text, "%!") || e.Subject == "" || !strings.HasSuffix(e.Text, "\n") {
				t.Errorf("%s: %q", kind, e.Text)
			}
			link := "\n\n  https://vault.example.com" + paths.page + "#token=" + token + "\n\n" // on its own line, with the token only after the #
			if strings.Contains(e.Text, link) != (paths.page != "") || strings.Contains(e.Text, "?token") || strings.Count(e.Text, "#") > 1 {
				t.Errorf("%s: %q", kind, e.Text)
			}
			if strings.ContainsFunc(e.Text, func(r rune) bool { return r > '~' || r < ' ' && r != '\n' }) {
				t.Errorf("%s: the text is not ASCII", kind)
			}
		}
	}
	if _, err := newFixture(t).outbox.Prepare(t.Context(), Message{Kind: "other", To: recipient}); err == nil {
		t.Error("an unknown kind was taken")
	}
}

func TestADirectoryHoldsOneReadableFileForEachMail(t *testing.T) {
	f := newFixture(t)
	id := f.post(Message{Kind: VerifyEmail, To: recipient, Token: token})
	dir := filepath.Join(t.TempDir(), "mail")
	f.pass(f.courier(Directory(dir)))
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) != 1 || entries[0].Name() != id+".eml" || f.stored() != 0 {
		t.Fatal(entries, f.stored(), f.log)
	}
	info, err := entries[0].Info()
	must(t, err)
	text, err := os.ReadFile(filepath.Join(dir, id+".eml"))
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Error(info.Mode())
	}
	for _, want := range []string{"To: <" + recipient + ">", `"token":"` + token + `"`, "noreply@example.com", "Message-ID: <" + id + "@example.com>"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s\nlacks %q", text, want)
		}
	}
}

// Run sends mails that are stored already, that are stored while it runs, and that become due again
// by the clock. It ends with its context.
func TestRunEmptiesTheOutboxUntilItsContextEnds(t *testing.T) {
	f := newFixture(t)
	ctx, stop := context.WithCancel(t.Context())
	sent, outcome := make(chan string), make(chan error)
	logged := make(lines, 100)
	options := f.options()
	options.Logger = slog.New(slog.NewTextHandler(logged, nil))
	before := f.post(Message{Kind: Invite, To: recipient, Token: token})
	done := make(chan error)
	go func() {
		done <- f.outbox.Run(ctx, sendFunc(func(_ context.Context, e Envelope) error {
			sent <- e.ID
			return <-outcome
		}), options)
	}()
	try := func(want string, err error) {
		t.Helper()
		if id := <-sent; id != want {
			t.Fatal(id)
		}
		outcome <- err
	}
	try(before, nil)
	later := f.post(Message{Kind: Invite, To: recipient, Token: token})
	try(later, errors.New("connection refused"))
	if line := <-logged; !strings.Contains(line, later) { // proves that the time of the next attempt is set
		t.Fatal(line)
	}
	f.advance(firstRetry)
	f.outbox.Notify()
	try(later, nil)
	stop()
	must(t, <-done)
	if f.stored() != 0 {
		t.Error("something is left, after it was sent")
	}
}

// lines is a log whose lines a test waits for.
type lines chan string

func (l lines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}

func TestRunSurvivesAStoreThatFails(t *testing.T) {
	f := newFixture(t)
	p, err := f.outbox.Prepare(t.Context(), Message{Kind: Invite, To: recipient, Token: token})
	must(t, err)
	must(t, f.store.Update(t.Context(), p.Put))
	broken := &failingStore{Store: f.store, fails: 1}
	outbox := NewOutbox(broken, f.keys, f.now)
	outbox.Notify() // avoids the wait after the failure
	ctx, stop := context.WithCancel(t.Context())
	must(t, outbox.Run(ctx, sendFunc(func(context.Context, Envelope) error { stop(); return nil }), f.options()))
	if f.stored() != 0 || !strings.Contains(f.log.String(), "retrying") {
		t.Fatal(f.stored(), f.log)
	}
}

// failingStore fails its first Views.
type failingStore struct {
	store.Store
	fails int
}

func (s *failingStore) View(ctx context.Context, fn func(store.Reader) error) error {
	if s.fails--; s.fails >= 0 {
		return errors.New("the disk is on fire")
	}
	return s.Store.View(ctx, fn)
}

func TestManyFailingMailsDoNotHoldUpANewOne(t *testing.T) {
	f := newFixture(t)
	for range 2*passSize + 3 {
		f.post(Message{Kind: Invite, To: recipient, Token: token})
	}
	var sent []string
	var tries atomic.Int64
	c := f.courier(sendFunc(func(_ context.Context, e Envelope) error {
		tries.Add(1)
		if e.To == recipient {
			return errors.New("connection refused")
		}
		sent = append(sent, e.ID)
		return nil
	}))
	for range 4 {
		before := tries.Load()
		f.pass(c)
		if n := tries.Load() - before; n > passSize {
			t.Fatalf("%d mails in one pass", n)
		}
	}
	id := f.post(Message{Kind: Invite, To: "new@example.org", Token: token})
	f.pass(c)
	if !slices.Equal(sent, []string{id}) || f.stored() != 2*passSize+3 {
		t.Fatal(sent, f.stored())
	}
}

func TestRunWantsItsOptions(t *testing.T) {
	f := newFixture(t)
	for _, o := range []Options{{From: "a@b.example"}, {PublicURL: "https://vault.example.com"}} {
		if err := f.outbox.Run(t.Context(), Directory("x"), o); err == nil {
			t.Errorf("%+v was taken", o)
		}
	}
}

// A mail counts as queued until it is sent, and as the oldest once it has failed.
func TestStatsTellOfMailsThatWait(t *testing.T) {
	f := newFixture(t)
	made := f.now()
	for range passSize + 1 { // more than one pass takes
		f.post(Message{Kind: Invite, To: recipient, Token: token})
	}
	failure := errors.New("connection refused")
	c := f.courier(sendFunc(func(context.Context, Envelope) error { return failure }))
	want := func(when string, want Stats) {
		t.Helper()
		if got := f.outbox.Stats(); got != want {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
	}
	f.pass(c)
	want("after a pass", Stats{Queued: passSize + 1, Postponed: passSize})
	f.pass(c)
	f.pass(c)
	want("after all have failed", Stats{Queued: passSize + 1, Oldest: made.UTC(), Postponed: passSize + 1})
	f.advance(time.Hour)
	failure = ErrRefused
	f.pass(c)
	failure = nil
	f.pass(c)
	f.pass(c)
	want("at the end", Stats{Sent: 1, GivenUp: passSize, Postponed: passSize + 1})
}
