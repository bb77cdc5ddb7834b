package audit

import (
	"bytes"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

func TestARefusingLogTakesNothing(t *testing.T) {
	f := newFixture(t)
	before := f.group(1)
	reason := errors.New("behind")
	refused := func(what string, err error) {
		t.Helper()
		if fault.Of(err) != fault.Unavailable || !errors.Is(err, reason) {
			t.Errorf("%s: %v", what, err)
		}
	}
	e := Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)}
	// A commit fails even if its events were accepted before the halt.
	refused("a commit", f.store.Update(t.Context(), func(tx store.Tx) error {
		_, err := f.log.Append(tx, e)
		f.log.Halt(reason)
		return err
	}))
	refused("Ready", f.log.Ready(t.Context()))
	refused("Record", f.log.Record(t.Context(), e))
	if !errors.Is(f.log.HaltedBy(), reason) {
		t.Error(f.log.HaltedBy())
	}
	if _, err := f.log.AcceptRollback(t.Context(), admin(), "because"); fault.Of(err) != fault.Conflict {
		t.Error("a reason that is no rollback was accepted:", err)
	}
	f.log.Halt(nil)
	if err := f.log.Ready(t.Context()); err != nil || f.log.HaltedBy() != nil {
		t.Error(err)
	}
	if again := f.group(1); again != before+1 {
		t.Error("something was written:", again)
	}
}

func TestAnAcceptedRollbackGoesOnAboveWhatWasLost(t *testing.T) {
	for _, mode := range []Signing{SignEntries, SignBatches} {
		t.Run(string(mode), func(t *testing.T) {
			f := newFixture(t)
			f.log.SetSigning(mode)
			f.group(4) // head at 5
			lost := RollbackError{LostFrom: 6, LostTo: 20, Hash: [32]byte{0xab}, Epoch: 1, Place: "the ConfigMap"}
			f.behind(lost)
			if msg := f.log.HaltedBy().Error(); !strings.Contains(msg, "6 to 20") || !strings.Contains(msg, "latticekeep audit accept-rollback") {
				t.Error(msg)
			}
			got, err := f.log.AcceptRollback(t.Context(), admin(), "restored from a backup")
			if err != nil {
				t.Fatal(err)
			}
			e := f.read(21)
			if want := (Rollback{2, 6, 20, Receipt{21, e.Hash}}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
			attributes := map[string]string{
				"epoch": "2", "lost_from": "6", "lost_to": "20", "reason": "restored from a backup",
				"anchored": "20", "anchored_hash": "ab" + strings.Repeat("0", 62),
			}
			if !maps.Equal(e.Attributes, attributes) {
				t.Errorf("attributes %v", e.Attributes)
			}
			if e.EventType != RollbackAccepted || e.TenantID != string(authz.SystemTenant) || e.Resource != (Resource{"chain_test", ChainResource}) ||
				e.PreviousHash != f.read(5).Hash || !e.verify(f.log.signer.Public(), nil) {
				t.Errorf("%+v", e)
			}
			if err := f.log.Ready(t.Context()); err != nil {
				t.Error("the refusal was not lifted:", err)
			}
			if first := f.group(3); first != 22 {
				t.Error("it goes on at", first)
			}
			if sequence, written, err := f.log.Progress(t.Context()); err != nil || sequence != 24 || written[Kind{RollbackAccepted, Success}] != 1 {
				t.Error(sequence, written, err)
			}
			// A newly started log finds a second loss.
			again := newParts(f.now)
			if err := again.Use(t.Context(), f.store, f.log.signer, "chain_test"); err != nil {
				t.Fatal(err)
			}
			f.behind(RollbackError{LostFrom: 25, LostTo: 30, Epoch: 2, Place: "the bucket"})
			if got, err = f.log.AcceptRollback(t.Context(), admin(), "again"); err != nil || got.Epoch != 3 || got.Sequence != 31 {
				t.Error(got, err)
			}
			want := []epoch{{1, 1, 0}, {2, 21, 5}, {3, 31, 9}}
			for i, e := range f.epochs() {
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
	f := newFixture(t)
	f.group(9) // head at 10
	f.behind(RollbackError{LostTo: 7, Epoch: 3, Place: "the ConfigMap"})
	if msg := f.log.HaltedBy().Error(); !strings.Contains(msg, "up to 7") || !strings.Contains(msg, "latticekeep audit accept-rollback") {
		t.Error(msg)
	}
	got, err := f.log.AcceptRollback(t.Context(), admin(), "forked")
	if err != nil || got.Sequence != 11 || got.LostFrom != 11 || got.LostTo != 10 || got.Epoch != 4 {
		t.Error(got, err)
	}
	e := f.read(11)
	if e.Attributes["lost_from"] != "11" || e.Attributes["lost_to"] != "10" || e.Attributes["anchored"] != "7" {
		t.Error(e.Attributes)
	}
	if got := f.epochs(); len(got) != 2 || got[1] != (epoch{4, 11, 10}) {
		t.Error(got)
	}
}

func TestWhoMayAcceptARollbackAndWhen(t *testing.T) {
	f := newFixture(t)
	if _, err := f.log.AcceptRollback(t.Context(), admin(), "because"); fault.Of(err) != fault.Conflict {
		t.Error("nothing was lost:", err)
	}
	if _, err := f.log.AcceptRollback(t.Context(), principal(tenantA), "because"); fault.Of(err) != fault.Forbidden {
		t.Error("a tenant:", err)
	}
	head, _, err := f.log.Progress(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	lost := RollbackError{LostFrom: head + 1, LostTo: 10, Epoch: 1, Place: "the ConfigMap"}
	f.behind(lost)
	for _, reason := range []string{"", "a\nb", "é", "\x7f", strings.Repeat("a", 201)} {
		if _, err := f.log.AcceptRollback(t.Context(), admin(), reason); fault.Of(err) != fault.Invalid {
			t.Errorf("the reason %q: %v", reason, err)
		}
	}
	if _, err := f.log.AcceptRollback(t.Context(), principal(tenantA), "because"); err == nil || f.log.HaltedBy() == nil {
		t.Error("a tenant accepted")
	}
	if now, _, err := f.log.Progress(t.Context()); err != nil || now != head {
		t.Error("something was written:", now, err)
	}
	// An acceptance is the first event of its commit, even if the log is no longer halted.
	f.log.Halt(nil)
	for name, before := range map[string]*acceptance{"an entry": nil, "another one": {lost: lost}} {
		err = f.store.Update(t.Context(), func(tx store.Tx) error {
			e := Event{Type: RollbackAccepted, Outcome: Success, Principal: admin()}
			_, err1 := f.log.append(tx, e, before)
			_, err2 := f.log.append(tx, e, &acceptance{lost: lost})
			return errors.Join(err1, err2)
		})
		if fault.Of(err) != fault.Unavailable {
			t.Errorf("%s before the acceptance: %v", name, err)
		}
	}
	f.behind(lost)
	if _, err := f.log.AcceptRollback(t.Context(), admin(), strings.Repeat("~", 200)); err != nil {
		t.Error(err)
	}
	// Another replica that looked earlier finds the same halt. The acceptance lifts it without a
	// second epoch.
	f.behind(lost)
	if _, err := f.log.AcceptRollback(t.Context(), admin(), "because"); fault.Of(err) != fault.Conflict || f.log.HaltedBy() != nil {
		t.Error("accepted twice:", err, f.log.HaltedBy())
	}
	if n := len(f.epochs()); n != 2 {
		t.Errorf("%d epochs", n)
	}
}

// The head row has the same form in every epoch.
func TestTheHeadRowKeepsItsForm(t *testing.T) {
	f := newFixture(t)
	f.behind(RollbackError{LostFrom: 2, LostTo: 10, Epoch: 1, Place: "the ConfigMap"})
	if _, err := f.log.AcceptRollback(t.Context(), admin(), "because"); err != nil {
		t.Fatal(err)
	}
	err := f.store.View(t.Context(), func(r store.Reader) error {
		b, err := r.Get(headKey)
		if e := f.read(11); err == nil && !bytes.Equal(b, e.link().encode()) {
			t.Errorf("%x", b)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
