package v2

import (
	"context"
	"net/http"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/server/gate"
)

func encryptionKey(k transit.Key) api.EncryptionKey {
	return api.EncryptionKey{
		KeyId: k.ID, Name: k.Name, Algorithm: algorithm, Version: int64(k.Version), Default: k.Default, RotationPeriod: k.RotationDays,
		CreatedAt: k.CreatedAt.UTC(), RotatedAt: k.RotatedAt.UTC(), NextRotationAt: k.NextRotation.UTC(),
	}
}

// ListKeys returns a page of the tenant's named keys.
func (a *cryptoAPI) ListKeys(c *gin.Context, params api.ListKeysParams) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		limit := gate.Value(params.Limit)
		if limit == 0 {
			limit = gate.DefaultLimit
		}
		found, next, err := a.transit.KeysAfter(ctx, call.Principal(), gate.Value(params.Cursor), limit)
		if err != nil {
			return nil, gate.InvalidParameter(err)
		}
		answer := api.EncryptionKeyList{Success: true, Keys: make([]api.EncryptionKey, len(found)), NextCursor: gate.NonZero(next)}
		for i, k := range found {
			answer.Keys[i] = encryptionKey(k)
		}
		return answer, nil
	})
}

// CreateKey creates a named key.
func (a *cryptoAPI) CreateKey(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.CreateKeyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		k, err := a.transit.CreateKey(ctx, call.Principal(), body.Name, gate.Value(body.RotationPeriod))
		if err != nil {
			return nil, err
		}
		return api.EncryptionKeyAnswer{Success: true, Key: encryptionKey(k)}, nil
	})
}

// GetKey returns a named key and its versions.
func (a *cryptoAPI) GetKey(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		k, versions, err := a.transit.Key(ctx, call.Principal(), id)
		if err != nil {
			return nil, err
		}
		answer := api.EncryptionKeyWithVersions{Success: true, Key: encryptionKey(k), Versions: make([]api.EncryptionKeyVersion, len(versions))}
		for i, v := range versions {
			answer.Versions[i] = api.EncryptionKeyVersion{Number: int64(v.Number), CreatedAt: gate.NonZero(v.CreatedAt.UTC()), Current: v.Current}
		}
		return answer, nil
	})
}

// RotateKey adds a new version to a named key.
func (a *cryptoAPI) RotateKey(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.RotateKeyRequest
		if call.HasBody() {
			if err := call.Decode(&body); err != nil {
				return nil, err
			}
		}
		k, rewrapped, err := a.transit.RotateKey(ctx, call.Principal(), id, gate.Value(body.ReEncryptData))
		if err != nil {
			return nil, err
		}
		return api.RotatedEncryptionKey{Success: true, Key: encryptionKey(k), ReEncryptedVersions: rewrapped}, nil
	})
}
