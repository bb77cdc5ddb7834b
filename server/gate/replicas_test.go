package gate_test

import (
	"context"
	"net/http"
	"strconv"
	"testing"
	"time"

	sharedclock "github.com/latticekeep/latticekeep/internal/clock"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// replicas starts three servers on one store, on machines whose clocks are minutes
// apart. The first is the service, the others are called through the copies of it.
func replicas(t *testing.T, change func(*server.Config)) [3]*service {
	t.Helper()
	var config server.Config
	var first *service
	lender := func(s *service, ahead time.Duration) quota.Lender {
		own := func() time.Time { return s.Clock.Now().Add(ahead) }
		return quota.NewLender(s.Store, sharedclock.New(func(context.Context) (time.Time, error) { return s.Clock.Now(), nil }, own))
	}
	made := &later{}
	first = newService(t, func(c *server.Config) {
		change(c)
		c.Lender = made
		config = *c
	})
	made.Lender = lender(first, 0)
	all := [3]*service{first}
	for i, ahead := range []time.Duration{3 * time.Minute, -3 * time.Minute} {
		c := config
		c.Lender = lender(first, ahead)
		c.Now = func() time.Time { return first.Clock.Now().Add(ahead) }
		another := *first.Service
		var err error
		another.Server, err = server.New(c)
		if err != nil {
			t.Fatal(err)
		}
		another.Serve()
		all[i+1] = &service{&another}
	}
	return all
}

// later is a lender that is made once there is a store.
type later struct{ quota.Lender }

func TestRateLimitsHoldAcrossReplicas(t *testing.T) {
	const limit = 11
	all := replicas(t, func(c *server.Config) { c.Limits.Address = limit })
	s := all[0]
	s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/system/tenants/" + string(s.Tenant) + "/limits", Key: s.SystemKey(), Body: `{"v2":11}`}).Want(t, http.StatusOK)
	for minute := range 2 {
		reset := strconv.FormatInt(s.Clock.Now().Truncate(time.Minute).Add(time.Minute).Unix(), 10)
		for name, c := range map[string]struct {
			key    string
			served int
		}{"of a tenant": {s.Key, http.StatusOK}, "of an address": {"", http.StatusUnauthorized}} {
			served := 0
			for i := range 3 * limit {
				r := all[i%3].Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Key: c.key})
				left := r.Header.Get("X-RateLimit-Remaining")
				switch {
				case r.Status == c.served:
					served++
				case r.Status != http.StatusTooManyRequests || left != "0":
					t.Fatalf("%s: status %d, %s remain: %s", name, r.Status, left, r.Body)
				}
				if r.Header.Get("X-RateLimit-Limit") != strconv.Itoa(limit) || r.Header.Get("X-RateLimit-Reset") != reset {
					t.Errorf("%s: %v", name, r.Header)
				}
			}
			if served != limit {
				t.Errorf("minute %d, %s: %d of %d were served", minute, name, served, limit)
			}
		}
		s.Clock.Advance(time.Minute)
	}
}

// broken lends nothing.
type broken struct{ now func() time.Time }

func (b broken) Now() time.Time { return b.now() }

func (b broken) Lease(context.Context, string, int, int) (quota.Lease, error) {
	return quota.Lease{}, fault.New(fault.Unavailable, "the store is down")
}

func TestWhatCannotBeCountedIsNotServed(t *testing.T) {
	s := newService(t, func(c *server.Config) { c.Lender = broken{c.Now} })
	for _, r := range []servertest.Request{
		{Method: "GET", Path: "/api/v2/vault/list", Key: s.Key},
		{Method: "GET", Path: "/api/v2/vault/list"},
		{Method: "POST", Path: "/api/v2/auth/login", Body: `{"email":"ada@example.org","password":"x"}`},
	} {
		s.Call(r).Message(t, http.StatusServiceUnavailable)
	}
	for path, want := range map[string]int{"/healthz": http.StatusOK, "/api/v2/nothing": http.StatusNotFound} {
		if r := s.Call(servertest.Request{Method: "GET", Path: path}); r.Status != want {
			t.Errorf("%s: %d", path, r.Status)
		}
	}
}
