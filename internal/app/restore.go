package app

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// restoreDirectory is where a database is made, in the data directory that it
// will be in. What is left there is of no use to anybody.
const restoreDirectory = databaseFile + ".restore"

type restoreOptions struct {
	input, dir, keyFile string
	chain, identity     string // pinned fingerprints; empty for none
}

func newRestoreCommand() *cobra.Command {
	var o restoreOptions
	cmd := &cobra.Command{
		Use:   "restore --input FILE --data-dir DIR",
		Short: "Make a data directory of a backup",
		Long: `Make a data directory of a backup. DIR must not have a database. The database
gets its name only after the backup's signature, the whole audit chain and every
credential row have been verified; until then nothing in DIR can be taken for a
restored deployment.

--fingerprint (printed by the server as "chain") and --identity say whose backup
it must be. Without either, and without --kms-key-file, somebody else could have
made all of it.

--kms-key-file tries whether that key opens what was restored. The KMS key is not
in a backup: start the server with the one that the deployment was made with.

What happened after the backup was taken is not in it: credentials sealed or
rotated since are missing, and what was deleted or revoked since is back.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd, "fingerprint", "identity", "kms-key-file"); err != nil {
				return err
			}
			r, err := restore(cmd.Context(), o, cmd.InOrStdin())
			if err != nil {
				return err
			}
			if _, err := fmt.Fprint(cmd.OutOrStdout(), r.text(o)); err != nil {
				return err
			}
			return r.key
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.input, "input", "", "file that latticekeep backup wrote; - for standard input")
	flags.StringVar(&o.dir, "data-dir", "", "data directory to make; it must not have a database")
	flags.StringVar(&o.keyFile, "kms-key-file", "", "KMS key to try on what was restored")
	flags.StringVar(&o.chain, "fingerprint", "", "fingerprint of the chain that the backup must be of")
	flags.StringVar(&o.identity, "identity", "", "fingerprint of the identity that must have signed the backup")
	_ = cmd.MarkFlagRequired("input") // the flags exist
	_ = cmd.MarkFlagRequired("data-dir")
	return cmd
}

// restored is what a restore has made.
type restored struct {
	taken
	report audit.Report
	key    error // why the KMS key does not open it
}

func (r restored) text(o restoreOptions) string {
	whose := "not compared with anything: somebody else could have made this backup"
	switch {
	case o.chain != "" || o.identity != "":
		whose = "as pinned"
	case o.keyFile != "" && r.key == nil:
		whose = "those of the KMS key's deployment"
	}
	key := "The KMS key is not in a backup: start the server with the one that this deployment was made with."
	if o.keyFile != "" && r.key == nil {
		key = "The KMS key opens it."
	}
	return fmt.Sprintf(`restored: %d rows, taken %s by latticekeep %s
head: %d %s
chain: %s
identity: %s (%s)
%s
What happened after this head is lost: compare it with one that you kept.
`, r.rows, r.CreatedAt.Format(time.RFC3339), r.Program, r.report.Sequence, r.report.Hash, r.Chain, r.Identity.ID(), whose, key)
}

// restore makes the database under another name, verifies it and gives it its
// name. The KMS key not opening it is no reason not to: the right one may.
func restore(ctx context.Context, o restoreOptions, stdin io.Reader) (r restored, err error) {
	if o.input != "-" {
		in, err := os.Open(o.input)
		if err != nil {
			return restored{}, fmt.Errorf("opening the backup: %w", err)
		}
		defer in.Close()
		stdin = in
	}
	from, err := backup.NewReader(stdin)
	if err != nil {
		return restored{}, err
	}
	r.Header = from.Header
	if err := o.compare(r.Header); err != nil {
		return restored{}, err
	}
	if err := os.MkdirAll(o.dir, 0o700); err != nil {
		return restored{}, fmt.Errorf("making the data directory: %w", err)
	}
	lock, err := lockDataDir(o.dir)
	if err != nil {
		return restored{}, err
	}
	defer lock.Close()
	target := filepath.Join(o.dir, databaseFile)
	if err := refuseExisting(target); err != nil {
		return restored{}, err
	}
	work := filepath.Join(o.dir, restoreDirectory)
	if err := errors.Join(os.RemoveAll(work), os.Mkdir(work, 0o700)); err != nil {
		return restored{}, fmt.Errorf("making room for the database: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()

	database := filepath.Join(work, databaseFile)
	if r.rows, err = fillDatabase(ctx, database, from); err != nil {
		return restored{}, fmt.Errorf("restoring: nothing was put in place: %w", err)
	}
	if err := r.verify(ctx, database, o.keyFile); err != nil {
		return restored{}, fmt.Errorf("verifying what was restored: nothing was put in place: %w", err)
	}
	return r, moveNew(database, target)
}

// compare holds what the backup says of itself against what is pinned, before
// anything is written. That it says so truly shows at its end.
func (o restoreOptions) compare(h backup.Header) error {
	switch {
	case o.chain != "" && o.chain != h.Chain:
		return fmt.Errorf("the backup is of the chain %s, which is not the pinned one: name the backup of this deployment", h.Chain)
	case o.identity != "" && o.identity != h.Identity.ID():
		return fmt.Errorf("the backup is signed by the identity %s, which is not the pinned one: name the backup of this deployment", h.Identity.ID())
	}
	return nil
}

// lockDataDir keeps a second restore out, and a server that starts waits: each
// makes its database under the lock of the directory.
func lockDataDir(dir string) (*os.File, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("opening the data directory: %w", err)
	}
	if err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("locking the data directory: a server or another restore is using it; wait for it, or choose another: %w", err)
	}
	return d, nil
}

// Bounds of one commit of a restore.
const (
	restoreRows  = 1000
	restoreBytes = 4 << 20
)

// fillDatabase makes a database of the rows of a backup and returns their number.
// An error leaves a file that is to be removed.
func fillDatabase(ctx context.Context, path string, from *backup.Reader) (rows uint64, err error) {
	s, err := bolt.Open(path, bolt.Options{})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	type row struct{ key, value []byte }
	var batch []row
	size := 0
	apply := func() error {
		err := s.Update(ctx, func(tx store.Tx) error {
			var err error
			for _, r := range batch {
				if r.value == nil {
					err = errors.Join(err, tx.Delete(r.key))
				} else {
					err = errors.Join(err, tx.Put(r.key, r.value))
				}
			}
			return err
		})
		batch, size = batch[:0], 0
		return err
	}
	rows, err = from.Rows(func(key, value []byte) error {
		batch = append(batch, row{bytes.Clone(key), bytes.Clone(value)})
		if size += len(key) + len(value); size < restoreBytes && len(batch) < restoreRows {
			return nil
		}
		return apply()
	})
	if err != nil {
		return 0, err
	}
	return rows, apply()
}

// verify holds the database against its audit log, and tries the KMS key.
func (r *restored) verify(ctx context.Context, path, keyFile string) (err error) {
	s, err := bolt.Open(path, bolt.Options{ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	if r.report, err = verifyStore(ctx, s, audit.Options{Fingerprint: r.Chain}); err != nil {
		return err
	}
	if keyFile == "" {
		return nil
	}
	keys, err := openKeys(ctx, s, keyFile)
	if err != nil {
		r.key = fmt.Errorf("restored, but the KMS key %s does not open it; the data is whole: find the key that it was made with: %w", keyFile, err)
		return nil
	}
	if keys.Identity().ID() != r.Identity.ID() {
		return errors.New("the backup is not signed by the deployment whose data is in it: somebody else made it")
	}
	return nil
}

func openKeys(ctx context.Context, s store.Store, keyFile string) (*keyring.Ring, error) {
	k, err := kms.OpenLocal(keyFile)
	if err != nil {
		return nil, err
	}
	return keyring.Open(ctx, s, k, keyring.Config{})
}

// verifyStore verifies the whole log of a database, and the rows that it tells of:
// credentials, API keys and namespaces.
func verifyStore(ctx context.Context, s store.Store, o audit.Options) (audit.Report, error) {
	report, err := vault.VerifyStore(ctx, s, o)
	if err != nil {
		return audit.Report{}, err
	}
	return report, identity.VerifyStore(ctx, s, report)
}
