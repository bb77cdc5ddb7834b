package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/dualsig"
)

func TestTheTreeOfAGroupIsRFC6962(t *testing.T) {
	for n := 2; n <= 70; n++ {
		hashes := make([][32]byte, n)
		var stored []tlog.Hash
		reader := tlog.HashReaderFunc(func(indexes []int64) (found []tlog.Hash, err error) {
			for _, i := range indexes {
				found = append(found, stored[i])
			}
			return found, nil
		})
		for i := range hashes {
			hashes[i] = sha256.Sum256([]byte{byte(i)})
			more, err := tlog.StoredHashes(int64(i), hashes[i][:], reader)
			if err != nil {
				t.Fatal(err)
			}
			stored = append(stored, more...)
		}
		want, err := tlog.TreeHash(int64(n), reader)
		if err != nil {
			t.Fatal(err)
		}
		tree := NewBatchTree(hashes)
		if tree.Root() != want {
			t.Fatalf("the root of %d is another one", n)
		}
		for i := range n {
			proof, err := tlog.ProveRecord(int64(n), int64(i), reader)
			if err != nil {
				t.Fatal(err)
			}
			var path []byte
			for _, h := range proof {
				path = append(path, h[:]...)
			}
			if got := tree.appendPath(nil, i); !bytes.Equal(got, path) {
				t.Fatalf("the path of %d in %d is another one", i, n)
			}
			if len(path) != 32*PathLength(uint32(n), uint32(i)) {
				t.Fatalf("pathLength(%d, %d) = %d", n, i, PathLength(uint32(n), uint32(i)))
			}
			p := BatchProof{uint32(n), uint32(i), path}
			if p.root(hashes[i]) != want {
				t.Fatalf("the path of %d in %d leads elsewhere", i, n)
			}
		}
	}
}

// The computation of lengths does not overflow for the largest possible tree.
func TestAPathIsAtMost32Hashes(t *testing.T) {
	for _, c := range []struct {
		n, index uint32
		want     int
	}{{1<<32 - 1, 0, 32}, {1<<32 - 1, 1<<32 - 2, 31}, {1<<31 + 1, 1 << 31, 1}, {2, 1, 1}} {
		if got := PathLength(c.n, c.index); got != c.want {
			t.Errorf("pathLength(%d, %d) = %d, want %d", c.n, c.index, got, c.want)
		}
	}
}

// goldenBatch is a sample, because signing is randomised. It has the entries of a group as they are
// exported and as they are stored. Every future version must read them.
type goldenBatch struct {
	PublicKey string   // hex
	Lines     []string // complete entries
	Rows      []string // hex, rows of the same entries
	Batch     string   // hex, row of the group
}

func TestTheGoldenGroupVerifies(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("testdata", "batch.json"))
	if err != nil {
		t.Fatal(err)
	}
	var g goldenBatch
	if err := json.Unmarshal(b, &g); err != nil {
		t.Fatal(err)
	}
	unhex := func(s string) []byte {
		b, err := hex.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	key, err := dualsig.ParsePublicKey(unhex(g.PublicKey))
	if err != nil {
		t.Fatal(err)
	}
	if len(g.Lines) != 3 || len(g.Rows) != 3 {
		t.Fatal("not the golden group")
	}
	for i := range g.Lines {
		e, sum, err := ParseWithDigest([]byte(g.Lines[i]))
		if err != nil || e.Hash != hex.EncodeToString(sum[:]) || !e.Verify(key, nil) {
			t.Errorf("line %d: %v", i, err)
		}
		s, err := DecodeStoredEntry(unhex(g.Rows[i]), unhex(g.Batch))
		if err != nil || !s.Verify(key, nil) {
			t.Fatalf("row %d: %v", i, err)
		}
		if !bytes.Equal(line(t, s.SignedEntry(), true), []byte(g.Lines[i])) {
			t.Errorf("row %d is another entry than the line", i)
		}
	}
}

func FuzzDecodeSignature(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		p, signature, ok := DecodeSignature(b)
		if !ok {
			return
		}
		again := signature
		if p.N != 0 {
			again = p.encode(signature)
			p.root([32]byte{})
		}
		if !bytes.Equal(again, b) || len(signature) != dualsig.SignatureSize {
			t.Fatal("read and written differ")
		}
	})
}
