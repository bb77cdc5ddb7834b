package keeper

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A sound log is never reported as broken, whatever is archived while it is read.
func TestWhatIsArchivedWhileItIsReadIsNoFault(t *testing.T) {
	for name, read := range map[string]func(l *audittest.Parts, a audit.Archive) error{
		"export":         func(l *audittest.Parts, _ audit.Archive) error { return l.Export(context.Background(), io.Discard, 0) },
		"a later export": func(l *audittest.Parts, _ audit.Archive) error { return l.Export(context.Background(), io.Discard, 17) },
		"replay": func(l *audittest.Parts, _ audit.Archive) error {
			return audittest.ErrorOf(l.Replay(context.Background(), audittest.TenantA, reader.ReplayPoint{}, 0, func(*audit.Entry) error { return nil }))
		},
		"visit": func(l *audittest.Parts, _ audit.Archive) error {
			return l.Visit(context.Background(), audittest.TenantA, func(*audit.Entry) {}, audit.SealingKeyCreated)
		},
		"verification": func(l *audittest.Parts, _ audit.Archive) error {
			p, err := l.Verify(context.Background())
			if p.Broken != nil {
				return p.Broken
			}
			return err
		},
		"another cut": func(l *audittest.Parts, a audit.Archive) error {
			return audittest.ErrorOf((&Cutter{Log: l.Log, Reader: l.Reader, Archive: a, Keep: audittest.Keep, most: 25}).Run(context.Background()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			conflicts := 0
			for at := int64(1); ; at++ {
				f := audittest.NewFixture(t)
				a, _ := f.Folder()
				f.Old()
				f.Follow()
				s := &audittest.Between{Store: f.Store, At: at, Do: func() error {
					_, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 20}).Run(t.Context())
					return err
				}}
				f.Log.Chain.Store = s
				switch err := read(f.Log, a); {
				case err == nil:
				case fault.Of(err) == fault.Conflict:
					conflicts++
				default:
					t.Errorf("archived before look %d: %v", at, err)
				}
				if s.Views.Load() < at {
					break
				}
			}
			if want := strings.Contains(name, "export") || name == "replay" || name == "another cut"; want != (conflicts > 0) {
				t.Errorf("%d of them had a conflict", conflicts)
			}
		})
	}
}

// A restored backup writes another history of the same sequences. The archive keeps both.
func TestAnArchivedHistoryIsNotOverwritten(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Fill(20)
	backup := f.Copied()
	run := func(f *audittest.Fixture) audit.Segment {
		t.Helper()
		f.Fill(20)
		f.Advance(audittest.Keep + 2*lateness)
		f.Fill(1)
		if n, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 41}).Run(t.Context()); err != nil || n == 0 {
			t.Fatalf("cut %d: %v", n, err)
		}
		return f.Segments()[0]
	}
	lost := run(f)
	restored := run(f.Opened(backup))
	if lost.From != restored.From || lost.To != restored.To || lost.Hash == restored.Hash {
		t.Fatalf("%+v, %+v", lost, restored)
	}
	for _, s := range []audit.Segment{lost, restored} {
		data, err := a.Get(t.Context(), s.Name)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := verify.Segment(data, s, verify.Options{PublicKey: f.Log.Signer.Public()}); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
}

// A base omits deleted items together with the archived entries of their deletion. Rows of deleted
// items that reappear are found.
func TestABaseForgetsWhatIsGone(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	gone := func(id string) {
		f.Record(audit.Event{Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: audit.CredentialResource}})
	}
	apiKey := func(of audit.EventType, id string) {
		f.Record(audit.Event{Type: of, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: id, Type: audit.APIKeyResource}})
	}
	for i := range 5 {
		f.Sealed(audittest.TenantA, fmt.Sprintf("cred_%d", i), "1", strings.Repeat("a", 64))
	}
	gone("cred_0")
	gone("cred_1")
	f.Sealed(audittest.TenantA, "cred_1", "1", strings.Repeat("b", 64)) // sealed again, and stays
	gone("cred_2")
	apiKey(audit.APIKeyCreated, "key_0")
	apiKey(audit.APIKeyCreated, "key_1")
	apiKey(audit.APIKeyRevoked, "key_0")
	f.Advance(audittest.Keep + 2*lateness)
	gone("cred_3") // after the archived part
	apiKey(audit.APIKeyRevoked, "key_1")
	f.Fill(2)
	written := f.Hashes()
	var row []byte
	f.Put(func(tx store.Tx) error {
		row = audittest.Get(tx, audit.CurrentKey(string(audittest.TenantA), "cred_0"))
		return nil
	})
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
	f.Follow()
	broken := &failing{Store: f.Store, at: 2} // the Update after the cut's
	f.Log.Chain.Store = broken
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.Log.Chain.Store = f.Store
	whole(f, a, written) // including everything that is still to be removed
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Clean()
	whole(f, a, written)
	base, err := f.Log.Chain.ReadBase(t.Context())
	if err != nil || len(base.Credentials) != 3 || len(base.APIKeys) != 1 {
		t.Fatalf("%v: the base knows %v and %v", err, base.Credentials, base.APIKeys)
	}
	report, err := f.Verify()
	if err != nil {
		t.Fatal(err)
	}
	for id, known := range map[string]bool{"cred_0": false, "cred_1": true, "cred_2": false, "cred_3": true, "cred_4": true} {
		state, ok := report.Credentials[audit.CredentialKey{Tenant: audittest.TenantA, Credential: id}]
		if ok != known || state.Deleted != (id == "cred_3") {
			t.Errorf("%s: %+v, %v", id, state, ok)
		}
		if err := f.Store.View(t.Context(), func(r store.Reader) error { return audittest.ErrorOf(chain.Current(r, audittest.TenantA, id)) }); (err == nil) != known {
			t.Errorf("%s: its current version is %v", id, err)
		}
	}
	f.Put(func(tx store.Tx) error { return tx.Put(audit.CurrentKey(string(audittest.TenantA), "cred_0"), row) })
	if _, err := f.Verify(); err == nil {
		t.Error("a row that is back is not found")
	}
}

// An object that decompresses to more than the bound is no segment.
func TestARemovalReadsNoBomb(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Old()
	f.Follow()
	c := Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}
	f.Log.Chain.Store = &failing{Store: f.Store, at: 2}
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.Log.Chain.Store = f.Store
	if err := a.Put(t.Context(), f.Segments()[0].Name, audittest.Zipped(make([]byte, 8*audit.MaxLine))); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Run(t.Context()); n != 0 || fault.Of(err) != fault.Internal {
		t.Errorf("cut %d: %v", n, err)
	}
}

// Exports from before checkpoints have the same entries, but another closing line.
func TestAFormerExportNamesItsRemedy(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(3)
	lines := f.Lines()
	lines[len(lines)-1] = `{"end":{"chain_id":"chain_test"}}` + "\n"
	_, err := verify.Export(strings.NewReader(strings.Join(lines, "")), verify.Options{})
	if _, broken := audit.IsBroken(err); broken || fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "export the log again") {
		t.Errorf("it is answered with %v", err)
	}
	lines[1] = strings.Replace(lines[1], "127.0.0.1", "127.0.0.2", 1)
	_, err = verify.Export(strings.NewReader(strings.Join(lines, "")), verify.Options{})
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 2 {
		t.Errorf("one that does not hold either: %v", err)
	}
}

// A bundle has the hashes of entries, even if their signatures are damaged.
func TestABundleNeedsNoSignatures(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Log.SetSigning(writer.SignBatches)
	first := f.Group(20)
	c := f.Follow()
	want, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, 0, int(c.Size))
	if err != nil {
		t.Fatal(err)
	}
	f.Put(func(tx store.Tx) error { return tx.Delete(audit.BatchKey(first)) })
	got, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, 0, int(c.Size))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes: %v", len(got), err)
	}
	f.Put(func(tx store.Tx) error {
		row := audittest.Get(tx, audit.EntryKey(first+3))
		row[len(row)-5] ^= 1
		return tx.Put(audit.EntryKey(first+3), row)
	})
	if _, err := f.Log.Tile(t.Context(), audittest.Principal(audittest.TenantA), -1, 0, int(c.Size)); fault.Of(err) != fault.Internal || err == nil {
		t.Errorf("an altered entry: %v", err)
	}
}

// An anchor keeps a signed note. The reader bounds its size, because anyone with write access to
// the anchor chooses it.
func TestALongAnchorIsNotReadWhole(t *testing.T) {
	f := audittest.NewFixture(t)
	dir := t.TempDir()
	bucket, err := objects.Open(t.Context(), "file://"+dir, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bucket.Close() })
	a := anchoredAt(f, NewBucketAnchor(f.Log.ChainID(), bucket))
	a.keep()
	signed := newestOf(t, f.Log)
	// A note may also carry the signatures of others.
	others := bytes.Repeat([]byte("\u2014 other AAAAAAAA\n"), maxNote/20)
	if _, why := a.keeper.readAnchor(append(bytes.Clone(signed), others...)); why != anchorMalformed {
		t.Errorf("a long note is refused as %q", why)
	}
	for _, long := range [][]byte{bytes.Repeat([]byte("x"), 1<<20), append(bytes.Clone(signed), bytes.Repeat([]byte("\n"), 1<<20)...)} {
		if err := bucket.Put(t.Context(), "anchor/chain_test/checkpoint", long); err != nil {
			t.Fatal(err)
		}
		a.Fill(1)
		a.Follow()
		a.keep()
		a.keep()
		a.checkStates(AnchorOK)
	}
	if n := a.keeper.Status()[0].Refused; n != 2 {
		t.Errorf("%d were refused", n)
	}
	names, err := filepath.Glob(filepath.Join(dir, "anchor", "chain_test", "refused-*"))
	if err != nil || len(names) != 2 {
		t.Fatalf("set aside: %v, %v", names, err)
	}
	for _, name := range names {
		if info, err := os.Stat(name); err != nil || info.Size() > maxNote+1 {
			t.Errorf("%d bytes were set aside: %v", info.Size(), err)
		}
	}
}
