package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// remote is how the administrative commands reach a running server.
type remote struct {
	url, key, keyFile string
	json              bool
}

func (r *remote) register(cmd *cobra.Command) {
	r.connection(cmd)
	cmd.PersistentFlags().BoolVar(&r.json, "json", false, "print the answer as the server sent it")
}

// connection defines the flags that say where the server is and who calls.
func (r *remote) connection(cmd *cobra.Command) {
	flags := cmd.PersistentFlags()
	flags.StringVar(&r.url, "url", os.Getenv("LATTICEKEEP_URL"), "base URL of the server (environment: LATTICEKEEP_URL)")
	flags.StringVar(&r.key, "api-key", "", "API key; other users of this machine may see it (environment: LATTICEKEEP_API_KEY)")
	flags.StringVar(&r.keyFile, "api-key-file", "", "file that holds the API key")
	cmd.MarkFlagsMutuallyExclusive("api-key", "api-key-file")
}

func (r *remote) client() (*client.V2, error) {
	key := r.key
	switch {
	case r.keyFile != "":
		b, err := os.ReadFile(r.keyFile)
		if err != nil {
			return nil, fmt.Errorf("reading the API key: %w", err)
		}
		key = strings.TrimSpace(string(b))
	case key == "":
		key = os.Getenv("LATTICEKEEP_API_KEY")
	}
	switch {
	case r.url == "":
		return nil, errors.New("no server: set --url or LATTICEKEEP_URL")
	case key == "":
		return nil, errors.New("no API key: set --api-key-file or LATTICEKEEP_API_KEY")
	}
	c, err := client.New(r.url, client.WithAPIKey(key))
	if err != nil {
		return nil, err
	}
	return c.V2, nil
}

// act returns a command that makes one call and prints its answer: as JSON, or
// as show does.
func act[T any](r *remote, use, short string, args cobra.PositionalArgs,
	call func(context.Context, *client.V2, []string) (T, error), show func(out, note io.Writer, answer T)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: args,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := r.client()
			if err != nil {
				return err
			}
			answer, err := call(cmd.Context(), c, args)
			if err != nil {
				return err
			}
			if r.json {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(answer)
			}
			show(cmd.OutOrStdout(), cmd.ErrOrStderr(), answer)
			return nil
		},
	}
}

// done is the answer of a command whose call has none of its own.
type done struct {
	ID   string `json:"id"`
	What string `json:"done"`
}

func showDone(out, _ io.Writer, d done) { fmt.Fprintln(out, d.ID, d.What) }

func group(use, short, long string, r *remote, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long}
	r.register(cmd)
	cmd.AddCommand(commands...)
	return cmd
}

// table writes rows of cells under a heading.
func table(out io.Writer, heading string, rows [][]string) {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, strings.ReplaceAll(heading, " ", "\t"))
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	w.Flush()
}

func day(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return t.UTC().Format(time.DateOnly)
}

func newTenantCommand() *cobra.Command {
	var r remote
	one := func(out, _ io.Writer, a *v2.TenantAnswer) { showTenants(out, a.Tenant) }
	var v1Rate, v2Rate int
	limit := act(&r, "limit TENANT_ID", "Set a tenant's requests a minute", cobra.ExactArgs(1),
		func(ctx context.Context, c *client.V2, args []string) (*v2.TenantAnswer, error) {
			var body v2.TenantLimits
			if v1Rate > 0 {
				body.V1 = &v1Rate
			}
			if v2Rate > 0 {
				body.V2 = &v2Rate
			}
			return c.SetTenantLimits(ctx, args[0], body)
		}, one)
	limit.Flags().IntVar(&v1Rate, "v1", 0, "of version 1 (default that of the deployment)")
	limit.Flags().IntVar(&v2Rate, "v2", 0, "of version 2 (default that of the deployment)")
	return group("tenant", "Administer the tenants of a running server", "Administer the tenants of a running server, with a system key.", &r,
		act(&r, "list", "List all tenants", cobra.NoArgs,
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
		act(&r, "create NAME", "Make a tenant, active at once", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (*v2.TenantAnswer, error) {
				return c.CreateTenant(ctx, v2.CreateTenantRequest{Name: args[0]})
			}, one),
		act(&r, "activate TENANT_ID", "End a tenant's trial: it stays writable", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (*v2.TenantAnswer, error) {
				return c.ActivateTenant(ctx, args[0])
			}, one),
		limit)
}

func showTenants(out io.Writer, tenants ...v2.Tenant) {
	var rows [][]string
	for _, t := range tenants {
		rows = append(rows, []string{t.TenantId, string(t.Status), day(&t.CreatedAt), day(t.TrialEndsAt), printable(t.Name)})
	}
	table(out, "TENANT_ID STATUS CREATED TRIAL_ENDS NAME", rows)
}

// printable keeps what a user chose as a name from steering the terminal.
func printable(s string) string { return strings.Trim(fmt.Sprintf("%+q", s), `"`) }

func newAPIKeyCommand() *cobra.Command {
	var r remote
	var tenant string
	var scopes []string
	var days int
	create := act(&r, "create NAME", "Make an API key and print it, this once", cobra.ExactArgs(1),
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
				expires = "until " + day(a.ExpiresAt)
			}
			fmt.Fprintf(note, "%s, %s; it is not shown again\n", a.KeyId, expires)
			fmt.Fprintln(out, a.ApiKey)
		})
	create.Flags().StringSliceVar(&scopes, "scope", nil, "what the key may do, as vault:read; may be repeated")
	create.Flags().StringVar(&tenant, "tenant", "", "tenant of the key, with a system key (default that of the calling key)")
	create.Flags().IntVar(&days, "days", 0, "lifetime in days (default without end)")
	_ = create.MarkFlagRequired("scope")
	return group("apikey", "Administer API keys on a running server",
		"Administer the API keys of the calling key's tenant; with a system key also make the first key of another tenant.", &r,
		create,
		act(&r, "list", "List the tenant's API keys, without the keys themselves", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.APIKeyList, error) { return c.ListAPIKeys(ctx) },
			func(out, _ io.Writer, a *v2.APIKeyList) {
				var rows [][]string
				for _, k := range a.ApiKeys {
					var held []string
					for _, s := range k.Scopes {
						held = append(held, string(s))
					}
					rows = append(rows, []string{k.KeyId, string(k.Status), day(&k.CreatedAt), day(k.ExpiresAt), day(k.LastUsedAt), strings.Join(held, ","), printable(k.Name)})
				}
				table(out, "KEY_ID STATUS CREATED EXPIRES LAST_USED SCOPES NAME", rows)
			}),
		act(&r, "revoke KEY_ID", "Revoke an API key at once", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				return done{args[0], "revoked"}, c.RevokeAPIKey(ctx, args[0])
			}, showDone))
}

func newUserCommand() *cobra.Command {
	var r remote
	var role string
	invite := act(&r, "invite EMAIL", "Invite somebody into the tenant, by mail", cobra.ExactArgs(1),
		func(ctx context.Context, c *client.V2, args []string) (*v2.InvitationAnswer, error) {
			return c.InviteMember(ctx, v2.InviteRequest{Email: args[0], Role: v2.Role(role)})
		}, func(out, _ io.Writer, a *v2.InvitationAnswer) {
			fmt.Fprintln(out, a.InvitationId, "sent, expires", day(&a.ExpiresAt))
		})
	invite.Flags().StringVar(&role, "role", "member", "owner, admin, member or auditor")
	return group("user", "Administer the members of a tenant on a running server",
		"Administer the members of the calling key's tenant. The key needs the scope account:admin.", &r,
		invite,
		act(&r, "list", "List members and invitations", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.MemberList, error) { return c.ListMembers(ctx) },
			func(out, _ io.Writer, a *v2.MemberList) {
				var rows [][]string
				for _, u := range a.Members {
					rows = append(rows, []string{u.UserId, string(u.Role), day(&u.CreatedAt), printable(string(u.Email))})
				}
				for _, i := range a.Invitations {
					rows = append(rows, []string{i.InvitationId, string(i.Role), "invited", printable(string(i.Email))})
				}
				table(out, "ID ROLE SINCE EMAIL", rows)
			}),
		act(&r, "role USER_ID ROLE", "Give a member another role", cobra.ExactArgs(2),
			func(ctx context.Context, c *client.V2, args []string) (*v2.UserAnswer, error) {
				return c.ChangeMember(ctx, args[0], v2.RoleRequest{Role: v2.Role(args[1])})
			}, func(out, _ io.Writer, a *v2.UserAnswer) { fmt.Fprintln(out, a.User.UserId, "is", a.User.Role) }),
		act(&r, "remove USER_ID", "Remove a member and end its sessions", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				return done{args[0], "removed"}, c.RemoveMember(ctx, args[0])
			}, showDone),
		act(&r, "revoke-invitation INVITATION_ID", "Make an invitation worthless", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				return done{args[0], "revoked"}, c.RevokeInvitation(ctx, args[0])
			}, showDone))
}
