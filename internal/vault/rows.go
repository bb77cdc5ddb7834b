package vault

import (
	"errors"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// isDamaged reports whether an error is about what is stored: a row that cannot be decoded, or that is
// not the one that was written last.
func isDamaged(err error) bool { return errors.Is(err, fault.Internal) || state.IsRefused(err) }

// appendEvent is [guard.Guard.Append] for callers that do not need the receipt.
func appendEvent(guard *guard.Guard, tx store.Tx, e audit.Event) error {
	_, err := guard.Append(tx, e)
	return err
}
