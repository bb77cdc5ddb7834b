package dotenv

import (
	"maps"
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

func TestWhatNoFileCanHoldIsNamedOnly(t *testing.T) {
	for key, value := range map[string]string{"ZERO": "hunter\x00", "BYTES": "hunter\xff", "1st": "hunter",
		// Node's util.parseEnv reads INJECTED=1 of the first as a variable, and python-dotenv \' in quotes as '.
		"ESCAPED": "hunter'\"\nINJECTED=1", "BACKSLASH": `hunter\`, "DOLLAR": "hunter'$x"} {
		file, err := Format(map[string]secret.Bytes{"A": secret.Bytes("1"), key: secret.Bytes(value)})
		if err == nil || !strings.Contains(err.Error(), key) || strings.Contains(err.Error(), "hunter") || file != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
}
