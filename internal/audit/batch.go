package audit

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"math/bits"
	"slices"
	"sync"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// batchContext separates the signature of a group from everything else ML-DSA
// signs here, and is the label of what it signs.
const batchContext = "latticekeep/audit-batch/v1"

// batchProof shows that an entry is one of a group that was signed as a whole:
// its place in the RFC 6962 tree over the group's hashes.
type batchProof struct {
	n, index uint32
	path     []byte // the hashes from the leaf's sibling up, 32 bytes each
}

// batchMessage is what is signed for a group of n entries.
func batchMessage(n uint32, root [32]byte) []byte {
	return frame.Join(batchContext, binary.BigEndian.AppendUint32(nil, n), root[:])
}

// pathLength returns how many hashes lead from a leaf to the root of a tree of
// n leaves (RFC 6962 §2.1.1): one for each level on which it has a sibling.
func pathLength(n, index uint32) int {
	// Below the level where the paths of this leaf and of the last one meet,
	// every node has a sibling; above it only those that are right children.
	inner := bits.Len32(index ^ (n - 1))
	return inner + bits.OnesCount32(index>>inner)
}

// root returns that of the tree which the path leads to from a leaf.
func (p batchProof) root(leaf [32]byte) [32]byte {
	hash := leafHash(leaf)
	inner := bits.Len32(p.index ^ (p.n - 1))
	for i, path := 0, p.path; len(path) > 0; i, path = i+1, path[32:] {
		if i < inner && p.index>>i&1 == 0 {
			hash = nodeHash(hash[:], path[:32])
		} else {
			hash = nodeHash(path[:32], hash[:])
		}
	}
	return hash
}

func leafHash(data [32]byte) [32]byte {
	var b [33]byte
	copy(b[1:], data[:])
	return sha256.Sum256(b[:])
}

func nodeHash(left, right []byte) [32]byte {
	var b [65]byte
	b[0] = 1
	copy(b[1:], left)
	copy(b[33:], right)
	return sha256.Sum256(b[:])
}

// batchTree is the tree over the hashes of a group, level by level; a node
// without a sibling is on the next level as it is.
type batchTree [][][32]byte

func newBatchTree(hashes [][32]byte) batchTree {
	level := make([][32]byte, len(hashes))
	for i, h := range hashes {
		level[i] = leafHash(h)
	}
	t := batchTree{level}
	for len(level) > 1 {
		next := make([][32]byte, 0, (len(level)+1)/2)
		for i := 0; i+1 < len(level); i += 2 {
			next = append(next, nodeHash(level[i][:], level[i+1][:]))
		}
		if len(level)%2 == 1 {
			next = append(next, level[len(level)-1])
		}
		t, level = append(t, next), next
	}
	return t
}

func (t batchTree) root() [32]byte { return t[len(t)-1][0] }

// appendPath appends the hashes that lead from a leaf to the root.
func (t batchTree) appendPath(dst []byte, index int) []byte {
	for _, level := range t {
		if sibling := index ^ 1; sibling < len(level) {
			dst = append(dst, level[sibling][:]...)
		}
		index /= 2
	}
	return dst
}

// signatureVersion begins the signature of an entry that was signed in a group:
// version ‖ u32 n ‖ u32 index ‖ path ‖ ML-DSA-65. A plain signature is nothing
// but the 3309 bytes, which is shorter than any of these.
const signatureVersion = 2

func (p batchProof) encode(signature []byte) []byte {
	b := make([]byte, 0, 9+len(p.path)+len(signature))
	b = append(b, signatureVersion)
	b = binary.BigEndian.AppendUint32(b, p.n)
	b = binary.BigEndian.AppendUint32(b, p.index)
	b = append(b, p.path...)
	return append(b, signature...)
}

// decodeSignature reads the signature of an entry, in either form. The proof of
// a plain one has n zero.
func decodeSignature(b []byte) (p batchProof, signature []byte, ok bool) {
	if len(b) == dualsig.SignatureSize {
		return batchProof{}, b, true
	}
	if len(b) < 9+dualsig.SignatureSize || b[0] != signatureVersion {
		return batchProof{}, nil, false
	}
	p = batchProof{n: binary.BigEndian.Uint32(b[1:]), index: binary.BigEndian.Uint32(b[5:])}
	p.path, signature = b[9:len(b)-dualsig.SignatureSize], b[len(b)-dualsig.SignatureSize:]
	if p.n < 2 || p.index >= p.n || len(p.path) != 32*pathLength(p.n, p.index) {
		return batchProof{}, nil, false
	}
	return p, signature, true
}

// verify reports whether the signature is key's over the hash, or over the root
// of a group that the hash is in, in the one spelling that base64 has for it.
// The memo may be nil.
func (e *Entry) verify(key *dualsig.PublicKey, m *memo) bool {
	var hash [32]byte
	if n, err := hex.Decode(hash[:], []byte(e.Hash)); err != nil || n != len(hash) {
		return false
	}
	b, ok := decodeBase64(e.Signature)
	if !ok {
		return false
	}
	p, signature, ok := decodeSignature(b)
	if !ok {
		return false
	}
	return p.verify(key, hash, signature, m)
}

func (p batchProof) verify(key *dualsig.PublicKey, hash [32]byte, signature []byte, m *memo) bool {
	if p.n == 0 {
		return key.Verify(signingContext, hash[:], signature)
	}
	return m.verify(key, p.n, p.root(hash), signature)
}

// memo remembers what the newest groups came to, since the entries of a group
// follow one another. The zero value is ready, nil remembers nothing, and it is
// safe for concurrent use. It is for one key.
type memo struct {
	mu     sync.Mutex
	groups map[[32]byte]func() bool
}

// maxMemo bounds the groups that are remembered.
const maxMemo = 1024

func (m *memo) verify(key *dualsig.PublicKey, n uint32, root [32]byte, signature []byte) bool {
	message := batchMessage(n, root)
	verify := func() bool { return key.Verify(batchContext, message, signature) }
	if m == nil {
		return verify()
	}
	group := sha256.Sum256(slices.Concat(message, signature))
	m.mu.Lock()
	once, known := m.groups[group]
	if !known {
		if len(m.groups) >= maxMemo || m.groups == nil {
			m.groups = make(map[[32]byte]func() bool)
		}
		once = sync.OnceValue(verify)
		m.groups[group] = once
	}
	m.mu.Unlock()
	return once()
}

// decodeBase64 accepts the one standard spelling only: Go's decoder would skip
// line breaks.
func decodeBase64(s string) ([]byte, bool) {
	b, err := base64.StdEncoding.DecodeString(s)
	return b, err == nil && base64.StdEncoding.EncodeToString(b) == s
}
