package keyring

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha512"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// deploymentKeys are the keys that live with the process.
type deploymentKeys struct {
	audit        *dualsig.PrivateKey
	identity     *dualsig.PrivateKey
	apiKeyHash   secret.Bytes
	tokenKey     secret.Bytes
	reportURLKey secret.Bytes
}

// Audit returns the key that signs the audit chain.
func (r *deploymentKeys) Audit() *dualsig.PrivateKey { return r.audit }

// Identity returns the public half of the deployment's identity key, which signs its public
// documents.
func (r *deploymentKeys) Identity() *dualsig.PublicKey { return r.identity.Public() }

// APIKeyHash returns the HMAC key of API keys and of everything else that is stored as a keyed
// hash. Each use has its own label.
func (r *deploymentKeys) APIKeyHash() secret.Bytes { return r.apiKeyHash }

// take keeps the keys that live with the process.
func (r *deploymentKeys) take(plain map[purpose]secret.Bytes) (err error) {
	var errs [4]error
	r.audit, errs[0] = dualsig.NewPrivateKey(plain[auditing])
	r.identity, errs[1] = dualsig.NewPrivateKey(plain[identity])
	r.apiKeyHash = plain[apiKeyHash]
	r.tokenKey, errs[2] = deriveKey(r.apiKeyHash, labelTokenKey)
	r.reportURLKey, errs[3] = deriveKey(r.apiKeyHash, labelReportURLKey)
	for _, p := range []purpose{wrapping, auditing, identity} {
		plain[p].Zero()
	}
	return errors.Join(errs[:]...)
}

// SignBackup signs the end of a backup with the deployment's identity key.
func (r *deploymentKeys) SignBackup(message []byte) ([]byte, error) {
	return r.identity.Sign(backup.SigningContext, message)
}

// SignBackupFile signs the description of an encrypted backup with the deployment's identity key.
func (r *deploymentKeys) SignBackupFile(message []byte) ([]byte, error) {
	return r.identity.Sign(backup.FileContext, message)
}

// SignCommits signs a segment of the log of commits with the deployment's identity key.
func (r *deploymentKeys) SignCommits(message []byte) ([]byte, error) {
	return r.identity.Sign(backup.CommitsContext, message)
}

// ReportContext separates reports from everything else that the identity key signs.
const ReportContext = "latticekeep/report/v1"

// SignReport signs a compliance report with the deployment's identity key: raw ML-DSA-65 over the
// bytes of the report.
func (r *deploymentKeys) SignReport(report []byte) ([]byte, error) {
	return r.identity.Sign(ReportContext, report)
}

// VerifyReport reports whether a signature is that of [Ring.SignReport] over exactly these bytes.
func (r *deploymentKeys) VerifyReport(report, signature []byte) bool {
	return r.identity.Public().Verify(ReportContext, report, signature)
}

const (
	labelTokenKey     = "latticekeep/access-token/v1"
	labelReportURLKey = "latticekeep/report-url/v1"
	derivedKeySize    = 64
)

// TokenKey returns the HMAC key of access tokens, 64 bytes. It is derived from the key that hashes
// API keys, so it needs no row and no KMS call of its own and is the same after every start. The
// caller must not change it.
func (r *deploymentKeys) TokenKey() secret.Bytes { return r.tokenKey }

// ReportURLKey returns the HMAC key of the URLs under which the server hands out the reports that
// it stores itself, 64 bytes. It is derived like [Ring.TokenKey].
func (r *deploymentKeys) ReportURLKey() secret.Bytes { return r.reportURLKey }

// deriveKey derives a key from the one that hashes API keys.
func deriveKey(apiKeyHash []byte, label string) (secret.Bytes, error) {
	key, err := hkdf.Key(sha512.New, apiKeyHash, nil, string(frame.Join(label)), derivedKeySize)
	if err != nil {
		return nil, fmt.Errorf("deriving the key of %s: %w", label, err)
	}
	return key, nil
}

// rowMACSize is the size of a row's MAC in bytes: HMAC-SHA-512, cut to 256 bits.
const rowMACSize = 32

var errForeignRow = fault.New(fault.Internal, "a stored row was not written by this deployment: stop the server, find the row with latticekeep doctor, and restore a backup")

// SealRow returns content after a MAC that binds it to its key in the store. An attacker who can
// write the database but has no key cannot change the content or move it to another key. SealRow
// does not hide the content. It also does not prevent that an earlier row of the same key is put
// back.
func (r *deploymentKeys) SealRow(key, content []byte) []byte {
	return append(r.rowMAC(key, content), content...)
}

// OpenRow returns the content of a row that [Ring.SealRow] made for this key, and nil for nil. The
// content shares the row's memory. Error: fault.Internal for any other row.
func (r *deploymentKeys) OpenRow(key, row []byte) ([]byte, error) {
	if row == nil {
		return nil, nil
	}
	if len(row) < rowMACSize || !hmac.Equal(row[:rowMACSize], r.rowMAC(key, row[rowMACSize:])) {
		return nil, errForeignRow
	}
	return row[rowMACSize:], nil
}

// rowMAC uses the key that also hashes API keys, with its own label.
func (r *deploymentKeys) rowMAC(key, content []byte) []byte {
	h := hmac.New(sha512.New, r.apiKeyHash)
	h.Write(frame.Join("latticekeep/row/v1", key, content))
	return h.Sum(nil)[:rowMACSize:rowMACSize]
}
