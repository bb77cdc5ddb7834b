package vault

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// isID tells ids from names.
var isID = regexp.MustCompile(`^cred_[a-z2-7]{26}$`)

// pageSize is what the server returns at most.
const pageSize = 100

// each calls use with the credentials that p selects, page by page.
func each(ctx context.Context, c *client.V2, p v2.ListCredentialsParams, use func(v2.Credential)) error {
	p.Limit = new(pageSize)
	for {
		page, err := c.ListCredentials(ctx, &p)
		if err != nil {
			return fmt.Errorf("listing credentials: %w", err)
		}
		for _, credential := range page.Credentials {
			use(credential)
		}
		if page.NextCursor == nil {
			return nil
		}
		p.Cursor = page.NextCursor
	}
}

// named returns the credentials of a name or an id without reading their values, also those in the trash
// and expired ones.
func named(ctx context.Context, c *client.V2, name string) (found []v2.Credential, err error) {
	if isID.MatchString(name) {
		m, err := c.GetCredentialMetadata(ctx, name)
		if err != nil {
			return nil, fmt.Errorf("looking for %s: %w", name, err)
		}
		return []v2.Credential{credentialOf(m)}, nil
	}
	err = each(ctx, c, v2.ListCredentialsParams{Prefix: &name}, func(credential v2.Credential) {
		if credential.Name == name {
			found = append(found, credential)
		}
	})
	return found, err
}

// find returns the credential of a name or an id; nil if there is none of that name. Those that are not
// active count only when no other one has the name.
func find(ctx context.Context, c *client.V2, name string) (*v2.Credential, error) {
	found, err := named(ctx, c, name)
	if err != nil {
		return nil, err
	}
	if active := activeOf(found); len(active) > 0 {
		found = active
	}
	return only(found, name)
}

// findNewest is find, but of several that are not active it returns the one that ended last. Their name is
// free, so the newest of them is meant.
func findNewest(ctx context.Context, c *client.V2, name string) (*v2.Credential, error) {
	found, err := named(ctx, c, name)
	if err != nil || len(found) == 0 {
		return nil, err
	}
	if active := activeOf(found); len(active) > 0 {
		return only(active, name)
	}
	return new(slices.MaxFunc(found, func(a, b v2.Credential) int {
		return cmp.Or(a.ExpiresAt.Compare(b.ExpiresAt), a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.CredentialId, b.CredentialId))
	})), nil
}

func activeOf(found []v2.Credential) []v2.Credential {
	return slices.DeleteFunc(slices.Clone(found), func(c v2.Credential) bool { return c.Status != v2.CredentialStatusActive })
}

// only returns the one credential that was found, nil if there is none, and an error for several. Who typed
// the name may not know of those, so it is no mistake in the command line.
func only(found []v2.Credential, name string) (*v2.Credential, error) {
	switch len(found) {
	case 0:
		return nil, nil
	case 1:
		return &found[0], nil
	}
	var ids []string
	for _, credential := range found {
		says := "expires"
		switch {
		case isTrashed(&credential):
			says = "in the trash since"
		case credential.Status != v2.CredentialStatusActive:
			says = "expired"
		}
		ids = append(ids, fmt.Sprintf("%s (%s %s)", credential.CredentialId, says, credential.ExpiresAt.UTC().Format(time.DateTime)))
	}
	err := fmt.Errorf("%d credentials have the name %s: give the id of one of them, %s", len(found), command.Printable(name), strings.Join(ids, ", "))
	return nil, &command.StatusError{Status: command.StatusRefused, Err: err}
}

// mustFindAny is find, with an error when there is none.
func mustFindAny(ctx context.Context, c *client.V2, name string) (*v2.Credential, error) {
	found, err := find(ctx, c, name)
	return found, orNone(found, name, err)
}

// orNone returns err, or that there is no credential of a name.
func orNone(found *v2.Credential, name string, err error) error {
	if err == nil && found == nil {
		return &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("there is no credential %s that this API key may see: latticekeep ls lists them", command.Printable(name))}
	}
	return err
}

func credentialOf(a *v2.CredentialAnswer) v2.Credential {
	return v2.Credential{
		CredentialId: a.CredentialId, Name: a.Name, CredentialType: a.CredentialType, Version: a.Version, Status: v2.CredentialStatus(a.Status), Trashed: a.Trashed, Owned: a.Owned,
		CreatedAt: a.CreatedAt, SealedAt: a.SealedAt, ExpiresAt: a.ExpiresAt, NeverExpires: a.NeverExpires,
		Description: a.Description, Contact: a.Contact, Tags: a.Tags, LastReadAt: a.LastReadAt,
	}
}

// end returns the day on which a lifetime ends.
func end(at time.Time) string {
	if at.Year() == 9999 {
		return "never"
	}
	return command.Day(&at)
}

func printCredentials(out io.Writer, all ...v2.Credential) {
	printDated(out, "UPDATED", func(c v2.Credential) string { return command.Day(&c.SealedAt) }, all)
}

// printReads prints credentials with when they were read last in place of when they were updated.
func printReads(out io.Writer, all []v2.Credential) {
	printDated(out, "READ", func(c v2.Credential) string {
		if c.LastReadAt == nil {
			return "never"
		}
		return c.LastReadAt.UTC().Format("2006-01-02 15h")
	}, all)
}

func printDated(out io.Writer, heading string, date func(v2.Credential) string, all []v2.Credential) {
	var rows [][]string
	for _, c := range all {
		status := string(c.Status)
		if isTrashed(&c) {
			status = "trash"
		}
		rows = append(rows, []string{
			command.Printable(c.Name), c.CredentialType, strconv.FormatInt(c.Version, 10), status, date(c), end(c.ExpiresAt), c.CredentialId,
		})
	}
	command.Table(out, "NAME TYPE VERSION STATUS "+heading+" EXPIRES ID", rows)
}
