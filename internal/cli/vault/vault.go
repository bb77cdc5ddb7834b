// Package vault provides the commands that read, write and remove credentials of a running server.
//
// A credential is given by its name or its id. No value is ever an argument, since other users of a
// machine see those; values come from standard input, files and the terminal. What the package holds
// of values it zeroes, except for the strings in requests and answers.
package vault

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// NewCommands returns all commands of the package.
func NewCommands() []*cobra.Command {
	return []*cobra.Command{newGetCommand(), newPutCommand(), newEditCommand(), newListCommand(), newRemoveCommand(), newRenewCommand(), newGenerateCommand(), newReencryptCommand(), newMoveCommand(), newDescribeCommand(), newHistoryCommand(), newUndoCommand(), newKeepCommand(),
		newRunCommand(), newEnvCommand()}
}

func newListCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var trash bool
	var sort, tag string
	cmd := &cobra.Command{
		Use:   "ls [PREFIX]",
		Short: "List credentials, without their values",
		Long: `List the credentials whose name begins with PREFIX, or all of them, in the order that
--sort says: with --trash those in the trash, and else the others. The API key needs
the scope vault:read.`,
		Example: `  latticekeep ls shop/ --sort expires
  latticekeep ls --tag pci
  latticekeep ls --sort unread
  latticekeep ls --trash`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			compare, known := sorts[sort]
			if !known {
				return command.UsageError("--sort must be name, created, updated, expires, last_read or unread")
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			prefix, p := strings.Join(args, ""), v2.ListCredentialsParams{}
			if prefix != "" {
				p.Prefix = &prefix
			}
			if tag != "" {
				p.Tag = &tag
			}
			all := []v2.Credential{} // [] in JSON
			err = each(cmd.Context(), c, p, func(credential v2.Credential) {
				if trash == isTrashed(&credential) {
					all = append(all, credential)
				}
			})
			if err != nil {
				return err
			}
			slices.SortFunc(all, func(a, b v2.Credential) int {
				return cmp.Or(compare(a, b), strings.Compare(a.Name, b.Name), strings.Compare(a.CredentialId, b.CredentialId))
			})
			return f.Print(cmd.OutOrStdout(), all, func(out io.Writer) {
				if sort == "last_read" || sort == "unread" {
					printReads(out, all)
					return
				}
				printCredentials(out, all...)
			})
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	cmd.Flags().BoolVar(&trash, "trash", false, "list what is in the trash")
	cmd.Flags().StringVar(&tag, "tag", "", "list only what has this tag")
	cmd.Flags().StringVar(&sort, "sort", "name", "order: name; created or updated, newest first; expires, soonest first; last_read, newest first, to the hour; unread, unused for the longest time first")
	command.Choices(cmd, "sort", slices.Sorted(maps.Keys(sorts))...)
	return cmd
}

// sorts are the orders of a list. Credentials that are equal in one are in the order of their names.
var sorts = map[string]func(a, b v2.Credential) int{
	"name":    func(_, _ v2.Credential) int { return 0 },
	"created": func(a, b v2.Credential) int { return b.CreatedAt.Compare(a.CreatedAt) },
	"updated": func(a, b v2.Credential) int { return b.SealedAt.Compare(a.SealedAt) },
	"expires": func(a, b v2.Credential) int { return a.ExpiresAt.Compare(b.ExpiresAt) },

	"last_read": func(a, b v2.Credential) int {
		return cmp.Or(b.LastReadAt, &time.Time{}).Compare(*cmp.Or(a.LastReadAt, &time.Time{}))
	},
	"unread": func(a, b v2.Credential) int { // what was never read is unused since it was created
		return cmp.Or(a.LastReadAt, &a.CreatedAt).Compare(*cmp.Or(b.LastReadAt, &b.CreatedAt))
	},
}

func newMoveCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	cmd := &cobra.Command{
		Use:   "mv NAME NEW",
		Short: "Give a credential another name",
		Long: `Give a credential another name, which is a path such as shop/prod/db. Its id, its
values and the time at which it expires stay. A name that another credential has is
refused. The API key needs the scopes vault:read and vault:write.`,
		Example: `  latticekeep mv shop/db shop/prod/db`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			found, err := mustFind(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			answer, err := c.RenameCredential(cmd.Context(), found.CredentialId, v2.RenameRequest{Name: args[1]})
			if err != nil {
				return fmt.Errorf("renaming %s: %w", command.Printable(args[0]), err)
			}
			moved := credentialOf(answer)
			return f.Print(cmd.OutOrStdout(), moved, func(out io.Writer) { printCredentials(out, moved) })
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	return cmd
}

func newReencryptCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	cmd := &cobra.Command{
		Use:   "reencrypt NAME",
		Short: "Encrypt a credential again, with the same values",
		Long: `Have the server encrypt a credential again, under a new key pair, as its next version,
and delete the old ciphertext. The values stay, and their lifetime starts again. In
REST this call is rotate. The API key needs the scopes vault:read and vault:write.`,
		Example: `  latticekeep reencrypt shop/db`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			found, err := mustFind(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			answer, err := c.RotateCredential(cmd.Context(), found.CredentialId)
			if err != nil {
				return fmt.Errorf("encrypting %s again: %w", command.Printable(args[0]), err)
			}
			made := credentialOf(answer)
			return f.Print(cmd.OutOrStdout(), made, func(out io.Writer) { printCredentials(out, made) })
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	return cmd
}
