// Package app is the process: it is the only package that wires the parts together. [Serve] runs a
// production server, [Dev] a development server, and [Webhook] the admission webhook.
package app

import (
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/quota"
)

// service holds the parts that run side by side, in development and in production.
type service struct {
	*deployment
	logger  *slog.Logger
	calls   *metrics.Calls
	now     func() time.Time
	mails   mail.Transport
	sender  string                    // sender of e-mails
	cluster *rest.Config              // nil without an operator
	tenants map[string]authz.TenantID // tenants by namespace

	operator   controllers.Options // configured options only
	operations net.Listener        // nil when the main listener serves operations
	tracing    *tracing            // nil without tracing
	clock      *sharedClock        // clock of the shared database; nil with one replica
	lender     *quota.Shared       // shared limits for requests; nil with one replica

	dev        bool               // a development server shows its secrets to its administrator
	recipients []backup.Recipient // recipients of backups over the API; empty allows any recipient, and then backups lack the KMS key

	sealingLifetime time.Duration // lifetime of a sealing key before its rotation; 0: for ever

	evidence   *evidence // proofs of the log
	compliance *assessor.Service
}

// audience is the audience of the ServiceAccount tokens that pods present to this server.
const audience = "latticekeep"

func (s *service) closeOperations() error {
	if s.operations == nil {
		return nil
	}
	return s.operations.Close()
}

// collectors returns the metrics of all parts but HTTP, TLS and the operator.
func (s *service) collectors() []prometheus.Collector {
	all := append(s.calls.Collectors(), s.rows.Collectors()...)
	all = append(all, metrics.Database(s.store), metrics.Keys(s.keys), metrics.SealingKeys(s.sealing), metrics.Mail(s.identity.Outbox()),
		metrics.Log(s.log), metrics.Proof(s.log, s.verifier, s.evidence.keeper))
	if s.dir != "" {
		all = append(all, metrics.Disk(s.dir))
	}
	if s.clock != nil {
		all = append(all, metrics.Postgres(s.clock.store.Load().Stats))
	}
	if a := s.evidence.archive; a != nil {
		all = append(all, metrics.Archive(a.cutter.Keep, func() bool { return a.state() == compliance.ArchiveReadable }))
	}
	return all
}
