package dashboard_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// vendored reads the manifest of what is of others: the digest of each file, and the packages that it is made of.
func vendored(t *testing.T) (digests map[string]string, packages map[string][]string) {
	t.Helper()
	digests, packages = map[string]string{}, map[string][]string{}
	for line := range strings.Lines(read(t, "static/vendor/versions")) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			t.Fatalf("a line of the manifest is not one: %q", line)
		}
		digests[fields[1]], packages[fields[1]] = fields[0], fields[2:]
	}
	return digests, packages
}

func read(t *testing.T, name string) string {
	t.Helper()
	content, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// A file of others that was changed, added or removed is noticed: make vendor-web makes them.
func TestVendoredFilesAreThoseOfTheManifest(t *testing.T) {
	digests, _ := vendored(t)
	var there []string
	for _, dir := range []string{"static/vendor", "testdata"} {
		err := fs.WalkDir(os.DirFS("."), dir, func(name string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && path.Base(name) != "versions" && (dir != "testdata" || strings.HasPrefix(path.Base(name), "axe.")) {
				there = append(there, name)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range there {
		sum := sha256.Sum256([]byte(read(t, name)))
		if got := hex.EncodeToString(sum[:]); digests[name] == "" {
			t.Errorf("%s is not in the manifest", name)
		} else if got != digests[name] {
			t.Errorf("%s has the digest %s, and in the manifest %s", name, got, digests[name])
		}
		delete(digests, name)
	}
	for name := range digests {
		t.Errorf("%s is in the manifest and missing", name)
	}
}

// The manifest, the licences and the lock file name the same packages, and the lock file says of each what it must be, and not where it
// comes from.
func TestVendoredPackagesArePinnedAndLicensed(t *testing.T) {
	_, packages := vendored(t)
	var lock struct {
		Packages map[string]struct {
			Version, Integrity, Resolved string
			Dependencies                 map[string]string
			DevDependencies              map[string]string
		}
	}
	content := read(t, "../../hack/web/package-lock.json")
	if err := json.Unmarshal([]byte(content), &lock); err != nil {
		t.Fatal(err)
	}
	for name, p := range lock.Packages {
		if name != "" && (p.Version == "" || !strings.HasPrefix(p.Integrity, "sha512-")) {
			t.Errorf("the lock file does not pin %s", name)
		}
		if p.Resolved != "" {
			t.Errorf("the lock file says where %s comes from", name)
		}
	}
	exact := regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+$`)
	for name, version := range lock.Packages[""].Dependencies {
		if !exact.MatchString(version) {
			t.Errorf("%s is asked for as %s", name, version)
		}
	}
	if strings.Contains(content, "://") && strings.Contains(content, ".tgz") {
		t.Error("the lock file has download addresses")
	}
	licences := read(t, "static/vendor/LICENSES.txt") + read(t, "testdata/axe.LICENSE.txt")
	for file, all := range packages {
		if strings.HasSuffix(file, ".js") && len(all) == 0 {
			t.Errorf("%s is made of no package", file)
		}
		for _, p := range all {
			name, version, _ := cutLast(p, "@")
			if got := lock.Packages["node_modules/"+name].Version; got != version {
				t.Errorf("%s has %s of version %s, and the lock file %q", file, name, version, got)
			}
			if !strings.Contains(licences, name+" "+version+" (") {
				t.Errorf("the licence of %s %s is missing", name, version)
			}
		}
	}
}

func cutLast(s, separator string) (before, after string, found bool) {
	i := strings.LastIndex(s, separator)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(separator):], true
}

// What the page loads makes no code out of text, asks nobody, and loads nothing else. Trusted Types would refuse the first at run time;
// Preact can set markup, for whoever asks it to (dangerouslySetInnerHTML), which nothing here does.
func TestScriptsMakeNoCodeOutOfText(t *testing.T) {
	code := regexp.MustCompile(`\beval\s*\(|\bFunction\s*\(|\bdocument\.write|\bimportScripts\b|\bset(Timeout|Interval)\s*\(\s*["'` + "`" + `]`)
	markup := regexp.MustCompile(`(?i)innerHTML|outerHTML|insertAdjacentHTML|srcdoc|createContextualFragment|DOMParser|parseFromString`)
	err := fs.WalkDir(os.DirFS("."), "static", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || path.Ext(name) != ".js" {
			return err
		}
		content := []byte(read(t, name))
		for _, found := range code.FindAll(content, -1) {
			t.Errorf("%s makes code: %s", name, found)
		}
		for _, found := range markup.FindAll(content, -1) {
			if name != "static/vendor/preact.js" || !slices.Contains([]string{"innerHTML", "InnerHTML"}, string(found)) {
				t.Errorf("%s makes markup: %s", name, found)
			}
		}
		if strings.HasPrefix(name, "static/vendor/") && (bytes.Contains(content, []byte("fetch(")) || bytes.Contains(content, []byte("XMLHttpRequest"))) {
			t.Errorf("%s asks somebody", name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
