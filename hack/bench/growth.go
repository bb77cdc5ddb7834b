package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"
)

// partGrowth compares reads from a small and a large embedded store.
func (r *run) partGrowth(ctx context.Context) (err error) {
	small, err := start(ctx, r.binary, r.dir, settings{name: "small", signing: "entry"})
	defer func() { err = errors.Join(err, small.stop()) }()
	if err != nil {
		return err
	}
	large, err := start(ctx, r.binary, r.dir, settings{name: "large", signing: "batch"})
	defer func() { err = errors.Join(err, large.stop()) }()
	if err != nil {
		return err
	}
	if err := r.fill(ctx, large); err != nil {
		return fmt.Errorf("sealing %d credentials: %w", r.credentials, err)
	}
	large.signing = "entry" // takes effect at the next start
	var started values
	for range r.roundCount {
		if err := large.restart(ctx); err != nil {
			return err
		}
		started = append(started, large.replicas[0].started.Seconds())
	}
	if err := small.restart(ctx); err != nil {
		return err
	}
	only := r.only
	defer func() { r.only = only }()
	r.only = []string{"unseal", "list"}
	all, err := r.rounds(ctx, []*deployment{small, large})
	if err != nil {
		return err
	}
	rows := [][]string{{"operation", "credentials", "requests/s", "p50 ms", "p99 ms", "p99 against the small store's", "resident MB", "of it not a file's"}}
	for i, s := range all {
		against, count := "", fmt.Sprint(poolSize)
		if s.deployment == large {
			against, count = s.p99.over(all[i-len(all)/2].p99).show("%.2f"), fmt.Sprint(r.credentials)
		}
		u, err := used(s.deployment.replicas[0].pid)
		if err != nil {
			return err
		}
		rows = append(rows, []string{
			s.operation.name, count, s.rate.show("%.0f"), s.median.show("%.1f"), s.p99.show("%.1f"), against,
			s.resident.show("%.0f"), fmt.Sprintf("%.0f", float64(u.anonymous)/1e6),
		})
	}
	r.print(rows)
	r.note("A start on %d credentials takes %s s until it serves. Resident memory has the pages of the database file that the kernel keeps mapped, "+
		"which it takes back when it needs them.", r.credentials, started.show("%.2f"))
	return nil
}

// fill seals credentials until the wanted number is reached.
func (r *run) fill(ctx context.Context, d *deployment) error {
	operations, err := d.operations(ctx)
	if err != nil {
		return err
	}
	var left atomic.Int64
	left.Store(int64(r.credentials - poolSize))
	seal := operations[4]
	next := seal.next
	ctx, full := context.WithCancel(ctx)
	defer full()
	seal.next = func() []byte {
		if left.Add(-1) == 0 {
			full()
		}
		return next()
	}
	for left.Load() > 0 {
		_, err := load{connections: r.load.connections, length: time.Minute}.run(ctx, d, seal)
		if err != nil && left.Load() > 0 {
			return err
		}
		r.progress("%d credentials are left to be sealed", max(0, left.Load()))
	}
	return nil
}

// restart stops a deployment of one replica and starts it again.
func (d *deployment) restart(ctx context.Context) error {
	if err := d.stop(); err != nil {
		return err
	}
	if err := d.add(ctx); err != nil {
		return err
	}
	c, err := dial(d.replicas[0].address)
	if err != nil {
		return err
	}
	defer c.close()
	status, answer, err := c.do(request(http.MethodGet, "/readyz", d.key, nil))
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("the server is not ready: %d: %s", status, answer)
	}
	return err
}
