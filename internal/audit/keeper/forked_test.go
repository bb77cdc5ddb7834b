package keeper

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A tenant's newest entry may be in the archive and of an earlier epoch.
func TestATenantGoesOnFromAnEntryThatIsArchived(t *testing.T) {
	for name, rewrite := range map[string]func(tx store.Tx, last uint64) error{
		"as it is": nil,
		"the row is gone": func(tx store.Tx, last uint64) error {
			return tx.Delete(audit.TenantKey(string(audittest.TenantB), last))
		},
		"of another entry": func(tx store.Tx, last uint64) error {
			return tx.Put(audit.TenantKey(string(audittest.TenantB), last+1), audittest.Get(tx, audit.TenantKey(string(audittest.TenantB), last)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := audittest.NewFixture(t)
			f.Old()
			a, _ := f.Folder()
			if n, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context()); err != nil || n == 0 {
				t.Fatal(n, err)
			}
			var last uint64
			_ = f.Store.View(t.Context(), func(r store.Reader) (err error) {
				newest, err := audit.ReadTenantHead(r, string(audittest.TenantB))
				last = newest.Sequence
				if _, missing := audit.ReadHash(r, 1); !errors.Is(missing, audit.ErrNoEntry) {
					t.Error("nothing is archived")
				}
				return err
			})
			if rewrite != nil {
				if err := f.Store.Update(t.Context(), func(tx store.Tx) error { return rewrite(tx, last) }); err != nil {
					t.Fatal(err)
				}
			}
			other := f.Another(f.Store)
			err := f.Store.Update(t.Context(), func(tx store.Tx) error {
				_, err := other.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
				return errors.Join(err, audittest.ErrNotDone)
			})
			if damaged := errors.Is(err, audit.ErrDamagedLog); damaged != (rewrite != nil) || last == 0 {
				t.Error(last, err)
			}
		})
	}
}
