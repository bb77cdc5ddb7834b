package alerts

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"
)

// panel is a panel of the dashboard.
type panel struct {
	Title   string `json:"title"`
	Type    string `json:"type"`
	Targets []struct {
		Expr string `json:"expr"`
	} `json:"targets"`
}

func readPanels(t *testing.T) []panel {
	t.Helper()
	text, err := os.ReadFile("../../charts/latticekeep/files/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []panel `json:"panels"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatalf("reading the dashboard: %v", err)
	}
	return d.Panels
}

// Each query of the dashboard has a result when it is evaluated as an alert. The server of the test
// has no cluster, PostgreSQL, TLS or anchor: their series are added to its answer.
func TestEveryPanelShowsSomething(t *testing.T) {
	p := newPrometheus(t, time.Minute)
	s := start(t, "", "")
	s.makeKey()
	s.seal() // any answer counts as a request
	text := get(t, s.metrics)
	for _, added := range []string{
		`latticekeep_postgres_connections{state="used"}`, "latticekeep_postgres_connections_max", "latticekeep_postgres_connection_wait_seconds_total",
		"latticekeep_postgres_up", "latticekeep_postgres_outages_total", `latticekeep_certificate_expiry_timestamp_seconds{use="server"}`,
		`latticekeep_tls_handshakes_total{group="X25519MLKEM768"}`, `latticekeep_audit_anchor_lag_entries{place="bucket"}`, "latticekeep_audit_retention_seconds", "latticekeep_audit_retention_entries",
		`latticekeep_sealedcredentials{condition="Ready",status="True"}`, `latticekeep_credential_expiry_timestamp_seconds{namespace="shop",name="db"}`,
		`latticekeep_credential_changes_total{change="sealed"}`, `latticekeep_admission_reviews_total{verdict="allowed"}`,
		"latticekeep_memory_limit_bytes", "latticekeep_backup_last_verified_timestamp_seconds", "latticekeep_backup_interval_seconds", "latticekeep_commits_shipped_until_timestamp_seconds", "latticekeep_commits_shipped_bytes_total", `latticekeep_unavailable_total{reason="store"}`, "latticekeep_target_oldest_look_timestamp_seconds", "latticekeep_target_repairs_total",
		`latticekeep_http_requests_total{method="GET",route="none",status="401"}`,
	} {
		text = set(text, added, 1)
	}
	end := p.during(10*time.Minute, func() { p.scrape("0", text) })
	var rules []rule
	shows := make(map[string]string) // query by alert
	for _, panel := range readPanels(t) {
		if len(panel.Targets) == 0 && panel.Type != "row" {
			t.Errorf("%s has no query", panel.Title)
		}
		for i, target := range panel.Targets {
			name := fmt.Sprintf("Latticekeep %s %d", panel.Title, i)
			shows[name] = target.Expr
			rules = append(rules, rule{Alert: name, Expr: "count(" + target.Expr + ")"})
		}
	}
	for _, name := range p.evaluate(rules)(end) {
		delete(shows, name)
	}
	for name, expr := range shows {
		t.Errorf("%s shows nothing: %s", name, expr)
	}
}

// A panel that a runbook names is there.
func TestRunbooksNamePanelsThatExist(t *testing.T) {
	there := make(map[string]bool)
	for _, panel := range readPanels(t) {
		there[panel.Title] = true
	}
	pages, err := filepath.Glob("../../docs/runbooks/*.md")
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`[^*]\*([A-Z][^*\n]*)\*[^*]`).FindAllStringSubmatch(string(text), -1) {
			if named++; !there[m[1]] {
				t.Errorf("%s names the panel %s, which does not exist", page, m[1])
			}
		}
	}
	if named == 0 {
		t.Error("no runbook names a panel")
	}
}
