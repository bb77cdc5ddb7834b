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

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
)

// entryKey returns the key of an entry's row. Sequences are big-endian, so the keys sort by
// sequence.
func entryKey(sequence uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/entry/"), sequence)
}

// batchKey returns the key of a group's signature. The first sequence names the group.
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
	headKey      = []byte("audit/head")
	entryRange   = store.Prefix([]byte("audit/entry/"))
	tenantRange  = store.Prefix([]byte("audit/tenant/"))
	batchRange   = store.Prefix([]byte("audit/batch/"))
	currentRange = store.Prefix([]byte("audit/anchor/"))
)

var checkpointKey = []byte("audit/checkpoint")

var baseKey = []byte("audit/base")

var verifiedKey = []byte("audit/verified")

// indexRow is the value under tenantKey. It holds the fields that [Reader.Query] filters by, so a
// query reads only the entries that it returns.
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

// A stored entry is a version byte, the data of its signature, and the canonical bytes that the
// hash covers. Every read computes the hash again, so no stored hash is trusted. In version 1, the
// data is the raw signature. In version 2, the entry was signed in a group, and the data is: u64
// first sequence of the group, u32 number of its entries, u32 index of the entry in the group, and
// the path of the index. The signature of the group has its own row under [batchKey].
const (
	plainRow = 1
	batchRow = 2

	plainRowHeader = 1 + dualsig.SignatureSize
	batchRowHeader = 1 + 8 + 4 + 4 // without the path
)

// beginBatchRow appends the part of a row that precedes the core.
func beginBatchRow(dst []byte, first uint64, index uint32, t batchTree) []byte {
	dst = append(dst, batchRow)
	dst = binary.BigEndian.AppendUint64(dst, first)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(t[0])))
	dst = binary.BigEndian.AppendUint32(dst, index)
	return t.appendPath(dst, int(index))
}

// rowBatch returns the first sequence of the group that the entry was signed in. It returns false
// for an entry with its own signature.
func rowBatch(row []byte) (first uint64, ok bool) {
	if len(row) < batchRowHeader || row[0] != batchRow {
		return 0, false
	}
	return binary.BigEndian.Uint64(row[1:]), true
}

// stored is an entry as it is in the store. It shares the memory of the rows that it was decoded
// from.
type stored struct {
	entry     *Entry // without Signature
	hash      [32]byte
	proof     batchProof
	signature []byte
}

// splitRow returns the bytes that the hash of a stored entry covers, and the proof of its place in
// its group. For a row of version 1, the proof is zero.
func splitRow(row []byte) (core []byte, p batchProof, err error) {
	if _, grouped := rowBatch(row); !grouped {
		if len(row) < plainRowHeader || row[0] != plainRow {
			return nil, p, errNotCanonical
		}
		return row[plainRowHeader:], p, nil
	}
	p = batchProof{n: binary.BigEndian.Uint32(row[9:]), index: binary.BigEndian.Uint32(row[13:])}
	if p.n < 2 || p.index >= p.n {
		return nil, p, errNotCanonical
	}
	end := batchRowHeader + 32*pathLength(p.n, p.index)
	if len(row) < end {
		return nil, p, errNotCanonical
	}
	p.path = row[batchRowHeader:end]
	return row[end:], p, nil
}

// decodeStored decodes a stored entry. The batch is the row of its group, if [rowBatch] names one.
func decodeStored(row, batch []byte) (s stored, err error) {
	var core []byte
	if core, s.proof, err = splitRow(row); err != nil {
		return stored{}, err
	}
	first, grouped := rowBatch(row)
	switch {
	case !grouped:
		s.signature = row[1:plainRowHeader]
	case len(batch) != dualsig.SignatureSize:
		return stored{}, errNotCanonical
	default:
		s.signature = batch
	}
	if s.entry, err = parse(core, false); err != nil {
		return stored{}, err
	}
	if grouped && (first == 0 || s.entry.Sequence != first+uint64(s.proof.index)) {
		return stored{}, errNotCanonical
	}
	s.hash = sha3.Sum256(core)
	s.entry.Hash = hex.EncodeToString(s.hash[:])
	return s, nil
}

// verify reports whether key made the signature. The memo may be nil.
func (s stored) verify(key *dualsig.PublicKey, m *memo) bool {
	return s.proof.verify(key, s.hash, s.signature, m)
}

// whole returns the entry with its signature.
func (s stored) whole() *Entry {
	b := s.signature
	if s.proof.n > 0 {
		b = s.proof.encode(b)
	}
	s.entry.Signature = base64.StdEncoding.EncodeToString(b)
	return s.entry
}

// The rows that name a tenant's newest entry are not signed. With write access to the database, but
// without the log's key, an attacker could change them so that a replica signs an entry that forks
// the tenant's history. So a process trusts such a row only if it names the tenant's newest entry
// known to this process, or an entry that is signed and not older. This check cannot find rows that
// were removed from the end of a tenant that the process has not met before. A verification finds
// that, including the verification of the running log.

// tenantHead is the newest entry of a tenant.
type tenantHead struct {
	sequence uint64 // tenant sequence
	last     link
}

// of reports whether the entry is the one at this position.
func (p tenantHead) of(e *Entry, tenant string) bool {
	return e.TenantID == tenant && e.TenantSequence == p.sequence && e.link() == p.last
}

// lastOf reads a tenant's newest entry from the tenant's index.
func lastOf(r store.Reader, tenant string) (p tenantHead, err error) {
	rng := store.Prefix(tenantPrefix(tenant))
	rng.Reverse = true
	var bad error
	err = r.Scan(rng, func(key, value []byte) bool {
		row, err := decodeIndexRow(value)
		if err != nil || len(key) < 8 {
			bad = errDamagedLog
			return false
		}
		p = tenantHead{binary.BigEndian.Uint64(key[len(key)-8:]), row.link}
		return false
	})
	return p, errors.Join(err, bad)
}

func sequenceOf(indexValue []byte) uint64 {
	if len(indexValue) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(indexValue)
}

func only(key []byte) store.Range { return store.Range{From: key, To: append(bytes.Clone(key), 0)} }

// noSignature stands in for a signature that is not checked.
var noSignature = make([]byte, dualsig.SignatureSize)

func readHead(r store.Reader) (link, error) {
	b, err := r.Get(headKey)
	if err != nil {
		return link{}, fmt.Errorf("reading the head of the chain: %w", err)
	}
	return decodeLink(b)
}

// entryRows returns copies of the row of an entry and of the row of its group. The row is nil if
// the entry does not exist; the batch is nil if the entry has no group.
func entryRows(r store.Reader, sequence uint64) (row, batch []byte, err error) {
	row, err = r.Get(entryKey(sequence))
	if err != nil {
		return nil, nil, fmt.Errorf("reading an audit entry: %w", err)
	}
	row = bytes.Clone(row)
	if first, ok := rowBatch(row); ok {
		if batch, err = r.Get(batchKey(first)); err != nil {
			return nil, nil, fmt.Errorf("reading the signature of audit entries: %w", err)
		}
	}
	return row, bytes.Clone(batch), nil
}

// storedEntry is [readEntry] without encoding the signature as text.
func storedEntry(r store.Reader, sequence uint64) (stored, error) {
	row, batch, err := entryRows(r, sequence)
	switch {
	case err != nil:
		return stored{}, err
	case row == nil:
		return stored{}, errNoEntry
	}
	e, err := decodeStored(row, batch)
	if err != nil || e.entry.Sequence != sequence {
		return stored{}, errDamagedLog
	}
	return e, nil
}

// readEntry returns the whole entry, unverified. Errors: errNoEntry, or fault.Internal if the row
// does not hold that entry.
func readEntry(r store.Reader, sequence uint64) (*Entry, error) {
	e, err := storedEntry(r, sequence)
	if err != nil {
		return nil, err
	}
	return e.whole(), nil
}

// readStored reads an entry that must exist. Error: errDamagedLog if it is missing.
func readStored(r store.Reader, sequence uint64) (stored, error) {
	e, err := storedEntry(r, sequence)
	if errors.Is(err, errNoEntry) {
		err = errDamagedLog
	}
	return e, err
}

// hashOf returns the hash of a stored entry without checking the signature. Errors: errNoEntry,
// errDamagedLog for a row that holds no entry.
func hashOf(r store.Reader, sequence uint64) (hash [32]byte, err error) {
	row, err := r.Get(entryKey(sequence))
	if err != nil {
		return hash, fmt.Errorf("reading an audit entry: %w", err)
	}
	if row == nil {
		return hash, errNoEntry
	}
	core, _, err := splitRow(row)
	if err != nil {
		return hash, errDamagedLog
	}
	return sha3.Sum256(core), nil
}

// newestEntry returns the highest sequence that has an entry, 0 for none.
func newestEntry(r store.Reader) (newest uint64, err error) {
	rows := entryRange
	rows.Reverse = true
	err = r.Scan(rows, func(key, _ []byte) bool {
		newest = sequenceOf(bytes.TrimPrefix(key, rows.From))
		return false
	})
	return newest, err
}

type row struct{ key, value []byte }

// readPage returns copies of the first rows of the range, and reports whether there may be more.
func readPage(r store.Reader, rng store.Range) (rows []row, more bool, err error) {
	size := 0
	err = r.Scan(rng, func(key, value []byte) bool {
		both := make([]byte, 0, len(key)+len(value)+1) // ScanAll appends a byte to the key
		both = append(append(both, value...), key...)
		rows = append(rows, row{both[len(value):], both[:len(value):len(value)]})
		size += len(value)
		more = len(rows) == pageRows || size >= pageBytes
		return !more
	})
	return rows, more, err
}

// A page bounds the rows that one snapshot reads. So reading a long log makes no long transaction,
// and few large rows are in memory at once.
const (
	pageRows  = 500
	pageBytes = 4 << 20
)

// ScanAll visits every row of the range in order, in snapshots of one page each. For rows that are
// only appended, this equals a read in one snapshot.
func ScanAll(ctx context.Context, s store.Store, rng store.Range, visit func(key, value []byte) error) error {
	for {
		var rows []row
		more, err := false, error(nil)
		err = s.View(ctx, func(r store.Reader) error {
			rows, more, err = readPage(r, rng)
			return err
		})
		if err != nil {
			return err
		}
		for _, row := range rows { // the snapshot has ended, so visit may be slow
			if err := visit(row.key, row.value); err != nil {
				return err
			}
		}
		if !more {
			return nil
		}
		rng.From = append(rows[len(rows)-1].key, 0)
	}
}

// entryRow is the row of an entry, with the row of its group if it has one.
type entryRow struct{ key, row, batch []byte }

// scanEntries visits the rows of the entries in the range, in order.
func scanEntries(ctx context.Context, s store.Store, rng store.Range, visit func(entryRow) error) error {
	for {
		var page []entryRow
		more := false
		err := s.View(ctx, func(r store.Reader) (err error) {
			page, more, err = readEntries(r, rng)
			return err
		})
		if err != nil {
			return err
		}
		for _, e := range page {
			if err := visit(e); err != nil {
				return err
			}
		}
		if !more {
			return nil
		}
		rng.From = append(bytes.Clone(page[len(page)-1].key), 0)
	}
}

func readEntries(r store.Reader, rng store.Range) (page []entryRow, more bool, err error) {
	rows, more, err := readPage(r, rng)
	if err != nil {
		return nil, false, err
	}
	var first uint64
	var batch []byte
	for _, row := range rows {
		e := entryRow{key: row.key, row: row.value}
		if of, ok := rowBatch(row.value); ok {
			if batch == nil || of != first {
				if batch, err = r.Get(batchKey(of)); err != nil {
					return nil, false, err
				}
				first, batch = of, bytes.Clone(batch)
			}
			e.batch = batch
		}
		page = append(page, e)
	}
	return page, more, nil
}
