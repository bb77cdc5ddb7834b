package schedule_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/backup/schedule"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/test/pgtest"
	"github.com/latticekeep/latticekeep/test/s3test"
	"github.com/latticekeep/latticekeep/test/statetest"
)

// deployment is what replicas share.
type deployment struct {
	t        *testing.T
	keyFile  string
	identity backup.Identity
	bucket   string          // URL
	config   schedule.Config // what the replicas have in common

	mu  sync.Mutex
	now time.Time
}

func newDeployment(t *testing.T, bucket string) *deployment {
	t.Helper()
	d := &deployment{t: t, keyFile: filepath.Join(t.TempDir(), "kms.key"), bucket: bucket, now: time.Date(2026, 11, 24, 2, 17, 0, 0, time.UTC)}
	must(t, kms.CreateLocal(d.keyFile))
	var err error
	d.identity, err = backup.NewIdentity()
	must(t, err)
	d.config = schedule.Config{Every: 24 * time.Hour, Keep: 72 * time.Hour, Scratch: t.TempDir()}
	return d
}

func (d *deployment) clock() time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.now
}

func (d *deployment) after(by time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.now = d.now.Add(by)
}

// replica is one process of a deployment.
type replica struct {
	*schedule.Schedule
	t      *testing.T
	d      *deployment
	db     store.Database
	logged *bytes.Buffer
}

// boltStore opens a database file.
func boltStore(t *testing.T) func(store.Hook) (store.Database, error) {
	path := filepath.Join(t.TempDir(), "store.db")
	return func(hook store.Hook) (store.Database, error) { return bolt.Open(path, bolt.Options{Hook: hook}) }
}

func (d *deployment) replica(open func(store.Hook) (store.Database, error)) *replica {
	d.t.Helper()
	ctx := d.t.Context()
	bound := statetest.New(d.t).State()
	log := writer.New(d.clock, bound)
	guards := guard.New(log)
	opened, err := open(log.Commit)
	must(d.t, err)
	d.t.Cleanup(func() { _ = opened.Close() })
	db := bound.Guard(opened)
	key, err := kms.OpenLocal(d.keyFile)
	must(d.t, err)
	_, keys, err := identity.Open(ctx, db, log, guards, key, keyring.Config{Now: d.clock})
	must(d.t, err)
	bucket, err := objects.Open(ctx, d.bucket, objects.SigningOptions{})
	must(d.t, err)
	r := &replica{t: d.t, d: d, db: db, logged: new(bytes.Buffer)}
	c := d.config
	c.Store, c.Log, c.Guard, c.Keys, c.KMS = db, log, guards, keys, []keyring.KMS{key}
	c.KMSKeys = func(context.Context) ([][]byte, error) {
		b, err := os.ReadFile(d.keyFile)
		return [][]byte{b}, err
	}
	c.Recipients = []backup.Recipient{d.identity.Recipient()}
	c.Bucket, c.Place, c.Program, c.Now = bucket, d.bucket, "test", d.clock
	c.Logger = slog.New(slog.NewTextHandler(r.logged, nil))
	r.Schedule = schedule.New(nil, c)
	return r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// names returns the objects in the bucket.
func (r *replica) names() []string {
	r.t.Helper()
	names, err := r.Bucket.List(r.t.Context(), "backup/", 100)
	must(r.t, err)
	return names
}

// prefixed returns the name of the backup of a time.
func (r *replica) prefixed(at string) string {
	return "backup/" + r.Log.ChainID() + "/" + at + ".backup"
}

// has fails unless the bucket has the backups of these times, each with its signature, and nothing else.
func (r *replica) has(times ...string) {
	r.t.Helper()
	var want []string
	for _, at := range times {
		name := r.prefixed(at)
		want = append(want, name, name+".sig")
	}
	if got := r.names(); !slices.Equal(got, want) {
		r.t.Fatalf("there are %q, want %q\n%s", got, want, r.logged)
	}
}

func (r *replica) status() schedule.Status {
	r.t.Helper()
	s, err := r.Status(r.t.Context())
	must(r.t, err)
	return s
}

// taken returns how many backups the log has.
func (r *replica) taken() (n uint64) {
	r.t.Helper()
	_, written, err := r.Log.Progress(r.t.Context())
	must(r.t, err)
	return written[writer.Kind{Type: audit.BackupTaken, Outcome: audit.Success}]
}

// restored restores a backup of the bucket as the command does.
func (r *replica) restored(name string) *restore.Restored {
	r.t.Helper()
	var done *restore.Restored
	err := r.Bucket.Download(r.t.Context(), name, func(file io.Reader) error {
		from, err := restore.Open(file, []backup.Identity{r.d.identity})
		if err != nil {
			return err
		}
		done = &restore.Restored{From: from}
		return done.Into(r.t.Context(), filepath.Join(r.t.TempDir(), "restored.db"), nil)
	})
	if err == nil {
		err = done.Key
	}
	must(r.t, err)
	return done
}

func eachBucket(t *testing.T, test func(t *testing.T, bucket string)) {
	t.Run("folder", func(t *testing.T) { test(t, "file://"+t.TempDir()) })
	t.Run("s3", func(t *testing.T) {
		url, err := s3test.ForTest(t).Bucket("backups")
		must(t, err)
		test(t, url+"&prefix=latticekeep/")
	})
}

func TestABackupIsTakenWhenItIsDueAndCanBeRestored(t *testing.T) {
	eachBucket(t, func(t *testing.T, bucket string) {
		d := newDeployment(t, bucket)
		r := d.replica(boltStore(t))
		must(t, r.RunOnce(t.Context()))
		r.has("20261124-021700")
		if s := r.status(); !s.Taken.Equal(d.now) || !s.Verified.Equal(d.now) || s.Bytes == 0 {
			t.Errorf("the status is %+v", s)
		}
		done := r.restored(r.names()[0])
		if !done.Tried || done.From.Header.Chain != r.Log.Fingerprint() {
			t.Errorf("restored %+v", done)
		}
		d.after(24*time.Hour - time.Second)
		must(t, r.RunOnce(t.Context()))
		r.has("20261124-021700")
		d.after(time.Second)
		must(t, r.RunOnce(t.Context()))
		r.has("20261124-021700", "20261125-021700")
		if n := r.taken(); n != 2 {
			t.Errorf("the log has %d backups", n)
		}
		if left, err := os.ReadDir(r.Scratch); err != nil || len(left) > 0 {
			t.Errorf("the scratch store left %v: %v", left, err)
		}
	})
}

func TestAnyRecipientOpensABackup(t *testing.T) {
	d := newDeployment(t, "file://"+t.TempDir())
	r := d.replica(boltStore(t))
	other, err := backup.NewIdentity()
	must(t, err)
	r.Recipients = append(r.Recipients, other.Recipient())
	must(t, r.RunOnce(t.Context()))
	r.restored(r.names()[0])
	d.identity = other
	r.restored(r.names()[0])
}

// A restart, or another replica, goes on where the last one was.
func TestARestartDoesNotTakeABackupAgain(t *testing.T) {
	d, open := newDeployment(t, "file://"+t.TempDir()), boltStore(t)
	first := d.replica(open)
	must(t, first.RunOnce(t.Context()))
	must(t, first.db.Close())
	d.after(time.Hour)
	second := d.replica(open)
	must(t, second.RunOnce(t.Context()))
	second.has("20261124-021700")
	second.Place = "file:///elsewhere" // as in another configuration
	must(t, second.RunOnce(t.Context()))
	second.has("20261124-021700", "20261124-031700")
}

func TestOneOfSeveralReplicasTakesTheBackup(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs a PostgreSQL server")
	}
	d, url := newDeployment(t, "file://"+t.TempDir()), pgtest.Shared(t).URL()
	open := func(hook store.Hook) (store.Database, error) {
		return postgres.Open(context.Background(), url, postgres.Options{Hook: hook, Head: state.HeadKey})
	}
	replicas := []*replica{d.replica(open), d.replica(open)}
	for _, want := range [][]string{{"20261124-021700"}, {"20261124-021700", "20261125-021700"}} {
		var all sync.WaitGroup
		for _, r := range replicas {
			all.Go(func() {
				if err := r.RunOnce(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		replicas[0].has(want...)
		if n := replicas[0].taken() + replicas[1].taken(); n != uint64(len(want)) {
			t.Errorf("the logs have %d backups, want %d", n, len(want))
		}
		d.after(24 * time.Hour)
	}
	replicas[1].restored(replicas[1].names()[0])
}

// What somebody else has put there stays, however old it is.
func TestOnlyOldBackupsOfThisDeploymentAreDeleted(t *testing.T) {
	eachBucket(t, func(t *testing.T, bucket string) {
		d := newDeployment(t, bucket)
		r := d.replica(boltStore(t))
		must(t, r.RunOnce(t.Context()))
		mine := r.names()
		get := func(name string) []byte {
			b, err := r.Bucket.Get(t.Context(), name)
			must(t, err)
			return b
		}
		put := func(name string, b []byte) string {
			must(t, r.Bucket.Put(t.Context(), name, b))
			return name
		}
		chain := "backup/" + r.Log.ChainID() + "/"
		foreign := newDeployment(t, bucket).replica(boltStore(t))
		must(t, foreign.RunOnce(t.Context()))
		others := slices.DeleteFunc(foreign.names(), func(name string) bool { return slices.Contains(mine, name) })
		others = append(others,
			put(chain+"20200101-000000.backup", get(mine[0])),                                  // without a signature
			put(chain+"20200102-000000.backup", get(mine[0])),                                  // with one of another backup
			put(chain+"20200102-000000.backup.sig", get(mine[1])),                              //
			put(chain+"20200103-000000.backup.sig", get(others[1])),                            // with one of another deployment
			put(chain+"20200104-000000.backup.sig", []byte("nothing")),                         //
			put(chain+"mine.backup", get(mine[0])), put(chain+"mine.backup.sig", get(mine[1])), // kept by hand
			put("20200101-000000.backup.sig", get(mine[1])),
		)
		d.after(72*time.Hour + time.Second)
		must(t, r.RunOnce(t.Context()))
		newest := chain + "20261127-021701.backup"
		for _, name := range append(others, newest, newest+".sig") {
			if there, err := r.Bucket.Exists(t.Context(), name); err != nil || !there {
				t.Errorf("%s is gone: %v", name, err)
			}
		}
		for _, name := range mine {
			if there, err := r.Bucket.Exists(t.Context(), name); err != nil || there {
				t.Errorf("%s is still there: %v", name, err)
			}
		}
	})
}

func TestNothingIsDeletedUntilANewerBackupIsVerified(t *testing.T) {
	d := newDeployment(t, "file://"+t.TempDir())
	r := d.replica(boltStore(t))
	must(t, r.RunOnce(t.Context()))
	good, scratch := r.status(), r.Scratch
	d.after(73 * time.Hour)
	r.Scratch = filepath.Join(scratch, "none")
	if err := r.RunOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "backup.scratch") {
		t.Errorf("without a scratch folder: %v", err)
	}
	r.has("20261124-021700", "20261127-031700")
	s := r.status()
	if !s.Taken.Equal(d.now) || !s.Verified.Equal(good.Verified) || s.Failures[schedule.Verify] != 1 || s.Failures[schedule.Take] != 0 {
		t.Errorf("the status is %+v", s)
	}
	r.Scratch = scratch
	d.after(24 * time.Hour)
	must(t, r.RunOnce(t.Context()))
	r.has("20261127-031700", "20261128-031700")
}

// A row that does not verify is found before somebody needs the backup.
func TestABackupOfADamagedStoreIsNotVerified(t *testing.T) {
	d, open := newDeployment(t, "file://"+t.TempDir()), boltStore(t)
	r := d.replica(open)
	must(t, r.Guard.Record(t.Context(), audit.Event{
		Type: audit.MemberListed, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant), Resource: audit.Resource{Type: audit.UserResource},
	}))
	must(t, r.db.Close())
	raw, err := open(nil)
	must(t, err)
	must(t, raw.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(audit.EntryKey(1)) }))
	must(t, raw.Close())
	damaged := d.replica(open)
	if err := damaged.RunOnce(t.Context()); err == nil {
		t.Fatal("it was verified")
	}
	if s := damaged.status(); s.Taken.IsZero() || !s.Verified.IsZero() || s.Failures[schedule.Verify] != 1 {
		t.Errorf("the status is %+v", s)
	}
}

func TestAFailureIsRepeatedAfterAPause(t *testing.T) {
	dir := t.TempDir()
	d := newDeployment(t, "file://"+filepath.Join(dir, "bucket"))
	r := d.replica(boltStore(t))
	must(t, os.Rename(filepath.Join(dir, "bucket"), filepath.Join(dir, "away")))
	fails := func(want uint64) {
		t.Helper()
		_ = r.RunOnce(t.Context())
		if n := r.status().Failures[schedule.Take]; n != want || r.taken() != 0 {
			t.Fatalf("%d failures, want %d, and %d entries", n, want, r.taken())
		}
	}
	fails(1)
	d.after(5*time.Minute - time.Second)
	fails(1)
	d.after(time.Second)
	fails(2)
	d.after(10*time.Minute - time.Second)
	fails(2)
	for range 9 { // never longer than an hour
		d.after(time.Hour)
		_ = r.RunOnce(t.Context())
	}
	fails(11)
	must(t, os.Rename(filepath.Join(dir, "away"), filepath.Join(dir, "bucket")))
	d.after(time.Hour)
	must(t, r.RunOnce(t.Context()))
	if len(r.names()) != 2 {
		t.Errorf("there are %q", r.names())
	}
}

// failing is a store whose copy ends early.
type failing struct {
	store.Database
	during func() error
}

func (f failing) Copy(ctx context.Context, emit func(key, value []byte) error) error {
	n := 0
	return f.Database.Copy(ctx, func(key, value []byte) error {
		if n++; n == 10 {
			if err := f.during(); err != nil {
				return err
			}
		}
		return emit(key, value)
	})
}

func TestACopyThatFailsLeavesNothing(t *testing.T) {
	eachBucket(t, func(t *testing.T, bucket string) {
		d := newDeployment(t, bucket)
		r := d.replica(boltStore(t))
		mine := errors.New("mine")
		r.Store = failing{r.db, func() error { return mine }}
		if err := r.RunOnce(t.Context()); !errors.Is(err, mine) {
			t.Errorf("the copy failed with %v", err)
		}
		r.has()
		ctx, end := context.WithCancel(t.Context())
		r.Store = failing{r.db, func() error { end(); return ctx.Err() }}
		d.after(time.Hour)
		if err := r.RunOnce(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("the copy ended with %v", err)
		}
		r.has()
		r.Store = r.db // the next start, at once
		must(t, r.RunOnce(t.Context()))
		r.has("20261124-031700")
	})
}

// After a kill another process goes on when the claim has ended, and removes what was left.
func TestAClaimEndsWithItsProcess(t *testing.T) {
	d := newDeployment(t, "file://"+t.TempDir())
	r := d.replica(boltStore(t))
	left := "backup/" + r.Log.ChainID() + "/20261124-021600.backup"
	must(t, r.Bucket.Put(t.Context(), left, []byte("part")))
	must(t, r.db.Update(t.Context(), func(tx store.Tx) error {
		return tx.Put([]byte("backup/schedule"), []byte(`{"place":"`+d.bucket+`","attempt":"`+left+`","by":"x","until":"2026-11-24T02:21:00Z"}`))
	}))
	must(t, r.RunOnce(t.Context()))
	if names := r.names(); !slices.Equal(names, []string{left}) {
		t.Errorf("there are %q before the claim ends", names)
	}
	d.after(4 * time.Minute)
	scratch := filepath.Join(r.Scratch, ".latticekeep-scratch-1")
	must(t, os.Mkdir(scratch, 0o700))
	must(t, os.WriteFile(filepath.Join(scratch, "scratch.db"), []byte("rows"), 0o600))
	must(t, r.RunOnce(t.Context()))
	r.has("20261124-022100")
	if _, err := os.Stat(scratch); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the scratch store of a killed process stays: %v", err)
	}
}

// A replica that was stopped, and goes on when another one has taken the backup, removes its own.
func TestALostClaimLeavesNothing(t *testing.T) {
	d := newDeployment(t, "file://"+t.TempDir())
	r := d.replica(boltStore(t))
	r.Store = failing{r.db, func() error {
		d.after(6 * time.Minute)
		return r.db.Update(t.Context(), func(tx store.Tx) error {
			return tx.Put([]byte("backup/schedule"), []byte(`{"place":"`+d.bucket+`","by":"another","taken":"2026-11-24T02:23:00Z"}`))
		})
	}}
	if err := r.RunOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "another replica") {
		t.Errorf("it ended with %v", err)
	}
	r.has()
	if s := r.status(); s.Taken.Minute() != 23 {
		t.Errorf("the status is %+v", s)
	}
}

// A copy of the deployment has the same chain and key, and maybe the same configuration.
func TestACloneDeletesNoBackupOfTheDeploymentItCameFrom(t *testing.T) {
	d := newDeployment(t, "file://"+t.TempDir())
	r := d.replica(boltStore(t))
	must(t, r.RunOnce(t.Context()))
	path := filepath.Join(t.TempDir(), "clone.db")
	must(t, r.Bucket.Download(t.Context(), r.names()[0], func(file io.Reader) error {
		from, err := restore.Open(file, []backup.Identity{d.identity})
		must(t, err)
		return (&restore.Restored{From: from}).Into(t.Context(), path, nil)
	}))
	d.after(2 * time.Hour)
	clone := d.replica(func(hook store.Hook) (store.Database, error) { return bolt.Open(path, bolt.Options{Hook: hook}) })
	clone.Keep = time.Hour
	must(t, clone.RunOnce(t.Context())) // the deployment has taken none since
	clone.has("20261124-021700", "20261124-041700")
	d.after(22 * time.Hour)
	if err := r.RunOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "20261124-041700.backup") {
		t.Error("the deployment does not tell of the clone:", err)
	}
	for i := range 2 { // the second time, the deployment has taken no other one meanwhile
		d.after(25 * time.Hour)
		if err := clone.RunOnce(t.Context()); err == nil || !strings.Contains(err.Error(), "20261125-021700.backup") || clone.status().Failures[schedule.Delete] != uint64(i+1) {
			t.Errorf("the clone's expiry %d: %v", i, err)
		}
	}
	clone.has("20261124-021700", "20261124-041700", "20261125-021700", "20261126-031700", "20261127-041700")
	must(t, r.Bucket.Delete(t.Context(), r.prefixed("20261125-021700"))) // by hand, since the deployment is gone
	must(t, r.Bucket.Delete(t.Context(), r.prefixed("20261125-021700")+".sig"))
	d.after(8 * 24 * time.Hour)
	must(t, clone.RunOnce(t.Context()))
	clone.has("20261205-041700")
}

// The row of a restored database names the backup that it came from, as one that is being written.
func TestARestoredServerKeepsTheBackupThatItCameFrom(t *testing.T) {
	d := newDeployment(t, "file://"+t.TempDir())
	r := d.replica(boltStore(t))
	must(t, r.RunOnce(t.Context()))
	r.has("20261124-021700")
	path := filepath.Join(t.TempDir(), "restored.db")
	must(t, r.Bucket.Download(t.Context(), r.names()[0], func(file io.Reader) error {
		from, err := restore.Open(file, []backup.Identity{d.identity})
		must(t, err)
		return (&restore.Restored{From: from}).Into(t.Context(), path, nil)
	}))
	must(t, r.db.Close())
	d.after(time.Hour)
	again := d.replica(func(hook store.Hook) (store.Database, error) { return bolt.Open(path, bolt.Options{Hook: hook}) })
	again.KMSKeys = nil
	again.Scratch = filepath.Join(t.TempDir(), "missing") // so the next one is not verified
	if err := again.RunOnce(t.Context()); err == nil {
		t.Error("a backup was verified without a scratch store")
	}
	again.has("20261124-021700", "20261124-031700")
}
