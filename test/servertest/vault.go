package servertest

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"filippo.io/age"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// Manifest returns a request to reseal a manifest with two values that are sealed for the current
// key.
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

// SealOwnedVersions generates a credential that belongs to an object, and rotates it. The first
// version stays readable for an hour.
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

var kept = sync.OnceValues(backup.NewIdentity)

// BackupIdentity returns the identity that opens the tests' backups.
func BackupIdentity(t testing.TB) backup.Identity {
	t.Helper()
	i, err := kept()
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// BackupBody returns the body of a request for a backup to BackupIdentity.
func BackupBody(t testing.TB) string {
	t.Helper()
	return Marshal(t, map[string]string{"recipient": BackupIdentity(t).Recipient().String()})
}

// DecryptBackup decrypts a backup as the age tool does.
func DecryptBackup(t testing.TB, answer []byte) []byte {
	t.Helper()
	all, err := age.ParseIdentities(bytes.NewReader(BackupIdentity(t).File(time.Now())))
	if err != nil {
		t.Fatal(err)
	}
	plain, err := age.Decrypt(backup.Split(bytes.NewReader(answer)), all...)
	if err != nil {
		t.Fatal(err)
	}
	inside, err := io.ReadAll(plain)
	if err != nil {
		t.Fatal(err)
	}
	return inside
}

// TakeBackup requests a backup and returns the response with an open body.
func (s *Service) TakeBackup(url, key string) *http.Response {
	s.T.Helper()
	r, err := http.NewRequestWithContext(s.T.Context(), http.MethodPost, url+"/api/v2/system/backup", strings.NewReader(BackupBody(s.T)))
	if err != nil {
		s.T.Fatal(err)
	}
	r.Header.Set("X-API-Key", key)
	r.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(func() { _ = answer.Body.Close() })
	return answer
}

// BackupOutcomes checks all entries about backups and returns their outcomes.
func (s *Service) BackupOutcomes() (outcomes string) {
	s.T.Helper()
	for _, e := range s.AllEntries(1) {
		if e.EventType == audit.BackupTaken {
			if e.Outcome == audit.Success && (e.Attributes["recipient"] != BackupIdentity(s.T).Recipient().ID() || e.Attributes["kms_key"] != "false") {
				s.T.Errorf("the entry says %v", e.Attributes)
			}
			if e.Resource.Type != audit.BackupResource || e.Resource.ID != "" || (e.Outcome == audit.Denied) == (e.TenantID == string(authz.SystemTenant)) {
				s.T.Errorf("%+v", e)
			}
			outcomes += string(e.Outcome) + e.Attributes[audit.AttributeReason] + " "
		}
	}
	return outcomes
}
