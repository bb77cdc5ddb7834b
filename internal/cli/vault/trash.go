package vault

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// graceDays is for how many days the server can renew a credential that has expired.
const graceDays = 28

func isTrashed(c *v2.Credential) bool { return c.Trashed != nil && *c.Trashed }

func newRemoveCommand() *cobra.Command {
	var r command.Server
	var purge, sure bool
	cmd := &cobra.Command{
		Use:   "rm NAME",
		Short: "Put a credential in the trash, or delete it for good",
		Long: `Put a credential in the trash. Nobody can read it there, and its name is free. For 28
days latticekeep renew brings it back; after that the server erases it. --purge deletes
it at once with all its values, also out of the trash, and nothing but a backup brings
that back: in a terminal you type its name to confirm; elsewhere --yes is needed. The
API key needs the scopes vault:read and vault:write.`,
		Example: `  latticekeep rm shop/db
  latticekeep rm shop/db --purge`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			if !purge {
				return trash(cmd, c, args[0])
			}
			found, err := mustFindAny(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			unchanged, err := ifUnchanged(cmd.Context(), c, found)
			if err != nil {
				return err
			}
			if !sure {
				name := command.Printable(args[0])
				if err := command.Confirm(cmd, "Type "+name+" to delete it with all its values for good", args[0], name); err != nil {
					return err
				}
			}
			if err := c.DeleteCredential(cmd.Context(), found.CredentialId, unchanged); err != nil {
				return fmt.Errorf("deleting %s: %w", command.Printable(args[0]), orChanged(err))
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s (%s) deleted\n", command.Printable(found.Name), found.CredentialId)
			return err
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	cmd.Flags().BoolVar(&purge, "purge", false, "delete for good")
	cmd.Flags().BoolVar(&sure, "yes", false, "with --purge: do not ask")
	return cmd
}

func trash(cmd *cobra.Command, c *client.V2, name string) error {
	found, err := mustFind(cmd.Context(), c, name)
	if err != nil {
		return err
	}
	unchanged, err := ifUnchanged(cmd.Context(), c, found)
	if err != nil {
		return err
	}
	made, err := c.TrashCredential(cmd.Context(), found.CredentialId, unchanged)
	if err != nil {
		return fmt.Errorf("putting %s in the trash: %w", command.Printable(name), orChanged(err))
	}
	until := made.ExpiresAt.AddDate(0, 0, graceDays)
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s is in the trash: until %s, latticekeep renew %s brings it back\n", command.Printable(made.Name), command.Day(&until), made.CredentialId)
	return err
}

// ifUnchanged makes a call remove a credential only as it is now: what somebody else stores until then stays.
func ifUnchanged(ctx context.Context, c *client.V2, found *v2.Credential) (client.CallOption, error) {
	var tag string
	if _, err := c.GetCredentialMetadata(ctx, found.CredentialId, client.EntityTag(&tag)); err != nil {
		return nil, fmt.Errorf("looking for %s: %w", command.Printable(found.Name), err)
	}
	return client.IfMatch(tag), nil
}

// orChanged says what the server's answer to [ifUnchanged] means.
func orChanged(err error) error {
	if errors.Is(err, client.ErrPreconditionFailed) {
		return fmt.Errorf("somebody else has changed it meanwhile, so it stays: look at it, and run the command again: %w", err)
	}
	return err
}

func newRenewCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var ttlDays *int
	var lasting bool
	cmd := &cobra.Command{
		Use:   "renew NAME",
		Short: "Start the lifetime of a credential again, also out of the trash",
		Long: `Start the lifetime of a credential again, with the same values under new keys, as its
next version. This also brings back what latticekeep rm has put in the trash, and what
expired in the last 28 days; latticekeep ls --trash lists the trash. A name that another
credential has got meanwhile is refused. Of several in the trash under one name the one
that was put there last comes back; an id names another one. The API key needs the
scopes vault:read and vault:write.`,
		Example: `  latticekeep renew shop/db
  latticekeep renew shop/db --ttl-days 365`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			found, err := findNewest(cmd.Context(), c, args[0])
			if err := orNone(found, args[0], err); err != nil {
				return err
			}
			answer, err := c.RenewCredential(cmd.Context(), found.CredentialId, v2.RenewRequest{TtlDays: ttlDays, NeverExpires: never(lasting)})
			if err != nil {
				return fmt.Errorf("renewing %s: %w", command.Printable(args[0]), err)
			}
			made := credentialOf(answer)
			return f.Print(cmd.OutOrStdout(), made, func(out io.Writer) { printCredentials(out, made) })
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	command.Int(cmd, &ttlDays, "ttl-days", 1, 3650, "lifetime in days from now, 1 to 3650 (default as many as the credential had)")
	neverExpires(cmd, &lasting)
	return cmd
}

// mustFind is mustFindAny, with an error for a credential that has expired.
func mustFind(ctx context.Context, c *client.V2, name string) (*v2.Credential, error) {
	found, err := mustFindAny(ctx, c, name)
	if err != nil || found.Status == v2.CredentialStatusActive {
		return found, err
	}
	what := "has expired"
	if isTrashed(found) {
		what = "is in the trash"
	}
	err = fmt.Errorf("%s %s: latticekeep renew %s brings it back, and latticekeep rm --purge deletes it", command.Printable(found.Name), what, found.CredentialId)
	return nil, &command.StatusError{Status: command.StatusRefused, Err: err}
}
