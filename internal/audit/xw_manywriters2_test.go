package audit

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// The newest entry that a process has seen may be archived by now.
func TestAReplicaThatSleptSinceEntriesWereArchivedGoesOn(t *testing.T) {
	replicas := newReplicas(t, 2)
	awake, asleep := replicas[0], replicas[1]
	now := time.Now()
	awake.clock, asleep.clock = func() time.Time { return now }, func() time.Time { return now }
	asleep.append(AuditRead, tenantB)
	for range 300 {
		awake.append(AuditRead, tenantA)
	}
	now = now.Add(keep + 48*time.Hour)
	awake.append(AuditRead, tenantA)
	a, _ := (&fixture{t: t}).folder()
	seen := asleep.log.heads.proposed.link
	if n, err := (&Cutter{Log: awake.log.Log, Reader: awake.log.Reader, Archive: a, Keep: keep}).Run(t.Context()); err != nil || n < 300 {
		t.Fatal(n, err)
	}
	cut := asleep.read()
	asleep.append(AuditRead, tenantB)
	asleep.verified(t)
	if _, written, err := asleep.log.Progress(t.Context()); err != nil || written[Kind{AuditRead, Success}] != 2 {
		t.Error(written, err)
	}
	// The tree shows whether it is the archived entry.
	if has, err := awake.log.chain.has(memoryTx{cut}, seen); !has || err != nil {
		t.Error(has, err)
	}
	other := seen
	other.hash[0] ^= 1
	if has, err := awake.log.chain.has(memoryTx{cut}, other); has || err != nil {
		t.Error("another entry is said to be archived:", err)
	}
	liar := cut.with(func(tx store.Tx) error {
		row := get(tx, tileKey(0, 0))
		copy(row[32:], tlogLeaf(other))
		return tx.Put(tileKey(0, 0), row)
	})
	if has, err := awake.log.chain.has(memoryTx{liar}, other); has {
		t.Error("a tree that does not hold is believed:", err)
	}
}

func tlogLeaf(at link) []byte {
	leaf := leafHash(at.hash)
	return leaf[:]
}
