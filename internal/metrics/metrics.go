// Package metrics has the Prometheus collectors of the parts that fail: the database, its disk, the
// KMS, certificates, e-mail, and the audit log with its anchors and its archive.
//
// A scrape reads memory, or asks for what takes the same time however much is stored. A value that
// cannot be found out is absent, since an old number would be taken for a new one. Labels have few
// values: none is the id or the name of a tenant, a user or a key.
package metrics

import (
	"context"
	"crypto/tls"
	"errors"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/connections"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres"
)

// scraped is a collector whose values are found out at each scrape.
type scraped struct {
	descs   []*prometheus.Desc
	collect func(context.Context, chan<- prometheus.Metric)
}

// timeout bounds what one collector does at a scrape, which may ask a database or a cluster.
const timeout = 2 * time.Second

// Describe implements prometheus.Collector.
func (s scraped) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range s.descs {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (s scraped) Collect(to chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	s.collect(ctx, to)
}

// Connections is the collector of the connections of a listener.
func Connections(l *connections.Listener) prometheus.Collector {
	open := desc("latticekeep_connections", "Open connections of the interface: kept, of callers with a credential and trusted proxies, and idle or busy ones of strangers.", "state")
	closed := desc("latticekeep_connections_closed_total", "Connections that were ended for others: their address had too many, or all had, or their tenant had the most.", "reason")
	return scraped{[]*prometheus.Desc{open, closed}, func(_ context.Context, to chan<- prometheus.Metric) {
		n := l.Counts()
		gauge(to, open, float64(n.Kept), "kept")
		gauge(to, open, float64(n.Idle), "idle")
		gauge(to, open, float64(n.Busy), "busy")
		for _, reason := range []connections.Reason{connections.Crowded, connections.Full, connections.Largest} {
			counter(to, closed, float64(n.Closed[reason]), string(reason))
		}
	}}
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

func gauge(to chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

func counter(to chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, value, labels...)
}

// instant sends a time in Unix seconds, and nothing for the zero time.
func instant(to chan<- prometheus.Metric, d *prometheus.Desc, at time.Time, labels ...string) {
	if !at.IsZero() {
		gauge(to, d, float64(at.UnixMilli())/1000, labels...)
	}
}

func flag(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// Calls measures the commits of the database and the calls of the KMS. It exists before both.
type Calls struct {
	commits  prometheus.Histogram
	updates  prometheus.Histogram
	failures prometheus.Counter

	kms         *prometheus.CounterVec
	kmsDuration *prometheus.HistogramVec
	kmsSuccess  prometheus.Gauge
}

// The operations and results of calls of the KMS.
const (
	wrap, unwrap                                    = "wrap", "unwrap"
	succeeded, unavailable, refused, failed, gaveUp = "ok", "unavailable", "refused", "failed", "cancelled"
)

// NewCalls returns the metrics with all of their labels at 0, so that a first failure is an
// increase.
func NewCalls() *Calls {
	durations := prometheus.ExponentialBuckets(0.0005, 2, 15) // 0.5 ms to 8 s
	c := &Calls{
		commits: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "latticekeep_store_commit_duration_seconds", Buckets: durations,
			Help: "Time of a commit that succeeded, from the first change of its group to the disk's or PostgreSQL's answer.",
		}),
		updates: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "latticekeep_store_commit_changes", Buckets: prometheus.ExponentialBuckets(1, 2, 10),
			Help: "Changes that shared a commit that succeeded.",
		}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "latticekeep_store_commit_failures_total",
			Help: "Attempts to commit that failed, those that were repeated included.",
		}),
		kms: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "latticekeep_kms_calls_total",
			Help: "Calls of the key-management service, by operation and result: ok, unavailable, refused, failed, or cancelled by us.",
		}, []string{"operation", "result"}),
		kmsDuration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "latticekeep_kms_call_duration_seconds", Buckets: durations,
			Help: "Time of a call of the key-management service with its repetitions, whatever its result.",
		}, []string{"operation"}),
		kmsSuccess: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "latticekeep_kms_last_success_timestamp_seconds",
			Help: "When the key-management service answered last, in Unix time.",
		}),
	}
	for _, operation := range []string{wrap, unwrap} {
		for _, result := range []string{succeeded, unavailable, refused, failed, gaveUp} {
			c.kms.WithLabelValues(operation, result)
		}
	}
	return c
}

// Collectors returns the metrics.
func (c *Calls) Collectors() []prometheus.Collector {
	return []prometheus.Collector{c.commits, c.updates, c.failures, c.kms, c.kmsDuration, c.kmsSuccess}
}

// ObserveCommit is a store.Observer.
func (c *Calls) ObserveCommit(of store.Commit) {
	if of.Err != nil {
		c.failures.Inc()
		return
	}
	c.commits.Observe(of.Took.Seconds())
	c.updates.Observe(float64(of.Updates))
}

// MeasureKMS returns a key that measures the calls of another.
func (c *Calls) MeasureKMS(key keyring.KMS) keyring.KMS { return measuredKMS{key, c} }

type measuredKMS struct {
	keyring.KMS
	calls *Calls
}

// Wrap implements keyring.KMS.
func (k measuredKMS) Wrap(ctx context.Context, keyContext string, key []byte) (wrapped []byte, err error) {
	defer k.calls.timed(ctx, wrap, &err)()
	return k.KMS.Wrap(ctx, keyContext, key)
}

// Unwrap implements keyring.KMS.
func (k measuredKMS) Unwrap(ctx context.Context, keyContext string, wrapped []byte) (key []byte, err error) {
	defer k.calls.timed(ctx, unwrap, &err)()
	return k.KMS.Unwrap(ctx, keyContext, wrapped)
}

// timed starts a measurement, and returns what ends it.
func (c *Calls) timed(ctx context.Context, operation string, err *error) (end func()) {
	began := time.Now()
	return func() {
		c.kmsDuration.WithLabelValues(operation).Observe(time.Since(began).Seconds())
		result := failed
		switch kind := fault.Of(*err); {
		case *err == nil:
			result = succeeded
			c.kmsSuccess.SetToCurrentTime()
		case errors.Is(ctx.Err(), context.Canceled):
			result = gaveUp
		case kind == fault.Unavailable:
			result = unavailable
		case kind == fault.Forbidden:
			result = refused
		}
		c.kms.WithLabelValues(operation, result).Inc()
	}
}

// Keys reports the cache of unwrapped keys, which serves while the KMS does not.
func Keys(ring *keyring.Ring) prometheus.Collector {
	sets := desc("latticekeep_kms_cached_key_sets", "Sets of keys in memory that the key-management service has unwrapped.")
	oldest := desc("latticekeep_kms_cache_oldest_timestamp_seconds", "When the key-management service was asked for the cached set that is the oldest, in Unix time.")
	return scraped{[]*prometheus.Desc{sets, oldest}, func(_ context.Context, to chan<- prometheus.Metric) {
		n, since := ring.Cached()
		gauge(to, sets, float64(n))
		instant(to, oldest, since)
	}}
}

// Database reports how much room the rows take.
func Database(db store.Database) prometheus.Collector {
	size := desc("latticekeep_store_bytes", "Size of the database file, or of the tables in PostgreSQL with their indexes.")
	free := desc("latticekeep_store_free_bytes", "Part of the database file that the next commits use before it grows. Absent for PostgreSQL.")
	reserve := desc("latticekeep_store_reserve_bytes", "Remaining bytes of the reserve in the database file, from which reads and removals are served on a full disk. Absent for PostgreSQL.")
	reserved := desc("latticekeep_store_reserved", "1 while the disk is full and changes are refused, otherwise 0. Absent for PostgreSQL.")
	returned := desc("latticekeep_store_compaction_returned_bytes_total", "Bytes that compactions of the database gave back to the file system. Absent for PostgreSQL.")
	compacted := desc("latticekeep_store_compaction_last_timestamp_seconds", "When the last compaction ended, in Unix time. Absent until there was one, and for PostgreSQL.")
	return scraped{[]*prometheus.Desc{size, free, reserve, reserved, returned, compacted}, func(ctx context.Context, to chan<- prometheus.Metric) {
		u, err := db.Usage(ctx)
		if err != nil {
			return
		}
		gauge(to, size, float64(u.Size))
		if u.Free >= 0 {
			gauge(to, free, float64(u.Free))
			gauge(to, reserve, float64(u.Reserve))
			gauge(to, reserved, flag(u.Reserved))
			counter(to, returned, float64(u.Returned))
			instant(to, compacted, u.Compacted)
		}
	}}
}

// Memory reports how many bytes the process may use, if there is a limit, and how many the deployment
// needs.
func Memory(limit, need func() int64) prometheus.Collector {
	most := desc("latticekeep_memory_limit_bytes", "Bytes of memory that the process may use. Absent without a limit.")
	least := desc("latticekeep_memory_need_bytes", "Bytes of memory that the process needs to serve this deployment under load.")
	return scraped{[]*prometheus.Desc{most, least}, func(_ context.Context, to chan<- prometheus.Metric) {
		if n := limit(); n > 0 {
			gauge(to, most, float64(n))
		}
		gauge(to, least, float64(need()))
	}}
}

// Disk reports the volume of a folder.
func Disk(dir string) prometheus.Collector {
	size := desc("latticekeep_disk_bytes", "Size of the volume of the data directory.")
	free := desc("latticekeep_disk_free_bytes", "Bytes that this process may still write on the volume of the data directory.")
	return scraped{[]*prometheus.Desc{size, free}, func(_ context.Context, to chan<- prometheus.Metric) {
		var s syscall.Statfs_t
		if err := syscall.Statfs(dir, &s); err != nil {
			return
		}
		gauge(to, size, float64(s.Blocks)*float64(s.Bsize))
		gauge(to, free, float64(s.Bavail)*float64(s.Bsize))
	}}
}

// Postgres reports the connections that read, and outages.
func Postgres(stats func() postgres.Stats) prometheus.Collector {
	connections := desc("latticekeep_postgres_connections", "Connections to PostgreSQL that read, by state: used or idle.", "state")
	limit := desc("latticekeep_postgres_connections_max", "How many connections that read there may be.")
	waits := desc("latticekeep_postgres_connection_waits_total", "Reads that waited for a connection, since all were used.")
	waited := desc("latticekeep_postgres_connection_wait_seconds_total", "How long they waited together.")
	up := desc("latticekeep_postgres_up", "1 while PostgreSQL is reached, 0 while it is not.")
	outages := desc("latticekeep_postgres_outages_total", "How often PostgreSQL was lost, failovers included.")
	return scraped{[]*prometheus.Desc{connections, limit, waits, waited, up, outages}, func(_ context.Context, to chan<- prometheus.Metric) {
		s := stats()
		gauge(to, connections, float64(s.Used), "used")
		gauge(to, connections, float64(s.Idle), "idle")
		gauge(to, limit, float64(s.Limit))
		counter(to, waits, float64(s.Waits))
		counter(to, waited, s.Waited.Seconds())
		gauge(to, up, flag(s.Reachable))
		counter(to, outages, float64(s.Outages))
	}}
}

// Certificate reports when a certificate ends that listeners of this process use for something.
func Certificate(use string, get func(*tls.ClientHelloInfo) (*tls.Certificate, error)) prometheus.Collector {
	expiry := desc("latticekeep_certificate_expiry_timestamp_seconds", "When the TLS certificate in use ends, in Unix time.", "use")
	return scraped{[]*prometheus.Desc{expiry}, func(_ context.Context, to chan<- prometheus.Metric) {
		if c, err := get(nil); err == nil && c.Leaf != nil {
			instant(to, expiry, c.Leaf.NotAfter, use)
		}
	}}
}

// Mail reports the outbox.
func Mail(outbox *mail.Outbox) prometheus.Collector {
	queued := desc("latticekeep_mail_queued", "E-mails in the outbox when it was last looked through; beyond 1,024 perhaps more.")
	oldest := desc("latticekeep_mail_oldest_timestamp_seconds", "When the oldest e-mail was written that this process has failed to send, in Unix time. Absent when there is none.")
	attempts := desc("latticekeep_mail_attempts_total", "Attempts to send an e-mail, by result: sent, postponed, or given_up.", "result")
	return scraped{[]*prometheus.Desc{queued, oldest, attempts}, func(_ context.Context, to chan<- prometheus.Metric) {
		s := outbox.Stats()
		gauge(to, queued, float64(s.Queued))
		instant(to, oldest, s.Oldest)
		counter(to, attempts, float64(s.Sent), "sent")
		counter(to, attempts, float64(s.Postponed), "postponed")
		counter(to, attempts, float64(s.GivenUp), "given_up")
	}}
}
