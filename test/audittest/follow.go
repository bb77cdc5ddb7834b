package audittest

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Epochs returns the epochs that the log accepts.
func (f *Fixture) Epochs() []audit.Epoch {
	f.T.Helper()
	var epochs []audit.Epoch
	err := f.Store.View(f.T.Context(), func(r store.Reader) (err error) {
		epochs, err = f.Log.Chain.Epochs(r)
		return err
	})
	if err != nil {
		f.T.Fatal(err)
	}
	return epochs
}

// Write appends n entries of two tenants in few commits.
func (f *Fixture) Write(n int) {
	f.T.Helper()
	f.Log.SetSigning(writer.SignBatches)
	defer f.Log.SetSigning(writer.SignEntries)
	for done := 0; done < n; {
		group := min(n-done, 1000)
		err := f.Store.Update(context.Background(), func(tx store.Tx) error {
			for i := range group {
				e := audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: Principal(TenantA), Resource: audit.Resource{Type: audit.CredentialResource}}
				if (done+i)%3 == 0 {
					e.Type, e.Principal = audit.CredentialListed, Principal(TenantB)
				}
				if _, err := f.Log.Append(tx, e); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			f.T.Fatal(err)
		}
		done += group
	}
}

// Forget deletes everything derived, as in a log from before the tree existed.
func (f *Fixture) Forget() {
	f.T.Helper()
	rows := f.RowsOf(audit.TileRange, audit.SummaryRange, store.Prefix(audit.CheckpointKey))
	err := f.Store.Update(context.Background(), func(tx store.Tx) error {
		for key := range rows {
			if err := tx.Delete([]byte(key)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		f.T.Fatal(err)
	}
	f.Log.Chain.Followed.Store(nil)
}

// FollowsTo fails the test unless the derived rows are exactly those of the first size entries.
func (f *Fixture) FollowsTo(size int64) {
	f.T.Helper()
	reference := &ReferenceTree{}
	blocks := make(map[string][]audit.IndexRow)
	wantSummaries := make(map[string][]byte)
	var last *audit.Entry
	for _, e := range f.Entries()[:size] {
		last = e
		reference.Add(f.T, e.Position().Hash)
		rows := append(blocks[e.TenantID], audit.IndexRow{Position: e.Position(), EventType: e.EventType, Actor: e.Actor.ID})
		if len(rows) == audit.BlockSize {
			wantSummaries[string(audit.SummaryKey(e.TenantID, e.TenantSequence/audit.BlockSize-1))] = audit.SummaryOf(rows)
			rows = nil
		}
		blocks[e.TenantID] = rows
	}
	if !maps.EqualFunc(f.RowsOf(audit.TileRange), reference.Rows(f.T), bytes.Equal) {
		f.T.Errorf("the tiles are not those of the first %d entries", size)
	}
	if !maps.EqualFunc(f.RowsOf(audit.SummaryRange), wantSummaries, bytes.Equal) {
		f.T.Errorf("the summaries are not those of the first %d entries", size)
	}
	signed, c, err := f.Log.Chain.NewestCheckpoint(context.Background())
	if err != nil {
		f.T.Fatal(err)
	}
	again, err := audit.ParseCheckpoint(signed, f.Log.Signer.Public())
	if err != nil || again != c {
		f.T.Errorf("the note says %+v, %v", again, err)
	}
	if c.Size != size || c.Root != reference.Root(f.T, size) || c.Sequence != last.Sequence || hex.EncodeToString(c.Hash[:]) != last.Hash || !c.Time.Equal(last.Time()) {
		f.T.Errorf("%+v is not the checkpoint of %d", c, size)
	}
}

// Follow follows the log and returns its checkpoint.
func (f *Fixture) Follow() audit.Checkpoint {
	f.T.Helper()
	c, err := f.Log.Follow(context.Background())
	if err != nil {
		f.T.Fatal(err)
	}
	return c
}

// Another returns the log as another process that opens the same store.
func (f *Fixture) Another(s store.Store) *Parts {
	f.T.Helper()
	l := NewParts(f.Now)
	if err := l.Use(context.Background(), s, f.Log.Signer, f.Log.Chain.ChainID); err != nil {
		f.T.Fatal(err)
	}
	return l
}

// Lose makes the log lack entries that a checkpoint elsewhere covers, and accepts the loss.
func (f *Fixture) Lose(to uint64) {
	f.T.Helper()
	f.Log.Halt(&audit.RollbackError{LostTo: to, Epoch: 1, Source: "a test"})
	p := Principal(authz.SystemTenant)
	p.Scopes = []authz.Scope{authz.SystemAdmin}
	if _, err := f.Log.AcceptRollback(context.Background(), p, "a test"); err != nil {
		f.T.Fatal(err)
	}
}

// CutTail removes the entries after a sequence and all rows that name them, but keeps the
// checkpoint.
func (f *Fixture) CutTail(to uint64) {
	f.T.Helper()
	err := f.Store.Update(f.T.Context(), func(tx store.Tx) error {
		head, err := audit.ReadHead(tx)
		if err != nil {
			return err
		}
		for n := head.Sequence; n > to; n-- {
			e, err := entries.Read(tx, n)
			if errors.Is(err, audit.ErrNoEntry) {
				continue // an accepted rollback skipped the sequence
			}
			if err != nil {
				return err
			}
			if err := errors.Join(tx.Delete(audit.EntryKey(n)), tx.Delete(audit.TenantKey(e.TenantID, e.TenantSequence))); err != nil {
				return err
			}
		}
		e, err := entries.Read(tx, to)
		if err != nil {
			return err
		}
		return tx.Put(audit.HeadKey, e.Position().Encode())
	})
	if err != nil {
		f.T.Fatal(err)
	}
	f.Restart()
}

// Crowd writes n entries of tenantA. Their numbers determine their types and actors. It returns
// them, oldest first. The clock advances by an hour after every hundred entries.
func (f *Fixture) Crowd(n int, of func(i int) (audit.EventType, string)) (rows []reader.Query) {
	f.T.Helper()
	f.Log.SetSigning(writer.SignBatches)
	defer f.Log.SetSigning(writer.SignEntries)
	for done := 0; done < n; f.Advance(time.Hour) {
		group := min(n-done, 100)
		err := f.Store.Update(context.Background(), func(tx store.Tx) error {
			for i := done; i < done+group; i++ {
				p := Principal(TenantA)
				e := audit.Event{Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.CredentialResource, ID: fmt.Sprint(i)}}
				e.Type, e.Principal.ID = of(i)
				if _, err := f.Log.Append(tx, e); err != nil {
					return err
				}
				if i%5 == 0 { // so sequences of the tenant differ from those of the log
					e.Principal.Tenant = TenantB
					if _, err := f.Log.Append(tx, e); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			f.T.Fatal(err)
		}
		for i := done; i < done+group; i++ {
			eventType, actor := of(i)
			rows = append(rows, reader.Query{EventType: string(eventType), UserID: actor, From: f.Now()})
		}
		done += group
	}
	return rows
}

func (f *Fixture) sizeOf(rng store.Range) (bytes int) {
	for key, value := range f.RowsOf(rng) {
		bytes += len(key) + len(value)
	}
	return bytes
}

// LongLog returns a followed log of n entries of one tenant. Few of them have the rare types that
// the benchmarks search for. One signature covers two thousand entries.
func LongLog(b *testing.B, n int, tenant authz.TenantID) *Fixture {
	b.Helper()
	f := NewFixture(b)
	f.Log.SetSigning(writer.SignBatches)
	began := time.Now()
	kinds := []audit.EventType{audit.CredentialUnsealed, audit.CredentialListed, audit.DataEncrypted, audit.DataDecrypted, audit.UserSignedIn, audit.AuditRead}
	for done := 0; done < n; f.Advance(time.Second) {
		err := f.Store.Update(b.Context(), func(tx store.Tx) error {
			for i := done; i < done+2000; i++ {
				p := Principal(tenant)
				p.ID = fmt.Sprint("usr_", i%50)
				e := audit.Event{Type: kinds[i%len(kinds)], Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.CredentialResource, ID: "cred_x"}}
				switch {
				case i == 17:
					e.Type, e.Principal.ID = audit.KeyRotated, "usr_once"
				case i%20_000 == 0:
					e.Type, e.Principal.ID = audit.CredentialDeleted, "usr_rare"
				case i%256 == 0:
					e.Type = audit.CredentialRotated // one in each block
				}
				if _, err := f.Log.Append(tx, e); err != nil {
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
	c := f.Follow()
	b.Logf("followed in %v: %.0f entries a second", time.Since(began), float64(c.Size)/time.Since(began).Seconds())
	if info, err := os.Stat(f.Path); err == nil {
		b.Logf("the database has %d MiB, of which %d MiB are summaries", info.Size()>>20, f.sizeOf(audit.SummaryRange)>>20)
	}
	return f
}

// P99 returns the 99th percentile, and sorts the durations.
func P99(all []time.Duration) time.Duration {
	slices.Sort(all)
	return all[len(all)*99/100]
}
