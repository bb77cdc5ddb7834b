package v2

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/custody"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/server/gate"
)

// kmsAPI implements the endpoints of the keys in the KMS.
type kmsAPI struct {
	custody *custody.Service
	now     func() time.Time
}

// A step of rewrapping waits for at most three calls to a key-management service. A destruction
// waits for its answer.
const (
	rewrapTime  = 4 * time.Second
	destroyTime = 10 * time.Second
)

func kmsKeys(found []keyring.KMSKey) []api.KMSKey {
	keys := make([]api.KMSKey, len(found))
	for i, k := range found {
		keys[i] = api.KMSKey{KeyId: k.ID, State: api.KMSKeyState(k.State), Sets: k.Sets, GivenUp: k.GivenUp}
	}
	return keys
}

// ListKMSKeys returns the KMS keys, and how much each of them wraps.
func (a *kmsAPI) ListKMSKeys(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		now := a.now().UTC().Truncate(time.Second).Add(time.Second) // so that a run rewraps everything wrapped until now
		found, err := a.custody.List(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		return api.KMSKeyList{Success: true, CheckedAt: now, DamagedSets: found.Damaged, KmsKeys: kmsKeys(found.Keys)}, nil
	})
}

// RewrapKeys rewraps some of what another KMS key wraps with the current one.
func (a *kmsAPI) RewrapKeys(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.RewrapKeysRequest
		if call.HasBody() {
			if err := call.Decode(&body); err != nil {
				return nil, err
			}
		}
		moved, err := a.custody.Rewrap(ctx, call.Principal(), gate.Value(body.WrappedBefore))
		if err != nil {
			return nil, err
		}
		return api.RewrapKeysAnswer{
			Success: true, Moved: moved.Sets, Remaining: moved.Remaining, DamagedSets: moved.Damaged, KmsKeys: kmsKeys(moved.Keys),
		}, nil
	})
}

// DestroyKMSKey destroys a previous KMS key.
func (a *kmsAPI) DestroyKMSKey(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.DestroyKMSKeyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		d, err := a.custody.Destroy(ctx, call.Principal(), body.KeyId)
		if err != nil {
			return nil, err
		}
		answer := api.DestroyKMSKeyAnswer{Success: true, KeyId: body.KeyId, Undo: gate.NonZero(d.Undo), Left: gate.NonZero(d.Left)}
		if !d.When.IsZero() {
			at := d.When.UTC()
			answer.FinalAt = &at
		}
		return answer, nil
	})
}
