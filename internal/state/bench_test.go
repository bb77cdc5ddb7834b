package state_test

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/store"
)

// benchRows returns the number of rows of the store that the benchmarks work on.
func benchRows(b *testing.B) int {
	n, err := strconv.Atoi(os.Getenv("LATTICEKEEP_BENCH_ROWS"))
	if err != nil {
		n = 20000
	}
	if testing.Short() {
		b.Skip("fills a store")
	}
	return n
}

func filled(b *testing.B) (f *fixture, rows int) {
	b.Helper()
	rows = benchRows(b)
	f = newFixture(b)
	value := make([]byte, 400)
	for n := 0; n < rows; {
		batch := make(map[string][]byte)
		for ; len(batch) < 2000 && n < rows; n++ {
			batch[fmt.Sprintf("user/email/%032x", n*7919)] = value
		}
		f.must(f.update(audit.APIKeyCreated, batch))
		clear(f.rows)
	}
	return f, rows
}

// processorTime returns what the process has used, which others on the machine do not change.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// A start reads the state and verifies it against the newest entry.
func BenchmarkStart(b *testing.B) {
	f, rows := filled(b)
	b.ResetTimer()
	began := processorTime(b)
	for range b.N {
		f.must(f.state.Use(b.Context(), f.raw, f.key))
	}
	b.ReportMetric((processorTime(b)-began).Seconds()/float64(b.N), "cpu-s/start")
	b.ReportMetric(b.Elapsed().Seconds()/float64(b.N), "s/start")
	size := 0
	f.must(f.raw.View(b.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte("state/")), func(key, value []byte) bool { size += len(key) + len(value); return true })
	}))
	b.ReportMetric(float64(size)/float64(rows), "bytes/row")
}

// A scan compares every row with the state.
func BenchmarkScan(b *testing.B) {
	f, rows := filled(b)
	b.ResetTimer()
	for range b.N {
		if result, err := f.state.Scan(b.Context(), f.raw, 1); err != nil || len(result.Refused) > 0 || result.Rows < uint64(rows) {
			b.Fatal(result, err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(rows), "ns/row")
	b.ReportMetric(b.Elapsed().Seconds()/float64(b.N)*1e6/float64(rows), "s/million")
}

// A read of one row without and with the state, of many rows in turn and of a few again and again.
func BenchmarkRead(b *testing.B) {
	f, rows := filled(b)
	for _, c := range []struct {
		name  string
		store store.Store
		rows  int
	}{{"raw", f.raw, rows}, {"held", f.store, rows}, {"raw-again", f.raw, 100}, {"held-again", f.store, 100}} {
		b.Run(c.name, func(b *testing.B) {
			for i := range b.N {
				f.must(c.store.View(b.Context(), func(r store.Reader) error {
					_, err := r.Get(fmt.Appendf(nil, "user/email/%032x", i%c.rows*7919))
					return err
				}))
			}
		})
	}
}

// A commit of one row with its entry, with and without the state.
func BenchmarkCommit(b *testing.B) {
	f, rows := filled(b)
	value := make([]byte, 400)
	for _, family := range []string{"apikey/used/", "user/email/"} {
		b.Run(map[string]string{"apikey/used/": "raw", "user/email/": "held"}[family], func(b *testing.B) {
			for i := range b.N {
				f.must(f.store.Update(b.Context(), func(tx store.Tx) error {
					if err := tx.Put(fmt.Appendf(nil, "%s%032x", family, i%rows*7919), append(value, byte(i))); err != nil {
						return err
					}
					_, err := f.log.Append(tx, event(audit.APIKeyCreated))
					return err
				}))
			}
		})
	}
}
