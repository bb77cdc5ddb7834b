package server

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/server/gate"
)

// metrics counts requests in a registry of the server's own.
type metrics struct {
	registry *prometheus.Registry
	shown    prometheus.Gatherers // the registry and those of others
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

// watch shows what a gate is doing.
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
}

func (m *metrics) observe(method, route string, status int, took time.Duration) {
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Inc()
	m.duration.WithLabelValues(method, route).Observe(took.Seconds())
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.shown, promhttp.HandlerOpts{})
}

// operations adds the endpoints of the process itself.
func (s *Server) operations(r gin.IRoutes) {
	r.GET("/healthz", s.health)
	r.GET("/readyz", s.ready)
	r.GET("/metrics", gin.WrapH(s.metrics.handler()))
}

// operational reports whether a route is one of them: they are called every few
// seconds by the platform and not by anybody.
func operational(route string) bool {
	return route == "/healthz" || route == "/readyz" || route == "/metrics"
}

type health struct {
	Success bool   `json:"success"`
	Status  string `json:"status"`
}

// health says that the process answers, and nothing about what it needs: a
// restart would not bring back a full disk.
func (s *Server) health(c *gin.Context) {
	s.v2.Write(c, http.StatusOK, health{true, "ok"})
}

// readyTimeout bounds the time that a probe waits.
const readyTimeout = time.Second

// ready says whether a request could be served: the store commits, the log goes
// on, the deployment's keys can be used, and the server is not about to end. The operator
// is no part of it: workloads read while their cluster's API server is down.
func (s *Server) ready(c *gin.Context) {
	ctx, cancel := context.WithTimeout(c.Request.Context(), readyTimeout)
	defer cancel()
	if err := s.couldServe(ctx); err != nil {
		s.v2.Refuse(c, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), err))
		return
	}
	s.v2.Write(c, http.StatusOK, health{true, "ok"})
}

var errEnding = errors.New("the server is ending")

func (s *Server) couldServe(ctx context.Context) error {
	if s.ending.Load() {
		return errEnding
	}
	if err := s.config.Audit.Ready(ctx); err != nil {
		return err
	}
	if _, err := s.config.Keys.SealingDocument(ctx); err != nil {
		return err
	}
	if s.config.Ready == nil {
		return nil
	}
	return s.config.Ready()
}

// served answers with an OpenAPI document, as it is.
func served(document string) gin.HandlerFunc {
	return func(c *gin.Context) {
		c.Header("Cache-Control", "public, max-age=60")
		c.Data(http.StatusOK, "application/yaml", []byte(document))
	}
}
