// Package auditlog provides the commands that verify, export and repair the audit log.
package auditlog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/export"
	"github.com/latticekeep/latticekeep/internal/offline"
)

func NewCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "audit", Short: "Search, verify and export the audit log, and prove what it held", Args: cobra.NoArgs}
	cmd.AddCommand(newAuditVerifyCommand(), newAuditExportCommand(), newAuditCheckpointCommand(), newAuditFingerprintCommand(), newAcceptRollbackCommand(), newReviewCommand(), newSearchCommand(), newTailCommand())
	return cmd
}

func newAuditCheckpointCommand() *cobra.Command {
	var r command.Server
	cmd := command.NewCall(&r, "checkpoint --url URL", "Print the newest checkpoint of a running server, to be kept", cobra.NoArgs,
		func(ctx context.Context, c *client.V2, _ []string) (*v2.CheckpointAnswer, error) {
			newest, err := c.GetCheckpoint(ctx)
			if err != nil {
				return nil, fmt.Errorf("reading the newest checkpoint: %w", err)
			}
			key, err := export.FetchLogKey(ctx, c)
			if err != nil {
				return nil, err
			}
			// A checkpoint that does not verify now is useless later.
			if _, err := audit.ParseCheckpoint([]byte(newest.Checkpoint), key.Public); err != nil {
				return nil, fmt.Errorf("the checkpoint that the server sent: %w", err)
			}
			return newest, nil
		},
		func(out, _ io.Writer, c *v2.CheckpointAnswer) { fmt.Fprint(out, c.Checkpoint) })
	cmd.Long = `Print the newest checkpoint of a running server as it signed it: how long the log
was, and the hash of its last entry. Keep it where the operator of the server
cannot change it; latticekeep audit verify --since FILE proves later that the log
still holds all that it held. The API key needs the scope audit:read.`
	r.Register(cmd)
	return cmd
}

func newAuditFingerprintCommand() *cobra.Command {
	var r command.Server
	var dir, file string
	cmd := &cobra.Command{
		Use:   "fingerprint (--url URL | --data-dir DIR | --file EXPORT)",
		Short: "Print the fingerprint that says whose log it is",
		Long: `Print the fingerprint of an audit log, for --fingerprint of latticekeep audit
verify. It is the SHA3-256 of the chain's id and its public key. Take it from the
operator, once, over a channel that you trust: a fingerprint that comes with a
log says nothing about who wrote it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fingerprint, err := "", error(nil)
			switch {
			case dir != "":
				fingerprint, err = fingerprintOfDir(cmd.Context(), dir)
			case file != "":
				fingerprint, err = fingerprintOfFile(file)
			default:
				var c *client.V2
				var key export.LogKey
				if c, err = r.Client(); err == nil {
					key, err = export.FetchLogKey(cmd.Context(), c)
				}
				if err == nil {
					fingerprint = key.Fingerprint()
				}
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), fingerprint)
			return err
		},
	}
	r.RegisterConnection(cmd)
	cmd.Flags().StringVar(&dir, "data-dir", "", "data directory of a stopped server")
	cmd.Flags().StringVar(&file, "file", "", "export that begins with the first entry of the log or of a tenant")
	cmd.MarkFlagsMutuallyExclusive("url", "profile", "data-dir", "file")
	return cmd
}

func fingerprintOfDir(ctx context.Context, dir string) (string, error) {
	report, err := offline.VerifyDataDir(ctx, dir, verify.Options{To: 1})
	return report.Fingerprint, err
}

func fingerprintOfFile(file string) (string, error) {
	f, done, err := export.OpenInput(nil, file)
	if err != nil {
		return "", err
	}
	defer done()
	first, err := f.First()
	if err != nil {
		return "", err
	}
	key, ok := export.KeyIn(first)
	if !ok {
		return "", errors.New("the export does not begin with an entry that names the log's key: give one from the first entry on")
	}
	return key.Fingerprint(), nil
}

func newAcceptRollbackCommand() *cobra.Command {
	var r command.Server
	var reason string
	cmd := command.NewCall(&r, "accept-rollback --url URL --reason TEXT", "Let a halted log continue after entries were lost", cobra.NoArgs,
		func(ctx context.Context, c *client.V2, _ []string) (*v2.RollbackAnswer, error) {
			if strings.TrimSpace(reason) == "" {
				return nil, command.UsageError("--reason is empty: say why the entries were lost, since the log keeps it")
			}
			answer, err := c.AcceptRollback(ctx, v2.AcceptRollbackRequest{Reason: reason})
			if err != nil {
				return nil, fmt.Errorf("accepting the rollback: %w", err)
			}
			return answer, nil
		},
		func(out, _ io.Writer, a *v2.RollbackAnswer) {
			lost := fmt.Sprintf("entries %d to %d are lost", a.LostFrom, a.LostTo)
			if a.LostTo < a.LostFrom {
				lost = "no sequence is skipped: the entries that are lost had others in their places"
			}
			fmt.Fprintf(out, "%s\nepoch %d begins with entry %d\nhash: %s\n", lost, a.Epoch, a.Sequence, a.Hash)
		})
	cmd.Long = `Let a server continue whose database is older than a checkpoint that is kept
elsewhere: its log is halted until somebody with a key of the scope system:admin
accepts that the entries in between are lost. Restore the newest copy of the database
before you do. The log then continues in a new epoch above the lost sequences, and
its first entry says what was lost and why; nothing makes that undone.

It asks nothing, and prints what was lost.`
	r.Register(cmd)
	cmd.Flags().StringVar(&reason, "reason", "", "why, in 1 to 200 printable ASCII characters; the log keeps it for good")
	_ = cmd.MarkFlagRequired("reason") // cannot fail: the flag exists
	return cmd
}
