package verify_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/test/audittest"
)

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
