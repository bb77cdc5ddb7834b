// Package admission is the validating webhook for SealedCredential: it refuses at `kubectl apply` what the operator would
// otherwise refuse later in a condition, and says what to do.
//
// The model: a review is judged in two steps. What can be told from the manifest alone is told here, by package sealing;
// whether its values open and whether the deployment's policy allows it, the vault is asked (see asker). The webhook
// keeps nothing: no key, no cache, no memory of an object.
//
// What holds: only a create, or an update that changes the spec, of an object that is not being deleted is judged, so that
// neither the operator's own writes nor a deletion ever wait for the vault; an update is not refused for what was wrong
// before it, so that a bad object can always be suspended. When the vault cannot be asked, the object is admitted with a
// warning, since the reconciler checks everything again: this is a convenience for authors and no boundary. No
// value, sealed or not, is put into an answer, a log or a metric.
//
// Whoever reaches the port may send anything. So the work is bounded before anything is read: the size of a review, the time
// it takes, and how many are in hand. What is no review, or contradicts itself, is refused. How often one address has the
// vault asked is bounded too: each question is a signed entry of the audit log, and without a bound whoever used up what the
// vault answers in a minute would have everybody's objects admitted unchecked. Beyond it, objects are denied until later.
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
	"k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// Path is where reviews are posted.
const Path = "/validate"

// MaxReviewBytes bounds a review, which holds the object as it was and as it shall be.
const MaxReviewBytes = 1 << 20

const (
	// maxReviews are in hand at the same time; with MaxReviewBytes it bounds the memory that strangers can take. One address
	// has maxOwnReviews of them at most, so that it cannot keep all others out.
	maxReviews    = 32
	maxOwnReviews = 16
	// patience is how long a review waits to be taken in hand, and how long its body may take to arrive.
	patience = 3 * time.Second
	// idleTimeout is how long a connection is kept for the next review: not for long, since others wait for it.
	idleTimeout = 5 * time.Second
	// maxQuestions is how often one address may have the vault asked in a minute. It is for an API server at work, and two
	// webhooks do not use up for one address what the vault answers by default (rate.v2).
	maxQuestions = 2400
	// DefaultTimeout is how long the vault has for its answer.
	DefaultTimeout = 3 * time.Second
)

// Options of [New]. URL is required.
type Options struct {
	URL       string           // address of the vault
	CAFile    string           // PEM of who signs the vault's certificate, read again when it changes; default the system's
	TokenFile string           // a ServiceAccount token with audience latticekeep, read again when it changes; default none
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
	inHand    *fair.Semaphore[string] // the reviews in hand, by address
	questions *quota.Limiter          // keyed by address

	reviews     *prometheus.CounterVec
	unavailable *prometheus.CounterVec
}

// Verdicts, as the metric names them.
const (
	passed    = "passed"    // it is none of those that are judged
	accepted  = "accepted"  // it is well-formed, and the vault accepts it
	denied    = "denied"    // it has a mistake
	unchecked = "unchecked" // it is well-formed, and the vault could not be asked
	postponed = "postponed" // it is well-formed, and its address has had the vault asked too often
	refused   = "refused"   // it is no review of a SealedCredential
)

// New returns a webhook. It reads no file and calls nobody yet.
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

// Collectors are the webhook's metrics.
func (w *Webhook) Collectors() []prometheus.Collector {
	return []prometheus.Collector{w.reviews, w.unavailable}
}

// ServeHTTP implements http.Handler. What is no review is refused with a status other than 200, which the API server takes
// for a failure of the webhook.
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
		w.logger.Error("an admission response could not be completed", "err", err)
	}
	answer, err := json.Marshal(admissionv1.AdmissionReview{TypeMeta: review.TypeMeta, Response: &response.AdmissionResponse})
	if err != nil {
		w.logger.Error("an admission response could not be encoded", "err", err)
		http.Error(rw, "internal error", http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	_, _ = rw.Write(answer) // a client that has gone needs no answer
}

// Server returns a server of the webhook, at [Path], that holds no connection for long without getting a review. It speaks
// HTTP/1.1 only when its listener's TLS offers nothing else, as it should: one connection then has one review in hand.
func (w *Webhook) Server() *http.Server {
	mux := http.NewServeMux()
	mux.Handle(Path, w)
	return &http.Server{
		Handler: mux, ErrorLog: slog.NewLogLogger(w.logger.Handler(), slog.LevelDebug), // what strangers do wrong
		ReadHeaderTimeout: w.patience, ReadTimeout: 3 * w.patience, // waiting for a slot included
		WriteTimeout: 4*w.patience + w.vault.timeout, IdleTimeout: idleTimeout, MaxHeaderBytes: 16 << 10,
	}
}

// waits is how long the API server waits, as it says in the query, and 0 when it does not.
func waits(r *http.Request) time.Duration {
	d, err := time.ParseDuration(r.URL.Query().Get("timeout"))
	if err != nil {
		return 0
	}
	return max(0, d)
}

// budget is how long a review may take from its arrival, with the wait for a slot, the body and the vault: less than the API
// server waits, so that a slow vault is a warning and not a failed webhook. Of it the vault has its own timeout at most.
func (w *Webhook) budget(r *http.Request) time.Duration {
	if waits := waits(r); waits > 0 {
		return waits / 4 * 3
	}
	return 2*w.patience + w.vault.timeout
}

// queueing is how long a review waits for a slot: at most a third of its budget, so that the rest is for the vault.
func (w *Webhook) queueing(r *http.Request) time.Duration {
	if waits := waits(r); waits > 0 {
		return min(w.patience, waits/4)
	}
	return w.patience
}

// read returns the review of a request and holds one slot for it, or the status and the reason to refuse it with.
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
	// Not for ever with one who holds a slot. Tests may use a writer that has no deadline.
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

// maxUID is longer than any UID of Kubernetes; what is echoed is bounded.
const maxUID = 128

// parse reads a review that has a request.
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

var (
	ourKind     = metav1.GroupVersionKind{Group: v1alpha1.GroupVersion.Group, Version: v1alpha1.GroupVersion.Version, Kind: v1alpha1.KindSealedCredential}
	ourResource = metav1.GroupVersionResource{Group: v1alpha1.GroupVersion.Group, Version: v1alpha1.GroupVersion.Version, Resource: "sealedcredentials"}
)

// sourceOf is the address that a request comes from. What a header says of it is not asked.
func sourceOf(r *http.Request) string {
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		return host
	}
	return r.RemoteAddr
}

// judge answers a request from source, and names the verdict.
func (w *Webhook) judge(ctx context.Context, source string, r *admissionv1.AdmissionRequest) (response admission.Response, verdict string) {
	if r.Resource != ourResource || r.Kind != ourKind {
		return admission.Errored(http.StatusBadRequest,
			fmt.Errorf("this webhook is for %s of %s: correct the rules of its configuration", ourResource.Resource, v1alpha1.GroupVersion)), refused
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
	if found := mistakes(before, after); len(found) > 0 {
		w.logger.Info("a SealedCredential was denied", "namespace", after.Namespace, "name", after.Name, "code", "malformed")
		return admission.Denied(text(found)), denied
	}
	question := questionOf(after)
	if before != nil && reflect.DeepEqual(questionOf(before), question) {
		return admission.Allowed(""), accepted // the vault would be asked what it was asked before
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
		if trouble.cause == causeForbidden || trouble.cause == causeFailed { // it does not pass by itself
			level = slog.LevelError
		}
		w.logger.Log(ctx, level, "the vault could not be asked, a SealedCredential is admitted unchecked",
			"namespace", after.Namespace, "name", after.Name, "cause", trouble.cause, "err", trouble.err)
		return admission.Allowed("").WithWarnings("latticekeep: " + trouble.warning +
			", so the values were not checked; the condition Ready of the object will say whether they can be used"), unchecked
	case !answer.Accepted:
		w.logger.Info("a SealedCredential was denied", "namespace", after.Namespace, "name", after.Name, "code", codeOf(answer))
		return admission.Denied(messageOf(answer)), denied
	}
	return admission.Allowed(""), accepted
}

// later denies an object until wait is over. The API server hands it on as it is, and clients then try again by themselves.
func later(wait time.Duration) admission.Response {
	seconds := max(1, int32((wait+time.Second-1)/time.Second))
	return admission.Response{AdmissionResponse: admissionv1.AdmissionResponse{Result: &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusTooManyRequests, Reason: metav1.StatusReasonTooManyRequests,
		Message: fmt.Sprintf("too many SealedCredentials are checked at the moment: try again in %d s", seconds),
		Details: &metav1.StatusDetails{RetryAfterSeconds: seconds},
	}}}
}

// objects returns the object of the request as it was, nil when it is new, and as it shall be.
func objects(r *admissionv1.AdmissionRequest) (before, after *v1alpha1.SealedCredential, err error) {
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

// object reads an object, which must be the one that the rest of the request is about.
func object(raw []byte, r *admissionv1.AdmissionRequest) (*v1alpha1.SealedCredential, error) {
	if len(bytes.TrimSpace(raw)) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return nil, errors.New("is missing")
	}
	o := new(v1alpha1.SealedCredential)
	if err := json.Unmarshal(raw, o); err != nil {
		return nil, errors.New("is no SealedCredential") // the cause may quote it
	}
	switch {
	case len(o.Name) > maxName || len(o.Namespace) > maxName: // before it gets into a log
		return nil, errors.New("has a name that is longer than any")
	case o.APIVersion != v1alpha1.GroupVersion.String() || o.Kind != v1alpha1.KindSealedCredential:
		return nil, errors.New("is of another kind than the request says")
	case r.Namespace == "" || o.Namespace != r.Namespace:
		return nil, errors.New("is in another namespace than the request says")
	// The name of an object that is created with generateName is in the object alone.
	case o.Name != r.Name && (r.Name != "" || r.Operation != admissionv1.Create):
		return nil, errors.New("has another name than the request says")
	}
	return o, nil
}

// mistakes are the problems of an object that it did not have before.
func mistakes(before, after *v1alpha1.SealedCredential) []sealing.Problem {
	found := sealing.Validate(after, sealing.Expect{})
	if before == nil {
		return found
	}
	known := sealing.Validate(before, sealing.Expect{})
	return slices.DeleteFunc(found, func(p sealing.Problem) bool { return slices.Contains(known, p) })
}

// shownMistakes is how many mistakes one answer tells of.
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
