package admin

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// subjectOf returns the subject of a binding. A user may be named by the e-mail address, and a group by its
// name.
func subjectOf(ctx context.Context, c *client.V2, name string) (string, error) {
	if isSubject(name) {
		return name, nil
	}
	if strings.Contains(name, "@") {
		return userOf(ctx, c, name)
	}
	return groupID(ctx, c, name)
}

// isSubject reports whether a name is a subject as the server has it.
func isSubject(name string) bool {
	return slices.ContainsFunc([]string{"usr_", "grp_", "key_", "system:serviceaccount:"}, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// userOf returns the id of a user who may be named by the e-mail address. It returns every other name as it
// is.
func userOf(ctx context.Context, c *client.V2, name string) (string, error) {
	if isSubject(name) || !strings.Contains(name, "@") {
		return name, nil
	}
	members, err := c.ListMembers(ctx)
	if err != nil {
		return "", err
	}
	for _, m := range members.Members {
		if strings.EqualFold(string(m.Email), name) {
			return m.UserId, nil
		}
	}
	return "", &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("no member has the address %s: latticekeep user list lists them", command.Printable(name))}
}

// groupID returns the id of a group that is named by its name or its id.
func groupID(ctx context.Context, c *client.V2, name string) (string, error) {
	all, err := c.ListGroups(ctx)
	if err != nil {
		return "", err
	}
	for _, g := range all.Groups {
		if g.GroupId == name || g.Name == name {
			return g.GroupId, nil
		}
	}
	return "", &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("there is no group %s: latticekeep group list lists them", command.Printable(name))}
}
