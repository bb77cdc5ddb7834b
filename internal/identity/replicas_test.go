package identity

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// replica returns another service on the same store, whose clock is ahead by the given time. It
// shares no memory with the first one.
func (f *people) replica(ahead time.Duration) *Service {
	now := func() time.Time { return f.time().Add(ahead) }
	return newParts(f.store, f.guard, f.keys, now)
}

// What one replica does takes effect at the other from its next request on, because no permission
// is kept in memory.
func TestWhatOneReplicaDoesCountsAtTheOtherAtOnce(t *testing.T) {
	f := newPeople(t)
	other := f.replica(0)
	owner := f.verified("ada@example.com")
	bob := f.join(owner, "bob@example.com", authz.Member)
	tokens := f.signIn("bob@example.com", goodPassword)
	at := func() (Caller, error) { return other.AuthenticateToken(t.Context(), tokens.Access) }

	if c, err := at(); err != nil || !c.May(authz.SealCredential) {
		t.Fatal("a session of one replica is none at the other:", err)
	}
	_, err := f.ChangeMember(t.Context(), owner.Principal, bob.ID, authz.Auditor)
	must(t, err)
	if c, err := at(); err != nil || c.May(authz.SealCredential) {
		t.Error("the previous role still counts:", err)
	}
	refreshed, err := other.Refresh(t.Context(), stranger, tokens.Refresh)
	must(t, err)
	if _, err := f.Refresh(t.Context(), stranger, tokens.Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Error("a refresh token is used twice:", err)
	}
	if _, err := at(); !errors.Is(err, fault.Unauthenticated) {
		t.Error("the session whose token was copied goes on:", err)
	}
	if _, err := other.Refresh(t.Context(), stranger, refreshed.Refresh); !errors.Is(err, fault.Unauthenticated) {
		t.Error(err)
	}
	tokens = f.signIn("bob@example.com", goodPassword)
	caller, err := at()
	must(t, err)
	must(t, f.SignOut(t.Context(), caller))
	if _, err := at(); !errors.Is(err, fault.Unauthenticated) {
		t.Error("signed out, and still in:", err)
	}

	made, key, err := f.CreateAPIKey(t.Context(), owner.Principal, APIKeyRequest{Name: "ci", Scopes: []authz.Scope{authz.VaultRead}})
	must(t, err)
	if _, err := other.Authenticate(t.Context(), key); err != nil {
		t.Error("a new key is none at the other:", err)
	}
	must(t, f.RevokeAPIKey(t.Context(), owner.Principal, made.ID))
	if _, err := other.Authenticate(t.Context(), key); !errors.Is(err, fault.Unauthenticated) {
		t.Error("a revoked key still counts:", err)
	}

	f.advance(trialPeriod)
	signedIn := f.signIn("ada@example.com", goodPassword)
	if c, err := other.AuthenticateToken(t.Context(), signedIn.Access); err != nil || !c.ReadOnly {
		t.Fatal(err)
	}
	_, err = f.ActivateTenant(t.Context(), operator(), owner.Tenant)
	must(t, err)
	_, err = f.LimitTenant(t.Context(), operator(), owner.Tenant, Limits{V2: 7})
	must(t, err)
	if c, err := other.AuthenticateToken(t.Context(), signedIn.Access); err != nil || c.ReadOnly || c.Limits.V2 != 7 {
		t.Error("an activation or a limit does not count:", err)
	}
}

// With clocks three minutes apart everything works. Expiry follows the clock of the replica that
// gets the request.
func TestReplicasWhoseClocksAreApartTakeWhatTheOtherGave(t *testing.T) {
	for _, ahead := range []time.Duration{3 * time.Minute, -3 * time.Minute} {
		f := newPeople(t)
		other := f.replica(ahead)
		owner := f.verified("ada@example.com")
		tokens := f.signIn("ada@example.com", goodPassword)
		if _, err := other.AuthenticateToken(t.Context(), tokens.Access); err != nil {
			t.Errorf("%v: an access token: %v", ahead, err)
		}
		refreshed, err := other.Refresh(t.Context(), stranger, tokens.Refresh)
		must(t, err)
		f.caller(refreshed)
		must(t, f.RequestPasswordReset(t.Context(), stranger, "ada@example.com"))
		must(t, other.ResetPassword(t.Context(), stranger, f.token("ada@example.com"), secret.Bytes(otherPassword)))
		f.signIn("ada@example.com", otherPassword)
		_, key, err := f.CreateAPIKey(t.Context(), owner.Principal, APIKeyRequest{Name: "ci", Scopes: []authz.Scope{authz.VaultRead}, ExpiresInDays: 1})
		must(t, err)
		if _, err := other.Authenticate(t.Context(), key); err != nil {
			t.Errorf("%v: an API key: %v", ahead, err)
		}
		f.fails(freeFailures+1, f.emailHash("ada@example.com")) // the wait is two seconds, plus the time by which this clock is behind
		f.advance(2*time.Second + max(0, -ahead))
		if _, err := other.SignIn(t.Context(), stranger, "ada@example.com", secret.Bytes(otherPassword)); err != nil {
			t.Errorf("%v: after the wait: %v", ahead, err)
		}
	}
}

func TestTheLastUseOfAKeyOnlyMovesForward(t *testing.T) {
	f := newPeople(t)
	other := f.replica(-3 * time.Minute)
	_, admin := f.newTenantOf("Example Ltd")
	_, key, err := f.CreateAPIKey(t.Context(), admin, APIKeyRequest{Name: "ci", Scopes: []authz.Scope{authz.VaultRead}})
	must(t, err)
	used := f.time()
	for _, s := range []*Service{f.Service, other} {
		_, err := s.Authenticate(t.Context(), key)
		must(t, err)
		must(t, s.FlushLastUsed(t.Context()))
		list, err := s.APIKeys(t.Context(), admin)
		must(t, err)
		if !list[len(list)-1].LastUsedAt.Equal(used) {
			t.Error(list[len(list)-1].LastUsedAt, used)
		}
	}
}

// Replicas that start together on an empty database make one deployment.
func TestReplicasThatStartTogetherMakeOneDeployment(t *testing.T) {
	dir := t.TempDir()
	must(t, kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	must(t, err)
	s, log := openStore(t, dir, time.Now, false)

	// The first replica has found the database empty, and then the other one is faster.
	overtaking := &overtaken{boundStore: s}
	overtaking.by = func() {
		_, _, err := Open(t.Context(), s, log, guard.New(log), k, keyring.Config{CacheTTL: time.Minute})
		must(t, err)
	}
	first, keys, err := Open(t.Context(), overtaking, log, guard.New(log), k, keyring.Config{CacheTTL: time.Minute})
	must(t, err)
	second, again, err := Open(t.Context(), s, log, guard.New(log), k, keyring.Config{CacheTTL: time.Minute})
	must(t, err)
	if keys.ChainID() != again.ChainID() || keys.Identity().ID() != again.Identity().ID() {
		t.Fatal("two deployments")
	}
	sealing, err := keys.SealingKeys(t.Context())
	must(t, err)
	if len(sealing) != 1 {
		t.Error(len(sealing), "sealing keys")
	}

	// Both replicas make the system key and deliver it to one place.
	var mu sync.Mutex
	var delivered []string
	deliver := func(key string) error {
		mu.Lock()
		defer mu.Unlock()
		if len(delivered) > 0 {
			return errors.New("there is one already")
		}
		delivered = append(delivered, key)
		return nil
	}
	var wg sync.WaitGroup
	for _, s := range []*Service{first, second} {
		wg.Go(func() { must(t, s.FirstSystemKey(t.Context(), deliver)) })
	}
	wg.Wait()
	if c, err := second.Authenticate(t.Context(), delivered[0]); err != nil || c.Tenant != authz.SystemTenant {
		t.Error("the delivered key does not work:", err)
	}
	if _, err := verify.Store(t.Context(), s, verify.Options{}); err != nil {
		t.Error(err)
	}
}

// If two keys are delivered to different places, one of them works and the other start fails.
func TestOneOfTwoFirstSystemKeysWorks(t *testing.T) {
	s := newService(t)
	var other string
	err := s.FirstSystemKey(t.Context(), func(string) error {
		return s.FirstSystemKey(t.Context(), func(key string) error { other = key; return nil })
	})
	if !errors.Is(err, fault.Conflict) {
		t.Error(err)
	}
	if _, err := s.Authenticate(t.Context(), other); err != nil {
		t.Error(err)
	}
}

// overtaken is a database on which another replica is faster, once.
type overtaken struct {
	*boundStore
	once sync.Once
	by   func()
}

// Update implements [store.Store].
func (s *overtaken) Update(ctx context.Context, fn func(store.Tx) error) error {
	s.once.Do(s.by)
	return s.boundStore.Update(ctx, fn)
}
