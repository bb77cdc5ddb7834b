package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/backup/rollback"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// laterFile is the database of the newest state, beside the one that is restored.
const laterFile = "later.db"

// logs is a log of commits, if there is one.
type logs struct {
	commits.Log
	there bool
}

// parseTime reads --to-time.
func parseTime(text string, now time.Time) (time.Time, error) {
	at, err := time.Parse(time.RFC3339, text)
	switch {
	case err != nil:
		return at, command.UsageError(fmt.Sprintf("--to-time is %q: give a time as 2026-11-25T03:00:00Z", text))
	case at.After(now):
		return at, command.UsageError(fmt.Sprintf("--to-time is in the future: it is %s now", now.UTC().Format(time.RFC3339)))
	}
	return at, nil
}

// toTime restores a deployment as it was at a time.
type toTime struct {
	*source
	at        time.Time
	base      keptBackup // restored backup
	restored  *restored
	result    rollback.Result
	later     verify.Report    // newest state that is known; zero if none is
	unknown   string           // why the later state may lack something
	known     audit.Checkpoint // checkpoint of --since, whose entries the later state must hold
	sinceText []byte           // file of --since; nil without it

	// The logs of commits of the restored backup and of the newest one.
	log, newestLog logs

	// Times of the last commit that was applied and of the next one in the log; zero if there is none.
	reached, next time.Time
}

// restoreToTime makes a data directory of the newest backup in the bucket that is not newer than the
// time, and of the log of commits up to the time. Then it takes away again what was taken away since.
func restoreToTime(ctx context.Context, o restoreOptions, now time.Time) (t *toTime, err error) {
	t = new(toTime)
	if t.at, err = parseTime(o.toTime, now); err != nil {
		return nil, err
	}
	dir, ok := o.Location(false).Dir()
	if !ok {
		return nil, command.UsageError("--to-time makes a data directory: PostgreSQL has its own recovery to a point in time")
	}
	if err := o.Location(false).Check(); err != nil {
		return nil, err
	}
	if t.source, err = openSource(ctx, o); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, t.bucket.Close()) }()
	err = inDirectory(dir, func(work string) error { return t.build(ctx, work) }, func() error {
		paths, _ := t.restored.keysOut(o)
		return removeAll(paths)
	})
	return t, err
}

// build makes the database in the folder work.
func (t *toTime) build(ctx context.Context, work string) error {
	database, later := filepath.Join(work, offline.DatabaseFile), filepath.Join(work, laterFile)
	if err := t.fillBase(ctx, database); err != nil {
		return err
	}
	if err := withDatabase(database, func(db store.Database) error { return t.replay(ctx, db) }); err != nil {
		return err
	}
	var err error
	if t.restored.Report, err = verified(ctx, database, verify.Options{Fingerprint: t.restored.From.Header.Chain}); err != nil {
		return fmt.Errorf("verifying what was restored: nothing was put in place: %w", err)
	}
	if err := t.readSince(); err != nil {
		return err
	}
	if err := t.buildLater(ctx, later); err != nil {
		return err
	}
	if err := t.checkGap(ctx); err != nil {
		return err
	}
	o := rollback.Options{Identity: t.restored.From.Header.Identity.ID(), To: t.at, Revive: t.revive, LaterReport: t.later, Unknown: t.unknown}
	if t.later.Sequence > 0 {
		db, err := bolt.Open(later, bolt.Options{ReadOnly: true})
		if err != nil {
			return err
		}
		defer db.Close()
		o.Later = db
	}
	err = t.withKMS(ctx, func(keys []keyring.KMS) (err error) {
		o.KMS = keys
		t.result, err = rollback.Apply(ctx, database, t.restored.Report, o)
		if errors.Is(err, rollback.ErrLater) { // nothing was changed
			t.unknown, t.later = err.Error(), verify.Report{}
			o.Later, o.LaterReport, o.Unknown = nil, t.later, t.unknown
			t.result, err = rollback.Apply(ctx, database, t.restored.Report, o)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("rolling back: nothing was put in place: %w", err)
	}
	return t.restored.writeKeys(t.restoreOptions)
}

// readSince reads the checkpoint that --since names.
func (t *toTime) readSince() error {
	if t.since == "" {
		return nil
	}
	kept, err := os.ReadFile(t.since)
	if err != nil {
		return fmt.Errorf("reading --since: %w", err)
	}
	if t.known, _, err = audit.ParseKept(kept, t.restored.Report.PublicKey); err != nil {
		return command.UsageError(fmt.Sprintf("--since: %s is no checkpoint of this log: %v", t.since, err))
	}
	t.sinceText = kept
	return nil
}

// fillBase makes a database of the newest backup that has nothing newer than the time.
func (t *toTime) fillBase(ctx context.Context, database string) error {
	for _, b := range slices.Backward(t.backups) {
		if b.began.After(t.at) {
			continue
		}
		var head audit.Position
		err := t.fill(ctx, b, database, func(r *restored, s store.Store) (err error) {
			if current, _, err := offline.KMSKeysOfBackup(r.From.KMSKeys); err != nil || current == nil && !t.tries() {
				return cmp.Or(err, errNoKMS)
			}
			t.base, t.restored = b, r
			return s.View(ctx, func(rd store.Reader) error {
				head, err = audit.ReadHead(rd)
				return err
			})
		})
		if err != nil {
			return err
		}
		if !time.UnixMicro(head.Micros).After(t.at) {
			return nil
		}
		if err := os.Remove(database); err != nil { // the backup began before the time, and has rows from after it
			return err
		}
	}
	return fmt.Errorf("--to-time is before the first backup in the bucket: a time after %s is possible", t.backups[0].began.Format(time.RFC3339))
}

var errNoKMS = command.UsageError("the KMS key is needed to sign what changes, and it is not in the backup: name it with --kms-key-file or --kms-url")

// replay applies the log of commits to the restored database, up to the time.
func (t *toTime) replay(ctx context.Context, db store.Store) error {
	log, there, err := t.logOf(ctx, t.base, t.restored, db)
	if t.log = (logs{log, there}); err != nil || !there {
		return err
	}
	log.Until = t.at
	reader := commits.NewReader(log)
	err = restore.Replay(ctx, db, reader, "")
	t.reached, t.next = reader.Reached().Time, reader.Refused()
	if broken := new(commits.BrokenError); errors.As(err, &broken) {
		return fmt.Errorf("--to-time is in a gap of the log of commits; an earlier time, or one after a later backup, is possible: %w", err)
	}
	return err
}

// checkGap fails if the log of commits ended before the time, and the newest backup has another log:
// nobody knows what happened in between.
func (t *toTime) checkGap(ctx context.Context) error {
	if t.base == t.newest() || !t.log.there || t.newestLog.there && t.log.Place.Log == t.newestLog.Place.Log {
		return nil
	}
	until := t.base.began
	reader := commits.NewReader(t.log.Log)
	for {
		r, err := reader.Next(ctx)
		if err == nil && r.Time.After(t.at) {
			return nil // the log goes on
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		until = r.Time
	}
	next := slices.Index(t.backups, t.base) + 1
	return fmt.Errorf("--to-time is in a gap of the log of commits: a time up to %s is possible, or one after %s",
		until.UTC().Format(time.RFC3339), t.backups[next].began.Format(time.RFC3339))
}

// buildLater makes the newest state that the bucket knows, in another database, or finds out why it
// cannot.
func (t *toTime) buildLater(ctx context.Context, database string) error {
	err := t.fill(ctx, t.newest(), database, func(r *restored, db store.Store) error {
		log, there, err := t.logOf(ctx, t.newest(), r, db)
		if t.newestLog = (logs{log, there}); err != nil {
			return err
		}
		if !there {
			t.unknown = "the newest backup has no log of commits"
			return nil
		}
		reader := commits.NewReader(log)
		err = restore.Replay(ctx, db, reader, "")
		if broken := new(commits.BrokenError); errors.As(err, &broken) {
			t.unknown = broken.Error()
			return nil
		}
		if err == nil {
			t.unknown, err = t.missingEnd(ctx, reader)
		}
		return err
	})
	o := verify.Options{Fingerprint: t.restored.From.Header.Chain}
	if err == nil {
		err = withDatabase(database, func(db store.Database) error { return t.compareSince(ctx, db, &o) })
	}
	if err == nil {
		t.later, err = verified(ctx, database, o)
	}
	if err != nil && fault.Of(err) == fault.Unavailable {
		return fmt.Errorf("reading what happened since: %w", err)
	}
	if err != nil {
		t.unknown, t.later = err.Error(), verify.Report{}
	}
	return ctx.Err()
}

// compareSince notes in t.unknown that the later state ends before the checkpoint of --since; the entries
// that it holds are known all the same. Otherwise it has the verification look for the checkpoint.
func (t *toTime) compareSince(ctx context.Context, db store.Database, o *verify.Options) error {
	if t.sinceText == nil {
		return nil
	}
	return db.View(ctx, func(r store.Reader) error {
		head, err := audit.ReadHead(r)
		if err == nil && head.Sequence < t.known.Sequence {
			t.unknown = fmt.Sprintf("it ends before entry %d, which the checkpoint of --since knows", t.known.Sequence)
			return nil
		}
		o.Since = t.sinceText
		return err
	})
}

// missingEnd says why the log that was read may lack its end, which whoever holds the bucket can hide.
// There is a commit after the time at least: what the operator wants to undo.
func (t *toTime) missingEnd(ctx context.Context, r *commits.Reader) (string, error) {
	others, err := r.Others(ctx)
	switch {
	case err != nil:
		return "", err
	case len(others) > 0:
		return fmt.Sprintf("another log of commits goes on at %s, and no backup names it", others[0].Began.Format(time.RFC3339)), nil
	case !r.Reached().Time.After(t.at):
		return "the log of commits has nothing from after the time", nil
	}
	return "", nil
}

// withKMS opens the KMS keys that are named, or those in the backup.
func (t *toTime) withKMS(ctx context.Context, use func([]keyring.KMS) error) error {
	current, former, err := offline.KMSKeysOfBackup(t.restored.From.KMSKeys)
	if err != nil {
		return fmt.Errorf("reading the KMS keys of the backup: %w", err)
	}
	if !t.tries() {
		return use(append([]keyring.KMS{current}, former...))
	}
	return t.WithKMS(ctx, func(named []keyring.KMS) error { return use(append(named, former...)) })
}

// text returns what the command prints.
func (t *toTime) text() string {
	var b strings.Builder
	r, report := t.result, t.restored.Report
	fmt.Fprintf(&b, "restored to: %s\nhead: %d %s\nchain: %s\n", t.at.UTC().Format(time.RFC3339), report.Sequence, report.Hash, report.Fingerprint)
	if !t.log.there {
		fmt.Fprintf(&b, "The bucket has no log of commits for this backup, so this is the state of %s.\n", t.base.began.Format(time.RFC3339))
	}
	if !t.reached.IsZero() {
		fmt.Fprintf(&b, "last commit in it: %s\n", t.reached.UTC().Format(time.RFC3339))
	}
	if !t.next.IsZero() {
		fmt.Fprintf(&b, "next state in the log: %s; no time in between makes another one\n", t.next.UTC().Format(time.RFC3339))
	}
	fmt.Fprintf(&b, "epoch: %d, begun by entry %d, above all that was lost\n", r.Epoch, r.Sequence)
	known := fmt.Sprintf("known up to entry %d %s", t.later.Sequence, t.later.Hash)
	switch {
	case t.later.Sequence == 0:
		known = "unknown (" + t.unknown + ")"
	case t.unknown != "":
		known += ", and not further (" + t.unknown + ")"
	}
	fmt.Fprintf(&b, "what happened since: %s\n", known)
	title := "taken away again"
	if t.revive {
		title = "back, as --revive asks"
	}
	writeRemovals(&b, title, r.Kept)
	if len(r.Unkept) > 0 {
		writeRemovals(&b, "NOT taken away again", r.Unkept)
	}
	for _, event := range r.Types() {
		fmt.Fprintf(&b, "lost: %d %s\n", r.Lost[event], event)
	}
	for _, tenant := range r.Ownerless {
		fmt.Fprintf(&b, "without an owner: tenant %s; invite one with an API key of the tenant\n", tenant)
	}
	if r.Unknown {
		b.WriteString("All sessions have ended, API keys wait for an owner of their tenant, and those of the deployment are revoked: move the file or Secret of its first key away, and the next start writes a new one.\n")
	}
	b.WriteString("Entries after the last known one are lost: compare it with one that you kept.\n")
	return b.String()
}

func writeRemovals(b *strings.Builder, title string, all []rollback.Removal) {
	fmt.Fprintf(b, "%s: %d\n", title, len(all))
	for _, one := range all {
		fmt.Fprintf(b, "  %s %s of tenant %s", one.Event, one.ID, one.Tenant)
		if one.Detail != "" {
			fmt.Fprintf(b, ", %s", one.Detail)
		}
		if one.Err != nil {
			fmt.Fprintf(b, ": %v", one.Err)
		}
		b.WriteByte('\n')
	}
}
