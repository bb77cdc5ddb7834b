// Package authz says who asks and what they may do. It is pure: it knows no
// store, no clock and no transport.
package authz

import (
	"crypto/rand"
	"encoding/base32"
	"slices"
	"strings"
)

// TenantID names a tenant: "ten_" and 128 random bits in base32.
type TenantID string

// SystemTenant owns what belongs to the deployment as a whole. It is not a
// well-formed tenant id, so that no tenant can ever be it.
const SystemTenant TenantID = "system"

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

const idLength = 26 // 128 bits in base32

// NewID returns prefix, "_" and 128 random bits in lower-case base32.
func NewID(prefix string) string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the program instead
	return prefix + "_" + encoding.EncodeToString(b[:])
}

// ValidID reports whether s is an id as [NewID] makes it. Only well-formed ids
// are looked up or recorded.
func ValidID(prefix, s string) bool {
	body, ok := strings.CutPrefix(s, prefix+"_")
	if !ok || len(body) != idLength {
		return false
	}
	b, err := encoding.DecodeString(body)
	// 26 characters carry 130 bits: the two spare ones must be zero, so that
	// an id has one spelling.
	return err == nil && len(b) == 16 && encoding.EncodeToString(b) == body
}

// Scope is a permission that an API key or a session carries.
type Scope string

// The scopes.
const (
	VaultRead      Scope = "vault:read"
	VaultWrite     Scope = "vault:write"
	CryptoEncrypt  Scope = "crypto:encrypt"
	CryptoDecrypt  Scope = "crypto:decrypt"
	CryptoSign     Scope = "crypto:sign"
	CryptoVerify   Scope = "crypto:verify"
	KeysRead       Scope = "keys:read"
	KeysWrite      Scope = "keys:write"
	AuditRead      Scope = "audit:read"
	ComplianceRead Scope = "compliance:read"
	AccountAdmin   Scope = "account:admin"
	SystemAdmin    Scope = "system:admin" // of the deployment; no tenant can be given it
)

// TenantScopes returns every scope that a tenant's principal can hold.
func TenantScopes() []Scope {
	return []Scope{
		VaultRead, VaultWrite, CryptoEncrypt, CryptoDecrypt, CryptoSign, CryptoVerify,
		KeysRead, KeysWrite, AuditRead, ComplianceRead, AccountAdmin,
	}
}

// Kind says what sort of principal acts.
type Kind string

// The kinds of principal.
const (
	APIKey   Kind = "api_key"
	Operator Kind = "operator" // the reconciler, in the tenant of an object's namespace
	System   Kind = "system"   // the deployment itself
	Stranger Kind = "stranger" // who was refused before it was known who it is; has no id
)

// Principal is who asks, and from where. It is an explicit argument right
// after the context, never inside it.
type Principal struct {
	Tenant TenantID
	Kind   Kind
	ID     string // pseudonymous: a key id, an object's UID; never a name or an address
	Scopes []Scope

	RequestID string // of the request or reconcile; the same in log, header and audit entry
	SourceIP  string // of the connection; empty inside the process
}

// Action is something a principal does to a resource.
type Action string

// The actions, each with the scope it takes in [required].
const (
	SealCredential   Action = "seal"
	ListCredentials  Action = "list"
	UnsealCredential Action = "unseal"
	RotateCredential Action = "rotate"
	DeleteCredential Action = "delete"
	ReadAudit        Action = "read_audit"
)

var required = map[Action]Scope{
	SealCredential:   VaultWrite,
	ListCredentials:  VaultRead,
	UnsealCredential: VaultRead,
	RotateCredential: VaultWrite,
	DeleteCredential: VaultWrite,
	ReadAudit:        AuditRead,
}

// May reports whether the principal holds the scope that the action takes. An
// unknown action is refused.
func (p Principal) May(a Action) bool {
	s, ok := required[a]
	return ok && p.Tenant != "" && slices.Contains(p.Scopes, s)
}
