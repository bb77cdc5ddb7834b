package audit

import (
	"crypto/rand"
	"crypto/sha3"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// pending is an event on its way through a commit.
type pending struct {
	Event
	receipt    *Receipt
	acceptance *acceptance // only of the event that begins an epoch
}

// Commit is the store's hook: it turns the events of one physical commit into
// entries, in their order.
func (l *Log) Commit(tx store.Tx, events []any) error {
	if len(events) == 0 {
		return nil
	}
	if l.signer == nil {
		return fault.Wrap(fault.Internal, "internal error", errNotEquipped)
	}
	group, err := l.group(events)
	if err != nil {
		return err
	}
	accepting := group[0].acceptance
	head, err := l.heads.take(tx, accepting)
	if err != nil {
		return err
	}
	first, number := head.sequence+1, head.epoch
	if accepting != nil {
		if first, err = accepting.beginEpoch(l, tx, head.link); err != nil {
			return err
		}
		number = accepting.epoch.number
	}
	tenants, err := l.positions(tx, group, head.link, number)
	l.heads.recent = nil
	if err != nil {
		return err
	}
	c := l.link(group, head.link, first, tenants)
	defer c.abandon()
	for i := range c.placed {
		at, p, tenant := c.places[i], group[i], string(group[i].Principal.Tenant)
		row := indexRow{at.link, p.Type, p.Principal.ID}
		if err := tx.Put(tenantKey(tenant, at.tenantSequence), row.encode()); err != nil {
			return err
		}
		if p.makesCurrent() {
			if err := tx.Put(currentKey(tenant, p.Resource.ID), at.link.encode()); err != nil {
				return err
			}
		}
		*p.receipt = Receipt{at.sequence, hex.EncodeToString(at.hash[:])}
	}
	if c.err != nil {
		return fault.Wrap(fault.Internal, "internal error", c.err)
	}
	if err := c.signatures.put(tx, first); err != nil {
		return err
	}
	if rows := c.signatures.rows; cap(rows) <= spareRows {
		l.spare = rows // which the store has copied
	}
	proposed := Head{c.head, number}
	l.heads.proposed, l.heads.proposedTenants = proposed, tenants
	l.heads.written.propose(c.head, group)
	tx.OnCommit(func() { // from now on there is no log without it
		l.rollbacks.noteHead(proposed)
		l.heads.remember(tenants, number)
	})
	return tx.Put(headKey, c.head.encode())
}

// positions returns the newest entry of each tenant in the group, which begins or goes
// on in an epoch.
func (l *Log) positions(tx store.Tx, group []pending, head link, epoch uint64) (map[string]tenantHead, error) {
	tenants := make(map[string]tenantHead)
	for i, p := range group {
		if (head.sequence == 0 && i == 0) != (p.Type == ChainStarted) {
			return nil, errDamagedLog // the log begins once
		}
		tenant := string(p.Principal.Tenant)
		if _, ok := tenants[tenant]; ok {
			continue
		}
		at, err := l.heads.position(tx, tenant, epoch)
		if err != nil {
			l.heads.readable.Delete(tenant) // so that the next of its events fails alone
			return nil, fmt.Errorf("reading a tenant's last entry: %w", err)
		}
		tenants[tenant] = at
	}
	return tenants, nil
}

// group returns the events of a commit as what they are. While the log takes no
// entries a commit must begin with the acceptance of what was lost, so that all
// of its entries are in the new epoch.
func (l *Log) group(events []any) ([]pending, error) {
	group := make([]pending, len(events))
	for i, event := range events {
		p, ok := event.(pending)
		if !ok {
			return nil, fault.Wrap(fault.Internal, "internal error", fmt.Errorf("an event of type %T is not for the log", event))
		}
		if p.acceptance != nil && i > 0 {
			return nil, errOneByOne
		}
		group[i] = p
	}
	if group[0].acceptance == nil {
		return group, l.rollbacks.checkNotHalted()
	}
	return group, nil
}

// linking makes the entries of one commit, each with the hash of the one before
// it, beside the transaction: what needs the transaction is done meanwhile.
type linking struct {
	log        *Log
	group      []pending
	head       link // the newest entry
	tenants    map[string]tenantHead
	timestamp  string
	salts      []byte
	signatures *signatures
	places     []newPlace
	placed     chan int // indexes of places, as they are filled in; closed at the end
	err        error    // to be read then
}

// newPlace is that of a new entry.
type newPlace struct {
	link
	tenantSequence uint64
}

// saltSize is that of what keeps the hash of an entry from being guessed, and
// with it, from a neighbour's previous_hash, the entry.
const saltSize = 16

// link begins to link the group to the head. Until it ends the tenants' newest
// entries, which it moves on, are its own.
func (l *Log) link(group []pending, head link, first uint64, tenants map[string]tenantHead) *linking {
	now := max(l.now().UnixMicro(), head.micros)
	c := &linking{
		log: l, group: group, head: head, tenants: tenants,
		timestamp:  time.UnixMicro(now).UTC().Format(timeFormat),
		salts:      make([]byte, saltSize*len(group)),
		signatures: l.sign(len(group)),
		places:     make([]newPlace, len(group)),
		placed:     make(chan int, len(group)),
	}
	_, _ = rand.Read(c.salts) // never fails
	go func() {
		defer close(c.placed)
		for i := range group {
			if c.err = c.add(i, link{sequence: first + uint64(i), micros: now}); c.err != nil {
				return
			}
			c.placed <- i
		}
		c.signatures.end()
	}()
	return c
}

// add makes the entry of the i-th event.
func (c *linking) add(i int, next link) error {
	p := c.group[i]
	tenant := string(p.Principal.Tenant)
	at := c.tenants[tenant]
	entry := c.log.entry(p.Event)
	entry.Sequence, entry.Timestamp = next.sequence, c.timestamp
	entry.Salt = base64.StdEncoding.EncodeToString(c.salts[saltSize*i:][:saltSize])
	entry.PreviousHash = c.head.previous()
	entry.TenantPreviousHash = at.last.previous()
	entry.TenantSequence = at.sequence + 1
	if entry.TenantSequence == 1 {
		entry.add(attributeChainID, c.log.ChainID())
		entry.add(attributePublicKey, c.log.public)
	}
	if p.acceptance != nil {
		p.acceptance.describe(entry)
	}
	core, err := c.signatures.core(i, entry)
	if err != nil {
		return err
	}
	next.hash = sha3.Sum256(core)
	c.signatures.add(i, next.hash)
	c.places[i] = newPlace{next, entry.TenantSequence}
	c.head, c.tenants[tenant] = next, tenantHead{entry.TenantSequence, next}
	return nil
}

// abandon returns when nothing is under way any more.
func (c *linking) abandon() {
	for range c.placed {
	}
	c.signatures.stop()
	c.signatures.wg.Wait()
}

// entry returns what the event alone says of its entry.
func (l *Log) entry(e Event) *Entry {
	entry := &Entry{
		Actor:      Actor{ID: e.Principal.ID, Type: string(e.Principal.Kind)},
		Attributes: e.Attributes,
		EventType:  e.Type,
		KeyID:      l.keyID,
		Outcome:    e.Outcome,
		RequestID:  e.Principal.RequestID,
		Resource:   e.Resource,
		SourceIP:   e.Principal.SourceIP,
		TenantID:   string(e.Principal.Tenant),
	}
	if e.Principal.Pod != "" {
		entry.add(attributePod, e.Principal.Pod)
	}
	return entry
}

// signatures are those of one commit, and its rows, which begin with them. They
// are made while the rest of the commit goes on: with one for each entry on all
// cores and while the chain is still being linked, since linking is serial and
// signing is most of the work; with one for all as soon as it is linked.
type signatures struct {
	signer *dualsig.PrivateKey
	hashes [][32]byte
	rows   []byte // of all entries
	ends   []int  // of each row
	wg     sync.WaitGroup

	// For entry mode, and for a group of one.
	linked chan int // indexes into hashes
	stop   func()   // no more hashes; safe to call again
	done   [][]byte
	errs   []error

	// For a group that has one signature.
	batch     bool
	tree      batchTree
	signature []byte
	err       error
}

// spareRows bounds the memory that is kept for the rows of the next commit.
const spareRows = 4 << 20

// sign expects n entries.
func (l *Log) sign(n int) *signatures {
	s := &signatures{
		signer: l.signer, hashes: make([][32]byte, n), ends: make([]int, 0, n),
		batch: n > 1 && l.batches.Load(), stop: func() {},
	}
	size := 1024
	if !s.batch {
		size += dualsig.SignatureSize
	}
	s.rows, l.spare = slices.Grow(l.spare[:0], n*size), nil
	if s.batch {
		return s
	}
	s.linked, s.done, s.errs = make(chan int, n), make([][]byte, n), make([]error, n)
	s.stop = sync.OnceFunc(func() { close(s.linked) })
	for range min(n, runtime.GOMAXPROCS(0)) - 1 {
		s.wg.Go(s.work)
	}
	return s
}

// core appends the row of the next entry, with room for what comes before its
// canonical form, which is returned.
func (s *signatures) core(i int, e *Entry) ([]byte, error) {
	before := plainRowHeader
	if s.batch {
		before = batchRowHeader + 32*pathLength(uint32(len(s.hashes)), uint32(i))
	}
	begin := len(s.rows) + before
	var err error
	s.rows, err = e.canonical(slices.Grow(s.rows, before)[:begin], false)
	s.ends = append(s.ends, len(s.rows))
	return s.rows[begin:], err
}

// add takes the hash of an entry.
func (s *signatures) add(i int, hash [32]byte) {
	s.hashes[i] = hash
	if !s.batch {
		s.linked <- i
	}
}

// end is called after the last hash.
func (s *signatures) end() {
	s.stop()
	if !s.batch {
		return
	}
	s.tree = newBatchTree(s.hashes)
	s.wg.Go(func() {
		s.signature, s.err = s.signer.Sign(batchContext, batchMessage(uint32(len(s.hashes)), s.tree.root()))
	})
}

func (s *signatures) work() {
	for i := range s.linked {
		s.done[i], s.errs[i] = s.signer.Sign(signingContext, s.hashes[i][:])
	}
}

// put writes the rows of the entries, the first of which has that sequence.
func (s *signatures) put(tx store.Tx, first uint64) error {
	if !s.batch {
		s.work() // helps with what is left
		s.wg.Wait()
		if err := errors.Join(s.errs...); err != nil {
			return fmt.Errorf("signing audit entries: %w", err)
		}
	}
	begin := 0
	for i, end := range s.ends {
		row := s.rows[begin:end]
		if s.batch {
			beginBatchRow(row[:0], first, uint32(i), s.tree)
		} else {
			row[0] = plainRow
			copy(row[1:], s.done[i])
		}
		if err := tx.Put(entryKey(first+uint64(i)), row); err != nil {
			return err
		}
		begin = end
	}
	if !s.batch {
		return nil
	}
	s.wg.Wait()
	if s.err != nil {
		return fmt.Errorf("signing audit entries: %w", s.err)
	}
	return tx.Put(batchKey(first), s.signature)
}

// onAllCores calls do for 0 to n-1, each once, and returns when all are done.
func onAllCores(n int, do func(i int)) {
	var next atomic.Int64
	work := func() {
		for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
			do(i)
		}
	}
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}
