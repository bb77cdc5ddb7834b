// Package pgtest runs a real PostgreSQL, of the machine's own binaries, for tests of what stands on it.
//
// It listens on 127.0.0.1 with passwords drawn for it alone, syncs what it commits, and keeps everything in one temporary directory. Once
// Start has returned, it answers. A shell watches a pipe that closes when the process that started the server ends, in whatever way,
// SIGKILL included: then the shell ends the server and removes the directory. So nothing remains, and tests need no TestMain.
//
// No part of the product imports the package.
package pgtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// startTimeout bounds a start; two seconds are usual.
const startTimeout = time.Minute

// ErrMissing says that PostgreSQL is not installed.
var ErrMissing = errors.New("PostgreSQL is not installed: run make postgres")

// role is that of the URLs: it owns its databases and is no superuser.
const role, superuser = "latticekeep", "postgres"

// Server is a PostgreSQL server. Its methods may be called concurrently, except that those which end, stop or start processes exclude
// each other.
type Server struct {
	*cluster
	url string
}

// cluster is what the servers of Shared have in common.
type cluster struct {
	bin       string // folder of the binaries
	dir       string // of everything; the watching shell removes it
	port      string
	password  string // of both roles
	account   *syscall.Credential
	watcher   *exec.Cmd
	pipe      io.Closer // the watching shell waits for its end
	databases sync.Mutex
	made      int

	mu   sync.Mutex
	pid  int           // of the postmaster
	done chan struct{} // closed when it has been reaped
}

// Start starts a server for the length of a test. It skips the test under -short and where PostgreSQL is not installed.
func Start(t testing.TB) *Server {
	t.Helper()
	skipShort(t)
	s, err := Run(t.Context())
	check(t, err)
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("stopping PostgreSQL: %v", err)
		}
	})
	return s
}

var shared = sync.OnceValues(func() (*Server, error) { return Run(context.Background()) })

// Shared is a server that all tests of the process share, with a database of the test's own, which is removed after the test. The server
// ends with the process; a test that kills, freezes or restarts one starts its own.
func Shared(t testing.TB) *Server {
	t.Helper()
	skipShort(t)
	s, err := shared()
	check(t, err)
	return &Server{cluster: s.cluster, url: s.temporary(t)}
}

func skipShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs PostgreSQL")
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, ErrMissing) {
		t.Skip(err.Error())
	}
	if err != nil {
		t.Fatalf("starting PostgreSQL: %v", err)
	}
}

// Run is Start without a test: the caller stops the server. The context bounds the start only.
func Run(ctx context.Context) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	bin, err := binaries()
	if err != nil {
		return nil, err
	}
	account, err := unprivileged()
	if err != nil {
		return nil, err
	}
	c := &cluster{bin: bin, account: account, password: rand.Text()}
	if c.dir, err = directory(account); err != nil {
		return nil, fmt.Errorf("making the directory of PostgreSQL: %w", err)
	}
	if err := c.watch(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(c.dir))
	}
	s := &Server{cluster: c}
	if err := c.first(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	if s.url, err = s.create(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// URL is that of a database of the server's own, with its password. The role owns the database and is no superuser.
func (s *Server) URL() string { return s.url }

// NewDatabase returns the URL of another, empty database.
func (s *Server) NewDatabase(t testing.TB) string {
	t.Helper()
	url, err := s.create(t.Context())
	if err != nil {
		t.Fatalf("creating a database: %v", err)
	}
	return url
}

// temporary is NewDatabase for the length of a test.
func (s *Server) temporary(t testing.TB) string {
	t.Helper()
	made := s.NewDatabase(t)
	t.Cleanup(func() {
		u, _ := url.Parse(made)
		ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
		defer cancel()
		if err := s.Exec(ctx, "DROP DATABASE "+strings.TrimPrefix(u.Path, "/")+" WITH (FORCE)"); err != nil {
			t.Errorf("removing a database: %v", err)
		}
	})
	return made
}

// SuperURL is the URL of the superuser, for the database that every server has.
func (s *Server) SuperURL() string { return s.address(superuser, "postgres") }

func (s *Server) create(ctx context.Context) (string, error) {
	s.databases.Lock() // template1 bears one copy at a time
	defer s.databases.Unlock()
	s.made++
	name := fmt.Sprintf("test%d", s.made)
	if err := s.Exec(ctx, "CREATE DATABASE "+name+" OWNER "+role); err != nil {
		return "", err
	}
	return s.address(role, name), nil
}

func (c *cluster) address(user, database string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(user, c.password), Host: net.JoinHostPort("127.0.0.1", c.port),
		Path: "/" + database, RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Exec runs statements, each on its own, as the superuser.
func (c *cluster) Exec(ctx context.Context, statements ...string) error {
	args := []string{"--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname=" + c.address(superuser, "postgres")}
	for _, s := range statements {
		args = append(args, "--command="+s)
	}
	return c.run(ctx, "psql", args...)
}

// run runs one of PostgreSQL's programs.
func (c *cluster) run(ctx context.Context, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, program), args...)
	c.equip(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("running %s: %w: %s", program, err, bytes.TrimSpace(out))
	}
	return nil
}

// equip has cmd run as PostgreSQL's user, in a process group of its own and free of settings that the machine may hold for its clients.
func (c *cluster) equip(cmd *exec.Cmd) {
	cmd.Dir = c.dir
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "PG") || strings.HasPrefix(v, "LC_") })
	cmd.Env = append(cmd.Env, "LC_ALL=C", "HOME="+c.dir, "TMPDIR="+c.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.account, Setpgid: true}
}

// settings hold for every server. What they leave out is PostgreSQL's default, syncing included; shared memory is in the directory
// as far as it can be, since SIGKILL leaves it behind.
const settings = `
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
dynamic_shared_memory_type = mmap
max_wal_senders = 0
logging_collector = off
timezone = UTC
log_timezone = UTC
`

// first makes the cluster and starts it, on another port when the one it found is taken meanwhile.
func (c *cluster) first(ctx context.Context) error {
	password := filepath.Join(c.dir, "password")
	if err := c.write(password, []byte(c.password+"\n")); err != nil {
		return err
	}
	if err := c.run(ctx, "initdb", "--pgdata="+c.data(), "--username="+superuser, "--pwfile="+password, "--auth=scram-sha-256",
		"--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"); err != nil {
		return err
	}
	if err := c.append("postgresql.conf", settings); err != nil {
		return err
	}
	var err error
	for range 5 {
		var l net.Listener
		if l, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return fmt.Errorf("finding a free port: %w", err)
		}
		_, c.port, _ = net.SplitHostPort(l.Addr().String())
		if err = l.Close(); err != nil {
			return fmt.Errorf("freeing a port: %w", err)
		}
		if err = c.start(ctx); !errors.Is(err, errPortTaken) {
			break
		}
	}
	if err != nil {
		return err
	}
	return c.Exec(ctx, "CREATE ROLE "+role+" LOGIN PASSWORD '"+c.password+"'")
}

func (c *cluster) data() string { return filepath.Join(c.dir, "data") }

// write creates a file that PostgreSQL's user may read, and nobody else.
func (c *cluster) write(path string, data []byte) error {
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return fmt.Errorf("writing for PostgreSQL: %w", err)
	}
	if c.account == nil {
		return nil
	}
	return os.Chown(path, int(c.account.Uid), int(c.account.Gid))
}

func (c *cluster) append(name, text string) error {
	f, err := os.OpenFile(filepath.Join(c.data(), name), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("configuring PostgreSQL: %w", err)
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// Configure puts files into the data directory, appends lines to postgresql.conf and restarts the server.
func (s *Server) Configure(t testing.TB, files map[string][]byte, lines ...string) {
	t.Helper()
	for name, data := range files {
		if err := s.write(filepath.Join(s.data(), name), data); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.append("postgresql.conf", strings.Join(lines, "\n")+"\n"); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(); err != nil {
		t.Fatalf("restarting PostgreSQL: %v", err)
	}
}

// binaries is the folder of the newest PostgreSQL: Debian's, or the one on the PATH.
func binaries() (string, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	slices.SortFunc(found, func(a, b string) int { return version(a) - version(b) })
	for _, path := range slices.Backward(found) {
		if bin := filepath.Dir(path); complete(bin) {
			return bin, nil
		}
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil && complete(filepath.Dir(path)) {
			return filepath.Dir(path), nil
		}
	}
	return "", ErrMissing
}

func version(path string) int {
	n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
	return n
}

func complete(bin string) bool {
	for _, program := range []string{"postgres", "initdb", "psql", "pg_isready"} {
		if _, err := os.Stat(filepath.Join(bin, program)); err != nil {
			return false
		}
	}
	return true
}

// unprivileged is who runs PostgreSQL, which refuses root: nil for whoever runs the test.
func unprivileged() (*syscall.Credential, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uerr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
		if uerr == nil && gerr == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, errors.New("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")
}

// directory makes one that account can reach: a temporary folder of root's own is none.
func directory(account *syscall.Credential) (string, error) {
	parent := os.TempDir()
	if account != nil {
		for dir := filepath.Clean(parent); dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
			if info, err := os.Stat(dir); err != nil || info.Mode()&1 == 0 {
				parent = "/tmp"
				break
			}
		}
	}
	dir, err := os.MkdirTemp(parent, "latticekeep-pg-")
	if err != nil || account == nil {
		return dir, err
	}
	return dir, os.Chown(dir, int(account.Uid), int(account.Gid))
}
