package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

func newBackupCommand() *cobra.Command {
	var r remote
	var dir, keyFile, output string
	cmd := &cobra.Command{
		Use:   "backup (--url URL | --data-dir DIR) --output FILE",
		Short: "Write a backup of the whole deployment to a file",
		Long: `Write a backup of the whole deployment to a new file: credentials, keys, sealing
keys, tenants, users and the audit log, as of one moment. It is read again
before it gets its name.

  --url       of a running server; the API key needs the scope system:admin.
              The audit log records it
  --data-dir  of a server that is stopped; the KMS key signs the backup's end

Nothing in a backup is plaintext, and the KMS key is not in it: without that
key nobody recovers anything from a backup, so keep it too, somewhere else.
latticekeep restore makes a data directory of a backup again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			write := func(ctx context.Context, w io.Writer) error { return downloadBackup(ctx, &r, w) }
			if dir != "" {
				if keyFile == "" {
					keyFile = filepath.Join(dir, kmsKeyFile)
				}
				write = func(ctx context.Context, w io.Writer) error { return backupDataDir(ctx, dir, keyFile, w) }
			}
			taken, err := writeBackup(cmd.Context(), output, write)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "ok: %s: %d rows, taken %s\nchain: %s\nidentity: %s\nthe KMS key is not in it: keep that too, elsewhere\n",
				output, taken.rows, taken.CreatedAt.Format(time.RFC3339), taken.Chain, taken.Identity.ID())
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&r.url, "url", os.Getenv("LATTICEKEEP_URL"), "base URL of a running server (environment: LATTICEKEEP_URL)")
	flags.StringVar(&r.key, "api-key", "", "API key for --url; other users of this machine may see it (environment: LATTICEKEEP_API_KEY)")
	flags.StringVar(&r.keyFile, "api-key-file", "", "file that holds the API key for --url")
	flags.StringVar(&dir, "data-dir", "", "data directory of a stopped server")
	flags.StringVar(&keyFile, "kms-key-file", "", "KMS key of --data-dir (default "+kmsKeyFile+" in it)")
	flags.StringVar(&output, "output", "", "file to write; it must not exist")
	_ = cmd.MarkFlagRequired("output") // the flag exists
	cmd.MarkFlagsMutuallyExclusive("url", "data-dir")
	cmd.MarkFlagsMutuallyExclusive("url", "kms-key-file")
	cmd.MarkFlagsMutuallyExclusive("api-key", "api-key-file", "data-dir")
	return cmd
}

// taken is what a backup says of itself, verified.
type taken struct {
	backup.Header
	rows uint64
}

// writeBackup makes a file of what write writes, and gives it its name when it
// is on disk and has been read again.
func writeBackup(ctx context.Context, output string, write func(context.Context, io.Writer) error) (t taken, err error) {
	if err := refuseExisting(output); err != nil {
		return taken{}, err
	}
	f, err := os.CreateTemp(filepath.Dir(output), filepath.Base(output)+".new-*") // mode 0600
	if err != nil {
		return taken{}, fmt.Errorf("creating the backup: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	err = write(ctx, f)
	if err == nil {
		if err = f.Sync(); err == nil {
			t, err = checkBackup(f)
		}
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return taken{}, fmt.Errorf("taking the backup: %w", err)
	}
	return t, moveNew(f.Name(), output)
}

func checkBackup(f *os.File) (taken, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return taken{}, fmt.Errorf("reading the backup again: %w", err)
	}
	in, err := backup.NewReader(f)
	if err != nil {
		return taken{}, err
	}
	rows, err := in.Rows(func(_, _ []byte) error { return nil })
	return taken{in.Header, rows}, err
}

// refuseExisting fails when there is something at path.
func refuseExisting(path string) error {
	_, err := os.Lstat(path)
	switch {
	case err == nil:
		return fmt.Errorf("%s exists already, and nothing is ever overwritten: choose another name", path)
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("looking for %s: %w", path, err)
	}
	return nil
}

// moveNew gives a file on the same file system another name, durably, and never
// replaces one.
func moveNew(from, to string) error {
	err := os.Link(from, to) // unlike a rename it does not replace
	switch {
	case err == nil:
		err = os.Remove(from)
	case !errors.Is(err, fs.ErrExist): // not every file system has links
		if err = refuseExisting(to); err == nil {
			err = os.Rename(from, to)
		}
	}
	if err != nil {
		return fmt.Errorf("naming %s: %w", filepath.Base(to), err)
	}
	d, err := os.Open(filepath.Dir(to))
	if err != nil {
		return fmt.Errorf("syncing the folder of %s: %w", filepath.Base(to), err)
	}
	return errors.Join(d.Sync(), d.Close())
}

// backupDataDir writes a backup of a data directory that nobody is using.
func backupDataDir(ctx context.Context, dir, keyFile string, w io.Writer) (err error) {
	k, err := kms.OpenLocal(keyFile)
	if err != nil {
		return fmt.Errorf("opening %s: %w", filepath.Base(keyFile), err)
	}
	s, err := bolt.Open(filepath.Join(dir, databaseFile), bolt.Options{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("opening %s (a running server is backed up with --url): %w", databaseFile, err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	keys, err := keyring.Open(ctx, s, k, keyring.Config{})
	if err != nil {
		return err
	}
	h := backup.Header{
		Chain: audit.Fingerprint(keys.ChainID(), keys.Audit().Public().Bytes()), Identity: keys.Identity(), CreatedAt: time.Now(), Program: version(),
	}
	return backup.Write(ctx, w, s, h, keys.SignBackup)
}

// stallTimeout is how long a server may send no byte of a backup.
const stallTimeout = 2 * time.Minute

var errStalled = errors.New("the server has sent nothing for two minutes: try again")

// downloadBackup writes a backup of a running server.
func downloadBackup(ctx context.Context, r *remote, w io.Writer) error {
	c, err := r.client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(stallTimeout, func() { cancel(errStalled) })
	defer watch.Stop()
	body, err := c.GetBackup(ctx)
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	defer body.Close()
	_, err = io.Copy(writerFunc(func(b []byte) (int, error) {
		watch.Reset(stallTimeout)
		return w.Write(b)
	}), body)
	if err != nil {
		return errors.Join(fmt.Errorf("the backup was broken off; the server's log may say why: %w", err), context.Cause(ctx))
	}
	return nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
