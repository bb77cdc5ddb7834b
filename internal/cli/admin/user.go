package admin

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewUserCommand() *cobra.Command {
	var r command.Server
	var role string
	invite := command.NewCall(&r, "invite EMAIL", "Invite somebody into the tenant, by mail", cobra.ExactArgs(1),
		func(ctx context.Context, c *client.V2, args []string) (*v2.InvitationAnswer, error) {
			return c.InviteMember(ctx, v2.InviteRequest{Email: args[0], Role: v2.Role(role)})
		}, func(out, _ io.Writer, a *v2.InvitationAnswer) {
			fmt.Fprintln(out, a.InvitationId, "sent, expires", command.Day(&a.ExpiresAt))
		})
	invite.Flags().StringVar(&role, "role", "member", "owner, admin, member, limited or auditor")
	command.Choices(invite, "role", authz.Roles()...)
	return command.NewGroup("user", "Administer the members of a tenant on a running server",
		"Administer the members of the calling key's tenant. The key needs the scope account:admin.", &r,
		invite,
		command.NewCall(&r, "list", "List members and invitations", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.MemberList, error) { return c.ListMembers(ctx) },
			func(out, _ io.Writer, a *v2.MemberList) {
				var rows [][]string
				for _, u := range a.Members {
					rows = append(rows, []string{u.UserId, string(u.Role), command.Day(&u.CreatedAt), command.Printable(string(u.Email))})
				}
				for _, i := range a.Invitations {
					rows = append(rows, []string{i.InvitationId, string(i.Role), "invited", command.Printable(string(i.Email))})
				}
				command.Table(out, "ID ROLE SINCE EMAIL", rows)
			}),
		command.NewCall(&r, "role USER_ID ROLE", "Give a member another role", cobra.ExactArgs(2),
			func(ctx context.Context, c *client.V2, args []string) (*v2.UserAnswer, error) {
				return c.ChangeMember(ctx, args[0], v2.RoleRequest{Role: v2.Role(args[1])})
			}, func(out, _ io.Writer, a *v2.UserAnswer) { fmt.Fprintln(out, a.User.UserId, "is", a.User.Role) }),
		command.NewCall(&r, "remove USER_ID", "Remove a member and end its sessions", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				return done{args[0], "removed"}, c.RemoveMember(ctx, args[0])
			}, showDone),
		command.NewCall(&r, "revoke-invitation INVITATION_ID", "Revoke an invitation", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				return done{args[0], "revoked"}, c.RevokeInvitation(ctx, args[0])
			}, showDone))
}
