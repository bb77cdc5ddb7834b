package writer_test

import (
	"bytes"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

func TestARefusingLogTakesNothing(t *testing.T) {
	f := audittest.NewFixture(t)
	before := f.Group(1)
	reason := errors.New("behind")
	refused := func(what string, err error) {
		t.Helper()
		if fault.Of(err) != fault.Unavailable || !errors.Is(err, reason) {
			t.Errorf("%s: %v", what, err)
		}
	}
	e := audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)}
	// A commit fails even if its events were accepted before the halt.
	refused("a commit", f.Store.Update(t.Context(), func(tx store.Tx) error {
		_, err := f.Log.Append(tx, e)
		f.Log.Halt(reason)
		return err
	}))
	refused("Ready", f.Log.Ready(t.Context()))
	refused("Record", f.Log.Record(t.Context(), e))
	if !errors.Is(f.Log.HaltedBy(), reason) {
		t.Error(f.Log.HaltedBy())
	}
	if _, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "because"); fault.Of(err) != fault.Conflict {
		t.Error("a reason that is no rollback was accepted:", err)
	}
	f.Log.Halt(nil)
	if err := f.Log.Ready(t.Context()); err != nil || f.Log.HaltedBy() != nil {
		t.Error(err)
	}
	if again := f.Group(1); again != before+1 {
		t.Error("something was written:", again)
	}
}

func TestAnAcceptedRollbackGoesOnAboveWhatWasLost(t *testing.T) {
	for _, mode := range []writer.Signing{writer.SignEntries, writer.SignBatches} {
		t.Run(string(mode), func(t *testing.T) {
			f := audittest.NewFixture(t)
			f.Log.SetSigning(mode)
			f.Group(4) // head at 5
			lost := audit.RollbackError{LostFrom: 6, LostTo: 20, Hash: [32]byte{0xab}, Epoch: 1, Source: "the ConfigMap"}
			f.Log.Halt(&lost)
			if msg := f.Log.HaltedBy().Error(); !strings.Contains(msg, "6 to 20") || !strings.Contains(msg, "latticekeep audit accept-rollback") {
				t.Error(msg)
			}
			got, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "restored from a backup")
			if err != nil {
				t.Fatal(err)
			}
			e := f.Read(21)
			if want := (audit.Rollback{Epoch: 2, LostFrom: 6, LostTo: 20, Receipt: audit.Receipt{Sequence: 21, Hash: e.Hash}}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
			attributes := map[string]string{
				"epoch": "2", "lost_from": "6", "lost_to": "20", "reason": "restored from a backup",
				"anchored": "20", "anchored_hash": "ab" + strings.Repeat("0", 62),
			}
			if !maps.Equal(e.Attributes, attributes) {
				t.Errorf("attributes %v", e.Attributes)
			}
			if e.EventType != audit.RollbackAccepted || e.TenantID != string(authz.SystemTenant) || e.Resource != (audit.Resource{ID: "chain_test", Type: audit.ChainResource}) ||
				e.PreviousHash != f.Read(5).Hash || !e.Verify(f.Log.Signer.Public(), nil) {
				t.Errorf("%+v", e)
			}
			if err := f.Log.Ready(t.Context()); err != nil {
				t.Error("the refusal was not lifted:", err)
			}
			if first := f.Group(3); first != 22 {
				t.Error("it goes on at", first)
			}
			if sequence, written, err := f.Log.Progress(t.Context()); err != nil || sequence != 24 || written[writer.Kind{Type: audit.RollbackAccepted, Outcome: audit.Success}] != 1 {
				t.Error(sequence, written, err)
			}
			// A newly started log finds a second loss.
			again := audittest.NewParts(f.Now)
			if err := again.Use(t.Context(), f.Store, f.Log.Signer, "chain_test"); err != nil {
				t.Fatal(err)
			}
			f.Log.Halt(&audit.RollbackError{LostFrom: 25, LostTo: 30, Epoch: 2, Source: "the bucket"})
			if got, err = f.Log.AcceptRollback(t.Context(), audittest.Admin(), "again"); err != nil || got.Epoch != 3 || got.Sequence != 31 {
				t.Error(got, err)
			}
			want := []audit.Epoch{{Number: 1, First: 1, Size: 0}, {Number: 2, First: 21, Size: 5}, {Number: 3, First: 31, Size: 9}}
			for i, e := range f.Epochs() {
				if e != want[i] {
					t.Errorf("epoch %+v, want %+v", e, want[i])
				}
			}
		})
	}
}

// If a database continued after a loss, its entries have sequences up to its own head. No sequence
// is used twice.
func TestAForkGoesOnAboveItsOwnHead(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Group(9) // head at 10
	f.Log.Halt(&audit.RollbackError{LostTo: 7, Epoch: 3, Source: "the ConfigMap"})
	if msg := f.Log.HaltedBy().Error(); !strings.Contains(msg, "up to 7") || !strings.Contains(msg, "latticekeep audit accept-rollback") {
		t.Error(msg)
	}
	got, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "forked")
	if err != nil || got.Sequence != 11 || got.LostFrom != 11 || got.LostTo != 10 || got.Epoch != 4 {
		t.Error(got, err)
	}
	e := f.Read(11)
	if e.Attributes["lost_from"] != "11" || e.Attributes["lost_to"] != "10" || e.Attributes["anchored"] != "7" {
		t.Error(e.Attributes)
	}
	if got := f.Epochs(); len(got) != 2 || got[1] != (audit.Epoch{Number: 4, First: 11, Size: 10}) {
		t.Error(got)
	}
}

func TestWhoMayAcceptARollbackAndWhen(t *testing.T) {
	f := audittest.NewFixture(t)
	if _, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "because"); fault.Of(err) != fault.Conflict {
		t.Error("nothing was lost:", err)
	}
	if _, err := f.Log.AcceptRollback(t.Context(), audittest.Principal(audittest.TenantA), "because"); fault.Of(err) != fault.Forbidden {
		t.Error("a tenant:", err)
	}
	head, _, err := f.Log.Progress(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	lost := audit.RollbackError{LostFrom: head + 1, LostTo: 10, Epoch: 1, Source: "the ConfigMap"}
	f.Log.Halt(&lost)
	for _, reason := range []string{"", "a\nb", "é", "\x7f", strings.Repeat("a", 201)} {
		if _, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), reason); fault.Of(err) != fault.Invalid {
			t.Errorf("the reason %q: %v", reason, err)
		}
	}
	if _, err := f.Log.AcceptRollback(t.Context(), audittest.Principal(audittest.TenantA), "because"); err == nil || f.Log.HaltedBy() == nil {
		t.Error("a tenant accepted")
	}
	if now, _, err := f.Log.Progress(t.Context()); err != nil || now != head {
		t.Error("something was written:", now, err)
	}
	// An acceptance is the first event of its commit, even if the log is no longer halted.
	f.Log.Halt(nil)
	for name, before := range map[string]*audit.RollbackError{"an entry": nil, "another one": &lost} {
		err = f.Store.Update(t.Context(), func(tx store.Tx) error {
			e := audit.Event{Type: audit.RollbackAccepted, Outcome: audit.Success, Principal: audittest.Admin()}
			_, err1 := f.Log.AppendAcceptance(tx, e, before)
			_, err2 := f.Log.AppendAcceptance(tx, e, &lost)
			return errors.Join(err1, err2)
		})
		if fault.Of(err) != fault.Unavailable {
			t.Errorf("%s before the acceptance: %v", name, err)
		}
	}
	f.Log.Halt(&lost)
	if _, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), strings.Repeat("~", 200)); err != nil {
		t.Error(err)
	}
	// Another replica that looked earlier finds the same halt. The acceptance lifts it without a
	// second epoch.
	f.Log.Halt(&lost)
	if _, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "because"); fault.Of(err) != fault.Conflict || f.Log.HaltedBy() != nil {
		t.Error("accepted twice:", err, f.Log.HaltedBy())
	}
	if n := len(f.Epochs()); n != 2 {
		t.Errorf("%d epochs", n)
	}
}

// The head row has the same form in every epoch.
func TestTheHeadRowKeepsItsForm(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Log.Halt(&audit.RollbackError{LostFrom: 2, LostTo: 10, Epoch: 1, Source: "the ConfigMap"})
	if _, err := f.Log.AcceptRollback(t.Context(), audittest.Admin(), "because"); err != nil {
		t.Fatal(err)
	}
	err := f.Store.View(t.Context(), func(r store.Reader) error {
		b, err := r.Get(audit.HeadKey)
		if e := f.Read(11); err == nil && !bytes.Equal(b, e.Position().Encode()) {
			t.Errorf("%x", b)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A commit that starts with an acceptance covers only what that acceptance names.
func TestAnAcceptanceIsNotOfMoreThanItKnows(t *testing.T) {
	r := audittest.NewReplicas(t, 1)[0]
	older := r.Read()
	for range 9 {
		r.Append(audit.AuditRead, audittest.TenantA)
	}
	r.Put(older)
	accept := func(to uint64) error {
		return r.Update(t.Context(), func(tx store.Tx) error {
			_, err := r.Log.AppendAcceptance(tx, audit.Event{Type: audit.RollbackAccepted, Outcome: audit.Success, Principal: audittest.Admin()}, &audit.RollbackError{LostFrom: 2, LostTo: to, Epoch: 1})
			return err
		})
	}
	if err := accept(5); !errors.Is(err, writer.ErrOneByOne) {
		t.Error(err)
	}
	if err := accept(10); err != nil {
		t.Error(err)
	}
}

// Verification compares a stored checkpoint at exactly the base with the base, and the tiles too.
func TestTheTreeAtTheBaseIsHeld(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	f.Old()
	f.Follow()
	if _, err := (&keeper.Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	base, err := chain.ReadBase(t.Context(), f.Store)
	if err != nil || base == nil {
		t.Fatal(base, err)
	}
	at := audit.Checkpoint{
		ChainID: "chain_test", Epoch: audit.EpochOf(base.Epochs, base.Sequence()).Number, Size: base.Tree.Size, Root: base.Tree.Root(),
		Sequence: base.Sequence(), Hash: base.Head.Hash, Time: time.UnixMicro(base.Head.Micros),
	}
	for name, change := range map[string]func(c *audit.Checkpoint, tile []byte){
		"as it was":     nil,
		"another tile":  func(_ *audit.Checkpoint, tile []byte) { tile[5] ^= 1 },
		"another root":  func(c *audit.Checkpoint, _ []byte) { c.Root[0] ^= 1 },
		"another entry": func(c *audit.Checkpoint, _ []byte) { c.Hash[0] ^= 1 },
	} {
		g := f.Opened(f.Copied())
		err := g.Store.Update(t.Context(), func(tx store.Tx) error {
			c := at
			if err := writer.TruncateTree(tx, c); err != nil {
				return err
			}
			index := c.Size >> audit.TileHeight
			tile := audittest.Get(tx, audit.TileKey(0, index))
			if change != nil {
				change(&c, tile)
			}
			return errors.Join(tx.Put(audit.TileKey(0, index), tile), tx.Put(audit.CheckpointKey, audittest.SignedNote(t, f, c)), writer.TruncateSummaries(tx, c.Sequence))
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.Verify(); (err == nil) != (change == nil) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
