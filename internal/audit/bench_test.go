package audit

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkAppend has 256 concurrent writers, each in a loop of its own, and
// reports their rate as a share of what the cores could sign if they did
// nothing else: once as the number of cores times the rate of one core that
// signs alone, and once as the rate of all cores that sign at the same time,
// which on a shared machine is less. Both are measured before and after, since
// such a machine's rate moves.
func BenchmarkAppend(b *testing.B) {
	const writers = 256
	f := newFixture(b)
	e := Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: "cred_x", Type: CredentialResource}}
	cores := runtime.GOMAXPROCS(0)
	one, all := rawRate(b, f, 1), rawRate(b, f, cores)
	commits := f.commits()
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ResetTimer()
	for range writers {
		wg.Go(func() {
			for next.Add(1) <= int64(b.N) {
				if err := f.log.Record(context.Background(), e); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	rate := float64(b.N) / b.Elapsed().Seconds()
	one, all = (one+rawRate(b, f, 1))/2, (all+rawRate(b, f, cores))/2
	b.ReportMetric(rate/(one*float64(cores)), "of-cores×raw")
	b.ReportMetric(rate/all, "of-all-cores-signing")
	b.ReportMetric(one, "raw-signs/s/core")
	b.ReportMetric(all, "raw-signs/s/all-cores")
	b.ReportMetric(rate, "appends/s")
	b.ReportMetric(float64(f.commits()-commits)/float64(b.N), "commits/append")
}

func (f *fixture) commits() uint64 { return f.store.(interface{ Commits() uint64 }).Commits() }

// rawRate is how many ML-DSA-65 signatures so many cores make in a second.
func rawRate(b *testing.B, f *fixture, cores int) float64 {
	const n = 2000 // by each
	message := make([]byte, 32)
	var wg sync.WaitGroup
	began := time.Now()
	for range cores {
		wg.Go(func() {
			for range n {
				if _, err := f.log.signer.Sign(signingContext, message); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	return float64(n*cores) / time.Since(began).Seconds()
}
