package audit

import (
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// errDamagedLog says that what was read is not what was written.
var errDamagedLog = fault.New(fault.Internal, "the audit log is damaged: run latticekeep audit verify")

// Broken says where a chain stops holding.
type Broken struct {
	Sequence uint64 // the first bad one
	Reason   string
}

func (b *Broken) Error() string {
	return fmt.Sprintf("the chain is broken at sequence %d: %s", b.Sequence, b.Reason)
}

// IsBroken returns the fault that err reports, if it is one of the chain and
// not of reading it.
func IsBroken(err error) (*Broken, bool) {
	var b *Broken
	ok := errors.As(err, &b)
	return b, ok
}

// damaged reports whether an error says that what was read is not what was
// written.
func damaged(err error) bool { return err != nil && fault.Of(err) == fault.Internal }

func unlessDamaged(err error) error {
	if err == errDamagedLog {
		return nil
	}
	return err
}

// unlessDamage returns an error that is not of damage.
func unlessDamage(err error) error {
	if damaged(err) {
		return nil
	}
	return err
}

// errNoEntry is a [fault.NotFound].
var errNoEntry = fault.New(fault.NotFound, "the log holds no entry with this sequence")
