package verify_test

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// The log contains an older checkpoint of any epoch, unless the entries that it covers were lost.
func TestAnOlderCheckpointOfAFormerEpoch(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(20)
	kept := f.Followed() // checkpoint at 21
	copied := audittest.CopyStore(t, f.Store)
	f.Fill(5)
	lost := f.Followed() // checkpoint at 26
	g := f.CopyOf(copied)
	accepted := g.RollBack(21, 26)
	if accepted.Sequence != 27 {
		t.Fatal(accepted)
	}
	g.Fill(5)
	newest := g.Followed()
	export := g.Export()
	for _, note := range [][]byte{kept, newest} {
		report, err := verify.Store(t.Context(), g.Store, verify.Options{Since: note})
		if err != nil || report.Since == nil || len(report.Rollbacks) != 1 || report.Rollbacks[0].LostFrom != 22 || report.Rollbacks[0].LostTo != 26 || report.Size != 27 {
			t.Fatal(report, err)
		}
		if _, err := verify.Export(bytes.NewReader(export), verify.Options{Since: note}); err != nil {
			t.Fatal(err)
		}
	}
	for name, err := range map[string]error{
		"store":  audittest.ErrorOf(verify.Store(t.Context(), g.Store, verify.Options{Since: lost})),
		"export": audittest.ErrorOf(verify.Export(bytes.NewReader(export), verify.Options{Since: lost})),
	} {
		if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 22 || !strings.Contains(broken.Reason, "entries 22 to 26 are not in this log, they were lost by the rollback that entry 27 accepted") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Anything but an older checkpoint of this log is a mistake of the caller, and no fault of the log.
func TestSinceTakesCheckpointsOfThisLogOnly(t *testing.T) {
	f, other := audittest.NewFixture(t), audittest.NewFixture(t)
	f.Fill(3)
	for name, note := range map[string][]byte{"another log's": other.Followed(), "altered": bytes.Replace(f.Followed(), []byte("sequence 4"), []byte("sequence 5"), 1), "junk": []byte("junk")} {
		_, err := verify.Store(t.Context(), f.Store, verify.Options{Since: note})
		if fault.Of(err) != fault.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := verify.Export(strings.NewReader(f.Lines()[2]), verify.Options{From: 3, PublicKey: f.Log.Signer.Public(), Since: f.Followed()}); fault.Of(err) != fault.Invalid {
		t.Error("a part proved an older checkpoint: ", err)
	}
}

func TestARangeIsVerifiedByItself(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(30)
	key := f.Log.Signer.Public()
	lines := f.Lines()
	kinds := map[string]func(verify.Options) (verify.Report, error){
		"store": func(o verify.Options) (verify.Report, error) { return verify.Store(t.Context(), f.Store, o) },
		"export": func(o verify.Options) (verify.Report, error) {
			return verify.Export(strings.NewReader(strings.Join(lines, "")), o)
		},
	}
	for name, run := range kinds {
		report, err := run(verify.Options{From: 10, To: 20, PublicKey: key})
		if err != nil || report.From != 10 || report.Sequence != 20 || report.Entries != 11 || report.Credentials != nil || !report.Pinned {
			t.Errorf("%s: %+v %v", name, report, err)
		}
		if report, err := run(verify.Options{To: 20}); err != nil || report.From != 1 || report.Sequence != 20 {
			t.Errorf("%s: %+v %v", name, report, err)
		}
		if _, err := run(verify.Options{From: 10}); fault.Of(err) != fault.Invalid {
			t.Errorf("%s without a key: %v", name, err)
		}
		if _, err := run(verify.Options{From: 10, PublicKey: audittest.NewFixture(t).Log.Signer.Public()}); err == nil {
			t.Errorf("%s with another key", name)
		}
		if _, err := run(verify.Options{From: 40, PublicKey: key}); err == nil {
			t.Errorf("%s: a range beyond the end holds", name)
		}
	}
	lines[14] = strings.Replace(lines[14], "success", "denied", 1)
	_, err := kinds["export"](verify.Options{From: 10, To: 20, PublicKey: key})
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 15 {
		t.Error(err)
	}
	if _, err := kinds["export"](verify.Options{From: 16, PublicKey: key}); err != nil {
		t.Error("what is before the range matters: ", err)
	}
}

// An interrupted export is resumed where it ended; the two parts together are one export.
func TestAnExportIsResumed(t *testing.T) {
	for _, signing := range []writer.Signing{writer.SignEntries, writer.SignBatches} {
		f := audittest.NewFixture(t)
		f.Log.SetSigning(signing)
		f.Fill(30)
		lines := f.Lines()
		var rest bytes.Buffer
		if err := f.Log.Export(t.Context(), &rest, 21); err != nil {
			t.Fatal(err)
		}
		key := f.Log.Signer.Public()
		report, err := verify.Export(bytes.NewReader(rest.Bytes()), verify.Options{From: 21, PublicKey: key})
		if err != nil || report.From != 21 || report.Sequence != 31 || report.Size != 31 || report.Fingerprint != f.Log.Fingerprint() {
			t.Fatal(report, err)
		}
		whole := strings.Join(lines[:20], "") + rest.String()
		if report, err := verify.Export(strings.NewReader(whole), verify.Options{Fingerprint: f.Log.Fingerprint()}); err != nil || report.Entries != 31 {
			t.Fatal(report, err)
		}
		if _, err := verify.Export(bytes.NewReader(rest.Bytes()), verify.Options{From: 20, PublicKey: key}); err == nil {
			t.Error("a part is taken for a longer one")
		}
		if _, err := verify.Export(bytes.NewReader(rest.Bytes()), verify.Options{PublicKey: key}); err == nil {
			t.Error("a part is taken for the whole")
		}
		if err := f.Log.Export(t.Context(), io.Discard, 99); fault.Of(err) != fault.Invalid {
			t.Error("an export of nothing: ", err)
		}
	}
}

// The lines of one tenant verify by that tenant's links, with the closing line of the whole export.
// Without it, they verify for whoever knows where they end.
func TestATenantsExportVerifies(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Log.SetSigning(writer.SignBatches)
	f.Fill(30)
	lines := f.Lines()
	var own []string
	for _, line := range lines {
		if strings.Contains(line, `"tenant_id":"`+string(audittest.TenantB)) {
			own = append(own, line)
		}
	}
	for _, end := range []string{"", lines[len(lines)-1]} {
		report, err := verify.Export(strings.NewReader(strings.Join(own, "")+end), verify.Options{Tenant: true, Unclosed: end == ""})
		if err != nil || report.Entries != 10 || report.Tenant != string(audittest.TenantB) {
			t.Error(report, err)
		}
	}
	for _, cut := range [][]string{own, own[:4]} {
		if b, ok := audit.IsBroken(audittest.ErrorOf(verify.Export(strings.NewReader(strings.Join(cut, "")), verify.Options{Tenant: true}))); !ok || !strings.Contains(b.Reason, "its closing line is missing") {
			t.Error("an export without its closing line holds:", b)
		}
		last, err := audit.ParseEntry([]byte(strings.TrimSuffix(cut[len(cut)-1], "\n")))
		if err != nil {
			t.Fatal(err)
		}
		if report, err := verify.Export(strings.NewReader(strings.Join(cut, "")), verify.Options{Tenant: true, To: last.Sequence}); err != nil || report.Sequence != last.Sequence {
			t.Error(report, err)
		}
	}
	missing := append(append([]string{}, own[:4]...), own[5:]...)
	if _, ok := audit.IsBroken(audittest.ErrorOf(verify.Export(strings.NewReader(strings.Join(missing, "")), verify.Options{Tenant: true}))); !ok {
		t.Error("an entry is missing, and that is not reported")
	}
	if _, ok := audit.IsBroken(audittest.ErrorOf(verify.Export(strings.NewReader(strings.Join(lines, "")), verify.Options{Tenant: true}))); !ok {
		t.Error("two tenants are taken for one")
	}
}

// The earliest of several faults is reported, in whichever stage of the pipeline each one shows.
func TestTheEarliestFaultIsReported(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(3 * verify.StretchSize)
	lines := f.Lines()
	signature := func(line string) string { // another signature of the same length
		at := strings.Index(line, `"signature":"`) + 100
		return line[:at] + strings.Repeat("A", 20) + line[at+20:]
	}
	for _, bad := range []int{3, verify.StretchSize + 3, 2*verify.StretchSize + 3} {
		changed := append([]string{}, lines...)
		changed[bad] = signature(changed[bad])
		for later := bad + 1; later < len(lines)-1; later += verify.StretchSize / 2 {
			changed[later] = "junk\n"
		}
		_, err := verify.Export(strings.NewReader(strings.Join(changed, "")), verify.Options{})
		if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != uint64(bad+1) || !strings.Contains(broken.Reason, "signature") {
			t.Errorf("line %d: %v", bad+1, err)
		}
	}
}

// Derived rows that are written after the entries may lag. They may not be ahead.
func TestDerivedRowsMayLag(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(10)
	for range 3 {
		if _, err := f.Verify(); err != nil {
			t.Fatal(err)
		}
		f.Followed()
		if _, err := f.Verify(); err != nil {
			t.Fatal(err)
		}
		f.Fill(300)
	}
}

// Exports from before checkpoints have the same entries, but another closing line.
func TestAnEarlierExportNamesItsRemedy(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(3)
	lines := f.Lines()
	lines[len(lines)-1] = `{"end":{"chain_id":"chain_test"}}` + "\n"
	_, err := verify.Export(strings.NewReader(strings.Join(lines, "")), verify.Options{})
	if _, broken := audit.IsBroken(err); broken || fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "export the log again") {
		t.Errorf("it is answered with %v", err)
	}
	lines[1] = strings.Replace(lines[1], "127.0.0.1", "127.0.0.2", 1)
	_, err = verify.Export(strings.NewReader(strings.Join(lines, "")), verify.Options{})
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 2 {
		t.Errorf("one that does not hold either: %v", err)
	}
}

// goldenFingerprint is the fingerprint of testdata/export.jsonl, a log of seven entries. Three of
// them are signed as a group, and one accepts a rollback. The key was not kept. The export must
// always verify.
const goldenFingerprint = "f6b6666ae59cd1e8ba67297259d53270ca356f5dc37e428a8a05eedc92d49d3f"

func TestTheGoldenExportVerifies(t *testing.T) {
	export, err := os.ReadFile(filepath.Join("testdata", "export.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	report, err := verify.Export(bytes.NewReader(export), verify.Options{Fingerprint: goldenFingerprint})
	if err != nil {
		t.Fatal(err)
	}
	if report.Entries != 7 || report.Sequence != 10 || len(report.Rollbacks) != 1 || !report.Pinned {
		t.Fatalf("%+v", report)
	}
}

// The canonical form matches an independent encoder. RFC 8785 means sorted keys, no spaces, and the
// shortest escapes.
func TestTheCanonicalFormIsRFC8785(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(3)
	for line := range bytes.Lines(f.Export()) {
		line = bytes.TrimSuffix(line, []byte("\n"))
		var fields map[string]any
		decoder := json.NewDecoder(bytes.NewReader(line))
		decoder.UseNumber()
		if err := decoder.Decode(&fields); err != nil {
			t.Fatal(err)
		}
		var again bytes.Buffer
		encoder := json.NewEncoder(&again) // sorts the keys of maps
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(fields); err != nil {
			t.Fatal(err)
		}
		// encoding/json escapes U+2028 and U+2029, RFC 8785 does not.
		want := strings.NewReplacer(`\u2028`, "\u2028", `\u2029`, "\u2029").Replace(strings.TrimSuffix(again.String(), "\n"))
		if string(line) != want {
			t.Fatalf("got  %s\nwant %s", line, want)
		}
	}
}

func FuzzVerifyExport(f *testing.F) {
	f.Fuzz(func(t *testing.T, export []byte) {
		if report, err := verify.Export(bytes.NewReader(export), verify.Options{}); err == nil && report.Entries == 0 {
			t.Fatal("nothing verified")
		}
	})
}
