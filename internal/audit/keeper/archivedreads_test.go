package keeper

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// A tail skips entries that were archived before it read them. It stops reading a log that has lost
// entries.
func TestATailGoesOnWhereTheDatabaseDoes(t *testing.T) {
	f := audittest.NewFixture(t)
	a, _ := f.Folder()
	zero := uint64(0)
	tail, err := f.Log.Tail(t.Context(), audittest.Principal(audittest.TenantA), &zero)
	if err != nil {
		t.Fatal(err)
	}
	f.Old()
	if _, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	left := f.SequencesOf(audittest.TenantA)
	if got := audittest.Drain(t, tail); len(left) == 0 || left[0] < 50 || !slices.Equal(got, left) {
		t.Errorf("%v, want %v", got, left)
	}
	if again, err := f.Log.Tail(t.Context(), audittest.Principal(audittest.TenantA), &zero); err != nil || !slices.Equal(audittest.Drain(t, again)[:len(left)], left) {
		t.Error(err)
	}
	f.Log.Halt(&audit.RollbackError{LostTo: 1 << 40, Epoch: 1, Source: "a test"})
	if _, err := tail.Next(t.Context()); fault.Of(err) != fault.Unavailable {
		t.Error(err)
	}
}

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
				if _, missing := entries.ReadHash(r, 1); !errors.Is(missing, audit.ErrNoEntry) {
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

// A sound log is never reported as broken, whatever is archived while it is read.
func TestWhatIsArchivedWhileItIsReadIsNoFault(t *testing.T) {
	for name, read := range map[string]func(l *audittest.Parts, a audit.Archive) error{
		"export":         func(l *audittest.Parts, _ audit.Archive) error { return l.Export(context.Background(), io.Discard, 0) },
		"a later export": func(l *audittest.Parts, _ audit.Archive) error { return l.Export(context.Background(), io.Discard, 17) },
		"replay": func(l *audittest.Parts, _ audit.Archive) error {
			return audittest.ErrorOf(l.Replay(context.Background(), audittest.TenantA, reader.ReplayPoint{}, 0, func(*audit.Entry) error { return nil }))
		},
		"visit": func(l *audittest.Parts, _ audit.Archive) error {
			return l.Visit(context.Background(), audittest.TenantA, func(*audit.Entry) {}, audit.SealingKeyCreated)
		},
		"verification": func(l *audittest.Parts, _ audit.Archive) error {
			p, err := l.Verify(context.Background())
			if p.Broken != nil {
				return p.Broken
			}
			return err
		},
		"another cut": func(l *audittest.Parts, a audit.Archive) error {
			return audittest.ErrorOf((&Cutter{Log: l.Log, Reader: l.Reader, Archive: a, Keep: audittest.Keep, most: 25}).Run(context.Background()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			conflicts := 0
			for at := int64(1); ; at += int64(audittest.Stride(4)) {
				f := audittest.NewFixture(t)
				a, _ := f.Folder()
				f.Old()
				f.Follow()
				s := &audittest.Between{Store: f.Store, At: at, Do: func() error {
					_, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep, most: 20}).Run(t.Context())
					return err
				}}
				f.Log.Chain.Store = s
				switch err := read(f.Log, a); {
				case err == nil:
				case fault.Of(err) == fault.Conflict:
					conflicts++
				default:
					t.Errorf("archived before look %d: %v", at, err)
				}
				if s.Views.Load() < at {
					break
				}
			}
			if want := strings.Contains(name, "export") || name == "replay" || name == "another cut"; want != (conflicts > 0) && !testing.Short() {
				t.Errorf("%d of them had a conflict", conflicts)
			}
		})
	}
}
