package diagnosis_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/diagnosis"
)

func check(part diagnosis.Part, lines ...diagnosis.Line) diagnosis.Check {
	return diagnosis.Check{Part: part, Look: func(context.Context) []diagnosis.Line { return lines }}
}

// A report has the order of the table as JSON, and as text the worst first. A name that somebody chose
// cannot control a terminal.
func TestAReportPutsTheWorstFirst(t *testing.T) {
	r := diagnosis.Run(t.Context(), "v1", time.Second,
		check(diagnosis.Mail, diagnosis.Well("it answers")),
		check(diagnosis.KMS, diagnosis.Fail("look at it", errors.New("it does\tnot\nanswer\x1b[2J"))),
		check(diagnosis.Anchors, diagnosis.Warn("set one", "there is none")),
		check(diagnosis.Disk, diagnosis.Skip("not here")))
	if r.Status != diagnosis.Failed || r.Lines[0].Part != diagnosis.Disk || r.Lines[3].Part != diagnosis.Mail || len(r.Errors()) != 1 {
		t.Errorf("%+v", r)
	}
	r.Time = time.Date(2026, 11, 25, 3, 0, 0, 0, time.UTC)
	var b strings.Builder
	if err := r.Print(&b); err != nil {
		t.Fatal(err)
	}
	const want = `FAILED   kms      it does not answer?[2J
                  do: look at it
                  see: https://github.com/latticekeep/latticekeep/blob/main/docs/runbooks/kms.md
warning  anchors  there is none
                  do: set one
                  see: https://github.com/latticekeep/latticekeep/blob/main/docs/runbooks/audit-log.md#latticekeeprollback
skipped  disk     not here
ok       mail     it answers
failed: 1 failed, 1 warning, 1 skipped, 1 ok (latticekeep v1, 2026-11-25T03:00:00Z)
`
	if b.String() != want {
		t.Errorf("got\n%s", b.String())
	}
}

// A check that hangs, as on a network file system, is a line, and the others have theirs.
func TestACheckThatHangsIsALine(t *testing.T) {
	hangs := make(chan struct{})
	defer close(hangs)
	r := diagnosis.Run(t.Context(), "v1", 10*time.Millisecond,
		diagnosis.Check{Part: diagnosis.Disk, Look: func(context.Context) []diagnosis.Line { <-hangs; return nil }},
		diagnosis.Check{Part: diagnosis.Archive, Look: func(context.Context) []diagnosis.Line { <-hangs; return nil }},
		check(diagnosis.Mail, diagnosis.Well("it answers")))
	if r.Of(diagnosis.Disk) != diagnosis.Failed || r.Of(diagnosis.Archive) != diagnosis.Failed || r.Of(diagnosis.Mail) != diagnosis.OK || !errors.Is(r.Errors()[0], context.DeadlineExceeded) {
		t.Errorf("%+v", r)
	}
}

// Callers that come at the same time cause one look.
func TestManyCallersCauseOneLook(t *testing.T) {
	looks := 0
	l := diagnosis.Latest{Run: func(ctx context.Context) diagnosis.Report {
		looks++
		return diagnosis.Run(ctx, "v1", time.Second)
	}}
	gone, leave := context.WithCancel(t.Context())
	leave()
	for range 10 {
		if r := l.Report(gone); r.Status != diagnosis.OK {
			t.Errorf("%+v", r)
		}
	}
	if looks > 2 { // a slow machine may take a second
		t.Errorf("%d looks", looks)
	}
}

// The guide has every part, in the words of the table, and each page and section exists.
func TestEveryPartIsInTheGuideAndHasAPage(t *testing.T) {
	guide, err := os.ReadFile("../../docs/guides/monitor.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range diagnosis.Parts {
		if row := "| `" + string(p.Part) + "` | " + p.Looks + " |"; !strings.Contains(string(guide), row) {
			t.Errorf("docs/guides/monitor.md has no row %s", row)
		}
		r := diagnosis.Run(t.Context(), "v1", time.Second, check(p.Part, diagnosis.Warn("x", "y")))
		path, section, _ := strings.Cut(strings.TrimPrefix(r.Lines[0].Runbook, "https://github.com/latticekeep/latticekeep/blob/main/"), "#")
		page, err := os.ReadFile("../../" + path)
		if err != nil || section != "" && !strings.Contains(strings.ToLower(string(page)), "\n## "+section+"\n") {
			t.Errorf("%s: there is no %s#%s: %v", p.Part, path, section, err)
		}
	}
}
