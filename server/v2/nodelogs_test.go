package v2_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/nodelog"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// nodeLog is the log of a node, which is longer than what was sent of it.
type nodeLog struct {
	t       *testing.T
	key     *dualsig.PrivateKey
	entries []*nodelog.Entry
}

// newNodeLog returns a log of six entries, the last of which says which log it is.
func newNodeLog(t *testing.T, seed byte, dropped uint64) *nodeLog {
	t.Helper()
	key, err := dualsig.NewPrivateKey([]byte(strings.Repeat(string(rune(seed)), dualsig.SeedSize)))
	if err != nil {
		t.Fatal(err)
	}
	l := &nodeLog{t: t, key: key}
	for range 5 {
		l.add(nodelog.Started, 0)
	}
	l.add(nodelog.Dropped, dropped)
	return l
}

func (l *nodeLog) add(kind nodelog.Kind, count uint64) {
	l.t.Helper()
	var last *nodelog.Entry
	if n := len(l.entries); n > 0 {
		last = l.entries[n-1]
	}
	e := nodelog.Next(l.key.Public().ID(), last, time.Date(2026, 11, 29, 8, 0, 0, 125e6, time.UTC), kind)
	e.Count = count
	if err := e.Sign(l.key); err != nil {
		l.t.Fatal(err)
	}
	l.entries = append(l.entries, e)
}

// after returns the first n entries in a log that went on otherwise.
func (l *nodeLog) after(n int) *nodeLog {
	other := &nodeLog{l.t, l.key, append([]*nodelog.Entry(nil), l.entries[:n]...)}
	for len(other.entries) < len(l.entries) {
		other.add(nodelog.Dropped, 9)
	}
	return other
}

// body is a request with the entries of two sequences.
func (l *nodeLog) body(first, last int) object {
	return object{"public_key": l.key.Public().Bytes(), "first": l.entries[first-1], "last": l.entries[last-1]}
}

func (l *nodeLog) send(s *service, key string, body object) servertest.Reply {
	return s.Call(servertest.Request{Method: "POST", Path: "/api/v2/audit/node-logs", Key: key, Body: servertest.Marshal(l.t, body)})
}

// sends sends entries, and fails the test unless they are recorded now, or were before.
func (l *nodeLog) sends(s *service, key string, first, last int, position int64, recorded bool) {
	l.t.Helper()
	got := servertest.Decode[v2.NodeLogReceipt](l.t, l.send(s, key, l.body(first, last)))
	if want := l.entries[position-1]; got.Sequence != position || got.Hash != want.Hash() || got.Recorded != recorded || got.Node != want.Node || got.Chain != want.Chain {
		l.t.Errorf("%d to %d: %+v", first, last, got)
	}
}

// Promise: the entries of a node's log are recorded once, as one entry of the deployment's log, whatever is sent again.
func TestALogOfANodeIsRecordedOnce(t *testing.T) {
	s := newService(t)
	key, l := s.GrantKey(authz.AuditWrite), newNodeLog(t, 'a', 7)
	l.sends(s, key, 1, 2, 2, true)
	l.sends(s, key, 1, 2, 2, false)
	l.sends(s, key, 1, 4, 2, false)
	l.sends(s, key, 2, 4, 2, false)
	l.sends(s, key, 3, 4, 4, true)
	l.sends(s, key, 1, 2, 4, false)
	l.sends(s, key, 6, 6, 6, true)
	newer := newNodeLog(t, 'a', 7)
	newer.sends(s, key, 1, 1, 1, true)
	l.sends(s, key, 5, 6, 6, false)
	newNodeLog(t, 'b', 7).sends(s, key, 1, 1, 1, true)
	l.sends(s, s.GrantKeyIn(s.TenantOf(s.Register("other@example.org")), authz.AuditWrite), 1, 2, 2, true)

	entries := s.Entries("event_type=NODE_LOG_RECORDED")
	if len(entries) != 5 {
		t.Fatalf("%d entries", len(entries))
	}
	if a := entries[1]["attributes"].(map[string]any); a["log_id"] != newer.entries[0].Chain || a["earlier_log"] != l.entries[0].Chain || a["earlier_to"] != "6" {
		t.Errorf("the record of a log that takes the place of another: %v", a)
	}
	want := []map[string]string{
		{"from": "6", "to": "6", "entries": "1", "missing": "1"},
		{"from": "3", "to": "4", "entries": "2"},
		{"from": "1", "to": "2", "entries": "2"},
	}
	for i, e := range entries[2:] {
		var attributes map[string]string
		b, err := json.Marshal(e["attributes"])
		if err == nil {
			err = json.Unmarshal(b, &attributes)
		}
		if err != nil {
			t.Fatal(err)
		}
		first, last := l.entries[e["attributes"].(map[string]any)["from"].(string)[0]-'1'], l.entries[e["attributes"].(map[string]any)["to"].(string)[0]-'1']
		want[i]["first_hash"], want[i]["last_hash"], want[i]["log_id"] = first.Hash(), last.Hash(), first.Chain
		if got := servertest.Marshal(t, attributes); got != servertest.Marshal(t, want[i]) {
			t.Errorf("entry %d: %s", i, got)
		}
		if id := e["resource"].(map[string]any)["id"]; id != l.key.Public().ID() {
			t.Errorf("entry %d is of %v", i, id)
		}
	}
}

// Promise: what was changed in a node's log after it was recorded is refused, by whoever has the node's key.
func TestALogOfANodeThatWasChangedIsRefused(t *testing.T) {
	s := newService(t)
	key, l := s.GrantKey(authz.AuditWrite), newNodeLog(t, 'a', 7)
	l.sends(s, key, 1, 4, 4, true)
	forked := l.after(3)
	for _, body := range []object{forked.body(5, 6), forked.body(4, 4), forked.body(4, 6), forked.body(1, 4)} {
		if text := forked.send(s, key, body).Message(t, http.StatusConflict); !strings.Contains(text, "was changed after it was sent") {
			t.Error(text)
		}
	}
	denied := s.Entries("event_type=NODE_LOG_RECORDED&outcome=denied")
	if len(denied) != 4 {
		t.Fatalf("%d refusals are recorded: %v", len(denied), denied)
	}
	for i, e := range denied { // the newest first
		a := e["attributes"].(map[string]any)
		if a["reason"] != "forked" || a["log_id"] != l.entries[0].Chain || a["recorded"] != "4" || a["recorded_hash"] != l.entries[3].Hash() || i > 0 && a["last_hash"] == l.entries[3].Hash() {
			t.Errorf("refusal %d says %v", i, a)
		}
	}
	l.sends(s, key, 5, 6, 6, true)
}

// Promise: only what a node has signed is recorded.
func TestALogThatNoNodeHasSignedIsRefused(t *testing.T) {
	s := newService(t)
	key, l, other := s.GrantKey(authz.AuditWrite), newNodeLog(t, 'a', 7), newNodeLog(t, 'b', 7)
	changed := func(change func(*nodelog.Entry)) object {
		body := l.body(1, 6)
		e := *l.entries[5]
		change(&e)
		body["last"] = e
		return body
	}
	of := l.body(1, 2)
	of["public_key"] = other.key.Public().Bytes()
	logs := l.body(1, 2)
	logs["last"] = newNodeLog(t, 'a', 7).entries[1]
	for text, body := range map[string]object{
		"last: the signature of entry 6 does not hold":             changed(func(e *nodelog.Entry) { e.Count = 1 }),
		"last: the signature of entry 7 does not hold":             changed(func(e *nodelog.Entry) { e.Sequence = 7 }),
		"last: entry 6: its time is not UTC in whole milliseconds": changed(func(e *nodelog.Entry) { e.At = e.At.Add(1) }),
		"last: entry 6: entries of dropped seeds, and no others":   changed(func(e *nodelog.Entry) { e.Kind = nodelog.Started }),
		"first: entry 1 is of another node's key":                  of,
		"first and last are not of one log":                        logs,
		"last are not of one log, in this order":                   l.body(4, 2),
		"public_key is no ML-DSA-65 public key":                    {"public_key": "AAAA", "first": l.entries[0], "last": l.entries[1]},
	} {
		if got := l.send(s, key, body).Message(t, http.StatusUnprocessableEntity); !strings.Contains(got, text) {
			t.Errorf("%s: %s", text, got)
		}
	}
	l.send(s, s.GrantKey(authz.AuditRead), l.body(1, 2)).Message(t, http.StatusForbidden)
	if n := len(s.Entries("event_type=NODE_LOG_RECORDED&outcome=success")); n != 0 {
		t.Errorf("%d are recorded", n)
	}
}

// Promise: the rows of a tenant have a bound, and the nodes that it has go on.
func TestATenantHasTheLogsOfSoManyNodes(t *testing.T) {
	s := newService(t)
	key, l := s.GrantKey(authz.AuditWrite), newNodeLog(t, 'a', 7)
	l.sends(s, key, 1, 2, 2, true)
	err := s.Store.Update(t.Context(), func(tx store.Tx) error {
		for i := range 999 {
			if err := tx.Put(fmt.Appendf(nil, "node-log/%s/%064d", s.Tenant, i), []byte("x")); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	other := newNodeLog(t, 'b', 7)
	if text := other.send(s, key, other.body(1, 2)).Message(t, http.StatusConflict); !strings.Contains(text, "1000 nodes") {
		t.Error(text)
	}
	l.sends(s, key, 3, 4, 4, true)

	// Of a node that begins new logs, the newest eight are known.
	for range 7 {
		newNodeLog(t, 'a', 7).sends(s, key, 1, 1, 1, true)
	}
	l.sends(s, key, 1, 2, 4, false)
	newNodeLog(t, 'a', 7).sends(s, key, 1, 1, 1, true)
	l.sends(s, key, 1, 2, 2, true)
}
