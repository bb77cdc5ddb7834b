package doctor_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/doctor"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// explain explains a row.
func (h *house) explain(x *doctor.Examination, row string) *doctor.Explanation {
	h.t.Helper()
	e, err := x.Explain(h.t.Context(), row)
	h.must(err)
	return e
}

func TestAnExplanationSaysWhatIsStored(t *testing.T) {
	h := newHouse(t)
	rows := h.rows()
	tenant, user := string(h.tenant), h.user.ID
	session := h.key(rows, "session/row/", user)
	for _, c := range []struct{ key, value, stored, resource string }{ // value "": the stored one
		{h.key(rows, "credential/", h.creds[0]), "", "version 2 of credential " + h.creds[0] + " of tenant " + tenant + ", sealed ", h.creds[0]},
		{h.key(rows, "credential/", h.creds[1]), "junk", "4 bytes that are no record of a credential", h.creds[1]},
		{h.key(rows, "owner/", ""), "", `the UID "uid-1"`, h.key(rows, "owner/", "")[len("owner/"+tenant+"/"):]},
		{"key/system/current", "", "version 1", "system"},
		{"key/" + tenant + "/current", "\x00\x00\x01\x02", "version 258", tenant},
		{"key/" + tenant + "/current", "abc", "3 bytes", tenant},
		{"key/" + tenant + "/00000001/mac", "abcd", "4 bytes", tenant},
		{"user/row/" + tenant + "/" + user, "short", "5 bytes, too short for a MAC", user},
		{"namespace/cluster/ns-uid", "", `a MAC, and "ten_`, "ns-uid"},
		{"transit/default/" + tenant, "", `a MAC, and "tkey_`, tenant},
		{"sealing/current", "", `a MAC, and "` + h.key(rows, "sealing/key/", "")[len("sealing/key/"):], h.key(rows, "sealing/key/", "")[len("sealing/key/"):]},
		{"sealing/current", "short", "5 bytes, too short for a MAC", ""},
		{h.key(rows, "user/row/", user), "", `role "owner", verified "false"`, user},
		{h.key(rows, "user/row/", user), "", ", and, not shown, email, password", user},
		{h.key(rows, "user/password/", user), "", " bytes", user},
		{h.key(rows, "ticket/hash/", user), "", `tenant "ten_`, user},
		{h.key(rows, "owned/", "uid-1"), "", `version "1", credential "cred_`, "uid-1"},
		{h.key(rows, "apikey/hash/", h.apiKey), "", `id "` + h.apiKey, h.apiKey},
		{"apikey/hash/1/none", "", "nothing", ""},
		{session, "", `tenant "ten_`, session[len("session/row/"+user+"/"):]},
		{"none/x", "abcd", "4 bytes", ""},
	} {
		if c.value != "" {
			h.tamper(map[string][]byte{c.key: []byte(c.value)})
		}
		x := h.examine(h.kms)
		e := h.explain(x, c.key)
		f, known := state.FamilyOf([]byte(c.key))
		if !strings.Contains(e.Stored, c.stored) || e.Resource != c.resource || e.Row != fmt.Sprintf("%+q", c.key) || e.Finding != of(x, c.key) ||
			e.Family != f.Prefix || known && (e.Says != f.Says || e.Risk != f.Risk) {
			t.Errorf("%q with %q: %+v; want %q of %q", c.key, c.value, e, c.stored, c.resource)
		}
		if (c.stored == "version 1" || strings.Contains(c.stored, "bytes")) && c.stored[0] != ' ' && e.Stored != c.stored {
			t.Errorf("%q: stored %q", c.key, e.Stored)
		}
		h.tamper(map[string][]byte{c.key: rows[c.key]})
	}
}

func TestAnExplanationSaysWhatTheStateHas(t *testing.T) {
	h := newHouse(t)
	rows := h.rows()
	owner, name, gone := h.key(rows, "owner/", ""), h.key(rows, "credential-name/", h.creds[0]), h.key(rows, "transit/default/", "")
	h.tamper(map[string][]byte{owner: []byte("uid-2"), owner + "x": []byte("uid-1"), gone: nil})
	x, without := h.examine(h.kms), h.examine()
	for _, c := range []struct{ key, want string }{
		{h.key(rows, "idempotency/key/", ""), "nothing: the log commits to deciding rows only"},
		{owner + "x", "absent"}, {gone, "present"}, {owner, "present, with another value"},
		{"tenant/none", "absent, as it is"}, {name, "present, with this value"},
	} {
		if e := h.explain(x, c.key); e.State != c.want {
			t.Errorf("%q: %q, want %q", c.key, e.State, c.want)
		}
		if e := h.explain(without, c.key); e.Deciding && e.State != "unknown: the state was not checked" {
			t.Errorf("%q without the deployment's keys: %q", c.key, e.State)
		}
	}
	says := map[state.Reason]string{state.Added: "added: the deployment deleted", state.Removed: "removed: the row is missing", state.Replaced: "replaced: it is not the row"}
	for _, key := range []string{owner + "x", gone, owner} {
		f := of(x, key)
		if f == nil || len(f.Problems) == 0 || !slices.ContainsFunc(f.Problems, func(p string) bool { return strings.HasPrefix(p, says[f.Reason]) }) {
			t.Errorf("%q: %+v", key, f)
		}
	}
	if f := of(x, gone); f.Reason != state.Removed || f.Family != "transit/default/" || len(f.Problems) != 1 {
		t.Errorf("%+v", f)
	}
}

// A missing row whose key is unknown has an id. Its group is what is known of the key.
func TestAMissingRowIsExplainedByItsID(t *testing.T) {
	h := newHouse(t)
	for range 16 { // more versions than are tried
		_, _, err := h.transit.RotateKey(t.Context(), h.owner, h.named, false)
		h.must(err)
	}
	rows := h.rows()
	version := "transit/version/" + string(h.tenant) + "/" + h.named + "/"
	h.tamper(map[string][]byte{
		h.key(rows, "user/email/", ""): nil, h.key(rows, "ticket/hash/", ""): nil, h.key(rows, "ticket/of/", ""): nil, version + "00000012": nil,
		"zone": []byte("none"), h.key(rows, "user/password/", ""): []byte("0123"),
	})
	x := h.examine(h.kms)
	ids := 0
	for _, f := range x.Findings {
		if f.Key != nil {
			continue
		}
		ids++
		e := h.explain(x, f.Named())
		of, _ := state.FamilyOf([]byte(f.Family))
		stored := "nothing"
		if f.Family == "transit/version/" {
			stored += fmt.Sprintf("; its key begins with %+q", version)
		}
		if e.Row != f.Row() || e.Family != f.Family || e.Stored != stored || e.Digest != state.Absent || e.State != "present: the deployment did not delete the row" ||
			!e.Deciding || e.Says != of.Says || e.Risk != of.Risk || e.Finding != f || e.Entries != nil {
			t.Errorf("%+v", e)
		}
	}
	if ids < 3 {
		t.Errorf("%d rows whose keys are unknown", ids)
	}
	for range 16 { // the findings come out of a map
		found := h.examine(h.kms).Findings
		if !slices.IsSortedFunc(found, func(a, b *doctor.Finding) int {
			switch {
			case (a.Key == nil) == (b.Key == nil):
				return strings.Compare(string(a.Key)+a.Row(), string(b.Key)+b.Row())
			case a.Key == nil:
				return 1
			}
			return -1
		}) {
			t.Error("rows with a known key come first, each in the order of their keys")
		}
	}
	if e, err := x.Explain(t.Context(), "user/email/#"+strings.Repeat("0", 36)); !errors.Is(err, doctor.ErrNoRow) {
		t.Errorf("an id of no row: %+v, %v", e, err)
	}
}

// Entries name the user of a session and not the session, so what it did begins behind the newest entry.
func TestAnExplanationTellsWhatASessionsUserDid(t *testing.T) {
	h := newHouse(t)
	ctx := t.Context()
	row := h.key(h.rows(), "session/row/", h.user.ID)
	stray := row[:len(row)-26] + strings.Repeat("a", 26)
	if e := h.explain(h.examine(h.kms), row); e.Activity == nil || e.Activity.Since.Type != audit.UserSignedIn || e.Activity.Count() != 0 {
		t.Errorf("%+v %+v", e, e.Activity)
	}
	for range 2 {
		_, err := h.identity.SignIn(ctx, stranger, "a@example.com", secret.Bytes(password))
		h.must(err)
	}
	h.tamper(map[string][]byte{stray: []byte("no entry has this session")})
	x := h.examine(h.kms)
	e := h.explain(x, row)
	if a := e.Activity; a == nil || a.Count() != 2 || a.Types[audit.UserSignedIn] != 2 || a.First <= a.Since.Sequence || a.Last <= a.First {
		t.Errorf("%+v %+v", e, a)
	}
	if e := h.explain(x, stray); e.Activity != nil || e.Entries != nil {
		t.Errorf("a session that no entry names: %+v", e)
	}
}

// A resource may have any number of entries. The newest that changed it are shown, the last one last.
func TestAnExplanationShowsTheNewestChanges(t *testing.T) {
	h := newHouse(t)
	for range 12 {
		_, _, err := h.transit.RotateKey(t.Context(), h.owner, h.named, false)
		h.must(err)
	}
	last := h.newest().Sequence
	_, err := h.vault.Read(t.Context(), h.owner, vault.ByID(h.creds[0])) // it changes nothing
	h.must(err)
	x := h.examine(h.kms)
	e := h.explain(x, "transit/key/"+string(h.tenant)+"/"+h.named)
	if n := len(e.Entries); n != 10 || e.Entries[n-1].Sequence != last || e.Entries[0].Sequence >= last || e.Entries[0].Type != audit.KeyRotated {
		t.Errorf("%d entries, %v", n, e.Entries)
	}
	for _, e := range h.explain(x, h.key(h.rows(), "credential/", h.creds[0])).Entries {
		if e.Type == audit.CredentialUnsealed {
			t.Errorf("a read is shown as a change: %s", e)
		}
	}
	if e := h.explain(x, h.key(h.rows(), "owned/", "uid-1")); len(e.Entries) == 0 {
		t.Error("no entry of the operator names the object")
	}
}
