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
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/custody"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/server/dashboard"
	"github.com/latticekeep/latticekeep/server/docs"
	"github.com/latticekeep/latticekeep/server/gate"
	v1 "github.com/latticekeep/latticekeep/server/v1"
	v2 "github.com/latticekeep/latticekeep/server/v2"
)

// Config of a [Server]. Vault, Transit, Identity, Audit, Compliance, Keys, Sealing,
// Custody and Store are required.
type Config struct {
	Vault      *vault.Vault
	Transit    *transit.Transit
	Identity   *identity.Service
	Audit      *audit.Log
	Guard      *audit.Guard
	Reader     *audit.Reader
	Compliance *assessor.Service
	Reports    v2.Reports // nil when whoever keeps them gives them out
	Keys       *keyring.Ring
	Sealing    *sealingkey.Service
	Custody    *custody.Service
	Store      Store
	KMSKeys    func(context.Context) ([][]byte, error) // the files of the keys that wrap all others, which backups carry; nil when there are none
	Recipients []backup.Recipient                      // of backups over the interface; empty: any
	Cluster    v2.Cluster                              // what the operator knows; nil: none runs

	PublicURL      string       // where users reach the service; cookies are Secure unless it is plain HTTP on loopback
	Rates          gate.Rates   // zero fields take the defaults
	Lender         quota.Lender // of the requests that replicas share; nil: there is one replica, which counts in memory
	TrustedProxies []string     // addresses or networks whose X-Forwarded-For is believed; default none

	Collectors []prometheus.Collector // more metrics than the server's own, such as those of its listener
	Gatherers  []prometheus.Gatherer  // registries of others, whose metrics have other names

	// OperationsApart keeps /healthz, /readyz and /metrics off the listener of the
	// interface: [Server.ServeOperations] serves them.
	OperationsApart bool
	// Ready says what /readyz fails for beside the store and the keys; may be nil.
	Ready func() error
	// Tracer makes a span of every request of the interface; nil: none.
	Tracer trace.Tracer

	Logger  *slog.Logger     // default slog.Default()
	Now     func() time.Time // default time.Now
	Version string           // of the program, for the metric latticekeep_build_info
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
	s.v2, err = v2.Register(s.engine, s.gate, &v2.API{
		Vault: config.Vault, Transit: config.Transit, Identity: config.Identity, Audit: config.Audit, Guard: config.Guard, Reader: config.Reader, Compliance: config.Compliance,
		Reports: config.Reports, Keys: config.Keys, Sealing: config.Sealing, Custody: config.Custody, Store: config.Store, KMSKeys: config.KMSKeys, Recipients: config.Recipients, Cluster: config.Cluster, Program: config.Version, Now: config.Now, SecureCookies: secure,
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
