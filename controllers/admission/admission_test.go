package admission

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/test/machine"
)

const (
	canary = "tr0ub4dor-and-3"
	token  = "eyJ.canary-token.sig"
)

// vault stands in for a vault in every state that a real one cannot be brought into; internal/app has the webhook ask a
// real one.
type vault struct {
	*httptest.Server
	token, ca string // files

	mu     sync.Mutex
	answer http.HandlerFunc
	asked  []v2.CheckRequest
	tokens []string
}

func newVault(t *testing.T) *vault {
	t.Helper()
	v := &vault{answer: says(`{"success":true,"accepted":true}`)}
	v.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var q v2.CheckRequest
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.URL.Path != "/api/v2/sealing-key/check" {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		v.mu.Lock()
		v.asked, v.tokens = append(v.asked, q), append(v.tokens, r.Header.Get("Authorization"))
		answer := v.answer
		v.mu.Unlock()
		answer(w, r)
	}))
	v.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	v.EnableHTTP2 = true
	v.StartTLS()
	t.Cleanup(v.Close)
	v.token, v.ca = filepath.Join(t.TempDir(), "token"), filepath.Join(t.TempDir(), "ca.crt")
	write(t, v.token, token+"\n")
	write(t, v.ca, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: v.Certificate().Raw})))
	return v
}

func (v *vault) set(h http.HandlerFunc) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.answer, v.asked, v.tokens = h, nil, nil
}

func (v *vault) questions() []v2.CheckRequest {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.asked
}

// says answers with a body, fails with a status.
func says(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, body)
	}
}

func fails(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"success":false,"error":{"code":%d,"message":"no"}}`, status)
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// newWebhook returns a webhook that asks v, and its log.
func newWebhook(t testing.TB, v *vault, change func(*Options)) (*Webhook, *machine.Log) {
	t.Helper()
	log := new(machine.Log)
	o := Options{URL: "https://127.0.0.1:1", Logger: slog.New(slog.NewJSONHandler(log, nil)), Timeout: time.Minute}
	if v != nil {
		o.URL, o.TokenFile, o.CAFile = v.URL, v.token, v.ca
	}
	if change != nil {
		change(&o)
	}
	w, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return w, log
}

// sealed is an object whose values anybody may have sealed: only a vault can tell.
func sealed(t testing.TB) *v1beta1.SealedCredential {
	t.Helper()
	key, err := envelope.GenerateSealingKey(envelope.SuiteMLKEM768X25519)
	if err != nil {
		t.Fatal(err)
	}
	o, err := sealing.Seal(key.Public(), sealing.Request{
		Namespace: "shop", Name: "db", CredentialType: "database", TTLDays: 30, Values: map[string]secret.Bytes{"password": secret.Bytes(canary)},
	}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return o
}

const uid = "705ab4f5-6393-11e8-b7cc-42010a800002"

// review is the review of a change; before is nil for a create.
func review(t testing.TB, before, after *v1beta1.SealedCredential) *admissionv1.AdmissionReview {
	t.Helper()
	gvk := after.GroupVersionKind()
	kind := metav1.GroupVersionKind{Group: gvk.Group, Version: gvk.Version, Kind: gvk.Kind}
	resource := metav1.GroupVersionResource{Group: gvk.Group, Version: gvk.Version, Resource: ourResource}
	r := &admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{
			UID: uid, Kind: kind, Resource: resource, RequestKind: &kind, RequestResource: &resource,
			Namespace: after.Namespace, Name: after.Name, Operation: admissionv1.Create, Object: runtime.RawExtension{Raw: encode(t, after)},
		},
	}
	if before != nil {
		r.Request.Operation, r.Request.OldObject = admissionv1.Update, runtime.RawExtension{Raw: encode(t, before)}
	}
	return r
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func post(w http.Handler, query string, body io.Reader) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, Path+query, body)
	r.Header.Set("Content-Type", "application/json")
	answer := httptest.NewRecorder()
	w.ServeHTTP(answer, r)
	return answer
}

// ask posts a review and returns the response in the answer.
func ask(t *testing.T, w http.Handler, r *admissionv1.AdmissionReview) *admissionv1.AdmissionResponse {
	t.Helper()
	answer := post(w, "?timeout=10s", bytes.NewReader(encode(t, r)))
	var back admissionv1.AdmissionReview
	if err := json.Unmarshal(answer.Body.Bytes(), &back); answer.Code != http.StatusOK || err != nil || back.Response == nil {
		t.Fatal(answer.Code, err, answer.Body)
	}
	if back.APIVersion != "admission.k8s.io/v1" || back.Kind != "AdmissionReview" || back.Response.UID != uid || back.Request != nil || back.Response.Patch != nil {
		t.Fatalf("%+v", back)
	}
	return back.Response
}

// count is what a metric of the webhook says.
func count(t *testing.T, w *Webhook, label string) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(w.Collectors()...)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue()
			}
		}
	}
	t.Fatalf("nothing is counted as %s", label)
	return 0
}

func TestTheVaultsAnswerDecides(t *testing.T) {
	v := newVault(t)
	for name, c := range map[string]struct {
		answer  http.HandlerFunc
		verdict string
		says    string // in the message, or the warning
		level   string // of the log, if it has anything
		cause   string
	}{
		"accepted":           {says(`{"success":true,"accepted":true}`), accepted, "", "", ""},
		"its own message":    {says(`{"success":true,"accepted":false,"code":"policy","message":"a TTL is at most 30 days here; set spec.ttlDays"}`), denied, "set spec.ttlDays", "INFO", ""},
		"malformed":          {says(`{"success":true,"accepted":false,"code":"malformed"}`), denied, "seal the values again", "INFO", ""},
		"an unknown key":     {says(`{"success":true,"accepted":false,"code":"unknown_key"}`), denied, "no such sealing key", "INFO", ""},
		"a retired key":      {says(`{"success":true,"accepted":false,"code":"retired_key"}`), denied, "latticekeep reseal", "INFO", ""},
		"does not open":      {says(`{"success":true,"accepted":false,"code":"does_not_open"}`), denied, "restore the manifest", "INFO", ""},
		"policy":             {says(`{"success":true,"accepted":false,"code":"policy"}`), denied, "ask its administrator", "INFO", ""},
		"older":              {says(`{"success":true,"accepted":false,"code":"older_value"}`), denied, "allowOlder", "INFO", ""},
		"a code of later":    {says(`{"success":true,"accepted":false,"code":"lunar"}`), denied, "does not accept", "INFO", ""},
		"no code":            {says(`{"success":true,"accepted":false}`), denied, "does not accept", "INFO", ""},
		"the token refused":  {fails(401), unchecked, "refuses to answer this webhook", "ERROR", causeForbidden},
		"the check refused":  {fails(403), unchecked, "refuses to answer this webhook", "ERROR", causeForbidden},
		"too many questions": {fails(429), unchecked, "busy", "WARN", causeBusy},
		"not ready":          {fails(503), unchecked, "busy", "WARN", causeBusy},
		"a failure":          {fails(500), unchecked, "failed to answer", "ERROR", causeFailed},
		"a bad gateway":      {fails(502), unchecked, "failed to answer", "ERROR", causeFailed},
		"another contract":   {fails(422), unchecked, "failed to answer", "ERROR", causeFailed},
		"no JSON":            {says(`<html>`), unchecked, "could not be reached", "WARN", causeUnreachable},
		"a hang-up":          {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, unchecked, "could not be reached", "WARN", causeUnreachable},
	} {
		t.Run(name, func(t *testing.T) {
			v.set(c.answer)
			w, log := newWebhook(t, v, nil)
			r := ask(t, w, review(t, nil, sealed(t)))
			if r.Allowed != (c.verdict != denied) || (len(r.Warnings) == 1) != (c.verdict == unchecked) {
				t.Fatalf("%+v", r)
			}
			text := strings.Join(r.Warnings, "")
			if c.verdict == denied {
				text = r.Result.Message
				if r.Result.Code != http.StatusForbidden {
					t.Error("code", r.Result.Code)
				}
			}
			if !strings.Contains(text, c.says) || len(text) > 256 && c.verdict == unchecked {
				t.Errorf("it says %q", text)
			}
			if got := log.String(); c.level == "" && got != "" || !strings.Contains(got, c.level) || strings.Count(got, "\n") > 1 {
				t.Errorf("it logs %s", got)
			}
			if count(t, w, c.verdict) != 1 || c.cause != "" && count(t, w, c.cause) != 1 {
				t.Error("it is not counted")
			}
			if q := v.questions(); len(q) == 0 || v.tokens[0] != "Bearer "+token {
				t.Fatal(q, v.tokens)
			}
			for _, secret := range []string{token, canary, "data\""} {
				if strings.Contains(log.String()+text, secret) {
					t.Errorf("%s is told", secret)
				}
			}
		})
	}
}

func TestTheQuestionIsTheWholeManifest(t *testing.T) {
	v := newVault(t)
	w, _ := newWebhook(t, v, nil)
	o := sealed(t)
	o.Spec.Sealed.Scope = v1beta1.ScopeNamespace
	ask(t, w, review(t, nil, o))
	q := v.questions()[0]
	value := o.Spec.Sealed.Values["password"]
	if q.Namespace != "shop" || q.Name != "db" || q.CredentialType != "database" || *q.TtlDays != 30 || q.Sealed.KeyId != o.Spec.Sealed.KeyID ||
		q.Sealed.Suite != string(o.Spec.Sealed.Suite) || *q.Sealed.Scope != "Namespace" || q.Sealed.Version != 1 || len(q.Sealed.Values) != 1 ||
		q.Sealed.Values["password"].Data != value.Data || !q.Sealed.Values["password"].SealedAt.Equal(value.SealedAt.Time) {
		t.Fatalf("%+v", q)
	}
	v.set(says(`{"success":true,"accepted":true}`))
	o.Spec.Sealed, o.Spec.Generate = nil, []v1beta1.Generator{{Key: "password", Random: &v1beta1.Random{Length: 32}}}
	if r := ask(t, w, review(t, nil, o)); !r.Allowed {
		t.Fatal(r.Result.Message)
	}
	if q := v.questions(); len(q) != 1 || q[0].Sealed != nil || q[0].CredentialType != "database" {
		t.Fatalf("policy is not asked for: %+v", q)
	}
}

func TestOnlyAChangedSpecOfALivingObjectIsJudged(t *testing.T) {
	v := newVault(t)
	v.set(says(`{"success":true,"accepted":false,"code":"does_not_open"}`))
	w, _ := newWebhook(t, v, nil)
	o := sealed(t)
	with := func(change func(*v1beta1.SealedCredential)) *v1beta1.SealedCredential {
		c := o.DeepCopy()
		change(c)
		return c
	}
	now := metav1.Now()
	for name, c := range map[string]struct {
		review *admissionv1.AdmissionReview
		change func(*admissionv1.AdmissionRequest)
		allow  bool
		asks   int
	}{
		"a create":                       {review(t, nil, o), nil, false, 1},
		"a create with a generated name": {review(t, nil, o), func(r *admissionv1.AdmissionRequest) { r.Name = "" }, false, 1},
		"other values":                   {review(t, with(func(c *v1beta1.SealedCredential) { c.Spec.Sealed = sealed(t).Spec.Sealed }), o), nil, false, 1},
		"another TTL":                    {review(t, with(func(c *v1beta1.SealedCredential) { c.Spec.TTLDays = 31 }), o), nil, false, 1},
		"labels":                         {review(t, with(func(c *v1beta1.SealedCredential) { c.Labels = map[string]string{"a": "b"} }), o), nil, true, 0},
		"the finalizer":                  {review(t, with(func(c *v1beta1.SealedCredential) { c.Finalizers = []string{v1beta1.Finalizer} }), o), nil, true, 0},
		"suspended, as far as the vault knows the same": {review(t, o, with(func(c *v1beta1.SealedCredential) { c.Spec.Suspend = true })), nil, true, 0},
		"while it is being deleted":                     {review(t, sealed(t), with(func(c *v1beta1.SealedCredential) { c.DeletionTimestamp = &now })), nil, true, 0},
		"a status":                                      {review(t, sealed(t), o), func(r *admissionv1.AdmissionRequest) { r.SubResource = "status" }, true, 0},
		"a deletion":                                    {review(t, nil, o), func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Delete; r.Object.Raw = nil }, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			v.set(v.answer)
			if c.change != nil {
				c.change(c.review.Request)
			}
			if r := ask(t, w, c.review); r.Allowed != c.allow || len(v.questions()) != c.asks {
				t.Errorf("%+v, asked %d times", r, len(v.questions()))
			}
		})
	}
}

func TestMistakesAreDeniedWithoutTheVault(t *testing.T) {
	w, log := newWebhook(t, nil, nil)
	o := sealed(t)
	o.Spec.Sealed.KeyID = "abc"
	o.Spec.Sealed.Values["password"] = v1beta1.SealedValue{SealedAt: o.Spec.Sealed.Values["password"].SealedAt, Data: canary}
	r := ask(t, w, review(t, nil, o))
	if r.Allowed || !strings.Contains(r.Result.Message, "spec.sealed.keyID") || !strings.Contains(r.Result.Message, "spec.sealed.values[password].data") {
		t.Fatalf("%+v", r)
	}
	if strings.Contains(r.Result.Message+log.String(), canary) {
		t.Error("a value is quoted")
	}
	future := sealed(t)
	at := future.Spec.Sealed.Values["password"]
	at.SealedAt.Time = time.Now().Add(48 * time.Hour).UTC().Truncate(time.Second)
	future.Spec.Sealed.Values["password"] = at
	if r := ask(t, w, review(t, nil, future)); r.Allowed || !strings.Contains(r.Result.Message, "values[password].sealedAt: is "+at.SealedAt.Format(time.RFC3339)) {
		t.Errorf("a value of the day after tomorrow: %+v", r)
	}
	long := sealed(t)
	long.Spec.Sealed = nil
	for i := range v1beta1.MaxGenerators {
		long.Spec.Generate = append(long.Spec.Generate, v1beta1.Generator{Key: fmt.Sprint("k", i), Random: &v1beta1.Random{Length: 4096}})
	}
	if r := ask(t, w, review(t, nil, long)); r.Allowed || !strings.Contains(r.Result.Message, "spec.generate: makes values of more than 256 KiB") {
		t.Errorf("more than the vault keeps: %+v", r)
	}
	before := o.DeepCopy()
	o.Spec.Suspend = true // somebody stops what came in while there was no webhook
	if r := ask(t, w, review(t, before, o)); !r.Allowed {
		t.Errorf("it cannot be suspended: %s", r.Result.Message)
	}
	o.Spec.CredentialType = "no type!"
	if r := ask(t, w, review(t, before, o)); r.Allowed || strings.Contains(r.Result.Message, "keyID") || !strings.Contains(r.Result.Message, "spec.credentialType") {
		t.Errorf("a new mistake: %+v", r)
	}
	o.Spec.Sealed.Values = make(map[string]v1beta1.SealedValue)
	for i := range 100 {
		o.Spec.Sealed.Values[fmt.Sprint("k", i)] = v1beta1.SealedValue{Data: "!"}
	}
	if r := ask(t, w, review(t, nil, o)); r.Allowed || len(r.Result.Message) > 2000 || !strings.Contains(r.Result.Message, "more like these") {
		t.Errorf("many mistakes: %+v", r)
	}
}

func TestForgedReviewsAreRefused(t *testing.T) {
	v := newVault(t)
	w, log := newWebhook(t, v, nil)
	o := sealed(t)
	forge := func(change func(*admissionv1.AdmissionReview)) []byte {
		r := review(t, nil, o)
		change(r)
		return encode(t, r)
	}
	request := func(change func(*admissionv1.AdmissionRequest)) []byte {
		return forge(func(r *admissionv1.AdmissionReview) { change(r.Request) })
	}
	other := func(change func(*v1beta1.SealedCredential)) []byte {
		c := o.DeepCopy()
		change(c)
		return encode(t, c)
	}
	long := strings.Repeat("a", 10_000)
	for name, c := range map[string]struct {
		body   []byte
		status int // 200: in a response, with the UID
		says   string
	}{
		"nothing":          {nil, 400, "not an AdmissionReview"},
		"no JSON":          {[]byte("apiVersion: admission.k8s.io/v1"), 400, "not an AdmissionReview"},
		"half":             {forge(func(*admissionv1.AdmissionReview) {})[:500], 400, "not an AdmissionReview"},
		"more behind it":   {append(forge(func(*admissionv1.AdmissionReview) {}), "{}"...), 400, "not an AdmissionReview"},
		"a list":           {[]byte("[]"), 400, "not an AdmissionReview"},
		"null":             {[]byte("null"), 400, "not an AdmissionReview"},
		"very deep":        {bytes.Repeat([]byte("["), 500_000), 400, "not an AdmissionReview"},
		"another kind":     {forge(func(r *admissionv1.AdmissionReview) { r.Kind = "Pod" }), 400, "not an AdmissionReview"},
		"an older version": {forge(func(r *admissionv1.AdmissionReview) { r.APIVersion = "admission.k8s.io/v1beta1" }), 400, "admissionReviewVersions"},
		"a response": {forge(func(r *admissionv1.AdmissionReview) {
			r.Request, r.Response = nil, &admissionv1.AdmissionResponse{UID: uid}
		}), 400, "no request"},
		"no UID":               {request(func(r *admissionv1.AdmissionRequest) { r.UID = "" }), 400, "UID"},
		"a UID of any length":  {request(func(r *admissionv1.AdmissionRequest) { r.UID = "x" + uid + uid + uid + uid }), 400, "UID"},
		"another resource":     {request(func(r *admissionv1.AdmissionRequest) { r.Resource.Resource = "secrets" }), 200, "correct the rules"},
		"another group":        {request(func(r *admissionv1.AdmissionRequest) { r.Resource.Group = "example.org" }), 200, "correct the rules"},
		"another version":      {request(func(r *admissionv1.AdmissionRequest) { r.Kind.Version = "v2" }), 200, "correct the rules"},
		"a version no one has": {request(func(r *admissionv1.AdmissionRequest) { r.Kind.Version, r.Resource.Version = "v2", "v2" }), 200, "correct the rules"},
		"two versions at once": {request(func(r *admissionv1.AdmissionRequest) { r.Kind.Version = "v1alpha1" }), 200, "correct the rules"},
		"an object of another version": {request(func(r *admissionv1.AdmissionRequest) {
			r.Object.Raw = other(func(c *v1beta1.SealedCredential) { c.APIVersion = "latticekeep.dev/v1alpha1" })
		}), 200, "another kind"},
		"a kind that does not": {request(func(r *admissionv1.AdmissionRequest) { r.Kind.Kind = "Secret" }), 200, "correct the rules"},
		"a deletion of others": {request(func(r *admissionv1.AdmissionRequest) { r.Operation = "DELETE"; r.Resource.Resource = "secrets" }), 200, "correct the rules"},
		"no object":            {request(func(r *admissionv1.AdmissionRequest) { r.Object.Raw = nil }), 200, "object is missing"},
		"no old object":        {request(func(r *admissionv1.AdmissionRequest) { r.Operation = "UPDATE" }), 200, "old object is missing"},
		"an object that is none": {request(func(r *admissionv1.AdmissionRequest) {
			r.Object.Raw = []byte(`{"spec":{"sealed":{"values":["` + canary + `"]}}}`)
		}), 200,
			"no SealedCredential"},
		"an object of another kind": {request(func(r *admissionv1.AdmissionRequest) {
			r.Object.Raw = other(func(c *v1beta1.SealedCredential) { c.Kind = "Secret" })
		}), 200, "another kind"},
		"an object of elsewhere":    {request(func(r *admissionv1.AdmissionRequest) { r.Namespace = "bank" }), 200, "another namespace"},
		"no namespace":              {request(func(r *admissionv1.AdmissionRequest) { r.Namespace = "" }), 200, "another namespace"},
		"an object of another name": {request(func(r *admissionv1.AdmissionRequest) { r.Name = "other" }), 200, "another name"},
		"an old one of another name": {request(func(r *admissionv1.AdmissionRequest) {
			r.Operation, r.OldObject.Raw = "UPDATE", other(func(c *v1beta1.SealedCredential) { c.Name = "other" })
		}), 200, "another name"},
		"an update without a name": {request(func(r *admissionv1.AdmissionRequest) { r.Operation, r.Name, r.OldObject = "UPDATE", "", r.Object }), 200, "another name"},
		"a name without an end": {request(func(r *admissionv1.AdmissionRequest) {
			r.Name, r.Object.Raw = long, other(func(c *v1beta1.SealedCredential) { c.Name = long })
		}), 200, "longer than any"},
	} {
		t.Run(name, func(t *testing.T) {
			before := count(t, w, refused)
			answer := post(w, "", bytes.NewReader(c.body))
			if answer.Code != c.status || !strings.Contains(answer.Body.String(), c.says) || answer.Body.Len() > 1000 {
				t.Fatal(answer.Code, answer.Body)
			}
			if c.status == http.StatusOK {
				var back admissionv1.AdmissionReview
				if err := json.Unmarshal(answer.Body.Bytes(), &back); err != nil || back.Response.Allowed || back.Response.UID != uid || back.Response.Result.Code != 400 {
					t.Error(err, answer.Body)
				}
			}
			if count(t, w, refused) != before+1 {
				t.Error("it is not counted")
			}
			if strings.Contains(answer.Body.String()+log.String(), canary) {
				t.Error("the object is quoted")
			}
		})
	}
	if len(v.questions()) > 0 {
		t.Error("the vault was asked")
	}
}

func TestOnlyJSONIsTakenAndOnlyByPOST(t *testing.T) {
	w, _ := newWebhook(t, nil, nil)
	server := w.Server()
	for _, c := range []struct {
		method, path, kind string
		status             int
	}{
		{"GET", Path, "application/json", 405}, {"PUT", Path, "application/json", 405}, {"DELETE", Path, "", 405},
		{"POST", Path, "", 415}, {"POST", Path, "application/yaml", 415}, {"POST", Path, "application/json-patch+json", 415}, {"POST", Path, ";", 415},
		{"POST", Path, "application/json; charset=utf-8", 400}, // it has no body
		{"POST", "/", "application/json", 404}, {"POST", "/metrics", "application/json", 404}, {"GET", "/debug/pprof/", "", 404},
	} {
		r := httptest.NewRequest(c.method, c.path, http.NoBody)
		r.Header.Set("Content-Type", c.kind)
		answer := httptest.NewRecorder()
		server.Handler.ServeHTTP(answer, r)
		if answer.Code != c.status || c.status == 405 && answer.Header().Get("Allow") != "POST" {
			t.Errorf("%s %s of %q: %d", c.method, c.path, c.kind, answer.Code)
		}
	}
}

// endless is a body that counts what is read of it.
type endless struct{ read int64 }

func (e *endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = ' '
	}
	e.read += int64(len(b))
	return len(b), nil
}

func TestALargeReviewIsRefusedUnread(t *testing.T) {
	w, _ := newWebhook(t, nil, nil)
	const huge = 100 << 20
	for name, length := range map[string]int64{"as it says": huge, "without saying so": -1} {
		body := new(endless)
		r := httptest.NewRequest(http.MethodPost, Path, io.LimitReader(body, huge))
		r.ContentLength = length
		r.Header.Set("Content-Type", "application/json")
		answer := httptest.NewRecorder()
		w.ServeHTTP(answer, r)
		if answer.Code != http.StatusRequestEntityTooLarge || answer.Header().Get("Connection") != "close" {
			t.Error(name, answer.Code)
		}
		if limit := int64(MaxReviewBytes + 64<<10); length > 0 && body.read > 0 || body.read > limit {
			t.Errorf("%s: %d bytes were read", name, body.read)
		}
	}
}

// The largest values that the schema allows fit, old and new together.
func TestTheLargestValuesFit(t *testing.T) {
	v := newVault(t)
	w, _ := newWebhook(t, v, nil)
	largest := func() *v1beta1.SealedCredential {
		o := sealed(t)
		value := o.Spec.Sealed.Values["password"]
		value.Data = strings.Repeat("AQID", v1beta1.MaxSealedText/4)
		o.Spec.Sealed.Values["password"] = value
		return o
	}
	if r := ask(t, w, review(t, largest(), largest())); !r.Allowed || len(v.questions()) != 1 {
		t.Errorf("%+v", r)
	}
}

func TestAVaultThatIsDownOrSlowIsAWarning(t *testing.T) {
	v := newVault(t)
	t.Run("down", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		w, _ := newWebhook(t, v, func(o *Options) { o.URL = "https://" + l.Addr().String() })
		if r := ask(t, w, review(t, nil, sealed(t))); !r.Allowed || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "could not be reached") {
			t.Errorf("%+v", r)
		}
	})
	for name, c := range map[string]struct {
		timeout time.Duration
		query   string
	}{"by its own measure": {50 * time.Millisecond, ""}, "by the API server's": {time.Hour, "?timeout=50ms"}} {
		t.Run("slow "+name, func(t *testing.T) {
			v.set(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
			w, _ := newWebhook(t, v, func(o *Options) { o.Timeout = c.timeout })
			answer := post(w, c.query, bytes.NewReader(encode(t, review(t, nil, sealed(t)))))
			if !strings.Contains(answer.Body.String(), `"allowed":true`) || !strings.Contains(answer.Body.String(), "could not be reached") {
				t.Error(answer.Code, answer.Body)
			}
		})
	}
}

func TestTokenAndCAAreReadAgain(t *testing.T) {
	v := newVault(t)
	w, log := newWebhook(t, v, nil)
	verdict := func() *admissionv1.AdmissionResponse { return ask(t, w, review(t, nil, sealed(t))) }
	if r := verdict(); len(r.Warnings) > 0 {
		t.Fatal(r.Warnings)
	}
	write(t, v.token, "the-next-token")
	if verdict(); v.tokens[1] != "Bearer the-next-token" {
		t.Error(v.tokens)
	}
	good, err := os.ReadFile(v.ca)
	if err != nil {
		t.Fatal(err)
	}
	for name, ca := range map[string]string{"no certificate": "junk", "nothing": ""} {
		write(t, v.ca, ca)
		if r := verdict(); !r.Allowed || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "cannot call the vault") {
			t.Errorf("%s: %+v", name, r)
		}
	}
	for _, file := range []string{v.ca, v.token} {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if r := verdict(); !r.Allowed || len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "cannot call the vault") {
			t.Errorf("without %s: %+v", file, r)
		}
		write(t, file, string(content))
		write(t, v.ca, string(good))
	}
	if r := verdict(); len(r.Warnings) > 0 {
		t.Error("it does not recover:", r.Warnings)
	}
	if !strings.Contains(log.String(), `"level":"ERROR"`) || strings.Contains(log.String(), "the-next-token") {
		t.Error(log.String())
	}
}

// A vault whose certificate the CA did not sign gets neither question nor token.
func TestAnotherVaultIsToldNothing(t *testing.T) {
	v := newVault(t)
	w, _ := newWebhook(t, v, nil)
	write(t, v.ca, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: stranger(t)})))
	if r := ask(t, w, review(t, nil, sealed(t))); !r.Allowed || len(r.Warnings) != 1 || len(v.questions()) > 0 {
		t.Errorf("%+v", r)
	}
	if _, err := New(Options{URL: "http://vault.example.org"}); err == nil {
		t.Error("a token would cross the network in the clear")
	}
}

// stranger is the certificate of an authority that signed nothing else.
func stranger(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestReviewsInHandAreBounded(t *testing.T) {
	w, _ := newWebhook(t, nil, func(o *Options) { o.Patience = time.Millisecond })
	for i := range maxReviews {
		if err := w.inHand.Acquire(t.Context(), strconv.Itoa(i)); err != nil {
			t.Fatal(i, err)
		}
	}
	body := new(endless)
	if answer := post(w, "", io.LimitReader(body, 100)); answer.Code != http.StatusServiceUnavailable || body.read > 0 {
		t.Fatal(answer.Code, body.read)
	}
	w.inHand.Release("0")
	for range 3 { // no slot is lost, whatever comes
		if answer := post(w, "", strings.NewReader("junk")); answer.Code != http.StatusBadRequest {
			t.Fatal(answer.Code)
		}
		if r := ask(t, w, review(t, nil, sealed(t))); !r.Allowed {
			t.Fatal(r)
		}
	}
	for i := 1; i < maxReviews; i++ {
		w.inHand.Release(strconv.Itoa(i))
	}
	nothingInHand(t, w)
}

// nothingInHand checks that as many reviews may be in hand as if there had been none.
func nothingInHand(t *testing.T, w *Webhook) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for i := range maxReviews {
		if err := w.inHand.Acquire(ctx, strconv.Itoa(i)); err != nil {
			t.Fatalf("only %d more reviews may be in hand, instead of %d: %v", i, maxReviews, err)
		}
		defer w.inHand.Release(strconv.Itoa(i))
	}
}

// from posts a review from an address.
func from(w http.Handler, address string, body io.Reader) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, Path, body)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Forwarded-For", rand.Text()) // anybody can write one
	r.RemoteAddr = address
	answer := httptest.NewRecorder()
	w.ServeHTTP(answer, r)
	return answer
}

func TestOneAddressDoesNotKeepTheOthersOut(t *testing.T) {
	w, _ := newWebhook(t, nil, func(o *Options) { o.Patience = time.Millisecond })
	for range maxOwnReviews {
		if err := w.inHand.Acquire(t.Context(), "192.0.2.1"); err != nil {
			t.Fatal(err)
		}
	}
	if answer := from(w, "192.0.2.1:1", new(endless)); answer.Code != http.StatusServiceUnavailable {
		t.Errorf("it has more than its share: %d", answer.Code)
	}
	for _, other := range []string{"192.0.2.2:1", "[2001:db8::1]:1"} {
		if answer := from(w, other, strings.NewReader("junk")); answer.Code != http.StatusBadRequest {
			t.Errorf("%s is kept out: %d", other, answer.Code)
		}
	}
}

// Each question is an entry of the audit log, and what the vault does not answer any more is admitted unchecked: so one address does not get to
// ask all of them, and is told to come back.
func TestOneAddressDoesNotAskTheVaultWithoutEnd(t *testing.T) {
	v := newVault(t)
	now := time.Now().UTC().Truncate(time.Minute).Add(48 * time.Second)
	w, log := newWebhook(t, v, func(o *Options) { o.Now = func() time.Time { return now } })
	object := sealed(t)
	body := encode(t, review(t, nil, object))
	answer := func(address string) *admissionv1.AdmissionResponse {
		t.Helper()
		var back admissionv1.AdmissionReview
		if a := from(w, address, bytes.NewReader(body)); a.Code != http.StatusOK || json.Unmarshal(a.Body.Bytes(), &back) != nil {
			t.Fatal(a.Code, a.Body)
		}
		return back.Response
	}
	for i := range maxQuestions - 1 {
		if w.questions.Take("192.0.2.1", maxQuestions).Exceeded {
			t.Fatal(i)
		}
	}
	if r := answer("192.0.2.1:1"); !r.Allowed {
		t.Fatalf("an API server at work is refused: %+v", r.Result)
	}
	r := answer("192.0.2.1:2")
	if r.Allowed || r.Result.Code != http.StatusTooManyRequests || r.Result.Reason != metav1.StatusReasonTooManyRequests || r.Result.Details.RetryAfterSeconds != 12 ||
		!strings.Contains(r.Result.Message, "try again in 12 s") {
		t.Errorf("%+v", r)
	}
	if n := len(v.questions()); n != 1 {
		t.Errorf("the vault is asked %d times", n)
	}
	if count(t, w, postponed) != 1 || count(t, w, unchecked) != 0 || !strings.Contains(log.String(), "192.0.2.1") {
		t.Error(log)
	}
	if r := answer("192.0.2.2:1"); !r.Allowed {
		t.Errorf("another address is refused: %+v", r.Result)
	}
	now = now.Add(12 * time.Second)
	if r := answer("192.0.2.1:1"); !r.Allowed {
		t.Errorf("it is refused for good: %+v", r.Result)
	}
}

// Clients that send slowly, or nothing, are cut off: in the headers, in the body, and between two reviews.
func TestSlowClientsAreCutOff(t *testing.T) {
	w, _ := newWebhook(t, nil, func(o *Options) { o.Patience = 100 * time.Millisecond })
	server := w.Server()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	for name, sent := range map[string]string{
		"nothing":         "",
		"half a header":   "POST /validate HTTP/1.1\r\nHost: w\r\nX-",
		"half a body":     "POST /validate HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
		"half of a chunk": "POST /validate HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
	} {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, sent); err != nil {
			t.Fatal(err)
		}
		// Should the server wait, the test does until it is cut off itself.
		if answer, err := io.ReadAll(conn); err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %v", name, err)
		} else if strings.Contains(string(answer), " 200 ") {
			t.Errorf("%s: %s", name, answer)
		}
		conn.Close()
	}
	if err := server.Shutdown(context.Background()); err != nil || !errors.Is(<-done, http.ErrServerClosed) {
		t.Error(err)
	}
	if server.IdleTimeout == 0 || server.IdleTimeout > 5*time.Second || server.WriteTimeout == 0 || server.MaxHeaderBytes > 1<<16 {
		t.Errorf("%+v", server)
	}
	nothingInHand(t, w)
}

// A body that does not arrive gives its slot back, whatever the server around the webhook does.
func TestASlowBodyHoldsNoSlotForLong(t *testing.T) {
	w, _ := newWebhook(t, nil, func(o *Options) { o.Patience = 50 * time.Millisecond })
	server := httptest.NewServer(w) // which waits for ever
	defer server.Close()
	body, rest := io.Pipe() // never written to
	defer rest.Close()
	r, err := http.Post(server.URL+Path, "application/json", body)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusRequestTimeout {
		t.Error(r.StatusCode)
	}
	nothingInHand(t, w)
}

// late is a body that arrives when wait is over.
type late struct {
	io.Reader
	wait time.Duration
}

func (l *late) Read(b []byte) (int, error) {
	time.Sleep(l.wait) // a slow sender: how long the body takes is what is tested
	l.wait = 0
	return l.Reader.Read(b)
}

// What a review waited for before the vault is asked is part of what the API server waits, so that it always gets an answer.
func TestAReviewIsAnsweredInTimeHoweverItWaited(t *testing.T) {
	const timeout = 8 * time.Second // generous: a busy machine is late by a second
	query := "?timeout=" + timeout.String()
	v := newVault(t)
	v.set(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	body := encode(t, review(t, nil, sealed(t)))
	full := func(w *Webhook) {
		for i := range maxReviews {
			if err := w.inHand.Acquire(t.Context(), strconv.Itoa(i)); err != nil {
				t.Fatal(i, err)
			}
		}
	}
	unchecked := func(t *testing.T, w *Webhook, body io.Reader) {
		t.Helper()
		start := time.Now()
		answer := post(w, query, body)
		if took := time.Since(start); took >= timeout || !strings.Contains(answer.Body.String(), `"allowed":true`) || !strings.Contains(answer.Body.String(), "could not be reached") {
			t.Errorf("after %v: %d %s", took, answer.Code, answer.Body)
		}
	}
	t.Run("for a slot and the body", func(t *testing.T) {
		t.Parallel()
		w, _ := newWebhook(t, v, nil)
		full(w)
		time.AfterFunc(timeout/8, func() { w.inHand.Release("0") })
		unchecked(t, w, &late{bytes.NewReader(body), timeout / 4})
	})
	t.Run("for the body", func(t *testing.T) {
		t.Parallel()
		w, _ := newWebhook(t, v, nil)
		unchecked(t, w, &late{bytes.NewReader(body), timeout * 3 / 8})
	})
	t.Run("for a slot in vain", func(t *testing.T) {
		t.Parallel()
		w, _ := newWebhook(t, v, func(o *Options) { o.Patience = timeout })
		full(w)
		start := time.Now()
		if answer := post(w, query, bytes.NewReader(body)); answer.Code != http.StatusServiceUnavailable || time.Since(start) > timeout/2 {
			t.Errorf("after %v: %d", time.Since(start), answer.Code)
		}
	})
	t.Run("and the vault has its own time all the same", func(t *testing.T) {
		t.Parallel()
		v := newVault(t)
		w, _ := newWebhook(t, v, func(o *Options) { o.Timeout = time.Second })
		if answer := post(w, query, &late{bytes.NewReader(body), 1200 * time.Millisecond}); !strings.Contains(answer.Body.String(), `"allowed":true`) || len(v.questions()) != 1 || count(t, w, accepted) != 1 {
			t.Errorf("%d %s", answer.Code, answer.Body)
		}
	})
}

// The vault is asked whether values are older for the object that is changed, and only when the
// change brings them. Its warning goes to the author.
func TestTheVaultKnowsWhichObjectGetsOtherValues(t *testing.T) {
	v := newVault(t)
	w, _ := newWebhook(t, v, nil)
	before := sealed(t)
	before.UID = "8c2b1c1e-0000-4000-8000-000000000001"
	values := sealed(t).Spec.Sealed
	with := func(change func(*v1beta1.SealedCredential)) *v1beta1.SealedCredential {
		c := before.DeepCopy()
		change(c)
		return c
	}
	allowed := with(func(c *v1beta1.SealedCredential) { c.Spec.Sealed.AllowOlder = true })
	for name, c := range map[string]struct {
		review *admissionv1.AdmissionReview
		uid    bool
		older  bool
		asks   int
	}{
		"a create":            {review(t, nil, before), false, false, 1},
		"a create on purpose": {review(t, nil, allowed), false, true, 1},
		"other values":        {review(t, before, with(func(c *v1beta1.SealedCredential) { c.Spec.Sealed = values })), true, false, 1},
		"another TTL":         {review(t, before, with(func(c *v1beta1.SealedCredential) { c.Spec.TTLDays = 31 })), true, true, 1},
		"on purpose":          {review(t, before, allowed), true, true, 1},
		"no longer":           {review(t, allowed, before), true, false, 1},
		"suspended":           {review(t, before, with(func(c *v1beta1.SealedCredential) { c.Spec.Suspend = true })), false, false, 0},
	} {
		v.set(v.answer)
		if r := ask(t, w, c.review); !r.Allowed || len(r.Warnings) != 0 {
			t.Errorf("%s: %+v", name, r)
		}
		q := v.questions()
		if len(q) != c.asks {
			t.Errorf("%s: asked %d times", name, len(q))
		} else if c.asks > 0 && ((q[0].Uid != nil && *q[0].Uid == string(before.UID)) != c.uid || (q[0].AllowOlder != nil && *q[0].AllowOlder) != c.older) {
			t.Errorf("%s: asked %+v", name, q[0])
		}
	}
	v.set(says(`{"success":true,"accepted":true,"warning":"there are newer values"}`))
	if r := ask(t, w, review(t, nil, before)); !r.Allowed || len(r.Warnings) != 1 || r.Warnings[0] != "latticekeep: there are newer values" || count(t, w, accepted) == 0 {
		t.Errorf("a warning: %+v", r)
	}
}

// An annotation of ours that means nothing is a warning, beside others, and refuses nothing.
func TestAnUnknownAnnotationIsAWarning(t *testing.T) {
	v := newVault(t)
	w, _ := newWebhook(t, v, nil)
	o := sealed(t)
	o.Annotations = map[string]string{"latticekeep.dev/restart-on": "db", "latticekeep.dev/abandon": "true", "example.org/a": "b"}
	suspended := o.DeepCopy()
	suspended.Spec.Suspend = true
	const says = `latticekeep: metadata.annotations: "latticekeep.dev/restart-on" has no meaning`
	for name, r := range map[string]*admissionv1.AdmissionReview{"a create": review(t, nil, o), "an update": review(t, o, suspended)} {
		if r := ask(t, w, r); !r.Allowed || len(r.Warnings) != 1 || !strings.HasPrefix(r.Warnings[0], says) || len(r.Warnings[0]) > 256 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	v.set(fails(503))
	if r := ask(t, w, review(t, nil, o)); !r.Allowed || len(r.Warnings) != 2 || !strings.Contains(r.Warnings[0], "busy") || !strings.HasPrefix(r.Warnings[1], says) {
		t.Errorf("while the vault is busy: %+v", r)
	}
}
