package doctor_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/doctor"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// key returns the key of a row whose key and value have these parts.
func (h *house) key(rows map[string][]byte, prefix, part string) string {
	h.t.Helper()
	for key, value := range rows {
		if strings.HasPrefix(key, prefix) && strings.Contains(key+string(value), part) {
			return key
		}
	}
	h.t.Fatalf("no row of %s has %s", prefix, part)
	return ""
}

// newest returns the newest entry of the log.
func (h *house) newest() (e *audit.Entry) {
	h.t.Helper()
	h.must(h.raw.View(context.Background(), func(r store.Reader) error {
		head, err := audit.ReadHead(r)
		if err == nil {
			e, err = entries.Read(r, head.Sequence)
		}
		return err
	}))
	return e
}

// refuses fails if rows were changed, or not refused with an error of the kind that says so.
func (h *house) refuses(done doctor.Resolved, err error, kind fault.Kind, says string) {
	h.t.Helper()
	if fault.Of(err) != kind || !strings.Contains(err.Error(), says) || done != (doctor.Resolved{}) {
		h.t.Errorf("%+v, %v: not refused with %q", done, err, says)
	}
	if e := h.newest(); e.EventType == audit.StateRowsAccepted || e.EventType == audit.StateRowsRemoved {
		h.t.Errorf("entry %d says that rows were changed", e.Sequence)
	}
}

// Whoever can write the database may change a row again, after doctor has shown it.
func TestOnlyWhatWasSeenIsAcceptedOrRemoved(t *testing.T) {
	h := newHouse(t)
	ctx := t.Context()
	before := h.rows()
	tokens, err := h.identity.SignIn(ctx, stranger, "a@example.com", secret.Bytes(password))
	h.must(err)
	var row string // of the session
	for key := range h.rows() {
		if strings.HasPrefix(key, "session/row/") && before[key] == nil {
			row = key
		}
	}
	seen := h.rows()[row]
	tokens, err = h.identity.Refresh(ctx, stranger, tokens.Refresh)
	h.must(err)
	other := h.rows()[row]
	_, err = h.identity.Refresh(ctx, stranger, tokens.Refresh)
	h.must(err)
	right := h.rows()[row]
	h.tamper(map[string][]byte{row: seen})
	f := of(h.examine(h.kms), row)
	if f == nil || !f.Acceptable() || !f.Removable() || len(f.Digest) != 16 || f.Named() != f.Row()+"@"+f.Digest {
		t.Fatalf("%+v", f)
	}
	for what, do := range map[string]func(string, ...string) (doctor.Resolved, error){"accepted": h.accept, "removed": h.remove} {
		t.Run(what, func(t *testing.T) {
			done, err := do("why", f.Row())
			h.refuses(done, err, fault.Invalid, "name it as ROW@DIGEST")
			done, err = do("why", row)
			h.refuses(done, err, fault.Invalid, "name it as ROW@DIGEST")
			for name, now := range map[string][]byte{"another value": other, "nothing": nil} {
				h.tamper(map[string][]byte{row: now})
				done, err := do("why", f.Named())
				h.refuses(done, err, fault.Conflict, f.Row()+" has changed since latticekeep doctor printed the digest "+f.Digest)
				if !bytes.Equal(h.rows()[row], now) {
					t.Errorf("%s: the row was changed", name)
				}
			}
			h.tamper(map[string][]byte{row: seen})
			done, err = do("why", f.Row()+"@absent")
			h.refuses(done, err, fault.Conflict, "has changed")
			h.tamper(map[string][]byte{row: right})
			done, err = do("why", f.Named())
			if !errors.Is(err, doctor.ErrNoRow) {
				t.Errorf("a row that is right again: %+v, %v", done, err)
			}
			h.tamper(map[string][]byte{row: seen})
		})
	}
	// Also while the command runs, behind its examination.
	for _, do := range []func(*doctor.Examination, context.Context, *writer.Log, []string, string) (doctor.Resolved, error){(*doctor.Examination).Accept, (*doctor.Examination).Remove} {
		x := h.examineToChange()
		h.tamper(map[string][]byte{row: other})
		done, err := do(x, ctx, h.log, []string{f.Named()}, "why")
		h.refuses(done, err, fault.Conflict, "has changed since")
		h.tamper(map[string][]byte{row: seen})
	}
	_, err = h.accept("why", f.Named())
	h.must(err)
	if found := h.examine(h.kms).Findings; len(found) > 0 {
		t.Errorf("%s: %v", found[0].Row(), found[0].Problems)
	}
}

// The digest of a missing row is a word, so that a row that was put in its place is not accepted.
func TestAMissingRowIsAcceptedOnlyWhileItIsMissing(t *testing.T) {
	h := newHouse(t)
	row := "tenant/" + string(h.tenant)
	value := h.rows()[row]
	h.tamper(map[string][]byte{row: nil})
	f := of(h.examine(h.kms), row)
	if f == nil || f.Digest != state.Absent || !f.Acceptable() || f.Removable() {
		t.Fatalf("%+v", f)
	}
	changed := bytes.Clone(value)
	changed[len(changed)-1] ^= 1
	h.tamper(map[string][]byte{row: changed})
	done, err := h.accept("why", f.Named())
	h.refuses(done, err, fault.Conflict, "has changed since latticekeep doctor printed the digest absent")
	h.tamper(map[string][]byte{row: nil})
	for _, digest := range []string{"0123456789abcdef", "absent!", "Absent", ""} {
		if done, err := h.accept("why", f.Row()+"@"+digest); err == nil {
			t.Errorf("with the digest %q: %+v", digest, done)
		}
	}
	_, err = h.accept("why", f.Named())
	h.must(err)

	// A missing row whose key is unknown has an id instead, and the same digest.
	h = newHouse(t)
	h.tamper(map[string][]byte{h.key(h.rows(), "user/email/", ""): nil})
	f = h.examine(h.kms).Findings[0]
	if f.Key != nil || f.Named() != "user/email/#"+f.ID+"@absent" {
		t.Fatalf("%+v", f)
	}
	done, err = h.accept("why", f.Row()+"@0123456789abcdef")
	h.refuses(done, err, fault.Conflict, f.Row()+" has changed since")
	done, err = h.remove("why", f.Named())
	h.refuses(done, err, fault.Invalid, "there is nothing to remove")
	_, err = h.accept("why", f.Named())
	h.must(err)
}

func TestADigestIsOfKeyAndValue(t *testing.T) {
	h := newHouse(t)
	x := h.examine(h.kms)
	digests := make(map[string]string)
	for key := range h.rows() {
		e, err := x.Explain(t.Context(), key)
		h.must(err)
		if other, again := digests[e.Digest]; again || len(e.Digest) != 16 {
			t.Errorf("%q has the digest %q, as has %q", key, e.Digest, other)
		}
		digests[e.Digest] = key
	}
	for _, row := range []string{"tenant/none", `"tenant/none"@0123456789abcdef`} {
		if e, err := x.Explain(t.Context(), row); err != nil || e.Digest != state.Absent || e.Row != `"tenant/none"` {
			t.Errorf("%+v, %v", e, err)
		}
	}
	row := "owner/" // another key with the same value, and the same key with another value
	owner := h.key(h.rows(), row, "")
	value := h.rows()[owner]
	moved := owner[:len(owner)-1] + "x"
	h.tamper(map[string][]byte{moved: value, owner: []byte("uid-2")})
	x = h.examine(h.kms)
	if a, b := of(x, moved), of(x, owner); a == nil || b == nil || digests[a.Digest] != "" || digests[b.Digest] != "" || a.Digest == b.Digest {
		t.Errorf("%+v, %+v", a, b)
	}
	if e, err := h.examine().Explain(t.Context(), owner); err != nil || e.Digest != "" {
		t.Errorf("without the deployment's keys: %+v, %v", e, err)
	}
}

func TestARemovedRowIsGoneForGood(t *testing.T) {
	h := newHouse(t)
	before := h.rows()
	ctx := t.Context()
	h.must(h.identity.RevokeAPIKey(ctx, h.owner, h.apiKey))
	after := h.rows()
	back := make(map[string][]byte)
	for key, value := range before {
		if strings.HasPrefix(key, "apikey/") && after[key] == nil {
			back[key] = value
		}
	}
	session := h.key(after, "session/row/", "")
	back[session] = bytes.Clone(after[session]) // damaged, and of the deployment
	back[session][40] ^= 1
	used := h.key(after, "idempotency/key/", "") // damaged, and it decides nothing
	back[used] = bytes.Clone(after[used])
	back[used][3] ^= 1
	back["sealing/key/0a"] = []byte("added")
	h.tamper(back)
	var named, rows []string
	for _, f := range h.examine(h.kms).Findings {
		if !f.Removable() {
			t.Errorf("%s cannot be removed: %v", f.Row(), f.Problems)
		}
		named, rows = append(named, f.Named()), append(rows, f.Row())
	}
	if len(named) != len(back) {
		t.Fatalf("%d rows were changed, and found are %q", len(back), rows)
	}
	done, err := h.remove("", named...)
	h.refuses(done, err, fault.Invalid, "the reason")
	done, err = h.remove("put back by somebody", append(named, named[0])...)
	h.must(err)
	e := h.newest()
	if e.EventType != audit.StateRowsRemoved || e.TenantID != "system" || e.Sequence != done.First || done.First != done.Last || done.Rows != len(rows) ||
		e.Attributes["reason"] != "put back by somebody" || len(e.Attributes["digest"]) != 64 || e.Attributes[audit.AttributeState] == "" {
		t.Errorf("%+v %+v", done, e)
	}
	for i, row := range rows {
		if e.Attributes["row_"+string(rune('1'+i))] != row {
			t.Errorf("the entry does not list %s", row)
		}
	}
	for key := range back {
		if h.rows()[key] != nil {
			t.Errorf("%q is still there", key)
		}
	}
	for _, f := range h.examine(h.kms).Findings {
		t.Errorf("afterwards %s: %v", f.Row(), f.Problems)
	}
	h.tamper(map[string][]byte{session: after[session]}) // the log commits to its absence
	if f := of(h.examine(h.kms), session); f == nil || f.Reason != state.Added {
		t.Errorf("the removed row was put back: %+v", f)
	}
}

// A row that something else needs stays, and so do those that are removed with it.
func TestARowThatIsNeededIsNotRemoved(t *testing.T) {
	h := newHouse(t)
	rows := h.rows()
	flipped := func(key string) map[string][]byte {
		value := bytes.Clone(rows[key])
		value[len(value)-2] ^= 1
		return map[string][]byte{key: value}
	}
	stray := "invitation/" + string(h.tenant) + "/inv_a"
	for name, c := range map[string]struct{ row, says string }{
		"a credential that the log has": {h.key(rows, "credential/", h.creds[0]), "has no row, but the log recorded it"},
		"an API key that is listed":     {h.key(rows, "apikey/hash/", h.apiKey), "is in the list of its tenant and has no row"},
		"a name of a credential":        {h.key(rows, "credential-name/", h.creds[0]), "in the index of names"},
		"a key of a tenant":             {h.key(rows, "key/"+string(h.tenant), "/mac"), "the row is missing"},
		"a seed of a named key":         {h.key(rows, "transit/seed/", ""), "restore a backup"},
		"a row of the deployment":       {"dev", "is one of the deployment itself"},
		"a sealing key":                 {h.key(rows, "sealing/key/", ""), "is one of the deployment itself"},
	} {
		h.tamper(flipped(c.row))
		h.tamper(map[string][]byte{stray: []byte("added")})
		x := h.examine(h.kms)
		f, other := of(x, c.row), of(x, stray)
		if f == nil || other == nil {
			t.Fatalf("%s: not found", name)
		}
		done, err := h.remove("why", other.Named(), f.Named())
		h.refuses(done, err, fault.Invalid, c.says)
		if h.rows()[stray] == nil || h.rows()[c.row] == nil {
			t.Errorf("%s: a row was removed", name)
		}
		h.tamper(rows)
	}
	h.tamper(map[string][]byte{stray: nil})
	h.tamper(map[string][]byte{"state/change/x": []byte("x")})
	for _, f := range h.examine(h.kms).Findings {
		done, err := h.remove("why", f.Named())
		h.refuses(done, err, fault.Invalid, "is one of the deployment itself")
	}
}
