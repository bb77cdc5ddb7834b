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
	ChainStarted          EventType = "CHAIN_STARTED"          // the first entry: chain id and audit key
	SealingKeyCreated     EventType = "SEALING_KEY_CREATED"    // a key for SealedCredential values
	TenantCreated         EventType = "TENANT_CREATED"         //
	NamespaceMapped       EventType = "NAMESPACE_MAPPED"       // a Kubernetes namespace belongs to the tenant
	APIKeyCreated         EventType = "API_KEY_CREATED"        //
	APIKeyRevoked         EventType = "API_KEY_REVOKED"        //
	CredentialSealed      EventType = "CREDENTIAL_SEALED"      // a new credential, or a deleted one made again
	CredentialListed      EventType = "CREDENTIAL_LISTED"      //
	CredentialUnsealed    EventType = "CREDENTIAL_UNSEALED"    //
	CredentialRotated     EventType = "CREDENTIAL_ROTATED"     // new values
	CredentialReencrypted EventType = "CREDENTIAL_REENCRYPTED" // new keys around the same values
	CredentialDeleted     EventType = "CREDENTIAL_DELETED"     //
	CredentialReleased    EventType = "CREDENTIAL_RELEASED"    // its owner is gone; if the credential was there, it stays
	AuditRead             EventType = "AUDIT_READ"             //
	AccessRefused         EventType = "ACCESS_REFUSED"         // no principal; once per source and minute, in the tenant system
)

// EventTypes returns all event types in the order of the documentation.
func EventTypes() []EventType {
	return []EventType{
		ChainStarted, SealingKeyCreated, TenantCreated, NamespaceMapped, APIKeyCreated, APIKeyRevoked,
		CredentialSealed, CredentialListed, CredentialUnsealed, CredentialRotated, CredentialReencrypted,
		CredentialDeleted, CredentialReleased, AuditRead, AccessRefused,
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
	TenantResource     = "tenant"
	APIKeyResource     = "api_key"
	SealingKeyResource = "sealing_key"
	ChainResource      = "chain"
	LogResource        = "audit_log"
	InterfaceResource  = "interface"
)

// Attributes with a meaning to the verification. The digest is that of the credential's
// record as the vault stores it.
const (
	AttributeVersion = "version" // of a credential, decimal
	AttributeDigest  = "digest"  // of its record, lower-case hex
	AttributeReason  = "reason"  // why something was denied or failed, one of a few fixed words
)

// Event is an entry before the log gave it its place.
type Event struct {
	Type       EventType
	Outcome    Outcome
	Principal  authz.Principal // whose chain it enters, and who is recorded as actor
	Resource   Resource
	Attributes map[string]string // ASCII snake-case keys; never a value, a name or an address
}

// The event of an attempt at each action, for [Log.Authorize].
var attempts = map[authz.Action]struct {
	event    EventType
	resource string
}{
	authz.SealCredential:   {CredentialSealed, CredentialResource},
	authz.ListCredentials:  {CredentialListed, CredentialResource},
	authz.UnsealCredential: {CredentialUnsealed, CredentialResource},
	authz.RotateCredential: {CredentialReencrypted, CredentialResource},
	authz.DeleteCredential: {CredentialDeleted, CredentialResource},
	authz.ReadAudit:        {AuditRead, LogResource},
}
