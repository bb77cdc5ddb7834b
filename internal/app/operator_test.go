package app

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/test/kubetest"
)

// said takes what a server prints to stderr, one piece for each write.
type said chan string

func (s said) Write(b []byte) (int, error) {
	s <- string(b)
	return len(b), nil
}

// await returns the next piece that contains words.
func (s said) await(t *testing.T, words string) string {
	t.Helper()
	patience := time.After(time.Minute)
	for {
		select {
		case text := <-s:
			if strings.Contains(text, words) {
				return text
			}
		case <-patience:
			t.Fatalf("waited in vain for %q", words)
		}
	}
}

// startOperator runs a server with its operator and returns once it printed its line.
func startOperator(t *testing.T, kubeconfig string) (*running, said) {
	t.Helper()
	stderr := make(said, 10_000) // more than a test makes
	return startWith(t, Config{Kubeconfig: kubeconfig, Stderr: stderr}), stderr
}

func (r *running) checkServes() {
	r.t.Helper()
	if status, answer := r.call("POST", "/api/v2/vault/seal", sealBody); status != http.StatusCreated {
		r.t.Error(status, answer)
	}
}

func TestAnAPIServerThatIsDownDoesNotEndTheHTTPService(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	const nobody = `{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c"}}],
"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}]}`
	if err := os.WriteFile(kubeconfig, []byte(nobody), 0o600); err != nil {
		t.Fatal(err)
	}
	r, stderr := startOperator(t, kubeconfig)
	for _, wait := range []string{"in=1s", "in=2s"} {
		if text := stderr.await(t, "the operator is not running"); !strings.Contains(text, wait) || !strings.Contains(text, "does the kubeconfig name it?") {
			t.Errorf("%q, want %s and the remedy", text, wait)
		}
		r.checkServes()
	}
	r.end()
}

func TestAnUnreadableKubeconfigIsRefused(t *testing.T) {
	_, err := run(t, "server", "--dev", "--listen", "127.0.0.1:0", "--kubeconfig", filepath.Join(t.TempDir(), "none"))
	if err == nil || !strings.Contains(err.Error(), "reading the kubeconfig") {
		t.Fatal(err)
	}
}

// The operator begins to work when what kept it from working is mended, and the server needs no restart.
func TestTheOperatorWaitsForItsCluster(t *testing.T) {
	plane := kubetest.ForTest(t)
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := plane.Kubectl(t.Context(), args...).CombinedOutput()
		if err != nil {
			t.Fatalf("kubectl %v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	claimedBy := func(identity string) {
		t.Helper()
		kubectl("wait", "--for=create", "--timeout=60s", "-n", "latticekeep-system", "configmap/latticekeep-sealing-key")
		document, err := sealing.ParseDocument([]byte(kubectl("get", "configmap", "-n", "latticekeep-system", "latticekeep-sealing-key",
			"-o", `jsonpath={.data.sealing-key\.json}`)))
		if err != nil {
			t.Fatal(err)
		}
		if err := document.CheckIdentity(identity); err != nil {
			t.Fatal(err)
		}
	}
	identityOf := func(stderr said) string {
		t.Helper()
		_, rest, _ := strings.Cut(stderr.await(t, "\nidentity: "), "\nidentity: ")
		return strings.Fields(rest)[0]
	}

	kubectl("delete", "-k", "../../config/crd")
	first, stderr := startOperator(t, plane.Kubeconfig)
	identity := identityOf(stderr)
	stderr.await(t, "kubectl apply -k config/crd")
	first.checkServes()
	kubectl("apply", "-k", "../../config/crd")
	claimedBy(identity)

	second, stderr := startOperator(t, plane.Kubeconfig)
	successor := identityOf(stderr)
	stderr.await(t, "kubectl delete configmap -n latticekeep-system latticekeep-sealing-key")
	second.checkServes()
	first.end()
	stderr.await(t, "kubectl delete configmap") // the claim of a server that has stopped stands
	claimedBy(identity)
	kubectl("delete", "configmap", "-n", "latticekeep-system", "latticekeep-sealing-key")
	claimedBy(successor)
	second.end()
}

func TestTheOperatorIsRunAgainEverMoreSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		last, errEnd := time.Now(), errors.New("not all reconciles finished")
		var waits []time.Duration
		err := operate(ctx, slog.New(slog.DiscardHandler), func() error {
			waits = append(waits, time.Since(last))
			defer func() { last = time.Now() }()
			switch len(waits) {
			case 9:
				time.Sleep(time.Hour) // it runs well, and then no more
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
	synctest.Test(t, func(t *testing.T) { // in which time passes only while it waits
		ctx, cancel := context.WithCancel(t.Context())
		err := operate(ctx, slog.New(slog.DiscardHandler), func() error {
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
	if cfg, err := clusterConfig(""); cfg != nil || err != nil {
		t.Fatal(cfg, err)
	}
}

// It runs itself in the environment of a pod.
func TestNoTestIsTheOperatorOfTheClusterItRunsIn(t *testing.T) {
	const inner = "LATTICEKEEP_TEST_IN_A_POD"
	if os.Getenv(inner) != "" {
		if cfg, err := clusterConfig(""); cfg != nil || err != nil || os.Getenv(serviceHost) != "" {
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
