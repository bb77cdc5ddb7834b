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

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// The operator creates the ConfigMap if it is missing; its role has the verb create for that.
//
// +kubebuilder:rbac:roleName=latticekeep-audit-anchor,groups="",resources=configmaps,verbs=get;update,resourceNames=latticekeep-audit-anchor,namespace=latticekeep-system

// The ConfigMap holds the newest signed checkpoint of each audit log under the ID of its chain. A
// server that begins a new chain, for example after its volume was lost, leaves the previous
// chain's checkpoint alone until that chain is restored.
const (
	anchorPrefix  = "chain_"  // prefix of chain ids
	anchorRefused = "refused" // key of a refused note found under the chain's id
)

// The anchor keeps the checkpoints of at most maxAnchors chains. It drops a checkpoint larger than
// maxAnchor bytes, which is several times the size of a real one.
const (
	maxAnchors = 16
	maxAnchor  = 16 << 10
)

// maxRefused bounds how much of a refused note is kept, in bytes. Its writer could make it so large
// that nothing fits beside it. A real checkpoint has less than 6 KiB.
const maxRefused = 64 << 10

// Anchor keeps the newest checkpoint of the audit log in a ConfigMap, as a place of
// keeper.AnchorKeeper. It works whether or not the operator runs. It only overwrites the
// resourceVersion that it has read. So if two writers compete, one wins and the other reads again.
// It is safe for concurrent use.
type Anchor struct {
	configMaps typedcorev1.ConfigMapInterface
	object     metav1.ObjectMeta
	chain      string // chain id

	mu       sync.Mutex
	lastRead *corev1.ConfigMap // as last read or written; nil: unknown
	setAside []byte            // note for the next write to keep; nil: none
}

// NewAnchor returns the anchor of a chain in the named ConfigMap, which need not exist.
func NewAnchor(cfg *rest.Config, namespace, name, chain string) (*Anchor, error) {
	core, err := typedcorev1.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("making a client for ConfigMap %s/%s: %w", namespace, name, err)
	}
	return &Anchor{configMaps: core.ConfigMaps(namespace), object: metav1.ObjectMeta{Namespace: namespace, Name: name}, chain: chain}, nil
}

// Name returns the name of this kind of place in metrics and audit entries.
func (a *Anchor) Name() string { return "configmap" }

// Load returns the kept checkpoint of this chain. It returns that of another chain if there is none
// of this one, and nil if there is none at all. Error: fault.Unavailable.
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

// otherChains returns the keys of the other chains' checkpoints that are kept.
func (a *Anchor) otherChains(c *corev1.ConfigMap) []string {
	keys := slices.DeleteFunc(slices.Sorted(maps.Keys(c.Data)), func(key string) bool {
		return key == a.chain || !strings.HasPrefix(key, anchorPrefix) || len(c.Data[key]) > maxAnchor
	})
	return keys[:min(len(keys), maxAnchors-1)]
}

// Save writes note over what Load has read. Errors: fault.Conflict if the ConfigMap has changed
// since, or Load was not called before; fault.Unavailable.
func (a *Anchor) Save(ctx context.Context, note []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.lastRead == nil {
		return fault.New(fault.Conflict, "the anchor is written over only after it was read")
	}
	next := a.lastRead.DeepCopy()
	a.lastRead = nil // unknown until the API server answers
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
		next, err = a.configMaps.Create(ctx, next, metav1.CreateOptions{FieldManager: v1beta1.OperatorName})
	} else {
		next, err = a.configMaps.Update(ctx, next, metav1.UpdateOptions{FieldManager: v1beta1.OperatorName})
		if apierrors.IsNotFound(err) { // deleted since it was read
			err = apierrors.NewConflict(corev1.Resource("configmaps"), a.object.Name, err)
		}
	}
	if err != nil {
		return a.apiFault("writing", err)
	}
	// If the API server stores something else, as with a mutating webhook, no checkpoint was kept.
	if !maps.Equal(next.Data, data) {
		return a.apiFault("writing", errors.New("something between here and the cluster's store changes it"))
	}
	a.lastRead, a.setAside = next, nil
	return nil
}

// SetAside makes the next Save keep note, which Load returned, beside the checkpoint. One write
// stores both, so the note is never in neither place. It does nothing if note is the checkpoint of
// another chain, which stays under that chain's ID.
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
