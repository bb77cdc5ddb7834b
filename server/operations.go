package server

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/server/gate"
)

// operations are the operational endpoints of the process.
type operations struct {
	monitor   *health.Monitor
	diagnosis func(context.Context, ...diagnosis.Part) diagnosis.Report
	metrics   *metrics
	version   *gate.Version // writes answers
	ending    atomic.Bool
}

// add adds the endpoints to routes. reason gives the text of an error to those
// who may call them. The checks are for metrics and the diagnosis, which are of the whole deployment.
func (o *operations) add(r gin.IRoutes, checked func(context.Context) health.Report, reason func(error) string, checks ...gin.HandlerFunc) {
	r.GET("/healthz", o.health)
	r.GET("/readyz", func(c *gin.Context) { o.ready(c, o.withEnding(checked(c.Request.Context())), reason) })
	r.GET("/diagnosis", append(slices.Clone(checks), o.diagnose)...)
	r.GET("/metrics", append(slices.Clone(checks), gin.WrapH(o.metrics.handler()))...)
}

// operational reports whether a route is operational. The platform, not a user, calls these every
// few seconds.
func operational(route string) bool {
	return route == "/healthz" || route == "/readyz" || route == "/diagnosis" || route == "/metrics"
}

type answer struct {
	Success bool   `json:"success"`
	Status  string `json:"status"`
}

// health reports only that the process answers. It checks no dependency: a restart would not repair
// a full disk.
func (o *operations) health(c *gin.Context) {
	o.version.Write(c, http.StatusOK, answer{true, "ok"})
}

// diagnose says how every part of the deployment is, whether it serves or not.
func (o *operations) diagnose(c *gin.Context) {
	o.version.Write(c, http.StatusOK, diagnosisAnswer{true, o.diagnosis(c.Request.Context())})
}

type diagnosisAnswer struct {
	Success bool `json:"success"`
	diagnosis.Report
}

// readyTimeout bounds the time that a probe waits.
const readyTimeout = time.Second

// ready reports whether this replica is to get requests: see package health. With the parameter
// verbose it lists the checks as text. The operator is none of them: workloads read credentials while
// their cluster's API server is down.
func (o *operations) ready(c *gin.Context, report health.Report, reason func(error) string) {
	err := report.Ready()
	if _, verbose := c.GetQuery("verbose"); verbose {
		status := http.StatusOK
		if err != nil {
			status = http.StatusServiceUnavailable
			_ = c.Error(err)
		}
		c.String(status, "%s", report.Text(reason))
		return
	}
	if err != nil {
		o.version.Refuse(c, fault.Outage(fault.ReasonOf(err), fault.Unavailable.Error(), err))
		return
	}
	o.version.Write(c, http.StatusOK, answer{true, "ok"})
}

var errEnding = fault.Outage(fault.ReasonEnding, "the server is shutting down", nil)

// report is the outcome of all checks now.
func (o *operations) report(ctx context.Context) health.Report { return o.withEnding(o.checked(ctx)) }

// checked runs the checks.
func (o *operations) checked(ctx context.Context) health.Report {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	return o.monitor.Report(ctx)
}

// withEnding adds a check to those of a report: a server that is ending has a fault of its own.
func (o *operations) withEnding(report health.Report) health.Report {
	ending := health.Result{Check: health.Check{Name: "shutdown", Scope: health.Replica, Stops: health.Classes()}}
	if o.ending.Load() {
		ending.Err = errEnding
	}
	report.Results = append(slices.Clip(report.Results), ending)
	return report
}

// reportAge is how long probes on the public listener share a report. It is short beside the period of
// any probe.
const reportAge = 500 * time.Millisecond

// sharedReport is a report that is made once for all who ask within reportAge.
type sharedReport struct {
	of func(context.Context) health.Report

	mu     sync.Mutex
	latest health.Report
	made   time.Time // end of the checks
}

func (r *sharedReport) get(ctx context.Context) health.Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.made) >= reportAge {
		r.latest = r.of(context.WithoutCancel(ctx)) // others wait for it; it has a time limit of its own
		r.made = time.Now()
	}
	return r.latest
}
