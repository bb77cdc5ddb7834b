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
//	1 ‖ ML-DSA-65 signature (3309 bytes) ‖ JSON
//
// The JSON has the fields of baseJSON in the order of their names and sorted lists, and no other
// spelling is accepted. The base lists only credentials that were not deleted and API keys that
// were not revoked by then. A Base does not change after it is made.
type Base struct{ history }

const (
	baseVersion = 1
	baseContext = "latticekeep/audit-base/v1"
)

// Sequence returns the sequence of the last entry that the base covers.
func (b *Base) Sequence() uint64 { return b.head.sequence }

// Hash returns the hash of the last entry that the base covers, in lower-case hex.
func (b *Base) Hash() string { return b.hash }

// Size returns the number of entries that the base covers.
func (b *Base) Size() int64 { return b.tree.size }

type baseJSON struct {
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
	Last     baseLink `json:"last"`
	Sequence uint64   `json:"sequence"` // tenant sequence
	Tenant   string   `json:"tenant"`
}

type baseCredential struct {
	Credential string      `json:"credential"`
	Current    baseLink    `json:"current"`
	Digest     string      `json:"digest"`
	Former     *baseFormer `json:"former,omitzero"`
	Sequence   uint64      `json:"sequence"`
	Tenant     string      `json:"tenant"`
	Version    string      `json:"version"`
}

type baseFormer struct {
	Digest  string `json:"digest"`
	Version string `json:"version"`
}

type baseLink struct {
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

func (s history) clone() history {
	s.epochs, s.lost, s.kept = slices.Clone(s.epochs), slices.Clone(s.lost), slices.Clone(s.kept)
	s.credentials, s.apiKeys, s.namespaces = maps.Clone(s.credentials), maps.Clone(s.apiKeys), maps.Clone(s.namespaces)
	tenants := make(map[string]*tenantState, len(s.tenants))
	for name, t := range s.tenants {
		copied := *t
		tenants[name] = &copied
	}
	s.tenants = tenants
	edge := make([][]tlog.Hash, len(s.tree.edge))
	for i, hashes := range s.tree.edge {
		edge[i] = append(make([]tlog.Hash, 0, tileWidth), hashes...)
	}
	s.tree = treeBuilder{size: s.tree.size, edge: edge}
	return s
}

func (b *Base) json() ([]byte, error) {
	s := b.history
	j := baseJSON{
		ChainID: s.chainID, Hash: s.hash, Micros: s.head.micros, Sequence: s.head.sequence,
		PublicKey: base64.StdEncoding.EncodeToString(s.public.Bytes()),
		Tree:      base64.StdEncoding.EncodeToString(s.tree.encode()),
	}
	for i, e := range s.epochs[1:] {
		j.Epochs = append(j.Epochs, baseEpoch{First: e.first, Hash: s.lost[i].Hash, LostFrom: s.lost[i].LostFrom, Number: e.number, Size: e.size})
	}
	for _, e := range s.kept {
		core, err := e.canonical(nil, false)
		if err != nil {
			return nil, err
		}
		j.Kept = append(j.Kept, string(core))
	}
	for name, t := range s.tenants {
		j.Tenants = append(j.Tenants, baseTenant{Last: t.last.json(), Sequence: t.sequence, Tenant: name})
	}
	for key, c := range s.credentials {
		of := baseCredential{
			Credential: key.Credential, Digest: c.Digest, Sequence: c.Sequence, Tenant: string(key.Tenant), Version: c.Version,
			Current: c.current.json(),
		}
		if c.Former != (Former{}) {
			of.Former = &baseFormer{c.Former.Digest, c.Former.Version}
		}
		j.Credentials = append(j.Credentials, of)
	}
	for key, k := range s.apiKeys {
		j.APIKeys = append(j.APIKeys, baseAPIKey{key.ID, k.Sequence, string(key.Tenant)})
	}
	for key, n := range s.namespaces {
		j.Namespaces = append(j.Namespaces, baseNamespace{key.Cluster, key.Namespace, n.Sequence, string(n.Tenant)})
	}
	j.sort()
	return json.Marshal(j)
}

func (j *baseJSON) sort() {
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

// sign returns the signed encoding of the base. Error: when the base belongs to another chain or
// key.
func (b *Base) sign(signer *dualsig.PrivateKey, chainID string) ([]byte, error) {
	if b.chainID != chainID || b.keyID != signer.Public().ID() {
		return nil, errors.New("signing a base: it is of another log")
	}
	text, err := b.json()
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
	if len(in) < 1+dualsig.SignatureSize || in[0] != baseVersion {
		return nil, ErrBase
	}
	signature, text := in[1:1+dualsig.SignatureSize], in[1+dualsig.SignatureSize:]
	var j baseJSON
	if err := json.Unmarshal(text, &j, json.RejectUnknownMembers(true)); err != nil {
		return nil, ErrBase
	}
	b, err := j.base()
	if err != nil {
		return nil, ErrBase
	}
	if key == nil {
		key = b.public
	}
	again, err := b.json()
	if err != nil || !bytes.Equal(again, text) || key.ID() != b.keyID || !key.Verify(baseContext, frame.Join(baseContext, text), signature) {
		return nil, ErrBase
	}
	return b, nil
}

func (j baseJSON) base() (*Base, error) {
	raw, ok1 := decodeBase64(j.PublicKey)
	tree, ok2 := decodeBase64(j.Tree)
	hash, ok3 := parseHash(j.Hash)
	if !ok1 || !ok2 || !ok3 || j.Sequence == 0 || j.Sequence > maxInteger || j.ChainID == "" {
		return nil, ErrBase
	}
	key, err1 := dualsig.ParsePublicKey(raw)
	built, err2 := decodeTree(tree)
	if errors.Join(err1, err2) != nil {
		return nil, ErrBase
	}
	s := history{
		chainID: j.ChainID, public: key, keyID: key.ID(), whole: true, hash: j.Hash,
		head: link{j.Sequence, j.Micros, hash}, tree: *built,
		epochs:      []epoch{{number: 1, first: 1}},
		tenants:     make(map[string]*tenantState, len(j.Tenants)),
		credentials: make(map[CredentialKey]State, len(j.Credentials)),
		apiKeys:     make(map[APIKeyName]APIKeyState, len(j.APIKeys)),
		namespaces:  make(map[NamespaceName]NamespaceState, len(j.Namespaces)),
	}
	for _, e := range j.Epochs {
		last := s.epochs[len(s.epochs)-1]
		if e.Number <= last.number || e.Size <= last.size || e.First < e.LostFrom || e.LostFrom != last.first+uint64(e.Size-last.size) {
			return nil, ErrBase
		}
		s.epochs = append(s.epochs, epoch{e.Number, e.First, e.Size})
		s.lost = append(s.lost, Rollback{Epoch: e.Number, LostFrom: e.LostFrom, LostTo: e.First - 1, Receipt: Receipt{e.First, e.Hash}})
	}
	if index, ok := indexOf(s.epochs, j.Sequence); !ok || index+1 != s.tree.size {
		return nil, ErrBase
	}
	for _, core := range j.Kept {
		e, err := parse([]byte(core), false)
		if err != nil {
			return nil, ErrBase
		}
		s.kept = append(s.kept, e)
	}
	for _, t := range j.Tenants {
		last, ok := t.Last.link()
		if !ok {
			return nil, ErrBase
		}
		s.tenants[t.Tenant] = &tenantState{t.Sequence, t.Last.Hash, last}
	}
	for _, c := range j.Credentials {
		current, ok := c.Current.link()
		if !ok {
			return nil, ErrBase
		}
		of := State{Sequence: c.Sequence, Version: c.Version, Digest: c.Digest, current: current}
		if c.Former != nil {
			of.Former = Former{c.Former.Version, c.Former.Digest}
		}
		s.credentials[CredentialKey{authz.TenantID(c.Tenant), c.Credential}] = of
	}
	for _, k := range j.APIKeys {
		s.apiKeys[APIKeyName{authz.TenantID(k.Tenant), k.ID}] = APIKeyState{Sequence: k.Sequence}
	}
	for _, n := range j.Namespaces {
		s.namespaces[NamespaceName{n.Cluster, n.Namespace}] = NamespaceState{n.Sequence, authz.TenantID(n.Tenant)}
	}
	return &Base{s}, nil
}

func (k link) json() baseLink { return baseLink{hex.EncodeToString(k.hash[:]), k.micros, k.sequence} }

func (k baseLink) link() (link, bool) {
	hash, ok := parseHash(k.Hash)
	return link{k.Sequence, k.Micros, hash}, ok
}

// parseHash parses 64 digits of lower-case hex.
func parseHash(s string) (hash [32]byte, ok bool) {
	n, err := hex.Decode(hash[:], []byte(s[:min(len(s), 64)]))
	return hash, err == nil && n == len(hash) && hex.EncodeToString(hash[:]) == s
}

// equal reports whether both bases have the same content. Either may be nil.
func (b *Base) equal(other *Base) bool {
	if b == nil || other == nil || b == other {
		return b == other
	}
	ours, err1 := b.json()
	theirs, err2 := other.json()
	return errors.Join(err1, err2) == nil && bytes.Equal(ours, theirs)
}
