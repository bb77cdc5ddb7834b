package state_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
)

// cannotStart reports a process that starts on the store.
func (s *shared) cannotStart(what string) {
	s.t.Helper()
	log := writer.New(time.Now, state.New(nil))
	s.must(log.Use(s.t.Context(), s.raw, s.signer, "chain_test"))
	if err := log.BindState(s.t.Context(), s.key); err == nil {
		s.t.Errorf("%s: a process starts", what)
	}
}

// cannotGoOn reports a process that reads or changes rows.
func (p *process) cannotGoOn(what string) {
	p.shared.t.Helper()
	if v, err := p.get(apiKey); err == nil {
		p.shared.t.Errorf("%s: a process that runs reads %q", what, v)
	}
	before := rows(p.shared.t, p.shared.raw)
	if err := p.update(audit.APIKeyCreated, map[string][]byte{"user/email/x": []byte("1")}); err == nil {
		p.shared.t.Errorf("%s: a process that runs changes rows", what)
	}
	restore(p.shared.t, p.shared.raw, before)
}

// Somebody without the key cannot write the head of the state: not one byte of it, such as the one
// that says that the state is complete, nor the head of another time. He cannot remove it either while
// a process runs.
func TestNobodyElseWritesTheHead(t *testing.T) {
	s := newShared(t)
	p := s.start(true)
	s.must(p.update(audit.ChainStarted, nil))
	s.must(p.update(audit.APIKeyCreated, map[string][]byte{apiKey: []byte("a")}))
	older := rows(t, s.raw)[string(state.HeadKey)]
	s.must(p.update(audit.APIKeyRevoked, map[string][]byte{apiKey: nil}))
	all := rows(t, s.raw)
	head := all[string(state.HeadKey)]
	put := func(value []byte) {
		s.must(s.raw.Update(t.Context(), func(tx store.Tx) error { return tx.Put(state.HeadKey, value) }))
	}
	for i := range head {
		bad := bytes.Clone(head)
		bad[i] ^= 1
		put(bad)
		p.cannotGoOn("a changed byte")
		if s.cannotStart("a changed byte"); t.Failed() {
			t.Fatal("byte", i)
		}
	}
	for what, bad := range map[string][]byte{"the head of another time": older, "a shorter head": head[:len(head)-1]} {
		put(bad)
		p.cannotGoOn(what)
		s.cannotStart(what)
	}
	s.must(s.raw.Update(t.Context(), func(tx store.Tx) error { return tx.Delete(state.HeadKey) }))
	p.cannotGoOn("a head that was removed")
	restore(t, s.raw, all)
	s.must(p.update(audit.APIKeyCreated, nil))
}

// A program that keeps no state cannot write to a store that has one without notice.
func TestEntriesBesideTheStateAreNoticed(t *testing.T) {
	s := newShared(t)
	p := s.start(true)
	s.must(p.update(audit.ChainStarted, nil))
	s.must(p.update(audit.APIKeyCreated, map[string][]byte{apiKey: []byte("a")}))
	s.must(s.start(false).update(audit.APIKeyCreated, nil))
	if err := p.update(audit.APIKeyCreated, nil); err == nil {
		t.Error("a process goes on behind an entry that the state does not know")
	}
	s.cannotStart("an entry that the state does not know")
}
