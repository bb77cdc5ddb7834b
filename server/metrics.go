package server

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/latticekeep/latticekeep/server/gate"
)

// metrics counts requests in the server's own registry.
type metrics struct {
	registry *prometheus.Registry
	shown    prometheus.Gatherers // the registry and those of other components
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
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
			Help:    "Time from the header of a request to the end of its answer.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 15), // 0.5 ms to 8 s
		}, []string{"method", "route"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "latticekeep_build_info",
		Help:        "Always 1; the label is the program's version.",
		ConstLabels: prometheus.Labels{"version": version},
	})
	build.Set(1)
	m.registry.MustRegister(m.requests, m.duration, build,
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

func (m *metrics) observe(method, route string, status int, took time.Duration) {
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Inc()
	m.duration.WithLabelValues(method, route).Observe(took.Seconds())
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.shown, promhttp.HandlerOpts{})
}
