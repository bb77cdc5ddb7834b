// Package python_test runs the tests of the Python client against a real server, checks its types,
// and builds its wheel.
package python_test

import (
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// interpreter is Debian's Python. One on the PATH may be another, without Debian's packages.
const interpreter = "/usr/bin/python3"

// requireModules skips the test where Debian's packages are not installed.
func requireModules(t *testing.T, modules ...string) {
	t.Helper()
	if testing.Short() {
		t.Skip("it needs Python")
	}
	for _, module := range modules {
		if err := exec.CommandContext(t.Context(), interpreter, "-c", "import "+module).Run(); err != nil {
			t.Skipf("%s of Debian has no module %s: run `make python` as root", interpreter, module)
		}
	}
}

func python(t *testing.T, env []string, arguments ...string) {
	t.Helper()
	c := exec.CommandContext(t.Context(), interpreter, arguments...)
	c.Env = append(os.Environ(), append(env, "PYTHONDONTWRITEBYTECODE=1")...)
	out, err := c.CombinedOutput()
	if err != nil {
		t.Errorf("%v: %v\n%s", arguments, err, out)
	}
}

func TestPythonClient(t *testing.T) {
	requireModules(t, "pytest")
	s := servertest.Start(t)
	owner := s.RegisterVerified("owner@example.org")
	secure, authority := overTLS(t, s.URL)
	clock := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { s.Clock.Advance(time.Hour) }))
	defer clock.Close()
	python(t, []string{
		"LATTICEKEEP_URL=" + s.URL,
		"LATTICEKEEP_API_KEY=" + s.Key,
		"LATTICEKEEP_EMAIL=" + owner.Email,
		"LATTICEKEEP_PASSWORD=" + owner.Password,
		"TEST_SYSTEM_KEY=" + s.SystemKey(),
		"TEST_METRICS_KEY=" + s.GrantKeyIn(authz.SystemTenant, authz.MetricsRead),
		"TEST_RECIPIENT=" + servertest.BackupIdentity(t).Recipient().String(),
		"TEST_CLOCK_URL=" + clock.URL, // each request lets an hour pass
		"TEST_TLS_URL=" + secure,
		"TEST_TLS_AUTHORITY=" + authority,
	}, "-m", "pytest", "-q")
}

// overTLS returns the URL of a proxy that speaks TLS, and the file of its certificate.
func overTLS(t *testing.T, address string) (proxy, file string) {
	t.Helper()
	target, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(httputil.NewSingleHostReverseProxy(target))
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // one client does not trust the certificate
	server.StartTLS()
	t.Cleanup(server.Close)
	file = filepath.Join(t.TempDir(), "authority.pem")
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(file, block, 0o600); err != nil {
		t.Fatal(err)
	}
	return server.URL, file
}

func TestPythonClientIsTyped(t *testing.T) {
	requireModules(t, "mypy", "pytest")
	python(t, nil, "-m", "mypy", "--cache-dir", t.TempDir())
}

func TestPythonClientHasAWheel(t *testing.T) {
	requireModules(t, "build", "hatchling")
	dir := t.TempDir()
	python(t, nil, "-m", "build", "--no-isolation", "--skip-dependency-check", "--wheel", "--outdir", dir)
	wheel := filepath.Join(dir, "latticekeep-2.0.0-py3-none-any.whl")
	python(t, []string{"PYTHONPATH=" + wheel}, "-c",
		"import latticekeep, pkgutil; assert pkgutil.get_data('latticekeep', 'py.typed') is not None; assert '.whl' in latticekeep.__file__")
	python(t, nil, "-c", "import sys, zipfile; assert any(n.endswith('/LICENSE') for n in zipfile.ZipFile(sys.argv[1]).namelist())", wheel)
}
