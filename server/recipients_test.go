package server

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
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
		"the recipient is":      {[]backup.Recipient{other.Recipient(), keeper(t).Recipient()}, http.StatusOK, "success "},
		"somebody else than it": {[]backup.Recipient{other.Recipient()}, http.StatusForbidden, "deniedrecipient "},
	} {
		t.Run(name, func(t *testing.T) {
			s := assemble(t, func(config *Config) { config.Recipients = c.recipients })
			h := httptest.NewServer(s.server.engine)
			t.Cleanup(h.Close)
			if got := s.takeBackup(h.URL, s.systemKey()); got.StatusCode != c.status {
				t.Errorf("%s", got.Status)
			}
			var said string
			for _, e := range s.records(1) {
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
