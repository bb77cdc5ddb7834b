package metrics

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/backup/schedule"
)

// Backups reports the backups that the server takes by itself. All replicas report the same times,
// and each the failures of its own.
func Backups(s *schedule.Schedule) prometheus.Collector {
	interval := desc("latticekeep_backup_interval_seconds", "How often the server takes a backup by itself. This and the other metrics of backups are absent when it takes none.")
	taken := desc("latticekeep_backup_last_success_timestamp_seconds", "When the newest backup was begun that is complete in its bucket, in Unix time; 0 when there is none.")
	verified := desc("latticekeep_backup_last_verified_timestamp_seconds", "When the newest backup was begun that was restored into a scratch store and verified, in Unix time; 0 when there is none.")
	size := desc("latticekeep_backup_bytes", "Size of the newest backup.")
	failures := desc("latticekeep_backup_failures_total", "Failures of backups, by step: take, verify, or delete.", "step")
	return scraped{[]*prometheus.Desc{interval, taken, verified, size, failures}, func(ctx context.Context, to chan<- prometheus.Metric) {
		gauge(to, interval, s.Every.Seconds())
		status, err := s.Status(ctx)
		for _, step := range schedule.Steps {
			counter(to, failures, float64(status.Failures[step]), string(step))
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
