package client

import (
	"context"
	"crypto/rand"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// V2 has a method for every operation of version 2. Methods that have nothing
// to tell besides success return only an error. Errors are as the package says.
type V2 struct {
	transport *transport
	session   session
	plain     bool // HTTP without TLS is allowed to other machines
}

// SealCredential stores a new credential. When p names no idempotency key the
// method makes one, so that the call may be sent again; a caller that wants to
// repeat the call itself, after a crash for example, brings its own.
func (v *V2) SealCredential(ctx context.Context, r v2.SealRequest, p *v2.SealCredentialParams) (*v2.CredentialAnswer, error) {
	if p == nil || p.IdempotencyKey == nil {
		key := rand.Text()
		p = &v2.SealCredentialParams{IdempotencyKey: &key}
	}
	return do[v2.CredentialAnswer](ctx, v.transport, post("/api/v2/vault/seal", r).withHeader(idempotencyKey, *p.IdempotencyKey))
}

// ListCredentials answers the metadata of the tenant's credentials; nil is all
// of them. A page may be short, and even empty, and still name the next: only one
// without NextCursor is the last.
func (v *V2) ListCredentials(ctx context.Context, p *v2.ListCredentialsParams) (*v2.CredentialList, error) {
	return do[v2.CredentialList](ctx, v.transport, get("/api/v2/vault/list").with(p))
}

// GetVaultSummary answers how many credentials there are, and which expire next.
func (v *V2) GetVaultSummary(ctx context.Context, p *v2.GetVaultSummaryParams) (*v2.VaultSummary, error) {
	return do[v2.VaultSummary](ctx, v.transport, get("/api/v2/vault/summary").with(p))
}

// GetCredentialMetadata answers what ListCredentials says of one credential,
// expired or not.
func (v *V2) GetCredentialMetadata(ctx context.Context, credentialID string) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, get("/api/v2/vault/{credential_id}/metadata", credentialID))
}

// UnsealCredential answers a credential with its values. ErrForbidden stands
// for everything that fails, an id that does not exist included; that holds for
// all methods that take a credential's id or name.
func (v *V2) UnsealCredential(ctx context.Context, credentialID string) (*v2.UnsealedCredential, error) {
	return do[v2.UnsealedCredential](ctx, v.transport, get("/api/v2/vault/{credential_id}", credentialID))
}

// UnsealCredentialVersion answers a version of a credential, the current one or
// the one before, while that is readable.
func (v *V2) UnsealCredentialVersion(ctx context.Context, credentialID string, version int64) (*v2.UnsealedCredential, error) {
	return do[v2.UnsealedCredential](ctx, v.transport, get("/api/v2/vault/{credential_id}", credentialID).with(&v2.UnsealCredentialParams{Version: &version}))
}

// UnsealCredentialByName answers the newest active credential of a name.
func (v *V2) UnsealCredentialByName(ctx context.Context, name string) (*v2.UnsealedCredential, error) {
	return do[v2.UnsealedCredential](ctx, v.transport, get("/api/v2/vault/by-name/{name}", name))
}

// ReplaceCredential stores new values as the next version.
func (v *V2) ReplaceCredential(ctx context.Context, credentialID string, r v2.ReplaceRequest) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, put("/api/v2/vault/{credential_id}", r, credentialID))
}

// RotateCredential encrypts a credential anew under fresh keys. Its values stay.
func (v *V2) RotateCredential(ctx context.Context, credentialID string) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, post("/api/v2/vault/rotate/{credential_id}", nil, credentialID))
}

// DeleteCredential removes a credential for good.
func (v *V2) DeleteCredential(ctx context.Context, credentialID string) error {
	return v.transport.run(ctx, remove("/api/v2/vault/{credential_id}", credentialID))
}

// ListCredentialVersions answers what is known of a credential's versions,
// newest first.
func (v *V2) ListCredentialVersions(ctx context.Context, credentialID string) (*v2.CredentialVersionList, error) {
	return do[v2.CredentialVersionList](ctx, v.transport, get("/api/v2/vault/{credential_id}/versions", credentialID))
}

// EncryptData encrypts with the tenant's default key. The answer is what
// DecryptData takes.
func (v *V2) EncryptData(ctx context.Context, r v2.EncryptRequest) (*v2.EncryptAnswer, error) {
	return do[v2.EncryptAnswer](ctx, v.transport, post("/api/v2/encryption/encrypt", r).repeatable())
}

// DecryptData decrypts after both signatures were verified. ErrInvalid: it
// cannot be decrypted, whatever the cause.
func (v *V2) DecryptData(ctx context.Context, r v2.DecryptRequest) (*v2.DecryptAnswer, error) {
	return do[v2.DecryptAnswer](ctx, v.transport, post("/api/v2/encryption/decrypt", r).repeatable())
}

// SignData answers an ML-DSA-65 and an HMAC-SHA-512 signature; both are needed
// to verify.
func (v *V2) SignData(ctx context.Context, r v2.SignRequest) (*v2.SignAnswer, error) {
	return do[v2.SignAnswer](ctx, v.transport, post("/api/v2/encryption/sign", r).repeatable())
}

// VerifyData answers whether both signatures hold.
func (v *V2) VerifyData(ctx context.Context, r v2.VerifyRequest) (*v2.VerifyAnswer, error) {
	return do[v2.VerifyAnswer](ctx, v.transport, post("/api/v2/encryption/verify", r).repeatable())
}

// EncryptBatch is EncryptData for up to 100 items.
func (v *V2) EncryptBatch(ctx context.Context, r v2.EncryptBatchRequest) (*v2.EncryptBatchAnswer, error) {
	return do[v2.EncryptBatchAnswer](ctx, v.transport, post("/api/v2/encryption/encrypt/batch", r).repeatable())
}

// DecryptBatch is DecryptData for up to 100 items. An item that fails has its
// error in its own result, and the method returns nil.
func (v *V2) DecryptBatch(ctx context.Context, r v2.DecryptBatchRequest) (*v2.DecryptBatchAnswer, error) {
	return do[v2.DecryptBatchAnswer](ctx, v.transport, post("/api/v2/encryption/decrypt/batch", r).repeatable())
}

// SignBatch is SignData for up to 100 items.
func (v *V2) SignBatch(ctx context.Context, r v2.SignBatchRequest) (*v2.SignBatchAnswer, error) {
	return do[v2.SignBatchAnswer](ctx, v.transport, post("/api/v2/encryption/sign/batch", r).repeatable())
}

// VerifyBatch is VerifyData for up to 100 items.
func (v *V2) VerifyBatch(ctx context.Context, r v2.VerifyBatchRequest) (*v2.VerifyBatchAnswer, error) {
	return do[v2.VerifyBatchAnswer](ctx, v.transport, post("/api/v2/encryption/verify/batch", r).repeatable())
}

// ListPublicKeys answers the tenant's ML-DSA-65 keys, newest first, for
// verifying elsewhere.
func (v *V2) ListPublicKeys(ctx context.Context) (*v2.PublicKeyList, error) {
	return do[v2.PublicKeyList](ctx, v.transport, get("/api/v2/encryption/public-key"))
}

// ListKeys answers a page of the tenant's named keys, oldest first; nil is the
// first page.
func (v *V2) ListKeys(ctx context.Context, p *v2.ListKeysParams) (*v2.EncryptionKeyList, error) {
	return do[v2.EncryptionKeyList](ctx, v.transport, get("/api/v2/keys").with(p))
}

// CreateKey makes a named key.
func (v *V2) CreateKey(ctx context.Context, r v2.CreateKeyRequest) (*v2.EncryptionKeyAnswer, error) {
	return do[v2.EncryptionKeyAnswer](ctx, v.transport, post("/api/v2/keys", r))
}

// GetKey answers a named key and its newest versions.
func (v *V2) GetKey(ctx context.Context, keyID string) (*v2.EncryptionKeyWithVersions, error) {
	return do[v2.EncryptionKeyWithVersions](ctx, v.transport, get("/api/v2/keys/{key_id}", keyID))
}

// RotateKey gives a named key a new version. Ciphertexts of earlier versions still
// decrypt.
func (v *V2) RotateKey(ctx context.Context, keyID string, r v2.RotateKeyRequest) (*v2.RotatedEncryptionKey, error) {
	return do[v2.RotatedEncryptionKey](ctx, v.transport, post("/api/v2/keys/{key_id}/rotate", r, keyID))
}

// QueryAuditLog answers entries of the tenant's audit log, newest first.
func (v *V2) QueryAuditLog(ctx context.Context, p *v2.QueryAuditLogParams) (*v2.AuditEntryList, error) {
	return do[v2.AuditEntryList](ctx, v.transport, get("/api/v2/audit/logs").with(p))
}

// GetSealingKey answers the key that manifests are sealed to, as a signed
// document. Whoever seals with it checks the signature against a pinned
// identity, as the command latticekeep seal does; this method does not.
func (v *V2) GetSealingKey(ctx context.Context) (*v2.SealingKeyDocument, error) {
	return do[v2.SealingKeyDocument](ctx, v.transport, get("/api/v2/sealing-key").anonymous())
}

// ResealManifest answers the values of a manifest, sealed for the newest key and
// bound to what they were bound to. Whoever takes them over compares scope, data
// keys and times, as the command latticekeep reseal does.
func (v *V2) ResealManifest(ctx context.Context, r v2.ResealRequest) (*v2.ResealedValues, error) {
	return do[v2.ResealedValues](ctx, v.transport, post("/api/v2/sealing-key/reseal", r).repeatable())
}

// CheckManifest answers whether a manifest would be accepted, or the code of what
// is wrong with it. Nothing is stored.
func (v *V2) CheckManifest(ctx context.Context, r v2.CheckRequest) (*v2.CheckAnswer, error) {
	return do[v2.CheckAnswer](ctx, v.transport, post("/api/v2/sealing-key/check", r).repeatable())
}

// GetContract answers the OpenAPI document of version 2 in YAML.
func (v *V2) GetContract(ctx context.Context) (string, error) {
	return v.transport.text(ctx, get("/api/v2/openapi.yaml").anonymous())
}

// GetHealth reports whether the process answers. It is asked once.
func (v *V2) GetHealth(ctx context.Context) (*v2.Health, error) {
	return do[v2.Health](ctx, v.transport, get("/healthz").probe())
}

// GetReadiness reports whether requests can be served; ErrUnavailable: not now.
// It is asked once.
func (v *V2) GetReadiness(ctx context.Context) (*v2.Health, error) {
	return do[v2.Health](ctx, v.transport, get("/readyz").probe())
}

// GetMetrics answers the metrics in the text format of Prometheus.
func (v *V2) GetMetrics(ctx context.Context) (string, error) {
	return v.transport.text(ctx, get("/metrics").probe())
}
