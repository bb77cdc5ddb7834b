package schedule

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// take writes a backup into the bucket, reads it again, and then writes its signature. The backup is an
// entry of the audit log before its first byte leaves.
func (s *Schedule) take(ctx context.Context, c *claimed) (_ *backup.Written, err error) {
	if there, err := s.Bucket.Exists(ctx, c.Attempt); err != nil { // so a bucket that is gone makes no entry
		return nil, err
	} else if there {
		return nil, fmt.Errorf("%s exists already, and nothing is ever overwritten", c.Attempt)
	}
	if c.leftover != "" {
		if c.restored, err = s.removeUnfinished(ctx, c.leftover); err != nil {
			return nil, fmt.Errorf("removing what an unfinished backup left: %w", err)
		}
	}
	var keys [][]byte
	if s.KMSKeys != nil {
		if keys, err = s.KMSKeys(ctx); err != nil {
			return nil, fmt.Errorf("reading the key file of the KMS, which belongs into the backup: %w", err)
		}
	}
	defer func() {
		for _, key := range keys {
			clear(key)
		}
	}()
	raised, err := format.RaisedRow(ctx, s.Store)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, r := range s.Recipients {
		ids = append(ids, r.ID())
	}
	err = s.Guard.Record(ctx, audit.Event{
		Type: audit.BackupTaken, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant), Resource: audit.Resource{Type: audit.BackupResource},
		Attributes: map[string]string{
			"recipient": strings.Join(ids, " "), "kms_key": strconv.FormatBool(len(keys) > 0 && len(keys[0]) > 0), audit.AttributeObject: c.Attempt,
		},
	})
	if err != nil {
		return nil, err
	}
	if s.commits != nil {
		if err := s.commits.Mark(ctx); err != nil {
			return nil, err
		}
	}
	h := backup.Header{Chain: s.Log.Fingerprint(), Identity: s.Keys.Identity(), CreatedAt: c.began, Program: s.Program, Format: raised}
	var written *backup.Written
	c.begun = true
	err = s.Bucket.Upload(ctx, c.Attempt, func(w io.Writer) (err error) {
		written, err = backup.WriteFile(ctx, w, s.Store, h, keys, s.Recipients, s.Keys)
		return err
	})
	if err == nil {
		err = s.confirm(ctx, c.Attempt, written.Statement)
	}
	if err != nil {
		if written != nil {
			written.Wipe()
		}
		return nil, err
	}
	return written, nil
}

// confirm reads a backup again, compares it with its statement, and puts that beside it.
func (s *Schedule) confirm(ctx context.Context, name string, statement []byte) error {
	said, err := backup.ParseStatement(statement)
	if err != nil {
		return err
	}
	if err := s.Bucket.Download(ctx, name, said.Check); err != nil {
		return fmt.Errorf("reading the backup again: %w", err)
	}
	if err := s.Bucket.Put(ctx, name+signatureSuffix, statement); err != nil {
		return err
	}
	kept, err := s.Bucket.GetStart(ctx, name+signatureSuffix, len(statement)+1)
	if err == nil && !bytes.Equal(kept, statement) {
		err = errors.New("it is not what was written")
	}
	if err != nil {
		return fmt.Errorf("reading the signature of the backup again: %w", err)
	}
	return nil
}

// verify makes a scratch store of the backup in the bucket, verifies that, and records the success.
func (s *Schedule) verify(ctx context.Context, c *claimed, w *backup.Written) (err error) {
	dir, err := s.scratch(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, wipe(dir)) }()
	err = s.Bucket.Download(ctx, c.Attempt, func(file io.Reader) error {
		from, err := w.Open(file)
		if err == nil {
			err = restore.Readable(from)
		}
		if err != nil {
			return err
		}
		defer func() {
			for _, key := range from.KMSKeys {
				clear(key)
			}
		}()
		r := &restore.Restored{From: from, Gentle: true}
		err = r.Into(ctx, filepath.Join(dir, "scratch.db"), func(ctx context.Context, db store.Store) error {
			keys, err := keyring.Open(ctx, db, s.KMS[0], keyring.Config{Previous: s.KMS[1:], Now: s.Now})
			if err != nil {
				return fmt.Errorf("the KMS key does not open it: %w", err)
			}
			return r.Opened(keys)
		})
		if err == nil {
			err = r.Key
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("restoring %s: %w", c.Attempt, err)
	}
	return s.update(ctx, func(r *row) error {
		if !r.Taken.Equal(c.began) {
			return errTakenOver
		}
		r.Verified, r.Until = c.began, time.Time{}
		return nil
	})
}

// scratchPattern names the folder of a scratch store.
const scratchPattern = ".latticekeep-scratch-*"

// scratch makes a folder for the scratch store, if there is room for it. It removes those that killed
// processes left.
func (s *Schedule) scratch(ctx context.Context) (dir string, err error) {
	left, err := filepath.Glob(filepath.Join(s.Scratch, scratchPattern))
	for _, dir := range left {
		err = errors.Join(err, wipe(dir))
	}
	if err != nil {
		return "", fmt.Errorf("removing an earlier scratch store: %w", err)
	}
	used, err := s.Store.Usage(ctx)
	if err != nil {
		return "", err
	}
	var volume syscall.Statfs_t
	if err := syscall.Statfs(s.Scratch, &volume); err != nil {
		return "", fmt.Errorf("backup.scratch: looking for room in %s: %w", s.Scratch, err)
	}
	// Half as much again as the rows take, and a twentieth of the volume for whoever else writes there.
	need := uint64(used.Size-max(used.Free, 0)) * 3 / 2
	if free, spare := volume.Bavail*uint64(volume.Bsize), volume.Blocks*uint64(volume.Bsize)/20; free < need+spare {
		return "", fault.New(fault.Unavailable, fmt.Sprintf(
			"backup.scratch: %s has %d MiB free, and a scratch store takes up to %d MiB beside %d MiB that stay free: make room, or name another folder", s.Scratch, free>>20, need>>20, spare>>20))
	}
	if dir, err = os.MkdirTemp(s.Scratch, scratchPattern); err != nil { // mode 0700
		return "", fmt.Errorf("backup.scratch: %w", err)
	}
	return dir, nil
}

// wipe removes a scratch store. It overwrites the files first, since what is deleted later is not to
// stay on the disk in a copy. A file system that copies on write keeps the blocks all the same.
func wipe(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range files {
		err = errors.Join(err, overwrite(path))
	}
	return errors.Join(err, os.RemoveAll(dir))
}

func overwrite(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	zeros := make([]byte, 1<<20)
	for at := int64(0); err == nil && at < info.Size(); at += int64(len(zeros)) {
		_, err = f.WriteAt(zeros[:min(int64(len(zeros)), info.Size()-at)], at)
	}
	return errors.Join(err, f.Sync(), f.Close())
}

// mostListed bounds a list of the bucket. The oldest names come first, so what is beyond it is listed
// when they are deleted.
const mostListed = 20_000

// afterRestore is how long a restored server deletes nothing.
const afterRestore = 8 * 24 * time.Hour

// expire deletes the backups that are older than Keep, except that of c, which was verified just now, and
// whatever is newer, and then the commits that are older than all that is left. It deletes only what has
// a signature of this deployment, and nothing while another server takes backups: see the package comment.
func (s *Schedule) expire(ctx context.Context, c *claimed) error {
	if s.Keep == 0 {
		return nil
	}
	names, err := s.Bucket.List(ctx, s.prefix(), mostListed)
	if err != nil {
		return err
	}
	r, err := s.read(ctx)
	if err != nil {
		return err
	}
	foreign, err := s.foreign(ctx, c, names, r.Foreign)
	if err != nil {
		return err
	}
	if foreign != "" {
		return fmt.Errorf("another server takes backups of this deployment into this bucket, such as %s: give each server a bucket or folder of its own, or, if that server is gone, delete its backups", foreign)
	}
	if c.began.Sub(r.Restored) < afterRestore {
		return nil
	}
	newest, before := c.Attempt, s.Now().Add(-s.Keep)
	var failed error
	oldest := s.Now()
	for _, signature := range names {
		name, is := strings.CutSuffix(signature, signatureSuffix)
		at, ours := s.timeOf(name)
		if !is || !ours {
			continue
		}
		old, made, err := name < newest && at.Before(before), false, error(nil)
		if old {
			made, err = s.made(ctx, name, at)
		}
		if made { // the signature goes last, since it shows that the rest may go
			err = s.remove(ctx, name)
		}
		failed = errors.Join(failed, err)
		if (!old || err != nil) && at.Before(oldest) {
			oldest = at
		}
		if !made || err != nil {
			continue
		}
		s.Logger.InfoContext(ctx, "deleted an old backup", "object", name)
	}
	if s.commits == nil {
		return failed
	}
	deleted, err := s.commits.Expire(ctx, oldest.Add(-skew))
	if deleted > 0 {
		s.Logger.InfoContext(ctx, "deleted commits that are older than all backups", "segments", deleted)
	}
	return errors.Join(failed, err)
}

// foreign returns the newest backup in the bucket that another server of this deployment took since the
// backup before c, or else the one that was found earlier, if it is still there. The row remembers it.
func (s *Schedule) foreign(ctx context.Context, c *claimed, names []string, earlier string) (found string, err error) {
	for _, signature := range names {
		name, is := strings.CutSuffix(signature, signatureSuffix)
		at, ours := s.timeOf(name)
		switch {
		case !is || !ours:
		case name == earlier:
			found = max(found, name)
		case c.previous.IsZero() || !at.After(c.previous) || !at.Before(c.began):
		default:
			made, err := s.made(ctx, name, at)
			if err != nil {
				return "", err
			}
			if made {
				found = max(found, name)
			}
		}
	}
	if found == earlier {
		return found, nil
	}
	return found, s.update(ctx, func(r *row) error { r.Foreign = found; return nil })
}

// made reports whether the signature beside a backup is of this deployment and of that backup.
func (s *Schedule) made(ctx context.Context, name string, at time.Time) (bool, error) {
	b, err := s.Bucket.GetStart(ctx, name+signatureSuffix, backup.StatementSize+1)
	if fault.Of(err) == fault.NotFound {
		return false, nil // another replica has deleted it
	}
	if err != nil {
		return false, err
	}
	said, err := backup.ParseStatement(b)
	return err == nil && said.Chain == s.Log.Fingerprint() && said.Identity.ID() == s.Keys.Identity().ID() && said.CreatedAt.Equal(at), nil
}
