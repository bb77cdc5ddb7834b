package app

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
)

// sealingKeyCollector counts the objects of each sealing key anew for every
// scrape. While they cannot be counted there is no metric: an old number would
// tell somebody to retire a key that is needed.
type sealingKeyCollector struct{ keys *sealingkey.Service }

var sealingKeyObjects = prometheus.NewDesc("latticekeep_sealing_key_objects",
	"SealedCredential objects whose values are sealed for a sealing key, by its id and its state: current, earlier or retired.",
	[]string{"key_id", "state"}, nil)

// collectTimeout bounds a scrape, which may ask the cluster.
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

// auditCollector shows how far the audit log has grown. It is asked anew for every
// scrape, and while it cannot be read there is no metric.
type auditCollector struct{ log *audit.Log }

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

// gatherOperator returns the metrics of the operator's libraries: of its queues,
// its reconciles and its requests to the API server. Those of the process are
// there already.
func gatherOperator() ([]*dto.MetricFamily, error) {
	families, err := metrics.Registry.Gather()
	return slices.DeleteFunc(families, func(f *dto.MetricFamily) bool {
		return strings.HasPrefix(f.GetName(), "go_") || strings.HasPrefix(f.GetName(), "process_")
	}), err
}
