package vault

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/secret"
)

// BenchmarkSeal reports how many physical commits (a pair of fdatasyncs each)
// a sealed credential of 1 KiB costs, with one caller and with 64 that each
// seal again as soon as they were answered.
func BenchmarkSeal(b *testing.B) {
	for _, sealers := range []int{1, 64} {
		b.Run(fmt.Sprintf("sealers=%d", sealers), func(b *testing.B) {
			f := newFixture(b, time.Hour)
			req := SealRequest{Name: "n", Type: "t", Values: map[string]secret.Bytes{"v": secret.Bytes(strings.Repeat("x", 1024))}}
			commits := f.store.Commits()
			var next atomic.Int64
			var wg sync.WaitGroup
			b.ResetTimer()
			for range sealers {
				wg.Go(func() {
					for next.Add(1) <= int64(b.N) {
						if _, err := f.vault.Seal(context.Background(), f.a, req); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			b.ReportMetric(float64(f.store.Commits()-commits)/float64(b.N), "fsync-pairs/seal")
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "seals/s")
		})
	}
}
