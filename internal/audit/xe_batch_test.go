package audit

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// flipAt changes a bit of a stored row.
func flipAt(tx store.Tx, key []byte, at int) error {
	row := get(tx, key)
	row[at] ^= 1
	return tx.Put(key, row)
}

func signatureOf(t testing.TB, e *Entry) []byte {
	t.Helper()
	b, ok := decodeBase64(e.Signature)
	if !ok {
		t.Fatal("the signature is not base64")
	}
	return b
}

func TestTheModeOfSigningChangesOnARunningLog(t *testing.T) {
	f := newFixture(t)
	entries := f.group(3)
	f.log.SetSigning(SignBatches)
	batch, one := f.group(5), f.group(1)
	f.log.SetSigning(SignEntries)
	again := f.group(2)
	key, shared := f.log.signer.Public(), new(memo)
	for sequence := uint64(1); sequence < again+2; sequence++ {
		e := f.read(sequence)
		if !e.verify(key, nil) || !e.verify(key, shared) {
			t.Errorf("the entry %d does not verify", sequence)
		}
		p, _, ok := decodeSignature(signatureOf(t, e))
		if want := sequence >= batch && sequence < one; !ok || (p.n != 0) != want {
			t.Errorf("the entry %d is signed in a group of %d", sequence, p.n)
		}
		if p.n != 0 && (p.n != 5 || uint64(p.index) != sequence-batch) {
			t.Errorf("the entry %d has index %d of %d", sequence, p.index, p.n)
		}
		text, err := e.canonical(nil, true)
		if err != nil {
			t.Fatal(err)
		}
		parsed, sum, err := parseWhole(text)
		if err != nil || !parsed.verify(key, shared) || hex.EncodeToString(sum[:]) != e.Hash {
			t.Errorf("the exported entry %d does not verify: %v", sequence, err)
		}
	}
	if len(shared.groups) != 1 {
		t.Errorf("%d groups are remembered", len(shared.groups))
	}
	rows := 0
	err := f.store.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("audit/batch/")), func(key, value []byte) bool {
			rows++
			if !bytes.Equal(key, batchKey(batch)) || len(value) != dualsig.SignatureSize {
				t.Errorf("the row %x of %d bytes", key, len(value))
			}
			return true
		})
	})
	if err != nil || rows != 1 || entries != 2 {
		t.Error(rows, err)
	}
	// A process can continue a log whose newest entry belongs to a group.
	f.log.SetSigning(SignBatches)
	f.group(4)
	again2 := newParts(f.now)
	if err := again2.Use(t.Context(), f.store, f.log.signer, "chain_test"); err != nil {
		t.Error(err)
	}
}

// A wrong signature is found, whichever entry of the group verified before it.
func TestEachEntryOfAGroupIsVerifiedOnItsOwn(t *testing.T) {
	f := newFixture(t)
	f.log.SetSigning(SignBatches)
	first := f.group(5)
	key := f.log.signer.Public()
	seed := make([]byte, dualsig.SeedSize)
	other, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	for sequence := first; sequence < first+5; sequence++ {
		good := f.read(sequence)
		blob := signatureOf(t, good)
		p, signature, _ := decodeSignature(blob)
		if !bytes.Equal(p.encode(signature), blob) {
			t.Fatal("another encoding of the same")
		}
		if good.verify(other.Public(), nil) {
			t.Error("verified with another key")
		}
		neighbour := f.read(first + (sequence-first+1)%5)
		bad := map[string][]byte{
			"empty":              nil,
			"without the header": signature,
			"a byte more":        append(bytes.Clone(blob), 0),
			"a byte less":        blob[:len(blob)-1],
			"a hash more":        batchProof{p.n, p.index, append(bytes.Clone(p.path), make([]byte, 32)...)}.encode(signature),
			"a hash less":        batchProof{p.n, p.index, p.path[32:]}.encode(signature),
			"a larger group":     batchProof{p.n + 1, p.index, p.path}.encode(signature),
			"another index":      batchProof{p.n, p.index ^ 1, p.path}.encode(signature),
			"no index":           batchProof{p.n, p.n, p.path}.encode(signature),
			"the neighbour's":    signatureOf(t, neighbour),
			"a group of one":     batchProof{1, 0, nil}.encode(signature),
			"a group of none":    batchProof{0, 0, nil}.encode(signature),
		}
		for i := 0; i < len(blob); i++ {
			if i > 9+len(p.path)+8 && i%401 != 0 { // sample the ML-DSA signature
				continue
			}
			b := bytes.Clone(blob)
			b[i] ^= 1
			bad[fmt.Sprint("byte ", i)] = b
		}
		for name, b := range bad {
			m := new(memo)
			if !good.verify(key, m) {
				t.Fatal("does not verify")
			}
			e := *good
			e.Signature = base64.StdEncoding.EncodeToString(b)
			if e.verify(key, m) || e.verify(key, nil) {
				t.Errorf("%d, %s: verified", sequence, name)
			}
		}
		m := new(memo)
		good.verify(key, m)
		// A group of one entry has only the plain form.
		hash, _ := hex.DecodeString(good.Hash)
		alone, err := f.log.signer.Sign(batchContext, batchMessage(1, leafHash([32]byte(hash))))
		if err != nil {
			t.Fatal(err)
		}
		e := *good
		e.Signature = base64.StdEncoding.EncodeToString(batchProof{1, 0, nil}.encode(alone))
		if e.verify(key, m) {
			t.Error("a group of one verified")
		}
		e = *good
		e.Signature = strings.Replace(good.Signature, good.Signature[:8], good.Signature[:8]+"\n", 1)
		if e.verify(key, m) {
			t.Error("another spelling verified")
		}
		e = *good
		e.Hash = neighbour.Hash
		if e.verify(key, m) {
			t.Error("another hash verified")
		}
	}
}

func TestTheMemoIsBounded(t *testing.T) {
	f := newFixture(t)
	m, key := new(memo), f.log.signer.Public()
	for i := range maxMemo + 10 {
		if m.verify(key, 2, sha256.Sum256(fmt.Append(nil, i)), nil) {
			t.Fatal("verified")
		}
	}
	if len(m.groups) > maxMemo {
		t.Errorf("%d groups", len(m.groups))
	}
}

func TestADamagedRowOfAGroupIsNotRead(t *testing.T) {
	for name, damage := range map[string]func(tx store.Tx, first uint64) error{
		"no signature": func(tx store.Tx, first uint64) error { return tx.Delete(batchKey(first)) },
		"a short signature": func(tx store.Tx, first uint64) error {
			return tx.Put(batchKey(first), make([]byte, dualsig.SignatureSize-1))
		},
		"a long signature": func(tx store.Tx, first uint64) error {
			return tx.Put(batchKey(first), make([]byte, dualsig.SignatureSize+1))
		},
		"another first": func(tx store.Tx, first uint64) error {
			if err := tx.Put(batchKey(first-1), get(tx, batchKey(first))); err != nil {
				return err
			}
			return flipAt(tx, entryKey(first+1), 8)
		},
		"another index": func(tx store.Tx, first uint64) error { return flipAt(tx, entryKey(first+1), 16) },
		"another size":  func(tx store.Tx, first uint64) error { return flipAt(tx, entryKey(first+1), 9) },
		"no version":    func(tx store.Tx, first uint64) error { return flipAt(tx, entryKey(first+1), 0) },
		"the other's row": func(tx store.Tx, first uint64) error {
			return tx.Put(entryKey(first+1), get(tx, entryKey(first)))
		},
		"cut": func(tx store.Tx, first uint64) error {
			return tx.Put(entryKey(first+1), get(tx, entryKey(first+1))[:batchRowHeader+40])
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.log.SetSigning(SignBatches)
			first := f.group(3)
			if err := f.store.Update(t.Context(), func(tx store.Tx) error { return damage(tx, first) }); err != nil {
				t.Fatal(err)
			}
			if err := f.readError(first + 1); fault.Of(err) != fault.Internal || err == nil {
				t.Error(err)
			}
		})
	}
	f := newFixture(t)
	if err := f.readError(2); fault.Of(err) != fault.NotFound {
		t.Error("an entry that is not there:", err)
	}
}

// Implementations that are not part of the product verify the signature of a group, as the
// documentation of the format describes.
func TestAnIndependentImplementationVerifiesGroups(t *testing.T) {
	f := newFixture(t)
	f.log.SetSigning(SignBatches)
	first := f.group(3)
	key, err := mldsa.NewPublicKey(mldsa.MLDSA65(), f.log.signer.Public().Bytes())
	if err != nil {
		t.Fatal(err)
	}
	leaf := func(i uint64) []byte {
		hash, _ := hex.DecodeString(f.read(first + i).Hash)
		sum := sha256.Sum256(append([]byte{0}, hash...))
		return sum[:]
	}
	node := func(left, right []byte) []byte {
		sum := sha256.Sum256(append(append([]byte{1}, left...), right...))
		return sum[:]
	}
	root := node(node(leaf(0), leaf(1)), leaf(2))
	message := append([]byte("\x00\x00\x00\x1alatticekeep/audit-batch/v1\x00\x00\x00\x04\x00\x00\x00\x03\x00\x00\x00\x20"), root...)
	blob := signatureOf(t, f.read(first+2))
	path := node(leaf(0), leaf(1))
	if want := append([]byte{2, 0, 0, 0, 3, 0, 0, 0, 2}, path...); !bytes.Equal(blob[:41], want) {
		t.Errorf("it begins with %x", blob[:41])
	}
	if err := mldsa.Verify(key, message, blob[41:], &mldsa.Options{Context: "latticekeep/audit-batch/v1"}); err != nil {
		t.Error(err)
	}
}
