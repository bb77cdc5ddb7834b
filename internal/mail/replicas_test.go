package mail

import (
	"context"
	"errors"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/machine"
)

// at returns the outbox of another replica, whose clock is ahead by the given time.
func (f *fixture) at(ahead time.Duration) *fixture {
	other := &fixture{t: f.t, store: f.store, keys: f.keys, log: new(machine.Log)}
	other.outbox = NewOutbox(f.store, f.keys, func() time.Time { return f.now().Add(ahead) })
	return other
}

// Several replicas empty one outbox and send each mail once, even if their clocks are minutes
// apart.
func TestReplicasSendEachMailOnce(t *testing.T) {
	f := newFixture(t)
	want := make(map[string]int)
	for range 3 * passSize {
		want[f.post(Message{Kind: Invite, To: recipient, Token: token})] = 1
	}
	var mu sync.Mutex
	sent := make(map[string]int)
	transport := sendFunc(func(_ context.Context, e Envelope) error {
		mu.Lock()
		defer mu.Unlock()
		sent[e.ID]++
		return nil
	})
	var wg sync.WaitGroup
	for _, ahead := range []time.Duration{0, 3 * time.Minute, -3 * time.Minute} {
		c := f.at(ahead).courier(transport)
		wg.Go(func() {
			for f.stored() > 0 {
				_, err := c.pass(t.Context())
				must(t, err)
			}
		})
	}
	wg.Wait()
	if !maps.Equal(sent, want) {
		t.Errorf("%v", sent)
	}
	if n := f.attempts(); n != 0 {
		t.Error(n, "rows are left of mails that are sent")
	}
}

func (f *fixture) attempts() (n int) {
	f.t.Helper()
	must(f.t, f.store.View(f.t.Context(), func(r store.Reader) error {
		return r.Scan(store.Prefix([]byte(attemptPrefix)), func(_, _ []byte) bool { n++; return true })
	}))
	return n
}

// While one replica is about to send a mail no other replica sends it, however far ahead its clock
// is. When the first one has been gone for longer than an attempt takes, another sends it.
func TestAMailOfADeadReplicaIsSentByAnother(t *testing.T) {
	f := newFixture(t)
	id := f.post(Message{Kind: Invite, To: recipient, Token: token})
	var sent []string
	other := f.at(time.Hour).courier(sendFunc(func(_ context.Context, e Envelope) error {
		sent = append(sent, e.ID)
		return nil
	}))
	died := errors.New("the process is killed")
	func() {
		defer func() { _ = recover() }()
		due, _, err := f.courier(nil).due(t.Context())
		must(t, err)
		c := f.courier(sendFunc(func(context.Context, Envelope) error { panic(died) }))
		c.deliver(t.Context(), due[0])
	}()
	wait, err := other.pass(t.Context())
	must(t, err)
	if wait != claimTime || len(sent) != 0 {
		t.Fatalf("looks again in %v, sent %v", wait, sent)
	}
	f.advance(claimTime - time.Millisecond)
	if _, err := other.pass(t.Context()); err != nil || len(sent) != 0 {
		t.Fatal("sent beside whoever claimed it:", sent, err)
	}
	f.advance(time.Millisecond)
	if _, err := other.pass(t.Context()); err != nil || len(sent) != 1 || sent[0] != id || f.stored() != 0 {
		t.Fatal(sent, f.stored(), err)
	}
}

// After a failed attempt, all replicas wait together.
func TestReplicasTogetherWaitAfterAFailure(t *testing.T) {
	f := newFixture(t)
	f.post(Message{Kind: Invite, To: recipient, Token: token})
	tries := 0
	refusing := sendFunc(func(context.Context, Envelope) error {
		tries++
		return errors.New("connection refused")
	})
	couriers := []*courier{f.at(0).courier(refusing), f.at(0).courier(refusing), f.at(0).courier(refusing)}
	for _, c := range couriers {
		c.restarted = false
	}
	for n, wait := range []time.Duration{1, 2, 4, 8, 16, 32} {
		for _, c := range couriers {
			_, err := c.pass(t.Context())
			must(t, err)
		}
		if tries != n+1 {
			t.Fatalf("%d tries, want %d", tries, n+1)
		}
		f.advance(wait * time.Second)
	}
}

// A Run that ends in the middle of an attempt releases the mail to the others at once.
func TestARunThatEndsReleasesItsMails(t *testing.T) {
	f := newFixture(t)
	f.post(Message{Kind: Invite, To: recipient, Token: token})
	ctx, stop := context.WithCancel(t.Context())
	must(t, f.outbox.Run(ctx, sendFunc(func(ctx context.Context, _ Envelope) error {
		stop()
		<-ctx.Done()
		return ctx.Err()
	}), f.options()))
	sent := 0
	_, err := f.at(0).courier(sendFunc(func(context.Context, Envelope) error { sent++; return nil })).pass(t.Context())
	must(t, err)
	if sent != 1 || f.stored() != 0 {
		t.Fatal(sent, f.stored())
	}
}
