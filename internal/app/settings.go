package app

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/controllers/cluster"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/egress"
	"github.com/latticekeep/latticekeep/internal/inspection"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/internal/offline"
)

// deploymentOf returns what a diagnosis looks at. Faults are of the settings that need no store.
func deploymentOf(c config.Config) inspection.Deployment {
	d := inspection.Deployment{Config: c, Version: buildinfo.Version(), Memory: memory.Limit()}
	fault := func(err error) {
		if err != nil {
			d.Faults = append(d.Faults, err)
		}
	}
	at, err := ClusterConfig(c.Kubernetes.Kubeconfig)
	fault(err)
	fault(checkCatalogues(c))
	fault(checkKeyFilesOutside(c))
	fault(checkBackupsOutside(c))
	if at == nil && err == nil {
		d.Faults = append(d.Faults, needsCluster(c)...)
	}
	_, _, err = mailsOf(c)
	fault(err)
	_, err = egressOf(c.Egress)
	fault(err)
	if at == nil {
		return d
	}
	namespace := ownNamespace(c, podNamespace)
	d.ConfigMap = func(chainID string) (keeper.Anchor, error) {
		return cluster.NewAnchor(at, namespace, c.Audit.Anchor.ConfigMap, chainID)
	}
	d.Secret = func(ctx context.Context, name string) (*tls.Certificate, error) {
		s, err := tlsFromSecret(at, namespace, name, time.Now, slog.New(slog.DiscardHandler))
		if err == nil {
			err = s.read(ctx)
		}
		if err != nil {
			return nil, err
		}
		return s.get(nil)
	}
	return d
}

// Diagnose looks at a deployment that no server uses: at what a start needs, or also at the whole log
// and every row, which may take minutes. row is called for each row that is read; it may be nil.
func Diagnose(ctx context.Context, c config.Config, whole bool, row func()) diagnosis.Report {
	depth := inspection.Start
	if whole {
		depth = inspection.Whole
	}
	return deploymentOf(c).Stopped(ctx, depth, row)
}

// diagnoseStart returns a function that looks at a deployment whose PostgreSQL this server waits for, and
// nil for the embedded database, which only its server opens while it starts.
func diagnoseStart(c config.Config) func(context.Context) diagnosis.Report {
	if c.Store.URL == "" {
		return nil
	}
	latest := &diagnosis.Latest{Run: func(ctx context.Context) diagnosis.Report { return Diagnose(ctx, c, false, nil) }}
	return latest.Report
}

// diagnose returns a function that looks at this server: at some parts, or without any at all of them.
func (s *service) diagnose(c config.Config, certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) func(context.Context, ...diagnosis.Part) diagnosis.Report {
	p := inspection.Process{
		Store: s.store, KMS: s.kms, Log: s.log, Verifier: s.verifier, Anchors: s.evidence.keeper, Rows: s.rows, Outbox: s.identity.Outbox(), Certificate: certificate,
	}
	if s.clock != nil {
		p.Postgres = s.clock.store.Load()
	}
	d := deploymentOf(c)
	checks := d.Running(p)
	latest := &diagnosis.Latest{Run: func(ctx context.Context) diagnosis.Report {
		return diagnosis.Run(ctx, d.Version, diagnosis.Limit, checks...)
	}}
	return func(ctx context.Context, parts ...diagnosis.Part) diagnosis.Report {
		if len(parts) == 0 {
			return latest.Report(ctx)
		}
		return diagnosis.Run(ctx, d.Version, diagnosis.Limit, diagnosis.Only(checks, parts...)...)
	}
}

// needsCluster returns which settings cannot be used without a cluster.
func needsCluster(c config.Config) (wrong []error) {
	if c.SystemKeySecret != "" {
		wrong = append(wrong, errors.New("systemKeySecret: there is no cluster to make a Secret in: name a file in systemKeyFile, or give kubernetes.kubeconfig"))
	}
	if c.TLS.SecretName != "" {
		wrong = append(wrong, errors.New("tls.secretName: there is no cluster to read a Secret in: give tls.certFile and tls.keyFile, or kubernetes.kubeconfig"))
	}
	return wrong
}

func checkCatalogues(c config.Config) error {
	if _, err := compliance.LoadCatalogues(c.Compliance.Catalogues); err != nil {
		return fmt.Errorf("compliance.catalogues: %w", err)
	}
	return nil
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
			return fmt.Errorf("finding kms.url: %w", durable.ExplainRefusal(path, err))
		} else if !ok {
			return errors.New("kms.url lies in dataDir, where a copy of the one is a copy of the other: move it elsewhere")
		}
	}
	return nil
}

// checkBackupsOutside fails when backups would go into the folder of the database.
func checkBackupsOutside(s config.Config) error {
	u, err := url.Parse(s.Backup.Bucket)
	if err != nil || u.Scheme != "file" || s.DataDir == "" {
		return nil // config has checked that it is a URL
	}
	if ok, err := outside(s.DataDir, u.Path); err != nil {
		return fmt.Errorf("finding backup.bucket: %w", durable.ExplainRefusal(u.Path, err))
	} else if !ok {
		return errors.New("backup.bucket lies in dataDir, where backups are lost with the database: move it to another volume or machine")
	}
	return nil
}

// mailsOf returns the transport and the sender of e-mails.
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

// egressOf returns the client for addresses that tenants name.
func egressOf(c config.Egress) (*egress.Client, error) {
	o := egress.Options{Allow: c.Networks()}
	if c.CAFile != "" {
		b, err := os.ReadFile(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("reading egress.caFile: %w", err)
		}
		if o.Roots, err = x509.SystemCertPool(); err != nil {
			return nil, fmt.Errorf("reading the certificates that the system trusts: %w", err)
		}
		if !o.Roots.AppendCertsFromPEM(b) {
			return nil, errors.New("egress.caFile: it has no certificate: give PEM")
		}
	}
	return egress.New(o), nil
}

// noMailServer is the mail.Transport of a deployment without a mail server.
type noMailServer struct{}

// Send drops the e-mail. The outbox logs the error.
func (noMailServer) Send(context.Context, mail.Envelope) error {
	return fmt.Errorf("%w: no mail server is configured, see mail.smtp.address", mail.ErrRefused)
}

// podNamespace is a file with the pod's namespace. It is in every pod that has a ServiceAccount
// token.
const podNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

// ownNamespace returns the operator's own namespace. This is the configured one, else the pod's if
// the operator manages the pod's cluster, else the default.
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
