package client

import (
	"context"

	v1 "github.com/latticekeep/latticekeep/api/openapi/v1"
)

// V1 has a method for every operation of version 1. Version 1 accepts only an API key. The package
// documentation describes the errors.
type V1 struct{ transport *transport }

// EncryptData encrypts data with a named key, or with the tenant's default key.
func (v *V1) EncryptData(ctx context.Context, r v1.EncryptRequest) (*v1.EncryptAnswer, error) {
	return do[v1.EncryptAnswer](ctx, v.transport, post("/v1/encrypt", r).repeatable())
}

// DecryptData decrypts the answer of EncryptData. ErrInvalid: the key does not decrypt it, whatever
// the cause. ErrNotFound: there is no such key.
func (v *V1) DecryptData(ctx context.Context, r v1.DecryptRequest) (*v1.DecryptAnswer, error) {
	return do[v1.DecryptAnswer](ctx, v.transport, post("/v1/decrypt", r).repeatable())
}

// RewrapData encrypts a ciphertext again with the newest version of its key. The plaintext does not
// leave the server.
func (v *V1) RewrapData(ctx context.Context, r v1.DecryptRequest) (*v1.EncryptAnswer, error) {
	return do[v1.EncryptAnswer](ctx, v.transport, post("/v1/rewrap", r).repeatable())
}

// GenerateKey creates a named key.
func (v *V1) GenerateKey(ctx context.Context, r v1.GenerateKeyRequest) (*v1.Key, error) {
	return do[v1.Key](ctx, v.transport, post("/v1/keys/generate", r))
}

// ListKeys returns a page of the tenant's keys, oldest first. A nil p means the first page.
func (v *V1) ListKeys(ctx context.Context, p *v1.ListKeysParams) (*v1.KeyList, error) {
	return do[v1.KeyList](ctx, v.transport, get("/v1/keys").with(p))
}

// RotateKey adds a version to a key. Ciphertexts of earlier versions can still be decrypted.
func (v *V1) RotateKey(ctx context.Context, keyID string, r v1.RotateKeyRequest) (*v1.RotatedKey, error) {
	return do[v1.RotatedKey](ctx, v.transport, post("/v1/keys/{key_id}/rotate", r, keyID))
}

// QueryAuditLogs returns entries of the tenant's audit log, newest first.
func (v *V1) QueryAuditLogs(ctx context.Context, p *v1.QueryAuditLogsParams) (*v1.AuditLogs, error) {
	return do[v1.AuditLogs](ctx, v.transport, get("/v1/audit/logs").with(p))
}

// GetContract returns the OpenAPI document of version 1 in YAML.
func (v *V1) GetContract(ctx context.Context) (string, error) {
	return v.transport.text(ctx, get("/v1/openapi.yaml").anonymous())
}
