// Package logtest builds audit logs on a real store, without a server.
package logtest

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// Log is an audit log on a real store, without a server.
type Log struct {
	T     *testing.T
	Audit *writer.Log
	Store *bolt.Store
	Key   *dualsig.PrivateKey
	Dir   string
	Now   time.Time
}

const ChainID = "chain_built"

// New creates a log in a data directory. It begins like the log of a deployment.
func New(t *testing.T, signing writer.Signing) *Log {
	t.Helper()
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	key, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	return NewWithKey(t, signing, key)
}

// NewWithKey is New with a signing key that another log may share.
func NewWithKey(t *testing.T, signing writer.Signing, key *dualsig.PrivateKey) *Log {
	t.Helper()
	b := &Log{T: t, Key: key, Dir: t.TempDir(), Now: time.Date(2026, 11, 21, 12, 0, 0, 123456000, time.UTC)}
	b.Audit = writer.New(func() time.Time { return b.Now }, nil)
	var err error
	if b.Store, err = bolt.Open(filepath.Join(b.Dir, offline.DatabaseFile), bolt.Options{Hook: b.Audit.Commit}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Store.Close() })
	if err := b.Audit.Use(t.Context(), b.Store, b.Key, ChainID); err != nil {
		t.Fatal(err)
	}
	b.Audit.SetSigning(signing)
	b.record(authz.SystemTenant, audit.ChainStarted, nil)
	return b
}

func (b *Log) event(tenant authz.TenantID, e audit.EventType, attributes map[string]string) audit.Event {
	b.Now = b.Now.Add(time.Millisecond)
	return audit.Event{
		Type: e, Outcome: audit.Success, Attributes: attributes, Resource: audit.Resource{Type: audit.LogResource},
		Principal: authz.Principal{
			Tenant: tenant, Kind: authz.APIKey, ID: "key_of_" + string(tenant), Scopes: append(authz.TenantScopes(), authz.SystemAdmin), RequestID: "req", SourceIP: "127.0.0.1",
		},
	}
}

func (b *Log) record(tenant authz.TenantID, e audit.EventType, attributes map[string]string) {
	b.T.Helper()
	if err := b.Audit.Record(b.T.Context(), b.event(tenant, e, attributes)); err != nil {
		b.T.Fatal(err)
	}
}

// Group writes entries of two tenants in one commit.
func (b *Log) Group(n int) {
	b.T.Helper()
	var events []audit.Event
	for i := range n {
		events = append(events, b.event([]authz.TenantID{"ten_a", "ten_b"}[i%2], audit.DataEncrypted, nil))
	}
	err := b.Store.Update(b.T.Context(), func(tx store.Tx) error {
		for _, e := range events {
			if _, err := b.Audit.Append(tx, e); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.T.Fatal(err)
	}
}

// Fill writes entries of several tenants and groups, some with unusual text.
func (b *Log) Fill() {
	b.T.Helper()
	b.record("ten_a", audit.CredentialUnsealed, map[string]string{"note": "<&>\"\\\u2028é\U0001F600\x7f\b\f\n\r\t\x01/", "other": "", "ä": "non-ASCII names, too"})
	for i := range 4 {
		b.record([]authz.TenantID{"ten_b", "ten_a", authz.SystemTenant}[i%3], audit.AuditRead, map[string]string{"i": strings.Repeat("x", i)})
	}
	b.Group(2)
	b.Group(7)
	b.record("ten_b", audit.CredentialUnsealed, nil)
	b.Group(1)
	b.Group(5)
}

// LoseTo accepts the loss of the entries up to a sequence, after which the log continues in a new
// epoch.
func (b *Log) LoseTo(sequence uint64) {
	b.T.Helper()
	b.Audit.Halt(&audit.RollbackError{LostFrom: 1, LostTo: sequence, Epoch: 1, Source: "test"})
	if _, err := guard.New(b.Audit).AcceptRollback(b.T.Context(), b.event(authz.SystemTenant, "", nil).Principal, "the disk failed"); err != nil {
		b.T.Fatal(err)
	}
}

// Export returns the lines of an export, each with its newline.
func (b *Log) Export(from uint64) []string {
	b.T.Helper()
	var out bytes.Buffer
	if err := reader.New(b.Audit, guard.New(b.Audit)).Export(b.T.Context(), &out, from); err != nil {
		b.T.Fatal(err)
	}
	return strings.SplitAfter(strings.TrimSuffix(out.String(), "\n"), "\n")
}

func (b *Log) Fingerprint() string {
	return audit.Fingerprint(ChainID, b.Key.Public().Bytes())
}

// NoteOf returns the checkpoint that closes an export.
func NoteOf(t *testing.T, lines []string) string {
	t.Helper()
	var end struct{ Checkpoint string }
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &end); err != nil || end.Checkpoint == "" {
		t.Fatal("no closing line:", err)
	}
	return end.Checkpoint
}

// OfTenant returns the lines of a tenant's entries and the closing line.
func OfTenant(lines []string, tenant string) (own []string) {
	for i, line := range lines {
		if strings.Contains(line, `"tenant_id":"`+tenant+`"`) || i == len(lines)-1 {
			own = append(own, line)
		}
	}
	return own
}

func WriteText(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
