package audit

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// The log contains an older checkpoint of any epoch, unless the entries that it covers were lost.
func TestAnOlderCheckpointOfAFormerEpoch(t *testing.T) {
	f := newFixture(t)
	f.fill(20)
	kept := f.followed() // checkpoint at 21
	copied := copyStore(t, f.store)
	f.fill(5)
	lost := f.followed() // checkpoint at 26
	g := f.copyOf(copied)
	accepted := g.rollBack(21, 26)
	if accepted.Sequence != 27 {
		t.Fatal(accepted)
	}
	g.fill(5)
	newest := g.followed()
	export := g.export()
	for _, note := range [][]byte{kept, newest} {
		report, err := VerifyStore(t.Context(), g.store, Options{Since: note})
		if err != nil || report.Since == nil || len(report.Rollbacks) != 1 || report.Rollbacks[0].LostFrom != 22 || report.Rollbacks[0].LostTo != 26 || report.Size != 27 {
			t.Fatal(report, err)
		}
		if _, err := VerifyExport(bytes.NewReader(export), Options{Since: note}); err != nil {
			t.Fatal(err)
		}
	}
	for name, err := range map[string]error{
		"store":  second(VerifyStore(t.Context(), g.store, Options{Since: lost})),
		"export": second(VerifyExport(bytes.NewReader(export), Options{Since: lost})),
	} {
		if broken, ok := IsBroken(err); !ok || broken.Sequence != 22 || !strings.Contains(broken.Reason, "entries 22 to 26 are not in this log, they were lost by the rollback that entry 27 accepted") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func second(_ Report, err error) error { return err }

// Anything but an older checkpoint of this log is a mistake of the caller, and no fault of the log.
func TestSinceTakesCheckpointsOfThisLogOnly(t *testing.T) {
	f, other := newFixture(t), newFixture(t)
	f.fill(3)
	for name, note := range map[string][]byte{"another log's": other.followed(), "altered": bytes.Replace(f.followed(), []byte("sequence 4"), []byte("sequence 5"), 1), "junk": []byte("junk")} {
		_, err := VerifyStore(t.Context(), f.store, Options{Since: note})
		if fault.Of(err) != fault.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := VerifyExport(strings.NewReader(f.lines()[2]), Options{From: 3, PublicKey: f.log.signer.Public(), Since: f.followed()}); fault.Of(err) != fault.Invalid {
		t.Error("a part proved an older checkpoint: ", err)
	}
}

func TestARangeIsVerifiedByItself(t *testing.T) {
	f := newFixture(t)
	f.fill(30)
	key := f.log.signer.Public()
	lines := f.lines()
	verify := map[string]func(Options) (Report, error){
		"store":  func(o Options) (Report, error) { return VerifyStore(t.Context(), f.store, o) },
		"export": func(o Options) (Report, error) { return VerifyExport(strings.NewReader(strings.Join(lines, "")), o) },
	}
	for name, verify := range verify {
		report, err := verify(Options{From: 10, To: 20, PublicKey: key})
		if err != nil || report.From != 10 || report.Sequence != 20 || report.Entries != 11 || report.Credentials != nil || !report.Pinned {
			t.Errorf("%s: %+v %v", name, report, err)
		}
		if report, err := verify(Options{To: 20}); err != nil || report.From != 1 || report.Sequence != 20 {
			t.Errorf("%s: %+v %v", name, report, err)
		}
		if _, err := verify(Options{From: 10}); fault.Of(err) != fault.Invalid {
			t.Errorf("%s without a key: %v", name, err)
		}
		if _, err := verify(Options{From: 10, PublicKey: newFixture(t).log.signer.Public()}); err == nil {
			t.Errorf("%s with another key", name)
		}
		if _, err := verify(Options{From: 40, PublicKey: key}); err == nil {
			t.Errorf("%s: a range beyond the end holds", name)
		}
	}
	lines[14] = strings.Replace(lines[14], "success", "denied", 1)
	_, err := verify["export"](Options{From: 10, To: 20, PublicKey: key})
	if broken, ok := IsBroken(err); !ok || broken.Sequence != 15 {
		t.Error(err)
	}
	if _, err := verify["export"](Options{From: 16, PublicKey: key}); err != nil {
		t.Error("what is before the range matters: ", err)
	}
}

// An interrupted export is resumed where it ended; the two parts together are one export.
func TestAnExportIsResumed(t *testing.T) {
	for _, signing := range []Signing{SignEntries, SignBatches} {
		f := newFixture(t)
		f.log.SetSigning(signing)
		f.fill(30)
		lines := f.lines()
		var rest bytes.Buffer
		if err := f.log.Export(t.Context(), &rest, 21); err != nil {
			t.Fatal(err)
		}
		key := f.log.signer.Public()
		report, err := VerifyExport(bytes.NewReader(rest.Bytes()), Options{From: 21, PublicKey: key})
		if err != nil || report.From != 21 || report.Sequence != 31 || report.Size != 31 || report.Fingerprint != f.log.Fingerprint() {
			t.Fatal(report, err)
		}
		whole := strings.Join(lines[:20], "") + rest.String()
		if report, err := VerifyExport(strings.NewReader(whole), Options{Fingerprint: f.log.Fingerprint()}); err != nil || report.Entries != 31 {
			t.Fatal(report, err)
		}
		if _, err := VerifyExport(bytes.NewReader(rest.Bytes()), Options{From: 20, PublicKey: key}); err == nil {
			t.Error("a part is taken for a longer one")
		}
		if _, err := VerifyExport(bytes.NewReader(rest.Bytes()), Options{PublicKey: key}); err == nil {
			t.Error("a part is taken for the whole")
		}
		if err := f.log.Export(t.Context(), io.Discard, 99); fault.Of(err) != fault.Invalid {
			t.Error("an export of nothing: ", err)
		}
	}
}

// The lines of one tenant verify by that tenant's links, with and without the closing line of the
// whole export.
func TestATenantsExportVerifies(t *testing.T) {
	f := newFixture(t)
	f.log.SetSigning(SignBatches)
	f.fill(30)
	lines := f.lines()
	var own []string
	for _, line := range lines {
		if strings.Contains(line, `"tenant_id":"`+string(tenantB)) {
			own = append(own, line)
		}
	}
	for _, end := range []string{"", lines[len(lines)-1]} {
		report, err := VerifyExport(strings.NewReader(strings.Join(own, "")+end), Options{Tenant: true})
		if err != nil || report.Entries != 10 || report.Tenant != string(tenantB) {
			t.Error(report, err)
		}
	}
	missing := append(append([]string{}, own[:4]...), own[5:]...)
	if _, ok := IsBroken(second(VerifyExport(strings.NewReader(strings.Join(missing, "")), Options{Tenant: true}))); !ok {
		t.Error("an entry is missing, and that is not reported")
	}
	if _, ok := IsBroken(second(VerifyExport(strings.NewReader(strings.Join(lines, "")), Options{Tenant: true}))); !ok {
		t.Error("two tenants are taken for one")
	}
}

// The earliest of several faults is reported, in whichever stage of the pipeline each one shows.
func TestTheEarliestFaultIsReported(t *testing.T) {
	f := newFixture(t)
	f.fill(3 * stretchSize)
	lines := f.lines()
	signature := func(line string) string { // another signature of the same length
		at := strings.Index(line, `"signature":"`) + 100
		return line[:at] + strings.Repeat("A", 20) + line[at+20:]
	}
	for _, bad := range []int{3, stretchSize + 3, 2*stretchSize + 3} {
		changed := append([]string{}, lines...)
		changed[bad] = signature(changed[bad])
		for later := bad + 1; later < len(lines)-1; later += stretchSize / 2 {
			changed[later] = "junk\n"
		}
		_, err := VerifyExport(strings.NewReader(strings.Join(changed, "")), Options{})
		if broken, ok := IsBroken(err); !ok || broken.Sequence != uint64(bad+1) || !strings.Contains(broken.Reason, "signature") {
			t.Errorf("line %d: %v", bad+1, err)
		}
	}
}

// Derived rows that are written after the entries may lag. They may not be ahead.
func TestDerivedRowsMayLag(t *testing.T) {
	f := newFixture(t)
	f.fill(10)
	for range 3 {
		if _, err := f.verify(); err != nil {
			t.Fatal(err)
		}
		f.followed()
		if _, err := f.verify(); err != nil {
			t.Fatal(err)
		}
		f.fill(300)
	}
}
