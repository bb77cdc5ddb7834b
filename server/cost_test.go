package server_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// costs is what requests cost, whatever machine they run on: rows that are read, commits, entries of the
// log, each of which is a signature, and allocations, those of the test's own client and store among them.
type costs struct{ rows, commits, entries, allocations int64 }

// countingStore counts the rows that closures read, and the commits. What the commit hook reads is not counted.
type countingStore struct {
	store.Database
	rows, commits atomic.Int64
}

// countingReader counts rows that are read, of which a Scan reads as many as it visits.
type countingReader struct {
	store.Reader
	rows *atomic.Int64
}

func (r countingReader) Get(key []byte) ([]byte, error) { r.rows.Add(1); return r.Reader.Get(key) }

func (r countingReader) Scan(rg store.Range, visit func(key, value []byte) bool) error {
	return r.Reader.Scan(rg, func(key, value []byte) bool { r.rows.Add(1); return visit(key, value) })
}

type countingTx struct {
	store.Tx
	countingReader
}

func (t countingTx) Get(key []byte) ([]byte, error) { return t.countingReader.Get(key) }

func (t countingTx) Scan(rg store.Range, visit func(key, value []byte) bool) error {
	return t.countingReader.Scan(rg, visit)
}

func (s *countingStore) View(ctx context.Context, closure func(store.Reader) error) error {
	return s.Database.View(ctx, func(r store.Reader) error { return closure(countingReader{r, &s.rows}) })
}

// Update counts what is committed, not what a test rehearses.
func (s *countingStore) Update(ctx context.Context, closure func(store.Tx) error) error {
	var rows atomic.Int64
	before := s.Commits()
	err := s.Database.Update(ctx, func(tx store.Tx) error {
		rows.Store(0)
		return closure(countingTx{tx, countingReader{tx, &rows}})
	})
	if n := s.Commits() - before; err == nil && n > 0 {
		s.rows.Add(rows.Load())
		s.commits.Add(int64(n))
	}
	return err
}

// An operation that comes to read more rows, to commit twice or to allocate more is slower everywhere.
// Raise a number only with a reason. That of the allocations is a tenth above what was measured.
func TestARequestCostsNoMoreThanItDid(t *testing.T) {
	var db *countingStore
	s := &service{servertest.StartOn(t, func(t testing.TB, hook store.Hook) store.Database {
		db = &countingStore{Database: servertest.Bolt(t, hook)}
		return db
	})}
	ask := func(method, path, body string) map[string]any {
		t.Helper()
		r := s.Call(servertest.Request{Method: method, Path: "/api/v2" + path, Key: s.Key, Body: body})
		var answer map[string]any
		if r.Status >= http.StatusBadRequest || json.Unmarshal(r.Body, &answer) != nil {
			t.Fatalf("%s %s: %d %s", method, path, r.Status, r.Body)
		}
		return answer
	}
	const page = 20
	data := fmt.Sprintf(`{"data":%q}`, strings.Repeat("x", 1024))
	seal := `{"name":"payments-database","credential_type":"database","values":{"password":"x"}}`
	var id string
	for range page {
		id = ask("POST", "/vault/seal", seal)["credential_id"].(string)
	}
	body := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	sealed := body(ask("POST", "/encryption/encrypt", data))
	signed := ask("POST", "/encryption/sign", data)
	signed["data"] = strings.Repeat("x", 1024)
	ask("GET", "/vault/"+id, "")
	for _, o := range []struct {
		name, method, path, body string
		most                     costs
	}{
		{"encrypt", "POST", "/encryption/encrypt", data, costs{10, 1, 1, 1000}},
		{"decrypt", "POST", "/encryption/decrypt", sealed, costs{8, 1, 1, 1000}},
		{"sign", "POST", "/encryption/sign", data, costs{6, 1, 1, 850}},
		{"verify", "POST", "/encryption/verify", body(signed), costs{6, 1, 1, 850}},
		{"seal", "POST", "/vault/seal", seal, costs{6, 1, 1, 1350}},
		{"unseal", "GET", "/vault/" + id, "", costs{11, 1, 1, 1000}},
		{"metadata", "GET", "/vault/" + id + "/metadata", "", costs{12, 1, 1, 920}},
		{"list", "GET", fmt.Sprintf("/vault/list?limit=%d", page), "", costs{8 + 3*page, 1, 1, 3150}},
	} {
		entry := s.NextSequence()
		rows, commits := db.rows.Load(), db.commits.Load()
		ask(o.method, o.path, o.body)
		got := costs{rows: db.rows.Load() - rows, commits: db.commits.Load() - commits}
		got.entries = int64(s.NextSequence() - entry)
		got.allocations = math.MaxInt64
		for range 3 { // the least counts, because others of the process allocate, too
			const requests = 10
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range requests {
				ask(o.method, o.path, o.body)
			}
			runtime.ReadMemStats(&after)
			got.allocations = min(got.allocations, int64(after.Mallocs-before.Mallocs)/requests)
		}
		if got.rows > o.most.rows || got.commits > o.most.commits || got.entries > o.most.entries || got.allocations > o.most.allocations {
			t.Errorf("%s: %+v, at most %+v", o.name, got, o.most)
		}
	}
}
