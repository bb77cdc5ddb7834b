package offline

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// A backup takes the key file that opens the stored data, not a file that replaced it.
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
		files, err := (&Deployment{KMSURL: c.urls[0], FormerKMSURLs: c.urls[1:]}).ReadKMSKeyFiles()
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
	opened := make([]KeyFile, 2)
	for i, path := range []string{current, former} {
		k, err := kms.OpenLocal(path)
		must(t, err)
		opened[i] = KeyFile{path, k.ID()}
	}
	use := func(k keyring.KMSKey) map[string]keyring.KMSKey {
		return map[string]keyring.KMSKey{opened[1].id: k}
	}
	if files, err := ReadKeyFiles(opened, use(keyring.KMSKey{})); err != nil || len(files) != 2 {
		t.Errorf("%d files, %v", len(files), err)
	}
	if files, err := ReadKeyFiles(opened, use(keyring.KMSKey{GivenUp: true})); err != nil || len(files) != 1 {
		t.Errorf("with one that was given up: %d files, %v", len(files), err)
	}
	must(t, os.Rename(former, current))
	if _, err := ReadKeyFiles(opened, nil); err == nil || !strings.Contains(err.Error(), "another key") {
		t.Error("an exchanged one: ", err)
	}
	must(t, os.Remove(current))
	if _, err := ReadKeyFiles(opened, nil); !errors.Is(err, os.ErrNotExist) {
		t.Error("one that is gone: ", err)
	}
	writeFile(t, current, []byte(wholeCurrent))
	if files, err := ReadKeyFiles(opened, use(keyring.KMSKey{})); err != nil || len(files) != 1 {
		t.Errorf("a former one is gone: %d files, %v", len(files), err)
	}
	for name, use := range map[string]map[string]keyring.KMSKey{"and needed": use(keyring.KMSKey{Sets: 1}), "and nothing is known of it": nil} {
		if _, err := ReadKeyFiles(opened, use); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a former one is gone, %s: %v", name, err)
		}
	}
}

// The printed name of a store contains no password.
func TestStoresAreNamedWithoutTheirPasswords(t *testing.T) {
	for text, want := range map[string]string{
		"bolt:/var/lib/latticekeep":                          "bolt:/var/lib/latticekeep",
		"bolt:/var/lib/../lib/latticekeep/":                  "bolt:/var/lib/latticekeep",
		"postgres://u:s3cret@db:5432/vault?sslmode=disable":  "postgres://db:5432/vault",
		"postgresql://u@db/vault?password=s3cret&sslmode=no": "postgresql://db/vault",
	} {
		a := Location{URL: text}
		if err := a.Check(); err != nil || a.String() != want {
			t.Errorf("%s: %s, %v", text, a, err)
		}
	}
	for _, text := range []string{"", "bolt:", "/var/lib/latticekeep", "bolt:///var/lib", "bolt:/var/lib/latticekeep.db", "mysql://u:s3cret@h/d", "postgres", "postgres://u:s3cret@h:port/d", "\x7f://s3cret"} {
		if err := (Location{URL: text}).Check(); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// The password comes from a file, as everywhere.
func TestThePasswordOfAStoreIsReadFromItsFile(t *testing.T) {
	database, password := pgtest.Shared(t).URL(), filepath.Join(t.TempDir(), "password")
	plain := withoutPassword(t, database, password)
	s, err := Open(t.Context(), Location{URL: plain, PasswordFile: password})
	must(t, err)
	must(t, s.Close())
	writeFile(t, password, []byte("wrong\n"))
	if s, err := Open(t.Context(), Location{URL: plain, PasswordFile: password}); err == nil {
		_ = s.Close()
		t.Error("another password was taken")
	}
	if _, err := Open(t.Context(), Location{URL: plain, PasswordFile: password + ".gone"}); err == nil {
		t.Error("a file that is not there was read")
	}
}
