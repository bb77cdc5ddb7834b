package audit_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// flipAt changes a bit of a stored row.
func flipAt(tx store.Tx, key []byte, at int) error {
	row := audittest.Get(tx, key)
	row[at] ^= 1
	return tx.Put(key, row)
}

func signatureOf(t testing.TB, e *audit.Entry) []byte {
	t.Helper()
	b, ok := audit.DecodeBase64(e.Signature)
	if !ok {
		t.Fatal("the signature is not base64")
	}
	return b
}

func TestTheModeOfSigningChangesOnARunningLog(t *testing.T) {
	f := audittest.NewFixture(t)
	entries := f.Group(3)
	f.Log.SetSigning(writer.SignBatches)
	batch, one := f.Group(5), f.Group(1)
	f.Log.SetSigning(writer.SignEntries)
	again := f.Group(2)
	key, shared := f.Log.Signer.Public(), new(audit.Memo)
	for sequence := uint64(1); sequence < again+2; sequence++ {
		e := f.Read(sequence)
		if !e.Verify(key, nil) || !e.Verify(key, shared) {
			t.Errorf("the entry %d does not verify", sequence)
		}
		p, _, ok := audit.DecodeSignature(signatureOf(t, e))
		if want := sequence >= batch && sequence < one; !ok || (p.N != 0) != want {
			t.Errorf("the entry %d is signed in a group of %d", sequence, p.N)
		}
		if p.N != 0 && (p.N != 5 || uint64(p.Index) != sequence-batch) {
			t.Errorf("the entry %d has index %d of %d", sequence, p.Index, p.N)
		}
		text, err := e.Canonical(nil, true)
		if err != nil {
			t.Fatal(err)
		}
		parsed, sum, err := audit.ParseWithDigest(text)
		if err != nil || !parsed.Verify(key, shared) || hex.EncodeToString(sum[:]) != e.Hash {
			t.Errorf("the exported entry %d does not verify: %v", sequence, err)
		}
	}
	if shared.Len() != 1 {
		t.Errorf("%d groups are remembered", shared.Len())
	}
	rows := 0
	err := f.Store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("audit/batch/")), func(key, value []byte) bool {
			rows++
			if !bytes.Equal(key, audit.BatchKey(batch)) || len(value) != dualsig.SignatureSize {
				t.Errorf("the row %x of %d bytes", key, len(value))
			}
			return true
		})
	})
	if err != nil || rows != 1 || entries != 2 {
		t.Error(rows, err)
	}
	// A process can continue a log whose newest entry belongs to a group.
	f.Log.SetSigning(writer.SignBatches)
	f.Group(4)
	again2 := audittest.NewParts(f.Now)
	if err := again2.Use(t.Context(), f.Store, f.Log.Signer, "chain_test"); err != nil {
		t.Error(err)
	}
}

// A wrong signature is found, whichever entry of the group verified before it.
func TestEachEntryOfAGroupIsVerifiedOnItsOwn(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Log.SetSigning(writer.SignBatches)
	first := f.Group(5)
	key := f.Log.Signer.Public()
	seed := make([]byte, dualsig.SeedSize)
	other, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	for sequence := first; sequence < first+5; sequence++ {
		good := f.Read(sequence)
		blob := signatureOf(t, good)
		p, signature, _ := audit.DecodeSignature(blob)
		if !bytes.Equal(p.Encode(signature), blob) {
			t.Fatal("another encoding of the same")
		}
		if good.Verify(other.Public(), nil) {
			t.Error("verified with another key")
		}
		neighbour := f.Read(first + (sequence-first+1)%5)
		bad := map[string][]byte{
			"empty":              nil,
			"without the header": signature,
			"a byte more":        append(bytes.Clone(blob), 0),
			"a byte less":        blob[:len(blob)-1],
			"a hash more":        audit.BatchProof{p.N, p.Index, append(bytes.Clone(p.Path), make([]byte, 32)...)}.Encode(signature),
			"a hash less":        audit.BatchProof{p.N, p.Index, p.Path[32:]}.Encode(signature),
			"a larger group":     audit.BatchProof{p.N + 1, p.Index, p.Path}.Encode(signature),
			"another index":      audit.BatchProof{p.N, p.Index ^ 1, p.Path}.Encode(signature),
			"no index":           audit.BatchProof{p.N, p.N, p.Path}.Encode(signature),
			"the neighbour's":    signatureOf(t, neighbour),
			"a group of one":     audit.BatchProof{1, 0, nil}.Encode(signature),
			"a group of none":    audit.BatchProof{0, 0, nil}.Encode(signature),
		}
		for i := 0; i < len(blob); i++ {
			if i > 9+len(p.Path)+8 && i%401 != 0 { // sample the ML-DSA signature
				continue
			}
			b := bytes.Clone(blob)
			b[i] ^= 1
			bad[fmt.Sprint("byte ", i)] = b
		}
		for name, b := range bad {
			m := new(audit.Memo)
			if !good.Verify(key, m) {
				t.Fatal("does not verify")
			}
			e := *good
			e.Signature = base64.StdEncoding.EncodeToString(b)
			if e.Verify(key, m) || e.Verify(key, nil) {
				t.Errorf("%d, %s: verified", sequence, name)
			}
		}
		m := new(audit.Memo)
		good.Verify(key, m)
		// A group of one entry has only the plain form.
		hash, _ := hex.DecodeString(good.Hash)
		alone, err := f.Log.Signer.Sign(audit.BatchContext, audit.BatchMessage(1, audit.LeafHash([32]byte(hash))))
		if err != nil {
			t.Fatal(err)
		}
		e := *good
		e.Signature = base64.StdEncoding.EncodeToString(audit.BatchProof{1, 0, nil}.Encode(alone))
		if e.Verify(key, m) {
			t.Error("a group of one verified")
		}
		e = *good
		e.Signature = strings.Replace(good.Signature, good.Signature[:8], good.Signature[:8]+"\n", 1)
		if e.Verify(key, m) {
			t.Error("another spelling verified")
		}
		e = *good
		e.Hash = neighbour.Hash
		if e.Verify(key, m) {
			t.Error("another hash verified")
		}
	}
}

func TestTheMemoIsBounded(t *testing.T) {
	f := audittest.NewFixture(t)
	m, key := new(audit.Memo), f.Log.Signer.Public()
	for i := range audit.MaxMemo + 10 {
		if m.Verify(key, 2, sha256.Sum256(fmt.Append(nil, i)), nil) {
			t.Fatal("verified")
		}
	}
	if m.Len() > audit.MaxMemo {
		t.Errorf("%d groups", m.Len())
	}
}

func TestADamagedRowOfAGroupIsNotRead(t *testing.T) {
	for name, damage := range map[string]func(tx store.Tx, first uint64) error{
		"no signature": func(tx store.Tx, first uint64) error { return tx.Delete(audit.BatchKey(first)) },
		"a short signature": func(tx store.Tx, first uint64) error {
			return tx.Put(audit.BatchKey(first), make([]byte, dualsig.SignatureSize-1))
		},
		"a long signature": func(tx store.Tx, first uint64) error {
			return tx.Put(audit.BatchKey(first), make([]byte, dualsig.SignatureSize+1))
		},
		"another first": func(tx store.Tx, first uint64) error {
			if err := tx.Put(audit.BatchKey(first-1), audittest.Get(tx, audit.BatchKey(first))); err != nil {
				return err
			}
			return flipAt(tx, audit.EntryKey(first+1), 8)
		},
		"another index": func(tx store.Tx, first uint64) error { return flipAt(tx, audit.EntryKey(first+1), 16) },
		"another size":  func(tx store.Tx, first uint64) error { return flipAt(tx, audit.EntryKey(first+1), 9) },
		"no version":    func(tx store.Tx, first uint64) error { return flipAt(tx, audit.EntryKey(first+1), 0) },
		"the other's row": func(tx store.Tx, first uint64) error {
			return tx.Put(audit.EntryKey(first+1), audittest.Get(tx, audit.EntryKey(first)))
		},
		"cut": func(tx store.Tx, first uint64) error {
			return tx.Put(audit.EntryKey(first+1), audittest.Get(tx, audit.EntryKey(first+1))[:audit.BatchRowHeader+40])
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := audittest.NewFixture(t)
			f.Log.SetSigning(writer.SignBatches)
			first := f.Group(3)
			if err := f.Store.Update(t.Context(), func(tx store.Tx) error { return damage(tx, first) }); err != nil {
				t.Fatal(err)
			}
			if err := readError(f, first+1); fault.Of(err) != fault.Internal || err == nil {
				t.Error(err)
			}
		})
	}
	f := audittest.NewFixture(t)
	if err := readError(f, 2); fault.Of(err) != fault.NotFound {
		t.Error("an entry that is not there:", err)
	}
}

// Implementations that are not part of the product verify the signature of a group, as the
// documentation of the format describes.
func TestAnIndependentImplementationVerifiesGroups(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Log.SetSigning(writer.SignBatches)
	first := f.Group(3)
	key, err := mldsa.NewPublicKey(mldsa.MLDSA65(), f.Log.Signer.Public().Bytes())
	if err != nil {
		t.Fatal(err)
	}
	leaf := func(i uint64) []byte {
		hash, _ := hex.DecodeString(f.Read(first + i).Hash)
		sum := sha256.Sum256(append([]byte{0}, hash...))
		return sum[:]
	}
	node := func(left, right []byte) []byte {
		sum := sha256.Sum256(append(append([]byte{1}, left...), right...))
		return sum[:]
	}
	root := node(node(leaf(0), leaf(1)), leaf(2))
	message := append([]byte("\x00\x00\x00\x1alatticekeep/audit-batch/v1\x00\x00\x00\x04\x00\x00\x00\x03\x00\x00\x00\x20"), root...)
	blob := signatureOf(t, f.Read(first+2))
	path := node(leaf(0), leaf(1))
	if want := append([]byte{2, 0, 0, 0, 3, 0, 0, 0, 2}, path...); !bytes.Equal(blob[:41], want) {
		t.Errorf("it begins with %x", blob[:41])
	}
	if err := mldsa.Verify(key, message, blob[41:], &mldsa.Options{Context: "latticekeep/audit-batch/v1"}); err != nil {
		t.Error(err)
	}
}

func readError(f *audittest.Fixture, sequence uint64) error {
	return f.Store.View(f.T.Context(), func(r store.Reader) error {
		_, err := entries.Read(r, sequence)
		return err
	})
}

// testdata/checkpoint is signed with a key whose seed is 32 zero bytes. It must always verify.
func TestTheGoldenCheckpointVerifies(t *testing.T) {
	signed, err := os.ReadFile(filepath.Join("testdata", "checkpoint"))
	if err != nil {
		t.Fatal(err)
	}
	key, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
	if err != nil {
		t.Fatal(err)
	}
	c, err := audit.ParseCheckpoint(signed, key.Public())
	if err != nil {
		t.Fatal(err)
	}
	b := &audit.TreeBuilder{}
	for b.Size < 300 {
		b.Add(audittest.Numbered(b.Size))
	}
	want := audit.Checkpoint{
		ChainID: "chain_golden", Epoch: 2, Size: 300, Root: b.Root(), Sequence: 310, Hash: audittest.Numbered(299),
		Time: time.Date(2026, 11, 21, 12, 0, 0, 123456000, time.UTC),
	}
	if c != want {
		t.Errorf("%+v, want %+v", c, want)
	}
	const text = "latticekeep.dev/log/chain_golden/2\n300\nSKDFlIOV/vOW8PH5pgUUDSOCTarNmyyZ0gVUxx4vCdg=\nsequence 310\n"
	if !bytes.HasPrefix(signed, []byte(text)) {
		t.Errorf("%s", signed)
	}
}
