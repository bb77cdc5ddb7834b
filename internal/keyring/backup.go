package keyring

import "github.com/latticekeep/latticekeep/internal/backup"

// SignBackup signs the end of a backup with the deployment's identity key.
func (r *Ring) SignBackup(message []byte) ([]byte, error) {
	return r.identity.Sign(backup.SigningContext, message)
}
