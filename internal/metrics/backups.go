package metrics

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/backup/schedule"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// Backups reports the backups that the server takes by itself. All replicas report the same times,
// and each the failures of its own. log is the log of commits, or nil.
func Backups(s *schedule.Schedule, log *commits.Shipper) prometheus.Collector {
	interval := desc("latticekeep_backup_interval_seconds", "How often the server takes a backup by itself. This and the other metrics of backups are absent when it takes none.")
	taken := desc("latticekeep_backup_last_success_timestamp_seconds", "When the newest backup was begun that is complete in its bucket, in Unix time; 0 when there is none.")
	verified := desc("latticekeep_backup_last_verified_timestamp_seconds", "When the newest backup was begun that was restored into a scratch store and verified, in Unix time; 0 when there is none.")
	size := desc("latticekeep_backup_bytes", "Size of the newest backup.")
	failures := desc("latticekeep_backup_failures_total", "Failures of backups, by step: take, verify, or delete.", "step")
	all := []*prometheus.Desc{interval, taken, verified, size, failures}
	shipped := desc("latticekeep_commits_shipped_until_timestamp_seconds", "Every commit before this time can be restored from the bucket of backups, in Unix time. This and the other metrics of commits are absent with PostgreSQL.")
	segments := desc("latticekeep_commits_segments_total", "Segments of the log of commits that were shipped.")
	bytes := desc("latticekeep_commits_shipped_bytes_total", "Bytes of the log of commits that were shipped.")
	tries := desc("latticekeep_commits_failures_total", "Tries to ship commits that failed.")
	logs := desc("latticekeep_commits_logs_total", "Logs of commits that have begun, by cause: first, gap, or fork.", "cause")
	if log != nil {
		all = append(all, shipped, segments, bytes, tries, logs)
	}
	return scraped{all, func(ctx context.Context, to chan<- prometheus.Metric) {
		gauge(to, interval, s.Every.Seconds())
		status, err := s.Status(ctx)
		for _, step := range schedule.Steps {
			counter(to, failures, float64(status.Failures[step]), string(step))
		}
		if log != nil {
			l := log.Status()
			counter(to, segments, float64(l.Segments))
			counter(to, bytes, float64(l.Bytes))
			counter(to, tries, float64(l.Failures))
			for _, cause := range commits.Causes {
				counter(to, logs, float64(l.Logs[cause]), string(cause))
			}
			switch until, failed := log.Until(ctx); {
			case l.Log == "", l.Log != status.Log, errors.Is(failed, bolt.ErrNoLog): // no backup that it goes on after
				gauge(to, shipped, unix(l.Began))
			case failed == nil:
				gauge(to, shipped, unix(until))
			}
		}
		if err != nil {
			return
		}
		gauge(to, taken, unix(status.Taken))
		gauge(to, verified, unix(status.Verified))
		gauge(to, size, float64(status.Bytes))
	}}
}

// unix returns a time in Unix seconds, and 0 for the zero time, so that an alert on its age sees that
// there was none.
func unix(at time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return float64(at.Unix())
}
