package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	"github.com/latticekeep/latticekeep/internal/frame"
)

// The lists of a [Base] may have a million items, and a cut changes few of them. So each list is a
// Merkle trie over rows of its own, and the signed row of the base has the hashes of the roots.
//
// The path of an item is SHA-256 of its name, as 64 hex digits. A node stands for all items whose
// paths begin with its prefix, and is the row audit/base/<letter of the list>/<prefix>. It is a leaf
// with the items themselves, ordered by path, if there are at most 16, and a branch with the count and
// the hash of each of its 16 children otherwise. The hash of a node is SHA-256 of its row. An empty
// node has no row. So equal lists have equal rows, and an item is changed, proved or found absent with
// the rows on its path.
//
//	leaf   = 0 ‖ u32(length) ‖ JSON …
//	branch = 1 ‖ (u64(count) ‖ hash) × 16
const (
	leafNode, branchNode = 0, 1

	leafItems = 16
	childSize = 8 + sha256.Size
)

// listNode is what a parent, or the signed row for a root, says of a node.
type listNode struct {
	count uint64
	hash  [sha256.Size]byte
}

func nodeOf(count int, row []byte) listNode { return listNode{uint64(count), sha256.Sum256(row)} }

// listItem is an item of a list.
type listItem struct {
	path [2 * sha256.Size]byte // hex
	text []byte                // JSON; nil removes the item
}

func itemPath(list byte, name ...string) (path [2 * sha256.Size]byte) {
	fields := [][]byte{{list}}
	for _, n := range name {
		fields = append(fields, []byte(n))
	}
	sum := sha256.Sum256(frame.Join("latticekeep/audit-base-item/v1", fields...))
	hex.Encode(path[:], sum[:])
	return path
}

func listKey(list byte, prefix []byte) []byte {
	return append(append(bytes.Clone(BaseListRange.From), list, '/'), prefix...)
}

// listTrie reads and changes one list.
type listTrie struct {
	list byte
	get  func(key []byte) ([]byte, error)
	// changed has the rows that were changed, nil for one that is to be deleted.
	changed map[string][]byte
}

// read returns the row of a node. Error: [ErrBase] if it is not the one that the parent names.
func (t *listTrie) read(prefix []byte, n listNode) ([]byte, error) {
	key := listKey(t.list, prefix)
	row, ok := t.changed[string(key)]
	if !ok {
		var err error
		if row, err = t.get(key); err != nil {
			return nil, err
		}
	}
	if len(row) == 0 || sha256.Sum256(row) != n.hash {
		return nil, ErrBase
	}
	return row, nil
}

// put sets the row of a node, and returns what its parent says of it.
func (t *listTrie) put(prefix []byte, count int, row []byte) listNode {
	t.changed[string(listKey(t.list, prefix))] = row
	if row == nil {
		return listNode{}
	}
	return nodeOf(count, row)
}

// find returns the JSON of an item, nil if the list lacks it.
func (t *listTrie) find(root listNode, path [2 * sha256.Size]byte) ([]byte, error) {
	n, depth := root, 0
	for ; n.count > leafItems && depth < len(path); depth++ {
		row, err := t.read(path[:depth], n)
		if err != nil {
			return nil, err
		}
		children, err := decodeBranch(row)
		if err != nil {
			return nil, err
		}
		n = children[digit(path[depth])]
	}
	items, err := t.leaf(path[:depth], n)
	for _, it := range items {
		if it.path == path {
			return it.text, nil
		}
	}
	return nil, err
}

// leaf returns the items of a node with at most leafItems.
func (t *listTrie) leaf(prefix []byte, n listNode) ([]listItem, error) {
	if n.count == 0 {
		return nil, nil
	}
	row, err := t.read(prefix, n)
	if err != nil {
		return nil, err
	}
	items, err := decodeLeaf(t.list, row)
	if err == nil && len(items) != int(n.count) {
		err = ErrBase
	}
	return items, err
}

// update changes the items below a node, and returns what its parent is to say of it then. The
// changes are ordered by path, each path once.
func (t *listTrie) update(prefix []byte, n listNode, changes []listItem) (listNode, error) {
	if len(changes) == 0 {
		return n, nil
	}
	if n.count <= leafItems {
		items, err := t.leaf(prefix, n)
		if err != nil {
			return listNode{}, err
		}
		return t.build(prefix, merged(items, changes), n.count > 0), nil
	}
	row, err := t.read(prefix, n)
	if err != nil {
		return listNode{}, err
	}
	children, err := decodeBranch(row)
	if err != nil {
		return listNode{}, err
	}
	total := 0
	for i := range children {
		var below []listItem
		below, changes = cutItems(changes, len(prefix), i)
		if children[i], err = t.update(child(prefix, i), children[i], below); err != nil {
			return listNode{}, err
		}
		total += int(children[i].count)
	}
	if total > leafItems {
		return t.put(prefix, total, encodeBranch(children)), nil
	}
	var items []listItem // the branch becomes a leaf
	for i, c := range children {
		more, err := t.leaf(child(prefix, i), c)
		if err != nil {
			return listNode{}, err
		}
		items = append(items, more...)
		if c.count > 0 {
			t.put(child(prefix, i), 0, nil)
		}
	}
	return t.build(prefix, items, true), nil
}

// build makes the node of items, ordered by path, and those below it. stored says that the node has a
// row.
func (t *listTrie) build(prefix []byte, items []listItem, stored bool) listNode {
	switch {
	case len(items) == 0 && !stored:
		return listNode{}
	case len(items) == 0:
		return t.put(prefix, 0, nil)
	case len(items) <= leafItems:
		return t.put(prefix, len(items), encodeLeaf(items))
	}
	var children [16]listNode
	rest := items
	for i := range children {
		var below []listItem
		below, rest = cutItems(rest, len(prefix), i)
		children[i] = t.build(child(prefix, i), below, false)
	}
	return t.put(prefix, len(items), encodeBranch(children))
}

// cutItems cuts off the items whose paths have the digit i at a depth.
func cutItems(items []listItem, depth, i int) (below, rest []listItem) {
	n := 0
	for n < len(items) && digit(items[n].path[depth]) == i {
		n++
	}
	return items[:n], items[n:]
}

func child(prefix []byte, i int) []byte {
	return append(prefix[:len(prefix):len(prefix)], "0123456789abcdef"[i])
}

func digit(c byte) int {
	if c >= 'a' {
		return int(c-'a') + 10
	}
	return int(c - '0')
}

// merged returns the items after the changes. Both are ordered by path.
func merged(items, changes []listItem) []listItem {
	var all []listItem
	for len(items) > 0 || len(changes) > 0 {
		order := 1
		switch {
		case len(changes) == 0:
			order = -1
		case len(items) > 0:
			order = bytes.Compare(items[0].path[:], changes[0].path[:])
		}
		if order < 0 {
			all, items = append(all, items[0]), items[1:]
			continue
		}
		if order == 0 {
			items = items[1:]
		}
		if changes[0].text != nil {
			all = append(all, changes[0])
		}
		changes = changes[1:]
	}
	return all
}

func encodeLeaf(items []listItem) []byte {
	row := []byte{leafNode}
	for _, it := range items {
		row = binary.BigEndian.AppendUint32(row, uint32(len(it.text)))
		row = append(row, it.text...)
	}
	return row
}

func decodeLeaf(list byte, row []byte) (items []listItem, err error) {
	if len(row) < 1 || row[0] != leafNode {
		return nil, ErrBase
	}
	for row = row[1:]; len(row) > 0; {
		if len(row) < 4 || uint64(len(row)-4) < uint64(binary.BigEndian.Uint32(row)) {
			return nil, ErrBase
		}
		n := binary.BigEndian.Uint32(row)
		text := bytes.Clone(row[4 : 4+n])
		row = row[4+n:]
		name, err := itemName(list, text)
		if err != nil {
			return nil, err
		}
		items = append(items, listItem{itemPath(list, name...), text})
	}
	return items, nil
}

func encodeBranch(children [16]listNode) []byte {
	row := make([]byte, 1, 1+16*childSize)
	row[0] = branchNode
	for _, c := range children {
		row = binary.BigEndian.AppendUint64(row, c.count)
		row = append(row, c.hash[:]...)
	}
	return row
}

func decodeBranch(row []byte) (children [16]listNode, err error) {
	if len(row) != 1+16*childSize || row[0] != branchNode {
		return children, ErrBase
	}
	for i := range children {
		at := row[1+i*childSize:]
		children[i] = listNode{binary.BigEndian.Uint64(at), [sha256.Size]byte(at[8:])}
	}
	return children, nil
}
