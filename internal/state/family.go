// Package state says which rows of the store decide who may see or do what.
//
// A row decides if an old value of it, put back by somebody who can write the database, gives
// anybody anything or undoes anything: a revoked API key that works again, a role that was taken
// away, an earlier value of a credential. A row also decides if the same follows from its absence,
// as with a mark that a KMS key was given up. All other rows are counters and caches, or an index
// whose rows are compared with a deciding row before they count.
//
// A closure that changes a deciding row appends an audit entry.
package state

import (
	"bytes"
	"slices"
	"strings"
)

// Family is a kind of row of the store.
type Family struct {
	// Prefix begins the keys of the rows. Without a '/' at its end it is the key of the only row.
	Prefix string
	// Deciding reports whether the rows decide who may see or do what.
	Deciding bool
	// Number stands for a deciding family in the ids of its rows. It never changes, and no other
	// family ever gets it. 0: the family does not decide.
	Number byte
	// Group is the number of '/' in the common prefix of the rows that are decided on together, such
	// as a user's sessions or the credentials of one name: their number counts, or the newest one, or
	// each of them is deleted. It is 0 when each row stands alone. A row with fewer '/' in its key
	// stands alone too.
	Group int
	// Whole reports whether a scan of all rows of the family, or of those of all families that begin
	// with its prefix, decides something: whether a KMS key may be destroyed.
	Whole bool
	// Own reports whether the rows are of the deployment itself. When one of them is put back, no
	// tenant can be served, so the whole deployment stops.
	Own bool
}

// Families are all kinds of rows. The comment on each says what somebody gains who puts back an old
// value of a row, or removes the row.
var Families = []Family{
	// Identity of the deployment and the KMS key that its own keys are under.
	{Prefix: "deployment", Deciding: true, Number: 1, Own: true},
	// The key of the previous start of a development server is not revoked.
	{Prefix: "dev", Deciding: true, Number: 2, Own: true},

	// A key that was rotated, or moved to another KMS key, is used again. Without a row a set is
	// incomplete, and its KMS key seems unused and may be destroyed.
	{Prefix: "key/", Deciding: true, Number: 3, Group: 3, Whole: true},
	{Prefix: "key/system/", Deciding: true, Number: 4, Group: 3, Own: true},
	// A KMS key that is being destroyed wraps new keys.
	{Prefix: "kms/given-up/", Deciding: true, Number: 5, Own: true},
	// A KMS key that nothing was moved from may be destroyed.
	{Prefix: "kms/moved-from/", Deciding: true, Number: 6, Own: true},
	// An earlier sealing key is published, and values are sealed for it.
	{Prefix: "sealing/current", Deciding: true, Number: 7, Own: true},
	// A retired sealing key opens values again.
	{Prefix: "sealing/key/", Deciding: true, Number: 8, Group: 2, Own: true},

	// A trial that ended goes on, limits of requests return.
	{Prefix: "tenant/", Deciding: true, Number: 9},
	{Prefix: "tenant/system", Deciding: true, Number: 10, Own: true},
	// A namespace is part of another tenant.
	{Prefix: "namespace/", Deciding: true, Number: 11},
	// A namespace that was made again under a configured name enters the tenant of that name.
	{Prefix: "namespace-name/", Deciding: true, Number: 12},

	// A member has an earlier role, a removed one is back. A tenant's members are counted, listed and
	// searched for the last owner.
	{Prefix: "user/row/", Deciding: true, Number: 13, Group: 3},
	// An address leads to an account that it does not belong to.
	{Prefix: "user/email/", Deciding: true, Number: 14},
	// An earlier password is right.
	{Prefix: "user/password/", Deciding: true, Number: 15},
	// A session that was ended goes on, a used refresh token is new. A user's sessions end together.
	{Prefix: "session/row/", Deciding: true, Number: 16, Group: 3},
	{Prefix: "session/selector/", Deciding: true, Number: 17},
	// A used or replaced token of a mail counts.
	{Prefix: "ticket/hash/", Deciding: true, Number: 18},
	{Prefix: "ticket/of/", Deciding: true, Number: 19},
	// A withdrawn invitation is accepted. A tenant's invitations are counted, and a user's end together.
	{Prefix: "invitation/", Deciding: true, Number: 20, Group: 2},
	// A revoked API key works. A tenant's keys are counted, and a user's end together.
	{Prefix: "apikey/hash/", Deciding: true, Number: 21},
	{Prefix: "apikey/tenant/", Deciding: true, Number: 22, Group: 3},

	// A deleted or replaced value is served. The newest version is the current one.
	{Prefix: "credential/", Deciding: true, Number: 23, Group: 3},
	// A version that ended, or another record, stands for the previous version of an object's
	// credential. All previous versions of a credential are deleted together.
	{Prefix: "former/", Deciding: true, Number: 24, Group: 3},
	// A credential has another history, whose newest line also says where the index of names has it.
	{Prefix: "credential-version/", Deciding: true, Number: 25, Group: 3},
	// A name leads to another credential. The newest credential of a name is the answer.
	{Prefix: "credential-name/", Deciding: true, Number: 26, Group: 3},
	// A credential has another owner or none, so others see and change it.
	{Prefix: "owner/", Deciding: true, Number: 27},
	// An object has an earlier version, and its previous version is readable again.
	{Prefix: "owned/", Deciding: true, Number: 28},

	// A named key has an earlier version as its newest one. A tenant's keys are counted and listed.
	{Prefix: "transit/key/", Deciding: true, Number: 29, Group: 3},
	// Data is encrypted under a key that is no longer the default.
	{Prefix: "transit/default/", Deciding: true, Number: 30},
	// A seed that was encrypted again is back under the earlier wrapping key. The newest row of a
	// version counts.
	{Prefix: "transit/seed/", Deciding: true, Number: 31, Group: 5},
	// The list of a key's versions has other times.
	{Prefix: "transit/version/", Deciding: true, Number: 32, Group: 4},

	// The rows that follow decide nothing.

	// The log verifies itself: entries, their order and what is derived from them.
	{Prefix: "audit/"},
	// Digests of the deciding rows, which the log verifies.
	{Prefix: "state/"},
	// What the scores of a tenant are made of: functions of the log. The rows stated and daily keep
	// replicas from recording an assessment twice.
	{Prefix: "compliance/"},
	// When an API key was last used, which is shown only.
	{Prefix: "apikey/used/"},
	// How many invitations a tenant mailed in an hour. It may mail more, each with a row of its own.
	{Prefix: "invited/"},
	// Requests of a minute. A tenant may make more of them.
	{Prefix: "quota/"},
	// Failures of an account. More guesses at its password are allowed, at one argon2id run each.
	{Prefix: "slowdown/"},
	// A mail that waits, and the attempts to send it. It is sent again to the same address, and the
	// token in it counts only as long as its ticket does.
	{Prefix: "mail/"},
	{Prefix: "mail-attempt/"},
	// What a repeated request is answered: id, name and times of the credential that the caller made,
	// no value. Without the rows the request makes another credential, as a new one may.
	{Prefix: "idempotency/key/"},
	{Prefix: "idempotency/request/"},
	{Prefix: "idempotency/due/"},
	// Indexes by time: the key, and the row of the object, say whether it is due.
	{Prefix: "transit/due/"},
	{Prefix: "former-end/"},
	// A mark of an earlier release, which nothing reads.
	{Prefix: "credential-indexed/"},
	// The store is not to be served, or not by a release that does not know its format. Without the
	// mark a server finds that deciding rows are missing.
	{Prefix: "maintenance"},
	{Prefix: "format"},
}

// bySegment holds the families by the first segment of their prefix, the longest prefix first.
var bySegment = func() map[string][]Family {
	m := map[string][]Family{}
	for _, f := range Families {
		first, _, _ := strings.Cut(f.Prefix, "/")
		m[first] = append(m[first], f)
	}
	for _, all := range m {
		slices.SortFunc(all, func(a, b Family) int { return len(b.Prefix) - len(a.Prefix) })
	}
	return m
}()

// FamilyOf returns the family of a row's key, and false for a key of no family. Among families whose
// prefixes begin the key, the longest prefix wins.
func FamilyOf(key []byte) (Family, bool) {
	first, _, _ := bytes.Cut(key, []byte{'/'})
	for _, f := range bySegment[string(first)] {
		if f.has(key) {
			return f, true
		}
	}
	return Family{}, false
}

func (f Family) has(key []byte) bool {
	n := len(f.Prefix)
	return len(key) >= n && string(key[:n]) == f.Prefix && (f.Prefix[n-1] == '/' || len(key) == n)
}

// GroupOf returns the common prefix of the rows that a row of the family is decided on together
// with, or nil if it stands alone. The result shares the key's memory.
func (f Family) GroupOf(key []byte) []byte {
	n := 0
	for range f.Group {
		i := bytes.IndexByte(key[n:], '/')
		if i < 0 {
			return nil
		}
		n += i + 1
	}
	if n == 0 {
		return nil
	}
	return key[:n]
}
