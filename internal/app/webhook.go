package app

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
	"golang.org/x/sync/errgroup"

	"github.com/latticekeep/latticekeep/controllers/admission"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/connections"
	"github.com/latticekeep/latticekeep/internal/metrics"
)

// Webhook holds the flags of latticekeep webhook.
type Webhook struct {
	Listen, Operations string
	CertFile, KeyFile  string
	ClientCAFile       string
	ClientNames        []string
	Vault              admission.Options
	Log                config.Log
	Drain              time.Duration
	After              func(time.Duration) <-chan time.Time
	Stderr             io.Writer
}

const (
	// maxWebhookConnections bounds all open connections of a webhook, and maxSourceConnections those of
	// one address: of a server under pressure only. The latter is twice the number of concurrent
	// reviews: one API server has enough connections, and no other client can take all of them.
	maxWebhookConnections = 512
	maxSourceConnections  = 64
	// certificatePace is how often a webhook without a certificate looks for one.
	certificatePace = time.Second
	// webhookGrace bounds the time that reviews in flight have when the webhook ends.
	webhookGrace = 20 * time.Second
)

// Run serves until ctx ends, then answers the reviews in flight and returns nil.
func (o Webhook) Run(ctx context.Context) (err error) {
	unlimited, err := o.Log.Logger(o.Stderr)
	if err != nil {
		return err
	}
	logger, endLog := openLog(ctx, unlimited)
	defer func() { endLog(err) }()
	defer ignoreHangups(logger)()
	o.Vault.Logger = logger
	hook, err := admission.New(o.Vault)
	if err != nil {
		return err
	}
	own := &certificate{certFile: o.CertFile, keyFile: o.KeyFile, logger: logger}
	handshakes := newHandshakeCounter()
	config := listenerTLS(own.get, false, handshakes)
	config.NextProtos = []string{"http/1.1"} // one review at a time per connection
	clients := &authority{file: o.ClientCAFile, names: o.ClientNames}
	if o.ClientCAFile != "" {
		config.GetConfigForClient = clients.demand(config.Clone())
	}
	ready := func() error {
		_, err := own.get(nil)
		if err == nil && o.ClientCAFile != "" {
			_, err = clients.pool()
		}
		return err
	}

	var ending atomic.Bool
	registry := prometheus.NewRegistry()
	registry.MustRegister(append(hook.Collectors(), handshakes, metrics.Certificate("webhook", own.get), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))...)
	operations := operationsServer(registry, func() error {
		if ending.Load() {
			return errors.New("ending")
		}
		return ready()
	}, logger)

	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.Listen)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	plain, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.Operations)
	if err != nil {
		return errors.Join(fmt.Errorf("listening: %w", err), l.Close())
	}
	sources := connections.Listen(l, connections.Options{PerAddress: maxSourceConnections})
	registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "latticekeep_admission_connections_closed_total",
		Help: "Connections to the webhook that were closed, since their address had as many as one address may.",
	}, func() float64 { return float64(sources.Counts().Closed[connections.Crowded]) }))
	bounded := netutil.LimitListener(sources, maxWebhookConnections)
	logger.Info("listening", "address", l.Addr().String(), "operations", plain.Addr().String(), "version", buildinfo.Version())
	parts, running := errgroup.WithContext(ctx)
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	parts.Go(func() error {
		return serveUntil(serving, hook.Server(), tls.NewListener(bounded, config))
	})
	parts.Go(func() error { return serveUntil(serving, operations, plain) })
	parts.Go(func() error {
		awaitReady(running, ready, logger)
		<-running.Done()
		ending.Store(true)
		if ctx.Err() != nil { // a requested stop is no error
			<-o.After(o.Drain)
		}
		stop()
		return nil
	})
	return parts.Wait()
}

// awaitReady returns once ready returns nil or ctx ends.
func awaitReady(ctx context.Context, ready func() error, logger *slog.Logger) {
	tick := time.NewTicker(certificatePace)
	defer tick.Stop()
	told := false
	for {
		err := ready()
		if err == nil {
			logger.Info("ready")
			return
		}
		if !told {
			logger.Warn("waiting for the TLS certificate", "error", err)
			told = true
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// serveUntil serves on l until ctx ends, then finishes the requests in flight. It closes l.
func serveUntil(ctx context.Context, s *http.Server, l net.Listener) error {
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	select {
	case err := <-done:
		return fmt.Errorf("serving: %w", err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), webhookGrace)
	defer cancel()
	if err := s.Shutdown(last); err != nil {
		return errors.Join(fmt.Errorf("ending: %w", err), s.Close())
	}
	return nil
}

// operationsServer serves /healthz, /metrics and /readyz, which fails when ready fails.
func operationsServer(registry *prometheus.Registry, ready func() error, logger *slog.Logger) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, "not ready: see the log", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	return &http.Server{
		Handler: mux, ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelDebug), ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}
}

// authority is the CA file that verifies client certificates, and the names that clients may have.
type authority struct {
	file  string
	names []string // empty allows any name
}

// pool reads the current content of the file.
func (a *authority) pool() (*x509.CertPool, error) {
	pem, err := os.ReadFile(a.file)
	if err != nil {
		return nil, fmt.Errorf("reading the CA of clients: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("reading the CA of clients: %s holds no certificate in PEM", a.file)
	}
	return pool, nil
}

// demand returns a GetConfigForClient function for a listener. With it every client must present a
// certificate for one of the names. All handshakes fail while the file cannot be read.
func (a *authority) demand(base *tls.Config) func(*tls.ClientHelloInfo) (*tls.Config, error) {
	base.ClientAuth = tls.RequireAndVerifyClientCert
	base.SessionTicketsDisabled = true // check the certificate at each connection against the current authorities
	count := base.VerifyConnection
	base.VerifyConnection = func(state tls.ConnectionState) error {
		leaf := state.PeerCertificates[0]
		known := func(name string) bool {
			return name == leaf.Subject.CommonName || slices.Contains(leaf.DNSNames, name)
		}
		if len(a.names) > 0 && !slices.ContainsFunc(a.names, known) {
			return errors.New("the client certificate is of another name than --client-name says")
		}
		return count(state)
	}
	return func(*tls.ClientHelloInfo) (*tls.Config, error) {
		pool, err := a.pool()
		if err != nil {
			return nil, err
		}
		c := base.Clone()
		c.ClientCAs = pool
		return c, nil
	}
}
