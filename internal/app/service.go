// Package app is the process: it is the only package that wires the parts together. [Serve] runs a
// production server, [Dev] a development server, and [Webhook] the admission webhook.
package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/backup/schedule"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/egress"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/internal/metrics"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/lifetime"
	"github.com/latticekeep/latticekeep/internal/webhooks"
)

// service holds the parts that run side by side, in development and in production.
type service struct {
	*deployment
	logger   *slog.Logger
	calls    *metrics.Calls
	now      func() time.Time
	mails    mail.Transport
	sender   string                    // sender of e-mails
	webhooks *webhooks.Service         // made by run
	names    *past.Sweeper             // likewise: erases past names
	egress   *egress.Client            // calls addresses that tenants name
	cluster  *rest.Config              // nil without an operator
	tenants  map[string]authz.TenantID // tenants by namespace

	operator   controllers.Options // configured options only
	operations net.Listener        // nil when the main listener serves operations
	tracing    *tracing            // nil without tracing
	clock      *sharedClock        // clock of the shared database; nil with one replica
	lender     *quota.Shared       // shared limits for requests; nil with one replica

	certificate func() error // why the listener has no certificate, or nil; nil without TLS

	dev        bool               // a development server shows its secrets to its administrator
	recipients []backup.Recipient // recipients of backups over the API; empty allows any recipient, and then backups lack the KMS key

	sealingLifetime time.Duration // lifetime of a sealing key before its rotation; 0: for ever

	evidence   *evidence          // proofs of the log
	backups    *schedule.Schedule // nil: the server takes no backups by itself
	commits    *commits.Shipper   // nil: no backups, or PostgreSQL
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
	all = append(all, metrics.Memory(memory.Limit, s.memoryNeed), metrics.Database(s.store), metrics.Keys(s.keys), metrics.SealingKeys(s.sealing), metrics.Mail(s.identity.Outbox()),
		metrics.Log(s.log), metrics.Proof(s.log, s.verifier, s.evidence.keeper))
	if s.dir != "" {
		all = append(all, metrics.Disk(s.dir))
	}
	if s.clock != nil {
		all = append(all, metrics.Postgres(s.clock.store.Load().Stats))
	}
	if s.backups != nil {
		all = append(all, metrics.Backups(s.backups, s.commits))
	}
	if a := s.evidence.archive; a != nil {
		all = append(all, metrics.Archive(a.cutter.Keep, a.cutter.MaxEntries, func() bool { return a.state() == compliance.ArchiveReadable }))
	}
	return all
}

// checks returns what decides whether this replica is ready, and what /readyz?verbose shows. A fault
// of the embedded database is this replica's own; all replicas share PostgreSQL.
func (s *service) checks() []health.Check {
	store := health.Replica
	if s.clock != nil {
		store = health.Shared
	}
	all, none := health.Classes(), []health.Class(nil)
	calls := s.watchKMS()
	checks := []health.Check{
		{Name: "store", Scope: store, Stops: all, Ask: s.store.Ready},
		{Name: "format", Scope: health.Replica, Stops: all, Ask: func(ctx context.Context) error { return ofItsOwn(checkServable(ctx, s.store)) }},
		{Name: "log", Scope: health.Shared, Stops: all, Ask: func(ctx context.Context) error { return ofItsOwn(s.log.CheckHistory(ctx)) }},
		{Name: "rows", Scope: health.Shared, Stops: all, Ask: func(context.Context) error { return s.rows.State.Halted() }},
		{Name: "kms", Scope: health.Shared, Stops: all, Ask: func(ctx context.Context) error {
			if err := calls.Ask(ctx); !errors.Is(err, kms.ErrCredentials) {
				return err
			}
			return nil
		}},
		{Name: "kms-credentials", Scope: health.Replica, Stops: all, Ask: func(ctx context.Context) error {
			if err := calls.Ask(ctx); errors.Is(err, kms.ErrCredentials) {
				return err
			}
			return nil
		}},
		{Name: "sealing-key", Scope: health.Shared, Stops: none, Ask: func(ctx context.Context) error {
			_, err := s.keys.SealingDocument(ctx)
			return ofItsOwn(err)
		}},
		{Name: "chain", Scope: health.Shared, Stops: none, Ask: func(context.Context) error {
			if broken := s.verifier.Proof().Broken; broken != nil {
				return broken
			}
			return nil
		}},
		s.checkMemory(),
		{Name: "anchors", Scope: health.Shared, Stops: none, Ask: func(context.Context) error { return checkAnchors(s.evidence.keeper.Status()) }},
	}
	if s.certificate != nil {
		checks = append(checks, health.Check{Name: "certificate", Scope: health.Replica, Stops: all, Ask: func(context.Context) error { return s.certificate() }})
	}
	if s.clock == nil { // the embedded database
		checks = append(checks, health.Check{Name: "disk", Scope: health.Replica, Stops: []health.Class{health.Change}, Ask: func(ctx context.Context) error {
			if u, err := s.store.Usage(ctx); err == nil && u.Reserved {
				return errDiskFull
			}
			return nil // without an answer, the check of the store fails
		}})
	} else { // requests cannot be counted with a wrong time
		checks = append(checks, health.Check{Name: "clock", Scope: health.Replica, Stops: all, Ask: func(ctx context.Context) error {
			return ofItsOwn(s.clock.Fresh(ctx, clockAge))
		}})
	}
	return checks
}

var errDiskFull = fault.Outage(fault.ReasonSpace, "the disk of the database is full: free space or make the volume larger. Until then only reads and removals are served", nil)

// clockAge is how old the last answer about the time may be. The clock asks more often by itself.
const clockAge = 30 * time.Second

// watchKMS judges the KMS by the calls of requests. Unwrapped keys bridge an outage for their time in
// the cache.
func (s *service) watchKMS() *health.Watch {
	return &health.Watch{
		Last: func() health.Outcome { return health.Outcome(s.kms[0].Outcome()) },
		Try: func(ctx context.Context) error {
			asked, err := s.keys.TryKMS(ctx)
			if !asked {
				return health.ErrUnasked
			}
			return err
		},
		Bridges: s.keys.CacheTTL(), Now: time.Now,
	}
}

// ofItsOwn returns err unless another check reports it: that of the database, or that of the rows.
func ofItsOwn(err error) error {
	switch fault.ReasonOf(err) {
	case fault.ReasonStore, fault.ReasonSpace, fault.ReasonTimeout, fault.ReasonRows:
		return nil
	}
	return err
}

// checkAnchors returns which places of anchors could not be read or do not agree with the log.
func checkAnchors(anchors []keeper.AnchorStatus) error {
	var errs []error
	for _, a := range anchors {
		if a.State != keeper.AnchorOK {
			errs = append(errs, fmt.Errorf("%s: %s", a.Name, a.State))
		}
	}
	return errors.Join(errs...)
}

// maintenance is the interval of background work.
const maintenance = time.Minute

// maintain does the due work every minute until ctx ends. It then stores for the last time what is counted
// in memory.
func (s *service) maintain(ctx context.Context) {
	tick := time.NewTicker(maintenance)
	defer tick.Stop()
	for {
		s.maintainOnce(ctx)
		select {
		case <-tick.C:
			s.flush(ctx, false)
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
			defer cancel()
			s.flush(ctx, true)
			return
		}
	}
}

// maintainOnce rotates the keys that are due, including the sealing key, removes old idempotency
// keys and reports, and assesses tenants. A failed step is tried again at the next run. While the
// log is halted nothing can be written, and the halt is already logged.
func (s *service) maintainOnce(ctx context.Context) {
	if err := s.evidence.expireReports(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("removing old reports failed; retrying", "in", maintenance, "error", err)
	}
	if s.log.HaltedBy() != nil {
		return
	}
	if n, err := s.transit.RotateDue(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("rotating due keys failed; retrying", "in", maintenance, "error", err)
	} else if n > 0 {
		s.logger.Info("rotated due keys", "keys", n)
	}
	if rotated, err := s.sealing.RotateDue(ctx, s.sealingLifetime); err != nil && ctx.Err() == nil {
		s.logger.Error("rotating the sealing key failed; retrying", "in", maintenance, "error", err)
	} else if rotated {
		s.logger.Info("rotated the sealing key, which was due")
	}
	if s.lender != nil {
		if err := s.lender.Sweep(ctx); err != nil && ctx.Err() == nil {
			s.logger.Error("deleting old quotas failed; retrying", "in", maintenance, "error", err)
		}
	}
	if _, err := s.vault.Sweep(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("deleting expired idempotency keys failed; retrying", "in", maintenance, "error", err)
	}
	if _, err := s.names.Sweep(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("erasing past names failed; retrying", "in", maintenance, "error", err)
	}
	if err := s.compliance.AssessAll(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("assessing tenants failed; retrying", "in", maintenance, "error", err)
	}
}

// flushTimeout bounds the last writes of a server that ends.
const flushTimeout = 5 * time.Second

// flush stores what is counted in memory; the last time, all of it.
func (s *service) flush(ctx context.Context, last bool) {
	if s.log.HaltedBy() != nil {
		return
	}
	if err := s.identity.FlushLastUsed(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("writing the last use of API keys failed; retrying", "in", maintenance, "error", err)
	}
	if err := s.guard.RecordRepetitions(ctx, last); err != nil && ctx.Err() == nil {
		s.logger.Error("recording how often reads were repeated failed; retrying", "in", maintenance, "error", err)
	}
}

// remind prepares what tells a tenant that credentials expire soon: a mail to each owner, if there is a
// mail server, and a delivery to each webhook.
func (s *service) remind(ctx context.Context, tenant authz.TenantID, soon lifetime.Find) (put func(store.Tx) error, err error) {
	mails := func(store.Tx) error { return nil }
	if _, none := s.mails.(noMailServer); !none {
		if mails, err = s.identity.RemindOwners(ctx, tenant); err != nil {
			return nil, err
		}
	}
	deliveries, err := s.webhooks.Remind(ctx, tenant, soon)
	if err != nil {
		return nil, err
	}
	return func(tx store.Tx) error {
		if err := errors.Join(mails(tx), deliveries(tx)); err != nil {
			return err
		}
		tx.OnCommit(s.webhooks.Notify)
		return nil
	}, nil
}
