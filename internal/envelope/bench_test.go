package envelope

import (
	"crypto/rand"
	"slices"
	"testing"
	"time"

	"github.com/cloudflare/circl/kem/mlkem/mlkem768"
)

// These benchmarks compare the envelope with ML-KEM-768 alone:
//
//	go test -run '^$' -bench 'Raw|SealOpen' ./internal/envelope

const benchmarkSize = 1024

// rawSeal generates a key pair and encapsulates. rawOpen derives the key from the stored seed and
// decapsulates.
func rawSeal(seed, ct, ss []byte) {
	rand.Read(seed)
	pk, _ := mlkem768.NewKeyFromSeed(seed)
	pk.EncapsulateTo(ct, ss, nil)
}

func rawOpen(seed, ct, ss []byte) {
	_, sk := mlkem768.NewKeyFromSeed(seed)
	sk.DecapsulateTo(ss, ct)
}

func BenchmarkRaw(b *testing.B) {
	seed, ct, ss := make([]byte, seedSize), make([]byte, mlkem768.CiphertextSize), make([]byte, mlkem768.SharedKeySize)
	b.Run("Seal", func(b *testing.B) {
		for b.Loop() {
			rawSeal(seed, ct, ss)
		}
	})
	b.Run("Open", func(b *testing.B) {
		rawSeal(seed, ct, ss)
		for b.Loop() {
			rawOpen(seed, ct, ss)
		}
	})
}

// BenchmarkSealOpen reports ns/op of the envelope, raw-ns/op of ML-KEM-768 alone, and x-raw, their
// ratio. The two alternate in one loop and the medians count, so a busy machine slows both alike.
func BenchmarkSealOpen(b *testing.B) {
	key, plaintext := testKey(1), make([]byte, benchmarkSize)
	seed, ct, ss := make([]byte, seedSize), make([]byte, mlkem768.CiphertextSize), make([]byte, mlkem768.SharedKeySize)
	rawSeal(seed, ct, ss)
	var body *Credential
	var wrap []byte
	seal := func() {
		var err error
		if body, wrap, err = SealCredential(key, 1, testContext, plaintext); err != nil {
			b.Fatal(err)
		}
	}
	open := func() {
		if _, err := OpenCredential(key, testContext, body, wrap); err != nil {
			b.Fatal(err)
		}
	}
	seal()
	b.Run("Seal", func(b *testing.B) { compare(b, func() { rawSeal(seed, ct, ss) }, seal) })
	b.Run("Open", func(b *testing.B) { compare(b, func() { rawOpen(seed, ct, ss) }, open) })
	b.Run("Both", func(b *testing.B) {
		compare(b, func() { rawSeal(seed, ct, ss); rawOpen(seed, ct, ss) }, func() { seal(); open() })
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

// BenchmarkOpenFailures shows that every kind of tampering costs the same.
func BenchmarkOpenFailures(b *testing.B) {
	for name, fail := range failures(b) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				_ = fail()
			}
		})
	}
}
