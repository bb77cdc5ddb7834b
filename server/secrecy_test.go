package server_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// A secret ends up in the wrong place by a caller's mistake, too: whatever
// place of a request it is in, it must come back only as the value of an unseal.
func TestASecretIsOnlyEverTheValueOfAnUnseal(t *testing.T) {
	s := newService(t)
	const canary = "tr0ub4dor-and-3"
	id := s.Seal(canary)
	if r := s.Get("/api/v2/vault/" + id); !bytes.Contains(r.Body, []byte(canary)) {
		t.Fatalf("the value did not come back: %s", r.Body)
	}
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/rotate/" + id, Key: s.Key}).Want(t, http.StatusOK)

	sealPath := "/api/v2/vault/seal"
	quoted := `"` + canary + `"`
	for _, r := range []servertest.Request{
		{Method: "GET", Path: "/api/v2/vault/list?name=" + canary},
		{Method: "GET", Path: "/api/v2/vault/list?cursor=" + canary},
		{Method: "GET", Path: "/api/v2/vault/list?q=" + canary},
		{Method: "GET", Path: "/api/v2/vault/list?status=" + canary},
		{Method: "GET", Path: "/api/v2/vault/list?credential_type=" + canary},
		{Method: "GET", Path: "/api/v2/vault/list?expires_before=" + canary},
		{Method: "GET", Path: "/api/v2/vault/list?limit=" + canary},
		{Method: "GET", Path: "/api/v2/audit/logs?event_type=" + canary},
		{Method: "GET", Path: "/api/v2/audit/logs?user_id=" + canary},
		{Method: "GET", Path: "/api/v2/audit/logs?from=" + canary},
		{Method: "GET", Path: "/api/v2/audit/logs?hours=" + canary},
		{Method: "GET", Path: "/api/v2/audit/logs?x=" + canary + "%zz"},
		{Method: "GET", Path: "/api/v2/vault/" + canary},
		{Method: "DELETE", Path: "/api/v2/vault/" + canary},
		{Method: "POST", Path: "/api/v2/vault/rotate/" + canary},
		{Method: "GET", Path: "/" + canary},
		{Method: canary, Path: "/" + canary},
		{Method: canary, Path: sealPath},
		{Method: "GET", Path: "/api/v2/vault/list", Key: canary},
		{Method: "GET", Path: "/api/v2/vault/list", Key: "lk_live_" + canary},
		{Method: "GET", Path: "/api/v2/vault/list", Header: http.Header{
			"X-Request-ID": {canary}, "User-Agent": {canary}, "X-Forwarded-For": {canary}, "Referer": {canary}, "Cookie": {canary},
			"Authorization": {"Bearer " + canary}, "Traceparent": {canary}, "X-" + canary: {canary}, "Accept": {canary},
		}},
		{Method: "POST", Path: sealPath, Body: quoted},
		{Method: "POST", Path: sealPath, Body: quoted, ContentType: canary + "/" + canary},
		{Method: "POST", Path: sealPath, Body: quoted, ContentType: "application/json; charset=" + canary},
		{Method: "POST", Path: sealPath, Body: canary},
		{Method: "POST", Path: sealPath, Body: `{"` + canary + `":` + quoted + `,"` + canary + `":1}`},
		{Method: "POST", Path: sealPath, Body: `{"name":[` + quoted + `]}`},
		{Method: "POST", Path: sealPath, Body: `{"name":"n","credential_type":"t","values":` + quoted + `}`},
		{Method: "POST", Path: sealPath, Body: `{"name":"n","credential_type":"t","values":{"` + canary + `":[` + quoted + `]}}`},
		{Method: "POST", Path: sealPath, Body: `{"name":"n","credential_type":"t","values":{"/` + canary + `":` + quoted + `}}`},
		{Method: "POST", Path: sealPath, Body: `{"name":"n","credential_type":"/` + canary + `","values":{"k":` + quoted + `}}`},
		{Method: "POST", Path: sealPath, Body: `{"name":"\u0000` + canary + `","credential_type":"t","values":{"k":` + quoted + `}}`},
		{Method: "POST", Path: sealPath, Body: `{"name":"n","credential_type":"t","values":{"k":` + quoted + `},"ttl_days":` + quoted + `}`},
		{Method: "POST", Path: sealPath, Body: `{"name":"n","credential_type":"t","values":{"k":` + quoted + `},"ttl_days":0}`},
		{Method: "POST", Path: sealPath, Body: `{"name":"n","credential_type":"t","values":{"k":` + quoted + strings.Repeat(" ", 1<<20) + `}}`},
	} {
		if r.Key == "" && r.Header == nil {
			r.Key = s.Key
		}
		got := s.Call(r)
		if bytes.Contains(got.Body, []byte(canary)) {
			t.Errorf("%s %s is answered with it: %s", r.Method, r.Path, got.Body)
		}
		for name, values := range got.Header {
			if strings.Contains(name+strings.Join(values, ""), canary) {
				t.Errorf("%s %s is answered with it in %s", r.Method, r.Path, name)
			}
		}
	}
	for _, query := range []string{"limit=100", "limit=100&event_type=CREDENTIAL_UNSEALED"} {
		if r := s.Get("/api/v2/audit/logs?" + query); r.Status != http.StatusOK || bytes.Contains(r.Body, []byte(canary)) {
			t.Errorf("it is in the audit log: %d", r.Status)
		}
	}
	if err := s.Store.Close(); err != nil { // errors with causes, too
		t.Fatal(err)
	}
	for _, path := range []string{"/api/v2/vault/" + canary, "/api/v2/audit/logs?user_id=" + canary} {
		s.Get(path).Message(t, http.StatusServiceUnavailable)
	}
	if strings.Contains(s.Logged.String(), canary) {
		t.Error("it is in the log")
	}
	if strings.Contains(s.Logged.String(), s.Key) {
		t.Error("the API key is in the log")
	}
	operations, _ := operate(t, s)
	if code, metrics := servertest.GetStatus(t, operations+"/metrics"); code != http.StatusOK || strings.Contains(metrics, canary) {
		t.Error("it is in the metrics", code)
	}
}

// mayReturn are the fields in which an operation's successful answer gives back
// what was sent to it or to another: what it is for.
var mayReturn = map[string]string{
	"v1 decryptData": "data", "v2 decryptData": "data", "v2 decryptBatch": "data",
	"v1 generateKey": "name", "v1 listKeys": "name", "v1 rotateKey": "name",
	"v2 listKeys": "name", "v2 createKey": "name", "v2 getKey": "name", "v2 rotateKey": "name",
	"v2 sealCredential": "name credential_type", "v2 listCredentials": "name credential_type description contact tags",
	"v2 getVaultSummary": "name credential_type", "v2 getCredentialMetadata": "name credential_type description contact tags",
	"v2 patchCredential": "name credential_type", "v2 putCredentialByName": "name credential_type",
	"v2 replaceCredential": "name credential_type", "v2 rotateCredential": "name credential_type", "v2 renameCredential": "name credential_type", "v2 describeCredential": "name credential_type description contact tags", "v2 undoCredential": "name credential_type", "v2 trashCredential": "name credential_type", "v2 renewCredential": "name credential_type",
	"v2 listHistoryRules": "path", "v2 putHistoryRule": "path", "v2 deleteHistoryRule": "path",
	"v2 getSettings": "never_expires_paths", "v2 changeSettings": "never_expires_paths",
	"v2 unsealCredential": "name credential_type values", "v2 unsealCredentialByName": "name credential_type values",
	"v2 registerUser": "email name", "v2 acceptInvitation": "email name", "v2 getAccount": "email name", "v2 getOverview": "name credential_type",
	"v2 listMembers": "email", "v2 inviteMember": "email", "v2 changeMember": "email",
	"v2 listWebhooks": "description", "v2 createWebhook": "description secret",
	"v2 listPolicies": "name path", "v2 createPolicy": "name path", "v2 getPolicy": "name path", "v2 changePolicy": "name path",
	"v2 listGroups": "name", "v2 createGroup": "name", "v2 getGroup": "name", "v2 renameGroup": "name", "v2 addGroupMember": "name", "v2 removeGroupMember": "name",
	"v2 createAPIKey": "name", "v2 listAPIKeys": "name", "v2 createTenantAPIKey": "name",
	"v2 listPermitted": "name", "v2 getReviewNote": "note",
	"v2 listTenants": "name", "v2 createTenant": "name", "v2 activateTenant": "name", "v2 setTenantLimits": "name",
	"v2 resealManifest": "sealed", "v2 checkManifest": "message", // with the data keys of the values
}

// A word in every place of every request: whatever of it is a secret, a name or
// an address, it is in no log, entry, metric, mail, header or error.
func TestNothingThatIsSentEndsUpInTheWrongPlace(t *testing.T) {
	w := newWorld(t, "c4n4ry7q2w9x8z")
	issued := &issued{w: w}
	all := operations(t)
	for place, name := range slices.Sorted(maps.Keys(all)) {
		o := all[name]
		r := w.authorized(o, examples[name](w, o))
		got := w.Call(r)
		if got.Status >= 300 {
			t.Errorf("%s: %d %s", name, got.Status, got.Body)
		}
		issued.hold(o, r, got)
		valid := w.authorized(o, examples[name](w, o))
		for i, r := range w.spoiled(o, valid) {
			if !chosen(place, i) {
				continue
			}
			issued.hold(o, r, w.Call(r))
		}
	}
	var left []servertest.Request // for a service that has lost its store
	for name, o := range all {
		if access[name] == "public" || access[name] == "refresh" {
			left = append(left, examples[name](w, o))
		}
	}
	issued.mails()
	least := 100
	if testing.Short() {
		least = 50
	}
	if issued.count() < least {
		t.Errorf("only %d secrets were issued: the test has lost sight of them", issued.count())
	}
	issued.absent("the metrics", []byte(w.Metrics()))
	entries, err := json.Marshal(w.AllEntries(1))
	w.must(err)
	issued.absent("the entries", entries)
	var export bytes.Buffer
	w.must(w.Config.Reader.Export(context.Background(), &export, 0))
	issued.absent("the exported entries", export.Bytes())
	w.must(w.Store.Close())
	for _, r := range left {
		if got := w.Call(r); got.Status != http.StatusOK { // the sealing key is known
			got.Message(t, http.StatusServiceUnavailable)
			issued.absent("the answer of a service without a store", got.Body)
		}
	}
	issued.absent("the log", []byte(w.Logged.String()))
}

// spoiled returns requests with the word wherever a request has a place for it,
// by what the contract and a valid request say.
func (w *world) spoiled(o operation, valid servertest.Request) (all []servertest.Request) {
	add := func(change func(*servertest.Request)) {
		r := valid
		r.Header = valid.Header.Clone()
		if r.Header == nil {
			r.Header = http.Header{}
		}
		change(&r)
		all = append(all, r)
	}
	word := w.word
	body := func(text string) { add(func(r *servertest.Request) { r.Body = text }) }
	header := func(pairs ...string) {
		add(func(r *servertest.Request) {
			for i := 0; i < len(pairs); i += 2 {
				r.Header.Set(pairs[i], pairs[i+1])
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
		add(func(r *servertest.Request) {
			r.Key, r.Bearer, r.Header = "", "", http.Header{"Authorization": {authorization}}
		})
	}
	for _, key := range []string{word, "lk_live_" + word} {
		add(func(r *servertest.Request) { r.Key, r.Bearer, r.Header = key, "", nil })
	}
	for _, contentType := range []string{word + "/" + word, "application/json; charset=" + word, "application/json; " + word} {
		add(func(r *servertest.Request) { r.Body, r.ContentType = `{"`+word+`":1}`, contentType })
	}
	for _, text := range []string{word, `"` + word + `"`, `["` + word + `"]`, `{"` + word + `":"` + word + `","` + word + `":1}`, `{"x":` + word + `}`} {
		body(text)
	}
	for _, id := range []string{word, "%00" + word, word + "%2F" + word, word + "%ff", "cred_" + word, word + "/" + word} {
		add(func(r *servertest.Request) { r.Path = o.at(id) })
	}
	add(func(r *servertest.Request) { r.Path += "/" + word })
	add(func(r *servertest.Request) { r.Method = word })
	bare, _, _ := strings.Cut(valid.Path, "?")
	query := func(text string) { add(func(r *servertest.Request) { r.Path = bare + "?" + text }) }
	query(word + "=" + word)
	query("%zz" + word)
	for _, p := range o.parameters {
		if p.Value.In == "query" {
			query(p.Value.Name + "=" + word)
			query(p.Value.Name + "=" + word + "&" + p.Value.Name + "=" + word)
			query(p.Value.Name + "=" + word + "%00")
		}
	}
	if valid.Body == "" {
		return all
	}
	var fields any
	w.must(json.Unmarshal([]byte(valid.Body), &fields))
	for _, other := range []any{
		word, word + "@example.org", word + "@" + word, "/" + word, word + "\x00",
		strings.Repeat(word, 1000), []any{word}, object{word: word}, object{"/" + word: word},
	} {
		text, _ := other.(string)
		if o.name == "v2 acceptRollback" && text != "" && len(text) < 200 && !strings.HasSuffix(text, "\x00") {
			continue // a reason is in the log for good, as the contract says
		}
		for _, changed := range replaced(fields, other) {
			body(servertest.Marshal(w.T, changed))
		}
	}
	withMore := maps.Clone(fields.(object))
	withMore[word] = word
	body(servertest.Marshal(w.T, withMore))
	for name := range fields.(object) {
		without := maps.Clone(fields.(object))
		delete(without, name)
		without[strings.ToUpper(name)] = word
		body(servertest.Marshal(w.T, without))
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

// unknownName is what a refusal says of a field or parameter that is not in the contract. It is the
// only place in which an answer repeats what was sent: a name, never a value.
var unknownName = regexp.MustCompile(`the (field|parameter) \\"[^"]{1,60}\\"…?( in [a-z_.0-9*\[\]]+)? is unknown`)

// invites are the lines in which an invitation says who invites to what. No mail has anything else that a
// user wrote.
var invites = regexp.MustCompile(`(?m)^  (Organisation|Invited by): .*\n`)

// issued are the secrets that the service made itself: tokens and API keys.
type issued struct {
	w   *world
	all []string
}

func (i *issued) count() int { return len(i.all) }

// hold checks an answer and takes note of the secrets in it.
func (i *issued) hold(o operation, r servertest.Request, got servertest.Reply) {
	i.w.T.Helper()
	what := o.name + " as " + r.Method + " " + r.Path
	for name, values := range got.Header {
		if strings.Contains(strings.ToLower(name+strings.Join(values, "")), i.w.word) {
			i.w.T.Errorf("%s: the header %s has it", what, name)
		}
	}
	for _, old := range i.all {
		if bytes.Contains(got.Body, []byte(old)) {
			i.w.T.Errorf("%s: the answer has a secret of another one", what)
		}
	}
	if got.Status >= 300 {
		i.absent(what+" with "+r.Body[:min(len(r.Body), 200)], unknownName.ReplaceAll(got.Body, nil))
		return
	}
	if o.name == "v2 takeBackup" { // names and addresses are what is inside, and it is larger than a message should be
		i.absent(what, got.Body)
		inside := servertest.DecryptBackup(i.w.T, got.Body)
		i.issuedOnly(what+", inside", inside)
		for _, form := range spellings(i.w.password()) {
			if bytes.Contains(inside, []byte(form)) {
				i.w.T.Errorf("%s: it has a password", what)
			}
		}
		return
	}
	if o.name == "v2 exportAuditLog" { // is the entries, which are looked through at the end
		return
	}
	if !strings.HasPrefix(got.Header.Get("Content-Type"), "application/json;") { // a document of its own format
		i.absent(what, got.Body)
		return
	}
	var answer any
	i.w.must(json.Unmarshal(got.Body, &answer))
	i.walk(what, answer, strings.Fields(mayReturn[o.name]))
	for _, name := range []string{"access_token", "api_key"} {
		if secret, ok := answer.(object)[name].(string); ok {
			i.all = append(i.all, secret)
		}
	}
	for _, c := range (&http.Response{Header: got.Header}).Cookies() {
		if c.Name == "refreshToken" && c.Value != "" {
			i.all = append(i.all, c.Value)
		}
	}
}

// walk looks for the word in an answer beside the fields that may have it.
func (i *issued) walk(what string, v any, but []string) {
	i.w.T.Helper()
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
	i.w.T.Helper()
	for _, e := range i.w.Mailbox.Received() {
		i.forms("a mail", []byte(e.From+e.Subject+invites.ReplaceAllString(e.Text, "")))
		if m := servertest.MailedToken.FindStringSubmatch(e.Text); m != nil {
			i.all = append(i.all, m[1])
		}
	}
}

// absent fails the test when text has the word in any form, or a secret.
func (i *issued) absent(what string, text []byte) {
	i.w.T.Helper()
	i.forms(what, text)
	i.issuedOnly(what, text)
}

// issuedOnly fails the test when text has a secret that the service made.
func (i *issued) issuedOnly(what string, text []byte) {
	i.w.T.Helper()
	for _, secret := range append(slices.Collect(maps.Values(i.w.keys)), i.all...) {
		if bytes.Contains(text, []byte(secret)) {
			i.w.T.Errorf("%s: it has a token or an API key", what)
		}
	}
}

func (i *issued) forms(what string, text []byte) {
	i.w.T.Helper()
	for _, form := range append(spellings(i.w.word), "of twelve bytes", servertest.Password, "owner@example") {
		if bytes.Contains(text, []byte(form)) {
			i.w.T.Errorf("%s: it has %s: %.500s", what, form, text)
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
		r := servertest.Request{Method: "POST", Path: path, Key: s.Key, Body: servertest.Marshal(t, body)}
		if strings.HasPrefix(path, "/v1/") {
			r.Key, r.Bearer = "", s.Key
		}
		got := s.Call(r)
		if got.Status >= 300 {
			t.Fatalf("%s: %d %s", path, got.Status, got.Body)
		}
		for _, form := range spellings(word) {
			if bytes.Contains(got.Body, []byte(form)) && !strings.HasSuffix(path, "/decrypt") {
				t.Errorf("%s: the answer has %s", path, form)
			}
		}
		var fields map[string]any
		if err := json.Unmarshal(got.Body, &fields); err != nil {
			t.Fatal(err)
		}
		return fields
	}
	values := object{"key": word}
	id := post("/api/v2/vault/seal", object{"name": "visible-name", "credential_type": "t", "values": values})["credential_id"].(string)
	s.Call(servertest.Request{Method: "PUT", Path: "/api/v2/vault/" + id, Key: s.Key, Body: servertest.Marshal(t, object{"values": values})}).Want(t, http.StatusOK)
	post("/api/v2/vault/rotate/"+id, object{})
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: s.Key, Header: http.Header{"Idempotency-Key": {word}},
		Body: servertest.Marshal(t, object{"name": "n", "credential_type": "t", "values": values})}).Want(t, http.StatusCreated)
	sealed := post("/api/v2/encryption/encrypt", object{"data": word})
	post("/api/v2/encryption/decrypt", sealed)
	post("/api/v2/encryption/sign", object{"data": word})
	post("/v1/encrypt", object{"data": word, "algorithm": "ML-KEM-768"})
	s.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/register", Body: servertest.Marshal(t, object{"email": "a@example.org", "password": word, "tenant_name": "T"})}).Want(t, http.StatusCreated)
	session := s.Login("a@example.org", word)
	m := s.Manifest(t, "shop", "db", word)
	again := post("/api/v2/sealing-key/reseal", m)
	check := object{"namespace": "shop", "name": "db", "credential_type": "database", "sealed": again["sealed"]}
	if post("/api/v2/sealing-key/check", check)["accepted"] != true {
		t.Error("what was resealed is not accepted")
	}
	check["name"] = "other"
	if post("/api/v2/sealing-key/check", check)["accepted"] != false {
		t.Error("what was sealed for another object is accepted")
	}
	owned := s.SealOwnedVersions(s.Operator(), "former "+word, word) // a current and a former version
	if _, err := s.Vault.Read(t.Context(), s.Operator(), vault.ByVersion(owned.ID, 1)); err != nil {
		t.Fatal(err)
	}

	got := s.Call(servertest.Request{Method: "POST", Path: "/api/v2/system/backup", Key: s.SystemKey(), Body: servertest.BackupBody(t)})
	if got.Status != http.StatusOK {
		t.Fatalf("%d: %s", got.Status, got.Body)
	}
	inside := servertest.DecryptBackup(t, got.Body)
	for _, visible := range []string{"visible-name", owned.ID} {
		if !bytes.Contains(inside, []byte(visible)) || bytes.Contains(got.Body, []byte(visible)) {
			t.Fatalf("a backup of %d bytes in which %s is not found, or without opening it", len(got.Body), visible)
		}
	}
	entries, err := json.Marshal(s.AllEntries(1))
	if err != nil {
		t.Fatal(err)
	}
	metrics := []byte(s.Metrics())
	for what, text := range map[string][]byte{"the backup": got.Body, "what is inside": inside, "the entries": entries, "the log": []byte(s.Logged.String()), "the metrics": metrics} {
		for _, form := range append(spellings(word), s.Key, session.Access, session.Refresh) {
			if bytes.Contains(text, []byte(form)) {
				t.Errorf("%s: it has %s", what, form)
			}
		}
	}
}
