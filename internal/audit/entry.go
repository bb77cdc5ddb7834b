package audit

import (
	"bytes"
	"crypto/sha3"
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

	"github.com/latticekeep/latticekeep/internal/authz"
)

// SigningContext separates signatures of entries from all other ML-DSA signatures of the project.
const SigningContext = "latticekeep/audit/v1"

// TimeFormat is RFC 3339 in UTC with microseconds, always with six digits.
const TimeFormat = "2006-01-02T15:04:05.000000Z"

// Entry is one link of the chain. Its JSON is canonical by RFC 8785: the fields are declared in the
// byte order of their names.
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
	Signature          string            `json:"signature"` // base64: ML-DSA-65 over the 32 bytes of Hash, or over a group with a proof of membership
	SourceIP           string            `json:"source_ip"`
	TenantID           string            `json:"tenant_id"`
	TenantPreviousHash string            `json:"tenant_previous_hash"`
	TenantSequence     uint64            `json:"tenant_sequence"`
	Timestamp          string            `json:"timestamp"`
}

// Time returns the entry's timestamp, or the zero time if it is malformed.
func (e *Entry) Time() time.Time {
	t, _ := time.Parse(TimeFormat, e.Timestamp)
	return t
}

// Position returns the entry's position. The hash is zero if the entry's hash is malformed.
func (e *Entry) Position() Position {
	k := Position{Sequence: e.Sequence, Micros: e.Time().UnixMicro()}
	if b, err := hex.DecodeString(e.Hash); err == nil && len(b) == len(k.Hash) {
		k.Hash = [32]byte(b)
	}
	return k
}

// Canonical appends the RFC 8785 form of the entry. Without whole, it omits hash and signature,
// which the hash does not cover. Every string must be valid UTF-8.
func (e *Entry) Canonical(dst []byte, whole bool) ([]byte, error) {
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

// writer appends canonical JSON. Its methods take the text before a value and the value.
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
func (e *Entry) JSON() ([]byte, error) { return e.Canonical(nil, true) }

// Digest returns the SHA3-256 of the bytes that the hash covers.
func (e *Entry) Digest() ([32]byte, error) {
	core, err := e.Canonical(nil, false)
	return sha3.Sum256(core), err
}

// plain returns the length of the longest prefix of s whose bytes are printable ASCII and need no
// escape in a JSON string.
func plain(s string) int {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return i
		}
	}
	return len(s)
}

// ErrNotCanonical means that bytes have the fields of an entry in another spelling (RFC 8785).
var ErrNotCanonical = errors.New("the bytes are not the canonical form of an entry")

// Add sets an attribute on a copy of the attributes, because the caller owns the event's map.
func (e *Entry) Add(attribute, value string) {
	if e.Attributes = maps.Clone(e.Attributes); e.Attributes == nil {
		e.Attributes = make(map[string]string)
	}
	e.Attributes[attribute] = value
}

// Begins reports whether the entry begins an epoch.
func (e *Entry) Begins() bool {
	return e.EventType == RollbackAccepted && e.Outcome == Success && e.TenantID == string(authz.SystemTenant)
}

// Archives reports whether the entry records an archived segment.
func (e *Entry) Archives() bool {
	return e.EventType == LogArchived && e.Outcome == Success && e.TenantID == string(authz.SystemTenant)
}

// Number returns a numeric attribute, or 0 if the attribute is no number.
func (e *Entry) Number(attribute string) uint64 {
	n, _ := strconv.ParseUint(e.Attributes[attribute], 10, 64) // 0 is not a valid value of any of these
	return n
}

// Decimal parses a number that has its only spelling.
func Decimal(s string) (uint64, bool) {
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil && n <= MaxInteger && strconv.FormatUint(n, 10) == s
}

// ParseEntry parses one entry in its canonical JSON form, as [reader.Reader.Export] writes it.
func ParseEntry(line []byte) (*Entry, error) { return parse(line, true) }

// parse parses an entry in canonical form, whole or without hash and signature. Anything else is an
// error, including an extra space or another spelling of a character.
func parse(b []byte, whole bool) (*Entry, error) {
	if p := (parser{text: string(b)}); p.entry(whole) {
		return &p.e, nil
	}
	return parseAny(b, whole)
}

// ParseWithDigest is [ParseEntry], and also returns the digest of the bytes that the hash covers,
// without encoding them again.
func ParseWithDigest(line []byte) (*Entry, [32]byte, error) {
	if p := (parser{text: string(line)}); p.entry(true) {
		h := sha3.New256()
		_, _ = h.Write(line[:p.hash.from]) // never fails
		_, _ = h.Write(line[p.hash.to:p.signature.from])
		_, _ = h.Write(line[p.signature.to:])
		var sum [32]byte
		h.Sum(sum[:0])
		return &p.e, sum, nil
	}
	e, err := parseAny(line, true)
	if err != nil {
		return nil, [32]byte{}, err
	}
	sum, err := e.Digest()
	return e, sum, err
}

// parseAny parses the JSON, encodes it again and compares the bytes. It defines what the parser
// below may accept, and handles the entries that the parser gives up on.
func parseAny(b []byte, whole bool) (*Entry, error) {
	var e Entry
	if err := json.Unmarshal(b, &e, json.RejectUnknownMembers(true)); err != nil {
		// The cause would quote the input. The content of an entry must not appear in error
		// messages, because only authorized principals may read it.
		return nil, ErrNotCanonical
	}
	again, err := e.Canonical(make([]byte, 0, len(b)), whole)
	if err != nil || !bytes.Equal(again, b) || e.Sequence > MaxInteger || e.TenantSequence > MaxInteger {
		return nil, ErrNotCanonical
	}
	return &e, nil
}

// parser parses the canonical form in one pass, which is possible because only one order of fields
// and one spelling of most strings is canonical. It gives up on malformed entries, and on the rare
// ones with a string that is not plain.
type parser struct {
	text            string // the strings of the entry share this memory
	at              int
	bad             bool
	e               Entry
	hash, signature span // extents of these fields, including their commas
}

type span struct{ from, to int }

// entry reports whether it could parse the text as an entry.
func (p *parser) entry(whole bool) bool {
	e := &p.e
	e.Actor.ID = p.field(`{"actor":{"id":"`)
	e.Actor.Type = p.field(`,"type":"`)
	p.attributes()
	e.EventType = EventType(p.field(`,"event_type":"`))
	if whole {
		p.hash.from = p.at
		e.Hash = p.field(`,"hash":"`)
		p.hash.to = p.at
	}
	e.KeyID = p.field(`,"key_id":"`)
	e.Outcome = Outcome(p.field(`,"outcome":"`))
	e.PreviousHash = p.field(`,"previous_hash":"`)
	e.RequestID = p.field(`,"request_id":"`)
	e.Resource.ID = p.field(`,"resource":{"id":"`)
	e.Resource.Type = p.field(`,"type":"`)
	e.Salt = p.field(`},"salt":"`)
	e.Sequence = p.number(`,"sequence":`)
	if whole {
		p.signature.from = p.at
		e.Signature = p.field(`,"signature":"`)
		p.signature.to = p.at
	}
	e.SourceIP = p.field(`,"source_ip":"`)
	e.TenantID = p.field(`,"tenant_id":"`)
	e.TenantPreviousHash = p.field(`,"tenant_previous_hash":"`)
	e.TenantSequence = p.number(`,"tenant_sequence":`)
	e.Timestamp = p.field(`,"timestamp":"`)
	p.literal("}")
	return !p.bad && p.at == len(p.text)
}

func (p *parser) attributes() {
	p.literal(`},"attributes":{`)
	p.e.Attributes = make(map[string]string)
	for last, first := "", true; !p.bad && !strings.HasPrefix(p.text[p.at:], "}"); first = false {
		begin := `,"`
		if first {
			begin = `"`
		}
		name := p.field(begin)
		if !first && name <= last {
			p.bad = true
		}
		p.e.Attributes[name] = p.field(`:"`)
		last = name
	}
	p.literal("}")
}

// literal skips s.
func (p *parser) literal(s string) {
	if p.bad || !strings.HasPrefix(p.text[p.at:], s) {
		p.bad = true
		return
	}
	p.at += len(s)
}

// field skips the literal, which ends with the opening quote, and returns the string after it.
func (p *parser) field(literal string) string {
	p.literal(literal)
	if p.bad {
		return ""
	}
	n := plain(p.text[p.at:])
	if p.at+n == len(p.text) || p.text[p.at+n] != '"' {
		p.bad = true
		return ""
	}
	s := p.text[p.at : p.at+n]
	p.at += n + 1
	return s
}

// number skips the literal and returns the number after it.
func (p *parser) number(literal string) (n uint64) {
	p.literal(literal)
	begin := p.at
	for ; !p.bad && p.at < len(p.text) && p.text[p.at]-'0' <= 9; p.at++ {
		n = 10*n + uint64(p.text[p.at]-'0')
		p.bad = n > MaxInteger
	}
	digits := p.text[begin:p.at]
	if digits == "" || (digits[0] == '0' && len(digits) > 1) {
		p.bad = true
	}
	return n
}
