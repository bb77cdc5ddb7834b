package audit

import (
	"strings"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// State is the newest state of a credential in the log.
type State struct {
	Sequence uint64 // entry that set this state
	Deleted  bool
	Version  string // decimal
	Digest   string // digest of the record, lower-case hex
	Former   Former // zero if no previous version can be readable
	current  link   // entry that created the newest version
}

// Former is the previous version that a rotation of a credential left readable.
type Former struct {
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

// history is the state after the entries seen so far. It holds everything that the verification of
// the next entries needs.
type history struct {
	chainID string
	public  *dualsig.PublicKey
	keyID   string

	head    link
	hash    string // hash of the head
	whole   bool   // no earlier entry is unknown: tree and replayed state are those of the whole log
	epochs  []epoch
	lost    []Rollback
	tree    treeBuilder
	tenants map[string]*tenantState

	credentials map[CredentialKey]State
	apiKeys     map[APIKeyName]APIKeyState
	namespaces  map[NamespaceName]NamespaceState
	kept        []*Entry // entries of sealing keys and archived segments, without hash and signature
}

// tenantState is the end of a tenant's part of the chain.
type tenantState struct {
	sequence uint64 // tenant sequence
	hash     string
	last     link
}

// replay applies an entry to the state. It copies the strings that it keeps, so the rest of the
// entry's text is not retained.
func (s *history) replay(e *Entry) {
	if e.Outcome != Success {
		return
	}
	tenant := func() authz.TenantID { return authz.TenantID(strings.Clone(e.TenantID)) }
	switch e.EventType {
	case APIKeyCreated:
		s.apiKeys[APIKeyName{tenant(), strings.Clone(e.Resource.ID)}] = APIKeyState{Sequence: e.Sequence}
	case APIKeyRevoked:
		s.apiKeys[APIKeyName{tenant(), strings.Clone(e.Resource.ID)}] = APIKeyState{Sequence: e.Sequence, Revoked: true}
	case SealingKeyCreated, SealingKeyRetired, SealingKeyRestored, LogArchived:
		kept := *e
		kept.Hash, kept.Signature = "", ""
		s.kept = append(s.kept, &kept)
	case NamespaceMapped:
		name := NamespaceName{strings.Clone(e.Attributes["cluster_uid"]), strings.Clone(e.Attributes["namespace_uid"])}
		s.namespaces[name] = NamespaceState{e.Sequence, tenant()}
	case CredentialSealed, CredentialRotated, CredentialReencrypted, CredentialDeleted, CredentialReleased, CredentialVersionEnded:
		if e.Resource.Type == CredentialResource {
			s.replayCredential(CredentialKey{tenant(), strings.Clone(e.Resource.ID)}, e)
		}
	}
}

func (s *history) replayCredential(key CredentialKey, e *Entry) {
	before, known := s.credentials[key]
	switch {
	case e.EventType.changesVersion():
		next := State{
			Sequence: e.Sequence, Version: strings.Clone(e.Attributes[AttributeVersion]), Digest: strings.Clone(e.Attributes[AttributeDigest]), current: s.head,
		}
		switch {
		case e.EventType == CredentialReencrypted:
			next.Former = before.Former
		case e.Attributes[AttributeOverlapUntil] != "":
			next.Former = Former{before.Version, before.Digest}
		}
		s.credentials[key] = next
	case e.EventType == CredentialDeleted:
		s.credentials[key] = State{Sequence: e.Sequence, Deleted: true, current: before.current}
	case known: // released, or its previous version ended
		before.Former = Former{}
		s.credentials[key] = before
	}
}
