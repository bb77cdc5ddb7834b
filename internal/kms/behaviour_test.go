package kms

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/kmstest"
)

// within returns a context with a deadline like the keyring's.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestAThrottledCallIsTriedAgain(t *testing.T) {
	each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
		b := wrap(t, k, "c")
		s.SetThrottle(0.3)
		s.ResetCalls()
		const n = 30
		for range n {
			if _, err := k.Unwrap(within(t, callTimeout), "c", b); err != nil {
				t.Fatal(err)
			}
		}
		if calls := s.Calls(); calls <= n || calls > 3*n {
			t.Errorf("%d calls for %d operations", calls, n)
		}
		s.SetThrottle(1)
		s.ResetCalls()
		if _, err := k.Wrap(within(t, 500*time.Millisecond), "c", secretKey); fault.Of(err) != fault.Unavailable || errors.Is(err, context.DeadlineExceeded) {
			t.Error("the answer is not what the service said:", err)
		}
		if calls := s.Calls(); calls < 2 || calls > 10 {
			t.Errorf("%d calls in half a second", calls)
		}
	})
}

func TestARefusedCallIsNotTriedAgainAndWorksWhenItIsAllowed(t *testing.T) {
	for name, refuse := range map[string]func(*kmstest.Server, bool){
		"revoked":  func(s *kmstest.Server, on bool) { s.SetRevoked(on) },
		"disabled": func(s *kmstest.Server, on bool) { s.SetDisabled(kmstest.DefaultKey, on) },
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
				b := wrap(t, k, "c")
				refuse(s, true)
				s.ResetCalls()
				if _, err := k.Unwrap(t.Context(), "c", b); fault.Of(err) != fault.Forbidden {
					t.Error(err)
				}
				if _, err := k.Wrap(t.Context(), "c", secretKey); fault.Of(err) != fault.Forbidden {
					t.Error(err)
				}
				if n := s.Calls(); n != 2 {
					t.Errorf("%d calls", n)
				}
				refuse(s, false)
				if _, err := k.Unwrap(t.Context(), "c", b); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Readiness depends on it: what worked and is refused now is refused for all replicas. For a wrong or
// missing token file see TestReadinessTellsOutagesOfTheKMSFromWrongCredentials.
func TestWhatTheServiceRefusesIsNotTheFaultOfThisProcess(t *testing.T) {
	each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
		vault := strings.HasPrefix(k.ID(), "hashivault:")
		b := wrap(t, k, "c")
		if o := k.Outcome(); o.Err != nil || o.Succeeded.IsZero() || !o.Failed.IsZero() {
			t.Errorf("after a success: %+v", o)
		}
		for _, c := range []struct {
			name string
			set  func(bool)
		}{
			{"revoked", s.SetRevoked},
			{"disabled", func(on bool) { s.SetDisabled(kmstest.DefaultKey, on) }},
			{"failing", s.SetFailing},
			{"dropping", s.SetDropping},
			{"throttling", func(on bool) { s.SetThrottle(map[bool]float64{true: 1}[on]) }},
			{"sealed", s.SetSealed},
		} {
			if c.name == "sealed" && !vault {
				continue
			}
			c.set(true)
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			_, err := k.Unwrap(ctx, "c", b)
			cancel()
			if err == nil || errors.Is(err, ErrCredentials) {
				t.Errorf("%s: %v", c.name, err)
			}
			if o := k.Outcome(); o.Err == nil || errors.Is(o.Err, ErrCredentials) || o.Failed.Before(o.Succeeded) {
				t.Errorf("%s: %+v", c.name, o)
			}
			c.set(false)
			if _, err := k.Unwrap(t.Context(), "c", b); err != nil {
				t.Error(c.name, err)
			}
			if o := k.Outcome(); o.Err != nil || o.Succeeded.Before(o.Failed) {
				t.Errorf("after %s: %+v", c.name, o)
			}
		}
		// Neither a caller who leaves nor damaged text says anything about the service.
		before := k.Outcome()
		gone, leave := context.WithCancel(t.Context())
		leave()
		_, _ = k.Unwrap(gone, "c", b)
		if _, err := k.Unwrap(t.Context(), "another", b); !errors.Is(err, ErrForeign) {
			t.Error(err)
		}
		if after := k.Outcome(); after.Err != nil || !after.Failed.Equal(before.Failed) {
			t.Errorf("%+v became %+v", before, after)
		}
	})
}

func TestAnOutageHealsByItself(t *testing.T) {
	for name, fail := range map[string]func(*kmstest.Server, bool){
		"failing":  func(s *kmstest.Server, on bool) { s.SetFailing(on) },
		"dropping": func(s *kmstest.Server, on bool) { s.SetDropping(on) },
		"sealed":   func(s *kmstest.Server, on bool) { s.SetSealed(on) },
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
				if name == "sealed" && !strings.HasPrefix(k.ID(), "hashivault") {
					t.Skip("only Vault can be sealed")
				}
				b := wrap(t, k, "c")
				fail(s, true)
				if _, err := k.Unwrap(within(t, 300*time.Millisecond), "c", b); fault.Of(err) != fault.Unavailable {
					t.Error(err)
				}
				fail(s, false)
				if _, err := k.Unwrap(t.Context(), "c", b); err != nil { // includes retries
					t.Error(err)
				}
			})
		})
	}
}

// The last error of the service is more useful than the end of the deadline, and a pause that ends
// after the deadline is pointless.
func TestWhatTheServiceSaidIsTheErrorAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		busy := errors.New("busy")
		ctx, cancel := context.WithTimeout(t.Context(), callTimeout)
		defer cancel()
		began, calls := time.Now(), 0
		err := try(ctx, slog.New(slog.DiscardHandler), "testing", func(ctx context.Context) error {
			if calls++; calls == 3 {
				<-ctx.Done()
				return unavailable(ctx.Err())
			}
			return unavailable(busy)
		})
		if !errors.Is(err, busy) || calls != 3 {
			t.Error(calls, err)
		}
		if took := time.Since(began); took != callTimeout {
			t.Error("took", took)
		}
		began = time.Now()
		short, cancel := context.WithTimeout(t.Context(), 10*firstPause)
		defer cancel()
		err = try(short, slog.New(slog.DiscardHandler), "testing", func(context.Context) error { return unavailable(busy) })
		if took := time.Since(began); !errors.Is(err, busy) || took >= 10*firstPause {
			t.Error("waited for nothing:", took, err)
		}
	})
}

// A call to a hanging service ends at the deadline, so calls do not pile up.
func TestASlowServiceIsLeftAtTheDeadline(t *testing.T) {
	each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
		b := wrap(t, k, "c")
		s.SetLatency(time.Hour)
		for range 3 {
			if _, err := k.Unwrap(within(t, 100*time.Millisecond), "c", b); fault.Of(err) != fault.Unavailable {
				t.Error(err)
			}
		}
		for deadline := time.Now().Add(20 * time.Second); s.InFlight() > 0; {
			if time.Now().After(deadline) {
				t.Fatalf("%d calls are still waiting for an answer", s.InFlight())
			}
			time.Sleep(5 * time.Millisecond)
		}
		s.SetLatency(0)
		if _, err := k.Unwrap(t.Context(), "c", b); err != nil {
			t.Error(err)
		}
	})
}

// withTLS starts a service that supports only some groups.
func withTLS(t *testing.T, provider string, groups ...tls.CurveID) (*kmstest.Server, *x509.CertPool) {
	t.Helper()
	made := httptest.NewUnstartedServer(nil)
	made.StartTLS()
	certificate, roots := made.TLS.Certificates[0], x509.NewCertPool()
	roots.AddCert(made.Certificate())
	made.Close()
	config := &tls.Config{Certificates: []tls.Certificate{certificate}, CurvePreferences: groups}
	if provider == "gcpkms" {
		t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", serviceAccount(t))
	}
	return serve(t, provider, kmstest.TLS(config)), roots
}

func TestAClassicalKeyExchangeIsRefusedWherePQIsRequired(t *testing.T) {
	for provider := range providers {
		t.Run(provider, func(t *testing.T) {
			classical, roots := withTLS(t, provider, tls.X25519, tls.CurveP256)
			_, err := Open(t.Context(), classical.URL(), Options{PQRequired: true, RootCAs: roots})
			if fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "X25519MLKEM768") || classical.Calls() != 0 {
				t.Error("with a service that has none:", err)
			}
			if k, err := Open(t.Context(), classical.URL(), Options{RootCAs: roots}); err != nil {
				t.Error("where it is not required:", err)
			} else {
				wrap(t, k, "c")
				k.Close()
			}
			usual, roots := withTLS(t, provider)
			k, err := Open(t.Context(), usual.URL(), Options{PQRequired: true, RootCAs: roots})
			if err != nil {
				t.Fatal("with a service of Go's defaults:", err)
			}
			defer k.Close()
			wrap(t, k, "c")
			if _, err := Open(t.Context(), usual.URL(), Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "not trusted") {
				t.Error("with a certificate that nobody trusts:", err)
			}
		})
	}
}

func TestADestroyedKeyOpensNothing(t *testing.T) {
	each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
		provider, _, _ := strings.Cut(k.ID(), ":")
		before := wrap(t, k, "c")
		s.Rotate(kmstest.DefaultKey)
		b := wrap(t, k, "c")
		if provider == "hashivault" {
			_, err := k.Destroy(t.Context())
			if fault.Of(err) != fault.Forbidden || !strings.Contains(fault.Message(err), "vault write transit/keys/latticekeep/config deletion_allowed=true") {
				t.Fatal("a key that must not be deleted:", err)
			}
			if _, err := k.Unwrap(t.Context(), "c", b); err != nil {
				t.Fatal(err)
			}
			s.SetDeletable(kmstest.DefaultKey, true)
		}
		d, err := k.Destroy(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range [][]byte{before, b} {
			if _, err := k.Unwrap(t.Context(), "c", b); err == nil || errors.Is(err, fault.Unavailable) {
				t.Error("still opened:", err)
			}
		}
		days := time.Until(d.When).Hours() / 24
		if again, err := k.Destroy(t.Context()); err != nil || again != d { // as after an attempt whose answer was lost, or that failed half way
			t.Error("again:", again, err)
		}
		switch provider {
		case "awskms":
			if days < 6.9 || days > 7 || !strings.Contains(d.Undo, "cancel-key-deletion") || d.Left != "" {
				t.Error(d)
			}
			if _, err := Open(t.Context(), s.URL(), Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), "about to be deleted") {
				t.Error(err)
			}
		case "gcpkms":
			if days < 29 || days > 30 || !strings.Contains(d.Undo, "restore") {
				t.Error(d)
			}
		case "hashivault":
			if !d.When.IsZero() || d.Undo != "" || d.Left == "" || s.Exists(kmstest.DefaultKey) {
				t.Error(d)
			}
		}
	})
}

func TestADestroyedKeyFileIsGone(t *testing.T) {
	k, path := create(t)
	link := filepath.Join(filepath.Dir(path), "link")
	if err := os.Link(path, link); err != nil { // shows what happens to the blocks
		t.Fatal(err)
	}
	d, err := k.Destroy(t.Context())
	if err != nil || !d.When.IsZero() || d.Undo != "" || d.Left == "" {
		t.Fatal(d, err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if b, err := os.ReadFile(link); err != nil || strings.Trim(string(b), "\x00") != "" {
		t.Errorf("left in the blocks: %q", b)
	}
	for what, content := range map[string][]byte{"removed": nil, "overwritten and not removed": make([]byte, len(formatFile(make([]byte, keySize))))} {
		if content != nil {
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if again, err := k.Destroy(t.Context()); err != nil || again != d {
			t.Errorf("a file that was %s before: %v, %v", what, again, err)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}
	if err := CreateLocal(path); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Destroy(t.Context()); fault.Of(err) != fault.Conflict {
		t.Error("another key's file:", err)
	}
	if _, err := OpenLocal(path); err != nil {
		t.Error(err)
	}
}
