package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// tick is the unit of times in /proc. Linux fixes it for user space.
const tick = time.Second / 100

// usage is the processor time and memory that a process has used so far.
type usage struct {
	cpu       time.Duration // user and system
	resident  int64         // bytes
	anonymous int64         // part of resident that is anonymous pages
}

// used reads the usage from /proc/PID/stat and /proc/PID/status.
func used(pid int) (u usage, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return u, err
	}
	_, rest, _ := strings.Cut(string(stat), ") ") // the name in brackets may contain anything
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return u, fmt.Errorf("reading /proc/%d/stat: it is too short", pid)
	}
	for _, field := range fields[11:13] { // utime and stime
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return u, fmt.Errorf("reading /proc/%d/stat: %w", pid, err)
		}
		u.cpu += time.Duration(n) * tick
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	u.resident, u.anonymous = kilobytes(status, "VmRSS:"), kilobytes(status, "RssAnon:")
	return u, nil
}

// kilobytes returns the value of a line in /proc/PID/status, in bytes.
func kilobytes(status []byte, name string) int64 {
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err == nil {
				return n << 10
			}
		}
	}
	return 0
}

// own returns the processor time of this process.
func own() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// childOf returns the only child of a process.
func childOf(pid int) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err != nil {
		return 0, err
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("finding the child of process %d: %w", pid, err)
	}
	return child, nil
}

// syncs counts the calls of fsync and fdatasync in the output of strace.
func syncs(path string) (int, error) {
	text, err := os.ReadFile(path)
	return bytes.Count(text, []byte("sync(")), err // a resumed call has no bracket after its name and is not counted twice
}

// profile writes to a file what the server computes in the next seconds, in the format of pprof.
func (s *server) profile(ctx context.Context, path string, length time.Duration) (err error) {
	url := fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", s.operations, max(1, int(length.Seconds())))
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("profiling the server: %s", answer.Status)
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	_, err = io.Copy(file, answer.Body)
	return err
}

// freeAddress returns a loopback address that nobody listens on.
func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
