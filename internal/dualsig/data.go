package dualsig

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
)

const labelData = "latticekeep/data-signature/v1"

// DataTagSize is the size of the tag of a data signature in bytes: version ‖ key version ‖
// HMAC-SHA-512.
const DataTagSize = dualHeader + MACSize

// SignData signs a caller's data, at most 64 MiB, so that others can verify it. pqc is a hedged
// ML-DSA-65 signature over data itself with an empty context, which any FIPS 204 verifier accepts
// without knowing this product. It cannot pass for anything else that the key signs, because
// everything else has a context. tag is version ‖ key version ‖ a MAC over data and pqc,
// [DataTagSize] bytes.
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

// standIn is verified in place of a pqc that does not have the length of an ML-DSA-65 signature.
// Every coefficient of its z is zero, which is in range. A signature of zero bytes would be out of
// range, and its verification would end at the first coefficient.
var standIn = func() (s [SignatureSize]byte) {
	const challenge, hint = 48, 55 + 6 // FIPS 204 table 1: c̃ of λ/4 bytes before z, ω + k after it
	for i := challenge; i < SignatureSize-hint; i += 5 {
		s[i+2], s[i+4] = 0x08, 0x80 // γ₁ - 0 in 20 bits, twice
	}
	return s
}()

// VerifyData reports whether this key made both pqc and tag for data, together. It evaluates both
// in every case, also when one has a wrong length or names another key. (ML-DSA-65 itself ends
// early for a badly encoded signature, which the sender can detect anyway.)
func (k *Key) VerifyData(data, pqc, tag []byte) bool {
	if k == nil || k.private == nil || len(data) > maxMessage {
		return false
	}
	return k.verifyData(data, pqc, tag, k.private.public.Verify, k.dataMAC)
}

// verifyData gets the two evaluations as parameters, so tests can count them.
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

// DataKeyVersion returns the version of the key that made the tag of a data signature.
func DataKeyVersion(tag []byte) (uint32, error) {
	if len(tag) != DataTagSize || tag[0] != version {
		return 0, errors.New("reading data signature: wrong length or unknown version")
	}
	return binary.BigEndian.Uint32(tag[1:]), nil
}
