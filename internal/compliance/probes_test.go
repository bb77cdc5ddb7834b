package compliance

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

type probeCase struct {
	name string
	want Result
	tell func(*story)
}

func stateCase(name string, want Result, change func(*State)) probeCase {
	return probeCase{name, want, func(s *story) { s.assessed(change) }}
}

// stateCases are those of a probe of the state: what flips it, and the cases that
// all of them have.
func stateCases(own ...probeCase) []probeCase {
	return append(own,
		probeCase{"good", Pass, func(s *story) { s.assessed() }},
		probeCase{"not assessed yet", NoData, func(*story) {}},
		probeCase{"never assessed", Fail, func(s *story) { s.days(8).readLog() }},
		probeCase{"assessed long ago", Fail, func(s *story) { s.assessed().days(8).readLog() }},
	)
}

var probeCases = map[string][]probeCase{
	"credentials_current": {
		{"none", NotApplicable, func(*story) {}},
		{"fresh", Pass, func(s *story) { s.sealed("a", 30) }},
		{"on its last day", Pass, func(s *story) { s.sealed("a", 30).days(30).after(-time.Second).readLog() }},
		{"expired", Fail, func(s *story) { s.sealed("a", 30).sealed("b", 60).days(30).readLog() }},
		{"expired and renewed", Pass, func(s *story) { s.sealed("a", 30).days(40).renewed("a", 30) }},
		{"expired and deleted", NotApplicable, func(s *story) { s.sealed("a", 30).days(40).credential(audit.CredentialDeleted, audit.Success, "a") }},
		{"a renewal that was denied", Fail, func(s *story) { s.sealed("a", 30).days(40).credential(audit.CredentialReencrypted, audit.Denied, "a") }},
	},
	"credentials_renewed": {
		{"none", NotApplicable, func(*story) {}},
		{"in time", Pass, func(s *story) { s.sealed("a", 30).days(20).renewed("a", 30) }},
		{"overdue", Fail, func(s *story) { s.sealed("a", 30).days(28).readLog() }},
		{"not overdue yet", Pass, func(s *story) { s.sealed("a", 30).days(26).readLog() }},
		{"too late", Fail, func(s *story) { s.sealed("a", 30).days(31).renewed("a", 30) }},
		{"too late, long ago", Pass, func(s *story) { s.sealed("a", 30).days(31).renewed("a", 300).days(92).readLog() }},
	},
	"values_rotated": {
		{"none", NotApplicable, func(*story) {}},
		{"renewed, but the same values", Fail, func(s *story) { s.sealed("a", 300).days(200).renewed("a", 300).days(166).readLog() }},
		{"new values", Pass, func(s *story) {
			s.sealed("a", 300).days(200).version(audit.CredentialRotated, "a", 300).days(166).readLog()
		}},
	},
	"keys_rotated": {
		{"none", NotApplicable, func(*story) {}},
		{"within", Pass, func(s *story) { s.key(audit.KeyCreated, "k", 90).days(90).readLog() }},
		{"past", Fail, func(s *story) { s.key(audit.KeyCreated, "k", 90).days(92).readLog() }},
		{"rotated", Pass, func(s *story) { s.key(audit.KeyCreated, "k", 90).days(92).key(audit.KeyRotated, "k", 90) }},
		{"of entries that named no period", Fail, func(s *story) {
			s.tell(audit.KeyCreated, audit.Success, client, audit.Resource{Type: audit.KeyResource, ID: "k"}).days(92).readLog()
		}},
	},
	"key_periods": {
		{"none", NotApplicable, func(*story) {}},
		{"two years", Pass, func(s *story) { s.key(audit.KeyCreated, "k", 730) }},
		{"ten years", Fail, func(s *story) { s.key(audit.KeyCreated, "k", 3650) }},
	},
	"disposal_timely": {
		{"none", NotApplicable, func(*story) {}},
		{"kept too long", Fail, func(s *story) { s.sealed("a", 30).days(61).readLog() }},
		{"deleted", Pass, func(s *story) { s.sealed("a", 30).days(61).credential(audit.CredentialDeleted, audit.Success, "a") }},
		{"a former version that should have ended", Fail, func(s *story) {
			s.sealed("a", 30).version(audit.CredentialRotated, "a", 30, audit.AttributeOverlapUntil, s.in(time.Hour)).days(2).readLog()
		}},
		{"a former version that ended", Pass, func(s *story) {
			s.sealed("a", 30).version(audit.CredentialRotated, "a", 30, audit.AttributeOverlapUntil, s.in(time.Hour)).days(1)
			s.credential(audit.CredentialVersionEnded, audit.Success, "a").days(1).readLog()
		}},
	},
	"deletion_final": {
		{"none", NotApplicable, func(*story) {}},
		{"gone", Pass, func(s *story) { s.sealed("a", 30).credential(audit.CredentialDeleted, audit.Success, "a") }},
		{"read again", Fail, func(s *story) {
			s.sealed("a", 30).credential(audit.CredentialDeleted, audit.Success, "a").credential(audit.CredentialUnsealed, audit.Success, "a")
		}},
		{"sealed again", Pass, func(s *story) {
			s.sealed("a", 30).credential(audit.CredentialDeleted, audit.Success, "a").sealed("a", 30).credential(audit.CredentialUnsealed, audit.Success, "a")
		}},
	},
	"changes_versioned": {
		{"none", NotApplicable, func(*story) {}},
		{"one after the other", Pass, func(s *story) { s.sealed("a", 30).renewed("a", 30).version(audit.CredentialRotated, "a", 30) }},
		{"one is missing", Fail, func(s *story) { s.sealed("a", 30).versions["a"]++; s.renewed("a", 30) }},
		{"without a digest", Fail, func(s *story) { s.version(audit.CredentialSealed, "a", 30, audit.AttributeDigest, "") }},
	},
	"integrity_intact": {
		{"nothing opened", NotApplicable, func(*story) {}},
		{"whole", Pass, func(s *story) { s.used(audit.DataDecrypted, client) }},
		{"damaged", Fail, func(s *story) {
			s.used(audit.DataDecrypted, client).credential(audit.CredentialUnsealed, audit.Failure, "a", audit.AttributeReason, "integrity")
		}},
		{"damaged long ago", Pass, func(s *story) {
			s.credential(audit.CredentialUnsealed, audit.Failure, "a", audit.AttributeReason, "integrity").days(100).used(audit.DataDecrypted, client)
		}},
	},
	"api_keys_bounded": {
		{"none", NotApplicable, func(*story) {}},
		{"for ever", Fail, func(s *story) { s.issued("k", 0, "", authz.VaultRead).issued("l", 10, "", authz.VaultRead) }},
		{"for a year", Pass, func(s *story) { s.issued("k", 365, "", authz.VaultRead) }},
		{"expired", NotApplicable, func(s *story) { s.issued("k", 10, "", authz.VaultRead).days(10).readLog() }},
		{"went with its owner", NotApplicable, func(s *story) {
			s.issued("k", 0, "usr_x", authz.VaultRead).tell(audit.MemberRemoved, audit.Success, owner, audit.Resource{Type: audit.UserResource, ID: "usr_x"})
		}},
		{"beyond its owner's new role", NotApplicable, func(s *story) {
			s.issued("k", 0, "usr_x", authz.VaultRead).tell(audit.MemberChanged, audit.Success, owner, audit.Resource{Type: audit.UserResource, ID: "usr_x"}, "role", "auditor")
		}},
		{"within its owner's new role", Fail, func(s *story) {
			s.issued("k", 0, "usr_x", authz.AuditRead).tell(audit.MemberChanged, audit.Success, owner, audit.Resource{Type: audit.UserResource, ID: "usr_x"}, "role", "auditor")
		}},
	},
	"api_keys_rotated": {
		{"young", Pass, func(s *story) { s.issued("k", 0, "", authz.VaultRead).days(365).readLog() }},
		{"old", Fail, func(s *story) { s.issued("k", 0, "", authz.VaultRead).days(366).readLog() }},
	},
	"api_keys_used": {
		{"new", Pass, func(s *story) { s.issued("k", 0, "", authz.VaultRead) }},
		{"unused", Fail, func(s *story) { s.issued("k", 0, "", authz.VaultRead).days(91).readLog() }},
		{"used", Pass, func(s *story) {
			s.issued("k", 0, "", authz.VaultRead).days(91).used(audit.KeyListed, as(authz.APIKey, "k"))
		}},
		{"denied", Fail, func(s *story) {
			s.issued("k", 0, "", authz.VaultRead).days(91).tell(audit.KeyListed, audit.Denied, as(authz.APIKey, "k"), audit.Resource{Type: audit.KeyResource})
		}},
	},
	"least_privilege": {
		{"new", Pass, func(s *story) { s.issued("k", 0, "", authz.VaultRead, authz.VaultWrite) }},
		{"one of two", Fail, func(s *story) {
			s.issued("k", 0, "", authz.VaultRead, authz.VaultWrite).days(91).used(audit.CredentialUnsealed, as(authz.APIKey, "k"))
		}},
		{"all", Pass, func(s *story) {
			s.issued("k", 0, "", authz.VaultRead, authz.AuditRead).days(91).used(audit.CredentialUnsealed, as(authz.APIKey, "k"))
		}},
	},
	"duties_separated": {
		{"apart", Pass, func(s *story) { s.issued("k", 0, "", authz.VaultRead).issued("l", 0, "", authz.AccountAdmin) }},
		{"in one", Fail, func(s *story) { s.issued("k", 0, "", authz.VaultRead, authz.AccountAdmin) }},
	},
	"members_active": {
		{"none", NotApplicable, func(*story) {}},
		{"active", Pass, func(s *story) { s.registered().days(91).readLog() }},
		{"idle", Fail, func(s *story) { s.registered().days(91).used(audit.DataEncrypted, client) }},
		{"removed", NotApplicable, func(s *story) {
			s.registered().days(91).tell(audit.MemberRemoved, audit.Success, service, audit.Resource{Type: audit.UserResource, ID: owner.ID})
		}},
	},
	"email_verified": {
		{"none", NotApplicable, func(*story) {}},
		{"still has time", NoData, func(s *story) { s.registered().days(6).readLog() }},
		{"verified", Pass, func(s *story) { s.registered().verified().days(8).readLog() }},
		{"by a reset", Pass, func(s *story) { s.registered().user(audit.PasswordReset, owner.ID, "email_verified", "true") }},
		{"never", Fail, func(s *story) { s.registered().days(8).readLog() }},
	},
	"issuance_approved": {
		{"none", NotApplicable, func(*story) {}},
		{"by an owner", Pass, func(s *story) { s.issued("k", 0, "", authz.VaultRead) }},
		{"joined uninvited", Fail, func(s *story) { s.user(audit.MemberJoined, "usr_x", "role", "member") }},
		{"joined invited", Pass, func(s *story) {
			s.tell(audit.MemberInvited, audit.Success, owner, audit.Resource{Type: audit.InvitationResource, ID: "i"}).user(audit.MemberJoined, "usr_x", "invitation", "i")
		}},
	},
	"departed_locked_out": {
		{"none", NotApplicable, func(*story) {}},
		{"quiet", Pass, func(s *story) { s.revoked().days(1).readLog() }},
		{"in flight", Pass, func(s *story) { s.revoked().after(time.Second).used(audit.KeyListed, as(authz.APIKey, "k")) }},
		{"active", Fail, func(s *story) { s.revoked().days(1).used(audit.KeyListed, as(authz.APIKey, "k")) }},
		{"refused", Pass, func(s *story) {
			s.revoked().days(1).tell(audit.KeyListed, audit.Denied, as(authz.APIKey, "k"), audit.Resource{Type: audit.KeyResource})
		}},
		{"expired and active", Fail, func(s *story) {
			s.issued("k", 1, "", authz.VaultRead).days(2).used(audit.KeyListed, as(authz.APIKey, "k"))
		}},
	},
	"sign_in_failures_handled": {
		{"no members", NotApplicable, func(*story) {}},
		{"none", Pass, func(s *story) { s.registered() }},
		{"a few", Pass, func(s *story) { s.registered().failedSignIns(4).days(2).readLog() }},
		{"a few each hour", Pass, func(s *story) {
			s.registered().failedSignIns(4).after(2 * time.Hour).failedSignIns(4).days(2).readLog()
		}},
		{"many, within the day", NoData, func(s *story) { s.registered().failedSignIns(5).after(23 * time.Hour).readLog() }},
		{"many with a reaction, and again within the day", Pass, func(s *story) {
			s.registered().failedSignIns(5).reacted().failedSignIns(5).after(23 * time.Hour).readLog()
		}},
		{"many in a second", Fail, func(s *story) { s.registered().failedSignIns(1).slowedDown().days(2).readLog() }},
		{"many in a second, with a reaction", Pass, func(s *story) { s.registered().failedSignIns(1).slowedDown().slowedDown().reacted().days(2).readLog() }},
		{"many without a reaction", Fail, func(s *story) { s.registered().failedSignIns(5).days(2).readLog() }},
		{"many with one", Pass, func(s *story) { s.registered().failedSignIns(20).reacted().days(2).readLog() }},
		{"many with a late one", Fail, func(s *story) { s.registered().failedSignIns(5).days(2).reacted() }},
		{"long ago", Pass, func(s *story) { s.registered().failedSignIns(5).days(92).readLog() }},
		{"again after the reaction", Fail, func(s *story) { s.registered().failedSignIns(5).reacted().failedSignIns(5).days(2).readLog() }},
	},
	"log_reviewed": {
		{"not yet", NoData, func(s *story) { s.days(30).used(audit.KeyListed, client) }},
		{"never", Fail, func(s *story) { s.days(31).used(audit.KeyListed, client) }},
		{"by a member", Pass, func(s *story) { s.days(31).readLog() }},
		{"long ago", Fail, func(s *story) { s.readLog().days(32).used(audit.KeyListed, client) }},
		{"by the service itself", Fail, func(s *story) { s.days(31).used(audit.AuditRead, service) }},
		{"denied", Fail, func(s *story) {
			s.days(31).tell(audit.AuditRead, audit.Denied, owner, audit.Resource{Type: audit.LogResource})
		}},
	},
	"access_reviewed": {
		{"nobody has access", NotApplicable, func(*story) {}},
		{"not yet", NoData, func(s *story) { s.registered() }},
		{"never", Fail, func(s *story) { s.registered().days(91).readLog() }},
		{"members alone", Fail, func(s *story) { s.registered().issued("k", 0, "", authz.VaultRead).days(91).listed(audit.MemberListed) }},
		{"both", Pass, func(s *story) {
			s.registered().issued("k", 0, "", authz.VaultRead).days(91).listed(audit.MemberListed).listed(audit.APIKeyListed)
		}},
	},
	"denials_reviewed": {
		{"none", NotApplicable, func(*story) {}},
		{"still time", NoData, func(s *story) { s.denied().denied().days(7).used(audit.KeyListed, client) }},
		{"one in time, and for another is time", Pass, func(s *story) { s.denied().days(6).readLog().denied().days(6).used(audit.KeyListed, client) }},
		{"not", Fail, func(s *story) { s.denied().days(8).used(audit.KeyListed, client) }},
		{"in time", Pass, func(s *story) { s.denied().days(6).readLog().days(30).used(audit.KeyListed, client) }},
		{"late", Fail, func(s *story) { s.denied().days(8).readLog() }},
		{"late, long ago", NotApplicable, func(s *story) { s.denied().days(8).readLog().days(92).used(audit.KeyListed, client) }},
	},
	"failures_reviewed": {
		{"none", NotApplicable, func(s *story) { s.denied() }},
		{"not", Fail, func(s *story) {
			s.credential(audit.CredentialUnsealed, audit.Failure, "a").days(8).used(audit.KeyListed, client)
		}},
		{"still time", NoData, func(s *story) {
			s.credential(audit.CredentialUnsealed, audit.Failure, "a").days(6).used(audit.KeyListed, client)
		}},
		{"in time", Pass, func(s *story) { s.credential(audit.CredentialUnsealed, audit.Failure, "a").days(1).readLog() }},
	},
	"inventory_reviewed": {
		{"not yet", NoData, func(s *story) { s.days(365).readLog() }},
		{"never", Fail, func(s *story) { s.days(366).readLog() }},
		{"read", Pass, func(s *story) { s.days(100).used(audit.InventoryRead, owner).days(365).readLog() }},
		{"long ago", Fail, func(s *story) { s.days(100).used(audit.InventoryRead, owner).days(366).readLog() }},
		{"denied", Fail, func(s *story) {
			s.days(366).tell(audit.InventoryRead, audit.Denied, owner, audit.Resource{Type: audit.ComplianceResource})
		}},
	},
	"events_complete": {
		{"all", Pass, func(s *story) { s.readLog().failedSignIns(1) }},
		{"nobody", Fail, func(s *story) { s.used(audit.KeyListed, as(authz.APIKey, "")) }},
		{"nothing", Fail, func(s *story) { s.tell(audit.KeyListed, audit.Success, client, audit.Resource{}) }},
		{"no result", Fail, func(s *story) { s.tell(audit.KeyListed, "", client, audit.Resource{Type: audit.KeyResource}) }},
	},
	"assessed_daily": {
		{"not yet", NoData, func(*story) {}},
		{"not yet, but on demand", NoData, func(s *story) { s.after(time.Hour).assessed() }},
		{"never", Fail, func(s *story) { s.days(3).readLog() }},
		{"never but on demand", Fail, func(s *story) { s.days(3).assessed() }},
		{"today", Pass, func(s *story) { s.assessed().daily() }},
		{"long ago", Fail, func(s *story) { s.assessed().daily().days(3).readLog() }},
		{"long ago, and on demand today", Fail, func(s *story) { s.assessed().daily().days(3).assessed() }},
	},
	"keys_wrapped": stateCases(
		stateCase("a key management service", Pass, func(s *State) { s.Custody = CustodyKMS }),
		stateCase("development", Fail, func(s *State) { s.Custody = CustodyDevelopment })),
	"transport_encrypted": stateCases(
		stateCase("without the hybrid", Pass, func(s *State) { s.Transport = TransportTLS13 }),
		stateCase("a proxy", NotApplicable, func(s *State) { s.Transport = TransportTerminated }),
		stateCase("plain", Fail, func(s *State) { s.Transport = TransportPlaintext })),
	"transport_quantum_safe": stateCases(
		stateCase("without the hybrid", Fail, func(s *State) { s.Transport = TransportTLS13 }),
		stateCase("a proxy", NotApplicable, func(s *State) { s.Transport = TransportTerminated })),
	"suites_quantum_safe": stateCases(stateCase("without ML-KEM", Fail, func(s *State) { s.Suites = []string{"ML-DSA-65", "RSA"} })),
	"log_signed": stateCases(
		stateCase("batch", Pass, func(s *State) { s.Signing = "batch" }),
		stateCase("not", Fail, func(s *State) { s.Signing = "" })),
	"log_verified": stateCases(
		stateCase("off", Fail, func(s *State) { s.VerifyEvery = 0 }),
		stateCase("each week", Fail, func(s *State) { s.VerifyEvery = inDays(7) })),
	"log_anchored": stateCases(stateCase("not", Fail, func(s *State) { s.Anchored = false })),
	"log_retained": stateCases(
		stateCase("a year", Pass, func(s *State) { s.RetentionDays, s.Archive = 365, ArchiveNone }),
		stateCase("for ever", Pass, func(s *State) { s.RetentionDays, s.Archive = 0, ArchiveNone }),
		stateCase("archived", Pass, func(s *State) { s.RetentionDays = 30 }),
		stateCase("the archive is not read", Fail, func(s *State) { s.Archive = ArchiveUnreadable }),
		stateCase("and was not, with what is moved no more", Fail, func(s *State) { s.RetentionDays, s.Archive = 0, ArchiveUnreadable }),
		stateCase("less", Fail, func(s *State) { s.RetentionDays, s.Archive = 364, ArchiveNone })),
	"log_retained_long": stateCases(
		stateCase("six years", Pass, func(s *State) { s.RetentionDays, s.Archive = 2192, ArchiveNone }),
		stateCase("for ever", Pass, func(s *State) { s.RetentionDays, s.Archive = 0, ArchiveNone }),
		stateCase("the archive is not read", Fail, func(s *State) { s.Archive = ArchiveUnreadable }),
		stateCase("a year", Fail, func(s *State) { s.RetentionDays, s.Archive = 365, ArchiveNone })),
	"retention_set": stateCases(
		stateCase("for ever", Fail, func(s *State) { s.RetentionDays, s.Archive = 0, ArchiveNone }),
		stateCase("for ever, beside an archive", Fail, func(s *State) { s.RetentionDays = 0 }),
		stateCase("without an archive", Fail, func(s *State) { s.Archive = ArchiveNone }),
		stateCase("the archive is not read", Fail, func(s *State) { s.Archive = ArchiveUnreadable })),
	"log_online": stateCases(
		stateCase("three months", Pass, func(s *State) { s.RetentionDays = 90 }),
		stateCase("for ever", Pass, func(s *State) { s.RetentionDays, s.Archive = 0, ArchiveNone }),
		stateCase("a month, and an archive", Fail, func(s *State) { s.RetentionDays = 30 })),
	"clock_synchronised": stateCases(stateCase("not", Fail, func(s *State) { s.ClockSynchronised = false })),
	"sealing_key_current": stateCases(
		stateCase("past its lifetime", Fail, func(s *State) { s.SealingKeyCreated = s.SealingKeyCreated.AddDate(0, 0, -30) }),
		stateCase("never renewed", Fail, func(s *State) { s.SealingKeyLifetime = 0 }),
		stateCase("none", Fail, func(s *State) { s.SealingKeyCreated = time.Time{} })),
	"backup_recent": stateCases(
		stateCase("old", Fail, func(s *State) { s.LastBackup = s.LastBackup.AddDate(0, 0, -8) }),
		stateCase("none yet", NoData, func(s *State) { s.LastBackup = time.Time{} }),
		probeCase{"none at all", Fail, func(s *story) { s.days(8).assessed(func(s *State) { s.LastBackup = time.Time{} }) }}),
}

func (s *story) revoked() *story {
	return s.issued("k", 0, "", authz.VaultRead).tell(audit.APIKeyRevoked, audit.Success, owner, audit.Resource{Type: audit.APIKeyResource, ID: "k"})
}

func (s *story) reacted() *story {
	return s.after(time.Minute).tell(audit.PasswordChanged, audit.Success, owner, audit.Resource{Type: audit.UserResource, ID: owner.ID})
}

func (s *story) slowedDown() *story {
	return s.tell(audit.UserSignedIn, audit.Denied, stranger, audit.Resource{Type: audit.UserResource}, audit.AttributeReason, audit.ReasonSlowedDown)
}

func (s *story) denied() *story {
	return s.credential(audit.CredentialUnsealed, audit.Denied, "cred_x", audit.AttributeReason, "missing")
}

func TestProbesSayWhatHappened(t *testing.T) {
	for i := range probes {
		p := &probes[i]
		t.Run(p.name, func(t *testing.T) {
			seen := make(map[Result]bool)
			for _, c := range probeCases[p.name] {
				t.Run(c.name, func(t *testing.T) {
					s, e := pure(t)
					s.began()
					c.tell(s)
					got := p.run(e)
					seen[got.Result] = true
					if got.Result != c.want {
						t.Errorf("%s: %q, want %s", got.Result, got.Detail, c.want)
					}
					if got.Detail == "" || strings.HasSuffix(got.Detail, ".") || got.Title == "" || len(got.Evidence) > maxEvidence {
						t.Errorf("%+v", got)
					}
					if got.Result == Pass && got.Sample > 0 && len(got.Evidence) == 0 {
						t.Errorf("it passes by %d things and cites none", got.Sample)
					}
					if !slices.IsSortedFunc(got.Evidence, func(a, b Reference) int { return int(a.Sequence) - int(b.Sequence) }) {
						t.Errorf("the citations are not in order: %v", got.Evidence)
					}
				})
			}
			if !seen[Pass] || !seen[Fail] {
				t.Error("its cases do not show both that it can pass and that it can fail")
			}
		})
	}
	for name := range probeCases {
		if probeOf(name) == nil {
			t.Errorf("cases of %s, which is no probe", name)
		}
	}
}
