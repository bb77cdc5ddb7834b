package compliance

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

const (
	ours   = authz.TenantID("ten_aaaaaaaaaaaaaaaaaaaaaaaaaa")
	theirs = authz.TenantID("ten_eeeeeeeeeeeeeeeeeeeeeeeeee")
)

var start = time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)

// story tells what a tenant did, to whatever records it.
type story struct {
	clock  time.Time
	record func(audit.Event)

	versions map[string]int
}

func (s *story) after(d time.Duration) *story { s.clock = s.clock.Add(d); return s }
func (s *story) days(n int) *story            { return s.after(time.Duration(n) * 24 * time.Hour) }

// pure returns a story whose entries are folded at once, and the evidence.
func pure(t testing.TB) (*story, *evidence) {
	t.Helper()
	e := newEvidence()
	s := &story{clock: start, versions: make(map[string]int)}
	s.record = func(event audit.Event) {
		t.Helper()
		if err := e.add(entryOf(event, s.clock, uint64(e.Count)+1)); err != nil {
			t.Fatal(err)
		}
	}
	return s, e
}

// entryOf is an entry as the log would make it, unsigned.
func entryOf(e audit.Event, at time.Time, n uint64) *audit.Entry {
	a := &audit.Entry{
		Actor: audit.Actor{ID: e.Principal.ID, Type: string(e.Principal.Kind)}, Attributes: map[string]string{}, EventType: e.Type,
		Outcome: e.Outcome, Resource: e.Resource, TenantID: string(e.Principal.Tenant), TenantSequence: n, Sequence: 10 * n,
		Hash: fmt.Sprintf("%064x", n), KeyID: "kid", Timestamp: at.UTC().Format("2006-01-02T15:04:05.000000Z"),
	}
	for k, v := range e.Attributes {
		a.Attributes[k] = v
	}
	if n == 1 {
		a.Attributes["chain_id"], a.Attributes["public_key"] = "chain_test", "cHVibGlj"
	}
	return a
}

func as(kind authz.Kind, id string) authz.Principal {
	return authz.Principal{Tenant: ours, Kind: kind, ID: id, RequestID: "req", SourceIP: "127.0.0.1", Scopes: authz.TenantScopes()}
}

var (
	service  = as(authz.System, "latticekeep")
	owner    = as(authz.User, "usr_owner")
	client   = as(authz.APIKey, "key_client")
	stranger = as(authz.Stranger, "")
)

func (s *story) tell(t audit.EventType, o audit.Outcome, p authz.Principal, r audit.Resource, attributes ...string) *story {
	a := make(map[string]string)
	for i := 0; i+1 < len(attributes); i += 2 {
		a[attributes[i]] = attributes[i+1]
	}
	s.record(audit.Event{Type: t, Outcome: o, Principal: p, Resource: r, Attributes: a})
	return s
}

func (s *story) in(d time.Duration) string { return s.clock.Add(d).UTC().Format(time.RFC3339Nano) }

func inDays(n int) time.Duration { return time.Duration(n) * 24 * time.Hour }

func (s *story) began() *story {
	return s.tell(audit.TenantCreated, audit.Success, service, audit.Resource{Type: audit.TenantResource, ID: string(ours)})
}

// version records the next version of a credential.
func (s *story) version(t audit.EventType, id string, ttl int, more ...string) *story {
	s.versions[id]++
	return s.tell(t, audit.Success, client, audit.Resource{Type: audit.CredentialResource, ID: id}, append([]string{
		audit.AttributeVersion, strconv.Itoa(s.versions[id]), audit.AttributeDigest, strings.Repeat("ab", 32),
		audit.AttributeExpiresAt, s.in(inDays(ttl)), audit.AttributeTTLDays, strconv.Itoa(ttl)}, more...)...)
}

func (s *story) sealed(id string, ttl int) *story { return s.version(audit.CredentialSealed, id, ttl) }
func (s *story) renewed(id string, ttl int) *story {
	return s.version(audit.CredentialReencrypted, id, ttl)
}

func (s *story) credential(t audit.EventType, o audit.Outcome, id string, attributes ...string) *story {
	return s.tell(t, o, client, audit.Resource{Type: audit.CredentialResource, ID: id}, attributes...)
}

func (s *story) key(t audit.EventType, id string, period int) *story {
	return s.tell(t, audit.Success, client, audit.Resource{Type: audit.KeyResource, ID: id},
		audit.AttributeRotationDays, strconv.Itoa(period), audit.AttributeNextRotation, s.in(inDays(period)))
}

// issued records a new API key; 0 days are no expiry.
func (s *story) issued(id string, days int, user string, scopes ...authz.Scope) *story {
	words := make([]string, len(scopes))
	for i, scope := range scopes {
		words[i] = string(scope)
	}
	attributes := []string{audit.AttributeScopes, strings.Join(words, " ")}
	if days > 0 {
		attributes = append(attributes, audit.AttributeExpiresAt, s.in(inDays(days)))
	}
	if user != "" {
		attributes = append(attributes, audit.AttributeUser, user)
	}
	return s.tell(audit.APIKeyCreated, audit.Success, owner, audit.Resource{Type: audit.APIKeyResource, ID: id}, attributes...)
}

func (s *story) user(t audit.EventType, id string, attributes ...string) *story {
	return s.tell(t, audit.Success, as(authz.User, id), audit.Resource{Type: audit.UserResource, ID: id}, attributes...)
}

func (s *story) registered() *story { return s.user(audit.UserRegistered, owner.ID) }
func (s *story) verified() *story   { return s.user(audit.EmailVerified, owner.ID) }

// failedSignIns are n in as many minutes.
func (s *story) failedSignIns(n int) *story {
	for range n {
		s.after(time.Minute).tell(audit.UserSignedIn, audit.Denied, stranger, audit.Resource{Type: audit.UserResource}, audit.AttributeReason, "credentials")
	}
	return s
}

func (s *story) readLog() *story {
	return s.tell(audit.AuditRead, audit.Success, owner, audit.Resource{Type: audit.LogResource})
}

func (s *story) listed(t audit.EventType) *story {
	return s.tell(t, audit.Success, owner, audit.Resource{Type: audit.UserResource})
}

func (s *story) used(t audit.EventType, p authz.Principal) *story {
	return s.tell(t, audit.Success, p, audit.Resource{Type: audit.DataResource})
}

// state of a deployment in which nothing is amiss.
func (s *story) goodState() State {
	return State{
		Custody: CustodyLocal, RetentionDays: 400, Archive: ArchiveReadable, Transport: TransportTLS13Quantum, Signing: "entry", VerifyEvery: 24 * time.Hour, Anchored: true,
		LastBackup: s.clock.Add(-time.Hour), SealingKeyCreated: s.clock.AddDate(0, 0, -10), SealingKeyLifetime: inDays(30),
		ClockSynchronised: true, Suites: []string{"ML-KEM-768", "ML-DSA-65", "AES-256-GCM"},
	}
}

func (s *story) assessed(change ...func(*State)) *story {
	state := s.goodState()
	for _, c := range change {
		c(&state)
	}
	s.record(audit.Event{
		Type: audit.ComplianceAssessed, Outcome: audit.Success, Principal: assessor(ours),
		Resource: audit.Resource{Type: audit.ComplianceResource}, Attributes: state.attributes(),
	})
	return s
}

// daily is the scheduled entry of all scores.
func (s *story) daily() *story {
	return s.tell(audit.ComplianceScored, audit.Success, assessor(ours), audit.Resource{Type: audit.ComplianceResource}, attributeHead, "1")
}

// good is a quarter of a tenant that looks after things.
func (s *story) good() *story {
	s.began().registered().after(time.Hour).verified()
	s.issued(client.ID, 180, owner.ID, authz.VaultRead, authz.VaultWrite, authz.KeysWrite, authz.CryptoEncrypt, authz.CryptoDecrypt)
	s.sealed("cred_a", 60).sealed("cred_b", 90).sealed("cred_c", 30).key(audit.KeyCreated, "ekey_a", 90)
	s.tell(audit.MemberInvited, audit.Success, owner, audit.Resource{Type: audit.InvitationResource, ID: "inv_b"}, "role", "member")
	s.after(time.Hour).user(audit.MemberJoined, "usr_b", "invitation", "inv_b", "role", "member")
	s.credential(audit.CredentialUnsealed, audit.Success, "cred_a", audit.AttributeVersion, "1")
	s.days(20).renewed("cred_c", 30).credential(audit.CredentialUnsealed, audit.Denied, "cred_x", audit.AttributeReason, "missing")
	s.days(2).readLog().failedSignIns(6).after(2 * time.Hour)
	s.tell(audit.PasswordChanged, audit.Success, owner, audit.Resource{Type: audit.UserResource, ID: owner.ID})
	s.days(1).readLog().days(20).credential(audit.CredentialDeleted, audit.Success, "cred_c").version(audit.CredentialRotated, "cred_a", 60)
	s.days(10).issued("key_old", 30, owner.ID, authz.VaultRead)
	s.days(5).tell(audit.APIKeyRevoked, audit.Success, owner, audit.Resource{Type: audit.APIKeyResource, ID: "key_old"})
	s.days(15).key(audit.KeyRotated, "ekey_a", 90).renewed("cred_b", 90).used(audit.DataDecrypted, client)
	s.user(audit.AccountRead, "usr_b").listed(audit.MemberListed).listed(audit.APIKeyListed).readLog()
	return s.used(audit.InventoryRead, owner).assessed().daily().used(audit.DataEncrypted, client)
}

// bad is a quarter of one that does not, in a deployment that is no better.
func (s *story) bad() *story {
	s.began().registered()
	s.issued(client.ID, 0, owner.ID, authz.AccountAdmin, authz.VaultRead, authz.VaultWrite, authz.CryptoSign)
	s.sealed("cred_a", 30).sealed("cred_b", 45).key(audit.KeyCreated, "ekey_a", 30).key(audit.KeyCreated, "ekey_b", 3650)
	s.days(1).credential(audit.CredentialUnsealed, audit.Denied, "cred_x", audit.AttributeReason, "missing")
	s.credential(audit.CredentialUnsealed, audit.Failure, "cred_b", audit.AttributeReason, "integrity")
	s.sealed("cred_d", 10).credential(audit.CredentialDeleted, audit.Success, "cred_d").after(time.Hour)
	s.credential(audit.CredentialUnsealed, audit.Success, "cred_d")
	s.versions["cred_b"] = 7
	s.days(60).renewed("cred_b", 45).issued("key_old", 0, "", authz.VaultRead)
	s.tell(audit.APIKeyRevoked, audit.Success, owner, audit.Resource{Type: audit.APIKeyResource, ID: "key_old"})
	s.tell(audit.MemberJoined, audit.Success, as(authz.User, "usr_b"), audit.Resource{Type: audit.UserResource, ID: "usr_b"}, "role", "admin")
	s.after(time.Hour).used(audit.DataDecrypted, as(authz.APIKey, "key_old")).failedSignIns(8)
	return s.days(40).assessed(badState).used(audit.DataEncrypted, as(authz.ServiceAccount, "sa"))
}

func badState(s *State) {
	*s = State{Custody: CustodyDevelopment, Transport: TransportPlaintext, Signing: "", RetentionDays: 30, Archive: ArchiveUnreadable, LastBackup: s.LastBackup.AddDate(0, -2, 0)}
}
