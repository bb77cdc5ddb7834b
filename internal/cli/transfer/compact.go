package transfer

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/offline"
)

// NewCompactCommand returns the command that gives free pages of a stopped database back.
func NewCompactCommand() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "compact --data-dir DIR",
		Short: "Give the free pages of a stopped server's database back to the file system",
		Long: `Give the free pages of the embedded database back to the file system. The file keeps
the room of deleted and archived rows and uses it for new ones, so that it does not
shrink by itself. A running server compacts its database itself when half of the file
is free and the volume has room; this command does it at any time, for a server that
is stopped.

It writes all rows to a new file beside the database, compares both row by row, puts
the new file in the place of the old one, and overwrites the old one with zeroes. The
volume must have room for the rows once more: the command says how much it needs, and
changes nothing if that is not free. If it is killed, the database is the old file or
the new one, whole, and the next start removes the other.

PostgreSQL has VACUUM FULL for this.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return command.UsageError("say which database: --data-dir")
			}
			before, after, err := compact(cmd.Context(), dir)
			if after > 0 {
				_, perr := fmt.Fprintf(cmd.OutOrStdout(), "ok: %s has %s MB, and had %s MB\n",
					filepath.Join(dir, offline.DatabaseFile), megabytes(after), megabytes(before))
				err = errors.Join(err, perr)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&dir, "data-dir", "", "data directory of a stopped server")
	return cmd
}

func compact(ctx context.Context, dir string) (before, after int64, err error) {
	db, err := offline.OpenExisting(ctx, offline.Location{URL: offline.BoltScheme + dir})
	if err != nil {
		return 0, 0, err
	}
	embedded := db.(interface {
		Compact(context.Context) (before, after int64, err error)
	})
	before, after, err = embedded.Compact(ctx)
	return before, after, errors.Join(err, db.Close())
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f", float64(n)/1e6) }
