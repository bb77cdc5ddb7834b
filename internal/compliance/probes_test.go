package compliance_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/test/story"
)

type probeCase struct {
	name string
	want compliance.Result
	tell func(*story.Story)
}

func stateCase(name string, want compliance.Result, change func(*compliance.State)) probeCase {
	return probeCase{name, want, func(s *story.Story) { s.Assessed(change) }}
}

// stateCases returns the cases of a probe of the state: its own, and those common to all such
// probes.
func stateCases(own ...probeCase) []probeCase {
	return append(own,
		probeCase{"good", compliance.Pass, func(s *story.Story) { s.Assessed() }},
		probeCase{"not assessed yet", compliance.NoData, func(*story.Story) {}},
		probeCase{"never assessed", compliance.Fail, func(s *story.Story) { s.Days(8).ReadLog() }},
		probeCase{"assessed long ago", compliance.Fail, func(s *story.Story) { s.Assessed().Days(8).ReadLog() }},
	)
}

var probeCases = map[string][]probeCase{
	"credentials_current": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"fresh", compliance.Pass, func(s *story.Story) { s.Sealed("a", 30) }},
		{"on its last day", compliance.Pass, func(s *story.Story) { s.Sealed("a", 30).Days(30).After(-time.Second).ReadLog() }},
		{"expired", compliance.Fail, func(s *story.Story) { s.Sealed("a", 30).Sealed("b", 60).Days(30).ReadLog() }},
		{"expired and renewed", compliance.Pass, func(s *story.Story) { s.Sealed("a", 30).Days(40).Renewed("a", 30) }},
		{"expired and deleted", compliance.NotApplicable, func(s *story.Story) {
			s.Sealed("a", 30).Days(40).Credential(audit.CredentialDeleted, audit.Success, "a")
		}},
		{"never expires", compliance.NotApplicable, func(s *story.Story) { s.Lasting("a").Days(300).ReadLog() }},
		{"never expires, beside one that did", compliance.Fail, func(s *story.Story) { s.Lasting("a").Sealed("b", 30).Days(30).ReadLog() }},
		{"in the trash", compliance.Pass, func(s *story.Story) { s.Sealed("b", 300).Sealed("a", 30).Trashed("a").Days(20).ReadLog() }},
		{"a renewal that was denied", compliance.Fail, func(s *story.Story) {
			s.Sealed("a", 30).Days(40).Credential(audit.CredentialReencrypted, audit.Denied, "a")
		}},
	},
	"credentials_renewed": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"in time", compliance.Pass, func(s *story.Story) { s.Sealed("a", 30).Days(20).Renewed("a", 30) }},
		{"never expires", compliance.NotApplicable, func(s *story.Story) { s.Lasting("a").Days(300).ReadLog() }},
		{"overdue", compliance.Fail, func(s *story.Story) { s.Sealed("a", 30).Days(28).ReadLog() }},
		{"not overdue yet", compliance.Pass, func(s *story.Story) { s.Sealed("a", 30).Days(26).ReadLog() }},
		{"too late", compliance.Fail, func(s *story.Story) { s.Sealed("a", 30).Days(31).Renewed("a", 30) }},
		{"out of the trash", compliance.Pass, func(s *story.Story) { s.Sealed("a", 300).Trashed("a").Days(20).Renewed("a", 300) }},
		{"too late, long ago", compliance.Pass, func(s *story.Story) { s.Sealed("a", 30).Days(31).Renewed("a", 300).Days(92).ReadLog() }},
	},
	"values_rotated": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"renewed, but the same values", compliance.Fail, func(s *story.Story) { s.Sealed("a", 300).Days(200).Renewed("a", 300).Days(166).ReadLog() }},
		{"never expires, and a year old", compliance.Fail, func(s *story.Story) { s.Lasting("a").Days(366).ReadLog() }},
		{"new values", compliance.Pass, func(s *story.Story) {
			s.Sealed("a", 300).Days(200).Version(audit.CredentialRotated, "a", 300).Days(166).ReadLog()
		}},
	},
	"keys_rotated": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"within", compliance.Pass, func(s *story.Story) { s.Key(audit.KeyCreated, "k", 90).Days(90).ReadLog() }},
		{"past", compliance.Fail, func(s *story.Story) { s.Key(audit.KeyCreated, "k", 90).Days(92).ReadLog() }},
		{"rotated", compliance.Pass, func(s *story.Story) { s.Key(audit.KeyCreated, "k", 90).Days(92).Key(audit.KeyRotated, "k", 90) }},
		{"of entries that named no period", compliance.Fail, func(s *story.Story) {
			s.Tell(audit.KeyCreated, audit.Success, story.Client, audit.Resource{Type: audit.KeyResource, ID: "k"}).Days(92).ReadLog()
		}},
	},
	"key_periods": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"two years", compliance.Pass, func(s *story.Story) { s.Key(audit.KeyCreated, "k", 730) }},
		{"ten years", compliance.Fail, func(s *story.Story) { s.Key(audit.KeyCreated, "k", 3650) }},
	},
	"disposal_timely": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"in the trash for too long", compliance.Fail, func(s *story.Story) { s.Sealed("a", 30).Trashed("a").Days(31).ReadLog() }},
		{"kept too long", compliance.Fail, func(s *story.Story) { s.Sealed("a", 30).Days(61).ReadLog() }},
		{"deleted", compliance.Pass, func(s *story.Story) {
			s.Sealed("a", 30).Days(61).Credential(audit.CredentialDeleted, audit.Success, "a")
		}},
		{"a former version that should have ended", compliance.Fail, func(s *story.Story) {
			s.Sealed("a", 30).Version(audit.CredentialRotated, "a", 30, audit.AttributeOverlapUntil, s.In(time.Hour)).Days(2).ReadLog()
		}},
		{"a former version that ended", compliance.Pass, func(s *story.Story) {
			s.Sealed("a", 30).Version(audit.CredentialRotated, "a", 30, audit.AttributeOverlapUntil, s.In(time.Hour)).Days(1)
			s.Credential(audit.CredentialVersionEnded, audit.Success, "a").Days(1).ReadLog()
		}},
	},
	"deletion_final": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"gone", compliance.Pass, func(s *story.Story) { s.Sealed("a", 30).Credential(audit.CredentialDeleted, audit.Success, "a") }},
		{"read again", compliance.Fail, func(s *story.Story) {
			s.Sealed("a", 30).Credential(audit.CredentialDeleted, audit.Success, "a").Credential(audit.CredentialUnsealed, audit.Success, "a")
		}},
		{"sealed again", compliance.Pass, func(s *story.Story) {
			s.Sealed("a", 30).Credential(audit.CredentialDeleted, audit.Success, "a").Sealed("a", 30).Credential(audit.CredentialUnsealed, audit.Success, "a")
		}},
	},
	"changes_versioned": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"one after the other", compliance.Pass, func(s *story.Story) {
			s.Sealed("a", 30).Renewed("a", 30).Version(audit.CredentialRotated, "a", 30)
		}},
		{"one is missing", compliance.Fail, func(s *story.Story) { s.Sealed("a", 30).Versions["a"]++; s.Renewed("a", 30) }},
		{"without a digest", compliance.Fail, func(s *story.Story) { s.Version(audit.CredentialSealed, "a", 30, audit.AttributeDigest, "") }},
	},
	"integrity_intact": {
		{"nothing opened", compliance.NotApplicable, func(*story.Story) {}},
		{"whole", compliance.Pass, func(s *story.Story) { s.Used(audit.DataDecrypted, story.Client) }},
		{"damaged", compliance.Fail, func(s *story.Story) {
			s.Used(audit.DataDecrypted, story.Client).Credential(audit.CredentialUnsealed, audit.Failure, "a", audit.AttributeReason, "integrity")
		}},
		{"damaged long ago", compliance.Pass, func(s *story.Story) {
			s.Credential(audit.CredentialUnsealed, audit.Failure, "a", audit.AttributeReason, "integrity").Days(100).Used(audit.DataDecrypted, story.Client)
		}},
	},
	"api_keys_bounded": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"for ever", compliance.Fail, func(s *story.Story) { s.Issued("k", 0, "", authz.VaultRead).Issued("l", 10, "", authz.VaultRead) }},
		{"for a year", compliance.Pass, func(s *story.Story) { s.Issued("k", 365, "", authz.VaultRead) }},
		{"expired", compliance.NotApplicable, func(s *story.Story) { s.Issued("k", 10, "", authz.VaultRead).Days(10).ReadLog() }},
		{"went with its owner", compliance.NotApplicable, func(s *story.Story) {
			s.Issued("k", 0, "usr_x", authz.VaultRead).Tell(audit.MemberRemoved, audit.Success, story.Owner, audit.Resource{Type: audit.UserResource, ID: "usr_x"})
		}},
		{"beyond its owner's new role", compliance.NotApplicable, func(s *story.Story) {
			s.Issued("k", 0, "usr_x", authz.VaultRead).Tell(audit.MemberChanged, audit.Success, story.Owner, audit.Resource{Type: audit.UserResource, ID: "usr_x"}, "role", "auditor")
		}},
		{"within its owner's new role", compliance.Fail, func(s *story.Story) {
			s.Issued("k", 0, "usr_x", authz.AuditRead).Tell(audit.MemberChanged, audit.Success, story.Owner, audit.Resource{Type: audit.UserResource, ID: "usr_x"}, "role", "auditor")
		}},
	},
	"api_keys_rotated": {
		{"young", compliance.Pass, func(s *story.Story) { s.Issued("k", 0, "", authz.VaultRead).Days(365).ReadLog() }},
		{"old", compliance.Fail, func(s *story.Story) { s.Issued("k", 0, "", authz.VaultRead).Days(366).ReadLog() }},
	},
	"api_keys_used": {
		{"new", compliance.Pass, func(s *story.Story) { s.Issued("k", 0, "", authz.VaultRead) }},
		{"unused", compliance.Fail, func(s *story.Story) { s.Issued("k", 0, "", authz.VaultRead).Days(91).ReadLog() }},
		{"used", compliance.Pass, func(s *story.Story) {
			s.Issued("k", 0, "", authz.VaultRead).Days(91).Used(audit.KeyListed, story.As(authz.APIKey, "k"))
		}},
		{"denied", compliance.Fail, func(s *story.Story) {
			s.Issued("k", 0, "", authz.VaultRead).Days(91).Tell(audit.KeyListed, audit.Denied, story.As(authz.APIKey, "k"), audit.Resource{Type: audit.KeyResource})
		}},
	},
	"least_privilege": {
		{"new", compliance.Pass, func(s *story.Story) { s.Issued("k", 0, "", authz.VaultRead, authz.VaultWrite) }},
		{"one of two", compliance.Fail, func(s *story.Story) {
			s.Issued("k", 0, "", authz.VaultRead, authz.VaultWrite).Days(91).Used(audit.CredentialUnsealed, story.As(authz.APIKey, "k"))
		}},
		{"all", compliance.Pass, func(s *story.Story) {
			s.Issued("k", 0, "", authz.VaultRead, authz.AuditRead).Days(91).Used(audit.CredentialUnsealed, story.As(authz.APIKey, "k"))
		}},
	},
	"duties_separated": {
		{"apart", compliance.Pass, func(s *story.Story) {
			s.Issued("k", 0, "", authz.VaultRead).Issued("l", 0, "", authz.AccountAdmin)
		}},
		{"in one", compliance.Fail, func(s *story.Story) { s.Issued("k", 0, "", authz.VaultRead, authz.AccountAdmin) }},
	},
	"members_active": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"active", compliance.Pass, func(s *story.Story) { s.Registered().Days(91).ReadLog() }},
		{"idle", compliance.Fail, func(s *story.Story) { s.Registered().Days(91).Used(audit.DataEncrypted, story.Client) }},
		{"removed", compliance.NotApplicable, func(s *story.Story) {
			s.Registered().Days(91).Tell(audit.MemberRemoved, audit.Success, story.Service, audit.Resource{Type: audit.UserResource, ID: story.Owner.ID})
		}},
	},
	"email_verified": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"still has time", compliance.NoData, func(s *story.Story) { s.Registered().Days(6).ReadLog() }},
		{"verified", compliance.Pass, func(s *story.Story) { s.Registered().Verified().Days(8).ReadLog() }},
		{"by a reset", compliance.Pass, func(s *story.Story) {
			s.Registered().User(audit.PasswordReset, story.Owner.ID, "email_verified", "true")
		}},
		{"never", compliance.Fail, func(s *story.Story) { s.Registered().Days(8).ReadLog() }},
	},
	"issuance_approved": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"by an owner", compliance.Pass, func(s *story.Story) { s.Issued("k", 0, "", authz.VaultRead) }},
		{"joined uninvited", compliance.Fail, func(s *story.Story) { s.User(audit.MemberJoined, "usr_x", "role", "member") }},
		{"joined invited", compliance.Pass, func(s *story.Story) {
			s.Tell(audit.MemberInvited, audit.Success, story.Owner, audit.Resource{Type: audit.InvitationResource, ID: "i"}).User(audit.MemberJoined, "usr_x", "invitation", "i")
		}},
	},
	"departed_locked_out": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"quiet", compliance.Pass, func(s *story.Story) { s.Revoked().Days(1).ReadLog() }},
		{"in flight", compliance.Pass, func(s *story.Story) {
			s.Revoked().After(time.Second).Used(audit.KeyListed, story.As(authz.APIKey, "k"))
		}},
		{"active", compliance.Fail, func(s *story.Story) { s.Revoked().Days(1).Used(audit.KeyListed, story.As(authz.APIKey, "k")) }},
		{"refused", compliance.Pass, func(s *story.Story) {
			s.Revoked().Days(1).Tell(audit.KeyListed, audit.Denied, story.As(authz.APIKey, "k"), audit.Resource{Type: audit.KeyResource})
		}},
		{"expired and active", compliance.Fail, func(s *story.Story) {
			s.Issued("k", 1, "", authz.VaultRead).Days(2).Used(audit.KeyListed, story.As(authz.APIKey, "k"))
		}},
	},
	"sign_in_failures_handled": {
		{"no members", compliance.NotApplicable, func(*story.Story) {}},
		{"none", compliance.Pass, func(s *story.Story) { s.Registered() }},
		{"a few", compliance.Pass, func(s *story.Story) { s.Registered().FailedSignIns(4).Days(2).ReadLog() }},
		{"a few each hour", compliance.Pass, func(s *story.Story) {
			s.Registered().FailedSignIns(4).After(2 * time.Hour).FailedSignIns(4).Days(2).ReadLog()
		}},
		{"many, within the day", compliance.NoData, func(s *story.Story) { s.Registered().FailedSignIns(5).After(23 * time.Hour).ReadLog() }},
		{"many with a reaction, and again within the day", compliance.Pass, func(s *story.Story) {
			s.Registered().FailedSignIns(5).Reacted().FailedSignIns(5).After(23 * time.Hour).ReadLog()
		}},
		{"many in a second", compliance.Fail, func(s *story.Story) { s.Registered().FailedSignIns(1).SlowedDown().Days(2).ReadLog() }},
		{"many in a second, with a reaction", compliance.Pass, func(s *story.Story) {
			s.Registered().FailedSignIns(1).SlowedDown().SlowedDown().Reacted().Days(2).ReadLog()
		}},
		{"many without a reaction", compliance.Fail, func(s *story.Story) { s.Registered().FailedSignIns(5).Days(2).ReadLog() }},
		{"many with one", compliance.Pass, func(s *story.Story) { s.Registered().FailedSignIns(20).Reacted().Days(2).ReadLog() }},
		{"many with a late one", compliance.Fail, func(s *story.Story) { s.Registered().FailedSignIns(5).Days(2).Reacted() }},
		{"many, acknowledged", compliance.Pass, func(s *story.Story) { s.Registered().FailedSignIns(5).Acknowledged().Days(2).ReadLog() }},
		{"many, and earlier entries acknowledged", compliance.Fail, func(s *story.Story) {
			s.Registered().FailedSignIns(5).AcknowledgedBy(story.Reviewer, 1, 2).Days(2).ReadLog()
		}},
		{"many, and a session that ended", compliance.Fail, func(s *story.Story) {
			s.Registered().FailedSignIns(5).User(audit.SessionEnded, story.Owner.ID).Days(2).ReadLog()
		}},
		{"many, and an API key that changes a member", compliance.Fail, func(s *story.Story) {
			s.Registered().FailedSignIns(5).Tell(audit.MemberChanged, audit.Success, story.Client, audit.Resource{Type: audit.UserResource, ID: "usr_x"}).Days(2).ReadLog()
		}},
		{"long ago", compliance.Pass, func(s *story.Story) { s.Registered().FailedSignIns(5).Days(92).ReadLog() }},
		{"again after the reaction", compliance.Fail, func(s *story.Story) {
			s.Registered().FailedSignIns(5).Reacted().FailedSignIns(5).Days(2).ReadLog()
		}},
	},
	"log_reviewed": {
		{"not yet", compliance.NoData, func(s *story.Story) { s.Days(30).Used(audit.KeyListed, story.Client) }},
		{"never", compliance.Fail, func(s *story.Story) { s.Days(31).Used(audit.KeyListed, story.Client) }},
		{"by a member", compliance.Pass, func(s *story.Story) { s.Days(31).Used(audit.KeyListed, story.Client).Acknowledged() }},
		{"a read", compliance.Fail, func(s *story.Story) { s.Days(31).ReadLog() }},
		{"long ago", compliance.Fail, func(s *story.Story) { s.Acknowledged().Days(32).Used(audit.KeyListed, story.Client) }},
		{"by an API key", compliance.Fail, func(s *story.Story) { s.Days(31).AcknowledgedBy(story.Client, 1, s.Told()) }},
		{"by the service itself", compliance.Fail, func(s *story.Story) { s.Days(31).AcknowledgedBy(story.Service, 1, s.Told()) }},
		{"denied", compliance.Fail, func(s *story.Story) {
			s.Days(31).Tell(audit.DenialsAcknowledged, audit.Denied, story.Owner, audit.Resource{Type: audit.LogResource},
				compliance.AttributeFrom, "1", compliance.AttributeTo, "1")
		}},
		{"of old entries alone", compliance.Fail, func(s *story.Story) {
			s.Days(20).Used(audit.KeyListed, story.Client).Days(11).AcknowledgedBy(story.Reviewer, 1, 1)
		}},
		{"of new entries alone", compliance.Fail, func(s *story.Story) {
			s.Days(31).Used(audit.KeyListed, story.Client).Used(audit.KeyListed, story.Client).AcknowledgedBy(story.Reviewer, 3, 3)
		}},
		{"of entries to come", compliance.Fail, func(s *story.Story) { s.Days(31).AcknowledgedBy(story.Reviewer, 1, 1<<40) }},
		{"in two parts", compliance.Pass, func(s *story.Story) {
			s.Days(31).Used(audit.KeyListed, story.Client).AcknowledgedBy(story.Reviewer, 1, 1).AcknowledgedBy(story.Owner, 2, 3)
		}},
	},
	"access_reviewed": {
		{"nobody has access", compliance.NotApplicable, func(*story.Story) {}},
		{"not yet", compliance.NoData, func(s *story.Story) { s.Registered() }},
		{"never", compliance.Fail, func(s *story.Story) { s.Registered().Days(91).ReadLog() }},
		{"listed", compliance.Fail, func(s *story.Story) {
			s.Registered().Days(91).Listed(audit.MemberListed).Listed(audit.APIKeyListed)
		}},
		{"by an API key", compliance.Fail, func(s *story.Story) {
			s.Registered().Days(91).Reviewed(audit.AccessReviewed, story.Client)
		}},
		{"by a member", compliance.Pass, func(s *story.Story) {
			s.Registered().Days(91).Reviewed(audit.AccessReviewed, story.Reviewer)
		}},
		{"long ago", compliance.Fail, func(s *story.Story) {
			s.Registered().Reviewed(audit.AccessReviewed, story.Reviewer).Days(92).ReadLog()
		}},
	},
	"denials_reviewed": {
		{"none", compliance.NotApplicable, func(*story.Story) {}},
		{"still time", compliance.NoData, func(s *story.Story) { s.Denied().Denied().Days(7).Used(audit.KeyListed, story.Client) }},
		{"one in time, and for another is time", compliance.Pass, func(s *story.Story) {
			s.Denied().Days(6).Acknowledged().Denied().Days(6).Used(audit.KeyListed, story.Client)
		}},
		{"not", compliance.Fail, func(s *story.Story) { s.Denied().Days(8).Used(audit.KeyListed, story.Client) }},
		{"a read", compliance.Fail, func(s *story.Story) { s.Denied().Days(1).ReadLog().Days(7).ReadLog() }},
		{"in time", compliance.Pass, func(s *story.Story) {
			s.Denied().Days(6).Acknowledged().Days(30).Used(audit.KeyListed, story.Client)
		}},
		{"out of the range", compliance.Fail, func(s *story.Story) {
			s.Denied().Days(1).AcknowledgedBy(story.Reviewer, 1, 1).Days(7).ReadLog()
		}},
		{"late", compliance.Fail, func(s *story.Story) { s.Denied().Days(8).Acknowledged() }},
		{"late, long ago", compliance.NotApplicable, func(s *story.Story) {
			s.Denied().Days(8).Acknowledged().Days(92).Used(audit.KeyListed, story.Client)
		}},
		{"by who made the API key", compliance.Fail, func(s *story.Story) {
			s.Issued(story.Client.ID, 0, story.Owner.ID, authz.VaultRead).Denied().AcknowledgedBy(story.Owner, 1, s.Told()).Days(8).ReadLog()
		}},
		{"by another than who made the API key", compliance.Pass, func(s *story.Story) {
			s.Issued(story.Client.ID, 0, story.Owner.ID, authz.VaultRead).Denied().Acknowledged().Days(8).ReadLog()
		}},
		{"by who made the API key that made it", compliance.Fail, func(s *story.Story) {
			s.Issued("key_first", 0, "", authz.AccountAdmin)
			s.Tell(audit.APIKeyCreated, audit.Success, story.As(authz.APIKey, "key_first"), audit.Resource{Type: audit.APIKeyResource, ID: story.Client.ID})
			s.Denied().AcknowledgedBy(story.Owner, 1, s.Told()).Days(8).ReadLog()
		}},
		{"by who caused it", compliance.Fail, func(s *story.Story) {
			s.Tell(audit.AuditRead, audit.Denied, story.Owner, audit.Resource{Type: audit.LogResource}).AcknowledgedBy(story.Owner, 1, s.Told()).Days(8).ReadLog()
		}},
		{"by another than who caused it, among very many", compliance.Pass, func(s *story.Story) {
			for range 3000 {
				s.Denied()
			}
			s.Acknowledged().Days(8).ReadLog()
		}},
		{"by who caused it, among very many", compliance.Fail, func(s *story.Story) {
			s.Issued(story.Client.ID, 0, story.Owner.ID, authz.VaultRead)
			for range 3000 {
				s.Denied()
			}
			s.AcknowledgedBy(story.Owner, 1, s.Told()).Days(8).ReadLog()
		}},
	},
	"failures_reviewed": {
		{"none", compliance.NotApplicable, func(s *story.Story) { s.Denied() }},
		{"not", compliance.Fail, func(s *story.Story) {
			s.Credential(audit.CredentialUnsealed, audit.Failure, "a").Days(8).Used(audit.KeyListed, story.Client)
		}},
		{"still time", compliance.NoData, func(s *story.Story) {
			s.Credential(audit.CredentialUnsealed, audit.Failure, "a").Days(6).Used(audit.KeyListed, story.Client)
		}},
		{"in time", compliance.Pass, func(s *story.Story) {
			s.Credential(audit.CredentialUnsealed, audit.Failure, "a").Days(1).Acknowledged()
		}},
	},
	"inventory_reviewed": {
		{"not yet", compliance.NoData, func(*story.Story) {}},
		{"reviewed", compliance.Pass, func(s *story.Story) { s.Reviewed(audit.InventoryReviewed, story.Reviewer).Days(300).ReadLog() }},
		{"read", compliance.Fail, func(s *story.Story) { s.Days(366).Used(audit.InventoryRead, story.Owner) }},
		{"by an API key", compliance.Fail, func(s *story.Story) { s.Days(366).Reviewed(audit.InventoryReviewed, story.Client) }},
		{"long ago", compliance.Fail, func(s *story.Story) { s.Reviewed(audit.InventoryReviewed, story.Reviewer).Days(366).ReadLog() }},
	},
	"events_complete": {
		{"all", compliance.Pass, func(s *story.Story) { s.ReadLog().FailedSignIns(1) }},
		{"nobody", compliance.Fail, func(s *story.Story) { s.Used(audit.KeyListed, story.As(authz.APIKey, "")) }},
		{"nothing", compliance.Fail, func(s *story.Story) { s.Tell(audit.KeyListed, audit.Success, story.Client, audit.Resource{}) }},
		{"no result", compliance.Fail, func(s *story.Story) {
			s.Tell(audit.KeyListed, "", story.Client, audit.Resource{Type: audit.KeyResource})
		}},
	},
	"assessed_daily": {
		{"not yet", compliance.NoData, func(*story.Story) {}},
		{"not yet, but on demand", compliance.NoData, func(s *story.Story) { s.After(time.Hour).Assessed() }},
		{"never", compliance.Fail, func(s *story.Story) { s.Days(3).ReadLog() }},
		{"never but on demand", compliance.Fail, func(s *story.Story) { s.Days(3).Assessed() }},
		{"today", compliance.Pass, func(s *story.Story) { s.Assessed().Daily() }},
		{"long ago", compliance.Fail, func(s *story.Story) { s.Assessed().Daily().Days(3).ReadLog() }},
		{"long ago, and on demand today", compliance.Fail, func(s *story.Story) { s.Assessed().Daily().Days(3).Assessed() }},
	},
	"keys_wrapped": stateCases(
		stateCase("a key management service", compliance.Pass, func(s *compliance.State) { s.Custody = compliance.CustodyKMS }),
		stateCase("development", compliance.Fail, func(s *compliance.State) { s.Custody = compliance.CustodyDevelopment })),
	"transport_encrypted": stateCases(
		stateCase("without the hybrid", compliance.Pass, func(s *compliance.State) { s.Transport = compliance.TransportTLS13 }),
		stateCase("a proxy", compliance.NotApplicable, func(s *compliance.State) { s.Transport = compliance.TransportTerminated }),
		stateCase("plain", compliance.Fail, func(s *compliance.State) { s.Transport = compliance.TransportPlaintext })),
	"transport_quantum_safe": stateCases(
		stateCase("without the hybrid", compliance.Fail, func(s *compliance.State) { s.Transport = compliance.TransportTLS13 }),
		stateCase("a proxy", compliance.NotApplicable, func(s *compliance.State) { s.Transport = compliance.TransportTerminated })),
	"suites_quantum_safe": stateCases(stateCase("without ML-KEM", compliance.Fail, func(s *compliance.State) { s.Suites = []string{"ML-DSA-65", "RSA"} })),
	"log_signed": stateCases(
		stateCase("batch", compliance.Pass, func(s *compliance.State) { s.Signing = "batch" }),
		stateCase("not", compliance.Fail, func(s *compliance.State) { s.Signing = "" })),
	"log_verified": stateCases(
		stateCase("off", compliance.Fail, func(s *compliance.State) { s.VerifyEvery = 0 }),
		stateCase("each week", compliance.Fail, func(s *compliance.State) { s.VerifyEvery = story.InDays(7) })),
	"log_anchored": stateCases(stateCase("not", compliance.Fail, func(s *compliance.State) { s.Anchored = false })),
	"log_retained": stateCases(
		stateCase("a year", compliance.Pass, func(s *compliance.State) { s.RetentionDays, s.Archive = 365, compliance.ArchiveNone }),
		stateCase("for ever", compliance.Pass, func(s *compliance.State) { s.RetentionDays, s.Archive = 0, compliance.ArchiveNone }),
		stateCase("archived", compliance.Pass, func(s *compliance.State) { s.RetentionDays = 30 }),
		stateCase("the archive is not read", compliance.Fail, func(s *compliance.State) { s.Archive = compliance.ArchiveUnreadable }),
		stateCase("and was not, with what is moved no more", compliance.Fail, func(s *compliance.State) { s.RetentionDays, s.Archive = 0, compliance.ArchiveUnreadable }),
		stateCase("less", compliance.Fail, func(s *compliance.State) { s.RetentionDays, s.Archive = 364, compliance.ArchiveNone })),
	"log_retained_long": stateCases(
		stateCase("six years", compliance.Pass, func(s *compliance.State) { s.RetentionDays, s.Archive = 2192, compliance.ArchiveNone }),
		stateCase("for ever", compliance.Pass, func(s *compliance.State) { s.RetentionDays, s.Archive = 0, compliance.ArchiveNone }),
		stateCase("the archive is not read", compliance.Fail, func(s *compliance.State) { s.Archive = compliance.ArchiveUnreadable }),
		stateCase("a year", compliance.Fail, func(s *compliance.State) { s.RetentionDays, s.Archive = 365, compliance.ArchiveNone })),
	"retention_set": stateCases(
		stateCase("for ever", compliance.Fail, func(s *compliance.State) { s.RetentionDays, s.Archive = 0, compliance.ArchiveNone }),
		stateCase("for ever, beside an archive", compliance.Fail, func(s *compliance.State) { s.RetentionDays = 0 }),
		stateCase("without an archive", compliance.Fail, func(s *compliance.State) { s.Archive = compliance.ArchiveNone }),
		stateCase("the archive is not read", compliance.Fail, func(s *compliance.State) { s.Archive = compliance.ArchiveUnreadable })),
	"log_online": stateCases(
		stateCase("three months", compliance.Pass, func(s *compliance.State) { s.RetentionDays = 90 }),
		stateCase("for ever", compliance.Pass, func(s *compliance.State) { s.RetentionDays, s.Archive = 0, compliance.ArchiveNone }),
		stateCase("a month, and an archive", compliance.Fail, func(s *compliance.State) { s.RetentionDays = 30 })),
	"clock_synchronised": stateCases(stateCase("not", compliance.Fail, func(s *compliance.State) { s.ClockSynchronised = false })),
	"sealing_key_current": stateCases(
		stateCase("past its lifetime", compliance.Fail, func(s *compliance.State) { s.SealingKeyCreated = s.SealingKeyCreated.AddDate(0, 0, -30) }),
		stateCase("never renewed", compliance.Fail, func(s *compliance.State) { s.SealingKeyLifetime = 0 }),
		stateCase("none", compliance.Fail, func(s *compliance.State) { s.SealingKeyCreated = time.Time{} })),
	"backup_recent": stateCases(
		stateCase("old", compliance.Fail, func(s *compliance.State) { s.LastBackup = s.LastBackup.AddDate(0, 0, -8) }),
		stateCase("none yet", compliance.NoData, func(s *compliance.State) { s.LastBackup = time.Time{} }),
		probeCase{"none at all", compliance.Fail, func(s *story.Story) {
			s.Days(8).Assessed(func(s *compliance.State) { s.LastBackup = time.Time{} })
		}}),
}

func TestProbesSayWhatHappened(t *testing.T) {
	for i := range compliance.Probes {
		p := &compliance.Probes[i]
		t.Run(p.Name, func(t *testing.T) {
			seen := make(map[compliance.Result]bool)
			for _, c := range probeCases[p.Name] {
				t.Run(c.name, func(t *testing.T) {
					s, e := pure(t)
					s.Began()
					c.tell(s)
					got := p.Run(e)
					seen[got.Result] = true
					if got.Result != c.want {
						t.Errorf("%s: %q, want %s", got.Result, got.Detail, c.want)
					}
					if got.Detail == "" || strings.HasSuffix(got.Detail, ".") || got.Title == "" || len(got.Evidence) > compliance.MaxEvidence {
						t.Errorf("%+v", got)
					}
					if got.Result == compliance.Pass && got.Sample > 0 && len(got.Evidence) == 0 {
						t.Errorf("it passes by %d things and cites none", got.Sample)
					}
					if !slices.IsSortedFunc(got.Evidence, func(a, b compliance.Reference) int { return int(a.Sequence) - int(b.Sequence) }) {
						t.Errorf("the citations are not in order: %v", got.Evidence)
					}
				})
			}
			if !seen[compliance.Pass] || !seen[compliance.Fail] {
				t.Error("its cases do not show both that it can pass and that it can fail")
			}
		})
	}
	for name := range probeCases {
		if compliance.ProbeOf(name) == nil {
			t.Errorf("cases of %s, which is no probe", name)
		}
	}
}
