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

// EntryKey returns the key of an entry's row. Sequences are big-endian, so the keys sort by
// sequence.
func EntryKey(sequence uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/entry/"), sequence)
}

// BatchKey returns the key of a group's signature. The first sequence names the group.
func BatchKey(first uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte("audit/batch/"), first)
}

// TenantPrefix returns the prefix of the keys of a tenant's index rows.
func TenantPrefix(tenant string) []byte { return []byte("audit/tenant/" + tenant + "/") }

// TenantKey returns the key of an index row: the entry of a tenant with a tenant sequence.
func TenantKey(tenant string, sequence uint64) []byte {
	return binary.BigEndian.AppendUint64(TenantPrefix(tenant), sequence)
}

// CurrentKey returns the key of the row that names the entry of a credential's newest version. Its
// prefix is older than anchors and has nothing to do with them.
func CurrentKey(tenant, credential string) []byte {
	return []byte("audit/anchor/" + tenant + "/" + credential)
}

var (
	HeadKey      = []byte("audit/head")
	EntryRange   = store.Prefix([]byte("audit/entry/"))
	TenantRange  = store.Prefix([]byte("audit/tenant/"))
	BatchRange   = store.Prefix([]byte("audit/batch/"))
	CurrentRange = store.Prefix([]byte("audit/anchor/"))
)

// CheckpointKey is the key of the newest signed checkpoint.
var CheckpointKey = []byte("audit/checkpoint")

// BaseKey is the key of the signed [Base]. There is none before the first cut.
var BaseKey = []byte("audit/base")

// VerifiedKey is the key of the signed progress of the verification (audit/verify).
var VerifiedKey = []byte("audit/verified")

// IndexRow is the value under [TenantKey]. It holds the fields that [reader.Reader.Query] filters
// by, so a query reads only the entries that it returns.
type IndexRow struct {
	Position
	EventType EventType
	Actor     string
}

// Encode returns the position, the event type, a zero byte and the actor.
func (r IndexRow) Encode() []byte {
	return append(r.Position.Encode(), string(r.EventType)+"\x00"+r.Actor...)
}

// DecodeIndexRow parses an index row. Error: [ErrDamagedLog].
func DecodeIndexRow(b []byte) (IndexRow, error) {
	if len(b) < 48 {
		return IndexRow{}, ErrDamagedLog
	}
	k, err := DecodePosition(b[:48])
	eventType, actor, ok := strings.Cut(string(b[48:]), "\x00")
	if err != nil || !ok {
		return IndexRow{}, ErrDamagedLog
	}
	return IndexRow{k, EventType(eventType), actor}, nil
}

// A stored entry is a version byte, the data of its signature, and the canonical bytes that the
// hash covers. Every read computes the hash again, so no stored hash is trusted. In version 1, the
// data is the raw signature. In version 2, the entry was signed in a group, and the data is: u64
// first sequence of the group, u32 number of its entries, u32 index of the entry in the group, and
// the path of the index. The signature of the group has its own row under [BatchKey].
const (
	PlainRow = 1
	batchRow = 2

	PlainRowHeader = 1 + dualsig.SignatureSize
	BatchRowHeader = 1 + 8 + 4 + 4 // without the path
)

// BeginBatchRow appends the part of a row that precedes the core.
func BeginBatchRow(dst []byte, first uint64, index uint32, t BatchTree) []byte {
	dst = append(dst, batchRow)
	dst = binary.BigEndian.AppendUint64(dst, first)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(t[0])))
	dst = binary.BigEndian.AppendUint32(dst, index)
	return t.appendPath(dst, int(index))
}

// RowBatch returns the first sequence of the group that the entry was signed in. It returns false
// for an entry with its own signature.
func RowBatch(row []byte) (first uint64, ok bool) {
	if len(row) < BatchRowHeader || row[0] != batchRow {
		return 0, false
	}
	return binary.BigEndian.Uint64(row[1:]), true
}

// StoredEntry is an entry as it is in the store. It shares the memory of the rows that it was
// decoded from.
type StoredEntry struct {
	Entry     *Entry // without Signature
	Hash      [32]byte
	Proof     BatchProof
	Signature []byte
}

// SplitRow returns the bytes that the hash of a stored entry covers, and the proof of its index in
// its group. For a row of version 1, the proof is zero.
func SplitRow(row []byte) (core []byte, p BatchProof, err error) {
	if _, grouped := RowBatch(row); !grouped {
		if len(row) < PlainRowHeader || row[0] != PlainRow {
			return nil, p, ErrNotCanonical
		}
		return row[PlainRowHeader:], p, nil
	}
	p = BatchProof{N: binary.BigEndian.Uint32(row[9:]), Index: binary.BigEndian.Uint32(row[13:])}
	if p.N < 2 || p.Index >= p.N {
		return nil, p, ErrNotCanonical
	}
	end := BatchRowHeader + 32*PathLength(p.N, p.Index)
	if len(row) < end {
		return nil, p, ErrNotCanonical
	}
	p.Path = row[BatchRowHeader:end]
	return row[end:], p, nil
}

// DecodeStoredEntry decodes a stored entry. The batch is the row of its group, if [RowBatch] names
// one.
func DecodeStoredEntry(row, batch []byte) (s StoredEntry, err error) {
	var core []byte
	if core, s.Proof, err = SplitRow(row); err != nil {
		return StoredEntry{}, err
	}
	first, grouped := RowBatch(row)
	switch {
	case !grouped:
		s.Signature = row[1:PlainRowHeader]
	case len(batch) != dualsig.SignatureSize:
		return StoredEntry{}, ErrNotCanonical
	default:
		s.Signature = batch
	}
	if s.Entry, err = parse(core, false); err != nil {
		return StoredEntry{}, err
	}
	if grouped && (first == 0 || s.Entry.Sequence != first+uint64(s.Proof.Index)) {
		return StoredEntry{}, ErrNotCanonical
	}
	s.Hash = sha3.Sum256(core)
	s.Entry.Hash = hex.EncodeToString(s.Hash[:])
	return s, nil
}

// Verify reports whether key made the signature. The memo may be nil.
func (s StoredEntry) Verify(key *dualsig.PublicKey, m *Memo) bool {
	return s.Proof.verify(key, s.Hash, s.Signature, m)
}

// SignedEntry returns the entry with its signature.
func (s StoredEntry) SignedEntry() *Entry {
	b := s.Signature
	if s.Proof.N > 0 {
		b = s.Proof.encode(b)
	}
	s.Entry.Signature = base64.StdEncoding.EncodeToString(b)
	return s.Entry
}

// The rows that name a tenant's newest entry are not signed. With write access to the database, but
// without the log's key, an attacker could change them so that a replica signs an entry that forks
// the tenant's history. So a process trusts such a row only if it names the tenant's newest entry
// known to this process, or an entry that is signed and not older. This check cannot find rows that
// were removed from the end of a tenant that the process has not met before. A verification finds
// that, including the verification of the running log.

// TenantHead is the newest entry of a tenant.
type TenantHead struct {
	Sequence uint64 // tenant sequence
	Last     Position
}

// IsOf reports whether the entry is the newest one that p names.
func (p TenantHead) IsOf(e *Entry, tenant string) bool {
	return e.TenantID == tenant && e.TenantSequence == p.Sequence && e.Position() == p.Last
}

// ReadTenantHead reads a tenant's newest entry from the tenant's index.
func ReadTenantHead(r store.Reader, tenant string) (p TenantHead, err error) {
	rng := store.Prefix(TenantPrefix(tenant))
	rng.Reverse = true
	var bad error
	err = r.Scan(rng, func(key, value []byte) bool {
		row, err := DecodeIndexRow(value)
		if err != nil || len(key) < 8 {
			bad = ErrDamagedLog
			return false
		}
		p = TenantHead{binary.BigEndian.Uint64(key[len(key)-8:]), row.Position}
		return false
	})
	return p, errors.Join(err, bad)
}

// SequenceOf returns the sequence that an index row or a current row begins with, or 0.
func SequenceOf(indexValue []byte) uint64 {
	if len(indexValue) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(indexValue)
}

// KeyRange returns the range that holds one key.
func KeyRange(key []byte) store.Range { return store.Range{From: key, To: append(bytes.Clone(key), 0)} }

// NoSignature stands in for a signature that is not checked.
var NoSignature = make([]byte, dualsig.SignatureSize)

// ReadHead returns the newest entry, as the store names it.
func ReadHead(r store.Reader) (Position, error) {
	b, err := r.Get(HeadKey)
	if err != nil {
		return Position{}, fmt.Errorf("reading the head of the chain: %w", err)
	}
	return DecodePosition(b)
}

// Row is a key of the store and its value.
type Row struct{ Key, Value []byte }

// readPage returns copies of the first rows of the range, and reports whether there may be more.
func readPage(r store.Reader, rng store.Range) (rows []Row, more bool, err error) {
	size := 0
	err = r.Scan(rng, func(key, value []byte) bool {
		both := make([]byte, 0, len(key)+len(value)+1) // ScanAll appends a byte to the key
		both = append(append(both, value...), key...)
		rows = append(rows, Row{both[len(value):], both[:len(value):len(value)]})
		size += len(value)
		more = len(rows) == PageRows || size >= pageBytes
		return !more
	})
	return rows, more, err
}

// A page bounds the rows that one snapshot reads. So reading a long log makes no long transaction,
// and few large rows are in memory at once.
const (
	PageRows  = 500
	pageBytes = 4 << 20
)

// ScanAll visits every row of the range in order, in snapshots of one page each. For rows that are
// only appended, this equals a read in one snapshot.
func ScanAll(ctx context.Context, s store.Store, rng store.Range, visit func(key, value []byte) error) error {
	for {
		var rows []Row
		more, err := false, error(nil)
		err = s.View(ctx, func(r store.Reader) error {
			rows, more, err = readPage(r, rng)
			return err
		})
		if err != nil {
			return err
		}
		for _, row := range rows { // the snapshot has ended, so visit may be slow
			if err := visit(row.Key, row.Value); err != nil {
				return err
			}
		}
		if !more {
			return nil
		}
		rng.From = append(rows[len(rows)-1].Key, 0)
	}
}
