package app

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
)

// archive moves old audit entries to a bucket and tracks whether they can be read there. No request
// waits for the bucket.
type archive struct {
	log    *writer.Log
	store  store.Store
	bucket *objects.Bucket
	cutter *keeper.Cutter
	now    func() time.Time
	logger *slog.Logger

	mu       sync.Mutex
	readable bool      // result of the last answer
	answered time.Time // time of the last answer; zero when never
	failure  string    // last problem logged
}

const (
	archiveEvery    = 24 * time.Hour      // interval between probes of a readable bucket
	archiveLasts    = 2 * archiveEvery    // validity of an answer; a failed probe is repeated meanwhile
	archivePatience = 3 * time.Second     // timeout of the probe at the start
	archiveHanging  = 5 * time.Minute     // timeout of all other probes
	archiveProbe    = "audit/never-there" // object to ask for while nothing is archived
)

// state returns one of the compliance.Archive constants.
func (a *archive) state() string {
	if a == nil {
		return compliance.ArchiveNone
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if age := a.now().Sub(a.answered); !a.readable || age >= archiveLasts {
		return compliance.ArchiveUnreadable
	}
	return compliance.ArchiveReadable
}

// retentionDays returns for how many days entries stay in the database: 0 for ever, and otherwise at
// least 1. It is less than Cutter.Keep says when newer entries were archived for their number.
func (a *archive) retentionDays(ctx context.Context) (int, error) {
	if a == nil {
		return 0, nil
	}
	const day = 24 * time.Hour
	keep := a.cutter.Keep
	base, err := a.log.ArchivedTo(ctx)
	if err != nil {
		return 0, err
	}
	if base != nil {
		if age := max(day, a.now().Sub(time.UnixMicro(base.Head.Micros))); keep == 0 || age < keep {
			keep = age
		}
	}
	return int(keep / day), nil
}

// due reports whether the bucket must be probed. This is so once a day, and every minute while the
// bucket does not answer or lacks its oldest segment.
func (a *archive) due() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.readable || a.failure != "" || a.now().Sub(a.answered) >= archiveEvery
}

// probe reads the oldest segment back. A deletion rule of the bucket removes the oldest segment
// first, so that segment shows whether the archive is complete.
func (a *archive) probe(ctx context.Context, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var segments []audit.Segment
	err := a.store.View(ctx, func(r store.Reader) (err error) {
		segments, err = audit.Segments(r)
		return err
	})
	if err == nil && len(segments) > 0 {
		_, err = a.bucket.Get(ctx, segments[0].Name)
	} else if err == nil {
		_, err = a.bucket.Exists(ctx, archiveProbe)
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return // the process ends
	}
	lost := fault.Of(err) == fault.NotFound
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil || lost {
		a.readable, a.answered = err == nil, a.now()
	}
	was := a.failure
	if a.failure = ""; err != nil {
		a.failure = fault.Message(err)
	}
	switch {
	case a.failure == was:
	case err == nil:
		a.logger.InfoContext(ctx, "the archive of the audit log can be read again")
	case lost:
		a.logger.ErrorContext(ctx, "the archive of the audit log lacks its oldest segment: restore it, and exclude the archive from the deletion rules of the bucket",
			"object", segments[0].Name)
	default:
		a.logger.WarnContext(ctx, "the archive of the audit log cannot be read; retrying", "in", maintenance, "error", err)
	}
}

// run probes the bucket and archives entries when they are due, until ctx ends. It has a goroutine
// of its own because a bucket may hang.
func (a *archive) run(ctx context.Context) {
	tick := time.NewTicker(maintenance)
	defer tick.Stop()
	for {
		if a.due() {
			a.probe(ctx, archiveHanging)
		}
		a.cutOnce(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// cutOnce archives the entries that are due. It does nothing while the log is halted, because
// nothing can be written then and the halt is already logged.
func (a *archive) cutOnce(ctx context.Context) {
	if a.log.HaltedBy() != nil {
		return
	}
	if cut, err := a.cutter.Run(ctx); errors.Is(err, fault.Conflict) {
		return // another replica was first
	} else if err != nil && ctx.Err() == nil {
		a.logger.Error("moving audit entries to the archive failed, they stay in the database; retrying", "in", maintenance, "error", err)
	} else if cut > 0 {
		a.logger.Info("audit entries were moved to the archive", "entries", cut)
	}
}
