package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/custody"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// deployment is a store, opened: the core that server and operator share.
type deployment struct {
	dir      string // empty when the store is elsewhere
	store    store.Database
	kms      []*kms.Key // the current one, then the former ones
	log      *audit.Log
	guard    *audit.Guard
	reader   *audit.Reader
	verifier *audit.LiveVerifier
	keys     *keyring.Ring
	keyFiles func(context.Context) ([][]byte, error) // of the KMS, for backups; nil when no key is a file
	identity *identity.Service
	vault    *vault.Vault
	transit  *transit.Transit
	sealing  *sealingkey.Service
	custody  *custody.Service
}

// deploymentOptions says where a deployment is and how it is opened.
type deploymentOptions struct {
	dir      string       // of the embedded database
	store    config.Store // of another one
	kms      config.KMS
	fresh    func() error   // asked before a deployment is made in an empty store; nil: nobody is
	clock    *sharedClock   // of the other store; nil: now is that of this machine
	pq       bool           // refuse classical key exchange
	policy   sealing.Policy // what manifests are checked against
	objects  sealingKeyUse  // of the cluster; nil: there is none
	tracing  *tracing       // nil: there is none
	evidence *evidence      // of the log
	logger   *slog.Logger
	now      func() time.Time
}

// sealingKeyUse counts objects by the id of the sealing key that they need.
type sealingKeyUse func(context.Context) (map[string]int, error)

// openDeployment opens the store, and makes a deployment in it when it is empty.
func openDeployment(ctx context.Context, p deploymentOptions) (_ *deployment, err error) {
	log := audit.New(p.now)
	guard := audit.NewGuard(log)
	d := &deployment{dir: p.dir, log: log, guard: guard, reader: audit.NewReader(log, guard), verifier: audit.NewLiveVerifier(log)}
	if d.store, err = openDatabase(ctx, p, offline.HookUnlessMarked(d.log.Commit)); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if err := offline.CheckUnmarked(ctx, d.store); err != nil {
		return nil, err
	}
	made, err := keyring.Made(ctx, d.store)
	if err == nil && !made && p.fresh != nil {
		err = p.fresh()
	}
	if err != nil {
		return nil, err
	}
	var urls []string
	if d.kms, urls, err = kmsOf(ctx, p, made); err != nil {
		return nil, err
	}
	if files, some := offline.KeyFilesOf(d.kms, urls); some {
		d.keyFiles = func(ctx context.Context) ([][]byte, error) { return d.readKeyFiles(ctx, files) }
	}
	var s store.Store = d.store
	wrapping := make([]keyring.KMS, len(d.kms))
	for i, k := range d.kms {
		wrapping[i] = k
		if p.tracing != nil {
			wrapping[i] = tracedKMS{k, p.tracing.tracer}
		}
	}
	if p.tracing != nil {
		s = tracedStore{s, p.tracing.tracer}
	}
	d.identity, d.keys, err = identity.Open(ctx, s, d.log, wrapping[0], keyring.Config{CacheTTL: p.kms.CacheTTL, Former: wrapping[1:], Now: p.now})
	if err != nil {
		return nil, err
	}
	if !made {
		p.logger.WarnContext(ctx, "created a new deployment in an empty database: if that is not intended, stop the server and check store.url or dataDir",
			"chain", d.log.Fingerprint())
	}
	if err := p.evidence.openAnchors(ctx, d.log, d.guard, p.logger, p.now); err != nil {
		return nil, err
	}
	d.vault = vault.New(s, d.guard, d.keys, p.now)
	d.transit = transit.New(s, d.guard, d.keys, p.now)
	d.sealing = sealingkey.New(s, d.guard, d.reader, d.keys, sealingkey.Options{
		InUse: eitherUse(d.vault.SealingKeyUse, p.objects), Policy: p.policy, Now: p.now,
	})
	d.custody = custody.New(s, d.guard, d.keys, custody.Options{Destroy: destroyer(d.kms), Now: p.now})
	if err := d.sealing.Verify(ctx); err != nil { // which is no reason to serve nothing
		p.logger.Error("the sealing keys are not as the audit log says", "err", err)
	}
	return d, nil
}

// readKeyFiles reads the files of the keys that are in use.
func (d *deployment) readKeyFiles(ctx context.Context, files []offline.KeyFile) ([][]byte, error) {
	found, err := d.keys.KMSKeys(ctx, time.Time{})
	if err != nil {
		return nil, err
	}
	use := make(map[string]keyring.KMSKey)
	for _, k := range found.Keys {
		if k.Sets += found.Damaged; k.State == keyring.KMSKeyFormer { // what is damaged may be under any
			use[k.ID] = k
		}
	}
	return offline.ReadKeyFiles(files, use)
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

// openDatabase opens the store that the settings name.
func openDatabase(ctx context.Context, p deploymentOptions, hook store.Hook) (store.Database, error) {
	if p.store.URL != "" {
		s, err := postgres.Open(ctx, p.store.URL, postgres.Options{
			Hook: hook, Logger: p.logger, Password: offline.Location{PasswordFile: p.store.PasswordFile}.Password(), Connections: p.store.Connections, PQRequired: p.pq,
		})
		if err != nil {
			return nil, fmt.Errorf("store.url: %w", err)
		}
		if p.clock != nil {
			if err := p.clock.of(ctx, s); err != nil {
				return nil, errors.Join(fmt.Errorf("store.url: %w", err), s.Close())
			}
		}
		return s, nil
	}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the data directory: %w", err)
	}
	s, err := bolt.Open(filepath.Join(p.dir, offline.DatabaseFile), bolt.Options{Hook: hook, Logger: p.logger})
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", offline.DatabaseFile, err)
	}
	return s, nil
}

// kmsOf opens the key that wraps all others, and those that did before. A key
// file is made when there is none, but never for a store that has a deployment.
// urls are those of the keys that it opened.
func kmsOf(ctx context.Context, p deploymentOptions, made bool) (keys []*kms.Key, urls []string, err error) {
	if path, is := offline.KMSFile(p.kms.URL); is {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) && !made {
			if err := kms.CreateLocal(path); err != nil && !errors.Is(err, fs.ErrExist) { // a replica on the same machine may just have made it
				return nil, nil, err
			}
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll(keys))
		}
	}()
	for i, text := range append([]string{p.kms.URL}, p.kms.Former...) {
		k, err := kms.Open(ctx, text, kms.Options{TokenFile: p.kms.TokenFile, PQRequired: p.pq, Logger: p.logger})
		switch {
		case err != nil && i > 0: // it may have been destroyed, and if it is still needed the keyring says so
			p.logger.WarnContext(ctx, "a KMS key of kms.former cannot be opened and is not used", "err", err)
			continue
		case err != nil:
			return keys, nil, fmt.Errorf("kms.url: %w", err)
		}
		keys, urls = append(keys, k), append(urls, text)
	}
	return keys, urls, nil
}

func closeAll(keys []*kms.Key) error {
	var errs []error
	for _, k := range keys {
		errs = append(errs, k.Close())
	}
	return errors.Join(errs...)
}

// close ends the deployment. Nothing of it is used any more.
func (d *deployment) close() error { return errors.Join(d.store.Close(), closeAll(d.kms)) }

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

// destroyer destroys one of some keys, by its id.
func destroyer(keys []*kms.Key) func(context.Context, string) (kms.Destruction, error) {
	return func(ctx context.Context, id string) (kms.Destruction, error) {
		for _, k := range keys {
			if k.ID() == id {
				return k.Destroy(ctx)
			}
		}
		return kms.Destruction{}, fault.New(fault.NotFound, "the configuration names no such KMS key")
	}
}

// sharedClock tells the time of the database that replicas share. It is made
// before the store is, whose hook tells the time of entries by it.
type sharedClock struct {
	*clock.Clock
	store atomic.Pointer[postgres.Store]
}

func newSharedClock() *sharedClock {
	c := new(sharedClock)
	c.Clock = clock.New(func(ctx context.Context) (time.Time, error) {
		s := c.store.Load()
		if s == nil {
			return time.Time{}, fault.New(fault.Unavailable, "the database is not open yet")
		}
		return s.Time(ctx)
	}, nil)
	return c
}

// of has the clock tell the time of a store.
func (c *sharedClock) of(ctx context.Context, s *postgres.Store) error {
	c.store.Store(s)
	return c.Measure(ctx)
}
