package app

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/logtest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// inProcess returns a development service that does not run yet, and its log.
func inProcess(t *testing.T, change func(*evidence)) (*service, *machine.Log) {
	t.Helper()
	dir, log := t.TempDir(), new(machine.Log)
	s := &service{logger: slog.New(slog.NewJSONHandler(log, nil)), now: time.Now, mails: noMailServer{}, sender: devSender, calls: metrics.NewCalls(), evidence: devProving()}
	if change != nil {
		change(s.evidence)
	}
	var err error
	s.deployment, err = openDeployment(t.Context(), deploymentOptions{
		dir: dir, kms: keyFileIn(dir), evidence: s.evidence, calls: s.calls, logger: s.logger, now: s.now,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.store.Close(), s.evidence.close()); err != nil {
			t.Error(err)
		}
	})
	return s, log
}

func TestOldReportsAreForgottenInTheDataDirectoryAlone(t *testing.T) {
	const report = "reports/ten_a/soc2-1-0123456789ab.pdf"
	own, _ := inProcess(t, nil)
	old := filepath.Join(own.dir, reportsDirectory, report)
	machine.WriteOldFile(t, old)
	young := strings.Replace(old, "soc2-1", "soc2-2", 1)
	machine.WriteFile(t, young, []byte("young"))
	folder := t.TempDir()
	configured, _ := inProcess(t, func(p *evidence) { p.Reports = (&url.URL{Scheme: "file", Path: folder}).String() })
	kept := filepath.Join(folder, report)
	machine.WriteOldFile(t, kept)
	for _, s := range []*service{own, configured} {
		if _, served, err := s.evidence.openCompliance(t.Context(), s, s.dir, "http://127.0.0.1"); err != nil || served == nil {
			t.Fatal(served, err)
		}
		if err := s.evidence.expireReports(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if exists(old) || !exists(young) || !exists(kept) {
		t.Errorf("old %t, young %t, in the operator's own folder %t", exists(old), exists(young), exists(kept))
	}
}

func TestWhatIsKeptIsAnchored(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	ok := keeper.AnchorStatus{State: keeper.AnchorOK, Sequence: 7, Checked: now.Add(-time.Hour)}
	empty, lost, silent := ok, ok, ok
	empty.Sequence, lost.State, silent.Checked = 0, keeper.AnchorRollback, now.Add(-24*time.Hour)
	unreachable := ok
	unreachable.State = keeper.AnchorUnreachable
	for name, c := range map[string]struct {
		places []keeper.AnchorStatus
		want   bool
	}{
		"no place": {}, "nothing there": {[]keeper.AnchorStatus{empty}, false}, "more than the log has": {[]keeper.AnchorStatus{lost}, false},
		"not looked at for a day": {[]keeper.AnchorStatus{silent}, false}, "unreachable": {[]keeper.AnchorStatus{unreachable}, false},
		"one": {[]keeper.AnchorStatus{ok}, true}, "one of two": {[]keeper.AnchorStatus{unreachable, ok}, true},
	} {
		if got := anchored(c.places, now); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestAnArchiveIsReadableWhileItsOldestSegmentIs(t *testing.T) {
	l := logtest.New(t, writer.SignEntries)
	dir := filepath.Join(t.TempDir(), "archive")
	bucket, err := objects.Open(t.Context(), "file://"+dir, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer bucket.Close()
	var log machine.Log
	a := &archive{
		log: l.Audit, store: l.Store, bucket: bucket, now: func() time.Time { return l.Now }, logger: slog.New(slog.NewJSONHandler(&log, nil)),
		cutter: &keeper.Cutter{Log: l.Audit, Reader: reader.New(l.Audit, guard.New(l.Audit)), Archive: bucket, Keep: 24 * time.Hour, Now: func() time.Time { return l.Now }},
	}
	expect := func(state string, due bool, logged int) {
		t.Helper()
		if got := a.state(); got != state || a.due() != due || strings.Count(log.String(), "\n") != logged {
			t.Errorf("%s, due %t; want %s, due %t after %d lines: %s", got, a.due(), state, due, logged, log.String())
		}
	}
	look := func() { a.probe(t.Context(), time.Minute) }
	if (*archive)(nil).state() != compliance.ArchiveNone {
		t.Error("no archive is one")
	}
	expect(compliance.ArchiveUnreadable, true, 0)
	look() // nothing is archived yet, but the bucket is readable
	expect(compliance.ArchiveReadable, false, 0)
	for range 2 {
		l.Fill()
		l.Now = l.Now.Add(72 * time.Hour)
		a.cutOnce(t.Context())
	}
	lines := strings.Count(log.String(), "\n")
	segments, err := filepath.Glob(filepath.Join(dir, "audit", logtest.ChainID, "*"))
	if err != nil || len(segments) < 2 {
		t.Fatal(segments, err, log.String())
	}
	expect(compliance.ArchiveUnreadable, true, lines) // the last answer is six days old
	look()
	expect(compliance.ArchiveReadable, false, lines)
	// A deletion rule of the bucket removed the oldest segment.
	aside := filepath.Join(t.TempDir(), "aside")
	if err := os.Rename(segments[0], aside); err != nil {
		t.Fatal(err)
	}
	look()
	expect(compliance.ArchiveUnreadable, true, lines+1)
	look()
	expect(compliance.ArchiveUnreadable, true, lines+1)
	if !strings.Contains(log.String(), filepath.Base(segments[0])) {
		t.Error("it does not say which: ", log.String())
	}
	if err := os.Rename(aside, segments[0]); err != nil {
		t.Fatal(err)
	}
	look()
	expect(compliance.ArchiveReadable, false, lines+2)
	// The last answer of a bucket that stops answering stays valid for one more day.
	if err := os.Rename(dir, dir+".gone"); err != nil {
		t.Fatal(err)
	}
	l.Now = l.Now.Add(24*time.Hour - time.Second)
	expect(compliance.ArchiveReadable, false, lines+2)
	l.Now = l.Now.Add(time.Second)
	expect(compliance.ArchiveReadable, true, lines+2)
	look()
	expect(compliance.ArchiveReadable, true, lines+3)
	l.Now = l.Now.Add(24 * time.Hour)
	look()
	expect(compliance.ArchiveUnreadable, true, lines+3)
	if err := os.Rename(dir+".gone", dir); err != nil {
		t.Fatal(err)
	}
	look()
	expect(compliance.ArchiveReadable, false, lines+4)
}

// Scores count the days that are left in the database, whatever the configuration says.
func TestEntriesStayForAsManyDaysAsAreLeft(t *testing.T) {
	l := logtest.New(t, writer.SignEntries)
	bucket, err := objects.Open(t.Context(), "file://"+filepath.Join(t.TempDir(), "archive"), objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer bucket.Close()
	now := func() time.Time { return l.Now }
	a := &archive{log: l.Audit, now: now, logger: slog.New(slog.DiscardHandler), cutter: &keeper.Cutter{Keep: 90 * 24 * time.Hour}}
	expect := func(of *archive, days int) {
		t.Helper()
		if got, err := of.retentionDays(t.Context()); err != nil || got != days {
			t.Errorf("%d days, want %d: %v", got, days, err)
		}
	}
	expect(nil, 0)
	expect(a, 90)
	expect(&archive{log: l.Audit, now: now, cutter: &keeper.Cutter{MaxEntries: 10_000}}, 0) // none has moved yet
	l.Fill()
	l.Now = l.Now.Add(72 * time.Hour)
	earlier := &keeper.Cutter{Log: l.Audit, Reader: reader.New(l.Audit, guard.New(l.Audit)), Archive: bucket, Keep: 24 * time.Hour, Now: now}
	if n, err := earlier.Run(t.Context()); n == 0 || err != nil {
		t.Fatal(n, err)
	}
	expect(a, 3)
	expect(&archive{log: l.Audit, now: now, cutter: &keeper.Cutter{MaxEntries: 10_000}}, 3)
	l.Now = l.Now.Add(100 * 24 * time.Hour)
	expect(a, 90)
}

// A server whose database lost entries says once what to do, and tries nothing else.
func TestARefusedLogIsToldOnce(t *testing.T) {
	s, log := inProcess(t, nil)
	s.log.Halt(&audit.RollbackError{LostFrom: 8, LostTo: 9, Epoch: 1, Source: "bucket"})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	if err := s.run(ctx, l, server.Config{PublicURL: "http://" + l.Addr().String()}, func() { stop() }); err != nil {
		t.Fatal(err)
	}
	s.maintainOnce(t.Context())
	s.flush(t.Context(), false)
	(&archive{log: s.log, cutter: &keeper.Cutter{Log: s.log}, logger: s.logger}).cutOnce(t.Context())
	told := 0
	for line := range strings.Lines(log.String()) {
		switch {
		case strings.Contains(line, `"level":"ERROR"`) && strings.Contains(line, "/readyz") && strings.Contains(line, "accept-rollback") && strings.Contains(line, "8 to 9"):
			told++
		case strings.Contains(line, "ERROR"), strings.Contains(line, "retrying"):
			t.Error(line)
		}
	}
	if told != 1 {
		t.Errorf("told %d times: %s", told, log.String())
	}
}
