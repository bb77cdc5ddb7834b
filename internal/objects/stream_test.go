package objects_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// written returns what writes n bytes in pieces of an odd size, and their digest.
func written(n int) (write func(io.Writer) error, sum [sha256.Size]byte) {
	data := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n)}).Read(data)
	return func(w io.Writer) error {
		for piece := range slices.Chunk(data, 99991) {
			if _, err := w.Write(piece); err != nil {
				return err
			}
		}
		return nil
	}, sha256.Sum256(data)
}

func TestAnObjectOfAnySizeIsReadAsItWasWritten(t *testing.T) {
	eachBucket(t, func(t *testing.T, b *objects.Bucket, _ func() error) {
		ctx, name := t.Context(), "backup/a/1.backup"
		for _, n := range []int{1, 16 << 20, 16<<20 + 1, 33 << 20} { // one part, and several
			write, want := written(n)
			if err := b.Upload(ctx, name, write); err != nil {
				t.Fatalf("%d bytes: %v", n, err)
			}
			sum := sha256.New()
			err := b.Download(ctx, name, func(r io.Reader) error {
				_, err := io.Copy(sum, r)
				return err
			})
			if err != nil || !bytes.Equal(sum.Sum(nil), want[:]) {
				t.Fatalf("%d bytes are read as others: %v", n, err)
			}
		}
		mine := errors.New("mine")
		if err := b.Download(ctx, name, func(io.Reader) error { return mine }); !errors.Is(err, mine) || fault.Of(err) != fault.Internal {
			t.Errorf("an error of the reader: %v", err)
		}
		if err := b.Download(ctx, "backup/a/none", func(io.Reader) error { return nil }); fault.Of(err) != fault.NotFound {
			t.Errorf("reading what is not there: %v", err)
		}
	})
}

func TestAnUploadThatFailsLeavesNothing(t *testing.T) {
	eachBucket(t, func(t *testing.T, b *objects.Bucket, _ func() error) {
		ctx, mine := t.Context(), errors.New("mine")
		write, _ := written(17 << 20)
		err := b.Upload(ctx, "backup/a/1.backup", func(w io.Writer) error { return errors.Join(write(w), mine) })
		if !errors.Is(err, mine) {
			t.Errorf("an error of the writer: %v", err)
		}
		if names, err := b.List(ctx, "backup/", 9); err != nil || len(names) > 0 {
			t.Errorf("there are %q: %v", names, err)
		}
	})
}

func TestNamesAreListedInTheirOrder(t *testing.T) {
	eachBucket(t, func(t *testing.T, b *objects.Bucket, _ func() error) {
		ctx := t.Context()
		list := func(prefix string, most int, want ...string) {
			t.Helper()
			if got, err := b.List(ctx, prefix, most); err != nil || !slices.Equal(got, want) {
				t.Errorf("of %q there are %q, want %q: %v", prefix, got, want, err)
			}
		}
		list("backup/a/", 9)
		for _, name := range []string{"backup/a/2", "backup/a/1", "backup/a/1.sig", "backup/a.b", "backup/ab/1", "anchor/a/1"} {
			if err := b.Put(ctx, name, []byte("x")); err != nil {
				t.Fatal(err)
			}
		}
		list("backup/a/", 9, "backup/a/1", "backup/a/1.sig", "backup/a/2")
		list("backup/a/", 2, "backup/a/1", "backup/a/1.sig")
		list("backup/a", 9, "backup/a.b", "backup/a/1", "backup/a/1.sig", "backup/a/2", "backup/ab/1")
		if got, err := b.ListAfter(ctx, "backup/a/", "backup/a/1", 1); err != nil || !slices.Equal(got, []string{"backup/a/1.sig"}) {
			t.Errorf("after a name there are %q: %v", got, err)
		}
		if got, err := b.ListAfter(ctx, "backup/a/", "backup/a/1.t", 9); err != nil || !slices.Equal(got, []string{"backup/a/2"}) {
			t.Errorf("after a name that is not there, there are %q: %v", got, err)
		}
	})
}

// More names than an answer of a cloud has.
func TestManyNamesAreListed(t *testing.T) {
	g := newGCS(t, "reports")
	for i := range 1001 {
		g.objects["reports"][fmt.Sprintf("a/%04d", i)] = gcsObject{about: map[string]any{"name": fmt.Sprintf("a/%04d", i)}}
	}
	names, err := open(t, "gs://reports", objects.SigningOptions{}).List(t.Context(), "a/", 2000)
	if err != nil || len(names) != 1001 {
		t.Errorf("there are %d names: %v", len(names), err)
	}
}

func TestAFolderWithoutRoomOrAccessIsUnavailable(t *testing.T) {
	dir := t.TempDir()
	b := open(t, "file://"+dir, objects.SigningOptions{})
	if err := os.WriteFile(filepath.Join(dir, "backup"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	write, _ := written(1)
	if err := b.Upload(t.Context(), "backup/a", write); fault.Of(err) != fault.Unavailable {
		t.Errorf("an upload below a file: %v", err)
	}
}
