package commits

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/commit"
)

const (
	pause        = 20 * time.Second // the longest wait before a commit is shipped
	segmentBytes = 2 << 20          // about the size of the largest segment with several records
	lastTry      = 5 * time.Second  // bound for what is shipped when the process ends

	// JournalBytes bounds what the store keeps in memory until it is shipped.
	JournalBytes = 2 * segmentBytes
)

// Config says what is shipped, and where to.
type Config struct {
	Database   *bolt.Store
	Store      store.Store // the same, as the services use it
	Bucket     *objects.Bucket
	Folder     string // [Folder] of the chain
	Chain      string // fingerprint of the chain
	Signer     Signer
	Recipients []backup.Recipient
	Now        func() time.Time
	Logger     *slog.Logger
}

// Shipper ships the commits of a store. One goroutine runs it; the other methods may be called at any
// time.
type Shipper struct {
	Config
	chain [32]byte
	tried chan struct{} // closed after the first try
	begun chan struct{} // signalled when a log has begun, for which there is no backup yet

	log  *open // nil until it is known
	size int   // segmentBytes, except in tests

	mu     sync.Mutex
	status Status
	failed bool // the last try
}

// open is the log that is written to.
type open struct {
	id   bolt.LogID
	at   position
	last uint64 // number of the last commit that was shipped
}

// Cause is why a log has begun.
type Cause string

// The causes.
const (
	First Cause = "first" // the store has none: it is new, restored, or was used without a bucket
	Gap   Cause = "gap"   // too much was not shipped, or a release wrote that keeps no list
	Fork  Cause = "fork"  // another server has written to the log
)

// Causes are all of them.
var Causes = []Cause{First, Gap, Fork}

// Status is what this process has shipped.
type Status struct {
	Log      string           // id of the log; "" for none
	Began    time.Time        // when this process began it or went on with it
	Segments uint64           // shipped segments
	Bytes    uint64           // bytes in these segments
	Failures uint64           // tries that failed
	Logs     map[Cause]uint64 // logs that have begun, by cause
}

// NewShipper returns a shipper. The store must have been opened with a journal of JournalBytes.
func NewShipper(c Config) (*Shipper, error) {
	s := &Shipper{Config: c, tried: make(chan struct{}), begun: make(chan struct{}, 1), size: segmentBytes, status: Status{Logs: make(map[Cause]uint64), Began: c.Now()}}
	if b, err := hex.DecodeString(c.Chain); err != nil || copy(s.chain[:], b) != len(s.chain) {
		return nil, errors.New("shipping commits: the chain is not a fingerprint")
	}
	return s, nil
}

// Status returns what this process has shipped.
func (s *Shipper) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.status
	status.Logs = make(map[Cause]uint64)
	for cause, n := range s.status.Logs {
		status.Logs[cause] = n
	}
	return status
}

// Until returns the time up to which all commits are in the bucket. Error: bolt.ErrNoLog,
// fault.Unavailable.
func (s *Shipper) Until(ctx context.Context) (time.Time, error) {
	now := s.Now()
	l, err := s.Database.Log(ctx)
	if err == nil && !l.Oldest.IsZero() {
		return l.Oldest, nil
	}
	return now, err
}

// Begun is signalled when a log has begun: it is of use once there is a backup.
func (s *Shipper) Begun() <-chan struct{} { return s.begun }

// Tried is closed once Run has tried to ship, whatever came of it.
func (s *Shipper) Tried() <-chan struct{} { return s.tried }

// Run ships commits until ctx ends, and then what is left.
func (s *Shipper) Run(ctx context.Context) {
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for first := true; ; first = false {
		full := s.Database.Journaled()
		if s.Ship(ctx) != nil {
			full = nil // until the next try
		}
		if first {
			close(s.tried)
		}
		select {
		case <-tick.C:
		case <-full:
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTry)
			defer cancel()
			_ = s.Ship(last) // it has logged the error
			return
		}
	}
}

// Ship ships what was committed. It logs and counts what fails.
func (s *Shipper) Ship(ctx context.Context) error {
	err := s.ship(ctx)
	s.mu.Lock()
	failed := s.failed
	if s.failed = err != nil && ctx.Err() == nil; s.failed {
		s.status.Failures++
	}
	s.mu.Unlock()
	switch {
	case err != nil && ctx.Err() == nil && !failed: // once per outage
		s.Logger.ErrorContext(ctx, "shipping commits failed; retrying", "in", pause, "error", err)
	case err == nil && failed:
		s.Logger.InfoContext(ctx, "commits are shipped again")
	}
	return err
}

func (s *Shipper) ship(ctx context.Context) error {
	if s.log == nil {
		if err := s.resume(ctx); err != nil {
			return err
		}
	}
	l, err := s.Database.Log(ctx)
	if errors.Is(err, bolt.ErrNoLog) {
		err = s.begin(ctx, Gap)
	}
	if err != nil {
		return err
	}
	// What is committed meanwhile waits, so that segments do not become many and small.
	for s.log.last < l.Newest || s.log.at.At > s.log.last {
		found, err := s.Database.CommitsAfter(ctx, s.log.id, s.log.last, s.log.at.At, s.size)
		switch {
		case errors.Is(err, bolt.ErrNoLog):
			err = s.begin(ctx, Gap)
		case err != nil || len(found) == 0:
			return err
		default:
			err = s.put(ctx, found)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// resume goes on with the log of the store, or begins one.
func (s *Shipper) resume(ctx context.Context) error {
	l, err := s.Database.Log(ctx)
	if errors.Is(err, bolt.ErrNoLog) {
		return s.begin(ctx, First)
	}
	if err != nil {
		return err
	}
	at, ok := decodePosition(l.Position)
	if !ok {
		return s.begin(ctx, Gap)
	}
	s.use(&open{id: l.ID, at: at, last: l.Shipped})
	if _, err = s.adopt(ctx); err == nil {
		err = s.Mark(ctx) // the process may have ended before it did
	}
	if err != nil {
		s.log = nil
	}
	return err
}

// begin begins a log. It waits for a bucket that answers, so that no log grows meanwhile for nothing.
func (s *Shipper) begin(ctx context.Context, cause Cause) error {
	var id bolt.LogID
	_, _ = rand.Read(id[:]) // never fails
	if _, err := s.Bucket.Exists(ctx, logPrefix(s.Folder, id)+segmentName(1)); err != nil {
		return fmt.Errorf("beginning a log of commits: %w", err)
	}
	var at position
	err := s.Database.BeginLog(ctx, id, func(r store.Reader) (_ []byte, err error) {
		at.Head, err = ReadHead(r) // no commit comes between: a head that is too old hides records from a reader
		return at.encode(), err
	})
	if err != nil {
		return fmt.Errorf("beginning a log of commits: %w", err)
	}
	s.use(&open{id: id, at: at})
	s.mu.Lock()
	s.status.Logs[cause]++
	s.mu.Unlock()
	s.Logger.InfoContext(ctx, "began a log of commits; a restore can use it once a backup is taken", "log", hex.EncodeToString(id[:]), "cause", cause)
	select {
	case s.begun <- struct{}{}:
	default:
	}
	return s.Mark(ctx)
}

// use goes on with a log.
func (s *Shipper) use(l *open) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = l
	s.status.Log, s.status.Began = hex.EncodeToString(l.id[:]), s.Now()
}

// put writes a segment. A list's record has one of its own, so that its statement says whether the
// state is whole after it.
func (s *Shipper) put(ctx context.Context, found []bolt.Commit) error {
	l := s.log
	after := &statement{Chain: s.chain, Log: l.id, Ordinal: l.at.Segment + 1, Previous: l.at.Digest, Mark: found[len(found)-1].ID, Before: l.at.Head}
	records := make([]commit.Record, len(found))
	head := l.at.Head
	for i, c := range found {
		head = headAfter(head, c.Rows)
		records[i] = c.Record
		records[i].Head = head
	}
	segment, err := seal(after, records, s.Recipients, s.Signer)
	if err != nil {
		return err
	}
	name := logPrefix(s.Folder, l.id) + segmentName(after.Ordinal)
	err = s.Bucket.Create(ctx, name, segment)
	if fault.Of(err) == fault.Conflict {
		adopted, err := s.adopt(ctx) // an earlier try may have succeeded without an answer
		if err != nil || adopted {
			return err
		}
		s.Logger.ErrorContext(ctx, "another server has written to the log of commits, on a copy of the database: stop one of them; this one goes on with another log", "object", name)
		return s.begin(ctx, Fork)
	}
	if err != nil {
		return fmt.Errorf("shipping commits: %w", err)
	}
	s.moveTo(*after)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Segments++
	s.status.Bytes += uint64(len(segment))
	return nil
}

func (s *Shipper) moveTo(after statement) {
	l := s.log
	l.last, l.at = after.Last, position{Segment: after.Ordinal, Digest: after.digest(), At: after.At, Head: after.After}
	s.Database.Shipped(l.id, l.last, l.at.encode())
}

// adopt goes on after segments that this store has written without noting it. Others it leaves alone.
func (s *Shipper) adopt(ctx context.Context) (adopted bool, err error) {
	for {
		l := s.log
		name := logPrefix(s.Folder, l.id) + segmentName(l.at.Segment+1)
		b, err := s.Bucket.GetStart(ctx, name, statementSize)
		if fault.Of(err) == fault.NotFound {
			return adopted, nil
		}
		if err != nil {
			return adopted, fmt.Errorf("reading the log of commits: %w", err)
		}
		found, err := parseStatement(b, s.Signer.Identity())
		if err != nil || found.Chain != s.chain || found.Log != l.id || found.Ordinal != l.at.Segment+1 || found.Previous != l.at.Digest || found.Last <= l.last {
			return adopted, nil
		}
		id, err := s.Database.CommitID(ctx, l.id, found.At) // it has the values of this commit
		switch {
		case fault.Of(err) == fault.NotFound || err == nil && id != found.Mark:
			return adopted, nil
		case err != nil:
			return adopted, err
		}
		s.moveTo(found)
		adopted = true
	}
}

// Mark writes the row that names the log and up to where it is shipped. A backup that is copied
// afterwards has the row.
func (s *Shipper) Mark(ctx context.Context) error {
	l, err := s.Database.Log(ctx)
	if errors.Is(err, bolt.ErrNoLog) {
		return nil // Ship begins one
	}
	if err != nil {
		return err
	}
	at, ok := decodePosition(l.Position)
	if !ok {
		return nil
	}
	want, err := Place{Log: l.ID, Segment: at.Segment, Digest: at.Digest}.encode()
	if err != nil {
		return fmt.Errorf("encoding the place of the log of commits: %w", err)
	}
	err = s.Store.Update(ctx, func(tx store.Tx) error {
		if b, err := tx.Get(placeKey); err != nil || string(b) == string(want) {
			return err
		}
		return tx.Put(placeKey, want)
	})
	if err != nil {
		return fmt.Errorf("noting the log of commits: %w", err)
	}
	return nil
}

// Expire deletes the segments of all logs of the chain whose commits were all made before a time. It
// deletes nothing that the deployment has not signed.
func (s *Shipper) Expire(ctx context.Context, before time.Time) (deleted int, err error) {
	for after := ""; ; {
		names, err := s.Bucket.ListAfter(ctx, s.Folder, after, 1)
		if err != nil || len(names) == 0 {
			return deleted, err
		}
		name := names[0]
		b, err := s.Bucket.GetStart(ctx, name, statementSize)
		if err != nil && fault.Of(err) != fault.NotFound {
			return deleted, err
		}
		after = name
		found, err := parseStatement(b, s.Signer.Identity())
		switch folder := logPrefix(s.Folder, found.Log); {
		case err != nil || name != folder+segmentName(found.Ordinal):
		case !found.Time.Before(before):
			after = folder + "a" // the rest of the log is newer
		default:
			if err := s.Bucket.Delete(ctx, name); err != nil {
				return deleted, err
			}
			deleted++
		}
	}
}
