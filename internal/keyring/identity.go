package keyring

import "github.com/latticekeep/latticekeep/internal/backup"

// SignBackup signs the end of a backup with the deployment's identity key.
func (r *Ring) SignBackup(message []byte) ([]byte, error) {
	return r.identity.Sign(backup.SigningContext, message)
}

// SignBackupFile signs what is said of an encrypted backup with the deployment's
// identity key.
func (r *Ring) SignBackupFile(message []byte) ([]byte, error) {
	return r.identity.Sign(backup.FileContext, message)
}

// ReportContext separates reports from everything else the identity key signs.
const ReportContext = "latticekeep/report/v1"

// SignReport signs a compliance report with the deployment's identity key: raw
// ML-DSA-65 over the bytes of the report.
func (r *Ring) SignReport(report []byte) ([]byte, error) {
	return r.identity.Sign(ReportContext, report)
}

// VerifyReport reports whether a signature is that of [Ring.SignReport] over
// exactly these bytes.
func (r *Ring) VerifyReport(report, signature []byte) bool {
	return r.identity.Public().Verify(ReportContext, report, signature)
}
