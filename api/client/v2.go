package client

import (
	"context"
	"crypto/rand"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// V2 has a method for every operation of version 2. A method without an answer besides success
// returns only an error. The package documentation describes the errors.
type V2 struct {
	transport *transport
	session   session
	plain     bool // plain HTTP to other machines is allowed
}

// SealCredential stores a new credential. When p has no idempotency key, the method generates one,
// so that the client may repeat the call. A caller that wants to repeat the call itself, for
// example after a crash, must set its own key.
func (v *V2) SealCredential(ctx context.Context, r v2.SealRequest, p *v2.SealCredentialParams) (*v2.CredentialAnswer, error) {
	if p == nil || p.IdempotencyKey == nil {
		key := rand.Text()
		p = &v2.SealCredentialParams{IdempotencyKey: &key}
	}
	return do[v2.CredentialAnswer](ctx, v.transport, post("/api/v2/vault/seal", r).withHeader(idempotencyKey, *p.IdempotencyKey))
}

// ListCredentials returns the metadata of the tenant's credentials. A nil p lists all of them. A
// page may be short or even empty and still have a next page: only a page without NextCursor is the
// last.
func (v *V2) ListCredentials(ctx context.Context, p *v2.ListCredentialsParams) (*v2.CredentialList, error) {
	return do[v2.CredentialList](ctx, v.transport, get("/api/v2/vault/list").with(p))
}

// GetVaultSummary returns the number of credentials, and those that expire next.
func (v *V2) GetVaultSummary(ctx context.Context, p *v2.GetVaultSummaryParams) (*v2.VaultSummary, error) {
	return do[v2.VaultSummary](ctx, v.transport, get("/api/v2/vault/summary").with(p))
}

// GetCredentialMetadata returns the metadata of one credential, as ListCredentials does. The
// credential may have expired.
func (v *V2) GetCredentialMetadata(ctx context.Context, credentialID string, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, get("/api/v2/vault/{credential_id}/metadata", credentialID).changed(options))
}

// UnsealCredential returns a credential with its values. Every failure is ErrForbidden, also for an
// id that does not exist. The same holds for all methods that take a credential's id or name.
func (v *V2) UnsealCredential(ctx context.Context, credentialID string, options ...CallOption) (*v2.UnsealedCredential, error) {
	return do[v2.UnsealedCredential](ctx, v.transport, get("/api/v2/vault/{credential_id}", credentialID).changed(options))
}

// UnsealCredentialVersion returns a version of a credential: the current one, or the previous
// version while it is readable.
func (v *V2) UnsealCredentialVersion(ctx context.Context, credentialID string, version int64, options ...CallOption) (*v2.UnsealedCredential, error) {
	return do[v2.UnsealedCredential](ctx, v.transport, get("/api/v2/vault/{credential_id}", credentialID).with(&v2.UnsealCredentialParams{Version: &version}).changed(options))
}

// UnsealCredentialByName returns the newest active credential with this name.
func (v *V2) UnsealCredentialByName(ctx context.Context, name string, options ...CallOption) (*v2.UnsealedCredential, error) {
	return do[v2.UnsealedCredential](ctx, v.transport, get("/api/v2/vault/by-name/{name}", name).changed(options))
}

// ReplaceCredential stores new values as the next version.
func (v *V2) ReplaceCredential(ctx context.Context, credentialID string, r v2.ReplaceRequest, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, put("/api/v2/vault/{credential_id}", r, credentialID).changed(options))
}

// PatchCredential changes some values of a credential: nil removes a key, and what is not named stays.
// The caller must also be allowed to unseal the credential.
func (v *V2) PatchCredential(ctx context.Context, credentialID string, r v2.PatchRequest, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, patch("/api/v2/vault/{credential_id}", r, credentialID).changed(options))
}

// PutCredentialByName stores the values as the next version of the credential with this name, or as a
// new credential, whose version is 1.
func (v *V2) PutCredentialByName(ctx context.Context, name string, r v2.PutRequest, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, put("/api/v2/vault/by-name/{name}", r, name).changed(options))
}

// DescribeCredential changes those of a credential's description, contact and tags that r has. Its version
// stays.
func (v *V2) DescribeCredential(ctx context.Context, credentialID string, r v2.DetailsRequest) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, patch("/api/v2/vault/{credential_id}/details", r, credentialID))
}

// RenameCredential gives a credential another name. It keeps its id, its values and its time.
func (v *V2) RenameCredential(ctx context.Context, credentialID string, r v2.RenameRequest, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, post("/api/v2/vault/{credential_id}/rename", r, credentialID).changed(options))
}

// UndoCredential stores the values of a kept version as the next version. The caller must also be allowed
// to unseal the credential. ErrInvalid: the version is not kept.
func (v *V2) UndoCredential(ctx context.Context, credentialID string, r v2.UndoRequest, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, post("/api/v2/vault/{credential_id}/undo", r, credentialID).changed(options))
}

// TrashCredential lets a credential expire now. For 28 days RenewCredential brings it back.
func (v *V2) TrashCredential(ctx context.Context, credentialID string, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, post("/api/v2/vault/{credential_id}/trash", nil, credentialID).changed(options))
}

// RenewCredential starts the lifetime of a credential again, also of one that is in the trash or expired in
// the last 28 days. The caller must also be allowed to unseal the credential.
func (v *V2) RenewCredential(ctx context.Context, credentialID string, r v2.RenewRequest, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, post("/api/v2/vault/{credential_id}/renew", r, credentialID).changed(options))
}

// ListHistoryRules returns how many earlier versions are kept on which paths.
func (v *V2) ListHistoryRules(ctx context.Context) (*v2.HistoryRules, error) {
	return do[v2.HistoryRules](ctx, v.transport, get("/api/v2/vault/history-rules"))
}

// PutHistoryRule puts a rule in place of the one with its path. It returns the rules after that.
func (v *V2) PutHistoryRule(ctx context.Context, r v2.HistoryRuleRequest) (*v2.HistoryRules, error) {
	return do[v2.HistoryRules](ctx, v.transport, put("/api/v2/vault/history-rules", r).repeatable())
}

// DeleteHistoryRule removes the rule that p names. It returns the rules after that.
func (v *V2) DeleteHistoryRule(ctx context.Context, p *v2.DeleteHistoryRuleParams) (*v2.HistoryRules, error) {
	return do[v2.HistoryRules](ctx, v.transport, remove("/api/v2/vault/history-rules").with(p).repeatable())
}

// GetSettings returns the settings of the tenant.
func (v *V2) GetSettings(ctx context.Context) (*v2.Settings, error) {
	return do[v2.Settings](ctx, v.transport, get("/api/v2/settings"))
}

// ChangeSettings changes the settings that r has. It returns all of them after that.
func (v *V2) ChangeSettings(ctx context.Context, r v2.SettingsRequest) (*v2.Settings, error) {
	return do[v2.Settings](ctx, v.transport, patch("/api/v2/settings", r).repeatable())
}

// RotateCredential encrypts a credential again with fresh keys. Its values stay the same.
func (v *V2) RotateCredential(ctx context.Context, credentialID string, options ...CallOption) (*v2.CredentialAnswer, error) {
	return do[v2.CredentialAnswer](ctx, v.transport, post("/api/v2/vault/rotate/{credential_id}", nil, credentialID).changed(options))
}

// DeleteCredential deletes a credential for good.
func (v *V2) DeleteCredential(ctx context.Context, credentialID string, options ...CallOption) error {
	return v.transport.run(ctx, remove("/api/v2/vault/{credential_id}", credentialID).changed(options))
}

// ListCredentialVersions returns the metadata of a credential's versions, newest first.
func (v *V2) ListCredentialVersions(ctx context.Context, credentialID string) (*v2.CredentialVersionList, error) {
	return do[v2.CredentialVersionList](ctx, v.transport, get("/api/v2/vault/{credential_id}/versions", credentialID))
}

// EncryptData encrypts with a named key, or with the tenant's default key. DecryptData accepts the
// answer. ErrNotFound: the tenant has no such key.
func (v *V2) EncryptData(ctx context.Context, r v2.EncryptRequest) (*v2.EncryptAnswer, error) {
	return do[v2.EncryptAnswer](ctx, v.transport, post("/api/v2/encryption/encrypt", r).repeatable())
}

// DecryptData verifies both signatures and then decrypts. ErrInvalid: decryption failed, whatever
// the cause.
func (v *V2) DecryptData(ctx context.Context, r v2.DecryptRequest) (*v2.DecryptAnswer, error) {
	return do[v2.DecryptAnswer](ctx, v.transport, post("/api/v2/encryption/decrypt", r).repeatable())
}

// SignData returns an ML-DSA-65 and an HMAC-SHA-512 signature. Verification needs both.
func (v *V2) SignData(ctx context.Context, r v2.SignRequest) (*v2.SignAnswer, error) {
	return do[v2.SignAnswer](ctx, v.transport, post("/api/v2/encryption/sign", r).repeatable())
}

// VerifyData reports whether both signatures are valid.
func (v *V2) VerifyData(ctx context.Context, r v2.VerifyRequest) (*v2.VerifyAnswer, error) {
	return do[v2.VerifyAnswer](ctx, v.transport, post("/api/v2/encryption/verify", r).repeatable())
}

// EncryptBatch is EncryptData for up to 100 items under one key.
func (v *V2) EncryptBatch(ctx context.Context, r v2.EncryptBatchRequest) (*v2.EncryptBatchAnswer, error) {
	return do[v2.EncryptBatchAnswer](ctx, v.transport, post("/api/v2/encryption/encrypt/batch", r).repeatable())
}

// DecryptBatch is DecryptData for up to 100 items. The result of a failed item holds its error, and
// the method's error is nil.
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

// ListPublicKeys returns the tenant's ML-DSA-65 public keys, newest first, for verification
// elsewhere.
func (v *V2) ListPublicKeys(ctx context.Context) (*v2.PublicKeyList, error) {
	return do[v2.PublicKeyList](ctx, v.transport, get("/api/v2/encryption/public-key"))
}

// ListKeys returns a page of the tenant's named keys, oldest first. A nil p means the first page.
func (v *V2) ListKeys(ctx context.Context, p *v2.ListKeysParams) (*v2.EncryptionKeyList, error) {
	return do[v2.EncryptionKeyList](ctx, v.transport, get("/api/v2/keys").with(p))
}

// CreateKey creates a named key.
func (v *V2) CreateKey(ctx context.Context, r v2.CreateKeyRequest) (*v2.EncryptionKeyAnswer, error) {
	return do[v2.EncryptionKeyAnswer](ctx, v.transport, post("/api/v2/keys", r))
}

// GetKey returns a named key and its newest versions.
func (v *V2) GetKey(ctx context.Context, keyID string) (*v2.EncryptionKeyWithVersions, error) {
	return do[v2.EncryptionKeyWithVersions](ctx, v.transport, get("/api/v2/keys/{key_id}", keyID))
}

// RotateKey adds a version to a named key. Ciphertexts of earlier versions can still be decrypted.
func (v *V2) RotateKey(ctx context.Context, keyID string, r v2.RotateKeyRequest) (*v2.RotatedEncryptionKey, error) {
	return do[v2.RotatedEncryptionKey](ctx, v.transport, post("/api/v2/keys/{key_id}/rotate", r, keyID))
}

// QueryAuditLog returns entries of the tenant's audit log, newest first.
func (v *V2) QueryAuditLog(ctx context.Context, p *v2.QueryAuditLogParams) (*v2.AuditEntryList, error) {
	return do[v2.AuditEntryList](ctx, v.transport, get("/api/v2/audit/logs").with(p))
}

// GetSealingKey returns the public key for sealing manifests, as a signed document. This method
// does not verify the signature. Before you seal with the key, verify it against a pinned identity,
// as the command latticekeep seal does.
func (v *V2) GetSealingKey(ctx context.Context) (*v2.SealingKeyDocument, error) {
	return do[v2.SealingKeyDocument](ctx, v.transport, get("/api/v2/sealing-key").anonymous())
}

// ResealManifest returns the values of a manifest, sealed for the newest key with the same binding.
// Before you use them, compare scope, data keys and times, as the command latticekeep reseal does.
func (v *V2) ResealManifest(ctx context.Context, r v2.ResealRequest) (*v2.ResealedValues, error) {
	return do[v2.ResealedValues](ctx, v.transport, post("/api/v2/sealing-key/reseal", r).repeatable())
}

// CheckManifest reports whether a manifest would be accepted, or returns the code of its error. It
// stores nothing.
func (v *V2) CheckManifest(ctx context.Context, r v2.CheckRequest) (*v2.CheckAnswer, error) {
	return do[v2.CheckAnswer](ctx, v.transport, post("/api/v2/sealing-key/check", r).repeatable())
}

// GetContract returns the OpenAPI document of version 2 in YAML.
func (v *V2) GetContract(ctx context.Context) (string, error) {
	return v.transport.text(ctx, get("/api/v2/openapi.yaml").anonymous())
}

// GetHealth reports whether the process answers. The client never repeats this call.
func (v *V2) GetHealth(ctx context.Context) (*v2.Health, error) {
	return do[v2.Health](ctx, v.transport, get("/healthz").anonymous().probe())
}

// GetReadiness reports whether requests can be served. ErrUnavailable: not now. The client never
// repeats this call.
func (v *V2) GetReadiness(ctx context.Context) (*v2.Health, error) {
	return do[v2.Health](ctx, v.transport, get("/readyz").anonymous().probe())
}

// GetDiagnosis returns how every part of the deployment is. It takes an API key of the deployment with
// metrics:read, or the address of operations.listen. The client never repeats this call.
func (v *V2) GetDiagnosis(ctx context.Context) (*v2.Diagnosis, error) {
	return do[v2.Diagnosis](ctx, v.transport, get("/diagnosis").probe())
}

// GetMetrics returns the metrics in the text format of Prometheus. It takes an API key of the deployment
// with metrics:read, or the address of operations.listen. The client never repeats this call.
func (v *V2) GetMetrics(ctx context.Context) (string, error) {
	return v.transport.text(ctx, get("/metrics").probe())
}
