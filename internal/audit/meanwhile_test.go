package audit

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
)

// A sound log is never reported as broken, whatever is archived while it is read.
func TestWhatIsArchivedWhileItIsReadIsNoFault(t *testing.T) {
	for name, read := range map[string]func(l *parts, a Archive) error{
		"export":         func(l *parts, _ Archive) error { return l.Export(context.Background(), io.Discard, 0) },
		"a later export": func(l *parts, _ Archive) error { return l.Export(context.Background(), io.Discard, 17) },
		"replay": func(l *parts, _ Archive) error {
			return errorOf(l.Replay(context.Background(), tenantA, ReplayPoint{}, 0, func(*Entry) error { return nil }))
		},
		"visit": func(l *parts, _ Archive) error {
			return l.Visit(context.Background(), tenantA, func(*Entry) {}, SealingKeyCreated)
		},
		"verification": func(l *parts, _ Archive) error {
			p, err := l.Verify(context.Background())
			if p.Broken != nil {
				return p.Broken
			}
			return err
		},
		"another cut": func(l *parts, a Archive) error {
			return errorOf((&Cutter{Log: l.Log, Reader: l.Reader, Archive: a, Keep: keep, most: 25}).Run(context.Background()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			conflicts := 0
			for at := int64(1); ; at++ {
				f := newFixture(t)
				a, _ := f.folder()
				f.old()
				f.follow()
				s := &between{Store: f.store, at: at, do: func() error {
					_, err := (&Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 20}).Run(t.Context())
					return err
				}}
				f.log.chain.store = s
				switch err := read(f.log, a); {
				case err == nil:
				case fault.Of(err) == fault.Conflict:
					conflicts++
				default:
					t.Errorf("archived before look %d: %v", at, err)
				}
				if s.views.Load() < at {
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
	f := newFixture(t)
	a, _ := f.folder()
	f.fill(20)
	backup := f.copied()
	run := func(f *fixture) Segment {
		t.Helper()
		f.fill(20)
		f.advance(keep + 2*lateness)
		f.fill(1)
		if n, err := (&Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep, most: 41}).Run(t.Context()); err != nil || n == 0 {
			t.Fatalf("cut %d: %v", n, err)
		}
		return f.segments()[0]
	}
	lost := run(f)
	restored := run(f.opened(backup))
	if lost.From != restored.From || lost.To != restored.To || lost.Hash == restored.Hash {
		t.Fatalf("%+v, %+v", lost, restored)
	}
	for _, s := range []Segment{lost, restored} {
		data, err := a.Get(t.Context(), s.Name)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := verifySegment(data, s, Options{PublicKey: f.log.signer.Public()}); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
}

// A base omits deleted items together with the archived entries of their deletion. Rows of deleted
// items that reappear are found.
func TestABaseForgetsWhatIsGone(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	gone := func(id string) {
		f.record(Event{Type: CredentialDeleted, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: id, Type: CredentialResource}})
	}
	apiKey := func(of EventType, id string) {
		f.record(Event{Type: of, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: id, Type: APIKeyResource}})
	}
	for i := range 5 {
		f.sealed(tenantA, fmt.Sprintf("cred_%d", i), "1", strings.Repeat("a", 64))
	}
	gone("cred_0")
	gone("cred_1")
	f.sealed(tenantA, "cred_1", "1", strings.Repeat("b", 64)) // sealed again, and stays
	gone("cred_2")
	apiKey(APIKeyCreated, "key_0")
	apiKey(APIKeyCreated, "key_1")
	apiKey(APIKeyRevoked, "key_0")
	f.advance(keep + 2*lateness)
	gone("cred_3") // after the archived part
	apiKey(APIKeyRevoked, "key_1")
	f.fill(2)
	written := f.hashes()
	var row []byte
	f.put(func(tx store.Tx) error { row = get(tx, currentKey(string(tenantA), "cred_0")); return nil })
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}
	f.follow()
	broken := &failing{Store: f.store, at: 2} // the Update after the cut's
	f.log.chain.store = broken
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.log.chain.store = f.store
	f.whole(a, written) // including everything that is still to be removed
	if _, err := c.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.clean()
	f.whole(a, written)
	base, err := f.log.chain.readBase(t.Context())
	if err != nil || len(base.credentials) != 3 || len(base.apiKeys) != 1 {
		t.Fatalf("%v: the base knows %v and %v", err, base.credentials, base.apiKeys)
	}
	report, err := f.verify()
	if err != nil {
		t.Fatal(err)
	}
	for id, known := range map[string]bool{"cred_0": false, "cred_1": true, "cred_2": false, "cred_3": true, "cred_4": true} {
		state, ok := report.Credentials[CredentialKey{tenantA, id}]
		if ok != known || state.Deleted != (id == "cred_3") {
			t.Errorf("%s: %+v, %v", id, state, ok)
		}
		if err := f.store.View(t.Context(), func(r store.Reader) error { return errorOf(Current(r, tenantA, id)) }); (err == nil) != known {
			t.Errorf("%s: its current version is %v", id, err)
		}
	}
	f.put(func(tx store.Tx) error { return tx.Put(currentKey(string(tenantA), "cred_0"), row) })
	if _, err := f.verify(); err == nil {
		t.Error("a row that is back is not found")
	}
}

// An object that decompresses to more than the bound is no segment.
func TestARemovalReadsNoBomb(t *testing.T) {
	f := newFixture(t)
	a, _ := f.folder()
	f.old()
	f.follow()
	c := Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}
	f.log.chain.store = &failing{Store: f.store, at: 2}
	if _, err := c.Run(t.Context()); err == nil {
		t.Fatal("it did not fail")
	}
	f.log.chain.store = f.store
	if err := a.Put(t.Context(), f.segments()[0].Name, zipped(make([]byte, 8*maxLine))); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Run(t.Context()); n != 0 || fault.Of(err) != fault.Internal {
		t.Errorf("cut %d: %v", n, err)
	}
}

// Exports from before checkpoints have the same entries, but another closing line.
func TestAFormerExportNamesItsRemedy(t *testing.T) {
	f := newFixture(t)
	f.fill(3)
	lines := f.lines()
	lines[len(lines)-1] = `{"end":{"chain_id":"chain_test"}}` + "\n"
	_, err := VerifyExport(strings.NewReader(strings.Join(lines, "")), Options{})
	if _, broken := IsBroken(err); broken || fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "export the log again") {
		t.Errorf("it is answered with %v", err)
	}
	lines[1] = strings.Replace(lines[1], "127.0.0.1", "127.0.0.2", 1)
	_, err = VerifyExport(strings.NewReader(strings.Join(lines, "")), Options{})
	if broken, ok := IsBroken(err); !ok || broken.Sequence != 2 {
		t.Errorf("one that does not hold either: %v", err)
	}
}

// A bundle has the hashes of entries, even if their signatures are damaged.
func TestABundleNeedsNoSignatures(t *testing.T) {
	f := newFixture(t)
	f.log.SetSigning(SignBatches)
	first := f.group(20)
	c := f.follow()
	want, err := f.log.Tile(t.Context(), principal(tenantA), -1, 0, int(c.Size))
	if err != nil {
		t.Fatal(err)
	}
	f.put(func(tx store.Tx) error { return tx.Delete(batchKey(first)) })
	got, err := f.log.Tile(t.Context(), principal(tenantA), -1, 0, int(c.Size))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes: %v", len(got), err)
	}
	f.put(func(tx store.Tx) error {
		row := get(tx, entryKey(first+3))
		row[len(row)-5] ^= 1
		return tx.Put(entryKey(first+3), row)
	})
	if _, err := f.log.Tile(t.Context(), principal(tenantA), -1, 0, int(c.Size)); fault.Of(err) != fault.Internal || err == nil {
		t.Errorf("an altered entry: %v", err)
	}
}

// An anchor keeps a signed note. The reader bounds its size, because anyone with write access to
// the anchor chooses it.
func TestALongAnchorIsNotReadWhole(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	bucket, err := objects.Open(t.Context(), "file://"+dir, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bucket.Close() })
	a := anchoredAt(f, NewBucketPlace(f.log.ChainID(), bucket))
	a.keep()
	signed := newestOf(t, f.log)
	// A note may also carry the signatures of others.
	others := bytes.Repeat([]byte("\u2014 other AAAAAAAA\n"), maxNote/20)
	if _, why := a.keeper.readAnchor(append(bytes.Clone(signed), others...)); why != anchorMalformed {
		t.Errorf("a long note is refused as %q", why)
	}
	for _, long := range [][]byte{bytes.Repeat([]byte("x"), 1<<20), append(bytes.Clone(signed), bytes.Repeat([]byte("\n"), 1<<20)...)} {
		if err := bucket.Put(t.Context(), "anchor/chain_test/checkpoint", long); err != nil {
			t.Fatal(err)
		}
		a.fill(1)
		a.follow()
		a.keep()
		a.keep()
		a.checkStates(PlaceOK)
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
