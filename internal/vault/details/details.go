// Package details keeps what people say of a credential: a description, whom to ask about it, and tags by
// which it is found. They are no part of its versions and change apart from the values. Like names, they
// stand in clear in the store, and no entry of the log holds them.
package details

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
)

// Bounds, in characters except for the number of tags.
const (
	MaxDescription = 1000
	MaxContact     = 255
	MaxTags        = 20
	MaxTag         = 64
)

// Details are those of one credential. It is also what its row holds; without any there is no row.
type Details struct {
	Description string   `json:"description,omitempty"`
	Contact     string   `json:"contact,omitempty"`
	Tags        []string `json:"tags,omitempty"` // sorted, each once
}

func (d *Details) isEmpty() bool { return d.Description == "" && d.Contact == "" && len(d.Tags) == 0 }

// Change says what is to be other than it is. A nil field stays as it is, and an empty one is taken away.
type Change struct {
	Description, Contact *string
	Tags                 *[]string
}

// Validate returns fault.Invalid for what no credential can have.
func (c Change) Validate() error {
	if d := c.Description; d != nil && !isText(*d, MaxDescription, "\n\t") {
		return fault.New(fault.Invalid, fmt.Sprintf("description must be at most %d characters of UTF-8 without control characters but line breaks and tabs", MaxDescription))
	}
	if d := c.Contact; d != nil && (!isText(*d, MaxContact, "") || strings.ContainsFunc(*d, endsLine)) {
		return fault.New(fault.Invalid, fmt.Sprintf("contact must be at most %d characters of UTF-8 in one line", MaxContact))
	}
	if c.Tags == nil {
		return nil
	}
	if len(*c.Tags) > MaxTags {
		return fault.New(fault.Invalid, fmt.Sprintf("tags must be at most %d", MaxTags))
	}
	for _, tag := range *c.Tags {
		if err := CheckTag(tag); err != nil {
			return fault.New(fault.Invalid, "tags: "+err.Error())
		}
	}
	return nil
}

// CheckTag returns fault.Invalid for what is no tag.
func CheckTag(tag string) error {
	bad := func(r rune) bool { return r == ',' || unicode.IsSpace(r) || !unicode.IsGraphic(r) }
	if tag == "" || !isText(tag, MaxTag, "") || strings.ContainsFunc(tag, bad) {
		return fault.New(fault.Invalid, fmt.Sprintf("a tag must have 1 to %d visible characters of UTF-8 without white space and commas", MaxTag))
	}
	return nil
}

// endsLine reports whether a character parts lines or paragraphs and is no control character.
func endsLine(r rune) bool { return unicode.In(r, unicode.Zl, unicode.Zp) }

// isText reports whether text has at most so many characters, and no control characters but some.
func isText(text string, most int, but string) bool {
	return utf8.ValidString(text) && utf8.RuneCountInString(text) <= most &&
		!strings.ContainsFunc(text, func(r rune) bool { return unicode.IsControl(r) && !strings.ContainsRune(but, r) })
}

// of returns details with the change, nil for none.
func (c Change) of(before *Details) *Details {
	var d Details
	if before != nil {
		d = *before
	}
	if c.Description != nil {
		d.Description = *c.Description
	}
	if c.Contact != nil {
		d.Contact = *c.Contact
	}
	if c.Tags != nil {
		d.Tags = nil
		for _, tag := range *c.Tags {
			d.Tags = append(d.Tags, authz.NormalizeName(tag))
		}
		slices.Sort(d.Tags)
		d.Tags = slices.Compact(d.Tags)
	}
	if d.isEmpty() {
		return nil
	}
	return &d
}

// Has reports whether there is a tag, in the form of [authz.NormalizeName].
func (d *Details) Has(tag string) bool { return d != nil && slices.Contains(d.Tags, tag) }

// Family begins the keys of the rows.
const Family = "details/"

// Key returns the key of the row of a credential.
func Key(tenant authz.TenantID, id string) []byte {
	return []byte(Family + string(tenant) + "/" + id)
}

// Rows reads and writes the rows. It is safe for concurrent use.
type Rows struct{ mac.Rows }

// Of returns the details of a credential, nil if it has none. Error: fault.Internal for a damaged row.
func (r Rows) Of(rd store.Reader, tenant authz.TenantID, id string) (*Details, error) {
	return mac.Get[Details](r.Rows, rd, Key(tenant, id))
}

// few is how many rows of a tenant a list reads at once. Those of more it reads one by one.
const few = 200

// OfAll returns how a list finds the details of its credentials: with one scan in a tenant that has few of
// them, so that it takes no longer where nobody uses them.
func (r Rows) OfAll(rd store.Reader, tenant authz.TenantID) func(id string) (*Details, error) {
	prefix := Key(tenant, "")
	var rows map[string][]byte
	read := sync.OnceValue(func() error {
		rows = make(map[string][]byte)
		return rd.Scan(store.Prefix(prefix), func(key, stored []byte) bool {
			rows[string(key[len(prefix):])] = bytes.Clone(stored)
			return len(rows) <= few
		})
	})
	return func(id string) (*Details, error) {
		if err := read(); err != nil || len(rows) > few { // also for a row that somebody changed
			return r.Of(rd, tenant, id)
		}
		stored, ok := rows[id]
		if !ok {
			return nil, nil
		}
		return mac.Decode[Details](r.Rows, Key(tenant, id), stored)
	}
}

// Change changes the details of a credential, and returns them, nil for none. The caller appends an entry
// with [Rows.Attributes] in the same transaction.
func (r Rows) Change(tx store.Tx, tenant authz.TenantID, id string, c Change) (*Details, error) {
	before, err := r.Of(tx, tenant, id)
	if err != nil {
		return nil, err
	}
	if err := format.Raise(tx, format.Details, format.Details); err != nil {
		return nil, err
	}
	d := c.of(before)
	if d == nil {
		return nil, tx.Delete(Key(tenant, id))
	}
	return d, mac.Put(r.Rows, tx, Key(tenant, id), *d)
}

// Attributes returns what an entry says of details, in which no text stands.
func (r Rows) Attributes(tenant authz.TenantID, id string, d *Details) map[string]string {
	if d == nil {
		d = &Details{}
	}
	fields := [][]byte{[]byte(tenant), []byte(id), []byte(d.Description), []byte(d.Contact)}
	for _, tag := range d.Tags {
		fields = append(fields, []byte(tag))
	}
	return map[string]string{
		"tags":           strconv.Itoa(len(d.Tags)),
		"details_digest": r.KeyedHex("latticekeep/credential-details/v1", fields...)[:32],
	}
}
