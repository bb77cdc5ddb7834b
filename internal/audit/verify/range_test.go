package verify_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A log that ends before the last sequence of the range was cut.
func TestALogThatEndsBeforeTheRangeIsBroken(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20) // head at 21
	f.Follow()
	key := f.Log.Signer.Public()
	lines := f.Lines()
	cut := strings.Join(lines[:15], "")
	whole := strings.Join(lines, "")
	for _, c := range []struct {
		what   string
		export string
		o      verify.Options
		first  uint64 // first bad sequence; 0: none
	}{
		{"cut", cut, verify.Options{To: 18}, 16},
		{"cut", cut, verify.Options{To: 16}, 16},
		{"cut", cut, verify.Options{To: 15}, 0},
		{"cut", cut, verify.Options{To: 3}, 0},
		{"cut", cut, verify.Options{From: 5, To: 18, PublicKey: key}, 16},
		{"cut", cut, verify.Options{From: 5, To: 15, PublicKey: key}, 0},
		{"cut", cut, verify.Options{From: 16, To: 18, PublicKey: key}, 16},
		{"whole", whole, verify.Options{To: 21}, 0},
		{"whole", whole, verify.Options{To: 22}, 22},
		{"whole", whole, verify.Options{From: 5, To: 22, PublicKey: key}, 22},
		{"with a gap", strings.Join(lines[:15], "") + strings.Join(lines[17:], ""), verify.Options{To: 16}, 16},
		{"with a gap", strings.Join(lines[:15], "") + strings.Join(lines[17:], ""), verify.Options{From: 3, To: 17, PublicKey: key}, 16},
		{"of another log at its end", strings.Join(lines[:21], "") + audittest.NewFixture(t).Lines()[1], verify.Options{To: 21}, 22},
	} {
		report, err := verify.Export(strings.NewReader(c.export), c.o)
		broken, ok := audit.IsBroken(err)
		switch {
		case c.first == 0 && (err != nil || report.Sequence != c.o.To):
			t.Errorf("%s, %d to %d: %+v, %v", c.what, c.o.From, c.o.To, report.Sequence, err)
		case c.first != 0 && (!ok || broken.Sequence != c.first):
			t.Errorf("%s, %d to %d: %v, want it broken at %d", c.what, c.o.From, c.o.To, err, c.first)
		}
	}
	f.CutTail(15)
	for _, o := range []verify.Options{{To: 18}, {From: 5, To: 18, PublicKey: key}, {From: 16, To: 16, PublicKey: key}, {To: 1 << 63}} {
		if broken, ok := audit.IsBroken(func() error { _, err := verify.Store(t.Context(), f.Store, o); return err }()); !ok || broken.Sequence != 16 {
			t.Errorf("the store, %d to %d: %v", o.From, o.To, broken)
		}
	}
	for _, o := range []verify.Options{{To: 15}, {From: 5, To: 15, PublicKey: key}} {
		if report, err := verify.Store(t.Context(), f.Store, o); err != nil || report.Sequence != 15 {
			t.Errorf("the store, %d to %d: %v", o.From, o.To, err)
		}
	}
}

// A sequence that an accepted rollback lost has no entry, and the entry that accepted the loss says
// so.
func TestARangeMayEndInWhatWasLost(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(9)
	f.RollBack(10, 20)
	f.Fill(5) // head at 26
	f.Follow()
	key := f.Log.Signer.Public()
	lines := f.Lines()
	whole := strings.Join(lines, "")
	altered := strings.Replace(whole, `"lost_from":"11"`, `"lost_from":"10"`, 1)
	for _, o := range []verify.Options{{To: 11}, {To: 15}, {To: 20}, {To: 21}, {From: 4, To: 15, PublicKey: key}, {From: 12, To: 15, PublicKey: key}} {
		report, err := verify.Export(strings.NewReader(whole), o)
		if err != nil || report.Sequence != 21 || len(report.Rollbacks) != 1 {
			t.Errorf("%d to %d: %+v, %v", o.From, o.To, report, err)
		}
		if report, err = verify.Store(t.Context(), f.Store, o); err != nil || report.Sequence != 21 || len(report.Rollbacks) != 1 {
			t.Errorf("the store, %d to %d: %+v, %v", o.From, o.To, report, err)
		}
		if _, err := verify.Export(strings.NewReader(altered), o); err == nil {
			t.Errorf("%d to %d: an acceptance that does not verify is believed", o.From, o.To)
		}
	}
	for _, export := range []string{strings.Join(lines[:10], ""), strings.Join(lines[:10], "") + strings.Join(lines[11:], "")} {
		if broken, ok := audit.IsBroken(func() error {
			_, err := verify.Export(strings.NewReader(export), verify.Options{To: 15})
			return err
		}()); !ok || broken.Sequence != 11 {
			t.Errorf("without the acceptance: %v", broken)
		}
	}
	err := f.Store.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(audit.EntryKey(21)) })
	if err != nil {
		t.Fatal(err)
	}
	if broken, ok := audit.IsBroken(func() error { _, err := verify.Store(t.Context(), f.Store, verify.Options{To: 15}); return err }()); !ok || broken.Sequence != 11 {
		t.Errorf("without the acceptance: %v", broken)
	}
}

// A fingerprint is compared with the log, or the verification fails: a part is never mistaken for
// the expected log.
func TestAFingerprintIsAlwaysHeldAgainstTheLog(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	f.Follow()
	whole, key := string(f.Export()), f.Log.Signer.Public()
	right, wrong := f.Log.Fingerprint(), strings.Repeat("0", 64)
	for _, c := range []struct {
		from, to uint64
		held     bool
	}{{0, 0, true}, {0, 9, true}, {5, 0, true}, {5, 21, true}, {5, 9, false}} {
		o := verify.Options{From: c.from, To: c.to, PublicKey: key, Fingerprint: right}
		report, err := verify.Export(strings.NewReader(whole), o)
		if c.held != (err == nil && report.Pinned) || !c.held && !errors.Is(err, fault.Invalid) {
			t.Errorf("%d to %d: %+v, %v", c.from, c.to, report.Pinned, err)
		}
		if report, err := verify.Store(t.Context(), f.Store, o); err != nil || !report.Pinned {
			t.Errorf("the store, %d to %d: %v", c.from, c.to, err)
		}
		o.Fingerprint = wrong
		if report, err := verify.Export(strings.NewReader(whole), o); err == nil || report.Pinned {
			t.Errorf("%d to %d: another fingerprint is taken", c.from, c.to)
		}
		if _, err := verify.Store(t.Context(), f.Store, o); err == nil {
			t.Errorf("the store, %d to %d: another fingerprint is taken", c.from, c.to)
		}
	}
	// A tenant's part without the entry that identifies the log.
	var part []audit.Entry
	for _, e := range f.Entries() {
		if e.TenantID == string(audittest.TenantA) {
			part = append(part, *e)
		}
	}
	o := verify.Options{Tenant: true, PublicKey: key, From: part[1].Sequence, Fingerprint: right}
	if _, err := verify.Tenant(part[1:], o); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
	o.From = 0
	if report, err := verify.Tenant(part, o); err != nil || !report.Pinned {
		t.Error(err)
	}
	var export strings.Builder
	for _, line := range strings.SplitAfter(whole, "\n") {
		if strings.HasPrefix(line, string(verify.ClosingPrefix)) || strings.Contains(line, `"tenant_id":"`+string(audittest.TenantA)+`"`) {
			export.WriteString(line)
		}
	}
	for fingerprint, held := range map[string]bool{right: true, wrong: false} {
		o := verify.Options{Tenant: true, PublicKey: key, From: part[1].Sequence, Fingerprint: fingerprint}
		report, err := verify.Export(strings.NewReader(export.String()), o)
		if (err == nil && report.Pinned && report.Fingerprint == fingerprint) != held {
			t.Errorf("%+v, %v", report.Pinned, err)
		}
		o.To = part[len(part)-2].Sequence
		if _, err := verify.Export(strings.NewReader(export.String()), o); !errors.Is(err, fault.Invalid) {
			t.Error(err)
		}
	}
	// To is only an upper bound for a tenant's part.
	if _, err := verify.Export(strings.NewReader(export.String()), verify.Options{Tenant: true, To: 1000}); err != nil {
		t.Error(err)
	}
}

func TestATenantProvesItsOwnHistory(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(60)
	entries, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(entries)
	report, err := verify.Tenant(entries, verify.Options{Fingerprint: f.Log.Fingerprint()})
	if err != nil || !report.Pinned || report.Entries != 40 {
		t.Fatal(report, err)
	}
	for name, forged := range map[string][]audit.Entry{
		"first dropped":  entries[1:],
		"middle dropped": slices.Delete(slices.Clone(entries), 7, 8),
		"swapped":        append([]audit.Entry{entries[0], entries[2], entries[1]}, entries[3:]...),
		"repeated":       slices.Insert(slices.Clone(entries), 5, entries[4]),
		"empty":          nil,
	} {
		if _, err := verify.Tenant(forged, verify.Options{}); err == nil {
			t.Errorf("%s: accepted", name)
		} else if _, ok := audit.IsBroken(err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}
