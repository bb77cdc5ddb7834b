package v2_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// The key of a KMS that is a file leaves the server inside a backup and nowhere
// else, and one that cannot be read makes no backup without it.
func TestABackupCarriesTheKMSKey(t *testing.T) {
	const file = "latticekeep-kms-key-1:c2VjcmV0"
	gone := errors.New("the volume is gone")
	var fails error
	s := newService(t, func(c *server.Config) {
		c.KMSKeys = func(context.Context) ([][]byte, error) { return [][]byte{[]byte(file), []byte("a former one")}, fails }
	})
	answer, err := io.ReadAll(s.TakeBackup(s.URL, s.SystemKey()).Body)
	if err != nil {
		t.Fatal(err)
	}
	in, err := backup.Open(backup.Split(bytes.NewReader(answer)), []backup.Identity{servertest.BackupIdentity(t)})
	if err != nil {
		t.Fatal(err)
	}
	if len(in.KMSKeys) != 2 || string(in.KMSKeys[0]) != file || string(in.KMSKeys[1]) != "a former one" || bytes.Contains(answer, []byte("kms-key")) {
		t.Errorf("%q", in.KMSKeys)
	}
	fails = gone
	for range 2 { // it is not in the way of the next
		if failed := s.TakeBackup(s.URL, s.SystemKey()); failed.StatusCode != http.StatusServiceUnavailable {
			t.Error(failed.Status)
		}
	}
	var said string
	for _, e := range s.AllEntries(1) {
		if e.EventType == audit.BackupTaken {
			said += string(e.Outcome) + e.Attributes["kms_key"] + e.Attributes[audit.AttributeReason] + " "
		}
	}
	if said != "successtrue failureno_kms_key failureno_kms_key " {
		t.Error(said)
	}
	if strings.Contains(s.Logged.String(), "c2VjcmV0") {
		t.Error("the key is in the log")
	}
}

// A backup begins with the format of its store, once not every release may open it.
func TestABackupOfARunningServerNamesTheFormat(t *testing.T) {
	s := newService(t)
	for _, row := range []string{"", `{"reader":1,"writer":1,"written_by":"v9.8.7"}`, `{"reader":2,"writer":2,"written_by":"v9.8.7"}`} {
		err := s.Store.Update(t.Context(), func(tx store.Tx) error {
			if row == "" {
				return tx.Delete(format.Row)
			}
			return tx.Put(format.Row, []byte(row))
		})
		if err != nil {
			t.Fatal(err)
		}
		in, err := backup.Open(backup.Split(s.TakeBackup(s.URL, s.SystemKey()).Body), []backup.Identity{servertest.BackupIdentity(t)})
		if err != nil {
			t.Fatal(err)
		}
		if want := strings.Contains(row, "2"); (in.Header.Format != nil) != want || want && string(in.Header.Format) != row {
			t.Errorf("with the row %q the backup begins with %q", row, in.Header.Format)
		}
		if _, err := in.Rows(func(_, _ []byte) error { return nil }); err != nil {
			t.Error(err)
		}
	}
}

// Whoever names a recipient that a quantum computer opens gets no backup, and is
// told why.
func TestABackupIsForPostQuantumRecipientsOnly(t *testing.T) {
	s := newService(t)
	for recipient, says := range map[string]string{
		"age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p": "quantum computer",
		"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ":                         "quantum computer",
		servertest.BackupIdentity(t).Recipient().String()[:100]:          "damaged",
		"AGE-SECRET-KEY-PQ-1XYZ":                                         "keep it to yourself",
	} {
		got := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/system/backup", Key: s.SystemKey(), Body: servertest.Marshal(t, map[string]string{"recipient": recipient})})
		if message := got.Message(t, http.StatusUnprocessableEntity); !strings.Contains(message, says) || strings.Contains(message, recipient[5:]) {
			t.Errorf("%.30s: %s", recipient, message)
		}
	}
}

// Whoever takes a backup without the program can tell its two parts apart.
func TestTheContractSaysHowLongAStatementIs(t *testing.T) {
	if want := fmt.Sprintf("The last %d bytes are not of the age file", backup.StatementSize); !strings.Contains(openapi.V2(), want) {
		t.Errorf("it does not say %q", want)
	}
}
