package v2

import (
	"context"
	"errors"
	"net/http"

	"github.com/gin-gonic/gin"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/server/gate"
	"github.com/latticekeep/latticekeep/server/v2/credentials"
)

// sealingAPI implements the endpoints of sealing keys and manifests.
type sealingAPI struct {
	sealing *sealingkey.Service
	keys    *keyring.Ring
}

// errDoesNotOpen is the answer to every resealing of values that do not open, whatever the cause.
var errDoesNotOpen = gate.Refusal(http.StatusBadRequest, "the values do not open here: their sealing key is unknown or retired, "+
	"or they were sealed for another object, scope or credential type, or changed afterwards; seal them again (latticekeep seal)")

func sealingKey(k sealingkey.Key) api.SealingKey {
	answer := api.SealingKey{
		KeyId: k.ID, Suite: string(k.Suite), State: api.SealingKeyState(k.State), CreatedAt: k.CreatedAt.UTC(), Objects: k.Objects,
	}
	if !k.RetiredAt.IsZero() {
		at := k.RetiredAt.UTC()
		answer.RetiredAt = &at
	}
	return answer
}

func sealingKeyAnswer(k sealingkey.Key, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return api.SealingKeyAnswer{Success: true, SealingKey: sealingKey(k)}, nil
}

// ListSealingKeys returns all sealing keys, the current one first.
func (a *sealingAPI) ListSealingKeys(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		keys, err := a.sealing.List(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		answer := api.SealingKeyList{Success: true, SealingKeys: make([]api.SealingKey, len(keys))}
		for i, k := range keys {
			answer.SealingKeys[i] = sealingKey(k)
		}
		return answer, nil
	})
}

// RotateSealingKey creates a new sealing key, which is published from then on.
func (a *sealingAPI) RotateSealingKey(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		return sealingKeyAnswer(a.sealing.Rotate(ctx, call.Principal()))
	})
}

// RetireSealingKey retires a sealing key that no object needs.
func (a *sealingAPI) RetireSealingKey(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return sealingKeyAnswer(a.sealing.Retire(ctx, call.Principal(), id))
	})
}

// RestoreSealingKey restores a retired sealing key.
func (a *sealingAPI) RestoreSealingKey(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return sealingKeyAnswer(a.sealing.Restore(ctx, call.Principal(), id))
	})
}

// sealedFrom returns the sealed values of a request as spec.sealed.
func sealedFrom(s api.SealedValues) *v1beta1.Sealed {
	sealed := &v1beta1.Sealed{
		Version: int32(s.Version), Suite: v1beta1.Suite(s.Suite), KeyID: s.KeyId, Scope: v1beta1.Scope(gate.Value(s.Scope)),
		Values: make(map[string]v1beta1.SealedValue, len(s.Values)),
	}
	for key, v := range s.Values {
		sealed.Values[key] = v1beta1.SealedValue{SealedAt: metav1.Time{Time: v.SealedAt.UTC()}, Data: v.Data}
	}
	return sealed
}

// ResealManifest seals the values of a manifest for the current sealing key.
func (a *sealingAPI) ResealManifest(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.ResealRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		if err := call.Review(ctx, gate.Value(body.Namespace), body.Name); err != nil {
			return nil, err
		}
		obj := &v1beta1.SealedCredential{
			ObjectMeta: metav1.ObjectMeta{Namespace: gate.Value(body.Namespace), Name: body.Name},
			Spec:       v1beta1.SealedCredentialSpec{CredentialType: body.CredentialType, Sealed: sealedFrom(body.Sealed)},
		}
		again, err := a.sealing.Reseal(ctx, call.Principal(), obj)
		if errors.Is(err, sealingkey.ErrDoesNotOpen) {
			return nil, errDoesNotOpen
		}
		if err != nil {
			return nil, err
		}
		scope := api.SealedValuesScope(again.Scope)
		answer := api.ResealedValues{Success: true, Sealed: api.SealedValues{
			Version: api.SealedValuesVersion(again.Version), Suite: string(again.Suite), KeyId: again.KeyID, Scope: &scope,
			Values: make(map[string]api.SealedValue, len(again.Values)),
		}}
		for key, v := range again.Values {
			answer.Sealed.Values[key] = api.SealedValue{SealedAt: v.SealedAt.UTC(), Data: v.Data}
		}
		return answer, nil
	})
}

// CheckManifest reports whether a manifest would be accepted, and one code if not. It checks no
// source of values other than sealed values.
func (a *sealingAPI) CheckManifest(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.CheckRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		if err := call.Review(ctx, body.Namespace, body.Name); err != nil {
			return nil, err
		}
		days, err := credentials.Days(body.TtlDays)
		if err != nil {
			return nil, err
		}
		obj := &v1beta1.SealedCredential{
			ObjectMeta: metav1.ObjectMeta{Namespace: body.Namespace, Name: body.Name, UID: types.UID(gate.Value(body.Uid))},
			Spec:       v1beta1.SealedCredentialSpec{CredentialType: body.CredentialType, TTLDays: int32(days)},
		}
		if body.Sealed != nil {
			obj.Spec.Sealed = sealedFrom(*body.Sealed)
			obj.Spec.Sealed.AllowOlder = gate.Value(body.AllowOlder)
		}
		v, err := a.sealing.Check(ctx, call.Principal(), obj)
		if err != nil {
			return nil, err
		}
		answer := api.CheckAnswer{Success: true, Accepted: v.Code == sealingkey.Accepted, Message: gate.NonZero(v.Message), Warning: gate.NonZero(v.Warning)}
		if !answer.Accepted {
			code := api.CheckAnswerCode(v.Code)
			answer.Code = &code
		}
		return answer, nil
	})
}

// GetSealingKey returns the document exactly as signed, so that the answer can be stored as a key
// file. An additional field would make it another document.
func (a *sealingAPI) GetSealingKey(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, _ *gate.Call) (any, error) {
		document, err := a.keys.SealingDocument(ctx)
		if err == nil {
			c.Header("Cache-Control", "public, max-age=60") // the same for everyone
		}
		return document, err
	})
}
