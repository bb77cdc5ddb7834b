package gate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/connections"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/state"
)

// AccessCookie holds the access token.
const AccessCookie = "accessToken"

// authenticate finds the caller. It refuses two credentials, because it cannot know which one a
// proxy before the server checked.
func (call *Call) authenticate(c *gin.Context) error {
	call.Caller = identity.Caller{Principal: stranger(c)}
	if call.operation.Auth == Public {
		return nil
	}
	caller, err := call.lookUp(c.Request)
	if err != nil {
		if state.IsRefused(err) { // somebody has changed the rows that say who it is
			err = fault.Wrap(fault.Unauthenticated, fault.Unauthenticated.Error(), err)
		}
		if call.operation.Auth == Optional && fault.Of(err) == fault.Unauthenticated {
			return nil
		}
		return err
	}
	if caller.Kind != authz.Stranger { // a pod whose namespace has no tenant
		connections.Keep(c.Request.Context(), caller.Tenant)
	}
	call.byHeader = len(c.Request.Header.Values("X-API-Key"))+len(c.Request.Header.Values("Authorization")) > 0
	caller.RequestID, caller.SourceIP = call.Caller.RequestID, call.Caller.SourceIP
	call.Caller = caller
	return nil
}

func (call *Call) lookUp(r *http.Request) (identity.Caller, error) {
	keys, authorization := r.Header.Values("X-API-Key"), r.Header.Values("Authorization")
	service := call.gate.config.Identity
	if call.version.scheme == BearerKey {
		token, ok := bearer(authorization)
		if !ok {
			return identity.Caller{}, fault.Unauthenticated
		}
		return service.Authenticate(r.Context(), token)
	}
	switch {
	case len(keys)+len(authorization) > 1:
		return identity.Caller{}, fault.Unauthenticated
	case len(keys) == 1:
		return service.Authenticate(r.Context(), keys[0])
	case len(authorization) == 1:
		token, ok := bearer(authorization)
		if !ok {
			return identity.Caller{}, fault.Unauthenticated
		}
		return service.AuthenticateBearer(r.Context(), token, !call.gate.addressUsedUp(call.Caller.SourceIP))
	}
	cookies := r.CookiesNamed(AccessCookie)
	if len(cookies) != 1 {
		return identity.Caller{}, fault.Unauthenticated
	}
	return service.AuthenticateToken(r.Context(), cookies[0].Value)
}

// Still looks the caller up again and returns nil if a new request of it would still be permitted. From
// then on the call has the rights that the caller has now. It counts and records nothing. Errors:
// fault.Unauthenticated, fault.Forbidden, fault.Unavailable.
func (call *Call) Still(ctx context.Context, c *gin.Context) error {
	ctx, cancel := context.WithTimeout(ctx, call.gate.config.Limits.Patience)
	defer cancel()
	if call.gate.config.Guard.CheckNotHalted() != nil {
		return fault.Unavailable
	}
	caller, err := call.lookUp(c.Request.WithContext(ctx))
	if err == nil && caller.ServiceAccount != nil {
		caller, err = call.gate.config.Identity.Permit(ctx, caller, call.operation.Action, "", c.Param(call.operation.Object))
	}
	switch {
	case err != nil:
		return fmt.Errorf("looking the caller up again: %w", err)
	case caller.Tenant != call.Caller.Tenant || caller.ID != call.Caller.ID || !caller.May(call.operation.Action):
		return fault.New(fault.Forbidden, "access denied")
	}
	caller.RequestID, caller.SourceIP = call.Caller.RequestID, call.Caller.SourceIP
	call.Caller = caller
	return nil
}

// nameMissingScope names the scope that a known caller lacks in the headers of its 403 (RFC 6750 §3.1).
// In the vault it names none, because every 403 there is the same.
func (call *Call) nameMissingScope(scope authz.Scope) {
	if scope != "" && !call.operation.vault && !slices.Contains(call.Caller.Scopes, scope) {
		call.answer.Set("WWW-Authenticate", fmt.Sprintf(`%s, error="insufficient_scope", scope="%s"`, bearerChallenge, scope))
	}
}

// bearer returns the token of an Authorization header (RFC 6750 §2.1).
func bearer(values []string) (string, bool) {
	if len(values) != 1 {
		return "", false
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	return token, ok && strings.EqualFold(scheme, "Bearer") && token != ""
}

// Review checks the scope of a ServiceAccount; all other callers have already passed their check.
// It asks the cluster whether the ServiceAccount may perform the action: in its own namespace or in
// the given one, and on the SealedCredential called name, if any.
//
// If the cluster permits it, the caller gets the scope of the action, and the call is counted for
// the tenant. So a caller without rights uses up nothing of the tenant's limit. Errors:
// fault.Forbidden, which is recorded once a minute; the 429 of a tenant over its rate;
// fault.Unavailable.
func (call *Call) Review(ctx context.Context, namespace, name string) error {
	if call.Caller.ServiceAccount == nil {
		return nil
	}
	caller, err := call.gate.config.Identity.Permit(ctx, call.Caller, call.operation.Action, namespace, name)
	if err != nil {
		// Hanging up also ends a review with fault.Unavailable, but must not avoid the count.
		call.unreviewed = errors.Is(err, fault.Unavailable) && !errors.Is(ctx.Err(), context.Canceled)
		return fmt.Errorf("reviewing the access of a ServiceAccount: %w", err)
	}
	call.Caller = caller
	guard, denied := call.gate.config.Guard, fault.New(fault.Forbidden, "access denied")
	switch {
	case len(caller.Scopes) > 0:
		call.permitted = true
		if err := call.countPermitted(ctx); err != nil {
			return err
		}
		return guard.Authorize(ctx, caller.Principal, call.operation.Action)
	case caller.Kind == authz.Stranger: // the namespace has no tenant
		call.gate.recordRefusal(ctx, caller.Principal, audit.AccessRefused)
		return denied
	}
	return cmp.Or(guard.RecordAttemptOncePerMinute(ctx, caller.Principal, call.operation.Action, audit.Denied, string(authz.MissingScope)), denied)
}

// Also reports whether the caller may do another action, too. A ServiceAccount's cluster is asked,
// and the scope of what it permits is added. Also records nothing. Error: fault.Unavailable.
func (call *Call) Also(ctx context.Context, a authz.Action) (bool, error) {
	if call.Caller.ServiceAccount == nil {
		return call.Caller.May(a), nil
	}
	asks := call.Caller
	asks.Scopes = nil
	caller, err := call.gate.config.Identity.Permit(ctx, asks, a, "", "")
	if err != nil {
		return false, fmt.Errorf("reviewing the access of a ServiceAccount: %w", err)
	}
	if !caller.May(a) {
		return false, nil
	}
	call.Caller.Scopes = slices.Concat(call.Caller.Scopes, caller.Scopes)
	return true, nil
}
