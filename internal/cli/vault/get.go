package vault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/delivery"
	"github.com/latticekeep/latticekeep/internal/dotenv"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// values are those of a credential, by key.
type values map[string]secret.Bytes

func (v values) zero() { secret.ZeroAll(v) }

// strings returns the values for a request or an answer.
func (v values) strings() map[string]string {
	out := make(map[string]string, len(v))
	for key, value := range v {
		out[key] = string(value)
	}
	return out
}

// opened is a credential with its values.
type opened struct {
	id     string
	values values
	binary []string // keys of values that are no text, sorted
}

// open reads a credential by its name or its id.
func open(ctx context.Context, c *client.V2, name string, options ...client.CallOption) (*opened, error) {
	var answer *v2.UnsealedCredential
	var err error
	if isID.MatchString(name) {
		answer, err = c.UnsealCredential(ctx, name, options...)
	} else {
		answer, err = c.UnsealCredentialByName(ctx, name, options...)
	}
	if errors.Is(err, client.ErrForbidden) {
		err = fmt.Errorf("there is no such credential, or it has expired, or this API key may not read it: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", command.Printable(name), err)
	}
	return openedOf(answer), nil
}

// openVersion reads one version of a credential.
func openVersion(ctx context.Context, c *client.V2, name string, version int64) (*opened, error) {
	found, err := mustFind(ctx, c, name)
	if err != nil {
		return nil, err
	}
	answer, err := c.UnsealCredentialVersion(ctx, found.CredentialId, version)
	if errors.Is(err, client.ErrForbidden) {
		err = fmt.Errorf("it is not kept, or this API key may not read it; latticekeep history %s says which are: %w", command.Printable(name), err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading version %d of %s: %w", version, command.Printable(name), err)
	}
	return openedOf(answer), nil
}

func openedOf(answer *v2.UnsealedCredential) *opened {
	o := &opened{answer.CredentialId, delivery.ValuesOf(answer), nil}
	if answer.BinaryValues != nil {
		o.binary = slices.Sorted(maps.Keys(*answer.BinaryValues))
	}
	return o
}

func newGetCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var version *int64
	cmd := &cobra.Command{
		Use:   "get NAME [KEY]",
		Short: "Read a credential",
		Long: `Read a credential by its name or its id. With KEY its value goes to standard output
as it is, byte by byte; only in a terminal a line break follows. Without KEY all
values are printed, as a table, JSON, YAML or the lines of a .env file.

NAME is that of the newest active credential of the name. Each read is an entry of
the audit log. The API key needs the scope vault:read.`,
		Example: `  latticekeep get db password
  (umask 077 && latticekeep get db -o env >.env)`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			if len(args) == 2 && cmd.Flags().Changed("output") {
				return command.UsageError("--output is for all values: leave KEY out, or --output")
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			var o *opened
			if version != nil {
				o, err = openVersion(cmd.Context(), c, args[0], *version)
			} else {
				o, err = open(cmd.Context(), c, args[0])
			}
			if err != nil {
				return err
			}
			defer o.values.zero()
			if len(args) == 2 {
				return printValue(cmd.OutOrStdout(), o, args[0], args[1])
			}
			return o.print(cmd.OutOrStdout(), &f, args[0])
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd, "env")
	command.Int(cmd, &version, "version", 1, maxVersion, "read this version instead of the current one; latticekeep history says which are kept")
	return cmd
}

func printValue(out io.Writer, o *opened, name, key string) error {
	value, ok := o.values[key]
	if !ok {
		return &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("%s has no key %s; it has %s",
			command.Printable(name), command.Printable(key), strings.Join(slices.Sorted(maps.Keys(o.values)), ", "))}
	}
	_, err := out.Write(value)
	if err == nil && command.IsTerminal(out) {
		_, err = io.WriteString(out, "\n")
	}
	return err
}

func (o *opened) checkText(name string) error {
	if len(o.binary) == 0 {
		return nil
	}
	return fmt.Errorf("the value of %s is not text: read it alone with latticekeep get %s %[1]s", o.binary[0], command.Printable(name))
}

// printEnv writes all values as a .env file.
func (o *opened) printEnv(out io.Writer, name string) error {
	if err := o.checkText(name); err != nil {
		return err
	}
	file, err := dotenv.Format(o.values)
	if err != nil {
		return err
	}
	defer file.Zero()
	_, err = out.Write(file)
	return err
}

// print writes all values. Only a table tells of those that are no text.
func (o *opened) print(out io.Writer, f *command.Format, name string) error {
	if f.Is("env") {
		return o.printEnv(out, name)
	}
	if err := o.checkText(name); err != nil && !f.Is("table") {
		return err
	}
	return f.Print(out, o.values.strings(), func(out io.Writer) {
		var rows [][]string
		for _, key := range slices.Sorted(maps.Keys(o.values)) {
			text := string(o.values[key])
			switch {
			case slices.Contains(o.binary, key):
				text = fmt.Sprintf("(%d bytes that are not text)", len(text))
			case strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsGraphic(r) }): // escaped it would be another value
				text = fmt.Sprintf("(%d bytes; latticekeep get %s %s)", len(text), command.Printable(name), key)
			}
			rows = append(rows, []string{key, text})
		}
		command.Table(out, "KEY VALUE", rows)
	})
}
