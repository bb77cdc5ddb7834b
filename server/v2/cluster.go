package v2

import (
	"context"
	"encoding/base64"
	"net/http"
	"sort"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/server/gate"
)

// clusterAPI implements the endpoint of the objects of a cluster.
type clusterAPI struct {
	cluster Cluster // nil without an operator
	guard   *guard.Guard
	keys    *keyring.Ring
}

// Cluster is the operator's view of its cluster.
type Cluster interface {
	// SealedCredentials returns the objects in a tenant's namespaces, sorted by namespace and name.
	// Error: fault.Unavailable while the operator does not know all of them.
	SealedCredentials(ctx context.Context, tenant authz.TenantID) ([]v1beta1.SealedCredential, error)
}

var errObjectCursor = gate.BadRequest("the cursor is not one of this list: start again without it")

// ListSealedCredentials returns the objects in the namespaces of the caller's tenant, without their
// values.
func (a *clusterAPI) ListSealedCredentials(c *gin.Context, params api.ListSealedCredentialsParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		before, ok := objectCursor(gate.Value(params.Cursor))
		if !ok {
			return nil, errObjectCursor
		}
		answer := api.SealedCredentialList{Success: true, Operator: a.cluster != nil, SealedCredentials: []api.SealedCredential{}, SealingKeys: []api.SealingKeyUse{}}
		if a.cluster != nil {
			all, err := a.cluster.SealedCredentials(ctx, call.Principal().Tenant)
			if err != nil {
				return nil, err
			}
			if p := call.Principal(); p.Kind == authz.ServiceAccount {
				all = inNamespace(all, p.Namespace.Name)
			}
			all = within(call.Principal(), all)
			if answer.SealingKeys, err = a.sealingKeyUse(ctx, all); err != nil {
				return nil, err
			}
			limit := gate.Value(params.Limit)
			if limit == 0 {
				limit = gate.DefaultLimit
			}
			rest := all[sort.Search(len(all), func(i int) bool { return objectName(&all[i]) > before }):]
			for i := range rest {
				if namespace := gate.Value(params.Namespace); namespace != "" && rest[i].Namespace != namespace {
					continue
				}
				if params.Status != nil && *params.Status != objectStatus(&rest[i]) {
					continue
				}
				if n := len(answer.SealedCredentials); n == limit {
					last := answer.SealedCredentials[n-1]
					next := base64.RawURLEncoding.EncodeToString([]byte(last.Namespace + "\x00" + last.Name))
					answer.NextCursor = &next
					break
				}
				answer.SealedCredentials = append(answer.SealedCredentials, sealedCredential(&rest[i]))
			}
		}
		err := a.guard.Record(ctx, audit.Event{
			Type: audit.CredentialListed, Outcome: audit.Success, Principal: call.Principal(), Resource: audit.Resource{Type: audit.ManifestResource},
		})
		if err != nil {
			return nil, err
		}
		return answer, nil
	})
}

// inNamespace returns the objects of one namespace. A ServiceAccount sees no objects of other
// namespaces, just as it sees no entries of theirs.
func inNamespace(all []v1beta1.SealedCredential, namespace string) (own []v1beta1.SealedCredential) {
	for i := range all {
		if all[i].Namespace == namespace {
			own = append(own, all[i])
		}
	}
	return own
}

// within returns the objects whose credentials the policies of p let it list. A credential has the
// name of its object.
func within(p authz.Principal, all []v1beta1.SealedCredential) (seen []v1beta1.SealedCredential) {
	if !p.Access.IsLimited() {
		return all
	}
	for i := range all {
		if p.Reaches(authz.ListSealedCredentials, all[i].Name) {
			seen = append(seen, all[i])
		}
	}
	return seen
}

// objectName returns a name whose order is the order of the list. No namespace has a zero byte in
// its name.
func objectName(sc *v1beta1.SealedCredential) string { return sc.Namespace + "\x00" + sc.Name }

// objectCursor returns the name of the last object on the previous page.
func objectCursor(text string) (name string, ok bool) {
	if text == "" {
		return "", true
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	namespace, of, found := strings.Cut(string(b), "\x00")
	return string(b), err == nil && found && namespace != "" && of != "" && base64.RawURLEncoding.EncodeToString(b) == text // accept only the canonical encoding
}

// sealingKeyUse counts the objects that need each sealing key, the current key first.
func (a *clusterAPI) sealingKeyUse(ctx context.Context, all []v1beta1.SealedCredential) ([]api.SealingKeyUse, error) {
	objects := make(map[string]int)
	for i := range all {
		if sealed := all[i].Spec.Sealed; sealed != nil {
			objects[sealed.KeyID]++
		}
	}
	keys, err := a.keys.SealingKeys(ctx)
	if err != nil {
		return nil, err
	}
	use := []api.SealingKeyUse{}
	for _, k := range keys {
		state := api.SealingKeyUseStateFormer
		if k.State == keyring.SealingKeyCurrent {
			state = api.SealingKeyUseStateCurrent
		}
		if n := objects[k.ID]; n > 0 || state == api.SealingKeyUseStateCurrent {
			use = append(use, api.SealingKeyUse{KeyId: k.ID, State: state, Objects: n})
		}
		delete(objects, k.ID)
	}
	known := len(use)
	for id, n := range objects {
		use = append(use, api.SealingKeyUse{KeyId: id, State: api.SealingKeyUseStateUnknown, Objects: n})
	}
	sort.Slice(use[known:], func(i, j int) bool { return use[known+i].KeyId < use[known+j].KeyId })
	return use, nil
}

// objectStatus returns the status of an object by the rules of kstatus, and Suspended for one that
// asks the operator to change nothing.
func objectStatus(sc *v1beta1.SealedCredential) api.ObjectStatus {
	is := func(condition string) bool { return meta.IsStatusConditionTrue(sc.Status.Conditions, condition) }
	switch {
	case sc.Spec.Suspend:
		return api.ObjectStatusSuspended
	case sc.Status.ObservedGeneration != sc.Generation, is(v1beta1.ConditionReconciling):
		return api.ObjectStatusInProgress
	case is(v1beta1.ConditionStalled):
		return api.ObjectStatusFailed
	case is(v1beta1.ConditionReady):
		return api.ObjectStatusCurrent
	}
	return api.ObjectStatusInProgress
}

func sealedCredential(sc *v1beta1.SealedCredential) api.SealedCredential {
	shown := api.SealedCredential{
		Namespace: sc.Namespace, Name: sc.Name, CredentialType: sc.Spec.CredentialType, Source: api.SealedCredentialSourceGenerate,
		Status: objectStatus(sc), Suspended: sc.Spec.Suspend, CreatedAt: sc.CreationTimestamp.UTC(), Generation: sc.Generation, ObservedGeneration: sc.Status.ObservedGeneration,
		CredentialId: gate.NonZero(sc.Status.CredentialID), Version: sc.Status.Version,
		NextRotationAt: moment(sc.Status.NextRotationTime), ExpiresAt: moment(sc.Status.ExpiresAt), Conditions: make([]api.ObjectCondition, len(sc.Status.Conditions)),
	}
	switch {
	case sc.Spec.Sealed != nil:
		scope := api.SealedCredentialScope(sc.Spec.Sealed.Scope)
		if scope == "" {
			scope = api.SealedCredentialScopeStrict
		}
		shown.Source, shown.KeyId, shown.Scope = api.SealedCredentialSourceSealed, &sc.Spec.Sealed.KeyID, &scope
	case sc.Spec.ValuesFrom != nil:
		shown.Source = api.SealedCredentialSourceValuesFrom
	}
	if target := sc.Spec.Target; target != nil {
		shown.TargetSecret = &sc.Name
		if target.Name != "" {
			shown.TargetSecret = &target.Name
		}
	}
	for i, condition := range sc.Status.Conditions {
		shown.Conditions[i] = api.ObjectCondition{
			Type: condition.Type, Status: api.ObjectConditionStatus(condition.Status), Reason: condition.Reason, Message: condition.Message,
			LastTransitionTime: condition.LastTransitionTime.UTC(),
		}
	}
	return shown
}

func moment(t *metav1.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	at := t.UTC()
	return &at
}
