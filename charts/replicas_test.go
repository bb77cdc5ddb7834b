package charts_test

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/test/pgtest"
	"github.com/latticekeep/latticekeep/test/s3test"
)

// Two replicas on one PostgreSQL, with the rights that the chart grants them: one is the operator, and when it ends the other.
func TestReplicasElectOneOperatorWithTheGrantedRights(t *testing.T) {
	database, err := url.Parse(pgtest.Start(t).URL())
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := s3test.ForTest(t).Bucket("reports")
	if err != nil {
		t.Fatal(err)
	}
	password, _ := database.User.Password()
	database.User = url.User(database.User.Username())
	l := &life{installation: install(t, fmt.Sprintf(`
replicas: 2
postgres: {existingSecret: latticekeep-postgres}
kms: {existingSecret: latticekeep-kms}
webhook: {enabled: false}
config:
  publicURL: https://localhost:8200
  store: {url: %q}
  compliance: {reports: %q}
`, database, bucket))}
	defer l.checkRefused()
	key := filepath.Join(l.dir, "kms.key")
	if err := kms.CreateLocal(key); err != nil {
		t.Fatal(err)
	}
	l.kubectl("", "create", "secret", "generic", "latticekeep-kms", "--namespace", namespace, "--from-file", key)
	l.kubectl("", "create", "secret", "generic", "latticekeep-postgres", "--namespace", namespace, "--from-literal", "password="+password)
	l.kubectl("", "create", "namespace", "shop")
	var env []string
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} { // that the chart takes from a Secret
		env = append(env, name+"="+os.Getenv(name))
	}

	replica := func() *pod {
		p := l.start("Deployment", "latticekeep", env...)
		l.line(p, p.out, `"base_url"`)
		return p
	}
	first := replica()
	leader := l.elected("")
	second := replica()
	l.made("one")
	if now := l.holder(); now != leader {
		t.Errorf("%s works, and %s was elected", now, leader)
	}
	l.end(first)
	l.elected(leader)
	l.made("two")
	for _, line := range l.unused(func(account string) bool { return account == "latticekeep" }) {
		if strings.Contains(line, "leases") {
			t.Error(line)
		}
	}
	l.end(second)
}

// made applies an object whose values the operator makes, and waits until they are there.
func (l *life) made(name string) {
	l.t.Helper()
	l.kubectl(fmt.Sprintf(`
apiVersion: latticekeep.dev/v1beta1
kind: SealedCredential
metadata: {namespace: shop, name: %s}
spec: {credentialType: api-key, ttlDays: 30, generate: [{key: token, random: {}}]}
`, name), "apply", "-f", "-")
	l.await("shop", name, "ready", func(o *v1beta1.SealedCredential) bool {
		return meta.IsStatusConditionTrue(o.Status.Conditions, v1beta1.ConditionReady)
	})
}

// holder is who has the Lease, and empty when nobody has.
func (l *life) holder() string {
	l.t.Helper()
	return l.kubectl("", "get", "lease", "latticekeep", "--namespace", namespace, "--ignore-not-found", "-o", "jsonpath={.spec.holderIdentity}")
}

// elected waits until somebody else than before has the Lease.
func (l *life) elected(before string) (now string) {
	l.t.Helper()
	l.awaitThat(func() string { return "nobody but " + before + " is elected" }, func() bool {
		now = l.holder()
		return now != "" && now != before
	})
	return now
}
