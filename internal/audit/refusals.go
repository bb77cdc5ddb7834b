package audit

import (
	"context"
	"net/netip"
	"sync"
	"time"
)

// Refused records the refusal of a stranger, or of a principal over its limit,
// unless one of the same source was recorded in this minute already.
func (l *Log) Refused(ctx context.Context, source string, e Event) error {
	if !l.refusals.first(source, l.now()) {
		return nil
	}
	return l.Record(ctx, e)
}

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
	source = Source(source)
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

// Source returns what stands for the host at an address: an IPv4 address as it
// is, an IPv6 address's network of 64 bits, and anything else as it is.
func Source(address string) string {
	if ip, err := netip.ParseAddr(address); err == nil && ip.Is6() && !ip.Is4In6() {
		network, _ := ip.Prefix(64) // an IPv6 address has one
		return network.Masked().String()
	}
	return address
}
