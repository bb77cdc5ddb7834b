package audit

import (
	"bytes"
	"crypto/sha3"
	"strings"

	"github.com/go-json-experiment/json"
)

// ParseEntry reads one entry in its canonical JSON form, as [Log.Export]
// writes it.
func ParseEntry(line []byte) (*Entry, error) { return parse(line, true) }

// parse reads an entry in canonical form, whole or without hash and signature.
// Anything else, down to a space or another spelling of a character, is an
// error.
func parse(b []byte, whole bool) (*Entry, error) {
	if p := (parser{text: string(b)}); p.entry(whole) {
		return &p.e, nil
	}
	return parseAny(b, whole)
}

// parseWhole is [ParseEntry] that also returns the digest of what the hash
// covers, without encoding it again.
func parseWhole(line []byte) (*Entry, [32]byte, error) {
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
	sum, err := e.digest()
	return e, sum, err
}

// parseAny is parse by reading the JSON and writing it again. It is the
// definition of what the parser below may accept, and takes over where that
// one gives up.
func parseAny(b []byte, whole bool) (*Entry, error) {
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

// parser reads the canonical form in one pass, since only one order of fields
// and one spelling of most strings is canonical. It gives up on an entry with a
// string that is not plain, which is rare, as on one that is wrong.
type parser struct {
	text            string // the strings of the entry are parts of it
	at              int
	bad             bool
	e               Entry
	hash, signature span // of these fields, their commas included
}

type span struct{ from, to int }

// entry reports whether the text is an entry that it could read.
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

// literal steps over s.
func (p *parser) literal(s string) {
	if p.bad || !strings.HasPrefix(p.text[p.at:], s) {
		p.bad = true
		return
	}
	p.at += len(s)
}

// field steps over the literal, which ends with the opening quote, and returns
// the string.
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

// number steps over the literal and returns the number after it.
func (p *parser) number(literal string) (n uint64) {
	p.literal(literal)
	begin := p.at
	for ; !p.bad && p.at < len(p.text) && p.text[p.at]-'0' <= 9; p.at++ {
		n = 10*n + uint64(p.text[p.at]-'0')
		p.bad = n > maxInteger
	}
	digits := p.text[begin:p.at]
	if digits == "" || (digits[0] == '0' && len(digits) > 1) {
		p.bad = true
	}
	return n
}
