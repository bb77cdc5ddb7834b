package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/test/logtest"
)

// compliance runs a command with the tenant's key.
func (a *audited) compliance(args ...string) (string, error) {
	return run(a.t, append(append([]string{"compliance"}, args...), "--url", a.BaseURL, "--api-key", a.APIKey)...)
}

func TestAScoreIsTheSameFromAnExport(t *testing.T) {
	a := startAudited(t)
	a.use(5)
	folder := t.TempDir()
	t.Chdir(folder)
	heads, answers := map[compliance.Framework]uint64{}, map[compliance.Framework]compliance.Assessment{}
	for _, f := range compliance.Frameworks() {
		out, err := a.compliance("score", "--framework", string(f), "--json")
		if err != nil {
			t.Fatal(err)
		}
		var answer compliance.Assessment
		if err := json.Unmarshal([]byte(out), &answer); err != nil || answer.Score == nil || len(answer.Controls) == 0 {
			t.Fatalf("%v: %s", err, out)
		}
		heads[f], answers[f] = answer.Head.Sequence, answer
	}
	a.use(3)
	whole := filepath.Join(folder, "export.jsonl")
	mustRun(t, "audit", "export", "--url", a.BaseURL, "--api-key", a.systemKey, "--whole", "--output", whole)
	own := filepath.Join(folder, "own.jsonl")
	a.mustAudit("export", "--output", own)
	for f, head := range heads {
		for _, args := range [][]string{{"--file", whole, "--tenant", string(a.TenantID)}, {"--file", own}} {
			args = append([]string{"compliance", "score", "--framework", string(f), "--head", strconv.FormatUint(head, 10), "--fingerprint", a.chain}, args...)
			var derived compliance.Assessment
			if err := json.Unmarshal([]byte(mustRun(t, append(args, "--json")...)), &derived); err != nil {
				t.Fatal(err)
			}
			served := answers[f]
			derived.Proof, served.Proof = compliance.Proof{}, compliance.Proof{} // differ by the time of the request
			if !reflect.DeepEqual(derived, served) {
				t.Errorf("%v\nderived: %+v\nserved:  %+v", args, derived, served)
			}
			if out := mustRun(t, args...); !strings.HasPrefix(out, "score: "+strconv.FormatFloat(*served.Score, 'f', 1, 64)+"\n") || !strings.Contains(out, served.Controls[0].ID) {
				t.Error(out)
			}
		}
	}

	// The command that a report prints works without a change.
	for _, format := range []string{"oscal", "pdf"} {
		file := filepath.Join(folder, "report."+format)
		args := []string{"report", "--framework", "soc2", "--head", strconv.FormatUint(heads[compliance.SOC2], 10), "--format", format, "--output", file}
		if _, err := a.compliance(append(args, "--identity", strings.Repeat("0", 64))...); err == nil || !strings.Contains(err.Error(), "another deployment") {
			t.Error("another identity:", err)
		}
		out, err := a.compliance(append(args, "--identity", a.identity)...)
		if err != nil || !strings.Contains(out, "signed by the pinned identity") {
			t.Fatal(err, out)
		}
		if info, err := os.Stat(file + ".sig"); err != nil || info.Size() != 3309 {
			t.Error("the signature:", err)
		}
		if _, err := a.compliance(args...); err == nil || !strings.Contains(err.Error(), "nothing is ever overwritten") {
			t.Error("the report was written over:", err)
		}
		if format == "pdf" {
			continue
		}
		command := regexp.MustCompile(`latticekeep (compliance score [^"\\]+)`).FindStringSubmatch(readText(t, file))
		if command == nil {
			t.Fatal("the report names no command")
		}
		again := mustRun(t, strings.Fields(command[1])...)
		if want := "score: " + strconv.FormatFloat(*answers[compliance.SOC2].Score, 'f', 1, 64); !strings.HasPrefix(again, want+"\n") {
			t.Errorf("%s says %s, want %s", command[0], again, want)
		}
	}

	// An export that does not verify yields no score.
	text := readText(t, own)
	lines := strings.SplitAfter(text, "\n")
	logtest.WriteText(t, own, strings.Join(append(lines[:3:3], lines[4:]...), ""))
	_, err := run(t, "compliance", "score", "--file", own, "--framework", "soc2")
	if _, ok := audit.IsBroken(err); !ok {
		t.Error("an export that lacks an entry:", err)
	}
	logtest.WriteText(t, own, text)
	for says, args := range map[string][]string{
		"another log":         {"--file", own, "--framework", "soc2", "--fingerprint", strings.Repeat("0", 64)},
		"whose entries":       {"--file", whole, "--framework", "soc2"},
		"is of tenant":        {"--file", own, "--framework", "soc2", "--tenant", "ten_other"},
		"no such entry":       {"--file", own, "--framework", "soc2", "--head", "999999"},
		"no such framework":   {"--file", own, "--framework", "soc3"},
		"of which log":        {"--framework", "soc2"},
		"is needed":           {"--file", own},
		"exclude each other":  {"--file", own, "--url", a.BaseURL, "--framework", "soc2"},
		"reading the directo": {"--file", own, "--framework", "soc2", "--catalogues", filepath.Join(folder, "none")},
	} {
		if _, err := run(t, append([]string{"compliance", "score"}, args...)...); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v, want %q", args, err, says)
		}
	}
}
