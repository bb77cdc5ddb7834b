package v2_test

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// count returns how many entries a query selects, its own reading aside.
func (s *service) count(query url.Values) int {
	s.T.Helper()
	query.Set("limit", "100")
	n := 0
	for _, e := range s.Entries(query.Encode()) {
		if e["event_type"] != "AUDIT_READ" {
			n++
		}
	}
	return n
}

func TestAuditFilters(t *testing.T) {
	s := newService(t)
	s.Clock.Advance(time.Hour)
	first := s.Clock.Now()
	id := s.Seal("v")
	s.Clock.Advance(time.Hour)
	second := s.Clock.Now()
	s.Get("/api/v2/vault/"+id).Want(t, http.StatusOK)
	s.Clock.Advance(90 * time.Minute)
	_, err := s.Vault.Apply(context.Background(), s.Operator(), "uid", 0, vault.Desired{
		Name: "n", Type: "t", Values: map[string]secret.Bytes{"k": secret.Bytes("v")},
	})
	if err != nil {
		t.Fatal(err)
	}
	at := func(t time.Time) string { return t.Format(time.RFC3339) }
	actor := s.Entries("event_type=CREDENTIAL_UNSEALED")[0]["actor"].(map[string]any)["id"].(string)
	for name, c := range map[string]struct {
		query url.Values
		want  int
	}{
		"type":                  {url.Values{"event_type": {"CREDENTIAL_SEALED"}}, 2},
		"type and actor":        {url.Values{"event_type": {"CREDENTIAL_SEALED"}, "user_id": {actor}}, 1},
		"actor":                 {url.Values{"user_id": {"operator"}}, 1},
		"unknown actor":         {url.Values{"user_id": {"nobody"}}, 0},
		"from":                  {url.Values{"from": {at(second)}}, 2},
		"from and to":           {url.Values{"from": {at(first)}, "to": {at(second)}}, 2},
		"from, in another zone": {url.Values{"from": {second.In(time.FixedZone("", 3600)).Format(time.RFC3339Nano)}}, 2},
		"one instant":           {url.Values{"from": {at(first)}, "to": {at(first)}}, 1},
		"one hour back":         {url.Values{"hours": {"1"}}, 1},
		"two hours back":        {url.Values{"hours": {"2"}}, 2},
		"all hours":             {url.Values{"hours": {"87600"}}, 5}, // and the tenant and its key
	} {
		if got := s.count(c.query); got != c.want {
			t.Errorf("%s: %d entries, want %d", name, got, c.want)
		}
	}
}

func TestAuditPagesNewestFirst(t *testing.T) {
	s := newService(t)
	for i := range 25 {
		s.Seal(fmt.Sprint(i))
	}
	if n := len(s.Entries("event_type=CREDENTIAL_SEALED")); n != 20 {
		t.Errorf("%d entries by default", n)
	}
	var sequences []float64
	query := "event_type=CREDENTIAL_SEALED&limit=10"
	for pages := 1; ; pages++ {
		page := s.Get("/api/v2/audit/logs?"+query).Want(t, http.StatusOK)
		for _, e := range page["entries"].([]any) {
			sequences = append(sequences, e.(map[string]any)["sequence"].(float64))
		}
		next, more := page["next_cursor"].(string)
		if !more || pages > 10 {
			break
		}
		query = "event_type=CREDENTIAL_SEALED&limit=10&cursor=" + next
	}
	descending := slices.IsSortedFunc(sequences, func(a, b float64) int { return int(b - a) })
	if len(sequences) != 25 || !descending || len(slices.Compact(sequences)) != 25 {
		t.Errorf("%d entries: %v", len(sequences), sequences)
	}
}

func TestATenantReadsOnlyItsOwnEntries(t *testing.T) {
	s := newService(t)
	if _, err := s.Vault.Seal(context.Background(), s.Stranger(), vault.SealRequest{
		Name: "n", Type: "t", Values: map[string]secret.Bytes{"k": secret.Bytes("v")},
	}); err != nil {
		t.Fatal(err)
	}
	for _, e := range s.Entries("limit=100") {
		if e["tenant_id"] != string(s.Tenant) {
			t.Errorf("entry of %v", e["tenant_id"])
		}
	}
	if n := len(s.Entries("user_id=stranger")); n != 0 {
		t.Errorf("%d foreign entries", n)
	}
}

func TestWrongQueriesAreRefused(t *testing.T) {
	s := newService(t)
	const canary = "canary"
	for _, query := range []string{
		"limit=0", "limit=-1", "limit=101", "limit=1.5", "limit=1e1", "limit=x", "limit=", "limit=%2B1x", "limit=99999999999999999999",
		"limit=1&limit=2", "limit=%00", "limit=%zz", "limit=1;cursor=x",
		"cursor=" + canary, "cursor=", "cursor=%ff", "cursor=" + strings.Repeat("A", 513),
	} {
		for _, path := range []string{"/api/v2/vault/list?", "/api/v2/audit/logs?"} {
			if m := s.Get(path+query).Message(t, http.StatusBadRequest); strings.Contains(m, canary) {
				t.Errorf("%s is quoted: %s", query, m)
			}
		}
	}
	for _, query := range []string{
		"event_type=credential_sealed", "event_type=" + canary, "event_type=", "event_type=AUDIT_READ&event_type=AUDIT_READ",
		"user_id=", "user_id=" + strings.Repeat("a", 129),
		"from=2026-11-21", "from=" + canary, "from=1763715600", "to=2026-11-21T10:00:00", "from=2026-13-01T00:00:00Z", "from=",
		"from=2026-11-21T10:00:00Z&to=2026-11-21T09:59:59Z",
		"hours=0", "hours=-1", "hours=87601", "hours=x", "hours=1.5", "hours=1&hours=1",
		"hours=1&from=2026-11-21T10:00:00Z", "hours=1&to=2026-11-21T10:00:00Z",
	} {
		if m := s.Get("/api/v2/audit/logs?"+query).Message(t, http.StatusBadRequest); strings.Contains(m, canary) {
			t.Errorf("%s is quoted: %s", query, m)
		}
	}
}

func TestARefusedStrangerIsRecordedOnceAMinute(t *testing.T) {
	s := newService(t)
	before, err := verify.Store(t.Context(), s.Store, verify.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if got := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list", Key: "lk_live_none"}); got.Status != http.StatusUnauthorized {
			t.Fatal(got.Status)
		}
	}
	after, err := verify.Store(t.Context(), s.Store, verify.Options{})
	if err != nil || after.Entries != before.Entries+1 {
		t.Fatalf("%d entries for 20 requests of one source, %v", after.Entries-before.Entries, err)
	}
}
