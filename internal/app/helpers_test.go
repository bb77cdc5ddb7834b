package app

import (
	"crypto/x509"
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/machine"
)

const serviceHost = "KUBERNETES_SERVICE_HOST" // set in every pod

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// counted returns the handshakes by group.
func counted(t *testing.T, handshakes prometheus.Collector) map[string]float64 {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(handshakes)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	groups := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			groups[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
		}
	}
	return groups
}

// testCluster is an API server with the namespaces of a test.
type testCluster struct {
	t     *testing.T
	plane *kubetest.ControlPlane
}

// try runs kubectl and returns its whole output.
func (c *testCluster) try(stdin string, args ...string) (string, error) {
	c.t.Helper()
	cmd := c.plane.Kubectl(c.t.Context(), args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (c *testCluster) kubectl(stdin string, args ...string) string {
	c.t.Helper()
	out, err := c.try(stdin, args...)
	if err != nil {
		c.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// writeCertificate returns the settings of a server with a certificate for 127.0.0.1.
func writeCertificate(t *testing.T, dir string, serial int64) (s config.TLS, roots *x509.CertPool) {
	t.Helper()
	s.CertFile, s.KeyFile, roots = machine.WriteCertificate(t, dir, serial)
	return s, roots
}
