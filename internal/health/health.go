// Package health says whether this replica serves, and what stops it.
//
// # Model
//
// A [Check] looks at one part that requests need. Its scope says who has the fault when it fails,
// and Stops names the classes of calls that fail with it. A replica is ready while it answers reads.
//
// A fault of this replica alone makes it unready, because the others can answer in its place. A
// fault that all replicas share would make all of them unready at once, which helps nobody: callers
// would get no connection instead of a 503 with Retry-After. So a shared fault keeps a replica from
// becoming ready, and never makes a ready one unready. It shows in the report and the metrics.
//
// # Invariants
//
//   - Checks use the outcomes of the calls that requests make anyway. A [Watch] makes a call of its
//     own only when there was none lately, and at most one in ten seconds.
//   - A check judges its own part only. When it cannot look because another part fails, it passes:
//     that part has its own check.
//
// The package knows no store, no KMS and no HTTP.
package health

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Scope says who has a fault.
type Scope string

// The scopes: this replica alone, or every replica of the deployment.
const (
	Replica Scope = "replica"
	Shared  Scope = "shared"
)

// Class is a class of calls.
type Class string

// The classes: calls that read credentials, and calls that change something.
const (
	Read   Class = "read"
	Change Class = "change"
)

// Classes lists all classes.
func Classes() []Class { return []Class{Read, Change} }

// Check looks at one part that requests need.
type Check struct {
	Name  string // short and fixed: it is the value of a label
	Scope Scope
	Stops []Class // classes of calls that fail while the check fails; may be empty
	// Ask returns why the check fails, or nil. It returns when ctx ends at the latest, and may be
	// called concurrently.
	Ask func(context.Context) error
}

// Result is the outcome of a check. A nil Err means that it passed.
type Result struct {
	Check
	Err error
}

// Report is the outcome of all checks.
type Report struct {
	Results []Result
	begun   bool // the replica has answered reads before
}

// Monitor runs the checks of a replica. It is safe for concurrent use.
type Monitor struct {
	checks []Check
	begun  atomic.Bool
}

// New returns a monitor of a replica that was never ready.
func New(checks ...Check) *Monitor { return &Monitor{checks: checks} }

// Report runs all checks side by side.
func (m *Monitor) Report(ctx context.Context) Report {
	r := Report{Results: make([]Result, len(m.checks))}
	var asked sync.WaitGroup
	for i, c := range m.checks {
		asked.Go(func() { r.Results[i] = Result{c, c.Ask(ctx)} })
	}
	asked.Wait()
	if r.Stopped(Read) == nil {
		m.begun.Store(true)
	}
	r.begun = m.begun.Load()
	return r
}

// Ready returns nil while the replica is to get requests: see the package comment. Otherwise it
// returns the first reason.
func (r Report) Ready() error {
	return r.first(func(c Check) bool { return slices.Contains(c.Stops, Read) && (c.Scope == Replica || !r.begun) })
}

// Stopped returns why calls of a class fail now, or nil.
func (r Report) Stopped(class Class) error {
	return r.first(func(c Check) bool { return slices.Contains(c.Stops, class) })
}

func (r Report) first(counts func(Check) bool) error {
	for _, one := range r.Results {
		if one.Err != nil && counts(one.Check) {
			return fmt.Errorf("%s: %w", one.Name, one.Err)
		}
	}
	return nil
}

// Text returns one line for each check, as /readyz?verbose of a Kubernetes API server does, then one
// for each class of calls, then the verdict. reason gives the text of an error.
func (r Report) Text(reason func(error) string) string {
	var b strings.Builder
	for _, one := range r.Results {
		if one.Err == nil {
			fmt.Fprintf(&b, "[+]%s ok\n", one.Name)
			continue
		}
		fmt.Fprintf(&b, "[-]%s failed (%s; stops %s): %s\n", one.Name, one.Scope, stops(one.Stops), oneLine(reason(one.Err)))
	}
	for _, class := range Classes() {
		state := "served"
		if r.Stopped(class) != nil {
			state = "stopped"
		}
		fmt.Fprintf(&b, "%s calls: %s\n", class, state)
	}
	if r.Ready() != nil {
		b.WriteString("readyz check failed\n")
	} else {
		b.WriteString("readyz check passed\n")
	}
	return b.String()
}

func stops(classes []Class) string {
	if len(classes) == 0 {
		return "nothing"
	}
	names := make([]string, len(classes))
	for i, c := range classes {
		names[i] = string(c)
	}
	return strings.Join(names, " and ")
}

// oneLine joins the lines of a text, such as those that libraries make of several errors.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
