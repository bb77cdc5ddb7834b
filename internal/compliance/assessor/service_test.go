package assessor

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/storetest"
	"github.com/latticekeep/latticekeep/test/story"
)

// world is a log on a real store, with a clock that the story moves, and the service.
type world struct {
	*story.Story
	t        *testing.T
	log      *writer.Log
	verifier *verify.LiveVerifier
	store    store.Store
	signer   *dualsig.PrivateKey
	path     string // path of the store
	folder   string // folder of reports
	reports  *objects.Bucket
	service  *Service
	state    func() compliance.State
	rendered int
	viewing  func() // called before each View of the log
}

// viewed is a store that reports each View.
type viewed struct {
	store.Store
	w *world
}

func (v viewed) View(ctx context.Context, fn func(store.Reader) error) error {
	if v.w.viewing != nil {
		v.w.viewing()
	}
	return v.Store.View(ctx, fn)
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, Story: &story.Story{Clock: story.Start, Versions: make(map[string]int)}, folder: filepath.Join(t.TempDir(), "reports")}
	w.log = writer.New(func() time.Time { return w.Clock }, nil)
	w.verifier = verify.NewLiveVerifier(w.log)
	w.path = filepath.Join(t.TempDir(), "audit.db")
	s, err := bolt.Open(w.path, bolt.Options{Hook: w.log.Commit})
	check(t, err)
	t.Cleanup(func() { _ = s.Close() })
	w.store = storetest.Rehearsing(s)
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	w.signer, err = dualsig.NewPrivateKey(seed)
	check(t, err)
	check(t, w.log.Use(t.Context(), viewed{w.store, w}, w.signer, "chain_test"))
	w.Record = func(e audit.Event) {
		t.Helper()
		check(t, w.log.Record(context.Background(), e))
	}
	w.Tell(audit.ChainStarted, audit.Success, authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "latticekeep"},
		audit.Resource{Type: audit.ChainResource, ID: "chain_test"})
	w.reports, err = objects.Open(t.Context(), "file://"+w.folder, objects.SigningOptions{
		BaseURL: "http://127.0.0.1/download", Secret: bytes.Repeat([]byte{7}, 32), Now: func() time.Time { return w.Clock },
	})
	check(t, err)
	t.Cleanup(func() { _ = w.reports.Close() })
	w.state = w.GoodState
	w.service = w.newService()
	return w
}

func (w *world) mac(key, content []byte) []byte {
	m := hmac.New(sha256.New, []byte("of the test"))
	fmt.Fprintf(m, "%d ", len(key))
	m.Write(key)
	m.Write(content)
	return m.Sum(nil)
}

func (w *world) newService() *Service {
	w.t.Helper()
	s, err := New(w.store, guard.New(w.log), Config{
		Reader: reader.New(w.log, guard.New(w.log)), Verifier: w.verifier, Program: "latticekeep test", Now: func() time.Time { return w.Clock },
		State: func(context.Context) (compliance.State, error) { return w.state(), nil },
		Seal:  func(key, content []byte) []byte { return append(w.mac(key, content), content...) },
		Open: func(key, row []byte) ([]byte, error) {
			if len(row) < 32 || !hmac.Equal(row[:32], w.mac(key, row[32:])) {
				return nil, errors.New("foreign")
			}
			return row[32:], nil
		},
		Reports: w.reports, Sign: func(b []byte) ([]byte, error) { return w.signer.Sign("latticekeep/report/v1", b) },
		Verify: func(b, signature []byte) bool {
			return w.signer.Public().Verify("latticekeep/report/v1", b, signature)
		},
		Renderers:    map[compliance.Format]compliance.Renderer{compliance.PDF: w.render, compliance.OSCAL: w.render, compliance.KSI: w.render},
		Inventory:    func(context.Context, authz.Principal) ([]byte, error) { return []byte("{}"), nil },
		Organisation: func(context.Context, authz.TenantID) (string, error) { return "Example Ltd", nil },
	})
	check(w.t, err)
	return s
}

// render replaces the renderers: it writes the whole document.
func (w *world) render(d compliance.Document) ([]byte, error) {
	w.rendered++
	return json.MarshalIndent(d, "", " ")
}

func (w *world) score(f compliance.Framework, head uint64) compliance.Assessment {
	w.t.Helper()
	a, err := w.service.Score(w.t.Context(), story.Owner, f, head)
	check(w.t, err)
	return a
}

// exported returns an export of the whole log.
func (w *world) exported() []byte {
	w.t.Helper()
	var out bytes.Buffer
	check(w.t, reader.New(w.log, guard.New(w.log)).Export(w.t.Context(), &out, 0))
	return out.Bytes()
}

// entries returns the entries of a tenant as an export contains them.
func (w *world) entries(tenant authz.TenantID) []*audit.Entry {
	w.t.Helper()
	var all []*audit.Entry
	for line := range bytes.Lines(w.exported()) {
		if e, err := audit.ParseEntry(bytes.TrimSuffix(line, []byte("\n"))); err == nil && e.TenantID == string(tenant) {
			all = append(all, e)
		}
	}
	return all
}

func result(a compliance.Assessment, id string) compliance.Result {
	for _, c := range a.Controls {
		if c.ID == id {
			return c.Result
		}
	}
	return ""
}

// flips lists the controls of each framework that depend on a tenant's behaviour.
var flips = map[compliance.Framework]string{
	compliance.SOC2:      "CC6.1 CC6.2 CC6.3 CC6.6 CC7.2 CC7.3 CC7.4 CC8.1 C1.2 A1.2",
	compliance.ISO27001:  "5.15 5.16 5.17 5.33 8.2 8.5 8.10 8.13 8.15 8.16 8.24 8.32",
	compliance.PCIDSS:    "3.6.1.2 3.7.4 3.7.5 3.7.7 4.2.1 7.2.1 7.2.5 8.6.3 10.3.4 10.4.1.1 10.5.1",
	compliance.HIPAA:     "164.308(a)(1)(ii)(D) 164.308(a)(3)(ii)(C) 164.308(a)(5)(ii)(C) 164.308(a)(5)(ii)(D) 164.312(a)(2)(iv) 164.312(c)(1) 164.312(d) 164.316(b)(2)(i)",
	compliance.GDPR:      "5(1)(e) 5(1)(f) 17 25(2) 28(3)(h) 32(1)(a) 32(1)(b) 32(1)(c) 33(5)",
	compliance.NISTCSF:   "PR.AA-01 PR.AA-03 PR.AA-05 PR.DS-01 PR.DS-02 PR.PS-04 DE.CM-03 DE.AE-02 RS.AN-06",
	compliance.FedRAMP:   "AC-6(9) AU-6(1) AU-11 IA-5(6) SC-12 SI-7(1) CM-3 KSI-SVC-ASM KSI-MLA-RVL KSI-MLA-OSM KSI-IAM-SNU KSI-SVC-VRI",
	compliance.APRA:      "21 23 27 28",
	compliance.NIST80053: "AC-2 AC-5 AC-6(9) AC-7 AU-6 AU-9(3) AU-11 CM-3 IA-5(1) IR-5 MP-6 SC-12(3) SC-28(1) SI-7(1)",
}

func TestFrameworksTellGoodFromBad(t *testing.T) {
	good, bad := newWorld(t), newWorld(t)
	good.Story.Good()
	bad.Story.Bad()
	bad.state = func() (s compliance.State) { s = bad.GoodState(); story.BadState(&s); return s }
	for _, f := range compliance.Frameworks() {
		g, b := good.score(f, 0), bad.score(f, 0)
		if g.Score == nil || b.Score == nil {
			t.Fatalf("%s: withheld: %q, %q", f, g.Reason, b.Reason)
		}
		t.Logf("%s: %.1f and %.1f", f, *g.Score, *b.Score)
		if *g.Score < 99 || *b.Score > 40 {
			t.Errorf("%s: a good tenant has %.1f and a bad one %.1f", f, *g.Score, *b.Score)
		}
		for _, c := range g.Controls {
			if c.Result == compliance.Fail || c.Result == compliance.NoData {
				t.Errorf("%s %s of the good tenant: %s %+v", f, c.ID, c.Result, c.Probes)
			}
		}
		for _, id := range strings.Fields(flips[f]) {
			if x, y := result(g, id), result(b, id); x != compliance.Pass || y != compliance.Fail {
				t.Errorf("%s %s: %q and %q, want pass and fail", f, id, x, y)
			}
		}
	}
}

// The scores of all frameworks are those of each, in one entry, which the history has and which is
// not the deployment's assessment of the day.
func TestScoresOfAllFrameworksAreOneEntry(t *testing.T) {
	w := newWorld(t)
	w.Story.Good()
	w.score(compliance.SOC2, 0) // the state of the day is recorded
	before := w.entries(story.Ours)
	all, err := w.service.Scores(t.Context(), story.Owner)
	check(t, err)
	added := w.entries(story.Ours)[len(before):]
	if len(added) != 1 || added[0].EventType != audit.ComplianceScored || added[0].Actor.ID != story.Owner.ID {
		t.Fatalf("%d entries: %+v", len(added), added)
	}
	if len(all) != len(compliance.Frameworks()) {
		t.Fatalf("%d scores", len(all))
	}
	for i, f := range compliance.Frameworks() {
		want := w.score(f, all[0].Head.Sequence)
		got := all[i]
		got.Proof, want.Proof = compliance.Proof{}, compliance.Proof{}
		if all[i].Proof.Status != compliance.Verified || !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\n%+v\nalone\n%+v", f, got, want)
		}
		if a := added[0].Attributes; a["head"] != formatUint(all[0].Head.Sequence) || a[string(f)] != formatScore(*want.Score) || a["pinned"] != "" {
			t.Errorf("%s: %v", f, a)
		}
		days, err := w.service.History(t.Context(), story.Owner, f)
		check(t, err)
		if len(days) == 0 || days[len(days)-1].Sequence != all[0].Head.Sequence {
			t.Errorf("%s: the history is %v", f, days)
		}
	}
	e := compliance.NewEvidence()
	for _, entry := range w.entries(story.Ours) {
		check(t, e.Add(entry))
	}
	if e.Daily.Sequence == added[0].Sequence {
		t.Error("what a user asked for is the assessment of a day")
	}
	nobody := story.Owner
	nobody.Scopes = nil
	if _, err := w.service.Scores(t.Context(), nobody); fault.Of(err) != fault.Forbidden {
		t.Errorf("without the scope: %v", err)
	}
}

func TestEmptyTenantHasANumber(t *testing.T) {
	w := newWorld(t)
	for _, f := range compliance.Frameworks() {
		a := w.score(f, 0)
		if a.Score == nil || *a.Score < 90 {
			t.Errorf("%s: %v %s", f, a.Score, a.Reason)
		}
		if a.Proof.Status != compliance.Verified || a.Head.Sequence != 2 && f == compliance.SOC2 || a.Coverage.Evidenced == 0 || a.Coverage.Evidenced >= a.Coverage.Controls {
			t.Errorf("%s: %+v %+v %+v", f, a.Proof, a.Head, a.Coverage)
		}
	}
}

func TestSameHeadSameAssessment(t *testing.T) {
	w := newWorld(t)
	w.Story.Good()
	w.service.evidence.milestone, w.service.evidence.saveEvery = 7, 5
	first := w.score(compliance.SOC2, 0)
	w.Days(400).ReadLog()
	for _, f := range compliance.Frameworks() {
		w.score(f, 0)
	}
	again := w.score(compliance.SOC2, first.Head.Sequence)
	derived, err := compliance.Derive(w.service.catalogues[compliance.SOC2], sequence(w.entries(story.Ours)), first.Head.Sequence)
	check(t, err)
	if again.Proof.Status != compliance.Verified || derived.Proof.Status != compliance.Verified {
		t.Errorf("%+v %+v", again.Proof, derived.Proof)
	}
	first.Proof, again.Proof, derived.Proof = compliance.Proof{}, compliance.Proof{}, compliance.Proof{}
	if !reflect.DeepEqual(first, again) || !reflect.DeepEqual(first, derived) {
		t.Errorf("as of one head:\n%+v\n%+v\n%+v", first, again, derived)
	}
	if now := w.score(compliance.SOC2, 0); *now.Score >= *first.Score {
		t.Errorf("a year without care: %.1f, before it %.1f", *now.Score, *first.Score)
	}
}

func TestHeadIsAnEntryOfTheTenant(t *testing.T) {
	w := newWorld(t)
	w.Began().ReadLog()
	other := story.Owner
	other.Tenant = story.Theirs
	w.Tell(audit.AuditRead, audit.Success, other, audit.Resource{Type: audit.LogResource}).ReadLog()
	// Entry 1 is the system's, entry 4 another tenant's.
	for _, head := range []uint64{1, 4, 99, 1 << 53} {
		if _, err := w.service.Score(t.Context(), story.Owner, compliance.SOC2, head); fault.Of(err) != fault.NotFound {
			t.Errorf("head %d: %v", head, err)
		}
		if _, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, head, compliance.PDF, compliance.About{}); fault.Of(err) != fault.NotFound {
			t.Errorf("report at %d: %v", head, err)
		}
	}
	if a := w.score(compliance.SOC2, 3); a.Head.Sequence != 3 || a.Proof.Status != compliance.Verified {
		t.Errorf("%+v", a.Head)
	}
	all := w.entries(story.Ours)
	refused := all[len(all)-2]
	if refused.EventType != audit.ComplianceReported || refused.Outcome != audit.Denied || refused.Attributes["reason"] != "no_such_head" {
		t.Errorf("%+v", refused)
	}
}

func TestCallsAreAuthorizedAndRecorded(t *testing.T) {
	w := newWorld(t)
	w.Began()
	ctx := t.Context()
	calls := map[audit.EventType]func(authz.Principal) error{
		audit.ComplianceScored:      func(p authz.Principal) error { _, err := w.service.Score(ctx, p, compliance.GDPR, 0); return err },
		audit.ComplianceHistoryRead: func(p authz.Principal) error { _, err := w.service.History(ctx, p, compliance.GDPR); return err },
		audit.ComplianceReported: func(p authz.Principal) error {
			_, err := w.service.Report(ctx, p, compliance.GDPR, 0, compliance.PDF, compliance.About{})
			return err
		},
		audit.InventoryRead: func(p authz.Principal) error { _, err := w.service.Inventory(ctx, p); return err },
	}
	for event, call := range calls {
		nobody := story.Owner
		nobody.Scopes = []authz.Scope{authz.AuditRead}
		if err := call(nobody); fault.Of(err) != fault.Forbidden {
			t.Errorf("%s: %v", event, err)
		}
		all := w.entries(story.Ours)
		if last := all[len(all)-1]; last.EventType != event || last.Outcome != audit.Denied {
			t.Errorf("%s: %s %s", event, last.EventType, last.Outcome)
		}
		check(t, call(story.Owner))
		all = w.entries(story.Ours)
		if last := all[len(all)-1]; last.EventType != event || last.Outcome != audit.Success || last.Actor.ID != story.Owner.ID {
			t.Errorf("%s: %s %s", event, last.EventType, last.Outcome)
		}
	}
	if _, err := w.service.Score(ctx, story.Owner, "soc3", 0); fault.Of(err) != fault.Invalid {
		t.Error(err)
	}
	for _, c := range []struct {
		f compliance.Framework
		x compliance.Format
	}{{compliance.GDPR, "doc"}, {compliance.GDPR, compliance.KSI}} {
		if _, err := w.service.Report(ctx, story.Owner, c.f, 0, c.x, compliance.About{}); fault.Of(err) != fault.Invalid {
			t.Errorf("%v: %v", c, err)
		}
	}
	check(t, w.store.Close())
	for event, call := range calls {
		if err := call(story.Owner); fault.Of(err) != fault.Unavailable {
			t.Errorf("%s of a store that is gone: %v", event, err)
		}
	}
}

func TestStateIsRecordedWhenItChangedAndDaily(t *testing.T) {
	w := newWorld(t)
	w.Began()
	fixed := w.GoodState()
	w.state = func() compliance.State { return fixed }
	states := func() (n int) {
		for _, e := range w.entries(story.Ours) {
			if e.EventType == audit.ComplianceAssessed {
				n++
			}
		}
		return n
	}
	for _, step := range []struct {
		name string
		do   func()
		want int
	}{
		{"the first score", func() {}, 1},
		{"an hour later", func() { w.After(time.Hour) }, 1},
		{"another state", func() { fixed.Transport = compliance.TransportPlaintext }, 2},
		{"a day later", func() { w.After(24 * time.Hour) }, 2},
		{"more than a day later", func() { w.After(time.Second) }, 3},
		{"at an earlier head", func() { w.Days(3); w.score(compliance.SOC2, 2) }, 4}, // the next line's own
	} {
		step.do()
		a := w.score(compliance.SOC2, 0)
		if got := states(); got != step.want {
			t.Errorf("%s: %d states, want %d", step.name, got, step.want)
		}
		if a.Head.Sequence == 0 || a.Proof.Status != compliance.Verified {
			t.Errorf("%s: %+v", step.name, a)
		}
	}
	w.service.state = func(context.Context) (compliance.State, error) { return compliance.State{}, errors.New("no answer") }
	if _, err := w.service.Score(t.Context(), story.Owner, compliance.SOC2, 0); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
}

// tamper changes a byte of a stored entry.
func (w *world) tamper(sequence uint64) {
	w.t.Helper()
	key := binary.BigEndian.AppendUint64([]byte("audit/entry/"), sequence)
	check(w.t, w.store.Update(w.t.Context(), func(tx store.Tx) error {
		row, err := tx.Get(key)
		if err != nil {
			return err
		}
		row = bytes.Replace(bytes.Clone(row), []byte(`"outcome":"success"`), []byte(`"outcome":"succesS"`), 1)
		return tx.Put(key, row)
	}))
}

func TestScoreIsWithheldWhenTheChainDoesNotHold(t *testing.T) {
	other := story.Owner
	other.Tenant = story.Theirs
	for name, sequence := range map[string]uint64{"an entry of the tenant": 3, "an entry of another one": 2} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.Tell(audit.AuditRead, audit.Success, other, audit.Resource{Type: audit.LogResource}).Began().ReadLog().ReadLog()
			w.tamper(sequence)
			a := w.score(compliance.SOC2, 0)
			if a.Score != nil || a.Reason == "" || a.Proof.Status != compliance.Broken || len(a.Controls) != 0 {
				t.Errorf("%+v", a)
			}
			if _, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, 0, compliance.PDF, compliance.About{}); fault.Of(err) != fault.Conflict {
				t.Error(err)
			}
			if files, _ := filepath.Glob(filepath.Join(w.folder, "reports/*/*")); len(files) != 0 {
				t.Error(files)
			}
			// The damage is reported, and the entries of other tenants say that there is no score.
			w.Days(1)
			for range 3 {
				if err := w.service.AssessAll(t.Context()); fault.Of(err) != fault.Internal {
					t.Error(err)
				}
				w.service = w.newService() // only once, even after a restart
			}
			var days []map[string]string
			_ = reader.New(w.log, guard.New(w.log)).Visit(t.Context(), authz.SystemTenant, func(e *audit.Entry) { days = append(days, e.Attributes) }, audit.ComplianceScored)
			if len(days) != 1 || len(days[0]) != 1+len(compliance.Frameworks()) || days[0]["soc2"] != "withheld" || days[0]["apra"] != "withheld" {
				t.Error(days)
			}
		})
	}
}

func TestDisabledVerificationMovesTheScore(t *testing.T) {
	w := newWorld(t)
	w.Began()
	verified := w.score(compliance.SOC2, 0)
	early, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, verified.Head.Sequence, compliance.PDF, compliance.About{})
	check(t, err)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	w.verifier.KeepVerified(ended, 0, nil) // turned off, whatever the state says
	a := w.score(compliance.SOC2, 0)
	if a.Score == nil || *a.Score >= *verified.Score || a.Proof != (compliance.Proof{Status: compliance.Disabled}) || a.Reason != "" {
		t.Errorf("%v %q %+v, with verification %v", a.Score, a.Reason, a.Proof, *verified.Score)
	}
	if p, q := probeResult(verified, "log_verified"), probeResult(a, "log_verified"); p.Result != compliance.Pass || p.Detail != "it is verified every 24 hours" || q.Result != compliance.Fail {
		t.Errorf("%+v\n%+v", p, q)
	}
	days, err := w.service.History(t.Context(), story.Owner, compliance.SOC2)
	check(t, err)
	if len(days) != 1 || days[0].Score != *a.Score {
		t.Error(days)
	}
	// The report says so, and differs from the earlier one for the same head.
	late, err := w.service.Report(t.Context(), story.Owner, compliance.SOC2, verified.Head.Sequence, compliance.PDF, compliance.About{})
	check(t, err)
	files, err := filepath.Glob(filepath.Join(w.folder, "reports", string(story.Ours), "*.pdf"))
	check(t, err)
	statuses := make(map[string]bool)
	for _, file := range files {
		var d compliance.Document
		b, err := os.ReadFile(file)
		check(t, err)
		check(t, json.Unmarshal(b, &d))
		statuses[d.Assessment.Proof.Status] = d.Assessment.Proof.VerifiedTo == verified.Head.Sequence
	}
	if early.Head != late.Head || len(files) != 2 || !maps.Equal(statuses, map[string]bool{compliance.Verified: true, compliance.Disabled: false}) {
		t.Errorf("%v %v", files, statuses)
	}
	// The tenant's own entries are still checked.
	w.tamper(2)
	w.service = w.newService()
	if a := w.score(compliance.SOC2, 0); a.Score != nil || a.Proof.Status != compliance.Broken {
		t.Errorf("%v %+v", a.Score, a.Proof)
	}
}

func probeResult(a compliance.Assessment, name string) compliance.ProbeResult {
	for _, c := range a.Controls {
		for _, p := range c.Probes {
			if p.Name == name {
				return p
			}
		}
	}
	return compliance.ProbeResult{}
}

func TestHistoryIsTheLastScoreOfEachDay(t *testing.T) {
	w := newWorld(t)
	w.Began()
	early := w.score(compliance.SOC2, 0)
	w.Registered().Issued("k", 0, "", authz.VaultRead, authz.AccountAdmin)
	late := w.score(compliance.SOC2, 0)
	w.score(compliance.SOC2, early.Head.Sequence) // pinned, so not a score of the day
	w.score(compliance.GDPR, 0)
	w.Days(2)
	third := w.score(compliance.SOC2, 0)
	days, err := w.service.History(t.Context(), story.Owner, compliance.SOC2)
	check(t, err)
	want := []compliance.DayScore{
		{Date: "2026-03-02", Score: *late.Score, Sequence: late.Head.Sequence},
		{Date: "2026-03-04", Score: *third.Score, Sequence: third.Head.Sequence},
	}
	if !slices.Equal(days, want) || *early.Score == *late.Score {
		t.Errorf("%v, want %v", days, want)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sequence(entries []*audit.Entry) iter.Seq2[*audit.Entry, error] {
	return func(yield func(*audit.Entry, error) bool) {
		for _, e := range entries {
			if !yield(e, nil) {
				return
			}
		}
	}
}
