package verify

import (
	"bytes"
	"encoding/hex"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Item is an entry in a verification. It comes from a row of the store, a line of an export, or a
// given [audit.Entry].
type Item struct {
	key, row, batch []byte
	line            []byte
	given           *audit.Entry

	audit.StoredEntry
	bad       error // why this is no entry
	misplaced bool  // its row stands in the place of another entry
	unsigned  bool  // its signature is malformed
	judged    bool  // sound is set
	sound     bool  // the signature verifies
	timed     bool  // the timestamp is well-formed
	micros    int64
	rowFault  string // why a row derived from the entry is wrong; empty if none is
	JSON      []byte // JSON for an export
}

var errWrongHash = errors.New("the hash is not that of the entry")

// parse sets everything that the entry alone determines.
func (it *Item) parse() {
	if it.row != nil || it.key != nil {
		it.StoredEntry, it.bad = audit.DecodeStoredEntry(it.row, it.batch)
	} else {
		it.bad = it.parseWhole()
	}
	if it.bad != nil {
		return
	}
	at := it.Entry.Time()
	it.micros = at.UnixMicro()
	// time.Parse accepts only one spelling of this length, except for the separator of the
	// fraction.
	it.timed = !at.IsZero() && len(it.Entry.Timestamp) == len(audit.TimeFormat) && it.Entry.Timestamp[len("2006-01-02T15:04:05")] == '.'
}

func (it *Item) parseWhole() (err error) {
	if it.Entry = it.given; it.line != nil {
		it.Entry, it.Hash, err = audit.ParseWithDigest(it.line)
	} else {
		it.Hash, err = it.Entry.Digest()
	}
	if err != nil {
		return audit.ErrNotCanonical
	}
	if hex.EncodeToString(it.Hash[:]) != it.Entry.Hash {
		return errWrongHash
	}
	b, ok := audit.DecodeBase64(it.Entry.Signature)
	if ok {
		it.Proof, it.Signature, ok = audit.DecodeSignature(b)
	}
	it.unsigned = !ok
	return nil
}

// stretchSize is the number of entries that pass through the pipeline together. It is large enough
// to outweigh the cost of passing them on, and small enough to keep all cores busy to the end.
const stretchSize = 128

// Several stretches are under way for each core, and all of them take a part of the memory limit at
// most.
const (
	stretchesPerCore = 3
	stretchMemory    = 2 << 20 // bytes of the entries of a stretch, parsed and encoded again
	stretchShare     = 6
)

// stretch is a run of consecutive entries.
type stretch struct {
	items   []Item
	cut     *audit.Broken // why the entry after the last item does not fit
	failure error         // why the entry after the last item could not be checked

	rows         *store.Range // range to read; nil if the items were given
	linked, done chan struct{}
}

func newStretch() *stretch {
	return &stretch{items: *itemPool.Get().(*[]Item), linked: make(chan struct{}), done: make(chan struct{})}
}

// itemPool pools the memory of finished stretches.
var itemPool = sync.Pool{New: func() any { return new(make([]Item, 0, stretchSize)) }}

func (b *stretch) release() {
	room := b.items[:cap(b.items)]
	clear(room)
	room = room[:0]
	itemPool.Put(&room)
	b.items = nil
}

// pipeline verifies stretches. It reads, parses and checks the signatures of several stretches at a
// time. It links a stretch after the previous one is linked, and concludes it after the previous
// one is concluded. No goroutine outlives its stretch, so a verifier may be dropped at any point.
type pipeline struct {
	filling *stretch
	last    *stretch // newest stretch that was started
	memo    audit.Memo
	key     atomic.Pointer[dualsig.PublicKey] // nil until it is known

	slots chan struct{} // stretches under way
	cores chan struct{} // stretches being computed on

	// beside is called for each entry read from the store, in the same snapshot. It finds derived
	// rows that disagree with the entry.
	compareRows func(r store.Reader, it *Item) error
	// derive is called with the sound entries of each stretch, concurrently with other stretches.
	checkDerived func(items []Item) error
	// Emit is called with the same entries, for one stretch at a time, in order.
	Emit func(items []Item) error
	// Encode fills the JSON of the entries for emit.
	Encode bool

	mu      sync.Mutex
	fault   *audit.Broken // earliest fault of the chain
	derived *audit.Broken // earliest fault of a derived row
	failure error         // why the verification could not continue
}

func (p *pipeline) init(gentle bool) {
	cores := memory.Share(stretchShare, stretchesPerCore*stretchMemory, runtime.GOMAXPROCS(0))
	if gentle {
		cores = 1
	}
	p.slots, p.cores = make(chan struct{}, stretchesPerCore*cores), make(chan struct{}, cores)
}

// start sends a stretch through the pipeline. Call it for one stretch at a time. The function view
// opens a snapshot to read the rows of the stretch from.
func (v *Verifier) start(b *stretch, view func(func(store.Reader) error) error) {
	before := v.last
	v.last = b
	v.slots <- struct{}{}
	go func() {
		defer func() { <-v.slots }()
		defer close(b.done)
		var failed error
		v.onCore(func() { failed = v.examine(b, view) })
		if before != nil {
			<-before.linked
		}
		switch {
		case before != nil && before.stops():
			b.items, b.failure = b.items[:0], errStopped
		case failed != nil:
			b.items, b.failure = b.items[:0], failed
		default:
			v.linkAll(b)
		}
		close(b.linked)
		unsound := -1
		v.onCore(func() { unsound = v.firstUnsigned(b) })
		held := b.items
		if unsound >= 0 {
			held = held[:unsound]
		}
		for i := range held {
			if held[i].rowFault != "" {
				v.suspect(held[i].Entry.Sequence, held[i].rowFault)
			}
		}
		var err error
		if v.checkDerived != nil && len(held) > 0 {
			err = v.checkDerived(held)
		}
		if before != nil {
			<-before.done
		}
		v.conclude(b, unsound, err)
		b.release()
	}()
}

// examine checks everything that each entry determines by itself. The signatures, which take most of
// the time, are checked after the snapshot that the rows are read from: on a busy machine it would
// take longer than a View may.
func (v *Verifier) examine(b *stretch, view func(func(store.Reader) error) error) error {
	if b.rows == nil {
		for i := range b.items {
			it := &b.items[i]
			it.parse()
			v.examineItem(it)
		}
		return nil
	}
	err := view(func(r store.Reader) error {
		err := entries.Scan(r, *b.rows, func(key, value []byte) bool {
			b.items = append(b.items, Item{key: key, row: value})
			return true
		})
		var first uint64
		var batch []byte
		for i := range b.items {
			it := &b.items[i]
			if of, ok := audit.RowBatch(it.row); ok && err == nil {
				if batch == nil || of != first {
					batch, err = r.Get(audit.BatchKey(of))
					first = of
				}
				it.batch = batch
			}
			if err != nil {
				return err
			}
			it.parse()
			if it.bad == nil && v.compareRows != nil {
				err = v.compareRows(r, it)
			}
			it.leaveRow()
		}
		return err
	})
	if err != nil {
		return err
	}
	for i := range b.items {
		v.examineItem(&b.items[i])
	}
	return nil
}

// examineItem checks the signature of a parsed entry if the key is known, and encodes the entry.
func (v *Verifier) examineItem(it *Item) {
	if it.bad != nil {
		return
	}
	key := v.key.Load()
	if key != nil {
		it.judged, it.sound = true, v.signatureHolds(it, key)
	}
	if v.Encode {
		it.JSON, it.bad = it.SignedEntry().JSON()
	}
	if key != nil {
		it.Signature, it.Proof.Path = nil, nil // most of what the entry takes
	}
}

// leaveRow drops references to the store's memory, copies the signature, and sets misplaced.
func (it *Item) leaveRow() {
	it.misplaced = it.bad == nil && string(it.key) != string(audit.EntryKey(it.Entry.Sequence))
	it.Signature, it.Proof.Path = bytes.Clone(it.Signature), bytes.Clone(it.Proof.Path)
	it.key, it.row, it.batch = nil, nil, nil
}

// errStopped marks stretches after one with a fault.
var errStopped = errors.New("an earlier entry does not hold")

// stops reports whether the verification ends with this stretch.
func (b *stretch) stops() bool { return b.cut != nil || b.failure != nil }

// firstUnsigned returns the index of the first entry whose signature does not verify, or -1.
func (v *Verifier) firstUnsigned(b *stretch) int {
	for i := range b.items {
		it := &b.items[i]
		if !it.judged {
			it.sound = v.signatureHolds(it, v.key.Load())
		}
		if !it.sound {
			return i
		}
	}
	return -1
}

func (p *pipeline) onCore(do func()) {
	p.cores <- struct{}{}
	do()
	<-p.cores
}

// conclude records the result of a stretch. It is called for one stretch at a time, in order.
func (p *pipeline) conclude(b *stretch, unsound int, err error) {
	p.mu.Lock()
	stopped := p.fault != nil || p.failure != nil
	switch {
	case stopped:
	case unsound >= 0:
		p.fault = &audit.Broken{Sequence: b.items[unsound].Entry.Sequence, Reason: "the signature does not verify"}
	case err != nil:
		p.failure = err
	case b.cut != nil:
		p.fault = b.cut
	case b.failure != nil:
		p.failure = b.failure
	}
	p.mu.Unlock()
	if stopped || p.Emit == nil {
		return
	}
	if unsound >= 0 {
		b.items = b.items[:unsound]
	}
	if err := p.Emit(b.items); err != nil {
		p.fail(err)
	}
}

// suspect notes that a row derived from the entry does not agree with it.
func (p *pipeline) suspect(sequence uint64, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.derived == nil || sequence < p.derived.Sequence {
		p.derived = &audit.Broken{Sequence: sequence, Reason: reason}
	}
}

// heal clears a failure, so the verification can continue after the last sound entry. It does not
// clear a fault.
func (p *pipeline) heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault == nil {
		p.failure, p.last = nil, nil
	}
}

func (p *pipeline) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failure == nil && p.fault == nil {
		p.failure = err
	}
}

// failed returns the reason to add no more entries: a fault of the chain, or a failure to continue.
func (p *pipeline) failed() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault == nil && p.failure == nil {
		return nil
	}
	return p.verdict()
}

// outcome returns the earliest fault, or the failure.
func (p *pipeline) outcome() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.verdict()
}

func (p *pipeline) verdict() error {
	switch {
	case p.failure != nil:
		return p.failure
	case p.fault != nil && (p.derived == nil || p.fault.Sequence <= p.derived.Sequence):
		return p.fault
	case p.derived != nil:
		return p.derived
	}
	return nil
}
