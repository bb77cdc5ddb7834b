package alerts

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/cli"
	"github.com/latticekeep/latticekeep/test/kmstest"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// The key-management service fails in every way for all replicas, and its token for this one.
func kmsFails(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	kms, err := kmstest.NewVault()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kms.Close)
	token := filepath.Join(t.TempDir(), "token")
	machine.WriteFile(t, token, []byte(kms.Token()))
	s := start(t, "", fmt.Sprintf("kms: {url: %q, tokenFile: %s, cacheTTL: 0s}", kms.URL(), token))
	s.makeKey()
	// A switch returns what turns a fault on and off.
	onOff := func(set func(bool)) (begin, end func()) { return func() { set(true) }, func() { set(false) } }
	shared := fault{
		ready: http.StatusOK, check: "[-]kms failed (shared; stops read and change): ", metric: `latticekeep_kms_calls_total{operation="unwrap",result="unavailable"}`,
		log: "a call of the key-management service failed", alerts: []string{"LatticekeepKMSFails", "LatticekeepErrors", "LatticekeepNotServing"},
	}
	own := shared
	own.ready, own.check, own.metric = http.StatusServiceUnavailable, "[-]kms-credentials failed (replica; stops read and change): ",
		`latticekeep_kms_calls_total{operation="unwrap",result="refused"}`

	revoked, wrong, garbage := shared, own, shared
	revoked.name, revoked.metric = "the KMS answers 403 to all", own.metric
	revoked.begin, revoked.end = onOff(kms.SetRevoked)
	p.suffers(s, revoked)
	wrong.name = "the token of one replica is wrong"
	wrong.begin = func() { machine.WriteFile(t, token, []byte("s.wrong")) }
	wrong.end = func() { machine.WriteFile(t, token, []byte(kms.Token())) }
	p.suffers(s, wrong)
	garbage.name, garbage.metric = "the KMS answers garbage", `latticekeep_kms_calls_total{operation="unwrap",result="failed"}`
	garbage.begin, garbage.end = onOff(kms.SetGarbling)
	p.suffers(s, garbage)
	if long() { // each call is repeated for 0.9 s
		shared.alerts = append(shared.alerts, "LatticekeepKMSSlow")
		sealed, dropping, throttled, silent, slow := shared, shared, shared, shared, shared
		sealed.name = "the KMS is sealed"
		sealed.begin, sealed.end = onOff(kms.SetSealed)
		dropping.name = "the KMS ends connections"
		dropping.begin, dropping.end = onOff(kms.SetDropping)
		throttled.name = "the KMS answers 429"
		throttled.begin, throttled.end = func() { kms.SetThrottle(1) }, func() { kms.SetThrottle(0) }
		silent.name = "the KMS hangs"
		silent.begin, silent.end = func() { kms.SetLatency(time.Minute) }, func() { kms.SetLatency(0) }
		slow.name, slow.check, slow.log, slow.read, slow.change = "the KMS takes 0.6 s", "", "request", true, true
		slow.metric = `latticekeep_kms_call_duration_seconds_bucket{operation="unwrap",le="+Inf"}`
		slow.begin, slow.end = func() { kms.SetLatency(600 * time.Millisecond) }, func() { kms.SetLatency(0) }
		slow.alerts = []string{"LatticekeepKMSSlow"}
		for _, f := range []fault{sealed, dropping, throttled, silent, slow} {
			f.lasts = 30 * time.Minute
			p.suffers(s, f)
		}
	}
	return p.judge()
}

// onPostgres starts a server on a PostgreSQL.
func onPostgres(t *testing.T, db *pgtest.Server) *server {
	t.Helper()
	s := start(t, "", configured(t, db))
	s.makeKey()
	return s
}

// configured returns the configuration of a server on a PostgreSQL.
func configured(t *testing.T, db *pgtest.Server) string {
	t.Helper()
	return fmt.Sprintf("store: {url: %q}\ncompliance: {reports: %q}", db.URL(), "file://"+filepath.Join(t.TempDir(), "reports"))
}

// PostgreSQL is killed, frozen, a standby, restarted again and again, and takes no writes.
func postgresFails(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	p.ignored = append(p.ignored, "LatticekeepCommitsFail", "LatticekeepPostgresFailsOver") // how often it is lost, and whether the server's own work commits meanwhile, is chance
	db := pgtest.Start(t)
	s := onPostgres(t, db)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	away := fault{
		name:  "PostgreSQL is killed",
		begin: func() { must(db.Kill()) }, end: func() { must(db.Restart()) },
		ready: http.StatusOK, check: "[-]store failed (shared; stops read and change): ", metric: "latticekeep_postgres_up 0",
		log: "the database cannot be reached", alerts: []string{"LatticekeepPostgresDown", "LatticekeepErrors", "LatticekeepOperatorDown", "LatticekeepNotServing"},
	}
	p.suffers(s, away)
	if long() {
		frozen, standby := away, away
		frozen.name = "PostgreSQL is frozen"
		frozen.begin, frozen.end = func() { must(db.Freeze()) }, func() { must(db.Thaw()) }
		p.suffers(s, frozen)
		standby.name = "PostgreSQL has failed over, and the URL leads to a standby"
		standby.begin = func() { db.Configure(t, map[string][]byte{"standby.signal": nil}) }
		standby.end = func() { must(db.Exec(t.Context(), "SELECT pg_promote()")) }
		p.suffers(s, standby)
	}
	fired := p.judge()

	p = newPrometheus(t, time.Minute)
	p.ignored = append(p.ignored, "LatticekeepNotServing") // a probe writes no row
	u, err := url.Parse(db.URL())
	must(err)
	run := func(statement string) {
		t.Helper()
		must(db.Exec(t.Context(), `\connect `+strings.TrimPrefix(u.Path, "/"), fmt.Sprintf(statement, u.User.Username())))
	}
	before := p.during(8*time.Minute, p.scraped(s, func() { s.seal() }))
	run("REVOKE INSERT, UPDATE ON latticekeep_kv FROM %s")
	during := p.during(20*time.Minute, p.scraped(s, func() {
		if status := s.seal(); status < 500 {
			t.Errorf("sealing without a commit: %d", status)
		}
	}))
	run("GRANT INSERT, UPDATE ON latticekeep_kv TO %s")
	s.await("the recovery", func() bool { return s.seal() == http.StatusCreated })
	after := p.during(20*time.Minute, p.scraped(s, func() { s.seal() }))
	firing := p.firing("1")
	want(t, "before", firing(before))
	want(t, "after", firing(after))
	fired = append(fired, want(t, "during", firing(during), "LatticekeepCommitsFail", "LatticekeepErrors")...)

	if !long() {
		return fired
	}
	p = newPrometheus(t, time.Minute)
	before = p.during(8*time.Minute, p.scraped(s, func() { s.seal() }))
	restarts := p.during(5*time.Minute, p.scraped(s, func() {
		must(db.Kill())
		s.await("the loss", func() bool { s.seal(); return s.look().value("latticekeep_postgres_up") == "0" })
		must(db.Restart())
		s.await("the recovery", func() bool { return s.seal() == http.StatusCreated })
	}))
	firing = p.firing("1")
	want(t, "before losses", firing(before))
	return append(fired, want(t, "five losses", firing(restarts), "LatticekeepPostgresFailsOver")...)
}

// A server that starts without PostgreSQL is alive and not ready. Prometheus knows it as down, since
// it has no metrics yet.
func postgresAbsent(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	db := pgtest.Start(t)
	s := onPostgres(t, db)
	p.during(10*time.Minute, p.scraped(s, nil))
	p.expect("before PostgreSQL is absent")
	s.stop()
	if err := db.Kill(); err != nil {
		t.Fatal(err)
	}
	s.log = machine.Log{}
	s.run()
	const waits = "PostgreSQL does not answer yet"
	s.await(waits, func() bool { s.metrics = s.said(waits, "operations"); return s.metrics != "" || s.dead() })
	s.metrics += "/metrics"
	f := fault{
		name: "PostgreSQL is absent at the start", ready: http.StatusServiceUnavailable, check: "[-]start failed (replica; stops read and change): ",
		metric: "up 0", log: waits, alerts: []string{"LatticekeepDown"},
	}
	if status, _ := s.see("/healthz"); status != http.StatusOK {
		t.Errorf("%s: /healthz is %d", f.name, status)
	}
	seen := s.look()
	if seen.ready != f.ready || seen.line(f.check) == "" {
		t.Errorf("%s: %d %s", f.name, seen.ready, seen.checks)
	}
	p.during(10*time.Minute, func() { p.scrape("0", "") }) // a scrape is answered with 503
	p.expect(f.name, f.alerts...)
	f.write(t, seen)
	if err := db.Restart(); err != nil {
		t.Fatal(err)
	}
	s.await("its start", func() bool { return s.said("ready", "base_url") != "" || s.dead() })
	s.url = s.said("ready", "base_url")
	s.metrics = s.said("ready", "operations") + "/metrics"
	p.during(20*time.Minute, p.scraped(s, func() {
		if read, change := s.read(), s.seal(); read != http.StatusOK || change != http.StatusCreated {
			t.Errorf("after the start: %d %d", read, change)
		}
	}))
	p.expect("after PostgreSQL was absent")
	return p.judge()
}

// Places that the server writes to are away: those of anchors and of backups, and the mail server.
// Callers notice nothing.
func placesAway(t *testing.T) []string {
	p := newPrometheus(t, time.Minute)
	places := t.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil { // nothing answers there
		t.Fatal(err)
	}
	s := start(t, "", fmt.Sprintf(`audit: {anchor: {bucket: 'file://%[1]s/anchors'}}
mail: {from: keeper@example.org, smtp: {address: '%[2]s', security: none}}`, places, address))
	s.makeKey()
	anchors := func() (files []string) {
		err := filepath.WalkDir(places+"/anchors", func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				files = append(files, path)
			}
			return nil // files come and go while one is written
		})
		if err != nil {
			t.Fatal(err)
		}
		return files
	}
	s.await("an anchor", func() bool { return len(anchors()) > 0 })
	rename := func(from, to string) func() {
		return func() {
			if err := os.Rename(places+from, places+to); err != nil {
				t.Fatal(err)
			}
		}
	}
	away := fault{
		name: "the bucket of anchors is away", begin: rename("/anchors", "/elsewhere"), end: rename("/elsewhere", "/anchors"),
		ready: http.StatusOK, check: "[-]anchors failed (shared; stops nothing): ", read: true, change: true,
		metric: `latticekeep_audit_anchor_state{place="bucket",state="unreachable"} 1`, log: "the anchor of the audit log cannot be kept",
		alerts: []string{"LatticekeepAnchorUnreachable"},
	}
	p.suffers(s, away)
	for _, path := range anchors() {
		machine.WriteFile(t, path, []byte("not a checkpoint"))
	}
	awaitMetric(t, s, `latticekeep_audit_anchor_refusals_total{place="bucket"} 1`)
	if said := "the anchor of the audit log keeps what is none of this log"; s.said(said, "level") != "ERROR" {
		t.Errorf("the log does not say %q", said)
	}
	p.during(2*time.Minute, p.scraped(s, nil))
	p.expect("the anchor is replaced", "LatticekeepAnchorRefused")
	s.await("the check", func() bool { return s.look().line("[-]anchors failed (shared; stops nothing): bucket: refused") != "" })
	s.await("a new anchor", func() bool { return !strings.Contains(s.look().checks, "[-]") })
	p.during(70*time.Minute, p.scraped(s, nil))
	mail := fault{
		name: "the mail server is away", ready: http.StatusOK, read: true, change: true, lasts: 40 * time.Minute,
		begin: func() {
			if status, body := s.ask("/api/v2/auth/register", "", `{"email":"user@example.org","password":"a long password","tenant_name":"Canary Ltd"}`); status != http.StatusCreated {
				t.Fatalf("registering: %d %s", status, body)
			}
		},
		metric: "latticekeep_mail_queued 1", log: "a mail could not be sent", alerts: []string{"LatticekeepMailWaits"},
	}
	p.suffers(s, mail)
	fired := p.judge()

	p = newPrometheus(t, time.Minute)
	s = start(t, "", "backup: {bucket: 's3://backups?endpoint=http://"+address+"&region=eu-central-1&use_path_style=true', recipients: ["+recipient(t)+"]}")
	s.makeKey()
	s.await("the failure of a backup", func() bool { return s.said("taking a backup failed", "error") != "" })
	p.during(70*time.Minute, p.scraped(s, nil))
	p.expect("the bucket of backups is away", "LatticekeepBackupOld", "LatticekeepCommitsNotShipped")
	backups := fault{
		name: "the bucket of backups is away", ready: http.StatusOK, read: true, change: true,
		metric: `latticekeep_backup_failures_total{step="take"} 1`, log: "taking a backup failed", alerts: []string{"LatticekeepBackupOld", "LatticekeepCommitsNotShipped"},
	}
	backups.shows(s, sight{})
	return append(fired, p.judge()...)
}

// recipient returns a recipient of backups.
func recipient(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	cmd := cli.Command()
	cmd.SetArgs([]string{"backup", "keygen", "--output", filepath.Join(t.TempDir(), "identity")})
	cmd.SetOut(&out)
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out.String())
}
