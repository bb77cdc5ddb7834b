package audit

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// Refused records the refusal of a stranger, unless one of the same source and
// type was recorded in this minute already: in whichever tenant's history, since
// otherwise the time it takes would tell which tenant has an account. To the
// source belongs what the stranger asked for, where one address may not hide what
// it tries on another. That an account is slowed down is recorded by itself: it is
// preceded by refusals in the same minute.
func (l *Log) Refused(ctx context.Context, source string, e Event) error {
	group := string(e.Type)
	if e.Attributes[AttributeReason] == ReasonSlowedDown {
		group += " " + ReasonSlowedDown
	}
	if !l.strangers.first(group, source, l.now()) {
		return nil
	}
	return l.Record(ctx, e)
}

// Limited records that a known principal was over its rate, once in a minute.
func (l *Log) Limited(ctx context.Context, p authz.Principal) error {
	if !l.limited.first(string(p.Tenant), p.ID, l.now()) {
		return nil
	}
	return l.Record(ctx, Event{
		Type: RateLimited, Outcome: Denied, Principal: p, Resource: Resource{Type: InterfaceResource},
	})
}

// Repeated records an event of which one says as much as many, unless one like it
// was recorded in this minute: of the same principal and pod, type, outcome and
// attributes.
func (l *Log) Repeated(ctx context.Context, e Event) error {
	p := e.Principal
	who := string(p.Tenant) + " " + p.ID + " " + p.Pod
	what := fmt.Sprint(e.Type, e.Outcome, e.Attributes)
	if !l.repeated.first(who, what, l.now()) {
		return nil
	}
	err := l.Record(ctx, e)
	if err != nil {
		l.repeated.forget(who, what)
	}
	return err
}

// AttemptOnce is [Log.Attempt], once in a minute for a principal, an action and a
// reason.
func (l *Log) AttemptOnce(ctx context.Context, p authz.Principal, a authz.Action, o Outcome, reason string) error {
	group := "attempt/" + string(p.Tenant) + "/" + string(a) + "/" + reason
	if !l.limited.first(group, p.ID, l.now()) {
		return nil
	}
	err := l.Attempt(ctx, p, a, o, reason)
	if err != nil {
		l.limited.forget(group, p.ID)
	}
	return err
}

// refusals decides which of them are recorded: in each group the first of every
// source in a minute, and not more than most. For strangers that keeps one with
// many addresses from filling the log, and one that is refused in one way from
// hiding what it tries in another; principals are known, and have no such bound.
// Every refusal is counted by the request metric.
type refusals struct {
	most int // 0: no bound

	mu       sync.Mutex
	minute   time.Time
	recorded map[string]map[string]bool // in this minute, by group and source
}

// maxStrangers are recorded in a minute.
const maxStrangers = 64

// first reports whether the refusal is to be recorded.
func (r *refusals) first(group, source string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if minute := now.Truncate(time.Minute); !minute.Equal(r.minute) {
		r.minute, r.recorded = minute, make(map[string]map[string]bool)
	}
	sources := r.recorded[group]
	if sources[source] || r.most > 0 && len(sources) == r.most {
		return false
	}
	if sources == nil {
		sources = make(map[string]bool)
		r.recorded[group] = sources
	}
	sources[source] = true
	return true
}

// forget has the next one recorded, because this one could not be.
func (r *refusals) forget(group, source string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.recorded[group], source)
}

// Source returns what stands for the host at an address: an IPv4 address as it
// is, an IPv6 address's network of 64 bits, which is what one host commonly has,
// and anything else as it is.
func Source(address string) string {
	if ip, err := netip.ParseAddr(address); err == nil && ip.Is6() && !ip.Is4In6() {
		network, _ := ip.Prefix(64) // an IPv6 address has one
		return network.Masked().String()
	}
	return address
}
