package app

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
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// builtLog is a log of its own on a real store, without a server.
type builtLog struct {
	t     *testing.T
	log   *audit.Log
	store *bolt.Store
	key   *dualsig.PrivateKey
	dir   string
	now   time.Time
}

const builtChain = "chain_built"

// buildLog makes a log in a data directory that begins as a deployment's does.
func buildLog(t *testing.T, signing audit.Signing) *builtLog {
	t.Helper()
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	key, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	return buildLogWith(t, signing, key)
}

// buildLogWith is buildLog with a key that another log may have.
func buildLogWith(t *testing.T, signing audit.Signing, key *dualsig.PrivateKey) *builtLog {
	t.Helper()
	b := &builtLog{t: t, key: key, dir: t.TempDir(), now: time.Date(2026, 11, 21, 12, 0, 0, 123456000, time.UTC)}
	b.log = audit.New(func() time.Time { return b.now })
	var err error
	if b.store, err = bolt.Open(filepath.Join(b.dir, databaseFile), bolt.Options{Hook: b.log.Commit}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.store.Close() })
	if err := b.log.Use(t.Context(), b.store, b.key, builtChain); err != nil {
		t.Fatal(err)
	}
	b.log.SetSigning(signing)
	b.record(authz.SystemTenant, audit.ChainStarted, nil)
	return b
}

func (b *builtLog) event(tenant authz.TenantID, e audit.EventType, attributes map[string]string) audit.Event {
	b.now = b.now.Add(time.Millisecond)
	return audit.Event{
		Type: e, Outcome: audit.Success, Attributes: attributes, Resource: audit.Resource{Type: audit.LogResource},
		Principal: authz.Principal{
			Tenant: tenant, Kind: authz.APIKey, ID: "key_of_" + string(tenant), Scopes: append(authz.TenantScopes(), authz.SystemAdmin), RequestID: "req", SourceIP: "127.0.0.1",
		},
	}
}

func (b *builtLog) record(tenant authz.TenantID, e audit.EventType, attributes map[string]string) {
	b.t.Helper()
	if err := b.log.Record(b.t.Context(), b.event(tenant, e, attributes)); err != nil {
		b.t.Fatal(err)
	}
}

// group writes entries of two tenants in one commit.
func (b *builtLog) group(n int) {
	b.t.Helper()
	var events []audit.Event
	for i := range n {
		events = append(events, b.event([]authz.TenantID{"ten_a", "ten_b"}[i%2], audit.DataEncrypted, nil))
	}
	err := b.store.Update(b.t.Context(), func(tx store.Tx) error {
		for _, e := range events {
			if _, err := b.log.Append(tx, e); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

// fill writes what has a strange spelling, and several tenants and groups.
func (b *builtLog) fill() {
	b.t.Helper()
	b.record("ten_a", audit.CredentialUnsealed, map[string]string{"note": "<&>\"\\\u2028é\U0001F600\x7f\b\f\n\r\t\x01/", "other": "", "ä": "non-ASCII names, too"})
	for i := range 4 {
		b.record([]authz.TenantID{"ten_b", "ten_a", authz.SystemTenant}[i%3], audit.AuditRead, map[string]string{"i": strings.Repeat("x", i)})
	}
	b.group(2)
	b.group(7)
	b.record("ten_b", audit.CredentialUnsealed, nil)
	b.group(1)
	b.group(5)
}

// loseTo lets the log go on behind a rollback.
func (b *builtLog) loseTo(sequence uint64) {
	b.t.Helper()
	b.log.Halt(&audit.RollbackError{LostFrom: 1, LostTo: sequence, Epoch: 1, Place: "test"})
	if _, err := audit.NewGuard(b.log).AcceptRollback(b.t.Context(), b.event(authz.SystemTenant, "", nil).Principal, "the disk failed"); err != nil {
		b.t.Fatal(err)
	}
}

// export returns the lines, each with its newline.
func (b *builtLog) export(from uint64) []string {
	b.t.Helper()
	var out bytes.Buffer
	if err := audit.NewReader(b.log, audit.NewGuard(b.log)).Export(b.t.Context(), &out, from); err != nil {
		b.t.Fatal(err)
	}
	return strings.SplitAfter(strings.TrimSuffix(out.String(), "\n"), "\n")
}

func (b *builtLog) fingerprint() string {
	return audit.Fingerprint(builtChain, b.key.Public().Bytes())
}

// noteOf returns the checkpoint that closes an export.
func noteOf(t *testing.T, lines []string) string {
	t.Helper()
	var end struct{ Checkpoint string }
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &end); err != nil || end.Checkpoint == "" {
		t.Fatal("no closing line:", err)
	}
	return end.Checkpoint
}

// ofTenant returns the lines of a tenant's entries and the closing line.
func ofTenant(lines []string, tenant string) (own []string) {
	for i, line := range lines {
		if strings.Contains(line, `"tenant_id":"`+tenant+`"`) || i == len(lines)-1 {
			own = append(own, line)
		}
	}
	return own
}

func writeText(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
