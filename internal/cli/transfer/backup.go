// Package transfer provides the commands that write a whole database: backup, restore, migrate and
// compact.
package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/download"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/progress"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// signatureSuffix is the suffix of the file with the statement beside a backup.
const signatureSuffix = ".sig"

func NewBackupCommand() *cobra.Command {
	var r command.Server
	var s offline.Deployment
	var to command.RecipientFlags
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
			recipient, err := to.Recipient()
			if err != nil {
				return err
			}
			if err := c.prepare(); err != nil {
				return err
			}
			open := func(ctx context.Context) (io.ReadCloser, error) { return downloadBackup(ctx, &r, recipient) }
			if s.Named() {
				open = func(ctx context.Context) (io.ReadCloser, error) { return backupStopped(ctx, &s, recipient), nil }
			}
			c.shown.start(cmd)
			made, err := writeBackup(cmd.Context(), output, open, c)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), made.text(output, c))
			return err
		},
	}
	flags := cmd.Flags()
	r.RegisterKey(cmd, flags, "base URL of a running server")
	command.RegisterStore(cmd, &s, "of a stopped server")
	command.RegisterKMS(cmd, &s, "KMS key of --data-dir (default "+offline.KMSKeyFileName+" in it) or --store")
	to.Register(cmd)
	c.register(cmd)
	flags.StringVar(&output, "output", "", "file to write; neither it nor the one with .sig behind it may exist")
	_ = cmd.MarkFlagRequired("output") // cannot fail: the flag exists
	for _, where := range []string{"data-dir", "store"} {
		cmd.MarkFlagsMutuallyExclusive("url", "profile", where)
		cmd.MarkFlagsMutuallyExclusive("api-key", "api-key-file", where)
	}
	cmd.MarkFlagsMutuallyExclusive("url", "profile", "kms-key-file")
	cmd.MarkFlagsMutuallyExclusive("url", "profile", "kms-url")
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
			if err := durable.WriteNew(output, identity.File(time.Now().UTC())); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), identity.Recipient())
			return err
		},
	}
	cmd.Flags().StringVar(&output, "output", "", "file to write the identity to; it must not exist")
	_ = cmd.MarkFlagRequired("output") // cannot fail: the flag exists
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
			c.shown.start(cmd)
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
	_ = cmd.MarkFlagRequired("input") // cannot fail: the flag exists
	return cmd
}

// checkOptions say how thoroughly a backup is verified.
type checkOptions struct {
	identity   string // pinned fingerprint; empty for none
	verifyWith string // file with identities that open the backup; empty for none
	identities []backup.Identity
	shown      shown
}

func (c *checkOptions) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&c.identity, "identity", "", "fingerprint of the deployment's identity that must have signed the backup")
	flags.StringVar(&c.verifyWith, "verify-with", "", "file with the identity that opens the backup, to verify what is in it too")
	c.shown.register(cmd)
}

// prepare reads the identities first, so that nothing is written if they are missing.
func (c *checkOptions) prepare() (err error) {
	if c.verifyWith != "" {
		c.identities, err = command.ReadIdentities(c.verifyWith)
	}
	return err
}

// checked is a backup that matches its statement, with the result of opening it.
type checked struct {
	backup.Statement
	inside *restore.Restored // nil if it was not opened
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
	inside := "its content was not verified: give the identity that opens it in --verify-with"
	if k.inside != nil {
		inside = fmt.Sprintf("verified: the backup opens, and its log up to head %d %s and all its rows hold", k.inside.Report.Sequence, k.inside.Report.Hash)
	}
	return fmt.Sprintf("ok: %s: %d rows, taken %s, is as it was signed\nchain: %s\nidentity: %s (%s)\n%s\n%s\n",
		path, k.Rows, k.CreatedAt.Format(time.RFC3339), k.Chain, k.Identity.ID(), whose, key, inside)
}

// check reads the file from its beginning and compares it with the statement.
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
	if err := s.Check(c.shown.Reader(f, "compared with the signature", progress.Size(f))); err != nil {
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

// open restores the backup into a temporary folder beside it, verifies the result and removes it.
func (c checkOptions) open(ctx context.Context, f *os.File, s backup.Statement) (_ *restore.Restored, err error) {
	dir, err := os.MkdirTemp(filepath.Dir(f.Name()), ".latticekeep-verify-*") // mode 0700
	if err != nil {
		return nil, fmt.Errorf("making room to verify the backup: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	from, err := restore.Open(c.shown.Reader(f, "opened", progress.Size(f)), c.identities)
	if err != nil {
		return nil, err
	}
	r := &restore.Restored{From: from, Entry: func() { c.shown.AddOf("entries verified") }}
	err = r.Into(ctx, filepath.Join(dir, offline.DatabaseFile), nil)
	c.shown.EndOf("entries verified")
	if err != nil {
		return nil, fmt.Errorf("verifying what is in the backup: %w", err)
	}
	h := from.Header
	switch {
	case r.Key != nil:
		return nil, r.Key
	case h.Chain != s.Chain || h.Identity.ID() != s.Identity.ID() || r.Rows != s.Rows || (len(from.KMSKeys) > 0 && len(from.KMSKeys[0]) > 0) != s.HasKMSKey:
		return nil, errors.New("what is in the backup is not what its signature says: take another one, and find out who made this")
	}
	return r, nil
}

// writeBackup writes the stream from open to a file. It renames the file to output only once the
// content is synced and verified, so an incomplete backup never has that name.
func writeBackup(ctx context.Context, output string, open func(context.Context) (io.ReadCloser, error), c checkOptions) (k checked, err error) {
	for _, path := range []string{output, output + signatureSuffix} {
		if err := durable.CheckAbsent(path); err != nil {
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
	statement, err := fetch(ctx, f, open, c.shown.Progress)
	if err == nil {
		if err = f.Sync(); err == nil {
			k, err = c.check(ctx, f, statement)
		}
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return checked{}, fmt.Errorf("taking the backup: %w", err)
	}
	if err := durable.WriteNew(output+signatureSuffix, statement); err != nil {
		return checked{}, err
	}
	if err := durable.MoveNew(f.Name(), output); err != nil {
		return checked{}, errors.Join(err, os.Remove(output+signatureSuffix))
	}
	return k, nil
}

// fetch writes the encrypted file to w and returns the statement after it.
func fetch(ctx context.Context, w io.Writer, open func(context.Context) (io.ReadCloser, error), p *progress.Progress) (statement []byte, err error) {
	in, err := open(ctx)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	parts := backup.Split(in)
	if _, err := io.Copy(w, p.Reader(parts, "written", 0)); err != nil {
		return nil, err
	}
	if parts.Statement() == nil {
		err := errors.New("the backup ended before its signature: the server's log may say why")
		return nil, &command.StatusError{Status: command.StatusUnreachable, Err: err}
	}
	return parts.Statement(), nil
}

// backupStopped returns a backup of a deployment that no server uses.
func backupStopped(ctx context.Context, s *offline.Deployment, to backup.Recipient) io.ReadCloser {
	return piped(func(w io.Writer) error {
		return s.WithStore(ctx, func(db store.Database) error {
			if err := offline.CheckUnmarked(ctx, db); err != nil { // the deployment is in another store
				return err
			}
			return s.WithKeys(ctx, db, nil, func(keys *keyring.Ring) error {
				files, err := s.ReadKMSKeyFiles()
				if err != nil {
					return err
				}
				raised, err := format.RaisedRow(ctx, db)
				if err != nil {
					return err
				}
				h := backup.Header{
					Chain: audit.Fingerprint(keys.ChainID(), keys.Audit().Public().Bytes()), Identity: keys.Identity(), CreatedAt: time.Now(), Program: buildinfo.Version(), Format: raised,
				}
				return backup.Write(ctx, w, db, h, files, to, keys)
			})
		})
	})
}

// downloadBackup returns a backup of a running server.
func downloadBackup(ctx context.Context, r *command.Server, to backup.Recipient) (io.ReadCloser, error) {
	c, err := r.Client()
	if err != nil {
		return nil, err
	}
	return download.Open(ctx, func(ctx context.Context) (io.ReadCloser, error) {
		return c.TakeBackup(ctx, v2.BackupRequest{Recipient: to.String()})
	})
}

// piped returns the output of write as a stream. Close stops write and waits for it.
func piped(write func(io.Writer) error) io.ReadCloser {
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = w.CloseWithError(write(w)) // never fails
	}()
	return pipe{r, done}
}

type pipe struct {
	*io.PipeReader
	done chan struct{}
}

func (p pipe) Close() error {
	err := p.PipeReader.Close()
	<-p.done
	return err
}
