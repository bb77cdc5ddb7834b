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

// RowFault is a stored row that does not hold, or that is missing.
type RowFault struct {
	Key      []byte // the row's, or the one that it would have
	Sequence uint64 // entry that contradicts the row; 0: none does
	Reason   string
}

// FirstFault returns a function that remembers faults, and one that returns the fault with the
// lowest sequence as a [Broken], or nil.
func FirstFault() (found func(RowFault), first func() error) {
	var least *Broken
	found = func(f RowFault) {
		if least == nil || f.Sequence < least.Sequence {
			least = &Broken{Sequence: f.Sequence, Reason: f.Reason}
		}
	}
	return found, func() error {
		if least == nil {
			return nil
		}
		return least
	}
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
