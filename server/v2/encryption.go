package v2

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/server/gate"
)

// cryptoAPI implements the endpoints of encryption and signatures, and of the keys for them.
type cryptoAPI struct{ transit *transit.Transit }

// algorithm is the only supported algorithm.
const algorithm = "ML-KEM-768"

// undecryptable is the answer to every ciphertext that does not decrypt, whatever the cause.
const undecryptable = "the ciphertext cannot be decrypted: send the envelope as encrypt answered it"

var errUndecryptable = gate.Refusal(http.StatusBadRequest, undecryptable)

// data copies the items of a request into bytes that can be overwritten.
func data[T any](items []T, text func(T) string) []secret.Bytes {
	copied := make([]secret.Bytes, len(items))
	for i, item := range items {
		copied[i] = secret.Bytes(text(item))
	}
	return copied
}

func zeroAll(data []secret.Bytes) {
	for _, d := range data {
		d.Zero()
	}
}

// encrypt encrypts items with a named key, or with the tenant's default key if keyID is nil.
func (a *cryptoAPI) encrypt(ctx context.Context, p authz.Principal, keyID *string, items []api.EncryptItem) ([]api.EncryptedData, error) {
	plain := data(items, func(r api.EncryptItem) string { return r.Data })
	defer zeroAll(plain)
	sealed, err := a.transit.Encrypt(ctx, p, gate.Value(keyID), plain)
	if err != nil {
		return nil, err
	}
	answers := make([]api.EncryptedData, len(sealed))
	for i, c := range sealed {
		answers[i] = api.EncryptedData{
			CiphertextKem:  base64.StdEncoding.EncodeToString(c.KEM),
			CiphertextData: base64.StdEncoding.EncodeToString(c.Data),
			Nonce:          base64.StdEncoding.EncodeToString(c.Nonce),
			Algorithm:      algorithm, KeyId: c.KeyID, KeyVersion: int64(c.KeyVersion),
		}
	}
	return answers, nil
}

// EncryptData encrypts with a named key, or with the tenant's default key.
func (a *cryptoAPI) EncryptData(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.EncryptRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		done, err := a.encrypt(ctx, call.Principal(), body.KeyId, []api.EncryptItem{{Data: body.Data}})
		if err != nil {
			return nil, err
		}
		e := done[0]
		return api.EncryptAnswer{
			Success: true, CiphertextKem: e.CiphertextKem, CiphertextData: e.CiphertextData, Nonce: e.Nonce,
			Algorithm: e.Algorithm, KeyId: e.KeyId, KeyVersion: e.KeyVersion,
		}, nil
	})
}

// EncryptBatch is EncryptData for many items under one key.
func (a *cryptoAPI) EncryptBatch(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.EncryptBatchRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		done, err := a.encrypt(ctx, call.Principal(), body.KeyId, body.Items)
		if err != nil {
			return nil, err
		}
		return api.EncryptBatchAnswer{Success: true, Results: done}, nil
	})
}

// decrypt opens envelopes. It passes even invalid base64 to the service, which refuses it like any
// other envelope and records it.
func (a *cryptoAPI) decrypt(ctx context.Context, p authz.Principal, items []api.DecryptRequest) ([]transit.Opened, error) {
	sealed := make([]transit.Ciphertext, len(items))
	for i, item := range items {
		kem, err1 := gate.DecodeBase64(item.CiphertextKem)
		nonce, err2 := gate.DecodeBase64(item.Nonce)
		body, err3 := gate.DecodeBase64(item.CiphertextData)
		if errors.Join(err1, err2, err3) == nil {
			sealed[i] = transit.Ciphertext{KEM: kem, Nonce: nonce, Data: body}
		}
	}
	return a.transit.Decrypt(ctx, p, "", sealed)
}

// DecryptData verifies the signatures of an envelope and decrypts it.
func (a *cryptoAPI) DecryptData(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.DecryptRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		opened, err := a.decrypt(ctx, call.Principal(), []api.DecryptRequest{body})
		if err != nil {
			return nil, err
		}
		if opened[0].Err != nil {
			return nil, errUndecryptable
		}
		defer opened[0].Data.Zero()
		return api.DecryptAnswer{Success: true, Data: string(opened[0].Data)}, nil
	})
}

// DecryptBatch is DecryptData for many items, each with a result of its own.
func (a *cryptoAPI) DecryptBatch(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.DecryptBatchRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		opened, err := a.decrypt(ctx, call.Principal(), body.Items)
		if err != nil {
			return nil, err
		}
		answer := api.DecryptBatchAnswer{Success: true, Results: make([]api.DecryptResult, len(opened))}
		for i, o := range opened {
			if o.Err != nil {
				answer.Results[i].Error = &api.ItemError{Code: http.StatusBadRequest, Message: undecryptable}
				continue
			}
			text := string(o.Data)
			answer.Results[i].Data = &text
			o.Data.Zero()
		}
		return answer, nil
	})
}

func (a *cryptoAPI) sign(ctx context.Context, p authz.Principal, items []api.SignRequest) ([]api.Signatures, error) {
	plain := data(items, func(r api.SignRequest) string { return r.Data })
	defer zeroAll(plain)
	signed, err := a.transit.Sign(ctx, p, plain)
	if err != nil {
		return nil, err
	}
	answers := make([]api.Signatures, len(signed))
	for i, s := range signed {
		answers[i] = api.Signatures{
			PqcSignature:  base64.StdEncoding.EncodeToString(s.PQC),
			HmacSignature: base64.StdEncoding.EncodeToString(s.HMAC),
			KeyId:         s.KeyID,
		}
	}
	return answers, nil
}

// SignData returns both signatures.
func (a *cryptoAPI) SignData(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.SignRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		signed, err := a.sign(ctx, call.Principal(), []api.SignRequest{body})
		if err != nil {
			return nil, err
		}
		s := signed[0]
		return api.SignAnswer{Success: true, PqcSignature: s.PqcSignature, HmacSignature: s.HmacSignature, KeyId: s.KeyId}, nil
	})
}

// SignBatch is SignData for many items.
func (a *cryptoAPI) SignBatch(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.SignBatchRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		signed, err := a.sign(ctx, call.Principal(), body.Items)
		if err != nil {
			return nil, err
		}
		return api.SignBatchAnswer{Success: true, Results: signed}, nil
	})
}

// verify checks signatures. A signature that is not base64 counts as wrong, like any other.
func (a *cryptoAPI) verify(ctx context.Context, p authz.Principal, items []api.VerifyRequest) ([]bool, error) {
	plain := data(items, func(r api.VerifyRequest) string { return r.Data })
	defer zeroAll(plain)
	signed := make([]transit.Signed, len(items))
	for i, item := range items {
		signed[i].Data = plain[i]
		signed[i].PQC, _ = gate.DecodeBase64(item.PqcSignature)
		signed[i].HMAC, _ = gate.DecodeBase64(item.HmacSignature)
	}
	return a.transit.Verify(ctx, p, signed)
}

// VerifyData reports whether both signatures are valid.
func (a *cryptoAPI) VerifyData(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.VerifyRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		valid, err := a.verify(ctx, call.Principal(), []api.VerifyRequest{body})
		if err != nil {
			return nil, err
		}
		return api.VerifyAnswer{Success: true, Valid: valid[0]}, nil
	})
}

// VerifyBatch is VerifyData for many items.
func (a *cryptoAPI) VerifyBatch(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.VerifyBatchRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		valid, err := a.verify(ctx, call.Principal(), body.Items)
		if err != nil {
			return nil, err
		}
		answer := api.VerifyBatchAnswer{Success: true, Results: make([]api.VerifyResult, len(valid))}
		for i, v := range valid {
			answer.Results[i].Valid = v
		}
		return answer, nil
	})
}

// ListPublicKeys returns the tenant's ML-DSA-65 keys as JWKs (RFC 9964).
func (a *cryptoAPI) ListPublicKeys(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		keys, err := a.transit.PublicKeys(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		answer := api.PublicKeyList{Success: true, Keys: make([]api.JWK, len(keys))}
		for i, k := range keys {
			answer.Keys[i] = api.JWK{
				Kty: "AKP", Alg: "ML-DSA-65", Use: "sig", Kid: k.ID, Pub: base64.RawURLEncoding.EncodeToString(k.Bytes),
			}
		}
		return answer, nil
	})
}
