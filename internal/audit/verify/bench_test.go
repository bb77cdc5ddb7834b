package verify_test

import (
	"context"
	"crypto/sha256"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// benchEntries returns the length of the log for the benchmarks: LATTICEKEEP_BENCH_ENTRIES, or
// enough entries to keep all cores busy for a while.
func benchEntries(b *testing.B) int {
	n, err := strconv.Atoi(os.Getenv("LATTICEKEEP_BENCH_ENTRIES"))
	if err != nil {
		n = 20_000
	}
	b.Helper()
	return n
}

// benchLog returns a log of n entries, in groups of up to 256.
func benchLog(b *testing.B, n int, s writer.Signing) *audittest.Fixture {
	b.Helper()
	f := audittest.NewFixture(b)
	f.Log.SetSigning(s)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 256 {
		wg.Go(func() {
			for i := next.Add(1); i < int64(n); i = next.Add(1) {
				tenant := audittest.TenantA
				if i%3 == 0 {
					tenant = audittest.TenantB
				}
				err := f.Log.Record(context.Background(), audit.Event{
					Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(tenant), Resource: audit.Resource{ID: "cred_x", Type: audit.CredentialResource},
				})
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return f
}

// BenchmarkVerify measures the verification of stored entries, first without and then with
// signatures. It also reports the latter as a share of the signatures that the cores could verify
// if they did nothing else. That rate is measured before and after, because it varies on a shared
// machine.
func BenchmarkVerify(b *testing.B) {
	for _, c := range []struct {
		name      string
		signing   writer.Signing
		linksOnly bool
	}{{"links", writer.SignEntries, true}, {"entry", writer.SignEntries, false}, {"batch", writer.SignBatches, false}, {"links-batch", writer.SignBatches, true}} {
		b.Run(c.name, func(b *testing.B) {
			f := benchLog(b, benchEntries(b), c.signing)
			hashes, signed := signMany(b, f)
			raw, rawUsed, walked, used := 0.0, 0.0, 0, time.Duration(0)
			runtime.GC()
			b.ResetTimer()
			for range b.N {
				b.StopTimer()
				if !c.linksOnly {
					began := cpuTime(b)
					raw += rawVerifications(b, f, hashes, signed)
					rawUsed += (cpuTime(b) - began).Seconds()
				}
				before := cpuTime(b)
				b.StartTimer()
				v := verify.NewVerifier(verify.Options{PublicKey: f.Log.Signer.Public()}.WithLinksOnly(c.linksOnly))
				err := v.AddRange(context.Background(), f.Store, audit.EntryRange)
				report, err2 := v.Finish()
				b.StopTimer()
				used += cpuTime(b) - before
				if err != nil || err2 != nil {
					b.Fatal(err, err2)
				}
				if !c.linksOnly {
					began := cpuTime(b)
					raw += rawVerifications(b, f, hashes, signed)
					rawUsed += (cpuTime(b) - began).Seconds()
				}
				walked += int(report.Entries)
				b.StartTimer()
			}
			b.StopTimer()
			rate := float64(walked) / b.Elapsed().Seconds()
			b.ReportMetric(rate, "entries/s")
			// The rate on cores that no other process uses.
			b.ReportMetric(float64(walked)/used.Seconds(), "entries/cpu-second")
			if raw > 0 {
				raw /= float64(2 * b.N)
				b.ReportMetric(raw, "raw-verifications/s/all-cores")
				b.ReportMetric(rate/raw, "of-raw")
				// The same by CPU time, which other processes on the machine do not change.
				b.ReportMetric(float64(walked)/used.Seconds()*rawUsed/float64(2*b.N*rawCount*runtime.GOMAXPROCS(0)), "of-raw-by-cpu-time")
			}
		})
	}
}

// cpuTime returns the CPU time that the process has used so far on all cores.
func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkVerifyStore measures the verification of a whole database with all derived rows.
func BenchmarkVerifyStore(b *testing.B) {
	f := benchLog(b, benchEntries(b), writer.SignEntries)
	if _, err := f.Log.Follow(context.Background()); err != nil {
		b.Fatal(err)
	}
	walked := 0
	b.ResetTimer()
	for range b.N {
		report, err := verify.Store(context.Background(), f.Store, verify.Options{})
		if err != nil {
			b.Fatal(err)
		}
		walked += int(report.Entries)
	}
	b.ReportMetric(float64(walked)/b.Elapsed().Seconds(), "entries/s")
}

const rawCount = 4000 // signatures for each core

// rawVerifications returns how many ML-DSA-65 signatures all cores verify in a second. The messages
// differ, as in a log, because the processor would learn to predict a repeated one.
func rawVerifications(b *testing.B, f *audittest.Fixture, hashes [][32]byte, signed [][]byte) float64 {
	key := f.Log.Signer.Public()
	cores := runtime.GOMAXPROCS(0)
	var wg sync.WaitGroup
	began := time.Now()
	for range cores {
		wg.Go(func() {
			for i := range rawCount {
				if i %= len(hashes); !key.Verify(audit.SigningContext, hashes[i][:], signed[i]) {
					b.Error("a signature does not verify")
				}
			}
		})
	}
	wg.Wait()
	return float64(rawCount*cores) / time.Since(began).Seconds()
}

// signMany creates the signatures for rawVerifications.
func signMany(b *testing.B, f *audittest.Fixture) (hashes [][32]byte, signed [][]byte) {
	for i := range 1024 {
		hash := sha256.Sum256([]byte{byte(i), byte(i >> 8)})
		signature, err := f.Log.Signer.Sign(audit.SigningContext, hash[:])
		if err != nil {
			b.Fatal(err)
		}
		hashes, signed = append(hashes, hash), append(signed, signature)
	}
	return hashes, signed
}

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
