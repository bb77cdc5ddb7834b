package alerts

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/machine"
)

// Every alert fires while its fault is on, is silent before, and is over after the fault has ended.
// Faults that can be caused are caused in real servers. For the others a server's metrics are changed.
func TestEveryAlertFires(t *testing.T) {
	tests := []struct {
		name string
		run  func(t *testing.T) (fires []string)
	}{
		{"a server ends", serverEnds},
		{"a replica is missing", replicaMissing},
		{"the operator does not run", operatorDown},
		{"the KMS fails", kmsFails},
		{"PostgreSQL fails", postgresFails},
		{"PostgreSQL is absent at the start", postgresAbsent},
		{"the disk of PostgreSQL fills", postgresFills},
		{"the disk fills", diskFills},
		{"the disk fails", diskFails},
		{"places are away", placesAway},
		{"certificates end", certificatesEnd},
		{"strangers hold connections", strangersConnect},
		{"memory is short", memoryShort},
		{"an upload stalls at the end", uploadStalls},
		{"changed metrics", changedMetrics},
	}
	writeRow(t, "\n## What is seen of each fault\n\n| fault | `/readyz` | reads | changes | check | metric | log | alerts |\n| --- | --- | --- | --- | --- | --- | --- | --- |")
	fired, ran := make(map[string]bool), 0
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for _, name := range test.run(t) {
				fired[name] = true
			}
			ran++ // unless it was skipped
		})
	}
	if t.Failed() || ran < len(tests) {
		return
	}
	for _, r := range readRules(t, "1") {
		if !fired[r.Alert] {
			t.Errorf("no test makes %s fire", r.Alert)
		}
	}
}

// want compares the alerts that fire with those that should, and returns the latter.
func want(t *testing.T, when string, got []string, fires ...string) []string {
	t.Helper()
	slices.Sort(fires)
	if !slices.Equal(got, fires) {
		t.Errorf("%s: %v fire, want %v", when, got, fires)
	}
	return fires
}

func serverEnds(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	s := start(t, "", "")
	up := p.during(10*time.Minute, p.scraped(s, nil))
	s.stop()
	if reason := s.said("ended", "reason"); reason != "terminated signal received" {
		t.Errorf("the log says that it ended for %q:\n%s", reason, s.log.Tail())
	}
	pending := p.during(4*time.Minute, p.scraped(s, nil))
	down := p.during(6*time.Minute, p.scraped(s, nil))
	firing := p.firing("1")
	want(t, "while it runs", firing(up))
	want(t, "at once", firing(pending))
	writeRow(t, "| a server ends | none | none | none | none | `up 0` | `ended` | Down |")
	return want(t, "after ten minutes", firing(down), "LatticekeepDown")
}

func replicaMissing(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	s := start(t, "", "")
	one := func() { p.scrape("0", get(t, s.metrics)) }
	both := func() { one(); p.scrape("1", get(t, s.metrics)) }
	before := p.during(20*time.Minute, both)
	p.during(time.Minute, func() { one(); p.forget("1") }) // its pod was deleted, and there is no other
	during := p.during(20*time.Minute, one)
	after := p.during(5*time.Minute, both)
	firing := p.firing("2")
	want(t, "with both", firing(before))
	want(t, "with both again", firing(after))
	writeRow(t, "| a replica is missing | 200, the others | served | served | none | `count(up) 1` | none | ReplicasMissing |")
	return want(t, "with one", firing(during), "LatticekeepReplicasMissing")
}

// The operator has a cluster whose API server nothing answers for.
func operatorDown(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	healthy := start(t, "", "")
	before := p.during(20*time.Minute, p.scraped(healthy, nil))
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	machine.WriteFile(t, kubeconfig, []byte(`{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c"}}],
"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}]}`))
	s := start(t, "", "kubernetes: {kubeconfig: "+kubeconfig+"}")
	during := p.during(20*time.Minute, p.scraped(s, nil))
	f := fault{
		name: "the API server is away", ready: 200, check: "[-]anchors failed (shared; stops nothing): ", read: true, change: true,
		metric: `latticekeep_audit_anchor_state{place="configmap",state="unreachable"} 1`, log: "operator stopped",
		alerts: []string{"LatticekeepOperatorDown", "LatticekeepAnchorUnreachable"},
	}
	f.shows(s, sight{})
	firing := p.firing("1")
	want(t, "before", firing(before))
	return want(t, "during", firing(during), f.alerts...)
}

func certificatesEnd(t *testing.T) []string {
	p := newPrometheus(t, 2*time.Minute)
	dir := t.TempDir()
	certFile, keyFile, _ := machine.WriteCertificateFor(t, dir, 1, 30*24*time.Hour)
	s := start(t, "", "tls: {certFile: "+certFile+", keyFile: "+keyFile+"}")
	renew := func(serial int64, valid time.Duration) {
		// Two files of the same second may have the same time and size.
		for _, file := range []string{certFile, keyFile} {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
		machine.WriteCertificateFor(t, dir, serial, valid)
		for _, file := range []string{certFile, keyFile} {
			if err := os.Chtimes(file, time.Time{}, time.Now().Add(time.Duration(serial)*time.Minute)); err != nil {
				t.Fatal(err)
			}
		}
	}
	before := p.during(70*time.Minute, p.scraped(s, nil))
	month := s.look()
	renew(2, 5*24*time.Hour)
	soon := p.during(70*time.Minute, p.scraped(s, nil))
	ending := fault{
		name: "the certificate ends in five days", ready: 200, read: true, change: true,
		metric: `latticekeep_certificate_expiry_timestamp_seconds{use="server"}`, alerts: []string{"LatticekeepCertificateExpires"},
	}
	ending.shows(s, month)
	renew(3, 3*time.Hour)
	ends := p.during(10*time.Minute, p.scraped(s, nil))
	ending.name, ending.alerts = "the certificate ends in three hours", append(ending.alerts, "LatticekeepCertificateExpired")
	ending.shows(s, month)
	renew(4, 30*24*time.Hour)
	after := p.during(4*time.Minute, p.scraped(s, nil))
	firing := p.firing("1")
	want(t, "with a month left", firing(before))
	want(t, "with five days left", firing(soon), "LatticekeepCertificateExpires")
	want(t, "with a new one", firing(after))
	return want(t, "with hours left", firing(ends), "LatticekeepCertificateExpires", "LatticekeepCertificateExpired")
}

// await waits until something is so, however busy the machine is.
func await(t *testing.T, s *server, what string, is func() bool) {
	t.Helper()
	s.await(what, is)
}

// awaitMetric waits until the metrics have a line that begins with text.
func awaitMetric(t *testing.T, s *server, text string) {
	t.Helper()
	await(t, s, text, func() bool { return strings.Contains(get(t, s.metrics), "\n"+text) })
}

// series is a series of a server, and what it becomes while the fault of its alert is on.
type series struct {
	name            string
	healthy, faulty float64
	grows           bool // the values are added at each minute
}

// changedMetrics sets the series of those alerts whose faults take too long, or need what is not here.
func changedMetrics(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	s := start(t, "", "")
	text := get(t, s.metrics)
	now := float64(time.Now().Unix())
	const day = 86400
	changed := map[string][]series{
		"LatticekeepMemoryShort":       {{"latticekeep_memory_limit_bytes", 1 << 40, 64 << 20, false}},
		"LatticekeepOverloaded":        {{"latticekeep_http_requests_shed_total", 0, 5, true}},
		"LatticekeepPostgresFailsOver": {{"latticekeep_postgres_outages_total", 0, 1, true}},
		"LatticekeepRefusals": {
			{`latticekeep_http_requests_total{method="GET",route="/api/v2/vault/:credential_id",status="403"}`, 1, 200, true},
			{`latticekeep_http_requests_total{method="GET",route="/api/v2/vault/:credential_id",status="200"}`, 300, 300, true},
		},
		"LatticekeepCommitsSlow":      slow("latticekeep_store_commit_duration_seconds_bucket", ""),
		"LatticekeepKMSSlow":          slow("latticekeep_kms_call_duration_seconds_bucket", `operation="unwrap",`),
		"LatticekeepPostgresBusy":     {{"latticekeep_postgres_connection_wait_seconds_total", 1, 120, true}},
		"LatticekeepMailGivenUp":      {{`latticekeep_mail_attempts_total{result="given_up"}`, 0, 1, true}},
		"LatticekeepLogBroken":        {{"latticekeep_audit_broken", 0, 1, false}},
		"LatticekeepRowsRefused":      {{`latticekeep_state_rows_refused_total{family="api-key",reason="replaced"}`, 0, 1, true}},
		"LatticekeepRollback":         {{`latticekeep_audit_anchor_state{place="bucket",state="rollback"}`, 0, 1, false}},
		"LatticekeepCheckpointBehind": {{"latticekeep_audit_checkpoint_lag_entries", 0, 7, true}, {"latticekeep_audit_sequence", 7, 7, true}},
		"LatticekeepAnchorBehind": {
			{`latticekeep_audit_anchor_lag_entries{place="configmap"}`, 3, 50, false},
			{`latticekeep_audit_anchor_sequence{place="configmap"}`, 7, 0, true},
		},
		"LatticekeepArchiveUnreadable": {{"latticekeep_audit_archive_readable", 1, 0, false}},
		"LatticekeepRetentionBehind": {
			{"latticekeep_audit_retention_seconds", 30 * day, 30 * day, false},
			{"latticekeep_audit_oldest_entry_timestamp_seconds", now - 31*day, now - 33*day, false},
			{"latticekeep_audit_retention_entries", 1e6, 1e6, false},
			{"latticekeep_audit_stored_entries", 1.2e6, 1.2e6, false},
		},
		"LatticekeepCommitsNotShipped": {{"latticekeep_commits_shipped_until_timestamp_seconds", now + day, now - 3*day, false}},
		"LatticekeepCommitsForked":     {{`latticekeep_commits_logs_total{cause="fork"}`, 0, 1, true}},
		"LatticekeepStalled":           {{`latticekeep_sealedcredentials{condition="Stalled",status="True"}`, 0, 2, false}},
		"LatticekeepRotationOverdue":   {{`latticekeep_sealedcredentials{condition="Expiring",status="True"}`, 0, 1, false}},
		"LatticekeepCredentialExpired": {
			{`latticekeep_credential_expiry_timestamp_seconds{name="db",namespace="shop"}`, now + 30*day, now - 1, false},
		},
		"LatticekeepTargetsUnseen":  {{"latticekeep_target_oldest_look_timestamp_seconds", now + day, now - 4000, false}},
		"LatticekeepTargetsChanged": {{"latticekeep_target_repairs_total", 0, 2, true}},
		"LatticekeepWebhookBlind":   {{"latticekeep_admission_vault_unavailable_total", 0, 1, true}},
	}
	values := make(map[string]float64)
	step := func(faulty bool) func() {
		return func() {
			scraped := text
			for _, all := range changed {
				for _, c := range all {
					value := c.healthy
					if faulty {
						value = c.faulty
					}
					if c.grows {
						value += values[c.name]
						values[c.name] = value
					}
					scraped = set(scraped, c.name, value)
				}
			}
			p.scrape("0", scraped)
		}
	}
	before := p.during(90*time.Minute, step(false))
	during := p.during(90*time.Minute, step(true))
	after := p.during(90*time.Minute, step(false))
	p.ignored = nil
	firing := p.firing("1")
	want(t, "before", firing(before))
	want(t, "after", firing(after))
	return want(t, "during", firing(during), slices.Collect(maps.Keys(changed))...)
}

// slow returns the buckets of a histogram in which calls take a millisecond, and then a second.
func slow(name, labels string) (all []series) {
	for _, le := range []string{"0.0005", "0.001", "0.002", "0.004", "0.008", "0.016", "0.032", "0.064", "0.128", "0.256", "0.512", "1.024", "2.048", "4.096", "8.192", "+Inf"} {
		s := series{fmt.Sprintf(`%s{%sle="%s"}`, name, labels, le), 10, 0, true}
		switch {
		case le == "0.0005":
			s.healthy = 0
		case len(le) > 3 && le[0] != '0' || le == "+Inf":
			s.faulty = 10
		}
		all = append(all, s)
	}
	return all
}

// Every alert leads to a section of a page, and every section of such a page is that of an alert.
func TestEveryAlertHasARunbook(t *testing.T) {
	const base, folder = "https://github.com/latticekeep/latticekeep/blob/main/docs/runbooks/", "../../docs/runbooks/"
	alerts := make(map[string]bool) // page#anchor
	for _, r := range readRules(t, "1") {
		at, ok := strings.CutPrefix(r.Annotations["runbook_url"], base)
		page, anchor, _ := strings.Cut(at, "#")
		if !ok || anchor != strings.ToLower(r.Alert) {
			t.Errorf("%s has the runbook %s, which is not in %s, or is another alert's", r.Alert, r.Annotations["runbook_url"], base)
		}
		alerts[at] = true
		text, err := os.ReadFile(folder + page)
		if err != nil {
			t.Errorf("%s: %v", r.Alert, err)
		} else if !strings.Contains(string(text), "\n## "+r.Alert+"\n") {
			t.Errorf("%s has no section in %s", r.Alert, page)
		}
		if r.Annotations["summary"] == "" || r.Annotations["description"] == "" || !slices.Contains([]string{"critical", "warning"}, r.Labels["severity"]) {
			t.Errorf("%s says too little: %v %v", r.Alert, r.Annotations, r.Labels)
		}
	}
	index, err := os.ReadFile(folder + "README.md")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(folder + "*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range pages {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		page := filepath.Base(path)
		if page == "README.md" {
			continue
		}
		if !strings.Contains(string(index), "]("+page+")") {
			t.Errorf("the index does not list %s", page)
		}
		for _, section := range regexp.MustCompile(`(?m)^## (\S+)$`).FindAllStringSubmatch(string(text), -1) {
			if at := page + "#" + strings.ToLower(section[1]); !alerts[at] {
				t.Errorf("%s is a section without an alert", at)
			}
		}
	}
}
