package tokenreview

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
)

// One control plane serves all parts. Each part has its own namespaces.
func TestARealCluster(t *testing.T) {
	w := newWorld(t)
	for _, part := range []struct {
		name string
		test func(*testing.T, *world)
	}{
		{"tokens that are good say who and where", testGoodTokens},
		{"no other token is anybody's", testBadTokens},
		{"a token ends with what it is bound to", testBoundTokens},
		{"a namespace made again is another one", testNamespaceMadeAgain},
		{"access is what RBAC says, by verb, name and namespace", testAccess},
		{"a yes is remembered for a while, and a no is not", testMemory},
		{"trouble with the API server is never a yes, and passes", testTrouble},
		{"a flood of junk costs the API server little", testFlood},
		{"an API server that is gone is no yes", testGone}, // last, because it stays gone
	} {
		t.Run(part.name, func(t *testing.T) {
			w.t = t
			w.wire.fail(nil)
			w.forget()
			part.test(t, w)
		})
	}
}

func testGoodTokens(t *testing.T, w *world) {
	namespace, pod := w.namespace("good"), w.pod("good", "pod")
	system, err := w.admin.CoreV1().Namespaces().Get(t.Context(), "kube-system", metav1.GetOptions{})
	must(t, err)
	account, err := w.admin.CoreV1().ServiceAccounts("good").Get(t.Context(), "app", metav1.GetOptions{})
	must(t, err)
	for name, c := range map[string]struct {
		token string
		pod   string
	}{
		"bound to a pod":        {w.token("good", pod, audience), string(pod.UID)},
		"bound to nothing":      {w.token("good", nil, audience), ""},
		"for another beside us": {w.token("good", nil, "vault", audience), ""},
	} {
		a, err := w.review(c.token)
		if err != nil || a.Cluster != string(system.UID) || a.Namespace != "good" || a.NamespaceUID != string(namespace.UID) || a.Name != "app" ||
			a.UID != string(account.UID) || a.Pod != c.pod || !slices.Contains(a.Groups, "system:serviceaccounts:good") {
			t.Errorf("%s: %+v %v", name, a, err)
		}
		if left := a.Expires.Sub(w.clock.Now()); left < 50*time.Minute || left > 61*time.Minute {
			t.Errorf("%s: it expires in %v", name, left)
		}
	}
}

func testBadTokens(t *testing.T, w *world) {
	w.namespace("bad")
	good := w.token("bad", nil, audience)
	w.wire.count("tokenreviews")
	another, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	same := func(jwt.MapClaims) {}
	set := func(claim string, value any) string {
		return w.resign(good, nil, func(c jwt.MapClaims) {
			if c[claim] = value; value == nil {
				delete(c, claim)
			}
		})
	}
	if _, err := w.review(w.resign(good, nil, same)); err != nil {
		t.Fatal("a token that was signed again as it was:", err)
	}
	past := time.Now().Add(-time.Hour).Unix()
	parts := strings.Split(good, ".")
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","typ":"JWT"}`))
	for name, c := range map[string]struct {
		token string
		asked int // questions to the API server
	}{
		"expired":                    {set("exp", past), 1},
		"not valid yet":              {set("nbf", time.Now().Add(time.Hour).Unix()), 1},
		"of another issuer":          {set("iss", "https://elsewhere.example.org"), 1},
		"signed with another key":    {w.resign(good, another, same), 1},
		"of a ServiceAccount's name": {set("sub", "system:serviceaccount:bad:default"), 1},
		"another signature":          {parts[0] + "." + parts[1] + "." + base64.RawURLEncoding.EncodeToString(make([]byte, 64)), 1},
		"alg none":                   {none + "." + parts[1] + ".", 1},

		"for another audience":             {w.token("bad", nil, "vault"), 0},
		"for the API server":               {w.token("bad", nil), 0},
		"a legacy one, without audience":   {set("aud", nil), 0},
		"an audience in another case":      {set("aud", "Latticekeep"), 0},
		"an audience with more":            {set("aud", "latticekeep/"), 0},
		"of a user":                        {set("sub", "admin"), 0},
		"without end":                      {set("exp", nil), 0},
		"without beginning":                {set("iat", nil), 0},
		"without header":                   {"." + parts[1] + "." + parts[2], 0},
		"a line break in it":               {parts[0] + "." + parts[1] + ".\n" + parts[2], 0},
		"an audience that is no text":      {set("aud", 7), 0},
		"an audience deep in lists":        {set("aud", []any{[]any{audience}}), 0},
		"an end that is no number":         {set("exp", "soon"), 0},
		"nothing":                          {"", 0},
		"dots":                             {"..", 0},
		"many dots":                        {strings.Repeat(".", 8000), 0},
		"what is not base64":               {"!." + parts[1] + "." + parts[2], 0},
		"a header nested deep":             {base64.RawURLEncoding.EncodeToString([]byte(strings.Repeat("[", 4000))) + "." + parts[1] + ".", 0},
		"its claims as a list":             {parts[0] + "." + base64.RawURLEncoding.EncodeToString([]byte(`[]`)) + "." + parts[2], 0},
		"claims for us that nobody signed": {parts[0] + "." + base64.RawURLEncoding.EncodeToString([]byte(`{"aud":"latticekeep","sub":"system:serviceaccount:bad:app","iat":1,"exp":9e9}`)) + "." + parts[2], 1},
	} {
		w.wire.count("tokenreviews")
		a, err := w.review(c.token)
		if !errors.Is(err, fault.Unauthenticated) || a.UID != "" || len(c.token) > 10 && strings.Contains(err.Error(), c.token) {
			t.Errorf("%s: %+v %v", name, a, err)
		}
		if n := w.wire.count("tokenreviews"); min(n, 1) != c.asked {
			t.Errorf("%s: %d questions", name, n)
		}
	}

	// The API server itself refuses these tokens, so the check does not depend on their claims.
	claims, _ := w.parse(good)
	for name, token := range map[string]string{"for another audience": w.token("bad", nil, "vault"), "a legacy one": set("aud", nil)} {
		if a, err := w.find(token, claims); !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("%s: %+v %v", name, a, err)
		}
	}

	// These answers are no yes: the API server's authenticators know no audiences, or know other
	// users.
	answer := func(authenticated bool, audiences []string, user map[string]any) string {
		b, err := json.Marshal(map[string]any{"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "status": map[string]any{
			"authenticated": authenticated, "audiences": audiences, "user": user,
		}})
		must(t, err)
		return string(b)
	}
	app := map[string]any{"username": "system:serviceaccount:bad:app", "uid": "u"}
	with := func(username string) map[string]any { return map[string]any{"username": username, "uid": "u"} }
	ours := []string{audience}
	for name, c := range map[string]struct {
		subject, body string
		want          error
	}{
		"yes":               {"system:serviceaccount:bad:app", answer(true, ours, app), nil},
		"no":                {"system:serviceaccount:bad:app", answer(false, ours, app), fault.Unauthenticated},
		"no audience":       {"system:serviceaccount:bad:app", answer(true, nil, app), fault.Unauthenticated},
		"another audience":  {"system:serviceaccount:bad:app", answer(true, []string{"vault"}, app), fault.Unauthenticated},
		"no UID":            {"system:serviceaccount:bad:app", answer(true, ours, map[string]any{"username": app["username"]}), fault.Unauthenticated},
		"a user":            {"admin", answer(true, ours, with("admin")), fault.Unauthenticated},
		"another account":   {"system:serviceaccount:bad:app", answer(true, ours, with("system:serviceaccount:bad:other")), fault.Unauthenticated},
		"no name":           {"system:serviceaccount:bad", answer(true, ours, with("system:serviceaccount:bad")), fault.Unauthenticated},
		"an empty name":     {"system:serviceaccount:bad:", answer(true, ours, with("system:serviceaccount:bad:")), fault.Unauthenticated},
		"an empty place":    {"system:serviceaccount::app", answer(true, ours, with("system:serviceaccount::app")), fault.Unauthenticated},
		"one part too many": {"system:serviceaccount:bad:app:x", answer(true, ours, with("system:serviceaccount:bad:app:x")), fault.Unauthenticated},
		"no such namespace": {"system:serviceaccount:nowhere:app", answer(true, ours, with("system:serviceaccount:nowhere:app")), fault.Unauthenticated},
		"an empty answer":   {"system:serviceaccount:bad:app", `{}`, fault.Unauthenticated},
		"no JSON":           {"system:serviceaccount:bad:app", `yes`, fault.Unavailable},
		"another kind":      {"system:serviceaccount:bad:app", `{"kind":"Status","apiVersion":"v1","status":"Success"}`, fault.Unauthenticated},
		"a failed status":   {"system:serviceaccount:bad:app", `{"kind":"Status","apiVersion":"v1","status":"Failure"}`, fault.Unavailable},
	} {
		w.forget()
		w.wire.fail(func(r *http.Request) (*http.Response, error) {
			if strings.HasSuffix(r.URL.Path, "/tokenreviews") {
				return answering(http.StatusCreated, c.body)(r)
			}
			return nil, nil
		})
		claims.Subject = c.subject
		a, err := w.find(good, claims)
		if c.want == nil && (err != nil || a.UID != "u") || c.want != nil && (!errors.Is(err, c.want) || a.UID != "") {
			t.Errorf("%s: %+v %v", name, a, err)
		}
	}
}

// find bypasses the memo and the check of the claims.
func (w *world) find(token string, claims jwt.RegisteredClaims) (identity.ServiceAccount, error) {
	return w.Reviewer.review(w.t.Context(), token, claims)
}

func testBoundTokens(t *testing.T, w *world) {
	ctx := t.Context()
	w.namespace("bound")
	now := int64(0)
	pod := w.pod("bound", "pod")
	ofPod, ofAccount := w.token("bound", pod, audience), w.token("bound", nil, audience)
	must(t, w.admin.CoreV1().Pods("bound").Delete(ctx, "pod", metav1.DeleteOptions{GracePeriodSeconds: &now}))
	again := w.pod("bound", "pod") // same name, another pod
	eventually(t, "the token of a deleted pod is refused", func() bool {
		w.forget()
		_, err := w.review(ofPod)
		return errors.Is(err, fault.Unauthenticated)
	})
	if a, err := w.review(w.token("bound", again, audience)); err != nil || a.Pod != string(again.UID) {
		t.Errorf("the next pod's: %+v %v", a, err)
	}
	must(t, w.admin.CoreV1().ServiceAccounts("bound").Delete(ctx, "app", metav1.DeleteOptions{}))
	eventually(t, "the token of a deleted ServiceAccount is refused", func() bool {
		w.forget()
		_, err := w.review(ofAccount)
		return errors.Is(err, fault.Unauthenticated)
	})
	made := w.account("bound", "app")
	w.forget()
	if a, err := w.review(ofAccount); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("the token of the previous account: %+v %v", a, err)
	}
	eventually(t, "the new account is known", func() bool {
		a, err := w.review(w.token("bound", nil, audience))
		return err == nil && a.UID == string(made.UID)
	})
}

// The API server accepts a token for ten more seconds. In that time the namespace becomes
// another's.
func testNamespaceMadeAgain(t *testing.T, w *world) {
	first := w.namespace("again")
	token := w.token("again", nil, audience)
	a, err := w.review(token)
	if err != nil || a.NamespaceUID != string(first.UID) {
		t.Fatal(a, err)
	}
	claims, _ := w.parse(token)
	var second *corev1.Namespace
	eventually(t, "the next second", func() bool { // a namespace with pods takes longer than this to end
		w.remove("again")
		second = w.namespace("again")
		return second.CreationTimestamp.After(claims.IssuedAt.Time)
	})
	// The earlier answer is remembered: the account in the namespace of that time.
	if a, err := w.review(token); err != nil || a.NamespaceUID != string(first.UID) {
		t.Errorf("remembered: %+v %v", a, err)
	}
	w.forget()
	if a, err := w.review(token); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("the previous namespace's token: %+v %v", a, err)
	}
	// This holds even if an API server remembers for longer than ten seconds.
	w.wire.fail(func(r *http.Request) (*http.Response, error) {
		if !strings.HasSuffix(r.URL.Path, "/tokenreviews") {
			return nil, nil
		}
		return answering(http.StatusCreated, fmt.Sprintf(`{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","status":{"authenticated":true,"audiences":["latticekeep"],
			"user":{"username":"system:serviceaccount:again:app","uid":%q}}}`, a.UID))(r)
	})
	if a, err := w.review(token); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("the previous namespace's token, which the API server remembers: %+v %v", a, err)
	}
	w.wire.fail(nil)
	if a, err := w.review(w.token("again", nil, audience)); err != nil || a.NamespaceUID != string(second.UID) {
		t.Errorf("the new namespace's token: %+v %v", a, err)
	}
}

func testAccess(t *testing.T, w *world) {
	w.namespace("access")
	w.namespace("elsewhere")
	w.grant("access", "one", rule("unseal", "db"))
	w.grant("access", "all", rule("list seal"))
	w.grant("access", "foreign", rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets", resource}, Verbs: []string{"decrypt"}})
	a, err := w.review(w.token("access", nil, audience))
	must(t, err)
	eventually(t, "RBAC is known", func() bool {
		return w.allowed(a, "unseal", "access", "db") && w.allowed(a, "list", "access", "") && w.allowed(a, "seal", "access", "")
	})
	for _, verb := range []string{"unseal", "list", "seal", "decrypt", "*", "", "UNSEAL", "get"} {
		for _, name := range []string{"", "db", "other", "*", "db/status", "DB", "db "} {
			for _, namespace := range []string{"access", "elsewhere", "kube-system", "nowhere", "*"} {
				want := namespace == "access" && (verb == "unseal" && name == "db" || verb == "list" || verb == "seal")
				if got := w.allowed(a, verb, namespace, name); got != want {
					t.Errorf("%q %q in %q: %v", verb, name, namespace, got)
				}
			}
		}
	}
	other, err := w.review(w.token("elsewhere", nil, audience))
	must(t, err)
	if w.allowed(other, "list", "access", "") || w.allowed(other, "unseal", "access", "db") {
		t.Error("the answer to one account is given to another")
	}
	_, err = w.admin.RbacV1().RoleBindings("elsewhere").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "group"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: "Group", APIGroup: rbacv1.GroupName, Name: "system:serviceaccounts:elsewhere"}},
	}, metav1.CreateOptions{})
	must(t, err)
	eventually(t, "what a group may its member may", func() bool { return w.allowed(other, "rotate", "elsewhere", "x") })
	if w.allowed(other, "rotate", "access", "x") {
		t.Error("a RoleBinding counts in another namespace")
	}
}

func testMemory(t *testing.T, w *world) {
	w.namespace("memory")
	token := w.token("memory", nil, audience)
	if _, err := w.Review(t.Context(), token, false); !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("unknown, and not to be asked about: %v", err)
	}
	a, err := w.review(token)
	must(t, err)
	w.wire.count("tokenreviews")
	asked := func(want int, what string) {
		t.Helper()
		if n := w.wire.count("tokenreviews"); min(n, 1) != want {
			t.Errorf("%s: %d questions", what, n)
		}
	}
	w.clock.advance(lifetime - time.Millisecond)
	_, err = w.review(token)
	must(t, err)
	_, err = w.Review(t.Context(), token, false)
	must(t, err)
	asked(0, "within its lifetime")
	w.clock.advance(time.Millisecond)
	_, err = w.review(token)
	must(t, err)
	asked(1, "after its lifetime")

	w.clock.advance(a.Expires.Sub(w.clock.Now()) - time.Second)
	w.forget()
	_, err = w.review(token)
	must(t, err)
	w.wire.count("tokenreviews")
	w.clock.advance(time.Second - time.Microsecond)
	_, err = w.review(token)
	must(t, err)
	asked(0, "before the token ends")
	w.clock.advance(time.Microsecond)
	_, err = w.Review(t.Context(), token, false)
	if !errors.Is(err, fault.Unauthenticated) {
		t.Errorf("remembered past the token's end: %v", err)
	}
	w.clock.micros.Store(time.Now().UnixMicro())

	access := func() int { return w.wire.count("subjectaccessreviews") }
	if w.allowed(a, "unseal", "memory", "") {
		t.Fatal("allowed without a role")
	}
	w.grant("memory", "role", rule("unseal"))
	eventually(t, "a no is not remembered", func() bool { return w.allowed(a, "unseal", "memory", "") })
	must(t, w.admin.RbacV1().RoleBindings("memory").Delete(t.Context(), "role", metav1.DeleteOptions{}))
	access()
	w.clock.advance(lifetime - time.Microsecond)
	if !w.allowed(a, "unseal", "memory", "") || access() != 0 {
		t.Error("a yes is not remembered")
	}
	w.clock.advance(time.Microsecond)
	eventually(t, "what is revoked ends", func() bool {
		if !w.allowed(a, "unseal", "memory", "") {
			return true
		}
		w.clock.advance(lifetime) // the API server's own cache has said yes once more, which is remembered
		return false
	})
	if access() == 0 {
		t.Error("nobody asked")
	}
	w.clock.micros.Store(time.Now().UnixMicro())
}

func testTrouble(t *testing.T, w *world) {
	w.namespace("trouble")
	w.grant("trouble", "role", rule("unseal"))
	token := w.token("trouble", nil, audience)
	a, err := w.review(token)
	must(t, err)
	const secretly = `{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","status":{"authenticated":true,"audiences":["latticekeep"]}}`
	for name, broken := range map[string]func(*http.Request) (*http.Response, error){
		"refused":          func(*http.Request) (*http.Response, error) { return nil, errors.New("connection refused") },
		"hanging":          hanging,
		"429":              answering(http.StatusTooManyRequests, `{"kind":"Status","apiVersion":"v1","code":429}`, "Retry-After", "1"),
		"429, now again":   answering(http.StatusTooManyRequests, `{"kind":"Status","apiVersion":"v1","code":429}`, "Retry-After", "0"),
		"500":              answering(http.StatusInternalServerError, `{"kind":"Status","apiVersion":"v1","code":500}`),
		"500 with a yes":   answering(http.StatusInternalServerError, secretly),
		"403, of us":       answering(http.StatusForbidden, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`),
		"401, of us":       answering(http.StatusUnauthorized, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Unauthorized","code":401}`),
		"a page of HTML":   answering(http.StatusOK, "<html>", "Content-Type", "text/html"),
		"an endless reply": answering(http.StatusCreated, "{"+strings.Repeat(" ", 1<<20)),
		"503":              answering(http.StatusServiceUnavailable, ""),
	} {
		w.forget()
		w.wire.fail(broken)
		w.wire.count("tokenreviews")
		if got, err := w.Review(t.Context(), token, true); !errors.Is(err, fault.Unavailable) || got.UID != "" || strings.Contains(err.Error(), token) {
			t.Errorf("%s: a token: %+v %v", name, got, err)
		}
		if allowed, err := w.Allowed(t.Context(), a, "unseal", "trouble", ""); !errors.Is(err, fault.Unavailable) || allowed {
			t.Errorf("%s: access: %v %v", name, allowed, err)
		}
		if name != "hanging" && w.wire.count("tokenreviews") != 1 {
			t.Errorf("%s: it was asked more than once", name)
		}
		w.wire.fail(nil)
		if got, err := w.review(token); err != nil || got.UID != a.UID { // the same reviewer
			t.Errorf("%s: afterwards: %+v %v", name, got, err)
		}
		eventually(t, "it is allowed again", func() bool { return w.allowed(a, "unseal", "trouble", "") })
	}
	// Only the namespace cannot be read.
	for _, namespace := range []string{"trouble", "kube-system"} {
		w.forget()
		w.wire.fail(func(r *http.Request) (*http.Response, error) {
			if strings.HasSuffix(r.URL.Path, "/namespaces/"+namespace) {
				return answering(http.StatusInternalServerError, "")(r)
			}
			return nil, nil
		})
		if got, err := w.Review(t.Context(), token, true); !errors.Is(err, fault.Unavailable) || got.UID != "" {
			t.Errorf("without %s: %+v %v", namespace, got, err)
		}
		w.wire.fail(nil)
		if _, err := w.review(token); err != nil {
			t.Errorf("without %s: afterwards: %v", namespace, err)
		}
	}
	// A caller that leaves does not cancel the question for others.
	w.forget()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.Review(gone, token, true); err != nil && !errors.Is(err, fault.Unavailable) {
		t.Error(err)
	}
	if _, err := w.review(token); err != nil {
		t.Error(err)
	}
}

func testFlood(t *testing.T, w *world) {
	w.namespace("flood")
	good := w.token("flood", nil, audience)
	parts := strings.Split(good, ".")
	var mu sync.Mutex
	open, most := 0, 0
	release := make(chan struct{})
	w.wire.fail(func(r *http.Request) (*http.Response, error) {
		mu.Lock()
		open++
		most = max(most, open)
		mu.Unlock()
		defer func() { mu.Lock(); open--; mu.Unlock() }()
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return answering(http.StatusCreated, `{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","status":{"authenticated":false}}`)(r)
	})
	var flood sync.WaitGroup
	for i := range 200 {
		flood.Go(func() {
			junk := good
			if i%2 == 0 { // the other half use one token
				junk = parts[0] + "." + parts[1] + "." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d", i))
			}
			if a, err := w.Review(t.Context(), junk, true); !errors.Is(err, fault.Unavailable) && !errors.Is(err, fault.Unauthenticated) || a.UID != "" {
				t.Errorf("%+v %v", a, err)
			}
		})
	}
	flood.Wait()
	close(release)
	if most == 0 || most > 16 {
		t.Errorf("%d questions at once", most)
	}
	w.wire.fail(nil)
	eventually(t, "what the flood held is free", func() bool { return w.tokens.asking.TryAcquire(atOnce) })
	w.tokens.asking.Release(atOnce)
	if len(w.tokens.known) != 0 {
		t.Errorf("%d of the junk are remembered", len(w.tokens.known))
	}
	if _, err := w.review(good); err != nil {
		t.Error("afterwards:", err)
	}
	// The remembered answers contain no token.
	if kept := fmt.Sprintf("%+v", w.tokens.known); strings.Contains(kept, parts[2]) {
		t.Error("the token is in memory:", kept)
	}
	if _, ok := w.tokens.known[sha256.Sum256([]byte(good))]; !ok {
		t.Error("the good token is not remembered")
	}
}

func testGone(t *testing.T, w *world) {
	w.namespace("gone")
	w.grant("gone", "role", rule("unseal"))
	token := w.token("gone", nil, audience)
	a, err := w.review(token)
	must(t, err)
	eventually(t, "RBAC is known", func() bool { return w.allowed(a, "unseal", "gone", "") })
	fresh := w.token("gone", nil, audience)
	must(t, w.plane.Stop())
	if _, err := w.Review(t.Context(), token, true); err != nil {
		t.Error("what it said is forgotten:", err)
	}
	if ok, err := w.Allowed(t.Context(), a, "unseal", "gone", ""); !ok || err != nil {
		t.Error("what it said is forgotten:", ok, err)
	}
	if _, err := w.Review(t.Context(), fresh, true); !errors.Is(err, fault.Unavailable) {
		t.Error("a token it was never asked about:", err)
	}
	w.clock.advance(lifetime)
	if _, err := w.Review(t.Context(), token, true); !errors.Is(err, fault.Unavailable) {
		t.Error("a token:", err)
	}
	if ok, err := w.Allowed(t.Context(), a, "unseal", "gone", ""); ok || !errors.Is(err, fault.Unavailable) {
		t.Error("access:", ok, err)
	}
}
