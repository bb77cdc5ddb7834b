package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

const (
	overload   = 5               // multiple of the server's capacity
	recovery   = 5 * time.Second // time in which latency must return to normal
	loginRate  = 500             // requests per second
	openAtMost = 2048            // connections of a load that does not wait for answers
)

// An offer is an open load: it sends a fixed number of requests per second without waiting for
// answers.
type offer struct {
	rate        float64
	connections int
}

// offered counts the requests of an offer by result.
type offered struct {
	sent, good, refused atomic.Int64
}

// run sends until ctx ends. A request without a free connection is neither sent nor counted.
func (f offer) run(ctx context.Context, d *deployment, o operation) (*offered, error) {
	out := new(offered)
	failures := make([]error, f.connections)
	var wg sync.WaitGroup
	began, step := time.Now(), time.Duration(float64(f.connections)/f.rate*float64(time.Second))
	for i := range f.connections {
		wg.Go(func() {
			c, err := dial(d.replicas[i%len(d.replicas)].address)
			if err != nil {
				failures[i] = err
				return
			}
			defer c.close()
			due := began.Add(step * time.Duration(i) / time.Duration(f.connections))
			for ctx.Err() == nil {
				if wait := time.Until(due); wait > 0 {
					if pause(ctx, wait) != nil {
						return
					}
				}
				due = due.Add(step)
				if late := time.Since(due); late > 0 { // no connection was free for these
					due = due.Add(late.Truncate(step))
				}
				out.sent.Add(1)
				status, answer, err := c.do(o.next())
				switch {
				case err != nil:
					failures[i] = err
					return
				case status == o.status:
					out.good.Add(1)
				case status == http.StatusServiceUnavailable:
					out.refused.Add(1)
				default:
					failures[i] = fmt.Errorf("%s was answered with %d: %s", o.name, status, answer)
					return
				}
			}
		})
	}
	wg.Wait()
	return out, errors.Join(failures...)
}

// partOverload measures encryption under much more load than the server can handle. Server and
// client have half of the machine each, also in the calm phase before.
func (r *run) partOverload(ctx context.Context) (err error) {
	first, back, err := apart()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, back()) }()
	d, err := start(ctx, r.binary, r.dir, settings{name: "overload", signing: "entry", cores: first})
	defer func() { err = errors.Join(err, d.stop()) }()
	if err != nil {
		return err
	}
	operations, err := d.operations(ctx)
	if err != nil {
		return err
	}
	encrypt := operations[0]
	var peak, asked, good, share, client, before, during, times, recovered values
	var kept [2]values // anonymous memory, before and after
	for n := range r.roundCount {
		calm, err := r.load.run(ctx, d, encrypt)
		if err != nil {
			return err
		}
		r.progress("round %d of %d: %.0f/s in calm, overload begins", n+1, r.roundCount, calm.rate())
		quiet, err := used(d.replicas[0].pid)
		if err != nil {
			return err
		}
		f := offer{rate: overload * calm.rate(), connections: openAtMost}
		under, stop := context.WithTimeout(ctx, r.load.warm+2*r.load.length)
		began, work := time.Now(), own()
		out, err := f.run(under, d, encrypt)
		stop()
		took := time.Since(began).Seconds()
		if err != nil {
			return err
		}
		client = append(client, (own()-work).Seconds()/took/float64(cores))
		busy, err := used(d.replicas[0].pid)
		if err != nil {
			return err
		}
		peak, asked, good = append(peak, calm.rate()), append(asked, float64(out.sent.Load())/took), append(good, float64(out.good.Load())/took)
		share = append(share, good[n]/peak[n])
		before, during = append(before, float64(quiet.resident)/1e6), append(during, float64(busy.resident)/1e6)
		times = append(times, during[n]/before[n])
		kept[0], kept[1] = append(kept[0], float64(quiet.anonymous)/1e6), append(kept[1], float64(busy.anonymous)/1e6)
		waited, err := r.recover(ctx, d, encrypt, calm)
		if err != nil {
			return err
		}
		recovered = append(recovered, waited.Seconds())
		r.progress("round %d of %d: %.0f/s of %.0f/s with %.0f/s asked", n+1, r.roundCount, good[n], peak[n], asked[n])
	}
	r.print([][]string{
		{"", "measured"},
		{"requests/s in calm", peak.show("%.0f")},
		{fmt.Sprintf("asked a second, %d times that", overload), asked.show("%.0f")},
		{"answered with 200 a second", good.show("%.0f")},
		{"of those in calm", share.show("%.2f")},
		{"the client's share of the machine meanwhile", client.show("%.2f")},
		{"resident MB in calm", before.show("%.0f")},
		{"resident MB after it", during.show("%.0f")},
		{"times as much", times.show("%.2f")},
		{"of it not a file's, MB in calm", kept[0].show("%.0f")},
		{"of it not a file's, MB after it", kept[1].show("%.0f")},
		{"seconds until the median is at most 1.2 times that in calm", recovered.show("%.1f")},
	})
	return nil
}

// recover returns the time until the median latency is about what it was before.
func (r *run) recover(ctx context.Context, d *deployment, o operation, calm *sample) (time.Duration, error) {
	began := time.Now()
	for {
		s, err := load{connections: r.load.connections, length: recovery / 20}.run(ctx, d, o)
		if err != nil || s.quantile(0.5) <= calm.quantile(0.5)*12/10 || time.Since(began) > 2*recovery {
			return time.Since(began), err
		}
	}
}

// partLogins measures encryption beside log-ins. Each log-in takes a core for 20 ms.
func (r *run) partLogins(ctx context.Context) (err error) {
	d, err := start(ctx, r.binary, r.dir, settings{name: "log-ins", signing: "entry", mail: true})
	defer func() { err = errors.Join(err, d.stop()) }()
	if err != nil {
		return err
	}
	operations, err := d.operations(ctx)
	if err != nil {
		return err
	}
	encrypt := operations[0]
	const address, password = "bench@example.org", "correct horse battery staple"
	c, err := client.New("http://" + d.replicas[0].address)
	if err != nil {
		return err
	}
	if _, err := c.V2.RegisterUser(ctx, v2.RegisterRequest{Email: address, Password: password, TenantName: "bench"}); err != nil {
		return fmt.Errorf("registering: %w", err)
	}
	body := fmt.Appendf(nil, `{"email":%q,"password":%q}`, address, password)
	login := operation{name: "log-in", status: http.StatusOK, next: func() []byte { return request(http.MethodPost, "/api/v2/auth/login", "", body) }}
	var without, with, times, signed values
	for n := range r.roundCount {
		calm, err := r.load.run(ctx, d, encrypt)
		if err != nil {
			return err
		}
		beside, stop := context.WithCancel(ctx)
		var out *offered
		var failed error
		var wg sync.WaitGroup
		wg.Go(func() { out, failed = offer{loginRate, 512}.run(beside, d, login) })
		busy, err := r.load.run(ctx, d, encrypt)
		stop()
		wg.Wait()
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		ms := func(s *sample) float64 { return s.quantile(0.99).Seconds() * 1e3 }
		without, with = append(without, ms(calm)), append(with, ms(busy))
		times, signed = append(times, with[n]/without[n]), append(signed, float64(out.good.Load())/(r.load.warm+r.load.length).Seconds())
		r.progress("round %d of %d: p99 %.1f ms beside log-ins, %.1f ms without", n+1, r.roundCount, with[n], without[n])
	}
	r.print([][]string{
		{"", "measured"},
		{"p99 of encrypt, ms", without.show("%.1f")},
		{fmt.Sprintf("the same beside %d log-ins a second, ms", loginRate), with.show("%.1f")},
		{"times as long", times.show("%.2f")},
		{"log-ins that succeeded, a second", signed.show("%.0f")},
	})
	return nil
}

// apart keeps the client on the second half of the machine's cores until back is called. It returns
// the first half, which is for the server. Otherwise a client that sends more than the server can
// handle would take cores from it. In production the client is on another machine.
func apart() (first string, back func() error, err error) {
	if cores < 2 {
		return "", nil, errors.New("keeping the client apart from the server takes two cores")
	}
	half := cores / 2
	span := func(from, to int) string { return fmt.Sprintf("%d-%d", from, to-1) }
	if err := keepTo(span(half, cores)); err != nil {
		return "", nil, err
	}
	before := runtime.GOMAXPROCS(cores - half)
	return span(0, half), func() error {
		runtime.GOMAXPROCS(before)
		return keepTo(span(0, cores))
	}, nil
}

// keepTo restricts all threads of this process, and their future threads, to some cores.
func keepTo(these string) error {
	out, err := exec.Command("taskset", "--all-tasks", "--cpu-list", "--pid", these, strconv.Itoa(os.Getpid())).CombinedOutput()
	if err != nil {
		return fmt.Errorf("choosing the client's cores: %w: %s", err, out)
	}
	return nil
}
