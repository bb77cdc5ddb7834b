package audit

import (
	"slices"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// EventType names an event, in upper snake case. A denied attempt has the type of what was
// attempted; its Outcome says that it was denied.
type EventType string

// All event types.
const (
	ChainStarted           EventType = "CHAIN_STARTED"       // the first entry: chain ID and audit key
	SealingKeyCreated      EventType = "SEALING_KEY_CREATED" // a key for SealedCredential values
	SealingKeyListed       EventType = "SEALING_KEY_LISTED"
	SealingKeyRetired      EventType = "SEALING_KEY_RETIRED"  // archived; values sealed for it are refused
	SealingKeyRestored     EventType = "SEALING_KEY_RESTORED" // taken back into use
	ManifestResealed       EventType = "MANIFEST_RESEALED"    // values of a manifest were sealed for the current key
	ManifestChecked        EventType = "MANIFEST_CHECKED"     // checked whether a manifest would be accepted
	BackupTaken            EventType = "BACKUP_TAKEN"
	KMSKeyListed           EventType = "KMS_KEY_LISTED"
	KMSRewrapped           EventType = "KMS_REWRAPPED"     // key sets were wrapped by another KMS key, or again by the same one
	KMSKeyDestroyed        EventType = "KMS_KEY_DESTROYED" // recorded before the KMS is asked to destroy it
	TenantCreated          EventType = "TENANT_CREATED"
	TenantListed           EventType = "TENANT_LISTED"
	TenantActivated        EventType = "TENANT_ACTIVATED" // the trial ended
	TenantLimited          EventType = "TENANT_LIMITED"   // its rate limits were set
	NamespaceMapped        EventType = "NAMESPACE_MAPPED" // a Kubernetes namespace belongs to the tenant
	APIKeyCreated          EventType = "API_KEY_CREATED"
	APIKeyApproved         EventType = "API_KEY_APPROVED"  // an owner approved a key that the operator made; it works from now on
	APIKeySuspended        EventType = "API_KEY_SUSPENDED" // after a rollback of which nobody knows what it undid; works again once an owner approves it
	APIKeyListed           EventType = "API_KEY_LISTED"
	APIKeyRevoked          EventType = "API_KEY_REVOKED"
	CredentialSealed       EventType = "CREDENTIAL_SEALED" // a new credential, or a deleted one created again
	CredentialListed       EventType = "CREDENTIAL_LISTED" // list of credentials, versions or cluster objects, or a repeated seal request
	CredentialUnsealed     EventType = "CREDENTIAL_UNSEALED"
	CredentialRotated      EventType = "CREDENTIAL_ROTATED"       // new values
	CredentialReencrypted  EventType = "CREDENTIAL_REENCRYPTED"   // new keys around the same values
	CredentialDescribed    EventType = "CREDENTIAL_DESCRIBED"     // other tags, another description or contact
	CredentialVersionEnded EventType = "CREDENTIAL_VERSION_ENDED" // the previous version is no longer readable
	CredentialDeleted      EventType = "CREDENTIAL_DELETED"
	CredentialReleased     EventType = "CREDENTIAL_RELEASED" // its owner is gone; an existing credential stays
	CredentialAdopted      EventType = "CREDENTIAL_ADOPTED"  // an object goes on with a credential that had no owner, or whose owner is of a former cluster
	KeyCreated             EventType = "KEY_CREATED"         // a named key
	KeyListed              EventType = "KEY_LISTED"
	KeyRotated             EventType = "KEY_ROTATED"
	DataEncrypted          EventType = "DATA_ENCRYPTED"
	DataDecrypted          EventType = "DATA_DECRYPTED"
	DataRewrapped          EventType = "DATA_REWRAPPED" // encrypted again with the newest version of its key
	DataSigned             EventType = "DATA_SIGNED"
	DataVerified           EventType = "DATA_VERIFIED"
	PublicKeyRead          EventType = "PUBLIC_KEY_READ"
	UserRegistered         EventType = "USER_REGISTERED"
	UserSignedIn           EventType = "USER_SIGNED_IN"
	UserSignedOut          EventType = "USER_SIGNED_OUT"
	AccountRead            EventType = "ACCOUNT_READ"
	SessionRefreshed       EventType = "SESSION_REFRESHED" // if denied: a refresh token was used twice, and its session ended
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
	HistoryRuleListed      EventType = "HISTORY_RULE_LISTED"  // how many earlier versions are kept on which paths
	HistoryRuleChanged     EventType = "HISTORY_RULE_CHANGED" // likewise; also when versions were erased that it no longer keeps
	WebhookListed          EventType = "WEBHOOK_LISTED"       // webhooks, or the deliveries of one
	WebhookCreated         EventType = "WEBHOOK_CREATED"
	WebhookDeleted         EventType = "WEBHOOK_DELETED"
	WebhookSent            EventType = "WEBHOOK_SENT"   // somebody asked for a test event, or for a dead letter again
	WebhookFailed          EventType = "WEBHOOK_FAILED" // a delivery was given up
	SettingsRead           EventType = "SETTINGS_READ"
	SettingsChanged        EventType = "SETTINGS_CHANGED"
	PolicyListed           EventType = "POLICY_LISTED" // policies of paths, and who has which
	PolicyCreated          EventType = "POLICY_CREATED"
	PolicyChanged          EventType = "POLICY_CHANGED"
	PolicyDeleted          EventType = "POLICY_DELETED"
	PolicyBound            EventType = "POLICY_BOUND"   // a user, an API key or a ServiceAccount has these policies from now on, and no other
	PolicyUnbound          EventType = "POLICY_UNBOUND" // no policy limits it any more
	GroupListed            EventType = "GROUP_LISTED"   // groups and their members
	GroupCreated           EventType = "GROUP_CREATED"
	GroupChanged           EventType = "GROUP_CHANGED"  // another name, or a member more or less
	GroupDeleted           EventType = "GROUP_DELETED"  // likewise its memberships, so what it added for its members is gone
	AccessChecked          EventType = "ACCESS_CHECKED" // judged whether a path could be reached, without a look whether anything is there; or tried a change of access
	AuditRead              EventType = "AUDIT_READ"
	ProofRead              EventType = "PROOF_READ"          // checkpoint, proofs, tiles and the audit key; at most once a minute for each caller
	AuditExported          EventType = "AUDIT_EXPORTED"      // the whole log
	LogArchived            EventType = "LOG_ARCHIVED"        // a segment is in the archive and no longer in the database
	AnchorStarted          EventType = "ANCHOR_STARTED"      // an anchor without a checkpoint gets one; a second such event shows that the checkpoint was removed
	AnchorRefused          EventType = "ANCHOR_REFUSED"      // an anchored checkpoint does not verify, or belongs to another chain
	RollbackAccepted       EventType = "ROLLBACK_ACCEPTED"   // entries were lost, and the log continues after them in a new epoch
	StateCommitted         EventType = "STATE_COMMITTED"     // a store of an earlier release: its rows are bound to the log from here on; earlier replays are not excluded
	StateRowsAccepted      EventType = "STATE_ROWS_ACCEPTED" // rows that somebody else had written or removed were accepted as they are
	StateRowsRemoved       EventType = "STATE_ROWS_REMOVED"  // rows that were wrong were removed
	MetricsRead            EventType = "METRICS_READ"        // only attempts that failed: a scrape leaves no entry
	ComplianceAssessed     EventType = "COMPLIANCE_ASSESSED" // the state that scores are based on
	ComplianceScored       EventType = "COMPLIANCE_SCORED"
	ComplianceHistoryRead  EventType = "COMPLIANCE_HISTORY_READ"
	ComplianceReported     EventType = "COMPLIANCE_REPORTED"
	InventoryRead          EventType = "INVENTORY_READ"
	DenialsAcknowledged    EventType = "DENIALS_ACKNOWLEDGED" // a member looked at the denials and failures of a range of entries
	AccessReviewed         EventType = "ACCESS_REVIEWED"      // a member looked at API keys and members
	InventoryReviewed      EventType = "INVENTORY_REVIEWED"   // a member looked at the inventory
	ReviewNoteErased       EventType = "REVIEW_NOTE_ERASED"   // the note of a review
	NamesErased            EventType = "NAMES_ERASED"         // past names of something that has another name or is gone
	NodeLogRecorded        EventType = "NODE_LOG_RECORDED"    // the log of a node had these entries then
	RateLimited            EventType = "RATE_LIMITED"         // at most once per principal and minute
	AccessRefused          EventType = "ACCESS_REFUSED"       // no principal; once per source and minute, at most 64 a minute, in the tenant system
)

// ChangesVersion reports whether a successful event of this type gives a credential a new version.
func (t EventType) ChangesVersion() bool {
	return slices.Contains([]EventType{CredentialSealed, CredentialRotated, CredentialReencrypted}, t)
}

// changes are the events of which a full disk refuses the success, because what they record adds to
// the store. Every other event records a read, a removal, a sign-in without which nobody could
// remove anything, or what the service does by itself to get along.
var changes = []EventType{
	ChainStarted, SealingKeyCreated, SealingKeyRestored, KMSRewrapped, KMSKeyDestroyed,
	TenantCreated, TenantActivated, TenantLimited, NamespaceMapped, APIKeyCreated, APIKeyApproved,
	CredentialSealed, CredentialRotated, CredentialReencrypted, CredentialDescribed, CredentialAdopted, KeyCreated, KeyRotated,
	UserRegistered, EmailVerified, VerificationRequested, PasswordChanged, PasswordResetRequested, PasswordReset,
	MemberInvited, MemberJoined, MemberChanged, SettingsChanged, PolicyCreated, PolicyChanged, PolicyBound, GroupCreated, GroupChanged, WebhookCreated, WebhookSent, DenialsAcknowledged, AccessReviewed, InventoryReviewed, NodeLogRecorded,
}

// IsChange reports whether a successful event of this type adds to what is stored, besides its
// entry. Such an event is refused while the disk is full.
func (t EventType) IsChange() bool { return slices.Contains(changes, t) }

// Outcome is the result of an event.
type Outcome string

// All outcomes.
const (
	Success Outcome = "success"
	Denied  Outcome = "denied"  // the principal may not do it, or may see nothing there
	Failure Outcome = "failure" // it was allowed and failed, for example because a record is damaged
)

// Actor is the principal who acted. Its ID is pseudonymous.
type Actor struct {
	ID   string `json:"id"`
	Type string `json:"type"`
}

// Resource is the object of the event.
type Resource struct {
	ID   string `json:"id"`
	Type string `json:"type"`
}

// Resource types.
const (
	CredentialResource = "credential"
	KeyResource        = "key"
	DataResource       = "data" // data of the caller, never stored
	TenantResource     = "tenant"
	APIKeyResource     = "api_key"
	UserResource       = "user"
	SessionResource    = "session"
	InvitationResource = "invitation"
	PolicyResource     = "policy"
	GroupResource      = "group"
	WebhookResource    = "webhook"
	// ServiceAccountResource is a ServiceAccount that has policies. Its id is a keyed hash of its name.
	ServiceAccountResource = "service_account"
	SealingKeyResource     = "sealing_key"
	ManifestResource       = "manifest"
	BackupResource         = "backup"
	KMSKeyResource         = "kms_key"
	ChainResource          = "chain"
	LogResource            = "audit_log"
	NodeLogResource        = "node_log" // its id is that of the node's key
	InterfaceResource      = "interface"
	ComplianceResource     = "compliance"
)

// Attributes that the verification reads.
const (
	AttributeVersion = "version" // version of a credential, decimal
	AttributeDigest  = "digest"  // digest of the credential's record as the vault stores it, lower-case hex
	AttributeReason  = "reason"  // why something was denied or failed; one of a few fixed words
	AttributeRepeats = "repeats" // how many of the same events the entry stands for, decimal
	AttributeWait    = "wait"    // "true": the caller waited for another version of the credential

	// AttributeOverlapUntil says until when a rotation leaves the previous version readable, in RFC
	// 3339.
	AttributeOverlapUntil = "overlap_until"

	// AttributeTrashed is "true" when a re-encryption put the credential in the trash.
	AttributeTrashed = "trashed"
	// AttributeRenamed is "true" when a re-encryption gave the credential another name.
	AttributeRenamed = "renamed"
)

// Event is an entry before the log gives it a place.
type Event struct {
	Type       EventType
	Outcome    Outcome
	Principal  authz.Principal // the actor, and the tenant whose chain the event enters
	Resource   Resource
	Attributes map[string]string // ASCII snake-case keys; never a credential's value, a name or an address
}

// Attributes of the first entry of every tenant's chain, including the deployment's own. Trust in a
// chain starts with them.
const (
	AttributeChainID   = "chain_id"
	AttributePublicKey = "public_key" // public key of the log, base64
)

// AttributePod is the UID of a pod. Every entry of a principal that is a pod has it.
const AttributePod = "pod_uid"

// Attributes of the entry that accepts a rollback.
const (
	AttributeEpoch        = "epoch"         // the new epoch
	AttributeLostFrom     = "lost_from"     // one above the previous entry's sequence
	AttributeLostTo       = "lost_to"       // one below this entry's sequence
	AttributeAnchored     = "anchored"      // sequence of the anchored checkpoint
	AttributeAnchoredHash = "anchored_hash" // hash of the entry at that sequence, lower-case hex
)

// Attributes of the entry that records an archived segment.
const (
	AttributeFrom    = "from" // first and last sequence
	AttributeTo      = "to"
	AttributeEntries = "entries"
	AttributeObject  = "object"
	AttributeSHA256  = "sha256" // [Segment.Digest], lower-case hex
)

// Attributes of entries about an anchor.
const (
	AttributePlace    = "place"    // name of a [keeper.Anchor]
	AttributeSequence = "sequence" // sequence of the anchor's first checkpoint; in the entry of a read, sequence of the entry read
)

// AttributeTail is "true" in the entry that records the opening of a [reader.Tail]. The entry of a
// single read has [attributeSequence] instead.
const AttributeTail = "tail"

// AttributeTried is the action of which a dry run tried a change.
const AttributeTried = "tried"

// AttributeNames is the number of names that a read of the log was told, in the entry of that read.
const AttributeNames = "names"

// AttributeNote is a salted hash of the note of a review, and its id: hex of a SHA3-256. The note is
// a row of its own, which can be erased.
const AttributeNote = "note"

// AttributePending is "true" in the entry of an API key that works only after an owner's approval.
const AttributePending = "pending"

// AttributeReviews is "true" in the entry of a member who asked what waits for a review.
const AttributeReviews = "reviews"

// AttributeOverview names the parts that an overview showed, separated by spaces, in the entry of that read.
const AttributeOverview = "overview"

// MakesCurrent reports whether the event creates the newest version of a credential.
func (e Event) MakesCurrent() bool {
	return e.Outcome == Success && e.Resource.Type == CredentialResource && e.Type.ChangesVersion()
}

// AttributeState commits to the rows that decide who may do what, as the commit leaves them: hex of
// a SHA-256. The last entry of each commit that changes such a row has it.
const AttributeState = "state"

// Attributes of the entry that binds the rows of an earlier release's store.
const (
	AttributeEarlierReplays = "earlier_replays" // NotExcluded: rows that were put back before are taken as they are
	NotExcluded             = "not_excluded"
	AttributeWrongMACs      = "wrong_macs" // number of rows whose MAC was wrong
)

// Attributes that internal/compliance reads. Times are RFC 3339 in UTC.
const (
	AttributeExpiresAt    = "expires_at"           // expiry of a credential's version, or of an API key that expires
	AttributeTTLDays      = "ttl_days"             // lifetime of a credential, decimal
	AttributeRotationDays = "rotation_period_days" // rotation period of a named key, decimal
	AttributeNextRotation = "next_rotation"        // time of a named key's next rotation
	AttributeScopes       = "scopes"               // scopes of an API key, separated by spaces
	AttributeUser         = "user"                 // ID of the user responsible for an API key, if there is one
)

// ReasonSlowedDown is the reason of a sign-in that was refused because the account had too many
// failures.
const ReasonSlowedDown = "slowed_down"
