package writer_test

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// BenchmarkAppend measures the rate of 256 concurrent writers, each in a loop of its own. With one
// signature for each entry it reports the rate as a share of what the cores could sign if they did
// nothing else. With one signature for each commit it reports the rate as a multiple of the first
// mode's. The share has two bases: the rate of one core that signs alone times the number of cores,
// and the rate of all cores that sign at the same time, which is lower on a shared machine. The
// modes take turns, and the raw rate is measured before and after, because the speed of such a
// machine varies.
//
//	go test -run '^$' -bench Append -benchtime 100000x ./internal/audit
func BenchmarkAppend(b *testing.B) {
	const turns = 4 // turns of each mode
	entry, batch := audittest.NewFixture(b), audittest.NewFixture(b)
	batch.Log.SetSigning(writer.SignBatches)
	cores := runtime.GOMAXPROCS(0)
	one, all := rawRate(b, entry, 1), rawRate(b, entry, cores)
	b.ResetTimer()
	var byEntry, byBatch appended
	for range turns {
		byEntry.add(appendAll(b, entry, b.N/turns+1))
		byBatch.add(appendAll(b, batch, b.N/turns+1))
	}
	b.StopTimer()
	one, all = (one+rawRate(b, entry, 1))/2, (all+rawRate(b, entry, cores))/2
	b.ReportMetric(byEntry.rate()/(one*float64(cores)), "of-cores×raw")
	b.ReportMetric(byEntry.rate()/all, "of-all-cores-signing")
	b.ReportMetric(one, "raw-signs/s/core")
	b.ReportMetric(all, "raw-signs/s/all-cores")
	b.ReportMetric(byEntry.rate(), "entry-appends/s")
	b.ReportMetric(byBatch.rate(), "batch-appends/s")
	b.ReportMetric(byBatch.rate()/byEntry.rate(), "batch/entry")
	b.ReportMetric(float64(byEntry.entries)/float64(byEntry.commits), "entries/commit")
	b.ReportMetric(float64(byBatch.entries)/float64(byBatch.commits), "batch-entries/commit")
}

// appended is the result of a run.
type appended struct {
	entries, commits uint64
	took             time.Duration
}

func (a *appended) add(b appended) {
	a.entries, a.commits, a.took = a.entries+b.entries, a.commits+b.commits, a.took+b.took
}

func (a appended) rate() float64 { return float64(a.entries) / a.took.Seconds() }

// appendAll writes n entries.
func appendAll(b *testing.B, f *audittest.Fixture, n int) appended {
	const writers = 256
	e := audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: "cred_x", Type: audit.CredentialResource}}
	before, began := commits(f), time.Now()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for next.Add(1) <= int64(n) {
				if err := f.Log.Record(context.Background(), e); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return appended{uint64(n), commits(f) - before, time.Since(began)}
}

// rawRate returns how many ML-DSA-65 signatures the given number of cores makes in a second.
func rawRate(b *testing.B, f *audittest.Fixture, cores int) float64 {
	const n = 2000 // signatures of each core
	message := make([]byte, 32)
	var wg sync.WaitGroup
	began := time.Now()
	for range cores {
		wg.Go(func() {
			for range n {
				if _, err := f.Log.Signer.Sign(audit.SigningContext, message); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	return float64(n*cores) / time.Since(began).Seconds()
}

func commits(f *audittest.Fixture) uint64 { return f.Store.(interface{ Commits() uint64 }).Commits() }
