package assessor

import (
	"context"
	"crypto/rand"
	"crypto/sha3"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Note is the note of a review. It is not part of the log, so that it can be erased. The entry of the
// review has only a hash, from which nobody can guess the text without the salt.
type Note struct {
	Salt []byte `json:"salt"` // 32 random bytes
	Text string `json:"text"`
}

func newNote(text string) Note {
	n := Note{make([]byte, 32), text}
	_, _ = rand.Read(n.Salt) // never fails: crypto/rand aborts the program instead
	return n
}

// id returns the hash in the entry of the review, which is also the id of the note.
func (n Note) id() string {
	sum := sha3.Sum256(frame.Join("latticekeep/review-note/v1", n.Salt, []byte(n.Text)))
	return hex.EncodeToString(sum[:])
}

func noteKey(tenant authz.TenantID, id string) []byte {
	return []byte("review-note/" + string(tenant) + "/" + id)
}

func (r *evidenceRows) encodeNote(tenant authz.TenantID, n Note) ([]byte, error) {
	b, err := json.Marshal(n)
	if err != nil {
		return nil, fmt.Errorf("encoding a note: %w", err)
	}
	return r.seal(noteKey(tenant, n.id()), b), nil
}

// readNote returns a note and whether it exists.
func (r *evidenceRows) readNote(from store.Reader, tenant authz.TenantID, id string) (n Note, found bool, err error) {
	if raw, err := hex.DecodeString(id); err != nil || hex.EncodeToString(raw) != id || len(raw) != sha3.New256().Size() {
		return n, false, nil // no other id is looked up or recorded
	}
	key := noteKey(tenant, id)
	row, err := from.Get(key)
	if err != nil || row == nil {
		return n, false, err
	}
	content, err := r.unseal(key, row)
	if err == nil {
		err = json.Unmarshal(content, &n)
	}
	if err == nil && n.id() != id {
		err = errors.New("its hash is not its id")
	}
	if err != nil {
		return n, false, fmt.Errorf("reading a note: %w", err)
	}
	return n, true, nil
}

var errNote = fault.New(fault.NotFound, "there is no such note: it was erased, or the id is not the attribute note of a review")

const reasonNoNote = "no_such_note"

// Note returns the note of a review. Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) Note(ctx context.Context, p authz.Principal, id string) (n Note, err error) {
	if err := s.guard.Admit(ctx, p, authz.ReadAudit); err != nil {
		return n, err
	}
	found := false
	err = s.evidence.store.View(ctx, func(r store.Reader) (err error) {
		n, found, err = s.evidence.readNote(r, p.Tenant, id)
		return err
	})
	if err != nil {
		return n, fmt.Errorf("looking up a note: %w", err)
	}
	e := logEvent(audit.AuditRead, p)
	if !found {
		return n, s.guard.Refuse(ctx, e, audit.Denied, reasonNoNote, errNote)
	}
	e.Attributes = map[string]string{audit.AttributeNote: id}
	return n, s.guard.Record(ctx, e)
}

// EraseNote deletes the note of a review. The review stays. Errors: fault.Forbidden,
// fault.NotFound, fault.Unavailable.
func (s *Service) EraseNote(ctx context.Context, p authz.Principal, id string) error {
	return eraseNote(ctx, s.evidence.evidenceRows, s.guard, p, id)
}

// EraseNote is [Service.EraseNote] for the store of a deployment that is not served. unseal returns the
// content of a row under a MAC.
func EraseNote(ctx context.Context, s store.Store, g *guard.Guard, unseal func(key, row []byte) ([]byte, error), p authz.Principal, id string) error {
	return eraseNote(ctx, evidenceRows{store: s, unseal: unseal}, g, p, id)
}

func eraseNote(ctx context.Context, rows evidenceRows, g *guard.Guard, p authz.Principal, id string) error {
	if err := g.Admit(ctx, p, authz.EraseReviewNote); err != nil {
		return err
	}
	found := false
	err := rows.store.Update(ctx, func(tx store.Tx) (err error) {
		e := logEvent(audit.ReviewNoteErased, p)
		if _, found, err = rows.readNote(tx, p.Tenant, id); err != nil {
			return err
		}
		if found {
			e.Attributes = map[string]string{audit.AttributeNote: id}
			err = tx.Delete(noteKey(p.Tenant, id))
		} else {
			e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reasonNoNote}
		}
		if err == nil {
			_, err = g.Append(tx, e)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("erasing a note: %w", err)
	}
	if !found {
		return errNote
	}
	return nil
}

// logEvent returns the event of p's success with the log.
func logEvent(t audit.EventType, p authz.Principal) audit.Event {
	return audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.LogResource}}
}
