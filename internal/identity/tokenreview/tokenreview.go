// Package tokenreview asks the API server of a Kubernetes cluster who presents a ServiceAccount
// token (TokenReview) and what its RBAC allows there (SubjectAccessReview).
//
// # Invariants
//
//   - Only an answer of the API server lets somebody in or allows something. If the API server does
//     not answer, the error is fault.Unavailable, within half a second.
//   - A token must have been made for our audience. The API server gets that audience, and its
//     answer must name it.
//   - Positive answers are remembered for ten seconds (see memo), and not past the token's end. The
//     token itself is in no store, log or error.
//   - A token that does not claim to be for us costs the API server nothing. Few other tokens are
//     asked about at a time, and each only once at a time.
//
// # Namespaces made again
//
// A token names its namespace and ServiceAccount by name, and the API server compares the
// ServiceAccount's UID with them. But the API server remembers its own positive answer for ten
// seconds. In that time the namespace can have been deleted and made again under the same name, for
// somebody else. So a token that is older than the present namespace is refused.
package tokenreview

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/golang-jwt/jwt/v5"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
)

const (
	userPrefix = "system:serviceaccount:"
	podUID     = "authentication.kubernetes.io/pod-uid" // key in a user's extra fields

	// Access is reviewed for this kind. No such object has to exist.
	group    = "latticekeep.dev"
	resource = "sealedcredentials"
)

var errToken = fault.New(fault.Unauthenticated, "a valid token of a ServiceAccount is required: request one with the audience latticekeep")

// Reviewer is the [identity.Cluster] behind an API server. It is safe for concurrent use.
type Reviewer struct {
	audience                            string
	now                                 func() time.Time
	authentication, authorization, core rest.Interface

	tokens *memo[identity.ServiceAccount]
	access *memo[bool]

	mu      sync.Mutex
	cluster string // UID; empty until it is known
}

var _ identity.Cluster = (*Reviewer)(nil)

// New returns a reviewer. It asks nothing yet. Its credentials must allow it to create TokenReviews
// and SubjectAccessReviews and to get namespaces. Error: an invalid configuration.
func New(cfg *rest.Config, audience string, now func() time.Time) (*Reviewer, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.QPS = -1 // the memos are the limit
	cfg.WarningHandler = rest.NoWarnings{}
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("making a client of the API server: %w", err)
	}
	authentication, err := authenticationclient.NewForConfigAndClient(cfg, client)
	if err != nil {
		return nil, fmt.Errorf("making a client of the API server: %w", err)
	}
	authorization, err := authorizationclient.NewForConfigAndClient(cfg, client)
	if err != nil {
		return nil, fmt.Errorf("making a client of the API server: %w", err)
	}
	core, err := coreclient.NewForConfigAndClient(cfg, client)
	if err != nil {
		return nil, fmt.Errorf("making a client of the API server: %w", err)
	}
	return &Reviewer{
		audience: audience, now: now,
		authentication: authentication.RESTClient(), authorization: authorization.RESTClient(), core: core.RESTClient(),
		tokens: newMemo[identity.ServiceAccount](now), access: newMemo[bool](now),
	}, nil
}

// Review implements [identity.Cluster].
func (r *Reviewer) Review(ctx context.Context, token string, ask bool) (identity.ServiceAccount, error) {
	key := sha256.Sum256([]byte(token))
	if a, ok := r.tokens.recall(key); ok {
		return a, nil
	}
	claims, ok := r.parse(token)
	if !ok || !ask {
		return identity.ServiceAccount{}, errToken
	}
	return r.tokens.ask(ctx, key, func(ctx context.Context) (identity.ServiceAccount, time.Time, error) {
		a, err := r.review(ctx, token, claims)
		return a, a.Expires, err
	})
}

// parse returns the claims of a token: audience, subject, time of issue and expiry. Nothing of this
// is proven. ok is false for a token that the API server could not prove either.
func (r *Reviewer) parse(token string) (claims jwt.RegisteredClaims, ok bool) {
	if strings.ContainsAny(token, "\r\n") { // the base64 decoder skips line ends, and a token has one spelling
		return claims, false
	}
	_, _, err := jwt.NewParser(jwt.WithStrictDecoding()).ParseUnverified(token, &claims)
	return claims, err == nil && slices.Contains(claims.Audience, r.audience) && strings.HasPrefix(claims.Subject, userPrefix) &&
		claims.IssuedAt != nil && claims.ExpiresAt != nil
}

// review asks the API server whose token this is. If the API server says that the token is
// authentic, its claims are too.
func (r *Reviewer) review(ctx context.Context, token string, claims jwt.RegisteredClaims) (a identity.ServiceAccount, err error) {
	asked := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{r.audience}}}
	var answer authenticationv1.TokenReview
	if err := create(ctx, r.authentication, "tokenreviews", asked, &answer); err != nil {
		return a, err
	}
	user := answer.Status.User
	parts := strings.Split(strings.TrimPrefix(user.Username, userPrefix), ":")
	if !answer.Status.Authenticated || !slices.Contains(answer.Status.Audiences, r.audience) ||
		user.Username != claims.Subject || len(parts) != 2 || parts[0] == "" || parts[1] == "" || user.UID == "" {
		return a, errToken
	}
	cluster, err := r.clusterUID(ctx)
	if err != nil {
		return a, err
	}
	namespace, err := r.namespace(ctx, parts[0])
	if apierrors.IsNotFound(err) {
		return a, errToken
	}
	if err != nil {
		return a, unavailable(err)
	}
	// Both times are whole seconds. A namespace cannot end and begin again within one second.
	if claims.IssuedAt.Before(namespace.CreationTimestamp.Time) {
		return a, errToken
	}
	a = identity.ServiceAccount{
		Cluster: cluster, Namespace: parts[0], NamespaceUID: string(namespace.UID), Name: parts[1], UID: user.UID,
		Groups: user.Groups, Extra: make(map[string][]string, len(user.Extra)), Expires: claims.ExpiresAt.Time,
	}
	for name, values := range user.Extra {
		a.Extra[name] = values
	}
	if pods := a.Extra[podUID]; len(pods) == 1 {
		a.Pod = pods[0]
	}
	return a, nil
}

// clusterUID returns the UID of the namespace kube-system, which identifies the cluster: it is
// unique and lives as long as the cluster.
func (r *Reviewer) clusterUID(ctx context.Context) (string, error) {
	r.mu.Lock()
	known := r.cluster
	r.mu.Unlock()
	if known != "" {
		return known, nil
	}
	system, err := r.namespace(ctx, metav1.NamespaceSystem)
	if err != nil {
		return "", unavailable(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cluster = string(system.UID)
	return r.cluster, nil
}

func (r *Reviewer) namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	n := new(corev1.Namespace)
	err := r.core.Get().Resource("namespaces").Name(name).MaxRetries(0).Do(ctx).Into(n)
	if err == nil && n.UID == "" {
		err = fmt.Errorf("reading a namespace: it has no UID")
	}
	return n, err
}

// Allowed implements [identity.Cluster].
func (r *Reviewer) Allowed(ctx context.Context, a identity.ServiceAccount, verb, namespace, name string) (bool, error) {
	spec := authorizationv1.SubjectAccessReviewSpec{
		User: userPrefix + a.Namespace + ":" + a.Name, UID: a.UID, Groups: a.Groups, Extra: make(map[string]authorizationv1.ExtraValue, len(a.Extra)),
		ResourceAttributes: &authorizationv1.ResourceAttributes{Group: group, Resource: resource, Verb: verb, Namespace: namespace, Name: name},
	}
	for name, values := range a.Extra {
		spec.Extra[name] = values
	}
	question, err := json.Marshal(spec)
	if err != nil {
		return false, fmt.Errorf("encoding a review of access: %w", err)
	}
	return r.access.ask(ctx, sha256.Sum256(question), func(ctx context.Context) (bool, time.Time, error) {
		var answer authorizationv1.SubjectAccessReview
		err := create(ctx, r.authorization, "subjectaccessreviews", &authorizationv1.SubjectAccessReview{Spec: spec}, &answer)
		if err != nil || !answer.Status.Allowed || answer.Status.Denied {
			return false, time.Time{}, err
		}
		return true, a.Expires, nil
	})
}

// create asks the API server once. By default client-go would obey a Retry-After, for which our
// caller has no time.
func create(ctx context.Context, c rest.Interface, resource string, asked, answer runtime.Object) error {
	if err := c.Post().Resource(resource).Body(asked).MaxRetries(0).Do(ctx).Into(answer); err != nil {
		return unavailable(err)
	}
	return nil
}
