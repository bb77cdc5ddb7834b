package cli

import (
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/test/kmstest"
	"github.com/latticekeep/latticekeep/test/machine"
)

func followRunbooks(f *documented) {
	f.cluster()
	s := newSite(f.T, closed)
	_, stop := s.serve()
	stop()
	f.pass("kubectl -n latticekeep-system exec latticekeep-0 -- /latticekeep doctor", "only a kubelet runs commands in pods; the next command is the same")
	f.runAs("latticekeep doctor --config", []string{"/etc/latticekeep/config.yaml", s.file}, "store")
	f.run("kubectl -n latticekeep-system get pods")
	f.pass("kubectl -n latticekeep-system logs latticekeep-0", "only a kubelet has logs")
	f.pass("kubectl -n latticekeep-system logs deployment/latticekeep", "only a kubelet has logs")
}

// The certificate is cert-manager's, whose type is all that is here of it.
func followCertificates(f *documented) {
	c := f.cluster()
	c.kubectl(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"certificates.cert-manager.io"},
"spec":{"group":"cert-manager.io","scope":"Namespaced","names":{"kind":"Certificate","plural":"certificates","singular":"certificate"},
"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`, "apply", "-f", "-")
	c.kubectl("", "wait", "--for=condition=Established", "crd/certificates.cert-manager.io")
	c.kubectl(`{"apiVersion":"cert-manager.io/v1","kind":"Certificate","metadata":{"name":"latticekeep-tls","namespace":"latticekeep-system"},
"status":{"conditions":[{"type":"Ready","status":"False","message":"the issuer does not answer"}]}}`, "apply", "-f", "-")
	f.run("kubectl -n latticekeep-system describe certificate", "the issuer does not answer")
}

// The volume fills, and the server starts again after its file system was repaired.
func followDatabase(f *documented) {
	e, at := newEstate(f.T, "")
	url, end := e.serve(at)
	f.at(url, e)
	f.runAs("latticekeep audit verify --url URL --whole", []string{"URL", url}, "ok: the whole log")
	end()
	c := f.cluster()
	defer c.install()()
	c.kubectl("", "-n", namespace, "patch", "pvc", "data-latticekeep-0", "--subresource=status", "--type=merge", "-p",
		`{"status":{"phase":"Bound","capacity":{"storage":"10Gi"},"accessModes":["ReadWriteOnce"]}}`)
	f.set("KUBE_EDITOR", "sed -i 's/storage: 10Gi/storage: 20Gi/'")
	f.run("kubectl -n latticekeep-system edit pvc data-latticekeep-0", "edited")
	if size := c.kubectl("", "-n", namespace, "get", "pvc", "data-latticekeep-0", "-o", "jsonpath={.spec.resources.requests.storage}"); size != "20Gi" {
		f.Errorf("the claim is for %s", size)
	}
}

// An object cannot be opened, and somebody changes the Secret of another.
func followObjects(f *documented) {
	c := f.cluster()
	server, stderr := startOperator(f.T, c.plane.Kubeconfig)
	defer server.end()
	identity := identityOf(f.T, stderr)
	server.paste("kubectl wait --for=create --timeout=60s -n latticekeep-system configmap/latticekeep-sealing-key\n"+
		pasted(f.T, "docs/get-started/kubectl.md", "## Seal, apply, look", "printf s3cret | kubectl create secret")+
		"kubectl wait --for=create --timeout=60s secret/db\n"+
		"sed 's/name: db$/name: moved/' sealed.yaml | kubectl apply -f -\n"+
		"kubectl wait --for=condition=Stalled --timeout=60s sealedcredential/moved\n"+
		`kubectl patch secret db --type=merge -p '{"data":{"password":"aGFja2Vk"}}'`+"\n"+
		"kubectl annotate sealedcredential/db latticekeep.dev/sync=now", // the operator would look by itself within ten minutes
		"KUBECONFIG="+c.plane.Kubeconfig, "IDENTITY="+identity)
	f.run("kubectl get sealedcredentials -A", "db", "moved")
	awaitOutput(f.T, "sealedcredential/db", func() string {
		return c.kubectl("", "get", "events", "-A", "--field-selector", "reason=TargetRepaired")
	})
	f.run("kubectl get events -A --field-selector reason=TargetRepaired", "sealedcredential/db")
	f.pass("kubectl -n latticekeep-system logs deployment/latticekeep-webhook", "only a kubelet has logs")
	c.kubectl("", "delete", "sealedcredentials", "--all", "--timeout=60s")
}

// awaitOutput waits until a command prints a text.
func awaitOutput(t *testing.T, want string, output func() string) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !strings.Contains(output(), want); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %q in\n%s", want, output())
		}
	}
}

// The token of this replica is wrong.
func followServer(f *documented) {
	f.cluster()
	f.run("kubectl -n latticekeep-system get pods -o wide")
	service, err := kmstest.NewVault()
	must(f.T, err)
	f.Cleanup(service.Close)
	s := newSite(f.T, closed+"operations: {listen: '127.0.0.1:0'}\n")
	s.replace(`{url: "file://`+s.path("keys/kms.key")+`"}`, `{url: "`+service.URL()+`", tokenFile: `+s.path("token")+`, cacheTTL: 0s}`)
	machine.WriteFile(f.T, s.path("token"), []byte(service.Token()))
	line, stop := s.serve()
	defer stop()
	machine.WriteFile(f.T, s.path("token"), []byte("s.wrong"))
	if status, body := s.ask(s.client(), "POST", line.BaseURL+"/api/v2/system/tenants", s.systemKey(), `{"name":"shop"}`); status != http.StatusServiceUnavailable {
		f.Error(status, body)
	}
	f.pass("kubectl -n latticekeep-system port-forward pod/latticekeep-0 8201", "only a kubelet forwards a port; the server's own is asked here")
	f.runAs("curl -s", []string{"http://127.0.0.1:8201", s.operations()}, "[-]kms-credentials failed (replica; stops read and change): ")
	f.run("kubectl -n latticekeep-system get pods")
}

// What guides and runbooks tell readers to look for is there: alerts, metrics, and lines of the log.
func TestWhatRunbooksNameIsThere(t *testing.T) {
	rules := readText(t, "../../charts/latticekeep/files/alerts.yaml")
	metrics := readText(t, "../../docs/reference/metrics.md") // TestEveryMetricIsDocumented holds it and the program together
	var code strings.Builder
	for _, dir := range []string{"../../internal", "../../server", "../../controllers"} {
		must(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
				code.WriteString(readText(t, path))
			}
			return err
		}))
	}
	pages, err := filepath.Glob("../../docs/runbooks/*.md")
	must(t, err)
	named := make(map[string]int)
	check := func(page, kind, form, in, before, after string) {
		for _, m := range regexp.MustCompile(form).FindAllStringSubmatch(readText(t, page), -1) {
			if named[kind]++; !strings.Contains(in, before+m[1]+after) {
				t.Errorf("%s names the %s %q, which does not exist", page, kind, m[1])
			}
		}
	}
	for _, page := range append(pages, "../../docs/guides/monitor.md", "../../docs/guides/backup.md") {
		check(page, "alert", `(?:^|[^a-zA-Z])(Latticekeep[A-Z]\w+)`, rules, "- alert: ", "\n")
		check(page, "metric", `(latticekeep_[a-z_]+[a-z])`, metrics, "`", "")
	}
	// Several words between backticks are of the log, unless they are a command, a query or a setting.
	other := regexp.MustCompile(`^(` + programs + `|make|describe|rate)\b|: `)
	system := syscall.EIO.Error() + syscall.EROFS.Error()
	for _, page := range pages {
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(regexp.MustCompile("(?ms)^ *```.*?^ *```").ReplaceAllString(readText(t, page), ""), -1) {
			said := strings.Join(strings.Fields(m[1]), " ")
			if !strings.Contains(said, " ") || other.MatchString(said) || strings.Contains(system, said) {
				continue
			}
			if named["line of the log"]++; !strings.Contains(code.String(), said) {
				t.Errorf("%s names the line of the log %q, which does not exist", page, said)
			}
		}
	}
	for _, kind := range []string{"alert", "metric", "line of the log"} {
		if named[kind] == 0 {
			t.Errorf("no page names any %s: this test looks for them in the wrong way", kind)
		}
	}
}
