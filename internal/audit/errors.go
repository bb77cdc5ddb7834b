package audit

import (
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// ErrDamagedLog reports that the rows read are not the rows that were written.
var ErrDamagedLog = fault.New(fault.Internal, "the audit log is damaged: run latticekeep audit verify")

// Broken names the place where a chain is broken.
type Broken struct {
	Sequence uint64 // first bad sequence
	Reason   string
}

func (b *Broken) Error() string {
	return fmt.Sprintf("the chain is broken at sequence %d: %s", b.Sequence, b.Reason)
}

// IsBroken returns the [Broken] in err. It returns false for other errors, such as a failure to
// read the chain.
func IsBroken(err error) (*Broken, bool) {
	var b *Broken
	ok := errors.As(err, &b)
	return b, ok
}

// IsDamage reports whether err means that the rows read are not the rows that were written.
func IsDamage(err error) bool { return err != nil && fault.Of(err) == fault.Internal }

// IgnoreDamagedRows returns err, or nil if err is [ErrDamagedLog]. Unlike [IgnoreDamage], it keeps
// other internal errors.
func IgnoreDamagedRows(err error) error {
	if errors.Is(err, ErrDamagedLog) {
		return nil
	}
	return err
}

// IgnoreDamage returns err, or nil if [IsDamage]. Callers use it where another check reports the
// damage.
func IgnoreDamage(err error) error {
	if IsDamage(err) {
		return nil
	}
	return err
}

// ErrNoEntry is a [fault.NotFound].
var ErrNoEntry = fault.New(fault.NotFound, "the log holds no entry with this sequence")
