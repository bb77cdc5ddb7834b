package admin

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewGroupCommand() *cobra.Command {
	var r command.Server
	return command.NewGroup("group", "Administer groups of users and ServiceAccounts on a running server",
		`Administer groups, to which latticekeep access bind gives policies. A member who is
limited to some paths reaches those of the group, too. A GROUP is named by its name or
its id; a MEMBER by the e-mail address or the id of a user, or
system:serviceaccount:<namespace>:<name>. The API key needs the scope account:admin.`, &r,
		command.NewCall(&r, "list", "List groups, with their policies", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.GroupList, error) { return c.ListGroups(ctx) },
			func(out, _ io.Writer, a *v2.GroupList) {
				var rows [][]string
				for _, g := range a.Groups {
					rows = append(rows, []string{command.Printable(g.Name), g.GroupId, strconv.Itoa(len(g.Members)), strings.Join(g.Policies, ", ")})
				}
				command.Table(out, "GROUP ID MEMBERS POLICIES", rows)
			}),
		command.NewCall(&r, "members GROUP", "List the members of a group", cobra.ExactArgs(1), membersOf, showGroupMembers),
		command.NewCall(&r, "create NAME", "Make a group without members", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (*v2.GroupAnswer, error) {
				return c.CreateGroup(ctx, v2.GroupRequest{Name: args[0]})
			}, showGroup),
		command.NewCall(&r, "rename GROUP NAME", "Give a group another name", cobra.ExactArgs(2),
			func(ctx context.Context, c *client.V2, args []string) (*v2.GroupAnswer, error) {
				id, err := groupID(ctx, c, args[0])
				if err != nil {
					return nil, err
				}
				return c.RenameGroup(ctx, id, v2.GroupRequest{Name: args[1]})
			}, showGroup),
		withDryRun(command.NewCall(&r, "delete GROUP", "Delete a group: its members lose what only its policies gave them", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				id, err := groupID(ctx, c, args[0])
				if err != nil {
					return done{}, err
				}
				return done{id, "deleted"}, c.DeleteGroup(ctx, id)
			}, showDone), &r, func(ctx context.Context, c *client.V2, args []string) (*v2.AccessChange, error) {
			id, err := groupID(ctx, c, args[0])
			return &v2.AccessChange{Change: v2.AccessChangeChangeDeleteGroup, GroupId: &id}, err
		}),
		newMembershipCommand(&r, "add GROUP MEMBER", "Make somebody a member of a group", (*client.V2).AddGroupMember),
		withDryRun(newMembershipCommand(&r, "remove GROUP MEMBER", "Take somebody out of a group", (*client.V2).RemoveGroupMember), &r,
			func(ctx context.Context, c *client.V2, args []string) (*v2.AccessChange, error) {
				group, member, err := membershipOf(ctx, c, args)
				return &v2.AccessChange{Change: v2.AccessChangeChangeRemoveMember, GroupId: &group, Subject: &member}, err
			}))
}

func newMembershipCommand(r *command.Server, use, short string, change func(*client.V2, context.Context, string, string) (*v2.GroupAnswer, error)) *cobra.Command {
	return command.NewCall(r, use, short, cobra.ExactArgs(2),
		func(ctx context.Context, c *client.V2, args []string) (*v2.GroupAnswer, error) {
			group, member, err := membershipOf(ctx, c, args)
			if err != nil {
				return nil, err
			}
			return change(c, ctx, group, member)
		}, showGroup)
}

// membershipOf returns the group and the member that arguments name.
func membershipOf(ctx context.Context, c *client.V2, args []string) (group, member string, err error) {
	if group, err = groupID(ctx, c, args[0]); err != nil {
		return "", "", err
	}
	member, err = userOf(ctx, c, args[1])
	return group, member, err
}

func showGroup(out, _ io.Writer, a *v2.GroupAnswer) {
	members := "members"
	if len(a.Group.Members) == 1 {
		members = "member"
	}
	fmt.Fprintln(out, a.Group.GroupId, command.Printable(a.Group.Name), "has", len(a.Group.Members), members)
}

// groupMembers is what members prints.
type groupMembers struct {
	Group   v2.Group `json:"group"`
	Members []member `json:"members"`
}

type member struct {
	ID    string `json:"id"`
	Email string `json:"email,omitempty"` // only a user has one
}

func membersOf(ctx context.Context, c *client.V2, args []string) (*groupMembers, error) {
	id, err := groupID(ctx, c, args[0])
	if err != nil {
		return nil, err
	}
	a, err := c.GetGroup(ctx, id)
	if err != nil {
		return nil, err
	}
	users, err := c.ListMembers(ctx)
	if err != nil {
		return nil, err
	}
	all := &groupMembers{Group: a.Group, Members: []member{}}
	for _, id := range a.Group.Members {
		m := member{ID: id}
		if i := slices.IndexFunc(users.Members, func(u v2.User) bool { return u.UserId == id }); i >= 0 {
			m.Email = string(users.Members[i].Email)
		}
		all.Members = append(all.Members, m)
	}
	return all, nil
}

func showGroupMembers(out, _ io.Writer, a *groupMembers) {
	var rows [][]string
	for _, m := range a.Members {
		rows = append(rows, []string{command.Printable(m.ID), command.Printable(m.Email)})
	}
	command.Table(out, "MEMBER EMAIL", rows)
}
