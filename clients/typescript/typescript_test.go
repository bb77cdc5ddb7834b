// Package typescript_test builds the client in TypeScript and runs its tests against a real server.
package typescript_test

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/servertest"
)

// TestTypeScript works in a copy, so that the working tree stays as it is.
func TestTypeScript(t *testing.T) {
	c := newCheckout(t)
	t.Run("generated files are those of the contracts", c.compareGenerated)
	c.run(nil, "npm", "run", "build")
	c.run(nil, filepath.Join(c.packages, ".bin/tsc"), "-p", "test")
	server := newServer(t)
	t.Run("tests", func(t *testing.T) {
		tests, err := filepath.Glob(filepath.Join(c.dir, "build/*.test.js"))
		if err != nil || len(tests) == 0 {
			t.Fatalf("no tests: %v", err)
		}
		c.in(t).run(server.environment(), "node", append([]string{"--test", "--test-reporter=spec"}, tests...)...)
		server.wantEveryOperation()
	})
	t.Run("package", func(t *testing.T) { c.in(t).consume(server) })
}

// checkout is a copy of the package in a tree like that of the repository.
type checkout struct {
	*testing.T
	root     string // the repository
	dir      string // the copy of the package
	packages string // node_modules, which holds the packages of the lock file
}

func newCheckout(t *testing.T) *checkout {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs node and npm, and compiles TypeScript")
	}
	version, err := exec.CommandContext(t.Context(), "node", "--version").Output()
	if err != nil {
		t.Skipf("node is not installed (make node): %v", err)
	}
	major, _, _ := strings.Cut(strings.TrimPrefix(string(version), "v"), ".")
	if n, err := strconv.Atoi(major); err != nil || n < 20 {
		t.Skipf("node is %s, and the client needs 20", bytes.TrimSpace(version))
	}
	if _, err := exec.LookPath("npm"); err != nil {
		t.Skipf("npm is not installed (make node): %v", err)
	}
	root, err := filepath.Abs("../..")
	check(t, err)
	c := &checkout{T: t, root: root}
	installed := strings.TrimSpace(c.run(nil, filepath.Join(root, "hack/npm.sh"), filepath.Join(root, "clients/typescript")))
	c.packages = filepath.Join(installed, "node_modules")

	tree := t.TempDir()
	c.dir = filepath.Join(tree, "clients/typescript")
	check(t, os.MkdirAll(c.dir, 0o700))
	for _, name := range []string{"api", "hack", "server", "LICENSE"} {
		check(t, os.Symlink(filepath.Join(root, name), filepath.Join(tree, name)))
	}
	for _, name := range []string{"package.json", "tsconfig.json", "tsconfig.crypto.json", "README.md"} {
		content, err := os.ReadFile(name)
		check(t, err)
		check(t, os.WriteFile(filepath.Join(c.dir, name), content, 0o600))
	}
	for _, name := range []string{"src", "scripts", "test"} {
		check(t, os.CopyFS(filepath.Join(c.dir, name), os.DirFS(name)))
	}
	check(t, os.Symlink(c.packages, filepath.Join(c.dir, "node_modules")))
	return c
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// in returns the checkout for a subtest.
func (c *checkout) in(t *testing.T) *checkout {
	of := *c
	of.T = t
	return &of
}

// run runs a command in the copy and returns its output.
func (c *checkout) run(env []string, name string, args ...string) string {
	c.Helper()
	return c.runIn(c.dir, env, name, args...)
}

func (c *checkout) runIn(dir string, env []string, name string, args ...string) string {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), 10*time.Minute)
	defer cancel()
	var out, problems bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		c.Fatalf("%s %s: %v\n%s%s", filepath.Base(name), strings.Join(args, " "), err, out.Bytes(), problems.Bytes())
	}
	return out.String()
}

func (c *checkout) compareGenerated(t *testing.T) {
	generated := filepath.Join(c.dir, "src/generated")
	before := files(t, generated)
	c.in(t).run(nil, "npm", "run", "generate")
	for name, after := range files(t, generated) {
		if before[name] != after {
			t.Errorf("src/generated/%s is out of date: run `npm run generate`", name)
		}
	}
}

func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check(t, err)
	all := map[string]string{}
	for _, e := range entries {
		content, err := os.ReadFile(filepath.Join(dir, e.Name()))
		check(t, err)
		all[e.Name()] = string(content)
	}
	return all
}

var example = regexp.MustCompile("(?s)```ts\n(.*?)```")

// consume installs the packed package elsewhere. There the examples of the README compile, with the strictest settings,
// and run.
func (c *checkout) consume(server *server) {
	c.Helper()
	dir := c.TempDir()
	packed := strings.TrimSpace(c.run(nil, "npm", "pack", "--silent", "--pack-destination", dir))
	installed := filepath.Join(dir, "node_modules/@latticekeep/client")
	check(c, os.MkdirAll(installed, 0o700))
	c.run(nil, "tar", "-xzf", filepath.Join(dir, packed), "-C", installed, "--strip-components=1")
	for _, name := range []string{"@noble", "@types", "undici-types"} {
		check(c, os.Symlink(filepath.Join(c.packages, name), filepath.Join(dir, "node_modules", name)))
	}
	for _, name := range []string{"LICENSE", "index.js", "index.d.ts", "crypto/log.js", "crypto/log.d.ts"} {
		if _, err := os.Stat(filepath.Join(installed, "dist", name)); err != nil {
			c.Error(err)
		}
	}

	readme, err := os.ReadFile("README.md")
	check(c, err)
	var program strings.Builder
	for _, block := range example.FindAllStringSubmatch(string(readme), -1) {
		program.WriteString(block[1] + "\n")
	}
	wrong := program.String() + "await client.v2.unsealCredential({path: {id: 'x'}});\n"
	for name, content := range map[string]string{"readme.ts": program.String(), "wrong.ts": wrong, "package.json": `{"type":"module"}`} {
		check(c, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	tsc := []string{filepath.Join(c.packages, ".bin/tsc"), "--strict", "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess", "--module", "nodenext", "--target", "es2022"}
	c.runIn(dir, nil, tsc[0], append(tsc[1:], "readme.ts")...)
	c.runIn(dir, nil, tsc[0], append(tsc[1:], "--noEmit", "--lib", "es2022", "--types", "node", "readme.ts")...) // without the types of browsers
	cmd := exec.CommandContext(c.Context(), tsc[0], append(tsc[1:], "--noEmit", "wrong.ts")...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "credential_id") {
		c.Errorf("a call with a parameter that is not in the contract compiles: %v\n%s", err, out)
	}
	server.FollowLog()
	if out := c.runIn(dir, server.environment(), "node", "readme.js"); !strings.Contains(out, "kind: SealedCredential") {
		c.Errorf("the examples print\n%s", out)
	}
}

// server is a service behind a proxy that checks each exchange against the contract and notes its operation.
type server struct {
	*servertest.Service
	proxy, control *httptest.Server
	account        servertest.Account

	mu     sync.Mutex
	called map[string]bool // by version and operation
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{Service: servertest.Start(t), called: map[string]bool{}}
	s.account = s.RegisterVerified("reader@example.org")
	target, err := url.Parse(s.URL)
	check(t, err)
	s.proxy = httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: s,
	})
	t.Cleanup(s.proxy.Close)

	control := http.NewServeMux()
	control.HandleFunc("POST /advance", func(http.ResponseWriter, *http.Request) { s.Clock.Advance(31 * time.Minute) })
	control.HandleFunc("POST /follow", func(http.ResponseWriter, *http.Request) {
		s.VerifyLog()
		s.FollowLog()
	})
	s.control = httptest.NewServer(control)
	t.Cleanup(s.control.Close)
	return s
}

// RoundTrip sends a request to the service.
func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	contract := s.Client.Transport.(*servertest.Contract)
	if route, _, err := contract.DocumentOf(r.URL.Path).Router.FindRoute(r); err == nil {
		s.mu.Lock()
		s.called[versionOf(r.URL.Path)+route.Operation.OperationID] = true
		s.mu.Unlock()
	}
	return contract.RoundTrip(r)
}

func versionOf(path string) string {
	if strings.HasPrefix(path, "/v1/") {
		return "v1 "
	}
	return "v2 "
}

func (s *server) environment() []string {
	return []string{
		"LATTICEKEEP_URL=" + s.proxy.URL, "LATTICEKEEP_DIRECT_URL=" + s.URL, "LATTICEKEEP_CONTROL=" + s.control.URL,
		"LATTICEKEEP_API_KEY=" + s.Key, "LATTICEKEEP_EMAIL=" + s.account.Email, "LATTICEKEEP_PASSWORD=" + s.account.Password,
		"LATTICEKEEP_SYSTEM_KEY=" + s.SystemKey(), "LATTICEKEEP_RECIPIENT=" + servertest.BackupIdentity(s.T).Recipient().String(),
		"LATTICEKEEP_LOG=" + s.Audit.Fingerprint(), "LATTICEKEEP_IDENTITY=" + s.Keys.Identity().ID(),
	}
}

// wantEveryOperation compares the operations that were called with the contracts.
func (s *server) wantEveryOperation() {
	s.T.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	contract := s.Client.Transport.(*servertest.Contract)
	for version, doc := range map[string]servertest.Document{"v1 ": contract.V1, "v2 ": contract.V2} {
		for _, item := range doc.Paths.Map() {
			for _, op := range item.Operations() {
				if !s.called[version+op.OperationID] {
					s.T.Errorf("%s%s did not reach the server", version, op.OperationID)
				}
			}
		}
	}
}

// The package uses the same code of others as the dashboard.
func TestDependenciesAreThoseOfTheDashboard(t *testing.T) {
	read := func(name string) map[string]string {
		content, err := os.ReadFile(name)
		check(t, err)
		var p struct{ Dependencies map[string]string }
		check(t, json.Unmarshal(content, &p))
		maps.DeleteFunc(p.Dependencies, func(name, _ string) bool { return !strings.HasPrefix(name, "@noble/") })
		return p.Dependencies
	}
	ours, theirs := read("package.json"), read("../../hack/web/package.json")
	if len(ours) == 0 || !maps.Equal(ours, theirs) {
		t.Errorf("package.json has %v, hack/web/package.json %v", slices.Sorted(maps.Keys(ours)), slices.Sorted(maps.Keys(theirs)))
	}
}
