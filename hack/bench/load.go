package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A sample holds the results of one operation over some time.
type sample struct {
	requests  int
	refused   int // answered with 503
	elapsed   time.Duration
	latencies []time.Duration // sorted
	server    time.Duration   // processor time of all replicas
	client    time.Duration   // processor time of the load itself
	resident  int64           // bytes, of all replicas, at the end
}

func (s *sample) rate() float64 { return float64(s.requests) / s.elapsed.Seconds() }

// quantile returns the latency that a share q of the requests did not exceed.
func (s *sample) quantile(q float64) time.Duration {
	if len(s.latencies) == 0 {
		return 0
	}
	return s.latencies[min(len(s.latencies)-1, int(q*float64(len(s.latencies))))]
}

// perRequest returns the servers' processor time per request.
func (s *sample) perRequest() time.Duration { return s.server / time.Duration(max(1, s.requests)) }

// clientShare returns the share of the machine that the load itself used.
func (s *sample) clientShare() float64 {
	return s.client.Seconds() / s.elapsed.Seconds() / float64(cores)
}

// A load is closed: each connection sends its next request once it has the answer to the last one.
type load struct {
	connections  int
	warm, length time.Duration
	profiles     string // folder for the profile of each operation on a deployment that is profiled
}

// run sends an operation to the replicas in turn. It counts answers with 503. Any other unexpected
// answer is an error.
func (l load) run(ctx context.Context, d *deployment, o operation) (*sample, error) {
	var measuring, over atomic.Bool
	workers := make([]struct {
		latencies []time.Duration
		refused   int
		err       error
	}, l.connections)
	var wg sync.WaitGroup
	connections := make([]*connection, l.connections)
	for i := range connections {
		c, err := dial(d.replicas[i%len(d.replicas)].address)
		if err != nil {
			return nil, fmt.Errorf("connecting: %w", err)
		}
		defer c.close()
		connections[i] = c
	}
	for i, c := range connections {
		w := &workers[i]
		wg.Go(func() {
			for !over.Load() {
				request, began := o.next(), time.Now()
				status, answer, err := c.do(request)
				took := time.Since(began)
				if err == nil && status == http.StatusServiceUnavailable {
					w.refused++
					continue
				}
				if err == nil && status != o.status {
					err = fmt.Errorf("%s was answered with %d: %s", o.name, status, answer)
				}
				if err != nil {
					w.err = err
					over.Store(true)
					return
				}
				if measuring.Load() && !over.Load() { // the answer came within the measured time
					w.latencies = append(w.latencies, took)
				}
			}
		})
	}
	profiled := make(chan error, 1)
	go func() { profiled <- l.profile(ctx, d, o) }()
	s, err := l.watch(ctx, d, &measuring, &over)
	over.Store(true)
	wg.Wait()
	err = errors.Join(err, <-profiled)
	for i := range workers {
		s.latencies = append(s.latencies, workers[i].latencies...)
		s.refused += workers[i].refused
		err = errors.Join(err, workers[i].err)
	}
	slices.Sort(s.latencies)
	s.requests = len(s.latencies)
	return s, err
}

// profile writes what the server computes meanwhile, if that is wanted.
func (l load) profile(ctx context.Context, d *deployment, o operation) error {
	if !d.profiled {
		return nil
	}
	if err := pause(ctx, l.warm); err != nil {
		return err
	}
	return d.replicas[0].profile(ctx, filepath.Join(l.profiles, d.name+"-"+o.name+".pprof"), l.length)
}

// watch measures from the end of the warm-up to the end of the load.
func (l load) watch(ctx context.Context, d *deployment, measuring, over *atomic.Bool) (*sample, error) {
	s := new(sample)
	if err := pause(ctx, l.warm); err != nil {
		return s, err
	}
	server, _, err := d.used()
	if err != nil {
		return s, err
	}
	client, began := own(), time.Now()
	measuring.Store(true)
	err = pause(ctx, l.length)
	over.Store(true)
	s.elapsed, s.client = time.Since(began), own()-client
	after, resident, err2 := d.used()
	s.server, s.resident = after-server, resident
	return s, errors.Join(err, err2)
}

// used returns the processor time and memory that all replicas have used.
func (d *deployment) used() (cpu time.Duration, resident int64, err error) {
	for _, r := range d.replicas {
		if r.pid == 0 { // a peer's process is not known
			continue
		}
		u, err := used(r.pid)
		if err != nil {
			return 0, 0, err
		}
		cpu, resident = cpu+u.cpu, resident+u.resident
	}
	return cpu, resident, nil
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
