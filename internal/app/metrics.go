package app

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
)

// sealingKeyCollector counts the objects of each sealing key at every scrape. It reports no metric
// when counting fails: with an old number somebody might retire a key that is still needed.
type sealingKeyCollector struct{ keys *sealingkey.Service }

var sealingKeyObjects = prometheus.NewDesc("latticekeep_sealing_key_objects",
	"SealedCredential objects whose values are sealed for a sealing key, by its id and its state: current, earlier or retired.",
	[]string{"key_id", "state"}, nil)

// collectTimeout bounds a scrape, which may query the cluster.
const collectTimeout = 2 * time.Second

func (c sealingKeyCollector) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- sealingKeyObjects
}

func (c sealingKeyCollector) Collect(metrics chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	keys, err := c.keys.Survey(ctx)
	if err != nil {
		return
	}
	for _, k := range keys {
		metrics <- prometheus.MustNewConstMetric(sealingKeyObjects, prometheus.GaugeValue, float64(k.Objects), k.ID, string(k.State))
	}
}

// auditCollector reports the size of the audit log. It reads the log at every scrape and reports no
// metric when that fails.
type auditCollector struct{ log *writer.Log }

var (
	auditSequence = prometheus.NewDesc("latticekeep_audit_sequence", "Sequence of the newest audit entry.", nil, nil)
	auditEntries  = prometheus.NewDesc("latticekeep_audit_entries_total",
		"Audit entries that this process has committed, by event type and outcome: all that anybody did or tried, REST and operator alike.",
		[]string{"event_type", "outcome"}, nil)
)

func (c auditCollector) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- auditSequence
	descriptions <- auditEntries
}

func (c auditCollector) Collect(metrics chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	sequence, written, err := c.log.Progress(ctx)
	if err != nil {
		return
	}
	metrics <- prometheus.MustNewConstMetric(auditSequence, prometheus.GaugeValue, float64(sequence))
	for kind, n := range written {
		metrics <- prometheus.MustNewConstMetric(auditEntries, prometheus.CounterValue, float64(n), string(kind.Type), string(kind.Outcome))
	}
}

// proofCollector reports how the log is verified and anchored. It reads memory only.
type proofCollector struct {
	log      *writer.Log
	verifier *verify.LiveVerifier
	keeper   *keeper.AnchorKeeper
}

var (
	checkpointLag = prometheus.NewDesc("latticekeep_audit_checkpoint_lag_entries", "Entries that the newest checkpoint does not cover yet.", nil, nil)
	verifiedTo    = prometheus.NewDesc("latticekeep_audit_verified_sequence", "The log was verified up to this sequence by this process.", nil, nil)
	brokenLog     = prometheus.NewDesc("latticekeep_audit_broken", "1 when the last verification found that the log does not hold.", nil, nil)
	anchorState   = prometheus.NewDesc("latticekeep_audit_anchor_state",
		"1 for the state that an anchored checkpoint was found in last: ok, unreachable, refused or rollback.", []string{"place", "state"}, nil)
	anchorSequence = prometheus.NewDesc("latticekeep_audit_anchor_sequence", "Sequence of the checkpoint that is anchored there.", []string{"place"}, nil)
	anchorRefusals = prometheus.NewDesc("latticekeep_audit_anchor_refusals_total",
		"Checkpoints found there that did not verify or belong to another chain.", []string{"place"}, nil)
)

func (c proofCollector) Describe(descriptions chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{checkpointLag, verifiedTo, brokenLog, anchorState, anchorSequence, anchorRefusals} {
		descriptions <- d
	}
}

func (c proofCollector) Collect(metrics chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(checkpointLag, float64(writer.NewFollower(c.log).Lag()))
	proof := c.verifier.Proof()
	gauge(verifiedTo, float64(proof.VerifiedTo))
	broken := 0.0
	if proof.Broken != nil {
		broken = 1
	}
	gauge(brokenLog, broken)
	for _, a := range c.keeper.Status() {
		for _, state := range []keeper.AnchorState{keeper.AnchorOK, keeper.AnchorUnreachable, keeper.AnchorRefused, keeper.AnchorRollback} {
			is := 0.0
			if a.State == state {
				is = 1
			}
			gauge(anchorState, is, a.Name, string(state))
		}
		gauge(anchorSequence, float64(a.Sequence), a.Name)
		metrics <- prometheus.MustNewConstMetric(anchorRefusals, prometheus.CounterValue, float64(a.Refused), a.Name)
	}
}
