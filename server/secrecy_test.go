package server

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
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
		{method: "GET", path: "/api/v2/vault/list?q=" + canary},
		{method: "GET", path: "/api/v2/vault/list?status=" + canary},
		{method: "GET", path: "/api/v2/vault/list?credential_type=" + canary},
		{method: "GET", path: "/api/v2/vault/list?expires_before=" + canary},
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

// mayReturn are the fields in which an operation's successful answer gives back
// what was sent to it or to another: what it is for.
var mayReturn = map[string]string{
	"v1 decryptData": "data", "v2 decryptData": "data", "v2 decryptBatch": "data",
	"v1 generateKey": "name", "v1 listKeys": "name", "v1 rotateKey": "name",
	"v2 listKeys": "name", "v2 createKey": "name", "v2 getKey": "name", "v2 rotateKey": "name",
	"v2 sealCredential": "name credential_type", "v2 listCredentials": "name credential_type",
	"v2 getVaultSummary": "name credential_type", "v2 getCredentialMetadata": "name credential_type",
	"v2 replaceCredential": "name credential_type", "v2 rotateCredential": "name credential_type",
	"v2 unsealCredential": "name credential_type values", "v2 unsealCredentialByName": "name credential_type values",
	"v2 registerUser": "email name", "v2 acceptInvitation": "email name", "v2 getAccount": "email name",
	"v2 listMembers": "email", "v2 inviteMember": "email", "v2 changeMember": "email",
	"v2 createAPIKey": "name", "v2 listAPIKeys": "name", "v2 createTenantAPIKey": "name",
	"v2 listTenants": "name", "v2 createTenant": "name", "v2 activateTenant": "name", "v2 setTenantLimits": "name",
	"v2 resealManifest": "sealed", "v2 checkManifest": "message", // with the data keys of the values
}

// A word in every place of every request: whatever of it is a secret, a name or
// an address, it is in no log, entry, metric, mail, header or error.
func TestNothingThatIsSentEndsUpInTheWrongPlace(t *testing.T) {
	w := newWorld(t, "c4n4ry7q2w9x8z")
	issued := &issued{w: w}
	all := operations(t)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		o := all[name]
		r := w.authorized(o, examples[name](w, o))
		got := w.call(r)
		if got.status >= 300 {
			t.Errorf("%s: %d %s", name, got.status, got.body)
		}
		issued.hold(o, r, got)
		valid := w.authorized(o, examples[name](w, o))
		for _, r := range w.spoiled(o, valid) {
			issued.hold(o, r, w.call(r))
		}
	}
	var left []request // for a service that has lost its store
	for name, o := range all {
		if access[name] == "public" || access[name] == "refresh" {
			left = append(left, examples[name](w, o))
		}
	}
	issued.mails()
	if issued.count() < 100 {
		t.Errorf("only %d secrets were issued: the test has lost sight of them", issued.count())
	}
	metrics := w.call(request{method: "GET", path: "/metrics"})
	issued.absent("the metrics", metrics.body)
	entries, err := json.Marshal(w.records(1))
	w.must(err)
	issued.absent("the entries", entries)
	var export bytes.Buffer
	w.must(w.server.config.Audit.Export(context.Background(), &export, 0))
	issued.absent("the exported entries", export.Bytes())
	w.must(w.store.Close())
	for _, r := range left {
		if got := w.call(r); got.status != http.StatusOK { // the sealing key is known
			got.message(t, http.StatusServiceUnavailable)
			issued.absent("the answer of a service without a store", got.body)
		}
	}
	issued.absent("the log", []byte(w.log.String()))
}

// spoiled returns requests with the word wherever a request has a place for it,
// by what the contract and a valid request say.
func (w *world) spoiled(o operation, valid request) (all []request) {
	add := func(change func(*request)) {
		r := valid
		r.header = valid.header.Clone()
		if r.header == nil {
			r.header = http.Header{}
		}
		change(&r)
		all = append(all, r)
	}
	word := w.word
	body := func(text string) { add(func(r *request) { r.body = text }) }
	header := func(pairs ...string) {
		add(func(r *request) {
			for i := 0; i < len(pairs); i += 2 {
				r.header.Set(pairs[i], pairs[i+1])
			}
		})
	}
	header("X-Request-ID", word, "User-Agent", word, "X-Forwarded-For", word, "X-Real-IP", word, "Forwarded", "for="+word,
		"Referer", "http://"+word, "Traceparent", word, "X-"+word, word, "Accept", word, "Accept-Language", word, "Origin", "http://"+word)
	header("Idempotency-Key", word+" "+word)
	header("Cookie", "accessToken="+word+"; refreshToken="+word)
	header("Cookie", word+"="+word, "Sec-Fetch-Site", "cross-site", "Origin", "http://"+word)
	token := word + "." + word + "." + word
	for _, authorization := range []string{word, "Bearer " + word, "Basic " + word, "Bearer lk_live_" + word, "Bearer " + token} {
		add(func(r *request) { r.key, r.bearer, r.header = "", "", http.Header{"Authorization": {authorization}} })
	}
	for _, key := range []string{word, "lk_live_" + word} {
		add(func(r *request) { r.key, r.bearer, r.header = key, "", nil })
	}
	for _, contentType := range []string{word + "/" + word, "application/json; charset=" + word, "application/json; " + word} {
		add(func(r *request) { r.body, r.contentType = `{"`+word+`":1}`, contentType })
	}
	for _, text := range []string{word, `"` + word + `"`, `["` + word + `"]`, `{"` + word + `":"` + word + `","` + word + `":1}`, `{"x":` + word + `}`} {
		body(text)
	}
	for _, id := range []string{word, "%00" + word, word + "%2F" + word, word + "%ff", "cred_" + word, word + "/" + word} {
		add(func(r *request) { r.path = o.at(id) })
	}
	add(func(r *request) { r.path += "/" + word })
	add(func(r *request) { r.method = word })
	bare, _, _ := strings.Cut(valid.path, "?")
	query := func(text string) { add(func(r *request) { r.path = bare + "?" + text }) }
	query(word + "=" + word)
	query("%zz" + word)
	for _, p := range o.parameters {
		if p.Value.In == "query" {
			query(p.Value.Name + "=" + word)
			query(p.Value.Name + "=" + word + "&" + p.Value.Name + "=" + word)
			query(p.Value.Name + "=" + word + "%00")
		}
	}
	if valid.body == "" {
		return all
	}
	var fields any
	w.must(json.Unmarshal([]byte(valid.body), &fields))
	for _, other := range []any{
		word, word + "@example.org", word + "@" + word, "/" + word, word + "\x00",
		strings.Repeat(word, 1000), []any{word}, object{word: word}, object{"/" + word: word},
	} {
		text, _ := other.(string)
		if o.name == "v2 acceptRollback" && text != "" && len(text) < 200 && !strings.HasSuffix(text, "\x00") {
			continue // a reason is in the log for good, as the contract says
		}
		for _, changed := range replaced(fields, other) {
			body(marshal(w.t, changed))
		}
	}
	withMore := maps.Clone(fields.(object))
	withMore[word] = word
	body(marshal(w.t, withMore))
	for name := range fields.(object) {
		without := maps.Clone(fields.(object))
		delete(without, name)
		without[strings.ToUpper(name)] = word
		body(marshal(w.t, without))
	}
	return all
}

// replaced returns copies of a JSON value with other in the place of each of its
// parts.
func replaced(v, other any) (all []any) {
	switch v := v.(type) {
	case object:
		for name, part := range v {
			for _, changed := range append(replaced(part, other), other) {
				c := maps.Clone(v)
				c[name] = changed
				all = append(all, c)
			}
		}
	case []any:
		for i, part := range v {
			for _, changed := range append(replaced(part, other), other) {
				c := slices.Clone(v)
				c[i] = changed
				all = append(all, c)
			}
		}
	}
	return all
}

// issued are the secrets that the service made itself: tokens and API keys.
type issued struct {
	w   *world
	all []string
}

func (i *issued) count() int { return len(i.all) }

// hold checks an answer and takes note of the secrets in it.
func (i *issued) hold(o operation, r request, got reply) {
	i.w.t.Helper()
	what := o.name + " as " + r.method + " " + r.path
	for name, values := range got.header {
		if strings.Contains(strings.ToLower(name+strings.Join(values, "")), i.w.word) {
			i.w.t.Errorf("%s: the header %s has it", what, name)
		}
	}
	for _, old := range i.all {
		if bytes.Contains(got.body, []byte(old)) {
			i.w.t.Errorf("%s: the answer has a secret of another one", what)
		}
	}
	if got.status >= 300 {
		i.absent(what+" with "+r.body[:min(len(r.body), 200)], got.body)
		return
	}
	if o.name == "v2 takeBackup" { // names and addresses are what is inside, and it is larger than a message should be
		i.absent(what, got.body)
		inside := decrypted(i.w.t, got.body)
		i.issuedOnly(what+", inside", inside)
		for _, form := range spellings(i.w.password()) {
			if bytes.Contains(inside, []byte(form)) {
				i.w.t.Errorf("%s: it has a password", what)
			}
		}
		return
	}
	if o.name == "v2 exportAuditLog" { // is the entries, which are looked through at the end
		return
	}
	if !strings.HasPrefix(got.header.Get("Content-Type"), "application/json;") { // a document of its own format
		i.absent(what, got.body)
		return
	}
	var answer any
	i.w.must(json.Unmarshal(got.body, &answer))
	i.walk(what, answer, strings.Fields(mayReturn[o.name]))
	for _, name := range []string{"access_token", "api_key"} {
		if secret, ok := answer.(object)[name].(string); ok {
			i.all = append(i.all, secret)
		}
	}
	for _, c := range (&http.Response{Header: got.header}).Cookies() {
		if c.Name == "refreshToken" && c.Value != "" {
			i.all = append(i.all, c.Value)
		}
	}
}

// walk looks for the word in an answer beside the fields that may have it.
func (i *issued) walk(what string, v any, but []string) {
	i.w.t.Helper()
	switch v := v.(type) {
	case object:
		for name, part := range v {
			i.absent(what, []byte(name))
			if !slices.Contains(but, name) {
				i.walk(what+", "+name, part, but)
			}
		}
	case []any:
		for _, part := range v {
			i.walk(what, part, but)
		}
	case string:
		i.absent(what, []byte(v))
	}
}

// mails checks what was mailed, and takes note of the tokens.
func (i *issued) mails() {
	i.w.t.Helper()
	i.w.mails.mu.Lock()
	defer i.w.mails.mu.Unlock()
	for _, e := range i.w.mails.received {
		i.forms("a mail", []byte(e.From+e.Subject+e.Text))
		if m := mailedToken.FindStringSubmatch(e.Text); m != nil {
			i.all = append(i.all, m[1])
		}
	}
}

// absent fails the test when text has the word in any form, or a secret.
func (i *issued) absent(what string, text []byte) {
	i.w.t.Helper()
	i.forms(what, text)
	i.issuedOnly(what, text)
}

// issuedOnly fails the test when text has a secret that the service made.
func (i *issued) issuedOnly(what string, text []byte) {
	i.w.t.Helper()
	for _, secret := range append(slices.Collect(maps.Values(i.w.keys)), i.all...) {
		if bytes.Contains(text, []byte(secret)) {
			i.w.t.Errorf("%s: it has a token or an API key", what)
		}
	}
}

func (i *issued) forms(what string, text []byte) {
	i.w.t.Helper()
	for _, form := range append(spellings(i.w.word), "of twelve bytes", testPassword, "owner@example") {
		if bytes.Contains(text, []byte(form)) {
			i.w.t.Errorf("%s: it has %s: %.500s", what, form, text)
		}
	}
}

// spellings returns the forms in which a word may be in a text.
func spellings(word string) []string {
	forms := []string{word, strings.ToUpper(word), hex.EncodeToString([]byte(word))}
	for n := range 3 { // in base64, wherever it begins
		encoded := base64.RawStdEncoding.EncodeToString(append(make([]byte, n), word...))
		forms = append(forms, encoded[4:len(encoded)-2])
	}
	return forms
}

// Whatever is given to the service to keep, and whatever it is only shown, is in
// a backup as little as in the answers, the log and the entries about it.
func TestABackupHasNoSecret(t *testing.T) {
	s := newService(t)
	const word = "c4n4ry7q2w9x8z"
	post := func(path string, body any) map[string]any {
		t.Helper()
		r := request{method: "POST", path: path, key: s.key, body: marshal(t, body)}
		if strings.HasPrefix(path, "/v1/") {
			r.key, r.bearer = "", s.key
		}
		got := s.call(r)
		if got.status >= 300 {
			t.Fatalf("%s: %d %s", path, got.status, got.body)
		}
		for _, form := range spellings(word) {
			if bytes.Contains(got.body, []byte(form)) && !strings.HasSuffix(path, "/decrypt") {
				t.Errorf("%s: the answer has %s", path, form)
			}
		}
		var fields map[string]any
		if err := json.Unmarshal(got.body, &fields); err != nil {
			t.Fatal(err)
		}
		return fields
	}
	values := object{"key": word}
	id := post("/api/v2/vault/seal", object{"name": "visible-name", "credential_type": "t", "values": values})["credential_id"].(string)
	s.call(request{method: "PUT", path: "/api/v2/vault/" + id, key: s.key, body: marshal(t, object{"values": values})}).want(t, http.StatusOK)
	post("/api/v2/vault/rotate/"+id, object{})
	s.call(request{method: "POST", path: "/api/v2/vault/seal", key: s.key, header: http.Header{"Idempotency-Key": {word}},
		body: marshal(t, object{"name": "n", "credential_type": "t", "values": values})}).want(t, http.StatusCreated)
	sealed := post("/api/v2/encryption/encrypt", object{"data": word})
	post("/api/v2/encryption/decrypt", sealed)
	post("/api/v2/encryption/sign", object{"data": word})
	post("/v1/encrypt", object{"data": word, "algorithm": "ML-KEM-768"})
	s.call(request{method: "POST", path: "/api/v2/auth/register", body: marshal(t, object{"email": "a@example.org", "password": word, "tenant_name": "T"})}).want(t, http.StatusCreated)
	session := s.login("a@example.org", word)
	m := s.manifest(t, "shop", "db", word)
	again := post("/api/v2/sealing-key/reseal", m)
	check := object{"namespace": "shop", "name": "db", "credential_type": "database", "sealed": again["sealed"]}
	if post("/api/v2/sealing-key/check", check)["accepted"] != true {
		t.Error("what was resealed is not accepted")
	}
	check["name"] = "other"
	if post("/api/v2/sealing-key/check", check)["accepted"] != false {
		t.Error("what was sealed for another object is accepted")
	}
	owned := s.rotatedTo(s.operator(), "former "+word, word) // a current and a former version
	if _, err := s.vault.UnsealVersion(t.Context(), s.operator(), owned.ID, 1); err != nil {
		t.Fatal(err)
	}

	got := s.call(request{method: "POST", path: "/api/v2/system/backup", key: s.systemKey(), body: backupBody(t)})
	if got.status != http.StatusOK {
		t.Fatalf("%d: %s", got.status, got.body)
	}
	inside := decrypted(t, got.body)
	for _, visible := range []string{"visible-name", owned.ID} {
		if !bytes.Contains(inside, []byte(visible)) || bytes.Contains(got.body, []byte(visible)) {
			t.Fatalf("a backup of %d bytes in which %s is not found, or without opening it", len(got.body), visible)
		}
	}
	entries, err := json.Marshal(s.records(1))
	if err != nil {
		t.Fatal(err)
	}
	metrics := s.call(request{method: "GET", path: "/metrics"}).body
	for what, text := range map[string][]byte{"the backup": got.body, "what is inside": inside, "the entries": entries, "the log": []byte(s.log.String()), "the metrics": metrics} {
		for _, form := range append(spellings(word), s.key, session.access, session.refresh) {
			if bytes.Contains(text, []byte(form)) {
				t.Errorf("%s: it has %s", what, form)
			}
		}
	}
}
