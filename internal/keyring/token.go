package keyring

import (
	"crypto/hkdf"
	"crypto/sha512"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	labelTokenKey     = "latticekeep/access-token/v1"
	labelReportURLKey = "latticekeep/report-url/v1"
	derivedKeySize    = 64
)

// TokenKey is the HMAC key of access tokens, 64 bytes. It is derived from the
// key that hashes API keys, so that it needs no row and no KMS of its own, and
// is the same after every start. The caller must not change it.
func (r *Ring) TokenKey() secret.Bytes { return r.tokenKey }

// ReportURLKey is the HMAC key of the URLs under which the server hands out
// reports that it keeps itself, 64 bytes, derived like [Ring.TokenKey].
func (r *Ring) ReportURLKey() secret.Bytes { return r.reportURLKey }

// deriveKey derives a key from the one that hashes API keys.
func deriveKey(apiKeyHash []byte, label string) (secret.Bytes, error) {
	key, err := hkdf.Key(sha512.New, apiKeyHash, nil, string(frame.Join(label)), derivedKeySize)
	if err != nil {
		return nil, fmt.Errorf("deriving the key of %s: %w", label, err)
	}
	return key, nil
}
