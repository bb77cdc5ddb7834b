package state

import (
	"archive/tar"
	"compress/gzip"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"go.etcd.io/bbolt"
)

func TestFamilies(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range Families {
		switch {
		case f.Prefix == "" || seen[f.Prefix]:
			t.Errorf("the prefix %q is empty or stands twice", f.Prefix)
		case f.Says == "" || f.Risk == "":
			t.Errorf("%s lacks what its rows say, or what follows when one is put back", f.Prefix)
		case !f.Deciding && (f.Own || f.Group != 0):
			t.Errorf("%s decides nothing, so it is neither the deployment's own nor decided on in groups", f.Prefix)
		case f.Group != 0 && f.Group < strings.Count(f.Prefix, "/"):
			t.Errorf("a group of %s has rows of other families", f.Prefix)
		}
		seen[f.Prefix] = true
	}
	for _, c := range []struct{ key, prefix, group string }{
		{"apikey/hash/1/0a", "apikey/hash/", ""},
		{"apikey/tenant/ten_a/key_b", "apikey/tenant/", "apikey/tenant/ten_a/"},
		{"session/row/usr_a/ses_b", "session/row/", "session/row/usr_a/"},
		{"user/row/ten_a/usr_b", "user/row/", "user/row/ten_a/"},
		{"invitation/ten_a/inv_b", "invitation/", "invitation/ten_a/"},
		{"credential/ten_a/cred_b/\x00\x00/\x00\x00\x00\x00\x01", "credential/", "credential/ten_a/cred_b/"},
		{"credential-name/ten_a/0a/\x00/\x00", "credential-name/", "credential-name/ten_a/0a/"},
		{"credential-version/ten_a/cred_b/\x00", "credential-version/", "credential-version/ten_a/cred_b/"},
		{"former/ten_a/cred_b/\x00", "former/", "former/ten_a/cred_b/"},
		{"former-end/\x00ten_a/uid", "former-end/", ""},
		{"transit/seed/ten_a/tkey_b/00000001/00000002", "transit/seed/", "transit/seed/ten_a/tkey_b/00000001/"},
		{"transit/version/ten_a/tkey_b/00000001", "transit/version/", "transit/version/ten_a/tkey_b/"},
		{"key/ten_a/00000001/wrapping/00000000000000ff", "key/", "key/ten_a/00000001/"},
		{"key/ten_a/current", "key/", ""},
		{"key/system/00000001/audit", "key/system/", "key/system/00000001/"},
		{"sealing/key/0a", "sealing/key/", "sealing/key/"},
		{"sealing/current", "sealing/current", ""},
		{"kms/given-up/awskms:arn/a/b", "kms/given-up/", ""},
		{"tenant/system", "tenant/system", ""},
		{"tenant/ten_a", "tenant/", ""},
		{"deployment", "deployment", ""},
		{"mail/mail_a", "mail/", ""},
		{"mail-attempt/mail_a", "mail-attempt/", ""},
	} {
		f, ok := FamilyOf([]byte(c.key))
		if group := f.GroupOf([]byte(c.key)); !ok || f.Prefix != c.prefix || string(group) != c.group {
			t.Errorf("%q is of family %q and in group %q, want %q and %q", c.key, f.Prefix, group, c.prefix, c.group)
		}
	}
	for _, key := range []string{"", "/", "deployments", "deployment/a", "sealing/currently", "sealing", "apikey/other/1", "unknown/a"} {
		if f, ok := FamilyOf([]byte(key)); ok {
			t.Errorf("%q is of family %q, want none", key, f.Prefix)
		}
	}
	key := []byte("session/row/usr_a/ses_b")
	if n := testing.AllocsPerRun(100, func() { FamilyOf(key) }); n != 0 {
		t.Errorf("FamilyOf allocates %v times", n)
	}
}

// TestEveryRowOfAnEarlierCommitHasAFamily reads the store with every kind of row that the tests of
// upgrades keep.
func TestEveryRowOfAnEarlierCommitHasAFamily(t *testing.T) {
	db, err := bbolt.Open(unpackDatabase(t), 0o600, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows := 0
	err = db.View(func(tx *bbolt.Tx) error {
		return tx.Bucket([]byte("latticekeep/store/v1")).ForEach(func(key, _ []byte) error {
			if _, ok := FamilyOf(key); !ok {
				t.Errorf("the row %q is of no family: enter it in Families with a judgement", key)
			}
			rows++
			return nil
		})
	})
	if err != nil || rows == 0 {
		t.Errorf("%d rows were read: %v", rows, err)
	}
}

func unpackDatabase(t *testing.T) string {
	t.Helper()
	packed, err := os.Open("../../test/upgrade/testdata/fixture.tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	zipped, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	for files := tar.NewReader(zipped); ; {
		header, err := files.Next()
		if err != nil {
			t.Fatalf("the fixture has no database: %v", err)
		}
		if header.Name != "data/latticekeep.db" {
			continue
		}
		content, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "latticekeep.db")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
}

// rowStart matches what a row key begins with in the code: the rest is added to the literal, or
// comes from the verbs of a format. wholeRow matches literals that the code converts to bytes.
var (
	rowStart = regexp.MustCompile(`^[a-z]+(-[a-z]+)*/`)
	wholeRow = regexp.MustCompile(`^[a-z]+[a-z/-]*$`)
)

// noRows are literals that look like the beginning of a row key, and what they begin instead.
var noRows = map[string]string{
	"anchor/":                   "object in a bucket of anchors",
	"backup/":                   "object in the bucket of backups",
	"commits/":                  "object in the bucket of backups",
	"reports/%s/%s-%d-%s.%s":    "object in the bucket of reports",
	"attempt/":                  "refusals that are counted in memory",
	"migrations/%04d.sql":       "embedded file",
	"application/json":          "media type",
	"application/yaml":          "media type",
	"text/plain; charset=utf-8": "media type",
	"http/1.1":                  "protocol in TLS",
	"identity/":                 "key in a list of cryptography",
	"signing/":                  "key in a list of cryptography",
	"mac/":                      "key in a list of cryptography",
	"wrapping/":                 "key in a list of cryptography",
	"sealing/":                  "key in a list of cryptography, and the context of a stored key",
	"transit/%s/%s/%d":          "context of a stored key",
}

// TestEveryRowThatTheCodeWritesHasAFamily takes every literal of the packages that use the store
// that looks like a row key or the beginning of one.
func TestEveryRowThatTheCodeWritesHasAFamily(t *testing.T) {
	known := map[string]bool{}
	check := func(path string, e ast.Expr, row *regexp.Regexp) {
		literal, ok := e.(*ast.BasicLit)
		if !ok || literal.Kind != token.STRING {
			return
		}
		text, err := strconv.Unquote(literal.Value)
		if err != nil {
			t.Fatalf("%s: unquoting a literal: %v", path, err)
		}
		if !row.MatchString(text) || strings.HasPrefix(text, "latticekeep/") { // frames have labels that begin so
			return
		}
		known[text] = true
		if _, ok := FamilyOf([]byte(text)); !ok && noRows[text] == "" {
			t.Errorf("%s: %q begins a row key of no family: enter it in Families with a judgement, or in noRows if it begins none", path, text)
		}
	}
	for _, path := range storeFiles(t) {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ImportSpec:
				return false
			case *ast.CallExpr:
				if to, ok := n.Fun.(*ast.ArrayType); ok && to.Len == nil && len(n.Args) == 1 {
					check(path, n.Args[0], wholeRow)
				}
			case *ast.BasicLit:
				check(path, n, rowStart)
			}
			return true
		})
	}
	for text := range noRows {
		if !known[text] {
			t.Errorf("%q is in no literal any more: delete it from noRows", text)
		}
	}
	for _, text := range []string{"deployment", "apikey/hash/", "session/row/"} {
		if !known[text] {
			t.Errorf("the row key %q was not found", text)
		}
	}
}

// storeFiles returns the product files of all packages of which a file imports the store.
func storeFiles(t *testing.T) []string {
	t.Helper()
	packages := map[string][]string{}
	uses := map[string]bool{}
	for _, root := range []string{"../../internal", "../../server", "../../controllers"} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
			if err != nil {
				return err
			}
			dir := filepath.Dir(path)
			packages[dir] = append(packages[dir], path)
			for _, i := range file.Imports {
				uses[dir] = uses[dir] || i.Path.Value == `"github.com/latticekeep/latticekeep/internal/store"`
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	var files []string
	for dir := range uses {
		if uses[dir] {
			files = append(files, packages[dir]...)
		}
	}
	if len(files) == 0 {
		t.Fatal("no package uses the store")
	}
	return files
}
