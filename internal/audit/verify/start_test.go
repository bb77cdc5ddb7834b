package verify_test

import (
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/audittest"
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
	f := audittest.LongLog(b, n, authz.SystemTenant)
	began := time.Now()
	if p, err := f.Log.Verify(b.Context()); err != nil || p.Status != verify.ProofVerified {
		b.Fatal(p, err)
	}
	b.Logf("verified in %v on one core: %.0f entries a second", time.Since(began), float64(n)/time.Since(began).Seconds())
	if err := f.Log.KeepProgress(b.Context(), 1); err != nil {
		b.Fatal(err)
	}
	for range 200 {
		f.Record(audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(authz.SystemTenant)})
	}
	if err := f.Store.Close(); err != nil {
		b.Fatal(err)
	}
	var starts, visits, verifications []time.Duration
	for b.Loop() {
		began := time.Now()
		log := audittest.NewParts(f.Now)
		s, err := bolt.Open(f.Path, bolt.Options{Hook: log.Commit})
		if err != nil {
			b.Fatal(err)
		}
		if err := log.Use(b.Context(), s, f.Log.Signer, "chain_test"); err != nil {
			b.Fatal(err)
		}
		seen, visit := 0, time.Now()
		if err := log.Visit(b.Context(), authz.SystemTenant, func(*audit.Entry) { seen++ }, audit.CredentialDeleted, audit.SealingKeyRetired, audit.SealingKeyRestored); err != nil || seen != (n+19_999)/20_000 {
			b.Fatal(seen, err)
		}
		visits = append(visits, time.Since(visit))
		if _, _, err := log.Chain.NewestCheckpoint(b.Context()); err != nil {
			b.Fatal(err)
		}
		if _, err := log.Follow(b.Context()); err != nil {
			b.Fatal(err)
		}
		starts = append(starts, time.Since(began))
		resumes := time.Now()
		if resumed, err := log.Resume(b.Context(), time.Hour); err != nil || !resumed {
			b.Fatal(resumed, err)
		}
		if p, err := log.Verify(b.Context()); err != nil || p.Status != verify.ProofVerified {
			b.Fatal(p, err)
		}
		verifications = append(verifications, time.Since(resumes))
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(audittest.P99(starts).Seconds()*1000, "ms-p99-start")
	b.ReportMetric(audittest.P99(visits).Seconds()*1000, "ms-p99-visit")
	b.ReportMetric(audittest.P99(verifications).Seconds()*1000, "ms-p99-verified")
}
