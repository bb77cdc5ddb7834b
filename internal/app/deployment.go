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

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/custody"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/state/watch"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// deployment is an opened store with its keys and log: the core that server and operator share.
type deployment struct {
	dir      string // empty when the store is elsewhere
	store    store.Database
	rows     *watch.Watcher
	kms      []*kms.Key // the current key first, then the previous ones
	log      *writer.Log
	guard    *guard.Guard
	reader   *reader.Reader
	verifier *verify.LiveVerifier
	keys     *keyring.Ring
	keyFiles func(context.Context) ([][]byte, error) // KMS key files for backups; nil when no key is a file
	identity *identity.Service
	vault    *vault.Vault
	transit  *transit.Transit
	sealing  *sealingkey.Service
	custody  *custody.Service
}

// deploymentOptions names a deployment and says how to open it.
type deploymentOptions struct {
	dir      string       // folder of the embedded database
	store    config.Store // any other store
	kms      config.KMS
	fresh    func() error              // check before a deployment is created in an empty store; nil for none
	dev      bool                      // an empty store is what a development server usually finds
	clock    *sharedClock              // clock of the other store; nil means the clock of this machine
	pq       bool                      // refuse classical key exchange
	policy   sealing.Policy            // rules for manifests
	objects  sealingKeyUse             // use in the cluster; nil without one
	accepted sealingkey.AcceptedValues // times of the values of the cluster's objects; nil without a cluster
	tracing  *tracing                  // nil without tracing
	evidence *evidence                 // proofs of the log
	calls    *metrics.Calls
	logger   *slog.Logger
	now      func() time.Time
}

// sealingKeyUse counts objects by the id of the sealing key that they need.
type sealingKeyUse func(context.Context) (map[string]int, error)

// openDeployment opens the store. It creates a deployment in it when the store is empty.
func openDeployment(ctx context.Context, p deploymentOptions) (_ *deployment, err error) {
	rows := watch.New(p.logger)
	log := writer.New(p.now, rows.State)
	guard := guard.New(log)
	d := &deployment{dir: p.dir, rows: rows, log: log, guard: guard, reader: reader.New(log, guard), verifier: verify.NewLiveVerifier(log)}
	database, err := openDatabase(ctx, p, offline.HookUnlessMarked(format.Hook(d.log.Commit)), d.log.Spared)
	if err != nil {
		return nil, err
	}
	d.store = rows.State.Guard(database)
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if err := checkServable(ctx, d.store); err != nil {
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
		wrapping[i] = p.calls.MeasureKMS(k)
		if p.tracing != nil {
			wrapping[i] = tracedKMS{wrapping[i], p.tracing.tracer}
		}
	}
	if p.tracing != nil {
		s = tracedStore{s, p.tracing.tracer}
	}
	d.identity, d.keys, err = identity.Open(ctx, s, d.log, guard, wrapping[0], keyring.Config{CacheTTL: p.kms.CacheTTL, Previous: wrapping[1:], Now: p.now})
	if err != nil {
		return nil, err
	}
	if err := rows.Open(ctx, database, log, d.reader, d.keys.OpenRow); err != nil {
		return nil, err
	}
	if embedded, is := database.(*bolt.Store); is {
		if err := writeAhead(ctx, s, embedded); err != nil { // not fatal: each commit then takes two syncs
			p.logger.WarnContext(ctx, "commits are slower until the next start: there is no write-ahead log", "error", err)
		}
	}
	switch {
	case !made && p.dev:
		p.logger.InfoContext(ctx, "created a new deployment in an empty database", "chain", d.log.Fingerprint())
	case !made:
		p.logger.WarnContext(ctx, "created a new deployment in an empty database: if that is not intended, stop the server and check store.url or dataDir",
			"chain", d.log.Fingerprint())
	}
	if !p.dev && !p.evidence.hasAnchors() {
		p.logger.WarnContext(ctx, "no checkpoint is kept outside of the database: an old copy of it that is put back is not noticed; set audit.anchor.bucket")
	}
	if err := p.evidence.openAnchors(ctx, d.log, d.guard, p.logger, p.now); err != nil {
		return nil, err
	}
	d.vault = vault.New(s, d.guard, d.keys, p.now)
	d.transit = transit.New(s, d.guard, d.keys, p.now)
	d.sealing = sealingkey.New(s, d.guard, d.reader, d.keys, sealingkey.Options{
		InUse: eitherUse(d.vault.SealingKeyUse, p.objects), Policy: p.policy, Accepted: p.accepted, Now: p.now,
	})
	d.custody = custody.New(s, d.guard, d.keys, custody.Options{Destroy: destroyer(d.kms), Now: p.now})
	if err := d.sealing.Verify(ctx); err != nil { // not fatal: the rest of the service still works
		p.logger.Error("the sealing keys are not as the audit log says", "error", err)
	}
	return d, nil
}

// checkServable fails if a server must not use the store: because it is incomplete or moved, or
// because it is of a newer release.
func checkServable(ctx context.Context, s store.Store) error {
	if err := offline.CheckUnmarked(ctx, s); err != nil {
		return err
	}
	return format.Check(ctx, s, false)
}

// readKeyFiles reads the files of the KMS keys that are in use.
func (d *deployment) readKeyFiles(ctx context.Context, files []offline.KeyFile) ([][]byte, error) {
	found, err := d.keys.KMSKeys(ctx, time.Time{})
	if err != nil {
		return nil, err
	}
	use := make(map[string]keyring.KMSKey)
	for _, k := range found.Keys {
		if k.Sets += found.Damaged; k.State == keyring.KMSKeyPrevious { // damaged keys may need any KMS key
			use[k.ID] = k
		}
	}
	return offline.ReadKeyFiles(files, use)
}

// eitherUse combines two counts of the objects that need a sealing key. The vault counts the values
// that it accepted last; the cluster counts the objects that wait. Most objects are in both, so the
// larger number counts.
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

// diskReserve is what the embedded database keeps on its volume for reads and removals on a full
// disk: ten minutes of 100 reads a second, each of which leaves an entry of about 5.5 KB. A volume of
// less than 5 GiB has a sixteenth.
const diskReserve = 10 * 60 * 100 * 5500

// openDatabase opens the store that the settings name. spared says which events go on while the disk
// is full.
func openDatabase(ctx context.Context, p deploymentOptions, hook store.Hook, spared func(event any) bool) (store.Database, error) {
	if p.store.URL != "" {
		s, err := postgres.Open(ctx, p.store.URL, postgres.Options{
			Hook: hook, Observer: p.calls.ObserveCommit, Head: state.HeadKey, Logger: p.logger, Password: offline.Location{PasswordFile: p.store.PasswordFile}.Password(), Connections: p.store.Connections, PQRequired: p.pq,
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
	o := bolt.Options{Hook: hook, Observer: p.calls.ObserveCommit, Logger: p.logger}
	if p.evidence.backup.Bucket != "" {
		o.Journal = commits.JournalBytes
	}
	if !p.dev { // the database of a development server stays small
		o.Reserve, o.Spared = diskReserve, spared
	}
	s, err := bolt.Open(filepath.Join(p.dir, offline.DatabaseFile), o)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", offline.DatabaseFile, err)
	}
	return s, nil
}

// writeAhead lets the embedded database use a write-ahead log, which earlier releases do not know.
func writeAhead(ctx context.Context, s store.Store, embedded *bolt.Store) error {
	f, err := format.Of(ctx, s)
	if err == nil && f.Writer < format.Ahead {
		err = s.Update(ctx, func(tx store.Tx) error { return format.Raise(tx, format.Ahead, format.Ahead) })
	}
	if err != nil {
		return fmt.Errorf("raising the format of the store: %w", err)
	}
	return embedded.WriteAhead(ctx)
}

// kmsOf opens the current KMS key and the previous ones, and returns them with their URLs. It
// creates a missing key file, but never for a store that already has a deployment: a new key could
// not open that. A previous key that cannot be opened is logged and skipped.
func kmsOf(ctx context.Context, p deploymentOptions, made bool) (keys []*kms.Key, urls []string, err error) {
	if path, is := offline.KMSFile(p.kms.URL); is {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) && !made {
			if err := kms.CreateLocal(path); err != nil && !errors.Is(err, fs.ErrExist) { // a replica on the same machine may have just created it
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
		case err != nil && i > 0: // it may be destroyed; the keyring reports it if it is still needed
			p.logger.WarnContext(ctx, "a KMS key of kms.former cannot be opened and is not used", "error", err)
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

// close closes the store and the KMS keys. The deployment must not be used afterwards.
func (d *deployment) close() error { return errors.Join(d.store.Close(), closeAll(d.kms)) }

// outside reports whether a file is outside a directory after links are resolved. A missing file is
// judged by the folder that it would be in.
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

// resolve returns the absolute path without links. The last elements of the path may be missing.
func resolve(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	resolved, err := filepath.EvalSymlinks(path)
	if !errors.Is(err, fs.ErrNotExist) || filepath.Dir(path) == path {
		return resolved, err
	}
	parent, err := resolve(filepath.Dir(path))
	return filepath.Join(parent, filepath.Base(path)), err
}

// destroyer returns a function that destroys one of the keys, named by its id.
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

// sharedClock returns the time of the database that replicas share. It exists before the store
// does, because the store's hook uses it for the times of entries.
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

// of makes the clock follow the time of the store.
func (c *sharedClock) of(ctx context.Context, s *postgres.Store) error {
	c.store.Store(s)
	return c.Measure(ctx)
}
