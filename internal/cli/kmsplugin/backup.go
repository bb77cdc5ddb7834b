package kmsplugin

import (
	"bytes"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/dumps"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/kmsplugin"
)

// maxBackup bounds an encrypted backup: three times the largest key set, which is in it as base64.
const maxBackup = 3 << 20

func newBackupCommand() *cobra.Command {
	var o options
	var to command.RecipientFlags
	var output string
	cmd := &cobra.Command{
		Use: "backup", Short: "Write the key set to a file that opens without the KMS", Args: cobra.NoArgs,
		Long: `Write the key set with its keys to a file that is encrypted to a post-quantum recipient of age, as backups of the
server are: latticekeep backup keygen makes one. It opens without the KMS, so it is the way back when the KMS key is
lost. Whoever has it and the identity reads all Secrets of the cluster: keep the two apart, and neither in the cluster.

Take one after each rotate, because a backup does not have the generations that came after it.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			recipient, err := to.Recipient()
			if err != nil {
				return err
			}
			if err := dumps.Forbid(); err != nil {
				return err
			}
			defer o.custody.Close()
			plain, s, err := kmsplugin.Backup(cmd.Context(), &o.custody, o.dir)
			if err != nil {
				return err
			}
			defer clear(plain)
			sealed, err := encrypt(plain, recipient)
			if err == nil {
				err = durable.WriteNew(output, sealed)
			}
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s has key set %s at revision %d, for %s\n", output, s.ID, s.Revision, recipient.ID())
			return nil
		},
	}
	o.registerDir(cmd)
	o.registerToken(cmd)
	to.Register(cmd)
	cmd.Flags().StringVar(&output, "output", "", "the file to write; it must not exist")
	_ = cmd.MarkFlagRequired("output") // cannot fail: the flag exists
	return cmd
}

func encrypt(plain []byte, to backup.Recipient) ([]byte, error) {
	var sealed bytes.Buffer
	w, err := backup.Encrypt(&sealed, []backup.Recipient{to})
	if err == nil {
		_, err = w.Write(plain)
	}
	if err == nil {
		err = w.Close()
	}
	return sealed.Bytes(), err
}

func newRestoreCommand() *cobra.Command {
	var o options
	var identity string
	cmd := &cobra.Command{
		Use: "restore FILE", Short: "Make a key set from a backup, under a KMS key", Args: cobra.ExactArgs(1),
		Long: `Make the key set of a backup again, on the first node, for when its directories or its KMS key are lost. It keeps
its id and its key ids, so all that is in etcd is read. It is one revision newer than the backup, is under the KMS key of --kms, and
names this node alone: add the others as at the first installation.

Rotate then, and write all Secrets again: whoever has the backup has the keys.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := dumps.Forbid(); err != nil {
				return err
			}
			identities, err := command.ReadIdentities(identity)
			if err != nil {
				return err
			}
			sealed, err := command.ReadFile(args[0], maxBackup)
			if err != nil {
				return err
			}
			plain, err := decrypt(sealed, identities)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			defer clear(plain)
			defer o.custody.Close()
			s, err := kmsplugin.Restore(cmd.Context(), &o.custody, o.dir, o.node, o.kms, plain)
			return changed(cmd, s, err)
		},
	}
	o.registerDir(cmd)
	o.registerNode(cmd)
	o.registerToken(cmd)
	cmd.Flags().StringVar(&identity, "identity-file", "", "file with the identity that opens the backup")
	_ = cmd.MarkFlagRequired("identity-file") // cannot fail: the flag exists
	return cmd
}

func decrypt(sealed []byte, identities []backup.Identity) ([]byte, error) {
	r, err := backup.Decrypt(bytes.NewReader(sealed), identities)
	if err != nil {
		return nil, err
	}
	// The plaintext is shorter, so reading it leaves no copies in buffers that were too small.
	plain := bytes.NewBuffer(make([]byte, 0, len(sealed)+bytes.MinRead))
	_, err = plain.ReadFrom(r)
	return plain.Bytes(), err
}
