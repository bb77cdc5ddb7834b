package server

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	sharedclock "github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/quota"
)

// replicas starts three servers on one store, on machines whose clocks are minutes
// apart. The first is the service, the others are called through the copies of it.
func replicas(t *testing.T, change func(*Config)) [3]*service {
	t.Helper()
	var config Config
	var first *service
	lender := func(s *service, ahead time.Duration) quota.Lender {
		own := func() time.Time { return s.clock.Now().Add(ahead) }
		return quota.NewLender(s.store, sharedclock.New(func(context.Context) (time.Time, error) { return s.clock.Now(), nil }, own))
	}
	made := &later{}
	first = newService(t, func(c *Config) {
		change(c)
		c.Lender = made
		config = *c
	})
	made.Lender = lender(first, 0)
	all := [3]*service{first}
	for i, ahead := range []time.Duration{3 * time.Minute, -3 * time.Minute} {
		c := config
		c.Lender = lender(first, ahead)
		c.Now = func() time.Time { return first.clock.Now().Add(ahead) }
		server, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		listening := httptest.NewServer(server.engine)
		t.Cleanup(listening.Close)
		copied := *first
		copied.server, copied.url = server, listening.URL
		all[i+1] = &copied
	}
	return all
}

// later is a lender that is made once there is a store.
type later struct{ quota.Lender }

func TestRateLimitsHoldAcrossReplicas(t *testing.T) {
	const limit = 11
	all := replicas(t, func(c *Config) { c.Rates.Address = limit })
	s := all[0]
	s.call(request{method: "PUT", path: "/api/v2/system/tenants/" + string(s.tenant) + "/limits", key: s.systemKey(), body: `{"v2":11}`}).want(t, http.StatusOK)
	for minute := range 2 {
		reset := strconv.FormatInt(s.clock.Now().Truncate(time.Minute).Add(time.Minute).Unix(), 10)
		for name, c := range map[string]struct {
			key    string
			served int
		}{"of a tenant": {s.key, http.StatusOK}, "of an address": {"", http.StatusUnauthorized}} {
			served := 0
			for i := range 3 * limit {
				r := all[i%3].call(request{method: "GET", path: "/api/v2/vault/list", key: c.key})
				left := r.header.Get("X-RateLimit-Remaining")
				switch {
				case r.status == c.served:
					served++
				case r.status != http.StatusTooManyRequests || left != "0":
					t.Fatalf("%s: status %d, %s remain: %s", name, r.status, left, r.body)
				}
				if r.header.Get("X-RateLimit-Limit") != strconv.Itoa(limit) || r.header.Get("X-RateLimit-Reset") != reset {
					t.Errorf("%s: %v", name, r.header)
				}
			}
			if served != limit {
				t.Errorf("minute %d, %s: %d of %d were served", minute, name, served, limit)
			}
		}
		s.clock.advance(time.Minute)
	}
}

// broken lends nothing.
type broken struct{ now func() time.Time }

func (b broken) Now() time.Time { return b.now() }

func (b broken) Lease(context.Context, string, int, int) (quota.Lease, error) {
	return quota.Lease{}, fault.New(fault.Unavailable, "the store is down")
}

func TestWhatCannotBeCountedIsNotServed(t *testing.T) {
	s := newService(t, func(c *Config) { c.Lender = broken{c.Now} })
	for _, r := range []request{
		{method: "GET", path: "/api/v2/vault/list", key: s.key},
		{method: "GET", path: "/api/v2/vault/list"},
		{method: "POST", path: "/api/v2/auth/login", body: `{"email":"ada@example.org","password":"x"}`},
	} {
		s.call(r).message(t, http.StatusServiceUnavailable)
	}
	for path, want := range map[string]int{"/healthz": http.StatusOK, "/api/v2/nothing": http.StatusNotFound} {
		if r := s.call(request{method: "GET", path: path}); r.status != want {
			t.Errorf("%s: %d", path, r.status)
		}
	}
}
