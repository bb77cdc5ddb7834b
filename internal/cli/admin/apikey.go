package admin

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewAPIKeyCommand() *cobra.Command {
	var r command.Server
	var tenant string
	var scopes []string
	var days int
	create := command.NewCall(&r, "create NAME", "Make an API key and print it, this once", cobra.ExactArgs(1),
		func(ctx context.Context, c *client.V2, args []string) (*v2.CreatedAPIKey, error) {
			body := v2.CreateAPIKeyRequest{Name: args[0]}
			for _, s := range scopes {
				body.Scopes = append(body.Scopes, v2.Scope(s))
			}
			if days > 0 {
				body.ExpiresInDays = &days
			}
			if tenant != "" {
				return c.CreateTenantAPIKey(ctx, tenant, body)
			}
			return c.CreateAPIKey(ctx, body)
		}, func(out, note io.Writer, a *v2.CreatedAPIKey) {
			expires := "without an end"
			if a.ExpiresAt != nil {
				expires = "until " + command.Day(a.ExpiresAt)
			}
			fmt.Fprintf(note, "%s, %s; it is not shown again\n", a.KeyId, expires)
			fmt.Fprintln(out, a.ApiKey)
		})
	create.Flags().StringSliceVar(&scopes, "scope", nil, "what the key may do, as vault:read; may be repeated")
	create.Flags().StringVar(&tenant, "tenant", "", "tenant of the key, with a system key (default that of the calling key)")
	create.Flags().IntVar(&days, "days", 0, "lifetime in days (default without end)")
	_ = create.MarkFlagRequired("scope")
	return command.NewGroup("apikey", "Administer API keys on a running server",
		"Administer the API keys of the calling key's tenant; with a system key also make the first key of another tenant.", &r,
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
