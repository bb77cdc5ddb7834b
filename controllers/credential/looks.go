package credential

import (
	"context"
	"crypto/sha3"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// recheck is the longest time between two reconciles of an unchanged object. Each of them looks at
// the target Secret, and finds for example a deleted vault entry or a restored sealing key. The
// interval is up to a fifth shorter, at random.
const recheck = 10 * time.Minute

// targetMemory is what targets remembers about a target, to avoid needless reads and, above all,
// needless opening of values.
type targetMemory struct {
	object      types.UID
	refused     *refusal // why the values of source cannot make this target
	source      source
	dryRunFirst bool // the last write failed: test the next one with a dry run

	data [32]byte // digestOf what was last written to the Secret, or to be written

	// seen is the target as last written or observed. The status has it too, but may not have been
	// written since.
	seen *v1beta1.TargetStatus

	lookedAt time.Time // last look at the Secret, or first reconcile; zero if the Secret is not looked at
	turn     time.Time // the next look may happen after it; zero if it has not asked for its turn
	asked    uint64    // requestOf the object at the last look or reconcile
}

// isUnchanged looks at the Secret, and returns what it has seen of it, or nil if the Secret is gone
// or has changed. A look may have to wait for its turn. Until then isUnchanged returns what the
// status says.
func (t *targets) isUnchanged(ctx context.Context, sc *v1beta1.SealedCredential, seen *v1beta1.TargetStatus) (*v1beta1.TargetStatus, error) {
	if t.mustWait(sc, seen) {
		return seen, nil
	}
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	err := t.live.Get(ctx, client.ObjectKey{Namespace: sc.Namespace, Name: seen.Name}, m)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("looking at the target Secret: %w", err)
	}
	t.recordLook(sc, nil)
	if apierrors.IsNotFound(err) || m.UID != seen.UID || m.ResourceVersion != seen.ResourceVersion || isOfEarlierRelease(m) {
		return nil, nil
	}
	if isSyncRequested(sc, seen) { // the author wants to know that the operator looked
		seen = seen.DeepCopy()
		seen.SeenAt, seen.Sync = seconds(t.now()), syncRequest(sc)
	}
	t.recordLook(sc, seen)
	return seen, nil
}

// mustWait reports whether the look at the Secret of sc has to wait for its turn. Only a look that
// nobody asked for waits: after a start, and at each recheck. A change of the object asks for a
// look, and so does a status that does not say that the Secret is right: it must not begin to say
// so without a look.
func (t *targets) mustWait(sc *v1beta1.SealedCredential, seen *v1beta1.TargetStatus) (wait bool) {
	now, asked := t.now(), requestOf(sc)
	synced := meta.FindStatusCondition(sc.Status.Conditions, v1beta1.ConditionTargetSynced)
	t.remember(sc, func(m *targetMemory) {
		isFirst, isChanged := m.lookedAt.IsZero(), m.asked != asked
		m.asked = asked
		if isFirst {
			m.lookedAt = now
		}
		if synced == nil || synced.Status != metav1.ConditionTrue || synced.ObservedGeneration != sc.Generation ||
			isChanged && !isFirst || isSyncRequested(sc, seen) {
			return
		}
		if m.turn.IsZero() {
			m.turn = now.Add(t.pace.ReserveN(now, 1).DelayFrom(now))
		}
		wait = now.Before(m.turn)
	})
	return wait
}

// requestOf returns a digest of what the author of sc can change. Another digest is a reason to
// look.
func requestOf(sc *v1beta1.SealedCredential) uint64 {
	h := fnv.New64a()
	fmt.Fprint(h, sc.Generation, sc.Labels, sc.Annotations) // sorts maps
	return h.Sum64()
}

// maxSync is the most of an annotation latticekeep.dev/sync that the status repeats, in bytes.
const maxSync = 63

// syncRequest returns the value of the annotation that asks for a look, as the status repeats it.
func syncRequest(sc *v1beta1.SealedCredential) string {
	value := sc.Annotations[v1beta1.AnnotationSync]
	return strings.ToValidUTF8(value[:min(maxSync, len(value))], "")
}

// isSyncRequested reports whether the author asked for a look that has not happened yet.
func isSyncRequested(sc *v1beta1.SealedCredential, seen *v1beta1.TargetStatus) bool {
	value := syncRequest(sc)
	return value != "" && value != seen.Sync
}

// recordLook remembers that the operator looked at the Secret of sc, or wrote it, now. If seen is not
// nil, the Secret is right.
func (t *targets) recordLook(sc *v1beta1.SealedCredential, seen *v1beta1.TargetStatus) {
	t.remember(sc, func(m *targetMemory) {
		m.lookedAt, m.turn, m.asked = t.now(), time.Time{}, requestOf(sc)
		if seen != nil {
			m.seen, m.refused, m.dryRunFirst = seen, nil, false
		}
	})
}

// nextTurn returns when the look at the Secret of an object has its turn, or the zero time if no
// look waits.
func (t *targets) nextTurn(sc *v1beta1.SealedCredential) time.Time { return t.memory(sc).turn }

// oldestLook returns the time of the oldest of the last looks at all Secrets, or the zero time if
// there is no Secret to look at. A Secret that was not looked at since the start counts from the
// first reconcile of its object.
func (t *targets) oldestLook() (oldest time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.memories {
		if !m.lookedAt.IsZero() && (oldest.IsZero() || m.lookedAt.Before(oldest)) {
			oldest = m.lookedAt
		}
	}
	return oldest
}

// lastKnown returns the last known target, or nil for none. The operator may have stopped after it
// wrote a target and before it wrote the status. If the spec no longer has a target, lastKnown then
// assumes a Secret with the default name.
func (t *targets) lastKnown(sc *v1beta1.SealedCredential) *v1beta1.TargetStatus {
	if seen := t.memory(sc).seen; seen != nil {
		return seen
	}
	if sc.Status.Target == nil && sc.Spec.Target == nil && sc.Generation > 1 && sc.Status.ObservedGeneration != sc.Generation {
		return &v1beta1.TargetStatus{Name: sc.Name}
	}
	return sc.Status.Target
}

// statusOf returns the status of a Secret that was written or compared with the vault now.
func (t *targets) statusOf(sc *v1beta1.SealedCredential, is *corev1.Secret, owned *vault.Owned) *v1beta1.TargetStatus {
	of := sourceOf(sc, owned)
	return &v1beta1.TargetStatus{
		Name: is.Name, UID: is.UID, ResourceVersion: is.ResourceVersion, Version: int64(owned.Version), Audit: of.audit, Spec: of.spec,
		SeenAt: seconds(t.now()), Sync: syncRequest(sc),
	}
}

// rememberData remembers the data of a Secret that was written or compared with the vault.
func (t *targets) rememberData(sc *v1beta1.SealedCredential, want *corev1.Secret) {
	digest := digestOf(want.Data)
	t.remember(sc, func(m *targetMemory) { m.data = digest })
}

// holds reports whether the Secret is known to have the values of the version, so that they need not
// be opened to see that only its metadata has changed.
func (t *targets) holds(sc *v1beta1.SealedCredential, is *corev1.Secret, of *vault.Owned) bool {
	m, from := t.memory(sc), sourceOf(sc, of)
	return m.seen != nil && m.seen.Audit == from.audit && m.seen.Spec == from.spec && m.data == digestOf(is.Data)
}

// digestOf returns a digest of the data of a Secret. It stays in memory.
func digestOf(data map[string][]byte) [32]byte {
	h := sha3.New256()
	for _, key := range slices.Sorted(maps.Keys(data)) {
		fmt.Fprintf(h, "%d %s %d ", len(key), key, len(data[key]))
		h.Write(data[key])
	}
	return [32]byte(h.Sum(nil))
}

// rememberRefusal remembers a refusal until the spec or the version changes. It remembers no
// transient refusal, but requires a dry run before the next write.
func (t *targets) rememberRefusal(sc *v1beta1.SealedCredential, of source, refused *refusal) {
	t.remember(sc, func(m *targetMemory) {
		m.lookedAt = time.Time{}
		if refused.transient {
			m.refused, m.dryRunFirst = nil, true
		} else {
			m.refused, m.source, m.dryRunFirst = refused, of, false
		}
	})
}

func (t *targets) rememberedRefusal(sc *v1beta1.SealedCredential, of source) *refusal {
	if m := t.memory(sc); m.source == of {
		return m.refused
	}
	return nil
}

// rememberFailure remembers that the Secret could not be written.
func (t *targets) rememberFailure(sc *v1beta1.SealedCredential) {
	t.remember(sc, func(m *targetMemory) { m.refused, m.dryRunFirst = nil, true })
}

func (t *targets) memory(sc *v1beta1.SealedCredential) (m targetMemory) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if is := t.memories[client.ObjectKeyFromObject(sc)]; is != nil && is.object == sc.UID {
		m = *is
	}
	return m
}

// remember changes what is known of the target of sc.
func (t *targets) remember(sc *v1beta1.SealedCredential, change func(*targetMemory)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := client.ObjectKeyFromObject(sc)
	m := t.memories[key]
	if m == nil || m.object != sc.UID {
		m = &targetMemory{object: sc.UID}
		t.memories[key] = m
	}
	change(m)
}

func (t *targets) forget(object types.NamespacedName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.memories, object)
}

// targetIndex is the index of SealedCredentials by the name of their target Secret.
const targetIndex = "spec.target.name"

func indexTarget(o client.Object) []string {
	sc, ok := o.(*v1beta1.SealedCredential)
	if !ok || sc.Spec.Target == nil {
		return nil
	}
	return []string{targetName(sc)}
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// targetHandler returns the handler of the Secrets that the operator may watch: it lets the objects
// whose target a changed Secret is look at it now.
func (r *reconciler) targetHandler() handler.EventHandler {
	return handler.Funcs{
		CreateFunc: func(ctx context.Context, e event.CreateEvent, q queue) { r.secretChanged(ctx, e.Object, false, q) },
		UpdateFunc: func(ctx context.Context, e event.UpdateEvent, q queue) { r.secretChanged(ctx, e.ObjectNew, false, q) },
		DeleteFunc: func(ctx context.Context, e event.DeleteEvent, q queue) { r.secretChanged(ctx, e.Object, true, q) },
	}
}

// secretChanged enqueues the objects whose target the Secret is. It leaves out those that know the
// Secret as it is: most of all at a start, and after a write of the operator itself.
func (r *reconciler) secretChanged(ctx context.Context, is client.Object, deleted bool, q queue) {
	list := new(v1beta1.SealedCredentialList)
	err := r.reader.List(ctx, list, client.InNamespace(is.GetNamespace()), client.MatchingFields{targetIndex: is.GetName()}, client.UnsafeDisableDeepCopy)
	if err != nil { // the next look finds it
		log.FromContext(ctx).Error(err, "looking for the objects of a Secret", "namespace", is.GetNamespace(), "name", is.GetName())
		return
	}
	for i := range list.Items {
		sc := &list.Items[i]
		if !deleted && r.targets.knows(sc, is) {
			continue
		}
		r.targets.requestLook(sc)
		q.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(sc)})
	}
}

// knows reports whether the Secret is as it was last seen.
func (t *targets) knows(sc *v1beta1.SealedCredential, is client.Object) bool {
	seen := t.lastKnown(sc)
	return seen != nil && seen.UID == is.GetUID() && seen.ResourceVersion == is.GetResourceVersion() && !isOfEarlierRelease(is)
}

// requestLook gives the next look at the Secret of sc its turn now.
func (t *targets) requestLook(sc *v1beta1.SealedCredential) {
	t.remember(sc, func(m *targetMemory) { m.turn = t.now() })
}
