package audit

import (
	"crypto/sha3"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// signingContext separates entries from everything else ML-DSA signs here.
const signingContext = "latticekeep/audit/v1"

// timeFormat is RFC 3339 in UTC with microseconds, always all six digits.
const timeFormat = "2006-01-02T15:04:05.000000Z"

// zeroHash stands for the predecessor of a first entry.
var zeroHash = strings.Repeat("0", 64)

// Entry is one link of the chain. Its JSON is RFC 8785 canonical: the field
// order below is the byte order of the names.
type Entry struct {
	Actor              Actor             `json:"actor"`
	Attributes         map[string]string `json:"attributes"`
	EventType          EventType         `json:"event_type"`
	Hash               string            `json:"hash"` // lower-case hex SHA3-256 of the entry without hash and signature
	KeyID              string            `json:"key_id"`
	Outcome            Outcome           `json:"outcome"`
	PreviousHash       string            `json:"previous_hash"`
	RequestID          string            `json:"request_id"`
	Resource           Resource          `json:"resource"`
	Salt               string            `json:"salt"` // 16 random bytes, base64
	Sequence           uint64            `json:"sequence"`
	Signature          string            `json:"signature"` // base64: ML-DSA-65 over the 32 bytes of Hash, or over a group that it proves to be in
	SourceIP           string            `json:"source_ip"`
	TenantID           string            `json:"tenant_id"`
	TenantPreviousHash string            `json:"tenant_previous_hash"`
	TenantSequence     uint64            `json:"tenant_sequence"`
	Timestamp          string            `json:"timestamp"`
}

// Time returns the entry's timestamp, and the zero time when it is malformed.
func (e *Entry) Time() time.Time {
	t, _ := time.Parse(timeFormat, e.Timestamp)
	return t
}

// link returns the entry's position. Its hash is the zero one when malformed.
func (e *Entry) link() link {
	k := link{sequence: e.Sequence, micros: e.Time().UnixMicro()}
	if b, err := hex.DecodeString(e.Hash); err == nil && len(b) == len(k.hash) {
		k.hash = [32]byte(b)
	}
	return k
}

// canonical appends the RFC 8785 form of the entry: whole, or only what the
// hash covers. Every string must be valid UTF-8.
func (e *Entry) canonical(dst []byte, whole bool) ([]byte, error) {
	w := writer{dst: dst}
	w.field(`{"actor":{"id":`, e.Actor.ID)
	w.field(`,"type":`, e.Actor.Type)
	w.attributes(e.Attributes)
	w.field(`,"event_type":`, string(e.EventType))
	if whole {
		w.field(`,"hash":`, e.Hash)
	}
	w.field(`,"key_id":`, e.KeyID)
	w.field(`,"outcome":`, string(e.Outcome))
	w.field(`,"previous_hash":`, e.PreviousHash)
	w.field(`,"request_id":`, e.RequestID)
	w.field(`,"resource":{"id":`, e.Resource.ID)
	w.field(`,"type":`, e.Resource.Type)
	w.field(`},"salt":`, e.Salt)
	w.number(`,"sequence":`, e.Sequence)
	if whole {
		w.field(`,"signature":`, e.Signature)
	}
	w.field(`,"source_ip":`, e.SourceIP)
	w.field(`,"tenant_id":`, e.TenantID)
	w.field(`,"tenant_previous_hash":`, e.TenantPreviousHash)
	w.number(`,"tenant_sequence":`, e.TenantSequence)
	w.field(`,"timestamp":`, e.Timestamp)
	return append(w.dst, '}'), w.err
}

// writer appends canonical JSON; its methods take what stands before a value.
type writer struct {
	dst []byte
	err error
}

func (w *writer) attributes(attributes map[string]string) {
	names := slices.AppendSeq(make([]string, 0, 16), maps.Keys(attributes))
	slices.Sort(names)
	w.dst = append(w.dst, `},"attributes":{`...)
	for i, name := range names {
		before := ","
		if i == 0 {
			before = ""
		}
		w.field(before, name)
		w.field(":", attributes[name])
	}
	w.dst = append(w.dst, '}')
}

func (w *writer) field(before, value string) {
	w.dst = append(w.dst, before...)
	if plain(value) == len(value) {
		w.dst = append(w.dst, '"')
		w.dst = append(w.dst, value...)
		w.dst = append(w.dst, '"')
		return
	}
	var err error
	if w.dst, err = jsontext.AppendQuote(w.dst, value); err != nil && w.err == nil {
		w.err = fmt.Errorf("encoding an audit entry: %w", err)
	}
}

func (w *writer) number(before string, n uint64) {
	w.dst = append(w.dst, before...)
	w.dst = strconv.AppendUint(w.dst, n, 10)
}

// JSON returns the canonical JSON of the whole entry.
func (e *Entry) JSON() ([]byte, error) { return e.canonical(nil, true) }

// digest returns the SHA3-256 of what the hash covers.
func (e *Entry) digest() ([32]byte, error) {
	core, err := e.canonical(nil, false)
	return sha3.Sum256(core), err
}

// A stored entry is a version byte, what belongs to its signature, and the
// canonical bytes that the hash covers: the hash is recomputed at each read,
// never believed. In version 1 the raw signature stands there. In version 2 the
// entry was signed in a group: u64 first sequence of the group, u32 number of
// its entries, u32 index in it, and the path of the index. The signature of the
// group is a row of its own, under [batchKey].
const (
	plainRow = 1
	batchRow = 2

	plainRowHeader = 1 + dualsig.SignatureSize
	batchRowHeader = 1 + 8 + 4 + 4 // and the path
)

func encodeRow(core, signature []byte) []byte {
	row := make([]byte, 0, 1+len(signature)+len(core))
	row = append(row, plainRow)
	row = append(row, signature...)
	return append(row, core...)
}

// beginBatchRow appends what comes before the core.
func beginBatchRow(dst []byte, first uint64, index uint32, t batchTree) []byte {
	dst = append(dst, batchRow)
	dst = binary.BigEndian.AppendUint64(dst, first)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(t[0])))
	dst = binary.BigEndian.AppendUint32(dst, index)
	return t.appendPath(dst, int(index))
}

// rowBatch returns the first sequence of the group that an entry was signed in,
// and false for an entry with a signature of its own.
func rowBatch(row []byte) (first uint64, ok bool) {
	if len(row) < batchRowHeader || row[0] != batchRow {
		return 0, false
	}
	return binary.BigEndian.Uint64(row[1:]), true
}

// stored is an entry as it lies in the store. It refers to the rows it was
// decoded from.
type stored struct {
	entry     *Entry // without Signature
	hash      [32]byte
	proof     batchProof
	signature []byte
}

// splitRow returns what the hash of a stored entry covers, and what shows its
// place in the group that it was signed in: of a row of version 1 the zero proof.
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

// decodeStored reads a stored entry; batch is the row of its group, if
// [rowBatch] names one.
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

// verify reports whether the signature is key's. The memo may be nil.
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

// decodeRow reads a stored entry; batch is the row of its group, if [rowBatch]
// names one.
func decodeRow(row, batch []byte) (*Entry, error) {
	s, err := decodeStored(row, batch)
	if err != nil {
		return nil, err
	}
	return s.whole(), nil
}

// errNoEntry is a [fault.NotFound].
var errNoEntry = fault.New(fault.NotFound, "the log holds no entry with this sequence")

// readEntry returns the whole entry, unverified. Errors: errNoEntry, or
// fault.Internal when what is there is not that entry.
func readEntry(r store.Reader, sequence uint64) (*Entry, error) {
	e, err := storedEntry(r, sequence)
	if err != nil {
		return nil, err
	}
	return e.whole(), nil
}
