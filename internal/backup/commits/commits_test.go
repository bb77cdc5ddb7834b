package commits_test

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type signing struct{ *dualsig.PrivateKey }

func (s signing) SignCommits(message []byte) ([]byte, error) {
	return s.Sign(backup.CommitsContext, message)
}

func (s signing) Identity() *dualsig.PublicKey { return s.Public() }

func newSigner(t *testing.T) signing {
	t.Helper()
	seed := make([]byte, 32)
	_, _ = crand.Read(seed) // never fails
	k, err := dualsig.NewPrivateKey(seed)
	must(t, err)
	return signing{k}
}

var chain = strings.Repeat("ab", 32)

const folder = "commits/chain/"

// deployment is what all copies of a database have in common.
type deployment struct {
	t        *testing.T
	signer   signing
	identity backup.Identity
	dir      string // of the bucket
	size     int    // of a segment; 0: the usual one
	journal  int    // bytes of a journal; 0: the usual one
}

func newDeployment(t *testing.T) *deployment {
	t.Helper()
	identity, err := backup.NewIdentity()
	must(t, err)
	return &deployment{t: t, signer: newSigner(t), identity: identity, dir: filepath.Join(t.TempDir(), "bucket")}
}

func (d *deployment) bucket() *objects.Bucket {
	d.t.Helper()
	b, err := objects.Open(d.t.Context(), "file://"+d.dir, objects.SigningOptions{})
	must(d.t, err)
	return b
}

// server is a process with a database, which writes entries as the audit log does.
type server struct {
	*commits.Shipper
	t        *testing.T
	path     string
	db       *bolt.Store
	logged   *bytes.Buffer
	sequence uint64
}

func (d *deployment) server(path string) *server {
	d.t.Helper()
	journal := commits.JournalBytes
	if d.journal > 0 {
		journal = d.journal
	}
	db, err := bolt.Open(path, bolt.Options{Journal: journal})
	must(d.t, err)
	d.t.Cleanup(func() { _ = db.Close() })
	s := &server{t: d.t, path: path, db: db, logged: new(bytes.Buffer)}
	s.Shipper, err = commits.NewShipper(commits.Config{
		Database: db, Store: db, Bucket: d.bucket(), Folder: folder, Chain: chain, Signer: d.signer,
		Recipients: []backup.Recipient{d.identity.Recipient()}, Now: time.Now, Logger: slog.New(slog.NewTextHandler(s.logged, nil)),
	})
	must(d.t, err)
	if d.size > 0 {
		s.SetSize(d.size)
	}
	s.sequence = s.head()
	return s
}

func (s *server) head() (sequence uint64) {
	s.t.Helper()
	must(s.t, s.db.View(s.t.Context(), func(r store.Reader) error {
		h, err := commits.ReadHead(r)
		sequence = h.Sequence
		return err
	}))
	return sequence
}

// write commits some rows, with an entry or without.
func (s *server) write(entry bool) {
	s.t.Helper()
	must(s.t, s.db.Update(s.t.Context(), func(tx store.Tx) error {
		var all []error
		for range 1 + rand.IntN(4) {
			key := fmt.Appendf(nil, "row%d", rand.IntN(40))
			if rand.IntN(3) == 0 {
				all = append(all, tx.Delete(key))
			} else {
				all = append(all, tx.Put(key, bytes.Repeat([]byte{byte(rand.Uint32())}, rand.IntN(300))))
			}
		}
		if entry {
			p := audit.Position{Sequence: s.sequence + 1, Hash: [32]byte{byte(s.sequence + 1), 7}}
			all = append(all, tx.Put(audit.HeadKey, p.Encode()))
		}
		return errors.Join(all...)
	}))
	if entry {
		s.sequence++
	}
}

func (s *server) writeSome() {
	for range 1 + rand.IntN(12) {
		s.write(rand.IntN(3) > 0)
	}
}

func (s *server) ship() {
	s.t.Helper()
	if err := s.Ship(s.t.Context()); err != nil {
		s.t.Fatalf("shipping: %v", err)
	}
}

// contents returns the rows, except the one that names the log.
func contents(t *testing.T, db store.Store) map[string]string {
	t.Helper()
	got := map[string]string{}
	must(t, db.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Range{}, func(k, v []byte) bool { got[string(k)] = string(v); return true })
	}))
	return got
}

// take takes a backup: the state of one commit.
func (s *server) take() map[string]string {
	s.t.Helper()
	must(s.t, s.Mark(s.t.Context()))
	s.write(true) // the entry of the backup
	return contents(s.t, s.db)
}

// restored makes a store of a backup and returns it with a reader of the log that it names.
func (d *deployment) restored(backup map[string]string, change func(*commits.Log)) (*bolt.Store, *commits.Reader) {
	d.t.Helper()
	db, err := bolt.Open(filepath.Join(d.t.TempDir(), "restored"), bolt.Options{})
	must(d.t, err)
	d.t.Cleanup(func() { _ = db.Close() })
	must(d.t, db.Update(d.t.Context(), func(tx store.Tx) error {
		for key, value := range backup {
			if err := tx.Put([]byte(key), []byte(value)); err != nil {
				return err
			}
		}
		return nil
	}))
	l := commits.Log{Bucket: d.bucket(), Folder: folder, Chain: chain, Identity: d.signer.Identity(), Identities: identities(d.identity)}
	must(d.t, db.View(d.t.Context(), func(r store.Reader) (err error) {
		there := false
		if l.Place, there, err = commits.ReadPlace(r); err == nil && !there {
			err = errors.New("the backup names no log")
		}
		if err == nil {
			l.From, err = commits.ReadHead(r)
		}
		return err
	}))
	if change != nil {
		change(&l)
	}
	return db, commits.NewReader(l)
}

func identities(all ...backup.Identity) []backup.Identity { return all }

// replay applies the log to a backup, compares it with what it must be, and returns what it reached.
func (d *deployment) replay(backup, want map[string]string, change func(*commits.Log)) commits.Reached {
	d.t.Helper()
	db, r := d.restored(backup, change)
	if err := restore.Replay(d.t.Context(), db, r, ""); err != nil {
		d.t.Fatalf("applying the log: %v", err)
	}
	if got := contents(d.t, db); !maps.Equal(got, want) {
		d.t.Errorf("the log makes other rows of the backup: %d, want %d", len(got), len(want))
	}
	return r.Reached()
}

func TestALogGoesOnAfterAnyBackup(t *testing.T) {
	for name, o := range map[string]struct{ size, journal int }{"with a journal": {}, "from the list": {1500, 1}, "from both": {1500, 6000}} {
		t.Run(name, func(t *testing.T) {
			d := newDeployment(t)
			d.size, d.journal = o.size, o.journal
			s := d.server(filepath.Join(t.TempDir(), "db"))
			s.writeSome()
			s.ship()
			var backups []map[string]string
			for range 12 {
				backups = append(backups, s.take())
				for range rand.IntN(4) {
					s.writeSome()
				}
				if rand.IntN(3) > 0 {
					s.ship()
				}
			}
			s.write(true)
			s.ship()
			want := contents(t, s.db)
			for _, b := range backups {
				d.replay(b, want, nil)
			}
			d.replay(want, want, nil) // of the end: the log has nothing
			if got := s.Status(); got.Logs[commits.First] != 1 || got.Logs[commits.Gap]+got.Logs[commits.Fork] > 0 || got.Segments == 0 || got.Failures > 0 {
				t.Errorf("the status is %+v", got)
			}
		})
	}
}

// What was applied goes on from where it ended, also when the log had ended in the middle of a stretch.
func TestALogIsFollowed(t *testing.T) {
	d := newDeployment(t)
	d.size, d.journal = 400, 1
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	db, r := d.restored(s.take(), nil)
	for range 30 {
		s.writeSome()
		s.write(true)
		s.ship()
		want := contents(t, s.db)
		must(t, restore.Replay(t.Context(), db, r, ""))
		if got := contents(t, db); !maps.Equal(got, want) {
			t.Fatalf("the copy has %d rows, want %d", len(got), len(want))
		}
		if _, err := r.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Fatalf("after the end: %v", err)
		}
	}
}

func TestALogIsReadUpToATime(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	s.ship()
	type moment struct {
		at   time.Time
		rows map[string]string
	}
	var moments []moment
	for range 20 {
		s.write(true)
		moments = append(moments, moment{time.Now(), contents(t, s.db)})
		time.Sleep(2 * time.Microsecond) // times have microseconds
		if rand.IntN(4) == 0 {
			s.ship()
		}
	}
	s.ship()
	for _, m := range moments {
		reached := d.replay(b, m.rows, func(l *commits.Log) { l.Until = m.at })
		if reached.Time.After(m.at) || reached.Time.IsZero() {
			t.Errorf("up to %s it has reached %s", m.at, reached.Time)
		}
	}
	d.replay(b, b, func(l *commits.Log) { l.Until = moments[0].at.Add(-time.Hour) })
}

// The values of a stretch are only whole at its end, so a time within it ends before it.
func TestAStretchIsReadAsAWhole(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	s.write(true)
	s.ship()
	before := contents(t, s.db)
	must(t, s.db.Close())
	d.size, d.journal = 300, 1
	s = d.server(s.path)
	for range 20 {
		s.write(true)
	}
	middle := time.Now()
	for range 20 {
		s.write(true)
	}
	s.ship()
	d.replay(b, before, func(l *commits.Log) { l.Until = middle })
	d.replay(b, contents(t, s.db), nil)
}

// clone copies the database as a kill leaves it.
func (s *server) clone() string {
	s.t.Helper()
	b, err := os.ReadFile(s.path)
	must(s.t, err)
	to := filepath.Join(s.t.TempDir(), "db")
	must(s.t, os.WriteFile(to, b, 0o600))
	return to
}

func TestAKilledServerGoesOnWithItsLog(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	for range 10 {
		s.writeSome()
		if rand.IntN(2) == 0 {
			s.ship()
			s.writeSome()
		}
		left := s.clone()
		if rand.IntN(2) == 0 { // the segment is there, and the process has died before it knew
			s.ship()
		}
		must(t, s.db.Close())
		s = d.server(left)
		s.write(true)
		s.ship()
		if n := s.Status().Logs; len(n) > 0 {
			t.Fatalf("a server that was killed has begun a log: %v", n)
		}
	}
	d.replay(b, contents(t, s.db), nil)
}

func TestAnOutageOfTheBucketLosesNothing(t *testing.T) {
	d := newDeployment(t)
	d.size, d.journal = 3000, 9000
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	s.ship()
	must(t, os.Rename(d.dir, d.dir+".away"))
	for range 5 {
		for range 10 {
			s.writeSome()
		}
		if err := s.Ship(t.Context()); fault.Of(err) != fault.Unavailable {
			t.Fatalf("without its bucket: %v", err)
		}
	}
	if until, err := s.Until(t.Context()); err != nil || time.Since(until) < 0 || s.Status().Failures != 5 || strings.Count(s.logged.String(), "shipping commits failed") != 1 {
		t.Errorf("everything is shipped until %s (%v), %d failures, and the log is\n%s", until, err, s.Status().Failures, s.logged)
	}
	must(t, os.Rename(d.dir+".away", d.dir))
	s.write(true)
	s.ship()
	d.replay(b, contents(t, s.db), nil)
	if n := s.Status().Logs; n[commits.First] != 1 || len(n) != 1 {
		t.Errorf("logs have begun: %v", n)
	}
}

// A segment that was written, while its answer was lost, is no other server's.
func TestALostAnswerEndsNoLog(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	s.write(true)
	d.server(s.clone()).ship() // writes what s would have written
	s.write(true)
	s.ship()
	s.write(true)
	s.ship()
	if n := s.Status().Logs; n[commits.Fork] > 0 {
		t.Errorf("logs have begun: %v", n)
	}
	d.replay(b, contents(t, s.db), nil)
}

// Two servers on copies of a database cannot mix what they ship.
func TestTheSecondServerOfALogBeginsAnother(t *testing.T) {
	d := newDeployment(t)
	first := d.server(filepath.Join(t.TempDir(), "db"))
	first.write(true)
	first.ship()
	b := first.take()
	first.ship()
	second := d.server(first.clone())
	for _, s := range []*server{first, second, first, second} {
		s.writeSome()
		s.write(true)
		s.ship()
	}
	if n := first.Status().Logs; n[commits.Fork] != 0 {
		t.Errorf("the first server has begun %v", n)
	}
	if n := second.Status().Logs; n[commits.Fork] != 1 || !strings.Contains(second.logged.String(), "another server has written") {
		t.Errorf("the second server has begun %v, and says\n%s", n, second.logged)
	}
	select {
	case <-second.Begun():
	default:
		t.Error("nobody is told that the second log needs a backup")
	}
	d.replay(b, contents(t, first.db), nil)
	later := second.take()
	second.write(true)
	second.ship()
	d.replay(later, contents(t, second.db), nil)
	_, r := d.restored(b, nil)
	if others, err := r.Others(t.Context()); err != nil || len(others) != 1 {
		t.Errorf("other logs are %v: %v", others, err)
	}
}

// A segment of a stretch has values of later commits. A copy of the database that lacks these commits must
// not go on after it, although it has all commits that the segment is of.
func TestACloneDoesNotGoOnWithValuesThatItLacks(t *testing.T) {
	d := newDeployment(t)
	d.size, d.journal = 300, 1
	first := d.server(filepath.Join(t.TempDir(), "db"))
	first.write(true)
	first.ship()
	b := first.take()
	first.ship()
	reached := d.replay(b, contents(t, first.db), nil)
	shipped := d.names()
	for range 20 {
		first.write(true)
	}
	left := first.clone()
	for range 20 {
		first.write(true)
	}
	first.ship()
	for _, name := range d.names()[len(shipped)+1:] { // it has died after the first segment
		must(t, d.bucket().Delete(t.Context(), name))
	}
	second := d.server(left)
	second.write(true)
	second.ship()
	if n := second.Status().Logs; n[commits.Fork] != 1 {
		t.Errorf("the copy has begun %v", n)
	}
	_, r := d.restored(b, nil)
	for {
		if _, err := r.Next(t.Context()); err != nil {
			break
		}
	}
	if r.Reached().Commit > reached.Commit {
		t.Errorf("the first log leads to commit %d", r.Reached().Commit)
	}
}

// Whoever writes to the bucket without the keys cannot keep a reader busy.
func TestObjectsOfOthersBesideTheLogsAreSkipped(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	s.ship()
	for _, name := range []string{"x/zz", "x/b/c", "zz/z", "z"} {
		must(t, d.bucket().Put(t.Context(), folder+name, []byte("junk")))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, r := d.restored(b, nil)
	if others, err := r.Others(ctx); err != nil || len(others) != 0 {
		t.Errorf("other logs are %v: %v", others, err)
	}
}

func TestALogWithAGapEndsAndAnotherBegins(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	s.write(true)
	s.ship()
	want := contents(t, s.db)
	long := bytes.Repeat([]byte("k"), 1000)
	for i := range 17 { // more than the list takes
		must(t, s.db.Update(t.Context(), func(tx store.Tx) error {
			for j := range 1000 {
				if err := tx.Put(fmt.Appendf(nil, "%s%02d%04d", long, i, j), nil); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	if _, err := s.Until(t.Context()); !errors.Is(err, bolt.ErrNoLog) {
		t.Errorf("the log goes on: %v", err)
	}
	s.ship()
	if n := s.Status().Logs[commits.Gap]; n != 1 {
		t.Errorf("%d logs have begun because of a gap", n)
	}
	s.write(true)
	s.ship()
	d.replay(b, want, nil) // up to the gap and not beyond
	_, r := d.restored(b, nil)
	if others, err := r.Others(t.Context()); err != nil || len(others) != 1 {
		t.Errorf("other logs are %v: %v", others, err)
	}
	later := s.take()
	s.write(true)
	s.ship()
	d.replay(later, contents(t, s.db), nil)
}

// A store that was restored does not go on with the log that it was restored from.
func TestARestoredStoreBeginsALog(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	s.write(true)
	s.ship()
	db, r := d.restored(b, nil)
	must(t, restore.Replay(t.Context(), db, r, ""))
	must(t, db.Close())
	path := filepath.Join(filepath.Dir(s.path), "restored")
	again, err := bolt.Open(path, bolt.Options{})
	must(t, err)
	must(t, again.Update(t.Context(), func(tx store.Tx) error {
		for key, value := range contents(t, s.db) {
			if err := tx.Put([]byte(key), []byte(value)); err != nil {
				return err
			}
		}
		return nil
	}))
	must(t, again.Close())
	next := d.server(path)
	next.write(true)
	next.ship()
	if n := next.Status().Logs[commits.First]; n != 1 {
		t.Errorf("the restored store has begun %d logs", n)
	}
	s.write(true)
	s.ship() // and the original goes on
	d.replay(b, contents(t, s.db), nil)
}

func TestCommitsThatNoBackupNeedsAreDeleted(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	old := s.take()
	for range 5 {
		s.write(true)
		s.ship()
	}
	b := s.take()
	before := time.Now()
	s.write(true)
	s.ship()
	names := d.names()
	must(t, d.bucket().Put(t.Context(), folder+"note", []byte("of somebody else")))
	if n, err := s.Expire(t.Context(), before); err != nil || n != len(names)-1 {
		t.Errorf("deleted %d of %d: %v", n, len(names), err)
	}
	d.replay(b, contents(t, s.db), nil)
	db, r := d.restored(old, nil)
	var broken *commits.BrokenError
	if err := restore.Replay(t.Context(), db, r, ""); !errors.As(err, &broken) || !strings.Contains(err.Error(), "deleted with an older backup") {
		t.Errorf("of the older backup: %v", err)
	}
	if there, err := d.bucket().Exists(t.Context(), folder+"note"); err != nil || !there {
		t.Error("an object of somebody else was deleted")
	}
}

// names returns the names of all segments.
func (d *deployment) names() []string {
	d.t.Helper()
	names, err := d.bucket().List(d.t.Context(), folder, 1000)
	must(d.t, err)
	return slices.DeleteFunc(names, func(n string) bool { return strings.HasSuffix(n, "note") })
}

func TestEverythingThatIsChangedInALogIsFound(t *testing.T) {
	d := newDeployment(t)
	s := d.server(filepath.Join(t.TempDir(), "db"))
	s.write(true)
	s.ship()
	b := s.take()
	var states []map[string]string
	for range 5 {
		s.write(true)
		s.write(true)
		s.ship()
		states = append(states, contents(t, s.db))
	}
	names := d.names() // the first of the five is names[1]
	if len(names) != 6 {
		t.Fatalf("there are %q", names)
	}
	bucket := d.bucket()
	get := func(name string) []byte {
		t.Helper()
		b, err := bucket.Get(t.Context(), name)
		must(t, err)
		return b
	}
	original := make(map[string][]byte)
	for _, name := range names {
		original[name] = get(name)
	}
	target := names[3]
	flip := func(at int) func() []byte {
		return func() []byte {
			b := bytes.Clone(original[target])
			b[(at+len(b))%len(b)] ^= 1
			return b
		}
	}
	other := newDeployment(t) // with the same names, as somebody else would make it
	other.server(filepath.Join(t.TempDir(), "other"))
	forged := func(sign signing, change func(*commits.Statement)) []byte {
		said, err := commits.ParseStatement(original[target], d.signer.Identity())
		must(t, err)
		records, err := commits.Unseal(said, original[target], identities(d.identity))
		must(t, err)
		records[0].Rows = nil
		change(&said)
		b, err := commits.Seal(&said, records, []backup.Recipient{d.identity.Recipient()}, sign)
		must(t, err)
		return b
	}
	same := func(*commits.Statement) {}
	for name, c := range map[string]struct {
		make func() []byte // nil: deleted
		says string
	}{
		"a byte of the magic":     {flip(3), "none of a log"},
		"a byte of the statement": {flip(100), "not signed"},
		"a byte of the signature": {flip(600), "not signed"},
		"a byte of the records":   {flip(-10), "changed"},
		"its end":                 {func() []byte { return original[target][:len(original[target])-1] }, "cut off"},
		"all but the magic":       {func() []byte { return original[target][:30] }, "cut off"},
		"all of it":               {func() []byte { return []byte{} }, "cut off"},
		"more behind it":          {func() []byte { return append(bytes.Clone(original[target]), 0) }, "changed"},
		"missing":                 {nil, "missing"},
		"the one before":          {func() []byte { return original[names[2]] }, "another segment"},
		"the one after":           {func() []byte { return original[names[4]] }, "another segment"},
		"signed by another":       {func() []byte { return forged(other.signer, same) }, "not signed"},
		"of another deployment":   {func() []byte { return forged(d.signer, func(s *commits.Statement) { s.Chain[0]++ }) }, "another deployment"},
		"of another log":          {func() []byte { return forged(d.signer, func(s *commits.Statement) { s.Log[0]++ }) }, "another segment"},
		"after another one":       {func() []byte { return forged(d.signer, func(s *commits.Statement) { s.Previous[0]++ }) }, "does not follow"},
		"of the same place":       {func() []byte { return forged(d.signer, same) }, "does not follow"}, // the next one tells
	} {
		if c.make == nil {
			must(t, bucket.Delete(t.Context(), target))
		} else {
			must(t, bucket.Put(t.Context(), target, c.make()))
		}
		db, r := d.restored(b, nil)
		err := restore.Replay(t.Context(), db, r, "")
		var broken *commits.BrokenError
		if !errors.As(err, &broken) || fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		want, object := states[1], target
		if name == "of the same place" {
			want, object = nil, names[4]
		}
		if broken.Object != object || !strings.Contains(err.Error(), "can be read up to "+broken.Reached.Time.Format(time.RFC3339Nano)) {
			t.Errorf("%s: it names %s and %s: %v", name, broken.Object, broken.Reached.Time, err)
		}
		must(t, bucket.Put(t.Context(), target, original[target]))
		if want != nil {
			d.replay(b, want, func(l *commits.Log) { l.Until = broken.Reached.Time })
		}
	}
	stranger, err := backup.NewIdentity()
	must(t, err)
	db, r := d.restored(b, func(l *commits.Log) { l.Identities = identities(stranger) })
	if err := restore.Replay(t.Context(), db, r, ""); err == nil || !strings.Contains(err.Error(), "encrypted to another recipient") {
		t.Errorf("with another identity: %v", err)
	}
	db, r = d.restored(b, func(l *commits.Log) { l.From.Hash[0]++ })
	if err := restore.Replay(t.Context(), db, r, ""); err == nil || !strings.Contains(err.Error(), "not the one of the backup") {
		t.Errorf("with another entry of the same number: %v", err)
	}
	d.replay(b, states[4], nil)
}

// A segment that was made by hand opens for ever: docs/formats.md describes it.
func TestTheGoldenSegmentOpens(t *testing.T) {
	read := func(name string) []byte {
		t.Helper()
		b, err := os.ReadFile(filepath.Join("testdata", name))
		must(t, err)
		return b
	}
	segment := read("segment")
	key, err := hex.DecodeString(strings.TrimSpace(string(read("deployment.hex"))))
	must(t, err)
	public, err := dualsig.ParsePublicKey(key)
	must(t, err)
	opens, err := backup.ReadIdentities(bytes.NewReader(read("identity")))
	must(t, err)
	said, err := commits.ParseStatement(segment, public)
	must(t, err)
	if said.Ordinal != 7 || said.First != 41 || said.Last != 42 || said.At != 42 || said.After.Sequence != 12 || said.Time.Year() != 2026 || hex.EncodeToString(said.Chain[:]) != chain {
		t.Errorf("it says %+v", said)
	}
	records, err := commits.Unseal(said, segment, opens)
	if err != nil || len(records) != 2 || string(records[1].Rows[0].Value) != "second" || records[1].Rows[1].Value != nil {
		t.Errorf("its records are %+v: %v", records, err)
	}
}

func FuzzParseStatement(f *testing.F) {
	key, err := os.ReadFile(filepath.Join("testdata", "deployment.hex"))
	if err != nil {
		f.Fatal(err)
	}
	raw, err := hex.DecodeString(strings.TrimSpace(string(key)))
	if err != nil {
		f.Fatal(err)
	}
	public, err := dualsig.ParsePublicKey(raw)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		said, err := commits.ParseStatement(b, public)
		if err == nil && said.Ordinal != 7 {
			t.Errorf("it has no signature, and says %+v", said)
		}
		if err == nil {
			_, _ = commits.Unseal(said, b, nil)
		}
	})
}
