package servertest

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
)

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

// DecryptBackup decrypts a backup as the age tool would.
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

// TakeBackup asks for a backup and returns the answer, its body still open.
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

// BackupOutcomes returns the outcomes of all entries about backups, after checking those entries.
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
