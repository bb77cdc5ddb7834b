package v2_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// manipulated are changes of a manifest that leave it well-formed: what an
// attacker would send who wants to learn something.
func manipulated(t testing.TB, s *service) map[string]func(*v2.ResealRequest) {
	other := s.Manifest(t, "bank", "db", "x")
	value := func(f func(*v2.SealedValue)) func(*v2.ResealRequest) {
		return func(r *v2.ResealRequest) {
			v := r.Sealed.Values["password"]
			f(&v)
			r.Sealed.Values["password"] = v
		}
	}
	blob := func(f func([]byte) []byte) func(*v2.ResealRequest) {
		return value(func(v *v2.SealedValue) {
			b, err := base64.StdEncoding.DecodeString(v.Data)
			if err != nil {
				t.Fatal(err)
			}
			v.Data = base64.StdEncoding.EncodeToString(f(b))
		})
	}
	all := map[string]func(*v2.ResealRequest){
		"another namespace": func(r *v2.ResealRequest) { *r.Namespace = "bank" },
		"no namespace":      func(r *v2.ResealRequest) { r.Namespace = new("") },
		"another name":      func(r *v2.ResealRequest) { r.Name = "cache" },
		"another type":      func(r *v2.ResealRequest) { r.CredentialType = "api-key" },
		"wider":             func(r *v2.ResealRequest) { *r.Sealed.Scope = v2.SealedValuesScopeNamespace },
		"widest":            func(r *v2.ResealRequest) { *r.Sealed.Scope = v2.SealedValuesScopeCluster },
		"another suite":     func(r *v2.ResealRequest) { r.Sealed.Suite = "MLKEM768" },
		"an unknown key":    func(r *v2.ResealRequest) { r.Sealed.KeyId = strings.Repeat("0", 64) },
		"another time":      value(func(v *v2.SealedValue) { v.SealedAt = v.SealedAt.Add(time.Second) }),
		"a foreign value":   value(func(v *v2.SealedValue) { *v = other.Sealed.Values["password"] }),
		"a longer value":    blob(func(b []byte) []byte { return append(b, 0) }),
		"a shorter value":   blob(func(b []byte) []byte { return b[:len(b)-1] }),
		"swapped values": func(r *v2.ResealRequest) {
			v := r.Sealed.Values
			v["password"], v["username"] = v["username"], v["password"]
		},
		"another data key": func(r *v2.ResealRequest) {
			r.Sealed.Values["pass"] = r.Sealed.Values["password"]
			delete(r.Sealed.Values, "password")
		},
		"only the last value": func(r *v2.ResealRequest) {
			r.Sealed.Values["username"] = other.Sealed.Values["username"]
		},
	}
	for _, at := range []int{1, 600, 1088, 1089, 1120, 1121, 1125, 1136} { // encapsulated keys, ciphertext, tag
		all[fmt.Sprint("bit at ", at)] = blob(func(b []byte) []byte { b[min(at, len(b)-1)] ^= 1; return b })
	}
	return all
}

// Resealing is no way to learn anything about values: whatever was done to a
// manifest, the answer to values that do not open is one, to the byte.
func TestResealAndCheckAnswerNothingButYesOrNo(t *testing.T) {
	s := newService(t)
	key := s.GrantKey(authz.VaultWrite)
	former := s.Manifest(t, "shop", "db", servertest.Canary)
	if _, err := s.Sealing.Rotate(t.Context(), sealingAdmin); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sealing.Retire(t.Context(), sealingAdmin, former.Sealed.KeyId); err != nil {
		t.Fatal(err)
	}
	changes := manipulated(t, s)
	changes["a retired key"] = func(r *v2.ResealRequest) { *r = former }
	codes := map[string]string{"an unknown key": "unknown_key", "a retired key": "retired_key"}
	post := func(path string, body any) servertest.Reply {
		return s.Call(servertest.Request{Method: "POST", Path: path, Key: key, Body: servertest.Marshal(t, body)})
	}
	check := func(r v2.ResealRequest) v2.CheckRequest {
		c := v2.CheckRequest{Namespace: *r.Namespace, Name: r.Name, CredentialType: r.CredentialType, Sealed: &r.Sealed}
		if c.Namespace == "" {
			c.Namespace = "other" // the contract wants one
		}
		return c
	}
	answers := make(map[string][]string)
	next := uint64(len(s.AllEntries(1))) + 1
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		r := s.Manifest(t, "shop", "db", servertest.Canary)
		changes[name](&r)
		got := post("/api/v2/sealing-key/reseal", r)
		if got.Status != http.StatusBadRequest {
			t.Errorf("%s: resealed with %d: %s", name, got.Status, got.Body)
		}
		body := string(withoutRequest(t, got.Body))
		answers["reseal "+body] = append(answers["reseal "+body], name)
		got = post("/api/v2/sealing-key/check", check(r))
		var v v2.CheckAnswer
		if err := json.Unmarshal(got.Body, &v); err != nil || got.Status != http.StatusOK || v.Accepted || v.Code == nil {
			t.Fatalf("%s: checked with %d: %s", name, got.Status, got.Body)
		}
		want := v2.CheckAnswerCodeDoesNotOpen
		if code, ok := codes[name]; ok {
			want = v2.CheckAnswerCode(code)
		}
		if *v.Code != want {
			t.Errorf("%s: %s", name, got.Body)
		}
		answers["check "+string(got.Body)] = append(answers["check "+string(got.Body)], name)
	}
	if len(answers) != 4 { // one of reseal, three codes of check
		t.Errorf("%d different answers: %v", len(answers), slices.Collect(maps.Keys(answers)))
	}
	for i, e := range s.AllEntries(next) {
		want := map[string]string{audit.AttributeReason: "does_not_open"}
		if i%2 == 1 {
			want = map[string]string{"verdict": e.Attributes["verdict"]}
		}
		if e.Resource.ID != "" || !maps.Equal(e.Attributes, want) {
			t.Errorf("the entry says %v %v", e.Resource, e.Attributes)
		}
	}

	good := s.Manifest(t, "shop", "db", servertest.Canary)
	for path, body := range map[string]any{"/api/v2/sealing-key/reseal": good, "/api/v2/sealing-key/check": check(good)} {
		if got := post(path, body); got.Status != http.StatusOK || bytes.Contains(got.Body, []byte(servertest.Canary)) {
			t.Errorf("%s: %d %s", path, got.Status, got.Body)
		}
	}
	for _, e := range s.AllEntries(1) {
		if text := fmt.Sprint(e); strings.Contains(text, servertest.Canary) {
			t.Errorf("an entry has the value: %s", text)
		}
	}
	if strings.Contains(s.Logged.String(), servertest.Canary) {
		t.Error("the log has the value")
	}
}

// withoutRequest returns an error without what differs between two requests.
func withoutRequest(t testing.TB, body []byte) []byte {
	t.Helper()
	var e map[string]any
	if err := json.Unmarshal(body, &e); err != nil {
		t.Fatal(err)
	}
	detail := e["error"].(map[string]any)
	delete(detail, "request_id")
	delete(detail, "timestamp")
	b, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var sealingAdmin = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "test", Scopes: []authz.Scope{authz.SystemAdmin}}

func TestCheckNamesTheFirstRuleThatAManifestBreaks(t *testing.T) {
	s := newService(t, func(c *server.Config) {
		c.Sealing = sealingkey.New(c.Store, c.Guard, c.Reader, c.Keys, sealingkey.Options{
			InUse: c.Vault.SealingKeyUse, Now: c.Now,
			Policy: sealing.Policy{MaxTTLDays: 60, Types: []string{"database", "tls"}, Scopes: []v1beta1.Scope{v1beta1.ScopeStrict}},
		})
	})
	r := s.Manifest(t, "shop", "db", servertest.Canary)
	good := func() v2.CheckRequest {
		sealed := r.Sealed
		sealed.Values = maps.Clone(sealed.Values)
		return v2.CheckRequest{Namespace: "shop", Name: "db", CredentialType: "database", TtlDays: new(60), Sealed: &sealed}
	}
	value := func(c *v2.CheckRequest, data string) {
		v := c.Sealed.Values["password"]
		v.Data = data
		c.Sealed.Values["password"] = v
	}
	for name, tc := range map[string]struct {
		change func(*v2.CheckRequest)
		code   v2.CheckAnswerCode
		says   string
	}{
		"good":                {func(*v2.CheckRequest) {}, "", ""},
		"without values":      {func(c *v2.CheckRequest) { c.Sealed = nil }, "", ""},
		"no TTL is 90 days":   {func(c *v2.CheckRequest) { c.TtlDays = nil }, v2.CheckAnswerCodePolicy, "spec.ttlDays: is 90"},
		"a long TTL":          {func(c *v2.CheckRequest) { c.Sealed, c.TtlDays = nil, new(61) }, v2.CheckAnswerCodePolicy, "spec.ttlDays: is 61"},
		"a type":              {func(c *v2.CheckRequest) { c.CredentialType = "api-key" }, v2.CheckAnswerCodePolicy, "database, tls"},
		"a scope":             {func(c *v2.CheckRequest) { c.Sealed.Scope = new(v2.SealedValuesScopeCluster) }, v2.CheckAnswerCodePolicy, "only Strict"},
		"another name":        {func(c *v2.CheckRequest) { c.Name = "cache" }, v2.CheckAnswerCodeDoesNotOpen, "do not open here"},
		"not base64":          {func(c *v2.CheckRequest) { value(c, servertest.Canary) }, v2.CheckAnswerCodeMalformed, "not standard base64"},
		"cut":                 {func(c *v2.CheckRequest) { value(c, "AQID") }, v2.CheckAnswerCodeMalformed, "it was cut"},
		"a data key":          {func(c *v2.CheckRequest) { c.Sealed.Values["a b"] = c.Sealed.Values["password"] }, v2.CheckAnswerCodeMalformed, "data key"},
		"a suite":             {func(c *v2.CheckRequest) { c.Sealed.Suite = "RSA" }, v2.CheckAnswerCodeMalformed, "spec.sealed.suite"},
		"a key id":            {func(c *v2.CheckRequest) { c.Sealed.KeyId = "0" }, v2.CheckAnswerCodeMalformed, "spec.sealed.keyID"},
		"a name":              {func(c *v2.CheckRequest) { c.Name = "DB" }, v2.CheckAnswerCodeMalformed, "metadata.name"},
		"malformed, also TTL": {func(c *v2.CheckRequest) { c.Name, c.TtlDays = "DB", new(61) }, v2.CheckAnswerCodeMalformed, "metadata.name"},
	} {
		body := good()
		tc.change(&body)
		got := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/sealing-key/check", Key: s.Key, Body: servertest.Marshal(t, body)})
		var v v2.CheckAnswer
		if err := json.Unmarshal(got.Body, &v); err != nil || got.Status != http.StatusOK {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
			continue
		}
		if v.Accepted != (tc.code == "") || !v.Accepted && (*v.Code != tc.code || !strings.Contains(*v.Message, tc.says)) {
			t.Errorf("%s: %s", name, got.Body)
		}
		if bytes.Contains(got.Body, []byte(servertest.Canary)) {
			t.Errorf("%s: what was sent is quoted", name)
		}
	}
}

// A new key is published at once, whoever asks, and caches may keep the former
// document for a minute.
func TestARotatedSealingKeyIsPublished(t *testing.T) {
	s := newService(t)
	before := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/sealing-key"}).Want(t, http.StatusOK)["key_id"]
	made := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/system/sealing-keys/rotate", Key: s.SystemKey()}).Want(t, http.StatusCreated)
	got := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/sealing-key"})
	if now := got.Want(t, http.StatusOK)["key_id"]; now == before || now != made["sealing_key"].(map[string]any)["key_id"] {
		t.Errorf("published %v", now)
	}
	if got.Header.Get("Cache-Control") != "public, max-age=60" {
		t.Errorf("Cache-Control %q", got.Header.Get("Cache-Control"))
	}
}
