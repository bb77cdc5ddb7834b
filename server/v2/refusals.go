package v2

import (
	"net/netip"
	"sync"
	"time"
)

// refusals decides which requests of strangers are recorded: the first of each
// source in a minute, and not more than maxSources in all, so that neither a
// stranger nor one with many addresses fills the log. A source is an IPv4
// address, or an IPv6 network of 64 bits, which is what one host commonly has.
// Every refusal is counted by the request metric.
type refusals struct {
	mu      sync.Mutex
	minute  time.Time
	sources map[string]bool // recorded in this minute
}

const maxSources = 16

// first reports whether the refusal is to be recorded.
func (r *refusals) first(source string, now time.Time) bool {
	if ip, err := netip.ParseAddr(source); err == nil && ip.Is6() && !ip.Is4In6() {
		network, _ := ip.Prefix(64) // an IPv6 address has one
		source = network.Masked().String()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if minute := now.Truncate(time.Minute); !minute.Equal(r.minute) {
		r.minute, r.sources = minute, make(map[string]bool)
	}
	if r.sources[source] || len(r.sources) == maxSources {
		return false
	}
	r.sources[source] = true
	return true
}
