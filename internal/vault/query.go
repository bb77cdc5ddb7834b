package vault

import (
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Status says whether a credential can still be unsealed.
type Status string

// These are the statuses.
const (
	Active  Status = "active"
	Expired Status = "expired"
)

// MaxFilterText bounds the text that names are searched for, in characters.
const MaxFilterText = 255

// Filter selects the credentials that match all of its fields. A zero field matches every
// credential.
type Filter struct {
	Text          string // part of the name, in any case (Unicode simple folding)
	Type          string
	Status        Status
	ExpiresBefore time.Time
}

func (f Filter) validate() error {
	if !utf8.ValidString(f.Text) || utf8.RuneCountInString(f.Text) > MaxFilterText {
		return fault.New(fault.Invalid, "q must be at most 255 characters of UTF-8")
	}
	if f.Status != "" && f.Status != Active && f.Status != Expired {
		return fault.New(fault.Invalid, "status must be active or expired")
	}
	return nil
}

// matcher returns a function that reports whether a credential matches the filter at now.
func (f Filter) matcher(now time.Time) func(r *record.Record) bool {
	text := fold(f.Text)
	return func(r *record.Record) bool {
		switch {
		case f.Type != "" && r.Type != f.Type,
			f.Status != "" && (f.Status == Expired) == now.Before(r.ExpiresAt),
			!f.ExpiresBefore.IsZero() && !r.ExpiresAt.Before(f.ExpiresBefore):
			return false
		}
		return text == "" || strings.Contains(fold(r.Name), text)
	}
}

// fold maps texts that differ only in case to the same text.
func fold(s string) string { return strings.Map(foldRune, s) }

// foldRune returns the smallest rune that is equal to r under simple case folding. An ASCII letter
// becomes its upper-case form.
func foldRune(r rune) rune {
	switch {
	case 'a' <= r && r <= 'z':
		return r - 'a' + 'A'
	case r < utf8.RuneSelf:
		return r
	}
	for { // follow the orbit of r until it wraps around
		next := unicode.SimpleFold(r)
		if next <= r {
			return next
		}
		r = next
	}
}

// ListQuery selects a page of the list. The zero value selects the whole list.
type ListQuery struct {
	Filter
	Limit  int
	Cursor string // returned by the previous page, which had the same filter
}

// bounded reports whether a page may end before the list does.
func (q ListQuery) bounded() bool { return q.Limit > 0 || q.Filter != Filter{} }

// readBudget bounds the work of a read over many credentials, however many the tenant has and
// however few match. A record costs one unit, and a read of its owner ownerCost units. The bytes of
// the records, which the store must fetch, have their own bound.
type readBudget struct{ records, bytes int }

const ownerCost = 10

// pageBudget is enough for 100 credentials of any size without a filter.
func pageBudget() readBudget { return readBudget{2_500, 32 << 20} }

func summaryBudget() readBudget { return readBudget{20_000, 160 << 20} }

func (b *readBudget) spend(value []byte) { b.records, b.bytes = b.records-1, b.bytes-len(value) }

func (b *readBudget) spent() bool { return b.records <= 0 || b.bytes <= 0 }

// cursors makes and reads the cursors of lists. A cursor encrypts the id that it continues after,
// because the caller may not be allowed to see that credential. It is bound to the tenant and the
// filter. It consists of a MAC over tenant, filter and id, and of the id XORed with a key stream
// derived from the MAC.
type cursors struct{ mac.Rows }

// Sizes of the two parts of a cursor, in bytes.
const (
	cursorTagSize = 16
	cursorIDSize  = 16
)

// encode returns the cursor for the credentials after an id.
func (c cursors) encode(tenant authz.TenantID, f Filter, after string) string {
	id, _ := authz.IDBytes(idPrefix, after)
	tag := c.tag(tenant, f, id[:])
	return base64.RawURLEncoding.EncodeToString(append(tag, c.xor(tag, id[:])...))
}

// decode is the inverse of encode. ok reports whether the cursor belongs to this list.
func (c cursors) decode(tenant authz.TenantID, f Filter, cursor string) (after string, ok bool) {
	b, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil || len(b) != cursorTagSize+cursorIDSize ||
		base64.RawURLEncoding.EncodeToString(b) != cursor { // rejects another spelling of the same bytes
		return "", false
	}
	id := c.xor(b[:cursorTagSize], b[cursorTagSize:])
	if subtle.ConstantTimeCompare(b[:cursorTagSize], c.tag(tenant, f, id)) != 1 {
		return "", false
	}
	return authz.IDFromBytes(idPrefix, [cursorIDSize]byte(id)), true
}

func (c cursors) tag(tenant authz.TenantID, f Filter, id []byte) []byte {
	var before []byte
	if !f.ExpiresBefore.IsZero() {
		before = binary.BigEndian.AppendUint64(nil, uint64(f.ExpiresBefore.UnixMicro()))
	}
	return c.KeyedHash("latticekeep/list-cursor/v1", []byte(tenant), []byte(f.Text), []byte(f.Type),
		[]byte(f.Status), before, id)[:cursorTagSize]
}

func (c cursors) xor(tag, id []byte) []byte {
	stream := c.KeyedHash("latticekeep/list-cursor-stream/v1", tag)
	out := make([]byte, cursorIDSize)
	subtle.XORBytes(out, id, stream)
	return out
}
