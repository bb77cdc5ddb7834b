package app

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
)

// The listener uses the current certificate of the Secret named by tls.secretName, and the last
// valid one if the Secret has none.
func TestTheCertificateOfASecretIsReadAgain(t *testing.T) {
	c := &testCluster{t, kubetest.ForTest(t)}
	// The server has exactly the rights that it needs.
	c.kubectl(`
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: tls, namespace: default}
rules: [{apiGroups: [""], resources: [secrets], resourceNames: [latticekeep-tls], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: tls, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: tls}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: server}]
`, "apply", "-f", "-")
	kubeconfig, err := c.plane.KubeconfigFor("server")
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	own, err := tlsFromSecret(cfg, "default", "latticekeep-tls", func() time.Time { return now }, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	serial := func() int64 {
		t.Helper()
		cert, err := own.get(nil)
		if err != nil {
			return 0
		}
		return cert.Leaf.SerialNumber.Int64()
	}
	put := func(n int64, change func(config.TLS)) {
		t.Helper()
		s, _ := writeCertificate(t, t.TempDir(), n)
		if change != nil {
			change(s)
		}
		made := c.kubectl("", "create", "secret", "generic", "latticekeep-tls", "--from-file=tls.crt="+s.CertFile, "--from-file=tls.key="+s.KeyFile,
			"--dry-run=client", "-o", "yaml")
		c.kubectl(made, "apply", "-f", "-")
	}

	if err := own.read(t.Context()); err == nil || serial() != 0 || own.pause(err) != secretRetry {
		t.Error("without a Secret:", err, serial())
	}
	put(1, nil)
	if err := own.read(t.Context()); err != nil || serial() != 1 {
		t.Fatal(err, serial())
	}
	now = time.Now()                           // however long the calls took
	if p := own.pause(nil); p != secretRetry { // the test's certificate was made for an hour
		t.Error("it is near its end and is read again after", p)
	}
	now = now.Add(-2 * time.Hour)
	if p := own.pause(nil); p != secretPause {
		t.Error("it is read again after", p)
	}
	put(2, func(s config.TLS) { machine.WriteFile(t, s.KeyFile, []byte("half of a key")) })
	if err := own.read(t.Context()); err == nil || serial() != 1 {
		t.Error("a pair that is none:", err, serial())
	}
	put(3, nil)
	if err := own.read(t.Context()); err != nil || serial() != 3 {
		t.Error("the next one:", err, serial())
	}
	c.kubectl("", "delete", "secret", "latticekeep-tls")
	if err := own.read(t.Context()); err == nil || serial() != 3 {
		t.Error("a Secret that is gone:", err, serial())
	}
}

func TestCertificatesServeTheNamesOfTheServices(t *testing.T) {
	for publicURL, last := range map[string]string{
		"https://Vault.example.org:8443/": "vault.example.org", "https://localhost:8200": "localhost",
		"https://10.0.0.1": "", "https://[::1]:8200": "", "https://a_b.example.org": "", "https://latticekeep.keep.svc": "",
	} {
		s := config.Default()
		s.PublicURL, s.TLS.SecretName = publicURL, "own"
		all := servingCertificates(s, "keep")
		want := "latticekeep.keep.svc latticekeep.keep latticekeep.keep.svc.cluster.local"
		if last != "" {
			want += " " + last
		}
		if len(all) != 2 || all[0].SecretName != "own" || strings.Join(all[0].DNSNames, " ") != want || all[0].WebhookConfiguration != "" {
			t.Errorf("%s: %+v", publicURL, all)
		}
		if w := all[1]; w.SecretName != "latticekeep-webhook-tls" || w.WebhookConfiguration != "latticekeep-webhook" || w.DNSNames[0] != "latticekeep-webhook.keep.svc" {
			t.Errorf("%+v", w)
		}
		s.Kubernetes.Webhook = false
		if without := servingCertificates(s, "keep"); len(without) != 1 || without[0].SecretName != "own" {
			t.Errorf("without a webhook: %+v", without)
		}
	}
}
