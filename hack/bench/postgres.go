package main

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/latticekeep/latticekeep/test/pgtest"
)

// mostReplicas is the largest number of replicas to measure on one database.
const mostReplicas = 4

// partPostgres compares one to four replicas on one PostgreSQL with the embedded store.
func (r *run) partPostgres(ctx context.Context) (err error) {
	db, err := pgtest.Run(ctx)
	if err != nil {
		return fmt.Errorf("starting PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, db.Stop()) }()
	embedded, err := start(ctx, r.binary, r.dir, settings{name: "beside-postgres", signing: "entry"})
	defer func() { err = errors.Join(err, embedded.stop()) }()
	if err != nil {
		return err
	}
	shared, err := start(ctx, r.binary, r.dir, settings{name: "postgres", signing: "entry", store: db.URL()})
	defer func() { err = errors.Join(err, shared.stop()) }()
	if err != nil {
		return err
	}
	for range mostReplicas - 1 {
		if err := shared.add(ctx); err != nil {
			return err
		}
	}
	// All replicas always run. Only the number that receives requests differs.
	deployments := []*deployment{embedded}
	for n := range mostReplicas {
		some := *shared
		some.name, some.replicas = fmt.Sprintf("%d on PostgreSQL", n+1), shared.replicas[:n+1]
		deployments = append(deployments, &some)
	}
	all, err := r.rounds(ctx, deployments)
	if err != nil {
		return err
	}
	rows := [][]string{{"operation", "replicas", "requests/s", "of the embedded store", "of one replica", "p50 ms", "p99 ms", "their µs a request", "resident MB, together"}}
	for _, s := range all {
		find := func(d *deployment) *series {
			return all[slices.IndexFunc(all, func(o *series) bool { return o.deployment == d && o.operation.name == s.operation.name })]
		}
		replicas, ofOne := "embedded", values(nil)
		if s.deployment != embedded {
			replicas, ofOne = fmt.Sprint(len(s.deployment.replicas)), s.rate.over(find(deployments[1]).rate)
		}
		rows = append(rows, []string{
			s.operation.name, replicas, s.rate.show("%.0f"), s.rate.over(find(embedded).rate).show("%.2f"), ofOne.show("%.2f"),
			s.median.show("%.1f"), s.p99.show("%.1f"), s.cpu.show("%.0f"), s.resident.show("%.0f"),
		})
	}
	r.print(rows)
	r.note("PostgreSQL runs on the same cores; its own processor time is not in the column of the replicas'.")
	return nil
}
