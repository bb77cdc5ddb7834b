// Package dualsig signs with ML-DSA-65 (FIPS 204). It does so alone where others must verify, and
// together with HMAC-SHA-512 where only the vault verifies.
//
// A dual signature is valid when both parts are valid. Both parts are always made, and both are
// always evaluated over the same framed bytes. These name the pair of algorithms, the key version
// and the ML-DSA-65 key. The MAC also covers the ML-DSA-65 signature. So neither part can be
// stripped, swapped or taken from another signature, and nothing in a signature chooses how it is
// verified. An attacker who breaks or steals one of the two keys still cannot forge a signature.
// The MAC proves nothing to third parties; the ML-DSA-65 part does. A signature of a caller's data
// has the same two parts as separate pieces, and its ML-DSA-65 part covers the bare data
// ([Key.SignData]).
//
// Signing is hedged. circl's crypto.Signer is deterministic and ignores its reader, so only
// mldsa65.SignTo with randomized = true is used. Keys are seeds, and every length is checked before
// circl gets the input. The package is pure and keeps no keys. The caller chooses the context for
// each use.
package dualsig

import (
	"crypto/hmac"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"sync"

	"github.com/latticekeep/latticekeep/internal/frame"
)

// Sizes in bytes.
const (
	// MACKeySize is the only length of a MAC key. HMAC pads shorter keys with zeros, so without
	// this rule a key and the same key followed by zeros would be equal.
	MACKeySize = 64
	MACSize    = sha512.Size

	dualHeader = 1 + 4
	// DualSize is the size of a dual signature.
	DualSize = dualHeader + SignatureSize + MACSize
)

const (
	version = 1

	algorithms = "ML-DSA-65+HMAC-SHA-512"
	labelDual  = "latticekeep/dual-signature/v1"
	labelMAC   = "latticekeep/dual-signature/mac/v1"

	maxMessage = 64 << 20
)

// Key makes and verifies dual signatures. It is safe for concurrent use. The zero value signs and
// verifies nothing.
type Key struct {
	version uint32
	private *PrivateKey
	id      []byte // SHA3-256 of the public key, 32 bytes
	mac     [MACKeySize]byte
	macs    sync.Pool // each hash.Hash holds the MAC key and nothing else
}

// NewKey returns the key of a version from an ML-DSA-65 seed (32 bytes) and an independent MAC key
// (64 bytes). It copies both.
func NewKey(version uint32, seed, macKey []byte) (*Key, error) {
	if len(macKey) != MACKeySize {
		return nil, fmt.Errorf("making dual key: MAC key has %d bytes, not %d", len(macKey), MACKeySize)
	}
	private, err := NewPrivateKey(seed)
	if err != nil {
		return nil, fmt.Errorf("making dual key: %w", err)
	}
	id, err := hex.DecodeString(private.public.id)
	if err != nil {
		return nil, fmt.Errorf("making dual key: %w", err)
	}
	k := &Key{version: version, private: private, id: id}
	copy(k.mac[:], macKey)
	return k, nil
}

// Version returns the key version that every signature of this key carries.
func (k *Key) Version() uint32 {
	if k == nil {
		return 0
	}
	return k.version
}

// Public returns the ML-DSA-65 public key, or nil for a zero key.
func (k *Key) Public() *PublicKey {
	if k == nil {
		return nil
	}
	return k.private.Public()
}

// frame returns the bytes that both parts sign.
func (k *Key) frame(context string, msg []byte) []byte {
	return frame.Join(labelDual, []byte(algorithms), binary.BigEndian.AppendUint32(nil, k.version), k.id, []byte(context), msg)
}

// Sign returns version ‖ key version ‖ ML-DSA-65 signature ‖ MAC, [DualSize] bytes. context has 1
// to 255 bytes and names the use. msg has at most 64 MiB.
func (k *Key) Sign(context string, msg []byte) ([]byte, error) {
	if k == nil || k.private == nil {
		return nil, errors.New("signing: no key")
	}
	if context == "" {
		return nil, errors.New("signing: a dual signature needs a context")
	}
	if len(msg) > maxMessage {
		return nil, fmt.Errorf("signing: message is over %d bytes", maxMessage)
	}
	framed := k.frame(context, msg)
	sig := make([]byte, DualSize)
	sig[0] = version
	binary.BigEndian.PutUint32(sig[1:], k.version)
	pqc := sig[dualHeader : dualHeader+SignatureSize]
	if err := k.private.sign(context, framed, true, pqc); err != nil {
		return nil, err
	}
	k.sum(sig[:dualHeader+SignatureSize], labelMAC, framed, pqc)
	return sig, nil
}

// Verify reports whether this key made both parts of sig for context and msg. It returns early only
// for public facts: length, version and key version.
func (k *Key) Verify(context string, msg, sig []byte) bool {
	if k == nil || k.private == nil || context == "" || len(context) > maxContext || len(msg) > maxMessage {
		return false
	}
	if v, err := KeyVersion(sig); err != nil || v != k.version {
		return false
	}
	framed := k.frame(context, msg)
	pqc, tag := sig[dualHeader:dualHeader+SignatureSize], sig[dualHeader+SignatureSize:]
	pqcHolds := asInt(k.private.public.Verify(context, framed, pqc))
	macHolds := subtle.ConstantTimeCompare(tag, k.sum(make([]byte, 0, MACSize), labelMAC, framed, pqc))
	return pqcHolds&macHolds == 1
}

// KeyVersion returns the version of the key that made the dual signature sig.
func KeyVersion(sig []byte) (uint32, error) {
	if len(sig) != DualSize || sig[0] != version {
		return 0, errors.New("reading dual signature: wrong length or unknown version")
	}
	return binary.BigEndian.Uint32(sig[1:]), nil
}

// sum appends HMAC-SHA-512 (RFC 2104) over a frame to b.
func (k *Key) sum(b []byte, label string, fields ...[]byte) []byte {
	h, ok := k.macs.Get().(hash.Hash)
	if !ok {
		h = hmac.New(sha512.New, k.mac[:])
	}
	frame.Write(h, label, fields...)
	b = h.Sum(b)
	h.Reset()
	k.macs.Put(h)
	return b
}

func asInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
