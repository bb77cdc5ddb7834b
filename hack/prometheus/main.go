// Command alerts evaluates a file of alerting rules with the rule manager, the query engine and the
// database of Prometheus, over scrapes from its standard input, by the times that these have. So a
// test sees in seconds what fires after hours.
//
// Standard input is a JSON array of scrapes in the order of their times. After all scrapes of one
// time, all rules are evaluated at that time. Standard output is a JSON array of the alerts that
// fire, in the order of time.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/url"
	"os"
	"slices"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/model/timestamp"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/rules"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb"
)

// Scrape is what Prometheus gets from one target at one time.
type Scrape struct {
	Time   time.Time         `json:"time"`
	Labels map[string]string `json:"labels"` // such as job and instance
	Text   string            `json:"text"`   // empty: the target did not answer
	Gone   bool              `json:"gone"`   // the target is no longer known
}

// Alert is an alert that fires.
type Alert struct {
	Time        time.Time         `json:"time"` // when the rules were evaluated
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func main() {
	if err := run(context.Background(), os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "alerts:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout io.Writer) (err error) {
	if len(args) != 1 {
		return errors.New("usage: alerts RULES <SCRAPES")
	}
	var scrapes []Scrape
	if err := json.NewDecoder(stdin).Decode(&scrapes); err != nil {
		return fmt.Errorf("reading the scrapes: %w", err)
	}
	dir, err := os.MkdirTemp("", "alerts-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	db, err := tsdb.Open(dir, nil, nil, tsdb.DefaultOptions(), nil)
	if err != nil {
		return fmt.Errorf("opening a database: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	db.DisableCompactions()
	groups, err := load(ctx, db, args[0])
	if err != nil {
		return err
	}
	alerts := []Alert{}
	known := make(map[string][]labels.Labels) // series of each target's last scrape
	for i, s := range scrapes {
		if known[key(s)], err = store(ctx, db, s, known[key(s)]); err != nil {
			return fmt.Errorf("storing scrape %d: %w", i, err)
		}
		if i+1 < len(scrapes) && scrapes[i+1].Time.Equal(s.Time) {
			continue
		}
		for _, g := range groups {
			g.Eval(ctx, s.Time)
			firing, err := alertsOf(g, s.Time)
			if err != nil {
				return err
			}
			alerts = append(alerts, firing...)
		}
	}
	return json.NewEncoder(stdout).Encode(alerts)
}

// load reads the rules.
func load(ctx context.Context, db *tsdb.DB, file string) ([]*rules.Group, error) {
	logger := slog.New(slog.DiscardHandler)
	promQL := parser.NewParser(parser.Options{})
	engine := promql.NewEngine(promql.EngineOpts{
		Logger: logger, MaxSamples: 50_000_000, Timeout: time.Minute, EnableAtModifier: true, EnableNegativeOffset: true, Parser: promQL,
	})
	manager := rules.NewManager(&rules.ManagerOptions{
		Context: ctx, Logger: logger, ExternalURL: &url.URL{Scheme: "http", Host: "prometheus"}, Parser: promQL,
		QueryFunc: rules.EngineQueryFunc(engine, db), Queryable: db, AppendableV2: db,
		NotifyFunc: func(context.Context, string, ...*rules.Alert) {},
	})
	byName, errs := manager.LoadGroups(time.Minute, labels.EmptyLabels(), "", nil, false, file)
	if len(errs) > 0 {
		return nil, fmt.Errorf("loading the rules: %w", errors.Join(errs...))
	}
	groups := make([]*rules.Group, 0, len(byName))
	for _, g := range byName {
		groups = append(groups, g)
		for _, r := range g.AlertingRules() {
			r.SetRestored(true) // nothing was pending before; only then are there series ALERTS
		}
	}
	slices.SortFunc(groups, func(a, b *rules.Group) int { return cmp.Compare(a.Name(), b.Name()) })
	return groups, nil
}

// key names the target of a scrape.
func key(s Scrape) string { return labels.FromMap(s.Labels).String() }

// store appends a scrape as Prometheus does: up says whether the target answered, and series that it
// no longer has are marked as stale. It returns the series that the target has now.
func store(ctx context.Context, db *tsdb.DB, s Scrape, before []labels.Labels) (now []labels.Labels, err error) {
	to := db.AppenderV2(ctx)
	defer func() {
		if err != nil {
			err = errors.Join(err, to.Rollback())
		}
	}()
	at := timestamp.FromTime(s.Time)
	put := func(l labels.Labels, v float64) error {
		_, err := to.Append(0, l, 0, at, v, nil, nil, storage.AOptions{})
		return err
	}
	has := make(map[uint64]bool)
	if s.Text != "" {
		p, err := textparse.New([]byte(s.Text), "text/plain", labels.NewSymbolTable(), textparse.ParserOptions{})
		if err != nil {
			return nil, err
		}
		for {
			entry, err := p.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, err
			}
			if entry != textparse.EntrySeries {
				continue
			}
			var l labels.Labels
			p.Labels(&l)
			_, _, v := p.Series()
			series := labels.NewBuilder(l)
			for name, text := range s.Labels {
				series.Set(name, text)
			}
			l = series.Labels()
			if err := put(l, v); err != nil {
				return nil, fmt.Errorf("%s: %w", l, err)
			}
			now = append(now, l)
			has[l.Hash()] = true
		}
	}
	up := labels.NewBuilder(labels.FromMap(s.Labels)).Set(labels.MetricName, "up").Labels()
	if !s.Gone {
		answered := 0.0
		if s.Text != "" {
			answered = 1
		}
		if err := put(up, answered); err != nil {
			return nil, err
		}
		now = append(now, up)
		has[up.Hash()] = true
	}
	for _, l := range before {
		if !has[l.Hash()] {
			if err := put(l, math.Float64frombits(value.StaleNaN)); err != nil {
				return nil, err
			}
		}
	}
	return now, to.Commit()
}

// alertsOf returns the alerts of a group that fire. Error: that of a rule that could not be
// evaluated.
func alertsOf(g *rules.Group, at time.Time) (all []Alert, err error) {
	for _, r := range g.AlertingRules() {
		if err := r.LastError(); err != nil {
			return nil, fmt.Errorf("evaluating %s: %w", r.Name(), err)
		}
		for _, a := range r.ActiveAlerts() {
			if a.State == rules.StateFiring {
				all = append(all, Alert{at, a.Labels.Map(), a.Annotations.Map()})
			}
		}
	}
	return all, nil
}
