package audit

import (
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// errDamagedLog reports that the rows read are not the rows that were written.
var errDamagedLog = fault.New(fault.Internal, "the audit log is damaged: run latticekeep audit verify")

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

// damaged reports whether err means that the rows read are not the rows that were written.
func damaged(err error) bool { return err != nil && fault.Of(err) == fault.Internal }

func unlessDamaged(err error) error {
	if errors.Is(err, errDamagedLog) {
		return nil
	}
	return err
}

// unlessDamage returns err, or nil if err reports damage.
func unlessDamage(err error) error {
	if damaged(err) {
		return nil
	}
	return err
}

// errNoEntry is a [fault.NotFound].
var errNoEntry = fault.New(fault.NotFound, "the log holds no entry with this sequence")
