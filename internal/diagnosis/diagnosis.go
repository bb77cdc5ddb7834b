// Package diagnosis says of each part of a deployment whether it is well, why not, and what to do.
//
// # Model
//
// A [Check] looks at one [Part] and returns lines, mostly one. [Run] runs all checks side by side and
// returns a [Report]. There is one table of parts, so a running server, a stopped deployment and a
// configuration that no server has used yet are described in the same words.
//
// # Invariants
//
//   - A check changes nothing and makes no file.
//   - A check that does not return in time is a failed line. Run does not wait for it.
//   - Lines hold no secret and no plaintext, so that a report can be pasted into a ticket.
//
// A diagnosis decides nothing: readiness is package health. The package knows no store and no KMS;
// package inspection has the checks.
package diagnosis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// Status is what a line says of its part. The words are part of the JSON that scripts read.
type Status string

// The statuses, worst first. A skipped part could not be looked at, and another line says why, or
// somebody else looks at it.
const (
	Failed  Status = "failed"
	Warning Status = "warning"
	Skipped Status = "skipped"
	OK      Status = "ok"
)

var statuses = []Status{Failed, Warning, Skipped, OK}

// Line says how a part is.
type Line struct {
	Part    Part   `json:"part"`
	Status  Status `json:"status"`
	Message string `json:"message"`
	Remedy  string `json:"remedy,omitempty"`  // what to do; empty when all is well
	Runbook string `json:"runbook,omitempty"` // URL of the page that says more; empty when all is well
	Err     error  `json:"-"`                 // why the part failed, for an exit status; nil when another process looked
}

// Well returns a line of a part that is well.
func Well(format string, args ...any) Line {
	return Line{Status: OK, Message: fmt.Sprintf(format, args...)}
}

// Skip returns a line of a part that could not be looked at because of another one.
func Skip(why string) Line { return Line{Status: Skipped, Message: why} }

// Warn returns a line of a part that serves, and will not for ever.
func Warn(remedy, format string, args ...any) Line {
	return Line{Status: Warning, Message: fmt.Sprintf(format, args...), Remedy: remedy}
}

// Fail returns a line of a part that has failed.
func Fail(remedy string, err error) Line {
	return Line{Status: Failed, Message: oneLine(err.Error()), Remedy: remedy, Err: err}
}

// Check looks at one part of a deployment.
type Check struct {
	Part Part
	Look func(context.Context) []Line // at least one line; ends with its context, if it can
}

// Only returns the checks of some parts; without any it returns all.
func Only(checks []Check, parts ...Part) []Check {
	if len(parts) == 0 {
		return checks
	}
	return slices.DeleteFunc(slices.Clone(checks), func(c Check) bool { return !slices.Contains(parts, c.Part) })
}

// Limit is how long a check may take.
const Limit = 5 * time.Second

// Report says how a deployment is. Its JSON is a documented shape: fields are only ever added.
type Report struct {
	Status  Status    `json:"status"`  // the worst of the lines, without those that are skipped
	Version string    `json:"version"` // version of the program that looked
	Time    time.Time `json:"time"`    // when it began to look, in UTC
	Lines   []Line    `json:"lines"`   // in the order of the parts
}

// Run runs the checks side by side, each for at most limit.
func Run(ctx context.Context, version string, limit time.Duration, checks ...Check) Report {
	r := Report{Status: OK, Version: version, Time: time.Now().UTC().Truncate(time.Second), Lines: []Line{}}
	found := make([]chan []Line, len(checks))
	for i, c := range checks {
		found[i] = make(chan []Line, 1)
		go func() {
			ctx, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			found[i] <- c.Look(ctx)
		}()
	}
	late := time.NewTimer(limit + limit/4) // for checks that do not end with their context
	defer late.Stop()
	for i, c := range checks {
		lines := awaitLines(ctx, found[i], late)
		for _, l := range lines {
			l.Part = c.Part
			r.Lines = append(r.Lines, l.withRunbook())
		}
	}
	r.judge()
	return r
}

// awaitLines returns the lines of a check, or one that says that it hangs.
func awaitLines(ctx context.Context, found <-chan []Line, late *time.Timer) []Line {
	select {
	case lines := <-found:
		return lines
	case <-late.C:
		late.Reset(0) // the next one has had as much time
	case <-ctx.Done():
	}
	select {
	case lines := <-found:
		return lines
	default:
		return []Line{Fail("look at the disk, the network and the service behind it", fmt.Errorf("no answer in time: %w", context.DeadlineExceeded))}
	}
}

// Add adds lines to a report.
func (r *Report) Add(part Part, lines ...Line) {
	for _, l := range lines {
		l.Part = part
		r.Lines = append(r.Lines, l.withRunbook())
	}
	r.judge()
}

// withRunbook adds the page to a line of which there is more to say.
func (l Line) withRunbook() Line {
	if l.Status == Failed || l.Status == Warning {
		l.Runbook = l.Part.page()
	}
	return l
}

// judge sorts the lines by their parts and sets the status.
func (r *Report) judge() {
	slices.SortStableFunc(r.Lines, func(a, b Line) int { return cmp.Compare(a.Part.place(), b.Part.place()) })
	r.Status = OK
	for _, l := range r.Lines {
		if l.Status != Skipped && slices.Index(statuses, l.Status) < slices.Index(statuses, r.Status) {
			r.Status = l.Status
		}
	}
}

// Of returns the worst status of a part's lines, and "" without any.
func (r Report) Of(part Part) (worst Status) {
	for _, s := range statuses {
		if slices.ContainsFunc(r.Lines, func(l Line) bool { return l.Part == part && l.Status == s }) {
			return s
		}
	}
	return ""
}

// Errors returns the errors of the failed lines. A line that another process has found is an error
// without a cause.
func (r Report) Errors() (errs []error) {
	for _, l := range r.Lines {
		if l.Status == Failed {
			errs = append(errs, cmp.Or(l.Err, errors.New(l.Message)))
		}
	}
	return errs
}

// Print writes the report as aligned text, the worst lines first, and a summary.
func (r Report) Print(w io.Writer) error {
	lines := slices.Clone(r.Lines)
	slices.SortStableFunc(lines, func(a, b Line) int {
		return cmp.Compare(slices.Index(statuses, a.Status), slices.Index(statuses, b.Status))
	})
	width, count := 0, make(map[Status]int)
	for _, l := range lines {
		width = max(width, len(l.Part))
		count[l.Status]++
	}
	var b strings.Builder
	for _, l := range lines {
		status := string(l.Status)
		if l.Status == Failed {
			status = "FAILED"
		}
		fmt.Fprintf(&b, "%-7s  %-*s  %s\n", status, width, l.Part, printable(l.Message))
		indent := strings.Repeat(" ", 7+2+width+2)
		if l.Remedy != "" {
			fmt.Fprintf(&b, "%sdo: %s\n", indent, printable(l.Remedy))
		}
		if l.Runbook != "" {
			fmt.Fprintf(&b, "%ssee: %s\n", indent, l.Runbook)
		}
	}
	var counts []string
	for _, s := range statuses {
		if n := count[s]; n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, s))
		}
	}
	fmt.Fprintf(&b, "%s: %s (latticekeep %s, %s)\n", r.Status, strings.Join(counts, ", "), printable(r.Version), r.Time.Format(time.RFC3339))
	_, err := io.WriteString(w, b.String())
	return err
}

// printable replaces what controls a terminal: a server, a certificate or a file name chose the text.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, text)
}

// oneLine joins the lines of a text, such as those that libraries make of several errors.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// Latest looks for callers who may ask at any rate. It is safe for concurrent use.
type Latest struct {
	Run func(context.Context) Report

	mu     sync.Mutex
	at     time.Time
	report Report
}

// lasts is how long a report is given to later callers, too.
const lasts = time.Second

// Report returns a report that is at most a second old. It goes on when a caller hangs up, since
// others get it.
func (l *Latest) Report(ctx context.Context) Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.at.IsZero() || time.Since(l.at) >= lasts {
		l.report, l.at = l.Run(context.WithoutCancel(ctx)), time.Now()
	}
	return l.report
}
