package bolt

import (
	"sync/atomic"
	"time"
)

// disk runs the steps that must reach the disk, and knows how long the writer has waited for them.
type disk struct {
	now       func() time.Time
	fault     func(step string, do func() error) error // Options.fault
	busySince atomic.Int64                             // Unix nanoseconds since which the writer waits for the disk; 0 when it does not
}

// durably runs one step that must reach the disk.
func (d *disk) durably(step string, do func() error) error {
	if d.fault == nil {
		return do()
	}
	return d.fault(step, do)
}

// busy marks the time during which the writer waits for the disk.
func (d *disk) busy() (end func()) {
	d.busySince.Store(d.now().UnixNano())
	return func() { d.busySince.Store(0) }
}

// hangs reports whether the writer has waited for the disk longer than limit.
func (d *disk) hangs(limit time.Duration) bool {
	since := d.busySince.Load()
	return since != 0 && d.now().Sub(time.Unix(0, since)) > limit
}
