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
