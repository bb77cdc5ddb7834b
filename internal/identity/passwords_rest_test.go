package identity

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// A process that stands still in the middle of a hash continues as before.
func TestASlowHashKeepsNobodyOutForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p passwords
		var done []func()
		for range max(1, runtime.GOMAXPROCS(0)/2) {
			d, err := p.start(t.Context())
			must(t, err)
			done = append(done, d)
		}
		waited := make(chan time.Time)
		go func() {
			d, err := p.start(t.Context())
			must(t, err)
			d()
			waited <- time.Now()
		}()
		synctest.Wait()
		time.Sleep(time.Hour)
		began := time.Now()
		for _, d := range done {
			d()
		}
		if took := (<-waited).Sub(began); took > longestRest {
			t.Error("the next one waited for", took)
		}
		synctest.Wait()
	})
}
