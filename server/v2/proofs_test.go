package v2_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/tlog"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// checkpoint brings the log up to date and reads its newest checkpoint, which it
// verifies with the key that the interface publishes.
func (s *service) checkpoint() (v2.CheckpointAnswer, tlog.Hash) {
	s.T.Helper()
	s.FollowLog()
	c := servertest.Decode[v2.CheckpointAnswer](s.T, s.Get("/api/v2/audit/checkpoint"))
	published := servertest.Decode[v2.AuditPublicKey](s.T, s.Get("/api/v2/audit/public-key"))
	raw, err := base64.RawURLEncoding.DecodeString(published.Key.Pub)
	if err != nil {
		s.T.Fatal(err)
	}
	key, err := dualsig.ParsePublicKey(raw)
	if err != nil {
		s.T.Fatal(err)
	}
	head, err := audit.ParseCheckpoint([]byte(c.Checkpoint), key)
	if err != nil {
		s.T.Fatal(err)
	}
	if head.Size != c.TreeSize || head.Sequence != uint64(c.Sequence) || hex.EncodeToString(head.Hash[:]) != c.Hash ||
		head.Root.String() != c.RootHash || !head.Time.Equal(c.Timestamp) || head.Epoch != uint64(c.Epoch) || head.ChainID != published.ChainId {
		s.T.Errorf("the fields beside the note say something else: %+v, %+v", c, head)
	}
	if published.Fingerprint != s.Audit.Fingerprint() || published.Fingerprint != audit.Fingerprint(published.ChainId, raw) ||
		published.Key.Kid != key.ID() || published.Verifier != audit.VerifierKey(published.ChainId, head.Epoch, key) {
		s.T.Errorf("the public key: %+v", published)
	}
	return c, head.Root
}

// historyOf returns the entries of a tenant.
func (s *service) historyOf(tenant authz.TenantID) (own []audit.Entry) {
	for _, e := range s.AllEntries(1) {
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
		s.Seal("v")
	}
	second, secondRoot := s.checkpoint()
	if second.TreeSize <= first.TreeSize || second.Sequence != second.TreeSize {
		t.Fatalf("sizes %d and %d", first.TreeSize, second.TreeSize)
	}
	inclusion := func(sequence int64, size string) v2.InclusionProof {
		t.Helper()
		return servertest.Decode[v2.InclusionProof](t, s.Get(fmt.Sprintf("/api/v2/audit/proof/inclusion?sequence=%d%s", sequence, size)))
	}
	for _, e := range s.historyOf(s.Tenant) {
		if int64(e.Sequence) > second.TreeSize {
			continue
		}
		p := inclusion(int64(e.Sequence), fmt.Sprintf("&tree_size=%d", second.TreeSize))
		if p.Hash != e.Hash || p.LeafIndex != int64(e.Sequence)-1 || p.TreeSize != second.TreeSize {
			t.Errorf("entry %d: %+v", e.Sequence, p)
		}
		proof := tlog.RecordProof(servertest.ParseHashes(t, p.Path))
		if err := tlog.CheckRecord(proof, p.TreeSize, secondRoot, p.LeafIndex, servertest.LeafHash(t, e.Hash)); err != nil {
			t.Errorf("entry %d: %v", e.Sequence, err)
		}
		if tlog.CheckRecord(proof, p.TreeSize, secondRoot, p.LeafIndex, servertest.LeafHash(t, strings.Repeat("0", 64))) == nil {
			t.Error("the proof proves anything")
		}
		if int64(e.Sequence) > first.TreeSize {
			continue
		}
		p = inclusion(int64(e.Sequence), fmt.Sprintf("&tree_size=%d", first.TreeSize))
		if err := tlog.CheckRecord(servertest.ParseHashes(t, p.Path), first.TreeSize, firstRoot, p.LeafIndex, servertest.LeafHash(t, e.Hash)); err != nil {
			t.Errorf("entry %d in the smaller tree: %v", e.Sequence, err)
		}
	}
	newest := s.FollowLog()
	if p := inclusion(int64(s.historyOf(s.Tenant)[0].Sequence), ""); p.TreeSize != newest.Size {
		t.Errorf("without a size: %d, not %d", p.TreeSize, newest.Size)
	}
	consistency := servertest.Decode[v2.ConsistencyProof](t, s.Get(fmt.Sprintf("/api/v2/audit/proof/consistency?from=%d&to=%d", first.TreeSize, second.TreeSize)))
	if consistency.From != first.TreeSize || consistency.To != second.TreeSize {
		t.Errorf("%+v", consistency)
	}
	proof := tlog.TreeProof(servertest.ParseHashes(t, consistency.Path))
	if err := tlog.CheckTree(proof, second.TreeSize, secondRoot, first.TreeSize, firstRoot); err != nil {
		t.Error(err)
	}
	if tlog.CheckTree(proof, second.TreeSize, secondRoot, first.TreeSize, secondRoot) == nil {
		t.Error("the proof proves anything")
	}
	if c := servertest.Decode[v2.ConsistencyProof](t, s.Get("/api/v2/audit/proof/consistency?from=1")); c.To < newest.Size {
		t.Errorf("without a size: %d", c.To)
	}
}

// Whose an entry is does not show in how a proof of it is refused.
func TestNobodyProvesTheEntriesOfAnother(t *testing.T) {
	s := newService(t)
	neighbour := s.GrantKeyIn(s.Stranger().Tenant, authz.AuditRead)
	s.Seal("v")
	c := s.FollowLog()
	own := s.FirstEntryOf(s.Tenant).Sequence
	foreign := s.FirstEntryOf(s.Stranger().Tenant).Sequence
	at := func(key string, sequence uint64) servertest.Request {
		return servertest.Request{Method: "GET", Path: "/api/v2/audit/proof/inclusion?sequence=" + strconv.FormatUint(sequence, 10), Key: key}
	}
	s.Call(at(s.Key, own)).Want(t, http.StatusOK)
	s.Call(at(neighbour, foreign)).Want(t, http.StatusOK)
	s.WantIndistinct(t, "a proof", http.StatusNotFound, map[string]servertest.Request{
		"a neighbour's": at(s.Key, foreign), "the deployment's": at(s.Key, 1), "none yet": at(s.Key, c.Sequence+1000), "never": at(s.Key, 1<<53-1),
	})
	s.WantIndistinct(t, "a proof for the neighbour", http.StatusNotFound, map[string]servertest.Request{
		"another's": at(neighbour, own), "the deployment's": at(neighbour, 1), "never": at(neighbour, 1<<53-1),
	})
	for _, what := range []string{"", "0", "-1", "1.5", "x", "9007199254740992", "99999999999999999999", "%00", "1&sequence=2"} {
		r := s.Get("/api/v2/audit/proof/inclusion?sequence=" + what)
		if message := r.Message(t, http.StatusBadRequest); !strings.Contains(message, "sequence") {
			t.Errorf("%s: %s", what, message)
		}
	}
}

// A mirror has the tiles and nothing else, and computes the root.
func TestTilesRebuildTheRoot(t *testing.T) {
	s := newService(t)
	for i := range 300 { // more than a tile is wide
		if err := s.Guard.RecordAttempt(context.Background(), s.Operator(), authz.ReadAudit, audit.Failure, "n"+strconv.Itoa(i)); err != nil {
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
		r := s.Get(path)
		if r.Status != http.StatusOK || r.Header.Get("Content-Type") != "application/octet-stream" {
			t.Fatalf("%s: %d %s", path, r.Status, r.Body)
		}
		return r.Body
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
	entries := s.AllEntries(1)
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
		s.Get("/api/v2/audit/tile/"+path).Message(t, status)
	}
}

func TestAConsistencyProofIsAskedForInOrder(t *testing.T) {
	s := newService(t)
	s.Seal("v")
	s.FollowLog()
	for _, query := range []string{"", "?from=", "?from=0", "?from=x", "?from=2&to=1", "?from=1&to=9007199254740991", "?from=9007199254740991", "?to=2"} {
		s.Get("/api/v2/audit/proof/consistency"+query).Message(t, http.StatusBadRequest)
	}
}

// The export that arrives is one that an auditor can verify, its own entry included.
func TestTheExportOfTheLogVerifies(t *testing.T) {
	s := newService(t)
	s.Seal("v")
	key := s.SystemKey()
	at := s.NextSequence()
	r := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/system/audit/export", Key: key})
	if r.Status != http.StatusOK || r.Header.Get("Content-Type") != "application/jsonl" {
		t.Fatalf("%d %v %.200s", r.Status, r.Header, r.Body)
	}
	report, err := verify.Export(bytes.NewReader(r.Body), verify.Options{Fingerprint: s.Audit.Fingerprint()})
	if err != nil || report.Entries < at {
		t.Errorf("%+v, %v", report, err)
	}
	lines := bufio.NewScanner(bytes.NewReader(r.Body))
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
	from := s.Call(servertest.Request{Method: "GET", Path: fmt.Sprintf("/api/v2/system/audit/export?from=%d", at), Key: key})
	if from.Status != http.StatusOK || len(from.Body) >= len(r.Body) || bytes.Contains(from.Body, []byte(fmt.Sprintf(`"sequence":%d,`, at-1))) {
		t.Errorf("%d, %d bytes", from.Status, len(from.Body))
	}
	if e := s.AllEntries(at); e[len(e)-1].Attributes["from"] != strconv.FormatUint(at, 10) {
		t.Errorf("%v", servertest.Summaries(e))
	}
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/system/audit/export", Key: s.Key}).Message(t, http.StatusForbidden)
}
