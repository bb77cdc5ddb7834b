package externalsecrets

import (
	"maps"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheOperatorReadsCredentials(t *testing.T) {
	s := newSite(t)
	s.put("shop%2Fdatabase", `{"username":"app","password":"first"}`)
	keyID := s.setUp()
	s.wantSecret("database", "password=first;username=app;")
	if s.reads("success") == 0 || s.reads("denied") != 0 {
		t.Error("the log does not show the read")
	}
	store, database, chosen := manifest(t, "SecretStore", "latticekeep"), manifest(t, "ExternalSecret", "database"), manifest(t, "ExternalSecret", "database-url")

	s.step("a rotation, when it is asked for", func() {
		s.put("shop%2Fdatabase", `{"username":"app","password":"second"}`)
		s.run("kubectl --namespace shop annotate externalsecret database force-sync")
		s.awaitSecret("database", "password=second;username=app;")
	})

	s.step("a rotation, after the interval", func() {
		s.put("shop%2Fsoon", `{"password":"first"}`)
		s.apply(database, "name: database", "name: soon", "shop/database", "shop/soon", "refreshInterval: 1h", "refreshInterval: 1s")
		s.awaitSecret("soon", "password=first;")
		s.put("shop%2Fsoon", `{"password":"second"}`)
		s.awaitSecret("soon", "password=second;")
		s.kubectl("", "--namespace", "shop", "delete", "externalsecret", "soon")
	})

	s.step("a value by its key", func() {
		s.apply(chosen)
		s.awaitSecret("database-url", "DB_PASSWORD=second;")
	})

	s.step("a key that the credential does not have", func() {
		s.apply(chosen, "database-url", "unknown", "property: password", "property: nothing")
		s.awaitFailure("unknown", "unknown key")
	})

	// The operator may read twice, so the credential has more values than that.
	s.step("the log entries of a refresh", func() {
		id := s.put("shop%2Ffive", `{"a":"1","b":"1","c":"1","d":"1","e":"1"}`)
		entries := func() int { return len(s.Entries("event_type=CREDENTIAL_UNSEALED&limit=100&resource_id=" + id)) }
		s.apply(database, "name: database", "name: five", "shop/database", "shop/five")
		s.awaitSecret("five", "a=1;b=1;c=1;d=1;e=1;")
		if n := entries(); n < 1 || n > 2 {
			s.t.Errorf("an extract made %d entries", n)
		}
		s.kubectl("", "--namespace", "shop", "delete", "externalsecret", "five")

		before, items := entries(), ""
		for _, key := range []string{"a", "b", "c", "d", "e"} {
			items += "  - secretKey: " + key + "\n    remoteRef: {key: shop/five, property: " + key + "}\n"
		}
		object, _, _ := strings.Cut(chosen, "  - secretKey")
		s.apply(object+items, "database-url", "five-items")
		s.awaitSecret("five-items", "a=1;b=1;c=1;d=1;e=1;")
		if n := entries() - before; n < 5 {
			s.t.Errorf("five items made %d entries", n)
		}
	})

	s.step("a version", func() {
		s.apply(chosen, "database-url", "versioned", "property: password", "property: password, version: '1'")
		s.awaitSecret("versioned", "DB_PASSWORD=second;")
	})

	s.step("a search", func() {
		s.apply(database, "name: database", "name: found", "extract: {key: shop/database}", "find: {name: {regexp: .*}}")
		s.awaitFailure("found", "not implemented")
	})

	// Names and keys that would mean something else in a URL, or in a path of JSON.
	s.step("any name", func() {
		const path = "'shop/two words+%?#é'"
		s.put("shop%2Ftwo%20words+%25%3F%23%C3%A9", `{"a-b.c_d":"odd"}`)
		s.apply(chosen, "database-url", "odd", "shop/database", path, "property: password", "property: a-b.c_d")
		s.awaitSecret("odd", "DB_PASSWORD=odd;")
		s.apply(database, "name: database", "name: odd-all", "shop/database", path)
		s.awaitSecret("odd-all", "a-b.c_d=odd;")
	})

	s.step("denials", func() {
		const denied = "error processing spec.dataFrom[0].extract, err: endpoint gave error 403 Forbidden"
		s.put("other%2Fdatabase", `{"password":"other"}`)
		s.grant("no-scope", "shop/**", []string{"read"}, "keys:read")
		s.giveKey("no-scope")
		s.apply(store, "name: latticekeep\n  namespace", "name: no-scope\n  namespace", "latticekeep-api-key", "no-scope")
		for name, replacements := range map[string][]string{
			"missing":           {"shop/database", "shop/missing"},
			"outside":           {"shop/database", "other/database"},
			"without-the-scope": {"{name: latticekeep}", "{name: no-scope}"},
		} {
			s.apply(database, append(replacements, "name: database", "name: "+name)...)
			s.awaitFailure(name, denied)
			s.wantNoSecret(name)
		}
		reasons := make(map[any]bool)
		for _, e := range s.Entries("event_type=CREDENTIAL_UNSEALED&limit=100&outcome=denied") {
			reasons[e["attributes"].(map[string]any)["reason"]] = true
		}
		if want := map[any]bool{"no_such_credential": true, "outside_policy": true, "missing_scope": true}; !maps.Equal(reasons, want) {
			s.t.Errorf("the log has the reasons %v", reasons)
		}
	})

	s.step("a Secret without the label", func() {
		s.kubectl("", "--namespace", "shop", "create", "secret", "generic", "unlabelled", "--from-literal=key=k")
		s.apply(store, "name: latticekeep\n  namespace", "name: unlabelled\n  namespace", "latticekeep-api-key", "unlabelled")
		s.apply(database, "name: database", "name: unlabelled", "{name: latticekeep}", "{name: unlabelled}")
		s.awaitFailure("unlabelled", "secret does not contain needed label 'external-secrets.io/type: webhook'")
	})

	s.step("an authority that did not sign", func() {
		s.apply(store, "name: latticekeep\n  namespace", "name: untrusted\n  namespace", "{type: ConfigMap, name: latticekeep-ca, key: ca.crt}", "{type: ConfigMap, name: kube-root-ca.crt, key: ca.crt}")
		s.kubectl("", "--namespace", "shop", "create", "configmap", "kube-root-ca.crt", "--from-literal=ca.crt="+otherAuthority(s.t))
		s.apply(database, "name: database", "name: untrusted", "{name: latticekeep}", "{name: untrusted}")
		s.awaitFailure("untrusted", "certificate signed by unknown authority")
	})

	// Latticekeep never says that a credential is gone, so the operator deletes no Secret.
	s.step("a credential in the trash", func() {
		id := s.put("shop%2Fgone", `{"password":"gone"}`)
		s.apply(database, "name: database", "name: gone", "shop/database", "shop/gone", "target: {name: database}", "target: {name: gone, deletionPolicy: Delete}")
		s.awaitSecret("gone", "password=gone;")
		s.Post("/api/v2/vault/"+id+"/trash", "").Want(s.t, http.StatusOK)
		s.refresh("gone")
		s.awaitFailure("gone", "403 Forbidden")
		s.wantSecret("gone", "password=gone;")
	})

	// Only a wrong path in the URL has this answer.
	s.step("a 404", func() {
		s.apply(store, "name: latticekeep\n  namespace", "name: misdirected\n  namespace", "/vault/by-name/", "/vaults/by-name/")
		for name, policy := range map[string]string{"retained": "Retain", "deleted": "Delete"} {
			replacements := []string{"name: database\n  namespace", "name: " + name + "\n  namespace", "target: {name: database}", "target: {name: " + name + ", deletionPolicy: " + policy + "}"}
			s.apply(database, replacements...)
			s.awaitSecret(name, "password=second;")
			s.apply(database, append(replacements, "{name: latticekeep}", "{name: misdirected}")...)
		}
		s.awaitFailure("retained", "Secret does not exist")
		s.wantSecret("retained", "password=second;username=app;")
		s.await("NotFound", "--namespace", "shop", "get", "secret", "deleted")
	})

	// The control plane here collects no garbage, which is what deletes the Secret.
	s.step("the owner of a Secret", func() {
		if owner := s.kubectl("", "--namespace", "shop", "get", "secret", "database", "--output", "jsonpath={.metadata.ownerReferences[*].kind}/{.metadata.ownerReferences[*].name}"); owner != "ExternalSecret/database" {
			s.t.Errorf("the Secret's owner is %s", owner)
		}
	})

	// The namespace of the ExternalSecret is the first segment of the path, and nothing leaves it.
	s.step("one store for all namespaces", func() {
		s.grant("all", "**", []string{"read"}, "vault:read")
		for _, args := range [][]string{
			{"create", "secret", "generic", "latticekeep-api-key", "--from-file=key=" + filepath.Join(s.dir, "api.key")},
			{"label", "secret", "latticekeep-api-key", "external-secrets.io/type=webhook"},
			{"create", "configmap", "latticekeep-ca", "--from-file=" + filepath.Join(s.dir, "ca.crt")},
		} {
			s.kubectl("", append([]string{"--namespace", "latticekeep-system"}, args...)...)
		}
		s.apply(manifest(s.t, "ClusterSecretStore", "latticekeep"))
		const both = "{kind: ClusterSecretStore, name: latticekeep}"
		s.apply(database, "name: database", "name: of-all", "{name: latticekeep}", both, "shop/database", "database")
		s.awaitSecret("of-all", "password=second;username=app;")
		for name, path := range map[string]string{"above": "../other/database", "aside": "'%2e%2e/other/database'"} {
			s.apply(database, "name: database", "name: "+name, "{name: latticekeep}", both, "shop/database", path)
			s.awaitFailure(name, "endpoint gave error 40")
			s.wantNoSecret(name)
		}
	})

	s.step("a key that is revoked", func() {
		s.Delete("/api/v2/api-keys/"+keyID).Want(s.t, http.StatusOK)
		s.refresh("database")
		s.awaitFailure("database", "401 Unauthorized")
		if said := s.run("kubectl --namespace shop describe externalsecret"); !strings.Contains(said, "401 Unauthorized") {
			s.t.Errorf("the guide's command does not show the event:\n%s", said)
		}
		s.wantSecret("database", "password=second;username=app;")
	})
}
