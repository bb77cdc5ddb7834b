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
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// pending is an event on its way through a commit.
type pending struct {
	Event
	receipt    *Receipt
	acceptance *acceptance // set only for the event that begins an epoch
}

// Commit is the store's commit hook. It turns the events of one physical commit into entries, in
// the order of the events.
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
		l.spare = rows // the store has copied the rows
	}
	proposed := Head{c.head, number}
	l.heads.proposed, l.heads.proposedTenants = proposed, tenants
	l.heads.written.propose(c.head, group)
	tx.OnCommit(func() { // from here on the log contains the commit
		l.rollbacks.noteHead(proposed)
		l.heads.remember(tenants, number)
	})
	return tx.Put(headKey, c.head.encode())
}

// positions returns the newest entry of each tenant in the group. The group begins the epoch or
// continues in it.
func (l *Log) positions(tx store.Tx, group []pending, head link, epoch uint64) (map[string]tenantHead, error) {
	tenants := make(map[string]tenantHead)
	for i, p := range group {
		if (head.sequence == 0 && i == 0) != (p.Type == ChainStarted) {
			return nil, errDamagedLog // only the first entry may start the chain
		}
		tenant := string(p.Principal.Tenant)
		if _, ok := tenants[tenant]; ok {
			continue
		}
		at, err := l.heads.position(tx, tenant, epoch)
		if err != nil {
			l.heads.readable.Delete(tenant) // the tenant's next event then fails alone
			return nil, fmt.Errorf("reading a tenant's last entry: %w", err)
		}
		tenants[tenant] = at
	}
	return tenants, nil
}

// group returns the events of a commit with their own type. While the log is halted, a commit must
// begin with the acceptance of the loss, so that all of its entries are in the new epoch.
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

// linking builds the entries of one commit, each with the hash of the entry before it. It runs
// beside the goroutine that uses the transaction.
type linking struct {
	log        *Log
	group      []pending
	head       link // the newest entry
	tenants    map[string]tenantHead
	timestamp  string
	salts      []byte
	signatures *signatures
	places     []newPlace
	placed     chan int // indexes of filled places; closed at the end
	err        error    // valid after placed is closed
}

// newPlace is the position of a new entry in the chain and among the entries of its tenant.
type newPlace struct {
	link
	tenantSequence uint64
}

// saltSize is the size of an entry's salt in bytes. A neighbour's previous_hash reveals the hash of
// an entry. Without the salt, the content of the entry could be guessed and tested against that
// hash.
const saltSize = 16

// link starts linking the group to the head. Until linking ends, only linking may use the tenants
// map, which it updates.
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

// add builds the entry of event i.
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

// abandon waits until all goroutines of the commit have ended.
func (c *linking) abandon() {
	for range c.placed {
	}
	c.signatures.stop()
	c.signatures.wg.Wait()
}

// entry returns an entry with the fields that come from the event alone.
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

// signatures are the signatures and rows of one commit. The header of a row has the signature of
// its entry or, in a batch, the entry's place in the batch. Signing is most of the work and linking
// is serial, so signing runs in parallel to the rest of the commit. With one signature for each
// entry it uses all cores and starts while the chain is still being linked. With one signature for
// the group it starts when linking ends.
type signatures struct {
	signer *dualsig.PrivateKey
	hashes [][32]byte
	rows   []byte // rows of all entries, one after the other
	ends   []int  // end offset of each row
	wg     sync.WaitGroup

	// For entry mode, and for a group of one.
	linked chan int // indexes into hashes
	stop   func()   // closes linked; safe to call again
	done   [][]byte
	errs   []error

	// For a group with one signature.
	batch     bool
	tree      batchTree
	signature []byte
	err       error
}

// spareRows is the size in bytes of the largest buffer that is kept for the next commit.
const spareRows = 4 << 20

// sign prepares for n entries and starts the workers of entry mode.
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

// core appends the row of the next entry, with room for the header. It returns the canonical form
// of the entry, which follows the header.
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

// add sets the hash of entry i and, in entry mode, has it signed.
func (s *signatures) add(i int, hash [32]byte) {
	s.hashes[i] = hash
	if !s.batch {
		s.linked <- i
	}
}

// end must be called after the last hash. In batch mode it starts signing the root of the tree.
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

// put writes the rows of the entries. The first entry has the sequence first.
func (s *signatures) put(tx store.Tx, first uint64) error {
	if !s.batch {
		s.work() // helps to sign the remaining entries
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
