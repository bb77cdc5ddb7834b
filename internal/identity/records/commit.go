package records

import (
	"context"
	"errors"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
)

// refusal is an error that is recorded. The change is not made, its entry says denied and why, and
// the caller gets the error.
type refusal struct {
	reason string
	error
}

func (r *refusal) Unwrap() error { return r.error }

// Refuse returns err as a refusal, for a change that [Store.Commit] makes: its entry says denied
// and the reason, and the caller gets err.
func Refuse(reason string, err error) error { return &refusal{reason, err} }

// ReasonOf returns the reason of a refusal, and false for every other error.
func ReasonOf(err error) (reason string, ok bool) {
	var refused *refusal
	if ok = errors.As(err, &refused); ok {
		reason = refused.reason
	}
	return reason, ok
}

// Commit makes a change together with its one entry. A change that returns a refusal must have
// written nothing.
func (s *Store) Commit(ctx context.Context, e audit.Event, change func(tx store.Tx, e *audit.Event) error) error {
	var refused *refusal
	err := s.store.Update(ctx, func(tx store.Tx) error {
		refused = nil
		e := e
		if err := change(tx, &e); errors.As(err, &refused) {
			e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: refused.reason}
		} else if err != nil {
			return err
		}
		_, err := s.guard.Append(tx, e)
		return err
	})
	if err != nil {
		return err
	}
	if refused != nil {
		return refused
	}
	return nil
}
