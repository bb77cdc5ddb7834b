package writer_test

import (
	"fmt"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Whatever the results of two replicas' commits are, in any order, the log is whole, the next
// commit succeeds, and each replica counts exactly its own committed entries.
func TestReplicasGoOnWhateverBecameOfTheirCommits(t *testing.T) {
	outcomes := []audittest.Outcome{audittest.Done, audittest.Failed, audittest.Persisted, audittest.Again, audittest.Late}
	length := 4
	if testing.Short() {
		length = 3
	}
	words := 1
	for range length {
		words *= 2 * len(outcomes)
	}
	all := audittest.NewReplicas(t, 2)
	begun, signer := all[0].Read(), all[0].Log.Signer
	audittest.OnAllCores(words, func(word int) {
		b := &audittest.Table{Now: begun}
		pair := []*audittest.Replica{b.Replica(t, signer), b.Replica(t, signer)}
		var want [2]uint64
		var said string
		count := func(said string) {
			for i, r := range pair {
				if _, written, err := r.Log.Progress(t.Context()); err != nil || written[writer.Kind{Type: audit.AuditRead, Outcome: audit.Success}] != want[i] {
					t.Errorf("%s: %d were counted of %d, %v", said, written[writer.Kind{Type: audit.AuditRead, Outcome: audit.Success}], want[i], err)
				}
			}
		}
		for rest := word; len(said) < 1 || rest > 0; rest /= 2 * len(outcomes) {
			i, o := rest%2, outcomes[rest/2%len(outcomes)]
			said += fmt.Sprintf("%d %s; ", i, o)
			r, other := pair[i], pair[1-i]
			r.Outcome, r.Frozen = o, func() {
				other.Outcome = audittest.Done
				other.Append(audit.AuditRead, audittest.TenantA)
				want[1-i]++
			}
			err := r.Tries(audit.AuditRead, audittest.TenantA)
			if ok := o != audittest.Failed && o != audittest.Persisted; (err == nil) != ok {
				t.Errorf("%s: %v", said, err)
			}
			if o != audittest.Failed {
				want[i]++
			}
			count(said)
		}
		for i, r := range pair {
			r.Outcome = audittest.Done
			r.Append(audit.AuditRead, audittest.TenantA)
			want[i]++
		}
		count(said)
		report, err := verify.Store(t.Context(), b.Read(), verify.Options{PublicKey: signer.Public()})
		if err != nil || report.Sequence != 1+want[0]+want[1] {
			t.Errorf("%s: %d entries, %v", said, report.Sequence, err)
		}
	})
}
