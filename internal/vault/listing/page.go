package listing

import (
	"cmp"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/details"
	"github.com/latticekeep/latticekeep/internal/vault/lastread"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Budget bounds the work of a read over many credentials, however many the tenant has and however few
// match. A record costs one unit, and a read of its owner [OwnerCost] units. The bytes of the records,
// which the store must fetch, have their own bound.
type Budget struct{ Records, Bytes int }

// PageBudget is enough for 100 credentials of any size without a filter.
func PageBudget() Budget { return Budget{2_500, 32 << 20} }

// SummaryBudget is that of the numbers of a tenant.
func SummaryBudget() Budget { return Budget{20_000, 160 << 20} }

// OwnerCost is what a read of an owner costs, in records.
const OwnerCost = 10

// Spend takes a record from the budget.
func (b *Budget) Spend(value []byte) { b.Records, b.Bytes = b.Records-1, b.Bytes-len(value) }

// Spent reports whether nothing is left.
func (b *Budget) Spent() bool { return b.Records <= 0 || b.Bytes <= 0 }

// looks bounds the names outside the caller's policies that a read by name looks at. So many segments
// in the place of one "*" take about half a second.
const looks = 50_000

// Owner says what a list has to know of the object that owns a credential.
type Owner struct {
	Owned  bool
	Hidden bool // from the caller
}

// Source is what a caller may see of a tenant's credentials.
type Source struct {
	Reader    store.Reader
	Principal authz.Principal
	// Owner returns who owns a credential. Error: one of package state for rows that somebody changed.
	Owner func(id string) (Owner, error)
	// Details returns what people say of a credential, nil for nothing. Errors: as those of Owner, and fault.Internal.
	Details func(id string) (*details.Details, error)
	// LastRead returns when a credential was read last, the zero time for never.
	LastRead func(id string) (time.Time, error)
	// ByName says that the index of paths is complete and used.
	ByName bool

	looks *int                 // what is left of them for one page; nil: all
	reads map[string]time.Time // what LastRead returns; nil: a row is read for each credential
}

// withReads returns the source with all last reads of the tenant, unless they are more than most: a
// tenant with so many credentials may still have a prefix with few.
func (s Source) withReads(most int) (Source, error) {
	reads, whole, err := lastread.All(s.Reader, s.Principal.Tenant, most)
	if err == nil && whole {
		s.reads = reads
		s.LastRead = func(id string) (time.Time, error) { return reads[id], nil }
	}
	return s, err
}

// UsesPaths reports whether a list is read in the order of names: one that asks for it, and every list
// of somebody with policies, who gets nothing of what lies outside, not even by the time that it takes.
func (q Query) UsesPaths(p authz.Principal) bool {
	return q.Order == ByName || q.Prefix != "" || q.Folders || p.Access.IsLimited()
}

// order returns the order in which a source answers a query.
func (s Source) order(q Query) Order {
	switch {
	case q.Order.ofTimes():
		return q.Order
	case s.ByName:
		return ByName
	}
	return ByID
}

// Pages reads pages of lists. One bounds a page, and All what reads all that a list selects: an order of
// times, and a total.
type Pages struct {
	Cursors
	One, All Budget
}

var (
	errCursor  = fault.New(fault.Invalid, "the cursor is not one of this list: start again without it")
	errFolders = fault.New(fault.Invalid, "delimiter: folders are listed in the order of names, and not to a ServiceAccount: leave it out, or sort by name")
	errSort    = fault.New(fault.Invalid, "sort: too many credentials for an order of times: give a prefix, or sort by name")
)

// Read reads the page of a query. each gets its credentials, in order. Errors: fault.Invalid for the
// cursor of another list, and for too many credentials in an order of times.
func (p Pages) Read(s Source, q Query, now time.Time, each func(Found)) (rest Rest, damaged int, err error) {
	order, after := s.order(q), ""
	if q.Folders && (order != ByName || s.hides()) {
		return Rest{}, 0, errFolders
	}
	if q.Cursor != "" {
		var ok bool
		if after, ok = p.Decode(s.Principal.Tenant, q.Filter, order, q.Cursor); !ok {
			return Rest{}, 0, errCursor
		}
	}
	if order.ofReads() {
		if s, err = s.withReads(p.All.Records); err != nil {
			return Rest{}, 0, err
		}
	}
	page := &Page{Budget: p.One, Reads: q.Limit > 0}
	var all []placed
	if order.ofTimes() || q.Count {
		every := &Page{Budget: p.All}
		total := 0
		err := every.all(s, q, now, func(one Found) {
			if total++; order.ofTimes() {
				one.Body, one.Signature, one.Wrap = nil, nil, nil // they would keep the whole row
				all = append(all, placed{position(order, one), one})
			}
		})
		if err != nil {
			return Rest{}, 0, err
		}
		if order.ofTimes() && every.More {
			return Rest{}, 0, errSort
		}
		damaged = every.Damaged
		if q.Count {
			rest.Total, rest.Whole = total, !every.More
		}
	}
	if order.ofTimes() {
		err = page.cut(s, all, q.Limit, after, each)
		damaged += page.Damaged
	} else {
		err = page.Read(s, q, after, now, each)
		damaged = page.Damaged
	}
	if err != nil {
		return Rest{}, 0, err
	}
	rest.Folders = page.Folders
	if page.More {
		rest.Cursor = p.Encode(s.Principal.Tenant, q.Filter, order, page.Last)
	}
	return rest, damaged, nil
}

// all calls each with all credentials that match. More says that the budget was spent before the end.
func (f *Page) all(s Source, q Query, now time.Time, each func(Found)) error {
	matches := q.Matcher(now)
	var bad error
	err := s.Visit(s.prefix(q), "", func(_ string, key, value []byte) bool {
		if f.More = key == nil || f.Budget.Spent(); f.More {
			return false
		}
		f.Budget.Spend(value)
		var one Found
		if one, bad = f.look(s, q, key, value, matches); one.Record != nil {
			each(one)
		}
		return bad == nil
	})
	return errors.Join(err, bad)
}

// position returns the place of a credential in an order of times: eight bytes that sort like the time, and
// the id.
func position(o Order, f Found) string {
	r := f.Record
	key := r.ExpiresAt.UnixMicro()
	switch o {
	case ByCreated:
		key = ^r.CreatedAt.UnixMicro()
	case ByUpdated:
		key = ^r.SealedAt.UnixMicro()
	case ByLastRead:
		key = ^f.LastRead.UnixMicro()
	case ByUnread:
		key = lastUse(f.LastRead, r.CreatedAt).UnixMicro()
	}
	return string(binary.BigEndian.AppendUint64(nil, uint64(key)^1<<63)) + r.ID
}

// lastUse returns when a credential was read last, or else made.
func lastUse(read, created time.Time) time.Time {
	if read.IsZero() {
		return created
	}
	return read
}

// placed is a credential with its place in an order of times.
type placed struct {
	at string
	Found
}

// cut makes the page of the credentials after a position in an order of times.
func (f *Page) cut(s Source, all []placed, limit int, after string, each func(Found)) error {
	slices.SortFunc(all, func(a, b placed) int { return strings.Compare(a.at, b.at) })
	found := 0
	for _, one := range all {
		if one.at <= after {
			continue
		}
		if f.More = limit > 0 && found == limit; f.More {
			return nil
		}
		f.Last = one.at
		shown, err := f.show(s, one.Found, each)
		if err != nil {
			return err
		}
		if shown {
			found++
		}
	}
	return nil
}

// prefix returns what the names begin with among which a query looks. To a ServiceAccount, from whom
// credentials are hidden, where it ends must tell nothing, so there it is one of the filters.
func (s Source) prefix(q Query) string {
	if s.hides() {
		return ""
	}
	return q.Prefix
}

// Hides reports whether some credentials are hidden from p, whatever its policies say: those of objects
// in other namespaces from a ServiceAccount.
func Hides(p authz.Principal) bool { return p.Kind == authz.ServiceAccount }

func (s Source) hides() bool { return Hides(s.Principal) }

// Visit calls do with the row of each credential that the caller may see, in order, until do returns
// false. position is what a cursor continues after. A damaged record has no name, so somebody with
// policies does not see it.
func (s Source) Visit(prefix, after string, do func(position string, key, value []byte) bool) error {
	if s.ByName {
		return s.visitPaths(prefix, after, do)
	}
	p := s.Principal
	all := record.TenantPrefix(p.Tenant)
	rng := store.Prefix(all)
	if after != "" {
		rng.From = store.Prefix(record.Prefix(p.Tenant, after)).To
	}
	return s.Reader.Scan(rng, func(key, value []byte) bool {
		if record.IsOutside(p, authz.ListCredentials, key, value) {
			return true
		}
		id, _, _ := strings.Cut(string(key[len(all):]), "/")
		if !authz.ValidID(record.IDPrefix, id) {
			id = "" // no place to continue after
		}
		return do(id, key, value)
	})
}

func (s Source) visitPaths(prefix, after string, do func(position string, key, value []byte) bool) error {
	p := s.Principal
	left := looks
	w := pathindex.Walk{Tenant: p.Tenant, Access: p.Access, Prefix: prefix, After: after, Looks: cmp.Or(s.looks, &left)}
	var bad error
	stopped, err := w.Read(s.Reader, func(position, name, id string) bool {
		key, value, err := record.Newest(s.Reader, p.Tenant, id)
		if state.IsRefused(err) { // as damaged as a row that does not decode
			key, value, err = []byte(position), nil, nil
		}
		if err != nil {
			bad = err
			return false
		}
		r, err := record.ViewAt(key, value)
		switch {
		case key == nil, err == nil && !pathindex.Leads(r, name): // left by a record that has moved or is gone
			return true
		case p.Access.IsLimited() && (err != nil || !p.Reaches(authz.ListCredentials, r.Name)):
			return true
		}
		return do(position, key, value)
	})
	if err = errors.Join(err, bad); err == nil && stopped != "" {
		do(stopped, nil, nil)
	}
	return err
}

// Page is one page of a list.
type Page struct {
	Budget  Budget
	Damaged int
	Last    string // position of the credential read last
	More    bool   // credentials follow after Last
	Folders []string
	Reads   bool // each credential has the time at which it was read last
}

// Found is a credential of a page. The record shares memory with the store's row.
type Found struct {
	*record.Record
	Owned    bool
	Details  *details.Details
	LastRead time.Time // in its order, and on pages with a limit
}

// Read reads the credentials after a position, or from the first one if it is empty. each gets those
// that match, in order. A folder takes the place of the first one in it that matches; Read goes on behind
// all that are in it.
func (f *Page) Read(s Source, q Query, after string, now time.Time, each func(Found)) error {
	matches := q.Matcher(now)
	found, left := 0, looks
	s.looks = &left
	for again := true; again; {
		again = false
		var bad error
		err := s.Visit(s.prefix(q), after, func(position string, key, value []byte) bool {
			if key == nil { // where the looks at other paths ended
				f.Last, f.More = position, true
				return false
			}
			full := q.Limit > 0 && found == q.Limit
			if f.More = full || q.bounded() && f.Budget.Spent() && f.Last != ""; f.More {
				return false
			}
			f.Budget.Spend(value)
			if position != "" {
				f.Last = position // damaged records count, too
			}
			var one Found
			if one, bad = f.look(s, q, key, value, matches); one.Record == nil {
				return bad == nil
			}
			if folder := q.folder(one.Name); folder != "" {
				found++
				f.Folders = append(f.Folders, folder)
				after, again = pathindex.Behind(folder), true
				f.Last = after
				return false
			}
			var shown bool
			if shown, bad = f.show(s, one, each); shown {
				found++
				f.More = s.hides() && found == q.Limit // whether others follow would tell of hidden ones
			}
			return bad == nil && !f.More
		})
		if err = errors.Join(err, bad); err != nil {
			return err
		}
	}
	return nil
}

// look returns a credential if it matches and the caller may see it, without what complete adds.
func (f *Page) look(s Source, q Query, key, value []byte, matches func(*record.Record) bool) (Found, error) {
	r, err := record.ViewAt(key, value)
	if err != nil {
		f.Damaged++ // one damaged record does not hide the others
		return Found{}, nil
	}
	found := Found{Record: r}
	// A ServiceAccount must not learn, from where a page ends or how long it takes, whether a
	// credential that is hidden from it matches. So its filter runs only after the owner is read.
	if s.hides() {
		if ok, err := f.complete(s, &found); !ok {
			return Found{}, err
		}
	}
	if !matches(r) {
		return Found{}, nil
	}
	if q.Tag != "" {
		said, err := s.Details(r.ID)
		if isDamaged(err) {
			f.Damaged++
			return Found{}, nil
		}
		if err != nil || !said.Has(q.Tag) {
			return Found{}, err
		}
	}
	if q.Order.ofReads() {
		if s.reads == nil {
			f.Budget.Records -= OwnerCost
		}
		found.LastRead, err = s.LastRead(r.ID)
	}
	return found, err
}

// show gives each a credential that matches, completed. It reports whether it was not left out.
func (f *Page) show(s Source, one Found, each func(Found)) (shown bool, err error) {
	if !s.hides() { // otherwise look has
		if ok, err := f.complete(s, &one); !ok {
			return false, err
		}
	}
	if f.Reads && one.LastRead.IsZero() {
		if one.LastRead, err = s.LastRead(one.ID); err != nil {
			return false, err
		}
	}
	each(one)
	return true, nil
}

// complete adds the owner and the details of a credential. ok is false for one that is left out, because it
// is hidden from the caller or damaged.
func (f *Page) complete(s Source, found *Found) (ok bool, err error) {
	f.Budget.Records -= OwnerCost
	by, err := s.Owner(found.ID)
	if err == nil && !by.Hidden {
		found.Owned = by.Owned
		found.Details, err = s.Details(found.ID)
	}
	if isDamaged(err) {
		f.Damaged++
		return false, nil
	}
	return err == nil && !by.Hidden, err
}

// isDamaged reports whether an error is about what is stored for one credential.
func isDamaged(err error) bool { return state.IsRefused(err) || errors.Is(err, fault.Internal) }
