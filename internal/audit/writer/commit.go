package writer

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

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Commit is the store's commit hook. It turns the events of one physical commit into entries, in
// the order of the events.
func (l *Log) Commit(tx store.Tx, events []any) error {
	if len(events) == 0 {
		return nil
	}
	if l.signer == nil {
		return fault.Wrap(fault.Internal, "internal error", errNotEquipped)
	}
	group, changes, err := l.group(events)
	if err != nil {
		return err
	}
	var accepting *acceptance
	if len(group) > 0 {
		accepting = group[0].acceptance
	}
	head, err := l.heads.settleHead(tx, accepting)
	if err != nil {
		return err
	}
	var loaded *state.Loaded
	if accepting != nil {
		loaded = accepting.state
	}
	stored, err := l.state.Begin(tx, head.Position, changes, len(group) > 0, loaded)
	if err != nil {
		return err
	}
	if len(group) == 0 {
		return stored.Put(tx, head.Position)
	}
	first, number := head.Sequence+1, head.Epoch
	if accepting != nil {
		if first, err = accepting.beginEpoch(l, tx, head.Position); err != nil {
			return err
		}
		number = accepting.epoch.Number
	}
	tenants, err := l.tenantHeads(tx, group, head.Position, number)
	l.heads.recent = nil // it reads through tx, which ends with the hook
	if err != nil {
		return err
	}
	c := l.startLinking(group, head.Position, first, tenants, stored.Commitment())
	defer c.abandon()
	for i := range c.filled {
		at, p, tenant := c.positions[i], group[i], string(group[i].Principal.Tenant)
		row := audit.IndexRow{Position: at.Position, EventType: p.Type, Actor: p.Principal.ID}
		if err := tx.Put(audit.TenantKey(tenant, at.tenantSequence), row.Encode()); err != nil {
			return err
		}
		if p.MakesCurrent() {
			if err := tx.Put(audit.CurrentKey(tenant, p.Resource.ID), at.Position.Encode()); err != nil {
				return err
			}
		}
		*p.receipt = audit.Receipt{Sequence: at.Sequence, Hash: hex.EncodeToString(at.Hash[:])}
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
	proposed := audit.Head{Position: c.head, Epoch: number}
	l.heads.proposed, l.heads.proposedTenants = proposed, tenants
	l.heads.written.propose(c.head, group)
	tx.OnCommit(func() { // now the log contains the commit
		l.Detector.noteHead(proposed)
		l.heads.remember(tenants, number)
	})
	if err := stored.Put(tx, c.head); err != nil {
		return err
	}
	return tx.Put(audit.HeadKey, c.head.Encode())
}

// tenantHeads returns the newest entry of each tenant in the group. The group begins the epoch or
// continues in it.
func (l *Log) tenantHeads(tx store.Tx, group []pending, head audit.Position, epoch uint64) (map[string]audit.TenantHead, error) {
	tenants := make(map[string]audit.TenantHead)
	for i, p := range group {
		if (head.Sequence == 0 && i == 0) != (p.Type == audit.ChainStarted) {
			return nil, audit.ErrDamagedLog // only the first entry may start the chain
		}
		tenant := string(p.Principal.Tenant)
		if _, ok := tenants[tenant]; ok {
			continue
		}
		at, err := l.heads.tenantHead(tx, tenant, epoch)
		if err != nil {
			l.heads.readable.Delete(tenant) // the tenant's next event then fails alone
			return nil, fmt.Errorf("reading a tenant's last entry: %w", err)
		}
		tenants[tenant] = at
	}
	return tenants, nil
}

// group returns the entries that the events of a commit become, and the rows that they change. While
// the log is halted, a commit must begin with the acceptance of the loss, so that all of its entries
// are in the new epoch.
func (l *Log) group(events []any) (group []pending, changes []state.Change, err error) {
	group = make([]pending, 0, len(events))
	for _, event := range events {
		switch e := event.(type) {
		case state.Change:
			changes = append(changes, e)
		case pending:
			if e.acceptance != nil && len(group) > 0 {
				return nil, nil, errOneByOne
			}
			group = append(group, e)
		default:
			return nil, nil, fault.Wrap(fault.Internal, "internal error", fmt.Errorf("an event of type %T is not for the log", event))
		}
	}
	if len(group) == 0 || group[0].acceptance == nil {
		err = l.Detector.CheckNotHalted()
	}
	return group, changes, err
}

// linker builds the entries of one commit, each with the hash of the entry before it. It runs
// beside the goroutine that uses the transaction.
type linker struct {
	log        *Log
	group      []pending
	head       audit.Position // the newest entry
	tenants    map[string]audit.TenantHead
	timestamp  string
	commitment string // what the attribute state gets; empty when the commit does not change the state
	salts      []byte
	signatures *signatures
	positions  []newPosition
	filled     chan int // indexes of filled positions; closed at the end
	err        error    // valid after filled is closed
}

// newPosition is the position of a new entry in the chain and among the entries of its tenant.
type newPosition struct {
	audit.Position
	tenantSequence uint64
}

// saltSize is the size of an entry's salt in bytes. A neighbour's previous_hash reveals the hash of
// an entry. Without the salt, the content of the entry could be guessed and tested against that
// hash.
const saltSize = 16

// startLinking starts linking the group to the head. Until the linker ends, only it may use the
// tenants map, which it updates.
func (l *Log) startLinking(group []pending, head audit.Position, first uint64, tenants map[string]audit.TenantHead, commitment string) *linker {
	now := max(l.Now().UnixMicro(), head.Micros)
	c := &linker{
		log: l, group: group, head: head, tenants: tenants,
		timestamp:  time.UnixMicro(now).UTC().Format(audit.TimeFormat),
		commitment: commitment,
		salts:      make([]byte, saltSize*len(group)),
		signatures: l.sign(len(group)),
		positions:  make([]newPosition, len(group)),
		filled:     make(chan int, len(group)),
	}
	_, _ = rand.Read(c.salts) // never fails
	go func() {
		defer close(c.filled)
		for i := range group {
			if c.err = c.add(i, audit.Position{Sequence: first + uint64(i), Micros: now}); c.err != nil {
				return
			}
			c.filled <- i
		}
		c.signatures.end()
	}()
	return c
}

// add builds the entry of event i.
func (c *linker) add(i int, next audit.Position) error {
	p := c.group[i]
	tenant := string(p.Principal.Tenant)
	at := c.tenants[tenant]
	entry := c.log.entry(p.Event)
	entry.Sequence, entry.Timestamp = next.Sequence, c.timestamp
	entry.Salt = base64.StdEncoding.EncodeToString(c.salts[saltSize*i:][:saltSize])
	entry.PreviousHash = c.head.PreviousHash()
	entry.TenantPreviousHash = at.Last.PreviousHash()
	entry.TenantSequence = at.Sequence + 1
	if entry.TenantSequence == 1 {
		entry.Add(audit.AttributeChainID, c.log.ChainID())
		entry.Add(audit.AttributePublicKey, c.log.public)
	}
	if p.acceptance != nil {
		p.acceptance.describe(entry)
	}
	if i == len(c.group)-1 && c.commitment != "" {
		entry.Add(audit.AttributeState, c.commitment)
	}
	core, err := c.signatures.core(i, entry)
	if err != nil {
		return err
	}
	next.Hash = sha3.Sum256(core)
	c.signatures.add(i, next.Hash)
	c.positions[i] = newPosition{next, entry.TenantSequence}
	c.head, c.tenants[tenant] = next, audit.TenantHead{Sequence: entry.TenantSequence, Last: next}
	return nil
}

// abandon waits until all goroutines of the commit have ended.
func (c *linker) abandon() {
	for range c.filled {
	}
	c.signatures.stop()
	c.signatures.wg.Wait()
}

// entry returns an entry with the fields that come from the event alone.
func (l *Log) entry(e audit.Event) *audit.Entry {
	entry := &audit.Entry{
		Actor:      audit.Actor{ID: e.Principal.ID, Type: string(e.Principal.Kind)},
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
		entry.Add(audit.AttributePod, e.Principal.Pod)
	}
	return entry
}

// signatures are the signatures and rows of one commit. The header of a row has the signature of
// its entry or, in a batch, the entry's index in the batch. Signing is most of the work and linking
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
	tree      audit.BatchTree
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
func (s *signatures) core(i int, e *audit.Entry) ([]byte, error) {
	before := audit.PlainRowHeader
	if s.batch {
		before = audit.BatchRowHeader + 32*audit.PathLength(uint32(len(s.hashes)), uint32(i))
	}
	begin := len(s.rows) + before
	var err error
	s.rows, err = e.Canonical(slices.Grow(s.rows, before)[:begin], false)
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
	s.tree = audit.NewBatchTree(s.hashes)
	s.wg.Go(func() {
		s.signature, s.err = s.signer.Sign(audit.BatchContext, audit.BatchMessage(uint32(len(s.hashes)), s.tree.Root()))
	})
}

func (s *signatures) work() {
	for i := range s.linked {
		s.done[i], s.errs[i] = s.signer.Sign(audit.SigningContext, s.hashes[i][:])
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
			audit.BeginBatchRow(row[:0], first, uint32(i), s.tree)
		} else {
			row[0] = audit.PlainRow
			copy(row[1:], s.done[i])
		}
		if err := tx.Put(audit.EntryKey(first+uint64(i)), row); err != nil {
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
	return tx.Put(audit.BatchKey(first), s.signature)
}
