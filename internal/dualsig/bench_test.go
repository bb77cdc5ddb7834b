package dualsig

import (
	"slices"
	"testing"
	"time"

	"github.com/cloudflare/circl/sign/mldsa/mldsa65"
)

// BenchmarkSignVerify compares a dual signature of 1 KiB with ML-DSA-65 alone. It reports ns/op,
// raw-ns/op and x-raw, their ratio. The two alternate in one loop and the medians count, so a busy
// machine slows both alike. The time of signing varies at random, so only many iterations give a
// useful result.
//
//	go test -run '^$' -bench SignVerify ./internal/dualsig
func BenchmarkSignVerify(b *testing.B) {
	k, msg := mustKey(b, 1, 1, 2), make([]byte, 1024)
	sig := mustSign(b, k, recordContext, msg)
	context, raw := []byte(recordContext), make([]byte, SignatureSize)
	rawSign := func() {
		if err := mldsa65.SignTo(k.private.key, msg, context, true, raw); err != nil {
			b.Fatal(err)
		}
	}
	rawSign()
	b.Run("Sign", func(b *testing.B) {
		compare(b, rawSign, func() { mustSign(b, k, recordContext, msg) })
	})
	b.Run("Verify", func(b *testing.B) {
		compare(b, func() { mldsa65.Verify(k.private.public.key, msg, context, raw) }, func() {
			if !k.Verify(recordContext, msg, sig) {
				b.Fatal("does not verify")
			}
		})
	})
}

func compare(b *testing.B, raw, ours func()) {
	var rawTimes, ourTimes []time.Duration
	for b.Loop() {
		start := time.Now()
		raw()
		middle := time.Now()
		ours()
		rawTimes = append(rawTimes, middle.Sub(start))
		ourTimes = append(ourTimes, time.Since(middle))
	}
	median := func(times []time.Duration) float64 {
		slices.Sort(times)
		return float64(times[len(times)/2].Nanoseconds())
	}
	b.ReportMetric(median(ourTimes), "ns/op")
	b.ReportMetric(median(rawTimes), "raw-ns/op")
	b.ReportMetric(median(ourTimes)/median(rawTimes), "x-raw")
}
