package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// decoded returns the body of a successful reply.
func decoded[T any](t testing.TB, r reply) T {
	t.Helper()
	r.want(t, http.StatusOK)
	var v T
	if err := json.Unmarshal(r.body, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// hashes returns a proof as the library takes it.
func hashes(t testing.TB, path []string) (all []tlog.Hash) {
	t.Helper()
	for _, text := range path {
		h, err := tlog.ParseHash(text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
	}
	return all
}

// leaf is the hash of the tree's leaf for an entry.
func leaf(t testing.TB, hash string) tlog.Hash {
	t.Helper()
	b, err := hex.DecodeString(hash)
	if err != nil {
		t.Fatal(err)
	}
	return tlog.RecordHash(b)
}

// checkpoint brings the log up to date and reads its newest checkpoint, which it
// verifies with the key that the interface publishes.
func (s *service) checkpoint() (v2.CheckpointAnswer, tlog.Hash) {
	s.t.Helper()
	s.follow()
	c := decoded[v2.CheckpointAnswer](s.t, s.get("/api/v2/audit/checkpoint"))
	published := decoded[v2.AuditPublicKey](s.t, s.get("/api/v2/audit/public-key"))
	raw, err := base64.RawURLEncoding.DecodeString(published.Key.Pub)
	if err != nil {
		s.t.Fatal(err)
	}
	key, err := dualsig.ParsePublicKey(raw)
	if err != nil {
		s.t.Fatal(err)
	}
	head, err := audit.ParseCheckpoint([]byte(c.Checkpoint), key)
	if err != nil {
		s.t.Fatal(err)
	}
	if head.Size != c.TreeSize || head.Sequence != uint64(c.Sequence) || hex.EncodeToString(head.Hash[:]) != c.Hash ||
		head.Root.String() != c.RootHash || !head.Time.Equal(c.Timestamp) || head.Epoch != uint64(c.Epoch) || head.ChainID != published.ChainId {
		s.t.Errorf("the fields beside the note say something else: %+v, %+v", c, head)
	}
	if published.Fingerprint != s.chain.Fingerprint() || published.Fingerprint != audit.Fingerprint(published.ChainId, raw) ||
		published.Key.Kid != key.ID() || published.Verifier != audit.VerifierKey(published.ChainId, head.Epoch, key) {
		s.t.Errorf("the public key: %+v", published)
	}
	return c, head.Root
}

// historyOf returns the entries of a tenant.
func (s *service) historyOf(tenant authz.TenantID) (own []audit.Entry) {
	for _, e := range s.records(1) {
		if e.TenantID == string(tenant) {
			own = append(own, e)
		}
	}
	return own
}

func TestProofsHoldAgainstCheckpoints(t *testing.T) {
	s := newService(t)
	first, firstRoot := s.checkpoint()
	for range 5 {
		s.seal("v")
	}
	second, secondRoot := s.checkpoint()
	if second.TreeSize <= first.TreeSize || second.Sequence != second.TreeSize {
		t.Fatalf("sizes %d and %d", first.TreeSize, second.TreeSize)
	}
	inclusion := func(sequence int64, size string) v2.InclusionProof {
		t.Helper()
		return decoded[v2.InclusionProof](t, s.get(fmt.Sprintf("/api/v2/audit/proof/inclusion?sequence=%d%s", sequence, size)))
	}
	for _, e := range s.historyOf(s.tenant) {
		if int64(e.Sequence) > second.TreeSize {
			continue
		}
		p := inclusion(int64(e.Sequence), fmt.Sprintf("&tree_size=%d", second.TreeSize))
		if p.Hash != e.Hash || p.LeafIndex != int64(e.Sequence)-1 || p.TreeSize != second.TreeSize {
			t.Errorf("entry %d: %+v", e.Sequence, p)
		}
		proof := tlog.RecordProof(hashes(t, p.Path))
		if err := tlog.CheckRecord(proof, p.TreeSize, secondRoot, p.LeafIndex, leaf(t, e.Hash)); err != nil {
			t.Errorf("entry %d: %v", e.Sequence, err)
		}
		if tlog.CheckRecord(proof, p.TreeSize, secondRoot, p.LeafIndex, leaf(t, strings.Repeat("0", 64))) == nil {
			t.Error("the proof proves anything")
		}
		if int64(e.Sequence) > first.TreeSize {
			continue
		}
		p = inclusion(int64(e.Sequence), fmt.Sprintf("&tree_size=%d", first.TreeSize))
		if err := tlog.CheckRecord(hashes(t, p.Path), first.TreeSize, firstRoot, p.LeafIndex, leaf(t, e.Hash)); err != nil {
			t.Errorf("entry %d in the smaller tree: %v", e.Sequence, err)
		}
	}
	newest := s.follow()
	if p := inclusion(int64(s.historyOf(s.tenant)[0].Sequence), ""); p.TreeSize != newest.Size {
		t.Errorf("without a size: %d, not %d", p.TreeSize, newest.Size)
	}
	consistency := decoded[v2.ConsistencyProof](t, s.get(fmt.Sprintf("/api/v2/audit/proof/consistency?from=%d&to=%d", first.TreeSize, second.TreeSize)))
	if consistency.From != first.TreeSize || consistency.To != second.TreeSize {
		t.Errorf("%+v", consistency)
	}
	proof := tlog.TreeProof(hashes(t, consistency.Path))
	if err := tlog.CheckTree(proof, second.TreeSize, secondRoot, first.TreeSize, firstRoot); err != nil {
		t.Error(err)
	}
	if tlog.CheckTree(proof, second.TreeSize, secondRoot, first.TreeSize, secondRoot) == nil {
		t.Error("the proof proves anything")
	}
	if c := decoded[v2.ConsistencyProof](t, s.get("/api/v2/audit/proof/consistency?from=1")); c.To < newest.Size {
		t.Errorf("without a size: %d", c.To)
	}
}

// Whose an entry is does not show in how a proof of it is refused.
func TestNobodyProvesTheEntriesOfAnother(t *testing.T) {
	s := newService(t)
	neighbour := s.grantIn(s.stranger().Tenant, authz.AuditRead)
	s.seal("v")
	c := s.follow()
	own := s.ownEntry(s.tenant).Sequence
	foreign := s.ownEntry(s.stranger().Tenant).Sequence
	at := func(key string, sequence uint64) request {
		return request{method: "GET", path: "/api/v2/audit/proof/inclusion?sequence=" + strconv.FormatUint(sequence, 10), key: key}
	}
	s.call(at(s.key, own)).want(t, http.StatusOK)
	s.call(at(neighbour, foreign)).want(t, http.StatusOK)
	s.indistinct(t, "a proof", http.StatusNotFound, map[string]request{
		"a neighbour's": at(s.key, foreign), "the deployment's": at(s.key, 1), "none yet": at(s.key, c.Sequence+1000), "never": at(s.key, 1<<53-1),
	})
	s.indistinct(t, "a proof for the neighbour", http.StatusNotFound, map[string]request{
		"another's": at(neighbour, own), "the deployment's": at(neighbour, 1), "never": at(neighbour, 1<<53-1),
	})
	for _, what := range []string{"", "0", "-1", "1.5", "x", "9007199254740992", "99999999999999999999", "%00", "1&sequence=2"} {
		r := s.get("/api/v2/audit/proof/inclusion?sequence=" + what)
		if message := r.message(t, http.StatusBadRequest); !strings.Contains(message, "sequence") {
			t.Errorf("%s: %s", what, message)
		}
	}
}

// A mirror has the tiles and nothing else, and computes the root.
func TestTilesRebuildTheRoot(t *testing.T) {
	s := newService(t)
	for i := range 300 { // more than a tile is wide
		if err := s.chain.Guard().RecordAttempt(context.Background(), s.operator(), authz.ReadAudit, audit.Failure, "n"+strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
	}
	c, root := s.checkpoint()
	tile := func(level string, index, width int64) []byte {
		t.Helper()
		path := fmt.Sprintf("/api/v2/audit/tile/%s/%d", level, index)
		if width < 256 {
			path += fmt.Sprintf("?width=%d", width)
		}
		r := s.get(path)
		if r.status != http.StatusOK || r.header.Get("Content-Type") != "application/octet-stream" {
			t.Fatalf("%s: %d %s", path, r.status, r.body)
		}
		return r.body
	}
	read := tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) {
		all := make([]tlog.Hash, len(indexes))
		for i, x := range indexes {
			of := tlog.TileForIndex(8, x)
			width := min(int64(256), c.TreeSize>>(8*of.L)-of.N*256)
			of.W = int(width)
			h, err := tlog.HashFromTile(of, tile(strconv.Itoa(of.L), of.N, width), x)
			if err != nil {
				return nil, err
			}
			all[i] = h
		}
		return all, nil
	})
	if got, err := tlog.TreeHash(c.TreeSize, read); err != nil || got != root {
		t.Errorf("the tiles are of the root %v, not %v: %v", got, root, err)
	}
	// Entry bundles are the leaves' own data: hashes of entries, each behind its length.
	entries := s.records(1)
	for index := int64(0); index*256 < c.TreeSize; index++ {
		width := min(256, c.TreeSize-index*256)
		bundle := tile("entries", index, width)
		if int64(len(bundle)) != width*34 {
			t.Fatalf("bundle %d has %d bytes", index, len(bundle))
		}
		for i := range width {
			if got := hex.EncodeToString(bundle[i*34 : i*34+34]); got != "0020"+entries[index*256+i].Hash {
				t.Fatalf("bundle %d, entry %d: %s", index, i, got)
			}
		}
	}
	if whole, part := tile("0", 0, 256), tile("0", 0, 10); !bytes.Equal(whole[:320], part) {
		t.Error("a tile is not the beginning of itself")
	}
	for path, status := range map[string]int{
		"0/9": 404, "0/1": 404, "1/1?width=1": 404, "1/0": 404, "7/0?width=1": 404, "entries/1": 404, "0/1?width=255": 404, "0/9007199254740991": 404,
		"8/0": 400, "x/0": 400, "-1/0": 400, "00/0": 400, "entries%2F/0": 400, "0/-1": 400, "0/x": 400, "0/99999999999999999999": 400,
		"0/0?width=0": 400, "0/0?width=257": 400, "0/0?width=x": 400, "0/0?width=1&width=1": 400,
	} {
		s.get("/api/v2/audit/tile/"+path).message(t, status)
	}
}

func TestAConsistencyProofIsAskedForInOrder(t *testing.T) {
	s := newService(t)
	s.seal("v")
	s.follow()
	for _, query := range []string{"", "?from=", "?from=0", "?from=x", "?from=2&to=1", "?from=1&to=9007199254740991", "?from=9007199254740991", "?to=2"} {
		s.get("/api/v2/audit/proof/consistency"+query).message(t, http.StatusBadRequest)
	}
}

// A proof that is read again and again is one entry a minute.
func TestReadsOfProofsLeaveOneEntryAMinute(t *testing.T) {
	s := newService(t)
	s.follow()
	before := s.next()
	for range 5 {
		s.get("/api/v2/audit/checkpoint").want(t, http.StatusOK)
	}
	if left := s.records(before); len(left) != 1 || left[0].EventType != audit.ProofRead || left[0].TenantID != string(s.tenant) {
		t.Errorf("%v", summary(left))
	}
	s.clock.advance(time.Minute)
	s.get("/api/v2/audit/checkpoint").want(t, http.StatusOK)
	if left := s.records(before); len(left) != 2 {
		t.Errorf("%v", summary(left))
	}
}

// The export that arrives is one that an auditor can verify, its own entry included.
func TestTheExportOfTheLogVerifies(t *testing.T) {
	s := newService(t)
	s.seal("v")
	key := s.systemKey()
	at := s.next()
	r := s.call(request{method: "GET", path: "/api/v2/system/audit/export", key: key})
	if r.status != http.StatusOK || r.header.Get("Content-Type") != "application/jsonl" {
		t.Fatalf("%d %v %.200s", r.status, r.header, r.body)
	}
	report, err := audit.VerifyExport(bytes.NewReader(r.body), audit.Options{Fingerprint: s.chain.Fingerprint()})
	if err != nil || report.Entries < at {
		t.Errorf("%+v, %v", report, err)
	}
	lines := bufio.NewScanner(bytes.NewReader(r.body))
	lines.Buffer(nil, 1<<20)
	found := false
	for lines.Scan() {
		var e audit.Entry
		if err := json.Unmarshal(lines.Bytes(), &e); err == nil && e.Sequence == at {
			found = e.EventType == audit.AuditExported && len(e.Attributes) == 0
		}
	}
	if !found {
		t.Error("the export is not in itself")
	}
	from := s.call(request{method: "GET", path: fmt.Sprintf("/api/v2/system/audit/export?from=%d", at), key: key})
	if from.status != http.StatusOK || len(from.body) >= len(r.body) || bytes.Contains(from.body, []byte(fmt.Sprintf(`"sequence":%d,`, at-1))) {
		t.Errorf("%d, %d bytes", from.status, len(from.body))
	}
	if e := s.records(at); e[len(e)-1].Attributes["from"] != strconv.FormatUint(at, 10) {
		t.Errorf("%v", summary(e))
	}
	s.call(request{method: "GET", path: "/api/v2/system/audit/export", key: s.key}).message(t, http.StatusForbidden)
}

// slow is an answer whose reader takes nothing until it is told to.
type slow struct {
	*httptest.ResponseRecorder
	began, goOn chan struct{}
}

func (w *slow) Write(b []byte) (int, error) {
	if w.began != nil {
		close(w.began)
		w.began = nil
	}
	<-w.goOn
	return w.ResponseRecorder.Write(b)
}

// One export at a time: it verifies the log while it writes it.
func TestOneExportIsWrittenAtATime(t *testing.T) {
	s := assemble(t)
	key := s.systemKey()
	ask := func(w http.ResponseWriter) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/api/v2/system/audit/export", nil)
		r.Header.Set("X-API-Key", key)
		s.server.engine.ServeHTTP(w, r)
	}
	began, done := make(chan struct{}), make(chan struct{})
	first := &slow{httptest.NewRecorder(), began, make(chan struct{})}
	go func() { defer close(done); ask(first) }()
	<-began
	second := httptest.NewRecorder()
	if ask(second); second.Code != http.StatusConflict {
		t.Error(second.Code, second.Body)
	}
	close(first.goOn)
	<-done
	if _, err := audit.VerifyExport(first.Body, audit.Options{}); err != nil || first.Code != http.StatusOK {
		t.Error(first.Code, err)
	}
	third := httptest.NewRecorder()
	if ask(third); third.Code != http.StatusOK {
		t.Error(third.Code, third.Body)
	}
	outcomes := ""
	for _, e := range s.records(1) {
		if e.EventType == audit.AuditExported {
			outcomes += string(e.Outcome) + e.Attributes[audit.AttributeReason] + " "
		}
	}
	if outcomes != "success failurein_progress success " {
		t.Error(outcomes)
	}
}

// While entries are lost nothing is answered but what brings the log back, whoever
// asks for what; afterwards all of it is, and the entry says what was lost.
func TestAServerThatLostEntriesAnswersNothingElse(t *testing.T) {
	w := newWorld(t, "plain")
	all := operations(t)
	requests := make(map[string]request)
	for name, o := range all {
		if name != "v2 acceptRollback" {
			requests[name] = w.authorized(o, examples[name](w, o))
		}
	}
	head := w.next() - 1
	w.lose()
	for name, r := range requests {
		w.call(r).want(t, http.StatusServiceUnavailable)
		if w.next() != head+1 {
			t.Fatalf("%s wrote an entry", name)
		}
	}
	for path, status := range map[string]int{"/healthz": 200, "/metrics": 200, "/readyz": 503} {
		if r := w.call(request{method: "GET", path: path}); r.status != status || bytes.Contains(r.body, []byte("anchor")) {
			t.Errorf("%s: %d %s", path, r.status, r.body)
		}
	}
	accept := request{method: "POST", path: "/api/v2/system/audit/accept-rollback", key: w.keys["system:admin"], body: `{"reason":"the disk failed"}`}
	weak, wrong, nobody := accept, accept, accept
	weak.key, nobody.key, wrong.body = w.keys["account:admin"], "", `{"reason":"größer"}`
	w.call(weak).message(t, http.StatusForbidden) // though it cannot be recorded
	w.call(nobody).message(t, http.StatusUnauthorized)
	if message := w.call(wrong).message(t, http.StatusUnprocessableEntity); !strings.Contains(message, "reason") {
		t.Error(message)
	}
	got := decoded[v2.RollbackAnswer](t, w.call(accept))
	if got.Epoch != 2 || got.LostFrom != int64(head)+1 || got.LostTo != int64(head)+10 || got.Sequence != int64(head)+11 {
		t.Errorf("%+v after %d", got, head)
	}
	left := w.records(head + 1)
	if len(left) != 1 || left[0].Sequence != head+11 || left[0].Hash != got.Hash || left[0].EventType != audit.RollbackAccepted ||
		left[0].Attributes[audit.AttributeReason] != "the disk failed" || left[0].TenantID != string(authz.SystemTenant) {
		t.Errorf("%v", summary(left))
	}
	w.call(accept).message(t, http.StatusConflict)
	if r := w.call(request{method: "GET", path: "/readyz"}); r.status != http.StatusOK {
		t.Errorf("%d %s", r.status, r.body)
	}
	w.call(w.authorized(all["v2 listCredentials"], request{method: "GET", path: "/api/v2/vault/list"})).want(t, http.StatusOK)
	// What was proven before is proven after, in the next epoch.
	c := w.follow()
	if c.Epoch != 2 || c.Sequence <= uint64(c.Size) {
		t.Errorf("%+v", c)
	}
	if _, err := audit.VerifyStore(t.Context(), w.store, audit.Options{}); err != nil {
		t.Error(err)
	}
}
