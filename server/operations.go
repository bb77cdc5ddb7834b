package server

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// metrics counts requests in a registry of the server's own.
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

func newMetrics(version string, more ...prometheus.Collector) *metrics {
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
	return m
}

func (m *metrics) observe(method, route string, status int, took time.Duration) {
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Inc()
	m.duration.WithLabelValues(method, route).Observe(took.Seconds())
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
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

// ready says whether a request could be served: the store commits and the
// deployment's keys can be used.
func (s *Server) ready(c *gin.Context) {
	ctx, cancel := context.WithTimeout(c.Request.Context(), readyTimeout)
	defer cancel()
	err := s.config.Store.Ready(ctx)
	if err == nil {
		_, err = s.config.Keys.SealingDocument(ctx)
	}
	if err != nil {
		s.v2.Refuse(c, fault.Wrap(fault.Unavailable, fault.Unavailable.Error(), err))
		return
	}
	s.v2.Write(c, http.StatusOK, health{true, "ok"})
}

// served answers with an OpenAPI document, as it is.
func served(document string) gin.HandlerFunc {
	return func(c *gin.Context) {
		c.Header("Cache-Control", "public, max-age=60")
		c.Data(http.StatusOK, "application/yaml", []byte(document))
	}
}
