package bolt

import (
	"context"
	"crypto/sha3"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
)

// burn simulates the work of a caller between two updates, such as signing and sealing.
func burn(d time.Duration) {
	var b [64]byte
	for end := time.Now().Add(d); time.Now().Before(end); {
		h := sha3.Sum512(b[:])
		copy(b[:], h[:])
	}
}

func BenchmarkUpdate(b *testing.B) {
	for _, writers := range []int{1, 64} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			s, err := Open(filepath.Join(b.TempDir(), "db"), Options{})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			value := make([]byte, 8<<10)
			var next atomic.Int64
			done := make(chan error, writers)
			for range writers {
				go func() {
					for {
						i := next.Add(1)
						if i > int64(b.N) {
							done <- nil
							return
						}
						burn(400 * time.Microsecond)
						err := s.Update(context.Background(), func(tx store.Tx) error {
							return tx.Put(fmt.Appendf(nil, "%08d", i), value)
						})
						if err != nil {
							done <- err
							return
						}
					}
				}()
			}
			for range writers {
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(s.Commits())/float64(b.N), "commits/op")
		})
	}
}

// BenchmarkLog compares commits with a log of commits, whose shipper takes them all, and without one,
// and tells how much the file grows. A commit is that of a read: an entry and the rows beside it.
func BenchmarkLog(b *testing.B) {
	for _, writers := range []int{1, 16} {
		for _, logs := range []bool{false, true} {
			b.Run(fmt.Sprintf("writers=%d/log=%t", writers, logs), func(b *testing.B) {
				path := filepath.Join(b.TempDir(), "db")
				s, err := Open(path, Options{Journal: 4 << 20})
				if err != nil {
					b.Fatal(err)
				}
				defer s.Close()
				ctx := context.Background()
				if logs {
					if err := s.BeginLog(ctx, LogID{1}, noPosition); err != nil {
						b.Fatal(err)
					}
				}
				entry, head := make([]byte, 4050), make([]byte, 150)
				var next atomic.Int64
				done := make(chan error, writers)
				b.ResetTimer()
				for range writers {
					go func() {
						for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
							err := s.Update(ctx, func(tx store.Tx) error {
								for _, key := range []string{"audit/head", "audit/tenant/head/0123456789abcdef", "state/head"} {
									if err := tx.Put([]byte(key), head); err != nil {
										return err
									}
								}
								if err := tx.Put(fmt.Appendf(nil, "audit/index/0123456789abcdef/%08d", i), head[:40]); err != nil {
									return err
								}
								return tx.Put(fmt.Appendf(nil, "audit/entry/%08d", i), entry)
							})
							if err != nil {
								done <- err
								return
							}
							if logs && i%1000 == 0 {
								if l, err := s.Log(ctx); err == nil {
									s.Shipped(l.ID, l.Newest, nil)
								}
							}
						}
						done <- nil
					}()
				}
				for range writers {
					if err := <-done; err != nil {
						b.Fatal(err)
					}
				}
				b.StopTimer()
				usage, err := s.Usage(ctx)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(usage.Size-usage.Free)/float64(b.N), "file-bytes/op")
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "updates/s")
			})
		}
	}
}
