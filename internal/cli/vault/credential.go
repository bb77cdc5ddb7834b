package vault

import (
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

// find returns the credential of a name or an id without reading its values; nil if there is none of
// that name. Of several with one name it takes the only active one.
func find(ctx context.Context, c *client.V2, name string) (*v2.Credential, error) {
	if isID.MatchString(name) {
		m, err := c.GetCredentialMetadata(ctx, name)
		if err != nil {
			return nil, fmt.Errorf("looking for %s: %w", name, err)
		}
		return new(credentialOf(m)), nil
	}
	var found []v2.Credential
	err := each(ctx, c, v2.ListCredentialsParams{Prefix: &name}, func(credential v2.Credential) {
		if credential.Name == name {
			found = append(found, credential)
		}
	})
	if err != nil {
		return nil, err
	}
	if active := slices.Clone(found); len(found) > 1 {
		active = slices.DeleteFunc(active, func(c v2.Credential) bool { return c.Status != v2.CredentialStatusActive })
		if len(active) == 1 {
			found = active
		}
	}
	switch len(found) {
	case 0:
		return nil, nil
	case 1:
		return &found[0], nil
	}
	var ids []string
	for _, credential := range found {
		ids = append(ids, credential.CredentialId)
	}
	return nil, command.UsageError(fmt.Sprintf("%d credentials have the name %s: give the id of one of them, %s", len(found), command.Printable(name), strings.Join(ids, ", ")))
}

// mustFindAny is find, with an error when there is none.
func mustFindAny(ctx context.Context, c *client.V2, name string) (*v2.Credential, error) {
	found, err := find(ctx, c, name)
	if err == nil && found == nil {
		err = &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("there is no credential %s that this API key may see: latticekeep ls lists them", command.Printable(name))}
	}
	return found, err
}

func credentialOf(a *v2.CredentialAnswer) v2.Credential {
	return v2.Credential{
		CredentialId: a.CredentialId, Name: a.Name, CredentialType: a.CredentialType, Version: a.Version, Status: v2.CredentialStatus(a.Status), Trashed: a.Trashed, Owned: a.Owned,
		CreatedAt: a.CreatedAt, SealedAt: a.SealedAt, ExpiresAt: a.ExpiresAt, NeverExpires: a.NeverExpires,
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
	var rows [][]string
	for _, c := range all {
		status := string(c.Status)
		if isTrashed(&c) {
			status = "trash"
		}
		rows = append(rows, []string{
			command.Printable(c.Name), c.CredentialType, strconv.FormatInt(c.Version, 10), status, command.Day(&c.SealedAt), end(c.ExpiresAt), c.CredentialId,
		})
	}
	command.Table(out, "NAME TYPE VERSION STATUS UPDATED EXPIRES ID", rows)
}
