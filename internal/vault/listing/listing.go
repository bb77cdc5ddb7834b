// Package listing reads lists of credentials: which ones a list selects, in which order, and what its
// cursors are.
package listing

import (
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
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

// MaxPrefix bounds what names begin with, in bytes.
const MaxPrefix = 255

// Filter selects the credentials that match all of its fields. A zero field matches every
// credential.
type Filter struct {
	Text          string // part of the name, in any case (Unicode simple folding)
	Type          string
	Status        Status
	ExpiresBefore time.Time
	Prefix        string // what the name begins with, in the form in which policies compare names
	Tag           string // one of its tags, in the form of [authz.NormalizeName]
	Folders       bool   // only what is directly under Prefix; the folders there are in [Rest]
}

// Order is the order of a list.
type Order string

// These are the orders. Every list of somebody with policies is in the order of names.
const (
	ByID   Order = ""
	ByName Order = "name" // in the order of the bytes of the form in which policies compare names

	// Orders of times, which read all that they select for each page.
	ByCreated Order = "created" // newest first
	ByUpdated Order = "updated" // newest version first
	ByExpires Order = "expires" // what expires first, first

	ByLastRead Order = "last_read" // read last first, exact to an hour; what nobody has read comes last
	ByUnread   Order = "unread"    // unused for the longest time first: since the last read, or since it was created
)

// ofTimes reports whether the order is one of times.
func (o Order) ofTimes() bool {
	return slices.Contains([]Order{ByCreated, ByUpdated, ByExpires, ByLastRead, ByUnread}, o)
}

// ofReads reports whether the order is one of the times of reads.
func (o Order) ofReads() bool { return o == ByLastRead || o == ByUnread }

// Query selects a page of a list. The zero value selects the whole list.
type Query struct {
	Filter
	Order  Order
	Limit  int
	Cursor string // returned by the previous page, which had the same filter and order
	Count  bool   // also count all that the list has
}

// Rest says what a page leaves out.
type Rest struct {
	Cursor string // the next page begins there; empty: there is none
	Total  int    // number of credentials in the whole list, if the query asks for it
	Whole  bool   // Total is exact; otherwise the list has more

	// Folders are those of the page, if the query asks for them: what the names of the credentials in a
	// folder begin with, in the form in which policies compare names, with the "/" at the end.
	Folders []string
}

// bounded reports whether a page may end before the list does.
func (q Query) bounded() bool { return q.Limit > 0 || q.Filter != Filter{} }

// Validate returns fault.Invalid for a filter that is out of bounds.
func (f Filter) Validate() error {
	if !utf8.ValidString(f.Text) || utf8.RuneCountInString(f.Text) > MaxFilterText {
		return fault.New(fault.Invalid, "q must be at most 255 characters of UTF-8")
	}
	if !utf8.ValidString(f.Prefix) || len(f.Prefix) > MaxPrefix {
		return fault.New(fault.Invalid, "prefix must be at most 255 bytes of UTF-8")
	}
	if f.Tag != "" {
		if err := details.CheckTag(f.Tag); err != nil {
			return fault.New(fault.Invalid, "tag: "+err.Error())
		}
	}
	if f.Status != "" && f.Status != Active && f.Status != Expired {
		return fault.New(fault.Invalid, "status must be active or expired")
	}
	return nil
}

// Matcher returns a function that reports whether a credential matches the filter at now, but for the tag,
// which its record does not have.
func (f Filter) Matcher(now time.Time) func(r *record.Record) bool {
	text, prefix := fold(f.Text), authz.NormalizeName(f.Prefix)
	return func(r *record.Record) bool {
		switch {
		case f.Type != "" && r.Type != f.Type,
			f.Status != "" && (f.Status == Expired) == now.Before(r.Until()),
			!f.ExpiresBefore.IsZero() && (r.NeverExpires() || !r.ExpiresAt.Before(f.ExpiresBefore)),
			prefix != "" && !strings.HasPrefix(authz.NormalizeName(r.Name), prefix):
			return false
		}
		return text == "" || strings.Contains(fold(r.Name), text)
	}
}

// folder returns the folder under the filter's prefix that a name is in, or "" for none, and for one that is
// longer than rows of the index tell apart.
func (f Filter) folder(name string) string {
	prefix, name := authz.NormalizeName(f.Prefix), authz.NormalizeName(name)
	end := strings.IndexByte(name[min(len(prefix), len(name)):], '/')
	if !f.Folders || end < 0 || !pathindex.HoldsFolder(name[:len(prefix)+end+1]) {
		return ""
	}
	return name[:len(prefix)+end+1]
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
