// Package server is the HTTP side of the service: the engine, the middleware for every request, the
// operational endpoints and the life of the listener. The interface itself is in the packages
// below, one per version.
//
// Every request gets an ID made by the server ([gate.RequestIDHeader]), the state of a rate limit,
// one access log line, two metrics, a span if there is a tracer and, after a panic, a 500. Probes
// and scrapes are logged at debug level unless they fail. The line of a request names the tenant and
// the principal by their IDs, and the address of the client. Logs, metrics and spans contain route
// templates, never paths, queries, headers or bodies, because any of those can hold a secret by
// mistake.
package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"net/url"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/connections"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/server/dashboard"
	"github.com/latticekeep/latticekeep/server/docs"
	"github.com/latticekeep/latticekeep/server/gate"
	v1 "github.com/latticekeep/latticekeep/server/v1"
	v2 "github.com/latticekeep/latticekeep/server/v2"
)

// Config configures a [Server]. Store and all services except Reports and Cluster are required.
type Config struct {
	v2.Services
	Store      Store
	KMSKeys    func(context.Context) ([][]byte, error) // key files that backups carry; nil if there are none
	Recipients []backup.Recipient                      // allowed recipients of a backup; empty allows any

	PublicURL      string       // where users reach the service; cookies are Secure unless it is plain HTTP on loopback
	Limits         gate.Limits  // zero fields take the defaults
	Lender         quota.Lender // shares rates between replicas; nil counts in memory
	TrustedProxies []string     // addresses or networks whose X-Forwarded-For is trusted; none by default

	Metrics
	Operations
	// Health says whether this replica serves: see [Server.ready].
	Health *health.Monitor
	// Tracer makes a span for every request of the interface; nil makes none.
	Tracer trace.Tracer

	Log
	Now     func() time.Time // default time.Now
	Version string           // version of the program, for the metric latticekeep_build_info
}

// Operations says where the operational endpoints are.
type Operations struct {
	// OperationsApart keeps /healthz, /readyz, /diagnosis and /metrics off the listener of the
	// interface, where the last two take a key with metrics:read. The caller serves them with [Server.ServeOperations].
	OperationsApart bool
	// Profiling adds /debug/pprof/ to [Server.ServeOperations], for everybody who reaches it.
	Profiling bool
	// Diagnosis says how some parts of the deployment are. Without parts it says it of all, and callers may ask
	// at any rate. Nil says nothing.
	Diagnosis func(context.Context, ...diagnosis.Part) diagnosis.Report
}

// Log says where the server logs, and what.
type Log struct {
	Logger      *slog.Logger // default slog.Default(); it should limit repeated errors
	HideClients bool         // leave the addresses of clients out
}

// Metrics are served together with the server's own.
type Metrics struct {
	Collectors []prometheus.Collector // collectors of this process, such as those of the listener
	Gatherers  []prometheus.Gatherer  // registries of other components, without common metric names
}

// Store is the part of the store that the server needs.
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
	process operations
}

// These are the limits of a connection. A request must arrive completely within readTimeout, so
// that a slow sender cannot hold a connection for long.
const (
	readHeaderTimeout = 10 * time.Second
	readTimeout       = 30 * time.Second
	writeTimeout      = 60 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 16 << 10
	drainTimeout      = 30 * time.Second // for requests in flight at shutdown
)

// New returns a server that is not listening yet.
func New(config Config) (*Server, error) {
	if config.Vault == nil || config.Transit == nil || config.Webhooks == nil || config.Identity == nil || config.Audit == nil || config.Guard == nil || config.Reader == nil || config.Compliance == nil ||
		config.Keys == nil || config.Sealing == nil || config.Custody == nil || config.Store == nil || config.Health == nil {
		return nil, errors.New("making the server: vault, transit, webhooks, identity, audit, compliance, keys, sealing, custody, store and health are required")
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	if config.Now == nil {
		config.Now = time.Now
	}
	if config.Diagnosis == nil {
		config.Diagnosis = func(ctx context.Context, _ ...diagnosis.Part) diagnosis.Report {
			return diagnosis.Run(ctx, config.Version, 0)
		}
	}
	s := &Server{config: config, metrics: newMetrics(config.Version, config.Collectors, config.Gatherers)}
	s.process.monitor, s.process.diagnosis, s.process.metrics = config.Health, config.Diagnosis, s.metrics
	s.metrics.registry.MustRegister(healthCollector{s.process.report})
	origin, secure, err := origin(config.PublicURL)
	if err != nil {
		return nil, err
	}
	s.gate, err = gate.New(gate.Config{
		Identity: config.Identity, Guard: config.Guard, Now: config.Now, Limits: config.Limits, Lender: config.Lender, Origin: origin,
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
	s.engine.RemoteIPHeaders = []string{"X-Forwarded-For"} // no header that a proxy may pass on unchanged
	s.engine.HandleMethodNotAllowed = true
	s.engine.RedirectTrailingSlash = false // a redirect has no envelope
	s.engine.UseEscapedPath = true         // an escaped slash in an id is part of the id
	s.engine.UnescapePathValues = false    // it would turn a plus sign into a space; unescape does not
	if config.Tracer != nil {
		s.engine.Use(s.trace)
	}
	s.engine.Use(s.observe, s.recover, unescape)
	s.engine.NoRoute(s.missing)
	s.engine.NoMethod(s.refuse(http.StatusMethodNotAllowed, "the endpoint does not have this method"))

	s.engine.GET("/v1/openapi.yaml", served(openapi.V1()))
	s.engine.GET("/api/v2/openapi.yaml", served(openapi.V2()))
	docs.Register(s.engine)
	dashboard.Register(s.engine, s.missing)
	s.v1, err = v1.Register(s.engine, s.gate, &v1.API{Transit: config.Transit, Reader: config.Reader})
	if err != nil {
		return nil, fmt.Errorf("making the server: %w", err)
	}
	s.v2, err = v2.Register(s.engine, s.gate, v2.Config{
		Services: config.Services,
		Backups: v2.Backups{
			Store: config.Store, KMSKeys: config.KMSKeys, Recipients: config.Recipients,
			Format: func(ctx context.Context) ([]byte, error) { return format.RaisedRow(ctx, config.Store) },
		},
		Program: config.Version, Now: config.Now, Diagnosis: config.Diagnosis, SecureCookies: secure,
	})
	if err != nil {
		return nil, fmt.Errorf("making the server: %w", err)
	}
	s.process.version = s.v2
	if !config.OperationsApart {
		// This listener is public, so metrics take a key, and strangers cannot make checks run at will.
		s.process.add(s.engine, (&sharedReport{of: s.process.checked}).get, fault.Message, s.v2.Checks())
	}
	return s, nil
}

// unescape decodes the parameters of the path. The generated routes do not decode them.
func unescape(c *gin.Context) {
	for i, p := range c.Params {
		if value, err := url.PathUnescape(p.Value); err == nil { // net/http has already refused invalid escapes
			c.Params[i].Value = value
		}
	}
}

// origin returns scheme and host of the public URL, and whether cookies require encrypted
// connections. They do unless the service is reached by plain HTTP on loopback.
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

// Serve answers connections of l until ctx ends. Then it stops accepting, breaks off streamed
// answers such as backups, waits at most 30 s for the requests in flight, and returns nil. It
// closes l. /readyz fails once ctx has ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	s.process.report(ctx) // a shared fault from now on does not make this replica unready
	h := s.listener(s.engine)
	h.RegisterOnShutdown(s.gate.EndStreams)
	h.RegisterOnShutdown(func() { s.process.ending.Store(true) })
	return serve(ctx, h, l, drainTimeout, s.config.Logger)
}

// ServeOperations serves /healthz, /readyz, /diagnosis and /metrics on l until ctx ends, and closes l. End ctx
// after Serve has returned, so that probes are answered while requests finish.
func (s *Server) ServeOperations(ctx context.Context, l net.Listener) error {
	engine := gin.New()
	engine.Use(s.observe, s.recover)
	engine.NoRoute(func(c *gin.Context) { s.v2.Refuse(c, gate.Refusal(http.StatusNotFound, "there is no such endpoint")) })
	s.process.add(engine, s.process.checked, error.Error) //nolint:contextcheck // handlers have the contexts of their requests
	if s.config.Profiling {
		profile(engine)
	}
	return serve(ctx, s.listener(engine), l, drainTimeout, s.config.Logger)
}

// profile adds the profiles of the process, such as its stacks. They show no value in memory.
func profile(r gin.IRoutes) {
	r.GET("/debug/pprof/*name", func(c *gin.Context) {
		switch c.Param("name") {
		case "/profile":
			pprof.Profile(c.Writer, c.Request)
		case "/trace":
			pprof.Trace(c.Writer, c.Request)
		default:
			pprof.Index(c.Writer, c.Request) // all others, and a list of them
		}
	})
}

func (s *Server) listener(handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ConnState:         connections.Follow,
		ConnContext:       connections.InContext,
		ErrorLog:          log.New(connectionLog{s}, "", 0),

		DisableGeneralOptionsHandler: true, // it would answer OPTIONS * before [Server.observe]
	}
}

// connectionLog logs what net/http says about connections. Its texts name the client.
type connectionLog struct{ *Server }

var ofClient = regexp.MustCompile(` from (?:client )?([^ ]+):\d+:`)

// Write implements io.Writer.
func (l connectionLog) Write(text []byte) (int, error) {
	attrs := []slog.Attr{slog.String("error", strings.TrimSpace(ofClient.ReplaceAllString(string(text), ":")))}
	if client := ofClient.FindSubmatch(text); client != nil && !l.config.HideClients {
		attrs = append(attrs, slog.String("source_ip", strings.Trim(string(client[1]), "[]")))
	}
	l.config.Logger.LogAttrs(context.Background(), slog.LevelWarn, "a connection failed", attrs...)
	return len(text), nil
}

// serve answers on l until ctx ends, and then waits for the requests in flight, with patience.
func serve(ctx context.Context, h *http.Server, l net.Listener, patience time.Duration, logger *slog.Logger) error {
	failed := make(chan error, 1)
	go func() { failed <- h.Serve(l) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serving HTTP: %w", err)
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	err := h.Shutdown(drain)
	if errors.Is(err, context.DeadlineExceeded) { // a stalled upload is no failure of the server
		logger.WarnContext(ctx, "ending: broke off requests that did not finish in time", "after", patience)
		err = nil
	}
	if err := errors.Join(err, h.Close()); err != nil {
		return fmt.Errorf("finishing requests in flight: %w", err)
	}
	return nil
}

// observe gives the request its ID, sets the common response headers, and logs and counts the
// request when it is finished.
func (s *Server) observe(c *gin.Context) {
	start := s.config.Now()
	id := authz.NewID("req")
	h := c.Writer.Header()
	h.Set(gate.RequestIDHeader, id)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store") // replaced by public answers
	if !framedByLength(c.Request) {
		h.Set("Connection", "close")
	}
	s.gate.ShowRate(c) // replaced once the request is counted
	defer func() {
		method, route, status := knownMethod(c.Request.Method), routeOf(c), c.Writer.Status()
		took := s.config.Now().Sub(start)
		s.metrics.observe(method, route, status, max(0, took-gate.WaitedFor(c)))
		reason := reasonOf(c, status)
		if reason != "" && !operational(route) {
			s.metrics.unavailable.WithLabelValues(string(reason)).Inc()
		}
		attrs := append(make([]slog.Attr, 0, 10),
			slog.String("request_id", id),
			slog.String("method", method),
			slog.String("route", route),
			slog.Int("status", status),
			slog.Float64("duration_ms", float64(took.Microseconds())/1000))
		if p, known := gate.PrincipalOf(c); known {
			attrs = append(attrs, slog.String("tenant_id", string(p.Tenant)), slog.String("principal_id", p.ID))
		}
		if !s.config.HideClients {
			attrs = append(attrs, slog.String("source_ip", c.ClientIP()))
		}
		level := slog.LevelInfo
		if operational(route) {
			level = slog.LevelDebug
		}
		broken := c.Errors.ByType(gin.ErrorTypeRender) // the answer was broken off after its status
		if status >= http.StatusInternalServerError || len(broken) > 0 {
			level = slog.LevelError
			if err := c.Errors.Last(); err != nil {
				attrs = append(attrs, slog.String("error", err.Error()))
			}
			if reason != "" {
				attrs = append(attrs, slog.String("reason", string(reason)))
			}
		}
		s.config.Logger.LogAttrs(c.Request.Context(), level, "request", attrs...)
	}()
	c.Next()
}

// reasonOf returns why a request was answered with 503, and "" for other answers.
func reasonOf(c *gin.Context, status int) fault.Reason {
	if status != http.StatusServiceUnavailable {
		return ""
	}
	reason := fault.ReasonOther
	if last := c.Errors.Last(); last != nil {
		reason = fault.ReasonOf(last)
	}
	if reason == fault.ReasonOther && c.Request.Context().Err() != nil {
		reason = fault.ReasonTimeout
	}
	return reason
}

// framedByLength reports whether only Content-Length can say where the request ends. A request that
// also has Transfer-Encoding may end elsewhere for a proxy, which would take the rest for the next
// request of somebody else, so the connection must end with the answer (RFC 9112 §6.1). net/http
// removes one of the two headers before a handler runs. So this reports false for every chunked
// request, and for every request of HTTP/1.0, where Transfer-Encoding is removed. Clients rarely send
// either, and then only need a new connection.
func framedByLength(r *http.Request) bool {
	return len(r.TransferEncoding) == 0 && r.ProtoAtLeast(1, 1)
}

// trace makes a span for the request, as the root of a new trace. It ignores a trace ID from the
// client, which is as untrusted as a request ID from the client. The request ID links the span to
// the log and the audit log.
func (s *Server) trace(c *gin.Context) {
	method, route := knownMethod(c.Request.Method), routeOf(c)
	if operational(route) {
		c.Next()
		return
	}
	ctx, span := s.config.Tracer.Start(c.Request.Context(), method+" "+route,
		trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("http.request.method", method), attribute.String("http.route", route)))
	defer func() { // a directly deferred End would record the panic value
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

// recover turns a panic into a 500. It logs the type and the stack, but not the panic value, which
// may quote a secret.
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
			// The response is incomplete. Break the connection too, so that the caller notices.
			panic(http.ErrAbortHandler)
		}
		s.version(c).Refuse(c, fault.Internal)
	}()
	c.Next()
}

// missing answers requests for a path that does not exist: a browser gets a page.
//
//nolint:contextcheck // the handler has the context of its request
func (s *Server) missing(c *gin.Context) {
	err := s.gate.CountStranger(c)
	if err == nil && dashboard.Missing(c) {
		return
	}
	s.version(c).Refuse(c, cmp.Or(err, gate.Refusal(http.StatusNotFound, "there is no such endpoint")))
}

// refuse answers requests that reach no endpoint.
//
//nolint:contextcheck // the handler has the context of its request
func (s *Server) refuse(status int, message string) gin.HandlerFunc {
	return func(c *gin.Context) {
		s.version(c).Refuse(c, cmp.Or(s.gate.CountStranger(c), gate.Refusal(status, message)))
	}
}

// version returns the version whose error envelope a path gets.
func (s *Server) version(c *gin.Context) *gate.Version {
	if strings.HasPrefix(c.Request.URL.Path, "/v1/") {
		return s.v1
	}
	return s.v2
}

// routeOf returns the route template that the request matched. A path may hold anything, and there
// are few templates.
func routeOf(c *gin.Context) string {
	if route := c.FullPath(); route != "" {
		return route
	}
	return "none"
}

// knownMethod returns the method, or "other" if it is unknown: the caller can choose any word.
func knownMethod(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return method
	}
	return "other"
}

// served answers with an OpenAPI document.
func served(document string) gin.HandlerFunc {
	return func(c *gin.Context) {
		c.Header("Cache-Control", "public, max-age=60")
		c.Data(http.StatusOK, "application/yaml", []byte(document))
	}
}
