package transfer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/progress"
	"github.com/latticekeep/latticekeep/internal/store"
)

// restoreDirectory is the folder in the data directory where a database is built. Its content can
// be removed at any time.
const restoreDirectory = offline.DatabaseFile + ".restore"

type restoreOptions struct {
	offline.Deployment
	input, identityFile string
	keyOut              string // file for the backup's KMS key; empty for none
	backupOnly          bool   // do not apply the log of commits
	chain, identity     string // pinned fingerprints; empty for none

	bucket, toTime, since, metricsFile string // see restoreToTime and follow
	revive, follow, promote            bool

	shown shown
}

// restored is the result of a restore.
type restored struct {
	restore.Restored
	log string // what the log of commits has added, for people
}

func (r restored) text(o restoreOptions) string {
	h := r.From.Header
	whose := "not compared with anything: somebody else could have made this backup"
	switch {
	case o.chain != "" || o.identity != "":
		whose = "as pinned"
	case o.tries() && r.Key == nil:
		whose = "those of the KMS key's deployment"
	}
	key := "The KMS key is not in the backup: start the server with the one that this deployment was made with."
	switch {
	case o.keyOut != "":
		paths, _ := r.keysOut(o)
		key = "The KMS key of the backup is in " + strings.Join(paths, " and ") + ": put it where the server's kms.url says, and keep no other copy there."
	case o.tries() && r.Key == nil:
		key = "The KMS key opens it."
	case r.Tried:
		key = "The KMS key in the backup opens it: --kms-key-out writes it to a file, should the server's own be lost."
	}
	return fmt.Sprintf(`restored: %d rows, taken %s by latticekeep %s
%shead: %d %s
chain: %s
identity: %s (%s)
%s
What happened after this head is lost: compare it with one that you kept.
`, r.Rows, h.CreatedAt.Format(time.RFC3339), h.Program, r.log, r.Report.Sequence, r.Report.Hash, h.Chain, h.Identity.ID(), whose, key)
}

// tries reports whether a KMS key to try is named.
func (o restoreOptions) tries() bool { return o.KeyFile != "" || o.KMSURL != "" }

// restoreTo writes the deployment and verifies it before a server can use it. It does not fail if the
// KMS key does not open the deployment, because the right one may exist elsewhere.
func restoreTo(ctx context.Context, o restoreOptions, stdin io.Reader) (restored, error) {
	target := o.Location(false)
	if err := target.Check(); err != nil {
		return restored{}, err
	}
	identities, err := command.ReadIdentities(o.identityFile)
	if err != nil {
		return restored{}, err
	}
	r := restored{}
	r.Entry = func() { o.shown.AddOf("entries verified") }
	err = withInput(ctx, o.input, stdin, func(in io.Reader) error {
		size := int64(0)
		if f, ok := in.(*os.File); ok {
			size = progress.Size(f)
		}
		return r.read(ctx, target, o, o.shown.Reader(in, "read", size), identities)
	})
	o.shown.EndOf("entries verified")
	if err != nil {
		return restored{}, err
	}
	return r, nil
}

// withInput opens what --input names and passes it to read.
func withInput(ctx context.Context, input string, stdin io.Reader, read func(io.Reader) error) error {
	bucket, name, isObject := objectOf(input)
	switch {
	case input == "-":
		return read(stdin)
	case isObject:
		b, err := objects.OpenExisting(ctx, bucket)
		if err == nil {
			err = b.Download(ctx, name, read)
		}
		if err != nil {
			return fmt.Errorf("reading %s of the bucket: %w", name, err)
		}
		return b.Close()
	}
	in, err := os.Open(input)
	if err != nil {
		return fmt.Errorf("opening the backup: %w", err)
	}
	defer in.Close()
	return read(in)
}

// read restores the backup from in to the target.
func (r *restored) read(ctx context.Context, target offline.Location, o restoreOptions, in io.Reader, identities []backup.Identity) (err error) {
	if r.From, err = restore.Open(backup.Split(in), identities); err != nil {
		return err
	}
	if err := o.compare(r); err != nil {
		return err
	}
	if !o.backupOnly {
		r.Then = func(ctx context.Context, s store.Store, id string) (err error) {
			r.Reached, r.log, err = replay(ctx, s, id, r.From, o.input, identities)
			return err
		}
	}
	if dir, ok := target.Dir(); ok {
		return r.toDirectory(ctx, dir, o)
	}
	return r.toDatabase(ctx, target, o)
}

// compare checks the backup's header against the pins before anything is written. Whether the
// header is genuine only shows at the end of the backup.
func (o restoreOptions) compare(r *restored) error {
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
func (r *restored) keysOut(o restoreOptions) (paths []string, keys [][]byte) {
	for i, key := range r.From.KMSKeys {
		if o.keyOut != "" && len(key) > 0 {
			paths, keys = append(paths, keyOutName(o.keyOut, i)), append(keys, key)
		}
	}
	return paths, keys
}

// writeKeys writes the KMS keys of the backup to their files.
func (r *restored) writeKeys(o restoreOptions) error {
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
func (r *restored) toDirectory(ctx context.Context, dir string, o restoreOptions) error {
	return inDirectory(dir, func(work string) error {
		if err := r.Into(ctx, filepath.Join(work, offline.DatabaseFile), r.tries(o)); err != nil {
			return err
		}
		return r.writeKeys(o)
	}, func() error {
		paths, _ := r.keysOut(o)
		return removeAll(paths)
	})
}

// inDirectory has build make a database in a folder of the data directory, and moves it to its place
// after that. undo takes back what else build did, should the move fail.
func inDirectory(dir string, build func(work string) error, undo func() error) (err error) {
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
	if err := build(work); err != nil {
		return err
	}
	if err := durable.MoveNew(filepath.Join(work, offline.DatabaseFile), target); err != nil {
		return errors.Join(err, undo())
	}
	return nil
}

// toDatabase loads the backup into an empty database that others could open, too. Meanwhile the
// database has a mark, so no server serves it.
func (r *restored) toDatabase(ctx context.Context, target offline.Location, o restoreOptions) (err error) {
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
	if err := r.Verify(ctx, s, r.tries(o)); err != nil {
		return fmt.Errorf("verifying what was restored: the database is not served, and the next restore into it begins again: %w", err)
	}
	if err := r.writeKeys(o); err != nil {
		return err
	}
	return offline.Unmark(ctx, s, m.ID) // on an unclear result the key stays in place
}

// tries returns a function that tries the KMS key that is named on what was restored, and nil when none
// is. It does not fail if the key does not open the deployment.
func (r *restored) tries(o restoreOptions) func(context.Context, store.Store) error {
	if !o.tries() {
		return nil
	}
	return func(ctx context.Context, s store.Store) error {
		_, former, err := offline.KMSKeysOfBackup(r.From.KMSKeys)
		if err != nil {
			return fmt.Errorf("reading the KMS keys of the backup: %w", err)
		}
		var wrong error
		r.Key = o.WithKeys(ctx, s, former, func(keys *keyring.Ring) error {
			wrong = r.Opened(keys)
			return nil
		})
		if r.Key != nil {
			r.Key = fmt.Errorf("restored, but the KMS key that was named does not open it; %s: %w", restore.Whole, r.Key)
		}
		return wrong
	}
}
