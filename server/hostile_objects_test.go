package server_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// misspelt returns strings that a careless decoder takes for the base64 of b.
func misspelt(b []byte) map[string]string {
	s := base64.StdEncoding.EncodeToString(b)
	bare := strings.TrimRight(s, "=")
	all := map[string]string{
		"empty": "", "junk in front": "§" + s, "junk behind": s + "§", "a space": s + " ", "a space in front": " " + s,
		"a line break": s[:76] + "\n" + s[76:], "two line breaks": s + "\r\n",
		"NUL": s + "\x00", "more padding": s + "====", "hexadecimal": fmt.Sprintf("%x", b), "twice": s + s, "one less": s[:len(s)-1],
		"padding alone": "====", "data URL": "data:;base64," + s,
		"escaped": strings.NewReplacer("+", "%2B", "/", "%2F", "=", "%3D").Replace(s + "+"),
	}
	if u := base64.URLEncoding.EncodeToString(b); u != s {
		all["URL alphabet"] = u
	}
	if bare != s {
		all["no padding"] = bare
		const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
		last := strings.IndexByte(alphabet, bare[len(bare)-1])
		all["spare bits"] = bare[:len(bare)-1] + string(alphabet[last|1]) + s[len(bare):]
	}
	return all
}

// damaged returns b with each byte of every part flipped (of long parts each
// 9th), shortened and lengthened. The sizes are those of the parts but the last.
func damaged(b []byte, sizes ...int) map[string][]byte {
	all := map[string][]byte{"empty": {}, "one less": b[:len(b)-1], "one more": append(slices.Clone(b), 0), "without the first": b[1:],
		"one in front": append([]byte{b[0]}, b...),
		"half":         b[:len(b)/2], "twice": append(slices.Clone(b), b...), "zeros": make([]byte, len(b))}
	begin := 0
	for _, size := range append(sizes, len(b)) {
		end := min(begin+size, len(b))
		step := 1
		if end-begin > 100 {
			step = 9
		}
		for i := begin; i < end; i += step {
			flipped := slices.Clone(b)
			flipped[i] ^= 1 << (i % 8)
			all[fmt.Sprintf("byte %d flipped", i)] = flipped
		}
		last := slices.Clone(b)
		last[end-1] ^= 0x80
		all[fmt.Sprintf("byte %d flipped at the top", end-1)] = last
		if end < len(b) {
			all[fmt.Sprintf("cut at %d", end)] = b[:end]
		}
		begin = end
	}
	return all
}

// dataParts are the parts of ciphertext_data: version, key id, key version,
// salt, commitment, signature; the ciphertext follows.
var dataParts = []int{1, 16, 4, 32, 32, dualsig.DualSize}

func raw(t *testing.T, fields map[string]any, name string) []byte {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(fields[name].(string))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestADamagedEnvelopeNeverDecrypts(t *testing.T) {
	s := newService(t)
	encrypt := func(data string) map[string]any {
		t.Helper()
		fields := s.Post("/api/v2/encryption/encrypt", servertest.Marshal(t, map[string]string{"data": data})).Want(t, http.StatusOK)
		return map[string]any{"ciphertext_kem": fields["ciphertext_kem"], "ciphertext_data": fields["ciphertext_data"], "nonce": fields["nonce"]}
	}
	good, other := encrypt(servertest.Canary+" of forty bytes and a few, for the blocks"), encrypt(servertest.Canary+" of forty bytes and a few, for the blocks")
	var names []string
	var items []any
	add := func(field, name, value string) {
		item := maps.Clone(good)
		item[field] = value
		names, items = append(names, field+": "+name), append(items, item)
	}
	for field, sizes := range map[string][]int{"ciphertext_kem": nil, "ciphertext_data": dataParts, "nonce": nil} {
		b := raw(t, good, field)
		for name, changed := range damaged(b, sizes...) {
			add(field, name, base64.StdEncoding.EncodeToString(changed))
		}
		if field == "nonce" { // too short for a line break in the middle
			b = append(slices.Clone(b), make([]byte, 60)...)
		}
		for name, value := range misspelt(b) {
			add(field, name, value)
		}
		add(field, "of another", other[field].(string))
	}
	for part := range slices.Chunk(items, 50) {
		got := s.Post("/api/v2/encryption/decrypt/batch", servertest.Marshal(t, map[string]any{"items": append(slices.Clone(part), good)})).Want(t,
			http.StatusOK)["results"].([]any)
		for i, r := range got {
			result := r.(map[string]any)
			if i == len(part) {
				if result["data"] == nil || result["error"] != nil {
					t.Fatalf("the undamaged one did not decrypt: %v", result)
				}
				continue
			}
			if want := got[0]; result["data"] != nil || fmt.Sprint(result) != fmt.Sprint(want) {
				t.Errorf("%s: %v", names[i], result)
			}
		}
		names = names[len(part):]
	}
	// One by one it is one and the same refusal.
	answers := map[string]bool{}
	for i := 0; i < len(items); i += 29 {
		r := s.Post("/api/v2/encryption/decrypt", servertest.Marshal(t, items[i]))
		if r.Status != http.StatusBadRequest {
			t.Errorf("item %d: %d", i, r.Status)
		}
		answers[alike(t, r)] = true
	}
	if len(answers) != 1 || len(items) < 500 {
		t.Errorf("%d different refusals of %d envelopes: %v", len(answers), len(items), answers)
	}
}

func TestADamagedCiphertextOfVersion1NeverDecrypts(t *testing.T) {
	s := newService(t)
	as := func(path string, body any) servertest.Reply {
		return s.Call(servertest.Request{Method: "POST", Path: path, Bearer: s.Key, Body: servertest.Marshal(t, body)})
	}
	first := as("/v1/keys/generate", map[string]string{"name": "a", "algorithm": "ML-KEM-768"}).Want(t, http.StatusCreated)["key_id"].(string)
	second := as("/v1/keys/generate", map[string]string{"name": "b", "algorithm": "ML-KEM-768"}).Want(t, http.StatusCreated)["key_id"].(string)
	sealed := as("/v1/encrypt", map[string]string{"data": servertest.Canary, "algorithm": "ML-KEM-768", "key_id": first}).Want(t, http.StatusOK)
	b := raw(t, sealed, "encrypted_data")
	hostile := misspelt(b)
	for name, changed := range damaged(b, append([]int{1, envelope.KEMCiphertextSize, 12}, dataParts...)...) {
		hostile[name] = base64.StdEncoding.EncodeToString(changed)
	}
	answers := map[string]bool{}
	for place, path := range []string{"/v1/decrypt", "/v1/rewrap"} {
		for i, name := range slices.Sorted(maps.Keys(hostile)) {
			if !chosen(place, i) {
				continue
			}
			value := hostile[name]
			r := as(path, map[string]any{"encrypted_data": value, "key_id": first})
			if r.Status != http.StatusBadRequest {
				t.Errorf("%s, %s: %d %s", path, name, r.Status, r.Body)
			}
			answers[alike(t, r)] = true
		}
		r := as(path, map[string]any{"encrypted_data": sealed["encrypted_data"], "key_id": second}) // the tenant's, but another
		if r.Status != http.StatusBadRequest {
			t.Errorf("%s with another key: %d", path, r.Status)
		}
		answers[alike(t, r)] = true
		r = as(path, map[string]any{"encrypted_data": sealed["encrypted_data"], "key_id": ""}) // no key is not any key
		if detail := r.Want(t, http.StatusBadRequest)["error"].(map[string]any)["details"].(string); !strings.Contains(detail, "key_id") {
			t.Errorf("%s without a key: %s", path, detail)
		}
		for _, id := range []string{servertest.Canary, strings.ToUpper(first), first + "\x00", authz.NewID("tkey"), strings.Repeat("a", 5000)} {
			if r := as(path, map[string]any{"encrypted_data": sealed["encrypted_data"], "key_id": id}); r.Status != http.StatusNotFound || echoed(r) {
				t.Errorf("%s with the key %.40q: %d %s", path, id, r.Status, r.Body)
			}
		}
		as(path, map[string]any{"encrypted_data": sealed["encrypted_data"], "key_id": first}).Want(t, http.StatusOK)
	}
	if len(answers) != 1 {
		t.Errorf("%d different refusals: %v", len(answers), answers)
	}
}

func TestADamagedSignatureNeverVerifies(t *testing.T) {
	s := newService(t)
	data := "data " + servertest.Canary
	signed := s.Post("/api/v2/encryption/sign", servertest.Marshal(t, map[string]string{"data": data})).Want(t, http.StatusOK)
	good := map[string]any{"data": data, "pqc_signature": signed["pqc_signature"], "hmac_signature": signed["hmac_signature"]}
	var names []string
	var items []any
	for _, field := range []string{"pqc_signature", "hmac_signature"} {
		b := raw(t, good, field)
		add := func(name, value string) {
			item := maps.Clone(good)
			item[field] = value
			names, items = append(names, field+": "+name), append(items, item)
		}
		for name, changed := range damaged(b) {
			add(name, base64.StdEncoding.EncodeToString(changed))
		}
		for name, value := range misspelt(b) {
			add(name, value)
		}
	}
	for _, changed := range []string{data + "\x00", data + " ", strings.ToUpper(data), data[1:], "\ufeff" + data} {
		item := maps.Clone(good)
		item["data"] = changed
		names, items = append(names, "data"), append(items, item)
	}
	names, items = append(names, "swapped"), append(items, map[string]any{"data": data, "pqc_signature": good["hmac_signature"],
		"hmac_signature": good["pqc_signature"]})
	for part := range slices.Chunk(items, 50) {
		got := s.Post("/api/v2/encryption/verify/batch", servertest.Marshal(t, map[string]any{"items": append(slices.Clone(part), good)})).Want(t,
			http.StatusOK)["results"].([]any)
		for i, r := range got {
			if r.(map[string]any)["valid"] != (i == len(part)) {
				t.Errorf("%s: %v", append(slices.Clone(names[:len(part)]), "undamaged")[i], r)
			}
		}
		names = names[len(part):]
	}
}

// What the schema lets through and anybody can see is no manifest is one refusal
// of resealing, which says nothing of it, and one code of checking, which names
// the field. Neither repeats what was sent, but for data keys, which have to be
// named.
func TestAMalformedManifestIsNotRepeated(t *testing.T) {
	s := newService(t)
	good := servertest.Marshal(t, s.Manifest(t, "shop", "db", servertest.Canary+"!")) // a length that base64 pads
	fresh := func() map[string]any {
		var m map[string]any
		if err := json.Unmarshal([]byte(good), &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	sealedOf := func(m map[string]any) map[string]any { return m["sealed"].(map[string]any) }
	valuesOf := func(m map[string]any) map[string]any { return sealedOf(m)["values"].(map[string]any) }
	changes := make(map[string]func(map[string]any))
	for _, text := range []string{"/" + servertest.Canary, servertest.Canary + "\x00", servertest.Canary + "\n", strings.ToUpper(servertest.Canary), "-" + servertest.Canary, servertest.Canary + "ä", "$(" + servertest.Canary + ")", " " + servertest.Canary} {
		for _, field := range []string{"namespace", "name", "credential_type"} {
			if field != "credential_type" || text != strings.ToUpper(servertest.Canary) { // a type may have capitals
				changes[field+" "+text] = func(m map[string]any) { m[field] = text }
			}
		}
		for _, field := range []string{"suite", "key_id"} {
			changes[field+" "+text] = func(m map[string]any) { sealedOf(m)[field] = text }
		}
		changes["data "+text] = func(m map[string]any) { valuesOf(m)["password"].(map[string]any)["data"] = text }
		if text != strings.ToUpper(servertest.Canary) && text[0] != '-' { // data keys may
			changes["data key "+text] = func(m map[string]any) { valuesOf(m)[text] = valuesOf(m)["password"] }
		}
	}
	cut := valuesOf(fresh())["password"].(map[string]any)["data"].(string)
	b, err := base64.StdEncoding.DecodeString(cut)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range misspelt(b) {
		if name != "empty" && name != "hexadecimal" { // the schema's to refuse, and base64 of something else
			changes["data, "+name] = func(m map[string]any) { valuesOf(m)["password"].(map[string]any)["data"] = text }
		}
	}
	refusals := map[string]bool{}
	for name, change := range changes {
		m := fresh()
		change(m)
		r := s.Post("/api/v2/sealing-key/reseal", servertest.Marshal(t, m))
		if r.Status != http.StatusUnprocessableEntity || echoed(r) {
			t.Errorf("%q: resealed with %d %s", name, r.Status, r.Body)
		}
		refusals[alike(t, r)] = true
		r = s.Post("/api/v2/sealing-key/check", servertest.Marshal(t, m))
		if v := r.Want(t, http.StatusOK); v["accepted"] != false || v["code"] != "malformed" || echoed(r) && !strings.HasPrefix(name, "data key") {
			t.Errorf("%q: checked with %s", name, r.Body)
		}
	}
	if len(refusals) != 1 || len(changes) < 50 {
		t.Errorf("%d different refusals of %d manifests: %v", len(refusals), len(changes), refusals)
	}
	s.Post("/api/v2/sealing-key/reseal", good).Want(t, http.StatusOK)
}

// Whatever belongs to another tenant is there for nobody else: it is answered
// like an id that never was, and nothing becomes of it.
func TestWhatBelongsToAnotherTenantIsNotThere(t *testing.T) {
	s := newService(t)
	owner, thief := s.Register("owner@example.org"), s.Register("thief@example.com")
	verify := func(address string) {
		t.Helper()
		s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/verify-email", Body: servertest.Marshal(t, map[string]string{"token": s.TokenMailedTo(address, 1)})}).Want(t,
			http.StatusOK)
	}
	verify(owner.Email)
	verify(thief.Email)
	as := func(a servertest.Account, method, path string, body any) servertest.Reply {
		t.Helper()
		r := servertest.Request{Method: method, Path: path, Bearer: a.Access}
		if body != nil {
			r.Body = servertest.Marshal(t, body)
		}
		return s.Call(r)
	}
	apiKey := func(a servertest.Account) (id, key string) {
		t.Helper()
		made := as(a, "POST", "/api/v2/api-keys", map[string]any{"name": "k", "scopes": []string{"crypto:encrypt", "crypto:decrypt", "keys:read",
			"keys:write"}}).Want(t, http.StatusCreated)
		return made["key_id"].(string), made["api_key"].(string)
	}
	ownersKeyID, ownersKey := apiKey(owner)
	_, thiefsKey := apiKey(thief)
	v1 := func(key, path string, body any) servertest.Reply {
		t.Helper()
		return s.Call(servertest.Request{Method: "POST", Path: path, Bearer: key, Body: servertest.Marshal(t, body)})
	}
	const algorithm = "ML-KEM-768"
	name := "owners-" + servertest.Canary
	cred := as(owner, "POST", "/api/v2/vault/seal", map[string]any{"name": name, "credential_type": "t",
		"values": map[string]string{"k": "v"}}).Want(t, http.StatusCreated)["credential_id"].(string)
	key := v1(ownersKey, "/v1/keys/generate", map[string]any{"name": "k", "algorithm": algorithm}).Want(t, http.StatusCreated)["key_id"].(string)
	thiefsOwn := v1(thiefsKey, "/v1/keys/generate", map[string]any{"name": "k", "algorithm": algorithm}).Want(t, http.StatusCreated)["key_id"].(string)
	sealed := v1(ownersKey, "/v1/encrypt", map[string]any{"data": servertest.Canary, "algorithm": algorithm, "key_id": key}).Want(t, http.StatusOK)
	enveloped := as(owner, "POST", "/api/v2/encryption/encrypt", map[string]any{"data": servertest.Canary}).Want(t, http.StatusOK)
	signed := as(owner, "POST", "/api/v2/encryption/sign", map[string]any{"data": servertest.Canary}).Want(t, http.StatusOK)
	signed["data"] = servertest.Canary
	me := as(owner, "GET", "/api/v2/auth/me", nil).Want(t, http.StatusOK)
	user := me["user"].(map[string]any)["user_id"].(string)
	session := as(owner, "GET", "/api/v2/auth/sessions", nil).Want(t, http.StatusOK)["sessions"].([]any)[0].(map[string]any)["session_id"].(string)
	invitation := as(owner, "POST", "/api/v2/members/invite", map[string]any{"email": "new@example.org", "role": "member"}).Want(t,
		http.StatusCreated)["invitation_id"].(string)

	values := map[string]any{"values": map[string]string{"k": "stolen"}}
	for _, c := range []struct {
		method, path, id, none string
		body                   any
		want                   int
	}{
		{"GET", "/api/v2/vault/%s", cred, authz.NewID("cred"), nil, 403},
		{"PUT", "/api/v2/vault/%s", cred, authz.NewID("cred"), values, 403},
		{"GET", "/api/v2/vault/%s/versions", cred, authz.NewID("cred"), nil, 403},
		{"POST", "/api/v2/vault/rotate/%s", cred, authz.NewID("cred"), nil, 403},
		{"DELETE", "/api/v2/vault/%s", cred, authz.NewID("cred"), nil, 403},
		{"GET", "/api/v2/vault/by-name/%s", name, "nobodys", nil, 403},
		{"DELETE", "/api/v2/auth/sessions/%s", session, authz.NewID("ses"), nil, 404},
		{"PUT", "/api/v2/members/%s", user, authz.NewID("usr"), map[string]string{"role": "member"}, 404},
		{"DELETE", "/api/v2/members/%s", user, authz.NewID("usr"), nil, 404},
		{"DELETE", "/api/v2/members/invitations/%s", invitation, authz.NewID("inv"), nil, 404},
		{"DELETE", "/api/v2/api-keys/%s", ownersKeyID, authz.NewID("key"), nil, 404},
	} {
		foreign, none := as(thief, c.method, fmt.Sprintf(c.path, c.id), c.body), as(thief, c.method, fmt.Sprintf(c.path, c.none), c.body)
		if foreign.Status != c.want || none.Status != c.want || alike(t, foreign) != alike(t, none) {
			t.Errorf("%s %s: %d %s, and %d %s", c.method, c.path, foreign.Status, foreign.Body, none.Status, none.Body)
		}
	}
	none := authz.NewID("tkey")
	for path, body := range map[string]map[string]any{
		"/v1/encrypt": {"data": "d", "algorithm": algorithm}, "/v1/decrypt": {"encrypted_data": sealed["encrypted_data"]},
		"/v1/rewrap":         {"encrypted_data": sealed["encrypted_data"]},
		"/v1/keys/%s/rotate": {"re_encrypt_data": true},
	} {
		with := func(id string) servertest.Reply {
			if !strings.Contains(path, "%s") {
				body["key_id"] = id
			}
			return v1(thiefsKey, strings.Replace(path, "%s", id, 1), body)
		}
		if foreign, never := with(key), with(none); foreign.Status != 404 || alike(t, foreign) != alike(t, never) {
			t.Errorf("%s: %d %s, and %s", path, foreign.Status, foreign.Body, never.Body)
		}
		if strings.Contains(path, "crypt") && path != "/v1/encrypt" || path == "/v1/rewrap" {
			if r := with(thiefsOwn); r.Status != 400 {
				t.Errorf("%s with an own key: %d", path, r.Status)
			}
		}
	}
	if r := as(thief, "POST", "/api/v2/encryption/decrypt", enveloped); r.Status != 400 || echoed(r) {
		t.Errorf("another tenant's envelope: %d %s", r.Status, r.Body)
	}
	batch := as(thief, "POST", "/api/v2/encryption/decrypt/batch", map[string]any{"items": []any{enveloped}})
	if r := batch.Want(t, http.StatusOK)["results"].([]any)[0].(map[string]any); r["data"] != nil || r["error"] == nil {
		t.Errorf("another tenant's envelope in a batch: %v", r)
	}
	if r := as(thief, "POST", "/api/v2/encryption/verify", signed).Want(t, http.StatusOK); r["valid"] != false {
		t.Errorf("another tenant's signatures hold")
	}

	// All of it is still there for its owner.
	if got := as(owner, "GET", "/api/v2/vault/"+cred, nil).Want(t, http.StatusOK); got["version"] != 1.0 || fmt.Sprint(got["values"]) != "map[k:v]" {
		t.Errorf("the credential: %v", got)
	}
	if got := v1(ownersKey, "/v1/decrypt", map[string]any{"encrypted_data": sealed["encrypted_data"], "key_id": key}).Want(t,
		http.StatusOK); got["data"] != servertest.Canary || got["key_version"] != 1.0 {
		t.Errorf("the data: %v", got)
	}
	if got := as(owner, "POST", "/api/v2/encryption/verify", signed).Want(t, http.StatusOK); got["valid"] != true {
		t.Error("the owner's signatures do not hold")
	}
	members := as(owner, "GET", "/api/v2/members", nil).Want(t, http.StatusOK)
	if fmt.Sprint(members["members"].([]any)[0].(map[string]any)["role"], len(members["invitations"].([]any))) != "owner1" {
		t.Errorf("the members: %v", members)
	}
}
