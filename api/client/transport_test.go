package client

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "github.com/latticekeep/latticekeep/api/openapi/v1"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

func TestARateLimitedCallIsSentAgainAfterTheTimeThatTheServerAsksFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &wire{answer: func(w http.ResponseWriter, _ *http.Request, n int) {
			if n <= 2 {
				w.Header().Set("Retry-After", "7")
				refusal(w, http.StatusTooManyRequests)
				return
			}
			success(w, nil)
		}}
		start := time.Now()
		// This call is not repeatable, but the server has done nothing.
		if _, err := n.client(t).V2.ReplaceCredential(t.Context(), "cred_x", v2.ReplaceRequest{Values: map[string]string{"k": "v"}}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took < 14*time.Second || took > 14*time.Second+2*firstWait {
			t.Errorf("it took %v", took)
		}
		sent := n.all()
		if len(sent) != 3 || sent[0].body == "" || sent[0].body != sent[2].body || sent[1].method != http.MethodPut {
			t.Errorf("%+v", sent)
		}
	})
}

// repetitions lists calls, and whether they may be repeated when their outcome is unknown.
var repetitions = []struct {
	name  string
	again bool
	call  func(context.Context, *Client) error
}{
	{"list", true, func(ctx context.Context, c *Client) error { _, err := c.V2.ListCredentials(ctx, nil); return err }},
	{"unseal", true, func(ctx context.Context, c *Client) error { _, err := c.V2.UnsealCredential(ctx, "cred_x"); return err }},
	{"audit", true, func(ctx context.Context, c *Client) error { _, err := c.V1.QueryAuditLogs(ctx, nil); return err }},
	{"encrypt", true, func(ctx context.Context, c *Client) error {
		_, err := c.V2.EncryptData(ctx, v2.EncryptRequest{})
		return err
	}},
	{"decrypt in v1", true, func(ctx context.Context, c *Client) error {
		_, err := c.V1.DecryptData(ctx, v1.DecryptRequest{})
		return err
	}},
	{"sign many", true, func(ctx context.Context, c *Client) error {
		_, err := c.V2.SignBatch(ctx, v2.SignBatchRequest{})
		return err
	}},
	{"seal", true, func(ctx context.Context, c *Client) error {
		_, err := c.V2.SealCredential(ctx, v2.SealRequest{}, nil)
		return err
	}},
	{"limit", true, func(ctx context.Context, c *Client) error {
		_, err := c.V2.SetTenantLimits(ctx, "ten_x", v2.LimitTenantRequest{})
		return err
	}},
	{"replace", false, func(ctx context.Context, c *Client) error {
		_, err := c.V2.ReplaceCredential(ctx, "cred_x", v2.ReplaceRequest{})
		return err
	}},
	{"rotate", false, func(ctx context.Context, c *Client) error { _, err := c.V2.RotateCredential(ctx, "cred_x"); return err }},
	{"rename", false, func(ctx context.Context, c *Client) error {
		_, err := c.V2.RenameCredential(ctx, "cred_x", v2.RenameRequest{})
		return err
	}},
	{"describe", false, func(ctx context.Context, c *Client) error {
		_, err := c.V2.DescribeCredential(ctx, "cred_x", v2.DetailsRequest{})
		return err
	}},
	{"trash", false, func(ctx context.Context, c *Client) error {
		_, err := c.V2.TrashCredential(ctx, "cred_x")
		return err
	}},
	{"renew", false, func(ctx context.Context, c *Client) error {
		_, err := c.V2.RenewCredential(ctx, "cred_x", v2.RenewRequest{})
		return err
	}},
	{"undo", false, func(ctx context.Context, c *Client) error {
		_, err := c.V2.UndoCredential(ctx, "cred_x", v2.UndoRequest{})
		return err
	}},
	{"rule", true, func(ctx context.Context, c *Client) error {
		_, err := c.V2.PutHistoryRule(ctx, v2.HistoryRuleRequest{})
		return err
	}},
	{"settings", true, func(ctx context.Context, c *Client) error {
		_, err := c.V2.ChangeSettings(ctx, v2.SettingsRequest{})
		return err
	}},
	{"no rule", true, func(ctx context.Context, c *Client) error {
		_, err := c.V2.DeleteHistoryRule(ctx, &v2.DeleteHistoryRuleParams{Path: "x"})
		return err
	}},
	{"delete", false, func(ctx context.Context, c *Client) error { return c.V2.DeleteCredential(ctx, "cred_x") }},
	{"key", false, func(ctx context.Context, c *Client) error {
		_, err := c.V1.GenerateKey(ctx, v1.GenerateKeyRequest{})
		return err
	}},
	{"register", false, func(ctx context.Context, c *Client) error {
		_, err := c.V2.RegisterUser(ctx, v2.RegisterRequest{})
		return err
	}},
	{"readiness", false, func(ctx context.Context, c *Client) error { _, err := c.V2.GetReadiness(ctx); return err }},
}

func TestOnlyWhatMayBeDoneTwiceIsSentAgainWhenTheOutcomeIsUnknown(t *testing.T) {
	broken := errors.New("connection reset")
	for _, c := range repetitions {
		t.Run(c.name, func(t *testing.T) {
			want := 1
			if c.again {
				want = 1 + defaultRetries
			}
			synctest.Test(t, func(t *testing.T) {
				n := &wire{answer: always(http.StatusServiceUnavailable)}
				if err := c.call(t.Context(), n.client(t)); !errors.Is(err, ErrUnavailable) || len(n.all()) != want {
					t.Errorf("503: sent %d times, want %d: %v", len(n.all()), want, err)
				}
				n = &wire{broken: broken}
				if err := c.call(t.Context(), n.client(t)); !errors.Is(err, broken) || len(n.all()) != want {
					t.Errorf("broken: sent %d times, want %d: %v", len(n.all()), want, err)
				}
				n = &wire{answer: always(http.StatusInternalServerError)}
				if err := c.call(t.Context(), n.client(t)); err == nil || len(n.all()) != 1 {
					t.Errorf("500: sent %d times: %v", len(n.all()), err)
				}
				n = &wire{answer: always(http.StatusServiceUnavailable)}
				if err := c.call(t.Context(), n.client(t, WithRetries(0))); err == nil || len(n.all()) != 1 {
					t.Errorf("without retries: sent %d times: %v", len(n.all()), err)
				}
			})
		})
	}
}

func TestWaitsGrowAndAreBounded(t *testing.T) {
	for attempt := range 80 {
		full := lastWait
		if attempt < 6 { // 200 ms · 2^6 is more than 10 s
			full = firstWait << attempt
		}
		for range 50 {
			if wait := backoff(attempt); wait < full/2 || wait > full {
				t.Fatalf("attempt %d waits %v, not %v to %v", attempt, wait, full/2, full)
			}
		}
	}
}

func TestTheContextBoundsTheWaits(t *testing.T) {
	limited := func(seconds int) *wire {
		return &wire{answer: func(w http.ResponseWriter, _ *http.Request, _ int) {
			w.Header().Set("Retry-After", strconv.Itoa(seconds))
			refusal(w, http.StatusTooManyRequests)
		}}
	}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := limited(20).client(t).V2.ListCredentials(ctx, nil)
		if e := new(Error); !errors.As(err, &e) || e.RetryAfter != 20*time.Second || time.Since(start) != 0 {
			t.Errorf("a deadline before the end of the wait: %v after %v", err, time.Since(start))
		}
	})
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(3*time.Second, cancel)
		_, err := limited(20).client(t).V2.ListCredentials(ctx, nil)
		if !errors.Is(err, context.Canceled) || time.Since(start) != 3*time.Second {
			t.Errorf("cancelled in the wait: %v after %v", err, time.Since(start))
		}
	})
	synctest.Test(t, func(t *testing.T) {
		start, n := time.Now(), limited(3600)
		_, err := n.client(t).V2.ListCredentials(t.Context(), nil)
		if !errors.Is(err, ErrRateLimited) || time.Since(start) != 0 || len(n.all()) != 1 {
			t.Errorf("an hour: %v after %v", err, time.Since(start))
		}
	})
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		n := &wire{broken: context.Canceled}
		if _, err := n.client(t).V2.ListCredentials(ctx, nil); !errors.Is(err, context.Canceled) || len(n.all()) > 1 {
			t.Errorf("cancelled before: %v", err)
		}
	})
}

func TestSealingCarriesOneIdempotencyKeyInAllAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &wire{answer: func(w http.ResponseWriter, _ *http.Request, n int) {
			if n == 1 {
				refusal(w, http.StatusServiceUnavailable)
				return
			}
			success(w, nil)
		}}
		c, own := n.client(t), "my-own"
		for _, p := range []*v2.SealCredentialParams{nil, nil, {IdempotencyKey: &own}} {
			if _, err := c.V2.SealCredential(t.Context(), v2.SealRequest{}, p); err != nil {
				t.Fatal(err)
			}
		}
		var keys []string
		for _, s := range n.all() {
			keys = append(keys, s.header.Get(idempotencyKey))
		}
		if len(keys) != 4 || len(keys[0]) < 20 || keys[0] != keys[1] || keys[1] == keys[2] || keys[3] != own {
			t.Errorf("%q", keys)
		}
	})
}

func TestASealWithAnEmptyIdempotencyKeyIsNotSentAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, none := &wire{answer: always(http.StatusServiceUnavailable)}, ""
		c := n.client(t)
		if _, err := c.V2.SealCredential(t.Context(), v2.SealRequest{}, &v2.SealCredentialParams{IdempotencyKey: &none}); !errors.Is(err, ErrUnavailable) {
			t.Fatal(err)
		}
		if sent := len(n.all()); sent != 1 {
			t.Errorf("it was sent %d times", sent)
		}
	})
}

func TestErrorsSayWhatTheServerAnswered(t *testing.T) {
	kinds := []error{ErrInvalid, ErrUnauthenticated, ErrForbidden, ErrNotFound, ErrConflict, ErrRateLimited, ErrUnavailable}
	for status, want := range map[int]error{
		302: nil, 400: ErrInvalid, 401: ErrUnauthenticated, 403: ErrForbidden, 404: ErrNotFound, 405: nil, 409: ErrConflict,
		413: ErrInvalid, 415: ErrInvalid, 422: ErrInvalid, 429: ErrRateLimited, 500: nil, 502: nil, 503: ErrUnavailable,
	} {
		_, err := (&wire{answer: always(status)}).client(t, WithRetries(0)).V2.ListAPIKeys(t.Context())
		e := new(Error)
		if !errors.As(err, &e) || e.Status != status || e.Code != status || e.Message != "the reason" || e.RequestID != "req_1" {
			t.Errorf("%d: %#v", status, err)
		}
		for _, kind := range kinds {
			if errors.Is(err, kind) != (kind == want) {
				t.Errorf("%d is %v: %v", status, kind, errors.Is(err, kind))
			}
		}
	}

	n := &wire{answer: func(w http.ResponseWriter, _ *http.Request, _ int) {
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte(`{"error":{"code":404,"message":"Not Found","details":"there is no such key","request_id":"req_2","timestamp":"t"}}`))
	}}
	_, err := n.client(t).V1.RotateKey(t.Context(), "tkey_x", v1.RotateKeyRequest{})
	if err == nil || err.Error() != "latticekeep answered 404: Not Found: there is no such key (request req_2)" {
		t.Error(err)
	}

	n = &wire{answer: func(w http.ResponseWriter, _ *http.Request, _ int) {
		w.Header().Set("X-Request-ID", "req_3")
		w.WriteHeader(http.StatusBadGateway)
		_, _ = w.Write([]byte("<html>a proxy</html>"))
	}}
	_, err = n.client(t).V2.ListAPIKeys(t.Context())
	if e := new(Error); !errors.As(err, &e) || *e != (Error{Status: 502, Message: "bad gateway", RequestID: "req_3"}) {
		t.Errorf("%#v", err)
	}

	n = &wire{answer: func(w http.ResponseWriter, _ *http.Request, _ int) { _, _ = w.Write([]byte("<html>a portal</html>")) }}
	if _, err = n.client(t).V2.ListAPIKeys(t.Context()); err == nil || !strings.Contains(err.Error(), "reading the answer") {
		t.Error("a success that is no JSON:", err)
	}
}

func TestNetworkErrorsDoNotQuoteTheAddress(t *testing.T) {
	n := &wire{broken: errors.New("connection reset")}
	_, err := n.client(t, WithRetries(0)).V2.UnsealCredentialByName(t.Context(), "payroll")
	if err == nil || strings.Contains(err.Error(), "payroll") {
		t.Error(err)
	}
}

func TestRetryAfterIsSecondsOrADate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for value, want := range map[string]time.Duration{
			"": 0, "0": 0, "3": 3 * time.Second, "-3": 0, "3.5": 0, "soon": 0, "99999999999999999999": 0,
			time.Now().UTC().Add(time.Minute).Format(http.TimeFormat):  time.Minute,
			time.Now().UTC().Add(-time.Minute).Format(http.TimeFormat): 0,
		} {
			if got := retryAfter(&http.Response{Header: http.Header{"Retry-After": {value}}}); got != want {
				t.Errorf("%q: %v, want %v", value, got, want)
			}
		}
	})
}
