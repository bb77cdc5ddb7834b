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
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// Names in a data directory. The KMS key is there in development only, as are
// the mails.
const (
	databaseFile  = "latticekeep.db"
	kmsKeyFile    = "kms.key"
	mailDirectory = "mail"
)

// deployment is a data directory, opened: the core that server and operator
// share.
type deployment struct {
	dir      string
	store    *bolt.Store
	log      *audit.Log
	keys     *keyring.Ring
	identity *identity.Service
	vault    *vault.Vault
	transit  *transit.Transit
	sealing  *sealingkey.Service
}

// place says where a deployment is and how it is opened.
type place struct {
	dir      string
	keyFile  string // of the KMS key
	cacheTTL time.Duration
	policy   sealing.Policy // what manifests are checked against
	objects  sealingKeyUse  // of the cluster; nil: there is none
	tracing  *tracing       // nil: there is none
	proving  *proving       // of the log
	logger   *slog.Logger
	now      func() time.Time
}

// sealingKeyUse counts objects by the id of the sealing key that they need.
type sealingKeyUse func(context.Context) (map[string]int, error)

// openDeployment opens the data directory, and fills it when it is empty.
func openDeployment(ctx context.Context, p place) (*deployment, error) {
	k, err := openDataDir(p.dir, p.keyFile)
	if err != nil {
		return nil, err
	}
	d := &deployment{dir: p.dir, log: audit.New(p.now)}
	if d.store, err = bolt.Open(filepath.Join(p.dir, databaseFile), bolt.Options{Hook: d.log.Commit, Logger: p.logger}); err != nil {
		return nil, fmt.Errorf("opening %s: %w", databaseFile, err)
	}
	var s store.Store = d.store
	var kms keyring.KMS = k
	if p.tracing != nil {
		s, kms = tracedStore{s, p.tracing.tracer}, tracedKMS{kms, p.tracing.tracer}
	}
	d.identity, d.keys, err = identity.Open(ctx, s, d.log, kms, keyring.Config{CacheTTL: p.cacheTTL, Now: p.now})
	if err != nil {
		return nil, errors.Join(err, d.store.Close())
	}
	if err := p.proving.begin(ctx, d.log, p.logger, p.now); err != nil {
		return nil, errors.Join(err, d.store.Close())
	}
	d.vault = vault.New(s, d.log, d.keys, p.now)
	d.transit = transit.New(s, d.log, d.keys, p.now)
	d.sealing = sealingkey.New(s, d.log, d.keys, sealingkey.Options{
		InUse: eitherUse(d.vault.SealingKeyUse, p.objects), Policy: p.policy, Now: p.now,
	})
	if d.log.Refusal() == nil { // else nothing is written, and the next start does it
		if err := d.vault.Reindex(ctx); err != nil {
			return nil, errors.Join(err, d.store.Close())
		}
	}
	if err := d.sealing.Verify(ctx); err != nil { // which is no reason to serve nothing
		p.logger.Error("the sealing keys are not as the audit log says", "err", err)
	}
	return d, nil
}

// eitherUse counts the objects that need a key as far as the vault knows, which
// has the values that it accepted last, or as far as the cluster knows, which has
// those that wait. Mostly they are the same ones: the larger number counts.
func eitherUse(vault, cluster sealingKeyUse) sealingKeyUse {
	if cluster == nil {
		return vault
	}
	return func(ctx context.Context) (map[string]int, error) {
		use, err := vault(ctx)
		if err != nil {
			return nil, err
		}
		objects, err := cluster(ctx)
		if err != nil {
			return nil, err
		}
		for id, n := range objects {
			use[id] = max(use[id], n)
		}
		return use, nil
	}
}

// openDataDir makes the directory and the KMS key if there are none, and
// returns the key. A directory that has a database is never given a new key.
func openDataDir(dir, keyFile string) (*kms.Local, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the data directory: %w", err)
	}
	_, err := os.Stat(filepath.Join(dir, databaseFile))
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(keyFile); errors.Is(err, fs.ErrNotExist) {
			if err := kms.CreateLocal(keyFile); err != nil {
				return nil, err
			}
		}
	}
	k, err := kms.OpenLocal(keyFile)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", filepath.Base(keyFile), err)
	}
	return k, nil
}

// outside says whether a file lies outside a directory, wherever links lead.
// What does not exist yet is judged by the folder it will be in.
func outside(dir, file string) (bool, error) {
	dir, err := resolve(dir)
	if err != nil {
		return false, err
	}
	file, err = resolve(file)
	if err != nil {
		return false, err
	}
	relative, err := filepath.Rel(dir, file)
	return err != nil || !filepath.IsLocal(relative), nil
}

// resolve returns the absolute path without links. It may end in names that do
// not exist.
func resolve(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	real, err := filepath.EvalSymlinks(path)
	if !errors.Is(err, fs.ErrNotExist) || filepath.Dir(path) == path {
		return real, err
	}
	parent, err := resolve(filepath.Dir(path))
	return filepath.Join(parent, filepath.Base(path)), err
}
