package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// Files of a data directory.
const (
	databaseFile = "latticekeep.db"
	kmsKeyFile   = "kms.key"
)

// deployment is a data directory, opened: the core that server and operator
// share.
type deployment struct {
	store    *bolt.Store
	log      *audit.Log
	keys     *keyring.Ring
	identity *identity.Service
	vault    *vault.Vault
}

// openDeployment opens the data directory, and fills it when it is empty.
func openDeployment(ctx context.Context, dir string, logger *slog.Logger, now func() time.Time) (*deployment, error) {
	k, err := openDataDir(dir)
	if err != nil {
		return nil, err
	}
	d := &deployment{log: audit.New(now)}
	if d.store, err = bolt.Open(filepath.Join(dir, databaseFile), bolt.Options{Hook: d.log.Commit, Logger: logger}); err != nil {
		return nil, fmt.Errorf("opening %s: %w", databaseFile, err)
	}
	d.identity, d.keys, err = identity.Open(ctx, d.store, d.log, k, keyring.Config{CacheTTL: keyring.DefaultCacheTTL, Now: now})
	if err != nil {
		return nil, errors.Join(err, d.store.Close())
	}
	d.vault = vault.New(d.store, d.log, d.keys, now)
	return d, nil
}

// openDataDir makes the directory with its KMS key if there is none, and
// returns the key. A directory that has a database is never given a new key.
func openDataDir(dir string) (*kms.Local, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the data directory: %w", err)
	}
	key := filepath.Join(dir, kmsKeyFile)
	_, err := os.Stat(filepath.Join(dir, databaseFile))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(key); errors.Is(err, fs.ErrNotExist) {
			if err := kms.CreateLocal(key); err != nil {
				return nil, err
			}
		}
	}
	k, err := kms.OpenLocal(key)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", kmsKeyFile, err)
	}
	return k, nil
}
