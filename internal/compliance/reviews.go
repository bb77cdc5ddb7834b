package compliance

import (
	"cmp"
	"crypto/sha3"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

// Attributes of DENIALS_ACKNOWLEDGED, ACCESS_REVIEWED and INVENTORY_REVIEWED.
const (
	AttributeFrom     = "from" // first and last tenant sequence of the range
	AttributeTo       = "to"
	AttributeDenials  = "denials"  // acknowledged denials, decimal
	AttributeFailures = "failures" // acknowledged failures, decimal
	AttributeCount    = "count"    // API keys and members, or parts of the inventory, decimal
	AttributeDigest   = "digest"   // SHA3-256 of what was acknowledged or reviewed, lower-case hex
)

// reviewTime is the time in which denials and failures should be acknowledged.
const reviewTime = 7 * 24 * time.Hour

// maxOpen bounds the groups of denials and failures that nobody has acknowledged. Beyond it the
// older half is merged, one group for each responsible user and outcome.
const maxOpen = 1024

// reviews holds what members looked at, and what waits for them. A review is an entry by a user: a
// read is none, because scripts and pages read.
type reviews struct {
	Open      []openGroup       `json:"open"`     // denials and failures that nobody has acknowledged, oldest first
	Makers    map[string]string `json:"makers"`   // user responsible for each API key
	Reviewed  uint64            `json:"reviewed"` // tenant sequence up to which acknowledged ranges leave nothing out
	Log       mark              `json:"log,omitzero"`
	Access    mark              `json:"access,omitzero"`
	Inventory mark              `json:"inventory,omitzero"`
}

// openGroup is a denial or failure that nobody has acknowledged, or several of one user.
type openGroup struct {
	Kind   aspect `json:"k"`           // aDenial or aFailure
	User   string `json:"u,omitempty"` // user who caused it, also through an API key; empty: nobody, such as a stranger
	Tally  tally  `json:"t"`
	From   uint64 `json:"a"` // first and last tenant sequence
	To     uint64 `json:"b"`
	Digest string `json:"d"` // hash of the entry; of a merged group, SHA3-256 of the digests of its parts
}

// Tally counts denials and failures.
type Tally struct{ Denials, Failures int }

func (t *Tally) add(g openGroup) {
	if g.Kind == aDenial {
		t.Denials += g.Tally.Count
	} else {
		t.Failures += g.Tally.Count
	}
}

// Acknowledged is what an acknowledgement covers.
type Acknowledged struct {
	Tally
	Own    Tally  // in the range, but caused by the member who acknowledges
	Digest string // SHA3-256 over the digests of the groups, in order
}

// Waiting is what a member can acknowledge.
type Waiting struct {
	Tally
	Own                    Tally     // another member has to acknowledge them
	Oldest                 time.Time // time of the oldest entry that the member can acknowledge; zero: none
	From, To               uint64    // the range to acknowledge; it also counts as a review of the log
	Log, Access, Inventory time.Time // last reviews; zero: never
}

// Waiting returns what waits for a user.
func (e *Evidence) Waiting(user string) Waiting {
	w := Waiting{From: e.Reviewed + 1, To: e.TenantSequence, Log: timeOf(e.Log), Access: timeOf(e.Access), Inventory: timeOf(e.Inventory)}
	for _, g := range e.Open {
		if isOwn(g, user) {
			w.Own.add(g)
			continue
		}
		w.add(g)
		w.From = min(w.From, g.From)
		if at := g.Tally.First.Time(); w.Oldest.IsZero() || at.Before(w.Oldest) {
			w.Oldest = at
		}
	}
	w.From = min(w.From, w.To)
	return w
}

// Denials returns the number of denied attempts of each of the last days in UTC, the oldest first. The last
// one is the day of now. Evidence keeps 92 days.
func (e *Evidence) Denials(now time.Time, days int) []int {
	n := make([]int, days)
	for i := range n {
		if t := e.Days[dayOf(now.UnixMicro())-int64(days-1-i)][aDenial]; t != nil {
			n[i] = t.Count
		}
	}
	return n
}

func timeOf(m mark) time.Time {
	if m == (mark{}) {
		return time.Time{}
	}
	return m.Time()
}

func isOwn(g openGroup, user string) bool { return user != "" && g.User == user }

func (g openGroup) within(from, to uint64) bool { return from <= g.From && g.To <= to }

// Acknowledge returns what an acknowledgement of a range by a user covers now.
func (e *Evidence) Acknowledge(user string, from, to uint64) Acknowledged {
	var a Acknowledged
	h := sha3.New256()
	for _, g := range e.Open {
		switch {
		case !g.within(from, to):
		case isOwn(g, user):
			a.Own.add(g)
		default:
			a.add(g)
			_, _ = h.Write([]byte(g.Digest))
		}
	}
	a.Digest = hex.EncodeToString(h.Sum(nil))
	return a
}

// AccessList returns the number of API keys and members, and a digest of what they may do.
func (e *Evidence) AccessList() (n int, digest string) {
	h := sha3.New256()
	for _, id := range slices.Sorted(maps.Keys(e.APIKeys)) {
		k := e.APIKeys[id]
		fmt.Fprintf(h, "api_key %s %s %d %s\n", id, k.User, k.Expires, strings.Join(k.Scopes, " "))
	}
	for _, id := range slices.Sorted(maps.Keys(e.Users)) {
		fmt.Fprintf(h, "user %s %s\n", id, e.Users[id].Role)
	}
	return len(e.APIKeys) + len(e.Users), hex.EncodeToString(h.Sum(nil))
}

// open adds a denial or failure to those that wait.
func (e *Evidence) open(kind aspect, a *audit.Entry, m mark) {
	g := openGroup{Kind: kind, User: e.responsible(a), From: a.TenantSequence, To: a.TenantSequence, Digest: a.Hash}
	g.Tally.add(m)
	if e.Open = append(e.Open, g); len(e.Open) > maxOpen {
		e.Open = append(merged(e.Open[:maxOpen/2]), e.Open[maxOpen/2:]...)
	}
}

// responsible returns the user who caused an entry, also through an API key. Others, such as
// strangers and service accounts, are of no user.
func (e *Evidence) responsible(a *audit.Entry) string {
	return e.Responsible(authz.Kind(a.Actor.Type), a.Actor.ID)
}

// Responsible returns the user who answers for a principal of the tenant, or "".
func (e *Evidence) Responsible(kind authz.Kind, id string) string {
	switch kind {
	case authz.User:
		return id
	case authz.APIKey:
		return e.Makers[id]
	}
	return ""
}

// made records who is responsible for a new API key.
func (e *Evidence) made(a *audit.Entry) {
	e.Makers[a.Resource.ID] = cmp.Or(a.Attributes[audit.AttributeUser], e.responsible(a))
}

// merged returns one group for each user and kind, in the order of their first entries.
func merged(groups []openGroup) []openGroup {
	type owner struct {
		kind aspect
		user string
	}
	at := make(map[owner]int)
	var all [][]openGroup
	for _, g := range groups {
		o := owner{g.Kind, g.User}
		i, ok := at[o]
		if !ok {
			i, at[o] = len(all), len(all)
			all = append(all, nil)
		}
		all[i] = append(all[i], g)
	}
	out := make([]openGroup, len(all))
	for i, parts := range all {
		out[i] = parts[0]
		if len(parts) == 1 {
			continue
		}
		h := sha3.New256()
		for j, g := range parts {
			_, _ = h.Write([]byte(g.Digest))
			if j > 0 {
				out[i].Tally.Count += g.Tally.Count
				out[i].Tally.Last, out[i].To = g.Tally.Last, max(out[i].To, g.To)
			}
		}
		out[i].Digest = hex.EncodeToString(h.Sum(nil))
	}
	return out
}

// review processes reviews by members. It trusts no number of the entry but the range, which may
// not reach the entry itself.
func (e *Evidence) review(a *audit.Entry, m mark) {
	if a.Outcome != audit.Success || a.Actor.Type != string(authz.User) || a.Actor.ID == "" {
		return
	}
	switch a.EventType {
	case audit.AccessReviewed:
		e.Access = m
	case audit.InventoryReviewed:
		e.Inventory = m
	case audit.DenialsAcknowledged:
		from, err := strconv.ParseUint(a.Attributes[AttributeFrom], 10, 64)
		to, err2 := strconv.ParseUint(a.Attributes[AttributeTo], 10, 64)
		if err == nil && err2 == nil && 0 < from && from <= to && to < a.TenantSequence {
			e.acknowledged(a.Actor.ID, from, to, m)
		}
	}
}

// acknowledged closes the groups that a range covers, except those of the member.
func (e *Evidence) acknowledged(user string, from, to uint64, m mark) {
	late := make(map[aspect]bool)
	e.Open = slices.DeleteFunc(e.Open, func(g openGroup) bool {
		covered := g.within(from, to) && !isOwn(g, user)
		if covered && m.Micros-g.Tally.First.Micros > reviewTime.Microseconds() {
			late[g.Kind] = true
		}
		return covered
	})
	e.count(anAcknowledgement, m)
	for kind, what := range map[aspect]aspect{aDenial: aLateDenial, aFailure: aLateFailure} {
		if late[kind] {
			e.count(what, m)
		}
	}
	for i := range e.Bursts {
		if b := &e.Bursts[i]; b.Reaction == nil && from <= b.Tenant && b.Tenant <= to {
			b.Reaction, e.FailedSignIns = &m, nil
		}
	}
	// A review of the log leaves no entry out since the one before, and reaches the last two days.
	if from > e.Reviewed+1 {
		return
	}
	e.Reviewed = max(e.Reviewed, to)
	if recent, _ := e.within(anEntry, 1); to+uint64(recent) >= e.TenantSequence {
		e.Log = m
	}
}
