package audit

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/go-json-experiment/json"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// Base is the state of a verification after the entries up to a sequence: everything needed to
// verify the entries after it. When those entries move to the archive, the base takes their place
// in the database, signed with the log's key:
//
//	2 ‖ ML-DSA-65 signature (3309 bytes) ‖ JSON
//
// The JSON has the fields of signedBase in the order of their names, and no other spelling is
// accepted. The tenants, credentials, API keys, namespaces and kept entries are in rows of their own,
// which the JSON commits to: [Base.With] and [Base.ReadLists] read them. Version 1, of earlier
// releases, has them in the JSON, which is that of BaseJSON; the next cut makes rows of them. The base
// lists only credentials that were not deleted and API keys that were not revoked by then. A Base does
// not change after it is made.
type Base struct {
	History
	lists map[byte]listNode // roots of the lists in the store; nil for a base that is in no store, or of version 1
}

const (
	baseVersion = 2
	baseContext = "latticekeep/audit-base/v2"

	formerBaseVersion = 1
	formerBaseContext = "latticekeep/audit-base/v1"

	// VerifiedContext separates signatures of the progress of a verification (audit/verify).
	VerifiedContext = "latticekeep/audit-verified/v1"
)

// Sequence returns the sequence of the last entry that the base covers.
func (b *Base) Sequence() uint64 { return b.Head.Sequence }

// BaseJSON is the JSON of a whole [Base], with its fields in the order of their names.
type BaseJSON struct {
	APIKeys     []baseAPIKey     `json:"api_keys"`
	ChainID     string           `json:"chain_id"`
	Credentials []baseCredential `json:"credentials"`
	Epochs      []baseEpoch      `json:"epochs"` // starting with the second
	Hash        string           `json:"hash"`   // last entry
	Kept        []string         `json:"kept"`   // canonical entries still needed, oldest first
	Micros      int64            `json:"micros"` // last entry; microseconds since 1970
	Namespaces  []baseNamespace  `json:"namespaces"`
	PublicKey   string           `json:"public_key"` // base64
	Sequence    uint64           `json:"sequence"`   // last entry
	Tenants     []baseTenant     `json:"tenants"`
	Tree        string           `json:"tree"` // base64: u64 size, hashes of partial tiles from level 0
}

type baseEpoch struct {
	First    uint64 `json:"first"` // sequence of the entry that began the epoch
	Hash     string `json:"hash"`  // hash of that entry
	LostFrom uint64 `json:"lost_from"`
	Number   uint64 `json:"number"`
	Size     int64  `json:"size"` // size of the tree before the epoch
}

type baseTenant struct {
	Last     basePosition `json:"last"`
	Sequence uint64       `json:"sequence"` // tenant sequence
	Tenant   string       `json:"tenant"`
}

type baseCredential struct {
	Credential string        `json:"credential"`
	Current    basePosition  `json:"current"`
	Digest     string        `json:"digest"`
	Previous   *basePrevious `json:"former,omitzero"`
	Sequence   uint64        `json:"sequence"`
	Tenant     string        `json:"tenant"`
	Version    string        `json:"version"`
}

type basePrevious struct {
	Digest  string `json:"digest"`
	Version string `json:"version"`
}

type basePosition struct {
	Hash     string `json:"hash"`
	Micros   int64  `json:"micros"`
	Sequence uint64 `json:"sequence"`
}

type baseAPIKey struct {
	ID       string `json:"id"`
	Sequence uint64 `json:"sequence"`
	Tenant   string `json:"tenant"`
}

type baseNamespace struct {
	Cluster   string `json:"cluster"`
	Namespace string `json:"namespace"`
	Sequence  uint64 `json:"sequence"`
	Tenant    string `json:"tenant"`
}

// Clone returns a copy that replaying further entries does not change in s.
func (s History) Clone() History {
	s.Epochs, s.Lost, s.Kept = slices.Clone(s.Epochs), slices.Clone(s.Lost), slices.Clone(s.Kept)
	s.Credentials, s.APIKeys, s.Namespaces = maps.Clone(s.Credentials), maps.Clone(s.APIKeys), maps.Clone(s.Namespaces)
	tenants := make(map[string]*TenantState, len(s.Tenants))
	for name, t := range s.Tenants {
		copied := *t
		tenants[name] = &copied
	}
	s.Tenants = tenants
	edge := make([][]tlog.Hash, len(s.Tree.Edge))
	for i, hashes := range s.Tree.Edge {
		edge[i] = append(make([]tlog.Hash, 0, TileWidth), hashes...)
	}
	s.Tree = TreeBuilder{Size: s.Tree.Size, Edge: edge}
	return s
}

// JSON returns the canonical JSON of the base with the items that it has: sorted lists, and no other
// spelling.
func (b *Base) JSON() ([]byte, error) {
	j, err := b.json()
	if err != nil {
		return nil, err
	}
	j.sort()
	return json.Marshal(j)
}

func (b *Base) json() (BaseJSON, error) {
	s := b.History
	j := BaseJSON{
		ChainID: s.ChainID, Hash: s.Hash, Micros: s.Head.Micros, Sequence: s.Head.Sequence,
		PublicKey: base64.StdEncoding.EncodeToString(s.Public.Bytes()),
		Tree:      base64.StdEncoding.EncodeToString(s.Tree.encode()),
	}
	for i, e := range s.Epochs[1:] {
		j.Epochs = append(j.Epochs, baseEpoch{First: e.First, Hash: s.Lost[i].Hash, LostFrom: s.Lost[i].LostFrom, Number: e.Number, Size: e.Size})
	}
	for _, e := range s.Kept {
		core, err := e.Canonical(nil, false)
		if err != nil {
			return BaseJSON{}, err
		}
		j.Kept = append(j.Kept, string(core))
	}
	for name, t := range s.Tenants {
		j.Tenants = append(j.Tenants, baseTenant{Last: t.Last.json(), Sequence: t.Sequence, Tenant: name})
	}
	for key, c := range s.Credentials {
		of := baseCredential{
			Credential: key.Credential, Digest: c.Digest, Sequence: c.Sequence, Tenant: string(key.Tenant), Version: c.Version,
			Current: c.Current.json(),
		}
		if c.Previous != (PreviousVersion{}) {
			of.Previous = &basePrevious{c.Previous.Digest, c.Previous.Version}
		}
		j.Credentials = append(j.Credentials, of)
	}
	for key, k := range s.APIKeys {
		j.APIKeys = append(j.APIKeys, baseAPIKey{key.ID, k.Sequence, string(key.Tenant)})
	}
	for key, n := range s.Namespaces {
		j.Namespaces = append(j.Namespaces, baseNamespace{key.Cluster, key.Namespace, n.Sequence, string(n.Tenant)})
	}
	return j, nil
}

func (j *BaseJSON) sort() {
	slices.SortFunc(j.Tenants, func(a, b baseTenant) int { return cmp.Compare(a.Tenant, b.Tenant) })
	slices.SortFunc(j.Credentials, func(a, b baseCredential) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Credential, b.Credential))
	})
	slices.SortFunc(j.APIKeys, func(a, b baseAPIKey) int {
		return cmp.Or(cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.ID, b.ID))
	})
	slices.SortFunc(j.Namespaces, func(a, b baseNamespace) int {
		return cmp.Or(cmp.Compare(a.Cluster, b.Cluster), cmp.Compare(a.Namespace, b.Namespace))
	})
}

// Sign returns the signed row of a base that [Base.Change] returned. Error: when the base belongs to
// another chain or key.
func (b *Base) Sign(signer *dualsig.PrivateKey, chainID string) ([]byte, error) {
	if b.ChainID != chainID || b.KeyID != signer.Public().ID() {
		return nil, errors.New("signing a base: it is of another log")
	}
	text, err := b.signedJSON()
	if err != nil {
		return nil, fmt.Errorf("encoding a base: %w", err)
	}
	signature, err := signer.Sign(baseContext, frame.Join(baseContext, text))
	if err != nil {
		return nil, fmt.Errorf("signing a base: %w", err)
	}
	return slices.Concat([]byte{baseVersion}, signature, text), nil
}

// ErrBase means that the base of a log is malformed, or not signed with the log's key.
var ErrBase = errors.New("the base of the log is damaged, or not signed with the log's key")

// ParseBase parses a base and verifies it with the log's key. If key is nil, it uses the key that
// the base itself names. That proves only that the base is not damaged. Error: [ErrBase].
func ParseBase(in []byte, key *dualsig.PublicKey) (*Base, error) {
	if len(in) < 1+dualsig.SignatureSize {
		return nil, ErrBase
	}
	signature, text := in[1:1+dualsig.SignatureSize], in[1+dualsig.SignatureSize:]
	parse, encode, signed := parseSigned, (*Base).signedJSON, baseContext
	switch in[0] {
	case baseVersion:
	case formerBaseVersion:
		parse, encode, signed = parseFormer, (*Base).JSON, formerBaseContext
	default:
		return nil, ErrBase
	}
	b, err := parse(text)
	if err != nil {
		return nil, ErrBase
	}
	if key == nil {
		key = b.Public
	}
	again, err := encode(b)
	if err != nil || !bytes.Equal(again, text) || key.ID() != b.KeyID || !key.Verify(signed, frame.Join(signed, text), signature) {
		return nil, ErrBase
	}
	return b, nil
}

// parseFormer parses the JSON of a base of version 1. The base has all items.
func parseFormer(text []byte) (*Base, error) {
	var j BaseJSON
	if err := json.Unmarshal(text, &j, json.RejectUnknownMembers(true)); err != nil {
		return nil, ErrBase
	}
	return j.Base()
}

// Base returns the state that j describes. Error: [ErrBase].
func (j BaseJSON) Base() (*Base, error) {
	raw, ok1 := DecodeBase64(j.PublicKey)
	tree, ok2 := DecodeBase64(j.Tree)
	hash, ok3 := parseHash(j.Hash)
	if !ok1 || !ok2 || !ok3 || j.Sequence == 0 || j.Sequence > MaxInteger || j.ChainID == "" {
		return nil, ErrBase
	}
	key, err1 := dualsig.ParsePublicKey(raw)
	built, err2 := decodeTree(tree)
	if errors.Join(err1, err2) != nil {
		return nil, ErrBase
	}
	s := History{
		ChainID: j.ChainID, Public: key, KeyID: key.ID(), IsComplete: true, Hash: j.Hash,
		Head: Position{j.Sequence, j.Micros, hash}, Tree: *built,
		Epochs:      []Epoch{{Number: 1, First: 1}},
		Tenants:     make(map[string]*TenantState, len(j.Tenants)),
		Credentials: make(map[CredentialKey]CredentialState, len(j.Credentials)),
		APIKeys:     make(map[APIKeyName]APIKeyState, len(j.APIKeys)),
		Namespaces:  make(map[NamespaceName]NamespaceState, len(j.Namespaces)),
	}
	for _, e := range j.Epochs {
		last := s.Epochs[len(s.Epochs)-1]
		if e.Number <= last.Number || e.Size <= last.Size || e.First < e.LostFrom || e.LostFrom != last.First+uint64(e.Size-last.Size) {
			return nil, ErrBase
		}
		s.Epochs = append(s.Epochs, Epoch{e.Number, e.First, e.Size})
		s.Lost = append(s.Lost, Rollback{Epoch: e.Number, LostFrom: e.LostFrom, LostTo: e.First - 1, Receipt: Receipt{e.First, e.Hash}})
	}
	if index, ok := IndexOf(s.Epochs, j.Sequence); !ok || index+1 != s.Tree.Size {
		return nil, ErrBase
	}
	for _, core := range j.Kept {
		e, err := parse([]byte(core), false)
		if err != nil {
			return nil, ErrBase
		}
		s.Kept = append(s.Kept, e)
	}
	for _, t := range j.Tenants {
		last, ok := t.Last.position()
		if !ok {
			return nil, ErrBase
		}
		s.Tenants[t.Tenant] = &TenantState{t.Sequence, t.Last.Hash, last}
	}
	for _, c := range j.Credentials {
		current, ok := c.Current.position()
		if !ok {
			return nil, ErrBase
		}
		of := CredentialState{Sequence: c.Sequence, Version: c.Version, Digest: c.Digest, Current: current}
		if c.Previous != nil {
			of.Previous = PreviousVersion{c.Previous.Version, c.Previous.Digest}
		}
		s.Credentials[CredentialKey{authz.TenantID(c.Tenant), c.Credential}] = of
	}
	for _, k := range j.APIKeys {
		s.APIKeys[APIKeyName{authz.TenantID(k.Tenant), k.ID}] = APIKeyState{Sequence: k.Sequence}
	}
	for _, n := range j.Namespaces {
		s.Namespaces[NamespaceName{n.Cluster, n.Namespace}] = NamespaceState{n.Sequence, authz.TenantID(n.Tenant)}
	}
	return &Base{History: s}, nil
}

func (k Position) json() basePosition {
	return basePosition{hex.EncodeToString(k.Hash[:]), k.Micros, k.Sequence}
}

func (k basePosition) position() (Position, bool) {
	hash, ok := parseHash(k.Hash)
	return Position{k.Sequence, k.Micros, hash}, ok
}

// parseHash parses 64 digits of lower-case hex.
func parseHash(s string) (hash [32]byte, ok bool) {
	n, err := hex.Decode(hash[:], []byte(s[:min(len(s), 64)]))
	return hash, err == nil && n == len(hash) && hex.EncodeToString(hash[:]) == s
}

// Equal reports whether both bases have the same content. Either may be nil.
func (b *Base) Equal(other *Base) bool {
	if b == nil || other == nil || b == other {
		return b == other
	}
	ours, err1 := b.JSON()
	theirs, err2 := other.JSON()
	return errors.Join(err1, err2) == nil && bytes.Equal(ours, theirs)
}
