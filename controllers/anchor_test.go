package controllers_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/controllers/cluster"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/fault"
)

var _ keeper.Anchor = (*cluster.Anchor)(nil)

const anchorName = "latticekeep-audit-anchor"

// anchorWorld is a cluster with the operator's rights, and without an operator.
type anchorWorld struct {
	*world
	key   client.ObjectKey
	chain string
}

func (w *anchorWorld) place(cfg *rest.Config, name string) *cluster.Anchor {
	w.t.Helper()
	a, err := cluster.NewAnchor(cfg, w.key.Namespace, name, w.chain)
	must(w.t, err)
	return a
}

func (w *anchorWorld) load(a *cluster.Anchor, want string) {
	w.t.Helper()
	if got, err := a.Load(w.t.Context()); err != nil || string(got) != want || (got == nil) != (want == "") {
		w.t.Fatalf("loaded %q, %v; want %q", got, err, want)
	}
}

func (w *anchorWorld) save(a *cluster.Anchor, note string, want error) {
	w.t.Helper()
	if err := a.Save(w.t.Context(), []byte(note)); !errors.Is(err, want) {
		w.t.Fatalf("saved %q: %v; want %v", note, err, want)
	}
}

// object returns the ConfigMap as an administrator sees it.
func (w *anchorWorld) object() *corev1.ConfigMap {
	w.t.Helper()
	c := new(corev1.ConfigMap)
	must(w.t, w.admin.Get(w.t.Context(), w.key, c))
	return c
}

func TestAnchorInAConfigMap(t *testing.T) {
	w := &anchorWorld{newWorld(t), client.ObjectKey{Namespace: controllers.DefaultNamespace, Name: anchorName}, "chain_ours"}
	for name, test := range map[string]func(*anchorWorld, *testing.T){
		"two writers":       (*anchorWorld).testWriters,
		"tampering":         (*anchorWorld).testTampering,
		"faults":            (*anchorWorld).testFaults,
		"rights":            (*anchorWorld).testRights,
		"another chain":     (*anchorWorld).testAnotherChain,
		"a log and keepers": (*anchorWorld).testKeeper,
	} {
		t.Run(name, func(t *testing.T) {
			w.in(t)
			test(w, t)
			w.kubectl("delete", "configmap", anchorName, "--namespace", w.key.Namespace, "--ignore-not-found")
		})
	}
}

func (w *anchorWorld) testWriters(t *testing.T) {
	a, b := w.place(w.operator, anchorName), w.place(w.operator, anchorName)
	w.save(a, "unread", fault.Conflict)
	w.load(a, "")
	w.load(b, "")
	w.save(a, "one", nil)
	w.save(b, "two", fault.Conflict) // the ConfigMap exists by now
	w.save(b, "two", fault.Conflict) // it has still not been read
	w.load(b, "one")
	w.save(b, "two", nil)
	w.save(b, "three", nil) // an anchor knows its own write
	w.save(a, "four", fault.Conflict)
	w.load(a, "three")
	must(t, w.admin.Delete(t.Context(), w.object()))
	w.save(a, "four", fault.Conflict)
	w.load(a, "")
	w.save(a, "four", nil)
	w.load(b, "four")
}

func (w *anchorWorld) testTampering(t *testing.T) {
	a := w.place(w.operator, anchorName)
	w.load(a, "")
	w.save(a, "ours", nil)
	c := w.object()
	c.Data[w.chain], c.Data["more"] = "forged", "x"
	c.Labels = map[string]string{"team": "platform"}
	must(t, w.admin.Update(t.Context(), c))
	w.save(a, "newer", fault.Conflict)
	w.load(a, "forged")
	must(t, a.SetAside(t.Context(), []byte("forged\xff")))
	w.save(a, "newer", nil)
	w.save(a, "newest", nil)
	if c := w.object(); len(c.Data) != 2 || c.Data[w.chain] != "newest" || c.Data["refused"] != "forged\uFFFD" || c.Labels["team"] != "platform" {
		t.Errorf("it holds %v, labels %v", c.Data, c.Labels)
	}

	// These would prevent every later checkpoint: the other map, and a full ConfigMap.
	large := bytes.Repeat([]byte("x"), 1<<20-1000)
	c = w.object()
	c.Data, c.BinaryData = nil, map[string][]byte{w.chain: large}
	must(t, w.admin.Update(t.Context(), c))
	w.load(a, string(large))
	must(t, a.SetAside(t.Context(), large))
	w.save(a, "ours again", nil)
	w.load(a, "ours again")
	if n := len(w.object().Data["refused"]); n != 64<<10 {
		t.Errorf("%d bytes are set aside", n)
	}

	immutable := true
	c = w.object()
	c.Immutable = &immutable
	must(t, w.admin.Update(t.Context(), c))
	w.load(a, "ours again")
	if err := a.Save(t.Context(), []byte("next")); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "delete it") {
		t.Errorf("an immutable one: %v", err)
	}
}

// testFaults makes the API server give other answers, or none.
func (w *anchorWorld) testFaults(t *testing.T) {
	var answer func(*http.Request) (*http.Response, error)
	cfg := rest.CopyConfig(w.operator)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if answer != nil {
				return answer(r)
			}
			return next.RoundTrip(r)
		})
	})
	status := func(code int) func(*http.Request) (*http.Response, error) {
		return func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: code, Status: http.StatusText(code), Header: http.Header{}, Body: http.NoBody, Request: r}, nil
		}
	}
	a := w.place(cfg, anchorName)
	w.load(a, "")
	w.save(a, "one", nil)
	for name, tc := range map[string]struct {
		answer func(*http.Request) (*http.Response, error)
		want   error // error of a write
	}{
		"409":    {status(http.StatusConflict), fault.Conflict},
		"500":    {status(http.StatusInternalServerError), fault.Unavailable},
		"503":    {status(http.StatusServiceUnavailable), fault.Unavailable},
		"401":    {status(http.StatusUnauthorized), fault.Unavailable},
		"no one": {func(*http.Request) (*http.Response, error) { return nil, errors.New("connection refused") }, fault.Unavailable},
	} {
		w.load(a, "one")
		answer = tc.answer
		w.save(a, "two", tc.want)
		if note, err := a.Load(t.Context()); err == nil || note != nil {
			t.Errorf("%s: loaded %q, %v", name, note, err)
		}
		w.save(a, "two", fault.Conflict) // an anchor that was not read is not overwritten
		answer = nil
	}
	// The API server hangs: the caller decides how long to wait.
	reached := make(chan struct{}, 1)
	answer = func(r *http.Request) (*http.Response, error) {
		reached <- struct{}{}
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-reached
		cancel()
	}()
	if _, err := a.Load(ctx); !errors.Is(err, fault.Unavailable) {
		t.Errorf("of one that hangs: %v", err)
	}
	answer = nil
	w.load(a, "one")
	// The write arrives but its answer is lost: the anchor knows the content only after another
	// read.
	cfg2 := rest.CopyConfig(w.operator)
	cfg2.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			resp, err := next.RoundTrip(r)
			if r.Method != http.MethodGet && err == nil {
				resp.Body.Close()
				return nil, errors.New("connection reset")
			}
			return resp, err
		})
	})
	b := w.place(cfg2, anchorName)
	w.load(b, "one")
	w.save(b, "two", fault.Unavailable)
	w.save(b, "three", fault.Conflict)
	w.load(b, "two")
}

// A server on an empty volume begins another chain, and keeps the checkpoint of the lost one.
func (w *anchorWorld) testAnotherChain(t *testing.T) {
	ours := w.place(w.operator, anchorName)
	w.load(ours, "")
	w.save(ours, "ours", nil)
	theirs, err := cluster.NewAnchor(w.operator, w.key.Namespace, anchorName, "chain_theirs")
	must(t, err)
	w.load(theirs, "ours") // the keeper reports it
	must(t, theirs.SetAside(t.Context(), []byte("ours")))
	w.save(theirs, "theirs", nil)
	w.load(theirs, "theirs")
	w.load(ours, "ours")
	if c := w.object(); len(c.Data) != 2 {
		t.Errorf("it holds %v", c.Data)
	}
	w.save(ours, "newer", nil)
	w.load(theirs, "theirs")
}

// testRights tries what the operator's token must not be able to do.
func (w *anchorWorld) testRights(t *testing.T) {
	for _, place := range []struct{ namespace, name string }{{w.key.Namespace, "other"}, {"default", anchorName}} {
		a, err := cluster.NewAnchor(w.operator, place.namespace, place.name, w.chain)
		must(t, err)
		if _, err := a.Load(t.Context()); !errors.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "forbidden") {
			t.Errorf("%v: %v", place, err)
		}
	}
	for _, what := range []string{"delete", "patch", "list", "watch"} {
		out, _ := w.plane.Kubectl(t.Context(), "auth", "can-i", "--as=system:serviceaccount:latticekeep-system:latticekeep", what,
			"configmaps/"+anchorName, "--namespace", w.key.Namespace).Output()
		if strings.TrimSpace(string(out)) != "no" {
			t.Errorf("may it %s the anchor? %s", what, out)
		}
	}
}

// testKeeper checks that the keeper of a real log detects changes to the ConfigMap.
func (w *anchorWorld) testKeeper(t *testing.T) {
	w.open(nil)
	defer w.store.Close()
	w.chain = w.log.ChainID()
	defer func() { w.chain = "chain_ours" }()
	var said logs
	ctx, cancel := context.WithCancel(t.Context())
	keeper := keeper.NewAnchorKeeper(w.log, guard.New(w.log), []keeper.Anchor{w.place(w.operator, anchorName)}, keeper.AnchorOptions{
		Every: 10 * time.Millisecond, Timeout: patience, Logger: slog.New(slog.NewTextHandler(&said, nil)), Now: w.clock.Now,
	})
	if _, err := writer.NewFollower(w.log).Follow(ctx); err != nil {
		t.Fatal(err)
	}
	must(t, keeper.Check(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		keeper.Keep(ctx)
	}()
	defer func() {
		cancel()
		<-done
	}()
	whole := func(after string) *corev1.ConfigMap {
		t.Helper()
		return await(w.world, w.key, new(corev1.ConfigMapList), "the anchor after "+after, func(c *corev1.ConfigMap) bool {
			return strings.HasPrefix(c.Data[w.chain], "latticekeep.dev/log/")
		})
	}
	c := whole("the start")
	if _, ok := c.Data["refused"]; ok {
		t.Error("something is refused")
	}
	c.Data[w.chain] = "forged"
	must(t, w.admin.Update(t.Context(), c))
	if c = whole("tampering"); c.Data["refused"] != "forged" {
		t.Errorf("set aside: %q", c.Data["refused"])
	}
	must(t, w.admin.Delete(t.Context(), c))
	whole("deletion")
	if n := keeper.Status()[0].Refused; n != 1 || strings.Count(said.String(), "level=ERROR") != 1 {
		t.Errorf("%d refused:\n%s", n, said.String())
	}
}
