package assessor

import (
	"bytes"
	"crypto/sha3"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/story"
)

// newest returns the newest entry of a type in the part of the log of story.Ours.
func (w *world) newest(t audit.EventType) *audit.Entry {
	w.t.Helper()
	all := w.entries(story.Ours)
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].EventType == t {
			return all[i]
		}
	}
	w.t.Fatalf("no %s", t)
	return nil
}

func TestANoteIsBesideTheLogUntilItIsErased(t *testing.T) {
	w := newWorld(t)
	w.Registered()
	const text = "Ada's machine had the old key. \u00e9"
	r, err := w.service.ReviewAccess(t.Context(), story.Reviewer, text)
	check(t, err)
	e := w.newest(audit.AccessReviewed)
	if e.Sequence != r.Sequence || e.Attributes[audit.AttributeNote] != r.NoteID || strings.Contains(string(w.exported()), "machine") {
		t.Errorf("%+v of %+v", e, r)
	}
	n, err := w.service.Note(t.Context(), story.Reviewer, r.NoteID)
	check(t, err)
	sum := sha3.Sum256(frame.Join("latticekeep/review-note/v1", n.Salt, []byte(text)))
	if n.Text != text || len(n.Salt) != 32 || hex.EncodeToString(sum[:]) != r.NoteID {
		t.Errorf("%+v", n)
	}
	if e := w.newest(audit.AuditRead); e.Attributes[audit.AttributeNote] != r.NoteID {
		t.Errorf("%+v", e)
	}
	second, err := w.service.ReviewAccess(t.Context(), story.Reviewer, text)
	check(t, err)
	if second.NoteID == r.NoteID {
		t.Error("two equal notes have one hash: a text can be guessed")
	}
	without, err := w.service.ReviewAccess(t.Context(), story.Reviewer, "")
	if err != nil || without.NoteID != "" {
		t.Error(without, err)
	}
	if _, ok := w.newest(audit.AccessReviewed).Attributes[audit.AttributeNote]; ok {
		t.Error("a review without a note names one")
	}

	other := story.Owner
	other.Tenant = story.Theirs
	auditor := story.Reviewer
	auditor.Scopes = authz.Auditor.Scopes()
	for name, failed := range map[string]error{
		"of another tenant": w.service.EraseNote(t.Context(), other, r.NoteID),
		"no id":             w.service.EraseNote(t.Context(), story.Owner, "../x"),
		"upper case":        w.service.EraseNote(t.Context(), story.Owner, strings.ToUpper(r.NoteID)),
		"unknown":           w.service.EraseNote(t.Context(), story.Owner, strings.Repeat("0", 64)),
		"erased":            errors.Join(w.service.EraseNote(t.Context(), story.Owner, second.NoteID), w.service.EraseNote(t.Context(), story.Owner, second.NoteID)),
	} {
		if !errors.Is(failed, fault.NotFound) {
			t.Errorf("%s: %v", name, failed)
		}
	}
	if err := w.service.EraseNote(t.Context(), auditor, r.NoteID); !errors.Is(err, fault.Forbidden) {
		t.Error("by an auditor:", err)
	}
	if _, err := w.service.Note(t.Context(), other, r.NoteID); !errors.Is(err, fault.NotFound) {
		t.Error("read in another tenant:", err)
	}
	check(t, w.service.EraseNote(t.Context(), story.Owner, r.NoteID))
	if e := w.newest(audit.ReviewNoteErased); e.Outcome != audit.Success || e.Attributes[audit.AttributeNote] != r.NoteID || e.Actor.ID != story.Owner.ID {
		t.Errorf("%+v", e)
	}
	if _, err := w.service.Note(t.Context(), story.Owner, r.NoteID); !errors.Is(err, fault.NotFound) {
		t.Error("read after it was erased:", err)
	}
	check(t, w.store.Close())
	if file, err := os.ReadFile(w.path); err != nil || bytes.Contains(file, []byte("machine had")) {
		t.Error("the file still has the text", err)
	}
}

// Somebody who writes the database cannot make a review say anything else.
func TestANoteThatSomebodyChangedIsRefused(t *testing.T) {
	w := newWorld(t)
	w.Registered()
	r, err := w.service.ReviewAccess(t.Context(), story.Reviewer, "all right")
	check(t, err)
	forged := newNote("nothing was right")
	for name, seal := range map[string]func(key, content []byte) []byte{
		"under a MAC":   w.service.evidence.seal,
		"without a MAC": func(_, content []byte) []byte { return content },
	} {
		check(t, w.store.Update(t.Context(), func(tx store.Tx) error {
			key := noteKey(story.Ours, r.NoteID)
			return tx.Put(key, seal(key, []byte(`{"salt":"`+strings.Repeat("A", 43)+`=","text":"`+forged.Text+`"}`)))
		}))
		if n, err := w.service.Note(t.Context(), story.Owner, r.NoteID); err == nil || errors.Is(err, fault.NotFound) {
			t.Errorf("%s: %+v, %v", name, n, err)
		}
	}
}
