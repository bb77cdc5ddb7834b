package cli

import (
	"regexp"
	"testing"
)

// Each command that may take minutes says how far it is, at a terminal or when asked. Here nobody is
// at a terminal.
func TestLongCommandsShowProgress(t *testing.T) {
	t.Parallel() // it mostly waits
	e, at := newEstate(t, "")
	to := newRecipient(t)
	file, log := e.path("all.backup"), e.path("log.jsonl")
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"audit", "verify", "--store", at}, `(?m)^[1-9]\d* entries verified$`},
		{[]string{"audit", "export", "--store", at, "--kms-key-file", e.keyFile(), "--output", log}, `(?m)^[1-9]\d* entries written$`},
		{[]string{"audit", "verify", "--file", log}, `(?m)^[1-9]\d* entries verified$`},
		{[]string{"backup", "--store", at, "--kms-key-file", e.keyFile(), "--recipient", to.text, "--output", file},
			`(?m)^\d+\.\d MB written$\n(.*\n)*(\d+\.\d) of (\d+\.\d) MB compared with the signature \(100%\)$`},
		{[]string{"backup", "verify", "--input", file, "--verify-with", to.file},
			`(?m)MB compared with the signature \(100%\)\n(.*\n)*\d+\.\d of \d+\.\d MB opened \(\d+%\)\n(.*\n)*[1-9]\d* entries verified$`},
		{[]string{"restore", "--input", file, "--identity-file", to.file, "--data-dir", e.path("restored")}, `(?m)^\d+\.\d of \d+\.\d MB read \(100%\)\n(.*\n)*[1-9]\d* entries verified$`},
		{[]string{"migrate", "--from", at, "--to", "bolt:" + e.path("moved")}, `(?m)^[1-9]\d* rows copied`},
	} {
		out := mustRun(t, append(c.args, "--progress")...)
		if !regexp.MustCompile(c.says).MatchString(out) {
			t.Errorf("%q does not show %s:\n%s", c.args, c.says, out)
		}
	}
	if out := mustRun(t, "audit", "verify", "--file", log); regexp.MustCompile(`(?m)entries verified$`).MatchString(out) {
		t.Errorf("progress that nobody asked for:\n%s", out)
	}
}
