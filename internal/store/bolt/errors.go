package bolt

import (
	"errors"
	"fmt"
	"runtime/debug"
	"syscall"

	berrors "go.etcd.io/bbolt/errors"

	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store/bolt/pages"
)

const damaged = pages.Damaged

// guard runs calls to bbolt, and nothing else, and turns their panics into errors. bbolt asserts
// what it finds in pages, and the memory map faults where the file cannot be read.
func guard(do func() error) (err error) {
	before := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(before)
		if p := recover(); p != nil {
			err = fault.Wrap(fault.Internal, damaged, fmt.Errorf("bbolt panicked: %v", p))
		}
	}()
	return do()
}

// unavailable classifies an error of bbolt or the file system. It leaves errors alone that guard
// and openFile have classified.
func unavailable(err error) error {
	var k fault.Kind
	if errors.As(err, &k) {
		return err
	}
	reason := fault.ReasonStore
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		reason = fault.ReasonSpace
	}
	return fault.Outage(reason, "the store could not be written: free space or repair the disk, then retry", err)
}

// IsInUse reports whether [Open] failed because another process has the file open.
func IsInUse(err error) bool { return errors.Is(err, berrors.ErrTimeout) }

// refused says that the file system keeps this process from the database.
func refused(path string, err error) error {
	return fault.Wrap(fault.Invalid, "the database may not be opened", durable.ExplainRefusal(path, err))
}

func ended(err error) error {
	return fault.Outage(fault.ReasonTimeout, "the request ended before the store could answer: retry", err)
}

func errClosed() error { return fault.Outage(fault.ReasonStore, "the store is closed", nil) }

var errRecovering = fault.Outage(fault.ReasonStore, "the store is recovering from a failure: retry", nil)

// over is the check function of a Reader whose closure has returned.
func over() error {
	return fault.Wrap(fault.Internal, fault.Internal.Error(), errors.New("a store transaction was used outside its closure"))
}
