// Package admission is the validating webhook for SealedCredential. It refuses at `kubectl apply`
// what the operator would otherwise refuse later in a condition, and says what to do.
//
// A review has two steps. Package sealing checks what the manifest alone shows. Then the webhook
// asks the vault whether the values open and the deployment's policy allows the object (see asker).
// The webhook keeps no key, no cache and no memory of an object.
//
// Invariants: the webhook judges only a create, or an update that changes the spec, of an object
// that is not being deleted. So neither the operator's own writes nor a deletion wait for the
// vault. It does not refuse an update for mistakes that the object already had, so a bad object can
// always be suspended. If the vault cannot be asked, it admits the object with a warning. It can do
// so because the reconciler checks everything again: the webhook is a convenience for authors, not
// a security boundary. It puts no value, sealed or not, into an answer, a log or a metric.
//
// Anyone who reaches the port may send anything. So the webhook limits the work before it reads
// anything: the size of a review, its time, and the number of reviews in progress. It refuses a
// request that is not a review or contradicts itself. It also limits how often one address has the
// vault asked, because each question is a signed entry of the audit log. Without that limit, one
// address could use up the vault's rate, and everyone's objects would be admitted unchecked. Above
// the limit, objects are denied until later.
package admission

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/connections"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// Path is the URL path of reviews.
const Path = "/validate"

// MaxReviewBytes is the maximum size of a review, which holds the old and the new object.
const MaxReviewBytes = 1 << 20

const (
	// maxReviews is how many reviews are in progress at the same time. With MaxReviewBytes it
	// bounds the memory that strangers can use. One address has at most maxOwnReviews, so that it
	// cannot block all others.
	maxReviews    = 32
	maxOwnReviews = 16
	// patience is how long a review waits for a slot, and how long its body may take to arrive.
	patience = 3 * time.Second
	// idleTimeout is how long an idle connection stays open. It is short because other clients may
	// wait for a connection.
	idleTimeout = 5 * time.Second
	// maxQuestions is how often one address may have the vault asked in a minute. It is enough for
	// a busy API server. Two webhooks together do not use up the vault's default rate (rate.v2) for
	// one address.
	maxQuestions = 2400
	// DefaultTimeout is the default limit for the vault's answer.
	DefaultTimeout = 3 * time.Second
)

// Options configures [New]. URL is required.
type Options struct {
	URL       string           // address of the vault
	CAFile    string           // PEM of the vault's certificate authority, read again when it changes; default the system's
	TokenFile string           // ServiceAccount token with audience latticekeep, read for each request; default none
	Timeout   time.Duration    // limit for the vault's answer; default DefaultTimeout
	Patience  time.Duration    // limit for slow clients; default 3 seconds
	Logger    *slog.Logger     // default slog.Default()
	Now       func() time.Time // default time.Now
}

// Webhook answers admission reviews. It is safe for concurrent use.
type Webhook struct {
	vault     *asker
	patience  time.Duration
	logger    *slog.Logger
	now       func() time.Time
	inHand    *fair.Semaphore[string] // reviews in progress, by address
	questions *quota.Limiter          // keyed by address

	reviews     *prometheus.CounterVec
	unavailable *prometheus.CounterVec
}

// The verdicts, as named in the metric.
const (
	passed    = "passed"    // not a change that the webhook judges
	accepted  = "accepted"  // well-formed, and the vault accepts it
	denied    = "denied"    // has a mistake
	unchecked = "unchecked" // well-formed, but the vault could not be asked
	postponed = "postponed" // well-formed, but its address asks too often
	refused   = "refused"   // not a review of a SealedCredential
)

// New returns a webhook. It reads no file and sends no request yet.
func New(o Options) (*Webhook, error) {
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	if o.Patience == 0 {
		o.Patience = patience
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	vault, err := newAsker(o.URL, o.CAFile, o.TokenFile, o.Timeout, maxReviews)
	if err != nil {
		return nil, err
	}
	w := &Webhook{
		vault: vault, patience: o.Patience, logger: o.Logger, now: o.Now, inHand: fair.NewSemaphore[string](maxReviews, maxOwnReviews), questions: quota.New(o.Now),
		reviews: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "latticekeep_admission_reviews_total",
			Help: "Admission reviews by verdict: passed, accepted, denied, unchecked (the vault could not be asked), postponed (one address asks too often) and refused (no review).",
		}, []string{"verdict"}),
		unavailable: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "latticekeep_admission_vault_unavailable_total",
			Help: "Questions that the vault did not answer, by cause: unreachable, busy, failed, or forbidden (its settings or RBAC refuse this webhook).",
		}, []string{"cause"}),
	}
	for _, v := range []string{passed, accepted, denied, unchecked, postponed, refused} {
		w.reviews.WithLabelValues(v)
	}
	for _, c := range []string{causeUnreachable, causeBusy, causeFailed, causeForbidden} {
		w.unavailable.WithLabelValues(c)
	}
	return w, nil
}

// Collectors returns the webhook's metrics.
func (w *Webhook) Collectors() []prometheus.Collector {
	return []prometheus.Collector{w.reviews, w.unavailable}
}

// ServeHTTP implements http.Handler. It refuses a request that is not a review with a status other
// than 200, which the API server treats as a failure of the webhook.
func (w *Webhook) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	arrived := time.Now()
	ctx, cancel := context.WithDeadline(r.Context(), arrived.Add(w.budget(r)))
	defer cancel()
	review, status, err := w.read(ctx, rw, r)
	if err != nil {
		w.reviews.WithLabelValues(refused).Inc()
		rw.Header().Set("Connection", "close") // the rest of the body is not read
		if status == http.StatusMethodNotAllowed {
			rw.Header().Set("Allow", http.MethodPost)
		}
		http.Error(rw, err.Error(), status)
		return
	}
	defer w.inHand.Release(sourceOf(r))
	request := admission.Request{AdmissionRequest: *review.Request}
	response, verdict := w.judge(ctx, sourceOf(r), &request.AdmissionRequest)
	w.reviews.WithLabelValues(verdict).Inc()
	if err := response.Complete(request); err != nil { // Complete fails only for patches
		w.logger.Error("an admission response could not be completed", "error", err)
	}
	answer, err := json.Marshal(admissionv1.AdmissionReview{TypeMeta: review.TypeMeta, Response: &response.AdmissionResponse})
	if err != nil {
		w.logger.Error("an admission response could not be encoded", "error", err)
		http.Error(rw, "internal error", http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	_, _ = rw.Write(answer) // a client that is gone needs no answer
}

// Server returns a server for the webhook at [Path] that keeps no connection open for long without
// a review. Its listener's TLS should offer HTTP/1.1 only, so that each connection has one review
// in progress.
func (w *Webhook) Server() *http.Server {
	mux := http.NewServeMux()
	mux.Handle(Path, w)
	return &http.Server{
		Handler: mux, ErrorLog: slog.NewLogLogger(w.logger.Handler(), slog.LevelDebug), // mistakes of strangers
		ReadHeaderTimeout: w.patience, ReadTimeout: 3 * w.patience, // includes the wait for a slot
		WriteTimeout: 4*w.patience + w.vault.timeout, IdleTimeout: idleTimeout, MaxHeaderBytes: 16 << 10,
		ConnState: connections.Follow,
	}
}

// waits returns the API server's timeout from the query, or 0 if there is none.
func waits(r *http.Request) time.Duration {
	d, err := time.ParseDuration(r.URL.Query().Get("timeout"))
	if err != nil {
		return 0
	}
	return max(0, d)
}

// budget returns how long a review may take from its arrival, including the wait for a slot, the
// body and the vault. It is less than the API server's timeout, so that a slow vault leads to a
// warning and not to a failed webhook. The vault also has its own timeout.
func (w *Webhook) budget(r *http.Request) time.Duration {
	if waits := waits(r); waits > 0 {
		return waits / 4 * 3
	}
	return 2*w.patience + w.vault.timeout
}

// queueing returns how long a review waits for a slot: at most a third of its budget, so that
// enough is left for the vault.
func (w *Webhook) queueing(r *http.Request) time.Duration {
	if waits := waits(r); waits > 0 {
		return min(w.patience, waits/4)
	}
	return w.patience
}

// read returns the review of a request and holds one slot for it. Otherwise it returns the status
// and reason of the refusal.
func (w *Webhook) read(ctx context.Context, rw http.ResponseWriter, r *http.Request) (*admissionv1.AdmissionReview, int, error) {
	if r.Method != http.MethodPost {
		return nil, http.StatusMethodNotAllowed, errors.New("post an AdmissionReview")
	}
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return nil, http.StatusUnsupportedMediaType, errors.New("the content type of an AdmissionReview is application/json")
	}
	tooLarge := fmt.Errorf("the review is larger than %d bytes, old and new object together: split the values over several objects", MaxReviewBytes)
	if r.ContentLength > MaxReviewBytes {
		return nil, http.StatusRequestEntityTooLarge, tooLarge
	}
	queueing, cancel := context.WithTimeout(ctx, w.queueing(r))
	defer cancel()
	if w.inHand.Acquire(queueing, sourceOf(r)) != nil {
		return nil, http.StatusServiceUnavailable, errors.New("too many reviews are in hand: try again")
	}
	free := true
	defer func() {
		if free {
			w.inHand.Release(sourceOf(r))
		}
	}()
	// Bound the time of a client that holds a slot. Tests may use a writer without deadlines.
	_ = http.NewResponseController(rw).SetReadDeadline(time.Now().Add(w.patience))
	body, err := io.ReadAll(http.MaxBytesReader(rw, r.Body, MaxReviewBytes))
	if large := new(http.MaxBytesError); errors.As(err, &large) {
		return nil, http.StatusRequestEntityTooLarge, tooLarge
	} else if err != nil {
		return nil, http.StatusRequestTimeout, errors.New("the review did not arrive whole in time")
	}
	_ = http.NewResponseController(rw).SetReadDeadline(time.Time{})
	review, err := parse(body)
	if err != nil {
		return nil, http.StatusBadRequest, err
	}
	free = false
	return review, 0, nil
}

// maxUID bounds the echoed UID. It is longer than any UID of Kubernetes.
const maxUID = 128

// parse parses a review, which must have a request.
func parse(body []byte) (*admissionv1.AdmissionReview, error) {
	review := new(admissionv1.AdmissionReview)
	if err := json.Unmarshal(body, review); err != nil {
		return nil, errors.New("the body is not an AdmissionReview in JSON") // the cause may quote it
	}
	if review.APIVersion != admissionv1.SchemeGroupVersion.String() || review.Kind != "AdmissionReview" {
		return nil, fmt.Errorf("the body is not an AdmissionReview of %s: set admissionReviewVersions of the webhook to v1", admissionv1.SchemeGroupVersion)
	}
	if r := review.Request; r == nil || r.UID == "" || len(r.UID) > maxUID {
		return nil, errors.New("the AdmissionReview has no request with a UID")
	}
	return review, nil
}

const ourResource = "sealedcredentials"

// ours reports whether a request is about a SealedCredential in a version that this program knows. The rules of the
// configuration name the versions, so an object comes in the one that its author wrote. Their fields are the same.
func ours(r *admissionv1.AdmissionRequest) bool {
	for _, v := range []schema.GroupVersion{v1beta1.GroupVersion, v1alpha1.GroupVersion} {
		if r.Kind == (metav1.GroupVersionKind{Group: v.Group, Version: v.Version, Kind: v1beta1.KindSealedCredential}) &&
			r.Resource == (metav1.GroupVersionResource{Group: v.Group, Version: v.Version, Resource: ourResource}) {
			return true
		}
	}
	return false
}

// sourceOf returns the host of the connection: see [authz.Source]. It ignores what headers say.
func sourceOf(r *http.Request) string {
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		return authz.Source(host)
	}
	return r.RemoteAddr
}

// judge returns the answer to a request from source, and the verdict.
func (w *Webhook) judge(ctx context.Context, source string, r *admissionv1.AdmissionRequest) (response admission.Response, verdict string) {
	if !ours(r) {
		return admission.Errored(http.StatusBadRequest,
			fmt.Errorf("this webhook is for %s of %s and %s: correct the rules of its configuration", ourResource, v1beta1.GroupVersion, v1alpha1.GroupVersion.Version)), refused
	}
	if r.SubResource != "" || r.Operation != admissionv1.Create && r.Operation != admissionv1.Update {
		return admission.Allowed(""), passed
	}
	before, after, err := objects(r)
	if err != nil {
		return admission.Errored(http.StatusBadRequest, err), refused
	}
	if after.DeletionTimestamp != nil || before != nil && equality.Semantic.DeepEqual(before.Spec, after.Spec) {
		return admission.Allowed(""), passed
	}
	if found := mistakes(before, after, w.now()); len(found) > 0 {
		w.logger.Info("a SealedCredential was denied", "namespace", after.Namespace, "name", after.Name, "code", "malformed")
		return admission.Denied(text(found)), denied
	}
	allow := func(verdict string, warnings ...string) (admission.Response, string) {
		for _, p := range sealing.Warnings(after) {
			warnings = append(warnings, p.String())
		}
		for i, w := range warnings {
			warnings[i] = "latticekeep: " + w
		}
		return admission.Allowed("").WithWarnings(warnings...), verdict
	}
	question := questionOf(after)
	if before != nil {
		if reflect.DeepEqual(questionOf(before), question) {
			return allow(accepted) // the question to the vault has not changed
		}
		question.Uid = new(string(before.UID))
		if equality.Semantic.DeepEqual(before.Spec.Sealed, after.Spec.Sealed) {
			question.AllowOlder = new(true) // the values are not what changes
		}
	}
	if u := w.questions.Take(source, maxQuestions); u.Exceeded {
		w.logger.Warn("an address has the vault asked too often, a SealedCredential is denied until later", "source", source)
		return later(u.Reset.Sub(w.now())), postponed
	}
	answer, trouble := w.vault.ask(ctx, question)
	switch {
	case trouble != nil:
		w.unavailable.WithLabelValues(trouble.cause).Inc()
		level := slog.LevelWarn
		if trouble.cause == causeForbidden || trouble.cause == causeFailed { // needs an administrator
			level = slog.LevelError
		}
		w.logger.Log(ctx, level, "the vault could not be asked, a SealedCredential is admitted unchecked",
			"namespace", after.Namespace, "name", after.Name, "cause", trouble.cause, "error", trouble.err)
		return allow(unchecked, trouble.warning+", so the values were not checked; the condition Ready of the object will say whether they can be used")
	case !answer.Accepted:
		w.logger.Info("a SealedCredential was denied", "namespace", after.Namespace, "name", after.Name, "code", codeOf(answer))
		return admission.Denied(messageOf(answer)), denied
	case answer.Warning != nil && *answer.Warning != "":
		return allow(accepted, *answer.Warning)
	}
	return allow(accepted)
}

// later denies an object until wait is over. The API server passes the answer on unchanged, and
// clients then retry by themselves.
func later(wait time.Duration) admission.Response {
	seconds := max(1, int32((wait+time.Second-1)/time.Second))
	return admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{Result: &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusTooManyRequests, Reason: metav1.StatusReasonTooManyRequests,
		Message: fmt.Sprintf("too many SealedCredentials are checked at the moment: try again in %d s", seconds),
		Details: &metav1.StatusDetails{RetryAfterSeconds: seconds},
	}}}
}

// objects returns the old object of the request, nil if it is new, and the new object.
func objects(r *admissionv1.AdmissionRequest) (before, after *v1beta1.SealedCredential, err error) {
	if after, err = object(r.Object.Raw, r); err != nil {
		return nil, nil, fmt.Errorf("the request's object %w", err)
	}
	if r.Operation == admissionv1.Update {
		if before, err = object(r.OldObject.Raw, r); err != nil {
			return nil, nil, fmt.Errorf("the request's old object %w", err)
		}
	}
	return before, after, nil
}

// maxName is the length of the longest name that Kubernetes allows (RFC 1123).
const maxName = 253

// object parses an object and checks that it is the one that the request names.
func object(raw []byte, r *admissionv1.AdmissionRequest) (*v1beta1.SealedCredential, error) {
	if len(bytes.TrimSpace(raw)) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return nil, errors.New("is missing")
	}
	o := new(v1beta1.SealedCredential)
	if err := json.Unmarshal(raw, o); err != nil {
		return nil, errors.New("is no SealedCredential") // the cause may quote it
	}
	switch {
	case len(o.Name) > maxName || len(o.Namespace) > maxName: // before the name is logged
		return nil, errors.New("has a name that is longer than any")
	case o.APIVersion != r.Kind.Group+"/"+r.Kind.Version || o.Kind != r.Kind.Kind:
		return nil, errors.New("is of another kind than the request says")
	case r.Namespace == "" || o.Namespace != r.Namespace:
		return nil, errors.New("is in another namespace than the request says")
	// With generateName, only the object has the name.
	case o.Name != r.Name && (r.Name != "" || r.Operation != admissionv1.Create):
		return nil, errors.New("has another name than the request says")
	}
	return o, nil
}

// mistakes returns the problems that the old object did not have.
func mistakes(before, after *v1beta1.SealedCredential, now time.Time) []sealing.Problem {
	found := sealing.Validate(after, sealing.Expect{Now: now})
	if before == nil {
		return found
	}
	known := sealing.Validate(before, sealing.Expect{Now: now})
	return slices.DeleteFunc(found, func(p sealing.Problem) bool { return slices.Contains(known, p) })
}

// shownMistakes is how many mistakes one answer lists.
const shownMistakes = 5

func text(found []sealing.Problem) string {
	var lines []string
	for _, p := range found[:min(shownMistakes, len(found))] {
		lines = append(lines, p.String())
	}
	if more := len(found) - shownMistakes; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more like these", more))
	}
	return strings.Join(lines, "; ")
}
