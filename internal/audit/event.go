package audit

import (
	"slices"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// EventType says what happened, in upper snake case. An attempt that was
// denied carries the type of what was attempted; Outcome tells them apart.
type EventType string

// The event types: all there are.
const (
	ChainStarted           EventType = "CHAIN_STARTED"       // the first entry: chain id and audit key
	SealingKeyCreated      EventType = "SEALING_KEY_CREATED" // a key for SealedCredential values
	SealingKeyListed       EventType = "SEALING_KEY_LISTED"
	SealingKeyRetired      EventType = "SEALING_KEY_RETIRED"  // archived: what is sealed for it is refused
	SealingKeyRestored     EventType = "SEALING_KEY_RESTORED" // taken back into use
	ManifestResealed       EventType = "MANIFEST_RESEALED"    // the values of a manifest were sealed for the current key
	ManifestChecked        EventType = "MANIFEST_CHECKED"     // whether a manifest would be accepted
	BackupTaken            EventType = "BACKUP_TAKEN"
	KMSKeyListed           EventType = "KMS_KEY_LISTED"
	KMSRewrapped           EventType = "KMS_REWRAPPED"     // sets of keys were put under another KMS key, or anew under the same
	KMSKeyDestroyed        EventType = "KMS_KEY_DESTROYED" // recorded before the KMS is asked for it
	TenantCreated          EventType = "TENANT_CREATED"
	TenantListed           EventType = "TENANT_LISTED"
	TenantActivated        EventType = "TENANT_ACTIVATED" // no longer on trial
	TenantLimited          EventType = "TENANT_LIMITED"   // its rate limits were set
	NamespaceMapped        EventType = "NAMESPACE_MAPPED" // a Kubernetes namespace belongs to the tenant
	APIKeyCreated          EventType = "API_KEY_CREATED"
	APIKeyListed           EventType = "API_KEY_LISTED"
	APIKeyRevoked          EventType = "API_KEY_REVOKED"
	CredentialSealed       EventType = "CREDENTIAL_SEALED" // a new credential, or a deleted one made again
	CredentialListed       EventType = "CREDENTIAL_LISTED" // all of them, the versions of one, the objects in the cluster, or a seal that was sent again
	CredentialUnsealed     EventType = "CREDENTIAL_UNSEALED"
	CredentialRotated      EventType = "CREDENTIAL_ROTATED"       // new values
	CredentialReencrypted  EventType = "CREDENTIAL_REENCRYPTED"   // new keys around the same values
	CredentialVersionEnded EventType = "CREDENTIAL_VERSION_ENDED" // the former version is no longer readable
	CredentialDeleted      EventType = "CREDENTIAL_DELETED"
	CredentialReleased     EventType = "CREDENTIAL_RELEASED" // its owner is gone; if the credential was there, it stays
	KeyCreated             EventType = "KEY_CREATED"         // a named key
	KeyListed              EventType = "KEY_LISTED"
	KeyRotated             EventType = "KEY_ROTATED"
	DataEncrypted          EventType = "DATA_ENCRYPTED"
	DataDecrypted          EventType = "DATA_DECRYPTED"
	DataRewrapped          EventType = "DATA_REWRAPPED" // encrypted anew with the newest version of its key
	DataSigned             EventType = "DATA_SIGNED"
	DataVerified           EventType = "DATA_VERIFIED"
	PublicKeyRead          EventType = "PUBLIC_KEY_READ"
	UserRegistered         EventType = "USER_REGISTERED"
	UserSignedIn           EventType = "USER_SIGNED_IN"
	UserSignedOut          EventType = "USER_SIGNED_OUT"
	AccountRead            EventType = "ACCOUNT_READ"
	SessionRefreshed       EventType = "SESSION_REFRESHED" // denied: a refresh token was used twice, and its session is over
	SessionListed          EventType = "SESSION_LISTED"
	SessionEnded           EventType = "SESSION_ENDED"
	EmailVerified          EventType = "EMAIL_VERIFIED"
	VerificationRequested  EventType = "VERIFICATION_REQUESTED"
	PasswordChanged        EventType = "PASSWORD_CHANGED"
	PasswordResetRequested EventType = "PASSWORD_RESET_REQUESTED"
	PasswordReset          EventType = "PASSWORD_RESET"
	MemberListed           EventType = "MEMBER_LISTED"
	MemberInvited          EventType = "MEMBER_INVITED"
	MemberJoined           EventType = "MEMBER_JOINED"
	MemberChanged          EventType = "MEMBER_CHANGED" // another role
	MemberRemoved          EventType = "MEMBER_REMOVED"
	InvitationRevoked      EventType = "INVITATION_REVOKED"
	AuditRead              EventType = "AUDIT_READ"
	ProofRead              EventType = "PROOF_READ"          // checkpoint, proofs, tiles and the audit key; once a minute for each caller
	AuditExported          EventType = "AUDIT_EXPORTED"      // the whole log
	LogArchived            EventType = "LOG_ARCHIVED"        // a segment lies in the archive and is no longer in the database
	AnchorStarted          EventType = "ANCHOR_STARTED"      // a place outside kept no checkpoint, and keeps one from now on: a second one tells that it was removed
	AnchorRefused          EventType = "ANCHOR_REFUSED"      // a checkpoint kept outside does not verify, or belongs to another chain
	RollbackAccepted       EventType = "ROLLBACK_ACCEPTED"   // entries were lost, and the log goes on above them in a new epoch
	ComplianceAssessed     EventType = "COMPLIANCE_ASSESSED" // the state that scores are judged by
	ComplianceScored       EventType = "COMPLIANCE_SCORED"
	ComplianceHistoryRead  EventType = "COMPLIANCE_HISTORY_READ"
	ComplianceReported     EventType = "COMPLIANCE_REPORTED"
	InventoryRead          EventType = "INVENTORY_READ"
	RateLimited            EventType = "RATE_LIMITED"   // once per principal and minute
	AccessRefused          EventType = "ACCESS_REFUSED" // no principal; once per source and minute, 64 a minute at most, in the tenant system
)

// EventTypes returns all event types in the order of the documentation.
func EventTypes() []EventType {
	return []EventType{
		ChainStarted,
		SealingKeyCreated,
		SealingKeyListed,
		SealingKeyRetired,
		SealingKeyRestored,
		ManifestResealed,
		ManifestChecked,
		BackupTaken,
		KMSKeyListed,
		KMSRewrapped,
		KMSKeyDestroyed,
		TenantCreated,
		TenantListed,
		TenantActivated,
		TenantLimited,
		NamespaceMapped,
		APIKeyCreated,
		APIKeyListed,
		APIKeyRevoked,
		CredentialSealed,
		CredentialListed,
		CredentialUnsealed,
		CredentialRotated,
		CredentialReencrypted,
		CredentialVersionEnded,
		CredentialDeleted,
		CredentialReleased,
		KeyCreated,
		KeyListed,
		KeyRotated,
		DataEncrypted,
		DataDecrypted,
		DataRewrapped,
		DataSigned,
		DataVerified,
		PublicKeyRead,
		UserRegistered,
		UserSignedIn,
		UserSignedOut,
		AccountRead,
		SessionRefreshed,
		SessionListed,
		SessionEnded,
		EmailVerified,
		VerificationRequested,
		PasswordChanged,
		PasswordResetRequested,
		PasswordReset,
		MemberListed,
		MemberInvited,
		MemberJoined,
		MemberChanged,
		MemberRemoved,
		InvitationRevoked,
		AuditRead,
		ProofRead,
		AuditExported,
		LogArchived,
		AnchorStarted,
		AnchorRefused,
		RollbackAccepted,
		ComplianceAssessed,
		ComplianceScored,
		ComplianceHistoryRead,
		ComplianceReported,
		InventoryRead,
		RateLimited,
		AccessRefused,
	}
}

// changesVersion reports whether a successful event of this type gives a
// credential a new version.
func (t EventType) changesVersion() bool {
	return slices.Contains([]EventType{CredentialSealed, CredentialRotated, CredentialReencrypted}, t)
}

// Outcome of an event.
type Outcome string

// The outcomes.
const (
	Success Outcome = "success"
	Denied  Outcome = "denied"  // the principal may not, or there is nothing it may see
	Failure Outcome = "failure" // it was allowed and did not work, say because a record is damaged
)

// Actor is who did it; its id is pseudonymous.
type Actor struct {
	ID   string `json:"id"`
	Type string `json:"type"`
}

// Resource is what it was done to.
type Resource struct {
	ID   string `json:"id"`
	Type string `json:"type"`
}

// Resource types.
const (
	CredentialResource = "credential"
	KeyResource        = "key"
	DataResource       = "data" // of the caller, never kept
	TenantResource     = "tenant"
	APIKeyResource     = "api_key"
	UserResource       = "user"
	SessionResource    = "session"
	InvitationResource = "invitation"
	SealingKeyResource = "sealing_key"
	ManifestResource   = "manifest"
	BackupResource     = "backup"
	KMSKeyResource     = "kms_key"
	ChainResource      = "chain"
	LogResource        = "audit_log"
	InterfaceResource  = "interface"
	ComplianceResource = "compliance"
)

// Attributes with a meaning to the verification. The digest is that of the credential's
// record as the vault stores it.
const (
	AttributeVersion = "version" // of a credential, decimal
	AttributeDigest  = "digest"  // of its record, lower-case hex
	AttributeReason  = "reason"  // why something was denied or failed, one of a few fixed words

	// AttributeOverlapUntil is of a rotation that left the version before
	// readable: until when, RFC 3339.
	AttributeOverlapUntil = "overlap_until"
)

// Event is an entry before the log gave it its place.
type Event struct {
	Type       EventType
	Outcome    Outcome
	Principal  authz.Principal // whose chain it enters, and who is recorded as actor
	Resource   Resource
	Attributes map[string]string // ASCII snake-case keys; never a value, a name or an address
}

// Attributes of the first entry of every tenant's chain, the deployment's own
// included: trust in a chain starts there.
const (
	attributeChainID   = "chain_id"
	attributePublicKey = "public_key" // of the log, base64
)

// attributePod is in every entry of a principal that is a pod: its UID.
const attributePod = "pod_uid"

// Attributes of the entry of an accepted rollback.
const (
	attributeEpoch        = "epoch"         // that begins with it
	attributeLostFrom     = "lost_from"     // one above the entry before
	attributeLostTo       = "lost_to"       // one below it
	attributeAnchored     = "anchored"      // the sequence that the checkpoint kept elsewhere has
	attributeAnchoredHash = "anchored_hash" // of the entry there, lower-case hex
)

// Attributes of the entry that says that a segment was archived.
const (
	attributeFrom    = "from" // sequences
	attributeTo      = "to"
	attributeEntries = "entries"
	attributeObject  = "object"
	attributeSHA256  = "sha256" // [Segment.Digest], lower-case hex
)

// Attributes of what the log says of a place.
const (
	attributePlace    = "place"    // the name of an [AnchorPlace]
	attributeSequence = "sequence" // of the checkpoint that it is begun with; also of an entry that was read by it
)

// attributeTail is of the entry of a [Tail]: true. That of a single entry has its
// [attributeSequence].
const attributeTail = "tail"

// makesCurrent reports whether the event is the newest version of a credential.
func (e Event) makesCurrent() bool {
	return e.Outcome == Success && e.Resource.Type == CredentialResource && e.Type.changesVersion()
}

// Attributes that internal/compliance judges by. Times are RFC 3339 in UTC.
const (
	AttributeExpiresAt    = "expires_at"           // of a credential's version, and of an API key that ends
	AttributeTTLDays      = "ttl_days"             // of a credential, decimal
	AttributeRotationDays = "rotation_period_days" // of a named key, decimal
	AttributeNextRotation = "next_rotation"        // of a named key, when it is due
	AttributeScopes       = "scopes"               // of an API key, separated by spaces
	AttributeUser         = "user"                 // id of who answers for an API key, if anyone does
)

// ReasonSlowedDown is that of a refused sign-in whose account had so many failures
// that it is slowed down.
const ReasonSlowedDown = "slowed_down"
