package app

import (
	"context"
	"errors"
	"net"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/identity/tokenreview"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/quota"
	"github.com/latticekeep/latticekeep/server"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
)

// run serves on l until ctx ends, and closes l. config holds the settings that differ between
// development and production. run calls ready once everything else is set up.
func (s *service) run(ctx context.Context, l net.Listener, config server.Config, ready func()) error {
	config.Vault, config.Transit, config.Identity, config.Audit, config.Guard, config.Reader, config.Keys, config.Store = s.vault, s.transit, s.identity, s.log, s.guard, s.reader, s.keys, s.store
	config.Sealing, config.Custody, config.Recipients = s.sealing, s.custody, s.recipients
	if s.dev || len(s.recipients) > 0 {
		config.KMSKeys = s.keyFiles // the handler serves them only to configured recipients
	}
	var reports *objects.Bucket
	var err error
	if s.compliance, reports, err = s.evidence.openCompliance(ctx, s, s.dir, config.PublicURL); err == nil {
		err = s.evidence.openArchive(ctx, s)
	}
	if err != nil {
		return errors.Join(err, l.Close(), s.closeOperations())
	}
	config.Compliance = s.compliance
	if reports != nil {
		config.Reports = reports
	}
	config.Collectors = append(config.Collectors, proofCollector{s.log, s.verifier, s.evidence.keeper})
	config.Collectors = append(config.Collectors, sealingKeyCollector{s.sealing})
	config.Collectors = append(config.Collectors, auditCollector{s.log})
	fit := config.Ready
	config.Ready = func() error {
		if err := offline.CheckUnmarked(ctx, s.store); err != nil || fit == nil {
			return err
		}
		return fit()
	}
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
	h, err := server.New(config)
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
		s.maintain(running)
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
		o.Vault, o.Identity, o.Keys, o.Logger, o.Now, o.Tenants, o.Tracer = s.vault, s.identity, s.keys, s.logger, s.now, s.tenants, config.Tracer
		parts.Go(func() error {
			return runOperator(running, s.logger, func() error {
				return controllers.Run(running, s.cluster, o)
			})
		})
	}
	ready()
	if reason := s.log.HaltedBy(); reason != nil {
		s.logger.Error("the audit log is halted: /readyz and all calls answer 503 until the rollback is accepted with latticekeep audit accept-rollback", "err", reason)
	}
	return parts.Wait()
}
