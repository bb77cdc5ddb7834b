package overview

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/diagnosis"
)

// Health is how a part of the deployment is, as every tenant may know it.
type Health struct {
	Part    diagnosis.Part
	Status  string // "ok", "warning", "failed" or "unknown"
	Message string
}

// unknown is the status of a part that was not looked at, or not in time.
const unknown = "unknown"

// messages has the parts that tenants are told of, in their order, and what is said of each. The lines of
// the diagnosis name paths, addresses and keys, so they stay with the operator.
var messages = []struct {
	part                diagnosis.Part
	ok, warning, failed string
}{
	{diagnosis.Chain, "The audit log is verified.", "The audit log is not verified while the server runs.", "The audit log does not verify, or takes no entries."},
	{diagnosis.Rows, "Every stored row is the one that the log commits to.", "Not every stored row is bound to the log yet.", "A stored row is not the one that the log commits to."},
	{diagnosis.Anchors, "Places outside of the database keep checkpoints of the log.", "No place outside of the database keeps a checkpoint, or one lags behind.", "A checkpoint that is kept outside of the database and the log disagree."},
	{diagnosis.KMS, "The key-management service wraps and opens keys.", "A key of the key-management service is not in order.", "The key-management service does not open keys."},
	{diagnosis.Backups, "The newest backup is verified and recent.", "It is not known that there is a recent and verified backup.", "There is no recent backup that was verified, or its place cannot be reached."},
	{diagnosis.Certificates, "Certificates are valid.", "A certificate expires soon, or there is none.", "A certificate is not valid."},
}

// shownParts returns the parts of which an overview says something: only those are looked at for it.
func shownParts() (parts []diagnosis.Part) {
	for _, m := range messages {
		parts = append(parts, m.part)
	}
	return parts
}

// healthOf returns what a report says to tenants. verifiedTo is the entry up to which the log is verified, 0
// for none.
func healthOf(r *diagnosis.Report, verifiedTo uint64) []Health {
	all := make([]Health, 0, len(messages))
	for _, m := range messages {
		h := Health{m.part, unknown, "Not known at the moment."}
		if r != nil {
			switch r.Of(m.part) {
			case diagnosis.OK:
				h.Status, h.Message = "ok", m.ok
			case diagnosis.Warning:
				h.Status, h.Message = "warning", m.warning
			case diagnosis.Failed:
				h.Status, h.Message = "failed", m.failed
			}
		}
		if h.Part == diagnosis.Chain && h.Status == "ok" && verifiedTo > 0 {
			h.Message = fmt.Sprintf("The audit log is verified up to entry %d.", verifiedTo)
		}
		all = append(all, h)
	}
	return all
}

const (
	lasts    = time.Minute            // how long a report is shown
	outdated = 5 * time.Minute        // after that it is not shown at all
	patience = 400 * time.Millisecond // how long a caller waits for a newer one
)

// doctor looks at the deployment for callers who do not wait for what hangs. It is safe for concurrent use.
type doctor struct {
	look func(context.Context) diagnosis.Report

	mu     sync.Mutex
	report *diagnosis.Report
	at     time.Time
	coming chan struct{} // closed once the look that runs now has ended; nil: none runs
}

// latest returns a report that is a few seconds old, an older one while a look hangs, or nil.
func (d *doctor) latest(ctx context.Context) *diagnosis.Report {
	d.mu.Lock()
	if d.report != nil && time.Since(d.at) < lasts {
		defer d.mu.Unlock()
		return d.report
	}
	if d.coming == nil {
		d.coming = make(chan struct{})
		go d.run(context.WithoutCancel(ctx), d.coming)
	}
	coming := d.coming
	d.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-coming:
	case <-timer.C:
	case <-ctx.Done():
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Since(d.at) > outdated {
		return nil
	}
	return d.report
}

func (d *doctor) run(ctx context.Context, done chan struct{}) {
	r := d.look(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.report, d.at, d.coming = &r, time.Now(), nil
	close(done)
}
