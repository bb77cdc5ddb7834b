package keyring

import (
	"crypto/hkdf"
	"crypto/sha512"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	labelTokenKey = "latticekeep/access-token/v1"
	tokenKeySize  = 64
)

// TokenKey is the HMAC key of access tokens, 64 bytes. It is derived from the
// key that hashes API keys, so that it needs no row and no KMS of its own, and
// is the same after every start. The caller must not change it.
func (r *Ring) TokenKey() secret.Bytes { return r.tokenKey }

func deriveTokenKey(apiKeyHash []byte) (secret.Bytes, error) {
	key, err := hkdf.Key(sha512.New, apiKeyHash, nil, string(frame.Join(labelTokenKey)), tokenKeySize)
	if err != nil {
		return nil, fmt.Errorf("deriving the access-token key: %w", err)
	}
	return key, nil
}
