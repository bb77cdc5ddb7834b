package gate

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
)

// The tests of the server raise this limit, which leaves time to report a timeout within a second.
func TestMostAnswersTakeLessThanASecond(t *testing.T) {
	if p := (Limits{}).withDefaults().Patience; p <= 0 || p >= time.Second {
		t.Errorf("an answer may take %v", p)
	}
}

func TestAFullLineRefusesAtOnceAndTheFirstToComeIsTheFirstToEnter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEntrance(1)
		if err := e.enter(t.Context()); err != nil || e.full() {
			t.Fatal(err)
		}
		order := make(chan int, e.waiting)
		for i := range e.waiting {
			go func() {
				if err := e.enter(t.Context()); err != nil {
					t.Error(i, err)
				}
				order <- i
			}()
			synctest.Wait()
		}
		began := time.Now()
		if err := e.enter(t.Context()); !errors.Is(err, ErrOverloaded) || !errors.Is(err, fault.Unavailable) || !e.full() || e.shed != 2 {
			t.Error(err, e.shed)
		}
		if took := time.Since(began); took > 0 {
			t.Error("it took", took)
		}
		for i := range e.waiting {
			e.leave()
			if n := <-order; n != i {
				t.Errorf("%d entered before %d", n, i)
			}
		}
		if e.leave(); e.in != 0 || e.line.Len() != 0 {
			t.Error(e.in, e.line.Len())
		}
	})
}

func TestWhoWaitsTooLongIsRefusedAndTakesNobodysPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEntrance(1)
		if err := e.enter(t.Context()); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := e.enter(t.Context()); !errors.Is(err, ErrOverloaded) || time.Since(began) != longestWait {
			t.Error(err, time.Since(began))
		}
		hungUp, hangUp := context.WithTimeout(t.Context(), time.Millisecond)
		defer hangUp()
		if err := e.enter(hungUp); !errors.Is(err, ErrOverloaded) || time.Since(began) != longestWait+time.Millisecond {
			t.Error(err, time.Since(began))
		}
		e.leave()
		if err := e.enter(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestNeverMoreThanTheyMayAreInAndNoPlaceIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 4
		e := newEntrance(most)
		var in, ever atomic.Int64
		var wg sync.WaitGroup
		for range 400 {
			wg.Go(func() {
				time.Sleep(rand.N(time.Second))
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(2*longestWait))
				defer cancel()
				if e.enter(ctx) != nil {
					return
				}
				ever.Add(1)
				if n := in.Add(1); n > most {
					t.Errorf("%d are in", n)
				}
				time.Sleep(rand.N(50 * time.Millisecond))
				in.Add(-1)
				e.leave()
			})
		}
		wg.Wait()
		if e.in != 0 || e.line.Len() != 0 || ever.Load()+int64(e.shed) != 400 {
			t.Error(e.in, e.line.Len(), ever.Load(), e.shed)
		}
	})
}

func TestWhatBringsAServerBackDoesNotWaitInLine(t *testing.T) {
	for name, o := range map[string]struct {
		Operation
		waits bool
	}{
		"encrypt":         {Operation{Action: authz.EncryptData}, true},
		"login":           {Operation{Auth: Public}, true},
		"accept-rollback": {Operation{Action: authz.AcceptRollback, Recovers: true}, false},
		"tenants":         {Operation{Action: authz.ListTenants}, false},
		"a report":        {Operation{Action: authz.ReadReport, Patience: time.Minute}, false},
	} {
		if op := (&operation{Operation: o.Operation}); op.waits() != o.waits {
			t.Errorf("%s: %v", name, op.waits())
		}
	}
}

const holding = `
openapi: 3.0.3
info: {title: t, version: '1'}
paths:
  /hold: {post: {operationId: hold, requestBody: {content: {application/json: {schema: {type: object}}}}, responses: {'200': {description: ok}}}}
`

// A service of one operation, of which few are carried out at a time, and each as long as release says.
func newHolder(t *testing.T) (url string, g *Gate, release chan struct{}) {
	t.Helper()
	g, err := New(Config{Now: time.Now, Guard: guard.New(writer.New(time.Now, nil)), InFlight: 1})
	if err != nil {
		t.Fatal(err)
	}
	v, err := g.Version(Definition{
		Name: "v2", Contract: ReadContract(holding), Scheme: KeyOrUser, Operations: map[string]Operation{"hold": {Auth: Public}},
		Envelope: func(p Problem) any { return p }, Schema: http.StatusUnprocessableEntity,
	})
	if err != nil {
		t.Fatal(err)
	}
	release = make(chan struct{})
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.POST("/hold", v.Checks(), func(c *gin.Context) {
		Answer(c, http.StatusOK, func(context.Context, *Call) (any, error) {
			<-release
			return struct{}{}, nil
		})
	})
	server := httptest.NewServer(engine)
	t.Cleanup(server.Close)
	return server.URL + "/hold", g, release
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: ", what)
		}
	}
}

func TestAnOverloadedServerRefusesWithoutReadingTheBody(t *testing.T) {
	url, g, release := newHolder(t)
	answers := make(chan int, 1)
	go func() {
		r, err := http.Post(url, "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Body.Close()
		answers <- r.StatusCode
	}()
	eventually(t, "one is carried out", func() bool { return g.Load().InFlight == 1 })
	for range g.entrance.waiting { // a line that nobody leaves
		g.entrance.line.PushBack(make(chan struct{}))
	}
	never, end := io.Pipe() // the body
	defer end.Close()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, never)
	if err != nil {
		t.Fatal(err)
	}
	request.ContentLength = maxBody // of a shorter one net/http itself reads the rest
	r, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var p Problem
	if err := json.NewDecoder(r.Body).Decode(&p); err != nil || r.StatusCode != http.StatusServiceUnavailable || p.Code != r.StatusCode || r.Header.Get("Retry-After") != "" {
		t.Error(r.Status, err, p, r.Header)
	}
	if l := g.Load(); l.Shed != 1 || l.InFlight != 1 {
		t.Errorf("%+v", l)
	}
	close(release)
	if status := <-answers; status != http.StatusOK {
		t.Error(status)
	}
}

func TestTheRefusalThatIsEncodedBeforeIsLikeAnyOther(t *testing.T) {
	for name, now := range map[string]time.Time{"in winter": time.Unix(1700000000, 0), "in summer": time.Unix(1690000000, 0)} {
		_, g, _ := newHolder(t)
		g.config.Now = func() time.Time { return now }
		v, err := g.Version(Definition{
			Name: "v2", Contract: ReadContract(holding), Scheme: KeyOrUser, Operations: map[string]Operation{"hold": {Auth: Public}},
			Envelope: func(p Problem) any { return map[string]any{"error": p, "success": false} }, Schema: http.StatusUnprocessableEntity,
		})
		if err != nil {
			t.Fatal(err)
		}
		answer := func(refuse func(*gin.Context)) (*httptest.ResponseRecorder, error) {
			w := httptest.NewRecorder()
			c, _ := gin.CreateTestContext(w)
			c.Request = httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/hold", http.NoBody)
			c.Header(RequestIDHeader, "req_"+name)
			refuse(c)
			return w, c.Errors.Last()
		}
		before, err1 := answer(v.refuseShed)
		other, err2 := answer(func(c *gin.Context) { v.fail(c, ErrOverloaded) })
		if !errors.Is(err1, ErrOverloaded) || !errors.Is(err2, ErrOverloaded) || before.Code != other.Code || !maps.EqualFunc(before.Header(), other.Header(), slices.Equal) ||
			before.Body.String() != other.Body.String() || !strings.Contains(before.Body.String(), "req_"+name) {
			t.Error(err1, err2, before.Code, before.Header(), before.Body, "but any other:", other.Code, other.Header(), other.Body)
		}
	}
}

func TestABodyOnItsWayHoldsNoPlace(t *testing.T) {
	url, g, release := newHolder(t)
	close(release)
	body, slow := io.Pipe()
	answers := make(chan int, 1)
	go func() {
		r, err := http.Post(url, "application/json", body)
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Body.Close()
		answers <- r.StatusCode
	}()
	if _, err := slow.Write([]byte(`{"a":`)); err != nil { // the server has the header now
		t.Fatal(err)
	}
	for range 3 {
		r, err := http.Post(url, "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != http.StatusOK {
			t.Error(r.Status)
		}
	}
	if _, err := slow.Write([]byte("1}")); err != nil || slow.Close() != nil {
		t.Error(err)
	}
	if status := <-answers; status != http.StatusOK {
		t.Error(status)
	}
	eventually(t, "nobody is in", func() bool { return g.Load().InFlight == 0 })
}

// reading reads a body for a tenant, as an admitted request does. The operation of tenant a waits in
// line, that of others does not.
func reading(t *testing.T, g *Gate, tenant authz.TenantID, body string, chunked bool) (*Call, error) {
	t.Helper()
	c, _ := gin.CreateTestContext(httptest.NewRecorder())
	c.Request = httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader(body))
	if chunked {
		c.Request.ContentLength = -1
	}
	op := &operation{}
	if tenant != "a" {
		op.Patience = time.Minute
	}
	call := &Call{gate: g, operation: op, Caller: identity.Caller{Principal: authz.Principal{Tenant: tenant}}}
	got, err := call.readBody(c, true)
	if call.body = got; err == nil && string(got) != body {
		t.Errorf("%d bytes of %d", len(got), len(body))
	}
	return call, err
}

func TestBodiesTakeATenthOfTheMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		large := strings.Repeat(" ", maxBody)
		for _, chunked := range []bool{false, true} {
			g := &Gate{entrance: newEntrance(1), bodies: newBodies(80 << 20)}
			var held []*Call
			for range 8 { // they have arrived, and are carried out
				call, err := reading(t, g, "a", large, chunked)
				if err != nil {
					t.Fatal(err)
				}
				held = append(held, call)
			}
			for _, tenant := range []authz.TenantID{"a", "b"} {
				began, shed := time.Now(), g.entrance.shed
				if _, err := reading(t, g, tenant, large, chunked); !errors.Is(err, ErrOverloaded) || g.entrance.shed != shed+1 || time.Since(began) != longestBodyWait {
					t.Error("a ninth:", err, g.entrance.shed, time.Since(began))
				}
			}
			small, err := reading(t, g, "a", large[:smallBody-1], chunked)
			if err != nil {
				t.Error("a small one:", err)
			}
			small.release()
			go func() {
				time.Sleep(longestBodyWait / 2)
				held[0].release()
			}()
			if held[0], err = reading(t, g, "b", large, chunked); err != nil {
				t.Error("one that waits for its turn:", err)
			}
			for _, call := range held {
				call.release()
			}
			if call, err := reading(t, g, "b", large, chunked); err != nil {
				t.Error(err)
			} else if call.release(); strings.Trim(string(call.body), "\x00") != "" {
				t.Error("the body stays in memory")
			}
		}
	})
}

func TestHowManyBytesOfBodiesThereMayBe(t *testing.T) {
	for limit, want := range map[int64]int64{math.MaxInt64: 192 << 20, 1 << 30: 107374182, 205 << 20: 21495808, 1 << 20: 4 << 20} {
		over, end := context.WithTimeout(t.Context(), time.Minute)
		end()
		b := newBodies(limit)
		all, err := b.Acquire(t.Context(), "a", want, func() {})
		if err != nil || !all.Settle() {
			t.Errorf("%d: less than %d: %v", limit, want, err)
		}
		if _, err := b.Acquire(over, "b", 1, func() {}); err == nil {
			t.Errorf("%d: more than %d", limit, want)
		}
	}
}
