package verify_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Verification from a base knows as much as verification from the beginning.
func TestABaseStandsForTheEntriesBeforeIt(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Sealed(audittest.TenantA, "cred_a", "1", strings.Repeat("a", 64))
	f.Record(audit.Event{Type: audit.APIKeyCreated, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: "key_1", Type: audit.APIKeyResource}})
	f.Record(audit.Event{Type: audit.NamespaceMapped, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB), Attributes: map[string]string{"cluster_uid": "c", "namespace_uid": "n"}})
	f.Fill(300)
	f.RollBack(304, 310)
	f.Fill(300)
	lines := f.Lines()
	whole, err := verify.Export(strings.NewReader(strings.Join(lines, "")), verify.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []uint64{1, 3, 256, 304, 311, 500} {
		_, row := f.BaseAt(at)
		base, err := audit.ParseBase(row, f.Log.Signer.Public())
		if err != nil || base.Sequence() != at {
			t.Fatal(base, err)
		}
		rest := lines[base.Tree.Size:]
		report, err := verify.Export(strings.NewReader(strings.Join(rest, "")), verify.Options{Base: base, Fingerprint: f.Log.Fingerprint()})
		if err != nil {
			t.Fatalf("from %d: %v", at, err)
		}
		if report.From <= at || report.Root != whole.Root || report.Size != whole.Size || report.Hash != whole.Hash || report.Epoch != 2 || len(report.Rollbacks) != 1 || !report.Pinned {
			t.Errorf("from %d: %+v", at, report)
		}
		if len(report.Credentials) != len(whole.Credentials) || len(report.APIKeys) != 1 || len(report.Namespaces) != 1 {
			t.Errorf("from %d: %d credentials, %d API keys, %d namespaces", at, len(report.Credentials), len(report.APIKeys), len(report.Namespaces))
		}
		for key, state := range whole.Credentials {
			if report.Credentials[key] != state {
				t.Errorf("from %d: %v is %+v", at, key, report.Credentials[key])
			}
		}
		if _, err := verify.Export(strings.NewReader(strings.Join(rest[1:], "")), verify.Options{Base: base}); err == nil {
			t.Errorf("from %d: the next entry is missing, and that is not reported", at)
		}
	}
}

// A base is parsed once, and parsed again when its row has changed.
func TestABaseIsReadOnce(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(10)
	put := func(row []byte) { f.Put(func(tx store.Tx) error { return tx.Put(audit.BaseKey, row) }) }
	if b, err := f.Log.Chain.ReadBase(t.Context()); b != nil || err != nil {
		t.Fatalf("of nothing archived: %v, %v", b, err)
	}
	_, row := f.BaseAt(4)
	put(row)
	all := make([]*audit.Base, 8)
	var readers sync.WaitGroup
	for i := range all {
		readers.Go(func() { all[i], _ = f.Log.Chain.ReadBase(t.Context()) })
	}
	readers.Wait()
	for _, b := range all {
		if b == nil || b != all[0] || b.Sequence() != 4 {
			t.Fatalf("%d readers have %v", len(all), all)
		}
	}
	altered := bytes.Clone(row)
	altered[len(altered)-20] ^= 1
	put(altered)
	if b, err := f.Log.Chain.ReadBase(t.Context()); b != nil || err == nil {
		t.Errorf("an altered row: %v, %v", b, err)
	}
	for name, err := range map[string]error{
		"replay": audittest.ErrorOf(f.Log.Replay(t.Context(), audittest.TenantA, reader.ReplayPoint{}, 0, func(*audit.Entry) error { return nil })),
		"visit":  f.Log.Visit(t.Context(), audittest.TenantA, func(*audit.Entry) {}, audit.SealingKeyCreated),
	} {
		if !errors.Is(err, audit.ErrDamagedLog) {
			t.Errorf("%s of a log with an altered base: %v", name, err)
		}
	}
	if err := f.Log.Export(t.Context(), io.Discard, 0); err == nil {
		t.Error("a log with an altered base was exported")
	} else if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 1 {
		t.Error(err)
	}
	put(row)
	if b, err := f.Log.Chain.ReadBase(t.Context()); b == nil || err != nil {
		t.Errorf("the former row: %v, %v", b, err)
	}
	_, next := f.BaseAt(6)
	put(next)
	if b, err := f.Log.Chain.ReadBase(t.Context()); err != nil || b.Sequence() != 6 {
		t.Errorf("another base: %v, %v", b, err)
	}
	_, foreign := audittest.NewFixture(t).BaseAt(1)
	put(foreign)
	if b, err := f.Log.Chain.ReadBase(t.Context()); b != nil || err == nil {
		t.Errorf("another log's: %v, %v", b, err)
	}
}

func TestABaseHasOneSpellingAndOneSigner(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Sealed(audittest.TenantA, "cred_a", "1", "00")
	b, row := f.BaseAt(2)
	if _, err := audit.ParseBase(row, audittest.NewFixture(t).Log.Signer.Public()); !errors.Is(err, audit.ErrBase) {
		t.Error("another key: ", err)
	}
	other := audittest.NewFixture(t).Log
	if _, err := b.Sign(other.Signer, other.ChainID()); err == nil {
		t.Error("a base of another log was signed")
	}
	for i := range row {
		if i > 20 && i < 3300 && i%97 > 0 {
			continue // a sample of the signature's bits is enough
		}
		changed := bytes.Clone(row)
		changed[i] ^= 1
		if _, err := audit.ParseBase(changed, f.Log.Signer.Public()); !errors.Is(err, audit.ErrBase) {
			t.Fatalf("byte %d flipped: %v", i, err)
		}
	}
	for _, changed := range [][]byte{nil, row[:100], append(bytes.Clone(row), ' '), bytes.Replace(row, []byte(`{"api_keys"`), []byte(`{ "api_keys"`), 1)} {
		if _, err := audit.ParseBase(changed, nil); !errors.Is(err, audit.ErrBase) {
			t.Error(err)
		}
	}
	if _, err := verify.NewVerifier(verify.Options{From: 2, PublicKey: f.Log.Signer.Public()}).Base(); err == nil {
		t.Error("a part made a base")
	}
}
