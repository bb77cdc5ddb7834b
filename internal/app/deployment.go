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
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
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
	if err := d.start(ctx, k, now); err != nil {
		return nil, errors.Join(err, d.store.Close())
	}
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

// start reads or makes what a deployment begins with: its keys, the first
// entry of its chain, and a sealing key.
func (d *deployment) start(ctx context.Context, k *kms.Local, now func() time.Time) error {
	config := keyring.Config{CacheTTL: keyring.DefaultCacheTTL, Now: now}
	var first *keyring.First
	var err error
	d.keys, err = keyring.Open(ctx, d.store, k, config)
	if errors.Is(err, fault.NotFound) {
		d.keys, first, err = keyring.Create(ctx, d.store, k, config)
	}
	if err != nil {
		return err
	}
	d.log.Use(d.store, d.keys.Audit(), d.keys.ChainID())
	if first != nil {
		err := d.store.Update(ctx, func(tx store.Tx) error {
			d.log.Append(tx, audit.Event{
				Type: audit.ChainStarted, Outcome: audit.Success, Principal: identity.System(authz.SystemTenant),
				Resource: audit.Resource{Type: audit.ChainResource, ID: d.keys.ChainID()},
			})
			return first.Put(tx)
		})
		if err != nil {
			return fmt.Errorf("starting the deployment: %w", err)
		}
	}
	if _, err := d.keys.SealingDocument(ctx); errors.Is(err, fault.NotFound) {
		if err := d.newSealingKey(ctx); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	d.identity = identity.New(d.store, d.log, d.keys, now)
	d.vault = vault.New(d.store, d.log, d.keys, now)
	return nil
}

func (d *deployment) newSealingKey(ctx context.Context) error {
	key, err := d.keys.NewSealingKey(ctx, envelope.SuiteMLKEM768X25519)
	if err != nil {
		return err
	}
	err = d.store.Update(ctx, func(tx store.Tx) error {
		d.log.Append(tx, audit.Event{
			Type: audit.SealingKeyCreated, Outcome: audit.Success, Principal: identity.System(authz.SystemTenant),
			Resource: audit.Resource{Type: audit.SealingKeyResource, ID: key.ID},
		})
		return key.Put(tx)
	})
	if err != nil {
		return fmt.Errorf("storing a sealing key: %w", err)
	}
	return nil
}
