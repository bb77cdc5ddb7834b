// Package pgtest runs a real PostgreSQL from the machine's own binaries, for tests of the parts
// that use it.
//
// It listens on 127.0.0.1 with random passwords, syncs its commits, and keeps everything in one
// temporary directory. Once Start has returned, it answers. A shell watches a pipe that closes when
// the process that started the server ends in any way, SIGKILL included. The shell then ends the
// server and removes the directory. So nothing remains, and tests need no TestMain.
//
// No part of the product imports the package.
package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Server is a PostgreSQL server. Its methods may be called concurrently. Those that end, stop or
// start processes exclude each other.
type Server struct {
	*cluster
	url string
}

// Start starts a server for the duration of a test. It skips the test under -short and where
// PostgreSQL is not installed.
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

// Shared returns a server that all tests of the process share, with a database of the test's own
// that is removed after the test. The server ends with the process. A test that kills, freezes or
// restarts a server must start its own.
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

// Run is Start without a test: the caller stops the server. The context bounds only the start.
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

// URL returns the URL of the server's own database, with the password. The role owns the database
// and is not a superuser.
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

// temporary is NewDatabase for the duration of a test.
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

// SuperURL returns the superuser's URL of the database postgres, which every server has.
func (s *Server) SuperURL() string { return s.address(superuser, "postgres") }

func (s *Server) create(ctx context.Context) (string, error) {
	s.databases.Lock() // template1 allows one copy at a time
	defer s.databases.Unlock()
	s.made++
	name := fmt.Sprintf("test%d", s.made)
	if err := s.Exec(ctx, "CREATE DATABASE "+name+" OWNER "+role); err != nil {
		return "", err
	}
	return s.address(role, name), nil
}

// Configure puts files into the data directory, appends lines to postgresql.conf and restarts the
// server.
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

// Stop stops the server and removes all its files. It may be called again.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pipe == nil {
		return nil
	}
	err := s.pipe.Close()
	s.pipe = nil
	_ = s.watcher.Wait() // the exit status of the shell does not matter; the directory must be gone
	if s.done != nil {
		<-s.done
	}
	if _, gone := os.Stat(s.dir); !errors.Is(gone, os.ErrNotExist) {
		err = errors.Join(err, fmt.Errorf("%s is still there", s.dir))
	}
	return err
}

// Restart stops the server cleanly if it runs, and starts it again on the same port.
func (s *Server) Restart() error {
	s.mu.Lock()
	if s.running() {
		_ = syscall.Kill(s.pid, syscall.SIGINT) // PostgreSQL's fast shutdown, which ends sessions
		<-s.done
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	return s.start(ctx)
}

// Kill kills all processes of the server with SIGKILL, like a machine failure. Restart starts it
// again.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running() {
		return nil
	}
	killed, err := s.signal(syscall.SIGSTOP, syscall.SIGKILL) // a stopped postmaster starts no new children
	if err != nil {
		return err
	}
	<-s.done
	// A server cannot start while a process of the previous one still has the shared memory.
	for {
		left, err := processes(func(pid, _ int) bool { return slices.Contains(killed, pid) })
		if err != nil || len(left) == 0 {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Freeze stops all processes of the server until Thaw. Connections stay open and silent.
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
