package vault

import (
	"cmp"
	"context"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Status is whether a credential can still be unsealed.
type Status string

// The statuses.
const (
	Active  Status = "active"
	Expired Status = "expired"
)

// MaxFilterText bounds the text that names are searched for, in characters.
const MaxFilterText = 255

// Filter says which credentials are meant: those that have all of it. Zero
// fields have every credential.
type Filter struct {
	Text          string // in the name, whatever the case (Unicode simple folding)
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

// matcher returns a function that tells the credentials that are meant.
func (f Filter) matcher(now time.Time) func(r *record) bool {
	text := fold(f.Text)
	return func(r *record) bool {
		switch {
		case f.Type != "" && r.kind != f.Type,
			f.Status != "" && (f.Status == Expired) == now.Before(r.expiresAt),
			!f.ExpiresBefore.IsZero() && !r.expiresAt.Before(f.ExpiresBefore):
			return false
		}
		return text == "" || strings.Contains(fold(r.name), text)
	}
}

// fold returns the same text for all texts that differ only in case.
func fold(s string) string { return strings.Map(least, s) }

// least returns the least of the runes that simple case folding takes for r.
func least(r rune) rune {
	switch {
	case 'a' <= r && r <= 'z':
		return r - 'a' + 'A'
	case r < utf8.RuneSelf:
		return r
	}
	for { // through the orbit until it begins again
		next := unicode.SimpleFold(r)
		if next <= r {
			return next
		}
		r = next
	}
}

// A read that looks for credentials stops after a bounded effort, however many
// the tenant has and however few are found: a record that is looked at is one,
// and finding out what owns it costs as much as several. Records have a size
// of their own beside that, which the store has to fetch.
type effort struct{ records, bytes int }

const costOfOwner = 10

// ofPage is enough for 100 credentials, however large, when nothing is searched for.
func ofPage() effort { return effort{2_500, 32 << 20} }

func ofSummary() effort { return effort{20_000, 160 << 20} }

func (e *effort) look(value []byte) { e.records, e.bytes = e.records-1, e.bytes-len(value) }

func (e *effort) spent() bool { return e.records <= 0 || e.bytes <= 0 }

// ListQuery selects a page of the list; zero means all of it.
type ListQuery struct {
	Filter
	Limit  int
	Cursor string // from the page before, which had the same filter
}

// bounded reports whether a page may end before the list does.
func (q ListQuery) bounded() bool { return q.Limit > 0 || q.Filter != Filter{} }

// List returns the credentials of p's tenant in the order of their ids,
// expired ones included and marked, and the cursor of the next page, if any; to
// a ServiceAccount without what objects of other namespaces own. With a limit or a
// filter a page may hold fewer credentials than there are left, or none, and has
// a cursor to go on with. Damaged records are left out and counted in the entry.
// Errors: fault.Forbidden, fault.Invalid for a filter that is none and the cursor
// of another list, fault.Unavailable.
func (v *Vault) List(ctx context.Context, p authz.Principal, q ListQuery) (list []Credential, next string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return nil, "", err
	}
	if err := q.validate(); err != nil {
		return nil, "", err
	}
	after := ""
	if q.Cursor != "" {
		var ok bool
		if after, ok = v.position(p.Tenant, q.Filter, q.Cursor); !ok {
			return nil, "", fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
		}
	}
	now := v.now()
	list = []Credential{}
	damaged := 0
	err = v.store.View(ctx, func(rd store.Reader) error {
		found := &page{vault: v, rd: rd, p: p, now: now, left: v.forPage, meant: q.matcher(now)}
		err := found.read(q, after)
		list, damaged = append(list, found.list...), found.damaged
		if found.more {
			next = v.cursor(p.Tenant, q.Filter, found.last)
		}
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("listing credentials: %w", err)
	}
	if err := v.guard.Record(ctx, listed(p, len(list), damaged)); err != nil {
		return nil, "", err
	}
	return list, next, nil
}

// listed is the entry of a look at many credentials.
func listed(p authz.Principal, count, damaged int) audit.Event {
	e := audit.Event{
		Type: audit.CredentialListed, Outcome: audit.Success, Principal: p,
		Resource:   audit.Resource{Type: audit.CredentialResource},
		Attributes: map[string]string{"count": strconv.Itoa(count)},
	}
	if damaged > 0 {
		e.Outcome = audit.Failure
		e.Attributes[audit.AttributeReason], e.Attributes["damaged"] = reasonIntegrity, strconv.Itoa(damaged)
	}
	return e
}

// page is a page of the list as it is read.
type page struct {
	vault *Vault
	rd    store.Reader
	p     authz.Principal
	now   time.Time
	meant func(r *record) bool

	left    effort
	last    string // id of the credential that was looked at last
	list    []Credential
	damaged int
	more    bool // there are credentials after last
}

// read looks at the credentials behind an id, those of all ids if it is empty.
func (f *page) read(q ListQuery, after string) error {
	rng := store.Prefix(credentialPrefix(f.p.Tenant))
	if after != "" {
		rng.From = store.Prefix(versionsPrefix(f.p.Tenant, after)).To
	}
	prefix := len(credentialPrefix(f.p.Tenant))
	var bad error
	err := f.rd.Scan(rng, func(key, value []byte) bool {
		full := q.Limit > 0 && len(f.list) == q.Limit
		if f.more = full || q.bounded() && f.left.spent() && f.last != ""; f.more {
			return false
		}
		f.left.look(value)
		if id, _, _ := strings.Cut(string(key[prefix:]), "/"); authz.ValidID(idPrefix, id) {
			f.last = id // also of a record that is damaged
		}
		bad = f.look(key, value)
		return bad == nil
	})
	return errors.Join(err, bad)
}

// look takes a credential into the list if it is meant and there for who asks.
func (f *page) look(key, value []byte) error {
	r, err := viewRecordAt(key, value)
	if err != nil {
		f.damaged++ // one damaged record does not hide the others
		return nil
	}
	// Where a page ends, and how long it takes, must not tell a ServiceAccount whether a
	// credential that is hidden from it is one that it asked for.
	if f.p.Kind != authz.ServiceAccount && !f.meant(r) {
		return nil
	}
	f.left.records -= costOfOwner
	by, err := f.vault.ownership(f.rd, f.p.Tenant, r.id)
	if err != nil || by.hides(f.p) || !f.meant(r) {
		return err
	}
	f.list = append(f.list, r.credential(f.now, by.owned))
	return nil
}

// cursorTag and an id are the bytes of a cursor.
const cursorTag, cursorID = 16, 16

// cursor returns the cursor of what comes after an id. It is encrypted, since that
// may be the id of a credential that is not there for who asks, and is bound to
// the tenant and the filter: a MAC over all of it, which is also what the key
// stream for the id is made of.
func (v *Vault) cursor(tenant authz.TenantID, f Filter, after string) string {
	id, _ := authz.IDBytes(idPrefix, after)
	tag := v.cursorTag(tenant, f, id[:])
	return base64.RawURLEncoding.EncodeToString(append(tag, v.cursorStream(tag, id[:])...))
}

// position is the inverse of cursor. ok says that the cursor is one of this list.
func (v *Vault) position(tenant authz.TenantID, f Filter, cursor string) (after string, ok bool) {
	b, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil || len(b) != cursorTag+cursorID || base64.RawURLEncoding.EncodeToString(b) != cursor { // it has one spelling
		return "", false
	}
	id := v.cursorStream(b[:cursorTag], b[cursorTag:])
	if subtle.ConstantTimeCompare(b[:cursorTag], v.cursorTag(tenant, f, id)) != 1 {
		return "", false
	}
	return authz.IDFromBytes(idPrefix, [cursorID]byte(id)), true
}

func (v *Vault) cursorTag(tenant authz.TenantID, f Filter, id []byte) []byte {
	var before []byte
	if !f.ExpiresBefore.IsZero() {
		before = binary.BigEndian.AppendUint64(nil, uint64(f.ExpiresBefore.UnixMicro()))
	}
	return v.keyedHash("latticekeep/list-cursor/v1", []byte(tenant), []byte(f.Text), []byte(f.Type), []byte(f.Status), before, id)[:cursorTag]
}

func (v *Vault) cursorStream(tag, id []byte) []byte {
	stream := v.keyedHash("latticekeep/list-cursor-stream/v1", tag)
	out := make([]byte, cursorID)
	subtle.XORBytes(out, id, stream)
	return out
}

// Metadata returns what [Vault.List] says of one credential, expired or not; the
// read is recorded before it returns. It opens nothing. Errors: fault.Forbidden
// for all that is not there for p, fault.Unavailable.
func (v *Vault) Metadata(ctx context.Context, p authz.Principal, id string) (Credential, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return Credential{}, err
	}
	absent := authz.NewID(idPrefix)
	l := &lookup{}
	err := v.store.View(ctx, func(rd store.Reader) error { return v.find(l, rd, p, byID(id), absent) })
	if err != nil {
		return Credential{}, fmt.Errorf("reading a credential's metadata: %w", err)
	}
	e := l.event(audit.CredentialListed, p, time.Time{}) // before anything expires: what has expired is there
	if e.Outcome != audit.Success {
		return Credential{}, v.deny(ctx, e)
	}
	if err := v.guard.Record(ctx, e); err != nil {
		return Credential{}, err
	}
	return l.record.credential(v.now(), l.owned), nil
}

// Bounds of a [Summary].
const (
	MaxNextToExpire = 10
	MaxSummaryTypes = 20
)

// Summary is what may be said of a tenant's credentials in a few numbers.
type Summary struct {
	Total, Active, Expired int
	ExpiringSoon           int          // of the active ones
	Types                  []TypeCount  // the most frequent first, at most MaxSummaryTypes
	OtherTypes             int          // credentials of further types
	NextToExpire           []Credential // active ones, the soonest first, at most MaxNextToExpire
	Complete               bool         // all credentials were counted; otherwise a part, which chance chose
}

// TypeCount is how many credentials are of a type.
type TypeCount struct {
	Type  string
	Count int
}

// Summary counts the credentials that [Vault.List] would return, those that expire
// within soon apart. It looks at a bounded number of them. Damaged records are left
// out and counted in the entry. Errors: fault.Forbidden, fault.Unavailable.
func (v *Vault) Summary(ctx context.Context, p authz.Principal, soon time.Duration) (Summary, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if _, err := v.ready(ctx, p, authz.ListCredentials); err != nil {
		return Summary{}, err
	}
	now := v.now()
	c := counter{p: p, now: now, soon: now.Add(soon), types: make(map[string]int)}
	err := v.store.View(ctx, func(rd store.Reader) error { return c.count(v, rd) })
	if err != nil {
		return Summary{}, fmt.Errorf("counting credentials: %w", err)
	}
	e := listed(p, c.Total, c.damaged)
	e.Attributes["summary"] = "true"
	if err := v.guard.Record(ctx, e); err != nil {
		return Summary{}, err
	}
	return c.summary(), nil
}

// counter is a summary as it is made.
type counter struct {
	Summary
	p         authz.Principal
	now, soon time.Time
	types     map[string]int
	damaged   int
}

func (c *counter) count(v *Vault, rd store.Reader) error {
	left := v.forSummary
	c.Complete = true
	var bad error
	err := rd.Scan(store.Prefix(credentialPrefix(c.p.Tenant)), func(key, value []byte) bool {
		if left.spent() {
			c.Complete = false
			return false
		}
		left.look(value)
		r, err := viewRecordAt(key, value)
		if err != nil {
			c.damaged++
			return true
		}
		if c.p.Kind == authz.ServiceAccount { // nothing is hidden from anybody else
			left.records -= costOfOwner
			by, err := v.ownership(rd, c.p.Tenant, r.id)
			if bad = err; err != nil || by.hides(c.p) {
				return err == nil
			}
		}
		c.add(r)
		return true
	})
	for i := range c.NextToExpire {
		by, err := v.ownership(rd, c.p.Tenant, c.NextToExpire[i].ID)
		bad = errors.Join(bad, err)
		c.NextToExpire[i].Owned = by.owned
	}
	return errors.Join(err, bad)
}

func (c *counter) add(r *record) {
	c.Total++
	c.types[r.kind]++
	if !c.now.Before(r.expiresAt) {
		c.Expired++
		return
	}
	c.Active++
	if r.expiresAt.Before(c.soon) {
		c.ExpiringSoon++
	}
	n := len(c.NextToExpire)
	if n == MaxNextToExpire {
		if !r.expiresAt.Before(c.NextToExpire[n-1].ExpiresAt) {
			return
		}
		c.NextToExpire = c.NextToExpire[:n-1]
	}
	at, _ := slices.BinarySearchFunc(c.NextToExpire, r, func(have Credential, r *record) int {
		return cmp.Or(have.ExpiresAt.Compare(r.expiresAt), -1) // behind those that expire at the same time
	})
	c.NextToExpire = slices.Insert(c.NextToExpire, at, r.credential(c.now, false))
}

func (c *counter) summary() Summary {
	for kind, n := range c.types {
		c.Types = append(c.Types, TypeCount{kind, n})
	}
	slices.SortFunc(c.Types, func(a, b TypeCount) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Type, b.Type))
	})
	if len(c.Types) > MaxSummaryTypes {
		for _, t := range c.Types[MaxSummaryTypes:] {
			c.OtherTypes += t.Count
		}
		c.Types = c.Types[:MaxSummaryTypes]
	}
	return c.Summary
}
