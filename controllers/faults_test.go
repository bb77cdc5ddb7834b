package controllers_test

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// crash ends an operator at its nth durable step, and lets no later one through. The step itself has happened or not,
// according to after; either way its answer is lost. Durable steps are the transactions of the store and the changes
// of SealedCredentials.
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

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (c *crash) transport(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (response *http.Response, err error) {
		if r.Method == http.MethodGet || !strings.Contains(r.URL.Path, "/sealedcredentials/") {
			return next.RoundTrip(r)
		}
		stepErr := c.step(func() error {
			response, err = next.RoundTrip(r) //nolint:bodyclose // it is closed below, or goes to the caller
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
}

var errDown = fault.New(fault.Unavailable, "the store is down")

func (f *flaky) View(ctx context.Context, fn func(store.Reader) error) error {
	if f.down.Load() {
		return errDown
	}
	if hidden, _ := f.hidden.Load().(string); hidden != "" {
		return f.Store.View(ctx, func(r store.Reader) error { return fn(hiding{r, hidden}) })
	}
	return f.Store.View(ctx, fn)
}

type hiding struct {
	store.Reader
	hidden string
}

func (h hiding) Get(key []byte) ([]byte, error) {
	if bytes.HasSuffix(key, []byte(h.hidden)) {
		return nil, nil
	}
	return h.Reader.Get(key)
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
