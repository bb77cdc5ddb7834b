package admin

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewTenantCommand() *cobra.Command {
	var r command.Server
	one := func(out, _ io.Writer, a *v2.TenantAnswer) { showTenants(out, a.Tenant) }
	var v1Rate, v2Rate *int
	limit := command.NewCall(&r, "limit TENANT_ID", "Set a tenant's requests a minute", cobra.ExactArgs(1),
		func(ctx context.Context, c *client.V2, args []string) (*v2.TenantAnswer, error) {
			return c.SetTenantLimits(ctx, args[0], v2.LimitTenantRequest{V1: v1Rate, V2: v2Rate})
		}, one)
	command.Int(limit, &v1Rate, "v1", 1, 1_000_000, "of version 1, 1 to 1000000 (default that of the deployment)")
	command.Int(limit, &v2Rate, "v2", 1, 1_000_000, "of version 2, 1 to 1000000 (default that of the deployment)")
	return command.NewGroup("tenant", "Administer the tenants of a running server", "Administer the tenants of a running server, with a system key.", &r,
		command.NewCall(&r, "list", "List all tenants", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (all []v2.Tenant, err error) {
				hundred, params := 100, &v2.ListTenantsParams{}
				params.Limit = &hundred
				for {
					page, err := c.ListTenants(ctx, params)
					if err != nil {
						return nil, err
					}
					all = append(all, page.Tenants...)
					if params.Cursor = page.NextCursor; params.Cursor == nil {
						return all, nil
					}
				}
			}, func(out, _ io.Writer, all []v2.Tenant) { showTenants(out, all...) }),
		command.NewCall(&r, "create NAME", "Make a tenant, active at once", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (*v2.TenantAnswer, error) {
				return c.CreateTenant(ctx, v2.CreateTenantRequest{Name: args[0]})
			}, one),
		command.NewCall(&r, "activate TENANT_ID", "End a tenant's trial: it stays writable", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (*v2.TenantAnswer, error) {
				return c.ActivateTenant(ctx, args[0])
			}, one),
		limit)
}

func showTenants(out io.Writer, tenants ...v2.Tenant) {
	var rows [][]string
	for _, t := range tenants {
		rows = append(rows, []string{t.TenantId, string(t.Status), command.Day(&t.CreatedAt), command.Day(t.TrialEndsAt), command.Printable(t.Name)})
	}
	command.Table(out, "TENANT_ID STATUS CREATED TRIAL_ENDS NAME", rows)
}
