// Package audit keeps the hash chain: one log for the whole deployment, in
// which every entry names the hash of the one before it and is signed with
// ML-DSA-65.
//
// An event joins the transaction of the change it records ([Log.Append]), so
// that there is never one without the other. Its place in the chain is decided
// when the store commits: the hook [Log.Commit] gives each event of the group
// its sequence and time, links it, and signs: each entry, or all of them at once
// ([Log.SetSigning]). Besides the entries the log keeps an index per tenant for
// [Log.Query] and, per credential, the entry of its current version ([Current]).
//
// A chain shows that nothing inside it was changed, dropped or moved. Alone it
// does not show that its tail was cut, nor that whoever holds the key wrote it
// anew. That takes a [Checkpoint] kept elsewhere: it states the head and the
// root of a tree over all entries, so that a later one is proven to contain it.
// A log that finds itself behind one takes no entries ([Log.Halt]) until the
// loss is accepted ([Log.AcceptRollback]); it then goes on in a new epoch, above
// the sequences that were lost. Sequences are consecutive within an epoch.
//
// # Several writers
//
// Many processes may write one log, each with a [Log] of its own that has the same
// key. The store runs their hooks one after the other, and that is the order of the
// chain. A hook that finds a head which its process did not write goes on from it when
// it is signed with the log's key and the log still has the newest entry that the
// process has seen there; else nothing is signed, and the process takes no entries
// until the loss is accepted, on whichever process. What one remembers is either held
// against the store in the same transaction or is but a bound: positions of tenants
// are read again after another has written, and none that is older, or that no
// signature speaks for, is gone on from. Everything derived, kept or archived is
// written by whoever comes first, compared with what it was computed from in the same
// transaction. By itself each process verifies the log, counts what it has written,
// and records the refusals of strangers once a minute.
package audit

import (
	"bytes"
	"context"
	"crypto/sha3"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Attributes of the first entry of every tenant's chain, the deployment's own
// included: trust in a chain starts there.
const (
	attributeChainID   = "chain_id"
	attributePublicKey = "public_key" // of the log, base64
)

// attributePod is in every entry of a principal that is a pod: its UID.
const attributePod = "pod_uid"

// Receipt tells the place that an event was given. It is filled in when the
// Update it joined has returned nil, and means nothing before. A closure that runs
// again gets another one: only that of its last run counts, and so whoever keeps it
// forgets it at the beginning of each.
type Receipt struct {
	Sequence uint64
	Hash     string // lower-case hex
}

// Log takes the entries of the chain of one deployment.
type Log struct {
	chain   *Chain
	signer  *dualsig.PrivateKey
	keyID   string
	public  string // base64 of the signer's public key
	now     func() time.Time
	batches atomic.Bool // [SignBatches]

	heads     heads
	rollbacks *Detector
	spare     []byte // memory of the rows of the last commit, for the next commit

	onAcceptance func(ctx context.Context) // nil: nobody asked to be told
}

// New returns a log that can serve as the store's commit hook but has no store
// and no key yet; [Log.Use] gives it both. Two steps, because the key is in
// the store and the store wants its hook when it is opened.
func New(now func() time.Time) *Log {
	ch := new(Chain)
	d := newDetector(ch)
	return &Log{now: now, chain: ch, rollbacks: d, heads: heads{chain: ch, rollbacks: d}}
}

// Use must be called once, before the first event. Error: fault.Internal when
// the head that is stored is not the last entry, signed with this key.
func (l *Log) Use(ctx context.Context, s store.Store, signer *dualsig.PrivateKey, chainID string) error {
	l.chain.store, l.chain.key, l.chain.chainID = s, signer.Public(), chainID
	l.signer, l.keyID = signer, signer.Public().ID()
	l.public = base64.StdEncoding.EncodeToString(signer.Public().Bytes())
	head, err := l.chain.verifiedHead(ctx)
	if err != nil {
		return fmt.Errorf("reading the head of the chain: %w", err)
	}
	l.heads.beginAt(head)
	l.rollbacks.seen.Store(&head)
	return nil
}

// verifiedHead returns the stored head after holding it against the last entry.
func (ch *Chain) verifiedHead(ctx context.Context) (head Head, err error) {
	var last *Entry
	err = ch.store.View(ctx, func(r store.Reader) error {
		if head.link, err = readHead(r); err != nil {
			return err
		}
		newest, err := newestEntry(r)
		if err == nil && newest > 0 {
			last, err = readEntry(r, newest)
		}
		if err == nil {
			head.epoch, err = ch.epochNow(r, head.link)
		}
		return err
	})
	switch {
	case err != nil:
		return Head{}, err
	case last == nil && head.link == link{}:
		return head, nil
	case last == nil || last.link() != head.link || !last.verify(ch.key, nil):
		return Head{}, errDamagedLog
	}
	return head, nil
}

// newestEntry returns the last sequence that there is an entry of, 0 for none.
func newestEntry(r store.Reader) (newest uint64, err error) {
	rows := entryRange
	rows.Reverse = true
	err = r.Scan(rows, func(key, _ []byte) bool {
		newest = sequenceOf(bytes.TrimPrefix(key, rows.From))
		return false
	})
	return newest, err
}

// Fingerprint identifies a chain by what its first entry says: 64 lower-case
// hex digits. Whoever pins it knows whose log is being verified.
func Fingerprint(chainID string, publicKey []byte) string {
	sum := sha3.Sum256(frame.Join("latticekeep/chain/v1", []byte(chainID), publicKey))
	return hex.EncodeToString(sum[:])
}

// Ready reports whether an entry could be written now. It is asked before
// anything is looked up for a caller.
func (l *Log) Ready(ctx context.Context) error {
	if l.rollbacks.suspected.Load() {
		if _, err := l.rollbacks.checkForRollback(ctx); err != nil {
			return err
		}
	}
	if err := l.rollbacks.checkNotHalted(); err != nil {
		return err
	}
	return l.chain.store.Ready(ctx)
}

// Halt makes [Log.Ready], [Log.Append] and every commit fail with fault.Unavailable, until it is
// called with nil or, when the reason is a [RollbackError], until that is accepted.
func (l *Log) Halt(reason error) { l.rollbacks.Halt(reason) }

// HaltedBy returns why the log takes no entries, and nil when it does.
func (l *Log) HaltedBy() error { return l.rollbacks.HaltedBy() }

// ChainID returns the id of the chain, as its first entry names it.
func (l *Log) ChainID() string { return l.chain.chainID }

// Fingerprint returns that of the log's chain.
func (l *Log) Fingerprint() string { return Fingerprint(l.chain.chainID, l.chain.key.Bytes()) }

// Append lets the event join the caller's transaction. Errors: fault.Unavailable
// while the log takes no entries, and fault.Internal when the tenant's part of
// the log is damaged, which so fails this caller and not all that share its
// commit.
func (l *Log) Append(tx store.Tx, e Event) (*Receipt, error) {
	if err := l.rollbacks.checkNotHalted(); err != nil {
		return nil, err
	}
	return l.append(tx, e, nil)
}

func (l *Log) append(tx store.Tx, e Event, a *acceptance) (*Receipt, error) {
	if err := l.heads.checkTenantHead(tx, string(e.Principal.Tenant)); err != nil {
		return nil, fmt.Errorf("reading the tenant's last entry: %w", err)
	}
	r := new(Receipt) // of this run: a closure that runs again appends again
	tx.Enqueue(pending{e, r, a})
	return r, nil
}

// Record writes one event in a transaction of its own.
func (l *Log) Record(ctx context.Context, e Event) error {
	return l.chain.store.Update(ctx, func(tx store.Tx) error {
		_, err := l.Append(tx, e)
		return err
	})
}

// Keys of the rows. Sequences are big-endian, so that byte order is theirs.
func entryKey(sequence uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/entry/"), sequence)
}

// batchKey is that of the signature of a group, by its first sequence.
func batchKey(first uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/batch/"), first)
}

func tenantPrefix(tenant string) []byte { return []byte("audit/tenant/" + tenant + "/") }

func tenantKey(tenant string, sequence uint64) []byte {
	return binary.BigEndian.AppendUint64(tenantPrefix(tenant), sequence)
}

func currentKey(tenant, credential string) []byte {
	return []byte("audit/anchor/" + tenant + "/" + credential)
}

var (
	headKey        = []byte("audit/head")
	entryRange     = store.Prefix([]byte("audit/entry/"))
	tenantRange    = store.Prefix([]byte("audit/tenant/"))
	batchRange     = store.Prefix([]byte("audit/batch/"))
	currentRange   = store.Prefix([]byte("audit/anchor/"))
	errDamagedLog  = fault.New(fault.Internal, "the audit log is damaged: run latticekeep audit verify")
	errNotEquipped = errors.New("the log has no key yet")
)

// link is a position in the chain or in a tenant's part of it: sequence u64,
// Unix microseconds u64, 32 bytes hash.
type link struct {
	sequence uint64
	micros   int64
	hash     [32]byte
}

func (k link) encode() []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 48), k.sequence)
	b = binary.BigEndian.AppendUint64(b, uint64(k.micros))
	return append(b, k.hash[:]...)
}

func decodeLink(b []byte) (k link, err error) {
	if b == nil {
		return link{}, nil // nothing before the first entry
	}
	if len(b) != 48 {
		return link{}, errDamagedLog
	}
	k.sequence = binary.BigEndian.Uint64(b)
	k.micros = int64(binary.BigEndian.Uint64(b[8:]))
	copy(k.hash[:], b[16:])
	return k, nil
}

func (k link) previous() string {
	if k.sequence == 0 {
		return zeroHash
	}
	return hex.EncodeToString(k.hash[:])
}

// indexRow is the value under tenantKey: what [Log.Query] filters by, so that
// it reads only the entries it returns.
type indexRow struct {
	link
	eventType EventType
	actor     string
}

func (r indexRow) encode() []byte {
	return append(r.link.encode(), string(r.eventType)+"\x00"+r.actor...)
}

func decodeIndexRow(b []byte) (indexRow, error) {
	if len(b) < 48 {
		return indexRow{}, errDamagedLog
	}
	k, err := decodeLink(b[:48])
	eventType, actor, ok := strings.Cut(string(b[48:]), "\x00")
	if err != nil || !ok {
		return indexRow{}, errDamagedLog
	}
	return indexRow{k, EventType(eventType), actor}, nil
}

// Current returns the entry of the credential's current version: what its
// owner's status shows.
func Current(r store.Reader, tenant authz.TenantID, credential string) (Receipt, error) {
	b, err := r.Get(currentKey(string(tenant), credential))
	if err != nil {
		return Receipt{}, err
	}
	k, err := decodeLink(b)
	if err != nil || k.sequence == 0 {
		return Receipt{}, errors.Join(errDamagedLog, err)
	}
	return Receipt{k.sequence, hex.EncodeToString(k.hash[:])}, nil
}
