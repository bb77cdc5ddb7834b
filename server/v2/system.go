package v2

import (
	"context"
	"net/http"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/server/gate"
)

func (a *accountAPI) tenantAnswer(t identity.Tenant, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return api.TenantAnswer{Success: true, Tenant: a.tenant(t)}, nil
}

// ListTenants returns all tenants of the deployment.
func (a *accountAPI) ListTenants(c *gin.Context, params api.ListTenantsParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		limit := gate.Value(params.Limit)
		if limit == 0 {
			limit = gate.DefaultLimit
		}
		found, next, err := a.identity.Tenants(ctx, call.Principal(), limit, gate.Value(params.Cursor))
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		answer := api.TenantList{Success: true, Tenants: make([]api.Tenant, len(found)), NextCursor: gate.NonZero(next)}
		for i, t := range found {
			answer.Tenants[i] = a.tenant(t)
		}
		return answer, nil
	})
}

// CreateTenant creates a tenant that is active at once.
func (a *accountAPI) CreateTenant(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.CreateTenantRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return a.tenantAnswer(a.identity.CreateTenant(ctx, call.Principal(), body.Name))
	})
}

// ActivateTenant ends a tenant's trial permanently.
func (a *accountAPI) ActivateTenant(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return a.tenantAnswer(a.identity.ActivateTenant(ctx, call.Principal(), authz.TenantID(id)))
	})
}

// SetTenantLimits gives a tenant rate limits of its own.
func (a *accountAPI) SetTenantLimits(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.LimitTenantRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		return a.tenantAnswer(a.identity.LimitTenant(ctx, call.Principal(), authz.TenantID(id),
			identity.Limits{V1: gate.Value(body.V1), V2: gate.Value(body.V2)}))
	})
}

// CreateTenantAPIKey creates an API key for a tenant.
func (a *accountAPI) CreateTenantAPIKey(c *gin.Context, id string) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.CreateAPIKeyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		k, key, err := a.identity.CreateTenantAPIKey(ctx, call.Principal(), authz.TenantID(id), apiKeyRequest(body))
		if err != nil {
			return nil, err
		}
		return createdAPIKey(k, key), nil
	})
}
