package identity

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/ticket"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// tickets returns a token of each kind, and for each kind a function that presents a token.
func (f *people) tickets() (tokens map[ticket.Kind]string, use map[ticket.Kind]func(token string) error) {
	f.t.Helper()
	owner := f.verified("ada@example.com")
	tokens = make(map[ticket.Kind]string)
	must(f.t, f.RequestPasswordReset(f.t.Context(), stranger, "ada@example.com"))
	tokens[ticket.Reset] = f.token("ada@example.com")
	_, err := f.Invite(f.t.Context(), owner.Principal, "bob@example.com", authz.Member)
	must(f.t, err)
	tokens[ticket.Invite] = f.token("bob@example.com")
	f.register("eve@example.com")
	tokens[ticket.Verify] = f.token("eve@example.com")
	return tokens, map[ticket.Kind]func(string) error{
		ticket.Verify: func(token string) error { return f.VerifyEmail(f.t.Context(), stranger, token) },
		ticket.Reset: func(token string) error {
			return f.ResetPassword(f.t.Context(), stranger, token, secret.Bytes(otherPassword))
		},
		ticket.Invite: func(token string) error {
			_, _, err := f.AcceptInvitation(f.t.Context(), stranger, token, secret.Bytes(goodPassword))
			return err
		},
	}
}

// prefix returns how tokens of a kind begin.
func prefix(k ticket.Kind) string { return "lk_" + string(k) + "_" }

func TestAMailedTokenCountsOnceAndForOneThing(t *testing.T) {
	f := newPeople(t)
	tokens, use := f.tickets()
	n := len(f.history(authz.SystemTenant))
	for kind, token := range tokens {
		body := token[len(prefix(kind)):]
		bad := []string{
			"", prefix(kind), body, token + "a", token[:len(token)-1], " " + token, token + "\n", strings.ToUpper(token), prefix(kind) + strings.Repeat("a", 52),
		}
		for other, foreign := range tokens {
			if other != kind {
				bad = append(bad, foreign, prefix(kind)+foreign[len(prefix(other)):])
			}
		}
		for _, b := range bad {
			if err := use[kind](b); !errors.Is(err, ErrTicket) || !errors.Is(err, fault.Invalid) {
				t.Errorf("%s with %.20q: %v", kind, b, err)
			}
		}
	}
	f.recorded(authz.SystemTenant, n)
	for kind, token := range tokens {
		must(t, use[kind](token))
		if err := use[kind](token); !errors.Is(err, ErrTicket) {
			t.Errorf("%s counts twice: %v", kind, err)
		}
	}
	if left := f.rows("ticket/"); len(left) != 0 {
		t.Errorf("%d rows of used tickets", len(left))
	}
}

func TestAMailedTokenExpires(t *testing.T) {
	f := newPeople(t)
	tokens, use := f.tickets()
	f.advance(time.Hour)
	if err := use[ticket.Reset](tokens[ticket.Reset]); !errors.Is(err, ErrTicket) {
		t.Error(err)
	}
	f.advance(47 * time.Hour)
	if err := use[ticket.Verify](tokens[ticket.Verify]); !errors.Is(err, ErrTicket) {
		t.Error(err)
	}
	f.advance(5*24*time.Hour - time.Second)
	must(t, f.store.View(t.Context(), func(r store.Reader) error { // valid until then
		_, err := f.grants.tickets.Find(r, ticket.Invite, tokens[ticket.Invite], f.time())
		return err
	}))
	f.advance(time.Second)
	if err := use[ticket.Invite](tokens[ticket.Invite]); !errors.Is(err, ErrTicket) {
		t.Error(err)
	}
}

func TestANewerTokenReplacesTheOlder(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	first := f.token("ada@example.com")
	me := f.caller(f.signIn("ada@example.com", goodPassword))
	n := len(f.history(u.Tenant))
	must(t, f.ResendVerification(t.Context(), me)) // a moment after the first
	if mails := f.mails(); len(mails) != 0 {
		t.Errorf("%d mails within a minute", len(mails))
	}
	f.advance(ticket.MailInterval)
	must(t, f.ResendVerification(t.Context(), me))
	second := f.token("ada@example.com")
	if err := f.VerifyEmail(t.Context(), stranger, first); !errors.Is(err, ErrTicket) {
		t.Error("the older token still counts:", err)
	}
	must(t, f.VerifyEmail(t.Context(), stranger, second))
	f.advance(ticket.MailInterval)
	must(t, f.ResendVerification(t.Context(), me)) // verified by now
	if mails := f.mails(); len(mails) != 0 {
		t.Errorf("%d mails to a verified address", len(mails))
	}
	asked := "VERIFICATION_REQUESTED success"
	f.recorded(u.Tenant, n, asked, asked, "EMAIL_VERIFIED success", asked)
}

func TestAPasswordIsResetByMail(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	f.mails()
	tokens := f.signIn("ada@example.com", goodPassword)
	for range 2 * freeFailures { // makes the account wait
		_, _ = f.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes("wrong"))
	}
	previous := f.rows("user/password/")
	n := len(f.history(u.Tenant))
	must(t, f.RequestPasswordReset(t.Context(), stranger, " ADA@example.com"))
	token := f.token("ada@example.com")
	if err := f.ResetPassword(t.Context(), stranger, token, secret.Bytes("short")); !errors.Is(err, fault.Invalid) || errors.Is(err, ErrTicket) {
		t.Error(err)
	}
	must(t, f.ResetPassword(t.Context(), stranger, token, secret.Bytes(otherPassword)))
	if mails := f.mails(); len(mails) != 1 || mails[0].To != "ada@example.com" || mailedToken.MatchString(mails[0].Text) {
		t.Error("the user is not told of it")
	}
	if f.alive(tokens) {
		t.Error("a session outlived the reset")
	}
	if _, err := f.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword)); !errors.Is(err, fault.Unauthenticated) {
		t.Error("the previous password counts:", err)
	}
	f.signIn("ada@example.com", otherPassword)
	f.recorded(u.Tenant, n, "PASSWORD_RESET_REQUESTED success", "PASSWORD_RESET success", "USER_SIGNED_IN success")
	now := f.rows("user/password/")
	if len(now) != 1 || len(previous) != 1 {
		t.Fatal(len(previous), len(now))
	}
	for key := range previous {
		if _, same := now[key]; same {
			t.Error("the new password lies where the previous one did, which is then not wiped")
		}
	}
}

func TestARequestOfAResetIsAnsweredAlike(t *testing.T) {
	f := newPeople(t)
	for _, email := range []string{"ada@example.com", "bob@example.com"} {
		f.register(email)
	}
	f.mails()
	must(t, f.RequestPasswordReset(t.Context(), stranger, "bob@example.com")) // mailed a moment ago
	f.mails()
	must(t, f.RequestPasswordReset(t.Context(), stranger, "warm-up@example.com")) // recorded, once a minute
	f.mails()
	type work struct{ gets, updates, mails int64 }
	var first *work
	for name, email := range map[string]string{
		"known": "ada@example.com", "known, mailed before": "bob@example.com", "unknown": "nobody@example.com", "no address": "nobody", "nothing": "",
	} {
		gets, updates := f.store.gets.Load(), f.store.updates.Load()
		must(t, f.RequestPasswordReset(t.Context(), stranger, email))
		did := work{f.store.gets.Load() - gets, f.store.updates.Load() - updates, int64(len(f.rows("mail/")))}
		if first == nil {
			first = &did
		}
		if did != *first || did.mails != 1 {
			t.Errorf("%s did %+v, another %+v", name, did, *first)
		}
		if sent := f.mails(); (len(sent) == 1) != (name == "known") {
			t.Errorf("%s: %d mails left the house", name, len(sent))
		}
	}
}

func TestAChangedPasswordEndsTheOtherSessions(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	f.mails()
	other := f.signIn("ada@example.com", goodPassword)
	mine := f.signIn("ada@example.com", goodPassword)
	me := f.caller(mine)
	n := len(f.history(u.Tenant))
	change := func(current, next string) error {
		return f.ChangePassword(t.Context(), me, secret.Bytes(current), secret.Bytes(next))
	}
	if err := change(goodPassword, "short"); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
	if err := change("wrong", otherPassword); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	must(t, change(goodPassword, otherPassword))
	if f.alive(other) || !f.alive(mine) {
		t.Error("not the other sessions ended")
	}
	if _, err := f.Refresh(t.Context(), stranger, mine.Refresh); err != nil {
		t.Error(err)
	}
	f.signIn("ada@example.com", otherPassword)
	if mails := f.mails(); len(mails) != 1 || mails[0].To != "ada@example.com" {
		t.Error("the user is not told of it")
	}
	n = f.recorded(u.Tenant, n, "PASSWORD_CHANGED denied wrong_password", "PASSWORD_CHANGED success", "SESSION_REFRESHED success", "USER_SIGNED_IN success")
	for range freeFailures {
		_ = change("wrong", goodPassword)
	}
	if err := change(otherPassword, goodPassword); !errors.Is(err, fault.Forbidden) {
		t.Error("a session guesses passwords without a wait:", err)
	}
	if len(f.history(u.Tenant)) != n+freeFailures+1 {
		t.Error("not each attempt was recorded once")
	}
}
