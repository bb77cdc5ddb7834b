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
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/server/gate"
)

// Ready is the line of a production server that scripts read. Its fields
// never change their names.
type Ready struct {
	BaseURL  string `json:"base_url"` // of the listener
	DataDir  string `json:"data_dir"` // empty when the database is elsewhere
	Identity string `json:"identity"`
	Chain    string `json:"chain"`
}

// Serve runs a production server with settings of [Load] until ctx ends, and
// returns nil once requests and reconciles in flight have finished. stdout
// takes one JSON line once the server is ready, stderr the log.
func Serve(ctx context.Context, s config.Config, stdout, stderr io.Writer) (err error) {
	if s.DataDir != "" {
		if s.DataDir, err = filepath.Abs(s.DataDir); err != nil { // for scripts that run elsewhere
			return fmt.Errorf("finding the data directory: %w", err)
		}
	}
	if _, err := compliance.LoadCatalogues(s.Compliance.Catalogues); err != nil { // before anything is made
		return fmt.Errorf("compliance.catalogues: %w", err)
	}
	logger := slog.New(slog.NewJSONHandler(stderr, nil))
	spans, err := newTracing(ctx, s.Tracing, logger)
	if err != nil {
		return err
	}
	if spans != nil {
		defer spans.end(context.WithoutCancel(ctx))
		logger = slog.New(spanHandler{logger.Handler()})
	}
	h := service{logger: logger, now: time.Now, tenants: make(map[string]authz.TenantID), sealingLifetime: s.Sealing.KeyLifetime}
	if h.recipients, err = s.BackupRecipients(); err != nil {
		return fmt.Errorf("backup.recipients: %w", err)
	}
	h.evidence = &evidence{
		Audit: s.Audit, Compliance: s.Compliance, custody: compliance.CustodyKMS, transport: transportOf(s.TLS),
	}
	if _, file := offline.KMSFile(s.KMS.URL); file {
		h.evidence.custody = compliance.CustodyLocal
	}
	defer func() { err = errors.Join(err, h.evidence.close()) }()
	if s.Store.URL != "" { // whose time all replicas go by
		h.clock = newSharedClock()
		h.now = h.clock.Now
	}
	for namespace, tenant := range s.Kubernetes.Namespaces {
		h.tenants[namespace] = authz.TenantID(tenant)
	}
	if h.mails, h.sender, err = mailsOf(s); err != nil {
		return err
	}
	if err := h.connect(s.Kubernetes.Kubeconfig); err != nil {
		return err
	}
	if s.SystemKeySecret != "" && h.cluster == nil {
		return errors.New("systemKeySecret: there is no cluster to make a Secret in: name a file in systemKeyFile, or give kubernetes.kubeconfig")
	}
	h.tracing = spans
	h.evidence.cluster, h.evidence.namespace = h.cluster, ownNamespace(s, podNamespace)
	h.operator.Namespace, h.operator.Policy = ownNamespace(s, podNamespace), s.Kubernetes.Policy.SealingPolicy()
	h.operator.Elect = s.Store.URL != ""
	h.operator.Workers, h.operator.RestartWorkloads = s.Kubernetes.Workers, s.Kubernetes.RestartWorkloads
	handshakes := newHandshakeCounter()
	var encryption *tls.Config
	if s.TLS.CertFile != "" {
		if encryption, err = tlsConfig(s.TLS, handshakes, logger); err != nil {
			return err
		}
	}
	if s.TLS.SecretName != "" {
		if h.cluster == nil {
			return errors.New("tls.secretName: there is no cluster to read a Secret in: give tls.certFile and tls.keyFile, or kubernetes.kubeconfig")
		}
		own, err := tlsFromSecret(h.cluster, h.operator.Namespace, s.TLS.SecretName, h.now, logger)
		if err != nil {
			return err
		}
		encryption = listenerTLS(own.get, s.TLS.PQRequired, handshakes)
		h.operator.Certificates = servingCertificates(s, h.operator.Namespace)
		reading, stop := context.WithCancel(ctx)
		var readers sync.WaitGroup
		readers.Go(func() { own.run(reading) })
		defer readers.Wait()
		defer stop()
	}
	if err := checkKeyFilesOutside(s); err != nil {
		return err
	}
	h.deployment, err = openDeployment(ctx, deploymentOptions{
		dir: s.DataDir, store: s.Store, kms: s.KMS, pq: s.TLS.PQRequired, clock: h.clock, fresh: func() error { return refuseSystemKeyFile(s.SystemKeyFile) },
		policy: h.operator.Policy, objects: h.sealingKeyUse(), tracing: h.tracing, evidence: h.evidence, logger: logger, now: h.now,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.deployment.close()) }()
	if s.Registration.Closed {
		h.identity.CloseRegistration()
	}
	err = h.identity.FirstSystemKey(ctx, func(key string) error { return h.deliverSystemKey(ctx, s, key) })
	if err != nil {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", s.Listen)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	if s.Operations.Listen != "" {
		if h.operations, err = (&net.ListenConfig{}).Listen(ctx, "tcp", s.Operations.Listen); err != nil {
			return fmt.Errorf("listening for operations: %w", errors.Join(err, l.Close()))
		}
	}
	line := Ready{BaseURL: "http://" + l.Addr().String(), DataDir: s.DataDir, Identity: h.keys.Identity().ID(), Chain: h.log.Fingerprint()}
	if encryption != nil {
		line.BaseURL = "https://" + l.Addr().String()
		l = tls.NewListener(l, encryption)
	}
	config := server.Config{
		PublicURL: strings.TrimSuffix(s.PublicURL, "/"), TrustedProxies: s.TrustedProxies, Collectors: []prometheus.Collector{handshakes},
	}
	if encryption != nil {
		config.Ready = func() error {
			_, err := encryption.GetCertificate(nil)
			return err
		}
	}
	config.Rates = gate.Rates{V1: s.Rate.V1, V2: s.Rate.V2, Address: s.Rate.Address, Registrations: s.Rate.Registrations}
	return h.run(ctx, l, config, func() {
		attrs := []any{"base_url", line.BaseURL, "version", buildinfo.Version()}
		if h.operations != nil {
			attrs = append(attrs, "operations", "http://"+h.operations.Addr().String())
		}
		logger.Info("ready", attrs...)
		if err := json.NewEncoder(stdout).Encode(line); err != nil {
			logger.Warn("the ready line could not be written", "err", err)
		}
	})
}

// checkKeyFilesOutside fails when a key file of the KMS is inside the folder of the database.
func checkKeyFilesOutside(s config.Config) error {
	if s.DataDir == "" {
		return nil
	}
	for _, text := range append([]string{s.KMS.URL}, s.KMS.Former...) {
		path, is := offline.KMSFile(text)
		if !is {
			continue
		}
		if ok, err := outside(s.DataDir, path); err != nil {
			return fmt.Errorf("finding kms.url: %w", err)
		} else if !ok {
			return errors.New("kms.url lies in dataDir, where a copy of the one is a copy of the other: move it elsewhere")
		}
	}
	return nil
}

// mailsOf returns who takes mails, and whom they come from.
func mailsOf(s config.Config) (mail.Transport, string, error) {
	smtp := s.Mail.SMTP
	if smtp.Address == "" {
		return noMailServer{}, devSender, nil
	}
	c := mail.SMTPConfig{Address: smtp.Address, Security: smtp.Security, Username: smtp.Username}
	if smtp.PasswordFile != "" {
		b, err := os.ReadFile(smtp.PasswordFile)
		if err != nil {
			return nil, "", fmt.Errorf("reading mail.smtp.passwordFile: %w", err)
		}
		c.Password = []byte(strings.TrimRight(string(b), "\r\n"))
	}
	t, err := mail.NewSMTP(c)
	if err != nil {
		return nil, "", fmt.Errorf("mail.smtp: %w", err)
	}
	return t, s.Mail.From, nil
}

// noMailServer is the transport of a deployment without a mail server.
type noMailServer struct{}

// Send drops the mail; the outbox logs that.
func (noMailServer) Send(context.Context, mail.Envelope) error {
	return fmt.Errorf("%w: no mail server is configured, see mail.smtp.address", mail.ErrRefused)
}

// podNamespace is a file in every pod that has the token of a ServiceAccount.
const podNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// ownNamespace returns the operator's own namespace: that of the configuration,
// that of the pod when its cluster is the one to be the operator of, or the default.
func ownNamespace(s config.Config, file string) string {
	if s.Kubernetes.Namespace != "" {
		return s.Kubernetes.Namespace
	}
	if s.Kubernetes.Kubeconfig == "" {
		if b, err := os.ReadFile(file); err == nil && len(b) > 0 {
			return strings.TrimSpace(string(b))
		}
	}
	return controllers.DefaultNamespace
}
