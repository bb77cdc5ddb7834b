package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
)

// boltScheme is that of the URL of a data directory: bolt:/var/lib/latticekeep.
const boltScheme = "bolt:"

const storeHint = "give bolt: and a data directory, as bolt:/var/lib/latticekeep, or postgres://user@host/database"

// storeAt says where a store is, for a command that opens it itself.
type storeAt struct {
	url          string // bolt:DIR or postgres://…
	passwordFile string // of PostgreSQL; else what PGPASSWORD says
	readOnly     bool
}

// dir returns the data directory, if it is one.
func (a storeAt) dir() (dir string, ok bool) { return strings.CutPrefix(a.url, boltScheme) }

// check fails for what is not the URL of a store, and quotes nothing: there may
// be a password in it.
func (a storeAt) check() error {
	if dir, ok := a.dir(); ok {
		if dir == "" || strings.HasPrefix(dir, "//") || strings.HasSuffix(dir, databaseFile) {
			return errors.New("the URL names no data directory: " + storeHint)
		}
		return nil
	}
	u, err := url.Parse(a.url)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return errors.New("the URL is not that of a store: " + storeHint)
	}
	return nil
}

// String names the store without what is secret.
func (a storeAt) String() string {
	if dir, ok := a.dir(); ok {
		if whole, err := filepath.Abs(dir); err == nil {
			dir = whole
		}
		return boltScheme + dir
	}
	u, err := url.Parse(a.url)
	if err != nil {
		return "postgres"
	}
	return fmt.Sprintf("%s://%s%s", u.Scheme, u.Host, u.Path)
}

// openStoreAt opens the store, which need not be that of a deployment. The caller
// closes it.
func openStoreAt(ctx context.Context, a storeAt) (store.Database, error) {
	if err := a.check(); err != nil {
		return nil, err
	}
	if dir, ok := a.dir(); ok {
		s, err := bolt.Open(filepath.Join(dir, databaseFile), bolt.Options{ReadOnly: a.readOnly})
		if err != nil {
			return nil, fmt.Errorf("opening %s of %s: %w", databaseFile, dir, err)
		}
		return s, nil
	}
	return postgres.Open(ctx, a.url, postgres.Options{ReadOnly: a.readOnly, Password: a.password()})
}

// password returns what tells the password of PostgreSQL, and nil when no file
// does.
func (a storeAt) password() func() (string, error) {
	if a.passwordFile == "" {
		return nil
	}
	return func() (string, error) {
		b, err := os.ReadFile(a.passwordFile)
		if err != nil {
			return "", fmt.Errorf("reading the password of the database: %w", err)
		}
		return strings.TrimRight(string(b), "\r\n"), nil
	}
}

// stopped is the deployment of a server that does not run, as flags name it.
type stopped struct {
	dir, store, passwordFile string
	kmsKeyFile, kmsURL       string
	kmsFormer                []string
	tokenFile                string
}

// registerStore defines the flags that say which store of a stopped server to open.
func registerStore(cmd *cobra.Command, s *stopped, what string) {
	flags := cmd.Flags()
	flags.StringVar(&s.dir, "data-dir", "", "data directory "+what)
	flags.StringVar(&s.store, "store", "", "the same as a URL, bolt:DIR or postgres://user@host/database")
	flags.StringVar(&s.passwordFile, "password-file", "", "file with the password of --store (default: what PGPASSWORD says)")
	cmd.MarkFlagsMutuallyExclusive("data-dir", "store")
}

// registerKMS defines the flags that say which KMS key opens the keys of the store.
func registerKMS(cmd *cobra.Command, s *stopped, use string) {
	flags := cmd.Flags()
	flags.StringVar(&s.kmsKeyFile, "kms-key-file", "", use)
	flags.StringVar(&s.kmsURL, "kms-url", "", "the same as a URL, as in kms.url")
	flags.StringArrayVar(&s.kmsFormer, "kms-former", nil, "URL of a former KMS key that not all was moved from, as in kms.former; may be repeated")
	flags.StringVar(&s.tokenFile, "kms-token-file", "", "file with the token of a hashivault:// --kms-url")
	cmd.MarkFlagsMutuallyExclusive("kms-key-file", "kms-url")
}

func (s *stopped) named() bool { return s.dir != "" || s.store != "" }

func (s *stopped) at(readOnly bool) storeAt {
	a := storeAt{url: s.store, passwordFile: s.passwordFile, readOnly: readOnly}
	if s.dir != "" {
		a.url = boltScheme + s.dir
	}
	return a
}

// with opens the store for reading and has do use it. One that is not whole yet
// is refused.
func (s *stopped) with(ctx context.Context, do func(store.Database) error) error {
	db, err := openStoreAt(ctx, s.at(true))
	if err != nil {
		return fmt.Errorf("%w (what a running server has is asked for with --url)", err)
	}
	m, err := markOf(ctx, db)
	switch {
	case err != nil:
	case m != nil && m.unfinished():
		err = m.refusal()
	default:
		err = do(db)
	}
	return errors.Join(err, db.Close())
}

// keyFile returns the file of the KMS key, if it is a file.
func (s *stopped) keyFile() (path string, ok bool) {
	switch {
	case s.kmsKeyFile != "":
		return s.kmsKeyFile, true
	case s.kmsURL != "":
		return kmsFile(s.kmsURL)
	case s.at(true).check() == nil:
		if dir, ok := s.at(true).dir(); ok {
			return filepath.Join(dir, kmsKeyFile), true
		}
	}
	return "", false
}

// kmsURLs are those of the KMS keys, the current one first.
func (s *stopped) kmsURLs() ([]string, error) {
	current := s.kmsURL
	if path, ok := s.keyFile(); ok {
		current = fileURL(path)
	}
	if current == "" {
		return nil, errors.New("the deployment's keys are needed: name the KMS key with --kms-key-file or --kms-url")
	}
	return append([]string{current}, s.kmsFormer...), nil
}

// keys opens the deployment's keys, and calls use with them. former are those of
// the KMS that may still be needed beside the named ones.
func (s *stopped) keys(ctx context.Context, db store.Store, former []keyring.KMS, use func(*keyring.Ring) error) error {
	urls, err := s.kmsURLs()
	if err != nil {
		return err
	}
	var all []keyring.KMS
	for _, u := range urls {
		k, err := kms.Open(ctx, u, kms.Options{TokenFile: s.tokenFile})
		if err != nil {
			return fmt.Errorf("opening the KMS key: %w", err)
		}
		defer func() { _ = k.Close() }() // nothing is left to be done
		all = append(all, k)
	}
	keys, err := keyring.Open(ctx, db, all[0], keyring.Config{Former: append(all[1:], former...)})
	if err != nil {
		return err
	}
	return use(keys)
}

// fileURL returns the URL of a key file.
func fileURL(path string) string {
	if whole, err := filepath.Abs(path); err == nil {
		path = whole
	}
	u := url.URL{Scheme: "file", Path: filepath.ToSlash(path)}
	return u.String()
}

// chainOf returns the fingerprint of the chain in a store, and "" when it has
// none.
func chainOf(ctx context.Context, s store.Store) string {
	report, err := audit.VerifyStore(ctx, s, audit.Options{To: 1})
	if err != nil {
		return ""
	}
	return report.Fingerprint
}

// keyFiles returns the files of the KMS keys as a backup takes them.
func (s *stopped) keyFiles() ([][]byte, error) {
	urls, err := s.kmsURLs()
	if err != nil {
		return nil, err
	}
	opened := make([]keyFile, len(urls))
	for i, u := range urls {
		path, ok := kmsFile(u)
		if !ok {
			continue
		}
		k, err := kms.OpenLocal(path)
		if err != nil {
			return nil, fmt.Errorf("opening %s: %w", filepath.Base(path), err)
		}
		opened[i] = keyFile{path, k.ID()}
	}
	return readKeyFiles(opened, nil)
}

// keyFile is a KMS key that was opened, and its file. path is empty when it is none.
type keyFile struct{ path, id string }

// keyFilesOf returns the files of keys, of which each was opened by the URL in its
// place.
func keyFilesOf(keys []*kms.Key, urls []string) (files []keyFile, some bool) {
	for i, k := range keys {
		path, ok := kmsFile(urls[i])
		files, some = append(files, keyFile{path, k.ID()}), some || ok
	}
	return files, some
}

// readKeyFiles returns the key files among the KMS keys that are in use, the
// current one first, as a backup takes them, none when none is a file: those which open what is stored, and
// not what lies there since. use has the former ones of which something is known:
// what was given up is left out, and a file that is gone, if nothing is under it.
func readKeyFiles(keys []keyFile, use map[string]keyring.KMSKey) (files [][]byte, err error) {
	for i, k := range keys {
		of, known := use[k.id]
		if i > 0 && (k.path == "" || of.GivenUp) {
			continue
		}
		var text []byte
		if k.path != "" {
			text, err = readKeyFile(k.path, k.id)
			if i > 0 && known && of.Sets == 0 && errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
		}
		files = append(files, text)
	}
	if len(files) == 1 && files[0] == nil {
		return nil, nil
	}
	return files, nil
}

// readKeyFile reads the file of the key with this id.
func readKeyFile(path, id string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the KMS key: %w", err)
	}
	k, err := kms.ParseLocal(text)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading %s: %w", filepath.Base(path), err)
	case k.ID() != id:
		return nil, fmt.Errorf("%s holds another key than the one that is in use: put that back", filepath.Base(path))
	}
	return text, nil
}

// carried are the KMS keys that came with a backup. current is nil when that is no
// file.
func carried(files [][]byte) (current keyring.KMS, former []keyring.KMS, err error) {
	for i, file := range files {
		if len(file) == 0 {
			continue
		}
		k, err := kms.ParseLocal(file)
		if err != nil {
			return nil, nil, err
		}
		if i == 0 {
			current = k
		} else {
			former = append(former, k)
		}
	}
	return current, former, nil
}

// piped returns what write writes. Close ends it, and waits for it.
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

// recipientFlags say whom a backup is encrypted to.
type recipientFlags struct{ text, file string }

func (f *recipientFlags) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.text, "recipient", "", "whom to encrypt to: age1pq1…")
	flags.StringVar(&f.file, "recipient-file", "", "file that holds the recipient")
	cmd.MarkFlagsMutuallyExclusive("recipient", "recipient-file")
	cmd.MarkFlagsOneRequired("recipient", "recipient-file")
}

func (f *recipientFlags) recipient() (backup.Recipient, error) {
	if f.file == "" {
		return backup.ParseRecipient(f.text)
	}
	file, err := os.Open(f.file)
	if err != nil {
		return backup.Recipient{}, fmt.Errorf("reading the recipient: %w", err)
	}
	defer file.Close()
	return backup.ReadRecipient(file)
}

// readIdentities reads a file of identities, as latticekeep backup keygen writes it.
func readIdentities(path string) ([]backup.Identity, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading the identity: %w", err)
	}
	defer f.Close()
	return backup.ReadIdentities(f)
}
