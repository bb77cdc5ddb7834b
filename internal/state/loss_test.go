package state_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
)

// shared is a store that several processes use in turn.
type shared struct {
	t      *testing.T
	raw    *bolt.Store
	hook   store.Hook // of the process whose turn it is; nil: somebody who has no key
	key    []byte
	signer *dualsig.PrivateKey
}

func newShared(t *testing.T) *shared {
	t.Helper()
	s := &shared{t: t, key: make([]byte, 64)}
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	_, _ = rand.Read(s.key)
	var err error
	s.signer, err = dualsig.NewPrivateKey(seed)
	s.must(err)
	s.raw, err = bolt.Open(filepath.Join(t.TempDir(), "s.db"), bolt.Options{Hook: func(tx store.Tx, events []any) error {
		if s.hook == nil {
			return nil
		}
		return s.hook(tx, events)
	}})
	s.must(err)
	t.Cleanup(func() { _ = s.raw.Close() })
	return s
}

func (s *shared) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// process is one of the processes.
type process struct {
	shared *shared
	log    *writer.Log
	store  *state.Store
}

// start starts a process, which is of an earlier release when it has no state.
func (s *shared) start(withState bool) *process {
	s.t.Helper()
	st := state.New(nil)
	p := &process{shared: s, log: writer.New(time.Now, nil), store: st.Guard(s.raw)}
	if withState {
		p.log = writer.New(time.Now, st)
	}
	s.must(p.log.Use(s.t.Context(), s.raw, s.signer, "chain_test"))
	s.must(p.log.BindState(s.t.Context(), s.key))
	return p
}

func (p *process) update(what audit.EventType, rows map[string][]byte) error {
	p.shared.hook = p.log.Commit
	defer func() { p.shared.hook = nil }()
	return p.store.Update(context.Background(), func(tx store.Tx) error {
		for key, value := range rows {
			if err := put(tx, key, value); err != nil {
				return err
			}
		}
		_, err := p.log.Append(tx, event(what))
		return err
	})
}

func (p *process) get(key string) (value []byte, err error) {
	err = p.store.View(context.Background(), func(r store.Reader) (err error) {
		value, err = r.Get([]byte(key))
		return err
	})
	return value, err
}

func (p *process) acceptRollback() error {
	_, err := p.log.AcceptRollback(context.Background(),
		authz.Principal{Tenant: authz.SystemTenant, ID: "api_key:admin", Scopes: []authz.Scope{authz.SystemAdmin}}, "restored")
	return err
}

// rows returns all rows of a store.
func rows(t *testing.T, s store.Store) map[string][]byte {
	t.Helper()
	found := make(map[string][]byte)
	err := s.View(t.Context(), func(r store.Reader) error {
		return r.Scan(store.Range{From: []byte{0}, To: []byte{0xff}}, func(key, value []byte) bool {
			found[string(key)] = bytes.Clone(value)
			return true
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// restore puts all rows of a store back.
func restore(t *testing.T, s store.Store, to map[string][]byte) {
	t.Helper()
	now := rows(t, s)
	err := s.Update(t.Context(), func(tx store.Tx) error {
		for key := range now {
			if _, kept := to[key]; !kept {
				if err := tx.Delete([]byte(key)); err != nil {
					return err
				}
			}
		}
		for key, value := range to {
			if err := tx.Put([]byte(key), value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

const apiKey = "apikey/hash/1/aa"

// A replica knows of a revocation from the state before its log does. It must not forget it when it
// commits to a database that was put back.
func TestACommitForgetsNothing(t *testing.T) {
	s := newShared(t)
	a := s.start(true)
	s.must(a.update(audit.ChainStarted, nil))
	s.must(a.update(audit.APIKeyCreated, map[string][]byte{apiKey: []byte("revoked")}))
	b := s.start(true)
	backup := rows(t, s.raw)
	s.must(a.update(audit.APIKeyRevoked, map[string][]byte{apiKey: nil}))
	if v, err := b.get(apiKey); v != nil || err != nil {
		t.Fatal(string(v), err)
	}
	restore(t, s.raw, backup)
	if err := b.update(audit.APIKeyCreated, map[string][]byte{"user/email/x": []byte("1")}); fault.Of(err) != fault.Unavailable {
		t.Error("a commit to a database that was put back:", err)
	}
	if v, err := b.get(apiKey); fault.Of(err) != fault.Unavailable {
		t.Errorf("the key works again: %q, %v", v, err)
	}
}

// The store of an earlier release has no state. The loss of its entries can be accepted.
func TestALossIsAcceptedWithoutAState(t *testing.T) {
	s := newShared(t)
	old := s.start(false)
	s.must(old.update(audit.ChainStarted, nil))
	s.must(old.update(audit.APIKeyCreated, nil))
	p := s.start(true)
	p.log.Halt(&audit.RollbackError{LostFrom: 3, LostTo: 20, Hash: [32]byte{0xab}, Epoch: 1, Source: "elsewhere"})
	s.hook = p.log.Commit
	s.must(p.acceptRollback())
	s.must(p.log.HaltedBy())
}

// Until a loss is accepted by a commit, the state is that of the lost entries.
func TestAnAcceptanceThatFailsChangesNothing(t *testing.T) {
	s := newShared(t)
	p := s.start(true)
	s.must(p.update(audit.ChainStarted, nil))
	s.must(p.update(audit.APIKeyCreated, map[string][]byte{apiKey: []byte("revoked")}))
	older := rows(t, s.raw)
	s.must(p.update(audit.APIKeyRevoked, map[string][]byte{apiKey: nil}))
	newer := rows(t, s.raw)
	restore(t, s.raw, older)
	failed := errors.New("the row of the head is locked")
	s.hook = func(store.Tx, []any) error { return failed }
	if err := p.acceptRollback(); !errors.Is(err, failed) {
		t.Fatal(err)
	}
	s.hook = nil
	for key, value := range newer { // somebody puts back the log alone
		if strings.HasPrefix(key, "audit/") {
			older[key] = value
		}
	}
	restore(t, s.raw, older)
	if v, err := p.get(apiKey); err == nil {
		t.Errorf("the key works again: %q", v)
	}
}
