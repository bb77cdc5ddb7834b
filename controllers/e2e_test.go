package controllers_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/vault/compare"
)

const (
	day     = 24 * time.Hour
	abandon = "latticekeep.dev/abandon"
)

// One control plane and one deployment serve all of these, one after the other, each in namespaces of its own; what
// they leave behind is verified as one chain.
func TestOperator(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	t.Run("a cluster without the CRD is told apart", w.testMissingCRD)
	t.Run("the schema refuses what the types say", w.testSchema)
	t.Run("an object is shown before anybody has seen it", w.testUnseen)
	w.start(nil)
	for _, test := range []struct {
		behaviour string
		run       func(*testing.T)
	}{
		{"an object is sealed, changed and deleted", w.testLife},
		{"an entry is rotated before its TTL ends", w.testRotation},
		{"a changed trigger rotates once", w.testTrigger},
		{"a deleted entry is made again", w.testRecreation},
		{"bad data is stalled until it is mended", w.testStalled},
		{"a bad update leaves the last good version serving", w.testLastGood},
		{"values open only where they were sealed for", w.testScopes},
		{"an older value is refused unless it is allowed", w.testOlder},
		{"earlier and later sealing keys open", w.testLateKey},
		{"values are imported from a Secret that names the object", w.testImport},
		{"values are made where nobody sees them", w.testGenerate},
		{"the target Secret holds what the vault holds", w.testTarget},
		{"a target Secret is looked at when the object changes", w.testLooks},
		{"labels and annotations of a target Secret are shared", w.testSharedTarget},
		{"a target Secret goes with its target and with nothing else", w.testTargetDeletion},
		{"an immutable target is made again for new values", w.testImmutable},
		{"a foreign Secret is left alone unless it names the object", w.testAdoption},
		{"a Secret moves into the vault without an outage", w.testMigration},
		{"values that are too old are told", w.testValueAge},
		{"a repair that fails is made again", w.testFailedRepair},
		{"a store that is set back is told from the one that was", w.testSetBack},
		{"a spec that is refused uses up no new values", w.testRefusedRegenerate},
		{"a source that cannot be read stops no rotation", w.testUnreadableSource},
		{"the target of an object that is left alone or refused is watched over", w.testDriftOfTheRefused},
		{"a rotation that is late is told", w.testExpiring},
		{"workloads are restarted by new values alone", w.testRestart},
		{"what the schema lets through does not get past the reconciler", w.testExploits},
		{"a Secret of somebody else is adopted by no route", w.testForeignSecrets},
		{"a namespace that is made again is another tenant", w.testNamespaceAgain},
		{"whatever failed is ready once it is mended", w.testMended},
		{"an API server that fails is waited for", w.testServerFaults},
		{"damage ends in a condition, and not in a loop", w.testDamage},
		{"the order of events does not matter", w.testAnyOrder},
		{"nothing is unsealed or written in vain", w.testBounded},
		{"the metrics say what the objects do", w.testMetrics},
		{"a suspended object is left alone", w.testSuspended},
		{"a retained entry outlives its object", w.testRetained},
		{"an outage is waited out", w.testOutage},
		{"an entry whose object is gone becomes its tenant's", w.testOrphans},
		{"a terminating namespace gets nothing new", w.testTerminating},
		{"the published sealing key is repaired", w.testPublished},
		{"whoever changes the published sealing key is answered at a slow pace", w.testPace},
		{"a cluster belongs to one deployment", w.testClaim},
		{"two operators on one store do no harm", w.testTwice},
	} {
		t.Run(test.behaviour, test.run)
	}
	w.halt()
	t.Run("the chain holds", w.testChain)
	t.Run("nothing secret is written anywhere", w.testNothingLeaks)
}

// From its creation on, an object says that it waits, which neither kubectl wait nor the operator
// takes for more. The operator's first word has a time of its own.
func (w *world) testUnseen(t *testing.T) {
	w, ns := w.in(t)
	sc := object(ns, "unseen")
	sc.Spec.Generate = []v1beta1.Generator{{Key: "token", Random: &v1beta1.Random{}}}
	sc = w.create(sc)
	if ready := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionReady); len(sc.Status.Conditions) != 1 || ready == nil ||
		ready.Status != metav1.ConditionUnknown || ready.Reason != v1beta1.ReasonPending || sc.Status.ObservedGeneration != -1 {
		t.Errorf("the status of a new object is %+v", sc.Status)
	}
	for _, resource := range []string{"sealedcredentials", "sealedcredentials.v1alpha1.latticekeep.dev"} {
		out := strings.Fields(w.kubectl("get", resource, "-n", ns))
		if text := strings.Join(out, " "); !strings.Contains(text, "NAME READY STATUS") || !strings.Contains(text, "unseen Unknown Pending") {
			t.Errorf("kubectl get %s prints %v", resource, out)
		}
	}
	out, err := w.plane.Kubectl(t.Context(), "wait", "--for=condition=Ready", "--timeout=0", "-n", ns, "sealedcredential/unseen").CombinedOutput()
	if err == nil {
		t.Errorf("kubectl wait takes an object that nobody has seen for ready: %s", out)
	}
	for _, field := range []string{"", ".status.conditions", ".spec.target.annotations", ".status.target.seenAt", ".spec.generate", ".spec.rotation"} {
		text := w.kubectl("explain", "sealedcredential"+field, "--api-version=latticekeep.dev/v1beta1")
		_, text, _ = strings.Cut(text, "DESCRIPTION:\n")
		text, _, _ = strings.Cut(text, "FIELDS:")
		lines := strings.Split(strings.TrimSpace(text), "\n")
		for i, line := range lines[:len(lines)-1] {
			// A line ends where a sentence does, or where the next word does not fit.
			line, next := strings.TrimSpace(line), strings.TrimSpace(lines[i+1])
			next, _, _ = strings.Cut(next, " ")
			if line != "" && !strings.HasSuffix(line, ".") && len(line)+len(" ")+len(next) < 70 {
				t.Errorf("kubectl explain sealedcredential%s breaks a line after %q", field, line)
			}
		}
	}
	w.start(nil)
	sc = w.awaitReady(sc, 1)
	for _, c := range sc.Status.Conditions {
		if c.LastTransitionTime.Year() < 2000 {
			t.Errorf("%s has been %s since %s", c.Type, c.Status, c.LastTransitionTime)
		}
	}
	w.halt()
}

func (w *world) testLife(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("username", "password")
	sc := w.awaitReady(w.create(w.manifest(ns, "db", values)), 1)
	w.checkUnseals(sc, values)
	s := sc.Status
	if !controllerutil.ContainsFinalizer(sc, v1beta1.Finalizer) {
		t.Error("the object has no finalizer")
	}
	if !s.SealedAt.Time.Equal(w.clock.in(0)) || !s.ExpiresAt.Time.Equal(w.clock.in(90*day)) ||
		s.NextRotationTime.After(w.clock.in(60*day)) || s.NextRotationTime.Time.Before(w.clock.in(57*day)) {
		t.Errorf("sealed at %v, expires at %v, next rotation at %v", s.SealedAt, s.ExpiresAt, s.NextRotationTime)
	}
	if s.SealingKeyID != sc.Spec.Sealed.KeyID {
		t.Errorf("the status names sealing key %q", s.SealingKeyID)
	}
	w.checkAuditReference(sc)

	out := w.kubectl("get", "sealedcredentials", "-n", ns)
	for _, column := range []string{"NAME", "READY", "STATUS", "Sealed", "TYPE", "VERSION", "EXPIRES", "AGE", "db", "True", "database", s.ExpiresAt.UTC().Format(time.RFC3339)} {
		if !strings.Contains(out, column) {
			t.Errorf("kubectl get does not print %q:\n%s", column, out)
		}
	}

	// One value is replaced: the other stays as it was sealed.
	w.clock.Advance(time.Hour)
	replaced := w.values("password")
	fresh := w.manifest(ns, "db", replaced)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Sealed.Values["password"] = fresh.Spec.Sealed.Values["password"]
	}), 2)
	values["password"] = replaced["password"]
	w.checkUnseals(sc, values)
	w.checkAuditReference(sc)
	if sc.Status.CredentialID != s.CredentialID {
		t.Error("a new value made a new credential")
	}

	// A new TTL starts now.
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.TTLDays = 30 }), 3)
	if want := w.clock.in(30 * day); !sc.Status.ExpiresAt.Time.Equal(want) {
		t.Errorf("expires at %v, want %v", sc.Status.ExpiresAt, want)
	}
	w.checkUnseals(sc, values)

	// When to rotate is no part of the entry.
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Rotation = &v1beta1.Rotation{Before: &metav1.Duration{Duration: day}}
	}), 3)
	if want := w.clock.in(29 * day); sc.Status.NextRotationTime.After(want) || sc.Status.NextRotationTime.Time.Before(want.Add(-day/10)) {
		t.Errorf("next rotation at %v, want %v or a little before", sc.Status.NextRotationTime, want)
	}

	must(t, w.admin.Delete(t.Context(), sc))
	w.awaitGone(sc)
	if _, err := w.vault.Read(t.Context(), w.tenant(ns), vault.ByID(s.CredentialID)); !errors.Is(err, fault.Forbidden) {
		t.Errorf("the deleted credential unseals: %v", err)
	}
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialRotated, audit.CredentialReencrypted, audit.CredentialDeleted)
	w.checkEvents(sc, "Sealed", "Rotated", "Reencrypted", "Released")
}

// checkAuditReference holds status.audit against the log.
func (w *world) checkAuditReference(sc *v1beta1.SealedCredential) {
	w.t.Helper()
	entries, _, err := reader.New(w.log, guard.New(w.log)).Query(w.t.Context(), w.tenant(sc.Namespace), reader.Query{Limit: 1000})
	must(w.t, err)
	for _, e := range entries { // newest first
		if e.Resource.ID == sc.Status.CredentialID && e.Attributes[audit.AttributeDigest] != "" {
			if sc.Status.Audit == nil || uint64(sc.Status.Audit.Sequence) != e.Sequence || sc.Status.Audit.Hash != e.Hash ||
				e.Attributes[audit.AttributeVersion] != fmt.Sprint(sc.Status.Version) || e.Actor.ID != string(sc.UID) {
				w.t.Errorf("the status refers to audit entry %+v; the log has %+v", sc.Status.Audit, e)
			}
			return
		}
	}
	w.t.Errorf("the log has no version of %s", sc.Name)
}

// checkEvents waits for the object's last event and holds the reasons of all of them, in order and without repetition.
func (w *world) checkEvents(sc *v1beta1.SealedCredential, reasons ...string) {
	w.t.Helper()
	await(w, client.ObjectKey{Namespace: sc.Namespace}, new(eventsv1.EventList), "events "+fmt.Sprint(reasons), func(_ *eventsv1.Event) bool {
		list := new(eventsv1.EventList)
		must(w.t, w.admin.List(w.t.Context(), list, client.InNamespace(sc.Namespace)))
		slices.SortFunc(list.Items, func(a, b eventsv1.Event) int { return a.EventTime.Compare(b.EventTime.Time) })
		var got []string
		for _, e := range list.Items {
			if e.Regarding.UID == sc.UID {
				got = append(got, e.Reason)
				if e.Series != nil { // it stands for several
					got = append(got, slices.Repeat([]string{e.Reason}, int(e.Series.Count)-1)...)
				}
			}
		}
		return slices.Equal(got, reasons)
	})
}

func (w *world) testRotation(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	sc := w.awaitReady(w.create(w.manifest(ns, "rotated", values)), 1)
	first := sc.Status

	w.clock.Advance(first.NextRotationTime.Sub(w.clock.Now()) - time.Second)
	// The time of the periodic look has come, that of the rotation has not: the other object shows that the clock was seen.
	w.awaitReady(w.create(w.manifest(ns, "witness", values)), 1)
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(sc), sc))
	if sc.Status.Version != 1 {
		t.Fatal("rotated before its time")
	}
	w.clock.Advance(time.Second)
	sc = w.awaitReady(sc, 2)
	if !sc.Status.SealedAt.Time.Before(first.ExpiresAt.Time) || !sc.Status.ExpiresAt.Time.Equal(w.clock.in(90*day)) {
		t.Errorf("sealed at %v, expires at %v; the version before expires at %v", sc.Status.SealedAt, sc.Status.ExpiresAt, first.ExpiresAt)
	}
	w.checkUnseals(sc, values)
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReencrypted)
	w.checkAuditReference(sc)

	// The operator was away while the TTL ended.
	w.halt()
	w.clock.Advance(100 * day)
	w.start(nil)
	sc = w.awaitReady(sc, 3)
	w.checkUnseals(sc, values)
}

func (w *world) testTrigger(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	manifest := w.manifest(ns, "triggered", values)
	manifest.Spec.Rotation = &v1beta1.Rotation{Trigger: "as created"}
	sc := w.awaitReady(w.create(manifest), 1)
	if sc.Status.LastTrigger != "as created" {
		t.Errorf("the last trigger is %q", sc.Status.LastTrigger)
	}
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation.Trigger = "now" }), 2)
	if sc.Status.LastTrigger != "now" {
		t.Errorf("the last trigger is %q", sc.Status.LastTrigger)
	}
	// A change with new values is one version, not two.
	values = w.values("token")
	fresh := w.manifest(ns, "triggered", values)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Rotation.Trigger, sc.Spec.Sealed = "again", fresh.Spec.Sealed
	}), 3)
	w.nudge(sc)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation.Before = &metav1.Duration{Duration: time.Hour} }), 3)
	w.checkUnseals(sc, values)
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReencrypted, audit.CredentialRotated)
}

// nudge has the object reconciled without changing what it asks for.
func (w *world) nudge(sc *v1beta1.SealedCredential) {
	w.t.Helper()
	w.change(sc, func(sc *v1beta1.SealedCredential) {
		metav1.SetMetaDataAnnotation(&sc.ObjectMeta, "example.com/nudge", authz.NewID("nudge"))
	})
}

func (w *world) testRecreation(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	steady := w.awaitReady(w.create(w.manifest(ns, "steady", values)), 1)
	sc := w.awaitReady(w.create(w.manifest(ns, "deleted", values)), 1)
	first := sc.Status
	if err := w.vault.Delete(t.Context(), w.tenant(ns), first.CredentialID); !errors.Is(err, fault.Forbidden) {
		t.Errorf("a tenant may delete what an object owns: %v", err)
	}
	remove := func() {
		t.Helper()
		must(t, w.vault.Delete(t.Context(), authz.SystemPrincipal(w.tenant(ns).Tenant), first.CredentialID))
	}
	remove()
	w.nudge(sc)
	sc = w.awaitReady(sc, 2)
	if sc.Status.CredentialID != first.CredentialID {
		t.Error("the credential was made again under another id")
	}
	w.checkUnseals(sc, values)

	for version := int64(3); version <= 4; version++ {
		remove()
		w.clock.Advance(10 * time.Minute) // nobody touches the object
		sc = w.awaitReady(sc, version)
		w.checkUnseals(sc, values)
	}
	w.checkEvents(sc, "Sealed", "Recreated", "Recreated", "Recreated")

	// An entry that was tampered with is found when it is to be opened, and made again from the object.
	damage(w, sc)
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Rotation = &v1beta1.Rotation{Trigger: "now"} }), 5)
	w.checkUnseals(sc, values)

	// The object beside it has been looked at as often, and nothing was written.
	now := new(v1beta1.SealedCredential)
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(steady), now))
	if now.ResourceVersion != steady.ResourceVersion {
		t.Errorf("an object in order was written to:\n%+v\n%+v", steady.Status, now.Status)
	}
	w.checkEvents(steady, "Sealed")
}

// damage changes the last byte of the row that holds the object's credential.
func damage(w *world, sc *v1beta1.SealedCredential) {
	w.t.Helper()
	rows := store.Prefix([]byte("credential/" + string(w.tenant(sc.Namespace).Tenant) + "/" + sc.Status.CredentialID + "/"))
	w.commit(func(tx store.Tx) error {
		var key, value []byte
		if err := tx.Scan(rows, func(k, v []byte) bool {
			key, value = bytes.Clone(k), bytes.Clone(v)
			return false
		}); err != nil || len(value) == 0 {
			return fmt.Errorf("finding the row of %s: %w", sc.Name, err)
		}
		value[len(value)-1] ^= 1
		return tx.Put(key, value)
	})
}

func (w *world) testSuspended(t *testing.T) {
	w, ns := w.in(t)
	manifest := w.manifest(ns, "suspended", w.values("token"))
	manifest.Spec.Suspend = true
	sc := w.awaitThat(w.create(manifest), "suspension", suspended(metav1.ConditionFalse))
	if sc.Status.CredentialID != "" || len(sc.Finalizers) != 0 {
		t.Errorf("a suspended object got credential %q and finalizers %v", sc.Status.CredentialID, sc.Finalizers)
	}
	sc = w.awaitReady(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.Suspend = false }), 1)
	sc = w.awaitThat(w.change(sc, func(sc *v1beta1.SealedCredential) {
		sc.Spec.Suspend, sc.Spec.Rotation = true, &v1beta1.Rotation{Trigger: "now"}
	}), "suspension", suspended(metav1.ConditionTrue))
	if sc.Status.NextRotationTime != nil {
		t.Error("a suspended object says when it is rotated")
	}
	sc = w.awaitThat(w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.TTLDays = 5 }), "suspension", suspended(metav1.ConditionFalse))
	w.checkHistory(sc, audit.CredentialSealed)

	must(t, w.vault.Delete(t.Context(), authz.SystemPrincipal(w.tenant(ns).Tenant), sc.Status.CredentialID))
	w.nudge(sc)
	sc = w.awaitThat(sc, "the loss to be shown", func(sc *v1beta1.SealedCredential) bool { return sc.Status.ExpiresAt == nil })
	if ready := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionReady); ready.Status != metav1.ConditionFalse || !strings.Contains(ready.Message, "nothing is served") {
		t.Errorf("with its entry gone the object is %+v", ready)
	}
	must(t, w.admin.Delete(t.Context(), sc))
	w.awaitGone(sc)
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialDeleted, audit.CredentialReleased)
}

func suspended(ready metav1.ConditionStatus) func(*v1beta1.SealedCredential) bool {
	return func(sc *v1beta1.SealedCredential) bool {
		c := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionReady)
		return c != nil && c.Reason == v1beta1.ReasonSuspended && c.Status == ready && sc.Status.ObservedGeneration == sc.Generation
	}
}

func (w *world) testRetained(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	manifest := w.manifest(ns, "retained", values)
	manifest.Spec.DeletionPolicy = v1beta1.DeletionRetain
	sc := w.awaitReady(w.create(manifest), 1)
	must(t, w.admin.Delete(t.Context(), sc))
	w.awaitGone(sc)
	w.checkUnseals(sc, values)
	w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReleased)
	// The entry is its tenant's now, and the same object made again gets another one.
	twin := w.awaitReady(w.create(w.manifest(ns, "retained", values)), 1)
	if twin.Status.CredentialID == sc.Status.CredentialID {
		t.Error("a new object took over the retained entry")
	}
	must(t, w.vault.Delete(t.Context(), w.tenant(ns), sc.Status.CredentialID))
	w.checkUnseals(twin, values)
}

func (w *world) testOutage(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	sc := w.awaitReady(w.create(w.manifest(ns, "waiting", values)), 1)
	abandoned := w.awaitReady(w.create(w.manifest(ns, "abandoned", values)), 1)
	retained := w.awaitReady(w.create(w.manifest(ns, "retained", values)), 1)
	w.store.down.Store(true)
	defer w.store.down.Store(false)

	sc = w.change(sc, func(sc *v1beta1.SealedCredential) { sc.Spec.TTLDays = 30 })
	sc = w.awaitThat(sc, "the outage to be shown", reconcilingCondition(v1beta1.ReasonVaultUnavailable))
	if s := sc.Status; !meta.IsStatusConditionTrue(s.Conditions, v1beta1.ConditionReady) || s.ObservedGeneration == sc.Generation || s.Version != 1 || s.Audit == nil {
		t.Errorf("an outage changed what is known: %+v", s)
	}
	created := w.awaitThat(w.create(w.manifest(ns, "created", values)), "the outage to be shown", reconcilingCondition(v1beta1.ReasonVaultUnavailable))

	if ready := meta.FindStatusCondition(created.Status.Conditions, v1beta1.ConditionReady); ready.Status != metav1.ConditionFalse || ready.Reason != v1beta1.ReasonVaultUnavailable {
		t.Errorf("a new object during an outage: %+v", ready)
	}

	must(t, w.admin.Delete(t.Context(), abandoned))
	abandoned = w.awaitThat(abandoned, "the outage to be shown", reconcilingCondition(v1beta1.ReasonDeleting))
	w.change(abandoned, func(sc *v1beta1.SealedCredential) { metav1.SetMetaDataAnnotation(&sc.ObjectMeta, abandon, "true") })
	w.awaitGone(abandoned)

	w.store.down.Store(false)
	w.checkUnseals(w.awaitReady(sc, 2), values)
	w.checkUnseals(w.awaitReady(created, 1), values)

	// The abandoned entry is released now that it can be, and kept like one that is abandoned while the vault is up.
	w.clock.Advance(10 * time.Minute)
	w.checkEvents(abandoned, "Sealed", "Released", "Released")
	w.change(retained, func(sc *v1beta1.SealedCredential) { metav1.SetMetaDataAnnotation(&sc.ObjectMeta, abandon, "true") })
	must(t, w.admin.Delete(t.Context(), retained))
	w.awaitGone(retained)
	for _, sc := range []*v1beta1.SealedCredential{abandoned, retained} {
		w.checkUnseals(sc, values)
		must(t, w.vault.Delete(t.Context(), w.tenant(ns), sc.Status.CredentialID))
		w.checkHistory(sc, audit.CredentialSealed, audit.CredentialReleased, audit.CredentialDeleted)
	}
}

func reconcilingCondition(reason string) func(*v1beta1.SealedCredential) bool {
	return func(sc *v1beta1.SealedCredential) bool {
		c := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionReconciling)
		return c != nil && c.Reason == reason
	}
}

func (w *world) testTerminating(t *testing.T) {
	w, ns := w.in(t)
	values := w.values("token")
	sealed := w.awaitReady(w.create(w.manifest(ns, "sealed", values)), 1)
	pending := w.manifest(ns, "pending", values)
	w.halt()
	w.create(pending)
	// No controller ends the namespace here: it stays terminating.
	must(t, w.admin.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}))
	w.start(nil)
	must(t, w.admin.Delete(t.Context(), sealed))
	w.awaitGone(sealed)
	w.checkHistory(sealed, audit.CredentialSealed, audit.CredentialDeleted)
	w.nudge(pending)
	elsewhere := w.namespace()
	w.awaitReady(w.create(w.manifest(elsewhere, "witness", values)), 1)
	must(t, w.admin.Get(t.Context(), client.ObjectKeyFromObject(pending), pending))
	if len(pending.Finalizers) != 0 || pending.Status.CredentialID != "" {
		t.Errorf("a terminating namespace got finalizers %v and credential %q", pending.Finalizers, pending.Status.CredentialID)
	}
	must(t, w.admin.Delete(t.Context(), pending))
	w.awaitGone(pending)
}

func (w *world) testMissingCRD(t *testing.T) {
	w, _ = w.in(t)
	w.open(nil)
	defer w.store.Close()
	w.kubectl("delete", "-k", "../config/crd")
	for strings.Contains(w.kubectl("api-resources"), "sealedcredentials") {
		must(t, t.Context().Err())
	}
	err := controllers.Run(t.Context(), w.operator, w.options())
	if err == nil || !strings.Contains(err.Error(), "kubectl apply -k config/crd") {
		t.Errorf("without the CRD the operator says %v", err)
	}
	w.kubectl("apply", "-k", "../config/crd")
	must(t, w.plane.AwaitCRDs(t.Context()))
	for !strings.Contains(w.kubectl("api-resources"), "sealedcredentials") {
		must(t, t.Context().Err())
	}
}

func (w *world) testChain(t *testing.T) {
	w, _ = w.in(t)
	w.open(nil)
	defer w.store.Close()
	report, err := compare.Store(t.Context(), w.store, verify.Options{Fingerprint: w.log.Fingerprint()})
	if err != nil {
		t.Errorf("verifying: %v", err)
	}
	if report.Entries < 20 || !report.Pinned {
		t.Errorf("the report covers %d entries, pinned %v", report.Entries, report.Pinned)
	}
}

func (w *world) testNothingLeaks(t *testing.T) {
	objects, events := new(v1beta1.SealedCredentialList), new(eventsv1.EventList)
	must(t, w.admin.List(t.Context(), objects))
	must(t, w.admin.List(t.Context(), events))
	b, err := json.Marshal([]any{objects, events})
	must(t, err)
	text := w.logs.String() + string(b)
	if len(objects.Items) == 0 || len(events.Items) == 0 || len(text) == len(b) || len(w.canaries) == 0 {
		t.Fatal("there is nothing to look for, or to look into")
	}
	for _, canary := range w.canaries {
		for _, form := range []string{canary, base64.StdEncoding.EncodeToString([]byte(canary))} {
			if strings.Contains(text, form) {
				t.Fatal("a value is in a log, an event or an object")
			}
		}
	}
}
