package verify_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"hash/maphash"
	"math/bits"
	mrand "math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// victim is a log with everything that a log can have: entries signed alone and in groups, several
// tenants, credentials, an accepted rollback, full and partial tiles, summaries, and entries that
// are not followed yet.
type victim struct {
	*audittest.Fixture
	*audittest.Memory
	raw             store.Store // nil: changes are made on a copy in memory
	lostFrom, epoch uint64      // sequences around the rollback
	head            uint64
	options         verify.Options
}

func newVictimOn(t testing.TB, newFixture func(testing.TB) *audittest.Fixture) *victim {
	f := newFixture(t)
	v := &victim{Fixture: f}
	f.Sealed(audittest.TenantA, "cred_a", "1", strings.Repeat("a", 64))
	f.Sealed(audittest.TenantB, "cred_b", "1", strings.Repeat("b", 64))
	v.fill(60)
	f.Log.SetSigning(writer.SignBatches)
	v.fill(120)
	f.Sealed(audittest.TenantA, "cred_a", "2", strings.Repeat("c", 64))
	f.Record(audit.Event{Type: audit.CredentialDeleted, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB), Resource: audit.Resource{ID: "cred_b", Type: audit.CredentialResource}})
	before, err := f.Verify()
	if err != nil {
		t.Fatal(err)
	}
	v.lostFrom = before.Sequence + 1
	f.Log.Halt(&audit.RollbackError{LostFrom: v.lostFrom, LostTo: v.lostFrom + 5, Epoch: 1, Source: "a test"})
	p := audittest.Principal(authz.SystemTenant)
	p.Scopes = []authz.Scope{authz.SystemAdmin}
	accepted, err := f.Log.AcceptRollback(t.Context(), p, "a test")
	if err != nil {
		t.Fatal(err)
	}
	v.epoch = accepted.Sequence
	v.fill(130)
	f.Log.SetSigning(writer.SignEntries)
	v.fill(3)
	if _, err := f.Log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	v.fill(5)
	v.Memory = audittest.CopyStore(t, f.Store)
	if f.URL != "" {
		v.raw = f.Opens(nil)
	}
	v.options = verify.Options{PublicKey: f.Log.Signer.Public()}.WithCheck(rememberSignatures())
	report, err := verify.Store(t.Context(), v.Memory, v.options)
	if err != nil {
		t.Fatal("whole at first: ", err)
	}
	v.head = report.Sequence
	if len(report.Rollbacks) != 1 || report.Epoch != 2 || report.Size != int64(report.Entries) || report.Entries >= report.Sequence {
		t.Fatalf("%+v", report)
	}
	for _, rng := range []store.Range{audit.SummaryRange, audit.TileRange, audit.BatchRange, audit.EpochRange, audit.CurrentRange, audit.KeyRange(audit.CheckpointKey)} {
		found := false
		if err := v.Memory.Tx().Scan(rng, func(_, _ []byte) bool { found = true; return false }); err != nil || !found {
			t.Fatalf("a victim without %s", rng.From)
		}
	}
	return v
}

// verifyWith verifies the log with a change, and undoes the change.
func (v *victim) verifyWith(change func(tx store.Tx) error) error {
	if v.raw == nil {
		_, err := verify.Store(context.Background(), v.With(change), v.options)
		return err
	}
	var undo map[string][]byte
	err := v.raw.Update(context.Background(), func(tx store.Tx) error {
		undo = make(map[string][]byte)
		return change(&undoneTx{tx, undo})
	})
	if err != nil {
		panic(err)
	}
	_, err = verify.Store(context.Background(), v.raw, v.options)
	failed := v.raw.Update(context.Background(), func(tx store.Tx) (err error) {
		for key, value := range undo {
			if value == nil {
				err = cmp.Or(err, tx.Delete([]byte(key)))
			} else {
				err = cmp.Or(err, tx.Put([]byte(key), value))
			}
		}
		return err
	})
	if failed != nil {
		panic(failed)
	}
	return err
}

// undoneTx records the previous rows, so they can be restored.
type undoneTx struct {
	store.Tx
	before map[string][]byte
}

func (tx *undoneTx) note(key []byte) error {
	if _, ok := tx.before[string(key)]; ok {
		return nil
	}
	value, err := tx.Get(key)
	tx.before[string(key)] = bytes.Clone(value)
	return err
}

func (tx *undoneTx) Put(key, value []byte) error { return cmp.Or(tx.note(key), tx.Tx.Put(key, value)) }

func (tx *undoneTx) Delete(key []byte) error { return cmp.Or(tx.note(key), tx.Tx.Delete(key)) }

// each calls do for 0 to n-1, concurrently if changes are made on copies.
func (v *victim) each(n int, do func(i int)) {
	if v.raw == nil {
		audittest.OnAllCores(n, do)
		return
	}
	for i := range n {
		do(i)
	}
}

// fill lets concurrent writers record entries, nine of ten for one tenant.
func (v *victim) fill(n int) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			e := audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: "cred_a", Type: audit.CredentialResource}}
			switch i % 10 {
			case 0:
				e.Principal = audittest.Principal(audittest.TenantB)
			case 5:
				e.Type, e.Attributes = audit.CredentialListed, map[string]string{"note": "<&>\"\\\u2028é"}
			}
			if err := v.Log.Record(context.Background(), e); err != nil {
				v.T.Error(err)
			}
		})
	}
	wg.Wait()
}

// sequenceIn returns the range of sequences at which a change of the row may be reported, or 0 and
// 0 if any sequence is accepted.
func (v *victim) sequenceIn(r audit.Row) (from, to uint64) {
	exactly := func(n uint64) (uint64, uint64) { return n, n }
	at := func(rng store.Range) uint64 { return binary.BigEndian.Uint64(r.Key[len(rng.From):]) }
	switch {
	case bytes.HasPrefix(r.Key, audit.EntryRange.From):
		return v.entryAt(at(audit.EntryRange))
	case bytes.HasPrefix(r.Key, entries.PackRange.From):
		return v.entryAt(packedAt(r, 0))
	case bytes.HasPrefix(r.Key, audit.BatchRange.From):
		return exactly(at(audit.BatchRange))
	case bytes.HasPrefix(r.Key, audit.EpochRange.From):
		return exactly(v.epoch)
	case bytes.HasPrefix(r.Key, audit.TenantRange.From), bytes.HasPrefix(r.Key, audit.CurrentRange.From):
		return exactly(audit.SequenceOf(r.Value))
	}
	return 0, 0
}

// entryAt returns the range of sequences at which a change of an entry may be reported.
func (v *victim) entryAt(sequence uint64) (from, to uint64) {
	if sequence == v.epoch { // a damaged acceptance does not say what was lost
		return v.lostFrom, v.epoch
	}
	return sequence, sequence
}

// Single-bit flips at 10,000 places in all rows of the log, including keys, are reported at the
// first wrong sequence.
func TestEachFlippedBitIsReported(t *testing.T) {
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		v := newVictimOn(t, newFixture)
		samples := 10_000
		switch {
		case v.raw != nil && testing.Short():
			samples = 50
		case v.raw != nil, testing.Short():
			samples = 500
		}
		v.flips(t, samples)
		v.pack()
		v.flips(t, samples)
	})
}

// pack packs the entries but for some of the last block, so that the rows of a group and the
// acceptance of a loss are in packs, and the head is not.
func (v *victim) pack() {
	v.T.Helper()
	change := func(tx store.Tx) error { return audittest.PackUpTo(tx, v.head-3) }
	v.Memory = v.With(change)
	if v.raw != nil {
		if err := v.raw.Update(context.Background(), change); err != nil {
			v.T.Fatal(err)
		}
	}
}

// packedAt returns the sequence of the entry that a byte of a pack belongs to: the first one of the
// pack for a byte that belongs to all.
func packedAt(r audit.Row, at int) uint64 {
	block := binary.BigEndian.Uint64(r.Key[len(entries.PackRange.From):])
	places := binary.BigEndian.Uint32(r.Value[1:])
	first := block*entries.BlockSize + 1 + uint64(bits.TrailingZeros32(places))
	lengths, end := r.Value[5:], 5+4*bits.OnesCount32(places)
	if at < end {
		return first
	}
	for ; places != 0; places &= places - 1 {
		if end += int(binary.BigEndian.Uint32(lengths)); at < end {
			return block*entries.BlockSize + 1 + uint64(bits.TrailingZeros32(places))
		}
		lengths = lengths[4:]
	}
	panic("the byte lies behind the pack")
}

func (v *victim) flips(t *testing.T, samples int) {
	places := make([]int, len(v.Rows)+1)
	for i, r := range v.Rows {
		places[i+1] = places[i] + len(r.Key) + len(r.Value)
	}
	rows := len(v.Rows)
	random := mrand.New(mrand.NewPCG(5, 2026))
	type flip struct{ row, at, bit int }
	flips := make([]flip, samples)
	for i := range flips {
		// Half of the flips are spread evenly over all bytes, most of which belong to signatures.
		// The other half is spread evenly over the rows.
		r, at := 0, random.IntN(places[rows])
		for places[r+1] <= at {
			r++
		}
		at -= places[r]
		if i%2 == 1 {
			r = random.IntN(rows)
			at = random.IntN(places[r+1] - places[r])
		}
		flips[i] = flip{r, at, random.IntN(8)}
	}
	var mu sync.Mutex
	failures := 0
	v.each(len(flips), func(i int) {
		f := flips[i]
		old := v.Rows[f.row]
		key, value := bytes.Clone(old.Key), bytes.Clone(old.Value)
		if f.at < len(key) {
			key[f.at] ^= 1 << f.bit
		} else {
			value[f.at-len(key)] ^= 1 << f.bit
		}
		overwritten := v.head
		if i, ok := v.Find(key); ok && f.at < len(key) {
			_, overwritten = v.sequenceIn(v.Rows[i])
		}
		err := v.verifyWith(func(tx store.Tx) error { return cmp.Or(tx.Delete(old.Key), tx.Put(key, value)) })
		from, to := v.sequenceIn(old)
		if packed := bytes.HasPrefix(old.Key, entries.PackRange.From); packed && f.at >= len(key) {
			from, to = v.entryAt(packedAt(old, f.at-len(key)))
		}
		if f.at < len(key) { // the row is missing here, and may replace another one there
			from, to = 1, cmp.Or(to, v.head+1)
			if overwritten > 0 {
				to = min(to, max(overwritten, 1))
			}
		}
		broken, ok := audit.IsBroken(err)
		if ok && broken.Sequence > 0 && broken.Sequence <= v.head+1 && (to == 0 || broken.Sequence >= from && broken.Sequence <= to) {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if failures++; failures <= 20 {
			t.Errorf("bit %d of byte %d of %q (key of %d bytes, value of %d): %v; want it at %d to %d", f.bit, f.at, old.Key, len(key), len(value), err, from, to)
		}
	})
	if failures > 0 {
		t.Errorf("%d of %d flips are not reported as they should be", failures, samples)
	}
}

// Every missing row is reported, and every row that also stands under another key.
func TestEachMissingRowIsReported(t *testing.T) {
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		v := newVictimOn(t, newFixture)
		every := 1
		if v.raw != nil {
			every = 17
		}
		v.missing(t, every)
		v.pack()
		v.missing(t, every)
	})
}

func (v *victim) missing(t *testing.T, every int) {
	v.each(len(v.Rows)/every, func(i int) {
		i *= every
		r := v.Rows[i]
		from, to := v.sequenceIn(r)
		err := v.verifyWith(func(tx store.Tx) error { return tx.Delete(r.Key) })
		if broken, ok := audit.IsBroken(err); !ok || broken.Sequence == 0 || to > 0 && (broken.Sequence < from || broken.Sequence > to) {
			t.Errorf("without %q: %v; want it at %d to %d", r.Key, err, from, to)
		}
		if i%5 > 0 {
			return
		}
		err = v.verifyWith(func(tx store.Tx) error { return tx.Put(append(bytes.Clone(r.Key), 'x'), r.Value) })
		if broken, ok := audit.IsBroken(err); !ok || broken.Sequence == 0 {
			t.Errorf("%q once more: %v", r.Key, err)
		}
	})
}

// Rows that belong to a longer log are reported.
func TestRowsAheadOfTheLogAreReported(t *testing.T) {
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		newVictimOn(t, newFixture).ahead(t)
	})
}

func (v *victim) ahead(t *testing.T) {
	junk, err := v.Memory.Tx().Get(audit.CheckpointKey)
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range map[string][]byte{
		"a tile beside the last":           audit.TileKey(0, 2),
		"a tile above the highest":         audit.TileKey(2, 0),
		"a summary of a later block":       audit.SummaryKey(string(audittest.TenantA), 1),
		"a summary of nobody":              audit.SummaryKey("ten_nobody", 0),
		"an epoch":                         audit.EpochKey(3),
		"a signature of a group":           audit.BatchKey(v.head - 1),
		"an entry":                         audit.EntryKey(v.head + 1),
		"a pack":                           entries.PackKey(v.head),
		"a pack of no sequences":           entries.PackKey(1 << 60),
		"an index row":                     audit.TenantKey(string(audittest.TenantA), 9999),
		"a credential's current version":   audit.CurrentKey(string(audittest.TenantA), "cred_c"),
		"something that is not of the log": []byte("audit/zzz"),
	} {
		err := v.verifyWith(func(tx store.Tx) error { return tx.Put(key, junk) })
		if broken, ok := audit.IsBroken(err); !ok || broken.Sequence == 0 || broken.Sequence > v.head+1 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The forger can write to the database but does not have the key.
func TestWhatAForgerDoesIsReported(t *testing.T) {
	audittest.OnBothStores(t, func(t *testing.T, newFixture func(testing.TB) *audittest.Fixture) {
		newVictimOn(t, newFixture).forged(t)
	})
}

func (v *victim) forged(t *testing.T) {
	k := v.lostFrom / 2
	entry := func(tx store.Tx, n uint64) *audit.Entry {
		e, err := entries.Read(tx, n)
		if err != nil {
			panic(err)
		}
		return e
	}
	cases := map[string]struct {
		first  uint64
		change func(tx store.Tx) error
	}{
		"edited, with hash and index made to fit": {k, func(tx store.Tx) error {
			return v.rewrite(tx, k, k, func(e *audit.Entry) { e.Outcome = audit.Denied })
		}},
		"deleted, with all that follows moved down and linked anew": {k, func(tx store.Tx) error {
			return v.rewrite(tx, k, v.head-1, func(_ *audit.Entry) {})
		}},
		"two entries exchanged, each with the sequence of its place": {k, func(tx store.Tx) error {
			a, b := entry(tx, k), entry(tx, k+1)
			a.Sequence, b.Sequence = b.Sequence, a.Sequence
			return cmp.Or(v.put(tx, a), v.put(tx, b))
		}},
		"inserted": {v.head + 1, func(tx store.Tx) error {
			e := entry(tx, v.head)
			e.PreviousHash, e.TenantPreviousHash, e.Sequence, e.TenantSequence = e.Hash, e.Hash, e.Sequence+1, e.TenantSequence+1
			return v.put(tx, e)
		}},
		"written anew from an entry on, with everything but the signing key": {k, func(tx store.Tx) error {
			return v.rewrite(tx, k, v.head, func(e *audit.Entry) {
				if e.Sequence == k {
					e.Outcome = audit.Denied
				}
			})
		}},
		"tail cut, with head and indexes made to fit, past the checkpoint": {v.epoch + 1, func(tx store.Tx) error {
			return v.cut(tx, v.epoch)
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			err := v.verifyWith(c.change)
			if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != c.first {
				t.Errorf("%v, want it at %d", err, c.first)
			}
		})
	}
}

// A log that was cut after its newest checkpoint, or an older copy of the log, verifies by itself.
// Only a checkpoint kept elsewhere reveals the loss.
func TestAnOlderCopyIsToldByAnOlderCheckpoint(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(30)
	older := audittest.CopyStore(t, f.Store)
	f.Fill(10)
	if _, err := f.Log.Follow(t.Context()); err != nil {
		t.Fatal(err)
	}
	note, kept, err := f.Log.Chain.NewestCheckpoint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	f.Fill(10)
	newer := audittest.CopyStore(t, f.Store)
	o := verify.Options{Since: note}
	report, err := verify.Store(t.Context(), newer, o)
	if err != nil || report.Since == nil || report.Since.Sequence != kept.Sequence {
		t.Fatal(report, err)
	}
	if _, err := verify.Store(t.Context(), older, verify.Options{}); err != nil {
		t.Fatal("the copy holds by itself: ", err)
	}
	_, err = verify.Store(t.Context(), older, o)
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != 32 || !strings.Contains(broken.Reason, "was cut") {
		t.Fatal(err)
	}
	// The older copy continues with the same key, and becomes another log than the known one.
	fork := f.CopyOf(older)
	fork.Fill(30)
	_, err = verify.Store(t.Context(), fork.Store, o)
	if broken, ok := audit.IsBroken(err); !ok || broken.Sequence != kept.Sequence || !strings.Contains(broken.Reason, "rewritten") {
		t.Fatal(err)
	}
}

// rewrite changes the entries of a range and links them again. They keep their old signatures,
// because a forger does not have the key.
func (v *victim) rewrite(tx store.Tx, from, to uint64, change func(*audit.Entry)) error {
	renamed := make(map[string]string)
	for n := from; n <= to; n++ {
		e, err := entries.Read(tx, n)
		if err == audit.ErrNoEntry {
			continue
		}
		if err != nil {
			return err
		}
		old := e.Hash
		change(e)
		e.PreviousHash = cmp.Or(renamed[e.PreviousHash], e.PreviousHash)
		e.TenantPreviousHash = cmp.Or(renamed[e.TenantPreviousHash], e.TenantPreviousHash)
		if err := v.put(tx, e); err != nil {
			return err
		}
		renamed[old] = e.Hash
	}
	return nil
}

// put writes an entry and its index row, and the head if the entry is the newest.
func (v *victim) put(tx store.Tx, e *audit.Entry) error {
	core, err := e.Canonical(nil, false)
	if err != nil {
		return err
	}
	sum, err := e.Digest()
	if err != nil {
		return err
	}
	e.Hash = hex.EncodeToString(sum[:])
	signature, _ := audit.DecodeBase64(e.Signature)
	_, raw, _ := audit.DecodeSignature(signature)
	index := audit.IndexRow{Position: e.Position(), EventType: e.EventType, Actor: e.Actor.ID}
	err = cmp.Or(tx.Put(audit.EntryKey(e.Sequence), audittest.EncodeRow(core, raw)), tx.Put(audit.TenantKey(e.TenantID, e.TenantSequence), index.Encode()))
	if err == nil && e.Sequence >= v.head {
		err = tx.Put(audit.HeadKey, e.Position().Encode())
	}
	return err
}

// cut removes the entries after a sequence and everything derived from them.
func (v *victim) cut(tx store.Tx, last uint64) error {
	e, err := entries.Read(tx, last)
	if err != nil {
		return err
	}
	err = tx.Put(audit.HeadKey, e.Position().Encode())
	for _, r := range v.Rows {
		from, _ := v.sequenceIn(r)
		if from > last && !bytes.Equal(r.Key, audit.HeadKey) {
			err = cmp.Or(err, tx.Delete(r.Key))
		}
	}
	return err
}

// Base64 has unused bits. A checkpoint in the store still has only one valid spelling.
func TestASpareBitOfACheckpointIsReported(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(3)
	respell := func(signed string) string {
		at := strings.LastIndex(signed, "==") - 1
		const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
		return signed[:at] + string(alphabet[strings.IndexByte(alphabet, signed[at])^1]) + signed[at+1:]
	}
	note := string(f.Followed())
	if _, err := audit.ParseCheckpoint([]byte(respell(note)), f.Log.Signer.Public()); err != nil {
		t.Fatal("not a spelling of the same: ", err)
	}
	changed := audittest.CopyStore(t, f.Store).With(func(tx store.Tx) error { return tx.Put(audit.CheckpointKey, []byte(respell(note))) })
	if _, ok := audit.IsBroken(audittest.ErrorOf(verify.Store(t.Context(), changed, verify.Options{}))); !ok {
		t.Error("not reported in the store")
	}
	if _, ok := audit.IsBroken(audittest.ErrorOf(verify.Export(strings.NewReader(respell(string(f.Export()))), verify.Options{}))); !ok {
		t.Error("not reported in an export")
	}
}

// rememberSignatures returns a check that verifies the same signature over the same hash only once.
// Thousands of logs that differ in one bit share all other signatures.
func rememberSignatures() func(audit.StoredEntry, func() bool) bool {
	type signed struct {
		hash            [32]byte
		n, index        uint32
		path, signature uint64
	}
	seed := maphash.MakeSeed()
	var known sync.Map
	return func(s audit.StoredEntry, verify func() bool) bool {
		key := signed{s.Hash, s.Proof.N, s.Proof.Index, maphash.Bytes(seed, s.Proof.Path), maphash.Bytes(seed, s.Signature)}
		if sound, ok := known.Load(key); ok {
			return sound.(bool)
		}
		sound := verify()
		known.Store(key, sound)
		return sound
	}
}
