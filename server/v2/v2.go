// Package v2 is version 2 of the REST interface, as api/openapi/v2.yaml states
// it: each endpoint decodes, calls one service and encodes.
//
// Every request passes the checks of [API.answer] in one fixed order, so that
// a request that breaks several rules is always answered for the same one, and
// a caller without the scope learns nothing about what it sent. Decisions about
// credentials are the services': this package only carries them, and never
// shows a caller more than a status and a generic message.
//
// Plaintext lives here in [secret.Bytes] and in the bodies of requests and
// responses, all of which are overwritten once the response is written. Copies
// that net/http makes, and those that a buffer leaves behind as it grows, are
// not.
package v2

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// API answers the endpoints of version 2. All fields are required.
type API struct {
	Vault    *vault.Vault
	Identity *identity.Service
	Audit    *audit.Log
	Keys     *keyring.Ring
	Now      func() time.Time

	refusals refusals
}

// endpoint is one row of the interface.
type endpoint struct {
	method, path string
	action       authz.Action // what the caller does; empty for an endpoint without authentication
	status       int          // of success
	handle       func(context.Context, authz.Principal, input) (any, error)
}

// input is what is left of a request once it has passed the checks.
type input struct {
	id    string     // the path's credential_id, not looked at yet
	query url.Values // well-formed
	body  []byte     // empty, or well-formed JSON; overwritten after the call
}

// Register adds the endpoints to r.
func (a *API) Register(r gin.IRouter) {
	for _, e := range []endpoint{
		{"POST", "/api/v2/vault/seal", authz.SealCredential, http.StatusCreated, a.seal},
		{"GET", "/api/v2/vault/list", authz.ListCredentials, http.StatusOK, a.list},
		{"GET", "/api/v2/vault/:credential_id", authz.UnsealCredential, http.StatusOK, a.unseal},
		{"POST", "/api/v2/vault/rotate/:credential_id", authz.RotateCredential, http.StatusOK, a.rotate},
		{"DELETE", "/api/v2/vault/:credential_id", authz.DeleteCredential, http.StatusOK, a.remove},
		{"GET", "/api/v2/audit/logs", authz.ReadAudit, http.StatusOK, a.auditLogs},
		{"GET", "/api/v2/sealing-key", "", http.StatusOK, a.sealingKey},
	} {
		r.Handle(e.method, e.path, func(c *gin.Context) {
			answer, err := a.answer(c, e)
			if err != nil {
				Fail(c, a.Now(), err)
				return
			}
			if plain, ok := answer.(interface{ zero() }); ok {
				defer plain.zero()
			}
			if e.action == "" { // public, and the same for everyone
				c.Header("Cache-Control", "public, max-age=60")
			}
			Write(c, a.Now(), e.status, answer)
		})
	}
}

// answer runs the checks in the order of the contract (the route is already
// found), then the endpoint.
func (a *API) answer(c *gin.Context, e endpoint) (any, error) {
	// The principal is looked up first, so that no memory is held for the body
	// of a stranger; a body that is too large is answered before all the same.
	var p authz.Principal
	var unknown error
	if e.action != "" {
		p, unknown = a.authenticate(c)
	}
	body, err := readBody(c, unknown == nil)
	defer secret.Bytes(body).Zero()
	if err == nil && errors.Is(unknown, fault.Unauthenticated) {
		a.recordRefusal(c)
	}
	if err := cmp.Or(err, unknown); err != nil {
		return nil, err
	}
	// From here on the answer takes at most a second, whatever hangs.
	ctx, cancel := context.WithTimeout(c.Request.Context(), patience)
	defer cancel()
	if e.action != "" {
		if err := a.Audit.Authorize(ctx, p, e.action); err != nil {
			return nil, err
		}
	}
	if len(body) > 0 {
		if err := checkContentType(c.Request.Header); err != nil {
			return nil, err
		}
		if err := checkJSON(body); err != nil {
			return nil, err
		}
	}
	query, err := url.ParseQuery(c.Request.URL.RawQuery)
	if err != nil {
		return nil, badQuery("the query string is malformed")
	}
	return e.handle(ctx, p, input{id: c.Param("credential_id"), query: query, body: body})
}

// maxBody bounds the body of a request.
const maxBody = 1 << 20

// patience leaves room, within a second, to answer that there is no answer.
const patience = 900 * time.Millisecond

// readBody reads the whole body, since how large a chunked body is shows only
// then, and returns it if it is to be kept.
func readBody(c *gin.Context, keep bool) (body []byte, err error) {
	if c.Request.ContentLength > maxBody {
		// net/http will not keep a connection whose body was left unread.
		return nil, &refusal{http.StatusRequestEntityTooLarge, "the request body is larger than 1 MiB"}
	}
	limited := http.MaxBytesReader(c.Writer, c.Request.Body, maxBody)
	if keep {
		body, err = io.ReadAll(limited)
	} else {
		_, err = io.Copy(io.Discard, limited)
	}
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return body, &refusal{http.StatusRequestEntityTooLarge, "the request body is larger than 1 MiB"}
	}
	if err != nil {
		return body, &refusal{http.StatusBadRequest, "the request body ended early"}
	}
	return body, nil
}

// recordRefusal leaves an entry of a request without a principal. The answer is
// the same whether that works or not.
func (a *API) recordRefusal(c *gin.Context) {
	source := address(c)
	if !a.refusals.first(source, a.Now()) {
		return
	}
	// Not under the request's own context: that ends when the stranger hangs up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request.Context()), patience)
	defer cancel()
	_ = a.Audit.Record(ctx, audit.Event{
		Type: audit.AccessRefused, Outcome: audit.Denied, Resource: audit.Resource{Type: audit.InterfaceResource},
		Principal: authz.Principal{Tenant: authz.SystemTenant, Kind: authz.Stranger, RequestID: requestID(c), SourceIP: source},
	})
}

// address is the connection's own: headers that name another are ignored.
func address(c *gin.Context) string {
	host, _, _ := net.SplitHostPort(c.Request.RemoteAddr)
	return host
}

// authenticate finds the principal behind the X-API-Key header.
func (a *API) authenticate(c *gin.Context) (authz.Principal, error) {
	// Two keys are as good as none: which one a proxy before us looked at is
	// unknown.
	keys := c.Request.Header.Values("X-API-Key")
	if len(keys) != 1 || keys[0] == "" {
		return authz.Principal{}, fault.Unauthenticated
	}
	p, err := a.Identity.Authenticate(c.Request.Context(), keys[0])
	if err != nil {
		return authz.Principal{}, err
	}
	p.RequestID = requestID(c)
	p.SourceIP = address(c)
	return p, nil
}
