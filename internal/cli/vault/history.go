package vault

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// maxVersion is the highest number that JSON carries.
const maxVersion = 1<<53 - 1

func newHistoryCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var diff *int64
	cmd := &cobra.Command{
		Use:   "history NAME",
		Short: "List the versions of a credential, without their values",
		Long: `List what a credential went through, newest first: when each version was encrypted,
why, and whether its values are still there. With --diff print instead which keys have
another value in the current version than in that one: + is new, - is gone, ~ is
another value. Neither prints a value. The API key needs the scope vault:read.`,
		Example: `  latticekeep history shop/db
  latticekeep history shop/db --diff 3`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			if diff != nil {
				keys, err := compare(cmd.Context(), c, args[0], *diff)
				if err != nil {
					return err
				}
				return f.Print(cmd.OutOrStdout(), keys, func(out io.Writer) { printDifference(out, keys) })
			}
			found, err := mustFind(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			answer, err := c.ListCredentialVersions(cmd.Context(), found.CredentialId)
			if err != nil {
				return fmt.Errorf("listing the versions of %s: %w", command.Printable(args[0]), err)
			}
			return f.Print(cmd.OutOrStdout(), answer.Versions, func(out io.Writer) { printVersions(out, answer.Versions) })
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	command.Int(cmd, &diff, "diff", 1, maxVersion, "compare the keys of the current version with those of this one, which must be kept")
	return cmd
}

func printVersions(out io.Writer, versions []v2.CredentialVersion) {
	var rows [][]string
	for _, v := range versions {
		values := "erased"
		switch {
		case v.Current:
			values = "current"
		case v.Readable:
			values = "kept"
		}
		rows = append(rows, []string{strconv.FormatInt(v.Version, 10), string(v.Change), v.SealedAt.UTC().Format(time.DateTime), end(v.ExpiresAt), values})
	}
	command.Table(out, "VERSION CHANGE SEALED EXPIRES VALUES", rows)
}

// difference has the keys in which the current version differs from an earlier one.
type difference struct {
	Added   []string `json:"added"`
	Removed []string `json:"removed"`
	Changed []string `json:"changed"`
}

func compare(ctx context.Context, c *client.V2, name string, version int64) (difference, error) {
	d := difference{[]string{}, []string{}, []string{}}
	former, err := openVersion(ctx, c, name, version)
	if err != nil {
		return d, err
	}
	defer former.values.zero()
	current, err := open(ctx, c, former.id)
	if err != nil {
		return d, err
	}
	defer current.values.zero()
	for _, key := range slices.Sorted(maps.Keys(current.values)) {
		if value, ok := former.values[key]; !ok {
			d.Added = append(d.Added, key)
		} else if !bytes.Equal(value, current.values[key]) {
			d.Changed = append(d.Changed, key)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(former.values)) {
		if _, ok := current.values[key]; !ok {
			d.Removed = append(d.Removed, key)
		}
	}
	return d, nil
}

func printDifference(out io.Writer, d difference) {
	for _, part := range []struct {
		sign string
		keys []string
	}{{"+", d.Added}, {"-", d.Removed}, {"~", d.Changed}} {
		for _, key := range part.keys {
			fmt.Fprintln(out, part.sign, command.Printable(key))
		}
	}
}

func newUndoCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var version *int64
	cmd := &cobra.Command{
		Use:   "undo NAME",
		Short: "Bring earlier values of a credential back",
		Long: `Store the values of an earlier version as the next version: those of --version, or
of the newest one that is kept. When somebody else changes the credential meanwhile,
nothing is stored. Earlier versions are kept where latticekeep keep says so. The API key
needs the scopes vault:read and vault:write.`,
		Example: `  latticekeep undo shop/db
  latticekeep undo shop/db --version 3`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			answer, err := undo(cmd.Context(), c, args[0], version)
			if err != nil {
				return err
			}
			made := credentialOf(answer)
			return f.Print(cmd.OutOrStdout(), made, func(out io.Writer) { printCredentials(out, made) })
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	command.Int(cmd, &version, "version", 1, maxVersion, "version whose values come back (default the newest earlier one that is kept)")
	return cmd
}

func undo(ctx context.Context, c *client.V2, name string, version *int64) (*v2.CredentialAnswer, error) {
	found, err := mustFind(ctx, c, name)
	if err != nil {
		return nil, err
	}
	var tag string
	if _, err := c.GetCredentialMetadata(ctx, found.CredentialId, client.EntityTag(&tag)); err != nil {
		return nil, fmt.Errorf("looking for %s: %w", command.Printable(name), err)
	}
	if version == nil {
		all, err := c.ListCredentialVersions(ctx, found.CredentialId)
		if err != nil {
			return nil, fmt.Errorf("listing the versions of %s: %w", command.Printable(name), err)
		}
		i := slices.IndexFunc(all.Versions, func(v v2.CredentialVersion) bool { return v.Readable && !v.Current })
		if i < 0 {
			return nil, &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("no earlier version of %s is kept: latticekeep keep says of which paths some are, from their next change on", command.Printable(name))}
		}
		version = &all.Versions[i].Version
	}
	answer, err := c.UndoCredential(ctx, found.CredentialId, v2.UndoRequest{Version: *version}, client.IfMatch(tag))
	if err != nil {
		return nil, fmt.Errorf("bringing version %d of %s back: %w", *version, command.Printable(name), err)
	}
	return answer, nil
}

func newKeepCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var remove bool
	cmd := &cobra.Command{
		Use:   "keep [PATH [N]]",
		Short: "Say how many earlier versions of credentials are kept",
		Long: `Have the server keep N earlier versions, 0 to 20, of the credentials on the paths
that the glob PATH matches, from their next change on. Without a rule none is kept: a
new value erases the earlier one. Of the rules that match a name the most specific one
counts. A lower number, and --remove, erase at once what is no longer kept. Without N
print the rule of PATH, and without PATH all rules. The API key needs the scope
account:admin.`,
		Example: `  latticekeep keep 'shop/**' 5
  latticekeep keep 'shop/**'
  latticekeep keep --remove 'shop/**'`,
		Args: cobra.MaximumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			if remove && len(args) != 1 {
				return command.UsageError("--remove takes PATH and no N")
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			answer, err := keep(cmd.Context(), c, args, remove)
			if err != nil {
				return err
			}
			return f.Print(cmd.OutOrStdout(), answer.Rules, func(out io.Writer) {
				var rows [][]string
				for _, rule := range answer.Rules {
					rows = append(rows, []string{command.Printable(rule.Path), strconv.Itoa(rule.VersionsKept)})
				}
				command.Table(out, "PATH KEPT", rows)
			})
		},
	}
	r.RegisterConnection(cmd)
	f.Register(cmd)
	cmd.Flags().BoolVar(&remove, "remove", false, "remove the rule of PATH")
	return cmd
}

// keep changes or removes the rule of a path and returns all, or returns that of a path, or all.
func keep(ctx context.Context, c *client.V2, args []string, remove bool) (*v2.HistoryRules, error) {
	switch {
	case remove:
		return c.DeleteHistoryRule(ctx, &v2.DeleteHistoryRuleParams{Path: args[0]})
	case len(args) < 2:
		all, err := c.ListHistoryRules(ctx)
		if err != nil || len(args) == 0 {
			return all, err
		}
		all.Rules = slices.DeleteFunc(all.Rules, func(r v2.HistoryRule) bool { return r.Path != args[0] })
		if len(all.Rules) == 0 {
			err = &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("there is no rule of the path %s: latticekeep keep prints all", command.Printable(args[0]))}
		}
		return all, err
	}
	n, err := strconv.Atoi(args[1])
	if err != nil {
		return nil, command.UsageError(fmt.Sprintf("N is %q: give a number from 0 to 20", args[1]))
	}
	return c.PutHistoryRule(ctx, v2.HistoryRuleRequest{Path: args[0], VersionsKept: n})
}
