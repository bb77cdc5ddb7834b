package controllers

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// Metrics collects the operator's metrics. It outlives one [Run] and reads the cache of the current
// one.
type Metrics struct {
	cache   atomic.Pointer[objectCache]
	changes *prometheus.CounterVec
	repairs prometheus.Counter
	expiry  *prometheus.Desc
	objects *prometheus.Desc
	looks   *prometheus.Desc
}

// objectCache is a cache of SealedCredentials, and what their operator knows beside it.
type objectCache struct {
	cached     client.Reader
	synced     func() bool
	oldestLook func() time.Time // at a target Secret; zero for none
	now        func() time.Time
}

// NewMetrics returns a collector for [Options]. The caller registers it.
func NewMetrics() *Metrics {
	return &Metrics{
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "latticekeep_credential_changes_total",
			Help: "Versions that the operator stored, by what made them: sealed, rotated (new values), reencrypted (new keys), recreated.",
		}, []string{"change"}),
		repairs: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "latticekeep_target_repairs_total",
			Help: "Target Secrets that the operator wrote again, since they were no longer as it had left them.",
		}),
		expiry: prometheus.NewDesc("latticekeep_credential_expiry_timestamp_seconds",
			"When the vault entry of a SealedCredential ends unless it is rotated, in Unix time.", []string{"namespace", "name"}, nil),
		objects: prometheus.NewDesc("latticekeep_sealedcredentials",
			"SealedCredentials by condition and its status.", []string{"condition", "status"}, nil),
		looks: prometheus.NewDesc("latticekeep_target_oldest_look_timestamp_seconds",
			"When the operator looked at the target Secret that it has not looked at for longest, in Unix time.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	m.changes.Describe(ch)
	m.repairs.Describe(ch)
	ch <- m.expiry
	ch <- m.objects
	ch <- m.looks
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.changes.Collect(ch)
	m.repairs.Collect(ch)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	list, err := m.list(ctx)
	if err != nil {
		return // the operator is not running, or its cache is not filled yet
	}
	type state struct {
		condition string
		status    metav1.ConditionStatus
	}
	states := make(map[state]int)
	for i := range list.Items {
		sc := &list.Items[i]
		if at := sc.Status.ExpiresAt; at != nil {
			ch <- prometheus.MustNewConstMetric(m.expiry, prometheus.GaugeValue, float64(at.Unix()), sc.Namespace, sc.Name)
		}
		for _, kind := range []string{
			v1beta1.ConditionReady, v1beta1.ConditionStalled, v1beta1.ConditionTargetSynced, v1beta1.ConditionValuesStale, v1beta1.ConditionExpiring,
		} {
			if c := apimeta.FindStatusCondition(sc.Status.Conditions, kind); c != nil {
				states[state{kind, c.Status}]++
			} else if kind == v1beta1.ConditionReady {
				states[state{kind, metav1.ConditionUnknown}]++
			}
		}
	}
	for s, n := range states {
		ch <- prometheus.MustNewConstMetric(m.objects, prometheus.GaugeValue, float64(n), s.condition, string(s.status))
	}
	if of := m.cache.Load(); of != nil {
		if oldest := of.oldestLook(); !oldest.IsZero() {
			ch <- prometheus.MustNewConstMetric(m.looks, prometheus.GaugeValue, float64(oldest.UnixMilli())/1000)
		}
	}
}

// errNotRunning means that no operator in this process knows all objects of the cluster.
var errNotRunning = errors.New("the operator is not running")

// SealingKeyUse returns how many objects of the cluster have values sealed for each key, by key ID.
// It fails while the operator does not know all objects.
func (m *Metrics) SealingKeyUse(ctx context.Context) (map[string]int, error) {
	list, err := m.list(ctx)
	if err != nil {
		return nil, fmt.Errorf("looking at the objects of the cluster: %w", err)
	}
	use := make(map[string]int)
	for i := range list.Items {
		if sealed := list.Items[i].Spec.Sealed; sealed != nil {
			use[sealed.KeyID]++
		}
	}
	return use, nil
}

func (m *Metrics) list(ctx context.Context) (*v1beta1.SealedCredentialList, error) {
	objects := m.cache.Load()
	if objects == nil || !objects.synced() {
		return nil, errNotRunning
	}
	list := new(v1beta1.SealedCredentialList)
	return list, objects.cached.List(ctx, list, client.UnsafeDisableDeepCopy)
}

// use sets the cache that metrics are collected from, once that has all objects; nil for none.
func (m *Metrics) use(of *objectCache) { m.cache.Store(of) }

// countChange counts a stored version.
func (m *Metrics) countChange(change string) { m.changes.WithLabelValues(change).Inc() }

// countRepair counts a target Secret that was changed or deleted, and is right again.
func (m *Metrics) countRepair() { m.repairs.Inc() }
