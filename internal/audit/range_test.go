package audit

import (
	"errors"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A log that ends before the last sequence of the range was cut.
func TestALogThatEndsBeforeTheRangeIsBroken(t *testing.T) {
	f := newFixture(t)
	f.fill(20) // head at 21
	f.follow()
	key := f.log.signer.Public()
	lines := f.lines()
	cut := strings.Join(lines[:15], "")
	whole := strings.Join(lines, "")
	for _, c := range []struct {
		what   string
		export string
		o      Options
		first  uint64 // first bad sequence; 0: none
	}{
		{"cut", cut, Options{To: 18}, 16},
		{"cut", cut, Options{To: 16}, 16},
		{"cut", cut, Options{To: 15}, 0},
		{"cut", cut, Options{To: 3}, 0},
		{"cut", cut, Options{From: 5, To: 18, PublicKey: key}, 16},
		{"cut", cut, Options{From: 5, To: 15, PublicKey: key}, 0},
		{"cut", cut, Options{From: 16, To: 18, PublicKey: key}, 16},
		{"whole", whole, Options{To: 21}, 0},
		{"whole", whole, Options{To: 22}, 22},
		{"whole", whole, Options{From: 5, To: 22, PublicKey: key}, 22},
		{"with a gap", strings.Join(lines[:15], "") + strings.Join(lines[17:], ""), Options{To: 16}, 16},
		{"with a gap", strings.Join(lines[:15], "") + strings.Join(lines[17:], ""), Options{From: 3, To: 17, PublicKey: key}, 16},
		{"of another log at its end", strings.Join(lines[:21], "") + newFixture(t).lines()[1], Options{To: 21}, 22},
	} {
		report, err := VerifyExport(strings.NewReader(c.export), c.o)
		broken, ok := IsBroken(err)
		switch {
		case c.first == 0 && (err != nil || report.Sequence != c.o.To):
			t.Errorf("%s, %d to %d: %+v, %v", c.what, c.o.From, c.o.To, report.Sequence, err)
		case c.first != 0 && (!ok || broken.Sequence != c.first):
			t.Errorf("%s, %d to %d: %v, want it broken at %d", c.what, c.o.From, c.o.To, err, c.first)
		}
	}
	f.cutTail(15)
	for _, o := range []Options{{To: 18}, {From: 5, To: 18, PublicKey: key}, {From: 16, To: 16, PublicKey: key}, {To: 1 << 63}} {
		if broken, ok := IsBroken(func() error { _, err := VerifyStore(t.Context(), f.store, o); return err }()); !ok || broken.Sequence != 16 {
			t.Errorf("the store, %d to %d: %v", o.From, o.To, broken)
		}
	}
	for _, o := range []Options{{To: 15}, {From: 5, To: 15, PublicKey: key}} {
		if report, err := VerifyStore(t.Context(), f.store, o); err != nil || report.Sequence != 15 {
			t.Errorf("the store, %d to %d: %v", o.From, o.To, err)
		}
	}
}

// A sequence that an accepted rollback lost has no entry, and the entry that accepted the loss says
// so.
func TestARangeMayEndInWhatWasLost(t *testing.T) {
	f := newFixture(t)
	f.fill(9)
	f.rollBack(10, 20)
	f.fill(5) // head at 26
	f.follow()
	key := f.log.signer.Public()
	lines := f.lines()
	whole := strings.Join(lines, "")
	altered := strings.Replace(whole, `"lost_from":"11"`, `"lost_from":"10"`, 1)
	for _, o := range []Options{{To: 11}, {To: 15}, {To: 20}, {To: 21}, {From: 4, To: 15, PublicKey: key}, {From: 12, To: 15, PublicKey: key}} {
		report, err := VerifyExport(strings.NewReader(whole), o)
		if err != nil || report.Sequence != 21 || len(report.Rollbacks) != 1 {
			t.Errorf("%d to %d: %+v, %v", o.From, o.To, report, err)
		}
		if report, err = VerifyStore(t.Context(), f.store, o); err != nil || report.Sequence != 21 || len(report.Rollbacks) != 1 {
			t.Errorf("the store, %d to %d: %+v, %v", o.From, o.To, report, err)
		}
		if _, err := VerifyExport(strings.NewReader(altered), o); err == nil {
			t.Errorf("%d to %d: an acceptance that does not verify is believed", o.From, o.To)
		}
	}
	for _, export := range []string{strings.Join(lines[:10], ""), strings.Join(lines[:10], "") + strings.Join(lines[11:], "")} {
		if broken, ok := IsBroken(func() error { _, err := VerifyExport(strings.NewReader(export), Options{To: 15}); return err }()); !ok || broken.Sequence != 11 {
			t.Errorf("without the acceptance: %v", broken)
		}
	}
	err := f.store.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(entryKey(21)) })
	if err != nil {
		t.Fatal(err)
	}
	if broken, ok := IsBroken(func() error { _, err := VerifyStore(t.Context(), f.store, Options{To: 15}); return err }()); !ok || broken.Sequence != 11 {
		t.Errorf("without the acceptance: %v", broken)
	}
}

// A fingerprint is compared with the log, or the verification fails: a part is never mistaken for
// the expected log.
func TestAFingerprintIsAlwaysHeldAgainstTheLog(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	f.follow()
	whole, key := string(f.export()), f.log.signer.Public()
	right, wrong := f.log.Fingerprint(), strings.Repeat("0", 64)
	for _, c := range []struct {
		from, to uint64
		held     bool
	}{{0, 0, true}, {0, 9, true}, {5, 0, true}, {5, 21, true}, {5, 9, false}} {
		o := Options{From: c.from, To: c.to, PublicKey: key, Fingerprint: right}
		report, err := VerifyExport(strings.NewReader(whole), o)
		if c.held != (err == nil && report.Pinned) || !c.held && !errors.Is(err, fault.Invalid) {
			t.Errorf("%d to %d: %+v, %v", c.from, c.to, report.Pinned, err)
		}
		if report, err := VerifyStore(t.Context(), f.store, o); err != nil || !report.Pinned {
			t.Errorf("the store, %d to %d: %v", c.from, c.to, err)
		}
		o.Fingerprint = wrong
		if report, err := VerifyExport(strings.NewReader(whole), o); err == nil || report.Pinned {
			t.Errorf("%d to %d: another fingerprint is taken", c.from, c.to)
		}
		if _, err := VerifyStore(t.Context(), f.store, o); err == nil {
			t.Errorf("the store, %d to %d: another fingerprint is taken", c.from, c.to)
		}
	}
	// A tenant's part without the entry that identifies the log.
	var part []Entry
	for _, e := range f.entries() {
		if e.TenantID == string(tenantA) {
			part = append(part, *e)
		}
	}
	o := Options{Tenant: true, PublicKey: key, From: part[1].Sequence, Fingerprint: right}
	if _, err := VerifyTenant(part[1:], o); !errors.Is(err, fault.Invalid) {
		t.Error(err)
	}
	o.From = 0
	if report, err := VerifyTenant(part, o); err != nil || !report.Pinned {
		t.Error(err)
	}
	var export strings.Builder
	for _, line := range strings.SplitAfter(whole, "\n") {
		if strings.HasPrefix(line, string(closingPrefix)) || strings.Contains(line, `"tenant_id":"`+string(tenantA)+`"`) {
			export.WriteString(line)
		}
	}
	for fingerprint, held := range map[string]bool{right: true, wrong: false} {
		o := Options{Tenant: true, PublicKey: key, From: part[1].Sequence, Fingerprint: fingerprint}
		report, err := VerifyExport(strings.NewReader(export.String()), o)
		if (err == nil && report.Pinned && report.Fingerprint == fingerprint) != held {
			t.Errorf("%+v, %v", report.Pinned, err)
		}
		o.To = part[len(part)-2].Sequence
		if _, err := VerifyExport(strings.NewReader(export.String()), o); !errors.Is(err, fault.Invalid) {
			t.Error(err)
		}
	}
	// To is only an upper bound for a tenant's part.
	if _, err := VerifyExport(strings.NewReader(export.String()), Options{Tenant: true, To: 1000}); err != nil {
		t.Error(err)
	}
}
