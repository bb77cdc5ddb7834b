package servertest

import (
	"bufio"
	"context"
	"crypto/sha3"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
)

// VerifyLog verifies the log up to its head, as the server does in the background.
func (s *Service) VerifyLog() {
	s.T.Helper()
	if _, err := s.Verifier.Verify(s.T.Context()); err != nil {
		s.T.Fatal(err)
	}
}

// AllEntries returns the entries of all tenants from a sequence on.
func (s *Service) AllEntries(from uint64) (all []audit.Entry) {
	s.T.Helper()
	rng := store.Prefix([]byte("audit/entry/"))
	rng.From = binary.BigEndian.AppendUint64([]byte("audit/entry/"), from)
	err := audit.ScanAll(context.Background(), s.Store, rng, func(_, value []byte) error {
		var e audit.Entry
		core := value[1+dualsig.SignatureSize:]
		err := json.Unmarshal(core, &e)
		e.Hash = fmt.Sprintf("%x", sha3.Sum256(core)) // the row omits it
		all = append(all, e)
		return err
	})
	if err != nil {
		s.T.Fatal(err)
	}
	return all
}

// NextSequence returns the sequence of the next entry. After a rollback the log has fewer entries.
func (s *Service) NextSequence() uint64 {
	s.T.Helper()
	head, _, err := s.Audit.Progress(context.Background())
	if err != nil {
		s.T.Fatal(err)
	}
	return head + 1
}

// Summaries returns one line for each entry: its type, outcome and attributes.
func Summaries(entries []audit.Entry) (all []string) {
	for _, e := range entries {
		all = append(all, fmt.Sprint(e.EventType, " ", e.Outcome, " ", e.Attributes))
	}
	return all
}

// FirstEntryOf returns the first entry of a tenant.
func (s *Service) FirstEntryOf(tenant authz.TenantID) audit.Entry {
	s.T.Helper()
	for _, e := range s.AllEntries(1) {
		if e.TenantID == string(tenant) {
			return e
		}
	}
	s.T.Fatal("the tenant has no entry")
	return audit.Entry{}
}

// LogLines returns the server's log lines with a message.
func (s *Service) LogLines(message string) []map[string]any {
	s.T.Helper()
	var lines []map[string]any
	scanner := bufio.NewScanner(strings.NewReader(s.Logged.String()))
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		var line map[string]any
		if err := json.Unmarshal(scanner.Bytes(), &line); err != nil {
			s.T.Fatal(err)
		}
		if line["msg"] == message {
			lines = append(lines, line)
		}
	}
	return lines
}

// ParseHashes converts the hashes of a proof to the library's type.
func ParseHashes(t testing.TB, path []string) (all []tlog.Hash) {
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

// LeafHash returns the hash of the tree's leaf for an entry's hash.
func LeafHash(t testing.TB, hash string) tlog.Hash {
	t.Helper()
	b, err := hex.DecodeString(hash)
	if err != nil {
		t.Fatal(err)
	}
	return tlog.RecordHash(b)
}

// FollowLog extends the tree and the newest checkpoint to the head of the log.
func (s *Service) FollowLog() audit.Checkpoint {
	s.T.Helper()
	c, err := writer.NewFollower(s.Audit).Follow(context.Background())
	if err != nil {
		s.T.Fatal(err)
	}
	return c
}

// LoseEntries halts the log as if an anchor knew ten entries after its head.
func (s *Service) LoseEntries() {
	s.T.Helper()
	next := s.NextSequence()
	s.Audit.Halt(&audit.RollbackError{LostFrom: next, LostTo: next + 9, Epoch: 1, Source: "a test"})
}
