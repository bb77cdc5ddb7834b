package requeue

import (
	"container/heap"
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// tick is how often the schedule checks the clock, and so the maximum delay of an object.
const tick = time.Second

// Schedule is a source of reconcile requests: it enqueues each object at its time. It compares
// times with the clock at every tick instead of setting timers, so that they follow the vault's
// clock.
//
// An object has at most one time, so the number of objects bounds the memory. The schedule forgets
// a time once it has passed; the next reconcile sets another. A Schedule is safe for concurrent
// use.
type Schedule struct {
	now func() time.Time

	mu    sync.Mutex
	heap  dueHeap
	entry map[types.NamespacedName]*due
}

// due is one object's time and its place in the heap.
type due struct {
	object types.NamespacedName
	at     time.Time
	index  int
}

// NewSchedule returns an empty schedule that uses the clock now.
func NewSchedule(now func() time.Time) *Schedule {
	return &Schedule{now: now, entry: make(map[types.NamespacedName]*due)}
}

// Set replaces the object's time.
func (s *Schedule) Set(object types.NamespacedName, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(object, at)
}

// Advance sets the object's time unless it has an earlier one.
func (s *Schedule) Advance(object types.NamespacedName, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d, ok := s.entry[object]; !ok || at.Before(d.at) {
		s.set(object, at)
	}
}

func (s *Schedule) set(object types.NamespacedName, at time.Time) {
	if d, ok := s.entry[object]; ok {
		d.at = at
		heap.Fix(&s.heap, d.index)
		return
	}
	d := &due{object: object, at: at}
	s.entry[object] = d
	heap.Push(&s.heap, d)
}

// Forget drops the object's time.
func (s *Schedule) Forget(object types.NamespacedName) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d, ok := s.entry[object]; ok {
		heap.Remove(&s.heap, d.index)
		delete(s.entry, object)
	}
}

// Due removes and returns the objects whose time has passed, earliest first.
func (s *Schedule) Due() []types.NamespacedName {
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	var objects []types.NamespacedName
	for len(s.heap) > 0 && !s.heap[0].at.After(now) {
		d := heap.Pop(&s.heap).(*due)
		delete(s.entry, d.object)
		objects = append(objects, d.object)
	}
	return objects
}

// Start implements source.Source. It adds due objects to the queue until ctx ends.
func (s *Schedule) Start(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	go func() {
		ticker := time.NewTicker(tick)
		defer ticker.Stop()
		for {
			for _, object := range s.Due() {
				queue.Add(reconcile.Request{NamespacedName: object})
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}()
	return nil
}

// dueHeap implements heap.Interface with the earliest time on top.
type dueHeap []*due

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *dueHeap) Push(x any) {
	d := x.(*due)
	d.index = len(*h)
	*h = append(*h, d)
}

func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	d := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return d
}
