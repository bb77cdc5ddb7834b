package controllers_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// crash ends an operator at its nth durable step, and lets no later one through. The step itself has happened or not,
// according to after; either way its answer is lost. Durable steps are the transactions of the store and the changes
// of SealedCredentials, Secrets and workloads.
type crash struct {
	at    int64
	after bool
	count atomic.Int64
	kill  func()
	ended chan struct{} // closed when the step has been reached
}

func newCrash(at int64, after bool) *crash {
	return &crash{at: at, after: after, ended: make(chan struct{})}
}

var errCrashed = fault.New(fault.Unavailable, "the process has ended")

func (c *crash) step(do func() error) error {
	switch n := c.count.Add(1); {
	case n < c.at:
		return do()
	case n == c.at:
		defer close(c.ended)
		defer c.kill()
		if c.after {
			if err := do(); err != nil {
				return err
			}
		}
	}
	return errCrashed
}

var durable = regexp.MustCompile(`/(sealedcredentials|secrets|deployments)(/|$)`)

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (c *crash) transport(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (response *http.Response, err error) {
		if r.Method == http.MethodGet || !durable.MatchString(r.URL.Path) || r.URL.Query().Has("dryRun") {
			return next.RoundTrip(r)
		}
		stepErr := c.step(func() error {
			response, err = next.RoundTrip(r)
			return err
		})
		if stepErr != nil {
			if response != nil {
				_, _ = io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			return nil, stepErr
		}
		return response, nil
	})
}

// flaky is a store that can be down, that can hide rows, and whose transactions are steps of a crash.
type flaky struct {
	store.Store
	crash  *crash
	down   atomic.Bool
	hidden atomic.Value // string: how the keys of the rows end
	looks  *counts      // at what the vault holds for an object, by its UID; nil: not counted
}

var errDown = fault.New(fault.Unavailable, "the store is down")

func (f *flaky) View(ctx context.Context, fn func(store.Reader) error) error {
	if f.down.Load() {
		return errDown
	}
	return f.Store.View(ctx, func(r store.Reader) error { return fn(watched{r, f}) })
}

type watched struct {
	store.Reader
	flaky *flaky
}

func (w watched) Get(key []byte) ([]byte, error) {
	if hidden, _ := w.flaky.hidden.Load().(string); hidden != "" && bytes.HasSuffix(key, []byte(hidden)) {
		return nil, nil
	}
	if parts := strings.Split(string(key), "/"); w.flaky.looks != nil && len(parts) == 3 && parts[0] == "owned" {
		w.flaky.looks.add(parts[2])
	}
	return w.Reader.Get(key)
}

// counts are how often things have happened, and can be waited for.
type counts struct {
	mu      sync.Mutex
	n       map[string]int
	changed chan struct{}
}

func (c *counts) add(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = make(map[string]int)
	}
	c.n[what]++
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

func (c *counts) of(what string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[what]
}

// sum is how often what begins so has happened.
func (c *counts) sum(prefix string) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for what, times := range c.n {
		if strings.HasPrefix(what, prefix) {
			n += times
		}
	}
	return n
}

// await waits until what has happened n times. Meanwhile it lets time pass, if pass is given: what is to be waited for may
// not have been seen when it was let pass before.
func (c *counts) await(t testing.TB, what string, n int, pass ...func()) {
	t.Helper()
	late, waited := time.After(patience), time.NewTicker(2*time.Second)
	defer waited.Stop()
	for {
		c.mu.Lock()
		if c.n[what] >= n {
			c.mu.Unlock()
			return
		}
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-waited.C:
			for _, p := range pass {
				p()
			}
		case <-late:
			t.Fatalf("waited in vain for %q to happen %d times: it did %d times", what, n, c.of(what))
		}
	}
}

// call is one of the operator's to the API server. The name is empty where the path has none.
type call struct{ verb, resource, namespace, name string }

// String is such as "patch sealedcredentials/status ns/name".
func (c call) String() string { return c.verb + " " + c.resource + " " + c.namespace + "/" + c.name }

func callOf(r *http.Request) call {
	c := call{verb: map[string]string{
		http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete",
	}[r.Method]}
	path := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	path = path[min(len(path), map[string]int{"api": 2, "apis": 3}[path[0]]):]
	if len(path) > 2 && path[0] == "namespaces" {
		c.namespace, path = path[1], path[2:]
	}
	path = append(path, "", "", "")
	if c.resource, c.name = path[0], path[1]; path[2] != "" {
		c.resource += "/" + path[2]
	}
	switch {
	case c.verb != "":
	case r.URL.Query().Get("watch") != "":
		c.verb = "watch"
	case c.name == "":
		c.verb = "list"
	default:
		c.verb = "get"
	}
	if r.URL.Query().Get("dryRun") != "" {
		c.verb = "try to " + c.verb
	}
	return c
}

// wire is what lies between the operator and the API server: it counts the calls, keeps the last body of each, answers some
// in the place of the API server, and can hold back what a watch says.
type wire struct {
	calls counts

	mu     sync.Mutex
	bodies map[string]string
	answer func(call) int           // the status to answer, 0 to ask the API server, hang
	mended <-chan struct{}          // closed when the answers that hang are given up
	held   map[string]chan struct{} // by resource: what its watches wait for
}

// hang is no answer at all until the call is given up or the fault is over.
const hang = 1

// fail has calls answered as answer says, until mend is called.
func (w *wire) fail(answer func(call) int) (mend func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	mended := make(chan struct{})
	w.answer, w.mended = answer, mended
	return sync.OnceFunc(func() {
		w.mu.Lock()
		w.answer = nil
		w.mu.Unlock()
		close(mended)
	})
}

func (w *wire) body(call string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.bodies[call]
}

// hold keeps back what watches of a resource say from now on, until release is called.
func (w *wire) hold(resource string) (release func()) {
	gate := make(chan struct{})
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held == nil {
		w.held = make(map[string]chan struct{})
	}
	w.held[resource] = gate
	return sync.OnceFunc(func() {
		w.mu.Lock()
		delete(w.held, resource)
		w.mu.Unlock()
		close(gate)
	})
}

func (w *wire) transport(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		c := callOf(r)
		if r.Body != nil {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return nil, err
			}
			r = r.Clone(r.Context())
			r.Body = io.NopCloser(bytes.NewReader(body))
			w.mu.Lock()
			if w.bodies == nil {
				w.bodies = make(map[string]string)
			}
			w.bodies[c.String()] = string(body)
			w.mu.Unlock()
		}
		w.calls.add(c.String())
		w.mu.Lock()
		status := 0
		if w.answer != nil {
			status = w.answer(c)
		}
		mended := w.mended
		w.mu.Unlock()
		switch {
		case status == hang:
			select {
			case <-r.Context().Done():
			case <-mended:
			}
			return nil, errDown
		case status != 0:
			reason := map[int]metav1.StatusReason{
				http.StatusConflict: metav1.StatusReasonConflict, http.StatusTooManyRequests: metav1.StatusReasonTooManyRequests,
				http.StatusInternalServerError: metav1.StatusReasonInternalError,
			}[status]
			body := fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d,"message":"as the test wants it"}`, reason, status)
			return &http.Response{
				StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
				Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)),
			}, nil
		}
		response, err := next.RoundTrip(r)
		if err == nil && c.verb == "watch" {
			response.Body = &heldBody{response.Body, r.Context(), func() chan struct{} {
				w.mu.Lock()
				defer w.mu.Unlock()
				return w.held[c.resource]
			}}
		}
		return response, err
	})
}

// heldBody is the body of a watch that may be held back.
type heldBody struct {
	io.ReadCloser
	ctx  context.Context
	gate func() chan struct{}
}

func (h *heldBody) Read(b []byte) (int, error) {
	n, err := h.ReadCloser.Read(b)
	if gate := h.gate(); gate != nil {
		select {
		case <-gate:
		case <-h.ctx.Done():
		}
	}
	return n, err
}

func (f *flaky) Update(ctx context.Context, fn func(store.Tx) error) error {
	if f.down.Load() {
		return errDown
	}
	if f.crash != nil {
		return f.crash.step(func() error { return f.Store.Update(ctx, fn) })
	}
	return f.Store.Update(ctx, fn)
}
