package doctor

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// rowID is the spelling of a row whose key is unknown.
var rowID = regexp.MustCompile(`^[a-z/-]+#[0-9a-f]{36}$`)

// Explanation is what is known about one row.
type Explanation struct {
	Row      string
	Family   string // empty: no kind of row that this release knows
	Deciding bool
	Says     string // what such a row says
	Risk     string // what follows when somebody puts back an old one, or removes it
	Stored   string // in words, without secrets
	Digest   string // the stored row, see [state.State.Digest]; empty: the state was not checked
	State    string
	Finding  *Finding  // nil: nothing is wrong with the row
	Resource string    // id that the log knows the resource by; empty: unknown
	Entries  []*Entry  // newest entries that changed the resource, oldest first
	Activity *Activity // what the resource did as a principal since; nil: it cannot act
}

// Explain says what is known about a row, which may be named with a digest.
func (x *Examination) Explain(ctx context.Context, row string) (*Explanation, error) {
	row, _ = splitDigest(row)
	found, err := x.Find(row)
	if err != nil {
		found = nil
	}
	if found == nil && rowID.MatchString(row) {
		return nil, err // an id that no missing row has
	}
	key := ParseRow(row)
	if found != nil {
		key = found.Key
	}
	e := &Explanation{Row: row, Finding: found}
	if key == nil {
		e.Family, e.Stored, e.State = found.Family, "nothing", "present: the deployment did not delete the row"
		e.Digest = found.Digest
		if f, ok := state.FamilyOf([]byte(e.Family)); ok {
			e.Deciding, e.Says, e.Risk = f.Deciding, f.Says, f.Risk
		}
		if found.Group != nil {
			e.Stored = fmt.Sprintf("nothing; its key begins with %+q", found.Group)
		}
		return e, nil
	}
	e.Row = fmt.Sprintf("%+q", key)
	if f, ok := state.FamilyOf(key); ok {
		e.Family, e.Deciding, e.Says, e.Risk = f.Prefix, f.Deciding, f.Says, f.Risk
	}
	value, err := x.get(ctx, key)
	if err != nil {
		return nil, err
	}
	e.Stored, e.Digest = describe(e.Family, key, value), x.digest(key, value)
	e.State = x.explainState(key, value, e.Deciding)
	e.Resource = subject(e.Family, key, value)
	h := make(history)
	h.want(e.Resource)
	if err := scanLog(ctx, x.store, h.visit); err != nil {
		return nil, err
	}
	if a := h[e.Resource]; a != nil {
		e.Entries = a.newest
		switch e.Family {
		case "apikey/hash/", "apikey/tenant/", "user/row/", "user/email/", "user/password/":
			e.Activity = &a.Activity
		}
	}
	if user := anyID.Find(key); e.Family == "session/row/" && user != nil {
		if e.Activity, err = x.since(ctx, string(user), e.Entries); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// since returns what a user has done since the newest of a session's entries. Entries name the user
// and not the session.
func (x *Examination) since(ctx context.Context, user string, entries []*Entry) (*Activity, error) {
	if len(entries) == 0 {
		return nil, nil
	}
	a := &Activity{Since: entries[len(entries)-1]}
	h := history{user: &about{Activity: newActivity()}}
	err := scanLog(ctx, x.store, func(e *audit.Entry) {
		if e.Sequence > a.Since.Sequence {
			h.count(e)
		}
	})
	found := h[user].Activity
	a.First, a.Last, a.Types = found.First, found.Last, found.Types
	return a, err
}

func (x *Examination) explainState(key, value []byte, deciding bool) string {
	reason, known := x.state.Compare(key, value)
	switch {
	case !deciding:
		return "nothing: the log commits to deciding rows only"
	case !x.State || !known:
		return "unknown: the state was not checked"
	case reason == state.Added:
		return "absent"
	case reason == state.Removed:
		return "present"
	case reason == state.Replaced:
		return "present, with another value"
	case value == nil:
		return "absent, as it is"
	}
	return "present, with this value"
}

// shown are the fields of stored rows that are no secrets and no hashes of secrets.
var shown = []string{
	"id", "tenant", "user", "role", "verified", "scopes", "created_at", "created_by", "expires_at", "last_used_at", "version", "rotation_days",
	"rotated_at", "next_rotation_at", "default", "credential", "change", "sealed_at", "key_id", "chain_id", "format", "kms_key", "retired_at",
	"suite", "wrapping_version", "trial_ends", "limits", "object",
}

// describe says in words what is stored, without secrets.
func describe(family string, key, value []byte) string {
	if value == nil {
		return "nothing"
	}
	switch family {
	case "credential/", "former/", "kept/":
		r, err := record.Decode(value)
		if err != nil {
			return fmt.Sprintf("%d bytes that are no record of a credential", len(value))
		}
		return fmt.Sprintf("version %d of credential %s of tenant %s, sealed %s, expires %s", r.Version, r.ID, r.Tenant, r.SealedAt.Format(time.RFC3339), r.ExpiresAt.Format(time.RFC3339))
	case "owner/":
		return fmt.Sprintf("the UID %+q", value)
	case "key/", "key/system/":
		if bytes.HasSuffix(key, []byte("/current")) && len(value) == 4 {
			return fmt.Sprintf("version %d", binary.BigEndian.Uint32(value))
		}
	}
	content := value
	if f, ok := state.FamilyOf(key); ok && f.HasMAC(key) {
		if len(value) < 32 {
			return fmt.Sprintf("%d bytes, too short for a MAC", len(value))
		}
		content = value[32:]
	}
	switch family {
	case "sealing/current", "namespace/", "namespace-name/", "transit/default/":
		return fmt.Sprintf("a MAC, and %+q", content)
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(content, &fields) != nil {
		return fmt.Sprintf("%d bytes", len(value))
	}
	var parts []string
	for _, name := range shown {
		if v, ok := fields[name]; ok {
			parts = append(parts, name+" "+strconv.QuoteToASCII(strings.Trim(string(v), `"`)))
			delete(fields, name)
		}
	}
	if len(fields) > 0 {
		parts = append(parts, "and, not shown, "+strings.Join(slices.Sorted(maps.Keys(fields)), ", "))
	}
	return strings.Join(parts, ", ")
}
