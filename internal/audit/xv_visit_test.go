package audit

import (
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// BenchmarkStart measures a start with a log of a million entries, or of LATTICEKEEP_BENCH_ENTRIES,
// all of the system's own tenant. A start opens the database, compares the head with the last
// entry, finds and verifies the entries of sealing keys (50 of this kind), reads the newest
// checkpoint and follows the chain to its end, which is 200 entries further the first time.
// Separately, the benchmark measures the time until the newest entries are verified, continuing
// from the progress of the previous process. It does not clear the machine's file cache between
// runs.
//
//	go test -run '^$' -bench Start -benchtime 20x ./internal/audit
func BenchmarkStart(b *testing.B) {
	n, err := strconv.Atoi(os.Getenv("LATTICEKEEP_BENCH_ENTRIES"))
	if err != nil {
		n = 1_000_000
	}
	f := longLog(b, n, authz.SystemTenant)
	began := time.Now()
	if p, err := f.log.Verify(b.Context()); err != nil || p.Status != ProofVerified {
		b.Fatal(p, err)
	}
	b.Logf("verified in %v on one core: %.0f entries a second", time.Since(began), float64(n)/time.Since(began).Seconds())
	if err := f.log.keepProgress(b.Context(), 1); err != nil {
		b.Fatal(err)
	}
	for range 200 {
		f.record(Event{Type: AuditRead, Outcome: Success, Principal: principal(authz.SystemTenant)})
	}
	if err := f.store.Close(); err != nil {
		b.Fatal(err)
	}
	var starts, visits, verifications []time.Duration
	for b.Loop() {
		began := time.Now()
		log := newParts(f.now)
		s, err := bolt.Open(f.path, bolt.Options{Hook: log.Commit})
		if err != nil {
			b.Fatal(err)
		}
		if err := log.Use(b.Context(), s, f.log.signer, "chain_test"); err != nil {
			b.Fatal(err)
		}
		seen, visit := 0, time.Now()
		if err := log.Visit(b.Context(), authz.SystemTenant, func(*Entry) { seen++ }, CredentialDeleted, SealingKeyRetired, SealingKeyRestored); err != nil || seen != (n+19_999)/20_000 {
			b.Fatal(seen, err)
		}
		visits = append(visits, time.Since(visit))
		if _, _, err := log.chain.NewestCheckpoint(b.Context()); err != nil {
			b.Fatal(err)
		}
		if _, err := log.Follow(b.Context()); err != nil {
			b.Fatal(err)
		}
		starts = append(starts, time.Since(began))
		verify := time.Now()
		if resumed, err := log.resume(b.Context(), time.Hour); err != nil || !resumed {
			b.Fatal(resumed, err)
		}
		if p, err := log.Verify(b.Context()); err != nil || p.Status != ProofVerified {
			b.Fatal(p, err)
		}
		verifications = append(verifications, time.Since(verify))
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(p99(starts).Seconds()*1000, "ms-p99-start")
	b.ReportMetric(p99(visits).Seconds()*1000, "ms-p99-visit")
	b.ReportMetric(p99(verifications).Seconds()*1000, "ms-p99-verified")
}
