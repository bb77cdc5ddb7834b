// Memscan counts how often a plaintext is in the memory of a running server: just after it was
// unsealed and decrypted, and again after other requests. It starts a development server, looks for
// random values that nothing else holds, and needs Linux and root.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	program := flag.String("latticekeep", "bin/latticekeep", "`path` of the product")
	requests := flag.Int("requests", 30, "other requests between the two counts")
	wait := flag.Duration("wait", 20*time.Second, "time between the two counts")
	show := flag.Bool("show", false, "print what is around each copy")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *program, *requests, *wait, *show); err != nil {
		fmt.Fprintln(os.Stderr, "memscan:", err)
		os.Exit(1)
	}
}

// server is a development server and the API key of its tenant.
type server struct {
	pid    int
	URL    string `json:"base_url"`
	Key    string `json:"api_key"`
	show   bool
	client *http.Client
}

func run(ctx context.Context, program string, requests int, wait time.Duration, show bool) (err error) {
	cmd := exec.CommandContext(ctx, program, "server", "--dev", "--listen", "127.0.0.1:0")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it removes its data
	cmd.SysProcAttr, cmd.Dir = asNobody(), "/"
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("starting the server: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the server: %w", err)
	}
	defer func() { err = errors.Join(err, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()) }()
	s := &server{pid: cmd.Process.Pid, show: show, client: &http.Client{Transport: &http.Transport{MaxIdleConns: 1}}}
	if err := json.NewDecoder(out).Decode(s); err != nil {
		return fmt.Errorf("waiting for the server: %w", err)
	}

	operations := []*operation{
		{name: "seal and unseal a credential", use: s.unseal},
		{name: "encrypt and decrypt data", use: s.decrypt},
	}
	for _, o := range operations {
		o.canary = rand.Text() + rand.Text()
		if err := o.use(ctx, o.canary); err != nil {
			return fmt.Errorf("%s: %w", o.name, err)
		}
		if o.first, err = s.count(o.canary); err != nil {
			return err
		}
	}
	if err := sleep(ctx, wait/2); err != nil {
		return err
	}
	for range requests {
		if _, err := s.call(ctx, http.MethodGet, "/api/v2/vault/list", nil); err != nil {
			return fmt.Errorf("listing: %w", err)
		}
	}
	if err := sleep(ctx, wait/2); err != nil {
		return err
	}
	fmt.Printf("| operation | copies just after it | after %v and %d other requests |\n| --- | --- | --- |\n", wait, requests)
	for _, o := range operations {
		later, err := s.count(o.canary)
		if err != nil {
			return err
		}
		fmt.Printf("| %s | %d | %d |\n", o.name, o.first, later)
	}
	fmt.Printf("\nAnother process of the server's user opens its memory: %s.\n\n%s/%s, %d processors, Linux %s, %s, %s.\n",
		s.opensMemory(ctx), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), release(), version(ctx, program), time.Now().UTC().Format(time.DateOnly))
	return nil
}

// operation puts a plaintext, the canary, into the memory of the server.
type operation struct {
	name   string
	use    func(ctx context.Context, canary string) error
	canary string
	first  int // copies just after it
}

// sleep waits, or returns the error of a context that ends earlier.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// unseal seals a credential with the canary and unseals it.
func (s *server) unseal(ctx context.Context, canary string) error {
	made, err := s.call(ctx, http.MethodPost, "/api/v2/vault/seal", map[string]any{
		"name": "canary", "credential_type": "database", "values": map[string]string{"password": canary},
	})
	if err != nil {
		return err
	}
	answer, err := s.call(ctx, http.MethodGet, fmt.Sprintf("/api/v2/vault/%v", made["credential_id"]), nil)
	if err == nil && !strings.Contains(fmt.Sprint(answer["values"]), canary) {
		err = errors.New("the value is not in the answer")
	}
	return err
}

// decrypt encrypts the canary and decrypts it.
func (s *server) decrypt(ctx context.Context, canary string) error {
	sealed, err := s.call(ctx, http.MethodPost, "/api/v2/encryption/encrypt", map[string]any{"data": canary})
	if err != nil {
		return err
	}
	answer, err := s.call(ctx, http.MethodPost, "/api/v2/encryption/decrypt", sealed)
	if err == nil && answer["data"] != canary {
		err = errors.New("the value is not in the answer")
	}
	return err
}

// call sends a request and returns its answer.
func (s *server) call(ctx context.Context, method, path string, body any) (answer map[string]any, err error) {
	var b []byte
	if body != nil {
		if b, err = json.Marshal(body); err != nil {
			return nil, fmt.Errorf("encoding the request: %w", err)
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, s.URL+path, bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	r.Header.Set("X-API-Key", s.Key)
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	w, err := s.client.Do(r)
	if err != nil {
		return nil, fmt.Errorf("calling the server: %w", err)
	}
	defer w.Body.Close()
	if w.StatusCode > 299 {
		return nil, fmt.Errorf("the server answered %s", w.Status)
	}
	if err := json.NewDecoder(w.Body).Decode(&answer); err != nil {
		return nil, fmt.Errorf("reading the answer: %w", err)
	}
	return answer, nil
}

// count returns how often the text is in the writable memory of the server.
func (s *server) count(text string) (n int, err error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", s.pid))
	if err != nil {
		return 0, fmt.Errorf("reading the map of the memory: %w", err)
	}
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", s.pid))
	if err != nil {
		return 0, fmt.Errorf("opening the memory: %w", err)
	}
	defer memory.Close()
	for line := range strings.Lines(string(maps)) {
		fields := strings.Fields(line)
		from, to, _ := strings.Cut(fields[0], "-")
		begin, err1 := strconv.ParseInt(from, 16, 64)
		end, err2 := strconv.ParseInt(to, 16, 64)
		if err1 != nil || err2 != nil || !strings.HasPrefix(fields[1], "rw") {
			continue // such as [vsyscall], and memory that holds the program
		}
		found, err := s.countIn(io.NewSectionReader(memory, begin, end-begin), text, begin)
		if err != nil {
			return 0, fmt.Errorf("reading the memory from %s on: %w", from, err)
		}
		n += found
	}
	return n, nil
}

func (s *server) countIn(r io.Reader, text string, at int64) (n int, err error) {
	const chunk = 4 << 20
	keep := len(text) - 1 // a copy may lie across two chunks
	buffer := make([]byte, 0, chunk+keep)
	for {
		room := buffer[len(buffer) : len(buffer)+chunk]
		got, err := io.ReadFull(r, room)
		buffer = buffer[:len(buffer)+got]
		for i := 0; ; {
			j := bytes.Index(buffer[i:], []byte(text))
			if j < 0 {
				break
			}
			if i += j; s.show {
				fmt.Fprintf(os.Stderr, "%#x %q\n", at+int64(i), buffer[max(0, i-60):min(len(buffer), i+len(text)+40)])
			}
			n, i = n+1, i+len(text)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		at += int64(len(buffer) - keep)
		buffer = buffer[:copy(buffer, buffer[len(buffer)-keep:])]
	}
}

// opensMemory says whether another process of the server's user opens its memory.
func (s *server) opensMemory(ctx context.Context) string {
	look := exec.CommandContext(ctx, "/bin/sh", "-c", `exec 3</proc/$1/mem`, "look", strconv.Itoa(s.pid))
	look.SysProcAttr = asNobody()
	if look.Run() != nil {
		return "refused"
	}
	return "allowed"
}

// asNobody makes a process one of a user without privileges, as the chart does.
func asNobody() *syscall.SysProcAttr {
	const nobody = 65534
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
}

func release() string {
	text, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return strings.TrimSpace(string(text))
}

func version(ctx context.Context, program string) string {
	text, _ := exec.CommandContext(ctx, program, "version").Output()
	return strings.TrimSpace(string(text))
}
