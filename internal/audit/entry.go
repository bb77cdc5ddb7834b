package audit

import (
	"bytes"
	"crypto/sha3"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/latticekeep/latticekeep/internal/dualsig"
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
	Signature          string            `json:"signature"` // base64 ML-DSA-65 over the 32 bytes of Hash
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

// verify reports whether the signature is key's over the hash, in the one
// spelling that base64 has for it.
func (e *Entry) verify(key *dualsig.PublicKey) bool {
	hash, err := hex.DecodeString(e.Hash)
	if err != nil {
		return false
	}
	signature, ok := decodeBase64(e.Signature)
	return ok && key.Verify(signingContext, hash, signature)
}

// decodeBase64 accepts the one standard spelling only: Go's decoder would skip
// line breaks.
func decodeBase64(s string) ([]byte, bool) {
	b, err := base64.StdEncoding.DecodeString(s)
	return b, err == nil && base64.StdEncoding.EncodeToString(b) == s
}

// canonical appends the RFC 8785 form of the entry: whole, or only what the
// hash covers. Every string must be valid UTF-8.
func (e *Entry) canonical(dst []byte, whole bool) ([]byte, error) {
	w := writer{dst: dst}
	w.object(func() {
		w.key("actor")
		w.object(func() { w.field("id", e.Actor.ID); w.field("type", e.Actor.Type) })
		w.key("attributes")
		w.object(func() {
			for _, k := range slices.Sorted(maps.Keys(e.Attributes)) {
				w.field(k, e.Attributes[k])
			}
		})
		w.field("event_type", string(e.EventType))
		if whole {
			w.field("hash", e.Hash)
		}
		w.field("key_id", e.KeyID)
		w.field("outcome", string(e.Outcome))
		w.field("previous_hash", e.PreviousHash)
		w.field("request_id", e.RequestID)
		w.key("resource")
		w.object(func() { w.field("id", e.Resource.ID); w.field("type", e.Resource.Type) })
		w.field("salt", e.Salt)
		w.number("sequence", e.Sequence)
		if whole {
			w.field("signature", e.Signature)
		}
		w.field("source_ip", e.SourceIP)
		w.field("tenant_id", e.TenantID)
		w.field("tenant_previous_hash", e.TenantPreviousHash)
		w.number("tenant_sequence", e.TenantSequence)
		w.field("timestamp", e.Timestamp)
	})
	return w.dst, w.err
}

// writer appends canonical JSON. Callers name fields in byte order.
type writer struct {
	dst   []byte
	comma bool
	err   error
}

func (w *writer) object(fields func()) {
	w.dst = append(w.dst, '{')
	w.comma = false
	fields()
	w.dst = append(w.dst, '}')
	w.comma = true
}

func (w *writer) quote(s string) {
	var err error
	if w.dst, err = jsontext.AppendQuote(w.dst, s); err != nil && w.err == nil {
		w.err = fmt.Errorf("encoding an audit entry: %w", err)
	}
}

func (w *writer) key(name string) {
	if w.comma {
		w.dst = append(w.dst, ',')
	}
	w.quote(name)
	w.dst = append(w.dst, ':')
	w.comma = false
}

func (w *writer) field(name, value string) {
	w.key(name)
	w.quote(value)
	w.comma = true
}

func (w *writer) number(name string, n uint64) {
	w.key(name)
	w.dst = strconv.AppendUint(w.dst, n, 10)
	w.comma = true
}

// maxInteger is the largest integer that every JSON reader keeps exact.
const maxInteger = 1<<53 - 1

var errNotCanonical = errors.New("the bytes are not the canonical form of an entry")

// parse reads an entry in canonical form, whole or without hash and signature.
// Anything else, down to a space or another spelling of a character, is an
// error.
func parse(b []byte, whole bool) (*Entry, error) {
	var e Entry
	if err := json.Unmarshal(b, &e, json.RejectUnknownMembers(true)); err != nil {
		// The cause would quote the input, and an entry of the log belongs to
		// whoever may read it, not to an error message.
		return nil, errNotCanonical
	}
	again, err := e.canonical(make([]byte, 0, len(b)), whole)
	if err != nil || !bytes.Equal(again, b) || e.Sequence > maxInteger || e.TenantSequence > maxInteger {
		return nil, errNotCanonical
	}
	return &e, nil
}

// ParseEntry reads one entry in its canonical JSON form, as [Log.Export]
// writes it.
func ParseEntry(line []byte) (*Entry, error) { return parse(line, true) }

// JSON returns the canonical JSON of the whole entry.
func (e *Entry) JSON() ([]byte, error) { return e.canonical(nil, true) }

// digest returns the SHA3-256 of what the hash covers.
func (e *Entry) digest() ([32]byte, error) {
	core, err := e.canonical(nil, false)
	return sha3.Sum256(core), err
}

// A stored entry is a version byte, the raw signature and the canonical bytes
// that the hash covers: the hash is recomputed at each read, never believed.
const entryVersion = 1

func encodeRow(core, signature []byte) []byte {
	row := make([]byte, 0, 1+len(signature)+len(core))
	row = append(row, entryVersion)
	row = append(row, signature...)
	return append(row, core...)
}

func decodeRow(row []byte) (*Entry, error) {
	if len(row) < 1+dualsig.SignatureSize || row[0] != entryVersion {
		return nil, errNotCanonical
	}
	signature, core := row[1:1+dualsig.SignatureSize], row[1+dualsig.SignatureSize:]
	e, err := parse(core, false)
	if err != nil {
		return nil, err
	}
	hash := sha3.Sum256(core)
	e.Hash = hex.EncodeToString(hash[:])
	e.Signature = base64.StdEncoding.EncodeToString(signature)
	return e, nil
}
