package audit

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
)

// A tenant's newest entry may be in the archive and of an earlier epoch.
func TestATenantGoesOnFromAnEntryThatIsArchived(t *testing.T) {
	for name, rewrite := range map[string]func(tx store.Tx, last uint64) error{
		"as it is":        nil,
		"the row is gone": func(tx store.Tx, last uint64) error { return tx.Delete(tenantKey(string(tenantB), last)) },
		"of another entry": func(tx store.Tx, last uint64) error {
			return tx.Put(tenantKey(string(tenantB), last+1), get(tx, tenantKey(string(tenantB), last)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.old()
			a, _ := f.folder()
			if n, err := (&Cutter{Log: f.log.Log, Reader: f.log.Reader, Archive: a, Keep: keep}).Run(t.Context()); err != nil || n == 0 {
				t.Fatal(n, err)
			}
			var last uint64
			_ = f.store.View(t.Context(), func(r store.Reader) (err error) {
				newest, err := lastOf(r, string(tenantB))
				last = newest.sequence
				if _, missing := hashOf(r, 1); !errors.Is(missing, errNoEntry) {
					t.Error("nothing is archived")
				}
				return err
			})
			if rewrite != nil {
				if err := f.store.Update(t.Context(), func(tx store.Tx) error { return rewrite(tx, last) }); err != nil {
					t.Fatal(err)
				}
			}
			other := f.another(f.store)
			err := f.store.Update(t.Context(), func(tx store.Tx) error {
				_, err := other.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantB)})
				return errors.Join(err, errNotDone)
			})
			if damaged := errors.Is(err, errDamagedLog); damaged != (rewrite != nil) || last == 0 {
				t.Error(last, err)
			}
		})
	}
}
