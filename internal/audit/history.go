package audit

import (
	"strings"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// CredentialState is the newest state of a credential in the log.
type CredentialState struct {
	Sequence uint64 // entry that set this state
	Deleted  bool
	Version  string          // decimal
	Digest   string          // digest of the record, lower-case hex
	Previous PreviousVersion // zero if no previous version can be readable
	Current  Position        // entry that created the newest version
}

// PreviousVersion is the previous version that a rotation of a credential left readable.
type PreviousVersion struct {
	Version string // decimal
	Digest  string // digest of its record
}

// CredentialKey identifies a credential of a tenant.
type CredentialKey struct {
	Tenant     authz.TenantID
	Credential string
}

// APIKeyName identifies an API key of a tenant.
type APIKeyName struct {
	Tenant authz.TenantID
	ID     string
}

// APIKeyState is the state of an API key in the log.
type APIKeyState struct {
	Sequence uint64 // entry that set this state
	Revoked  bool
}

// NamespaceName identifies a namespace of a cluster; both fields are UIDs.
type NamespaceName struct{ Cluster, Namespace string }

// NamespaceState names the tenant that a namespace belongs to.
type NamespaceState struct {
	Sequence uint64 // entry that set this state
	Tenant   authz.TenantID
}

// History is the state after the entries seen so far. It holds everything that the verification of
// the next entries needs.
type History struct {
	ChainID string
	Public  *dualsig.PublicKey
	KeyID   string

	Head       Position
	Hash       string // hash of the head
	IsComplete bool   // no earlier entry is unknown: tree and replayed state are those of the whole log
	Epochs     []Epoch
	Lost       []Rollback
	Tree       TreeBuilder
	Tenants    map[string]*TenantState

	Credentials map[CredentialKey]CredentialState
	APIKeys     map[APIKeyName]APIKeyState
	Namespaces  map[NamespaceName]NamespaceState
	Kept        []*Entry // entries of sealing keys, archived segments and the first state, without hash and signature
}

// TenantState is the end of a tenant's part of the chain.
type TenantState struct {
	Sequence uint64 // tenant sequence
	Hash     string
	Last     Position
}

// keep keeps an entry for the base, without hash and signature.
func (s *History) keep(e *Entry) {
	kept := *e
	kept.Hash, kept.Signature = "", ""
	s.Kept = append(s.Kept, &kept)
}

// Replay applies an entry to the state. It copies the strings that it keeps, so the rest of the
// entry's text is not retained.
func (s *History) Replay(e *Entry) {
	if e.Outcome != Success {
		return
	}
	tenant := func() authz.TenantID { return authz.TenantID(strings.Clone(e.TenantID)) }
	switch e.EventType {
	case APIKeyCreated:
		s.APIKeys[APIKeyName{tenant(), strings.Clone(e.Resource.ID)}] = APIKeyState{Sequence: e.Sequence}
	case APIKeyRevoked:
		s.APIKeys[APIKeyName{tenant(), strings.Clone(e.Resource.ID)}] = APIKeyState{Sequence: e.Sequence, Revoked: true}
	case SealingKeyCreated, SealingKeyRetired, SealingKeyRestored, LogArchived, StateCommitted:
		s.keep(e)
	case ChainStarted:
		if e.Attributes[AttributeState] != "" {
			s.keep(e)
		}
	case NamespaceMapped:
		name := NamespaceName{strings.Clone(e.Attributes["cluster_uid"]), strings.Clone(e.Attributes["namespace_uid"])}
		s.Namespaces[name] = NamespaceState{e.Sequence, tenant()}
	case CredentialSealed, CredentialRotated, CredentialReencrypted, CredentialDeleted, CredentialReleased, CredentialAdopted, CredentialVersionEnded:
		if e.Resource.Type == CredentialResource {
			s.replayCredential(CredentialKey{tenant(), strings.Clone(e.Resource.ID)}, e)
		}
	}
}

func (s *History) replayCredential(key CredentialKey, e *Entry) {
	before, known := s.Credentials[key]
	switch {
	case e.EventType.ChangesVersion():
		next := CredentialState{
			Sequence: e.Sequence, Version: strings.Clone(e.Attributes[AttributeVersion]), Digest: strings.Clone(e.Attributes[AttributeDigest]), Current: s.Head,
		}
		switch {
		case e.EventType == CredentialReencrypted:
			next.Previous = before.Previous
		case e.Attributes[AttributeOverlapUntil] != "":
			next.Previous = PreviousVersion{before.Version, before.Digest}
		}
		s.Credentials[key] = next
	case e.EventType == CredentialDeleted:
		s.Credentials[key] = CredentialState{Sequence: e.Sequence, Deleted: true, Current: before.Current}
	case known: // released or adopted, or its previous version ended
		before.Previous = PreviousVersion{}
		s.Credentials[key] = before
	}
}
