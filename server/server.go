// Package server is the HTTP side of the service: the engine, the middleware
// that every request passes, the operational endpoints and the listener's
// life. The interface itself is in the packages below, one per version.
//
// What every request gets, whatever it asks: an id of the server's own making
// ([gate.RequestIDHeader]), the state of a rate limit, one access log line
// (probes and scrapes only when they fail, and of those that are refused because too
// many wait the first one of a second), two metrics, a span if there is a
// tracer and, when something panics, a 500. Logs, metrics and spans speak of
// route templates, never of paths, queries, headers or bodies, since any of them
// can hold a secret by mistake.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/server/dashboard"
	"github.com/latticekeep/latticekeep/server/docs"
	"github.com/latticekeep/latticekeep/server/gate"
	v1 "github.com/latticekeep/latticekeep/server/v1"
	v2 "github.com/latticekeep/latticekeep/server/v2"
)

// Config of a [Server]. The services but Reports and Cluster, and the store, are required.
type Config struct {
	v2.Services
	Store      Store
	KMSKeys    func(context.Context) ([][]byte, error) // key files that backups carry; nil if there are none
	Recipients []backup.Recipient                      // who may be named as recipient of a backup; empty means anybody

	PublicURL      string       // where users reach the service; cookies are Secure unless it is plain HTTP on loopback
	Rates          gate.Rates   // zero fields take the defaults
	Lender         quota.Lender // shares rates between replicas; nil counts in memory
	TrustedProxies []string     // addresses or networks whose X-Forwarded-For is believed; none by default

	Metrics
	// OperationsApart keeps /healthz, /readyz and /metrics off the listener of the interface. The caller
	// serves them with [Server.ServeOperations].
	OperationsApart bool
	// Ready returns a further reason for /readyz to fail; may be nil.
	Ready func() error
	// Tracer makes a span of every request of the interface; nil makes none.
	Tracer trace.Tracer

	Logger  *slog.Logger     // default slog.Default()
	Now     func() time.Time // default time.Now
	Version string           // of the program, for the metric latticekeep_build_info
}

// Metrics are shown beside the server's own.
type Metrics struct {
	Collectors []prometheus.Collector // of this process, such as those of the listener
	Gatherers  []prometheus.Gatherer  // registries of others, whose metrics have other names
}

// Store is what the server asks of the store itself.
type Store interface {
	store.Store
	backup.Source
}

// Server answers HTTP.
type Server struct {
	config  Config
	engine  *gin.Engine
	metrics *metrics
	gate    *gate.Gate
	v1, v2  *gate.Version
	ending  atomic.Bool
	shed    atomic.Int64 // Unix second in which the log last said that requests are refused
}

// Limits of a connection. A request has ReadTimeout to arrive whole, so that a
// slow sender holds no connection for long.
const (
	readHeaderTimeout = 10 * time.Second
	readTimeout       = 30 * time.Second
	writeTimeout      = 60 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 16 << 10
	drainTimeout      = 30 * time.Second // for requests in flight at the end
)

// New returns a server that is not listening yet.
func New(config Config) (*Server, error) {
	if config.Vault == nil || config.Transit == nil || config.Identity == nil || config.Audit == nil || config.Guard == nil || config.Reader == nil || config.Compliance == nil ||
		config.Keys == nil || config.Sealing == nil || config.Custody == nil || config.Store == nil {
		return nil, errors.New("making the server: vault, transit, identity, audit, compliance, keys, sealing, custody and store are required")
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	if config.Now == nil {
		config.Now = time.Now
	}
	s := &Server{config: config, metrics: newMetrics(config.Version, config.Collectors, config.Gatherers)}
	origin, secure, err := origin(config.PublicURL)
	if err != nil {
		return nil, err
	}
	s.gate, err = gate.New(gate.Config{
		Identity: config.Identity, Guard: config.Guard, Now: config.Now, Rates: config.Rates, Lender: config.Lender, Origin: origin,
	})
	if err != nil {
		return nil, fmt.Errorf("making the server: %w", err)
	}
	s.metrics.watch(s.gate)

	gin.SetMode(gin.ReleaseMode) // otherwise gin prints its routes on stdout
	s.engine = gin.New()
	if err := s.engine.SetTrustedProxies(config.TrustedProxies); err != nil {
		return nil, fmt.Errorf("trusting proxies: %w", err)
	}
	s.engine.RemoteIPHeaders = []string{"X-Forwarded-For"} // and no header that a proxy may pass on as it came
	s.engine.HandleMethodNotAllowed = true
	s.engine.RedirectTrailingSlash = false // a redirect has no envelope
	s.engine.UseEscapedPath = true         // an escaped slash in an id is part of the id
	s.engine.UnescapePathValues = false    // it would take a plus sign for a space; unescape does not
	if config.Tracer != nil {
		s.engine.Use(s.trace)
	}
	s.engine.Use(s.observe, s.recover, unescape)
	s.engine.NoRoute(s.refuse(http.StatusNotFound, "there is no such endpoint"))
	s.engine.NoMethod(s.refuse(http.StatusMethodNotAllowed, "the endpoint does not have this method"))

	if !config.OperationsApart {
		s.operations(s.engine)
	}
	s.engine.GET("/v1/openapi.yaml", served(openapi.V1()))
	s.engine.GET("/api/v2/openapi.yaml", served(openapi.V2()))
	docs.Register(s.engine)
	dashboard.Register(s.engine, s.refuse(http.StatusNotFound, "there is no such endpoint"))
	s.v1, err = v1.Register(s.engine, s.gate, &v1.API{Transit: config.Transit, Reader: config.Reader})
	if err != nil {
		return nil, fmt.Errorf("making the server: %w", err)
	}
	s.v2, err = v2.Register(s.engine, s.gate, v2.Config{
		Services: config.Services,
		Backups:  v2.Backups{Store: config.Store, KMSKeys: config.KMSKeys, Recipients: config.Recipients},
		Program:  config.Version, Now: config.Now, SecureCookies: secure,
	})
	if err != nil {
		return nil, fmt.Errorf("making the server: %w", err)
	}
	return s, nil
}

// unescape decodes the parameters of the path, which the generated routes take
// as they are.
func unescape(c *gin.Context) {
	for i, p := range c.Params {
		if value, err := url.PathUnescape(p.Value); err == nil { // net/http refuses what cannot be
			c.Params[i].Value = value
		}
	}
}

// origin returns scheme and host of the public URL, and whether cookies are for
// encrypted connections only: unless the service is reached by plain HTTP on
// loopback.
func origin(publicURL string) (origin string, secure bool, err error) {
	if publicURL == "" {
		return "", true, nil
	}
	u, err := url.Parse(publicURL)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return "", false, fmt.Errorf("making the server: the public URL is not one like https://vault.example.org")
	}
	local := u.Hostname() == "localhost"
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil {
		local = ip.IsLoopback()
	}
	return u.Scheme + "://" + u.Host, u.Scheme == "https" || !local, nil
}

// Serve answers connections of l until ctx ends, then stops accepting, breaks
// off backups, waits for the requests in flight (at most 30 s) and returns nil.
// It closes l. /readyz fails from then on.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	h := s.listener(s.engine)
	h.RegisterOnShutdown(s.gate.EndStreams)
	h.RegisterOnShutdown(func() { s.ending.Store(true) })
	return serve(ctx, h, l)
}

// ServeOperations answers /healthz, /readyz and /metrics at l, which it closes,
// until ctx ends. That should be after Serve has returned, so that probes are
// answered while requests finish.
func (s *Server) ServeOperations(ctx context.Context, l net.Listener) error {
	engine := gin.New()
	engine.Use(s.observe, s.recover)
	engine.NoRoute(func(c *gin.Context) { s.v2.Refuse(c, gate.Refusal(http.StatusNotFound, "there is no such endpoint")) })
	s.operations(engine)
	return serve(ctx, s.listener(engine), l)
}

func (s *Server) listener(handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.config.Logger.Handler(), slog.LevelWarn),
	}
}

func serve(ctx context.Context, h *http.Server, l net.Listener) error {
	failed := make(chan error, 1)
	go func() { failed <- h.Serve(l) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serving HTTP: %w", err)
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	if err := h.Shutdown(drain); err != nil {
		return fmt.Errorf("finishing requests in flight: %w", errors.Join(err, h.Close()))
	}
	return nil
}

// observe names the request, sets the headers of every response, and when all
// is done logs and counts it.
func (s *Server) observe(c *gin.Context) {
	start := s.config.Now()
	id := authz.NewID("req")
	h := c.Writer.Header()
	h.Set(gate.RequestIDHeader, id)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store") // public answers replace it
	s.gate.ShowRate(c)                 // likewise
	defer func() {
		method, route, status := knownMethod(c.Request.Method), routeOf(c), c.Writer.Status()
		took := s.config.Now().Sub(start)
		s.metrics.observe(method, route, status, took)
		if last := c.Errors.Last(); last != nil && errors.Is(last, gate.ErrOverloaded) && !s.firstShed(start) {
			return
		}
		attrs := []slog.Attr{
			slog.String("request_id", id),
			slog.String("method", method),
			slog.String("route", route),
			slog.Int("status", status),
			slog.Duration("duration", took),
		}
		level := slog.LevelInfo
		if operational(route) {
			level = slog.LevelDebug
		}
		broken := c.Errors.ByType(gin.ErrorTypeRender) // an answer that was cut after its status
		if status >= http.StatusInternalServerError || len(broken) > 0 {
			level = slog.LevelError
			if err := c.Errors.Last(); err != nil {
				attrs = append(attrs, slog.String("error", err.Error()))
			}
		}
		s.config.Logger.LogAttrs(c.Request.Context(), level, "request", attrs...)
	}()
	c.Next()
}

// firstShed reports whether a request that was refused because too many waited is
// the first one of its second. The log tells of no other: there are as many as
// anybody sends, and to write them down would take what the server is short of.
func (s *Server) firstShed(at time.Time) bool {
	last, now := s.shed.Load(), at.Unix()
	return last != now && s.shed.CompareAndSwap(last, now)
}

// trace makes a span of the request, and a trace of the span: what a stranger says
// of its own trace is no more believed than what it says its request's id is. The
// request's id leads from the span to the log and the audit log.
func (s *Server) trace(c *gin.Context) {
	method, route := knownMethod(c.Request.Method), routeOf(c)
	if operational(route) {
		c.Next()
		return
	}
	ctx, span := s.config.Tracer.Start(c.Request.Context(), method+" "+route,
		trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("http.request.method", method), attribute.String("http.route", route)))
	defer func() { // End as the deferred function itself would record what is panicked with
		status := c.Writer.Status()
		span.SetAttributes(attribute.Int("http.response.status_code", status),
			attribute.String("latticekeep.request_id", c.Writer.Header().Get(gate.RequestIDHeader)))
		if status >= http.StatusInternalServerError {
			span.SetStatus(codes.Error, "")
		}
		span.End()
	}()
	c.Request = c.Request.WithContext(ctx)
	c.Next()
}

// recover turns a panic into a 500. The value that was panicked with is not
// logged, since it may quote a secret; its type and the stack say enough.
func (s *Server) recover(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		s.config.Logger.LogAttrs(c.Request.Context(), slog.LevelError, "panic",
			slog.String("request_id", c.Writer.Header().Get(gate.RequestIDHeader)),
			slog.String("route", routeOf(c)),
			slog.String("type", fmt.Sprintf("%T", v)),
			slog.String("stack", string(debug.Stack())))
		if c.Writer.Written() {
			// The response is broken: break the connection too, so that the
			// caller does not take it for whole.
			panic(http.ErrAbortHandler)
		}
		s.version(c).Refuse(c, fault.Internal)
	}()
	c.Next()
}

// refuse answers what reaches no endpoint.
func (s *Server) refuse(status int, message string) gin.HandlerFunc {
	return func(c *gin.Context) {
		s.version(c).Refuse(c, cmp.Or(s.gate.CountStranger(c), gate.Refusal(status, message)))
	}
}

// version returns the version whose envelopes a path gets.
func (s *Server) version(c *gin.Context) *gate.Version {
	if strings.HasPrefix(c.Request.URL.Path, "/v1/") {
		return s.v1
	}
	return s.v2
}

// routeOf returns the template that the request matched: a path may hold
// anything, and templates are few.
func routeOf(c *gin.Context) string {
	if route := c.FullPath(); route != "" {
		return route
	}
	return "none"
}

// knownMethod returns one of a few words for the method, which is the caller's
// to choose.
func knownMethod(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return method
	}
	return "other"
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
