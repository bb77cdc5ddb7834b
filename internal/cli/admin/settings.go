package admin

import (
	"context"
	"io"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewSettingsCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var may, must []string
	var names *int
	cmd := &cobra.Command{
		Use:   "settings",
		Short: "Print or change what the admins of a tenant decide for all of it",
		Long: `Print the settings of the tenant, and first change those that flags name.

Credentials expire. Only on the paths of --never-expires, which are globs, may somebody
store one that does not. --must-expire takes such a path away: what was stored there
without an end stays so until latticekeep renew --ttl-days gives it one.

Readers of the audit log learn for --names-kept-days what somebody or something was
called that is gone or has another name; 0 erases these names. The API key needs the
scope account:admin.`,
		Example: `  latticekeep settings
  latticekeep settings --never-expires 'ci/**'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			s, err := settings(cmd.Context(), c, may, must, names)
			if err != nil {
				return err
			}
			return f.Print(cmd.OutOrStdout(), s, func(out io.Writer) {
				var rows [][]string
				for _, path := range s.NeverExpiresPaths {
					rows = append(rows, []string{"never-expires", command.Printable(path)})
				}
				rows = append(rows, []string{"names-kept-days", strconv.Itoa(s.NamesKeptDays)})
				command.Table(out, "SETTING VALUE", rows)
			})
		},
	}
	r.RegisterConnection(cmd)
	f.Register(cmd)
	cmd.Flags().StringArrayVar(&may, "never-expires", nil, "glob of paths on which credentials may never expire; may be repeated")
	cmd.Flags().StringArrayVar(&must, "must-expire", nil, "glob that --never-expires had, to take away; may be repeated")
	command.Int(cmd, &names, "names-kept-days", 0, 3650, "days for which past names are kept (400 until somebody changes it)")
	return cmd
}

// settings adds and takes away paths on which credentials may never expire, sets for how many days past
// names are kept, and returns the settings.
func settings(ctx context.Context, c *client.V2, may, must []string, names *int) (*v2.Settings, error) {
	to := v2.SettingsRequest{NamesKeptDays: names}
	if len(may)+len(must) == 0 && names != nil {
		return c.ChangeSettings(ctx, to)
	}
	s, err := c.GetSettings(ctx)
	if err != nil || len(may)+len(must) == 0 {
		return s, err
	}
	for _, path := range must {
		if !slices.Contains(s.NeverExpiresPaths, path) {
			return nil, command.UsageError("--must-expire " + command.Printable(path) + ": no setting has this path; latticekeep settings prints those that there are")
		}
	}
	paths := slices.DeleteFunc(append(s.NeverExpiresPaths, may...), func(path string) bool { return slices.Contains(must, path) })
	to.NeverExpiresPaths = &paths
	return c.ChangeSettings(ctx, to)
}
