package rollback

import "github.com/latticekeep/latticekeep/internal/audit"

// Effect says what becomes of a successful entry that was made after the time of a rollback.
type Effect int

const (
	// None: the entry records a read, or what the service does again by itself.
	None Effect = iota
	// Lost: what the entry gave or changed is gone. The result counts it, because somebody may have to
	// do it again.
	Lost
	// Kept: what the entry took away stays away. Where the same type also gives something, as another
	// role does, that part is lost.
	Kept
)

// Effects has every type of entry. A type that puts back access when it is undone must be Kept.
var Effects = map[audit.EventType]Effect{
	// What was taken away.
	audit.SealingKeyRetired:     Kept, // a retired sealing key would open values again
	audit.NamespaceMapped:       Kept, // pods of the namespace would reach the tenant that it left
	audit.APIKeyRevoked:         Kept,
	audit.APIKeySuspended:       Kept,
	audit.CredentialDeleted:     Kept, // its previous version stays deleted, too
	audit.CredentialReencrypted: Kept, // the trash; other keys are lost
	audit.UserSignedOut:         Kept,
	audit.SessionRefreshed:      Kept, // a used refresh token would be new again, so its session ends
	audit.SessionEnded:          Kept,
	audit.PasswordChanged:       Kept, // the earlier password would sign in
	audit.PasswordReset:         Kept, // likewise
	audit.MemberJoined:          Kept, // the used invitation; the member is lost
	audit.MemberChanged:         Kept, // a lowered role; a raised one is lost
	audit.MemberRemoved:         Kept, // sessions, API keys and invitations of the member stay removed, too
	audit.InvitationRevoked:     Kept,
	audit.ReviewNoteErased:      Kept,
	audit.NamesErased:           Kept,
	audit.HistoryRuleChanged:    Kept, // what it erased; the rules are those of later
	audit.WebhookDeleted:        Kept, // its address would be told what expires
	audit.SettingsChanged:       Kept, // the paths on which credentials may no longer never expire, and past names that are to be forgotten
	audit.PolicyChanged:         Kept, // what it no longer allowed; what it allowed in addition is lost
	audit.PolicyBound:           Kept, // likewise, of a user, an API key, a ServiceAccount or a group
	audit.PolicyUnbound:         Kept, // what a group added; the policies of that time limit others again
	audit.GroupChanged:          Kept, // a member that was removed; one that was added, and a name, are lost
	audit.GroupDeleted:          Kept,

	// What was given or changed.
	audit.SealingKeyCreated:   Lost, // values that were sealed for it have to be sealed again
	audit.SealingKeyRestored:  Lost,
	audit.KMSRewrapped:        Lost, // keys are under the KMS key of that time
	audit.KMSKeyDestroyed:     Lost, // without that KMS key a rollback cannot be signed
	audit.TenantCreated:       Lost,
	audit.TenantActivated:     Lost,
	audit.TenantLimited:       Lost,
	audit.APIKeyCreated:       Lost,
	audit.APIKeyApproved:      Lost,
	audit.CredentialSealed:    Lost,
	audit.CredentialDescribed: Lost,
	audit.CredentialRotated:   Lost, // the value of that time is what was asked for
	audit.CredentialReleased:  Lost, // the operator releases again what has no object
	audit.CredentialAdopted:   Lost,
	audit.KeyCreated:          Lost, // data that it encrypted is lost with it
	audit.KeyRotated:          Lost, // likewise, of that version
	audit.UserRegistered:      Lost,
	audit.UserSignedIn:        Lost,
	audit.EmailVerified:       Lost,
	audit.MemberInvited:       Lost,
	audit.WebhookCreated:      Lost,
	audit.PolicyCreated:       Lost,
	audit.PolicyDeleted:       Lost, // a deleted policy was bound to nobody
	audit.GroupCreated:        Lost,
	audit.DenialsAcknowledged: Lost,
	audit.AccessReviewed:      Lost,
	audit.InventoryReviewed:   Lost,
	audit.NodeLogRecorded:     Lost, // the node has the entries, as long as it keeps them
	audit.StateRowsAccepted:   Lost, // doctor finds the rows again
	audit.StateRowsRemoved:    Lost,
	audit.RollbackAccepted:    Lost,

	// Tokens in mails: requesting one replaces the one before, which lives for an hour. A password
	// whose reset was requested since is worthless, as a changed one is.
	audit.PasswordResetRequested: Kept,
	audit.VerificationRequested:  None, // an earlier token verifies the same address

	// A previous version ends at the time that its row names, also after a rollback.
	audit.CredentialVersionEnded: None,

	audit.ChainStarted:          None,
	audit.SealingKeyListed:      None,
	audit.ManifestResealed:      None,
	audit.ManifestChecked:       None,
	audit.BackupTaken:           None,
	audit.KMSKeyListed:          None,
	audit.TenantListed:          None,
	audit.APIKeyListed:          None,
	audit.CredentialListed:      None,
	audit.CredentialUnsealed:    None,
	audit.KeyListed:             None,
	audit.DataEncrypted:         None,
	audit.DataDecrypted:         None,
	audit.DataRewrapped:         None,
	audit.DataSigned:            None,
	audit.DataVerified:          None,
	audit.PublicKeyRead:         None,
	audit.AccountRead:           None,
	audit.SessionListed:         None,
	audit.MemberListed:          None,
	audit.HistoryRuleListed:     None,
	audit.WebhookListed:         None,
	audit.WebhookSent:           None,
	audit.WebhookFailed:         None,
	audit.SettingsRead:          None,
	audit.PolicyListed:          None,
	audit.GroupListed:           None,
	audit.AccessChecked:         None,
	audit.AuditRead:             None,
	audit.ProofRead:             None,
	audit.MetricsRead:           None,
	audit.AuditExported:         None,
	audit.LogArchived:           None,
	audit.AnchorStarted:         None,
	audit.AnchorRefused:         None,
	audit.StateCommitted:        None,
	audit.ComplianceAssessed:    None,
	audit.ComplianceScored:      None,
	audit.ComplianceHistoryRead: None,
	audit.ComplianceReported:    None,
	audit.InventoryRead:         None,
	audit.RateLimited:           None,
	audit.AccessRefused:         None,
}
