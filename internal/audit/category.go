package audit

// Category is a class of event types that readers of the log ask for together. Attempts that were denied
// or failed are in it, too. The types in no category change nothing that is kept, and tell no plaintext.
type Category string

// These are the categories.
const (
	Changes Category = "changes" // makes, changes or ends something that is kept
	Secrets Category = "secrets" // gives somebody a plaintext
)

var categories = map[Category][]EventType{
	Secrets: {CredentialUnsealed, DataDecrypted},
	Changes: {
		ChainStarted, SealingKeyCreated, SealingKeyRetired, SealingKeyRestored, KMSRewrapped, KMSKeyDestroyed,
		TenantCreated, TenantActivated, TenantLimited, NamespaceMapped, APIKeyCreated, APIKeyApproved, APIKeySuspended,
		APIKeyRevoked, CredentialSealed, CredentialRotated, CredentialReencrypted, CredentialDescribed,
		CredentialVersionEnded, CredentialDeleted, CredentialReleased, CredentialAdopted, KeyCreated, KeyRotated,
		UserRegistered, SessionEnded, EmailVerified, VerificationRequested, PasswordChanged, PasswordResetRequested,
		PasswordReset, MemberInvited, MemberJoined, MemberChanged, MemberRemoved, InvitationRevoked, HistoryRuleChanged,
		WebhookCreated, WebhookDeleted, SettingsChanged, PolicyCreated, PolicyChanged, PolicyDeleted, PolicyBound,
		PolicyUnbound, GroupCreated, GroupChanged, GroupDeleted, AnchorRefused, RollbackAccepted, StateCommitted,
		StateRowsAccepted, StateRowsRemoved, DenialsAcknowledged, AccessReviewed, InventoryReviewed, ReviewNoteErased,
		NamesErased,
	},
}

// Types returns the types in the category.
func (c Category) Types() []EventType { return categories[c] }
