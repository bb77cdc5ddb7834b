package transfer

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewRestoreCommand() *cobra.Command {
	var o restoreOptions
	cmd := &cobra.Command{
		Use:   "restore (--input FILE | --bucket URL (--to-time TIME | --follow)) --identity-file FILE (--data-dir DIR | --store URL) | restore --promote --data-dir DIR",
		Short: "Make a deployment of a backup",
		Long: `Make a deployment of a backup, in a data directory that has no database or in a
PostgreSQL database that is empty. It is only served when the backup's signature,
the whole audit chain and every credential row have been verified: until then a
database file has another name, and one of PostgreSQL a row that a server refuses.

--input is a file, - for standard input, or an object of a bucket to which the
server takes backups: s3://BUCKET/NAME?region=REGION, gs://BUCKET/NAME.

--identity-file opens the backup: the file that latticekeep backup keygen wrote.

--fingerprint (printed by the server as "chain") and --identity say whose backup
it must be. Without either, and without --kms-key-file or --kms-url, somebody
else could have made all of it: everybody can encrypt to a recipient.

--kms-key-out writes the KMS key that was in the backup to a new file. The server
wants it where its kms.url says. --kms-key-file or --kms-url tries whether a key
that you have opens what was restored.

A server with an embedded database ships its commits to the bucket of its backups,
every 20 seconds. When --input is where it put the backup, s3://BUCKET/backup/…,
gs://… or a file below its folder, the restore goes on with these commits up to
the last one, and prints its time. --backup-only leaves them out.

Otherwise what happened after the backup was taken is lost: credentials sealed or
rotated since are missing, and what was deleted or revoked since is back.

--to-time goes back to a time on purpose. It takes the newest backup in --bucket
from before that time, and the log of commits up to it. Credentials have the
values of that time. Nothing comes back that was deleted, revoked, removed, demoted
or signed out since, and users who changed their password since have to reset it by
mail; --revive leaves that undone. When what happened since is unknown, all sessions
end, and API keys wait for an owner of their tenant. Whoever holds the bucket can cut
off the newest commits: --since FILE, a checkpoint that was kept elsewhere, such as
the newest anchor, shows that none is missing up to there. The log goes on in a new
epoch, with signed entries of all that, so the KMS key is needed: that in the
backup, or the one that --kms-key-file or --kms-url names. The server starts on
it at once. Stop the old one first, and never start it on the old data again.

--follow keeps a cold copy in --data-dir: it restores the newest backup in
--bucket, applies what the server ships, verifies the entries, and goes on until
it is stopped. No server serves the copy. --promote verifies all of it and makes
it one that is served, after the other server was stopped for good.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.check(); err != nil {
				return err
			}
			if o.follow {
				return follow(cmd.Context(), o, cmd.OutOrStdout())
			}
			o.shown.start(cmd)
			if o.promote {
				text, err := promote(cmd.Context(), o)
				if err != nil {
					return err
				}
				_, err = fmt.Fprint(cmd.OutOrStdout(), text)
				return err
			}
			if o.toTime != "" {
				t, err := restoreToTime(cmd.Context(), o, time.Now())
				if err != nil {
					return err
				}
				_, err = fmt.Fprint(cmd.OutOrStdout(), t.text())
				return err
			}
			r, err := restoreTo(cmd.Context(), o, cmd.InOrStdin())
			if err != nil {
				return err
			}
			if _, err := fmt.Fprint(cmd.OutOrStdout(), r.text(o)); err != nil {
				return err
			}
			return r.Key
		},
	}
	command.RegisterStore(cmd, &o.Deployment, "to make; it must not have a database")
	command.RegisterKMS(cmd, &o.Deployment, "KMS key to try on what was restored")
	flags := cmd.Flags()
	flags.StringVar(&o.input, "input", "", "backup: a file, the URL of an object such as s3://bucket/name, or - for standard input")
	flags.StringVar(&o.bucket, "bucket", "", "bucket of the server's backups, as in backup.bucket of its configuration, for --to-time and --follow")
	flags.StringVar(&o.toTime, "to-time", "", "time to go back to, as 2026-11-25T02:45:00Z")
	flags.StringVar(&o.since, "since", "", "with --to-time, file with a checkpoint of the log that what happened since must reach")
	flags.BoolVar(&o.follow, "follow", false, "keep a cold copy in --data-dir within a minute of the server, until it is promoted")
	flags.StringVar(&o.metricsFile, "metrics-file", "", "with --follow, file for the textfile collector of Prometheus's node exporter")
	flags.BoolVar(&o.promote, "promote", false, "make the cold copy in --data-dir one that a server serves")
	flags.BoolVar(&o.revive, "revive", false, "with --to-time, give back what was taken away since")
	flags.StringVar(&o.identityFile, "identity-file", "", "file with the identity that opens the backup")
	flags.StringVar(&o.keyOut, "kms-key-out", "", "file to write the KMS key of the backup to; it must not exist")
	flags.BoolVar(&o.backupOnly, "backup-only", false, "leave out what was committed after the backup")
	o.shown.register(cmd)
	flags.StringVar(&o.chain, "fingerprint", "", "fingerprint of the chain that the backup must be of")
	flags.StringVar(&o.identity, "identity", "", "fingerprint of the identity that must have signed the backup")
	cmd.MarkFlagsOneRequired("input", "bucket", "promote")
	cmd.MarkFlagsMutuallyExclusive("input", "bucket", "promote")
	cmd.MarkFlagsMutuallyExclusive("to-time", "follow", "promote")
	cmd.MarkFlagsOneRequired("data-dir", "store")
	return cmd
}

// check checks the flags that go together.
func (o restoreOptions) check() error {
	switch {
	case !o.promote && o.identityFile == "":
		return command.UsageError("--identity-file is missing: name the file with the identity that opens the backups")
	case (o.toTime != "" || o.follow) && o.bucket == "":
		return command.UsageError("--to-time and --follow need --bucket: name the bucket of the server's backups")
	case o.bucket != "" && o.toTime == "" && !o.follow:
		return command.UsageError("--bucket needs --to-time or --follow: for one backup, name its object with --input")
	case o.revive && o.toTime == "":
		return command.UsageError("--revive is for --to-time: a restored backup gives back everything that was there when it was taken")
	case o.since != "" && o.toTime == "":
		return command.UsageError("--since is for --to-time: compare a restored store with latticekeep audit verify --since")
	case o.shown.asked && (o.follow || o.promote):
		return command.UsageError("--progress is for a restore that ends: leave it out with --follow and --promote")
	case o.metricsFile != "" && !o.follow:
		return command.UsageError("--metrics-file is for --follow")
	}
	return nil
}
