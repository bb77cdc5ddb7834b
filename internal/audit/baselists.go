package audit

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/store"
)

// BaseListRange holds the rows of the lists.
var BaseListRange = store.Prefix([]byte("audit/base/"))

// Letters of the lists.
const (
	listAPIKeys     = 'a'
	listCredentials = 'c'
	listKept        = 'k'
	listNamespaces  = 'n'
	listTenants     = 't'
)

// BaseLists are letters of lists, such as [AllLists].
type BaseLists string

const (
	AllLists    BaseLists = "acknt"
	TenantsList BaseLists = "t" // the ends of the parts of tenants: all that links need
	KeptList    BaseLists = "k"
)

// itemName returns the name of an item from its JSON.
func itemName(list byte, text []byte) ([]string, error) {
	var j BaseJSON
	if err := j.add(list, text); err != nil {
		return nil, ErrBase
	}
	for _, it := range j.names() {
		return it.name, nil
	}
	return nil, ErrBase
}

// add adds an item to its list. Error: [ErrBase].
func (j *BaseJSON) add(list byte, text []byte) error {
	var err error
	switch list {
	case listAPIKeys:
		j.APIKeys, err = appendJSON(j.APIKeys, text)
	case listCredentials:
		j.Credentials, err = appendJSON(j.Credentials, text)
	case listKept:
		j.Kept, err = appendJSON(j.Kept, text)
	case listNamespaces:
		j.Namespaces, err = appendJSON(j.Namespaces, text)
	case listTenants:
		j.Tenants, err = appendJSON(j.Tenants, text)
	default:
		err = ErrBase
	}
	return err
}

func appendJSON[T any](list []T, text []byte) ([]T, error) {
	var item T
	if err := json.Unmarshal(text, &item, json.RejectUnknownMembers(true)); err != nil {
		return nil, ErrBase
	}
	return append(list, item), nil
}

// namedItem is an item of a list with its name.
type namedItem struct {
	list byte
	name []string
	item any
}

// names returns all items of all lists.
func (j *BaseJSON) names() (all []namedItem) {
	for _, k := range j.APIKeys {
		all = append(all, namedItem{listAPIKeys, []string{k.Tenant, k.ID}, k})
	}
	for _, c := range j.Credentials {
		all = append(all, namedItem{listCredentials, []string{c.Tenant, c.Credential}, c})
	}
	for _, core := range j.Kept {
		if e, err := parse([]byte(core), false); err == nil {
			all = append(all, namedItem{listKept, []string{strconv.FormatUint(e.Sequence, 10)}, core})
		}
	}
	for _, n := range j.Namespaces {
		all = append(all, namedItem{listNamespaces, []string{n.Cluster, n.Namespace}, n})
	}
	for _, t := range j.Tenants {
		all = append(all, namedItem{listTenants, []string{t.Tenant}, t})
	}
	return all
}

// HasRows reports whether the items of the base are in rows of the store.
func (b *Base) HasRows() bool { return b.lists != nil }

// Touched are the names of items that entries may change.
type Touched map[touchedItem]bool

type touchedItem struct {
	list byte
	path [2 * sha256.Size]byte
}

func (t Touched) note(list byte, name ...string) {
	t[touchedItem{list, itemPath(list, name...)}] = true
}

// Note adds what an entry may change.
func (t Touched) Note(e *Entry) {
	t.note(listTenants, e.TenantID)
	switch e.EventType {
	case APIKeyCreated, APIKeyRevoked:
		t.note(listAPIKeys, e.TenantID, e.Resource.ID)
	default:
		if e.Resource.Type == CredentialResource {
			t.note(listCredentials, e.TenantID, e.Resource.ID)
		}
	}
}

// Get reads a row.
type Get func(key []byte) ([]byte, error)

// With returns the base with those of its items that may change. Of a base with version 1 it has all.
// Error: [ErrBase] when a row is not the one that the base commits to.
func (b *Base) With(touched Touched, get Get) (*Base, error) {
	if b == nil || b.lists == nil {
		return b, nil
	}
	j, err := b.json()
	if err != nil {
		return nil, err
	}
	for it := range touched {
		t := listTrie{list: it.list, get: get}
		text, err := t.find(b.lists[it.list], it.path)
		if err == nil && text != nil {
			err = j.add(it.list, text)
		}
		if err != nil {
			return nil, err
		}
	}
	return b.from(j)
}

// Tenant returns the end of a tenant's part, nil if the tenant has no entry before the base. Error:
// [ErrBase] when a row is not the one that the base commits to.
func (b *Base) Tenant(tenant string, get Get) (*TenantState, error) {
	if b.lists == nil || b.Tenants[tenant] != nil {
		return b.Tenants[tenant], nil
	}
	with, err := b.With(Touched{{listTenants, itemPath(listTenants, tenant)}: true}, get)
	if err != nil {
		return nil, err
	}
	return with.Tenants[tenant], nil
}

// from returns the base that j describes, with the lists of b.
func (b *Base) from(j BaseJSON) (*Base, error) {
	j.sort()
	with, err := j.Base()
	if err != nil {
		return nil, err
	}
	slices.SortFunc(with.Kept, func(a, b *Entry) int { return cmp.Compare(a.Sequence, b.Sequence) })
	with.lists = b.lists
	return with, nil
}

// ReadLists returns the base with all items of some lists. A base of version 1 has all of them anyway.
// It reads many snapshots. Error: [ErrBase] when the rows are not those that the base commits to, such
// as when the base in the store is another one by now.
func (b *Base) ReadLists(ctx context.Context, s store.Store, lists BaseLists) (*Base, error) {
	var j BaseJSON
	if b.lists != nil {
		var err error
		if j, err = b.json(); err != nil {
			return nil, err
		}
	}
	expected := make(map[string]listNode) // nodes whose row must follow
	for _, list := range []byte(lists) {
		if n := b.lists[list]; n.count > 0 {
			expected[string(listKey(list, nil))] = n
		}
	}
	for _, list := range []byte(lists) {
		// Parents come before their children.
		err := ScanAll(ctx, s, store.Prefix(listKey(list, nil)), func(key, row []byte) error {
			n, ok := expected[string(key)]
			delete(expected, string(key))
			if !ok || sha256.Sum256(row) != n.hash {
				return ErrBase
			}
			if n.count <= leafItems {
				items, err := decodeLeaf(list, row)
				if err == nil && len(items) != int(n.count) {
					err = ErrBase
				}
				for _, it := range items {
					err = cmp.Or(err, j.add(list, it.text))
				}
				return err
			}
			children, err := decodeBranch(row)
			for i, c := range children {
				if c.count > 0 {
					expected[string(key)+"0123456789abcdef"[i:i+1]] = c
				}
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	if len(expected) > 0 {
		return nil, ErrBase
	}
	if b.lists == nil {
		return b, nil
	}
	return b.from(j)
}

// Change returns the base next, which continues b, with the lists that it then has, and the rows
// that change: nil for a row that is to be deleted. b is what [Base.With] returned for the touched
// items, nil for the beginning of the log; next has these items as they are now. Error: [ErrBase] when
// a row is not the one that b commits to.
func (b *Base) Change(next *Base, touched Touched, get Get) (*Base, map[string][]byte, error) {
	j, err := next.json()
	if err != nil {
		return nil, nil, err
	}
	changes, gone := make(map[byte][]listItem), maps.Clone(touched)
	for _, it := range j.names() {
		text, err := json.Marshal(it.item)
		if err != nil {
			return nil, nil, fmt.Errorf("encoding a base: %w", err)
		}
		path := itemPath(it.list, it.name...)
		changes[it.list] = append(changes[it.list], listItem{path, text})
		delete(gone, touchedItem{it.list, path})
	}
	for it := range gone {
		changes[it.list] = append(changes[it.list], listItem{path: it.path})
	}
	result, rows := &Base{History: next.History, lists: make(map[byte]listNode)}, make(map[string][]byte)
	for _, list := range []byte(AllLists) {
		slices.SortFunc(changes[list], func(x, y listItem) int { return bytes.Compare(x.path[:], y.path[:]) })
		var root listNode
		if b != nil {
			root = b.lists[list]
		}
		t := listTrie{list, get, rows}
		if root, err = t.update(nil, root, changes[list]); err != nil {
			return nil, nil, err
		}
		result.lists[list] = root
	}
	return result, rows, nil
}

// signedBase is the JSON of a base of version 2, with its fields in the order of their names.
type signedBase struct {
	ChainID   string      `json:"chain_id"`
	Epochs    []baseEpoch `json:"epochs"`
	Hash      string      `json:"hash"`
	Lists     signedLists `json:"lists"`
	Micros    int64       `json:"micros"`
	PublicKey string      `json:"public_key"`
	Sequence  uint64      `json:"sequence"`
	Tree      string      `json:"tree"`
}

type signedLists struct {
	APIKeys     signedList `json:"api_keys"`
	Credentials signedList `json:"credentials"`
	Kept        signedList `json:"kept"`
	Namespaces  signedList `json:"namespaces"`
	Tenants     signedList `json:"tenants"`
}

// signedList is the root of a list.
type signedList struct {
	Count uint64 `json:"count"`
	Hash  string `json:"hash"` // hash of the root; zeros for an empty list
}

// each visits the roots.
func (l *signedLists) each(visit func(list byte, root *signedList)) {
	visit(listAPIKeys, &l.APIKeys)
	visit(listCredentials, &l.Credentials)
	visit(listKept, &l.Kept)
	visit(listNamespaces, &l.Namespaces)
	visit(listTenants, &l.Tenants)
}

// signedJSON returns the JSON that is signed.
func (b *Base) signedJSON() ([]byte, error) {
	if b.lists == nil {
		return nil, errors.New("encoding a base: it has no lists")
	}
	bare := Base{History: b.History}
	bare.Credentials, bare.APIKeys, bare.Namespaces, bare.Tenants, bare.Kept = nil, nil, nil, nil, nil
	j, err := bare.json()
	if err != nil {
		return nil, err
	}
	s := signedBase{ChainID: j.ChainID, Epochs: j.Epochs, Hash: j.Hash, Micros: j.Micros, PublicKey: j.PublicKey, Sequence: j.Sequence, Tree: j.Tree}
	s.Lists.each(func(list byte, root *signedList) {
		n := b.lists[list]
		root.Count, root.Hash = n.count, hex.EncodeToString(n.hash[:])
	})
	return json.Marshal(s)
}

// parseSigned parses the JSON of a base of version 2. The base has no items.
func parseSigned(text []byte) (*Base, error) {
	var s signedBase
	if err := json.Unmarshal(text, &s, json.RejectUnknownMembers(true)); err != nil {
		return nil, ErrBase
	}
	b, err := BaseJSON{ChainID: s.ChainID, Epochs: s.Epochs, Hash: s.Hash, Micros: s.Micros, PublicKey: s.PublicKey, Sequence: s.Sequence, Tree: s.Tree}.Base()
	if err != nil {
		return nil, ErrBase
	}
	b.lists = make(map[byte]listNode)
	s.Lists.each(func(list byte, root *signedList) {
		hash, ok := parseHash(root.Hash)
		if !ok || (root.Count == 0) != (hash == [32]byte{}) {
			err = ErrBase
		}
		b.lists[list] = listNode{root.Count, hash}
	})
	return b, err
}
