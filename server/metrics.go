package server

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/server/gate"
)

// metrics counts requests in the server's own registry.
type metrics struct {
	registry *prometheus.Registry
	shown    prometheus.Gatherers // the registry and those of other components
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec

	unavailable *prometheus.CounterVec
}

func newMetrics(version string, more []prometheus.Collector, others []prometheus.Gatherer) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "latticekeep_http_requests_total",
			Help: "Requests answered, by method, route template and status.",
		}, []string{"method", "route", "status"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "latticekeep_http_request_duration_seconds",
			Help:    "Time from the header of a request to the end of its answer, without what its caller asked to wait.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 15), // 0.5 ms to 8 s
		}, []string{"method", "route"}),
	}
	m.unavailable = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "latticekeep_unavailable_total",
		Help: "Requests answered with 503, by what was lacking. Probes and scrapes do not count.",
	}, []string{"reason"})
	for _, r := range fault.Reasons() {
		m.unavailable.WithLabelValues(string(r)) // so that the first one is an increase
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "latticekeep_build_info",
		Help:        "Always 1; the label is the program's version.",
		ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	m.registry.MustRegister(m.requests, m.duration, m.unavailable, build,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.registry.MustRegister(more...)
	m.shown = append(prometheus.Gatherers{m.registry}, others...)
	return m
}

// watch adds metrics of a gate's load.
func (m *metrics) watch(g *gate.Gate) {
	m.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "latticekeep_http_requests_in_flight",
			Help: "Requests of the interface that are being carried out.",
		}, func() float64 { return float64(g.Load().InFlight) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "latticekeep_http_requests_waiting",
			Help: "Requests that wait to be carried out.",
		}, func() float64 { return float64(g.Load().Waiting) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "latticekeep_http_requests_shed_total",
			Help: "Requests that were refused with 503 because too many waited.",
		}, func() float64 { return float64(g.Load().Shed) }),
	)
	limited := func(rate string, of func(gate.Load) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name:        "latticekeep_http_requests_limited_total",
			Help:        "Requests that were refused with 429, by whose rate they exceeded: of an address or of a tenant.",
			ConstLabels: prometheus.Labels{"rate": rate},
		}, func() float64 { return float64(of(g.Load())) })
	}
	m.registry.MustRegister(limited("address", func(l gate.Load) uint64 { return l.OverAddress }), limited("tenant", func(l gate.Load) uint64 { return l.OverTenant }))
}

// healthCollector runs all checks at every scrape.
type healthCollector struct {
	report func(context.Context) health.Report
}

var (
	serving = prometheus.NewDesc("latticekeep_serving", "1 while calls of this class are served, 0 while a failing check stops them: read or change.",
		[]string{"class"}, nil)
	healthCheck = prometheus.NewDesc("latticekeep_health_check", "1 while the check passes, 0 while it fails. The scope says who has the fault: this replica or all.",
		[]string{"check", "scope"}, nil)
)

func (c healthCollector) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- serving
	descriptions <- healthCheck
}

func (c healthCollector) Collect(metrics chan<- prometheus.Metric) {
	report := c.report(context.Background())
	gauge := func(d *prometheus.Desc, err error, labels ...string) {
		v := 1.0
		if err != nil {
			v = 0
		}
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, class := range health.Classes() {
		gauge(serving, report.Stopped(class), string(class))
	}
	for _, r := range report.Results {
		gauge(healthCheck, r.Err, r.Name, string(r.Scope))
	}
}

func (m *metrics) observe(method, route string, status int, took time.Duration) {
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Inc()
	m.duration.WithLabelValues(method, route).Observe(took.Seconds())
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.shown, promhttp.HandlerOpts{})
}
