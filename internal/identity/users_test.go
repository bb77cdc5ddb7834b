package identity

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// countedStore is a database that counts reads and writes.
type countedStore struct {
	*boundStore
	gets, updates atomic.Int64
	updated       chan struct{} // capacity 1
}

func (s *countedStore) View(ctx context.Context, fn func(store.Reader) error) error {
	return s.boundStore.View(ctx, func(r store.Reader) error { return fn(countedReader{r, s}) })
}

func (s *countedStore) Update(ctx context.Context, fn func(store.Tx) error) error {
	s.updates.Add(1)
	err := s.boundStore.Update(ctx, fn)
	select {
	case s.updated <- struct{}{}:
	default:
	}
	return err
}

type countedReader struct {
	store.Reader
	s *countedStore
}

func (r countedReader) Get(key []byte) ([]byte, error) {
	r.s.gets.Add(1)
	return r.Reader.Get(key)
}

func (r countedReader) Scan(rng store.Range, visit func(k, v []byte) bool) error {
	r.s.gets.Add(1)
	return r.Reader.Scan(rng, visit)
}

// people is a service on real parts, with the test's clock.
type people struct {
	*Service
	t     testing.TB
	log   *writer.Log
	store *countedStore

	mu    sync.Mutex
	clock time.Time
	sent  []mail.Envelope
}

func newPeople(t testing.TB) *people {
	t.Helper()
	return makePeople(t, false)
}

// inBothStores runs a test about changed rows on a store whose rows are held against the state, and on
// one whose rows are not yet.
func inBothStores(t *testing.T, test func(t *testing.T, f *people)) {
	t.Run("held against the state", func(t *testing.T) { test(t, makePeople(t, false)) })
	t.Run("not held against the state", func(t *testing.T) { test(t, makePeople(t, true)) })
}

func (f *people) commit(change func(tx store.Tx) error) {
	f.t.Helper()
	commit(f.t, f.Service, change)
}

// commit changes rows without the service, with an entry in the history of no tenant of the test.
func commit(t testing.TB, s *Service, change func(tx store.Tx) error) {
	t.Helper()
	e := systemEvent(audit.TenantListed, audit.TenantResource, "")
	e.Principal.Tenant = "ten_test"
	must(t, s.store.Update(t.Context(), func(tx store.Tx) error {
		_, err := s.guard.Append(tx, e)
		return errors.Join(change(tx), err)
	}))
}

func makePeople(t testing.TB, unbound bool) *people {
	t.Helper()
	dir := t.TempDir()
	f := &people{t: t, clock: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)}
	must(t, kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	must(t, err)
	s, log := openStore(t, dir, f.time, unbound)
	f.log, f.store = log, &countedStore{boundStore: s, updated: make(chan struct{}, 1)}
	f.Service, _, err = Open(t.Context(), f.store, f.log, guard.New(f.log), k, keyring.Config{CacheTTL: time.Hour, Now: f.time})
	must(t, err)
	return f
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (f *people) time() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.clock
}

func (f *people) advance(d time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clock = f.clock.Add(d)
}

const (
	goodPassword  = "correct horse battery"
	otherPassword = "staple, and something else"
)

var stranger = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.Stranger, RequestID: "req_1", SourceIP: "192.0.2.1"}

// from returns a stranger at its own source address, so its refusals are recorded.
func from(address string) authz.Principal {
	p := stranger
	p.SourceIP = address
	return p
}

func (f *people) register(email string) User {
	f.t.Helper()
	u, _, err := f.Register(f.t.Context(), stranger, email, secret.Bytes(goodPassword), "Example Ltd")
	must(f.t, err)
	return u
}

func (f *people) signIn(email, password string) Tokens {
	f.t.Helper()
	tokens, err := f.SignIn(f.t.Context(), stranger, email, secret.Bytes(password))
	must(f.t, err)
	return tokens
}

func (f *people) caller(t Tokens) Caller {
	f.t.Helper()
	c, err := f.AuthenticateToken(f.t.Context(), t.Access)
	must(f.t, err)
	return c
}

// verified registers a user, verifies its address and signs it in.
func (f *people) verified(email string) Caller {
	f.t.Helper()
	f.register(email)
	must(f.t, f.VerifyEmail(f.t.Context(), stranger, f.token(email)))
	return f.caller(f.signIn(email, goodPassword))
}

// Send implements [mail.Transport].
func (f *people) Send(_ context.Context, e mail.Envelope) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent = append(f.sent, e)
	return nil
}

// mails sends everything in the outbox and returns the mails since the previous call.
func (f *people) mails() []mail.Envelope {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f.Outbox().Run(ctx, f, mail.Options{PublicURL: "http://127.0.0.1:8200", From: "keeper@example.com"}); err != nil {
			f.t.Error(err)
		}
	})
	for len(f.rows("mail/")) > 0 {
		select {
		case <-f.store.updated:
		case <-ctx.Done():
			f.t.Fatal("mails are left in the outbox")
		}
	}
	cancel()
	wg.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() { f.sent = nil }()
	return f.sent
}

var mailedToken = regexp.MustCompile(`lk_[a-z]+_[a-z2-7]{52}`)

// token returns the token of the only waiting mail, which must be for this address.
func (f *people) token(to string) string {
	f.t.Helper()
	all := f.mails()
	if len(all) != 1 || all[0].To != to {
		f.t.Fatalf("%d mails, not one to %s", len(all), to)
	}
	token := mailedToken.FindString(all[0].Text)
	if token == "" {
		f.t.Fatal("no token in the mail")
	}
	return token
}

// rows returns the rows under a prefix.
func (f *people) rows(prefix string) map[string]string {
	f.t.Helper()
	all := make(map[string]string)
	must(f.t, f.store.raw.View(f.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(prefix)), func(k, v []byte) bool {
			all[string(k)] = string(v)
			return true
		})
	}))
	return all
}

// history returns a tenant's entries, oldest first, as type, outcome and reason.
func (f *people) history(tenant authz.TenantID) []string {
	f.t.Helper()
	entries := f.entries(tenant)
	var all []string
	for _, e := range entries {
		if e.EventType != audit.AuditRead {
			all = append(all, strings.Join(slices.DeleteFunc(
				[]string{string(e.EventType), string(e.Outcome), e.Attributes[audit.AttributeReason]},
				func(s string) bool { return s == "" }), " "))
		}
	}
	return all
}

func (f *people) entries(tenant authz.TenantID) []audit.Entry {
	f.t.Helper()
	auditor := authz.Principal{Tenant: tenant, Kind: authz.System, ID: "test", Scopes: []authz.Scope{authz.AuditRead}}
	entries, _, err := reader.New(f.log, guard.New(f.log)).Query(f.t.Context(), auditor, reader.Query{Limit: 1000})
	must(f.t, err)
	slices.Reverse(entries)
	return entries
}

// recorded checks the entries of a tenant after the first n, and returns how many entries there
// are.
func (f *people) recorded(tenant authz.TenantID, n int, want ...string) int {
	f.t.Helper()
	all := f.history(tenant)
	if got := all[n:]; !slices.Equal(got, want) {
		f.t.Errorf("recorded %q, want %q", got, want)
	}
	return len(all)
}

func TestRegistrationMakesTenantUserAndMailTogether(t *testing.T) {
	f := newPeople(t)
	u, tenant, err := f.Register(t.Context(), stranger, " Ada@Example.COM ", secret.Bytes(goodPassword), "Example Ltd")
	must(t, err)
	if u.Email != "ada@example.com" || u.Role != authz.Owner || u.EmailVerified || u.Tenant != tenant.ID || !authz.ValidID("usr", u.ID) {
		t.Fatalf("%+v", u)
	}
	if tenant.Name != "Example Ltd" || !tenant.TrialEnds.Equal(f.time().Add(14*24*time.Hour)) {
		t.Fatalf("%+v", tenant)
	}
	if _, err := f.keys.Current(t.Context(), tenant.ID); err != nil {
		t.Error("a tenant without keys:", err)
	}
	caller := f.caller(f.signIn("ada@example.com", goodPassword))
	token := f.token("ada@example.com")
	must(t, f.VerifyEmail(t.Context(), stranger, token))
	if err := f.VerifyEmail(t.Context(), stranger, token); !errors.Is(err, ErrTicket) {
		t.Error("a token counts twice:", err)
	}
	got, me, err := f.Account(t.Context(), caller)
	if err != nil || me == nil || !me.EmailVerified || me.ID != u.ID || got.ID != tenant.ID || got.Name != tenant.Name {
		t.Error(got, me, err)
	}
	f.recorded(tenant.ID, 0, "TENANT_CREATED success", "USER_REGISTERED success", "USER_SIGNED_IN success", "EMAIL_VERIFIED success", "ACCOUNT_READ success")
	for _, e := range f.entries(tenant.ID)[:3] {
		if e.RequestID != stranger.RequestID || e.SourceIP != stranger.SourceIP {
			t.Errorf("%s does not name its request", e.EventType)
		}
	}
	for _, e := range f.entries(tenant.ID)[1:5] {
		if e.Actor.ID != u.ID || e.Actor.Type != "user" {
			t.Errorf("%s was done by %+v", e.EventType, e.Actor)
		}
	}
	if _, err := verify.Store(t.Context(), f.store, verify.Options{}); err != nil {
		t.Error(err)
	}
}

func TestAnAddressBelongsToOneUser(t *testing.T) {
	f := newPeople(t)
	addresses := []string{"ada@example.com", "ADA@example.com", " ada@EXAMPLE.com", "ａｄａ@example.com"}
	var won, taken atomic.Int64
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			_, _, err := f.Register(t.Context(), stranger, addresses[i%len(addresses)], secret.Bytes(goodPassword), "Example Ltd")
			switch {
			case err == nil:
				won.Add(1)
			case errors.Is(err, fault.Conflict):
				taken.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 || taken.Load() != 11 {
		t.Fatalf("%d won, %d were refused", won.Load(), taken.Load())
	}
	if n := len(f.rows("user/row/")); n != 1 {
		t.Errorf("%d users", n)
	}
	if n := len(f.rows("tenant/ten_")); n != 1 {
		t.Errorf("%d tenants: what was refused left something", n)
	}
	if mails := f.mails(); len(mails) != 1 {
		t.Errorf("%d mails", len(mails))
	}
	if h := f.history(authz.SystemTenant); !slices.Contains(h, "USER_REGISTERED denied email_taken") {
		t.Error(h)
	}
}

func TestRegistrationRefusesWhatCannotBe(t *testing.T) {
	f := newPeople(t)
	before := len(f.history(authz.SystemTenant))
	for name, c := range map[string]struct{ email, password, tenant string }{
		"no address":     {"ada", goodPassword, "Example"},
		"short password": {"ada@example.com", "12345678901", "Example"},
		"long password":  {"ada@example.com", strings.Repeat("x", 1025), "Example"},
		"no name":        {"ada@example.com", goodPassword, ""},
		"long name":      {"ada@example.com", goodPassword, strings.Repeat("x", 256)},
	} {
		if _, _, err := f.Register(t.Context(), stranger, c.email, secret.Bytes(c.password), c.tenant); !errors.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	f.recorded(authz.SystemTenant, before) // nothing: the server that handles the request records it
	if n := len(f.rows("user/")) + len(f.rows("mail/")) + len(f.rows("ticket/")); n != 0 {
		t.Errorf("%d rows", n)
	}
}

func TestClosedRegistrationLetsNobodyIn(t *testing.T) {
	f := newPeople(t)
	f.CloseRegistration()
	before := len(f.history(authz.SystemTenant))
	for range 3 {
		_, _, err := f.Register(t.Context(), stranger, "ada@example.com", secret.Bytes(goodPassword), "Example")
		if !errors.Is(err, fault.Forbidden) {
			t.Fatal(err)
		}
	}
	f.recorded(authz.SystemTenant, before, "USER_REGISTERED denied registration_closed") // once a minute
}

func TestAnAPIKeyHasAnAccountToo(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	for _, p := range []authz.Principal{
		{Tenant: u.Tenant, Kind: authz.APIKey, ID: authz.NewID("key")},
		{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: authz.NewID("key")},
	} {
		tenant, user, err := f.Account(t.Context(), Caller{Principal: p})
		if err != nil || user != nil || tenant.ID != p.Tenant {
			t.Error(tenant, user, err)
		}
	}
}

// Actions of a user on its own account are refused to everyone else, and each refusal is recorded
// once.
func TestWhatIsAUsersOwnIsRefusedToKeys(t *testing.T) {
	f := newPeople(t)
	u := f.register("ada@example.com")
	key := Caller{Principal: authz.Principal{Tenant: u.Tenant, Kind: authz.APIKey, ID: authz.NewID("key"), Scopes: authz.TenantScopes()}}
	n := len(f.history(u.Tenant))
	for want, do := range map[string]func() error{
		"SESSION_LISTED denied missing_scope":         func() error { _, err := f.Sessions(t.Context(), key); return err },
		"SESSION_ENDED denied missing_scope":          func() error { return f.EndSession(t.Context(), key, authz.NewID("ses")) },
		"USER_SIGNED_OUT denied missing_scope":        func() error { return f.SignOut(t.Context(), key) },
		"VERIFICATION_REQUESTED denied missing_scope": func() error { return f.ResendVerification(t.Context(), key) },
		"PASSWORD_CHANGED denied missing_scope": func() error {
			return f.ChangePassword(t.Context(), key, secret.Bytes(goodPassword), secret.Bytes(otherPassword))
		},
	} {
		if err := do(); !errors.Is(err, fault.Forbidden) {
			t.Errorf("%s: %v", want, err)
		}
		n = f.recorded(u.Tenant, n, want)
	}
}

// The audit log contains nothing that a person typed or was mailed. The store contains only hashes
// of what signs somebody in.
func TestNothingSecretIsKept(t *testing.T) {
	f := newPeople(t)
	owner := f.verified("canary-owner@example.com")
	must(t, f.RequestPasswordReset(t.Context(), stranger, "canary-owner@example.com"))
	reset := f.token("canary-owner@example.com")
	invitation, err := f.Invite(t.Context(), owner.Principal, "canary-guest@example.com", authz.Member)
	must(t, err)
	invite := f.token("canary-guest@example.com")
	tokens := f.signIn("canary-owner@example.com", goodPassword)
	_, err = f.SignIn(t.Context(), from("192.0.2.9"), "canary-owner@example.com", secret.Bytes("canary-wrong-password"))
	if !errors.Is(err, fault.Unauthenticated) || strings.Contains(err.Error(), "canary") {
		t.Error(err)
	}
	must(t, f.RevokeInvitation(t.Context(), owner.Principal, invitation.ID))

	for k, v := range f.rows("audit/") {
		for _, secretText := range []string{"canary", goodPassword, "Example Ltd", reset, invite, tokens.Refresh, tokens.Access} {
			if strings.Contains(k+v, secretText) {
				t.Errorf("%.8q is in the audit log", secretText)
			}
		}
	}
	all := f.rows("")
	for k, v := range all {
		for _, token := range []string{reset, invite, tokens.Refresh, tokens.Access, goodPassword, "canary-wrong-password"} {
			// Only the prefix is cut. A cut at every "_" would leave the short end of an access
			// token, which can be anywhere.
			if body := regexp.MustCompile(`^lk_[a-z]+_`).ReplaceAllString(token, ""); strings.Contains(k+v, body) {
				t.Errorf("%.8q lies under %q", token, k)
			}
		}
		if strings.Contains(k, "canary") {
			t.Errorf("an address is in the key %q", k)
		}
	}
	if len(all) == 0 || len(slices.Collect(maps.Keys(f.rows("audit/")))) == 0 {
		t.Error("nothing was looked at")
	}
}

// An attacker who can write the database must not become an owner.
func TestAUsersRowsCannotBeRewritten(t *testing.T) {
	inBothStores(t, testAUsersRowsCannotBeRewritten)
}

func testAUsersRowsCannotBeRewritten(t *testing.T, f *people) {
	owner := f.verified("ada@example.com")
	guest := f.join(owner, "bob@example.com", authz.Member)
	tokens := f.signIn("bob@example.com", goodPassword)
	theirs := string(userKey(account{guest.Tenant, guest.ID}))
	rows := f.rows("user/row/")
	for name, forged := range map[string]string{
		"another role":  strings.Replace(rows[theirs], `"member"`, `"owner"`, 1),
		"another's row": rows[string(userKey(accountOf(owner.Principal)))],
		"no MAC":        rows[theirs][32:],
	} {
		f.store.tamper(t, func(tx store.Tx) error { return tx.Put([]byte(theirs), []byte(forged)) })
		if c, err := f.AuthenticateToken(t.Context(), tokens.Access); !f.store.isChanged(err) || c.Tenant != "" {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
}

func (f *people) login(email string) (l login) {
	f.t.Helper()
	must(f.t, f.store.View(f.t.Context(), func(r store.Reader) (err error) {
		l, err = f.findLogin(r, email)
		return err
	}))
	return l
}

// join invites a user and accepts the invitation.
func (f *people) join(by Caller, email string, role authz.Role) User {
	f.t.Helper()
	f.advance(time.Second) // members are listed in the order of joining
	_, err := f.Invite(f.t.Context(), by.Principal, email, role)
	must(f.t, err)
	u, _, err := f.AcceptInvitation(f.t.Context(), stranger, f.token(email), secret.Bytes(goodPassword))
	must(f.t, err)
	return u
}
