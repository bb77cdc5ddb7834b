package app

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// A backup takes the key file that opens what is stored, not what lies there since.
func TestAKeyFileThatWasExchangedIsNotBackedUp(t *testing.T) {
	dir := t.TempDir()
	current, former := filepath.Join(dir, "current.key"), filepath.Join(dir, "former.key")
	must(t, errors.Join(kms.CreateLocal(current), kms.CreateLocal(former)))
	whole := func(path string) string {
		t.Helper()
		b, err := os.ReadFile(path)
		must(t, err)
		return string(b)
	}
	wholeCurrent := whole(current)
	for name, c := range map[string]struct {
		urls []string
		want []string
	}{
		"a key file":                     {[]string{fileURL(current)}, []string{whole(current)}},
		"two":                            {[]string{fileURL(current), fileURL(former)}, []string{whole(current), whole(former)}},
		"a service and a former file":    {[]string{"awskms:///alias/a", fileURL(former)}, []string{"", whole(former)}},
		"a file and a former service":    {[]string{fileURL(current), "awskms:///alias/a"}, []string{whole(current)}},
		"a file behind two services":     {[]string{"awskms:///alias/a", "awskms:///alias/b", fileURL(former)}, []string{"", whole(former)}},
		"services, of which none is one": {[]string{"awskms:///alias/a", "gcpkms://projects/p"}, nil},
	} {
		files, err := (&stopped{kmsURL: c.urls[0], kmsFormer: c.urls[1:]}).keyFiles()
		if err != nil || len(files) != len(c.want) {
			t.Errorf("%s: %d files, %v", name, len(files), err)
			continue
		}
		for i := range files {
			if string(files[i]) != c.want[i] {
				t.Errorf("%s: file %d is another one", name, i)
			}
		}
	}
	opened := make([]keyFile, 2)
	for i, path := range []string{current, former} {
		k, err := kms.OpenLocal(path)
		must(t, err)
		opened[i] = keyFile{path, k.ID()}
	}
	use := func(k keyring.KMSKey) map[string]keyring.KMSKey {
		return map[string]keyring.KMSKey{opened[1].id: k}
	}
	if files, err := readKeyFiles(opened, use(keyring.KMSKey{})); err != nil || len(files) != 2 {
		t.Errorf("%d files, %v", len(files), err)
	}
	if files, err := readKeyFiles(opened, use(keyring.KMSKey{GivenUp: true})); err != nil || len(files) != 1 {
		t.Errorf("with one that was given up: %d files, %v", len(files), err)
	}
	must(t, os.Rename(former, current))
	if _, err := readKeyFiles(opened, nil); err == nil || !strings.Contains(err.Error(), "another key") {
		t.Error("an exchanged one: ", err)
	}
	must(t, os.Remove(current))
	if _, err := readKeyFiles(opened, nil); !errors.Is(err, os.ErrNotExist) {
		t.Error("one that is gone: ", err)
	}
	writeFile(t, current, []byte(wholeCurrent))
	if files, err := readKeyFiles(opened, use(keyring.KMSKey{})); err != nil || len(files) != 1 {
		t.Errorf("a former one is gone: %d files, %v", len(files), err)
	}
	for name, use := range map[string]map[string]keyring.KMSKey{"and needed": use(keyring.KMSKey{Sets: 1}), "and nothing is known of it": nil} {
		if _, err := readKeyFiles(opened, use); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a former one is gone, %s: %v", name, err)
		}
	}
}

// The row that says why a store is not served stays with the store, also when the
// backup was taken while it was there.
func TestAMarkIsNotRestored(t *testing.T) {
	e, from := newEstate(t, "")
	url, end := e.serve(from)
	to := newRecipient(t)
	file := e.backUp(url, to)
	end()
	content, err := os.ReadFile(file)
	must(t, err)
	marked := filepath.Join(t.TempDir(), "marked.backup")
	writeFile(t, marked, withRow(t, e, content, to, markRow, []byte(`{"state":"leaving"}`)))
	target := boltScheme + e.path("restored")
	mustRun(t, "restore", "--input", marked, "--identity-file", to.file, "--store", target)
	e.whole(target)
}

// withRow returns a backup with one row more, signed by the deployment.
func withRow(t *testing.T, e *estate, file []byte, to recipient, key, value []byte) []byte {
	t.Helper()
	in, err := backup.Open(bytes.NewReader(file), to.identities(t))
	must(t, err)
	var all rows
	_, err = in.Rows(func(key, value []byte) error {
		all = append(all, row{bytes.Clone(key), bytes.Clone(value)})
		return nil
	})
	must(t, err)
	var b bytes.Buffer
	e.with(boltScheme+e.path("data"), func(s store.Database) {
		must(t, backup.Write(t.Context(), &b, append(all, row{key, value}), in.Header, in.KMSKeys, to.identities(t)[0].Recipient(), openKeys(t, s, e.keyFile())))
	})
	return b.Bytes()
}

// A store is named by a URL that tells no secret when it is repeated.
func TestStoresAreNamedWithoutTheirPasswords(t *testing.T) {
	for text, want := range map[string]string{
		"bolt:/var/lib/latticekeep":                          "bolt:/var/lib/latticekeep",
		"bolt:/var/lib/../lib/latticekeep/":                  "bolt:/var/lib/latticekeep",
		"postgres://u:s3cret@db:5432/vault?sslmode=disable":  "postgres://db:5432/vault",
		"postgresql://u@db/vault?password=s3cret&sslmode=no": "postgresql://db/vault",
	} {
		a := storeAt{url: text}
		if err := a.check(); err != nil || a.String() != want {
			t.Errorf("%s: %s, %v", text, a, err)
		}
	}
	for _, text := range []string{"", "bolt:", "/var/lib/latticekeep", "bolt:///var/lib", "bolt:/var/lib/latticekeep.db", "mysql://u:s3cret@h/d", "postgres", "postgres://u:s3cret@h:port/d", "\x7f://s3cret"} {
		if err := (storeAt{url: text}).check(); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// The password comes from a file, as everywhere.
func TestThePasswordOfAStoreIsReadFromItsFile(t *testing.T) {
	database, password := pgtest.Shared(t).URL(), filepath.Join(t.TempDir(), "password")
	plain := withoutPassword(t, database, password)
	s, err := openStoreAt(t.Context(), storeAt{url: plain, passwordFile: password})
	must(t, err)
	must(t, s.Close())
	writeFile(t, password, []byte("wrong\n"))
	if s, err := openStoreAt(t.Context(), storeAt{url: plain, passwordFile: password}); err == nil {
		_ = s.Close()
		t.Error("another password was taken")
	}
	if _, err := openStoreAt(t.Context(), storeAt{url: plain, passwordFile: password + ".gone"}); err == nil {
		t.Error("a file that is not there was read")
	}
}
