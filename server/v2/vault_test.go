package v2_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/test/servertest"
)

func TestACredentialIsSealedListedUnsealedRotatedAndDeleted(t *testing.T) {
	s := newService(t)
	sealed := s.Post("/api/v2/vault/seal",
		`{"name":"payments","credential_type":"api_key","values":{"a":"one","b":"tw\u0000o"},"ttl_days":10}`).Want(t, http.StatusCreated)
	id := sealed["credential_id"].(string)
	want := map[string]any{
		"success": true, "credential_id": id, "name": "payments", "credential_type": "api_key", "version": 1.0,
		"status": "active", "owned": false,
		"created_at": "2026-11-21T10:00:00Z", "sealed_at": "2026-11-21T10:00:00Z", "expires_at": "2026-12-01T10:00:00Z",
	}
	if !reflect.DeepEqual(sealed, want) {
		t.Errorf("sealed: %v", sealed)
	}

	delete(want, "success")
	listed := s.Get("/api/v2/vault/list").Want(t, http.StatusOK)
	if !reflect.DeepEqual(listed, map[string]any{"success": true, "credentials": []any{want}}) {
		t.Errorf("listed: %v", listed)
	}

	wantPlain := map[string]any{
		"success": true, "credential_id": id, "name": "payments", "credential_type": "api_key", "version": 1.0,
		"values":     map[string]any{"a": "one", "b": "tw\x00o"},
		"created_at": "2026-11-21T10:00:00Z", "expires_at": "2026-12-01T10:00:00Z",
	}
	unsealed := s.Get("/api/v2/vault/"+id).Want(t, http.StatusOK)
	if !reflect.DeepEqual(unsealed, wantPlain) {
		t.Errorf("unsealed: %v", unsealed)
	}

	s.Clock.Advance(24 * time.Hour)
	rotated := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/rotate/" + id, Key: s.Key}).Want(t, http.StatusOK)
	want["success"], want["version"] = true, 2.0
	want["sealed_at"], want["expires_at"] = "2026-11-22T10:00:00Z", "2026-12-02T10:00:00Z"
	if !reflect.DeepEqual(rotated, want) {
		t.Errorf("rotated: %v", rotated)
	}
	again := s.Get("/api/v2/vault/"+id).Want(t, http.StatusOK)
	if !reflect.DeepEqual(again["values"], wantPlain["values"]) || again["version"] != 2.0 {
		t.Errorf("unsealed after the rotation: %v", again)
	}

	removed := s.Delete("/api/v2/vault/"+id).Want(t, http.StatusOK)
	if !reflect.DeepEqual(removed, map[string]any{"success": true, "credential_id": id}) {
		t.Errorf("deleted: %v", removed)
	}
	if listed := s.Get("/api/v2/vault/list").Want(t, http.StatusOK); len(listed["credentials"].([]any)) != 0 {
		t.Errorf("listed after the deletion: %v", listed)
	}

	var types []string
	for _, e := range s.Entries("limit=9") {
		if e["outcome"] == "success" && e["event_type"] != "AUDIT_READ" {
			types = append(types, strings.TrimPrefix(e["event_type"].(string), "CREDENTIAL_"))
		}
	}
	if want := []string{"LISTED", "DELETED", "UNSEALED", "REENCRYPTED", "UNSEALED", "LISTED", "SEALED"}; !slices.Equal(types[:7], want) {
		t.Errorf("audit entries, newest first: %v", types)
	}
}

func TestLifetime(t *testing.T) {
	s := newService(t)
	for ttl, days := range map[string]int{"": 90, `,"ttl_days":1`: 1, `,"ttl_days":3650`: 3650} {
		sealed := s.Post("/api/v2/vault/seal", `{"name":"n","credential_type":"t","values":{"k":"v"}`+ttl+`}`).Want(t, http.StatusCreated)
		if want := s.Clock.Now().AddDate(0, 0, days).Format(time.RFC3339); sealed["expires_at"] != want {
			t.Errorf("%q expires at %v, want %s", ttl, sealed["expires_at"], want)
		}
	}
}

func TestExpiredCredentialsAreListedAsSuchAndCanBeDeleted(t *testing.T) {
	s := newService(t)
	id := s.Seal("v")
	s.Clock.Advance(10 * 24 * time.Hour) // exactly its lifetime
	listed := s.Get("/api/v2/vault/list").Want(t, http.StatusOK)["credentials"].([]any)
	if len(listed) != 1 || listed[0].(map[string]any)["status"] != "expired" {
		t.Fatalf("listed: %v", listed)
	}
	s.Get("/api/v2/vault/"+id).Message(t, http.StatusForbidden)
	s.Delete("/api/v2/vault/"+id).Want(t, http.StatusOK)
}

func TestListPages(t *testing.T) {
	s := newService(t)
	var sealed []string
	for i := range 5 {
		sealed = append(sealed, s.Seal(fmt.Sprint(i)))
	}
	slices.Sort(sealed)
	var paged []string
	cursor, pages := "", 0
	for {
		page := s.Get("/api/v2/vault/list?limit=2"+cursor).Want(t, http.StatusOK)
		pages++
		for _, c := range page["credentials"].([]any) {
			paged = append(paged, c.(map[string]any)["credential_id"].(string))
		}
		next, more := page["next_cursor"].(string)
		if !more {
			break
		}
		cursor = "&cursor=" + next
	}
	if !slices.Equal(paged, sealed) || pages != 3 {
		t.Errorf("%d pages: %v, want %v", pages, paged, sealed)
	}
	if all := s.Get("/api/v2/vault/list").Want(t, http.StatusOK); len(all["credentials"].([]any)) != 5 || all["next_cursor"] != nil {
		t.Errorf("without parameters: %v", all)
	}
}

// Names of every kind are found, and come back as they are.
func TestAListIsSearchedByNameAndNarrowedDown(t *testing.T) {
	s := newService(t)
	const arabic = "\u0645\u0641\u062a\u0627\u062d \u0627\u0644\u062f\u0641\u0639"
	names := []string{"Zahlungen Jürgen", "zahlungen", "ZAHLUNGEN & Co. 100%", arabic, "a\u202egnp.exe", `<img src=x onerror="alert(1)">`}
	ids := make(map[string]string)
	for i, name := range names {
		body := servertest.Marshal(t, object{"name": name, "credential_type": []string{"api_key", "database"}[i%2], "values": object{"k": "v"}, "ttl_days": 5 + i})
		ids[s.Post("/api/v2/vault/seal", body).Want(t, http.StatusCreated)["credential_id"].(string)] = name
	}
	neighbour := s.GrantKeyIn(s.Stranger().Tenant, authz.VaultRead, authz.VaultWrite)
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: neighbour, Body: `{"name":"zahlungen","credential_type":"api_key","values":{"k":"v"}}`}).Want(t, http.StatusCreated)
	s.Clock.Advance(5 * 24 * time.Hour) // when the first expires
	for _, c := range []struct {
		query url.Values
		want  []int
	}{
		{url.Values{}, []int{0, 1, 2, 3, 4, 5}},
		{url.Values{"q": {"ZAHLungen"}}, []int{0, 1, 2}},
		{url.Values{"q": {"jÜRG"}}, []int{0}},
		{url.Values{"q": {"& co. 100%"}}, []int{2}},
		{url.Values{"q": {arabic[4:10]}}, []int{3}},
		{url.Values{"q": {"\u202e"}}, []int{4}},
		{url.Values{"q": {`ONERROR="`}}, []int{5}},
		{url.Values{"q": {"zahlungen"}, "status": {"active"}}, []int{1, 2}},
		{url.Values{"status": {"expired"}}, []int{0}},
		{url.Values{"credential_type": {"database"}}, []int{1, 3, 5}},
		{url.Values{"expires_before": {"2026-11-27T12:00:00+02:00"}}, []int{0}},
		{url.Values{"expires_before": {"2026-11-27T12:00:01+02:00"}}, []int{0, 1}},
		{url.Values{"expires_before": {"0001-01-01T00:00:00Z"}}, nil},
		{url.Values{"q": {"zahl"}, "credential_type": {"api_key"}, "status": {"active"}, "expires_before": {"2026-12-01T00:00:00Z"}}, []int{2}},
		{url.Values{"q": {"none"}}, nil},
	} {
		var want, got []string
		for _, i := range c.want {
			want = append(want, names[i])
		}
		c.query.Set("limit", "1")
		for more := true; more; {
			page := s.Get("/api/v2/vault/list?"+c.query.Encode()).Want(t, http.StatusOK)
			for _, one := range page["credentials"].([]any) {
				one := one.(map[string]any)
				got = append(got, one["name"].(string))
				if ids[one["credential_id"].(string)] != one["name"] {
					t.Errorf("%v: %v", c.query, one)
				}
			}
			var next string
			if next, more = page["next_cursor"].(string); more {
				c.query.Set("cursor", next)
			}
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%v: %q, want %q", c.query, got, want)
		}
	}
	first := s.Get("/api/v2/vault/list?limit=1&q=zahl").Want(t, http.StatusOK)["next_cursor"].(string)
	for _, query := range []string{"limit=1", "limit=1&q=zah", "limit=1&q=ZAHL", "q=zahl&status=active"} {
		s.Get("/api/v2/vault/list?"+query+"&cursor="+first).Message(t, http.StatusBadRequest)
	}
	s.Get("/api/v2/vault/list?limit=2&q=zahl&cursor="+first).Want(t, http.StatusOK) // a page may be of another size
	s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/list?limit=1&q=zahl&cursor=" + first, Key: neighbour}).Message(t, http.StatusBadRequest)
}

func TestASummaryAndTheMetadataOfOne(t *testing.T) {
	s := newService(t)
	empty := s.Get("/api/v2/vault/summary").Want(t, http.StatusOK)
	want := map[string]any{
		"success": true, "complete": true, "total": 0.0, "active": 0.0, "expired": 0.0, "expiring_soon": 0.0, "expiring_within_days": 7.0,
		"credential_types": []any{}, "other_types": 0.0, "next_to_expire": []any{},
	}
	if !reflect.DeepEqual(empty, want) {
		t.Errorf("of nothing: %v", empty)
	}
	var rows []any
	for _, days := range []int{1, 8, 30} {
		body := servertest.Marshal(t, object{"name": "n", "credential_type": "api_key", "values": object{"k": "v"}, "ttl_days": days})
		row := s.Post("/api/v2/vault/seal", body).Want(t, http.StatusCreated)
		path := "/api/v2/vault/" + row["credential_id"].(string) + "/metadata"
		if got := s.Get(path).Want(t, http.StatusOK); !reflect.DeepEqual(got, row) {
			t.Errorf("metadata %v, want %v", got, row)
		}
		delete(row, "success")
		rows = append(rows, row)
	}
	s.Clock.Advance(24 * time.Hour)
	gone := rows[0].(map[string]any)["credential_id"].(string)
	if got := s.Get("/api/v2/vault/"+gone+"/metadata").Want(t, http.StatusOK); got["status"] != "expired" {
		t.Errorf("metadata of an expired one: %v", got)
	}
	s.Get("/api/v2/vault/"+gone).Message(t, http.StatusForbidden)
	want["total"], want["active"], want["expired"], want["next_to_expire"] = 3.0, 2.0, 1.0, rows[1:]
	want["credential_types"] = []any{map[string]any{"credential_type": "api_key", "count": 3.0}}
	if got := s.Get("/api/v2/vault/summary").Want(t, http.StatusOK); !reflect.DeepEqual(got, want) {
		t.Errorf("summary %v, want %v", got, want)
	}
	want["expiring_soon"], want["expiring_within_days"] = 1.0, 8.0
	if got := s.Get("/api/v2/vault/summary?expiring_within_days=8").Want(t, http.StatusOK); !reflect.DeepEqual(got, want) {
		t.Errorf("summary %v, want %v", got, want)
	}
}

// The keys of the two versions are the same.
func TestKeysAreThoseOfBothVersions(t *testing.T) {
	s := newService(t)
	first := s.Post("/api/v2/keys", `{"name":"Schlüssel"}`).Want(t, http.StatusCreated)["key"].(map[string]any)
	id := first["key_id"].(string)
	old := s.Call(servertest.Request{Method: "POST", Path: "/v1/keys/generate", Bearer: s.Key, Body: `{"algorithm":"ML-KEM-768","name":"old","rotation_period":1}`}).Want(t, http.StatusCreated)
	body := servertest.Marshal(t, object{"data": "x", "algorithm": "ML-KEM-768", "key_id": id})
	sealed := s.Call(servertest.Request{Method: "POST", Path: "/v1/encrypt", Bearer: s.Key, Body: body}).Want(t, http.StatusOK)
	s.Clock.Advance(time.Hour)
	rotated := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/keys/" + id + "/rotate", Key: s.Key}).Want(t, http.StatusOK) // without a body
	if rotated["re_encrypted_versions"] != 0.0 {
		t.Errorf("rotated: %v", rotated)
	}
	want := map[string]any{
		"key_id": id, "name": "Schlüssel", "algorithm": "ML-KEM-768", "version": 2.0, "default": false, "rotation_period": 90.0,
		"created_at": "2026-11-21T10:00:00Z", "rotated_at": "2026-11-21T11:00:00Z", "next_rotation_at": "2027-02-19T11:00:00Z",
	}
	got := s.Get("/api/v2/keys/"+id).Want(t, http.StatusOK)
	if !reflect.DeepEqual(got, map[string]any{"success": true, "key": want, "versions": []any{
		map[string]any{"number": 2.0, "created_at": "2026-11-21T11:00:00Z", "current": true},
		map[string]any{"number": 1.0, "created_at": "2026-11-21T10:00:00Z", "current": false},
	}}) || !reflect.DeepEqual(rotated["key"], got["key"]) {
		t.Errorf("key %v, rotated %v", got, rotated)
	}
	open := servertest.Marshal(t, object{"encrypted_data": sealed["encrypted_data"], "key_id": id})
	if got := s.Call(servertest.Request{Method: "POST", Path: "/v1/decrypt", Bearer: s.Key, Body: open}).Want(t, http.StatusOK)["data"]; got != "x" {
		t.Errorf("decrypted %v", got)
	}
	delete(want, "default")
	listed := s.Call(servertest.Request{Method: "GET", Path: "/v1/keys", Bearer: s.Key}).Want(t, http.StatusOK)["keys"].([]any)
	if !slices.ContainsFunc(listed, func(k any) bool { return reflect.DeepEqual(k, any(want)) }) {
		t.Errorf("version 1 lists %v", listed)
	}
	paged := s.Get("/api/v2/keys?limit=100").Want(t, http.StatusOK)["keys"].([]any)
	if !slices.ContainsFunc(paged, func(k any) bool { return k.(map[string]any)["key_id"] == old["key_id"] }) || len(paged) != 2 {
		t.Errorf("version 2 lists %v", paged)
	}
	if s.Post("/api/v2/keys", `{"name":"n","rotation_period":0}`).Status != 422 || s.Get("/api/v2/keys?limit=101").Status != 400 {
		t.Error("bounds")
	}
}

func TestValuesThatAreNoTextComeInBase64(t *testing.T) {
	s := newService(t)
	binary := []byte{0xff, 0x00, 0xfe}
	owned, err := s.Vault.Apply(context.Background(), s.Operator(), "uid", 0, vault.Desired{
		Name: "n", Type: "t", Values: map[string]secret.Bytes{"text": secret.Bytes("v"), "key.der": append(secret.Bytes{}, binary...)},
	})
	if err != nil {
		t.Fatal(err)
	}
	got := s.Get("/api/v2/vault/"+owned.ID).Want(t, http.StatusOK)
	if !reflect.DeepEqual(got["values"], map[string]any{"text": "v"}) ||
		!reflect.DeepEqual(got["binary_values"], map[string]any{"key.der": base64.StdEncoding.EncodeToString(binary)}) {
		t.Errorf("unsealed: %v", got)
	}
}

func TestCredentialsOfAnObjectAreReadOnly(t *testing.T) {
	s := newService(t)
	owned, err := s.Vault.Apply(context.Background(), s.Operator(), "uid", 0, vault.Desired{
		Name: "n", Type: "t", Values: map[string]secret.Bytes{"k": secret.Bytes("v")},
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/rotate/" + owned.ID, Key: s.Key}).Message(t, http.StatusForbidden)
	s.Delete("/api/v2/vault/"+owned.ID).Message(t, http.StatusForbidden)
	s.Get("/api/v2/vault/"+owned.ID).Want(t, http.StatusOK)
	listed := s.Get("/api/v2/vault/list").Want(t, http.StatusOK)["credentials"].([]any)
	if listed[0].(map[string]any)["owned"] != true {
		t.Errorf("listed: %v", listed)
	}
}

func TestThePreviousVersionOfAnObjectsCredentialIsReadUntilItsEnd(t *testing.T) {
	s := newService(t)
	owned := s.SealOwnedVersions(s.Operator(), "old", "new")
	c, err := client.New(s.URL, client.WithHTTPClient(s.Client), client.WithAPIKey(s.Key))
	if err != nil {
		t.Fatal(err)
	}
	previous, err := c.V2.UnsealCredentialVersion(t.Context(), owned.ID, 1)
	if err != nil {
		t.Fatal(err)
	}
	if previous.Version != 1 || previous.Values["k"] != "old" || !previous.ExpiresAt.Equal(owned.Previous.Until) {
		t.Errorf("through the client: %+v", previous)
	}
	path := "/api/v2/vault/" + owned.ID
	for _, c := range []struct {
		query, value, expires string
		version               float64
	}{
		{"", "new", "2027-02-19T10:00:00Z", 2},
		{"?version=2", "new", "2027-02-19T10:00:00Z", 2},
		{"?version=1", "old", "2026-11-21T11:00:00Z", 1},
	} {
		got := s.Get(path+c.query).Want(t, http.StatusOK)
		if !reflect.DeepEqual(got["values"], map[string]any{"k": c.value}) || got["version"] != c.version || got["expires_at"] != c.expires {
			t.Errorf("%q: %v", c.query, got)
		}
		if e := s.Entries("limit=1")[0]; e["event_type"] != "CREDENTIAL_UNSEALED" || e["attributes"].(map[string]any)["version"] != fmt.Sprint(c.version) {
			t.Errorf("%q: recorded as %v", c.query, e)
		}
	}
	want := servertest.WithoutRequest(t, s.Get("/api/v2/vault/"+authz.NewID("cred")))
	denied := func(queries ...string) {
		t.Helper()
		for _, query := range queries {
			r := s.Get(path + query)
			r.Message(t, http.StatusForbidden)
			if got := servertest.WithoutRequest(t, r); got != want {
				t.Errorf("%q: %s, want %s", query, got, want)
			}
		}
	}
	denied("?version=3", "?version=9223372036854775807")
	for _, query := range []string{"?version=0", "?version=-1", "?version=", "?version=x", "?version=1.5", "?version=9223372036854775808", "?version=1&version=2"} {
		s.Get(path+query).Message(t, http.StatusBadRequest)
	}
	weak := s.GrantKey(authz.ComplianceRead)
	if got := servertest.WithoutRequest(t, s.Call(servertest.Request{Method: "GET", Path: path + "?version=1", Key: weak})); got != want {
		t.Errorf("without the scope: %s, want %s", got, want)
	}
	s.Clock.Advance(time.Hour)
	denied("?version=1")
	if _, err := s.Vault.Sweep(context.Background()); err != nil {
		t.Fatal(err)
	}
	denied("?version=1")
	if e := s.Entries("event_type=CREDENTIAL_VERSION_ENDED"); len(e) != 1 {
		t.Errorf("the end is recorded as %v", e)
	}
	s.Get(path+"?version=2").Want(t, http.StatusOK)
}

func TestAllFailuresOfAVaultEndpointAreAlike(t *testing.T) {
	s := newService(t)
	foreign, err := s.Vault.Seal(context.Background(), s.Stranger(), vault.SealRequest{
		Name: "n", Type: "t", Values: map[string]secret.Bytes{"k": secret.Bytes("v")},
	})
	if err != nil {
		t.Fatal(err)
	}
	deleted := s.Seal("v")
	s.Delete("/api/v2/vault/"+deleted).Want(t, http.StatusOK)
	expired := s.Seal("v")
	s.Clock.Advance(11 * 24 * time.Hour)
	ids := map[string]string{
		"foreign": foreign.ID, "deleted": deleted, "never existed": authz.NewID("cred"),
		"too short": "cred_a", "another prefix": authz.NewID("key"), "upper case": strings.ToUpper(deleted), "a word": "x",
		"the name of an endpoint": "seal", "escaped slash": "cred%2Faaaa", "escaped dots": "%2e%2e", "NUL": "%00", "not UTF-8": "%ff",
		"spaces": "%20", "very long": strings.Repeat("a", 4000), "HTML": "%3Cscript%3E",
	}
	want := ""
	for _, endpoint := range []struct{ method, path string }{
		{"GET", "/api/v2/vault/"}, {"POST", "/api/v2/vault/rotate/"}, {"DELETE", "/api/v2/vault/"},
	} {
		cases := map[string]string{}
		for name, id := range ids {
			cases[name] = id
		}
		if endpoint.method != "DELETE" {
			cases["expired"] = expired
		}
		for name, id := range cases {
			r := s.Call(servertest.Request{Method: endpoint.method, Path: endpoint.path + id, Key: s.Key})
			r.Message(t, http.StatusForbidden)
			got := servertest.WithoutRequest(t, r)
			if want == "" {
				want = got
			}
			if got != want {
				t.Errorf("%s %s: %s, want %s", endpoint.method, name, got, want)
			}
			names := func(h http.Header) (names []string) {
				for name := range h {
					names = append(names, name)
				}
				slices.Sort(names)
				return names
			}
			if got, want := names(r.Header), []string{"Cache-Control", "Content-Length", "Content-Type", "Date", "X-Content-Type-Options",
				"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset", "X-Request-Id"}; !slices.Equal(got, want) {
				t.Errorf("%s %s: headers %v", endpoint.method, name, got)
			}
		}
	}
	weak := s.GrantKey(authz.ComplianceRead)
	if got := servertest.WithoutRequest(t, s.Call(servertest.Request{Method: "GET", Path: "/api/v2/vault/" + deleted, Key: weak})); got != want {
		t.Errorf("without the scope: %s, want %s", got, want)
	}
}

func TestDeniedAttemptsAreInTheAuditLog(t *testing.T) {
	s := newService(t)
	id := authz.NewID("cred")
	r := s.Get("/api/v2/vault/" + id)
	e := s.Entries("limit=1")[0]
	resource := e["resource"].(map[string]any)
	if e["event_type"] != "CREDENTIAL_UNSEALED" || e["outcome"] != "denied" || resource["id"] != id ||
		e["request_id"] != r.Header.Get("X-Request-ID") || e["source_ip"] != "127.0.0.1" {
		t.Errorf("entry %v", e)
	}
	weak := s.GrantKey(authz.AuditRead)
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: weak, Body: `{}`}).Message(t, http.StatusForbidden)
	if e := s.Entries("limit=1")[0]; e["event_type"] != "CREDENTIAL_SEALED" || e["outcome"] != "denied" {
		t.Errorf("entry %v", e)
	}
}

// Reads of one credential carry the tag of their version, and a change that names another one is a
// 412 that changes nothing.
func TestAChangeUnderATagIsMadeOnItsVersion(t *testing.T) {
	s := newService(t)
	id := s.Post("/api/v2/vault/seal", `{"name":"a/b","credential_type":"t","values":{"k":"one"}}`).Want(t, http.StatusCreated)["credential_id"].(string)
	call := func(method, path, body, ifMatch string) servertest.Reply {
		return s.Call(servertest.Request{Method: method, Path: "/api/v2/vault/" + path, Key: s.Key, Body: body, Header: http.Header{"If-Match": {ifMatch}}})
	}
	tags := func() (all []string) {
		for _, path := range []string{id, id + "/metadata", "by-name/a%2Fb"} {
			r := s.Get("/api/v2/vault/" + path)
			r.Want(t, http.StatusOK)
			all = append(all, r.Header.Get("ETag"))
		}
		return slices.Compact(all)
	}
	first := tags()
	if len(first) != 1 || !strings.HasPrefix(first[0], `"`) {
		t.Fatalf("the tags of one version: %v", first)
	}
	call("PUT", id, `{"values":{"k":"two"}}`, first[0]).Want(t, http.StatusOK)
	for _, r := range []servertest.Reply{
		call("PUT", id, `{"values":{"k":"three"}}`, first[0]), call("POST", "rotate/"+id, "", first[0]), call("DELETE", id, "", `"x", "y"`),
	} {
		if m := r.Message(t, http.StatusPreconditionFailed); !strings.Contains(m, "If-Match") || r.Header.Get("ETag") != "" {
			t.Errorf("%s, tag %q", m, r.Header.Get("ETag"))
		}
	}
	for _, malformed := range []string{"x", "'x'", `"x`, `"x";"y"`, "*, *", `"é"`} {
		call("DELETE", id, "", malformed).Message(t, http.StatusBadRequest)
	}
	second := tags()
	if got := s.Get("/api/v2/vault/"+id).Want(t, http.StatusOK); got["version"] != 2.0 || len(second) != 1 || second[0] == first[0] {
		t.Errorf("version %v with the tags %v", got["version"], second)
	}
	call("POST", "rotate/"+id, "", "*").Want(t, http.StatusOK)
	call("DELETE", id, "", strings.Join(tags(), ", ")).Want(t, http.StatusOK)
	if r := s.Get("/api/v2/vault/" + id); r.Status != http.StatusForbidden || r.Header.Get("ETag") != "" {
		t.Error(r.Status, r.Header)
	}
}

// A pod may learn that its condition does not hold when its cluster lets it unseal, too.
func TestAConditionOfAPodAsksForTheRightToRead(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	id := s.Post("/api/v2/vault/seal", `{"name":"n","credential_type":"t","values":{"k":"one"}}`).Want(t, http.StatusCreated)["credential_id"].(string)
	replace := func(ifMatch string) int {
		r := servertest.Request{Method: "PUT", Path: "/api/v2/vault/" + id, Bearer: servertest.ShopToken, Body: `{"values":{"k":"two"}}`}
		if ifMatch != "" {
			r.Header = http.Header{"If-Match": {ifMatch}}
		}
		return s.Call(r).Status
	}
	p.Allow(servertest.AllowOnly("replace"))
	if got := []int{replace(`"x"`), replace("")}; !slices.Equal(got, []int{http.StatusForbidden, http.StatusOK}) {
		t.Error("that may only replace:", got)
	}
	p.Allow(func(_, verb, _ string) bool { return verb == "replace" || verb == "unseal" })
	if got := replace(`"x"`); got != http.StatusPreconditionFailed {
		t.Error("that may unseal, too:", got)
	}
}

// A patch is a JSON merge patch of the values, in either media type.
func TestAPatchIsAMergePatchOfTheValues(t *testing.T) {
	s := newService(t)
	id := s.Post("/api/v2/vault/seal", `{"name":"n","credential_type":"t","values":{"user":"ada","password":"one"}}`).Want(t, http.StatusCreated)["credential_id"].(string)
	patch := func(body, contentType, key string) servertest.Reply {
		return s.Call(servertest.Request{Method: "PATCH", Path: "/api/v2/vault/" + id, Key: key, Body: body, ContentType: contentType})
	}
	patch(`{"values":{"password":"two","port":"1"}}`, "application/merge-patch+json", s.Key).Want(t, http.StatusOK)
	answer := patch(`{"values":{"port":null,"never":null}}`, "application/json", s.Key).Want(t, http.StatusOK)
	got := s.Get("/api/v2/vault/"+id).Want(t, http.StatusOK)
	if !reflect.DeepEqual(got["values"], map[string]any{"user": "ada", "password": "two"}) || answer["version"] != 3.0 || answer["values"] != nil {
		t.Errorf("%v, answered %v", got["values"], answer)
	}
	for _, contentType := range []string{"text/plain", "application/json-patch+json", "application/merge-patch+json; charset=latin1"} {
		if m := patch(`{"values":{"a":"b"}}`, contentType, s.Key).Message(t, http.StatusUnsupportedMediaType); !strings.Contains(m, "application/merge-patch+json") {
			t.Error(m)
		}
	}
	for _, invalid := range []string{`{"values":{}}`, `{}`, `{"values":null}`, `{"values":{"a":1}}`, `{"name":"m","values":{"a":"b"}}`, `{"values":{"user":null,"password":null}}`, `{"values":{"a/b":"c"}}`, `{"values":{"a":"b"},"ttl_days":null}`} {
		patch(invalid, "application/merge-patch+json", s.Key).Message(t, http.StatusUnprocessableEntity)
	}
	if m := patch(`{"values":{"user":null,"password":null}}`, "application/json", s.GrantKey(authz.VaultWrite)).Message(t, http.StatusForbidden); m != "access denied" {
		t.Error(m)
	}
}

// A put by name makes the credential once, and can be sent again.
func TestAPutByNameReplacesOrMakes(t *testing.T) {
	s := newService(t)
	path := "/api/v2/vault/by-name/" + url.PathEscape("shop/prod/db")
	send := func(body string, header http.Header) servertest.Reply {
		return s.Call(servertest.Request{Method: "PUT", Path: path, Key: s.Key, Body: body, Header: header})
	}
	made := send(`{"credential_type":"database","values":{"k":"one"},"ttl_days":7}`, nil).Want(t, http.StatusCreated)
	for range 2 {
		again := send(`{"credential_type":"database","values":{"k":"two"}}`, nil).Want(t, http.StatusOK)
		if again["credential_id"] != made["credential_id"] || again["expires_at"] != made["expires_at"] {
			t.Errorf("%v, then %v", made, again)
		}
	}
	read := s.Get(path)
	if got := read.Want(t, http.StatusOK); got["name"] != "shop/prod/db" || got["version"] != 3.0 || got["values"].(map[string]any)["k"] != "two" {
		t.Error(got)
	}
	send(`{"credential_type":"database","values":{"k":"three"}}`, http.Header{"If-Match": {read.Header.Get("ETag")}}).Want(t, http.StatusOK)
	send(`{"credential_type":"database","values":{"k":"lost"}}`, http.Header{"If-Match": {read.Header.Get("ETag")}}).Message(t, http.StatusPreconditionFailed)
	for _, name := range []string{"a//b", "/a", "a/", ".", "..", "a/../b"} {
		m := s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/by-name/" + strings.ReplaceAll(strings.ReplaceAll(name, ".", "%2E"), "/", "%2F"), Key: s.Key, Body: `{"credential_type":"t","values":{"k":"v"}}`}).Message(t, http.StatusUnprocessableEntity)
		if !strings.Contains(m, "segments") {
			t.Errorf("%q: %s", name, m)
		}
	}
	if n := len(s.Get("/api/v2/vault/list").Want(t, http.StatusOK)["credentials"].([]any)); n != 1 {
		t.Errorf("%d credentials", n)
	}
}

// A pod that may not unseal stores nothing by name. One that may, and may seal, makes a credential by
// its name, and replaces none.
func TestAPodNeedsBothRightsToReplaceByName(t *testing.T) {
	s := newService(t)
	p := s.UsePods(s.Tenant)
	send := func() int {
		return s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/by-name/n", Bearer: servertest.ShopToken, Body: `{"credential_type":"t","values":{"k":"v"}}`}).Status
	}
	allow := func(verbs ...string) {
		p.Allow(func(_, verb, _ string) bool { return slices.Contains(verbs, verb) })
	}
	allow("seal", "replace")
	if got := send(); got != http.StatusForbidden {
		t.Error("that may not unseal:", got)
	}
	allow("seal", "unseal")
	if got := []int{send(), send()}; !slices.Equal(got, []int{http.StatusCreated, http.StatusForbidden}) {
		t.Error("that may only seal and unseal:", got)
	}
	allow("seal", "unseal", "replace")
	if got := send(); got != http.StatusOK {
		t.Error("that may replace, too:", got)
	}
}
