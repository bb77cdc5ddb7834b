package offline

import (
	"net/url"
	"os"
	"testing"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// withoutPassword moves the password of a URL to a file.
func withoutPassword(t *testing.T, whole, file string) string {
	t.Helper()
	u, err := url.Parse(whole)
	must(t, err)
	password, _ := u.User.Password()
	writeFile(t, file, []byte(password+"\n"))
	u.User = url.User(u.User.Username())
	return u.String()
}

func writeFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}
