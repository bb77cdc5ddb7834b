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

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
)

// signatureSuffix is that of the file with the statement beside a backup.
const signatureSuffix = ".sig"

func newBackupCommand() *cobra.Command {
	var r remote
	var s stopped
	var to recipientFlags
	var c checkOptions
	var output string
	cmd := &cobra.Command{
		Use:   "backup (--url URL | --data-dir DIR | --store URL) (--recipient age1pq1… | --recipient-file FILE) --output FILE",
		Short: "Write an encrypted backup of the whole deployment to a file",
		Long: `Write a backup of the whole deployment to a new file: credentials, keys, sealing
keys, tenants, users and the audit log, as of one moment.

  --url       of a running server; the API key needs the scope system:admin.
              The audit log records it
  --data-dir  of a server that is stopped; the KMS key signs the backup
  --store     likewise, as a URL: bolt:DIR or postgres://user@host/database

All of it is encrypted to a post-quantum recipient of age before it leaves the
server; latticekeep backup keygen makes one. If the KMS key is a key file, it is
in the backup too: whoever has the identity of the recipient reads everything,
and needs nothing else. Keep that identity where neither the server nor whoever
keeps the backups can read it.

FILE is an age file, and FILE.sig the deployment's signature of it. Before they
get their names the file is read again from disk and held against it;
--verify-with also opens the file, and verifies all that is in it.
latticekeep restore makes a deployment of a backup again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd, "identity", "verify-with", "recipient", "recipient-file"); err != nil {
				return err
			}
			recipient, err := to.recipient()
			if err != nil {
				return err
			}
			if err := c.prepare(); err != nil {
				return err
			}
			open := func(ctx context.Context) (io.ReadCloser, error) { return downloadBackup(ctx, &r, recipient) }
			if s.named() {
				open = func(ctx context.Context) (io.ReadCloser, error) { return backupStopped(ctx, &s, recipient), nil }
			}
			made, err := writeBackup(cmd.Context(), output, open, c)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), made.text(output, c))
			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&r.url, "url", os.Getenv("LATTICEKEEP_URL"), "base URL of a running server (environment: LATTICEKEEP_URL)")
	flags.StringVar(&r.key, "api-key", "", "API key for --url; other users of this machine may see it (environment: LATTICEKEEP_API_KEY)")
	flags.StringVar(&r.keyFile, "api-key-file", "", "file that holds the API key for --url")
	registerStore(cmd, &s, "of a stopped server")
	registerKMS(cmd, &s, "KMS key of --data-dir (default "+kmsKeyFile+" in it) or --store")
	to.register(cmd)
	c.register(cmd)
	flags.StringVar(&output, "output", "", "file to write; neither it nor the one with .sig behind it may exist")
	_ = cmd.MarkFlagRequired("output") // the flag exists
	for _, where := range []string{"data-dir", "store"} {
		cmd.MarkFlagsMutuallyExclusive("url", where)
		cmd.MarkFlagsMutuallyExclusive("api-key", "api-key-file", where)
	}
	cmd.MarkFlagsMutuallyExclusive("url", "kms-key-file")
	cmd.MarkFlagsMutuallyExclusive("url", "kms-url")
	cmd.AddCommand(newBackupKeygenCommand(), newBackupVerifyCommand())
	return cmd
}

func newBackupKeygenCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "keygen --output FILE",
		Short: "Make an identity that opens backups, and print its recipient",
		Long: `Make an identity that opens backups, write it to a new file that only you can
read, and print the recipient, to which backups are encrypted. The file is as
age-keygen -pq writes it, and the age tool reads it.

Whoever has the file reads every backup that was made for it; without it nobody
reads any. Keep it twice, and not where the backups or the server are.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			identity, err := backup.NewIdentity()
			if err != nil {
				return err
			}
			if err := writeDurable(output, identity.File(time.Now().UTC())); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), identity.Recipient())
			return err
		},
	}
	cmd.Flags().StringVar(&output, "output", "", "file to write the identity to; it must not exist")
	_ = cmd.MarkFlagRequired("output") // the flag exists
	return cmd
}

func newBackupVerifyCommand() *cobra.Command {
	var c checkOptions
	var input string
	cmd := &cobra.Command{
		Use:   "verify --input FILE",
		Short: "Verify a backup that was kept, against its signature",
		Long: `Verify a backup that was kept, against the signature in FILE.sig: that it is,
byte for byte, what the deployment wrote. Nothing that is secret is needed for
that. --verify-with also opens it, and verifies all that is in it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd, "identity", "verify-with"); err != nil {
				return err
			}
			if err := c.prepare(); err != nil {
				return err
			}
			signature, err := os.ReadFile(input + signatureSuffix)
			if err != nil {
				return fmt.Errorf("reading the signature of the backup: %w", err)
			}
			f, err := os.Open(input)
			if err != nil {
				return fmt.Errorf("opening the backup: %w", err)
			}
			defer f.Close()
			found, err := c.check(cmd.Context(), f, signature)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), found.text(input, c))
			return err
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&input, "input", "", "backup; its signature is beside it, with .sig behind its name")
	_ = cmd.MarkFlagRequired("input") // the flag exists
	return cmd
}

// checkOptions say how far a backup is verified.
type checkOptions struct {
	identity   string // pinned fingerprint; empty for none
	verifyWith string // file
	identities []backup.Identity
}

func (c *checkOptions) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&c.identity, "identity", "", "fingerprint of the deployment's identity that must have signed the backup")
	flags.StringVar(&c.verifyWith, "verify-with", "", "file with the identity that opens the backup, to verify what is in it too")
}

// prepare reads what is needed, so that nothing is written when it is not there.
func (c *checkOptions) prepare() (err error) {
	if c.verifyWith != "" {
		c.identities, err = readIdentities(c.verifyWith)
	}
	return err
}

// checked is a backup that was held against its statement, and what was found
// when it was opened.
type checked struct {
	backup.Statement
	inside *restored // nil: it was not opened
}

func (k checked) text(path string, c checkOptions) string {
	whose := "not compared with anything: pin it with --identity"
	if c.identity != "" {
		whose = "the pinned one"
	}
	key := "the KMS key is not in it: it has to be there when the backup is restored"
	if k.HasKMSKey {
		key = "the KMS key is in it: whoever opens the backup reads everything"
	}
	inside := "what is in it was not looked at: that takes the identity that opens it, in --verify-with"
	if k.inside != nil {
		inside = fmt.Sprintf("verified: the backup opens, and its log up to head %d %s and all its rows hold", k.inside.report.Sequence, k.inside.report.Hash)
	}
	return fmt.Sprintf("ok: %s: %d rows, taken %s, is as it was signed\nchain: %s\nidentity: %s (%s)\n%s\n%s\n",
		path, k.Rows, k.CreatedAt.Format(time.RFC3339), k.Chain, k.Identity.ID(), whose, key, inside)
}

// check reads the file from its beginning and holds it against the statement.
func (c checkOptions) check(ctx context.Context, f *os.File, statement []byte) (checked, error) {
	s, err := backup.ParseStatement(statement)
	if err != nil {
		return checked{}, err
	}
	if c.identity != "" && s.Identity.ID() != c.identity {
		return checked{}, fmt.Errorf("the backup is signed by the identity %s, which is not the pinned one: ask the right server", s.Identity.ID())
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return checked{}, fmt.Errorf("reading the backup again: %w", err)
	}
	if err := s.Check(f); err != nil {
		return checked{}, err
	}
	if len(c.identities) == 0 {
		return checked{Statement: s}, nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return checked{}, fmt.Errorf("reading the backup again: %w", err)
	}
	inside, err := c.open(ctx, f, s)
	return checked{s, inside}, err
}

// open restores the backup beside it, verifies that, and keeps nothing of it.
func (c checkOptions) open(ctx context.Context, f *os.File, s backup.Statement) (_ *restored, err error) {
	dir, err := os.MkdirTemp(filepath.Dir(f.Name()), ".latticekeep-verify-*") // mode 0700
	if err != nil {
		return nil, fmt.Errorf("making room to verify the backup: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	from, err := backup.Open(f, c.identities)
	if err != nil {
		return nil, err
	}
	r := &restored{from: from}
	if err := r.into(ctx, filepath.Join(dir, databaseFile), restoreOptions{}); err != nil {
		return nil, fmt.Errorf("verifying what is in the backup: %w", err)
	}
	h := from.Header
	switch {
	case r.key != nil:
		return nil, r.key
	case h.Chain != s.Chain || h.Identity.ID() != s.Identity.ID() || r.rows != s.Rows || (len(from.KMSKeys) > 0 && len(from.KMSKeys[0]) > 0) != s.HasKMSKey:
		return nil, errors.New("what is in the backup is not what its signature says: take another one, and find out who made this")
	}
	return r, nil
}

// writeBackup makes a file of what open returns, and gives it its name when it is
// on disk and has been read again. A backup of which half is left has no name.
func writeBackup(ctx context.Context, output string, open func(context.Context) (io.ReadCloser, error), c checkOptions) (k checked, err error) {
	for _, path := range []string{output, output + signatureSuffix} {
		if err := refuseExisting(path); err != nil {
			return checked{}, err
		}
	}
	f, err := os.CreateTemp(filepath.Dir(output), filepath.Base(output)+".new-*") // mode 0600
	if err != nil {
		return checked{}, fmt.Errorf("creating the backup: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	statement, err := fetch(ctx, f, open)
	if err == nil {
		if err = f.Sync(); err == nil {
			k, err = c.check(ctx, f, statement)
		}
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return checked{}, fmt.Errorf("taking the backup: %w", err)
	}
	if err := writeDurable(output+signatureSuffix, statement); err != nil {
		return checked{}, err
	}
	if err := moveNew(f.Name(), output); err != nil {
		return checked{}, errors.Join(err, os.Remove(output+signatureSuffix))
	}
	return k, nil
}

// fetch writes the encrypted file to w and returns the statement behind it.
func fetch(ctx context.Context, w io.Writer, open func(context.Context) (io.ReadCloser, error)) (statement []byte, err error) {
	in, err := open(ctx)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	parts := backup.Split(in)
	if _, err := io.Copy(w, parts); err != nil {
		return nil, err
	}
	if parts.Statement() == nil {
		return nil, errors.New("the backup ended before its signature: the server's log may say why")
	}
	return parts.Statement(), nil
}

// writeDurable writes a file that must not exist, with mode 0600, and returns when it
// is durable.
func writeDurable(path string, content []byte) (err error) {
	if err := refuseExisting(path); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".new-*") // mode 0600
	if err != nil {
		return fmt.Errorf("creating %s: %w", filepath.Base(path), err)
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = moveNew(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("writing %s: %w", filepath.Base(path), err)
	}
	return nil
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

// backupStopped is a backup of a deployment that nobody is using.
func backupStopped(ctx context.Context, s *stopped, to backup.Recipient) io.ReadCloser {
	return piped(func(w io.Writer) error {
		return s.with(ctx, func(db store.Database) error {
			if err := refuseMarked(ctx, db); err != nil { // it goes on elsewhere
				return err
			}
			return s.keys(ctx, db, nil, func(keys *keyring.Ring) error {
				files, err := s.keyFiles()
				if err != nil {
					return err
				}
				h := backup.Header{
					Chain: audit.Fingerprint(keys.ChainID(), keys.Audit().Public().Bytes()), Identity: keys.Identity(), CreatedAt: time.Now(), Program: version(),
				}
				return backup.Write(ctx, w, db, h, files, to, keys)
			})
		})
	})
}

// downloadBackup is a backup of a running server.
func downloadBackup(ctx context.Context, r *remote, to backup.Recipient) (io.ReadCloser, error) {
	c, err := r.client()
	if err != nil {
		return nil, err
	}
	return openDownload(ctx, func(ctx context.Context) (io.ReadCloser, error) {
		return c.TakeBackup(ctx, v2.BackupRequest{Recipient: to.String()})
	})
}
