package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/disktest"
	"github.com/latticekeep/latticekeep/test/kmstest"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// clinic is a deployment that has every part, and each part is well.
type clinic struct {
	*site
	kms   *kmstest.Server
	smtp  net.Listener
	token func() // writes the token that works
}

// newClinic makes the deployment; more is appended to its configuration. It has a store, and a backup
// when the settings name a bucket for them.
func newClinic(t *testing.T, more string) *clinic {
	t.Helper()
	c := &clinic{site: newSite(t, "")}
	_, _, c.roots = machine.WriteCertificateFor(t, c.dir, 1, 60*24*time.Hour)
	var err error
	c.kms, err = kmstest.NewVault()
	must(t, err)
	t.Cleanup(c.kms.Close)
	c.token = func() { machine.WriteFile(t, c.path("token"), []byte(c.kms.Token())) }
	c.token()
	c.smtp, err = net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = c.smtp.Close() })
	c.replace(`{url: "file://`+c.path("keys/kms.key")+`"}`, `{url: "`+c.kms.URL()+`", tokenFile: `+c.path("token")+`, cacheTTL: 0s}`)
	c.replace("publicURL: https://127.0.0.1:8200", "publicURL: https://127.0.0.1")
	text := readText(t, c.file) + fmt.Sprintf(`
operations: {listen: "127.0.0.1:0"}
audit: {anchor: {bucket: "file://%s"}, retention: {keep: 24h, archive: "file://%s"}}
mail: {from: a@example.org, smtp: {address: "%s", security: none}}
%s`, c.path("anchors"), c.path("archive"), c.smtp.Addr(), more)
	machine.WriteFile(t, c.file, []byte(text))
	return c
}

// look runs a command that reports, and returns the report and the exit status.
func look(t *testing.T, args ...string) (diagnosis.Report, int) {
	t.Helper()
	var out, log bytes.Buffer
	cmd := Command()
	cmd.SetArgs(append(args, "--output", "json"))
	cmd.SetOut(&out)
	cmd.SetErr(&log)
	err := cmd.ExecuteContext(t.Context())
	var r diagnosis.Report
	if json.Unmarshal(out.Bytes(), &r) != nil {
		t.Fatalf("%q: no report: %v\n%s%s", args, err, out.String(), log.String())
	}
	return r, ExitStatus(err)
}

// serve begins a new log, so that the addresses in it are those of this server.
func (c *clinic) serve() (app.Ready, func()) {
	c.t.Helper()
	c.log = machine.Log{}
	return c.site.serve()
}

// lookUntil looks until the exit status is exit: on a busy machine a check may take longer than it is
// given, and so fail. It finds no less for that, so a look that finds nothing wrong is not repeated.
func (c *clinic) lookUntil(exit int, args ...string) diagnosis.Report {
	c.t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; {
		r, status := look(c.t, args...)
		if status == exit || exit == 0 && find(r, diagnosis.Disk).Status == diagnosis.Failed { // the disk is that of the machine
			return r
		} else if status == 0 || time.Now().After(end) {
			c.t.Fatalf("%q: the status is %d, want %d: %+v", args, status, exit, r)
		}
		c.t.Logf("%q: the status is %d, want %d: %+v", args, status, exit, r)
		time.Sleep(100 * time.Millisecond) // The next look waits for the busy machine.
	}
}

func (c *clinic) stopped(exit int) diagnosis.Report {
	c.t.Helper()
	return c.lookUntil(exit, "doctor", "--config", c.file)
}

func (c *clinic) running(exit int) diagnosis.Report {
	c.t.Helper()
	return c.lookUntil(exit, "doctor", "--url", c.operations())
}

func (c *clinic) checkConfig() (diagnosis.Report, int) {
	c.t.Helper()
	return look(c.t, "server", "--config", c.file, "--check-config")
}

// find returns the line of a part that has the worst status.
func find(r diagnosis.Report, part diagnosis.Part) (line diagnosis.Line) {
	order := []diagnosis.Status{"", diagnosis.OK, diagnosis.Skipped, diagnosis.Warning, diagnosis.Failed}
	for _, l := range r.Lines {
		if l.Part == part && slices.Index(order, l.Status) > slices.Index(order, line.Status) {
			line = l
		}
	}
	return line
}

// The disk is that of the machine on which the test runs, so its line may say anything.
func wantWell(t *testing.T, name string, r diagnosis.Report, status int, skipped ...diagnosis.Part) {
	t.Helper()
	if len(r.Lines) < len(diagnosis.Parts) {
		t.Errorf("%s: %d lines for %d parts", name, len(r.Lines), len(diagnosis.Parts))
	}
	for _, l := range r.Lines {
		want := diagnosis.OK
		if slices.Contains(skipped, l.Part) {
			want = diagnosis.Skipped
		}
		if l.Part != diagnosis.Disk && l.Status != want {
			t.Errorf("%s: %s is %s: %s", name, l.Part, l.Status, l.Message)
		}
	}
	if find(r, diagnosis.Disk).Status != diagnosis.Failed && status != 0 {
		t.Errorf("%s: status %d", name, status)
	}
}

// wantLine fails unless a part has a line with these words, and says what to do.
func wantLine(t *testing.T, name string, r diagnosis.Report, part diagnosis.Part, status diagnosis.Status, words string) {
	t.Helper()
	l := find(r, part)
	if l.Status != status || !strings.Contains(l.Message, words) || (status != diagnosis.Skipped && (l.Remedy == "" || !strings.Contains(l.Runbook, "/docs/"))) {
		t.Errorf("%s: %s is %s, want %s with %q: %+v", name, part, l.Status, status, words, l)
	}
}

// await asks a running server until a part has a status.
func (c *clinic) await(name string, part diagnosis.Part, status diagnosis.Status, words ...string) diagnosis.Report {
	c.t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		r, _ := look(c.t, "doctor", "--url", c.operations())
		if l := find(r, part); l.Status == status && strings.Contains(l.Message, strings.Join(words, "")) {
			return r
		} else if time.Now().After(end) {
			c.t.Fatalf("%s: %s stays %s: %s\n%s", name, part, l.Status, l.Message, c.log.Tail())
		}
	}
}

// Each fault of a deployment has its line, whether a server runs or not, and the line goes away with
// it.
func TestDoctorSaysWhatIsWrongWithADeployment(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newClinic(t, "")
	c.replace("mail:", fmt.Sprintf("backup: {bucket: \"file://%s\", recipients: [%s]}\nmail:", c.path("backups"), newRecipient(t).text))

	// Before the first start: nothing is made, and all is well.
	before := c.tree()
	r, status := c.checkConfig()
	wantLine(t, "before the first start", r, diagnosis.Rows, diagnosis.Skipped, "there is no database yet")
	for _, l := range r.Lines {
		if l.Status == diagnosis.Failed && l.Part != diagnosis.Disk || status != 0 && find(r, diagnosis.Disk).Status != diagnosis.Failed {
			t.Errorf("before the first start: %d %+v", status, l)
		}
	}
	if after := c.tree(); !slices.Equal(before, after) {
		t.Errorf("checking the configuration has made files: %q, before %q", after, before)
	}

	_, stop := c.serve()
	c.await("the first backup", diagnosis.Backups, diagnosis.OK)
	c.await("the first checkpoint", diagnosis.Anchors, diagnosis.OK, "its checkpoint is of entry ")
	wantWell(t, "running", c.running(0), 0)
	r, status = c.checkConfig()
	wantWell(t, "checked while a server runs", r, status, diagnosis.Store, diagnosis.Clock, diagnosis.Rows, diagnosis.Chain, diagnosis.Anchors)
	wantLine(t, "asked beside a server", c.stopped(3), diagnosis.Store, diagnosis.Failed, "a server uses the database now")
	stop()
	wantWell(t, "stopped", c.stopped(0), 0)
	r, status = c.checkConfig()
	wantWell(t, "checked", r, status, diagnosis.Rows)

	certificate := func(valid time.Duration) { machine.WriteCertificateFor(t, c.dir, 2, valid) }
	moved := func(name string) (func(), func()) {
		return func() { must(t, os.Rename(c.path(name), c.path(name+".gone"))) }, func() { must(t, os.Rename(c.path(name+".gone"), c.path(name))) }
	}
	noBackups, backups := moved("backups")
	noArchive, archive := moved("archive")
	noAnchors, anchors := moved("anchors")
	faults := []struct {
		name       string
		begin, end func()
		part       diagnosis.Part
		status     diagnosis.Status
		words      string
		exit       int // of a look at the stopped deployment
	}{
		{"a wrong token", func() { machine.WriteFile(t, c.path("token"), []byte("s.wrong")) }, c.token, diagnosis.KMS, diagnosis.Failed, "the credentials for the key-management service do not work", 4},
		{"no token file", func() { must(t, os.Remove(c.path("token"))) }, c.token, diagnosis.KMS, diagnosis.Failed, "kms.tokenFile cannot be read", 3},
		{"a token for everybody", func() { must(t, os.Chmod(c.path("token"), 0o644)) }, func() { must(t, os.Chmod(c.path("token"), 0o600)) }, diagnosis.Files, diagnosis.Warning, "kms.tokenFile: others than its owner and group can open it", 0},
		{"a KMS that is down", func() { c.kms.SetDropping(true) }, func() { c.kms.SetDropping(false) }, diagnosis.KMS, diagnosis.Failed, "the key-management service cannot be reached", 3},
		{"an expired certificate", func() { certificate(-time.Minute) }, func() { certificate(60 * 24 * time.Hour) }, diagnosis.Certificates, diagnosis.Failed, "certificate has expired at", 1},
		{"a certificate that ends", func() { certificate(24 * time.Hour) }, func() { certificate(60 * 24 * time.Hour) }, diagnosis.Certificates, diagnosis.Warning, "certificate expires at", 0},
		{"no bucket for backups", noBackups, backups, diagnosis.Backups, diagnosis.Failed, "backup.bucket: the folder of the bucket does not exist", 3},
		{"no archive", noArchive, archive, diagnosis.Archive, diagnosis.Failed, "audit.retention.archive: the folder of the bucket does not exist", 3},
		{"no anchors", noAnchors, anchors, diagnosis.Anchors, diagnosis.Failed, "bucket: ", 3},
		{"no mail server", func() { must(t, c.smtp.Close()) }, func() {
			l, err := net.Listen("tcp", c.smtp.Addr().String())
			must(t, err)
			c.smtp = l
		}, diagnosis.Mail, diagnosis.Warning, "the mail server cannot be reached", 0},
	}
	for _, f := range faults {
		f.begin()
		wantLine(t, f.name+", stopped", c.stopped(f.exit), f.part, f.status, f.words)
		f.end()
	}
	_, stop = c.serve()
	for _, f := range faults {
		if f.name == "no anchors" {
			continue // a server looks every ten seconds
		}
		f.begin()
		wantLine(t, f.name+", running", c.await(f.name, f.part, f.status), f.part, f.status, f.words)
		f.end()
		c.await("after "+f.name, f.part, diagnosis.OK)
	}
	stop()

	// What is in the store: an old backup, and a damaged row.
	row := func(key string, change func(string) string) {
		s, err := offline.Open(t.Context(), offline.Location{URL: offline.BoltScheme + c.path("data")})
		must(t, err)
		must(t, s.Update(t.Context(), func(tx store.Tx) error {
			old, err := tx.Get([]byte(key))
			if err != nil {
				return err
			}
			return tx.Put([]byte(key), []byte(change(string(old))))
		}))
		must(t, s.Close())
	}
	var whole string
	row("backup/schedule", func(old string) string {
		whole = old
		var schedule map[string]any
		must(t, json.Unmarshal([]byte(old), &schedule))
		schedule["verified"] = time.Now().Add(-72 * time.Hour).UTC()
		b, err := json.Marshal(schedule)
		must(t, err)
		return string(b)
	})
	wantLine(t, "stopped", c.stopped(1), diagnosis.Backups, diagnosis.Failed, "3 days ago, and one is due every 24 hours")
	_, stop = c.serve() // the newest one is young, so none is due
	wantLine(t, "running", c.await("an old backup", diagnosis.Backups, diagnosis.Failed), diagnosis.Backups, diagnosis.Failed, "3 days ago, and one is due every 24 hours")
	stop()
	row("backup/schedule", func(string) string { return whole })
	row("tenant/system", func(old string) string {
		whole = old
		return old[:5] + string([]byte{old[5] ^ 1}) + old[6:]
	})
	wantLine(t, "stopped", c.stopped(1), diagnosis.Rows, diagnosis.Failed, `"tenant/system": `)
	if out, err := run(t, "doctor", "--config", c.file, "--explain", "tenant/system"); err != nil || !strings.Contains(out, "wrong: ") {
		t.Error(out, err)
	}
	row("tenant/system", func(string) string { return whole })
	wantWell(t, "after all", c.stopped(0), 0)
}

// tree lists all files below the folder of the site.
func (c *clinic) tree() (all []string) {
	c.t.Helper()
	must(c.t, filepath.WalkDir(c.dir, func(path string, _ os.DirEntry, err error) error {
		all = append(all, path)
		return err
	}))
	return all
}

// An older copy of the database is told by the anchor, whether it is served or not.
func TestDoctorFindsAnOlderCopyOfTheDatabase(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newClinic(t, "")
	_, stop := c.serve()
	c.await("the first checkpoint", diagnosis.Anchors, diagnosis.OK, "its checkpoint is of entry ")
	stop()
	old := readText(t, c.path("data/"+offline.DatabaseFile))
	anchored := func() string {
		files, err := filepath.Glob(c.path("anchors/anchor/*/checkpoint"))
		if err != nil || len(files) == 0 {
			return ""
		}
		return readText(t, files[0])
	}
	line, stop := c.serve()
	before := anchored()
	c.ask(c.client(), "POST", line.BaseURL+"/api/v2/system/tenants", c.systemKey(), `{"name":"shop"}`)
	for end := time.Now().Add(time.Minute); anchored() == before; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the anchor stays as it is")
		}
	}
	stop()
	machine.WriteFile(t, c.path("data/"+offline.DatabaseFile), []byte(old))
	wantLine(t, "stopped", c.stopped(1), diagnosis.Anchors, diagnosis.Failed, "and the head is entry ")
	_, stop = c.serve()
	r := c.running(1)
	wantLine(t, "running", r, diagnosis.Anchors, diagnosis.Failed, "the database is an older copy, or another one")
	wantLine(t, "running", r, diagnosis.Chain, diagnosis.Failed, "")
	stop()
}

// A full disk is told by a server that serves from its reserve, and without a server.
func TestDoctorFindsAFullDisk(t *testing.T) {
	c := newClinic(t, "")
	volume := disktest.Mount(t, disktest.Tmpfs, 48<<20)
	c.replace("dataDir: "+c.path("data"), "dataDir: "+volume)
	line, stop := c.serve()
	free := disktest.Fill(t, volume)
	c.ask(c.client(), "POST", line.BaseURL+"/api/v2/system/tenants", c.systemKey(), `{"name":"shop"}`)
	wantLine(t, "running", c.await("a full disk", diagnosis.Disk, diagnosis.Failed), diagnosis.Disk, diagnosis.Failed, " free (0 %) for dataDir")
	stop()
	wantLine(t, "stopped", c.stopped(1), diagnosis.Disk, diagnosis.Failed, " %) for dataDir") // the write-ahead log has gone
	free()
}

// PostgreSQL that is down is told with a server that runs, with one that waits for it, and without one.
func TestDoctorFindsThatPostgreSQLIsDown(t *testing.T) {
	t.Parallel() // it mostly waits
	server := pgtest.Start(t)
	c := newClinic(t, "store: {url: '"+server.URL()+"'}\n")
	c.replace("dataDir: "+c.path("data")+"\n", "compliance: {reports: 'file://"+c.path("reports")+"'}\n")
	r, status := c.checkConfig()
	if l := find(r, diagnosis.PostgreSQL); status != 0 && find(r, diagnosis.Disk).Status != diagnosis.Failed || !strings.Contains(l.Message, "has no tables yet") {
		t.Errorf("before the first start: %d %+v", status, l)
	}
	_, stop := c.serve()
	c.await("the first checkpoint", diagnosis.Anchors, diagnosis.OK, "its checkpoint is of entry ")
	r = c.running(0)
	for _, part := range []diagnosis.Part{diagnosis.PostgreSQL, diagnosis.Store, diagnosis.Replicas, diagnosis.Clock, diagnosis.KMS} {
		if l := find(r, part); l.Status != diagnosis.OK {
			t.Errorf("running: %+v", l)
		}
	}
	if l := find(c.stopped(0), diagnosis.Rows); l.Status != diagnosis.OK { // PostgreSQL has many readers
		t.Errorf("beside a server: %+v", l)
	}
	must(t, server.Kill())
	wantLine(t, "running", c.await("PostgreSQL is down", diagnosis.PostgreSQL, diagnosis.Failed), diagnosis.PostgreSQL, diagnosis.Failed, "")
	r = c.stopped(3)
	wantLine(t, "stopped", r, diagnosis.PostgreSQL, diagnosis.Failed, "store.url: ")
	wantLine(t, "stopped", r, diagnosis.Store, diagnosis.Skipped, "PostgreSQL cannot be used")
	if strings.Contains(fmt.Sprint(r), "password") && strings.Contains(fmt.Sprint(r), server.URL()) {
		t.Error("the report has the URL of the database")
	}
	must(t, server.Restart())
	c.await("PostgreSQL is back", diagnosis.PostgreSQL, diagnosis.OK)
	stop()
}

// An entry of the future tells of a clock that was set back, or was wrong.
func TestDoctorFindsAnEntryOfTheFuture(t *testing.T) {
	dir := t.TempDir()
	data, keys := filepath.Join(dir, "data"), filepath.Join(dir, "keys")
	must(t, os.Mkdir(keys, 0o700))
	ctx, stop := context.WithCancel(t.Context())
	ready := make(said, 100)
	done := make(chan error, 1)
	go func() {
		done <- app.Dev(ctx, app.DevConfig{Listen: "127.0.0.1:0", DataDir: data, Stdout: ready, Stderr: new(machine.Log), Now: func() time.Time { return time.Now().Add(26 * time.Hour) }})
	}()
	ready.await(t, "base_url")
	stop()
	must(t, <-done)
	must(t, os.Rename(filepath.Join(data, offline.KMSKeyFileName), filepath.Join(keys, "kms.key")))
	c := &clinic{site: &site{t: t, dir: dir, file: filepath.Join(dir, "config.yaml")}}
	machine.WriteFile(t, c.file, fmt.Appendf(nil, `
listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
dataDir: %s
kms: {url: "file://%s/kms.key"}
systemKeyFile: %s/system.key
operations: {listen: "127.0.0.1:0"}
registration: {closed: true}
`, data, keys, dir))
	wantLine(t, "stopped", c.stopped(1), diagnosis.Clock, diagnosis.Failed, "25 hours in the future: the clock was set back")
	_, stop = c.serve()
	r := c.running(1)
	wantLine(t, "running", r, diagnosis.Clock, diagnosis.Failed, "25 hours in the future: the clock was set back")
	stop()
}

// A configuration with several faults has a line for each, with where it stands.
func TestCheckConfigSaysAllThatIsWrongAtOnce(t *testing.T) {
	s := newSite(t, "lisen: x\nrate: {v1: 0}\nsealing: {keyLifetime: 5 min}\n")
	t.Setenv("LATTICEKEEP_LOG_LEVEL", "loud")
	t.Setenv("LATTICEKEEP_NONE", "x")
	r, status := look(t, "server", "--config", s.file, "--check-config")
	if status != 2 {
		t.Errorf("status %d", status)
	}
	var all []string
	for _, l := range r.Lines {
		if l.Part != diagnosis.Configuration || l.Status != diagnosis.Failed {
			t.Errorf("%+v", l)
		}
		all = append(all, l.Message)
	}
	text := strings.Join(all, "\n")
	for _, want := range []string{"line 8: there is no key lisen", "line 9: rate.v1: give at least 1", "line 10: `5 min` is not a duration", "LATTICEKEEP_LOG_LEVEL: log.level: give ", "the variable LATTICEKEEP_NONE", "mail.smtp.address: name the mail server"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if len(all) != 6 {
		t.Errorf("%d lines:\n%s", len(all), text)
	}
	if out, err := run(t, "server", "--config", s.file); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("a start says something else: %v %s", err, out)
	}
}

// Doctor asks the server of a configuration on the address for operations, and as text puts the worst
// first.
func TestDoctorAsksTheServerOfAConfiguration(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	operations := l.Addr().String()
	must(t, l.Close())
	s := newSite(t, closed+"operations: {listen: '"+operations+"'}\n")
	line, stop := s.serve()
	out, err := run(t, "doctor", "--config", s.file)
	if err != nil || !strings.HasPrefix(out, "warning") || !strings.Contains(out, "\nok ") || !strings.Contains(out, "the scan of ") && !strings.Contains(out, "the first scan of all rows") {
		t.Errorf("%v\n%s", err, out)
	}
	if strings.Contains(out, s.systemKey()) || strings.Contains(out, "-----BEGIN") {
		t.Error("the report has a secret")
	}
	if _, err := run(t, "doctor", "--url", line.BaseURL); ExitStatus(err) != 3 { // its certificate is not trusted
		t.Errorf("without a connection: %d %v", ExitStatus(err), err)
	}
	stop()
	for _, wrong := range [][]string{
		{"doctor"}, {"doctor", "--config", s.file, "--data-dir", s.path("data")}, {"doctor", "--config", s.file, "--kms-url", "file:///x"}, {"doctor", "--url", "http://127.0.0.1:1", "--explain", "x"},
		{"doctor", "--data-dir", s.path("data"), "--output", "json"}, {"doctor", "--config", s.file, "--output", "xml"}, {"server", "--check-config", "--dev"}, {"server", "--config", s.file, "--output", "json"},
		{"doctor", "--config", s.path("none.yaml")},
	} {
		if out, err := run(t, wrong...); ExitStatus(err) != 2 {
			t.Errorf("%q: %d %v %s", wrong, ExitStatus(err), err, out)
		}
	}
}
