package chaos

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"
)

// A history outlives the process, which is killed repeatedly while clients share a few credentials.
func TestHistoriesAreLinearisableAcrossKills(t *testing.T) {
	beside(t)
	kills := 6
	if long() {
		kills = 60
	}
	out := transcript(t)
	d := newEmbedded(t)
	var server atomic.Pointer[process]
	server.Store(d.start())
	d.admit(server.Load())
	for range kills / 6 { // bounds the length of a history and so the time of its check
		c := d.clients(8, server.Load)
		c.start(1 << 20)
		for range 6 {
			enough := c.acknowledged.Load() + 20 + rand.Int64N(100)
			waitFor(t, func() bool { return c.acknowledged.Load() > enough })
			server.Load().kill()
			server.Store(d.start())
		}
		before := c.acknowledged.Load()
		waitFor(t, func() bool { return c.acknowledged.Load() > before+50 })
		c.end(d.over(server.Load, func(err error) { t.Error(err) }))
		fmt.Fprintf(out, "six kills: %s\n", c.history.check(t))
	}
	d.accounted(server.Load())
	server.Load().kill()
	entries, err := d.verify()
	must(t, err)
	fmt.Fprintf(out, "%d kills; audit verify: %d entries hold\n", kills, entries)
}

// clients returns n clients of the servers.
func (d *deployment) clients(n int, servers ...func() *process) *clients {
	c := &clients{history: newHistory()}
	for i := range n {
		c.asks = append(c.asks, d.over(servers[i%len(servers)], func(err error) { d.t.Error(err) }))
	}
	return c
}

// patience is how long a test waits for what takes a second: the machine may be busy.
const patience = 5 * time.Minute

// waitFor waits until so returns true.
func waitFor(t testing.TB, so func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !so(); {
		if time.Now().After(end) {
			t.Fatal("it has not become so in ", patience)
		}
		time.Sleep(time.Millisecond)
	}
}
