// Package inspection looks at each part of a deployment, for a [diagnosis.Report].
//
// # Model
//
// A [Deployment] is a configuration and the machine that it is used on. A running server looks at
// the parts that it has open ([Deployment.Running]). Without a server, the parts are opened for
// reading, looked at and closed again ([Deployment.Stopped]). Both use the same judgements, so a part
// is described in the same words whoever looks. What only a server can know, such as the last scan
// of all rows, it takes from its parts; what takes long, such as verifying the whole log, only a look
// at a stopped deployment does.
//
// # Invariants
//
//   - Nothing is written and no file is made. The key-management service is asked to wrap and open a
//     random value, and nothing else is asked of a service but to answer.
//   - A part that needs one that is not open is skipped: that one has a line of its own.
package inspection

import (
	"context"
	"crypto/tls"

	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/state/watch"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
)

// Process is what a running server has open.
type Process struct {
	Store    store.Database
	Postgres *postgres.Store // nil: the store is the embedded database
	KMS      []*kms.Key      // the current key first
	Log      *writer.Log
	Verifier *verify.LiveVerifier
	Anchors  *keeper.AnchorKeeper
	Rows     *watch.Watcher
	Outbox   *mail.Outbox
	// Certificate returns that of the listener. Nil: it has none.
	Certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
}

// one makes a check of a function with one line.
func one(part diagnosis.Part, look func(context.Context) diagnosis.Line) diagnosis.Check {
	return diagnosis.Check{Part: part, Look: func(ctx context.Context) []diagnosis.Line { return []diagnosis.Line{look(ctx)} }}
}

// Running returns the checks of a server.
func (d Deployment) Running(p Process) []diagnosis.Check {
	s := &opened{Deployment: d, store: p.Store, made: true, oldest: p.Log.OldestTime, postgres: p.Postgres}
	checks := []diagnosis.Check{
		one(diagnosis.Store, func(ctx context.Context) diagnosis.Line {
			if err := p.Store.Ready(ctx); err != nil {
				return diagnosis.Fail("look at the disk or at PostgreSQL", err)
			}
			return s.describeStore(ctx)
		}),
		one(diagnosis.Rows, func(context.Context) diagnosis.Line { return judgeRows(p.Rows) }),
		one(diagnosis.Chain, func(context.Context) diagnosis.Line { return d.judgeProof(p.Log, p.Verifier.Proof()) }),
		{Part: diagnosis.Anchors, Look: func(context.Context) []diagnosis.Line { return d.judgeAnchors(p.Anchors.Status(), p.Log.Newest()) }},
		{Part: diagnosis.KMS, Look: func(ctx context.Context) []diagnosis.Line { return s.tryKMS(ctx, p.KMS) }},
		{Part: diagnosis.Mail, Look: func(ctx context.Context) []diagnosis.Line { return s.mail(ctx, new(p.Outbox.Stats())) }},
	}
	if p.Certificate != nil {
		checks = append(checks, diagnosis.Check{Part: diagnosis.Certificates, Look: func(ctx context.Context) []diagnosis.Line {
			c, err := p.Certificate(nil)
			return append([]diagnosis.Line{d.judgeCertificate("the server's", c, err)}, d.webhookCertificate(ctx)...)
		}})
	} else {
		checks = append(checks, one(diagnosis.Certificates, func(context.Context) diagnosis.Line { return noCertificate }))
	}
	return append(checks, s.common()...)
}

// common returns the checks that are the same with and without a server.
func (s *opened) common() []diagnosis.Check {
	return []diagnosis.Check{
		{Part: diagnosis.Configuration, Look: func(context.Context) []diagnosis.Line { return s.configuration() }},
		one(diagnosis.Memory, func(context.Context) diagnosis.Line { return judgeMemory(s.Memory) }),
		{Part: diagnosis.Disk, Look: s.disk},
		{Part: diagnosis.Files, Look: func(context.Context) []diagnosis.Line { return s.files() }},
		one(diagnosis.PostgreSQL, s.describePostgres),
		one(diagnosis.Replicas, s.replicas),
		one(diagnosis.Clock, s.clock),
		one(diagnosis.Archive, s.archive),
		{Part: diagnosis.Backups, Look: s.backups},
	}
}

func (d Deployment) configuration() (lines []diagnosis.Line) {
	for _, err := range d.Faults {
		lines = append(lines, diagnosis.Fail("correct the setting; a server does not start with it", err))
	}
	if len(lines) == 0 {
		lines = append(lines, diagnosis.Well("every setting is known, and they go together"))
	}
	return lines
}
