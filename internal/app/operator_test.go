package app

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestTheOperatorIsRunAgainEverMoreSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		last, errEnd := time.Now(), errors.New("not all reconciles finished")
		var waits []time.Duration
		err := runOperator(ctx, slog.New(slog.DiscardHandler), func() error {
			waits = append(waits, time.Since(last))
			defer func() { last = time.Now() }()
			switch len(waits) {
			case 9:
				time.Sleep(time.Hour) // works for a while, then fails
			case 11:
				cancel()
				return errEnd
			}
			return errors.New("no such host")
		})
		const s = time.Second
		if want := []time.Duration{0, s, 2 * s, 4 * s, 8 * s, 16 * s, 32 * s, 60 * s, 60 * s, s, 2 * s}; !slices.Equal(waits, want) {
			t.Errorf("waited %v, want %v", waits, want)
		}
		if !errors.Is(err, errEnd) {
			t.Error("trouble at the end is not told:", err)
		}
	})
}

func TestTheOperatorEndsWhileItWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // here time passes only while the operator waits
		ctx, cancel := context.WithCancel(t.Context())
		err := runOperator(ctx, slog.New(slog.DiscardHandler), func() error {
			time.AfterFunc(time.Millisecond, cancel)
			return errors.New("no such host")
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestAPodWithoutATokenIsNoOperator(t *testing.T) {
	if _, err := os.Stat("/var/run/secrets/kubernetes.io/serviceaccount/token"); err == nil {
		t.Skip("this machine is a pod with a ServiceAccount token")
	}
	t.Setenv(serviceHost, "127.0.0.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "1")
	if cfg, err := ClusterConfig(""); cfg != nil || err != nil {
		t.Fatal(cfg, err)
	}
}

// The test runs itself again in the environment of a pod.
func TestNoTestIsTheOperatorOfTheClusterItRunsIn(t *testing.T) {
	const inner = "LATTICEKEEP_TEST_IN_A_POD"
	if os.Getenv(inner) != "" {
		if cfg, err := ClusterConfig(""); cfg != nil || err != nil || os.Getenv(serviceHost) != "" {
			t.Fatal(cfg, err, os.Getenv(serviceHost))
		}
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), inner+"=1", serviceHost+"=127.0.0.1", "KUBERNETES_SERVICE_PORT=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
