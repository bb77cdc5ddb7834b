// Package restore makes a store of a backup, and verifies what it made. A server does that with the
// backups that it takes, and the command restore with those that it is given.
package restore

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Restored is a backup that is made a store of.
type Restored struct {
	From   *backup.Reader
	Gentle bool // verify on one core
	// Then changes the store once the backup is in it and is known to be whole, and before it is
	// verified. id is that of [Restored.Fill]. Nil: nothing.
	Then func(ctx context.Context, s store.Store, id string) error
	// Entry is called for each entry of the log that is verified. Nil: not called.
	Entry func()

	// The results.
	Rows    uint64
	Report  verify.Report
	Reached commits.Reached // up to where the log of commits was applied; zero: it was not
	Tried   bool            // a KMS key opens the deployment
	Key     error           // reason why the KMS key does not open the deployment
}

// Whole is what an error about a KMS key says of the data.
const Whole = "the data is whole: find the key that it was made with"

// Open opens a backup up to its rows.
func Open(in io.Reader, identities []backup.Identity) (*backup.Reader, error) {
	r, err := backup.Open(in, identities)
	if err != nil {
		return nil, err
	}
	return r, Readable(r)
}

// Readable fails for a backup of a store that only a newer release reads.
func Readable(r *backup.Reader) error {
	f, err := format.Parse(r.Header.Format)
	if err == nil {
		err = f.CheckReader()
	}
	if err != nil {
		return fmt.Errorf("opening the backup: %w", err)
	}
	return nil
}

// Into restores the backup into a new database file and verifies it as
// [Restored.Verify] does.
func (r *Restored) Into(ctx context.Context, database string, also func(context.Context, store.Store) error) error {
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
	if err := errors.Join(r.Verify(ctx, s, also), s.Close()); err != nil {
		return fmt.Errorf("verifying what was restored: nothing was put in place: %w", err)
	}
	return nil
}

// Fill writes the rows of the backup to the store. It fails once the store's mark has another id;
// an empty id needs no mark.
func (r *Restored) Fill(ctx context.Context, s store.Store, id string) (err error) {
	type row struct{ key, value []byte }
	var batch []row
	size := 0
	apply := func() error {
		err := s.Update(ctx, func(tx store.Tx) error {
			if err := offline.CheckHolder(tx, id); err != nil {
				return err
			}
			for _, r := range batch {
				if err := put(tx, r.key, r.value); err != nil {
					return err
				}
			}
			return nil
		})
		batch, size = batch[:0], 0
		return err
	}
	r.Rows, err = r.From.Rows(func(key, value []byte) error {
		batch = append(batch, row{bytes.Clone(key), bytes.Clone(value)})
		if size += len(key) + len(value); size < offline.BatchBytes && len(batch) < offline.BatchRows {
			return nil
		}
		return apply()
	})
	if err != nil {
		return err
	}
	if err := apply(); err != nil || r.Then == nil {
		return err
	}
	return r.Then(ctx, s, id)
}

// Verify compares the store with its audit log, and tries the KMS key of the backup, if there is one.
// also may try others; nil does not.
func (r *Restored) Verify(ctx context.Context, s store.Store, also func(context.Context, store.Store) error) (err error) {
	if r.Report, err = offline.VerifyStore(ctx, s, verify.Options{Fingerprint: r.From.Header.Chain, Gentle: r.Gentle, Entry: r.Entry}); err != nil {
		return err
	}
	if at := r.Reached; !at.Time.IsZero() && (r.Report.Sequence != at.Head.Sequence || r.Report.Hash != hex.EncodeToString(at.Head.Hash[:])) {
		return fmt.Errorf("the log of commits ends with entry %d, and the store with %d: restore with --backup-only", at.Head.Sequence, r.Report.Sequence)
	}
	current, former, err := offline.KMSKeysOfBackup(r.From.KMSKeys)
	if err != nil {
		return fmt.Errorf("reading the KMS keys of the backup: %w", err)
	}
	if current != nil {
		keys, err := keyring.Open(ctx, s, current, keyring.Config{Previous: former})
		if err != nil {
			r.Key = fmt.Errorf("the KMS key in the backup does not open it; %s: %w", Whole, err)
		} else if err := r.Opened(keys); err != nil {
			return err
		}
	}
	if also == nil {
		return nil
	}
	return also(ctx, s)
}

// Opened notes that a KMS key opens the deployment. It fails if the deployment has not signed the
// backup.
func (r *Restored) Opened(keys *keyring.Ring) error {
	if keys.Identity().ID() != r.From.Header.Identity.ID() {
		return errors.New("the backup is not signed by the deployment whose data is in it: somebody else made it")
	}
	r.Tried = true
	return nil
}
