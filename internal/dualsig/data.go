package dualsig

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/frame"
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

// VerifyData reports whether pqc and tag are both this key's for data, and were
// made together. Only what is public (lengths, version, key version) decides
// early.
func (k *Key) VerifyData(data, pqc, tag []byte) bool {
	if k == nil || k.private == nil || len(data) > maxMessage || len(pqc) != SignatureSize {
		return false
	}
	if v, err := DataKeyVersion(tag); err != nil || v != k.version {
		return false
	}
	pqcHolds := asInt(k.private.public.Verify("", data, pqc))
	macHolds := subtle.ConstantTimeCompare(tag[dualHeader:], k.dataMAC(data, pqc))
	return pqcHolds&macHolds == 1
}

func (k *Key) dataMAC(data, pqc []byte) []byte {
	version := binary.BigEndian.AppendUint32(nil, k.version)
	return mac(k.mac[:], frame.Join(labelData, []byte(algorithms), version, k.id, data, pqc))
}

// DataKeyVersion returns the version of the key that made the tag of a data
// signature.
func DataKeyVersion(tag []byte) (uint32, error) {
	if len(tag) != DataTagSize || tag[0] != version {
		return 0, errors.New("reading data signature: wrong length or unknown version")
	}
	return binary.BigEndian.Uint32(tag[1:]), nil
}
