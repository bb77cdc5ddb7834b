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
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// crash ends an operator at its nth durable step, and blocks all later steps. The step itself has
// happened if after is set; its answer is lost either way. Durable steps are the transactions of
// the store and the changes of SealedCredentials, Secrets and workloads.
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

// flaky is a store that can be down and can hide rows, and whose transactions are steps of a crash.
type flaky struct {
	store.Store
	raw    *bolt.Store // without the guard
	crash  *crash
	down   atomic.Bool
	hidden atomic.Value // string: suffix of the hidden rows' keys
	looks  *counts      // reads of an object's vault entry, by UID; nil: not counted
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

// counts counts events and lets tests wait for them.
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

// sum returns the count of all events with a prefix.
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

// await waits until an event has happened n times. Meanwhile it calls pass, if not nil, to let time
// pass again: the awaited object may not have been observed when time passed before.
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

// call is one call of the operator to the API server. The name is empty if the path has none.
type call struct{ verb, resource, namespace, name string }

// String returns, for example, "patch sealedcredentials/status ns/name".
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

// wire is between the operator and the API server. It counts the calls, keeps the last body of
// each, answers some calls instead of the API server, and can hold back watches.
type wire struct {
	calls counts

	mu     sync.Mutex
	bodies map[string]string
	answer func(call) int           // returns a status, 0 to ask the API server, or hang
	mended <-chan struct{}          // closed to end hanging answers
	held   map[string]chan struct{} // by resource: closed to release its watches
}

// hang means no answer until the caller gives up or the fault ends.
const hang = 1

// fail answers calls as answer says, until mend is called.
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

// hold holds back the watches of a resource from now on, until release is called.
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
