package fair

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

const grace = 5 * time.Second

// borrowing is a caller that has a loan until it is called in.
type borrowing struct {
	*Loan[string]
	calledIn chan struct{}
}

func (b borrowing) wasCalledIn() bool {
	select {
	case <-b.calledIn:
		return true
	default:
		return false
	}
}

// lend fails the test if there are no units within a second. A loan that is called in is released.
func lend(t *testing.T, p *Pool[string], key string, units int64) borrowing {
	t.Helper()
	b, err := tryLend(t, p, key, units)
	if err != nil {
		t.Fatalf("%s got nothing: %v", key, err)
	}
	return b
}

func tryLend(t *testing.T, p *Pool[string], key string, units int64) (borrowing, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	b := borrowing{calledIn: make(chan struct{})}
	var err error
	if b.Loan, err = p.Acquire(ctx, key, units, func() { close(b.calledIn) }); err != nil {
		return b, err
	}
	ended := t.Context()
	go func() {
		select {
		case <-b.calledIn:
			b.Release()
		case <-ended.Done():
		}
	}()
	return b, nil
}

func TestKeysThatHoldEverythingGiveWayToAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool[string](8, grace)
		var a, b []borrowing
		for range 4 {
			a, b = append(a, lend(t, p, "a", 1)), append(b, lend(t, p, "b", 1))
		}
		for range 2 { // until all three have as many, but for two that cannot be shared
			lend(t, p, "c", 1)
		}
		called := 0
		for _, one := range append(a, b...) {
			if one.wasCalledIn() {
				called++
			}
		}
		if called != 2 || !a[0].wasCalledIn() || !b[0].wasCalledIn() {
			t.Errorf("%d loans were called in, not the longest of both", called)
		}
		if _, err := tryLend(t, p, "c", 1); !errors.Is(err, context.DeadlineExceeded) {
			t.Error("a key has more than its share:", err)
		}
	})
}

func TestALoanIsCalledInForItsOwnKeyOnlyAfterTheGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool[string](2, grace)
		slow, settled := lend(t, p, "a", 1), lend(t, p, "a", 1)
		if !settled.Settle() {
			t.Error("called in without need")
		}
		if _, err := tryLend(t, p, "a", 1); err == nil || slow.wasCalledIn() {
			t.Error("called in at once:", err)
		}
		time.Sleep(grace)
		lend(t, p, "a", 1)
		if !slow.wasCalledIn() || slow.Settle() || settled.wasCalledIn() {
			t.Error("called in:", slow.wasCalledIn(), settled.wasCalledIn())
		}
	})
}

func TestASettledLoanIsCalledInOnlyOnceItIsOfferedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool[string](4, grace)
		held := lend(t, p, "a", 4)
		if !held.Settle() {
			t.Error("called in without need")
		}
		time.Sleep(2 * grace)
		if _, err := tryLend(t, p, "b", 1); err == nil {
			t.Fatal("a settled loan was called in")
		}
		offered := make(chan struct{})
		began := time.Now()
		held.Offer(grace/100, func() { close(offered); go held.Release() })
		lend(t, p, "b", 1)
		<-offered
		if took := time.Since(began); took != grace/100 {
			t.Errorf("called in after %v", took)
		}
		if held.Settle() {
			t.Error("a loan that was called in can be settled")
		}
	})
}

func TestTheKeyThatHasLeastIsServedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool[string](2, grace)
		first, second := lend(t, p, "a", 1), lend(t, p, "a", 1)
		if !first.Settle() || !second.Settle() {
			t.Error("called in without need")
		}
		order := make(chan string, 3)
		for _, key := range []string{"a", "a", "c"} {
			go func() {
				l, err := p.Acquire(t.Context(), key, 1, func() {})
				if err != nil {
					t.Error(err)
					return
				}
				order <- key
				l.Settle()
				l.Release()
			}()
			synctest.Wait()
		}
		first.Release()
		if key := <-order; key != "c" {
			t.Errorf("%s was served first", key)
		}
		<-order
		<-order
		second.Release()
		if len(p.keys) != 0 || p.free != 2 || p.coming != 0 {
			t.Errorf("%d keys are remembered, %d units are free and %d come", len(p.keys), p.free, p.coming)
		}
	})
}

func TestWhoeverGivesUpLeavesNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool[string](2, grace)
		held := lend(t, p, "a", 2)
		held.Settle()
		if _, err := tryLend(t, p, "b", 2); err == nil {
			t.Fatal("more than there is")
		}
		if _, err := tryLend(t, p, "b", 3); err == nil {
			t.Fatal("more than there ever is")
		}
		held.Release()
		if len(p.keys) != 0 || p.free != 2 {
			t.Errorf("%d keys are remembered, %d units are free", len(p.keys), p.free)
		}
	})
}
