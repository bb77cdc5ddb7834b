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
// nothing else. That is measured first and last in the same run, one core at a
// time, since the rate of a shared machine moves.
func BenchmarkAppend(b *testing.B) {
	const writers = 256
	f := newFixture(b)
	e := Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: "cred_x", Type: CredentialResource}}
	before := rawRate(b, f)
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
	raw := (before + rawRate(b, f)) / 2
	cores := float64(runtime.GOMAXPROCS(0))
	b.ReportMetric(rate/(raw*cores), "of-cores×raw")
	b.ReportMetric(raw, "raw-signs/s/core")
	b.ReportMetric(rate, "appends/s")
	b.ReportMetric(float64(f.commits()-commits)/float64(b.N), "commits/append")
}

func (f *fixture) commits() uint64 { return f.store.(interface{ Commits() uint64 }).Commits() }

// rawRate is how many ML-DSA-65 signatures one core makes in a second.
func rawRate(b *testing.B, f *fixture) float64 {
	const n = 1500
	message := make([]byte, 32)
	began := time.Now()
	for range n {
		if _, err := f.log.signer.Sign(signingContext, message); err != nil {
			b.Fatal(err)
		}
	}
	return n / time.Since(began).Seconds()
}
