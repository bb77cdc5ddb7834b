package audit

import (
	"bytes"
	"crypto/sha3"
	"strings"

	"github.com/go-json-experiment/json"
)

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
