package dotenv

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/secret"
)

func TestWhatFormatWritesIsReadAlike(t *testing.T) {
	hard := map[string]string{
		"PLAIN": "abc/DEF:1,2@x", "EMPTY": "", "SPACE": " a b ", "DOLLAR": "$HOME `id` $(id)", "SINGLE": `it's`, "LINES": "a\nb\n", "HASH": "#a #b",
		"DOUBLE": `say "x"`, "UNICODE": "grün 🔑", "EQUALS": "a=b", "CR": "a\r\nb", "TILDE": "~", "STAR": "*",
		"PATH_2": `C:\new\table`, "REGEXP": `^\d+\.\$[a-z]"\n`, "CONTINUED": "a\\\nb", "FIRST": `\x`,
	}
	values := make(map[string]secret.Bytes)
	for k, v := range hard {
		values[k] = secret.Bytes(v)
	}
	file, err := Format(values)
	if err != nil {
		t.Fatal(err)
	}
	variables, err := Parse(file)
	got := make(map[string]string)
	for _, v := range variables {
		got[v.Name] = v.Value
	}
	if err != nil || !maps.Equal(got, hard) {
		t.Errorf("Parse: %q, %v", got, err)
	}
	path := filepath.Join(t.TempDir(), ".env")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	for key, want := range hard { // a shell
		out, err := exec.CommandContext(t.Context(), "sh", "-c", `. "$1"; eval "printf '%s.' \"\$$2\""`, "sh", path, key).Output()
		if err != nil || string(out) != want+"." {
			t.Errorf("sh reads %s as %q, %v; want %q", key, out, err, want+".")
		}
	}
}

// Each value of hard characters is refused, or a shell and Parse read it as it was.
func TestAShellReadsWhatFormatWrites(t *testing.T) {
	const seed, hard = 1, "\\\\'\"$`\n\r\t #=!*~{}()nx"
	random := rand.New(rand.NewPCG(seed, seed)) //nolint:gosec // values of a test
	values := make(map[string]secret.Bytes)
	var want, script strings.Builder
	script.WriteString(`. "$1"; printf '%s\0'`)
	for i := range 3000 {
		key := fmt.Sprintf("K%d", i)
		value := make(secret.Bytes, random.IntN(6))
		for j := range value {
			value[j] = hard[random.IntN(len(hard))]
		}
		if _, err := Format(map[string]secret.Bytes{key: value}); err != nil {
			continue
		}
		values[key] = value
		want.WriteString(string(value) + "\x00")
		script.WriteString(` "$` + key + `"`)
	}
	if len(values) < 1000 {
		t.Fatalf("only %d values are not refused", len(values))
	}
	file, err := Format(values)
	if err != nil {
		t.Fatal(err)
	}
	all, err := Parse(file)
	if err != nil || len(all) != len(values) {
		t.Fatalf("%d variables, %v", len(all), err)
	}
	for _, v := range all {
		if v.Value != string(values[v.Name]) {
			t.Errorf("Parse reads %q as %q", values[v.Name], v.Value)
		}
	}
	path := filepath.Join(t.TempDir(), ".env")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := exec.CommandContext(t.Context(), "sh", "-c", script.String(), "sh", path).Output()
	if err != nil || string(got) != want.String() {
		t.Errorf("sh reads other values, %v", err)
	}
}

func TestWhatNoFileCanHoldIsNamedOnly(t *testing.T) {
	for key, value := range map[string]string{"ZERO": "hunter\x00", "BYTES": "hunter\xff", "1st": "hunter",
		// Node's util.parseEnv reads INJECTED=1 of the first as a variable, and python-dotenv \' in quotes as '.
		"ESCAPED": "hunter'\"\nINJECTED=1", "LAST": `hunter\`, "TWO": `\\hunter`, "BOTH": `hun\ter's`, "DOLLAR": "hunter'$x"} {
		file, err := Format(map[string]secret.Bytes{"A": secret.Bytes("1"), key: secret.Bytes(value)})
		if err == nil || !strings.Contains(err.Error(), key) || strings.Contains(err.Error(), "hunter") || file != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
}
