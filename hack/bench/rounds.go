package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// rounds measures every operation once per round on all deployments in turn. If the machine becomes
// slower over time, that affects all of them alike.
func (r *run) rounds(ctx context.Context, deployments []*deployment) ([]*series, error) {
	var all []*series
	for _, d := range deployments {
		operations, err := d.operations(ctx)
		if err != nil {
			return nil, fmt.Errorf("preparing %s: %w", d.name, err)
		}
		for _, o := range operations {
			if slices.Contains(r.only, o.name) {
				all = append(all, &series{deployment: d, operation: o})
			}
		}
	}
	for n := range r.roundCount {
		if err := r.measurePrimitives(); err != nil {
			return nil, err
		}
		for _, s := range all {
			r.progress("round %d of %d: %s of %s begins", n+1, r.roundCount, s.operation.name, s.deployment.name)
			sample, err := r.load.run(ctx, s.deployment, s.operation)
			if err != nil {
				return nil, fmt.Errorf("driving %s of %s: %w", s.operation.name, s.deployment.name, err)
			}
			s.add(sample, r.alone[n], r.together[n])
			r.progress("round %d of %d: %s of %s: %.0f/s", n+1, r.roundCount, s.operation.name, s.deployment.name, sample.rate())
		}
	}
	return all, nil
}

// measurePrimitives adds a round of costs, measured on one core and on all cores.
func (r *run) measurePrimitives() error {
	const each = 150 * time.Millisecond
	alone, err := r.bench.measure(each, 1)
	together, err2 := r.bench.measure(each, cores)
	r.alone, r.together = append(r.alone, alone), append(r.together, together)
	return errors.Join(err, err2)
}

// series is the result of all rounds for one operation of one deployment.
type series struct {
	deployment *deployment
	operation  operation

	rate, median, p99, tail values // requests per second, ms, ms, and 99th percentile as a multiple of the median
	cpu, share, client      values // servers' µs per request; share of it in primitives; client's share of the machine
	ratio, togetherRatio    values
	resident                values // MB
	syncs                   float64
	refused                 int
}

func (s *series) add(sample *sample, alone, together costs) {
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
	s.rate = append(s.rate, sample.rate())
	s.median = append(s.median, ms(sample.quantile(0.5)))
	s.p99 = append(s.p99, ms(sample.quantile(0.99)))
	s.tail = append(s.tail, sample.quantile(0.99).Seconds()/sample.quantile(0.5).Seconds())
	s.cpu = append(s.cpu, ms(sample.perRequest())*1e3)
	s.client = append(s.client, sample.clientShare())
	if len(s.operation.costs) > 0 {
		s.share = append(s.share, alone.of(s.operation).Seconds()/sample.perRequest().Seconds())
		s.ratio = append(s.ratio, sample.rate()/alone.limit(s.operation))
		s.togetherRatio = append(s.togetherRatio, sample.rate()/together.limit(s.operation))
	}
	s.refused += sample.refused
	s.resident = append(s.resident, float64(sample.resident)/1e6)
}

// countSyncs runs every operation against a separate deployment under strace, which records every
// sync. With seccomp strace stops only these calls, so about as many requests share a commit as
// without it.
func (r *run) countSyncs(ctx context.Context, signing string) (perRequest map[string]float64, err error) {
	if !r.syncs {
		return nil, nil
	}
	if _, err := exec.LookPath("strace"); err != nil {
		r.note("Syncs were not counted: strace is not installed.")
		return nil, nil
	}
	d, err := start(ctx, r.binary, r.dir, settings{name: "traced-" + signing, signing: signing, traced: true})
	defer func() { err = errors.Join(err, d.stop()) }()
	if err != nil {
		return nil, err
	}
	operations, err := d.operations(ctx)
	if err != nil {
		return nil, err
	}
	perRequest = make(map[string]float64)
	for _, o := range operations {
		before, err := syncs(d.replicas[0].trace)
		if err != nil {
			return nil, err
		}
		short := load{connections: r.load.connections, length: r.load.length / 2}
		sample, err := short.run(ctx, d, o)
		if err != nil {
			return nil, err
		}
		after, err := syncs(d.replicas[0].trace)
		if err != nil {
			return nil, err
		}
		perRequest[o.name] = float64(after-before) / float64(sample.requests)
	}
	return perRequest, nil
}

// partEmbedded measures the operations on the embedded store, with entries signed one by one and in
// batches.
func (r *run) partEmbedded(ctx context.Context) (err error) {
	var deployments []*deployment
	defer func() {
		for _, d := range deployments {
			err = errors.Join(err, d.stop())
		}
	}()
	for _, signing := range r.signing {
		d, err := start(ctx, r.binary, r.dir, settings{name: "bolt-" + signing, signing: signing, profiled: r.load.profiles != ""})
		deployments = append(deployments, d)
		if err != nil {
			return err
		}
	}
	all, err := r.rounds(ctx, deployments)
	if err != nil {
		return err
	}
	for _, signing := range r.signing {
		counted, err := r.countSyncs(ctx, signing)
		if err != nil {
			return fmt.Errorf("counting syncs: %w", err)
		}
		for _, s := range all {
			if s.deployment.signing == signing {
				s.syncs = counted[s.operation.name]
			}
		}
	}
	var operations []operation
	for _, s := range all {
		if s.deployment == deployments[0] {
			operations = append(operations, s.operation)
		}
	}
	r.printPrimitives(operations)
	for _, d := range deployments {
		r.printSeries("Embedded store, `audit.signing: "+d.signing+"`", d, all)
	}
	if len(deployments) == 2 {
		r.printBatch(all)
	}
	return r.guard(all)
}

func (r *run) printPrimitives(operations []operation) {
	rows := [][]string{{"primitive", "what it is", "alone, µs", "on all cores, µs"}}
	for p := range primitives {
		var alone, together values
		for i := range r.alone {
			alone, together = append(alone, r.alone[i][p].Seconds()*1e6), append(together, r.together[i][p].Seconds()*1e6)
		}
		rows = append(rows, []string{p.String(), p.contains(), alone.show("%.0f"), together.show("%.0f")})
	}
	r.print(rows)
	r.note("The limit of an operation is %d cores divided by the sum of its primitives, alone: %s. In batches the signature of an entry is left out.", cores, costsOf(operations))
}

func (r *run) printSeries(title string, d *deployment, all []*series) {
	fmt.Fprintf(r.out, "\n### %s\n\n", title)
	rows := [][]string{{"operation", "requests/s", "of the limit", "of the limit on all cores", "p50 ms", "p99 ms", "p99 ÷ p50",
		"server µs a request", "of which primitives", "client's share", "syncs a request", "resident MB"}}
	for _, s := range all {
		if s.deployment != d {
			continue
		}
		synced := "–"
		if s.syncs > 0 {
			synced = fmt.Sprintf("%.3f", s.syncs)
		}
		rows = append(rows, []string{
			s.operation.name, s.rate.show("%.0f"), s.ratio.show("%.2f"), s.togetherRatio.show("%.2f"), s.median.show("%.1f"), s.p99.show("%.1f"),
			s.tail.show("%.1f"), s.cpu.show("%.0f"), s.share.show("%.2f"), s.client.show("%.2f"), synced, s.resident.show("%.0f"),
		})
	}
	r.print(rows)
	for _, s := range all {
		if s.deployment == d && s.refused > 0 {
			r.note("%d requests of %s were refused with 503.", s.refused, s.operation.name)
		}
	}
}

// printBatch compares the two ways to sign entries round by round.
func (r *run) printBatch(all []*series) {
	fmt.Fprintf(r.out, "\n### Entries signed in batches against one by one\n\n")
	rows := [][]string{{"operation", "times as many requests"}}
	for _, batch := range all {
		for _, entry := range all {
			if batch.deployment.signing != "batch" || entry.deployment.signing != "entry" || batch.operation.name != entry.operation.name {
				continue
			}
			var times values
			for i := range batch.rate {
				times = append(times, batch.rate[i]/entry.rate[i])
			}
			rows = append(rows, []string{batch.operation.name, times.show("%.2f")})
		}
	}
	r.print(rows)
}

// guard fails if an operation spends too much time outside its primitives. It compares processor
// times, which are comparable on a shared machine.
func (r *run) guard(all []*series) error {
	var wrong []error
	for _, s := range all {
		if least, ok := r.least[s.operation.name]; ok && s.deployment.signing == "entry" && s.share.median() < least {
			wrong = append(wrong, fmt.Errorf("%s spends %.2f of the server's time on its primitives, less than %.2f: profile what was added", s.operation.name, s.share.median(), least))
		}
	}
	return errors.Join(wrong...)
}

// costsOf describes the primitives that make up the limit of each operation.
func costsOf(operations []operation) string {
	var lines []string
	for _, o := range operations {
		var names []string
		for _, p := range o.costs {
			names = append(names, p.String())
		}
		lines = append(lines, o.name+" = "+strings.Join(names, " + "))
	}
	return strings.Join(lines, "; ")
}
