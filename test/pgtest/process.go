package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

var errPortTaken = errors.New("port taken")

// watching is the shell that outlives everything. Of its own accord a postmaster ends within seconds, and takes the shared memory with it
// that no directory holds; what a killed one left is removed by the number in its lock file. A number of a process means something
// only while that process names our directory.
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
	c.watcher.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt at the terminal is not for it
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

// Stop ends the server and removes all it wrote. It may be called again.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pipe == nil {
		return nil
	}
	err := s.pipe.Close()
	s.pipe = nil
	_ = s.watcher.Wait() // what its last command said does not matter: the directory does
	if s.done != nil {
		<-s.done
	}
	if _, gone := os.Stat(s.dir); !errors.Is(gone, os.ErrNotExist) {
		err = errors.Join(err, fmt.Errorf("%s is still there", s.dir))
	}
	return err
}

// start starts the postmaster and returns when it takes connections.
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
		// The lock file says "ready" only for this postmaster, and pg_isready that it answers.
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

// Log is what the server has written since it was started last.
func (c *cluster) Log() string {
	log, _ := os.ReadFile(filepath.Join(c.dir, "log"))
	return string(log)
}

// Restart ends the server in good order, if it is running, and starts it again on the same port.
func (s *Server) Restart() error {
	s.mu.Lock()
	if s.running() {
		_ = syscall.Kill(s.pid, syscall.SIGINT) // PostgreSQL's "fast" shutdown: sessions are ended
		<-s.done
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return s.start(ctx)
}

// Kill ends all processes of the server by SIGKILL, as a machine that fails would. Restart starts it again.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running() {
		return nil
	}
	killed, err := s.signal(syscall.SIGSTOP, syscall.SIGKILL) // a stopped postmaster has no new children
	if err != nil {
		return err
	}
	<-s.done
	// A server does not start while a process has the shared memory of the one before.
	for {
		left, err := processes(func(pid, _ int) bool { return slices.Contains(killed, pid) })
		if err != nil || len(left) == 0 {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Freeze stops all processes of the server, whose connections stay open and silent, until Thaw.
func (s *Server) Freeze() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.signal(syscall.SIGSTOP, syscall.SIGSTOP)
	return err
}

// Thaw ends Freeze.
func (s *Server) Thaw() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.signal(syscall.SIGCONT, syscall.SIGCONT)
	return err
}

func (c *cluster) running() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// signal sends first to the postmaster, and then the other signal to all its children and to itself, and returns who got it.
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

// processes returns those of the machine that are meant and have not ended, the largest id first: a postmaster comes after its children.
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
