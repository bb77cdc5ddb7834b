package compliance

import (
	"bytes"
	"compress/flate"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

const (
	maxFolds         = 64      // tenants whose evidence is in memory
	defaultSaveEvery = 8 << 10 // entries of a tenant between two stored states
	defaultMilestone = 1 << 16 // entries of a tenant between two states that are kept for good
)

// folds are the evidence of tenants, in memory. What is in it follows from the
// log, so that it can be forgotten at any time.
type folds struct {
	mu  sync.Mutex
	all map[authz.TenantID]*fold
	use uint64
}

// fold is a tenant's evidence. Whoever has its turn may use it.
type fold struct {
	tenant authz.TenantID
	turn   *semaphore.Weighted // weight 1
	used   uint64

	evidence   *evidence         // nil until it was loaded
	unproven   bool              // no signature behind the newest entry was verified yet
	stored     uint64            // tenant sequence that the stored state stands at
	milestones map[uint64][]byte // to be stored, packed, by sequence
}

// keep has evidence stored with the fold, as of its newest entry.
func (f *fold) keep(e *evidence) error {
	packed, err := pack(e)
	if err != nil {
		return err
	}
	if f.milestones == nil {
		f.milestones = make(map[uint64][]byte)
	}
	f.milestones[e.Last.Sequence] = packed
	return nil
}

// enter returns a tenant's fold for the caller alone, until it first leaves. Error:
// fault.Unavailable when others have it for longer than ctx.
func (s *Service) enter(ctx context.Context, tenant authz.TenantID) (f *fold, leave func(), err error) {
	f = s.folds.of(tenant)
	if f.turn.Acquire(ctx, 1) != nil {
		return nil, nil, errBusy
	}
	return f, sync.OnceFunc(func() { f.turn.Release(1) }), nil
}

var errBusy = fault.New(fault.Unavailable, "the evidence is being gathered: retry")

func (all *folds) of(tenant authz.TenantID) *fold {
	all.mu.Lock()
	defer all.mu.Unlock()
	all.use++
	f := all.all[tenant]
	if f == nil {
		f = &fold{tenant: tenant, turn: semaphore.NewWeighted(1)}
		if len(all.all) >= maxFolds {
			all.evict()
		}
		if all.all == nil {
			all.all = make(map[authz.TenantID]*fold)
		}
		all.all[tenant] = f
	}
	f.used = all.use
	return f
}

// evict forgets the fold that was not used for longest. Whoever has its turn may
// go on: the next one gathers anew.
func (all *folds) evict() {
	var oldest *fold
	for _, f := range all.all {
		if oldest == nil || f.used < oldest.used {
			oldest = f
		}
	}
	delete(all.all, oldest.tenant)
}

// errUnfinished says that there was not enough time: what was gathered stays.
var errUnfinished = errors.New("the evidence is not gathered up to the head yet")

// catchUp brings a fold to the entry `to` of the tenant, or to the last one before
// it; 0 is the newest. It loads what was stored first. Errors: errUnfinished,
// fault.Unavailable, and others when the tenant's part of the log does not hold.
func (s *Service) catchUp(ctx context.Context, f *fold, to uint64) error {
	fresh := false
	if f.evidence == nil {
		e, err := s.load(ctx, stateKey(f.tenant))
		if err != nil {
			return err
		}
		if fresh = e == nil; fresh {
			e = newEvidence()
		}
		f.evidence, f.stored = e, e.TenantSequence
	}
	if to != 0 && f.evidence.Last.Sequence >= to {
		if !f.unproven {
			return nil
		}
		to = 0 // what comes behind it proves it
	}
	from := f.evidence.TenantSequence
	err := s.replay(ctx, f.tenant, f.evidence, to, f.keep)
	switch {
	case errors.Is(err, errUnfinished), fault.Of(err) == fault.Unavailable && err != nil:
		f.unproven = f.unproven || f.evidence.TenantSequence > from
		return err
	case err != nil:
		behind := f.evidence.Last.Sequence
		f.evidence, f.milestones, f.unproven = nil, nil, false
		if fresh {
			return err
		}
		return s.startOver(ctx, f, to, behind, err)
	case f.unproven && f.evidence.TenantSequence == from:
		f.evidence, f.milestones, f.unproven = nil, nil, false // nothing came that would prove it
		return errUnfinished
	}
	f.unproven = false
	if f.evidence.TenantSequence >= f.stored+s.saveEvery {
		if saved := s.save(ctx, f); saved != nil {
			s.logger.WarnContext(ctx, "storing a tenant's evidence", "tenant", f.tenant, "error", saved)
		}
	}
	return nil
}

// startOver gathers anew what does not go on from where it was: the entries behind
// are archived, by another replica, which has stored what they were evidence for; or
// the log is not the one that it was gathered from, and then it begins with the first.
func (s *Service) startOver(ctx context.Context, f *fold, to, behind uint64, why error) error {
	stored, err := s.load(ctx, stateKey(f.tenant))
	if err != nil {
		return err
	}
	if stored != nil && stored.Last.Sequence > behind {
		if f.evidence, f.stored = stored, stored.TenantSequence; to != 0 && stored.Last.Sequence >= to {
			return nil
		}
		err := s.replay(ctx, f.tenant, f.evidence, to, f.keep)
		if err == nil || interrupted(err) {
			f.unproven = err != nil && f.evidence.TenantSequence > f.stored
			return err
		}
		f.evidence, f.milestones = nil, nil
	}
	e := newEvidence()
	if err := s.replay(ctx, f.tenant, e, to, nil); err != nil {
		if errors.Is(err, errUnfinished) {
			return err
		}
		return why
	}
	s.logger.WarnContext(ctx, "a tenant's evidence was gathered anew", "tenant", f.tenant, "error", why)
	f.evidence, f.stored = e, 0
	return nil
}

// replay folds the tenant's entries after the newest of e in, up to `to`. What
// kept is given stands at a milestone.
func (s *Service) replay(ctx context.Context, tenant authz.TenantID, e *evidence, to uint64, keep func(*evidence) error) error {
	after := audit.ReplayPoint{TenantSequence: e.TenantSequence, Sequence: e.Last.Sequence, Hash: e.Last.Hash}
	_, err := s.reader.Replay(ctx, tenant, after, to, func(entry *audit.Entry) error {
		if err := e.add(entry); err != nil {
			return err
		}
		if keep != nil && e.TenantSequence%s.milestone == 0 {
			return keep(e)
		}
		return nil
	})
	switch {
	case err != nil && ctx.Err() != nil:
		return errUnfinished
	case err != nil:
		return fmt.Errorf("reading the tenant's entries: %w", err)
	}
	return nil
}

// asOf gathers the evidence of the tenant's entries up to a sequence, from what is
// stored before it. Errors: errNotNext and fault.Conflict when what it would be
// gathered from is archived, and as catchUp.
func (s *Service) asOf(ctx context.Context, tenant authz.TenantID, to uint64) (*evidence, error) {
	e, err := s.before(ctx, tenant, to)
	if err != nil || e.Last.Sequence == to {
		return e, err
	}
	return e, s.replay(ctx, tenant, e, to, nil)
}

// before returns what evidence as of a sequence is gathered from.
func (s *Service) before(ctx context.Context, tenant authz.TenantID, to uint64) (*evidence, error) {
	e, err := s.loadBefore(ctx, tenant, to)
	if e == nil && err == nil {
		e = newEvidence()
	}
	return e, err
}

// Rows, each under the keyring's MAC: the newest state of a tenant, and those that
// are kept, by the sequence that they stand at, are that sequence and the packed
// evidence, which may be megabytes; and one is the sequence of the newest state
// alone, so that nobody needs to read the state to compare it.
func stateKey(tenant authz.TenantID) []byte { return []byte("compliance/state/" + string(tenant)) }

func headKey(tenant authz.TenantID) []byte { return []byte("compliance/head/" + string(tenant)) }

func milestonePrefix(tenant authz.TenantID) []byte { return append(stateKey(tenant), '/') }

func milestoneKey(tenant authz.TenantID, sequence uint64) []byte {
	return binary.BigEndian.AppendUint64(milestonePrefix(tenant), sequence)
}

// maxEncoded bounds what is unpacked, in bytes.
const maxEncoded = 1 << 30

// pack compresses encoded evidence, most of which is names of members and
// hexadecimal.
func pack(e *evidence) ([]byte, error) {
	encoded, err := e.encode()
	if err != nil {
		return nil, err
	}
	var packed bytes.Buffer
	w, err := flate.NewWriter(&packed, flate.BestSpeed)
	if err == nil {
		_, err = w.Write(encoded)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return nil, fmt.Errorf("compressing evidence: %w", err)
	}
	return packed.Bytes(), nil
}

func unpack(packed []byte) (*evidence, error) {
	encoded, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), maxEncoded))
	if err != nil {
		return nil, errors.Join(errForeignEvidence, err)
	}
	return decodeEvidence(encoded)
}

func (s *Service) row(key []byte, sequence uint64, packed []byte) []byte {
	content := binary.BigEndian.AppendUint64(make([]byte, 0, 8+len(packed)), sequence)
	return s.seal(key, append(content, packed...))
}

// open returns the sequence and the packed evidence of a row.
func (s *Service) open(key, row []byte) (sequence uint64, packed []byte, err error) {
	content, err := s.unseal(key, row)
	if err != nil || len(content) < 8 {
		return 0, nil, errors.Join(errForeignEvidence, err)
	}
	return binary.BigEndian.Uint64(content), content[8:], nil
}

// load returns the evidence in a row, nil when there is none or it cannot be
// used: then it is gathered anew.
func (s *Service) load(ctx context.Context, key []byte) (e *evidence, err error) {
	var row []byte
	err = s.store.View(ctx, func(r store.Reader) error { // which has two seconds, and the rest may take longer
		row, err = r.Get(key)
		row = bytes.Clone(row)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading stored evidence: %w", err)
	}
	if row == nil {
		return nil, nil
	}
	return s.decode(ctx, key, row), nil
}

func (s *Service) decode(ctx context.Context, key, row []byte) *evidence {
	sequence, packed, err := s.open(key, row)
	if err == nil {
		var e *evidence
		if e, err = unpack(packed); err == nil && e.Last.Sequence == sequence {
			return e
		}
	}
	s.logger.WarnContext(ctx, "stored evidence is not used", "error", err)
	return nil
}

// loadBefore returns the newest evidence that is stored and stands at the sequence
// or before it, nil when there is none.
func (s *Service) loadBefore(ctx context.Context, tenant authz.TenantID, sequence uint64) (*evidence, error) {
	rng := store.Prefix(milestonePrefix(tenant))
	rng.To, rng.Reverse = milestoneKey(tenant, sequence+1), true
	for {
		var key, row []byte
		err := s.store.View(ctx, func(r store.Reader) error {
			return r.Scan(rng, func(k, v []byte) bool {
				key, row = bytes.Clone(k), bytes.Clone(v)
				return false
			})
		})
		if err != nil {
			return nil, fmt.Errorf("reading stored evidence: %w", err)
		}
		if key == nil {
			return nil, nil
		}
		if e := s.decode(ctx, key, row); e != nil {
			return e, nil
		}
		rng.To = key
	}
}

// save stores a fold and its milestones, unless a newer state is stored already:
// the entries that an older one would go on from may be archived by now.
func (s *Service) save(ctx context.Context, f *fold) error {
	e := f.evidence
	if e == nil || e.Count == 0 {
		return nil
	}
	packed, err := pack(e)
	if err != nil {
		return err
	}
	// All is made before the closure, which others wait for.
	key, head := stateKey(f.tenant), headKey(f.tenant)
	row, stands := s.row(key, e.Last.Sequence, packed), s.row(head, e.Last.Sequence, nil)
	kept := make(map[string][]byte, len(f.milestones))
	for sequence, packed := range f.milestones {
		at := milestoneKey(f.tenant, sequence)
		kept[string(at)] = s.row(at, sequence, packed)
	}
	err = s.store.Update(ctx, func(tx store.Tx) error {
		for at, row := range kept {
			if err := tx.Put([]byte(at), row); err != nil {
				return err
			}
		}
		before, err := tx.Get(head)
		if err != nil {
			return err
		}
		if before != nil {
			// The same one is stored again, since what is there may not have been usable.
			if sequence, _, err := s.open(head, before); err == nil && sequence > e.Last.Sequence {
				return nil
			}
		}
		return errors.Join(tx.Put(key, row), tx.Put(head, stands))
	})
	if err != nil {
		return fmt.Errorf("storing evidence: %w", err)
	}
	f.stored, f.milestones = e.TenantSequence, nil
	return nil
}

// prune removes the states of a tenant before the last one that the entries behind
// `archived` are judged from.
func (s *Service) prune(ctx context.Context, tenant authz.TenantID, archived uint64) error {
	var old [][]byte
	err := s.store.View(ctx, func(r store.Reader) error {
		rng := store.Prefix(milestonePrefix(tenant))
		rng.To, rng.Reverse = milestoneKey(tenant, archived+1), true
		return r.Scan(rng, func(key, _ []byte) bool {
			old = append(old, bytes.Clone(key))
			return true
		})
	})
	if err == nil && len(old) > 1 {
		err = s.store.Update(ctx, func(tx store.Tx) error {
			for _, key := range old[1:] {
				if err := tx.Delete(key); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("removing old evidence: %w", err)
	}
	return nil
}
