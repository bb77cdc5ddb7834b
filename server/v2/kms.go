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

// kmsAPI answers the endpoints of the keys of the KMS.
type kmsAPI struct {
	custody *custody.Service
	now     func() time.Time
}

// A step of moving keys waits for three calls of a key-management service at
// most, and a destruction for as long as that takes to answer.
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

// ListKMSKeys answers the KMS keys, and how much is under each.
func (a *kmsAPI) ListKMSKeys(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		now := a.now().UTC().Truncate(time.Second).Add(time.Second) // so that a run wraps anew all that was wrapped until now
		found, err := a.custody.List(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		return api.KMSKeyList{Success: true, CheckedAt: now, DamagedSets: found.Damaged, KmsKeys: kmsKeys(found.Keys)}, nil
	})
}

// RewrapKeys moves some of what is under another KMS key under the current one.
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

// DestroyKMSKey has a former KMS key destroyed.
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
		answer := api.DestroyKMSKeyAnswer{Success: true, KeyId: body.KeyId, Undo: optional(d.Undo), Left: optional(d.Left)}
		if !d.When.IsZero() {
			at := d.When.UTC()
			answer.FinalAt = &at
		}
		return answer, nil
	})
}
