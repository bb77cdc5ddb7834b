package controllers_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
)

// benchObjects is how many objects the benchmark of the operator has.
const benchObjects = 2000

// BenchmarkOperator makes many objects with targets ready, and then starts again with all of them settled. Every number is
// a ratio to what a plain client takes for the same calls in the same run, and the writes are those that the API server's
// audit log has. It runs once, whatever -benchtime says.
func BenchmarkOperator(b *testing.B) {
	log := filepath.Join(b.TempDir(), "audit.log")
	policy := filepath.Join(b.TempDir(), "policy.yaml")
	must(b, os.WriteFile(policy, []byte(`{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
	  {"level": "Metadata", "users": ["system:serviceaccount:latticekeep-system:latticekeep"], "verbs": ["create", "update", "patch", "delete"]},
	  {"level": "None"}]}`), 0o600))
	w := newWorld(b, "--audit-policy-file", policy, "--audit-log-path", log, "--audit-log-mode", "blocking",
		"--max-requests-inflight", "0", "--max-mutating-requests-inflight", "0", "--enable-priority-and-fairness=false")
	w.clock.micros.Store(time.Now().UnixMicro())
	w.pace = controllers.Pace{} // what users have

	// The key to seal with exists once the operator has run.
	w.start(nil)
	w.published()
	w.halt()
	raw, op := w.namespace(), w.namespace()
	w.fillNamespace(raw, benchObjects)
	w.fillNamespace(op, benchObjects)

	plain := w.plainWrites(raw)
	b.ReportMetric(benchObjects/plain.Seconds(), "plain-objects/s")
	w.empty(raw)

	from := offset(b, log)
	done := reconciles(b) + benchObjects
	w.start(nil)
	w.awaitReconciles(b, done-benchObjects+1) // what a start takes is measured below
	began := time.Now()
	w.awaitReconciles(b, done)
	took := time.Since(began)
	w.checkAllReady(op, benchObjects)
	w.halt() // events are written by then
	writes := writesSince(b, log, from)
	b.ReportMetric(benchObjects/took.Seconds(), "objects/s")
	b.ReportMetric(plain.Seconds()/took.Seconds(), "rate/plain")
	for kind, n := range writes {
		b.ReportMetric(float64(n)/benchObjects, kind+"/object")
		if n > benchObjects {
			b.Errorf("%d writes (%s) for %d objects", n, kind, benchObjects)
		}
	}
	if len(writes) != 4 {
		b.Errorf("the writes are %v: want finalizer, target, status and event", writes)
	}

	// Again, with nothing to do.
	list := w.plainRead()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	from = offset(b, log)
	done = reconciles(b) + benchObjects
	began = time.Now()
	w.start(nil)
	w.awaitReconciles(b, done)
	took = time.Since(began)
	runtime.GC()
	runtime.ReadMemStats(&after)
	b.ReportMetric(took.Seconds()/list.Seconds(), "restart/plain-read")
	b.ReportMetric((float64(after.HeapAlloc)-float64(before.HeapAlloc))/benchObjects/1024, "KiB/object")

	// One at a time, on an operator with nothing else to do; then one during a restart.
	var usual []time.Duration
	for i := range 100 {
		usual = append(usual, w.timeToReady(op, fmt.Sprintf("usual-%d", i)))
	}
	slices.Sort(usual)
	w.halt()
	if n := len(writesSince(b, log, from)); n == 0 {
		b.Error("the audit log has no write of the new objects: it is not the operator's")
	}
	p99 := usual[len(usual)*99/100-1]
	done = reconciles(b)
	w.start(nil)
	w.awaitReconciles(b, done+1) // the others wait
	during := w.timeToReady(op, "during")
	b.ReportMetric(during.Seconds()/p99.Seconds(), "new-during-restart/p99")
	w.halt()

	from = offset(b, log)
	done = reconciles(b) + benchObjects
	w.start(nil)
	w.awaitReconciles(b, done)
	w.halt()
	total := 0
	for _, n := range writesSince(b, log, from) {
		total += n
	}
	if total != 0 {
		b.Errorf("a restart with settled objects made %d writes", total)
	}
	b.ReportMetric(float64(total), "writes-of-a-restart")
	b.ReportMetric(0, "ns/op")
}

func (w *world) fillNamespace(namespace string, n int) {
	w.t.Helper()
	w.concurrently(n, func(i int) error {
		return w.admin.Create(w.t.Context(), w.benchObject(namespace, fmt.Sprintf("object-%d", i)))
	})
}

// empty removes the objects of a namespace.
func (w *world) empty(namespace string) {
	w.t.Helper()
	list := new(v1beta1.SealedCredentialList)
	must(w.t, w.admin.List(w.t.Context(), list, client.InNamespace(namespace)))
	w.concurrently(len(list.Items), func(i int) error {
		list.Items[i].Finalizers = nil
		if err := w.admin.Update(w.t.Context(), &list.Items[i]); err != nil {
			return err
		}
		return w.admin.Delete(w.t.Context(), &list.Items[i])
	})
}

// benchObject has two values of 32 bytes and a target.
func (w *world) benchObject(namespace, name string) *v1beta1.SealedCredential {
	sc := w.manifest(namespace, name, map[string]string{
		"username": "0123456789abcdef0123456789abcdef", "password": "0123456789abcdef0123456789abcdef",
	})
	sc.Spec.Target = &v1beta1.Target{}
	return sc
}

// concurrently calls do for 0 to n-1 with as many workers as the operator has.
func (w *world) concurrently(n int, do func(int) error) {
	w.t.Helper()
	next := make(chan int)
	errs := make(chan error, n)
	var workers sync.WaitGroup
	for range controllers.DefaultWorkers {
		workers.Go(func() {
			for i := range next {
				if err := do(i); err != nil {
					errs <- err
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	workers.Wait()
	close(errs)
	must(w.t, <-errs)
}

func (w *world) operatorClient() client.Client {
	scheme := k8sruntime.NewScheme()
	for _, add := range []func(*k8sruntime.Scheme) error{v1beta1.AddToScheme, corev1.AddToScheme, eventsv1.AddToScheme} {
		must(w.t, add(scheme))
	}
	cfg := rest.CopyConfig(w.operator)
	cfg.QPS = -1
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	must(w.t, err)
	return c
}

// plainWrites makes the writes that the operator makes of each object of a namespace, by a loop that does nothing else:
// finalizer, target, status, event.
func (w *world) plainWrites(namespace string) time.Duration {
	c, ctx := w.operatorClient(), w.t.Context()
	list := new(v1beta1.SealedCredentialList)
	must(w.t, c.List(ctx, list, client.InNamespace(namespace)))
	began := time.Now()
	w.concurrently(len(list.Items), func(i int) error {
		sc := &list.Items[i]
		before := sc.DeepCopy()
		sc.Finalizers = []string{v1beta1.Finalizer}
		if err := c.Patch(ctx, sc, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return err
		}
		target := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: sc.Name, Annotations: map[string]string{
				v1beta1.AnnotationOwner: string(sc.UID), v1beta1.AnnotationVersion: "1", v1beta1.AnnotationDeletionPolicy: "Delete",
			}},
			Data: map[string][]byte{"username": make([]byte, 32), "password": make([]byte, 32)},
		}
		if err := c.Create(ctx, target); err != nil {
			return err
		}
		before = sc.DeepCopy()
		now := metav1.Now()
		sc.Status = v1beta1.SealedCredentialStatus{
			ObservedGeneration: 1, CredentialID: "cred_mfrggzdfmztwq2lknnwg23tpoa", Version: 1, SealedAt: &now, ExpiresAt: &now, NextRotationTime: &now,
			ValuesChangedAt: &now, SealingKeyID: sc.Spec.Sealed.KeyID, Audit: &v1beta1.AuditReference{Hash: sc.Spec.Sealed.KeyID},
			Target: &v1beta1.TargetStatus{Name: sc.Name, UID: target.UID, ResourceVersion: target.ResourceVersion, Version: 1, Audit: sc.Spec.Sealed.KeyID, Spec: sc.Spec.Sealed.KeyID},
		}
		for _, kind := range []string{v1beta1.ConditionReady, v1beta1.ConditionTargetSynced, v1beta1.ConditionExpiring} {
			meta.SetStatusCondition(&sc.Status.Conditions, metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: "Sealed", Message: "version 1 is served until tomorrow"})
		}
		if err := c.Status().Patch(ctx, sc, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return err
		}
		return c.Create(ctx, &eventsv1.Event{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "event-"}, EventTime: metav1.NowMicro(), Type: "Normal", Reason: "Sealed", Action: "Seal",
			ReportingController: "latticekeep", ReportingInstance: "latticekeep", Note: "sealed into the vault as version 1",
			Regarding: corev1.ObjectReference{Kind: "SealedCredential", Namespace: namespace, Name: sc.Name, UID: sc.UID},
		})
	})
	return time.Since(began)
}

// plainRead is how long a LIST of all objects takes and after it the sync of a cache that does nothing else.
func (w *world) plainRead() time.Duration {
	scheme := k8sruntime.NewScheme()
	must(w.t, v1beta1.AddToScheme(scheme))
	cfg := rest.CopyConfig(w.operator)
	cfg.QPS = -1
	began := time.Now()
	must(w.t, w.operatorClient().List(w.t.Context(), new(v1beta1.SealedCredentialList)))
	c, err := cache.New(cfg, cache.Options{Scheme: scheme, DefaultTransform: cache.TransformStripManagedFields()})
	must(w.t, err)
	ctx, cancel := context.WithCancel(w.t.Context())
	defer cancel()
	_, err = c.GetInformer(ctx, new(v1beta1.SealedCredential), cache.BlockUntilSynced(false))
	must(w.t, err)
	go func() { _ = c.Start(ctx) }()
	if !c.WaitForCacheSync(ctx) {
		w.t.Fatal("the cache does not sync")
	}
	return time.Since(began)
}

// awaitReconciles returns once so many reconciles have ended, by the counter that costs the operator nothing.
func (w *world) awaitReconciles(b *testing.B, n int) {
	b.Helper()
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for end := time.Now().Add(5 * time.Minute); reconciles(b) < n; <-look.C {
		if time.Now().After(end) {
			b.Fatalf("%d reconciles, not %d\n%s", reconciles(b), n, w.logs.tail())
		}
	}
}

func (w *world) checkAllReady(namespace string, n int) {
	w.t.Helper()
	list := new(v1beta1.SealedCredentialList)
	must(w.t, w.admin.List(w.t.Context(), list, client.InNamespace(namespace)))
	ready := 0
	for i := range list.Items {
		if meta.IsStatusConditionTrue(list.Items[i].Status.Conditions, v1beta1.ConditionReady) {
			ready++
		}
	}
	if ready != n {
		w.t.Errorf("%d objects are ready, not %d", ready, n)
	}
}

func (w *world) timeToReady(namespace, name string) time.Duration {
	w.t.Helper()
	sc := w.benchObject(namespace, name)
	began := time.Now()
	w.awaitReady(w.create(sc), 1)
	return time.Since(began)
}

// reconciles is how many SealedCredentials have been reconciled in this process.
func reconciles(b *testing.B) int {
	families, err := metrics.Registry.Gather()
	must(b, err)
	n := 0.0
	for _, f := range families {
		if f.GetName() != "controller_runtime_reconcile_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "controller" && l.GetValue() == "sealedcredential" {
					n += m.GetCounter().GetValue()
				}
			}
		}
	}
	return int(n)
}

func offset(b *testing.B, log string) int64 {
	info, err := os.Stat(log)
	must(b, err)
	return info.Size()
}

// writesSince returns the writes of the operator that the API server's audit log has from an offset on, by what they wrote.
func writesSince(b *testing.B, log string, from int64) map[string]int {
	f, err := os.Open(log)
	must(b, err)
	defer f.Close()
	_, err = f.Seek(from, io.SeekStart)
	must(b, err)
	writes := make(map[string]int)
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct {
			Verb      string
			ObjectRef struct{ Resource, Subresource string }
		}
		must(b, json.Unmarshal(lines.Bytes(), &e))
		if e.ObjectRef.Subresource != "" {
			e.ObjectRef.Resource += "-" + e.ObjectRef.Subresource
		}
		writes[e.Verb+"-"+e.ObjectRef.Resource]++
	}
	must(b, lines.Err())
	return writes
}
