package cli

import (
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// completed returns what the Tab key offers behind a command line, and whether files are offered, too.
func completed(t *testing.T, args ...string) (offered []string, files bool) {
	t.Helper()
	text, _, _ := strings.Cut(mustRun(t, append([]string{cobra.ShellCompNoDescRequestCmd}, args...)...), "\nCompletion ended")
	lines := strings.Split(text, "\n")
	directive := 0
	if _, err := fmt.Sscanf(lines[len(lines)-1], ":%d", &directive); err != nil {
		t.Fatalf("%q completes to %q", args, lines)
	}
	return lines[:len(lines)-1], cobra.ShellCompDirective(directive)&cobra.ShellCompDirectiveNoFileComp == 0
}

// The Tab key offers every value that a flag takes, and no file where none is wanted.
func TestFlagsComplete(t *testing.T) {
	level := []string{"debug", "info", "warn", "error"}
	scopes := []string{"Strict", "Namespace", "Cluster"}
	report := []string{"text", "json"}
	for line, want := range map[string][]string{
		"audit review ":                 {"--email", "denials", "access", "inventory"},
		"completion ":                   {"bash", "zsh", "fish", "powershell"},
		"user invite --role ":           {"owner", "admin", "member", "limited", "auditor"},
		"compliance report --format ":   {"pdf", "oscal", "ksi"},
		"compliance score --framework ": {"soc2", "iso27001", "pci_dss", "hipaa", "gdpr", "nist_csf", "fedramp", "apra", "nist_800_53"},
		"seal --scope ":                 scopes,
		"validate --scope ":             scopes,
		"webhook --log-level ":          level,
		"webhook --log-format ":         {"json", "text"},
		"doctor --output ":              report,
		"server --output ":              report,
		"apikey create --url ":          nil,
		"apikey revoke ":                nil,
		"comp":                          {"compact", "completion", "compliance"},
	} {
		got, files := completed(t, strings.Split(line, " ")...)
		if !slices.Equal(got, want) || files {
			t.Errorf("%s[Tab] offers %q, and files: %v; want %q", line, got, files, want)
		}
	}
	all, _ := completed(t, "apikey", "create", "--scope", "")
	for _, s := range all {
		if !v2.Scope(s).Valid() {
			t.Errorf("--scope offers %s, which the contract does not have", s)
		}
	}
	events, _ := completed(t, "audit", "search", "--event", "")
	for _, e := range events {
		if !v2.EventType(e).Valid() {
			t.Errorf("--event offers %s, which the contract does not have", e)
		}
	}
	if !slices.Contains(events, "CREDENTIAL_UNSEALED") || len(events) < 60 {
		t.Errorf("--event offers only %q", events)
	}
	for flag, count := range map[string]int{"--charset": 4, "--key-pair": 7} {
		offered, _ := completed(t, "generate", "x", flag, "")
		if len(offered) != count {
			t.Errorf("%s offers %q", flag, offered)
		}
	}
	if len(all) < 10 {
		t.Errorf("--scope offers only %q", all)
	}
	for _, line := range []string{"reseal ", "audit verify --file ", "import sealed-secrets ", "audit verify --api-key-file ", "import env "} {
		if _, files := completed(t, strings.Split(line, " ")...); !files {
			t.Errorf("%s[Tab] offers no file", line)
		}
	}
}

// A flag whose help says that it takes a file or folder completes one.
func TestFlagsThatTakeFilesCompleteFiles(t *testing.T) {
	says := regexp.MustCompile(`^(?:(?:PEM|configuration) )?(?:file|folder|data directory|kubeconfig)\b|, PEM`)
	seen := 0
	eachFlag(Command(), func(cmd *cobra.Command, f *pflag.Flag) {
		if !says.MatchString(f.Usage) || cmd.HasSubCommands() {
			return
		}
		seen++
		args := append(strings.Fields(strings.TrimPrefix(cmd.CommandPath(), "latticekeep")), "--"+f.Name, "")
		if _, files := completed(t, args...); !files {
			t.Errorf("%q is %q and completes no files: enter it in completion.go", args, f.Usage)
		}
	})
	if seen < 20 {
		t.Errorf("only %d flags take files", seen)
	}
}

// Each script is one that its shell can read, and a command of the help.
func TestScriptsOfCompletion(t *testing.T) {
	help := mustRun(t, "--help")
	if !strings.Contains(help, "\n  completion ") {
		t.Errorf("the help does not name completion:\n%s", help)
	}
	for _, shell := range shells {
		script := mustRun(t, "completion", shell)
		if !strings.Contains(script, "__complete") || !strings.Contains(script, "latticekeep") {
			t.Errorf("the script for %s does not ask the program:\n%.300s", shell, script)
		}
	}
	check := exec.CommandContext(t.Context(), "bash", "-n")
	check.Stdin = strings.NewReader(mustRun(t, "completion", "bash"))
	if out, err := check.CombinedOutput(); err != nil {
		t.Errorf("bash cannot read its script: %v\n%s", err, out)
	}
	if _, err := run(t, "completion", "tcsh"); ExitStatus(err) != 2 || !strings.Contains(err.Error(), "bash, zsh, fish, powershell; run") {
		t.Errorf("a shell that has no script: %v", err)
	}
}
