package v2_test

import (
	"net/http"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// Whoever has a key with system:admin still cannot choose who reads all of it.
func TestBackupsGoToTheConfiguredRecipientsOnly(t *testing.T) {
	other, err := backup.NewIdentity()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		recipients []backup.Recipient
		status     int
		entry      string
	}{
		"nobody is configured":  {nil, http.StatusOK, "success "},
		"the recipient is":      {[]backup.Recipient{other.Recipient(), servertest.BackupIdentity(t).Recipient()}, http.StatusOK, "success "},
		"somebody else than it": {[]backup.Recipient{other.Recipient()}, http.StatusForbidden, "deniedrecipient "},
	} {
		t.Run(name, func(t *testing.T) {
			s := newService(t, func(config *server.Config) { config.Recipients = c.recipients })
			if got := s.TakeBackup(s.URL, s.SystemKey()); got.StatusCode != c.status {
				t.Errorf("%s", got.Status)
			}
			var said string
			for _, e := range s.AllEntries(1) {
				if e.EventType == audit.BackupTaken {
					said += string(e.Outcome) + e.Attributes[audit.AttributeReason] + " "
				}
			}
			if said != c.entry {
				t.Errorf("entries: %s", said)
			}
		})
	}
}
