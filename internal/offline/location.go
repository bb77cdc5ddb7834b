package offline

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
)

// KMSFile returns the path of the key file in a value of kms.url, if the URL names a file.
func KMSFile(text string) (path string, ok bool) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "file" {
		return "", false
	}
	return u.Path, true
}

// Names of files in a data directory. Only development servers keep the KMS key there.
const (
	DatabaseFile   = "latticekeep.db"
	KMSKeyFileName = "kms.key"
)

// OpenExisting opens a store that must exist. It refuses a data directory that a server is using.
func OpenExisting(ctx context.Context, a Location) (store.Database, error) {
	if dir, ok := a.Dir(); ok {
		if _, err := os.Stat(filepath.Join(dir, DatabaseFile)); err != nil {
			return nil, fmt.Errorf("there is no deployment: %w", err)
		}
	}
	return Open(ctx, a)
}

// LockDataDir locks a data directory while a database is created in it. It keeps a second restore
// out, and a starting server waits.
func LockDataDir(dir string) (*os.File, error) {
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

// BoltScheme is the URL scheme of a data directory, as in bolt:/var/lib/latticekeep.
const BoltScheme = "bolt:"

const storeHint = "give bolt: and a data directory, as bolt:/var/lib/latticekeep, or postgres://user@host/database"

// Location names a store for a command that opens it itself.
type Location struct {
	URL          string // bolt:DIR or postgres://…
	PasswordFile string // file with the PostgreSQL password; PGPASSWORD otherwise
	ReadOnly     bool
	Hook         store.Hook // called for each commit; nil: no hook
}

// Dir returns the data directory, if the location is one.
func (a Location) Dir() (dir string, ok bool) { return strings.CutPrefix(a.URL, BoltScheme) }

// Check fails if the URL is not that of a store. The error does not quote the URL, which may
// contain a password.
func (a Location) Check() error {
	if dir, ok := a.Dir(); ok {
		if dir == "" || strings.HasPrefix(dir, "//") || strings.HasSuffix(dir, DatabaseFile) {
			return errors.New("the URL names no data directory: " + storeHint)
		}
		return nil
	}
	u, err := url.Parse(a.URL)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return errors.New("the URL is not that of a store: " + storeHint)
	}
	return nil
}

// String returns the name of the store without secrets.
func (a Location) String() string {
	if dir, ok := a.Dir(); ok {
		if whole, err := filepath.Abs(dir); err == nil {
			dir = whole
		}
		return BoltScheme + dir
	}
	u, err := url.Parse(a.URL)
	if err != nil {
		return "postgres"
	}
	return fmt.Sprintf("%s://%s%s", u.Scheme, u.Host, u.Path)
}

// Open opens the store. The store may lack a deployment. The caller closes it. Open refuses a store
// of a newer release that this program must not read, or must not write unless a.ReadOnly is set.
func Open(ctx context.Context, a Location) (store.Database, error) {
	s, err := openUnchecked(ctx, a)
	if err != nil {
		return nil, err
	}
	if err := format.Check(ctx, s, a.ReadOnly); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// openUnchecked opens the store whatever its format is.
func openUnchecked(ctx context.Context, a Location) (store.Database, error) {
	if err := a.Check(); err != nil {
		return nil, err
	}
	if dir, ok := a.Dir(); ok {
		s, err := bolt.Open(filepath.Join(dir, DatabaseFile), bolt.Options{ReadOnly: a.ReadOnly, Hook: a.Hook})
		if err != nil {
			return nil, fmt.Errorf("opening %s of %s: %w", DatabaseFile, dir, err)
		}
		return s, nil
	}
	return postgres.Open(ctx, a.URL, postgres.Options{ReadOnly: a.ReadOnly, Hook: a.Hook, Password: a.Password()})
}

// Password returns a function that reads the PostgreSQL password from its file, and nil without a
// file.
func (a Location) Password() func() (string, error) {
	if a.PasswordFile == "" {
		return nil
	}
	return func() (string, error) {
		b, err := os.ReadFile(a.PasswordFile)
		if err != nil {
			return "", fmt.Errorf("reading the password of the database: %w", err)
		}
		return strings.TrimRight(string(b), "\r\n"), nil
	}
}

// fileURL returns the URL of a key file.
func fileURL(path string) string {
	if whole, err := filepath.Abs(path); err == nil {
		path = whole
	}
	u := url.URL{Scheme: "file", Path: filepath.ToSlash(path)}
	return u.String()
}
