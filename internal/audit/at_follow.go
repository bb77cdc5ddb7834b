package audit

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// behind halts the log as if it lacked entries of a checkpoint.
func (f *fixture) behind(lost RollbackError) { f.log.Halt(&lost) }

func (f *fixture) epochs() []epoch {
	f.t.Helper()
	var epochs []epoch
	err := f.store.View(f.t.Context(), func(r store.Reader) (err error) {
		epochs, err = f.log.chain.epochs(r)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return epochs
}

// write appends n entries of two tenants in few commits.
func (f *fixture) write(n int) {
	f.t.Helper()
	f.log.SetSigning(SignBatches)
	defer f.log.SetSigning(SignEntries)
	for done := 0; done < n; {
		group := min(n-done, 1000)
		err := f.store.Update(context.Background(), func(tx store.Tx) error {
			for i := range group {
				e := Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{Type: CredentialResource}}
				if (done+i)%3 == 0 {
					e.Type, e.Principal = CredentialListed, principal(tenantB)
				}
				if _, err := f.log.Append(tx, e); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			f.t.Fatal(err)
		}
		done += group
	}
}

// rowsOf returns the rows of some ranges by key.
func (f *fixture) rowsOf(ranges ...store.Range) map[string][]byte {
	f.t.Helper()
	rows := make(map[string][]byte)
	for _, rng := range ranges {
		err := ScanAll(context.Background(), f.store, rng, func(key, value []byte) error {
			rows[string(key)] = value
			return nil
		})
		if err != nil {
			f.t.Fatal(err)
		}
	}
	return rows
}

// forget deletes everything derived, as in a log from before the tree existed.
func (f *fixture) forget() {
	f.t.Helper()
	rows := f.rowsOf(tileRange, summaryRange, store.Prefix(checkpointKey))
	err := f.store.Update(context.Background(), func(tx store.Tx) error {
		for key := range rows {
			if err := tx.Delete([]byte(key)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.log.chain.followed.Store(nil)
}

// entries returns the whole log.
func (f *fixture) entries() (entries []*Entry) {
	f.t.Helper()
	for key := range f.rowsOf(entryRange) {
		err := f.store.View(context.Background(), func(r store.Reader) error {
			e, err := readEntry(r, binary.BigEndian.Uint64([]byte(key)[len(key)-8:]))
			entries = append(entries, e)
			return err
		})
		if err != nil {
			f.t.Fatal(err)
		}
	}
	slices.SortFunc(entries, func(a, b *Entry) int { return int(a.Sequence) - int(b.Sequence) })
	return entries
}

// followsTo fails the test unless the derived rows are exactly those of the first size entries.
func (f *fixture) followsTo(size int64) {
	f.t.Helper()
	reference := &referenceTree{}
	blocks := make(map[string][]indexRow)
	wantSummaries := make(map[string][]byte)
	var last *Entry
	for _, e := range f.entries()[:size] {
		last = e
		reference.add(f.t, e.link().hash)
		rows := append(blocks[e.TenantID], indexRow{e.link(), e.EventType, e.Actor.ID})
		if len(rows) == blockSize {
			wantSummaries[string(summaryKey(e.TenantID, e.TenantSequence/blockSize-1))] = summaryOf(rows)
			rows = nil
		}
		blocks[e.TenantID] = rows
	}
	if !maps.EqualFunc(f.rowsOf(tileRange), reference.rows(f.t), bytes.Equal) {
		f.t.Errorf("the tiles are not those of the first %d entries", size)
	}
	if !maps.EqualFunc(f.rowsOf(summaryRange), wantSummaries, bytes.Equal) {
		f.t.Errorf("the summaries are not those of the first %d entries", size)
	}
	signed, c, err := f.log.chain.NewestCheckpoint(context.Background())
	if err != nil {
		f.t.Fatal(err)
	}
	again, err := ParseCheckpoint(signed, f.log.signer.Public())
	if err != nil || again != c {
		f.t.Errorf("the note says %+v, %v", again, err)
	}
	if c.Size != size || c.Root != reference.root(f.t, size) || c.Sequence != last.Sequence || hex.EncodeToString(c.Hash[:]) != last.Hash || !c.Time.Equal(last.Time()) {
		f.t.Errorf("%+v is not the checkpoint of %d", c, size)
	}
}

func (f *fixture) follow() Checkpoint {
	f.t.Helper()
	c, err := f.log.Follow(context.Background())
	if err != nil {
		f.t.Fatal(err)
	}
	return c
}

// another returns the log as another process that opens the same store.
func (f *fixture) another(s store.Store) *parts {
	f.t.Helper()
	l := newParts(f.now)
	if err := l.Use(context.Background(), s, f.log.signer, f.log.chain.chainID); err != nil {
		f.t.Fatal(err)
	}
	return l
}

// lose makes the log lack entries that a checkpoint elsewhere covers, and accepts the loss.
func (f *fixture) lose(to uint64) {
	f.t.Helper()
	f.log.Halt(&RollbackError{LostTo: to, Epoch: 1, Place: "a test"})
	p := principal(authz.SystemTenant)
	p.Scopes = []authz.Scope{authz.SystemAdmin}
	if _, err := f.log.AcceptRollback(context.Background(), p, "a test"); err != nil {
		f.t.Fatal(err)
	}
}

// cutTail removes the entries after a sequence and all rows that name them, but keeps the
// checkpoint.
func (f *fixture) cutTail(to uint64) {
	f.t.Helper()
	err := f.store.Update(f.t.Context(), func(tx store.Tx) error {
		head, err := readHead(tx)
		if err != nil {
			return err
		}
		for n := head.sequence; n > to; n-- {
			e, err := readEntry(tx, n)
			if errors.Is(err, errNoEntry) {
				continue // an accepted rollback skipped the sequence
			}
			if err != nil {
				return err
			}
			if err := errors.Join(tx.Delete(entryKey(n)), tx.Delete(tenantKey(e.TenantID, e.TenantSequence))); err != nil {
				return err
			}
		}
		e, err := readEntry(tx, to)
		if err != nil {
			return err
		}
		return tx.Put(headKey, e.link().encode())
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.restart()
}

func (f *fixture) summaryRow(block uint64) (row []byte, err error) {
	err = f.store.View(context.Background(), func(r store.Reader) error {
		b, err := r.Get(summaryKey(string(tenantA), block))
		row = bytes.Clone(b)
		return err
	})
	return row, err
}

// pages reads all pages of a query and returns the hours of the entries found.
func (f *fixture) pages(q Query) (hours []string) {
	f.t.Helper()
	asking := principal(tenantA)
	asking.ID = "key_asking"
	for n := 0; ; n++ {
		entries, next, err := f.log.Query(f.t.Context(), asking, q)
		if err != nil {
			f.t.Fatal(err)
		}
		for _, e := range entries {
			if e.TenantID != string(tenantA) {
				f.t.Fatal("another tenant's entry")
			}
			if e.EventType != AuditRead {
				hours = append(hours, e.Resource.ID)
			}
		}
		if len(entries) > q.Limit || n > 1000 {
			f.t.Fatal("a page too large, or no end")
		}
		if q.Cursor = next; next == "" {
			return hours
		}
	}
}

// crowd writes n entries of tenantA. Their numbers determine their types and actors. It returns
// them, oldest first. The clock advances by an hour after every hundred entries.
func (f *fixture) crowd(n int, of func(i int) (EventType, string)) (rows []Query) {
	f.t.Helper()
	f.log.SetSigning(SignBatches)
	defer f.log.SetSigning(SignEntries)
	for done := 0; done < n; f.advance(time.Hour) {
		group := min(n-done, 100)
		err := f.store.Update(context.Background(), func(tx store.Tx) error {
			for i := done; i < done+group; i++ {
				p := principal(tenantA)
				e := Event{Outcome: Success, Principal: p, Resource: Resource{Type: CredentialResource, ID: fmt.Sprint(i)}}
				e.Type, e.Principal.ID = of(i)
				if _, err := f.log.Append(tx, e); err != nil {
					return err
				}
				if i%5 == 0 { // so sequences of the tenant differ from those of the log
					e.Principal.Tenant = tenantB
					if _, err := f.log.Append(tx, e); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			f.t.Fatal(err)
		}
		for i := done; i < done+group; i++ {
			eventType, actor := of(i)
			rows = append(rows, Query{EventType: string(eventType), UserID: actor, From: f.now()})
		}
		done += group
	}
	return rows
}

func (f *fixture) sizeOf(rng store.Range) (bytes int) {
	for key, value := range f.rowsOf(rng) {
		bytes += len(key) + len(value)
	}
	return bytes
}

// longLog returns a followed log of n entries of one tenant. Few of them have the rare types that
// the benchmarks search for. One signature covers two thousand entries.
func longLog(b *testing.B, n int, tenant authz.TenantID) *fixture {
	b.Helper()
	f := newFixture(b)
	f.log.SetSigning(SignBatches)
	began := time.Now()
	kinds := []EventType{CredentialUnsealed, CredentialListed, DataEncrypted, DataDecrypted, UserSignedIn, AuditRead}
	for done := 0; done < n; f.advance(time.Second) {
		err := f.store.Update(b.Context(), func(tx store.Tx) error {
			for i := done; i < done+2000; i++ {
				p := principal(tenant)
				p.ID = fmt.Sprint("usr_", i%50)
				e := Event{Type: kinds[i%len(kinds)], Outcome: Success, Principal: p, Resource: Resource{Type: CredentialResource, ID: "cred_x"}}
				switch {
				case i == 17:
					e.Type, e.Principal.ID = KeyRotated, "usr_once"
				case i%20_000 == 0:
					e.Type, e.Principal.ID = CredentialDeleted, "usr_rare"
				case i%256 == 0:
					e.Type = CredentialRotated // one in each block
				}
				if _, err := f.log.Append(tx, e); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			b.Fatal(err)
		}
		done += 2000
	}
	b.Logf("%d entries written in %v", n, time.Since(began))
	began = time.Now()
	c := f.follow()
	b.Logf("followed in %v: %.0f entries a second", time.Since(began), float64(c.Size)/time.Since(began).Seconds())
	if info, err := os.Stat(f.path); err == nil {
		b.Logf("the database has %d MiB, of which %d MiB are summaries", info.Size()>>20, f.sizeOf(summaryRange)>>20)
	}
	return f
}

func p99(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)*99/100]
}
