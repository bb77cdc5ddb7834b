// Package schedule takes backups of a running deployment when they are due, puts them into a bucket,
// restores each of them into a scratch store to verify it, and deletes old ones.
//
// Replicas share one row of the store: it says when the last backup was taken, and who takes the next
// one. A replica that takes one renews its claim, and another may begin when it no longer does.
//
// # Objects
//
// A backup is the object backup/<chain id>/<time>.backup, an age file, and beside it its signature,
// .backup.sig. The signature is written last: an object without one is not a backup. A process that is
// killed leaves at most such an object, whose name is in the row, and the next attempt deletes it.
//
// # Who deletes
//
// A copy of the deployment, such as one that a backup was restored into for a test, has the same chain,
// keys and bucket, and maybe a shorter time to keep. So a server deletes nothing as long as the bucket
// has a backup that it did not take, of a time after it came to be: that is another server's, which is
// in use. For a week and a day after a restore it deletes nothing at all, so that the other one has had
// time for its next backup.
//
// # What is verified
//
// After the upload the object is read again and compared with its signature, and then, as by the
// command restore, a store is made of it: its signature, the audit log, every row that the log
// mentions, and that the KMS key opens it. The process opens the object with the key of that one file,
// which it has from writing it. So whether a recipient's identity opens the backup, only its holder
// can find out.
package schedule

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Config says what is backed up, and how.
type Config struct {
	Store store.Database
	Log   *writer.Log
	Guard *guard.Guard
	Keys  *keyring.Ring
	KMS   []keyring.KMS // keys that open the deployment, the current one first
	// KMSKeys returns the key files for a backup, as backup.Write takes them, and they are wiped after
	// use. Nil: there are none.
	KMSKeys    func(context.Context) ([][]byte, error)
	Recipients []backup.Recipient // at least one; each of them opens every backup

	Bucket  *objects.Bucket
	Place   string        // URL of Bucket: a backup in another one does not count
	Every   time.Duration // a backup is due when the last one is as old as this
	Keep    time.Duration // a backup that is older is deleted once a newer one is verified; 0: never
	Scratch string        // folder for the scratch store

	Program string // version of the program, which a backup states
	Now     func() time.Time
	Logger  *slog.Logger
}

// Schedule takes the backups of a deployment.
type Schedule struct {
	Config
	commits *commits.Shipper // nil unless the store is embedded, so that no other process takes backups
	by      string           // random id of the last attempt of this process

	mu       sync.Mutex
	failures map[Step]uint64
}

// Step is what failed.
type Step string

// The steps of a backup.
const (
	Take   Step = "take"   // copying, uploading, reading again
	Verify Step = "verify" // restoring into the scratch store
	Delete Step = "delete" // deleting old backups
)

// Steps are all of them.
var Steps = []Step{Take, Verify, Delete}

// New returns the schedule of a deployment. Each log of commits that log ships gets a backup to go on
// after; nil: there is none.
func New(log *commits.Shipper, c Config) *Schedule {
	return &Schedule{Config: c, commits: log, failures: make(map[Step]uint64)}
}

// Status is what is known of the backups of a deployment, whichever replica took them.
type Status struct {
	Taken    time.Time // when the newest backup was begun that is in the bucket; zero for none
	Verified time.Time // the same of the newest one that was restored and verified
	Bytes    int64     // size of the newest backup
	Log      string    // log of commits that goes on after the newest backup; "" for none
	Failures map[Step]uint64
}

// Status returns the state of the backups. Failures are those of this process, and are there in spite
// of an error. Error: fault.Unavailable.
func (s *Schedule) Status(ctx context.Context) (Status, error) {
	r, err := s.read(ctx)
	status := Status{Failures: make(map[Step]uint64)}
	if r.Place == s.Place {
		status.Taken, status.Verified, status.Bytes, status.Log = r.Taken, r.Verified, r.Bytes, r.Log
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, step := range Steps {
		status.Failures[step] = s.failures[step]
	}
	return status, err
}

const (
	look  = time.Minute     // how often it is looked whether a backup is due, and how often a claim is renewed
	lease = 5 * time.Minute // how long a claim holds

	firstPause, lastPause = 5 * time.Minute, time.Hour // the wait after a failure doubles from first to last

	// skew is by how much the clock may go back without a backup that seems to be of the future.
	skew = time.Hour
)

// rowKey is the key of the row that replicas share. The row decides nothing but when a backup is taken,
// and which unfinished object is deleted.
var rowKey = []byte("backup/schedule")

// row is the content of the row.
type row struct {
	Place    string    `json:"place"` // URL of the bucket that the backups are in
	Taken    time.Time `json:"taken,omitzero"`
	Verified time.Time `json:"verified,omitzero"`
	Bytes    int64     `json:"bytes,omitempty"`
	Log      string    `json:"log,omitempty"` // log of commits of the newest backup

	Restored time.Time `json:"restored,omitzero"` // first backup of a server that was restored from one
	Foreign  string    `json:"foreign,omitempty"` // newest backup here that another server was seen to take

	Attempt  string    `json:"attempt,omitempty"` // object that is being written, or was left behind
	By       string    `json:"by,omitempty"`      // random id of that attempt
	Until    time.Time `json:"until,omitzero"`    // nobody else begins before
	Failures int       `json:"failures,omitempty"`
}

func readRow(r store.Reader) (found row, err error) {
	b, err := r.Get(rowKey)
	if err == nil && b != nil && json.Unmarshal(b, &found) != nil {
		return row{}, nil // a damaged row costs one more backup
	}
	return found, err
}

func (s *Schedule) read(ctx context.Context) (found row, err error) {
	err = s.Store.View(ctx, func(r store.Reader) error {
		found, err = readRow(r)
		return err
	})
	return found, err
}

// update changes the row. A change that returns an error is not made.
func (s *Schedule) update(ctx context.Context, change func(*row) error) error {
	return s.Store.Update(ctx, func(tx store.Tx) error {
		r, err := readRow(tx)
		if err == nil {
			err = change(&r)
		}
		if err != nil {
			return err
		}
		b, err := json.Marshal(r)
		if err != nil {
			return fmt.Errorf("encoding the state of the backups: %w", err)
		}
		return tx.Put(rowKey, b)
	})
}

// due reports whether a backup is to be begun.
func (s *Schedule) due(r row, now time.Time) bool {
	// Beside a log of commits there is one process: another claim is of a process that has ended, or of
	// the server whose backup this store was restored from.
	ended := s.commits != nil && r.By != s.by
	if left := r.Until.Sub(now); left > 0 && left <= lastPause && !ended { // a longer one is of a clock that was wrong
		return false
	}
	age := now.Sub(r.Taken)
	log := s.log()
	return r.Place != s.Place || age >= s.Every || age < -skew || log != "" && log != r.Log && age > 0 // two of one second would have one name
}

// log returns the id of the log of commits, or "" while there is none.
func (s *Schedule) log() string {
	if s.commits == nil {
		return ""
	}
	return s.commits.Status().Log
}

// claimed is an attempt of this process.
type claimed struct {
	Attempt, By string
	log         string // log of commits when the attempt began
	began       time.Time
	leftover    string    // object that an earlier attempt may not have finished
	previous    time.Time // time of the newest earlier backup that this server knows; zero for none
	restored    bool      // leftover is whole, as in a database that was restored from it
	begun       bool      // the object may be in the bucket because of this attempt
}

var (
	errNotDue    = errors.New("not due")
	errTakenOver = errors.New("another replica takes this backup, since the claim of this one was not renewed")
)

// claim returns nil when no backup is due, or another replica takes it.
func (s *Schedule) claim(ctx context.Context) (*claimed, error) {
	now := s.Now().UTC().Truncate(time.Second)
	if r, err := s.read(ctx); err != nil || !s.due(r, now) {
		return nil, err
	}
	c := &claimed{Attempt: s.objectName(now), By: rand.Text(), log: s.log(), began: now}
	err := s.update(ctx, func(r *row) error {
		if !s.due(*r, now) {
			return errNotDue
		}
		if r.Place != s.Place { // what is elsewhere stays there
			*r = row{Place: s.Place}
		}
		c.leftover, c.previous = r.Attempt, r.Taken
		if at, ok := s.timeOf(r.Attempt); ok && at.After(c.previous) {
			c.previous = at
		}
		r.Attempt, r.By, r.Until = c.Attempt, c.By, now.Add(lease)
		return nil
	})
	if errors.Is(err, errNotDue) {
		return nil, nil
	}
	s.by = c.By
	return c, err
}

// renew keeps the claim until done is called. It ends the context when the claim is lost.
func (s *Schedule) renew(ctx context.Context, c *claimed) (working context.Context, done func()) {
	working, cancel := context.WithCancelCause(ctx)
	var renewing sync.WaitGroup
	renewing.Go(func() {
		tick := time.NewTicker(look)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-working.Done():
				return
			}
			err := s.update(working, func(r *row) error {
				if r.By != c.By {
					return errTakenOver
				}
				r.Until = s.Now().Add(lease)
				return nil
			})
			if errors.Is(err, errTakenOver) {
				cancel(err)
			}
		}
	})
	return working, func() { cancel(nil); renewing.Wait() }
}

// finish records a backup that is in the bucket with its signature.
func (s *Schedule) finish(ctx context.Context, c *claimed, w *backup.Written) error {
	statement, err := backup.ParseStatement(w.Statement)
	if err != nil {
		return err
	}
	return s.update(ctx, func(r *row) error {
		if r.By != c.By {
			return errTakenOver
		}
		r.Taken, r.Bytes, r.Log, r.Attempt, r.Failures = c.began, int64(statement.Size), c.log, "", 0
		if c.restored {
			r.Restored = c.began
		}
		return nil
	})
}

// giveUpTimeout bounds what is done after ctx may have ended.
const giveUpTimeout = 10 * time.Second

// giveUp removes what the attempt has left in the bucket, and says when the next one may begin: at once
// when this process ends.
func (s *Schedule) giveUp(ctx context.Context, c *claimed, why error) (pause time.Duration) {
	ending := ctx.Err() != nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveUpTimeout)
	defer cancel()
	var whole bool
	var removed error
	switch {
	case !c.begun:
	case errors.Is(why, errTakenOver): // so it is not recorded, even if it is whole
		removed = s.remove(ctx, c.Attempt)
	default:
		whole, removed = s.removeUnfinished(ctx, c.Attempt)
	}
	err := s.update(ctx, func(r *row) error {
		if r.By != c.By {
			return errTakenOver
		}
		if removed == nil && !whole { // a whole one is not another server's
			r.Attempt = ""
		}
		r.Until = time.Time{}
		if !ending {
			pause = min(firstPause<<min(r.Failures, 8), lastPause)
			r.Failures++
			r.Until = s.Now().Add(pause)
		}
		return nil
	})
	if err := errors.Join(removed, err); err != nil && !errors.Is(err, errTakenOver) {
		s.Logger.WarnContext(ctx, "what an unfinished backup left was not removed; retrying with the next one", "object", c.Attempt, "error", err)
	}
	return pause
}

const (
	suffix          = ".backup"
	signatureSuffix = ".sig" // as the command backup names it
	timeFormat      = "20060102-150405"
)

// prefix returns how the names of this deployment's backups begin.
func (s *Schedule) prefix() string { return "backup/" + s.Log.ChainID() + "/" }

func (s *Schedule) objectName(at time.Time) string {
	return s.prefix() + at.UTC().Format(timeFormat) + suffix
}

var timePattern = regexp.MustCompile(`^[0-9]{8}-[0-9]{6}$`)

// timeOf returns when a backup of this deployment was begun, by its name.
func (s *Schedule) timeOf(name string) (at time.Time, ok bool) {
	chain, at, ok := ParseName(name)
	return at, ok && chain == s.Log.ChainID()
}

// ParseName returns of which chain an object of a bucket is a backup, and when it was begun. It returns
// false for every other object.
func ParseName(name string) (chainID string, at time.Time, ok bool) {
	text, ours := strings.CutPrefix(name, "backup/")
	text, whole := strings.CutSuffix(text, suffix)
	chainID, text, _ = strings.Cut(text, "/")
	at, err := time.Parse(timeFormat, text)
	return chainID, at, ours && whole && err == nil && timePattern.MatchString(text)
}

// removeUnfinished deletes what an attempt left. A backup that has its signature is whole, and stays:
// the row of a restored database names the backup that it was restored from, and a commit that was not
// confirmed may have recorded one.
func (s *Schedule) removeUnfinished(ctx context.Context, name string) (whole bool, err error) {
	whole, err = s.Bucket.Exists(ctx, name+signatureSuffix)
	if err != nil || whole {
		return whole, err
	}
	return false, s.remove(ctx, name)
}

// remove deletes a backup and its signature, or what there is of them.
func (s *Schedule) remove(ctx context.Context, name string) error {
	if _, ours := s.timeOf(name); !ours {
		return nil // the row was damaged: nothing else is ever deleted
	}
	if err := s.Bucket.Delete(ctx, name); err != nil {
		return err
	}
	return s.Bucket.Delete(ctx, name+signatureSuffix)
}
