package transfer

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/backup/rollback"
	"github.com/latticekeep/latticekeep/internal/backup/schedule"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/commit"
)

// followInterval is how often a follower looks for new segments.
const followInterval = 10 * time.Second

// follower keeps a cold copy of a deployment in a data directory. The copy has a mark, so that no server
// serves it.
type follower struct {
	*source
	dir string
	out io.Writer
}

// follow makes the copy if there is none, and applies what the server ships, until ctx ends. It fails for
// a log of commits that is not what the server wrote; trouble with the bucket is printed and retried.
func follow(ctx context.Context, o restoreOptions, out io.Writer) (err error) {
	f := &follower{out: out}
	var ok bool
	if f.dir, ok = o.Location(false).Dir(); !ok {
		return command.UsageError("--follow keeps a data directory: PostgreSQL has its own replication")
	}
	if err := o.Location(false).Check(); err != nil {
		return err
	}
	if f.source, err = openSource(ctx, o); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.bucket.Close()) }()
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return fmt.Errorf("making the data directory: %w", err)
	}
	if _, err := os.Stat(f.database()); errors.Is(err, os.ErrNotExist) {
		if err := f.copyNewest(ctx); err != nil {
			return err
		}
	}
	for {
		err := f.applyLog(ctx)
		if ctx.Err() != nil {
			return nil // it was told to end
		}
		if !errors.Is(err, errLogEnded) {
			return err
		}
		if err := f.list(ctx); err != nil {
			return err
		}
		if err := f.copyNewest(ctx); err != nil {
			return err
		}
	}
}

func (f *follower) database() string { return filepath.Join(f.dir, offline.DatabaseFile) }

// copyNewest makes the copy of the newest backup, in place of the one that is there. Until it is verified
// the copy before stays.
func (f *follower) copyNewest(ctx context.Context) (err error) {
	lock, err := offline.LockDataDir(f.dir) // an open database has a lock of its own
	if err != nil {
		return err
	}
	defer lock.Close()
	work := filepath.Join(f.dir, restoreDirectory)
	if err := errors.Join(os.RemoveAll(work), os.Mkdir(work, 0o700)); err != nil {
		return fmt.Errorf("making room for the database: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	made := filepath.Join(work, offline.DatabaseFile)
	chain := ""
	err = f.fill(ctx, f.newest(), made, func(r *restored, db store.Store) error {
		chain = r.From.Header.Chain
		return offline.PutFirstMark(ctx, db, &offline.Mark{
			State: offline.Following, ID: rand.Text(), Other: f.newest().name, Chain: r.From.Header.Chain, Identity: r.From.Header.Identity.Bytes(), Since: time.Now().UTC().Format(time.RFC3339),
		})
	})
	if err != nil {
		return err
	}
	report, err := verified(ctx, made, verify.Options{Fingerprint: chain})
	if err != nil {
		return fmt.Errorf("verifying %s: nothing was put in place: %w", f.newest().name, err)
	}
	if err := durable.MoveOver(made, f.database()); err != nil {
		return err
	}
	f.say("copied %s, up to entry %d %s", f.newest().name, report.Sequence, report.Hash)
	return nil
}

// errLogEnded means that the log of commits does not go on, and that a later backup has another one.
var errLogEnded = errors.New("the log of commits has ended")

// applyLog applies segments as they come. It returns errLogEnded when the copy has to be made again.
func (f *follower) applyLog(ctx context.Context) (err error) {
	db, err := bolt.Open(f.database(), bolt.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	m, err := offline.MarkOf(ctx, db)
	if err != nil {
		return err
	}
	if m == nil || m.State != offline.Following {
		return errors.New("the data directory has a database that follows no other: name another directory")
	}
	log, err := f.logOfCopy(ctx, db, m)
	if err != nil {
		return err
	}
	f.chain, f.identity = m.Chain, log.Identity.ID() // another copy must be of the same deployment
	reader := commits.NewReader(log)
	known := log.From
	for {
		err := f.step(ctx, db, reader, m, &known)
		switch {
		case err != nil && fault.Of(err) == fault.Unavailable:
			f.say("the copy stands at entry %d; retrying in %s: %v", known.Sequence, followInterval, err)
		case err != nil:
			return err
		}
		others, err := reader.Others(ctx)
		if err == nil && len(others) > 0 {
			return errLogEnded
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(followInterval):
		}
	}
}

// logOfCopy returns the log of commits that a copy follows.
func (f *follower) logOfCopy(ctx context.Context, db store.Store, m *offline.Mark) (log commits.Log, err error) {
	chainID, _, ok := schedule.ParseName(m.Other)
	identity, err := dualsig.ParsePublicKey(m.Identity)
	if err != nil || !ok {
		return log, errors.New("the mark of the copy is damaged: remove the database, and follow again")
	}
	log = commits.Log{Bucket: f.bucket, Folder: commits.Folder(chainID), Chain: m.Chain, Identity: identity, Identities: f.identities}
	there, err := readPlace(ctx, db, &log)
	if err == nil && !there {
		err = fmt.Errorf("the backup %s has no log of commits, so nothing can be followed: see that the server ships one, and wait for its next backup", m.Other)
	}
	return log, err
}

// step applies what the server has shipped, and verifies the entries that are new in the copy. known is
// the head up to which they are verified.
func (f *follower) step(ctx context.Context, db store.Store, reader *commits.Reader, m *offline.Mark, known *commit.Head) error {
	applied := restore.Replay(ctx, db, reader, m.ID)
	var now commit.Head
	err := db.View(ctx, func(r store.Reader) (err error) {
		now, err = commits.ReadHead(r)
		return err
	})
	if err != nil {
		return err
	}
	if now != *known {
		if _, err := verify.Store(ctx, db, verify.Options{From: known.Sequence, Fingerprint: m.Chain}); err != nil {
			return fmt.Errorf("verifying the new entries of the copy, which must not be promoted: %w", err)
		}
	}
	if applied == nil {
		applied = f.writeMetrics(now.Sequence, reader.Reached().Time)
	}
	if now != *known {
		*known = now
		f.say("followed up to entry %d %x, committed %s", now.Sequence, now.Hash, reader.Reached().Time.UTC().Format(time.RFC3339))
	}
	return applied
}

// say prints a line with the time.
func (f *follower) say(format string, values ...any) {
	fmt.Fprintf(f.out, "%s %s\n", time.Now().UTC().Format(time.RFC3339), fmt.Sprintf(format, values...))
}

// writeMetrics writes the file that Prometheus's node exporter reads, if one is named.
func (f *follower) writeMetrics(entry uint64, committed time.Time) error {
	if f.metricsFile == "" {
		return nil
	}
	var b strings.Builder
	gauge := func(name, help string, value any) {
		fmt.Fprintf(&b, "# HELP latticekeep_follow_%[1]s %[2]s\n# TYPE latticekeep_follow_%[1]s gauge\nlatticekeep_follow_%[1]s %[3]v\n", name, help, value)
	}
	gauge("success_timestamp_seconds", "When the copy last had everything that is in the bucket.", time.Now().Unix())
	gauge("entry", "Newest entry of the copy's audit log.", entry)
	if !committed.IsZero() {
		gauge("commit_timestamp_seconds", "When the newest commit of the copy was made.", committed.Unix())
	}
	temp, err := durable.WriteTemp(f.metricsFile, ".latticekeep-follow-*", 0o644, []byte(b.String()))
	if err == nil {
		err = durable.MoveOver(temp, f.metricsFile)
	}
	if err != nil {
		return fmt.Errorf("writing --metrics-file: %w", err)
	}
	return nil
}

// promote makes a copy a database that a server serves. It verifies all of it, begins a new epoch, and
// removes the mark.
func promote(ctx context.Context, o restoreOptions) (text string, err error) {
	dir, ok := o.Location(false).Dir()
	if !ok || o.Location(false).Check() != nil {
		return "", command.UsageError("--promote needs the data directory of a copy: name it with --data-dir")
	}
	if !o.tries() {
		return "", command.UsageError("--promote signs an entry: name the KMS key with --kms-key-file or --kms-url")
	}
	database := filepath.Join(dir, offline.DatabaseFile)
	if _, err := os.Stat(database); err != nil {
		return "", fmt.Errorf("there is no copy: %w", err)
	}
	var m *offline.Mark
	var report verify.Report
	err = withDatabase(database, func(db store.Database) (err error) {
		if m, err = offline.MarkOf(ctx, db); err != nil {
			return err
		}
		if m == nil || m.State != offline.Following && m.State != offline.Promoting {
			return errors.New("the database is no copy that follows another: there is nothing to promote")
		}
		if report, err = offline.VerifyStore(ctx, db, verify.Options{Fingerprint: cmp.Or(o.chain, m.Chain)}); err != nil {
			return err
		}
		m.State = offline.Promoting // nothing follows from here on
		return db.Update(ctx, m.Put)
	})
	if err != nil {
		return "", fmt.Errorf("promoting: the copy is not served: %w", err)
	}
	identity, err := dualsig.ParsePublicKey(m.Identity)
	if err != nil {
		return "", fmt.Errorf("reading the mark of the copy: %w", err)
	}
	var rolled audit.Rollback
	err = o.WithKMS(ctx, func(keys []keyring.KMS) (err error) {
		rolled, err = rollback.Promote(ctx, database, report, rollback.Options{KMS: keys, Identity: identity.ID()})
		return err
	})
	if err != nil {
		return "", fmt.Errorf("promoting: the copy is not served: %w", err)
	}
	if err := withDatabase(database, func(db store.Database) error { return offline.Unmark(ctx, db, m.ID) }); err != nil {
		return "", err
	}
	return fmt.Sprintf(`promoted: every entry and row is verified
head: %d %s
epoch: %d, begun by entry %d
What the other server did after this head is lost. Never start it again.
`, report.Sequence, report.Hash, rolled.Epoch, rolled.Sequence), nil
}
