package audit

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Verification from a base knows as much as verification from the beginning.
func TestABaseStandsForTheEntriesBeforeIt(t *testing.T) {
	f := newFixture(t)
	f.sealed(tenantA, "cred_a", "1", strings.Repeat("a", 64))
	f.record(Event{Type: APIKeyCreated, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: "key_1", Type: APIKeyResource}})
	f.record(Event{Type: NamespaceMapped, Outcome: Success, Principal: principal(tenantB), Attributes: map[string]string{"cluster_uid": "c", "namespace_uid": "n"}})
	f.fill(300)
	f.rollBack(304, 310)
	f.fill(300)
	lines := f.lines()
	whole, err := VerifyExport(strings.NewReader(strings.Join(lines, "")), Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []uint64{1, 3, 256, 304, 311, 500} {
		_, row := f.baseAt(at)
		base, err := ParseBase(row, f.log.signer.Public())
		if err != nil || base.Sequence() != at {
			t.Fatal(base, err)
		}
		rest := lines[base.Size():]
		report, err := VerifyExport(strings.NewReader(strings.Join(rest, "")), Options{Base: base, Fingerprint: f.log.Fingerprint()})
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
		if _, err := VerifyExport(strings.NewReader(strings.Join(rest[1:], "")), Options{Base: base}); err == nil {
			t.Errorf("from %d: the next entry is missing, and that is not reported", at)
		}
	}
}

// A base is parsed once, and parsed again when its row has changed.
func TestABaseIsReadOnce(t *testing.T) {
	f := newFixture(t)
	f.fill(10)
	put := func(row []byte) { f.put(func(tx store.Tx) error { return tx.Put(baseKey, row) }) }
	if b, err := f.log.chain.readBase(t.Context()); b != nil || err != nil {
		t.Fatalf("of nothing archived: %v, %v", b, err)
	}
	_, row := f.baseAt(4)
	put(row)
	all := make([]*Base, 8)
	var readers sync.WaitGroup
	for i := range all {
		readers.Go(func() { all[i], _ = f.log.chain.readBase(t.Context()) })
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
	if b, err := f.log.chain.readBase(t.Context()); b != nil || err == nil {
		t.Errorf("an altered row: %v, %v", b, err)
	}
	for name, err := range map[string]error{
		"replay": errorOf(f.log.Replay(t.Context(), tenantA, ReplayPoint{}, 0, func(*Entry) error { return nil })),
		"visit":  f.log.Visit(t.Context(), tenantA, func(*Entry) {}, SealingKeyCreated),
	} {
		if !errors.Is(err, errDamagedLog) {
			t.Errorf("%s of a log with an altered base: %v", name, err)
		}
	}
	if err := f.log.Export(t.Context(), io.Discard, 0); err == nil {
		t.Error("a log with an altered base was exported")
	} else if broken, ok := IsBroken(err); !ok || broken.Sequence != 1 {
		t.Error(err)
	}
	put(row)
	if b, err := f.log.chain.readBase(t.Context()); b == nil || err != nil {
		t.Errorf("the former row: %v, %v", b, err)
	}
	_, next := f.baseAt(6)
	put(next)
	if b, err := f.log.chain.readBase(t.Context()); err != nil || b.Sequence() != 6 {
		t.Errorf("another base: %v, %v", b, err)
	}
	_, foreign := newFixture(t).baseAt(1)
	put(foreign)
	if b, err := f.log.chain.readBase(t.Context()); b != nil || err == nil {
		t.Errorf("another log's: %v, %v", b, err)
	}
}

func TestABaseHasOneSpellingAndOneSigner(t *testing.T) {
	f := newFixture(t)
	f.sealed(tenantA, "cred_a", "1", "00")
	b, row := f.baseAt(2)
	if _, err := ParseBase(row, newFixture(t).log.signer.Public()); !errors.Is(err, ErrBase) {
		t.Error("another key: ", err)
	}
	other := newFixture(t).log
	if _, err := b.sign(other.signer, other.ChainID()); err == nil {
		t.Error("a base of another log was signed")
	}
	for i := range row {
		if i > 20 && i < 3300 && i%97 > 0 {
			continue // a sample of the signature's bits is enough
		}
		changed := bytes.Clone(row)
		changed[i] ^= 1
		if _, err := ParseBase(changed, f.log.signer.Public()); !errors.Is(err, ErrBase) {
			t.Fatalf("byte %d flipped: %v", i, err)
		}
	}
	for _, changed := range [][]byte{nil, row[:100], append(bytes.Clone(row), ' '), bytes.Replace(row, []byte(`{"api_keys"`), []byte(`{ "api_keys"`), 1)} {
		if _, err := ParseBase(changed, nil); !errors.Is(err, ErrBase) {
			t.Error(err)
		}
	}
	if _, err := NewVerifier(Options{From: 2, PublicKey: f.log.signer.Public()}).Base(); err == nil {
		t.Error("a part made a base")
	}
}
