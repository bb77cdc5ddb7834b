package cli

import (
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
)

func readText(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const serviceHost = "KUBERNETES_SERVICE_HOST" // set in every pod

// said receives the server's standard error, one string for each write.
type said chan string

func (s said) Write(b []byte) (int, error) {
	s <- string(b)
	return len(b), nil
}

// await returns the next string that contains words.
func (s said) await(t *testing.T, words string) string {
	t.Helper()
	patience := time.After(time.Minute)
	for {
		select {
		case text := <-s:
			if strings.Contains(text, words) {
				return text
			}
		case <-patience:
			t.Fatalf("waited in vain for %q", words)
		}
	}
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// withoutPassword moves the password of a URL to a file.
func withoutPassword(t *testing.T, whole, file string) string {
	t.Helper()
	u, err := url.Parse(whole)
	must(t, err)
	password, _ := u.User.Password()
	machine.WriteFile(t, file, []byte(password+"\n"))
	u.User = url.User(u.User.Username())
	return u.String()
}

// cluster is an API server with the namespaces of a test.
type cluster struct {
	t     *testing.T
	plane *kubetest.ControlPlane
}

// try runs kubectl and returns its whole output.
func (c *cluster) try(stdin string, args ...string) (string, error) {
	c.t.Helper()
	cmd := c.plane.Kubectl(c.t.Context(), args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (c *cluster) kubectl(stdin string, args ...string) string {
	c.t.Helper()
	out, err := c.try(stdin, args...)
	if err != nil {
		c.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}
