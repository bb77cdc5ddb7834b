package servertest

import (
	"context"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// Manifest returns a request about a manifest with two values, sealed for the current key.
func (s *Service) Manifest(t testing.TB, namespace, name, value string) v2.ResealRequest {
	t.Helper()
	document, err := s.Keys.SealingDocument(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	obj, err := sealing.Seal(document.Key(), sealing.Request{
		Namespace: namespace, Name: name, CredentialType: "database",
		Values: map[string]secret.Bytes{"password": secret.Bytes(value), "username": secret.Bytes("app")},
	}, s.Clock.Now())
	if err != nil {
		t.Fatal(err)
	}
	from := obj.Spec.Sealed
	scope := v2.SealedValuesScope(from.Scope)
	r := v2.ResealRequest{Namespace: &namespace, Name: name, CredentialType: "database", Sealed: v2.SealedValues{
		Version: 1, Suite: string(from.Suite), KeyId: from.KeyID, Scope: &scope, Values: make(map[string]v2.SealedValue),
	}}
	for k, v := range from.Values {
		r.Sealed.Values[k] = v2.SealedValue{SealedAt: v.SealedAt.UTC(), Data: v.Data}
	}
	return r
}

// SealOwnedVersions generates a credential of an object and rotates it. The first version stays
// readable for an hour.
func (s *Service) SealOwnedVersions(p authz.Principal, previous, value string) *vault.Owned {
	s.T.Helper()
	var owned *vault.Owned
	for i, value := range []string{previous, value} {
		var err error
		owned, err = s.Vault.Generate(context.Background(), p, "uid", uint64(i), vault.Desired{Name: "n", Type: "t", Overlap: time.Hour},
			func(map[string]secret.Bytes) (map[string]secret.Bytes, error) {
				return map[string]secret.Bytes{"k": secret.Bytes(value)}, nil
			})
		if err != nil {
			s.T.Fatal(err)
		}
	}
	return owned
}
