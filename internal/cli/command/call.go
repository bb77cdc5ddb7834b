// Package command provides the parts that several commands share: flags that name a server, a store
// or a log, and commands that make one call and print its answer.
package command

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
)

// NewCall returns a command that makes one call and prints its answer, as JSON or through show.
func NewCall[T any](r *Server, use, short string, args cobra.PositionalArgs,
	call func(context.Context, *client.V2, []string) (T, error), show func(out, note io.Writer, answer T)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Args: args,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			answer, err := call(cmd.Context(), c, args)
			if err != nil {
				return err
			}
			if r.JSON {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				return e.Encode(answer)
			}
			show(cmd.OutOrStdout(), cmd.ErrOrStderr(), answer)
			return nil
		},
	}
}

func NewGroup(use, short, long string, r *Server, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long}
	r.Register(cmd)
	cmd.AddCommand(commands...)
	return cmd
}

// Table writes rows of cells under a heading.
func Table(out io.Writer, heading string, rows [][]string) {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, strings.ReplaceAll(heading, " ", "\t"))
	for _, row := range rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	w.Flush()
}

func Day(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return t.UTC().Format(time.DateOnly)
}

// Printable escapes what is not printable, such as control characters and those that change the direction
// of text, and quotes and backslashes: a name chosen by a user cannot control the terminal, and no two
// names look alike because of what is not seen. Letters of all scripts stay.
func Printable(s string) string {
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

func PrintJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
