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

// BatchContext is the label and the ML-DSA context of the signature of a group. It separates this
// signature from all other signatures in this program.
const BatchContext = "latticekeep/audit-batch/v1"

// BatchProof proves that an entry is one of a group that has one signature. It is the entry's index
// in the RFC 6962 tree over the hashes of the group.
type BatchProof struct {
	N, Index uint32
	Path     []byte // hashes from the leaf's sibling upwards, 32 bytes each
}

// BatchMessage returns the message that is signed for a group of n entries.
func BatchMessage(n uint32, root [32]byte) []byte {
	return frame.Join(BatchContext, binary.BigEndian.AppendUint32(nil, n), root[:])
}

// PathLength returns how many hashes lead from a leaf to the root of a tree of n leaves (RFC 6962
// §2.1.1). The path has one hash for each level on which it has a sibling.
func PathLength(n, index uint32) int {
	// Below the level where the paths of this leaf and of the last leaf meet, every node has a
	// sibling. Above that level, only right children have one.
	inner := bits.Len32(index ^ (n - 1))
	return inner + bits.OnesCount32(index>>inner)
}

// root computes the root of the tree from a leaf and the path.
func (p BatchProof) root(leaf [32]byte) [32]byte {
	hash := LeafHash(leaf)
	inner := bits.Len32(p.Index ^ (p.N - 1))
	for i, path := 0, p.Path; len(path) > 0; i, path = i+1, path[32:] {
		if i < inner && p.Index>>i&1 == 0 {
			hash = nodeHash(hash[:], path[:32])
		} else {
			hash = nodeHash(path[:32], hash[:])
		}
	}
	return hash
}

// LeafHash returns the hash of a leaf, SHA-256(0 ‖ data) (RFC 6962, section 2.1).
func LeafHash(data [32]byte) [32]byte {
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

// BatchTree is the tree over the hashes of a group, level by level. A node without a sibling moves
// up to the next level unchanged.
type BatchTree [][][32]byte

// NewBatchTree returns the tree over the hashes of at least one entry.
func NewBatchTree(hashes [][32]byte) BatchTree {
	level := make([][32]byte, len(hashes))
	for i, h := range hashes {
		level[i] = LeafHash(h)
	}
	t := BatchTree{level}
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

// Root returns the root, the value that the signature of a group covers.
func (t BatchTree) Root() [32]byte { return t[len(t)-1][0] }

// appendPath appends the hashes that lead from a leaf to the root.
func (t BatchTree) appendPath(dst []byte, index int) []byte {
	for _, level := range t {
		if sibling := index ^ 1; sibling < len(level) {
			dst = append(dst, level[sibling][:]...)
		}
		index /= 2
	}
	return dst
}

// signatureVersion is the first byte of the signature of an entry in a group: version ‖ u32 n ‖ u32
// index ‖ path ‖ ML-DSA-65. The signature of a single entry is only the 3309 bytes of ML-DSA-65, so
// its length tells the two forms apart.
const signatureVersion = 2

func (p BatchProof) encode(signature []byte) []byte {
	b := make([]byte, 0, 9+len(p.Path)+len(signature))
	b = append(b, signatureVersion)
	b = binary.BigEndian.AppendUint32(b, p.N)
	b = binary.BigEndian.AppendUint32(b, p.Index)
	b = append(b, p.Path...)
	return append(b, signature...)
}

// DecodeSignature decodes the signature of an entry in either form. For a single entry it returns a
// proof with n zero.
func DecodeSignature(b []byte) (p BatchProof, signature []byte, ok bool) {
	if len(b) == dualsig.SignatureSize {
		return BatchProof{}, b, true
	}
	if len(b) < 9+dualsig.SignatureSize || b[0] != signatureVersion {
		return BatchProof{}, nil, false
	}
	p = BatchProof{N: binary.BigEndian.Uint32(b[1:]), Index: binary.BigEndian.Uint32(b[5:])}
	p.Path, signature = b[9:len(b)-dualsig.SignatureSize], b[len(b)-dualsig.SignatureSize:]
	if p.N < 2 || p.Index >= p.N || len(p.Path) != 32*PathLength(p.N, p.Index) {
		return BatchProof{}, nil, false
	}
	return p, signature, true
}

// Verify reports whether key has signed the hash of the entry, or the root of a group that contains
// the hash. It accepts only canonical base64. The memo may be nil.
func (e *Entry) Verify(key *dualsig.PublicKey, m *Memo) bool {
	var hash [32]byte
	if n, err := hex.Decode(hash[:], []byte(e.Hash)); err != nil || n != len(hash) {
		return false
	}
	b, ok := DecodeBase64(e.Signature)
	if !ok {
		return false
	}
	p, signature, ok := DecodeSignature(b)
	if !ok {
		return false
	}
	return p.verify(key, hash, signature, m)
}

func (p BatchProof) verify(key *dualsig.PublicKey, hash [32]byte, signature []byte, m *Memo) bool {
	if p.N == 0 {
		return key.Verify(SigningContext, hash[:], signature)
	}
	return m.verify(key, p.N, p.root(hash), signature)
}

// Memo caches the results of verifying the signatures of recent groups, because entries of one
// group follow one another. The zero value is ready for use, and a nil memo caches nothing. A memo
// is safe for concurrent use. It must be used with one key only.
type Memo struct {
	mu     sync.Mutex
	groups map[[32]byte]func() bool
}

// maxMemo is the largest number of cached groups. A full cache is emptied.
const maxMemo = 1024

func (m *Memo) verify(key *dualsig.PublicKey, n uint32, root [32]byte, signature []byte) bool {
	message := BatchMessage(n, root)
	verify := func() bool { return key.Verify(BatchContext, message, signature) }
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

// DecodeBase64 decodes standard base64 and accepts only the canonical spelling. Go's decoder alone
// would skip line breaks.
func DecodeBase64(s string) ([]byte, bool) {
	b, err := base64.StdEncoding.DecodeString(s)
	return b, err == nil && base64.StdEncoding.EncodeToString(b) == s
}
