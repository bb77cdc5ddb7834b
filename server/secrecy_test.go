package server

import (
	"bytes"
	"net/http"
	"strings"
	"testing"
)

// A secret ends up in the wrong place by a caller's mistake, too: whatever
// place of a request it is in, it must come back only as the value of an unseal.
func TestASecretIsOnlyEverTheValueOfAnUnseal(t *testing.T) {
	s := newService(t)
	const canary = "tr0ub4dor-and-3"
	id := s.seal(canary)
	if r := s.get("/api/v2/vault/" + id); !bytes.Contains(r.body, []byte(canary)) {
		t.Fatalf("the value did not come back: %s", r.body)
	}
	s.call(request{method: "POST", path: "/api/v2/vault/rotate/" + id, key: s.key}).want(t, http.StatusOK)

	sealPath := "/api/v2/vault/seal"
	quoted := `"` + canary + `"`
	for _, r := range []request{
		{method: "GET", path: "/api/v2/vault/list?name=" + canary},
		{method: "GET", path: "/api/v2/vault/list?cursor=" + canary},
		{method: "GET", path: "/api/v2/vault/list?limit=" + canary},
		{method: "GET", path: "/api/v2/audit/logs?event_type=" + canary},
		{method: "GET", path: "/api/v2/audit/logs?user_id=" + canary},
		{method: "GET", path: "/api/v2/audit/logs?from=" + canary},
		{method: "GET", path: "/api/v2/audit/logs?hours=" + canary},
		{method: "GET", path: "/api/v2/audit/logs?x=" + canary + "%zz"},
		{method: "GET", path: "/api/v2/vault/" + canary},
		{method: "DELETE", path: "/api/v2/vault/" + canary},
		{method: "POST", path: "/api/v2/vault/rotate/" + canary},
		{method: "GET", path: "/" + canary},
		{method: canary, path: "/" + canary},
		{method: canary, path: sealPath},
		{method: "GET", path: "/api/v2/vault/list", key: canary},
		{method: "GET", path: "/api/v2/vault/list", key: "lk_live_" + canary},
		{method: "GET", path: "/api/v2/vault/list", header: http.Header{
			"X-Request-ID": {canary}, "User-Agent": {canary}, "X-Forwarded-For": {canary}, "Referer": {canary}, "Cookie": {canary},
			"Authorization": {"Bearer " + canary}, "Traceparent": {canary}, "X-" + canary: {canary}, "Accept": {canary},
		}},
		{method: "POST", path: sealPath, body: quoted},
		{method: "POST", path: sealPath, body: quoted, contentType: canary + "/" + canary},
		{method: "POST", path: sealPath, body: quoted, contentType: "application/json; charset=" + canary},
		{method: "POST", path: sealPath, body: canary},
		{method: "POST", path: sealPath, body: `{"` + canary + `":` + quoted + `,"` + canary + `":1}`},
		{method: "POST", path: sealPath, body: `{"name":[` + quoted + `]}`},
		{method: "POST", path: sealPath, body: `{"name":"n","credential_type":"t","values":` + quoted + `}`},
		{method: "POST", path: sealPath, body: `{"name":"n","credential_type":"t","values":{"` + canary + `":[` + quoted + `]}}`},
		{method: "POST", path: sealPath, body: `{"name":"n","credential_type":"t","values":{"/` + canary + `":` + quoted + `}}`},
		{method: "POST", path: sealPath, body: `{"name":"n","credential_type":"/` + canary + `","values":{"k":` + quoted + `}}`},
		{method: "POST", path: sealPath, body: `{"name":"\u0000` + canary + `","credential_type":"t","values":{"k":` + quoted + `}}`},
		{method: "POST", path: sealPath, body: `{"name":"n","credential_type":"t","values":{"k":` + quoted + `},"ttl_days":` + quoted + `}`},
		{method: "POST", path: sealPath, body: `{"name":"n","credential_type":"t","values":{"k":` + quoted + `},"ttl_days":0}`},
		{method: "POST", path: sealPath, body: `{"name":"n","credential_type":"t","values":{"k":` + quoted + strings.Repeat(" ", 1<<20) + `}}`},
	} {
		if r.key == "" && r.header == nil {
			r.key = s.key
		}
		got := s.call(r)
		if bytes.Contains(got.body, []byte(canary)) {
			t.Errorf("%s %s is answered with it: %s", r.method, r.path, got.body)
		}
		for name, values := range got.header {
			if strings.Contains(name+strings.Join(values, ""), canary) {
				t.Errorf("%s %s is answered with it in %s", r.method, r.path, name)
			}
		}
	}
	for _, query := range []string{"limit=100", "limit=100&event_type=CREDENTIAL_UNSEALED"} {
		if r := s.get("/api/v2/audit/logs?" + query); r.status != http.StatusOK || bytes.Contains(r.body, []byte(canary)) {
			t.Errorf("it is in the audit log: %d", r.status)
		}
	}
	if err := s.store.Close(); err != nil { // errors with causes, too
		t.Fatal(err)
	}
	for _, path := range []string{"/api/v2/vault/" + canary, "/api/v2/audit/logs?user_id=" + canary} {
		s.get(path).message(t, http.StatusServiceUnavailable)
	}
	if strings.Contains(s.log.String(), canary) {
		t.Error("it is in the log")
	}
	if strings.Contains(s.log.String(), s.key) {
		t.Error("the API key is in the log")
	}
	if r := s.call(request{method: "GET", path: "/metrics"}); bytes.Contains(r.body, []byte(canary)) {
		t.Error("it is in the metrics")
	}
}
