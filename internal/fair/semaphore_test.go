package fair

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

// attempt returns the error of a caller that waits until nothing else can happen.
func attempt(t *testing.T, s *Semaphore[string], key string) error {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() { answer <- s.Acquire(ctx, key) }()
	synctest.Wait()
	cancel()
	return <-answer
}

func TestCallersOfOneKeyDoNotKeepOthersOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSemaphore[string](3, 2)
		for range 2 {
			if err := attempt(t, s, "a"); err != nil {
				t.Fatal("within the share of a key:", err)
			}
		}
		if err := attempt(t, s, "a"); !errors.Is(err, context.Canceled) {
			t.Error("a key has more than its share:", err)
		}
		if err := attempt(t, s, "b"); err != nil {
			t.Error("another key is kept out:", err)
		}
		if err := attempt(t, s, "c"); !errors.Is(err, context.Canceled) {
			t.Error("more callers than in total:", err)
		}
		s.Release("a")
		if err := attempt(t, s, "c"); err != nil {
			t.Error("what was released is not free:", err)
		}
		for _, key := range []string{"a", "b", "c"} {
			s.Release(key)
		}
		if len(s.keys) != 0 {
			t.Errorf("%d keys are remembered of which nobody is there", len(s.keys))
		}
	})
}

func TestCallersOfOneKeyGoOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSemaphore[string](0, 1)
		for _, key := range []string{"a", "b", "c"} {
			if err := attempt(t, s, key); err != nil {
				t.Fatalf("%s waits for the callers of other keys: %v", key, err)
			}
		}
		next := make(chan error)
		go func() { next <- s.Acquire(t.Context(), "a") }()
		synctest.Wait()
		select {
		case err := <-next:
			t.Fatal("two of one key go on at a time:", err)
		default:
		}
		s.Release("a")
		if err := <-next; err != nil {
			t.Error("the next caller does not go on:", err)
		}
		for _, key := range []string{"a", "b", "c"} {
			s.Release(key)
		}
		if len(s.keys) != 0 {
			t.Errorf("%d keys are remembered of which nobody is there", len(s.keys))
		}
	})
}
