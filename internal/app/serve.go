package app

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/connections"
	"github.com/latticekeep/latticekeep/internal/dryrun"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/internal/identity/tokenreview"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/names"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/nodelog/receiver"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/webhooks"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/server/gate"
)

// Ready is the JSON line of a production server that scripts read. The names of its fields never
// change.
type Ready struct {
	BaseURL  string `json:"base_url"` // URL of the listener
	DataDir  string `json:"data_dir"` // empty when the database is elsewhere
	Identity string `json:"identity"`
	Chain    string `json:"chain"`
}

// Serve runs a production server with a configuration from [config.Load] until ctx ends. It returns
// nil once requests and reconciles in flight have finished. It writes one JSON line to stdout once
// the server is ready, and the log to stderr.
func Serve(ctx context.Context, c config.Config, stdout, stderr io.Writer) (err error) {
	unlimited, err := c.Log.Logger(stderr)
	if err != nil {
		return err
	}
	logger, endLog := openLog(ctx, unlimited)
	p := &production{config: c, handshakes: newHandshakeCounter()}
	defer func() { err = errors.Join(err, p.end()); endLog(err) }()
	defer ignoreHangups(logger)()
	if err := p.configure(ctx, logger); err != nil {
		return err
	}
	l, err := p.listen(ctx)
	if err != nil {
		return err
	}
	if err := p.openMeanwhile(ctx, l); err != nil {
		err = errors.Join(err, l.Close(), p.closeOperations())
		if ctx.Err() != nil { // it ended while it waited
			return nil
		}
		return err
	}
	p.bounded = connections.Listen(l, connections.Options{
		Most: connections.Most(), PerAddress: maxSourceConnections, Trusted: p.config.Proxies(),
	})
	return p.serve(ctx, p.bounded, stdout)
}

// production is a server that is built from a configuration.
type production struct {
	service
	config     config.Config
	handshakes *prometheus.CounterVec
	bounded    *connections.Listener
	encryption *tls.Config    // TLS of the listener; nil: plain HTTP
	cleanup    []func() error // functions to call at the end, newest first
}

func (p *production) end() error {
	var errs []error
	for _, clean := range slices.Backward(p.cleanup) {
		errs = append(errs, clean())
	}
	return errors.Join(errs...)
}

// configure creates the parts that need no store, so that a wrong configuration changes nothing.
func (p *production) configure(ctx context.Context, logger *slog.Logger) (err error) {
	if p.config.DataDir != "" {
		if p.config.DataDir, err = filepath.Abs(p.config.DataDir); err != nil { // scripts may run in another folder
			return fmt.Errorf("finding the data directory: %w", err)
		}
	}
	if err := checkCatalogues(p.config); err != nil {
		return err
	}
	if err := p.configureService(ctx, logger); err != nil {
		return err
	}
	if err := p.configureOperator(); err != nil {
		return err
	}
	if err := p.configureTLS(ctx); err != nil {
		return err
	}
	return errors.Join(checkKeyFilesOutside(p.config), checkBackupsOutside(p.config))
}

// openMeanwhile opens the deployment while the listeners answer that the server starts. It waits for
// PostgreSQL as long as it takes: a process that ended instead would be started again and again, with
// pauses that outlast the outage.
func (p *production) openMeanwhile(ctx context.Context, l *net.TCPListener) (err error) {
	var waiting atomic.Pointer[error]
	meanwhile := server.NewStarting(l, p.encryption, p.operationsListener(), func() error {
		if reason := waiting.Load(); reason != nil {
			return *reason
		}
		return fault.New(fault.Unavailable, "the database is being opened")
	}, diagnoseStart(p.config))
	defer func() { err = errors.Join(err, meanwhile.End()) }() //nolint:contextcheck // it ends when ctx has ended, too
	for pause, last := firstWait, ""; ; pause = min(2*pause, lastWait) {
		err := p.open(ctx)
		if err == nil || p.deployment != nil || !postgres.IsAbsent(err) {
			return err
		}
		waiting.Store(&err)
		if text := err.Error(); text != last {
			last = text
			attrs := []any{"error", err, "listen", l.Addr().String()}
			if p.operations != nil {
				attrs = append(attrs, "operations", "http://"+p.operations.Addr().String())
			}
			p.logger.Warn("PostgreSQL does not answer yet; waiting for it", attrs...)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// The pauses between attempts to reach PostgreSQL at the start grow from firstWait to lastWait.
const firstWait, lastWait = 250 * time.Millisecond, 2 * time.Second

// configureService sets up tracing, time, and the settings of e-mail, backups and evidence.
func (p *production) configureService(ctx context.Context, logger *slog.Logger) (err error) {
	c := p.config
	spans, err := newTracing(ctx, c.Tracing, logger)
	if err != nil {
		return err
	}
	if spans != nil {
		p.cleanup = append(p.cleanup, func() error { spans.end(context.WithoutCancel(ctx)); return nil })
		logger = slog.New(spanHandler{logger.Handler()})
	}
	p.service = service{logger: logger, calls: metrics.NewCalls(), now: time.Now, tenants: make(map[string]authz.TenantID), sealingLifetime: c.Sealing.KeyLifetime, tracing: spans}
	if p.recipients, err = c.BackupRecipients(); err != nil {
		return fmt.Errorf("backup.recipients: %w", err)
	}
	p.evidence = &evidence{Audit: c.Audit, Compliance: c.Compliance, backup: c.Backup, custody: compliance.CustodyKMS, transport: transportOf(c.TLS)}
	if _, file := offline.KMSFile(c.KMS.URL); file {
		p.evidence.custody = compliance.CustodyLocal
	}
	p.cleanup = append(p.cleanup, p.evidence.close)
	if c.Store.URL != "" { // all replicas use the time of the database
		p.clock = newSharedClock()
		p.now = p.clock.Now
	}
	for namespace, tenant := range c.Kubernetes.Namespaces {
		p.tenants[namespace] = authz.TenantID(tenant)
	}
	if p.egress, err = egressOf(c.Egress); err != nil {
		return err
	}
	p.mails, p.sender, err = mailsOf(c)
	return err
}

// configureOperator finds the cluster and sets the options of its operator.
func (p *production) configureOperator() error {
	c := p.config
	if err := p.connect(c.Kubernetes.Kubeconfig); err != nil {
		return err
	}
	if wrong := needsCluster(c); p.cluster == nil && len(wrong) > 0 {
		return errors.Join(wrong...)
	}
	p.evidence.cluster, p.evidence.namespace = p.cluster, ownNamespace(c, podNamespace)
	p.operator.Tenants.UIDs = make(map[string]authz.TenantID, len(c.Kubernetes.NamespacesByUID))
	for uid, tenant := range c.Kubernetes.NamespacesByUID {
		p.operator.Tenants.UIDs[uid] = authz.TenantID(tenant)
	}
	p.operator.Namespace, p.operator.Policy = ownNamespace(c, podNamespace), c.Kubernetes.Policy.SealingPolicy()
	p.operator.Elect = c.Store.URL != ""
	p.operator.Pace = controllers.Pace{Workers: c.Kubernetes.Workers, LooksPerMinute: c.Kubernetes.LooksPerMinute}
	p.operator.Rights = controllers.Rights{RestartWorkloads: c.Kubernetes.RestartWorkloads, WatchSecrets: c.Kubernetes.WatchSecrets}
	return nil
}

// configureTLS loads the certificate of the listener, or creates the reader of its Secret.
func (p *production) configureTLS(ctx context.Context) (err error) {
	c := p.config
	if c.TLS.CertFile != "" {
		p.encryption, err = tlsConfig(c.TLS, p.handshakes, p.logger)
		return err
	}
	if c.TLS.SecretName == "" {
		return nil
	}
	own, err := tlsFromSecret(p.cluster, p.operator.Namespace, c.TLS.SecretName, p.now, p.logger)
	if err != nil {
		return err
	}
	p.encryption = listenerTLS(own.get, c.TLS.PQRequired, p.handshakes)
	p.operator.Certificates = servingCertificates(c, p.operator.Namespace)
	reading, stop := context.WithCancel(ctx)
	var readers sync.WaitGroup
	readers.Go(func() { own.run(reading) })
	p.cleanup = append(p.cleanup, func() error { stop(); readers.Wait(); return nil })
	return nil
}

// open opens the deployment and delivers its first system key.
func (p *production) open(ctx context.Context) (err error) {
	c := p.config
	p.deployment, err = openDeployment(ctx, deploymentOptions{
		dir: c.DataDir, store: c.Store, kms: c.KMS, pq: c.TLS.PQRequired, clock: p.clock, fresh: func() error { return refuseSystemKeyFile(c.SystemKeyFile) },
		policy: p.operator.Policy, objects: p.sealingKeyUse(), accepted: p.acceptedValues(), tracing: p.tracing, evidence: p.evidence, calls: p.calls, logger: p.logger, now: p.now,
	})
	if err != nil {
		return err
	}
	p.cleanup = append(p.cleanup, p.deployment.close)
	if c.Registration.Closed {
		p.identity.CloseRegistration()
	}
	return p.identity.FirstSystemKey(ctx, func(key string) error { return p.deliverSystemKey(ctx, c, key) })
}

// listen opens the listener for requests, and the one for operations if it is configured. It comes
// before the database, so that nothing is created for a server whose address is in use.
func (p *production) listen(ctx context.Context) (*net.TCPListener, error) {
	l, err := listenTCP(ctx, p.config.Listen)
	if err != nil {
		return nil, fmt.Errorf("listening: %w", err)
	}
	if p.config.Operations.Listen != "" {
		operations, err := listenTCP(ctx, p.config.Operations.Listen)
		if err != nil {
			return nil, fmt.Errorf("listening for operations: %w", errors.Join(err, l.Close()))
		}
		p.operations = operations
	}
	return l, nil
}

func listenTCP(ctx context.Context, address string) (*net.TCPListener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// operationsListener returns the listener for operations before it is served, or nil.
func (p *production) operationsListener() *net.TCPListener {
	l, _ := p.operations.(*net.TCPListener)
	return l
}

// serve serves on l until ctx ends, and prints the ready line.
func (p *production) serve(ctx context.Context, l net.Listener, stdout io.Writer) error {
	c := p.config
	line := Ready{BaseURL: "http://" + l.Addr().String(), DataDir: c.DataDir, Identity: p.keys.Identity().ID(), Chain: p.log.Fingerprint()}
	options := server.Config{
		PublicURL: strings.TrimSuffix(c.PublicURL, "/"), TrustedProxies: c.TrustedProxies, Log: server.Log{HideClients: !c.Log.ClientAddress}, Metrics: server.Metrics{Collectors: []prometheus.Collector{p.handshakes, metrics.Connections(p.bounded)}},
		Operations: server.Operations{Profiling: c.Operations.Profiling},
		Limits:     gate.Limits{V1: c.Rate.V1, V2: c.Rate.V2, Address: c.Rate.Address, Registrations: c.Rate.Registrations},
	}
	var certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	if p.encryption != nil {
		line.BaseURL = "https://" + l.Addr().String()
		l = tls.NewListener(l, p.encryption)
		options.Collectors = append(options.Collectors, metrics.Certificate("server", p.encryption.GetCertificate))
		certificate = p.encryption.GetCertificate
		p.certificate = func() error {
			_, err := p.encryption.GetCertificate(nil)
			return err
		}
	}
	options.Diagnosis = p.diagnose(c, certificate)
	return p.run(ctx, l, options, func() {
		attrs := []any{"base_url", line.BaseURL, "version", buildinfo.Version()}
		if p.operations != nil {
			attrs = append(attrs, "operations", "http://"+p.operations.Addr().String())
		}
		p.logger.Info("ready", attrs...)
		if err := json.NewEncoder(stdout).Encode(line); err != nil {
			p.logger.Warn("writing the ready line failed", "error", err)
		}
	})
}

// run serves on l until ctx ends, and closes l. config holds the settings that differ between
// development and production. run calls ready once everything else is set up.
func (s *service) run(ctx context.Context, l net.Listener, config server.Config, ready func()) error {
	config.Vault, config.Transit, config.Identity, config.Audit, config.Guard, config.Reader, config.Keys, config.Store = s.vault, s.transit, s.identity, s.log, s.guard, s.reader, s.keys, s.store
	s.identity.Access.Ready = s.everyReplicaReads(format.Policies)
	s.vault.Rules.Ready = s.everyReplicaReads(format.Kept)
	s.vault.Settings.Ready = s.everyReplicaReads(format.Settings)
	s.vault.DetailsReady = s.everyReplicaReads(format.Details)
	s.vault.Lifetimes.Remind = s.remind
	s.webhooks = webhooks.New(s.store, s.guard, s.keys, s.now)
	config.Webhooks = s.webhooks
	s.names = &past.Sweeper{Names: past.New(s.keys, s.now), Store: s.store}
	config.NodeLogs = receiver.New(s.store, s.guard, mac.New(s.keys))
	config.Names = names.New(s.store, s.guard, s.identity, s.transit, s.names.Names)
	config.DryRun = dryrun.New(s.store, s.guard, s.reader, s.identity.Access, s.names.Names, s.now)
	config.Sealing, config.Custody, config.Recipients = s.sealing, s.custody, s.recipients
	if s.dev || len(s.recipients) > 0 {
		config.KMSKeys = s.keyFiles // only for configured recipients, or in development
	}
	var reports *objects.Bucket
	var err error
	if s.compliance, reports, err = s.evidence.openCompliance(ctx, s, s.dir, config.PublicURL); err == nil {
		err = errors.Join(s.evidence.openArchive(ctx, s), s.evidence.openBackups(ctx, s))
	}
	if err != nil {
		return errors.Join(err, l.Close(), s.closeOperations())
	}
	config.Compliance = s.compliance
	if reports != nil {
		config.Reports = reports
	}
	config.Collectors = append(config.Collectors, s.collectors()...)
	config.Health = health.New(s.checks()...)
	if s.clock != nil {
		s.lender = quota.NewLender(s.store, s.clock.Clock)
		config.Lender = s.lender
	}
	config.Logger, config.Now, config.Version = s.logger, s.now, buildinfo.Version()
	config.OperationsApart = s.operations != nil
	if s.cluster != nil {
		config.Collectors = append(config.Collectors, s.operator.Metrics)
		config.Cluster = s.operator.View
		config.Gatherers = append(config.Gatherers, prometheus.GathererFunc(gatherOperator))
	}
	if s.tracing != nil {
		config.Tracer = s.tracing.tracer
	}
	h, err := server.New(config) //nolint:contextcheck // handlers have the contexts of their requests
	if err != nil {
		return errors.Join(err, l.Close(), s.closeOperations())
	}
	if s.cluster != nil {
		reviewer, err := tokenreview.New(s.cluster, audience, s.now)
		if err != nil {
			return errors.Join(err, l.Close(), s.closeOperations())
		}
		s.identity.UseCluster(reviewer, s.tenants)
	}
	parts, running := errgroup.WithContext(ctx)
	probed, endProbes := context.WithCancel(context.WithoutCancel(ctx))
	parts.Go(func() error {
		defer endProbes() // ends after the requests in flight
		return h.Serve(running, l)
	})
	if s.operations != nil {
		parts.Go(func() error { return h.ServeOperations(probed, s.operations) })
	}
	parts.Go(func() error {
		return s.identity.Outbox().Run(running, s.mails, mail.Options{PublicURL: config.PublicURL, From: s.sender, Logger: s.logger})
	})
	parts.Go(func() error {
		s.webhooks.Run(running, s.egress, s.logger)
		return nil
	})
	parts.Go(func() error {
		s.maintain(running)
		return nil
	})
	parts.Go(func() error {
		s.rows.Run(running)
		return nil
	})
	parts.Go(func() error {
		memory.KeepResting(running)
		return nil
	})
	if s.clock != nil {
		parts.Go(func() error {
			s.clock.Follow(running, s.logger)
			return nil
		})
	}
	s.evidence.run(running, s, parts)
	if s.cluster != nil {
		o := s.operator
		o.Vault, o.Identity, o.Keys, o.Logger, o.Now, o.Tenants.Names, o.Tracer = s.vault, s.identity, s.keys, s.logger, s.now, s.tenants, config.Tracer
		parts.Go(func() error {
			return runOperator(running, s.logger, func() error {
				return controllers.Run(running, s.cluster, o)
			})
		})
	}
	s.logMemory()
	ready()
	if reason := s.log.HaltedBy(); reason != nil {
		s.logger.Error("the audit log is halted: /readyz and all calls answer 503 until the rollback is accepted with latticekeep audit accept-rollback", "error", reason)
	}
	if reason := s.rows.State.Halted(); reason != nil {
		s.logger.Error("a stored row of the deployment itself is not the one that the audit log commits to: /readyz and all calls answer 503; stop the server and run latticekeep doctor", "error", reason)
	}
	return parts.Wait()
}
