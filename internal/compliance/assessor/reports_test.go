package assessor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/story"
)

func TestReportIsMadeOnceAndSigned(t *testing.T) {
	w := newWorld(t)
	w.Story.Good()
	former := w.score(compliance.SOC2, 0) // on the same day
	w.Issued("key_all", 0, "", authz.VaultRead, authz.AccountAdmin)
	link, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, 0, compliance.PDF, compliance.About{})
	check(t, err)
	if want := w.Clock.Add(time.Hour); !link.ExpiresAt.Equal(want) || link.URL == link.SignatureURL {
		t.Errorf("%+v", link)
	}
	files, err := filepath.Glob(filepath.Join(w.folder, "reports", string(story.Ours), "*"))
	check(t, err)
	var report, signature []byte
	for _, f := range files {
		b, err := os.ReadFile(f)
		check(t, err)
		switch {
		case strings.HasSuffix(f, ".pdf.sig"):
			signature = b
		case strings.HasSuffix(f, ".pdf"):
			report = b
		}
	}
	if !w.signer.Public().Verify("latticekeep/report/v1", report, signature) {
		t.Error("the signature is not the report's")
	}
	w.Days(3).ReadLog()
	again, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, link.Head.Sequence, compliance.PDF, compliance.About{})
	check(t, err)
	if again.Head != link.Head || w.rendered != 1 {
		t.Errorf("it was rendered %d times", w.rendered)
	}
	check(t, os.RemoveAll(filepath.Join(w.folder, "reports", string(story.Ours))))
	w.service = w.newService()
	_, err = w.service.Report(t.Context(), story.Owner, compliance.SOC2, link.Head.Sequence, compliance.PDF, compliance.About{})
	check(t, err)
	files, err = filepath.Glob(filepath.Join(w.folder, "reports", string(story.Ours), "*.pdf"))
	check(t, err)
	if len(files) != 1 {
		t.Fatal(files)
	}
	if b, err := os.ReadFile(files[0]); err != nil || !bytes.Equal(b, report) || w.rendered != 2 {
		t.Error("the same head gave another report")
	}
	var d compliance.Document
	check(t, json.Unmarshal(report, &d))
	if d.Fingerprint != w.log.Fingerprint() || d.ChainID != "chain_test" || !strings.Contains(d.Checkpoint, link.Head.Hash) ||
		!strings.Contains(d.Command, d.Fingerprint) || d.Assessment.Score == nil || d.Activity[0].Count == 0 || d.Name != "SOC 2" {
		t.Errorf("%+v", d)
	}
	own := compliance.DayScore{
		Date: link.Head.Time.Format(time.DateOnly), Score: *d.Assessment.Score, Sequence: link.Head.Sequence,
	}
	if n := len(d.History); n == 0 || d.History[n-1] != own || *former.Score == own.Score || n > 1 && d.History[n-2].Date == own.Date {
		t.Errorf("the history %v does not end with the score of the head, %v", d.History, own)
	}
}

// failing is a bucket that fails at the n-th Put.
type failing struct {
	compliance.Reports
	puts, failAt int
}

func (f *failing) Put(ctx context.Context, name string, b []byte) error {
	if f.puts++; f.puts == f.failAt {
		return errors.New("the network is down")
	}
	return f.Reports.Put(ctx, name, b)
}

// gone is a bucket that cannot be read.
type gone struct{ compliance.Reports }

func (gone) Get(context.Context, string) ([]byte, error) {
	return nil, errors.New("network unreachable")
}

func TestNothingIsHalfWrittenToABucketThatIsGone(t *testing.T) {
	for failAt := 1; failAt <= 2; failAt++ {
		w := newWorld(t)
		w.Story.Good()
		w.service.reports.bucket = &failing{Reports: w.reports, failAt: failAt}
		if _, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, 0, compliance.OSCAL, compliance.About{}); fault.Of(err) != fault.Unavailable || strings.Contains(fault.Message(err), "network") {
			t.Error(err)
		}
		if files, _ := filepath.Glob(filepath.Join(w.folder, "reports", string(story.Ours), "*.json")); len(files) != 0 {
			t.Error(files)
		}
		all := w.entries(story.Ours)
		if last := all[len(all)-1]; last.EventType == audit.ComplianceReported {
			t.Error("a report that there is not was recorded")
		}
		_, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, 0, compliance.OSCAL, compliance.About{})
		check(t, err)
	}
	w := newWorld(t)
	w.Began()
	w.service.reports.bucket = gone{w.reports}
	if _, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, 0, compliance.PDF, compliance.About{}); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
}

// lying returns the names in the bucket with their contents.
func (w *world) lying() map[string][]byte {
	w.t.Helper()
	all := make(map[string][]byte)
	files, err := filepath.Glob(filepath.Join(w.folder, "reports", string(story.Ours), "*"))
	check(w.t, err)
	for _, file := range files {
		b, err := os.ReadFile(file)
		check(w.t, err)
		name, err := filepath.Rel(w.folder, file)
		check(w.t, err)
		all[filepath.ToSlash(name)] = b
	}
	return all
}

// A stored object is served only if this deployment put it there. Otherwise it is rendered again,
// by this process and by the next one.
func TestStoredReportsAreNotBelieved(t *testing.T) {
	w := newWorld(t)
	w.Began()
	early, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, 0, compliance.PDF, compliance.About{})
	check(t, err)
	w.Days(40).ReadLog()
	link, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, 0, compliance.PDF, compliance.About{})
	check(t, err)
	w.verified()
	var name, former string
	whole := w.lying()
	for n := range whole {
		switch {
		case strings.Contains(n, fmt.Sprintf("/soc2-%d-", link.Head.Sequence)) && strings.HasSuffix(n, ".pdf"):
			name = n
		case strings.Contains(n, fmt.Sprintf("/soc2-%d-", early.Head.Sequence)) && strings.HasSuffix(n, ".pdf"):
			former = n
		}
	}
	if name == "" || former == "" || len(whole) != 4 {
		t.Fatalf("there are %d objects", len(whole))
	}
	seed := make([]byte, dualsig.SeedSize)
	stranger, err := dualsig.NewPrivateKey(seed)
	check(t, err)
	forged := []byte("a better score")
	theirs, err := stranger.Sign("latticekeep/report/v1", forged)
	check(t, err)
	path := func(name string) string { return filepath.Join(w.folder, filepath.FromSlash(name)) }
	write := func(name string, b []byte) { check(t, os.WriteFile(path(name), b, 0o600)) }
	for what, c := range map[string]struct {
		change func()
		given  bool // the download cannot detect it: it is a report of this deployment
	}{
		"another report":      {func() { write(name, forged) }, false},
		"another's signature": {func() { write(name, forged); write(name+".sig", theirs) }, false},
		"another signature":   {func() { write(name+".sig", theirs) }, false},
		"no signature":        {func() { check(t, os.Remove(path(name+".sig"))) }, false},
		"no report":           {func() { check(t, os.Remove(path(name))) }, false},
		"an empty report":     {func() { write(name, nil) }, false},
		"one that leads elsewhere": {func() {
			check(t, os.Remove(path(name)))
			check(t, os.Symlink(path(former), path(name)))
		}, false},
		"an earlier one of ours":      {func() { write(name, whole[former]); write(name+".sig", whole[former+".sig"]) }, true},
		"as it is, in a new process":  {func() {}, true},
		"and in the one that knew it": {func() {}, true},
	} {
		for _, again := range []bool{false, true} {
			if again {
				w.service = w.newService()
				w.verified()
			}
			c.change()
			for _, n := range []string{name, name + ".sig"} {
				b, err := w.service.Stored(t.Context(), n)
				if c.given != (err == nil) || err != nil && fault.Of(err) != fault.NotFound {
					t.Errorf("%s: %s gives %.20q, %v", what, n, b, err)
				}
			}
			got, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, link.Head.Sequence, compliance.PDF, compliance.About{})
			check(t, err)
			now := w.lying()
			if got.Head != link.Head || !bytes.Equal(now[name], whole[name]) || !w.signer.Public().Verify("latticekeep/report/v1", now[name], now[name+".sig"]) {
				t.Errorf("%s: what is given out is %.30q", what, now[name])
			}
			if b, err := w.service.Stored(t.Context(), name); err != nil || !bytes.Equal(b, whole[name]) {
				t.Errorf("%s: a download gives %.30q, %v", what, b, err)
			}
		}
	}
	if _, err := w.service.Stored(t.Context(), "reports/none.pdf"); fault.Of(err) != fault.NotFound {
		t.Error(err)
	}
	check(t, os.RemoveAll(w.folder))
	if _, err := w.service.Stored(t.Context(), name); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
}

// verified verifies the whole log, which a report needs.
func (w *world) verified() {
	w.t.Helper()
	_, err := w.verifier.Verify(w.t.Context())
	check(w.t, err)
}

// idle is a bucket that fails when it is used while evidence is in use.
type idle struct {
	compliance.Reports
	busy func() bool
	used int
}

func (b *idle) look(t string) error {
	if b.used++; b.busy() {
		return errors.New("evidence is waited for while the bucket is used by " + t)
	}
	return nil
}

func (b *idle) Get(ctx context.Context, name string) ([]byte, error) {
	data, err := b.Reports.Get(ctx, name)
	return data, errors.Join(b.look("Get"), err)
}

func (b *idle) Put(ctx context.Context, name string, data []byte) error {
	return errors.Join(b.look("Put"), b.Reports.Put(ctx, name, data))
}

func (b *idle) SignedURL(ctx context.Context, name string, lifetime time.Duration) (string, error) {
	u, err := b.Reports.SignedURL(ctx, name, lifetime)
	return u, errors.Join(b.look("SignedURL"), err)
}

// A slow bucket delays only the caller that asked for the report. A log that takes no entries is
// reported before any wait.
func TestWhoWaitsForWhat(t *testing.T) {
	w := newWorld(t)
	w.Began().ReadLog().ReadLog()
	held := func(turn *semaphore.Weighted) bool {
		free := turn.TryAcquire(1)
		if free {
			turn.Release(1)
		}
		return !free
	}
	b := &idle{Reports: w.reports, busy: func() bool {
		return held(w.service.evidence.newest.get(story.Ours, 0).holder) || held(w.service.evidence.older.get(story.Ours, 3).holder)
	}}
	w.service.reports.bucket = b
	for range 2 {
		for _, head := range []uint64{0, 3} {
			_, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, head, compliance.PDF, compliance.About{})
			check(t, err)
		}
	}
	if b.used < 10 {
		t.Errorf("the bucket was used %d times", b.used)
	}
	_, leave, err := w.service.evidence.acquire(t.Context(), story.Ours)
	check(t, err)
	defer leave()
	w.service.patience = time.Hour
	w.log.Halt(fault.New(fault.Unavailable, "the log is behind its anchor"))
	ctx := t.Context()
	_, scoring := w.service.Score(ctx, story.Owner, compliance.SOC2, 0)
	_, pinned := w.service.Score(ctx, story.Owner, compliance.SOC2, 3)
	_, reading := w.service.History(ctx, story.Owner, compliance.SOC2)
	_, reporting := w.service.Report(ctx, story.Owner, compliance.SOC2, 0, compliance.PDF, compliance.About{})
	_, listing := w.service.Inventory(ctx, story.Owner)
	for _, err := range []error{scoring, pinned, reading, reporting, listing} {
		if fault.Of(err) != fault.Unavailable || !strings.Contains(err.Error(), "behind its anchor") {
			t.Error(err)
		}
	}
}
