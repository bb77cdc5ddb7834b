package requeue

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

func object(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: fmt.Sprint("object-", i)}
}

func TestScheduleGivesOutWhatIsDueInOrder(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	now := start
	s := NewSchedule(func() time.Time { return now })

	const n = 500
	at := make(map[types.NamespacedName]time.Time)
	for i := range 4 * n { // most objects are set more than once: the last time counts
		o := object(i % n)
		at[o] = start.Add(time.Duration(rand.IntN(3600)) * time.Second)
		s.Set(o, at[o])
	}
	for i := range n / 5 {
		s.Forget(object(5 * i))
		s.Forget(object(5 * i)) // again, which is nothing
		delete(at, object(5*i))
	}

	var last time.Time
	for ; !now.After(start.Add(time.Hour)); now = now.Add(time.Minute) {
		for _, o := range s.Due() {
			due, ok := at[o]
			if !ok {
				t.Fatalf("%v was given out though it was forgotten or given out before", o)
			}
			if due.Before(last) || due.After(now) || now.Sub(due) >= time.Minute {
				t.Fatalf("%v, due at %v, was given out at %v after one due at %v", o, due, now, last)
			}
			last = due
			delete(at, o)
		}
	}
	if len(at) != 0 || len(s.entry) != 0 || len(s.heap) != 0 {
		t.Errorf("%d objects were never given out; %d entries and %d heap places are left", len(at), len(s.entry), len(s.heap))
	}
}

func TestScheduleEnqueuesWithinASecondOfTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
		s := NewSchedule(time.Now)
		begin := time.Now()
		s.Set(object(1), begin.Add(3*time.Hour))
		s.Set(object(2), begin.Add(time.Hour))
		s.Set(object(3), begin.Add(-time.Hour))
		if err := s.Start(ctx, queue); err != nil {
			t.Fatal(err)
		}
		var order []types.NamespacedName
		for _, want := range []time.Duration{0, time.Hour, 3 * time.Hour} {
			request, _ := queue.Get()
			queue.Done(request)
			order = append(order, request.NamespacedName)
			if late := time.Since(begin.Add(want)); late < 0 || late > tick {
				t.Errorf("%v came %v after its time", request, late)
			}
		}
		if want := []types.NamespacedName{object(3), object(2), object(1)}; !slices.Equal(order, want) {
			t.Errorf("the order is %v, want %v", order, want)
		}
		cancel()
		queue.ShutDown()
	})
}
