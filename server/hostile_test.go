package server_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/latticekeep/latticekeep/test/servertest"
)

// besieged is a service with a caller of every kind.
type besieged struct {
	*service
	user   servertest.Account
	system string
}

func newBesieged(t *testing.T) besieged {
	t.Helper()
	s := newService(t)
	return besieged{s, s.Register("owner@example.org"), s.SystemKey()}
}

// request returns the example of an operation from a caller who may.
func (b besieged) request(o listed) servertest.Request {
	id, _ := o.pathExample()
	r := servertest.Request{Method: o.method, Path: o.to(id)}
	if o.schema != nil {
		r.Body = servertest.Marshal(b.T, o.example)
	}
	switch {
	case o.public:
	case strings.HasPrefix(o.id, "v1 "):
		r.Bearer = b.Key
	case o.scope == "system:admin":
		r.Key = b.system
	case o.id == "v2 refreshSession":
		r.Header = servertest.Cookies("refreshToken", b.user.Refresh)
	case o.user:
		r.Bearer = b.user.Access
	default:
		r.Key = b.Key
	}
	return r
}

// refused fails the test unless the request is answered with the status and
// without anything of what was sent. That the envelope is its version's and
// that the headers are there, the contract's transport sees to.
func (b besieged) refused(t *testing.T, name string, r servertest.Request, want int) servertest.Reply {
	t.Helper()
	got := b.Call(r)
	if got.Status != want {
		t.Errorf("%s: %d, want %d: %.300s", name, got.Status, want, got.Body)
	}
	if echoed(got) {
		t.Errorf("%s: the answer repeats what was sent: %v %s", name, got.Header, got.Body)
	}
	return got
}

// unlessTooLarge returns the status of a body, which is first of all held to
// its bound.
func (o listed) unlessTooLarge(body string, status int) int {
	if len(body) > o.most {
		return http.StatusRequestEntityTooLarge
	}
	return status
}

func echoed(r servertest.Reply) bool {
	return strings.Contains(strings.ToLower(fmt.Sprint(r.Header, string(r.Body))), servertest.Canary)
}

// untouched fails the test unless the caller's session outlived the attempts.
func (b besieged) untouched(t *testing.T) {
	t.Helper()
	b.Call(servertest.Request{Method: "GET", Path: "/api/v2/auth/me", Bearer: b.user.Access}).Want(t, http.StatusOK)
	b.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/refresh", Header: servertest.Cookies("refreshToken", b.user.Refresh)}).Want(t, http.StatusOK)
}

// signed is the operation whose query is its credential: a wrong one is one
// refusal, whatever is wrong with it.
const signed = "v2 downloadReport"

func TestEveryOperationRefusesHostileBodies(t *testing.T) {
	b := newBesieged(t)
	nested := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	for place, o := range listedOperations(t) {
		valid, cases := b.request(o), 0
		refused := func(name string, r servertest.Request, want int) {
			if cases++; chosen(place, cases) {
				b.refused(t, o.id+", "+name, r, want)
			}
		}
		object := `{"` + servertest.Canary + `":1}`
		if o.schema != nil {
			object = valid.Body
		}
		more := func(member string) string { return strings.TrimSuffix(object, "}") + "," + member + "}" }
		if object == "{}" {
			more = func(member string) string { return "{" + member + "}" }
		}
		bodies := map[string]string{
			"blank": " ", "open": object[:len(object)-1], "unopened": "}", "trailing": object + object, "trailing comma": object[:len(object)-1] + ",}",
			"words": servertest.Canary, "comment": "/*" + servertest.Canary + "*/" + object, "single quotes": "{'" + servertest.Canary + "':1}", "byte order mark": "\xef\xbb\xbf" + object,
			"invalid UTF-8": more("\"x\":\"" + servertest.Canary + "\xff\""), "overlong UTF-8": more("\"x\":\"" + servertest.Canary + "\xc0\x80\""),
			"encoded surrogate": more("\"x\":\"" + servertest.Canary + "\xed\xa0\x80\""), "raw NUL": more("\"x\":\"" + servertest.Canary + "\x00\""),
			"NUL behind": object + "\x00", "control character": more("\"x\":\"" + servertest.Canary + "\n\""),
			"high surrogate": more(`"x":"` + servertest.Canary + `\ud800"`), "low surrogate": more(`"x":"\udc00` + servertest.Canary + `"`),
			"bad escape": more(`"x":"\q` + servertest.Canary + `"`),
			"NaN":        more(`"x":NaN`), "infinity": more(`"x":-Infinity`), "leading zero": more(`"x":01`), "hexadecimal": more(`"x":0x1`),
			"bare point": more(`"x":1.`),
			"duplicate":  more(`"x":"` + servertest.Canary + `","x":1`), "duplicate by an escape": more(`"` + servertest.Canary + `":1,"\u0063` + servertest.Canary[1:] + `":1`),
			"duplicate below": more(`"x":[{"` + servertest.Canary + `":1,"` + servertest.Canary + `":2}]`),
			"33 deep":         more(`"x":` + nested(32)), "33 deep, alone": nested(33), "100,000 deep": nested(100_000),
			"deep and open": strings.Repeat(`{"`+servertest.Canary+`":`, 100_000),
		}
		for _, name := range slices.Sorted(maps.Keys(bodies)) {
			r := valid
			r.Body = bodies[name]
			refused(name, r, o.unlessTooLarge(r.Body, http.StatusBadRequest))
		}
		for _, contentType := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=" + servertest.Canary,
			"application/json; charset=latin1",
			"application/json; charset", "application/json, text/plain", "application/" + servertest.Canary + "+json", "*/*", " "} {
			r := valid
			r.Body, r.ContentType = object, contentType
			refused(contentType, r, http.StatusUnsupportedMediaType)
		}
		for _, chunked := range []bool{false, true} {
			r := valid
			r.Body, r.Chunked = object+strings.Repeat(" ", o.most+1-len(object)), chunked
			refused("too large", r, http.StatusRequestEntityTooLarge)
		}
		for _, query := range []string{"?x=%zz" + servertest.Canary, "?x=1;y=" + servertest.Canary} {
			r := valid
			r.Path += query
			status := http.StatusBadRequest
			if o.id == signed {
				status = http.StatusForbidden
			}
			refused(query, r, status)
		}
		if o.required {
			r := valid
			r.Body = ""
			refused("empty", r, http.StatusBadRequest)
			r.ContentType = "application/json"
			refused("empty JSON", r, http.StatusBadRequest)
		}
	}
	b.untouched(t)
	login := `{"email":"nobody@example.org","password":"` + servertest.Canary + `"}`
	login += strings.Repeat(" ", 16<<10-len(login))
	b.refused(t, "exactly 16 KiB", servertest.Request{Method: "POST", Path: "/api/v2/auth/login", Body: login}, http.StatusUnauthorized)
	deep := b.Post("/api/v2/encryption/encrypt", `{"data":"d","x":`+nested(31)+`}`).Message(t, http.StatusUnprocessableEntity) // 32 deep is not too deep
	if !strings.Contains(deep, "unknown") {
		t.Errorf("32 deep: %s", deep)
	}
}

// variant is a body with one thing wrong.
type variant struct {
	name  string
	value any
}

// wrongs returns values that a schema forbids, each one step away from valid.
func wrongs(s *openapi3.Schema, valid any) []variant {
	var all []variant
	add := func(name string, value any) { all = append(all, variant{name, value}) }
	kinds := map[string]any{
		"boolean": true, "number": json.Number("17"), "string": servertest.Canary, "array": []any{servertest.Canary}, "object": map[string]any{servertest.Canary: servertest.Canary},
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		if !s.Type.Is(kind) && !(s.Type.Is("integer") && kind == "number") {
			add(kind, kinds[kind])
		}
	}
	if !s.Nullable {
		add("null", nil)
	}
	switch {
	case s.Type.Is("string"):
		if s.MinLength > 0 {
			add("empty string", "")
			add("too short", strings.Repeat("a", int(s.MinLength)-1))
		}
		if s.MaxLength != nil {
			add("too long", strings.Repeat("a", int(*s.MaxLength)+1))
		}
		if len(s.Enum) > 0 {
			add("not of the list", servertest.Canary)
			add("other case", strings.ToUpper(valid.(string))+strings.ToLower(valid.(string)))
			add("NUL behind", valid.(string)+"\x00")
		}
		if s.Pattern != "" {
			add("of other characters", "/ключ"+servertest.Canary)
			add("with a line behind", valid.(string)+"\n")
		}
		if s.Format == "date-time" {
			for _, text := range []string{servertest.Canary, "2026-11-21", "2026-11-21T10:00:00", "2026-11-21 10:00:00Z", "2026-11-21t10:00:00z",
				"2026-11-21T25:00:00Z", "2026-11-21T10:00:60Z", "2026-02-30T10:00:00Z", "2026-11-21T10:00:00+01:00", "2026-11-21T10:00:00Z\x00"} {
				add("the time "+text, text)
			}
		}
	case s.Type.Is("integer") && len(s.Enum) > 0:
		for _, text := range []string{"0", "2", "-1", "1.5", "1e1", "1e999", "4294967297", "18446744073709551617"} {
			add(text, json.Number(text))
		}
	case s.Type.Is("integer"):
		texts := []string{"1.5", "-0.5", "1e999", "-1e999", "9223372036854775808", "18446744073709551617", strings.Repeat("9", 1000)}
		if s.Min != nil && s.Max != nil {
			texts = append(texts, strconv.FormatFloat(*s.Min-1, 'f', -1, 64), strconv.FormatFloat(*s.Max+1, 'f', -1, 64), "-1")
		}
		for _, text := range texts {
			add(text, json.Number(text))
		}
	case s.Type.Is("array"):
		all = append(all, wrongItems(s, valid.([]any))...)
	case s.Type.Is("object"):
		all = append(all, wrongMembers(s, valid.(map[string]any))...)
	}
	return all
}

func wrongItems(s *openapi3.Schema, valid []any) []variant {
	var all []variant
	if s.MinItems > 0 {
		all = append(all, variant{"no items", []any{}})
	}
	if s.MaxItems != nil {
		all = append(all, variant{"too many items", slices.Repeat(valid[:1], int(*s.MaxItems)+1)})
	}
	if s.UniqueItems {
		all = append(all, variant{"an item twice", slices.Repeat(valid[:1], 2)})
	}
	for _, w := range wrongs(s.Items.Value, valid[0]) {
		all = append(all, variant{"an item: " + w.name, append(slices.Clone(valid), w.value)})
	}
	return all
}

func wrongMembers(s *openapi3.Schema, valid map[string]any) []variant {
	var all []variant
	with := func(name, member string, change func(map[string]any)) {
		changed := maps.Clone(valid)
		change(changed)
		all = append(all, variant{member + ": " + name, changed})
	}
	if s.AdditionalProperties.Schema == nil {
		with("unlisted", "", func(m map[string]any) { m["unlisted"] = true })
	}
	for _, name := range s.Required {
		with("missing", name, func(m map[string]any) { delete(m, name) })
		with("in another case", name, func(m map[string]any) { m[strings.ToUpper(name)] = m[name]; delete(m, name) })
	}
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		field := s.Properties[name].Value
		example, there := valid[name]
		if !there {
			example = map[bool]any{true: field.Default, false: field.Example}[field.Default != nil]
		}
		if example == nil && len(field.Enum) > 0 {
			example = field.Enum[0]
		}
		for _, w := range wrongs(field, example) {
			with(w.name, name, func(m map[string]any) { m[name] = w.value })
		}
	}
	if more := s.AdditionalProperties.Schema; more != nil {
		one := valid[slices.Sorted(maps.Keys(valid))[0]]
		all = append(all, variant{"no members", map[string]any{}})
		with("too many members", "", func(m map[string]any) {
			for i := range int(*s.MaxProps) + 1 {
				m["k"+strconv.Itoa(i)] = one
			}
		})
		for _, w := range wrongs(more.Value, one) {
			with(w.name, "a member", func(m map[string]any) { m["k"] = w.value })
		}
	}
	return all
}

func TestEveryFieldOfEveryBodyIsHeldToItsSchema(t *testing.T) {
	b := newBesieged(t)
	fields := 0
	for place, o := range listedOperations(t) {
		if o.schema == nil {
			continue
		}
		if o.id == "v2 resealManifest" { // the values of the contract's example do not open, with the same status
			opens := servertest.Marshal(t, b.Manifest(t, "shop", "db", "v"))
			b.Call(servertest.Request{Method: o.method, Path: o.path, Key: b.Key, Body: opens}).Want(t, http.StatusOK)
			if err := json.Unmarshal([]byte(opens), &o.example); err != nil {
				t.Fatal(err)
			}
		}
		for i, w := range wrongs(o.schema, o.example) {
			if fields++; !chosen(place, i) {
				continue
			}
			r := b.request(o)
			r.Body = servertest.Marshal(t, w.value)
			b.refused(t, o.id+", "+w.name, r, o.unlessTooLarge(r.Body, o.schemaStatus))
		}
	}
	if fields < 500 {
		t.Errorf("only %d bodies are wrong", fields)
	}
	b.untouched(t)
}

// What a schema cannot say: lengths in bytes, control characters, addresses.
func TestValuesThatOnlyTheServicesRefuse(t *testing.T) {
	b := newBesieged(t)
	wide := strings.Repeat("ä", 200) // 400 bytes
	names := []string{servertest.Canary + "\x00", servertest.Canary + "\n", servertest.Canary + "\x7f", servertest.Canary + "\u0085", wide}
	addresses := []string{servertest.Canary, "@" + servertest.Canary, servertest.Canary + "@", servertest.Canary + "@example..org", servertest.Canary + "@example.org.", "a@b@" + servertest.Canary + ".org",
		servertest.Canary + "@-a.org", `"` + servertest.Canary + `"@example.org`,
		servertest.Canary + "@[192.0.2.1]", servertest.Canary + " x@example.org", servertest.Canary + "\x00@example.org", servertest.Canary + "@exa\r\nmple.org", "<" + servertest.Canary + "@example.org>",
		servertest.Canary + "@example.org,x@example.org",
		strings.Repeat("a", 65) + "@" + servertest.Canary + ".org", servertest.Canary + "@" + strings.Repeat("a", 64) + ".org", "\u202e" + servertest.Canary + "@example.org"}
	passwords := []string{strings.Repeat("ä", 513)}
	big := strings.Repeat("ä", 360_000) // 720,000 bytes in fewer characters than the schema allows
	hostile := map[string]map[string][]string{
		"v1 encryptData":        {"data": {big}},
		"v1 generateKey":        {"name": names},
		"v2 sealCredential":     {"name": names, "credential_type": {"ключ"}},
		"v2 encryptData":        {"data": {big}},
		"v2 signData":           {"data": {big}},
		"v2 verifyData":         {"data": {big}},
		"v2 registerUser":       {"email": addresses, "password": passwords, "tenant_name": names},
		"v2 inviteMember":       {"email": addresses},
		"v2 createTenant":       {"name": names},
		"v2 createAPIKey":       {"name": names},
		"v2 createTenantAPIKey": {"name": names},
		"v2 resetPassword":      {"new_password": passwords},
		"v2 acceptInvitation":   {"password": passwords},
		"v2 changePassword":     {"new_password": passwords},
	}
	for _, o := range listedOperations(t) {
		for field, values := range hostile[o.id] {
			for _, value := range values {
				r := b.request(o)
				body := maps.Clone(o.example.(map[string]any))
				body[field] = value
				r.Body = servertest.Marshal(t, body)
				b.refused(t, fmt.Sprintf("%s, %s %.40q", o.id, field, value), r, o.schemaStatus)
			}
		}
		delete(hostile, o.id)
	}
	if len(hostile) > 0 {
		t.Errorf("no such operations: %v", hostile)
	}
	// Whoever forgot a password, or tries one, is told nothing of the address.
	for _, address := range addresses {
		body := map[string]string{"email": address}
		b.refused(t, "forgot", servertest.Request{Method: "POST", Path: "/api/v2/auth/forgot-password", Body: servertest.Marshal(t, body)}, http.StatusOK)
	}
	for _, address := range addresses[:3] {
		body := map[string]string{"email": address, "password": servertest.Canary}
		b.refused(t, "login", servertest.Request{Method: "POST", Path: "/api/v2/auth/login", Body: servertest.Marshal(t, body)}, http.StatusUnauthorized)
	}
	b.untouched(t)
}

// badParameters returns values, in the escaping of a query, that a parameter's
// schema forbids.
func badParameters(s *openapi3.Schema) []string {
	switch {
	case s.Type.Is("integer"):
		values := []string{servertest.Canary, strconv.FormatFloat(*s.Min-1, 'f', -1, 64), "-1", "1.5", "1e1", "0x1", "%201", "1%00", "9223372036854775808",
			"18446744073709551617", "NaN", "null", strings.Repeat("9", 400), "1,2"}
		if s.Max != nil {
			values = append(values, strconv.FormatFloat(*s.Max+1, 'f', -1, 64))
		}
		return values
	case s.Type.Is("boolean"):
		return []string{servertest.Canary, "yes", "null", "2", "true%00", "%20true", "true,false"}
	case s.Format == "date":
		return []string{servertest.Canary, "2026-13-01", "2026-02-30", "2026-1-1", "2026-11-21T10:00:00Z", "21.11.2026", "2026-11-21%00", "02026-11-21"}
	case s.Format == "date-time":
		return []string{servertest.Canary, "2026-11-21", "2026-11-21T10:00:00", "2026-11-21%2010:00:00Z", "2026-11-21T25:00:00Z", "2026-02-30T10:00:00Z",
			"2026-11-21T10:00:00+01:00", "1795255260"}
	case len(s.Enum) > 0:
		other := strings.ToLower(fmt.Sprint(s.Enum[0]))
		if other == s.Enum[0] {
			other = strings.ToUpper(other)
		}
		if other == s.Enum[0] { // has no letters
			other += other
		}
		return []string{servertest.Canary, other, fmt.Sprint(s.Enum[0], "%00"), fmt.Sprint(s.Enum[0], ",", s.Enum[len(s.Enum)-1])}
	}
	return []string{strings.Repeat("a", int(*s.MaxLength)+1)}
}

func TestEveryParameterIsHeldToItsSchema(t *testing.T) {
	b := newBesieged(t)
	sent := 0
	for _, o := range listedOperations(t) {
		for _, p := range o.parameters {
			if p.In == openapi3.ParameterInPath || o.id == signed {
				continue
			}
			values := badParameters(p.Schema.Value)
			if p.Name == "cursor" {
				values = append(values, servertest.Canary, "AAAA", "%00", "..%2F..", "AAAAAAAAAAE=", "AAAAAAAAAAE%0A", "AAAAAAAAAAF", strings.Repeat("a", 512))
			}
			for _, value := range append(values, "") {
				if sent++; !chosen(sent, 0) {
					continue
				}
				r := b.request(o)
				if p.In == openapi3.ParameterInHeader {
					r.Header = http.Header{p.Name: {value}}
				} else {
					r.Path += "?" + p.Name + "=" + value
				}
				b.refused(t, fmt.Sprintf("%s, %s=%.30s", o.id, p.Name, value), r, http.StatusBadRequest)
			}
			twice := b.request(o)
			example := fmt.Sprint(map[bool]any{true: p.Example, false: 1}[p.Example != nil])
			if p.In == openapi3.ParameterInHeader {
				twice.Header = http.Header{p.Name: {example, example}}
			} else {
				twice.Path += "?" + p.Name + "=" + url.QueryEscape(example) + "&" + p.Name + "=" + url.QueryEscape(example)
			}
			b.refused(t, o.id+", "+p.Name+" twice", twice, http.StatusBadRequest)
		}
	}
	if sent < 100 {
		t.Errorf("only %d parameters are wrong", sent)
	}
	for _, value := range []string{"a b", servertest.Canary + "é", servertest.Canary + "\t" + servertest.Canary, "\x80"} {
		b.refused(t, "Idempotency-Key", servertest.Request{Method: "POST", Path: "/api/v2/vault/seal", Key: b.Key,
			Body:   `{"name":"n","credential_type":"t","values":{"k":"v"}}`,
			Header: http.Header{"Idempotency-Key": {value}}}, http.StatusBadRequest)
	}
	for _, query := range []string{"hours=1&from=2026-11-21T10:00:00Z", "hours=1&to=2026-11-21T10:00:00Z",
		"from=2026-11-21T10:00:00Z&to=2026-11-21T09:59:59Z"} {
		b.refused(t, query, servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?" + query, Key: b.Key}, http.StatusBadRequest)
	}
	b.refused(t, "days", servertest.Request{Method: "GET", Path: "/v1/audit/logs?start_date=2026-11-21&end_date=2026-11-20", Bearer: b.Key}, http.StatusBadRequest)
	for _, query := range []string{"Limit=x", "LIMIT=" + servertest.Canary, "limit%5B%5D=0", "limit%00=0", "=x", "%20limit=1"} {
		b.refused(t, query, servertest.Request{Method: "GET", Path: "/api/v2/audit/logs?" + query, Key: b.Key}, http.StatusBadRequest)
	}
}

func TestHostileIDsAreIDsOfNothing(t *testing.T) {
	b := newBesieged(t)
	for place, o := range listedOperations(t) {
		example, ok := o.pathExample()
		if !ok || o.id == "v2 getTile" || o.id == "v2 getAuditEntry" || o.id == "v2 putCredentialByName" { // a level, a sequence and a new name are no ids
			continue
		}
		want := http.StatusNotFound
		if strings.HasPrefix(o.path, "/api/v2/vault/") {
			want = http.StatusForbidden
		}
		var bodies []string
		for i, id := range []string{example, servertest.Canary, strings.ToUpper(example), example + "a", example[:len(example)-1], "x" + example, example + "%00",
			example + "%20", example + "%0A", "%00", "%20", "*",
			"%2F", "..%2F" + example, "%2e%2e", "%2e%2e%2f%2e%2e", "%252e", "%ff%fe", "%C0%80", "%F0%9F%94%91", "%0d%0aX-" + servertest.Canary + ":%201",
			"'%20OR%20'1'='1", "$ne", "%7B%7D",
			"req_mfrggzdfmztwq2lknnwg23tpoa", "cred_" + strings.Repeat("%E2%80%AE", 26), strings.Repeat("a", 4096)} {
			if !chosen(place, i) {
				continue
			}
			r := b.request(o)
			r.Path = o.to(id)
			got := b.refused(t, fmt.Sprintf("%s, %.60s", o.id, id), r, want)
			bodies = append(bodies, alike(t, got))
		}
		if n := len(slices.Compact(bodies)); n != 1 {
			t.Errorf("%s: %d different answers to ids of nothing", o.id, n)
		}
	}
}

// alike returns the body of an error without what is different every time.
func alike(t testing.TB, r servertest.Reply) string {
	t.Helper()
	var fields map[string]any
	if err := json.Unmarshal(r.Body, &fields); err != nil {
		t.Fatalf("body %q: %v", r.Body, err)
	}
	if detail, ok := fields["error"].(map[string]any); ok {
		delete(detail, "request_id")
		delete(detail, "timestamp")
	}
	return servertest.Marshal(t, fields)
}
