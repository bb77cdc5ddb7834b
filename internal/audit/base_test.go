package audit

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// goldenBase is the fingerprint of the log in testdata/base, whose private key was not kept. One of
// its two credentials and one of its two API keys are gone, and a rollback was accepted.
const goldenBase = "bcf416743ccbdf045c5cba4eb8b78fab70be39789c2d4bc5999484ec472a53e5"

// Every future version must read the golden base.
func TestTheGoldenBase(t *testing.T) {
	row, err := os.ReadFile(filepath.Join("testdata", "base"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := ParseBase(row, nil)
	if err != nil {
		t.Fatal(err)
	}
	text, err := b.JSON()
	if err != nil || !bytes.Equal(text, row[len(row)-len(text):]) {
		t.Fatal("it is written in another way than it was read: ", err)
	}
	if b.Sequence() != 13 || b.Tree.Size != 11 || Fingerprint(b.ChainID, b.Public.Bytes()) != goldenBase {
		t.Fatalf("%d %d", b.Sequence(), b.Tree.Size)
	}
	if len(b.Credentials) != 1 || len(b.APIKeys) != 1 || len(b.Namespaces) != 1 || len(b.Kept) != 1 || len(b.Lost) != 1 || len(b.Tenants) != 3 {
		t.Fatalf("%+v", b.History)
	}
}

func FuzzParseBase(f *testing.F) {
	f.Fuzz(func(t *testing.T, in []byte) {
		b, err := ParseBase(in, nil)
		if err != nil {
			return
		}
		if text, err := b.JSON(); err != nil || !bytes.HasSuffix(in, text) {
			t.Fatal("parse and encode differ", err)
		}
	})
}
