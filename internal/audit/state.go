package audit

import (
	"strings"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// State is the newest state of a credential that the log knows.
type State struct {
	Sequence uint64 // of the entry that says so
	Deleted  bool
	Version  string // decimal
	Digest   string // of the record, lower-case hex
	Former   Former // zero when no former version may be there
	current  link   // of the entry that gave it its newest version
}

// Former is the version that a rotation of a credential left readable.
type Former struct {
	Version string // decimal
	Digest  string // of its record
}

// CredentialKey names a credential of a tenant.
type CredentialKey struct {
	Tenant     authz.TenantID
	Credential string
}

// APIKeyName names an API key of a tenant.
type APIKeyName struct {
	Tenant authz.TenantID
	ID     string
}

// APIKeyState is what the log knows of an API key.
type APIKeyState struct {
	Sequence uint64 // of the entry that says so
	Revoked  bool
}

// NamespaceName names a namespace of a cluster, both by their UIDs.
type NamespaceName struct{ Cluster, Namespace string }

// NamespaceState is the tenant that a namespace belongs to.
type NamespaceState struct {
	Sequence uint64 // of the entry that says so
	Tenant   authz.TenantID
}

// history is what the entries so far came to: all that the verification of the
// next ones needs.
type history struct {
	chainID string
	public  *dualsig.PublicKey
	keyID   string

	head    link
	hash    string // of the head
	whole   bool   // nothing before it is unknown: tree and replay are of the whole log
	epochs  []epoch
	lost    []Rollback
	tree    treeBuilder
	tenants map[string]*tenantState

	credentials map[CredentialKey]State
	apiKeys     map[APIKeyName]APIKeyState
	namespaces  map[NamespaceName]NamespaceState
	kept        []*Entry // those that [Log.Visit] is asked for, without hash and signature
}

// tenantState is the end of a tenant's part of the chain.
type tenantState struct {
	sequence uint64 // of the tenant
	hash     string
	last     link
}

// replay keeps what an entry says there is now. What is kept of an entry is
// copied, so as not to keep all of its text.
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
	case known: // released, or its former version ended
		before.Former = Former{}
		s.credentials[key] = before
	}
}
