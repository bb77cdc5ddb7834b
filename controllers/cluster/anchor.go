package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// The ConfigMap is made if it is missing, for which the operator's role has the verb.
//
// +kubebuilder:rbac:roleName=latticekeep-audit-anchor,groups="",resources=configmaps,verbs=get;update,resourceNames=latticekeep-audit-anchor,namespace=latticekeep-system

// The ConfigMap has the newest signed checkpoint of an audit log under the id of its chain, so that a server which begins
// a new chain, say on a volume that was lost, leaves alone what is known of the former one until that is restored.
const (
	anchorPrefix  = "chain_"  // prefix of chain ids
	anchorRefused = "refused" // what lay under the id and was none of this log
)

// At most maxAnchors chains' checkpoints are kept, and none of more than maxAnchor bytes, which is several times what one has.
const (
	maxAnchors = 16
	maxAnchor  = 16 << 10
)

// maxRefused bounds what is kept of a note that was refused: whoever could write it could make it so large that nothing
// fits beside it, and a checkpoint has under 6 KiB.
const maxRefused = 64 << 10

// Anchor keeps the newest checkpoint of the audit log in a ConfigMap: it is a place of audit.AnchorKeeper, and works
// whether or not the operator runs. What it writes over is what it has read, by its resourceVersion, so that of two that
// write one wins and the other one looks again. Safe for concurrent use.
type Anchor struct {
	configMaps typedcorev1.ConfigMapInterface
	object     metav1.ObjectMeta
	chain      string // id of it

	mu       sync.Mutex
	lastRead *corev1.ConfigMap // as it was read or written last; nil: that is not known
	setAside []byte            // goes into the next write; nil: nothing new
}

// NewAnchor returns the ConfigMap of that name in a namespace, which need not exist, as the anchor of a chain.
func NewAnchor(cfg *rest.Config, namespace, name, chain string) (*Anchor, error) {
	core, err := typedcorev1.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("making a client for ConfigMap %s/%s: %w", namespace, name, err)
	}
	return &Anchor{configMaps: core.ConfigMaps(namespace), object: metav1.ObjectMeta{Namespace: namespace, Name: name}, chain: chain}, nil
}

// Name returns what metrics and audit entries call such a place.
func (a *Anchor) Name() string { return "configmap" }

// Load returns the checkpoint that is kept: that of another chain when there is none of this one, and nil when there is none
// at all. Error: fault.Unavailable.
func (a *Anchor) Load(ctx context.Context) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lastRead, a.setAside = nil, nil
	got, err := a.configMaps.Get(ctx, a.object.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		a.lastRead = &corev1.ConfigMap{ObjectMeta: a.object}
		return nil, nil
	}
	if err != nil {
		return nil, a.apiFault("reading", err)
	}
	a.lastRead = got
	if note, ok := got.Data[a.chain]; ok {
		return []byte(note), nil
	}
	if note, ok := got.BinaryData[a.chain]; ok {
		return note, nil
	}
	if others := a.otherChains(got); len(others) > 0 {
		return []byte(got.Data[others[0]]), nil
	}
	return nil, nil
}

// otherChains returns the keys of other chains' checkpoints, as many as are kept.
func (a *Anchor) otherChains(c *corev1.ConfigMap) []string {
	keys := slices.DeleteFunc(slices.Sorted(maps.Keys(c.Data)), func(key string) bool {
		return key == a.chain || !strings.HasPrefix(key, anchorPrefix) || len(c.Data[key]) > maxAnchor
	})
	return keys[:min(len(keys), maxAnchors-1)]
}

// Save puts note where Load has looked. Errors: fault.Conflict when something else is there by now, or Load was not called
// before; fault.Unavailable.
func (a *Anchor) Save(ctx context.Context, note []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.lastRead == nil {
		return fault.New(fault.Conflict, "the anchor is written over only after it was read")
	}
	next := a.lastRead.DeepCopy()
	a.lastRead = nil // until the answer says what is there
	if next.Immutable != nil && *next.Immutable {
		return a.apiFault("writing", errors.New("it was made immutable: delete it, and it is made again"))
	}
	data := map[string]string{a.chain: string(note)}
	for _, key := range a.otherChains(next) {
		data[key] = next.Data[key]
	}
	if a.setAside != nil {
		data[anchorRefused] = strings.ToValidUTF8(string(a.setAside), "\uFFFD")
	} else if former, ok := next.Data[anchorRefused]; ok {
		data[anchorRefused] = former
	}
	next.Data, next.BinaryData = data, nil
	var err error
	if next.ResourceVersion == "" {
		next, err = a.configMaps.Create(ctx, next, metav1.CreateOptions{FieldManager: v1alpha1.OperatorName})
	} else {
		next, err = a.configMaps.Update(ctx, next, metav1.UpdateOptions{FieldManager: v1alpha1.OperatorName})
		if apierrors.IsNotFound(err) { // it was deleted meanwhile
			err = apierrors.NewConflict(corev1.Resource("configmaps"), a.object.Name, err)
		}
	}
	if err != nil {
		return a.apiFault("writing", err)
	}
	// A server that takes a write and keeps something else, as a mutating webhook might, has kept no checkpoint.
	if !maps.Equal(next.Data, data) {
		return a.apiFault("writing", errors.New("something between here and the cluster's store changes it"))
	}
	a.lastRead, a.setAside = next, nil
	return nil
}

// SetAside has the next Save keep note, which Load returned, beside the checkpoint: in the same write, so that at no moment
// it is in neither place, or two writes follow each other at once. What another chain keeps under its own id stays there.
func (a *Anchor) SetAside(_ context.Context, note []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.lastRead != nil && slices.ContainsFunc(a.otherChains(a.lastRead), func(key string) bool { return a.lastRead.Data[key] == string(note) }) {
		return nil
	}
	a.setAside = note[:min(len(note), maxRefused)]
	return nil
}

// apiFault gives an error of the API server its kind.
func (a *Anchor) apiFault(doing string, err error) error {
	err = fmt.Errorf("%s ConfigMap %s/%s: %w", doing, a.object.Namespace, a.object.Name, err)
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		return fault.Wrap(fault.Conflict, "the anchor was changed meanwhile", err)
	}
	return fault.Wrap(fault.Unavailable, "the anchor cannot be reached", err)
}
