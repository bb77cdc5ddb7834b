// Package story describes a tenant's actions as a sequence of audit events, for tests of compliance
// evidence.
package story

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
)

const (
	Ours   = authz.TenantID("ten_aaaaaaaaaaaaaaaaaaaaaaaaaa")
	Theirs = authz.TenantID("ten_eeeeeeeeeeeeeeeeeeeeeeeeee")
)

var Start = time.Date(2026, 3, 2, 9, 0, 0, 0, time.UTC)

// Story records a tenant's actions as entries.
type Story struct {
	Clock  time.Time
	Record func(audit.Event)

	Versions map[string]int
	told     int // entries so far
}

func (s *Story) After(d time.Duration) *Story { s.Clock = s.Clock.Add(d); return s }
func (s *Story) Days(n int) *Story            { return s.After(time.Duration(n) * 24 * time.Hour) }

// EntryOf returns an unsigned entry like one of the log.
func EntryOf(e audit.Event, at time.Time, n uint64) *audit.Entry {
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

func As(kind authz.Kind, id string) authz.Principal {
	return authz.Principal{Tenant: Ours, Kind: kind, ID: id, RequestID: "req", SourceIP: "127.0.0.1", Scopes: authz.TenantScopes()}
}

var (
	Service  = As(authz.System, "latticekeep")
	Owner    = As(authz.User, "usr_owner")
	Client   = As(authz.APIKey, "key_client")
	Stranger = As(authz.Stranger, "")

	// Reviewer is a member who causes nothing that needs a review.
	Reviewer = As(authz.User, "usr_b")
)

func (s *Story) Tell(t audit.EventType, o audit.Outcome, p authz.Principal, r audit.Resource, attributes ...string) *Story {
	a := make(map[string]string)
	for i := 0; i+1 < len(attributes); i += 2 {
		a[attributes[i]] = attributes[i+1]
	}
	s.told++
	s.Record(audit.Event{Type: t, Outcome: o, Principal: p, Resource: r, Attributes: a})
	return s
}

func (s *Story) In(d time.Duration) string { return s.Clock.Add(d).UTC().Format(time.RFC3339Nano) }

func InDays(n int) time.Duration { return time.Duration(n) * 24 * time.Hour }

func (s *Story) Began() *Story {
	s.told = 0
	return s.Tell(audit.TenantCreated, audit.Success, Service, audit.Resource{Type: audit.TenantResource, ID: string(Ours)})
}

// Version records the next version of a credential.
func (s *Story) Version(t audit.EventType, id string, ttl int, more ...string) *Story {
	s.Versions[id]++
	return s.Tell(t, audit.Success, Client, audit.Resource{Type: audit.CredentialResource, ID: id}, append([]string{
		audit.AttributeVersion, strconv.Itoa(s.Versions[id]), audit.AttributeDigest, strings.Repeat("ab", 32),
		audit.AttributeExpiresAt, s.In(InDays(ttl)), audit.AttributeTTLDays, strconv.Itoa(ttl)}, more...)...)
}

func (s *Story) Sealed(id string, ttl int) *Story { return s.Version(audit.CredentialSealed, id, ttl) }

// Lasting records that a credential was sealed that never expires.
func (s *Story) Lasting(id string) *Story {
	return s.Version(audit.CredentialSealed, id, 0, audit.AttributeExpiresAt, "9999-12-31T23:59:59Z")
}

func (s *Story) Renewed(id string, ttl int) *Story {
	return s.Version(audit.CredentialReencrypted, id, ttl)
}

// Trashed records that a credential was put in the trash.
func (s *Story) Trashed(id string) *Story {
	return s.Version(audit.CredentialReencrypted, id, 0, audit.AttributeTrashed, "true")
}

func (s *Story) Credential(t audit.EventType, o audit.Outcome, id string, attributes ...string) *Story {
	return s.Tell(t, o, Client, audit.Resource{Type: audit.CredentialResource, ID: id}, attributes...)
}

func (s *Story) Key(t audit.EventType, id string, period int) *Story {
	return s.Tell(t, audit.Success, Client, audit.Resource{Type: audit.KeyResource, ID: id},
		audit.AttributeRotationDays, strconv.Itoa(period), audit.AttributeNextRotation, s.In(InDays(period)))
}

// Issued records a new API key. With 0 days it does not expire.
func (s *Story) Issued(id string, days int, user string, scopes ...authz.Scope) *Story {
	words := make([]string, len(scopes))
	for i, scope := range scopes {
		words[i] = string(scope)
	}
	attributes := []string{audit.AttributeScopes, strings.Join(words, " ")}
	if days > 0 {
		attributes = append(attributes, audit.AttributeExpiresAt, s.In(InDays(days)))
	}
	if user != "" {
		attributes = append(attributes, audit.AttributeUser, user)
	}
	return s.Tell(audit.APIKeyCreated, audit.Success, Owner, audit.Resource{Type: audit.APIKeyResource, ID: id}, attributes...)
}

func (s *Story) User(t audit.EventType, id string, attributes ...string) *Story {
	return s.Tell(t, audit.Success, As(authz.User, id), audit.Resource{Type: audit.UserResource, ID: id}, attributes...)
}

func (s *Story) Registered() *Story { return s.User(audit.UserRegistered, Owner.ID) }
func (s *Story) Verified() *Story   { return s.User(audit.EmailVerified, Owner.ID) }

// FailedSignIns records n failed sign-ins, one per minute.
func (s *Story) FailedSignIns(n int) *Story {
	for range n {
		s.After(time.Minute).Tell(audit.UserSignedIn, audit.Denied, Stranger, audit.Resource{Type: audit.UserResource}, audit.AttributeReason, "credentials")
	}
	return s
}

func (s *Story) ReadLog() *Story {
	return s.Tell(audit.AuditRead, audit.Success, Owner, audit.Resource{Type: audit.LogResource})
}

// Acknowledged records that the reviewer acknowledges all entries so far.
func (s *Story) Acknowledged() *Story { return s.AcknowledgedBy(Reviewer, 1, s.told) }

func (s *Story) AcknowledgedBy(p authz.Principal, from, to int) *Story {
	return s.Tell(audit.DenialsAcknowledged, audit.Success, p, audit.Resource{Type: audit.LogResource},
		compliance.AttributeFrom, strconv.Itoa(from), compliance.AttributeTo, strconv.Itoa(to))
}

// Reviewed records a review of access or of the inventory.
func (s *Story) Reviewed(t audit.EventType, p authz.Principal) *Story {
	return s.Tell(t, audit.Success, p, audit.Resource{Type: audit.ComplianceResource})
}

// Told returns the number of entries so far.
func (s *Story) Told() int { return s.told }

func (s *Story) Listed(t audit.EventType) *Story {
	return s.Tell(t, audit.Success, Owner, audit.Resource{Type: audit.UserResource})
}

func (s *Story) Used(t audit.EventType, p authz.Principal) *Story {
	return s.Tell(t, audit.Success, p, audit.Resource{Type: audit.DataResource})
}

// GoodState returns the state of a deployment without faults.
func (s *Story) GoodState() compliance.State {
	return compliance.State{
		Custody: compliance.CustodyLocal, RetentionDays: 400, Archive: compliance.ArchiveReadable, Transport: compliance.TransportTLS13Quantum, Signing: "entry", VerifyEvery: 24 * time.Hour, Anchored: true,
		LastBackup: s.Clock.Add(-time.Hour), SealingKeyCreated: s.Clock.AddDate(0, 0, -10), SealingKeyLifetime: InDays(30),
		ClockSynchronised: true, Suites: []string{"ML-KEM-768", "ML-DSA-65", "AES-256-GCM"},
	}
}

func (s *Story) Assessed(change ...func(*compliance.State)) *Story {
	state := s.GoodState()
	for _, c := range change {
		c(&state)
	}
	s.told++
	s.Record(audit.Event{
		Type: audit.ComplianceAssessed, Outcome: audit.Success, Principal: compliance.Assessor(Ours),
		Resource: audit.Resource{Type: audit.ComplianceResource}, Attributes: state.Attributes(),
	})
	return s
}

// Daily records the scheduled entry of all scores.
func (s *Story) Daily() *Story {
	return s.Tell(audit.ComplianceScored, audit.Success, compliance.Assessor(Ours), audit.Resource{Type: audit.ComplianceResource}, compliance.AttributeHead, "1")
}

// Good records three months of a careful tenant.
func (s *Story) Good() *Story {
	s.Began().Registered().After(time.Hour).Verified()
	s.Issued(Client.ID, 180, Owner.ID, authz.VaultRead, authz.VaultWrite, authz.KeysWrite, authz.CryptoEncrypt, authz.CryptoDecrypt)
	s.Sealed("cred_a", 60).Sealed("cred_b", 90).Sealed("cred_c", 30).Key(audit.KeyCreated, "ekey_a", 90)
	s.Tell(audit.MemberInvited, audit.Success, Owner, audit.Resource{Type: audit.InvitationResource, ID: "inv_b"}, "role", "auditor")
	s.After(time.Hour).User(audit.MemberJoined, "usr_b", "invitation", "inv_b", "role", "auditor")
	s.Credential(audit.CredentialUnsealed, audit.Success, "cred_a", audit.AttributeVersion, "1")
	s.Days(20).Renewed("cred_c", 30).Credential(audit.CredentialUnsealed, audit.Denied, "cred_x", audit.AttributeReason, "missing")
	s.Days(2).Acknowledged().FailedSignIns(6).After(2 * time.Hour)
	s.Tell(audit.PasswordChanged, audit.Success, Owner, audit.Resource{Type: audit.UserResource, ID: Owner.ID})
	s.Days(1).Acknowledged().Days(20).Credential(audit.CredentialDeleted, audit.Success, "cred_c").Version(audit.CredentialRotated, "cred_a", 60)
	s.Days(10).Issued("key_old", 30, Owner.ID, authz.VaultRead)
	s.Days(5).Tell(audit.APIKeyRevoked, audit.Success, Owner, audit.Resource{Type: audit.APIKeyResource, ID: "key_old"})
	s.Days(15).Key(audit.KeyRotated, "ekey_a", 90).Renewed("cred_b", 90).Used(audit.DataDecrypted, Client)
	s.User(audit.AccountRead, "usr_b").Reviewed(audit.AccessReviewed, Reviewer).Acknowledged()
	return s.Reviewed(audit.InventoryReviewed, Owner).Assessed().Daily().Used(audit.DataEncrypted, Client)
}

// Bad records three months of a careless tenant in a deployment with faults.
func (s *Story) Bad() *Story {
	s.Began().Registered()
	s.Issued(Client.ID, 0, Owner.ID, authz.AccountAdmin, authz.VaultRead, authz.VaultWrite, authz.CryptoSign)
	s.Sealed("cred_a", 30).Sealed("cred_b", 45).Key(audit.KeyCreated, "ekey_a", 30).Key(audit.KeyCreated, "ekey_b", 3650)
	s.Days(1).Credential(audit.CredentialUnsealed, audit.Denied, "cred_x", audit.AttributeReason, "missing")
	s.Credential(audit.CredentialUnsealed, audit.Failure, "cred_b", audit.AttributeReason, "integrity")
	s.Sealed("cred_d", 10).Credential(audit.CredentialDeleted, audit.Success, "cred_d").After(time.Hour)
	s.Credential(audit.CredentialUnsealed, audit.Success, "cred_d")
	s.Versions["cred_b"] = 7
	s.Days(60).Renewed("cred_b", 45).Issued("key_old", 0, "", authz.VaultRead)
	s.Tell(audit.APIKeyRevoked, audit.Success, Owner, audit.Resource{Type: audit.APIKeyResource, ID: "key_old"})
	s.Tell(audit.MemberJoined, audit.Success, As(authz.User, "usr_b"), audit.Resource{Type: audit.UserResource, ID: "usr_b"}, "role", "admin")
	s.After(time.Hour).Used(audit.DataDecrypted, As(authz.APIKey, "key_old")).FailedSignIns(8)
	return s.Days(40).Assessed(BadState).Used(audit.DataEncrypted, As(authz.ServiceAccount, "sa"))
}

func BadState(s *compliance.State) {
	*s = compliance.State{Custody: compliance.CustodyDevelopment, Transport: compliance.TransportPlaintext, Signing: "", RetentionDays: 30, Archive: compliance.ArchiveUnreadable, LastBackup: s.LastBackup.AddDate(0, -2, 0)}
}

func (s *Story) Revoked() *Story {
	return s.Issued("k", 0, "", authz.VaultRead).Tell(audit.APIKeyRevoked, audit.Success, Owner, audit.Resource{Type: audit.APIKeyResource, ID: "k"})
}

func (s *Story) Reacted() *Story {
	return s.After(time.Minute).Tell(audit.PasswordChanged, audit.Success, Owner, audit.Resource{Type: audit.UserResource, ID: Owner.ID})
}

func (s *Story) SlowedDown() *Story {
	return s.Tell(audit.UserSignedIn, audit.Denied, Stranger, audit.Resource{Type: audit.UserResource}, audit.AttributeReason, audit.ReasonSlowedDown)
}

func (s *Story) Denied() *Story {
	return s.Credential(audit.CredentialUnsealed, audit.Denied, "cred_x", audit.AttributeReason, "missing")
}
