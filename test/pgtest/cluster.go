package pgtest

import (
	"bytes"
	"context"
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
	"time"
)

var errPortTaken = errors.New("port taken")

// watching is the script of a shell that outlives the test process and the server. A postmaster
// that ends by itself does so within seconds and releases the shared memory that is outside the
// directory. The shell removes the shared memory of a killed postmaster by the number in its lock
// file. A process id is trusted only while that process names our directory.
const watching = `
dir=$1
read -r _
lock=$dir/data/postmaster.pid
ours() { ps -p "$pid" -o args= 2>/dev/null | grep -qF -- "$dir"; }
if pid=$(head -n 1 "$lock" 2>/dev/null) && [ -n "$pid" ]; then
	if ours; then
		kill -CONT $(ps -A -o pid= -o ppid= | awk -v p="$pid" '$2 == p || $1 == p {print $1}')
		kill -QUIT "$pid"
		for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
			ours || break
			sleep 0.1
		done
		ours && kill -KILL $(ps -A -o pid= -o ppid= | awk -v p="$pid" '$2 == p {print $1}') "$pid"
	fi
	memory=$(awk 'NR == 7 {print $2}' "$lock" 2>/dev/null)
	[ -n "$memory" ] && ipcrm -m "$memory"
fi
for i in 1 2 3 4 5; do
	rm -rf "$dir" && break
	sleep 0.2
done
`

// watch starts the shell.
func (c *cluster) watch() error {
	c.watcher = exec.Command("/bin/sh", "-c", watching, "pgtest", c.dir)
	c.watcher.Dir = "/"
	c.watcher.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal must not reach it
	pipe, err := c.watcher.StdinPipe()
	if err != nil {
		return fmt.Errorf("making a pipe: %w", err)
	}
	if err := c.watcher.Start(); err != nil {
		return fmt.Errorf("starting a shell: %w", err)
	}
	c.pipe = pipe
	return nil
}

// start starts the postmaster and returns when it accepts connections.
func (c *cluster) start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	log, err := os.Create(filepath.Join(c.dir, "log"))
	if err != nil {
		return fmt.Errorf("creating a log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(c.bin, "postgres"), "-D", c.data(), "-p", c.port)
	c.equip(cmd)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting postgres: %w", err)
	}
	done := make(chan struct{})
	c.pid, c.done = cmd.Process.Pid, done
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		// The lock file shows that this postmaster is ready, and pg_isready shows that it answers.
		if c.ready() && c.run(ctx, "pg_isready", "--quiet", "--host=127.0.0.1", "--port="+c.port, "--timeout=10") == nil {
			return nil
		}
		select {
		case <-ticker.C:
		case <-done:
			output, _ := os.ReadFile(log.Name())
			if bytes.Contains(output, []byte("Address already in use")) {
				return fmt.Errorf("starting postgres: %w", errPortTaken)
			}
			return fmt.Errorf("postgres ended while starting: %s", output)
		case <-ctx.Done():
			return fmt.Errorf("waiting for postgres: %w", ctx.Err())
		}
	}
}

func (c *cluster) ready() bool {
	lock, err := os.ReadFile(filepath.Join(c.data(), "postmaster.pid"))
	lines := strings.Split(string(lock), "\n")
	return err == nil && len(lines) > 7 && lines[0] == strconv.Itoa(c.pid) && strings.TrimSpace(lines[7]) == "ready"
}

// Log returns the server's output since its last start.
func (c *cluster) Log() string {
	log, _ := os.ReadFile(filepath.Join(c.dir, "log"))
	return string(log)
}

func (c *cluster) running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// signal sends the signal first to the postmaster, then the signal then to all its children and to
// itself. It returns the ids of the processes that got the second signal.
func (c *cluster) signal(first, then syscall.Signal) ([]int, error) {
	if err := syscall.Kill(c.pid, first); err != nil {
		return nil, fmt.Errorf("signalling postgres: %w", err)
	}
	// Each child leads a process group of its own.
	all, err := processes(func(pid, parent int) bool { return parent == c.pid || pid == c.pid })
	if err != nil {
		return nil, err
	}
	for _, pid := range all {
		if err := syscall.Kill(pid, then); err != nil && !errors.Is(err, syscall.ESRCH) {
			return nil, fmt.Errorf("signalling postgres: %w", err)
		}
	}
	return all, nil
}

// processes returns the ids of the machine's running processes that meant selects, largest first,
// so that a postmaster comes after its children.
func processes(meant func(pid, parent int) bool) ([]int, error) {
	out, err := exec.Command("ps", "-A", "-o", "pid=", "-o", "ppid=", "-o", "stat=").Output()
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var found []int
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) != 3 || strings.HasPrefix(f[2], "Z") {
			continue
		}
		pid, err := strconv.Atoi(f[0])
		parent, perr := strconv.Atoi(f[1])
		if err == nil && perr == nil && meant(pid, parent) {
			found = append(found, pid)
		}
	}
	slices.Sort(found)
	slices.Reverse(found)
	return found, nil
}

// startTimeout bounds a start, which usually takes two seconds.
const startTimeout = time.Minute

// ErrMissing says that PostgreSQL is not installed.
var ErrMissing = errors.New("PostgreSQL is not installed: run make postgres")

// role is the role in the URLs. It owns its databases and is not a superuser.
const role, superuser = "latticekeep", "postgres"

// cluster is the part that the servers of Shared have in common.
type cluster struct {
	bin       string // folder of the binaries
	dir       string // holds everything; the watching shell removes it
	port      string
	password  string // password of both roles
	account   *syscall.Credential
	watcher   *exec.Cmd
	pipe      io.Closer // the watching shell waits for its end
	databases sync.Mutex
	made      int

	mu   sync.Mutex
	pid  int           // the postmaster
	done chan struct{} // closed when the postmaster has been reaped
}

func (c *cluster) address(user, database string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(user, c.password), Host: net.JoinHostPort("127.0.0.1", c.port),
		Path: "/" + database, RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Exec runs each statement separately as the superuser.
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

// equip makes cmd run as PostgreSQL's user, in a process group of its own and without the machine's
// settings for PostgreSQL clients.
func (c *cluster) equip(cmd *exec.Cmd) {
	cmd.Dir = c.dir
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "PG") || strings.HasPrefix(v, "LC_") })
	cmd.Env = append(cmd.Env, "LC_ALL=C", "HOME="+c.dir, "TMPDIR="+c.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: c.account, Setpgid: true}
}

// first creates the cluster and starts it. It tries another port if the chosen one is taken
// meanwhile.
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

// write creates a file that only PostgreSQL's user can read.
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

// binaries returns the folder of the newest PostgreSQL: Debian's, or the one in PATH.
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

// unprivileged returns the account that runs PostgreSQL, which refuses to run as root. nil means
// the user who runs the test.
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

// directory creates a directory that account can reach. It uses /tmp if account cannot reach the
// default temporary folder.
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

// settings apply to every server. Everything else, including syncing, is PostgreSQL's default.
// Shared memory is kept in the directory as far as possible because SIGKILL leaves it behind.
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
