package vault

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/lastread"
	"github.com/latticekeep/latticekeep/internal/vault/listing"
)

// lastRead returns the time that the metadata of a credential have.
func (f *fixture) lastRead(id string) time.Time {
	f.t.Helper()
	c, err := f.vault.Metadata(f.t.Context(), f.a, id)
	must(f.t, err)
	return c.LastRead
}

// The hour of the last read is noted with the entry of the first read in it, whatever found the
// credential, and goes with the credential.
func TestTheHourOfTheLastReadIsNoted(t *testing.T) {
	inBothStores(t, func(t *testing.T, f *fixture) {
		c := f.seal(f.a, login)
		other := f.sealNamed(f.b, "foreign", login)
		_, _ = f.vault.Read(t.Context(), f.a, ByID(other.ID))
		if at := f.lastRead(c.ID); !at.IsZero() {
			t.Errorf("before the first read: %v", at)
		}
		read := func() (work, error) {
			return f.measured(func() error {
				_, err := f.vault.Read(t.Context(), f.a, ByID(c.ID))
				return err
			})
		}
		for i, want := range []bool{true, false, true} {
			if i == 2 {
				f.advance(time.Hour)
			}
			first, err := read()
			must(t, err)
			second, err := read()
			must(t, err)
			if at := f.lastRead(c.ID); !at.Equal(f.now().Truncate(time.Hour)) {
				t.Errorf("read %d: noted %v at %v", i, at, f.now())
			}
			if first.entries != 1 || first.updates != 1 || second.updates != 1 || first.writes-second.writes != map[bool]int64{true: 1}[want] {
				t.Errorf("read %d: %+v, then %+v", i, first, second)
			}
		}
		f.advance(time.Hour)
		_, err := f.vault.Read(t.Context(), f.a, ByName(c.Name))
		must(t, err)
		if at := f.lastRead(c.ID); !at.Equal(f.now().Truncate(time.Hour)) {
			t.Errorf("by name: noted %v at %v", at, f.now())
		}
		if keys, _ := f.rows(lastread.Family); len(keys) != 1 {
			t.Errorf("rows: %q", keys)
		}
		must(t, f.vault.Delete(t.Context(), f.a, c.ID))
		must(t, f.store.Update(t.Context(), func(tx store.Tx) error { // of a read that the deletion overtook
			return f.vault.records.noteRead(tx, f.a.Tenant, c.ID, f.now())
		}))
		if keys, _ := f.rows(lastread.Family); len(keys) != 0 {
			t.Errorf("left behind: %q", keys)
		}
		f.verify()
	})
}

// A row that holds no hour counts as never, and the next read mends it.
func TestADamagedHourOfTheLastReadCountsAsNever(t *testing.T) {
	f := newFixture(t, time.Minute)
	c := f.seal(f.a, login)
	for _, junk := range []string{"", "\xff\xff\xff\xff\xff\xff\xff\xff", "99999-01-01T00", "2026-13-01T00", "2026-01-01T00 "} {
		must(t, f.store.Update(t.Context(), func(tx store.Tx) error {
			return tx.Put(lastread.Key(f.a.Tenant, c.ID), []byte(junk))
		}))
		list, _, err := f.vault.List(t.Context(), f.a, ListQuery{Order: listing.ByLastRead})
		if err != nil || len(list) != 1 || !list[0].LastRead.IsZero() || !f.lastRead(c.ID).IsZero() {
			t.Errorf("%q: %+v, %v", junk, list, err)
		}
		_, err = f.vault.Read(t.Context(), f.a, ByID(c.ID))
		must(t, err)
		if at := f.lastRead(c.ID); !at.Equal(f.now().Truncate(time.Hour)) {
			t.Errorf("%q, then read: %v", junk, at)
		}
	}
}
