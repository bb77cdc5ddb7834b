package identity

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

func (f *people) alive(t Tokens) bool {
	f.t.Helper()
	_, err := f.AuthenticateToken(f.t.Context(), t.Access)
	if err != nil && !errors.Is(err, fault.Unauthenticated) {
		f.t.Error(err)
	}
	return err == nil
}

func TestASignInBeginsASession(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	tokens := f.signIn(" ADA@example.com", goodPassword)
	if !tokens.AccessExpires.Equal(f.time().Add(30*time.Minute)) || !tokens.RefreshExpires.Equal(f.time().Add(7*24*time.Hour)) {
		t.Error(tokens.AccessExpires, tokens.RefreshExpires)
	}
	c := f.caller(tokens)
	if c.Tenant != u.Tenant || c.Kind != authz.User || c.ID != u.ID || c.ReadOnly ||
		!slices.Equal(c.Scopes, authz.Owner.Scopes()) || !authz.ValidID("ses", c.Session) {
		t.Errorf("%+v", c)
	}
	f.advance(30*time.Minute - time.Second)
	if !f.alive(tokens) {
		t.Error("an access token ended early")
	}
	f.advance(time.Second)
	if f.alive(tokens) {
		t.Error("an access token is good for more than 30 minutes")
	}
}

func TestARefreshTokenCountsOnce(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	first := f.signIn("ada@example.com", goodPassword)
	bystander := f.signIn("ada@example.com", goodPassword)
	n := len(f.history(u.Tenant))
	f.advance(time.Hour)
	second, err := f.Refresh(t.Context(), stranger, first.Refresh)
	must(t, err)
	if f.caller(second).Session == "" || second.Refresh == first.Refresh || !second.RefreshExpires.Equal(first.RefreshExpires) {
		t.Fatal("the refresh did not go on with the session")
	}
	third, err := f.Refresh(t.Context(), stranger, second.Refresh)
	must(t, err)
	if _, err := f.Refresh(t.Context(), stranger, first.Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Fatal("a used token counts:", err)
	}
	if f.alive(third) {
		t.Error("the session outlived the reuse of its token")
	}
	if _, err := f.Refresh(t.Context(), stranger, third.Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Error("the newest token outlived the reuse of an old one:", err)
	}
	if _, err := f.Refresh(t.Context(), stranger, bystander.Refresh); err != nil {
		t.Error("another session ended too:", err)
	}
	f.recorded(u.Tenant, n, "SESSION_REFRESHED success", "SESSION_REFRESHED success", "SESSION_REFRESHED denied reused", "SESSION_REFRESHED success")
	if h := f.history(authz.SystemTenant); h[len(h)-1] != "SESSION_REFRESHED denied no_such_session" {
		t.Error(h)
	}
}

func TestOfAHundredRefreshesOneWinsAndTheSessionIsOver(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	tokens := f.signIn("ada@example.com", goodPassword)
	var won, lost atomic.Int64
	var winner atomic.Pointer[Tokens]
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			next, err := f.Refresh(t.Context(), stranger, tokens.Refresh)
			switch {
			case err == nil:
				won.Add(1)
				winner.Store(&next)
			case errors.Is(err, fault.Unauthenticated):
				lost.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 || lost.Load() != 99 {
		t.Fatalf("%d won, %d lost", won.Load(), lost.Load())
	}
	if f.alive(*winner.Load()) {
		t.Error("the family lives on")
	}
	if _, err := f.Refresh(t.Context(), stranger, winner.Load().Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Error(err)
	}
	if n := len(f.rows("session/")); n != 0 {
		t.Errorf("%d rows of a dead session", n)
	}
}

func TestWhatIsNoRefreshTokenIsRefused(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	tokens := f.signIn("ada@example.com", goodPassword)
	body := tokens.Refresh[len(refreshPrefix):]
	foreign, _, _ := f.newRefresh(nil)
	for _, bad := range []string{
		"", refreshPrefix, body, tokens.Refresh + "a", tokens.Refresh[:len(tokens.Refresh)-1],
		" " + tokens.Refresh, "lk_live_" + body, foreign, tokens.Access,
	} {
		if _, err := f.Refresh(t.Context(), stranger, bad); !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
	if _, err := f.Refresh(t.Context(), stranger, tokens.Refresh); err != nil {
		t.Error("what is not a token of it ended the session:", err)
	}
}

func TestASessionEndsSevenDaysAfterTheSignIn(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	tokens := f.signIn("ada@example.com", goodPassword)
	f.advance(7*24*time.Hour - 10*time.Minute)
	tokens, err := f.Refresh(t.Context(), stranger, tokens.Refresh)
	must(t, err)
	if !tokens.AccessExpires.Equal(tokens.RefreshExpires) {
		t.Error("an access token is promised beyond its session:", tokens.AccessExpires, tokens.RefreshExpires)
	}
	f.advance(10 * time.Minute)
	if f.alive(tokens) {
		t.Error("the access token outlived the session")
	}
	if _, err := f.Refresh(t.Context(), stranger, tokens.Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Error(err)
	}
	f.signIn("ada@example.com", goodPassword)
	if n := len(f.rows("session/row/")); n != 1 {
		t.Errorf("%d sessions are kept", n)
	}
}

// Failures on an address without an account do not hide failures on another address.
func TestAGuessIsInTheHistoryOfItsTenant(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	n := len(f.history(u.Tenant))
	for range 3 {
		for _, address := range []string{"nobody@example.com", "ada@example.com"} {
			_, _ = f.SignIn(t.Context(), stranger, address, secret.Bytes("wrong"))
		}
	}
	f.recorded(u.Tenant, n, "USER_SIGNED_IN denied wrong_credentials")
}

func TestSignInsAreRefusedAlike(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	f.register("slow@example.com")
	f.mails()
	for range freeFailures {
		_, _ = f.SignIn(t.Context(), stranger, "slow@example.com", secret.Bytes("wrong"))
	}
	cases := map[string][2]string{
		"unknown":          {"nobody@example.com", goodPassword},
		"wrong password":   {"ada@example.com", otherPassword},
		"empty password":   {"ada@example.com", ""},
		"huge password":    {"ada@example.com", string(make([]byte, 1<<20))},
		"slowed down":      {"slow@example.com", otherPassword},
		"slowed and right": {"slow@example.com", goodPassword},
		"no address":       {"ada", goodPassword},
		"empty address":    {"", goodPassword},
	}
	for range freeFailures {
		for _, c := range cases { // the first refusals of each kind in a minute are recorded
			_, _ = f.SignIn(t.Context(), stranger, c[0], secret.Bytes(c[1]))
		}
	}
	type work struct{ gets, updates int64 }
	var first *work
	for name, c := range cases {
		gets, updates := f.store.gets.Load(), f.store.updates.Load()
		_, err := f.SignIn(t.Context(), stranger, c[0], secret.Bytes(c[1]))
		if !errors.Is(err, fault.Unauthenticated) || err.Error() != errSignIn.Error() {
			t.Errorf("%s: %v", name, err)
		}
		did := work{f.store.gets.Load() - gets, f.store.updates.Load() - updates}
		if first == nil {
			first = &did
		}
		if did != *first || did.gets == 0 {
			t.Errorf("%s did %+v, another %+v", name, did, *first)
		}
	}
}

func TestAFailedSignInIsRecordedWhereItWasTried(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	n := len(f.history(u.Tenant))
	for range 3 {
		_, _ = f.SignIn(t.Context(), from("192.0.2.7"), "ada@example.com", secret.Bytes(otherPassword))
	}
	f.recorded(u.Tenant, n, "USER_SIGNED_IN denied wrong_credentials") // once a minute
	entries := f.entries(u.Tenant)
	for _, e := range entries {
		if e.EventType == audit.UserSignedIn && (e.Actor.Type != "stranger" || e.Actor.ID != "" || e.Resource.ID != "" || e.SourceIP != "192.0.2.7") {
			t.Errorf("%+v", e)
		}
	}
	n = len(f.history(authz.SystemTenant))
	_, _ = f.SignIn(t.Context(), from("192.0.2.8"), "nobody@example.com", secret.Bytes(otherPassword))
	f.recorded(authz.SystemTenant, n, "USER_SIGNED_IN denied wrong_credentials")
}

// However fast guesses come, the tenant's history shows that there were many. Guesses at an address
// without an account do the same work.
func TestFastGuessesLeaveASecondEntry(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	f.mails()
	var did []string
	for _, c := range []struct {
		email  string
		tenant authz.TenantID
	}{{"ada@example.com", u.Tenant}, {"nobody@example.com", authz.SystemTenant}} {
		n := len(f.history(c.tenant))
		var steps strings.Builder
		for i := range 12 {
			gets, updates, rows := f.store.gets.Load(), f.store.updates.Load(), len(f.rows("audit/entry/"))
			password := otherPassword
			if i == 10 {
				password = goodPassword
			}
			_, err := f.SignIn(t.Context(), stranger, c.email, secret.Bytes(password))
			if !errors.Is(err, fault.Unauthenticated) || err.Error() != errSignIn.Error() {
				t.Errorf("%s: %v", c.email, err)
			}
			entries := len(f.rows("audit/entry/")) - rows
			fmt.Fprintln(&steps, i, f.store.gets.Load()-gets, f.store.updates.Load()-updates, entries)
			if want := i == 0 || i == freeFailures-1; (entries == 1) != want || entries > 1 {
				t.Errorf("%s: guess %d left %d entries", c.email, i+1, entries)
			}
		}
		did = append(did, steps.String())
		f.recorded(c.tenant, n, "USER_SIGNED_IN denied wrong_credentials", "USER_SIGNED_IN denied slowed_down")
		f.advance(time.Minute)
		_, _ = f.SignIn(t.Context(), stranger, c.email, secret.Bytes(otherPassword))
		f.recorded(c.tenant, n+2, "USER_SIGNED_IN denied slowed_down")
	}
	if did[0] != did[1] {
		t.Errorf("for an account:\n%sand for nobody:\n%s", did[0], did[1])
	}
}

func TestGuessingSlowsAnAccountDown(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	f.register("bob@example.com")
	try := func(email, password string) bool {
		_, err := f.SignIn(t.Context(), stranger, email, secret.Bytes(password))
		if err != nil && !errors.Is(err, fault.Unauthenticated) {
			t.Fatal(err)
		}
		return err == nil
	}
	for i := range freeFailures {
		if try([]string{"ada@example.com", "ADA@example.com ", "ａｄａ@example.com"}[i%3], otherPassword) {
			t.Fatal("signed in with a wrong password")
		}
	}
	if try("ada@example.com", goodPassword) {
		t.Error("the right password counts while the account waits")
	}
	if !try("bob@example.com", goodPassword) {
		t.Error("another account waits too")
	}
	f.advance(time.Second)
	if !try("ada@example.com", goodPassword) {
		t.Error("a second after the fifth failure the right password is refused")
	}
	if try("ada@example.com", otherPassword) || !try("ada@example.com", goodPassword) {
		t.Error("a success does not begin anew")
	}
}

func TestSessionsAreListedAndEnded(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	first := f.signIn("ada@example.com", goodPassword)
	f.advance(time.Minute)
	second := f.signIn("ada@example.com", goodPassword)
	me := f.caller(second)
	n := len(f.history(u.Tenant))
	list, err := f.Sessions(t.Context(), me)
	must(t, err)
	if len(list) != 2 || list[0].Current || !list[1].Current || list[1].ID != me.Session || !list[0].CreatedAt.Before(list[1].CreatedAt) {
		t.Fatalf("%+v", list)
	}
	must(t, f.EndSession(t.Context(), me, list[0].ID))
	if f.alive(first) || !f.alive(second) {
		t.Error("not the session that was named ended")
	}
	f.register("eve@example.com")
	foreign := f.caller(f.signIn("eve@example.com", goodPassword)).Session
	for _, id := range []string{list[0].ID, authz.NewID("ses"), foreign, "", "ses_x", u.ID, "../" + me.Session} {
		if err := f.EndSession(t.Context(), me, id); !errors.Is(err, fault.NotFound) {
			t.Errorf("%q: %v", id, err)
		}
	}
	if list, _ = f.Sessions(t.Context(), me); len(list) != 1 {
		t.Error(list)
	}
	must(t, f.SignOut(t.Context(), me))
	if f.alive(second) {
		t.Error("signed out, and the access token still counts")
	}
	if _, err := f.Refresh(t.Context(), stranger, second.Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Error("signed out, and the refresh token still counts:", err)
	}
	denied := "SESSION_ENDED denied no_such_session"
	f.recorded(u.Tenant, n, "SESSION_LISTED success", "SESSION_ENDED success", denied, denied, denied, denied, denied, denied, denied,
		"SESSION_LISTED success", "USER_SIGNED_OUT success")
}

func TestARefreshTokenSignsOut(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	tokens := f.signIn("ada@example.com", goodPassword)
	n := len(f.history(u.Tenant))
	must(t, f.SignOutRefresh(t.Context(), stranger, tokens.Refresh))
	if f.alive(tokens) {
		t.Error("the session goes on")
	}
	if err := f.SignOutRefresh(t.Context(), stranger, tokens.Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Error(err)
	}
	f.recorded(u.Tenant, n, "USER_SIGNED_OUT success")
}

func TestAUserHasABoundedNumberOfSessions(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	l := f.login("ada@example.com")
	first, err := f.beginSession(t.Context(), stranger, l)
	must(t, err)
	for range maxSessions {
		f.advance(time.Second)
		_, err := f.beginSession(t.Context(), stranger, l)
		must(t, err)
	}
	if n := len(f.rows("session/row/")); n != maxSessions || len(f.rows("session/selector/")) != maxSessions {
		t.Errorf("%d sessions", n)
	}
	if f.alive(first) {
		t.Error("the oldest session was not the one to go")
	}
}

func TestAUserOfAnEndedTrialSignsInAndIsReadOnly(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	f.advance(14*24*time.Hour - time.Second)
	c := f.caller(f.signIn("ada@example.com", goodPassword))
	if c.ReadOnly {
		t.Error("read-only before the trial ended")
	}
	f.advance(time.Second)
	if c = f.caller(f.signIn("ada@example.com", goodPassword)); !c.ReadOnly {
		t.Error("the trial does not end")
	}
	if _, err := f.Invite(t.Context(), c.Principal, "bob@example.com", authz.Member); !errors.Is(err, fault.Forbidden) {
		t.Error(err)
	}
	must(t, f.SignOut(t.Context(), c))
}

// A session says what program used it last, and from where. Nothing is said of one that an earlier release wrote.
func TestASessionSaysWhereItIs(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	from := stranger
	from.SourceIP, from.Device = "192.0.2.7", "Firefox on Linux"
	tokens, err := f.SignIn(t.Context(), from, "ada@example.com", secret.Bytes(goodPassword))
	must(t, err)
	is := func(device, address string) {
		t.Helper()
		all, err := f.Sessions(t.Context(), f.caller(tokens))
		must(t, err)
		if len(all) != 1 || all[0].Device != device || all[0].Address != address {
			t.Errorf("%+v, want %q at %q", all, device, address)
		}
	}
	is("Firefox on Linux", "192.0.2.7")
	from.SourceIP, from.Device = "2001:db8::9", "curl"
	tokens, err = f.Refresh(t.Context(), from, tokens.Refresh)
	must(t, err)
	is("curl", "2001:db8::9")
	tokens, err = f.Refresh(t.Context(), authz.Principal{Tenant: authz.SystemTenant, Kind: authz.Stranger}, tokens.Refresh)
	must(t, err)
	is("", "")
	for _, row := range f.rows("session/row/") {
		if strings.Contains(string(row), "device") || strings.Contains(string(row), `"address"`) {
			t.Errorf("a row without both has other fields than those of earlier releases: %s", row)
		}
	}
}
