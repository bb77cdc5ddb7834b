// Package offline works on stores that no server uses. It opens them by URL with the keys of their
// deployment. It also sets and reads the mark that keeps every server away from a store while a
// restore or a migration works on it.
package offline

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/vault/compare"
)

// Verify verifies the log and the credential rows of a store that no server uses. For a range it
// verifies only the log.
func (s *Deployment) Verify(ctx context.Context, a verify.Options) (report verify.Report, err error) {
	err = s.WithStore(ctx, func(db store.Database) (err error) {
		if a.From > 1 || a.To > 0 { // a partial log does not show which rows exist
			report, err = verify.Store(ctx, db, a)
			return err
		}
		report, err = VerifyStore(ctx, db, a)
		return err
	})
	return report, err
}

// VerifyDataDir is [Deployment.Verify] for a data directory.
func VerifyDataDir(ctx context.Context, dir string, a verify.Options) (verify.Report, error) {
	s := Deployment{DataDir: dir}
	return s.Verify(ctx, a)
}

// VerifyStore verifies the whole log of a database and the rows that the log covers: credentials,
// API keys and namespaces.
func VerifyStore(ctx context.Context, s store.Store, o verify.Options) (verify.Report, error) {
	report, err := compare.Store(ctx, s, o)
	if err != nil {
		return verify.Report{}, err
	}
	return report, identity.VerifyStore(ctx, s, report)
}

// Deployment is the deployment of a stopped server, as flags name it.
type Deployment struct {
	DataDir, Store, PasswordFile string
	KeyFile, KMSURL              string
	FormerKMSURLs                []string
	TokenFile                    string
}

func (s *Deployment) Named() bool { return s.DataDir != "" || s.Store != "" }

func (s *Deployment) Location(readOnly bool) Location {
	a := Location{URL: s.Store, PasswordFile: s.PasswordFile, ReadOnly: readOnly}
	if s.DataDir != "" {
		a.URL = BoltScheme + s.DataDir
	}
	return a
}

// WithStore opens the store for reading and passes it to do. It refuses a store that is incomplete
// because of a restore or a migration, and one that only a newer release reads.
func (s *Deployment) WithStore(ctx context.Context, do func(store.Database) error) error {
	return s.withStore(ctx, s.Location(true), func(m *Mark) bool { return m.Unfinished() }, do)
}

// WithWritableStore opens the store for writing, with the hook of its commits, and passes it to do.
// It refuses a store that no server would serve.
func (s *Deployment) WithWritableStore(ctx context.Context, hook store.Hook, do func(store.Database) error) error {
	at := s.Location(false)
	at.Hook = HookUnlessMarked(hook)
	return s.withStore(ctx, at, func(*Mark) bool { return true }, do)
}

func (s *Deployment) withStore(ctx context.Context, at Location, refuses func(*Mark) bool, do func(store.Database) error) error {
	open := openUnchecked
	if !at.ReadOnly {
		open = OpenExisting // nothing is made
	}
	db, err := open(ctx, at)
	if err != nil {
		return fmt.Errorf("%w (what a running server has is asked for with --url)", err)
	}
	m, err := MarkOf(ctx, db)
	switch {
	case err != nil:
	case m != nil && refuses(m):
		err = m.Err()
	default:
		if err = format.Check(ctx, db, true); err == nil {
			err = do(db)
		}
	}
	return errors.Join(err, db.Close())
}

// KMSKeyFile returns the path of the KMS key, if the key is a file.
func (s *Deployment) KMSKeyFile() (path string, ok bool) {
	switch {
	case s.KeyFile != "":
		return s.KeyFile, true
	case s.KMSURL != "":
		return KMSFile(s.KMSURL)
	case s.Location(true).Check() == nil:
		if dir, ok := s.Location(true).Dir(); ok {
			return filepath.Join(dir, KMSKeyFileName), true
		}
	}
	return "", false
}

// kmsURLs returns the URLs of the KMS keys, the current one first.
func (s *Deployment) kmsURLs() ([]string, error) {
	current := s.KMSURL
	if path, ok := s.KMSKeyFile(); ok {
		current = fileURL(path)
	}
	if current == "" {
		return nil, errors.New("the deployment's keys are needed: name the KMS key with --kms-key-file or --kms-url")
	}
	return append([]string{current}, s.FormerKMSURLs...), nil
}

// HasKMSKey reports whether a KMS key is named, or a key file is in the data directory.
func (s *Deployment) HasKMSKey() bool {
	if s.KeyFile != "" || s.KMSURL != "" {
		return true
	}
	path, ok := s.KMSKeyFile()
	if ok {
		_, err := os.Stat(path)
		ok = err == nil
	}
	return ok
}

// WithKMS opens the KMS keys and passes them to use, the current one first.
func (s *Deployment) WithKMS(ctx context.Context, use func([]keyring.KMS) error) error {
	urls, err := s.kmsURLs()
	if err != nil {
		return err
	}
	var all []keyring.KMS
	for _, u := range urls {
		k, err := kms.Open(ctx, u, kms.Options{TokenFile: s.TokenFile})
		if err != nil {
			return fmt.Errorf("opening the KMS key: %w", err)
		}
		defer func() { _ = k.Close() }() // nothing is left to do on an error
		all = append(all, k)
	}
	return use(all)
}

// WithKeys opens the deployment's keys and passes them to use. former has more KMS keys that may
// still be needed, besides the configured ones.
func (s *Deployment) WithKeys(ctx context.Context, db store.Store, former []keyring.KMS, use func(*keyring.Ring) error) error {
	return s.WithKMS(ctx, func(all []keyring.KMS) error {
		keys, err := keyring.Open(ctx, db, all[0], keyring.Config{Previous: append(all[1:], former...)})
		if err != nil {
			return err
		}
		return use(keys)
	})
}

// ReadKMSKeyFiles returns the key files of the KMS for a backup.
func (s *Deployment) ReadKMSKeyFiles() ([][]byte, error) {
	urls, err := s.kmsURLs()
	if err != nil {
		return nil, err
	}
	opened := make([]KeyFile, len(urls))
	for i, u := range urls {
		path, ok := KMSFile(u)
		if !ok {
			continue
		}
		k, err := kms.OpenLocal(path)
		if err != nil {
			return nil, fmt.Errorf("opening %s: %w", filepath.Base(path), err)
		}
		opened[i] = KeyFile{path, k.ID()}
	}
	return ReadKeyFiles(opened, nil)
}
