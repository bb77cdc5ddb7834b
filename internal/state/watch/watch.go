// Package watch watches over the stored rows that decide who may do what: it binds those of an
// earlier release's store to the log, searches for rows that somebody else has written, and reports
// them.
package watch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// Watcher owns the state of a deployment. It is safe for concurrent use.
type Watcher struct {
	State *state.State

	database store.Database // without the guard of the state
	openRow  func(key, row []byte) ([]byte, error)
	log      *writer.Log
	logger   *slog.Logger

	refused *prometheus.CounterVec
	wrong   prometheus.Gauge
	scanned prometheus.Gauge

	mu     sync.Mutex
	logged map[string]time.Time // when a row was reported last
	last   Scan
}

// New returns a watcher, and in it a state that has no key yet.
func New(logger *slog.Logger) *Watcher {
	w := &Watcher{
		logger: logger,
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "latticekeep_state_rows_refused_total",
			Help: "Reads of a stored row that is not the one that the log commits to, by family and reason: replaced, removed or added. Also rows whose MAC was wrong when those of an earlier release were bound: damaged.",
		}, []string{"family", "reason"}),
		wrong: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "latticekeep_state_rows_wrong", Help: "Stored rows that the last scan found not to be those that the log commits to.",
		}),
		scanned: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "latticekeep_state_scanned_timestamp_seconds", Help: "When the last scan of all rows ended.",
		}),
		logged: make(map[string]time.Time),
	}
	w.State = state.New(w.report)
	return w
}

// Scan is the result of a scan of all rows.
type Scan struct {
	At    time.Time // its end; zero: there was none yet
	Wrong int       // rows that were not those that the log commits to
}

// LastScan returns the newest complete scan of this process.
func (w *Watcher) LastScan() Scan {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last
}

// Collectors returns the metrics.
func (w *Watcher) Collectors() []prometheus.Collector {
	return []prometheus.Collector{w.refused, w.wrong, w.scanned}
}

// Open gives the watcher what it works on, once the state has its key, and holds the rows of the
// deployment itself against the state. database is the store without the guard of the state. openRow
// returns the content of a row under a MAC, and an error when the MAC is wrong. Errors: fault.Internal when the log had a state and the store has none: somebody has removed its rows, and
// may have put back others before. To know that of a store of an earlier release, Open reads the
// whole log, and refuses a damaged one.
func (w *Watcher) Open(ctx context.Context, database store.Database, log *writer.Log, rd *reader.Reader, openRow func(key, row []byte) ([]byte, error)) error {
	w.database, w.log, w.openRow = database, log, openRow
	if !w.State.Kept() {
		before, err := rd.FindState(ctx)
		if err == nil && before > 0 {
			err = errGone
		}
		if err != nil {
			return fmt.Errorf("looking for an earlier state in the log: %w", err)
		}
	}
	return w.State.CheckOwn(ctx, database)
}

var errGone = fault.New(fault.Internal, "the rows of the state are not there, and the log says that they were: restore a backup")

// oncePer is how long a row that is wrong is not logged again.
const oncePer = time.Minute

// mostLogged bounds the rows that the watcher remembers.
const mostLogged = 10000

// report counts and logs a row that a read has refused.
func (w *Watcher) report(e *state.RowError) {
	w.reportAs(e, "a stored row is not the one that the audit log commits to: stop the server and run latticekeep doctor")
}

// reportDamaged counts and logs a row whose MAC was wrong when it was bound to the log.
func (w *Watcher) reportDamaged(e *state.RowError) {
	w.reportAs(e, "a stored row was damaged before it was bound to the audit log, and is refused: stop the server and run latticekeep doctor")
}

func (w *Watcher) reportAs(e *state.RowError, message string) {
	w.refused.WithLabelValues(e.Family, string(e.Reason)).Inc()
	w.mu.Lock()
	defer w.mu.Unlock()
	name := e.Error()
	now := time.Now()
	if now.Sub(w.logged[name]) <= oncePer {
		return
	}
	if len(w.logged) >= mostLogged {
		clear(w.logged)
	}
	w.logged[name] = now
	w.logger.Error(message, "family", e.Family, "row", fmt.Sprintf("%q", e.Key), "reason", e.Reason)
}

// retryBuild is the pause after which a state that could not be built is tried again.
const retryBuild = time.Minute

// Run builds the state if the store is of an earlier release, and then scans the rows again and
// again, until ctx ends.
func (w *Watcher) Run(ctx context.Context) {
	for {
		w.build(ctx) // again when the loss of a part of the build was accepted
		began := time.Now()
		w.scan(ctx)
		if !sleep(ctx, scanEvery-time.Since(began)) {
			return
		}
	}
}

// build binds the rows of an earlier release's store to the log, once no replica of an earlier
// release is left.
func (w *Watcher) build(ctx context.Context) {
	waits := false
	for !w.State.Complete() {
		ready, err := w.database.ReplicasRead(ctx, format.State)
		if err == nil && ready {
			err = w.State.Build(ctx, w.database, state.Binding{Verify: w.verify, Report: w.reportDamaged, Record: w.commit})
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			w.logger.Error("binding the stored rows to the audit log failed; retrying", "in", retryBuild, "error", err)
		case !ready && !waits:
			w.logger.Info("the stored rows will be bound to the audit log when all replicas of the earlier release have ended")
			waits = true
		case ready:
			w.logger.Info("the stored rows are bound to the audit log from now on: an earlier release cannot open this store any more")
		}
		if !w.State.Complete() && !sleep(ctx, retryBuild) {
			return
		}
	}
}

func (w *Watcher) verify(key, row []byte) error {
	_, err := w.openRow(key, row)
	return err
}

// commit appends STATE_COMMITTED and raises the format of the store, in the last commit of a build.
// From then on an earlier release refuses the store.
func (w *Watcher) commit(tx store.Tx, wrong uint64) error {
	_, err := w.log.Append(tx, audit.Event{
		Type: audit.StateCommitted, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
		Resource:   audit.Resource{Type: audit.ChainResource, ID: w.log.ChainID()},
		Attributes: map[string]string{audit.AttributeEarlierReplays: audit.NotExcluded, audit.AttributeWrongMACs: strconv.FormatUint(wrong, 10)},
	})
	return errors.Join(err, format.Raise(tx, format.State, format.State))
}

// scanShare is the part of a core that a scan of all rows takes, and scanEvery the shortest time
// from the beginning of one scan to that of the next.
const (
	scanShare = 0.1
	scanEvery = time.Minute
)

// scan compares all rows with the state.
func (w *Watcher) scan(ctx context.Context) {
	found, err := w.State.Scan(ctx, w.database, scanShare)
	for _, e := range found.Refused {
		w.report(e)
		if fault.Of(e) == fault.Unavailable { // a row of the deployment itself
			w.State.Halt(e)
		}
	}
	switch {
	case ctx.Err() != nil:
	case err != nil:
		w.logger.Error("scanning the stored rows failed; retrying", "in", scanEvery, "error", err)
	case w.State.Complete():
		w.wrong.Set(float64(len(found.Refused)))
		w.scanned.SetToCurrentTime()
		w.mu.Lock()
		w.last = Scan{time.Now(), len(found.Refused)}
		w.mu.Unlock()
	}
}

// sleep waits and reports whether ctx goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
