package dualsig

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
)

const labelData = "latticekeep/data-signature/v1"

// DataTagSize is the size of the tag of a data signature:
// version ‖ key version ‖ HMAC-SHA-512.
const DataTagSize = dualHeader + MACSize

// SignData signs a caller's data, at most 64 MiB, for others to check: pqc is a
// hedged ML-DSA-65 signature over data itself with an empty context, which any
// FIPS 204 verifier accepts without knowing this product. It can stand for
// nothing else that the key signs, since all of that has a context. tag is
// version ‖ key version ‖ a MAC over data and pqc, [DataTagSize] bytes.
func (k *Key) SignData(data []byte) (pqc, tag []byte, err error) {
	if k == nil || k.private == nil {
		return nil, nil, errors.New("signing data: no key")
	}
	if len(data) > maxMessage {
		return nil, nil, fmt.Errorf("signing data: over %d bytes", maxMessage)
	}
	if pqc, err = k.private.Sign("", data); err != nil {
		return nil, nil, fmt.Errorf("signing data: %w", err)
	}
	tag = binary.BigEndian.AppendUint32([]byte{version}, k.version)
	return pqc, append(tag, k.dataMAC(data, pqc)...), nil
}

// standIn is verified in the place of what has not the length of an ML-DSA-65
// signature. Every coefficient of its z is zero, which is in range: zero bytes
// alone would be out of range, and verifying them ends at the first.
var standIn = func() (s [SignatureSize]byte) {
	const challenge, hint = 48, 55 + 6 // FIPS 204 table 1: c̃ of λ/4 bytes before z, ω + k after it
	for i := challenge; i < SignatureSize-hint; i += 5 {
		s[i+2], s[i+4] = 0x08, 0x80 // γ₁ - 0 in 20 bits, twice
	}
	return s
}()

// VerifyData reports whether pqc and tag are both this key's for data, and were
// made together. Both are evaluated whatever is wrong with either, also when it
// has not the length of one or names another key. (ML-DSA-65 itself ends early
// with a signature that is badly encoded, as whoever sent it can see.)
func (k *Key) VerifyData(data, pqc, tag []byte) bool {
	if k == nil || k.private == nil || len(data) > maxMessage {
		return false
	}
	return k.verifyData(data, pqc, tag, k.private.public.Verify, k.dataMAC)
}

// verifyData takes the two evaluations from its caller, so that they can be
// counted.
func (k *Key) verifyData(data, pqc, tag []byte, verify func(context string, msg, sig []byte) bool, mac func(data, pqc []byte) []byte) bool {
	signature, sum := standIn, [DataTagSize]byte{}
	if len(pqc) == SignatureSize {
		copy(signature[:], pqc)
	}
	copy(sum[:], tag)
	v, err := DataKeyVersion(tag)
	formed := asInt(len(pqc) == SignatureSize) & asInt(err == nil) & asInt(v == k.version)
	pqcHolds := asInt(verify("", data, signature[:]))
	macHolds := subtle.ConstantTimeCompare(sum[dualHeader:], mac(data, signature[:]))
	return formed&pqcHolds&macHolds == 1
}

func (k *Key) dataMAC(data, pqc []byte) []byte {
	version := binary.BigEndian.AppendUint32(nil, k.version)
	return k.sum(make([]byte, 0, MACSize), labelData, []byte(algorithms), version, k.id, data, pqc)
}

// DataKeyVersion returns the version of the key that made the tag of a data
// signature.
func DataKeyVersion(tag []byte) (uint32, error) {
	if len(tag) != DataTagSize || tag[0] != version {
		return 0, errors.New("reading data signature: wrong length or unknown version")
	}
	return binary.BigEndian.Uint32(tag[1:]), nil
}
