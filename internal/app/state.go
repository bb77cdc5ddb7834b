package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// rows watches over the stored rows that decide who may do what: it reports those that somebody else
// has written, and searches for them.
type rows struct {
	logger  *slog.Logger
	refused *prometheus.CounterVec
	wrong   prometheus.Gauge
	scanned prometheus.Gauge

	mu     sync.Mutex
	logged map[string]time.Time // when a row was reported last
}

func newRows(logger *slog.Logger) *rows {
	return &rows{
		logger: logger,
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "latticekeep_state_rows_refused_total",
			Help: "Reads of a stored row that is not the one that the log commits to, by family and reason: replaced, removed or added.",
		}, []string{"family", "reason"}),
		wrong: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "latticekeep_state_rows_wrong", Help: "Stored rows that the last scan found not to be those that the log commits to.",
		}),
		scanned: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "latticekeep_state_scanned_timestamp_seconds", Help: "When the last scan of all rows ended.",
		}),
		logged: make(map[string]time.Time),
	}
}

// oncePer is how long a row that is wrong is not logged again.
const oncePer = time.Minute

// report counts and logs a row that a read has refused.
func (w *rows) report(e *state.RowError) {
	w.refused.WithLabelValues(e.Family, string(e.Reason)).Inc()
	w.mu.Lock()
	defer w.mu.Unlock()
	name := e.Error()
	if now := time.Now(); now.Sub(w.logged[name]) > oncePer {
		if len(w.logged) > 10000 {
			clear(w.logged)
		}
		w.logged[name] = now
		w.logger.Error("a stored row is not the one that the audit log commits to: stop the server and run latticekeep doctor", "family", e.Family, "row", fmt.Sprintf("%q", e.Key), "reason", e.Reason)
	}
}

var errStateGone = errors.New("the rows of the state are not there, and the log says that they were: restore a backup")

// checkKept returns an error when the log had a state and the store has none: somebody has removed
// its rows, and older ones may have been put back.
func checkKept(ctx context.Context, s *state.State, rd *reader.Reader) error {
	if s.Kept() {
		return nil
	}
	gone := false
	err := rd.Visit(ctx, authz.SystemTenant, func(e *audit.Entry) {
		gone = gone || e.EventType == audit.StateCommitted || e.Attributes[audit.AttributeState] != ""
	}, audit.StateCommitted, audit.ChainStarted)
	if err == nil && gone {
		err = errStateGone
	}
	return err
}

// retryBuild is the pause after which a state that could not be built is tried again.
const retryBuild = time.Minute

// build binds the rows of an earlier release's store to the log.
func (s *service) buildState(ctx context.Context) {
	for !s.state.Complete() {
		err := s.state.Build(ctx, s.database, func(tx store.Tx) error {
			_, err := s.log.Append(tx, audit.Event{
				Type: audit.StateCommitted, Outcome: audit.Success, Principal: authz.SystemPrincipal(authz.SystemTenant),
				Resource: audit.Resource{Type: audit.ChainResource, ID: s.log.ChainID()},
			})
			return err
		})
		if err == nil {
			s.logger.Info("the stored rows are bound to the audit log from now on: an earlier release can no longer write this store")
			return
		}
		if ctx.Err() != nil {
			return
		}
		s.logger.Error("binding the stored rows to the audit log failed; retrying", "in", retryBuild, "err", err)
		if !sleep(ctx, retryBuild) {
			return
		}
	}
}

// scanShare is the part of a core that a scan of all rows takes, and scanEvery the shortest time
// from the beginning of one scan to that of the next.
const (
	scanShare = 0.1
	scanEvery = time.Minute
)

// scanRows holds all rows against the state, again and again, until ctx ends.
func (s *service) scanRows(ctx context.Context) {
	for {
		began := time.Now()
		found, err := s.state.Scan(ctx, s.database, scanShare)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			s.logger.Error("holding the stored rows against the audit log failed; retrying", "in", scanEvery, "err", err)
		case s.state.Complete():
			for _, e := range found.Refused {
				s.rows.report(e)
			}
			s.rows.wrong.Set(float64(len(found.Refused)))
			s.rows.scanned.SetToCurrentTime()
		}
		if !sleep(ctx, scanEvery-time.Since(began)) {
			return
		}
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
