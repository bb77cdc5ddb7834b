package cli

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/kmsplugin"
	"github.com/latticekeep/latticekeep/internal/nodelog"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// shipsItsLog has a deployment record the log of the node, twice.
func (s *apiServer) shipsItsLog(t *testing.T) {
	t.Helper()
	r := start(t, t.TempDir())
	ship := func() string {
		return mustRun(t, "kms-plugin", "ship-log", "--dir", s.dir, "--url", r.BaseURL, "--api-key", r.APIKey)
	}
	wantOutput(t, ship(), "has recorded entries 1 to ")
	wantOutput(t, ship(), "the server has all entries")
	status, log := r.call(http.MethodGet, "/api/v2/audit/logs?event_type=NODE_LOG_RECORDED", "")
	entries, _ := log["entries"].([]any)
	if status != http.StatusOK || len(entries) != 1 {
		t.Fatalf("%d: %d records of the log", status, len(entries))
	}
	recorded := entries[0].(map[string]any)["attributes"].(map[string]any)
	out := mustRun(t, "kms-plugin", "verify-log", "--dir", s.dir)
	for _, name := range []string{"first_hash", "last_hash", "log_id", "to"} {
		wantOutput(t, out, recorded[name].(string))
	}
}

// losesItsKeySet loses the directory of the node and the KMS key, and goes on with the backup.
func (s *apiServer) losesItsKeySet(t *testing.T, kek string) {
	t.Helper()
	identity, file := s.dir+".identity", s.dir+".age"
	recipient := mustRun(t, "backup", "keygen", "--output", identity)
	recipient = recipient[strings.Index(recipient, "age1pq1"):]
	recipient = strings.Fields(recipient)[0]
	mustRun(t, "kms-plugin", "backup", "--dir", s.dir, "--recipient", recipient, "--output", file)
	before := s.currentKeyID(t)
	must(t, os.RemoveAll(s.dir))
	must(t, os.Remove(kek))

	must(t, kms.CreateLocal(kek+".other"))
	mustRun(t, "kms-plugin", "restore", "--dir", s.dir, "--node", "cp-1", "--kms", "file://"+kek+".other", "--identity-file", identity, file)
	if after := s.currentKeyID(t); after != before {
		t.Errorf("the restored key set has key id %s, and etcd names %s", after, before)
	}
	s.startPlugin(t)
	must(t, s.plane.RestartAPIServer())
	s.awaitReady(t)
	s.reads(t, "new", "staple")
	s.kubectl("", "create", "secret", "generic", "after", "--from-literal=password=loss")
	s.reads(t, "after", "loss")
}

// Promise: what one API server writes, the other reads, through a whole change of keys.
func TestTwoAPIServersShareAKeySet(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs a Kubernetes control plane")
	}
	t.Parallel()
	dir, err := os.MkdirTemp("", "latticekeep-kms-") // short, for the path of the socket
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	kek := filepath.Join(dir, "kms.key")
	must(t, kms.CreateLocal(kek))
	servers := []*apiServer{{}, {}}
	configs := []string{"", ""}
	for i, s := range servers {
		name := fmt.Sprintf("cp-%d", i+1)
		*s = apiServer{program: programFor(t), dir: filepath.Join(dir, name), socket: filepath.Join(dir, name+".sock")}
		configs[i] = filepath.Join(dir, name+".yaml")
		machine.WriteFile(t, configs[i], fmt.Appendf(nil, encryptionConfiguration, s.socket))
	}
	first, second := servers[0], servers[1]
	mustRun(t, "kms-plugin", "init", "--dir", first.dir, "--node", "cp-1", "--kms", "file://"+kek)
	machine.WriteFile(t, second.dir+".json", []byte(mustRun(t, "kms-plugin", "node", "--dir", second.dir, "--node", "cp-2", "--kms", "file://"+kek)))
	mustRun(t, "kms-plugin", "add-node", "--dir", first.dir, second.dir+".json")
	distribute := func() {
		t.Helper()
		copied := filepath.Join(second.dir, "keyset.json")
		machine.WriteFile(t, copied+".new", []byte(readText(t, filepath.Join(first.dir, "keyset.json"))))
		must(t, os.Rename(copied+".new", copied))
	}
	distribute()
	first.startPlugin(t)
	second.startPlugin(t)
	first.cluster = &cluster{t, kubetest.ForTest(t, "--encryption-provider-config", configs[0])}
	second.cluster = &cluster{t, first.plane.Another(t, "--encryption-provider-config", configs[1])}

	first.kubectl("", "create", "secret", "generic", "one", "--from-literal=password=by the first")
	second.kubectl("", "create", "secret", "generic", "two", "--from-literal=password=by the second")
	second.reads(t, "one", "by the first")
	first.reads(t, "two", "by the second")

	// The second plugin has not loaded the pending generation: nothing is promoted.
	mustRun(t, "kms-plugin", "rotate", "--dir", first.dir)
	acknowledged := first.acknowledged(t)
	if _, err := run(t, "kms-plugin", "promote", "--dir", first.dir, acknowledged); err == nil || !strings.Contains(err.Error(), "no acknowledgement from cp-2") {
		t.Errorf("a promotion without the second node: %v", err)
	}
	distribute()
	mustRun(t, "kms-plugin", "promote", "--dir", first.dir, acknowledged, second.acknowledged(t))

	// Only the first plugin has the promoted key set. The second reads what is written under it.
	next := first.currentKeyID(t)
	awaitOutput(t, next, func() string {
		_, _ = first.try("", "get", "--raw", "/healthz") // asks the plugin which key is current
		_, _ = first.try("", "delete", "secret", "three")
		first.kubectl("", "create", "secret", "generic", "three", "--from-literal=password=under the new key")
		return first.stored(t, "three").keyID
	})
	second.reads(t, "three", "under the new key")
	second.kubectl("", "create", "secret", "generic", "four", "--from-literal=password=under the old key")
	if id := second.stored(t, "four").keyID; id == next {
		t.Error("the second API server writes under a key that its plugin has not promoted")
	}
	first.reads(t, "four", "under the old key")
}

// servedPlugin is a plugin in this process.
type servedPlugin struct{ dir, socket string }

// servePlugin serves a new key set in a folder, until the benchmark ends.
func servePlugin(b *testing.B, folder string) servedPlugin {
	b.Helper()
	kek, p := filepath.Join(folder, "kms.key"), servedPlugin{filepath.Join(folder, "cp-1"), filepath.Join(folder, "kms.sock")}
	must(b, kms.CreateLocal(kek))
	_, err := kmsplugin.Init(b.Context(), new(kmsplugin.Custody), p.dir, "cp-1", "file://"+kek, envelope.MLKEM768)
	must(b, err)
	served := make(chan error, 1)
	ctx, stop := context.WithCancel(b.Context())
	go func() { served <- kmsplugin.Serve(ctx, kmsplugin.Config{Dir: p.dir, Socket: p.socket}) }()
	b.Cleanup(func() { stop(); must(b, <-served) })
	return p
}

// opened returns how many seeds the plugin has opened.
func (p servedPlugin) opened(b *testing.B) uint64 {
	b.Helper()
	log, err := kmsplugin.VerifyLog(p.dir)
	must(b, err)
	return log.Kinds[nodelog.Opened]
}

// BenchmarkTenThousandSecrets restarts an API server that has 10,000 Secrets under 50 seeds, one for each
// of its earlier starts, and reports how long it takes until all are read, beside one without any Secret.
func BenchmarkTenThousandSecrets(b *testing.B) {
	const seeds, each = 50, 200
	dir, err := os.MkdirTemp("", "latticekeep-kms-") // short, for the path of the socket
	must(b, err)
	b.Cleanup(func() { must(b, os.RemoveAll(dir)) })
	p := servePlugin(b, dir)
	config := filepath.Join(dir, "encryption.yaml")
	must(b, os.WriteFile(config, fmt.Appendf(nil, encryptionConfiguration, p.socket), 0o600))
	plane := kubetest.ForTest(b, "--encryption-provider-config", config)
	restart := func() {
		must(b, plane.RestartAPIServer())
		ctx, cancel := context.WithTimeout(b.Context(), 3*time.Minute)
		defer cancel()
		must(b, plane.AwaitReady(ctx))
	}
	list := func() (found int, took time.Duration) {
		began := time.Now()
		out, err := plane.Kubectl(b.Context(), "get", "secrets", "--output", "name").Output()
		must(b, err)
		return strings.Count(string(out), "secret/s"), time.Since(began)
	}
	began := time.Now()
	restart()
	_, listed := list()
	empty := time.Since(began)
	for seed := range seeds {
		var manifests strings.Builder
		for i := range each {
			fmt.Fprintf(&manifests, "---\napiVersion: v1\nkind: Secret\nmetadata: {name: s%02d-%03d}\nstringData: {password: p%d}\n", seed, i, i)
		}
		cmd := plane.Kubectl(b.Context(), "create", "--filename", "-")
		cmd.Stdin = strings.NewReader(manifests.String())
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%v: %.300s", err, out)
		}
		restart()
	}
	for b.Loop() {
		opened := p.opened(b)
		began := time.Now()
		restart()
		found, took := list()
		if found != seeds*each {
			b.Fatalf("%d Secrets", found)
		}
		b.ReportMetric(float64(p.opened(b)-opened), "seeds-opened")
		b.ReportMetric(time.Since(began).Seconds()/empty.Seconds(), "restart/empty")
		b.ReportMetric(took.Seconds()/listed.Seconds(), "list/empty")
	}
}
