package identity

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/test/timing"
)

const timedSignIns = 2000 // per kind

// BenchmarkTimingOfRefusedSignIns compares sign-ins with wrong passwords of existing accounts and
// with addresses that have none. It alternates between both in a random order and reports Welch's t
// between their times: over all of them, and over the fastest nine tenths, where little but the
// work is measured. It fails if the t over all is 4.5 or more. Refusals are recorded once per
// minute and source, so three cases are timed: without an entry, with an entry (each in a minute of
// its own), and right after the refusal of an address without an account. It takes minutes whatever
// -benchtime says, so it runs only when -bench names Timing.
func BenchmarkTimingOfRefusedSignIns(b *testing.B) {
	timing.Asked(b)
	b.Run("counted", func(b *testing.B) { timeSignIns(b, 0, false) })
	b.Run("recorded", func(b *testing.B) { timeSignIns(b, time.Minute, false) })
	b.Run("after another", func(b *testing.B) { timeSignIns(b, time.Minute, true) })
}

// timeSignIns moves the service's clock by step before each sign-in. If prime is true, another
// sign-in is refused before it.
func timeSignIns(b *testing.B, step time.Duration, prime bool) {
	var clock atomic.Int64
	clock.Store(time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC).UnixNano())
	s := newTimedService(b, func() time.Time { return time.Unix(0, clock.Load()) })
	sorts := []string{"wrong password", "unknown"}
	const each = 20 // addresses, so no place in the store identifies its kind
	addresses := make(map[string][]string)
	for i := range each {
		known := fmt.Sprintf("known-%02d@example.com", i)
		_, _, err := s.Register(b.Context(), stranger, known, secret.Bytes(goodPassword), "Example Ltd")
		must(b, err)
		addresses["wrong password"] = append(addresses["wrong password"], known)
		addresses["unknown"] = append(addresses["unknown"], fmt.Sprintf("nobody-%02d@example.com", i))
	}
	must(b, s.store.(*bolt.Store).Scrubbed(b.Context()))
	times := make(map[string][]float64)
	signIn := func(sort string, i int) float64 {
		clock.Add(int64(step))
		password := secret.Bytes(otherPassword)
		if prime {
			_, _ = s.SignIn(b.Context(), stranger, "prime@example.com", password)
		}
		began := time.Now()
		_, err := s.SignIn(b.Context(), stranger, addresses[sort][i%each], password)
		took := time.Since(began)
		if !errors.Is(err, fault.Unauthenticated) {
			b.Fatal(sort, err)
		}
		return float64(took.Microseconds())
	}
	for i := range 50 { // warms up the decoy, the heap and the branch predictors
		signIn(sorts[i%len(sorts)], i)
	}
	b.ResetTimer()
	for i := range timedSignIns {
		for _, at := range rand.Perm(len(sorts)) {
			times[sorts[at]] = append(times[sorts[at]], signIn(sorts[at], i))
		}
	}
	b.StopTimer()
	known, unknown := times[sorts[0]], times[sorts[1]]
	all, fast := timing.Welch(known, unknown), timing.Welch(timing.Fastest(known, 0.9), timing.Fastest(unknown, 0.9))
	for _, sort := range sorts {
		mean, _ := timing.MeanAndVariance(times[sort])
		b.Logf("%-14s median %.0f us, mean %.0f us", sort, timing.Fastest(times[sort], 0.5)[timedSignIns/2-1], mean)
	}
	b.Logf("t = %+.2f, fastest nine tenths t = %+.2f", all, fast)
	b.ReportMetric(math.Abs(all), "welch-t")
	b.ReportMetric(math.Abs(fast), "welch-t-fast")
	b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(timedSignIns*len(sorts)), "us/sign-in")
	if math.Abs(all) >= timing.MaxT {
		b.Errorf("Welch's t is %.2f: whether an address has an account can be told by the time of a sign-in", all)
	}
}

func newTimedService(b *testing.B, now func() time.Time) *Service {
	b.Helper()
	dir := b.TempDir()
	must(b, kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	must(b, err)
	log := writer.New(now, nil)
	db, err := bolt.Open(filepath.Join(dir, "i.db"), bolt.Options{Hook: log.Commit})
	must(b, err)
	b.Cleanup(func() { _ = db.Close() })
	s, _, err := Open(b.Context(), db, log, guard.New(log), k, keyring.Config{CacheTTL: time.Hour, Now: now})
	must(b, err)
	return s
}

const argonMemory = 19 << 20 // bytes that argon2 allocates for one password

// One run of argon2 takes most of the time of a sign-in, whatever the address. It is the only thing
// that allocates so much. Each refusal leaves one entry.
func TestEveryRefusedSignInHashesOnceAndLeavesOneEntry(t *testing.T) {
	f := newPeople(t)
	f.register("ada@example.com")
	f.register("slow@example.com")
	f.mails()
	for range freeFailures {
		_, _ = f.SignIn(t.Context(), stranger, "slow@example.com", secret.Bytes(otherPassword))
	}
	source := 0
	for name, c := range map[string][2]string{
		"unknown":          {"nobody@example.com", goodPassword},
		"wrong password":   {"ada@example.com", otherPassword},
		"empty password":   {"ada@example.com", ""},
		"huge password":    {"ada@example.com", string(make([]byte, 1<<20))},
		"slowed down":      {"slow@example.com", otherPassword},
		"slowed and right": {"slow@example.com", goodPassword},
		"no address":       {"ada", goodPassword},
		"empty address":    {"", goodPassword},
	} {
		source++
		by := from(fmt.Sprint("192.0.2.", 10+source)) // no refusal from this source was recorded in this minute
		rows := len(f.rows("audit/entry/"))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := f.SignIn(t.Context(), by, c[0], secret.Bytes(c[1]))
		runtime.ReadMemStats(&after)
		if !errors.Is(err, fault.Unauthenticated) {
			t.Errorf("%s: %v", name, err)
		}
		if runs := (after.TotalAlloc - before.TotalAlloc) / argonMemory; runs != 1 {
			t.Errorf("%s: %d runs of argon2", name, runs)
		}
		if entries := len(f.rows("audit/entry/")) - rows; entries != 1 {
			t.Errorf("%s: %d entries", name, entries)
		}
	}
}
