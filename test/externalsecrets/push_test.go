package externalsecrets

import (
	"maps"
	"net/http"
	"testing"
	"time"
)

func TestTheOperatorPushesSecrets(t *testing.T) {
	s := newSite(t)
	s.run("kubectl --namespace latticekeep-system get secret latticekeep-tls")
	s.run("kubectl --namespace shop create configmap")
	s.grant("shop-push", "shop/pushed/**", []string{"read", "write"}, "vault:read", "vault:write")
	s.giveKey("latticekeep-push-key")
	s.apply(manifest(t, "SecretStore", "latticekeep-push"))
	s.kubectl("", "--namespace", "shop", "create", "secret", "generic", "session", `--from-literal=key=a"b\c`, "--from-literal=other=é+ %")
	push := manifest(t, "PushSecret", "session")
	const pushed = "/api/v2/vault/by-name/shop%2Fpushed%2F"
	// variant applies the guide's PushSecret under another name, for another credential.
	variant := func(name string, replacements ...string) {
		s.t.Helper()
		s.apply(push, append(replacements, "name: session\n  namespace", "name: "+name+"\n  namespace", "pushed/session", "pushed/"+name)...)
	}

	s.apply(push)
	s.awaitPush("session", "Synced True")
	first := s.Get(pushed+"session").Want(t, http.StatusOK)
	if want := map[string]any{"key": `a"b\c`, "other": "é+ %"}; !maps.Equal(first["values"].(map[string]any), want) {
		t.Errorf("pushed %v, want %v", first["values"], want)
	}

	s.step("again, when it is asked for", func() {
		s.Clock.Advance(24 * time.Hour)
		s.run("kubectl --namespace shop annotate pushsecret session")
		s.awaitVersion(pushed+"session", first["version"].(float64)+1)
		if again := s.Get(pushed+"session").Want(s.t, http.StatusOK); again["expires_at"] == first["expires_at"] {
			s.t.Errorf("a push does not begin the lifetime again: %v", again)
		}
	})

	s.step("again, after the interval", func() {
		variant("soon", "refreshInterval: 24h", "refreshInterval: 1s")
		s.awaitVersion(pushed+"soon", 2)
		s.kubectl("", "--namespace", "shop", "delete", "pushsecret", "soon")
	})

	s.step("a path outside of the policy", func() {
		variant("outside", "shop/pushed/session", "shop/outside")
		s.awaitPush("outside", "endpoint gave error 403 Forbidden")
	})

	s.step("a single key", func() {
		variant("single", "match: {", "match: {secretKey: key, ")
		s.awaitPush("single", "endpoint gave error 400 Bad Request")
		s.Get(pushed+"single").Want(s.t, http.StatusForbidden)
	})

	s.step("only when there is none", func() {
		variant("careful", "updatePolicy: Replace", "updatePolicy: IfNotExists")
		s.awaitPush("careful", "could not verify if secret exists in store")
		s.Get(pushed+"careful").Want(s.t, http.StatusForbidden)
	})

	// The operator sends no API key then, and it never removes the object.
	s.step("deletion", func() {
		variant("stuck", "deletionPolicy: None", "deletionPolicy: Delete")
		s.awaitPush("stuck", "Synced True")
		s.kubectl("", "--namespace", "shop", "delete", "pushsecret", "stuck", "--wait=false")
		s.awaitPush("stuck", "Failed to Delete Secrets from Provider")
		s.kubectl("", "--namespace", "shop", "patch", "pushsecret", "stuck", "--type=merge", "--patch", `{"spec":{"deletionPolicy":"None"}}`)
		s.kubectl("", "--namespace", "shop", "wait", "--for=delete", "pushsecret/stuck", "--timeout=60s")
		s.Get(pushed+"stuck").Want(s.t, http.StatusOK)
	})
}

// awaitPush waits for the condition of a PushSecret: its reason, status and message.
func (s *site) awaitPush(name, want string) {
	s.t.Helper()
	s.await(want, "--namespace", "shop", "get", "pushsecret", name, "--output",
		`jsonpath={range .status.conditions[?(@.type=="Ready")]}{.reason} {.status} {.message}{end}`)
}

// awaitVersion waits until a credential has at least this version.
func (s *site) awaitVersion(path string, version float64) {
	s.t.Helper()
	s.poll(func() (string, bool) {
		r := s.Get(path)
		return string(r.Body), r.Status == http.StatusOK && r.Want(s.t, http.StatusOK)["version"].(float64) >= version
	})
}
