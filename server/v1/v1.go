// Package v1 is version 1 of the REST interface, as defined in api/openapi/v1.yaml. Each endpoint
// decodes the request, calls one service and encodes the answer. Routes and types are generated
// from the contract. Package gate checks a request before an endpoint sees it.
package v1

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/api/openapi"
	api "github.com/latticekeep/latticekeep/api/openapi/v1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/server/gate"
)

// API implements the endpoints of version 1. All fields are required.
type API struct {
	Transit *transit.Transit
	Reader  *reader.Reader
}

var _ ServerInterface = (*API)(nil)

// Operations returns the action of every operation in the contract.
func Operations() map[string]gate.Operation {
	return map[string]gate.Operation{
		"encryptData":    {Action: authz.EncryptData},
		"decryptData":    {Action: authz.DecryptData},
		"rewrapData":     {Action: authz.RewrapData},
		"generateKey":    {Action: authz.CreateKey},
		"listKeys":       {Action: authz.ListKeys},
		"rotateKey":      {Action: authz.RotateKey},
		"queryAuditLogs": {Action: authz.ReadAudit},
	}
}

var contract = gate.ReadContract(openapi.V1())

// Register adds the endpoints to r, behind g.
func Register(r gin.IRouter, g *gate.Gate, a *API) (*gate.Version, error) {
	v, err := g.Version(gate.Definition{
		Name: "v1", Contract: contract, Scheme: gate.BearerKey, Operations: Operations(),
		Envelope: envelope, Schema: http.StatusBadRequest,
	})
	if err != nil {
		return nil, err
	}
	RegisterHandlersWithOptions(r.Group("", v.Checks()), a, GinServerOptions{ErrorHandler: v.Fail})
	return v, nil
}

// errorBody is the error envelope of version 1.
type errorBody struct {
	Error errorDetail `json:"error"`
}

type errorDetail struct {
	Code      int    `json:"code"`
	Message   string `json:"message"`
	Details   string `json:"details"`
	RequestID string `json:"request_id"`
	Timestamp string `json:"timestamp"`
}

func envelope(p gate.Problem) any {
	return errorBody{errorDetail{p.Code, p.Message, p.Details, p.RequestID, p.Timestamp}}
}

// algorithm is the only supported algorithm.
const algorithm = "ML-KEM-768"

var errUndecryptable = gate.Refusal(http.StatusBadRequest, "the ciphertext cannot be decrypted with this key: send encrypted_data as encrypt answered it")

// parse parses a ciphertext. For invalid input it returns an empty one, which the service refuses
// like any other and records.
func parse(encrypted string) transit.Ciphertext {
	b, err := gate.DecodeBase64(encrypted)
	if err != nil {
		return transit.Ciphertext{}
	}
	c, err := transit.ParseCiphertext(b)
	if err != nil {
		return transit.Ciphertext{}
	}
	return c
}

func encrypted(c transit.Ciphertext) (api.EncryptAnswer, error) {
	b, err := c.MarshalBinary()
	if err != nil {
		return api.EncryptAnswer{}, err
	}
	return api.EncryptAnswer{
		EncryptedData: base64.StdEncoding.EncodeToString(b), KeyId: c.KeyID, KeyVersion: int64(c.KeyVersion), Algorithm: algorithm,
	}, nil
}

// EncryptData encrypts with a named key, or with the tenant's default key.
func (a *API) EncryptData(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.EncryptRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		data := secret.Bytes(body.Data)
		defer data.Zero()
		sealed, err := a.Transit.Encrypt(ctx, call.Principal(), gate.Value(body.KeyId), []secret.Bytes{data})
		if err != nil {
			return nil, err
		}
		return encrypted(sealed[0])
	})
}

// DecryptData verifies the signatures and decrypts.
func (a *API) DecryptData(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.DecryptRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		opened, err := a.Transit.Decrypt(ctx, call.Principal(), body.KeyId, []transit.Ciphertext{parse(body.EncryptedData)})
		if err != nil {
			return nil, err
		}
		o := opened[0]
		if o.Err != nil {
			return nil, errUndecryptable
		}
		defer o.Data.Zero()
		return api.DecryptAnswer{Data: string(o.Data), KeyId: o.KeyID, KeyVersion: int64(o.KeyVersion)}, nil
	})
}

// RewrapData re-encrypts a ciphertext with the newest version of its key.
func (a *API) RewrapData(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.DecryptRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		sealed, err := a.Transit.Rewrap(ctx, call.Principal(), body.KeyId, parse(body.EncryptedData))
		if errors.Is(err, transit.ErrDecrypt) {
			return nil, errUndecryptable
		}
		if err != nil {
			return nil, err
		}
		return encrypted(sealed)
	})
}

func key(k transit.Key) api.Key {
	return api.Key{
		KeyId: k.ID, Name: k.Name, Algorithm: algorithm, Version: int64(k.Version), RotationPeriod: k.RotationDays,
		CreatedAt: k.CreatedAt.UTC(), RotatedAt: k.RotatedAt.UTC(), NextRotationAt: k.NextRotation.UTC(),
	}
}

// GenerateKey creates a named key.
func (a *API) GenerateKey(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.GenerateKeyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		k, err := a.Transit.CreateKey(ctx, call.Principal(), body.Name, gate.Value(body.RotationPeriod))
		if err != nil {
			return nil, err
		}
		return key(k), nil
	})
}

// ListKeys returns a page of the tenant's keys.
func (a *API) ListKeys(c *gin.Context, params api.ListKeysParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		page, limit := max(1, gate.Value(params.Page)), gate.Value(params.Limit)
		if limit == 0 {
			limit = gate.DefaultLimit
		}
		found, total, err := a.Transit.Keys(ctx, call.Principal(), (page-1)*limit, limit)
		if err != nil {
			return nil, err
		}
		answer := api.KeyList{Keys: make([]api.Key, len(found)), Page: page, Limit: limit, Total: total}
		for i, k := range found {
			answer.Keys[i] = key(k)
		}
		return answer, nil
	})
}

// RotateKey adds a new version to a key.
func (a *API) RotateKey(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.RotateKeyRequest
		if call.HasBody() {
			if err := call.Decode(&body); err != nil {
				return nil, err
			}
		}
		k, rewrapped, err := a.Transit.RotateKey(ctx, call.Principal(), id, gate.Value(body.ReEncryptData))
		if err != nil {
			return nil, err
		}
		r := key(k)
		return api.RotatedKey{
			KeyId: r.KeyId, Name: r.Name, Algorithm: r.Algorithm, Version: r.Version, RotationPeriod: r.RotationPeriod,
			CreatedAt: r.CreatedAt, RotatedAt: r.RotatedAt, NextRotationAt: r.NextRotationAt, ReEncryptedVersions: rewrapped,
		}, nil
	})
}

// auditLogs is the generated type with the entries exactly as the log returns them. Their bytes
// were hashed and signed.
type auditLogs struct {
	Logs       []audit.Entry `json:"logs"`
	NextCursor string        `json:"next_cursor,omitzero"`
}

// QueryAuditLogs returns entries of the caller's tenant, newest first.
func (a *API) QueryAuditLogs(c *gin.Context, params api.QueryAuditLogsParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		q := reader.Query{Limit: gate.Value(params.Limit), Cursor: gate.Value(params.Cursor)}
		if params.StartDate != nil {
			q.From = params.StartDate.Time
		}
		if params.EndDate != nil { // include the whole day
			q.To = params.EndDate.AddDate(0, 0, 1).Add(-time.Nanosecond)
		}
		if !q.From.IsZero() && !q.To.IsZero() && q.To.Before(q.From) {
			return nil, gate.BadRequest("the parameter end_date is earlier than start_date")
		}
		if q.Limit == 0 {
			q.Limit = gate.DefaultLimit
		}
		entries, next, err := a.Reader.Query(ctx, call.Principal(), q)
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		return auditLogs{entries, next}, nil
	})
}
