package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/backup/schedule"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// source is a bucket to which a server takes backups and ships its log of commits.
type source struct {
	restoreOptions
	bucket     *objects.Bucket
	identities []backup.Identity
	backups    []keptBackup // the deployment's backups, oldest first
}

// keptBackup is a backup in a bucket.
type keptBackup struct {
	name  string
	began time.Time
}

// openSource opens the bucket and lists the backups of the deployment.
func openSource(ctx context.Context, o restoreOptions) (s *source, err error) {
	s = &source{restoreOptions: o}
	if s.identities, err = command.ReadIdentities(o.identityFile); err != nil {
		return nil, err
	}
	if s.bucket, err = objects.OpenExisting(ctx, o.bucket); err != nil {
		return nil, fmt.Errorf("opening the bucket: %w", err)
	}
	if err := s.list(ctx); err != nil {
		return nil, errors.Join(err, s.bucket.Close())
	}
	return s, nil
}

// maxListed is the number of objects that are looked at in a bucket.
const maxListed = 1_000_000

// list finds the backups of the deployment that have a signature.
func (s *source) list(ctx context.Context) error {
	names, err := s.bucket.List(ctx, "backup/", maxListed)
	if err != nil {
		return err
	}
	byChain := make(map[string][]keptBackup)
	for _, name := range names {
		chain, began, ok := schedule.ParseName(name)
		if _, signed := slices.BinarySearch(names, name+signatureSuffix); ok && signed {
			byChain[chain] = append(byChain[chain], keptBackup{name, began})
		}
	}
	for chain, backups := range byChain {
		slices.SortFunc(backups, func(a, b keptBackup) int { return a.began.Compare(b.began) })
		if s.chain != "" && len(byChain) > 1 && !s.areOf(ctx, backups) {
			delete(byChain, chain)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	switch len(byChain) {
	case 0:
		return errors.New("the bucket has no backup of this deployment: look at --bucket and --fingerprint")
	case 1:
		for _, backups := range byChain {
			s.backups = backups
		}
		return nil
	}
	return command.UsageError("the bucket has backups of several deployments: name yours with --fingerprint")
}

// areOf reports whether the newest of these backups that opens is of the pinned chain. Somebody else may
// have put a newer object beside them.
func (s *source) areOf(ctx context.Context, backups []keptBackup) bool {
	for _, b := range slices.Backward(backups) {
		chain := ""
		err := s.bucket.Download(ctx, b.name, func(in io.Reader) error {
			from, err := restore.Open(backup.Split(s.shown.Reader(in, "read", 0)), s.identities)
			if err == nil {
				chain = from.Header.Chain
			}
			return err
		})
		if err == nil || ctx.Err() != nil {
			return chain == s.chain
		}
	}
	return false
}

func (s *source) newest() keptBackup { return s.backups[len(s.backups)-1] }

// open passes a backup to use, opened up to its rows.
func (s *source) open(ctx context.Context, b keptBackup, use func(*restored) error) error {
	err := s.bucket.Download(ctx, b.name, func(in io.Reader) error {
		from, err := restore.Open(backup.Split(in), s.identities)
		if err != nil {
			return err
		}
		r := &restored{Restored: restore.Restored{From: from}}
		if err := s.compare(r); err != nil {
			return err
		}
		return use(r)
	})
	if err != nil {
		return fmt.Errorf("restoring %s of the bucket: %w", b.name, err)
	}
	return nil
}

// fill makes a database of a backup, and passes it to use.
func (s *source) fill(ctx context.Context, b keptBackup, database string, use func(*restored, store.Store) error) error {
	return s.open(ctx, b, func(r *restored) error {
		return withDatabase(database, func(db store.Database) error {
			if err := r.Fill(ctx, db, ""); err != nil {
				return err
			}
			return use(r, db)
		})
	})
}

// withDatabase opens a database file that nobody uses, and makes it if it does not exist.
func withDatabase(path string, use func(store.Database) error) error {
	db, err := bolt.Open(path, bolt.Options{})
	if err != nil {
		return err
	}
	return errors.Join(use(db), db.Close())
}

// verified verifies a database file that nobody uses, and that its log is the chain.
func verified(ctx context.Context, path string, o verify.Options) (report verify.Report, err error) {
	db, err := bolt.Open(path, bolt.Options{ReadOnly: true})
	if err != nil {
		return report, err
	}
	report, err = offline.VerifyStore(ctx, db, o)
	return report, errors.Join(err, db.Close())
}

// logOf returns the log of commits that the backup in a database is part of. There is none in the
// backup of a server that ships none.
func (s *source) logOf(ctx context.Context, b keptBackup, r *restored, db store.Store) (log commits.Log, there bool, err error) {
	h := r.From.Header
	chainID, _, _ := schedule.ParseName(b.name)
	log = commits.Log{Bucket: s.bucket, Folder: commits.Folder(chainID), Chain: h.Chain, Identity: h.Identity, Identities: s.identities}
	there, err = readPlace(ctx, db, &log)
	return log, there, err
}
