package transfer

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// restoreDirectory is the folder in the data directory where a database is built. Its content can
// be removed at any time.
const restoreDirectory = offline.DatabaseFile + ".restore"

type restoreOptions struct {
	offline.Deployment
	input, identityFile string
	keyOut              string // file for the backup's KMS key; empty for none
	chain, identity     string // pinned fingerprints; empty for none
}

func NewRestoreCommand() *cobra.Command {
	var o restoreOptions
	cmd := &cobra.Command{
		Use:   "restore --input FILE --identity-file FILE (--data-dir DIR | --store URL)",
		Short: "Make a deployment of a backup",
		Long: `Make a deployment of a backup, in a data directory that has no database or in a
PostgreSQL database that is empty. It is only served when the backup's signature,
the whole audit chain and every credential row have been verified: until then a
database file has another name, and one of PostgreSQL a row that a server refuses.

--identity-file opens the backup: the file that latticekeep backup keygen wrote.

--fingerprint (printed by the server as "chain") and --identity say whose backup
it must be. Without either, and without --kms-key-file or --kms-url, somebody
else could have made all of it: everybody can encrypt to a recipient.

--kms-key-out writes the KMS key that was in the backup to a new file. The server
wants it where its kms.url says. --kms-key-file or --kms-url tries whether a key
that you have opens what was restored.

A backup does not have what happened after it was taken: credentials sealed or
rotated since are missing, and what was deleted or revoked since is back.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
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
	command.RegisterStore(cmd, &o.Deployment, "to make; it must not have a database")
	command.RegisterKMS(cmd, &o.Deployment, "KMS key to try on what was restored")
	flags := cmd.Flags()
	flags.StringVar(&o.input, "input", "", "file that latticekeep backup wrote; - for standard input")
	flags.StringVar(&o.identityFile, "identity-file", "", "file with the identity that opens the backup")
	flags.StringVar(&o.keyOut, "kms-key-out", "", "file to write the KMS key of the backup to; it must not exist")
	flags.StringVar(&o.chain, "fingerprint", "", "fingerprint of the chain that the backup must be of")
	flags.StringVar(&o.identity, "identity", "", "fingerprint of the identity that must have signed the backup")
	_ = cmd.MarkFlagRequired("input") // cannot fail: the flags exist
	_ = cmd.MarkFlagRequired("identity-file")
	cmd.MarkFlagsOneRequired("data-dir", "store")
	return cmd
}

// Restored is the result of a restore.
type Restored struct {
	From   *backup.Reader
	rows   uint64
	report verify.Report
	tried  bool  // a KMS key opens the deployment
	key    error // reason why the KMS key does not open the deployment
}

func (r Restored) text(o restoreOptions) string {
	h := r.From.Header
	whose := "not compared with anything: somebody else could have made this backup"
	switch {
	case o.chain != "" || o.identity != "":
		whose = "as pinned"
	case o.tries() && r.key == nil:
		whose = "those of the KMS key's deployment"
	}
	key := "The KMS key is not in the backup: start the server with the one that this deployment was made with."
	switch {
	case o.keyOut != "":
		paths, _ := r.keysOut(o)
		key = "The KMS key of the backup is in " + strings.Join(paths, " and ") + ": put it where the server's kms.url says, and keep no other copy there."
	case o.tries() && r.key == nil:
		key = "The KMS key opens it."
	case r.tried:
		key = "The KMS key in the backup opens it: --kms-key-out writes it to a file, should the server's own be lost."
	}
	return fmt.Sprintf(`restored: %d rows, taken %s by latticekeep %s
head: %d %s
chain: %s
identity: %s (%s)
%s
What happened after this head is lost: compare it with one that you kept.
`, r.rows, h.CreatedAt.Format(time.RFC3339), h.Program, r.report.Sequence, r.report.Hash, h.Chain, h.Identity.ID(), whose, key)
}

// tries reports whether a KMS key to try is named.
func (o restoreOptions) tries() bool { return o.KeyFile != "" || o.KMSURL != "" }

// restore writes the deployment and verifies it before a server can use it. It does not fail if the
// KMS key does not open the deployment, because the right one may exist elsewhere.
func restore(ctx context.Context, o restoreOptions, stdin io.Reader) (Restored, error) {
	target := o.Location(false)
	if err := target.Check(); err != nil {
		return Restored{}, err
	}
	identities, err := readIdentities(o.identityFile)
	if err != nil {
		return Restored{}, err
	}
	if o.input != "-" {
		in, err := os.Open(o.input)
		if err != nil {
			return Restored{}, fmt.Errorf("opening the backup: %w", err)
		}
		defer in.Close()
		stdin = in
	}
	r := Restored{}
	if r.From, err = openBackup(backup.Split(stdin), identities); err != nil {
		return Restored{}, err
	}
	if err := o.compare(&r); err != nil {
		return Restored{}, err
	}
	if dir, ok := target.Dir(); ok {
		err = r.toDirectory(ctx, dir, o)
	} else {
		err = r.toDatabase(ctx, target, o)
	}
	if err != nil {
		return Restored{}, err
	}
	return r, nil
}

// openBackup opens a backup up to its rows. It refuses one of a store that only a newer release
// reads.
func openBackup(in io.Reader, identities []backup.Identity) (*backup.Reader, error) {
	r, err := backup.Open(in, identities)
	if err != nil {
		return nil, err
	}
	f, err := format.Parse(r.Header.Format)
	if err == nil {
		err = f.CheckReader()
	}
	if err != nil {
		return nil, fmt.Errorf("opening the backup: %w", err)
	}
	return r, nil
}

// compare checks the backup's header against the pins before anything is written. Whether the
// header is genuine only shows at the end of the backup.
func (o restoreOptions) compare(r *Restored) error {
	h := r.From.Header
	paths, _ := r.keysOut(o)
	switch {
	case o.chain != "" && o.chain != h.Chain:
		return fmt.Errorf("the backup is of the chain %s, which is not the pinned one: name the backup of this deployment", h.Chain)
	case o.identity != "" && o.identity != h.Identity.ID():
		return fmt.Errorf("the backup is signed by the identity %s, which is not the pinned one: name the backup of this deployment", h.Identity.ID())
	case o.keyOut != "" && len(paths) == 0:
		return errors.New("the KMS key is not in this backup: leave out --kms-key-out, and start the server with that key")
	}
	for _, path := range paths {
		if err := durable.CheckAbsent(path); err != nil {
			return err
		}
	}
	return nil
}

// keyOutName returns the file for the i-th KMS key. The first is the current key; the others are
// previous keys that may still be needed.
func keyOutName(path string, i int) string {
	if i == 0 {
		return path
	}
	return fmt.Sprintf("%s.former-%d", path, i)
}

// keysOut returns the files that writeKeys creates and their content.
func (r *Restored) keysOut(o restoreOptions) (paths []string, keys [][]byte) {
	for i, key := range r.From.KMSKeys {
		if o.keyOut != "" && len(key) > 0 {
			paths, keys = append(paths, keyOutName(o.keyOut, i)), append(keys, key)
		}
	}
	return paths, keys
}

// writeKeys writes the KMS keys of the backup to their files.
func (r *Restored) writeKeys(o restoreOptions) error {
	paths, keys := r.keysOut(o)
	for i, path := range paths {
		if err := durable.WriteNew(path, keys[i]); err != nil {
			return errors.Join(err, removeAll(paths[:i]))
		}
	}
	return nil
}

func removeAll(paths []string) (err error) {
	for _, path := range paths {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

// toDirectory builds the database under another name and renames it once it is verified.
func (r *Restored) toDirectory(ctx context.Context, dir string, o restoreOptions) (err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("making the data directory: %w", err)
	}
	lock, err := offline.LockDataDir(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	target := filepath.Join(dir, offline.DatabaseFile)
	if err := durable.CheckAbsent(target); err != nil {
		return err
	}
	work := filepath.Join(dir, restoreDirectory)
	if err := errors.Join(os.RemoveAll(work), os.Mkdir(work, 0o700)); err != nil {
		return fmt.Errorf("making room for the database: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	database := filepath.Join(work, offline.DatabaseFile)
	if err := r.into(ctx, database, o); err != nil {
		return err
	}
	if err := r.writeKeys(o); err != nil {
		return err
	}
	if err := durable.MoveNew(database, target); err != nil {
		paths, _ := r.keysOut(o)
		return errors.Join(err, removeAll(paths))
	}
	return nil
}

// into restores the backup into a new database file and verifies it.
func (r *Restored) into(ctx context.Context, database string, o restoreOptions) error {
	s, err := bolt.Open(database, bolt.Options{})
	if err != nil {
		return err
	}
	if err := errors.Join(r.Fill(ctx, s, ""), s.Close()); err != nil {
		return fmt.Errorf("restoring: nothing was put in place: %w", err)
	}
	if s, err = bolt.Open(database, bolt.Options{ReadOnly: true}); err != nil {
		return err
	}
	if err := errors.Join(r.verify(ctx, s, o), s.Close()); err != nil {
		return fmt.Errorf("verifying what was restored: nothing was put in place: %w", err)
	}
	return nil
}

// toDatabase loads the backup into an empty database that others could open, too. Meanwhile the
// database has a mark, so no server serves it.
func (r *Restored) toDatabase(ctx context.Context, target offline.Location, o restoreOptions) (err error) {
	s, err := offline.Open(ctx, target)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	m := &offline.Mark{State: offline.Restoring, ID: rand.Text(), Other: "a backup", Chain: r.From.Header.Chain, Since: time.Now().UTC().Format(time.RFC3339)}
	if err := offline.Claim(ctx, s, m, func(found *offline.Mark) bool { return found.State == offline.Restoring }); err != nil {
		return err
	}
	if err := r.Fill(ctx, s, m.ID); err != nil {
		return fmt.Errorf("restoring: the database is not served, and the next restore into it begins again: %w", err)
	}
	if err := r.verify(ctx, s, o); err != nil {
		return fmt.Errorf("verifying what was restored: the database is not served, and the next restore into it begins again: %w", err)
	}
	if err := r.writeKeys(o); err != nil {
		return err
	}
	return offline.Unmark(ctx, s, m.ID) // on an unclear result the key stays in place
}

// Fill writes the rows of the backup to the store. It fails once the store's mark has another id;
// an empty id needs no mark.
func (r *Restored) Fill(ctx context.Context, s store.Store, id string) (err error) {
	type row struct{ key, value []byte }
	var batch []row
	size := 0
	apply := func() error {
		err := s.Update(ctx, func(tx store.Tx) error {
			err := offline.CheckHolder(tx, id)
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
	r.rows, err = r.From.Rows(func(key, value []byte) error {
		switch {
		case bytes.Equal(key, offline.MarkRow):
			return nil
		case bytes.Equal(key, format.Row): // raised while the backup was taken, after its header was written
			f, err := format.Parse(value)
			if err == nil {
				err = f.CheckReader()
			}
			if err != nil {
				return err
			}
		}
		batch = append(batch, row{bytes.Clone(key), bytes.Clone(value)})
		if size += len(key) + len(value); size < offline.BatchBytes && len(batch) < offline.BatchRows {
			return nil
		}
		return apply()
	})
	if err != nil {
		return err
	}
	return apply()
}

// verify compares the store with its audit log, and tries the KMS key of the backup and the named
// one.
func (r *Restored) verify(ctx context.Context, s store.Store, o restoreOptions) (err error) {
	if r.report, err = offline.VerifyStore(ctx, s, verify.Options{Fingerprint: r.From.Header.Chain}); err != nil {
		return err
	}
	signed := func(keys *keyring.Ring) error {
		if keys.Identity().ID() != r.From.Header.Identity.ID() {
			return errors.New("the backup is not signed by the deployment whose data is in it: somebody else made it")
		}
		r.tried = true
		return nil
	}
	current, former, err := offline.KMSKeysOfBackup(r.From.KMSKeys)
	if err != nil {
		return fmt.Errorf("reading the KMS keys of the backup: %w", err)
	}
	const whole = "the data is whole: find the key that it was made with"
	if current != nil {
		keys, err := keyring.Open(ctx, s, current, keyring.Config{Previous: former})
		if err != nil {
			r.key = fmt.Errorf("the KMS key in the backup does not open it; %s: %w", whole, err)
		} else if err := signed(keys); err != nil {
			return err
		}
	}
	if !o.tries() {
		return nil
	}
	var wrong error
	r.key = o.WithKeys(ctx, s, former, func(keys *keyring.Ring) error {
		wrong = signed(keys)
		return nil
	})
	if r.key != nil {
		r.key = fmt.Errorf("restored, but the KMS key that was named does not open it; %s: %w", whole, r.key)
	}
	return wrong
}
