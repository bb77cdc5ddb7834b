package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/test/logtest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// audited is a running server with the output of its first start.
type audited struct {
	*running
	dir, chain, identity, systemKey string
}

func startAudited(t *testing.T) *audited {
	t.Helper()
	stderr := make(said, 100_000)
	a := &audited{dir: filepath.Join(t.TempDir(), "data")}
	a.running = startWith(t, app.DevConfig{DataDir: a.dir, Stderr: stderr})
	text := stderr.await(t, "SYSTEM_KEY=")
	for pattern, to := range map[string]*string{`identity: (\w{64})`: &a.identity, `chain: (\w{64})`: &a.chain, `SYSTEM_KEY=(lk_live_\w+)`: &a.systemKey} {
		found := regexp.MustCompile(pattern).FindStringSubmatch(text)
		if found == nil {
			t.Fatalf("%s is not in %s", pattern, text)
		}
		*to = found[1]
	}
	return a
}

// use creates n entries of the tenant, besides that of the credential which it reads.
func (a *audited) use(n int) {
	a.t.Helper()
	a.read(a.sealed("s3cret"), n)
}

// audit runs an audit command with the tenant's key.
func (a *audited) audit(args ...string) (string, error) {
	return run(a.t, append(append([]string{"audit"}, args...), "--url", a.BaseURL, "--api-key", a.APIKey)...)
}

func (a *audited) mustAudit(args ...string) string {
	a.t.Helper()
	out, err := a.audit(args...)
	if err != nil {
		a.t.Fatalf("%v: %v", args, err)
	}
	return out
}

// middle returns a proxy between client and server that alters answers.
func middle(t *testing.T, base string, alter func(path string, body []byte) []byte) *httptest.Server {
	t.Helper()
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(u)
	proxy.ModifyResponse = func(r *http.Response) error {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		_ = r.Body.Close()
		if body = alter(r.Request.URL.Path, body); body == nil {
			r.StatusCode, body = http.StatusNotFound, []byte(`{"success":false,"error":{"code":404,"message":"gone"}}`)
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		r.Header.Set("Content-Length", fmt.Sprint(len(body)))
		return nil
	}
	s := httptest.NewServer(proxy)
	t.Cleanup(s.Close)
	return s
}

// copyData copies a data directory.
func copyData(t *testing.T, to, from string) {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(to, offline.KMSKeyFileName), 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

// withoutEnd cuts off the closing line. checkpointPrefix begins the last line of an export.
const checkpointPrefix = `{"checkpoint":`

func withoutEnd(text string) string {
	return text[:strings.LastIndex(text, checkpointPrefix)]
}

func TestATenantsExportGrowsAndIsVerified(t *testing.T) {
	t.Parallel() // it mostly waits
	a := startAudited(t)
	a.use(150) // more than one page
	file, pem := filepath.Join(t.TempDir(), "log.jsonl"), filepath.Join(t.TempDir(), "audit.pem")
	if out := a.mustAudit("export", "--output", file, "--public-key-out", pem, "--progress"); !strings.Contains(out, "entries written") {
		t.Error("no progress:", out)
	}
	verified := func(file string) string {
		t.Helper()
		return mustRun(t, "audit", "verify", "--file", file, "--public-key", pem, "--fingerprint", a.chain)
	}
	if out := verified(file); !strings.Contains(out, "the log of tenant "+string(a.TenantID)) || !strings.Contains(out, "the pinned one") {
		t.Error(out)
	}
	first := readText(t, file)
	if _, err := os.Stat(file + ".part"); err == nil {
		t.Error("what was fetched is still there")
	}

	a.use(120)
	a.mustAudit("export", "--output", file)
	second := readText(t, file)
	verified(file)
	if !strings.HasPrefix(second, withoutEnd(first)) || len(second) < len(first)+100*1000 {
		t.Error("the export did not grow behind what was there")
	}
	// A run ended in the middle of a line.
	a.use(1)
	for _, cut := range []int{len(withoutEnd(second)) - 100, len(second) - 10, len(first) - 1, 3} {
		logtest.WriteText(t, file, second[:cut])
		a.mustAudit("export", "--output", file)
		verified(file)
		if got := readText(t, file); !strings.HasPrefix(got, withoutEnd(second)) {
			t.Errorf("cut at %d: the export is not what it would have been", cut)
		}
	}
	// Standard output gets the same export.
	out := a.mustAudit("export")
	if !strings.HasPrefix(out, withoutEnd(second)) || !strings.Contains(out, checkpointPrefix) {
		t.Error("standard output has something else")
	}

	// Entries of another log, or of the whole log, are never appended.
	other := startAudited(t)
	other.use(1)
	before := readText(t, file)
	for says, args := range map[string][]string{
		"does not go on from": {"--url", other.BaseURL, "--api-key", other.APIKey},
		"another part":        {"--url", a.BaseURL, "--api-key", a.systemKey, "--whole"},
	} {
		_, err := run(t, append([]string{"audit", "export", "--output", file}, args...)...)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v", args, err)
		}
		if readText(t, file) != before {
			t.Fatal("the export was changed")
		}
		_ = os.Remove(file + ".part")
	}
	junk := logtest.WriteText(t, filepath.Join(t.TempDir(), "junk"), "something else\n")
	if _, err := a.audit("export", "--output", junk); err == nil || readText(t, junk) != "something else\n" {
		t.Error("a file that is no export:", err)
	}
}

func TestATenantsExportThatWasBrokenOffGoesOn(t *testing.T) {
	t.Parallel() // it mostly waits
	a := startAudited(t)
	a.use(350)
	file := filepath.Join(t.TempDir(), "log.jsonl")
	var mu sync.Mutex
	pages, allowed := 0, 2
	m := middle(t, a.BaseURL, func(path string, body []byte) []byte {
		mu.Lock()
		defer mu.Unlock()
		if strings.HasSuffix(path, "/audit/logs") {
			if pages++; pages > allowed {
				return nil
			}
		}
		return body
	})
	if _, err := run(t, "audit", "export", "--url", m.URL, "--api-key", a.APIKey, "--output", file); err == nil {
		t.Fatal("the server was gone, and nobody noticed")
	}
	part := readText(t, file+".part")
	if strings.Count(part, "\n") != 2*101 {
		t.Fatalf("%d lines of two pages were kept", strings.Count(part, "\n"))
	}
	logtest.WriteText(t, file+".part", part+`{"actor":{"id":"torn`)
	a.use(3) // entries that this run does not get
	pages, allowed = 0, 100
	if _, err := run(t, "audit", "export", "--url", m.URL, "--api-key", a.APIKey, "--output", file); err != nil {
		t.Fatal(err)
	}
	if pages != 2 { // 352 entries and those of reading them
		t.Errorf("%d pages were fetched for the rest", pages)
	}
	report := mustRun(t, "audit", "verify", "--file", file, "--fingerprint", a.chain)
	if !strings.Contains(report, "the log of tenant") {
		t.Error(report)
	}
	// A part of another log is detected.
	other := startAudited(t)
	other.use(150)
	logtest.WriteText(t, file+"2.part", part)
	if _, err := run(t, "audit", "export", "--url", other.BaseURL, "--api-key", other.APIKey, "--output", file+"2"); err == nil || !strings.Contains(err.Error(), "remove the .part file") {
		t.Error(err)
	}
}

func TestTheWholeLogIsExportedByASystemKeyAndByADataDirectory(t *testing.T) {
	a := startAudited(t)
	a.use(20)
	file := filepath.Join(t.TempDir(), "log.jsonl")
	whole := []string{"audit", "export", "--url", a.BaseURL, "--api-key", a.systemKey, "--whole", "--output", file}
	mustRun(t, whole...)
	first := readText(t, file)
	if out := mustRun(t, "audit", "verify", "--file", file, "--fingerprint", a.chain); !strings.Contains(out, "ok: the whole log") {
		t.Error(out)
	}
	note := logtest.WriteText(t, filepath.Join(t.TempDir(), "note"), a.mustAudit("checkpoint"))
	a.use(20)
	mustRun(t, append(whole, "--progress")...)
	second := readText(t, file)
	if out := mustRun(t, "audit", "verify", "--file", file, "--fingerprint", a.chain, "--since", note); !strings.Contains(out, "since: the log holds all") {
		t.Error(out)
	}
	if !strings.HasPrefix(second, withoutEnd(first)) {
		t.Error("the export did not grow behind what was there")
	}
	logtest.WriteText(t, file, second[:len(first)-50])
	mustRun(t, whole...)
	if got := readText(t, file); !strings.HasPrefix(got, withoutEnd(second)) {
		t.Error("the export did not go on from what was there")
	}
	if _, err := a.audit("export", "--whole"); err == nil || !strings.Contains(err.Error(), "403") {
		t.Error("a tenant's key exports the whole log:", err)
	}
	for _, args := range [][]string{{}, {"--since", note}, {"--from", "5"}, {"--from", "5", "--to", "9"}} {
		args = append([]string{"audit", "verify", "--url", a.BaseURL, "--api-key", a.systemKey, "--whole", "--fingerprint", a.chain}, args...)
		if out, err := run(t, args...); err != nil || !strings.Contains(out, "the pinned one") {
			t.Errorf("%v: %v %s", args, err, out)
		}
	}
	a.end()

	// The export of the data directory continues the server's export.
	mustRun(t, "audit", "export", "--data-dir", a.dir, "--output", file)
	if out := mustRun(t, "audit", "verify", "--file", file); !strings.Contains(out, "ok: the whole log") || !strings.HasPrefix(readText(t, file), withoutEnd(second)) {
		t.Error(out)
	}
	key := filepath.Join(t.TempDir(), "kms.key")
	if err := os.Rename(filepath.Join(a.dir, offline.KMSKeyFileName), key); err != nil {
		t.Fatal(err)
	}
	if out := mustRun(t, "audit", "export", "--data-dir", a.dir, "--kms-key-file", key); out != readText(t, file) && withoutEnd(out) != withoutEnd(readText(t, file)) {
		t.Error("standard output has something else")
	}
	for _, args := range [][]string{{"--file", file}, {"--data-dir", a.dir}} {
		if out := mustRun(t, append([]string{"audit", "fingerprint"}, args...)...); out != a.chain+"\n" {
			t.Errorf("the fingerprint of %v is %s", args, out)
		}
		if out := mustRun(t, append([]string{"audit", "verify", "--from", "3", "--to", "7", "--fingerprint", a.chain}, args...)...); !strings.Contains(out, "the pinned one") {
			t.Error(out)
		}
		if _, err := run(t, append([]string{"audit", "verify", "--from", "3", "--to", "7", "--fingerprint", strings.Repeat("0", 64)}, args...)...); err == nil || !strings.Contains(err.Error(), "another log") {
			t.Error(err)
		}
		for _, part := range [][]string{{"--from", "3", "--to", "7"}, {"--to", "7"}} {
			if out := mustRun(t, append(append([]string{"audit", "verify"}, args...), part...)...); !strings.Contains(out, "head: 7 ") || !strings.Contains(out, "self-consistent only") {
				t.Errorf("%v %v: %s", args, part, out)
			}
		}
	}
	if out := mustRun(t, "audit", "verify", "--data-dir", a.dir, "--since", note); !strings.Contains(out, "since: the log holds all") {
		t.Error(out)
	}
}

func TestVerifyingAServerHoldsItToItsCheckpoint(t *testing.T) {
	t.Parallel() // it mostly waits
	a := startAudited(t)
	a.use(30)
	note := logtest.WriteText(t, filepath.Join(t.TempDir(), "note"), a.mustAudit("checkpoint"))
	a.use(130)
	out := a.mustAudit("verify", "--fingerprint", a.chain, "--since", note)
	for _, want := range []string{"the log of tenant " + string(a.TenantID), "checkpoint: entry ", "since: the log holds all", "the pinned one"} {
		if !strings.Contains(out, want) {
			t.Errorf("it does not say %q: %s", want, out)
		}
	}
	if out := a.mustAudit("verify", "--from", "9", "--fingerprint", a.chain); !strings.Contains(out, "the pinned one") {
		t.Error(out)
	}
	if out := a.mustAudit("fingerprint"); out != a.chain+"\n" {
		t.Error(out)
	}
	later := logtest.WriteText(t, filepath.Join(t.TempDir(), "later"), a.mustAudit("checkpoint"))
	other := startAudited(t)
	other.use(1)
	foreign := logtest.WriteText(t, filepath.Join(t.TempDir(), "foreign"), other.mustAudit("checkpoint"))
	if _, err := a.audit("verify", "--since", foreign); err == nil || !strings.Contains(err.Error(), "the older checkpoint") {
		t.Error("a checkpoint of another log:", err)
	}
	otherCheckpoint, _ := json.Marshal(readText(t, foreign))
	older, _ := json.Marshal(readText(t, note))

	answer := func(body []byte, change func(map[string]any)) []byte {
		var fields map[string]any
		if err := json.Unmarshal(body, &fields); err != nil {
			t.Error(err)
		}
		change(fields)
		b, _ := json.Marshal(fields)
		return b
	}
	type lie struct {
		path   string
		change func(map[string]any)
		args   []string
		says   string
	}
	entry := func(fields map[string]any, n int) map[string]any {
		return fields["entries"].([]any)[n].(map[string]any)
	}
	for name, l := range map[string]lie{
		"another log's checkpoint":         {"/audit/checkpoint", func(f map[string]any) { f["checkpoint"] = json.RawMessage(otherCheckpoint) }, nil, "not signed with the log's key"},
		"an old checkpoint said to be new": {"/audit/checkpoint", func(f map[string]any) { f["checkpoint"] = json.RawMessage(older) }, nil, "does not cover it"},
		"another entry's proof":            {"/proof/inclusion", func(f map[string]any) { f["leaf_index"] = f["leaf_index"].(float64) - 1 }, nil, "does not prove"},
		"an altered proof":                 {"/proof/inclusion", func(f map[string]any) { f["path"] = append(f["path"].([]any)[1:], f["path"].([]any)[0]) }, nil, "does not prove"},
		"no consistency":                   {"/proof/consistency", func(f map[string]any) { f["path"] = f["path"].([]any)[1:] }, []string{"--since", note}, "does not go on from the older checkpoint"},
		"an altered entry":                 {"/audit/logs", func(f map[string]any) { entry(f, 3)["outcome"] = "denied" }, nil, "the hash is not that of the entry"},
		"a missing entry": {"/audit/logs", func(f map[string]any) {
			all := f["entries"].([]any)
			f["entries"] = append(all[:7:7], all[8:]...)
		}, nil, "an entry of this tenant is missing"},
		"a repeated entry": {"/audit/logs", func(f map[string]any) {
			all := f["entries"].([]any)
			f["entries"] = append(all[:7:7], all[6:]...)
		}, nil, "newest first"},
	} {
		t.Run(name, func(t *testing.T) {
			m := middle(t, a.BaseURL, func(path string, body []byte) []byte {
				if !strings.HasSuffix(path, l.path) {
					return body
				}
				return answer(body, l.change)
			})
			args := append([]string{"audit", "verify", "--url", m.URL, "--api-key", a.APIKey}, l.args...)
			_, err := run(t, args...)
			if broken, ok := audit.IsBroken(err); !ok || !strings.Contains(broken.Reason, l.says) {
				t.Errorf("%v, want %q", err, l.says)
			}
		})
	}

	// The server's log is shorter than its earlier checkpoint, as after a start from an older copy.
	dir := filepath.Join(t.TempDir(), "older")
	a.end()
	copyData(t, dir, a.dir)
	out = mustRun(t, "audit", "verify", "--data-dir", dir)
	var head uint64
	if _, err := fmt.Sscanf(out[strings.Index(out, "head: "):], "head: %d", &head); err != nil {
		t.Fatal(err)
	}
	again := start(t, a.dir)
	status, _ := again.call("GET", "/api/v2/vault/list", "")
	if status != http.StatusOK {
		t.Fatal(status)
	}
	newest := logtest.WriteText(t, filepath.Join(t.TempDir(), "newest"), again.checkpointAfter(head))
	again.end()
	if out := mustRun(t, "audit", "verify", "--data-dir", a.dir, "--since", newest); !strings.Contains(out, "since: the log holds all") {
		t.Error(out)
	}
	if _, err := run(t, "audit", "verify", "--data-dir", dir, "--since", newest); err == nil || !strings.Contains(err.Error(), "the log was cut") {
		t.Error("a data directory that was cut:", err)
	}
	forked := start(t, dir)
	if _, err := run(t, "audit", "verify", "--url", forked.BaseURL, "--api-key", forked.APIKey, "--since", newest); err == nil {
		t.Error("a server that was started from an older copy")
	} else if _, ok := audit.IsBroken(err); !ok {
		t.Error(err)
	}
	if _, err := run(t, "audit", "verify", "--url", forked.BaseURL, "--api-key", forked.APIKey, "--since", later); err != nil {
		t.Error("what both know:", err)
	}
}

// checkpointAfter returns the first checkpoint that covers an entry after the one with a sequence. A
// server signs its checkpoints up to a second after the entries.
func (r *running) checkpointAfter(sequence uint64) string {
	r.t.Helper()
	patience := time.After(time.Minute)
	for {
		signed := mustRun(r.t, "audit", "checkpoint", "--url", r.BaseURL, "--api-key", r.APIKey)
		c, err := audit.PeekCheckpoint([]byte(signed))
		if err != nil {
			r.t.Fatal(err)
		}
		if c.Sequence > sequence {
			return signed
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-patience:
			r.t.Fatalf("no checkpoint covers an entry after %d", sequence)
		}
	}
}

func TestARollbackIsAcceptedFromTheCommandLine(t *testing.T) {
	t.Parallel() // it mostly waits
	s := &site{t: t, dir: t.TempDir()}
	s.file = s.path("config.yaml")
	if err := os.Mkdir(s.path("keys"), 0o700); err != nil {
		t.Fatal(err)
	}
	anchors := (&url.URL{Scheme: "file", Path: s.path("anchors")}).String()
	machine.WriteFile(t, s.file, fmt.Appendf(nil, `
listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
dataDir: %s
kms: {url: "file://%s"}
systemKeyFile: %s
registration: {closed: true}
audit: {anchor: {bucket: %q}}
`, s.path("data"), s.path("keys/kms.key"), s.path("system.key"), anchors))
	server, stop := s.serve()
	key := s.systemKey()
	with := func(args ...string) []string { return append(args, "--url", server.BaseURL, "--api-key", key) }
	if _, err := run(t, with("audit", "accept-rollback", "--reason", "none")...); err == nil || !strings.Contains(err.Error(), "409") {
		t.Error("a rollback that was none:", err)
	}
	if _, err := run(t, with("audit", "accept-rollback")...); err == nil || !strings.Contains(err.Error(), "reason") {
		t.Error("without a reason:", err)
	}
	stop()
	copyData(t, s.path("copy"), s.path("data"))
	server, stop = s.serve()
	for _, name := range []string{"one", "two"} {
		mustRun(t, with("tenant", "create", name)...)
	}
	log := mustRun(t, with("audit", "export", "--whole")...)
	note := logtest.WriteText(t, s.path("note"), logtest.NoteOf(t, strings.SplitAfter(strings.TrimSuffix(log, "\n"), "\n")))
	stop()
	// The server anchors its newest checkpoint within ten seconds.
	bucket, err := objects.Open(t.Context(), anchors, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	chain := strings.Split(readText(t, note), "/")[2]
	if err := errors.Join(bucket.Put(t.Context(), "anchor/"+chain+"/checkpoint", []byte(readText(t, note))), bucket.Close()); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(s.path("data")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(s.path("copy"), s.path("data")); err != nil {
		t.Fatal(err)
	}
	server, stop = s.serve()
	if _, err := run(t, with("tenant", "create", "three")...); err == nil || !strings.Contains(err.Error(), "503") {
		t.Fatal("a database that is behind its anchor is written to:", err)
	}
	out := mustRun(t, with("audit", "accept-rollback", "--reason", "the disk failed")...)
	lost := regexp.MustCompile(`^entries (\d+) to (\d+) are lost\nepoch 2 begins with entry (\d+)\n`).FindStringSubmatch(out)
	if lost == nil {
		t.Fatal(out)
	}
	mustRun(t, with("tenant", "create", "three")...)
	out = mustRun(t, with("audit", "verify", "--whole")...)
	if want := fmt.Sprintf("rollback: entry %s accepts that entries %s to %s were lost, and begins epoch 2\n", lost[3], lost[1], lost[2]); !strings.Contains(out, want) {
		t.Errorf("no %q in %s", want, out)
	}
	_, err = run(t, with("audit", "verify", "--whole", "--since", note)...)
	if broken, ok := audit.IsBroken(err); !ok || fmt.Sprint(broken.Sequence) != lost[1] {
		t.Error("what was lost is not told:", err)
	}
	if _, err := run(t, with("audit", "verify", "--since", note)...); err == nil {
		t.Error("what was lost is not told by the tree")
	}
	mustRun(t, with("audit", "verify")...)
	stop()
}

func TestALogWithAnArchiveIsVerifiedWhole(t *testing.T) {
	l := logtest.New(t, writer.SignBatches)
	folder := (&url.URL{Scheme: "file", Path: filepath.Join(t.TempDir(), "archive")}).String()
	bucket, err := objects.Open(t.Context(), folder, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer bucket.Close()
	var notes []string
	entries := 0
	for range 3 {
		l.Fill()
		notes = append(notes, logtest.WriteText(t, filepath.Join(t.TempDir(), "note"), logtest.NoteOf(t, l.Export(0))))
		l.Now = l.Now.Add(72 * time.Hour)
		cutter := keeper.Cutter{Log: l.Audit, Reader: reader.New(l.Audit, guard.New(l.Audit)), Archive: bucket, Keep: 24 * time.Hour, Now: func() time.Time { return l.Now }}
		n, err := cutter.Run(t.Context())
		if err != nil || n == 0 {
			t.Fatal("nothing was cut:", n, err)
		}
		entries += int(n)
	}
	l.Fill()
	lines := l.Export(0)
	entries += len(lines) - 1
	file := logtest.WriteText(t, filepath.Join(t.TempDir(), "log.jsonl"), strings.Join(lines, ""))
	if err := l.Store.Close(); err != nil {
		t.Fatal(err)
	}
	whole := fmt.Sprintf("ok: the whole log: %d entries", entries)
	for _, of := range [][]string{{"--data-dir", l.Dir}, {"--file", file}} {
		args := append([]string{"audit", "verify", "--archive", folder, "--fingerprint", l.Fingerprint()}, of...)
		if out, err := run(t, args...); err != nil || !strings.Contains(out, whole) || !strings.Contains(out, "the pinned one") {
			t.Errorf("%v: %v, want %q: %s", of, err, whole, out)
		}
		for _, note := range notes {
			if out, err := run(t, append(args, "--since", note)...); err != nil || !strings.Contains(out, "since: ") {
				t.Errorf("%v since %s: %v %s", of, note, err, out)
			}
		}
		if _, err := run(t, append(args, "--fingerprint", strings.Repeat("0", 64))...); err == nil {
			t.Error("another log's fingerprint")
		}
	}
	if out := mustRun(t, "audit", "verify", "--data-dir", l.Dir); !strings.Contains(out, "behind what is archived") {
		t.Error(out)
	}
	if _, err := run(t, "audit", "verify", "--file", file); err == nil || !strings.Contains(err.Error(), "--archive") {
		t.Error("an export that begins in the middle:", err)
	}
	segments, err := filepath.Glob(filepath.Join(strings.TrimPrefix(folder, "file://"), "audit", logtest.ChainID, "*"))
	if err != nil || len(segments) < 3 {
		t.Fatal(segments, err)
	}
	content := readText(t, segments[1])
	logtest.WriteText(t, segments[1], content[:200]+string(content[200]^1)+content[201:])
	for _, of := range [][]string{{"--data-dir", l.Dir}, {"--file", file}} {
		if _, err := run(t, append([]string{"audit", "verify", "--archive", folder}, of...)...); err == nil {
			t.Errorf("%v with a segment that was altered", of)
		} else if _, ok := audit.IsBroken(err); !ok {
			t.Errorf("%v: %v", of, err)
		}
	}
}

func TestTheCommandsOfTheLogSayWhatIsWrong(t *testing.T) {
	testscript.Run(t, testscript.Params{Files: []string{filepath.Join("testdata", "script", "admin.txt"), filepath.Join("testdata", "script", "audit.txt")}})
}
