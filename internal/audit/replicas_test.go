package audit

import (
	"fmt"
	"testing"
)

// Whatever the results of two replicas' commits are, in any order, the log is whole, the next
// commit succeeds, and each replica counts exactly its own committed entries.
func TestReplicasGoOnWhateverBecameOfTheirCommits(t *testing.T) {
	outcomes := []outcome{done, failed, persisted, again, late}
	length := 4
	if testing.Short() {
		length = 3
	}
	words := 1
	for range length {
		words *= 2 * len(outcomes)
	}
	all := newReplicas(t, 2)
	begun, signer := all[0].read(), all[0].log.signer
	onAllCores(words, func(word int) {
		b := &table{now: begun}
		pair := []*replica{b.replica(t, signer), b.replica(t, signer)}
		var want [2]uint64
		var said string
		count := func(said string) {
			for i, r := range pair {
				if _, written, err := r.log.Progress(t.Context()); err != nil || written[Kind{AuditRead, Success}] != want[i] {
					t.Errorf("%s: %d were counted of %d, %v", said, written[Kind{AuditRead, Success}], want[i], err)
				}
			}
		}
		for rest := word; len(said) < 1 || rest > 0; rest /= 2 * len(outcomes) {
			i, o := rest%2, outcomes[rest/2%len(outcomes)]
			said += fmt.Sprintf("%d %s; ", i, o)
			r, other := pair[i], pair[1-i]
			r.outcome, r.frozen = o, func() {
				other.outcome = done
				other.append(AuditRead, tenantA)
				want[1-i]++
			}
			err := r.tries(AuditRead, tenantA)
			if ok := o != failed && o != persisted; (err == nil) != ok {
				t.Errorf("%s: %v", said, err)
			}
			if o != failed {
				want[i]++
			}
			count(said)
		}
		for i, r := range pair {
			r.outcome = done
			r.append(AuditRead, tenantA)
			want[i]++
		}
		count(said)
		report, err := VerifyStore(t.Context(), b.read(), Options{PublicKey: signer.Public()})
		if err != nil || report.Sequence != 1+want[0]+want[1] {
			t.Errorf("%s: %d entries, %v", said, report.Sequence, err)
		}
	})
}
