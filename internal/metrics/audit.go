package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
)

// SealingKeys counts the objects of each sealing key. It reports nothing when counting fails: with an
// old number somebody might retire a key that is still needed.
func SealingKeys(keys *sealingkey.Service) prometheus.Collector {
	objects := desc("latticekeep_sealing_key_objects",
		"SealedCredential objects whose values are sealed for a sealing key, by its id and its state: current, earlier or retired.", "key_id", "state")
	return scraped{[]*prometheus.Desc{objects}, func(ctx context.Context, to chan<- prometheus.Metric) {
		all, err := keys.Survey(ctx)
		if err != nil {
			return
		}
		for _, k := range all {
			gauge(to, objects, float64(k.Objects), k.ID, string(k.State))
		}
	}}
}

// Log reports the size of the audit log, and its oldest entry in the database.
func Log(log *writer.Log) prometheus.Collector {
	newest := desc("latticekeep_audit_sequence", "Sequence of the newest audit entry.")
	entries := desc("latticekeep_audit_entries_total",
		"Audit entries that this process has committed, by event type and outcome: all that anybody did or tried, REST and operator alike.", "event_type", "outcome")
	oldest := desc("latticekeep_audit_oldest_entry_timestamp_seconds", "When the oldest audit entry that is still in the database was written, in Unix time.")
	stored := desc("latticekeep_audit_stored_entries", "Audit entries that are in the database and not in the archive.")
	return scraped{[]*prometheus.Desc{newest, entries, oldest, stored}, func(ctx context.Context, to chan<- prometheus.Metric) {
		sequence, written, err := log.Progress(ctx)
		if err != nil {
			return
		}
		gauge(to, newest, float64(sequence))
		for kind, n := range written {
			counter(to, entries, float64(n), string(kind.Type), string(kind.Outcome))
		}
		if at, err := log.OldestTime(ctx); err == nil {
			instant(to, oldest, at)
		}
		if n, err := log.StoredEntries(ctx); err == nil {
			gauge(to, stored, float64(n))
		}
	}}
}

// Proof reports how the log is verified and anchored. It reads memory only.
func Proof(log *writer.Log, verifier *verify.LiveVerifier, anchors *keeper.AnchorKeeper) prometheus.Collector {
	checkpointLag := desc("latticekeep_audit_checkpoint_lag_entries", "Entries that the newest checkpoint does not cover yet.")
	verifiedTo := desc("latticekeep_audit_verified_sequence", "The log was verified up to this sequence by this process.")
	broken := desc("latticekeep_audit_broken", "1 when the last verification found that the log does not hold.")
	state := desc("latticekeep_audit_anchor_state",
		"1 for the state that an anchored checkpoint was found in last: ok, unreachable, refused or rollback.", "place", "state")
	sequence := desc("latticekeep_audit_anchor_sequence", "Sequence of the checkpoint that is anchored there.", "place")
	lag := desc("latticekeep_audit_anchor_lag_entries", "Entries that the database has and the checkpoint that is anchored there does not cover.", "place")
	checked := desc("latticekeep_audit_anchor_checked_timestamp_seconds", "When the anchor could last be read, in Unix time.", "place")
	refusals := desc("latticekeep_audit_anchor_refusals_total", "Checkpoints found there that did not verify or belong to another chain.", "place")
	all := []*prometheus.Desc{checkpointLag, verifiedTo, broken, state, sequence, lag, checked, refusals}
	return scraped{all, func(_ context.Context, to chan<- prometheus.Metric) {
		gauge(to, checkpointLag, float64(writer.NewFollower(log).Lag()))
		proof := verifier.Proof()
		gauge(to, verifiedTo, float64(proof.VerifiedTo))
		gauge(to, broken, flag(proof.Broken != nil))
		newest := log.Newest()
		for _, a := range anchors.Status() {
			for _, s := range []keeper.AnchorState{keeper.AnchorOK, keeper.AnchorUnreachable, keeper.AnchorRefused, keeper.AnchorRollback} {
				gauge(to, state, flag(a.State == s), a.Name, string(s))
			}
			gauge(to, sequence, float64(a.Sequence), a.Name)
			gauge(to, lag, float64(newest-min(newest, a.Sequence)), a.Name)
			instant(to, checked, a.Checked, a.Name)
			counter(to, refusals, float64(a.Refused), a.Name)
		}
	}}
}

// Archive reports a log whose old entries move to an archive, after keep and beyond a number of
// entries. 0 is no bound.
func Archive(keep time.Duration, entries uint64, readable func() bool) prometheus.Collector {
	kept := desc("latticekeep_audit_retention_seconds", "How long audit entries stay in the database; at most a day later they move to the archive. Absent without an archive or audit.retention.keep.")
	stay := desc("latticekeep_audit_retention_entries", "How many audit entries stay in the database; the oldest beyond it move to the archive. Absent without an archive or audit.retention.maxEntries.")
	read := desc("latticekeep_audit_archive_readable", "1 when the archive of the audit log could lately be read, and has its oldest segment. Absent without an archive.")
	return scraped{[]*prometheus.Desc{kept, stay, read}, func(_ context.Context, to chan<- prometheus.Metric) {
		if keep > 0 {
			gauge(to, kept, keep.Seconds())
		}
		if entries > 0 {
			gauge(to, stay, float64(entries))
		}
		gauge(to, read, flag(readable()))
	}}
}
