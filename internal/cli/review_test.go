package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func TestAMemberReviewsFromTheCommandLine(t *testing.T) {
	s := start(t, t.TempDir())
	c, err := client.New(s.BaseURL)
	must(t, err)
	const email, password = "ada@example.org", "correct horse battery staple"
	_, err = c.V2.RegisterUser(t.Context(), v2.RegisterRequest{Email: email, Password: password, TenantName: "Example Ltd"})
	must(t, err)
	file := filepath.Join(t.TempDir(), "password")
	must(t, os.WriteFile(file, []byte(password+"\n"), 0o600))
	review := func(args ...string) (string, error) {
		t.Helper()
		return run(t, append([]string{"audit", "review", "--url", s.BaseURL, "--email", email, "--password-file", file}, args...)...)
	}
	for _, step := range []struct{ args, want string }{
		{"", "last review of log: -"},
		{"denials --note seen", "0 denials and 0 failures acknowledged"},
		{"access", "1 items"},
		{"inventory --json", `"subject": "inventory"`},
		{"", "last review of log: 20"},
	} {
		out, err := review(strings.Fields(step.args)...)
		if err != nil || !strings.Contains(out, step.want) {
			t.Errorf("%q: %q, %v", step.args, out, err)
		}
	}
	must(t, os.WriteFile(file, []byte("another passphrase of words"), 0o600))
	for args, status := range map[string]int{"": command.StatusRefused, "everything": command.StatusUsage, "--note x": command.StatusUsage} {
		if out, err := review(strings.Fields(args)...); command.Status(err) != status {
			t.Errorf("%q: %q, %v", args, out, err)
		}
	}
	if _, err := run(t, "audit", "review", "--url", s.BaseURL, "--email", email); command.Status(err) != command.StatusUsage || !strings.Contains(err.Error(), "--password-file") {
		t.Error("without a password:", err)
	}
}
