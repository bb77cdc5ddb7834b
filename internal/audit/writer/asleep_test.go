package writer_test

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// The newest entry that a process has seen may be archived by now.
func TestAReplicaThatSleptSinceEntriesWereArchivedGoesOn(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	awake, asleep := replicas[0], replicas[1]
	now := time.Now()
	awake.Clock, asleep.Clock = func() time.Time { return now }, func() time.Time { return now }
	asleep.Append(audit.AuditRead, audittest.TenantB)
	for range 300 {
		awake.Append(audit.AuditRead, audittest.TenantA)
	}
	now = now.Add(audittest.Keep + 48*time.Hour)
	awake.Append(audit.AuditRead, audittest.TenantA)
	a, _ := (&audittest.Fixture{T: t}).Folder()
	seen := asleep.Log.Proposed().Position
	if n, err := (&keeper.Cutter{Log: awake.Log.Log, Reader: awake.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context()); err != nil || n < 300 {
		t.Fatal(n, err)
	}
	cut := asleep.Read()
	asleep.Append(audit.AuditRead, audittest.TenantB)
	asleep.Verified(t)
	if _, written, err := asleep.Log.Progress(t.Context()); err != nil || written[writer.Kind{Type: audit.AuditRead, Outcome: audit.Success}] != 2 {
		t.Error(written, err)
	}
	// The tree shows whether it is the archived entry.
	if has, err := awake.Log.Chain.HasEntry(cut.Tx(), seen); !has || err != nil {
		t.Error(has, err)
	}
	other := seen
	other.Hash[0] ^= 1
	if has, err := awake.Log.Chain.HasEntry(cut.Tx(), other); has || err != nil {
		t.Error("another entry is said to be archived:", err)
	}
	liar := cut.With(func(tx store.Tx) error {
		row := audittest.Get(tx, audit.TileKey(0, 0))
		copy(row[32:], tlogLeaf(other))
		return tx.Put(audit.TileKey(0, 0), row)
	})
	if has, err := awake.Log.Chain.HasEntry(liar.Tx(), other); has {
		t.Error("a tree that does not hold is believed:", err)
	}
}

func tlogLeaf(at audit.Position) []byte {
	leaf := audit.LeafHash(at.Hash)
	return leaf[:]
}
