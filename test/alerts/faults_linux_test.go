package alerts

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/disktest"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// The data directory is on a volume of its own, which something else fills. Changes end first, and
// reads when the reserve is used up.
func diskFills(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	p.volume = true
	const megabytes = 512
	volume := disktest.Mount(t, disktest.Tmpfs, megabytes<<20)
	s := start(t, filepath.Join(volume, "data"), "")
	s.makeKey()
	filler := filepath.Join(volume, "filler")
	fill := func(left int64) func() {
		return func() {
			t.Helper()
			f, err := os.OpenFile(filler, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.Write(make([]byte, max(0, free(t, volume)-left))); err != nil && !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	empty := func() {
		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
	}
	filling := fault{
		name: "a tenth of the disk is left", begin: fill(megabytes << 20 / 10), end: empty, lasts: 40 * time.Minute,
		ready: http.StatusOK, read: true, change: true, metric: "latticekeep_disk_free_bytes", log: "request", alerts: []string{"LatticekeepDiskFilling"},
	}
	p.suffers(s, filling)
	p.during(7*time.Hour, p.scraped(s, nil)) // until it does not look as if the disk filled within a day
	full := filling
	full.name, full.begin, full.change = "the disk is full", fill(0), false
	full.check, full.metric, full.log = "[-]disk failed (replica; stops change): ", "latticekeep_store_reserved 1", "the disk is full"
	full.alerts = []string{"LatticekeepDiskFilling", "LatticekeepDiskFull", "LatticekeepNotServing", "LatticekeepErrors"}
	p.suffers(s, full)
	return p.judge()
}

// free returns the bytes that may be written on the volume of a folder.
func free(t *testing.T, dir string) int64 {
	t.Helper()
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		t.Fatal(err)
	}
	return int64(s.Bavail) * s.Bsize
}

// The disk of PostgreSQL fills, on which the server is not.
func postgresFills(t *testing.T) []string {
	if !long() {
		t.Log("tables are filled until they have to grow: run make chaos")
		return nil
	}
	p := newPrometheus(t, time.Minute)
	volume, err := os.MkdirTemp("", "postgres-") // its user reaches no folder of the test
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(volume); err != nil {
			t.Error(err)
		}
	})
	if err := syscall.Mount("tmpfs", volume, "tmpfs", 0, "size=256m,mode=1777"); err != nil {
		t.Skipf("a file system cannot be mounted here, which takes root: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(volume, 0); err != nil {
			t.Errorf("unmounting %s: %v", volume, err)
		}
	})
	temporary := os.TempDir()
	t.Setenv("TMPDIR", volume)
	db := pgtest.Start(t)
	t.Setenv("TMPDIR", temporary)
	s := onPostgres(t, db)
	var empty func()
	p.suffers(s, fault{
		name:  "the disk of PostgreSQL is full",
		begin: func() { empty = disktest.Fill(t, volume) }, end: func() { empty() },
		ready: http.StatusOK, check: "[-]store failed (shared; stops read and change): ", metric: "latticekeep_store_commit_failures_total",
		log: "committing failed", alerts: []string{"LatticekeepCommitsFail", "LatticekeepNotServing", "LatticekeepErrors"},
	})
	return p.judge()
}

// Every write to the database file fails, as on a broken disk, and as on a file system that became
// read-only.
func diskFails(t *testing.T) []string {
	if out, err := exec.Command("strace", "-q", "-o", "/dev/null", "true").CombinedOutput(); err != nil {
		t.Skipf("strace (package strace) cannot be used here: %v %s", err, out)
	}
	p := newPrometheus(t, time.Minute)
	s := start(t, "", "")
	s.makeKey()
	var trace *exec.Cmd
	f := fault{
		end: func() {
			_ = trace.Process.Signal(os.Interrupt)
			_ = trace.Wait() // an interrupt ended it
		},
		ready: http.StatusServiceUnavailable, check: "[-]store failed (replica; stops read and change): ", metric: "latticekeep_store_commit_failures_total",
		log: "committing failed", alerts: []string{"LatticekeepCommitsFail", "LatticekeepNotServing", "LatticekeepErrors", "LatticekeepOperatorDown"},
	}
	errors := map[string]string{"EIO": "the disk fails"}
	if long() {
		errors["EROFS"] = "the file system is read-only"
	}
	for errno, name := range errors {
		f.name = name
		f.begin = func() {
			const calls = "pwrite64,fsync,fdatasync,ftruncate"
			trace = exec.Command("strace", "-f", "-q", "-o", s.path("trace"), "-p", fmt.Sprint(s.cmd.Process.Pid), "-P", s.path("data/latticekeep.db"),
				"-e", "trace="+calls, "-e", fmt.Sprintf("inject=%s:error=%s", calls, errno))
			if err := trace.Start(); err != nil {
				t.Fatal(err)
			}
		}
		p.suffers(s, f)
	}
	return p.judge()
}

// Strangers take connections until the process has no room for more.
func strangersConnect(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	s := startBelow(t, "", "", "/bin/sh", "-c", `ulimit -n 256 && exec "$@"`, "sh")
	s.makeKey()
	var held []net.Conn
	f := fault{
		name: "strangers use up the descriptors", ready: http.StatusOK, read: true, change: true,
		begin: func() {},
		meanwhile: func() {
			for range 160 {
				if c, err := net.DialTimeout("tcp", strings.TrimPrefix(s.url, "http://"), 10*time.Second); err == nil {
					held = append(held, c)
				}
			}
		},
		end: func() {
			for _, c := range held {
				_ = c.Close()
			}
		},
		metric: `latticekeep_connections_closed_total{reason="address"}`, alerts: []string{"LatticekeepConnectionsFull"},
	}
	p.suffers(s, f)
	return p.judge()
}

// The memory is too small for the bodies that clients send at the same time.
func memoryShort(t *testing.T) []string {
	if !long() {
		t.Log("thousands of bodies are sent: run make chaos")
		return nil
	}
	p := newPrometheus(t, time.Minute)
	s := startBelow(t, "", "", "env", "GOMEMLIMIT=128MiB")
	s.makeKey()
	body := `{"name":"large","credential_type":"t","values":{"v":"` + strings.Repeat("x", 60<<10) + `"}}`
	f := fault{
		name: "memory is too short for the bodies", ready: http.StatusOK, read: true, change: true,
		begin: func() {},
		meanwhile: func() {
			const held = 400 // beyond the least room for bodies
			var clients sync.WaitGroup
			for range held {
				clients.Go(func() { s.upload(body) })
			}
			clients.Wait()
		},
		end:    func() {},
		metric: `latticekeep_unavailable_total{reason="overload"}`, log: "request", alerts: []string{"LatticekeepOverloaded", "LatticekeepErrors"},
	}
	p.suffers(s, f)
	return p.judge()
}

// upload sends a body, and ignores the answer.
func (s *server) upload(body string) {
	r, err := http.NewRequest(http.MethodPost, s.url+"/api/v2/vault/seal", strings.NewReader(body))
	if err != nil {
		s.t.Error(err)
		return
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-API-Key", s.key)
	if answer, err := http.DefaultClient.Do(r); err == nil { // the server may close the connection before the body is sent
		_, _ = io.Copy(io.Discard, answer.Body)
		_ = answer.Body.Close()
	}
}

// The server is told to end while an upload stalls: it says so, and ends well.
func uploadStalls(t *testing.T) []string {
	if !long() {
		t.Log("an upload is waited for for half a minute: run make chaos")
		return nil
	}
	p := newPrometheus(t, time.Minute)
	s := start(t, "", "")
	s.makeKey()
	p.during(10*time.Minute, p.scraped(s, nil))
	p.expect("before the end")
	const kept = `latticekeep_connections{state="kept"}` // those with a key
	before := s.look().value(kept)
	c := machine.DialFrom(t, "127.0.0.1", strings.TrimPrefix(s.url, "http://"))
	if _, err := fmt.Fprintf(c, "POST /api/v2/vault/seal HTTP/1.1\r\nHost: v\r\nX-API-Key: %s\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{", s.key); err != nil {
		t.Fatal(err)
	}
	s.await("the upload", func() bool { return s.look().value(kept) != before })
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	f := fault{
		name: "SIGTERM while an upload stalls", ready: http.StatusServiceUnavailable, check: "[-]shutdown failed (replica; stops read and change): ",
		metric: `latticekeep_health_check{check="shutdown",scope="replica"} 0`, log: "ended", alerts: []string{"LatticekeepDown"},
	}
	var seen sight
	s.await("the check", func() bool { seen = s.look(); return f.differs(sight{}, seen) == nil || s.dead() })
	if err := f.differs(sight{}, seen); err != nil {
		t.Errorf("%s: %v\n%s", f.name, err, seen.checks)
	}
	<-s.ended
	if !s.cmd.ProcessState.Success() || s.said("ended", "reason") != "terminated signal received" {
		t.Errorf("it ended with %s and says %q\n%s", s.cmd.ProcessState, s.said("ended", "reason"), s.log.Tail())
	}
	p.during(10*time.Minute, p.scraped(s, nil))
	p.expect(f.name, f.alerts...)
	f.write(t, seen)
	return p.judge()
}
