package admin

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// defaultKeyDays is the lifetime of a key that is made without --days and --no-expiry, as in the
// dashboard.
const defaultKeyDays = 90

func NewAPIKeyCommand() *cobra.Command {
	var r command.Server
	var tenant string
	var scopes []string
	var days *int
	var endless bool
	create := command.NewCall(&r, "create NAME", "Make an API key and print it, this once", cobra.ExactArgs(1),
		func(ctx context.Context, c *client.V2, args []string) (*v2.CreatedAPIKey, error) {
			body := v2.CreateAPIKeyRequest{Name: args[0]}
			for _, s := range scopes {
				body.Scopes = append(body.Scopes, v2.Scope(s))
			}
			if body.ExpiresInDays = days; days == nil && !endless {
				body.ExpiresInDays = new(defaultKeyDays)
			}
			if tenant != "" {
				return c.CreateTenantAPIKey(ctx, tenant, body)
			}
			return c.CreateAPIKey(ctx, body)
		}, func(out, note io.Writer, a *v2.CreatedAPIKey) {
			expires := "never expires"
			if a.ExpiresAt != nil {
				expires = "expires " + command.Day(a.ExpiresAt)
			}
			fmt.Fprintf(note, "%s, %s; it is not shown again\n", a.KeyId, expires)
			if a.Status == v2.APIKeyStatusPending {
				fmt.Fprintln(note, "it opens nothing until an owner of the tenant approves it: they have a mail about it")
			}
			fmt.Fprintln(out, a.ApiKey)
		})
	create.Flags().StringSliceVar(&scopes, "scope", nil, "what the key may do, as vault:read or, with a system key, metrics:read; may be repeated")
	command.Choices(create, "scope", authz.Scopes()...)
	create.Flags().StringVar(&tenant, "tenant", "", "tenant of the key, with a system key (default that of the calling key)")
	command.Int(create, &days, "days", 1, 3650, fmt.Sprintf("lifetime in days, 1 to 3650 (default %d)", defaultKeyDays))
	create.Flags().BoolVar(&endless, "no-expiry", false, "make a key that never expires; revoke it when nobody needs it any more")
	create.MarkFlagsMutuallyExclusive("days", "no-expiry")
	_ = create.MarkFlagRequired("scope") // cannot fail: the flag exists
	return command.NewGroup("apikey", "Administer API keys on a running server",
		"Administer the API keys of the calling key's tenant; with a system key also make keys of another tenant.\n"+
			"In a tenant that has an owner such a key works when an owner has approved it.", &r,
		create,
		command.NewCall(&r, "list", "List the tenant's API keys, without the keys themselves", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.APIKeyList, error) { return c.ListAPIKeys(ctx) },
			func(out, _ io.Writer, a *v2.APIKeyList) {
				var rows [][]string
				for _, k := range a.ApiKeys {
					var held []string
					for _, s := range k.Scopes {
						held = append(held, string(s))
					}
					rows = append(rows, []string{k.KeyId, string(k.Status), command.Day(&k.CreatedAt), command.Day(k.ExpiresAt), command.Day(k.LastUsedAt), strings.Join(held, ","), command.Printable(k.Name)})
				}
				command.Table(out, "KEY_ID STATUS CREATED EXPIRES LAST_USED SCOPES NAME", rows)
			}),
		command.NewCall(&r, "revoke KEY_ID", "Revoke an API key at once", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				return done{args[0], "revoked"}, c.RevokeAPIKey(ctx, args[0])
			}, showDone))
}
