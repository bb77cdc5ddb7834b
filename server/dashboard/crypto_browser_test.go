package dashboard_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha3"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"golang.org/x/mod/sumdb/tlog"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/server/dashboard"
)

// The scripts below static/crypto are held against the Go implementation in a real browser, under the page's own policy.

// bench is an empty page with the dashboard's policy that can load the dashboard's scripts.
type bench struct {
	*tab
	assets string // the address of the folder of the scripts
}

// benchServer serves the dashboard, and an empty page at /empty.
var benchServer = sync.OnceValue(func() *httptest.Server {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	dashboard.Register(e, func(c *gin.Context) { c.Status(http.StatusNotFound) })
	e.GET("/empty", func(c *gin.Context) {
		w := httptest.NewRecorder()
		e.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/sign-in", nil))
		c.Header("Content-Security-Policy", w.Header().Get("Content-Security-Policy"))
		c.Data(http.StatusOK, "text/html; charset=utf-8", []byte(`<!doctype html><title>empty</title><link rel="icon" href="`+assetsPath.FindString(w.Body.String())+`/icon.svg">`))
	})
	return httptest.NewServer(e)
})

var assetsPath = regexp.MustCompile(`/assets/[0-9a-f]+`)

func newBench(t testing.TB) *bench {
	t.Helper()
	server := benchServer()
	b := &bench{tab: newTab(t, server.URL)}
	b.open("/empty")
	b.eval(`document.querySelector('link').getAttribute('href').replace('/icon.svg', '')`, &b.assets)
	return b
}

// outcome is what a script returned, or why it refused.
type outcome struct {
	Value   json.RawMessage
	Refused string // the message of the error
	Part    string // of a log.Refused
	// Of a sealing.Invalid.
	Problems []struct{ Field, DataKey, Message string }
}

// call runs a function of a module, such as "(m, a) => m.verifyLink(a.entry, a.previous)", with each of several arguments.
func (b *bench) call(module, function string, arguments ...any) []outcome {
	b.t.Helper()
	given, err := json.Marshal(arguments)
	if err != nil {
		b.t.Fatal(err)
	}
	var text string
	b.eval(fmt.Sprintf(`(async () => {
		const m = await import(%q);
		const call = %s;
		const outcomes = [];
		for (const a of JSON.parse(%s)) {
			try {
				outcomes.push({value: await call(m, a) ?? null});
			} catch (e) {
				if (!(e instanceof Error)) throw e;
				outcomes.push({refused: e.name === 'Error' ? e.message : e.name + ' ' + e.message, part: e.part, problems: e.problems});
			}
		}
		return JSON.stringify(outcomes);
	})()`, b.assets+"/crypto/"+module, function, literal(given)), &text)
	var outcomes []outcome
	if err := json.Unmarshal([]byte(text), &outcomes); err != nil || len(outcomes) != len(arguments) {
		b.t.Fatalf("%d outcomes of %d: %v", len(outcomes), len(arguments), err)
	}
	return outcomes
}

// literal writes JSON as a literal of JavaScript that has it as text.
func literal(b []byte) string {
	quoted, err := json.Marshal(string(b))
	if err != nil {
		panic(err) // a string has an encoding
	}
	return string(quoted)
}

func newIdentity(t testing.TB) *dualsig.PrivateKey {
	t.Helper()
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	identity, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	return identity
}

func newSealingKey(t testing.TB, suite envelope.Suite) *envelope.SealingKey {
	t.Helper()
	key, err := envelope.GenerateSealingKey(suite)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

var madeAt = time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC)

func documentOf(t testing.TB, identity *dualsig.PrivateKey, key *envelope.SealingPublicKey) string {
	t.Helper()
	document, err := sealing.Sign(identity, key, madeAt)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(document)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// ---- sealing

// toSeal is what a page would seal: values are base64 here, so that any bytes can be.
type toSeal struct {
	Document       string            `json:"document"`
	Namespace      string            `json:"namespace"`
	Name           string            `json:"name"`
	CredentialType string            `json:"credentialType"`
	Scope          string            `json:"scope"`
	TTLDays        int32             `json:"ttlDays"`
	Values         map[string]string `json:"values"` // sealed as bytes
	Texts          map[string]string `json:"texts"`  // sealed as text
	At             int64             `json:"at"`     // Unix milliseconds
}

const sealFunction = `async (m, {document, values, texts, at, ...rest}) => m.sealManifest({
	...rest, key: await m.readSealingKey(document), now: new Date(at),
	values: new Map([...Object.entries(texts ?? {}), ...Object.entries(values ?? {}).map(([k, v]) => [k, Uint8Array.from(atob(v), c => c.charCodeAt(0))])]),
})`

func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return b
}

func TestValuesSealedInTheBrowserOpenInTheVault(t *testing.T) {
	b := newBench(t)
	identity := newIdentity(t)
	many := map[string]string{}
	for i := range v1beta1.MaxValues {
		many[fmt.Sprintf("key-%02d", i)] = base64.StdEncoding.EncodeToString(randomBytes(i))
	}
	keys := map[envelope.Suite]*envelope.SealingKey{}
	var cases []toSeal
	for _, suite := range []envelope.Suite{envelope.SuiteMLKEM768X25519, envelope.SuiteMLKEM768} {
		keys[suite] = newSealingKey(t, suite)
		document := documentOf(t, identity, keys[suite].Public())
		for _, scope := range []v1beta1.Scope{v1beta1.ScopeStrict, v1beta1.ScopeNamespace, v1beta1.ScopeCluster} {
			base := toSeal{Document: document, Namespace: "shop", Name: "db", CredentialType: "database", Scope: string(scope), At: madeAt.UnixMilli() + 123}
			texts := base
			texts.Texts = map[string]string{
				"password": "tr0ub4dor-and-3", "umlauts": "Größe, Übermut, ẞ", "empty": "", "right-to-left": "שלום \u202e עולם", "astral": "🗝️𝕏", "lines": "a\nb\r\n\tc\x00d",
				"UPPER.case_1-x": "\ufeffbyte order mark", "yaml": "yes: no # - \"'",
			}
			binary := base
			binary.TTLDays, binary.Values = 30, map[string]string{"k": base64.StdEncoding.EncodeToString(randomBytes(70000)), "all": base64.StdEncoding.EncodeToString(everyByte())}
			full := base
			full.TTLDays, full.Values = v1beta1.MaxTTLDays, many
			cases = append(cases, texts, binary, full)
		}
		// Names that YAML could take for something else, and no namespace where none is needed.
		for _, name := range []string{"123", "1e3", "0x10", "true", "null", "on", "1.5", "2026-11-21", "0o7", "y", "a.b-c"} {
			one := toSeal{Document: document, Namespace: "no", Name: name, CredentialType: "1_000", Scope: "Strict", Texts: map[string]string{"1.0": "v", "null": "w", "yes": "x", "-": "y", ".": "z", "1": ""}}
			if strings.Contains(one.Namespace+name, ".") {
				one.Namespace, one.Scope = "", "Cluster"
			}
			cases = append(cases, one)
		}
	}
	arguments := make([]any, len(cases))
	for i := range cases {
		arguments[i] = cases[i]
	}
	for i, o := range b.call("sealing.js", sealFunction, arguments...) {
		c := cases[i]
		what := fmt.Sprintf("%s in %q, scope %s", c.Name, c.Namespace, c.Scope)
		var manifest string
		if err := json.Unmarshal(o.Value, &manifest); err != nil {
			t.Fatalf("%s: %s", what, o.Refused)
		}
		var obj v1beta1.SealedCredential
		if err := yaml.UnmarshalStrict([]byte(manifest), &obj); err != nil {
			t.Fatalf("%s: %v\n%.400s", what, err, manifest)
		}
		document, err := sealing.ParseDocument([]byte(c.Document))
		if err != nil {
			t.Fatal(err)
		}
		key := keys[document.Key().Suite()]
		want := sealing.Expect{Namespace: c.Namespace, Name: c.Name, Scope: v1beta1.Scope(c.Scope), Key: key.Public()}
		if problems := sealing.Validate(&obj, want); problems != nil {
			t.Errorf("%s: %v", what, problems)
		}
		opened, err := sealing.Open(&obj, func(string) (*envelope.SealingKey, error) { return key, nil })
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		values := map[string]secret.Bytes{}
		for k, v := range c.Texts {
			values[k] = secret.Bytes(v)
		}
		for k, v := range c.Values {
			plain, err := base64.StdEncoding.DecodeString(v)
			if err != nil {
				t.Fatal(err)
			}
			values[k] = plain
		}
		if !maps.EqualFunc(opened, values, func(a, b secret.Bytes) bool { return bytes.Equal(a, b) }) {
			t.Errorf("%s: other values came out than went in", what)
		}

		// But for what is random it is the manifest that latticekeep seal prints.
		ours, err := sealing.Seal(key.Public(), sealing.Request{
			Namespace: c.Namespace, Name: c.Name, CredentialType: c.CredentialType, TTLDays: c.TTLDays, Scope: v1beta1.Scope(c.Scope), Values: values,
		}, time.UnixMilli(c.At))
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range []*v1beta1.SealedCredential{&obj, ours} {
			for k, v := range o.Spec.Sealed.Values {
				o.Spec.Sealed.Values[k] = v1beta1.SealedValue{SealedAt: metav1.NewTime(v.SealedAt.UTC()), Data: strconv.Itoa(len(v.Data))}
			}
		}
		theirs, err := yaml.Marshal(obj)
		if err != nil {
			t.Fatal(err)
		}
		if wanted, err := yaml.Marshal(ours); err != nil || !bytes.Equal(wanted, theirs) {
			t.Errorf("%s: the manifest is\n%s\nand not\n%s", what, theirs, wanted)
		}
	}
}

func everyByte() []byte {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

// A value that was sealed in the browser opens only where it belongs.
func TestValuesSealedInTheBrowserAreBound(t *testing.T) {
	b := newBench(t)
	key := newSealingKey(t, envelope.SuiteMLKEM768X25519)
	document := documentOf(t, newIdentity(t), key.Public())
	o := b.call("sealing.js", sealFunction, toSeal{
		Document: document, Namespace: "shop", Name: "db", CredentialType: "database", Scope: "Strict", At: madeAt.UnixMilli(), Texts: map[string]string{"a": "v", "b": "v"},
	})[0]
	var manifest string
	if err := json.Unmarshal(o.Value, &manifest); err != nil {
		t.Fatal(o.Refused)
	}
	for name, change := range map[string]func(*v1beta1.SealedCredential){
		"nothing":   func(*v1beta1.SealedCredential) {},
		"name":      func(o *v1beta1.SealedCredential) { o.Name = "other" },
		"namespace": func(o *v1beta1.SealedCredential) { o.Namespace = "other" },
		"type":      func(o *v1beta1.SealedCredential) { o.Spec.CredentialType = "other" },
		"scope":     func(o *v1beta1.SealedCredential) { o.Spec.Sealed.Scope = v1beta1.ScopeNamespace },
		"data key": func(o *v1beta1.SealedCredential) {
			v := o.Spec.Sealed.Values
			v["a"], v["b"] = v["b"], v["a"]
		},
		"sealedAt": func(o *v1beta1.SealedCredential) {
			v := o.Spec.Sealed.Values["a"]
			v.SealedAt = metav1.NewTime(v.SealedAt.Add(time.Second))
			o.Spec.Sealed.Values["a"] = v
		},
	} {
		var obj v1beta1.SealedCredential
		if err := yaml.UnmarshalStrict([]byte(manifest), &obj); err != nil {
			t.Fatal(err)
		}
		change(&obj)
		_, err := sealing.Open(&obj, func(string) (*envelope.SealingKey, error) { return key, nil })
		if (err == nil) != (name == "nothing") {
			t.Errorf("with another %s: %v", name, err)
		}
	}
}

// The browser accepts a document exactly when Go does, and says whose it is.
func TestSealingKeyDocumentsAreReadAlike(t *testing.T) {
	b := newBench(t)
	identity, key := newIdentity(t), newSealingKey(t, envelope.SuiteMLKEM768X25519)
	document, other := documentOf(t, identity, key.Public()), documentOf(t, newIdentity(t), newSealingKey(t, envelope.SuiteMLKEM768X25519).Public())
	field := func(doc, name string) string {
		_, rest, _ := strings.Cut(doc, `"`+name+`":"`)
		value, _, _ := strings.Cut(rest, `"`)
		return value
	}
	identityKey := func(doc string) string { return field(doc[strings.Index(doc, `"identity"`):], "public_key") }
	swap := func(from, to string) string { return strings.Replace(document, from, to, 1) }
	with := func(name string) string { return swap(field(document, name), field(other, name)) }
	// resigned is a document with these parts and a signature that holds.
	resigned := func(suite string, publicKey []byte, at string, algorithm string, another ...string) string {
		created, _ := time.Parse(time.RFC3339, at)
		id := sha3.Sum256(frame.Join(suite, publicKey))
		keyID := append(another, hex.EncodeToString(id[:]))[0]
		message := frame.Join("latticekeep/sealing-key/v1", frame.Uint64(1), []byte(suite), []byte(keyID), publicKey, frame.Uint64(uint64(created.Unix())),
			[]byte(algorithm), identity.Public().Bytes())
		signature, err := identity.Sign("latticekeep/sealing-key/v1", message)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf(`{"version":1,"suite":%q,"key_id":%q,"public_key":%q,"created_at":%q,"identity":{"algorithm":%q,"public_key":%q},"signature":%q}`,
			suite, keyID, base64.StdEncoding.EncodeToString(publicKey), at, algorithm, base64.StdEncoding.EncodeToString(identity.Public().Bytes()), base64.StdEncoding.EncodeToString(signature))
	}
	publicKey := key.Public().Bytes()
	notReduced := bytes.Clone(publicKey)
	notReduced[0], notReduced[1] = 0x01, notReduced[1]&0xf0|0x0d // 0xd01 is q
	notReduced2 := bytes.Clone(publicKey)
	notReduced2[1150], notReduced2[1151] = notReduced2[1150]&0x0f|0x10, 0xd0
	lowOrder := bytes.Clone(publicKey)
	clear(lowOrder[1184:])
	alone := newSealingKey(t, envelope.SuiteMLKEM768).Public().Bytes()

	documents := map[string]string{
		"as it is": document, "of another": other, "indented": indented(t, document), "with white space": " \t\r\n" + document + "\n",
		"of the other suite": resigned("MLKEM768", alone, "2026-11-21T10:30:00Z", "ML-DSA-65"), "signed again": resigned("MLKEM768-X25519", publicKey, "2026-11-21T10:30:00Z", "ML-DSA-65"),
		"before 1970": resigned("MLKEM768-X25519", publicKey, "0001-01-01T00:00:00Z", "ML-DSA-65"), "a low-order point": resigned("MLKEM768-X25519", lowOrder, "2026-11-21T10:30:00Z", "ML-DSA-65"),

		"empty": "", "no JSON": "age1pq", "null": "null", "a list": "[]", "too large": document + strings.Repeat(" ", sealing.MaxDocumentBytes), "a number": "1", "half": document[:len(document)/2],
		"unknown field": swap(`{"version"`, `{"success":true,"version"`), "repeated field": swap(`{"version":1,`, `{"version":1,"version":1,`), "another spelling": swap(`"suite"`, `"Suite"`),
		"field in the identity": swap(`"algorithm"`, `"x":1,"algorithm"`), "identity a list": swap(`"identity":{"algorithm":"ML-DSA-65",`, `"identity":["ML-DSA-65",`),
		"escaped": swap(`"suite"`, `"\u0073uite"`), "escaped value": swap("ML-DSA-65", `ML\u002dDSA-65`), "another order": strings.Replace(swap(`"version":1,`, ""), `,"signature"`, `,"version":1,"signature"`, 1),
		"second value": document + "{}", "version": swap(`"version":1`, `"version":2`), "version as text": swap(`"version":1`, `"version":"1"`), "version 1.0": swap(`"version":1`, `"version":1.0`),
		"suite": swap("MLKEM768-X25519", "MLKEM768"), "unknown suite": swap("MLKEM768-X25519", "RSA"), "suite of an object": swap("MLKEM768-X25519", "constructor"),
		"key id": with("key_id"), "public key": with("public_key"), "both": strings.Replace(with("public_key"), field(document, "key_id"), field(other, "key_id"), 1),
		"created at": swap("10:30:00", "10:30:01"), "fraction": swap("10:30:00", "10:30:00.5"), "zone": swap("10:30:00Z", "10:30:00+00:00"), "no time": swap("2026-11-21T10:30:00Z", "yesterday"),
		"algorithm": swap("ML-DSA-65", "ML-DSA-44"), "signature of another": with("signature"), "identity of another": swap(identityKey(document), identityKey(other)),
		"short signature": swap(field(document, "signature"), "AAAA"), "no signature": swap(`,"signature":"`+field(document, "signature")+`"`, ""), "signature null": swap(`"`+field(document, "signature")+`"`, "null"),
		"line break in base64": swap(field(document, "signature"), `\n`+field(document, "signature")), "space in base64": swap(field(document, "signature"), " "+field(document, "signature")),
		"byte order mark": "\ufeff" + document,

		"not reduced":                  resigned("MLKEM768-X25519", notReduced, "2026-11-21T10:30:00Z", "ML-DSA-65"),
		"not reduced, the last number": resigned("MLKEM768-X25519", notReduced2, "2026-11-21T10:30:00Z", "ML-DSA-65"),
		"signed, of another length":    resigned("MLKEM768", publicKey, "2026-11-21T10:30:00Z", "ML-DSA-65"), "signed, with a fraction": resigned("MLKEM768-X25519", publicKey, "2026-11-21T10:30:00.5Z", "ML-DSA-65"),
		"signed, a day that is none": resigned("MLKEM768-X25519", publicKey, "2026-02-30T10:30:00Z", "ML-DSA-65"), "signed, another algorithm": resigned("MLKEM768-X25519", publicKey, "2026-11-21T10:30:00Z", "ML-DSA-44"),
		"signed, another key id": resigned("MLKEM768-X25519", publicKey, "2026-11-21T10:30:00Z", "ML-DSA-65", strings.Repeat("0", 64)),
		"signed, unknown suite":  resigned("RSA", publicKey, "2026-11-21T10:30:00Z", "ML-DSA-65"),
	}
	for i := 0; i < len(document); i += 61 {
		flipped := []byte(document)
		flipped[i] ^= 1
		documents[fmt.Sprintf("byte %d", i)] = string(flipped)
	}
	names := slices.Sorted(maps.Keys(documents))
	arguments := make([]any, len(names))
	for i, name := range names {
		arguments[i] = documents[name]
	}
	accepted := 0
	for i, o := range b.call("sealing.js", `async (m, text) => (await m.readSealingKey(text)).identity`, arguments...) {
		d, err := sealing.ParseDocument([]byte(documents[names[i]]))
		if (err == nil) != (o.Refused == "") {
			t.Errorf("%s: Go says %v, the browser %q", names[i], err, o.Refused)
			continue
		}
		if err != nil {
			if !strings.HasSuffix(o.Refused, ".") || strings.Contains(o.Refused, "TypeError") {
				t.Errorf("%s: refused with %q", names[i], o.Refused)
			}
			continue
		}
		accepted++
		if string(o.Value) != `"`+d.Identity()+`"` {
			t.Errorf("%s: the identity is %s, not %s", names[i], o.Value, d.Identity())
		}
	}
	if accepted != 8 {
		t.Errorf("%d documents were accepted", accepted)
	}
	// Parsed, it is read as well.
	if o := b.call("sealing.js", `async (m, text) => (await m.readSealingKey(JSON.parse(text))).keyID`, document)[0]; string(o.Value) != `"`+key.Public().ID()+`"` {
		t.Errorf("%s %s", o.Value, o.Refused)
	}
	// What was not verified seals nothing, and neither does a key whose X25519 point has a low order.
	for name, function := range map[string]string{
		"a copy of a key": `async (m, text) => m.sealManifest({key: {...await m.readSealingKey(text)}, namespace: 'n', name: 'n', credentialType: 't', values: {k: 'v'}})`,
		"a low order":     `async (m, text) => m.sealManifest({key: await m.readSealingKey(text), namespace: 'n', name: 'n', credentialType: 't', values: {k: 'v'}})`,
	} {
		given := document
		if name == "a low order" {
			given = documents["a low-order point"]
		}
		if o := b.call("sealing.js", function, given)[0]; o.Refused == "" {
			t.Errorf("%s seals: %s", name, o.Value)
		}
	}
}

func indented(t testing.TB, document string) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Indent(&b, []byte(document), "\t", "  "); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// What Go would not seal the browser does not, and says which field it is, without the value.
func TestWhatCannotBeSealedIsNamed(t *testing.T) {
	b := newBench(t)
	key := newSealingKey(t, envelope.SuiteMLKEM768X25519)
	document := documentOf(t, newIdentity(t), key.Public())
	const canary = "tr0ub4dor-and-3"
	type change func(*toSeal)
	tooMany, tooLong := map[string]string{}, strings.Repeat("x", 254)
	for i := range v1beta1.MaxValues + 1 {
		tooMany[fmt.Sprint("k", i)] = canary
	}
	cases := []struct {
		name, field string
		change      change
	}{
		{"nothing", "", func(*toSeal) {}},
		{"longest name", "", func(c *toSeal) { c.Name = strings.Repeat("a", 253) }},
		{"longest key", "", func(c *toSeal) { c.Texts = map[string]string{tooLong[:253]: canary} }},
		{"largest", "", func(c *toSeal) { c.Texts = map[string]string{"k": strings.Repeat("ü", (262146-1137)/2)} }},
		{"no name", "name", func(c *toSeal) { c.Name = "" }},
		{"upper case", "name", func(c *toSeal) { c.Name = "Db" }},
		{"dot at the end", "name", func(c *toSeal) { c.Name = "db." }},
		{"two dots", "name", func(c *toSeal) { c.Name = "d..b" }},
		{"too long a name", "name", func(c *toSeal) { c.Name = strings.Repeat("a", 254) }},
		{"a line break", "name", func(c *toSeal) { c.Name = "db\n" }},
		{"no namespace", "namespace", func(c *toSeal) { c.Namespace = "" }},
		{"no namespace, namespace", "namespace", func(c *toSeal) { c.Namespace, c.Scope = "", "Namespace" }},
		{"a dot", "namespace", func(c *toSeal) { c.Namespace = "a.b" }},
		{"too long a namespace", "namespace", func(c *toSeal) { c.Namespace = strings.Repeat("a", 64) }},
		{"a bad namespace for all", "namespace", func(c *toSeal) { c.Namespace, c.Scope = "A", "Cluster" }},
		{"no type", "credentialType", func(c *toSeal) { c.CredentialType = "" }},
		{"type with a space", "credentialType", func(c *toSeal) { c.CredentialType = "a b" }},
		{"type with a dash", "credentialType", func(c *toSeal) { c.CredentialType = "-a" }},
		{"too long a type", "credentialType", func(c *toSeal) { c.CredentialType = strings.Repeat("a", 64) }},
		{"scope", "scope", func(c *toSeal) { c.Scope = "strict" }},
		{"TTL below", "ttlDays", func(c *toSeal) { c.TTLDays = -1 }},
		{"TTL above", "ttlDays", func(c *toSeal) { c.TTLDays = v1beta1.MaxTTLDays + 1 }},
		{"no values", "values", func(c *toSeal) { c.Texts = nil }},
		{"too many values", "values", func(c *toSeal) { c.Texts = tooMany }},
		{"too large", "values", func(c *toSeal) { c.Texts = map[string]string{"k": strings.Repeat("ü", (262146-1137)/2+1)} }},
		{"too large together", "values", func(c *toSeal) {
			c.Texts = map[string]string{"k": strings.Repeat("x", 200000), "l": strings.Repeat("x", 100000)}
		}},
		{"empty key", "values", func(c *toSeal) { c.Texts = map[string]string{"": canary} }},
		{"key with a space", "values", func(c *toSeal) { c.Texts = map[string]string{"a b": canary} }},
		{"key with an umlaut", "values", func(c *toSeal) { c.Texts = map[string]string{"ü": canary} }},
		{"too long a key", "values", func(c *toSeal) { c.Texts = map[string]string{tooLong: canary} }},
	}
	var arguments []any
	for _, c := range cases {
		given := toSeal{Document: document, Namespace: "shop", Name: "db", CredentialType: "database", Scope: "Strict", Texts: map[string]string{"k": canary}}
		c.change(&given)
		arguments = append(arguments, given)
	}
	for i, o := range b.call("sealing.js", sealFunction, arguments...) {
		c, given := cases[i], arguments[i].(toSeal)
		values := map[string]secret.Bytes{}
		for k, v := range given.Texts {
			values[k] = secret.Bytes(v)
		}
		_, err := sealing.Seal(key.Public(), sealing.Request{
			Namespace: given.Namespace, Name: given.Name, CredentialType: given.CredentialType, TTLDays: given.TTLDays, Scope: v1beta1.Scope(given.Scope), Values: values,
		}, madeAt)
		if (err == nil) != (c.field == "") {
			t.Fatalf("%s: Go says %v", c.name, err)
		}
		if strings.Contains(o.Refused, canary) {
			t.Errorf("%s: the refusal has the value", c.name)
		}
		switch {
		case c.field == "" && o.Refused != "":
			t.Errorf("%s: refused: %s", c.name, o.Refused)
		case c.field != "" && len(o.Problems) == 0:
			t.Errorf("%s: sealed, or refused without a field: %s", c.name, o.Refused)
		case c.field != "" && (o.Problems[0].Field != c.field || !strings.HasSuffix(o.Problems[0].Message, ".")):
			t.Errorf("%s: %+v", c.name, o.Problems)
		}
	}
	// What JSON cannot carry here.
	for name, values := range map[string]string{
		"a key given twice": `[['k', 'v'], ['k', 'w']]`, "half a character": `{k: '\ud800'}`, "a number": `{k: 1}`, "nothing": `undefined`, "null": `{k: null}`,
	} {
		o := b.call("sealing.js", `async (m, text) => m.sealManifest({key: await m.readSealingKey(text), namespace: 'n', name: 'n', credentialType: 't', values: `+values+`})`, document)[0]
		if len(o.Problems) != 1 || o.Problems[0].Field != "values" || name != "nothing" && o.Problems[0].DataKey != "k" {
			t.Errorf("%s: %+v", name, o)
		}
	}
	for _, ttl := range []string{"1.5", "NaN", "'30'", "-1", "3651", "Infinity"} {
		o := b.call("sealing.js", `async (m, text) => m.sealManifest({key: await m.readSealingKey(text), namespace: 'n', name: 'n', credentialType: 't', values: {k: 'v'}, ttlDays: `+ttl+`})`, document)[0]
		if len(o.Problems) != 1 || o.Problems[0].Field != "ttlDays" {
			t.Errorf("%s days: %+v", ttl, o)
		}
	}
}

// ---- the log

// history is a real log on disk, which is asked as the interface asks it.
type history struct {
	t      testing.TB
	log    *writer.Log
	store  store.Database
	signer *dualsig.PrivateKey
}

const (
	ownTenant     = authz.TenantID("ten_aaaaaaaaaaaaaaaaaaaaaaaaaa")
	foreignTenant = authz.TenantID("ten_eeeeeeeeeeeeeeeeeeeeeeeeee")
	chainID       = "chain_test"
)

func newHistory(t testing.TB) *history {
	t.Helper()
	clock := madeAt
	var mu sync.Mutex
	h := &history{t: t, signer: newIdentity(t), log: writer.New(func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		clock = clock.Add(1234567 * time.Microsecond)
		return clock
	}, nil)}
	var err error
	if h.store, err = bolt.Open(filepath.Join(t.TempDir(), "audit.db"), bolt.Options{Hook: h.log.Commit}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.store.Close() })
	if err := h.log.Use(t.Context(), h.store, h.signer, chainID); err != nil {
		t.Fatal(err)
	}
	h.record(authz.SystemTenant, audit.ChainStarted, nil)
	return h
}

func principal(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.APIKey, ID: "key_of_" + string(tenant), Scopes: append(authz.TenantScopes(), authz.SystemAdmin), RequestID: "req", SourceIP: "127.0.0.1"}
}

func (h *history) record(tenant authz.TenantID, what audit.EventType, attributes map[string]string) {
	h.t.Helper()
	err := h.log.Record(context.Background(), audit.Event{
		Type: what, Outcome: audit.Success, Principal: principal(tenant), Resource: audit.Resource{Type: audit.CredentialResource, ID: "cred_x"}, Attributes: attributes,
	})
	if err != nil {
		h.t.Fatal(err)
	}
}

// group writes n entries in one commit, which share a signature.
func (h *history) group(n int) {
	h.t.Helper()
	h.log.SetSigning(writer.SignBatches)
	defer h.log.SetSigning(writer.SignEntries)
	err := h.store.Update(context.Background(), func(tx store.Tx) error {
		for i := range n {
			tenant := ownTenant
			if i%3 == 1 {
				tenant = foreignTenant
			}
			_, err := h.log.Append(tx, audit.Event{Type: audit.CredentialSealed, Outcome: audit.Success, Principal: principal(tenant), Attributes: map[string]string{"version": strconv.Itoa(i)}})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		h.t.Fatal(err)
	}
}

// entries returns all that a tenant has, newest first, as the interface answers them.
func (h *history) entries(tenant authz.TenantID) []audit.Entry {
	h.t.Helper()
	var all []audit.Entry
	for cursor := ""; ; {
		page, next, err := reader.New(h.log, guard.New(h.log)).Query(context.Background(), principal(tenant), reader.Query{Limit: 1000, Cursor: cursor})
		if err != nil {
			h.t.Fatal(err)
		}
		all = append(all, page...)
		if next == "" {
			return all
		}
		cursor = next
	}
}

func (h *history) publicKey() v2.AuditPublicKey { return publicKeyOf(chainID, h.signer.Public()) }

func publicKeyOf(chain string, key *dualsig.PublicKey) v2.AuditPublicKey {
	return v2.AuditPublicKey{
		Success: true, ChainId: chain, Fingerprint: audit.Fingerprint(chain, key.Bytes()), Verifier: audit.VerifierKey(chain, 1, key),
		Key: v2.JWK{Kty: "AKP", Alg: "ML-DSA-65", Use: "sig", Kid: key.ID(), Pub: base64.RawURLEncoding.EncodeToString(key.Bytes())},
	}
}

func checkpointAnswer(signed []byte, c audit.Checkpoint) v2.CheckpointAnswer {
	return v2.CheckpointAnswer{
		Success: true, Checkpoint: string(signed), Epoch: int64(c.Epoch), Sequence: int64(c.Sequence), Hash: hex.EncodeToString(c.Hash[:]),
		TreeSize: c.Size, RootHash: c.Root.String(), Timestamp: c.Time.UTC(),
	}
}

func (h *history) checkpoint() v2.CheckpointAnswer {
	h.t.Helper()
	if _, err := writer.NewFollower(h.log).Follow(context.Background()); err != nil {
		h.t.Fatal(err)
	}
	signed, c, err := reader.New(h.log, guard.New(h.log)).ReadCheckpoint(context.Background(), principal(ownTenant))
	if err != nil {
		h.t.Fatal(err)
	}
	return checkpointAnswer(signed, c)
}

func hashPath[P tlog.RecordProof | tlog.TreeProof](hashes P) []string {
	all := make([]string, len(hashes))
	for i, hash := range hashes {
		all[i] = hash.String()
	}
	return all
}

func (h *history) inclusion(sequence uint64, size int64) v2.InclusionProof {
	h.t.Helper()
	p, err := reader.New(h.log, guard.New(h.log)).ProveInclusion(context.Background(), principal(ownTenant), sequence, size)
	if err != nil {
		h.t.Fatalf("entry %d: %v", sequence, err)
	}
	return v2.InclusionProof{Success: true, Sequence: int64(p.Sequence), Hash: p.Hash, LeafIndex: p.Index, TreeSize: p.Size, Path: hashPath(p.Path)}
}

func (h *history) consistency(from, to int64) v2.ConsistencyProof {
	h.t.Helper()
	from, to, p, err := reader.New(h.log, guard.New(h.log)).ProveConsistency(context.Background(), principal(ownTenant), from, to)
	if err != nil {
		h.t.Fatal(err)
	}
	return v2.ConsistencyProof{Success: true, From: from, To: to, Path: hashPath(p)}
}

// filled has entries of two tenants, signed alone and in groups, and some whose attributes have to be escaped.
func filled(t testing.TB) *history {
	t.Helper()
	h := newHistory(t)
	for i, attributes := range []map[string]string{
		nil, {"version": "1"}, {"10": "ten", "9": "nine", "a": "\"\\/\b\f\n\r\t\x01\x1f\x7f", "b": "Größe \u2028 <script>&", "c": "🗝️\U0010ffff\ufeff"}, {"__proto__": "x", "constructor": "y"},
	} {
		h.record(ownTenant, audit.CredentialSealed, attributes)
		h.record(foreignTenant, audit.CredentialUnsealed, map[string]string{"n": strconv.Itoa(i)})
	}
	for _, n := range []int{2, 3, 7, 16, 33} {
		h.group(n)
		h.record(ownTenant, audit.CredentialUnsealed, nil)
	}
	return h
}

// argument is what the functions of log.js take.
type argument struct {
	Entry      any `json:"entry"`
	Previous   any `json:"previous"`
	Proof      any `json:"proof"`
	Checkpoint any `json:"checkpoint"`
	From       any `json:"from"`
	To         any `json:"to"`
	PublicKeys any `json:"publicKeys"`
}

func TestTheBrowserVerifiesEntriesAndTheirLinks(t *testing.T) {
	b := newBench(t)
	h := filled(t)
	entries := h.entries(ownTenant)
	checkpoint := h.checkpoint()
	if len(entries) < 45 {
		t.Fatalf("%d entries", len(entries))
	}
	var whole, links, included []any
	grouped := 0
	for i, e := range entries {
		whole = append(whole, argument{Entry: e, PublicKeys: h.publicKey()})
		if len(e.Signature) > 4500 {
			grouped++
		}
		var previous any
		if i+1 < len(entries) {
			previous = entries[i+1]
		}
		links = append(links, argument{Entry: e, Previous: previous})
		if int64(e.Sequence) <= checkpoint.Sequence {
			included = append(included, argument{Entry: e, Proof: h.inclusion(e.Sequence, checkpoint.TreeSize), Checkpoint: checkpoint, PublicKeys: []any{h.publicKey()}})
		}
	}
	if grouped < 30 {
		t.Errorf("%d entries were signed in groups", grouped)
	}
	for i, o := range b.call("log.js", `(m, a) => m.verifyEntry(a.entry, a.publicKeys)`, whole...) {
		var found struct {
			Hash      string
			Signature struct {
				KeyID   string
				Entries int
			}
		}
		if err := json.Unmarshal(o.Value, &found); err != nil || found.Hash != entries[i].Hash || found.Signature.KeyID != h.signer.Public().ID() || found.Signature.Entries < 1 {
			t.Errorf("entry %d: %s %s", entries[i].Sequence, o.Value, o.Refused)
		}
	}
	for i, o := range b.call("log.js", `(m, a) => m.verifyLink(a.entry, a.previous)`, links...) {
		var found struct{ Chain, Tenant bool }
		if err := json.Unmarshal(o.Value, &found); err != nil || !found.Tenant {
			t.Errorf("entry %d: %s %s", entries[i].Sequence, o.Value, o.Refused)
		}
	}
	for i, o := range b.call("log.js", `(m, a) => m.verifyInclusion(a)`, included...) {
		want := fmt.Sprintf(`{"index":%d,"size":%d}`, included[i].(argument).Entry.(audit.Entry).Sequence-1, checkpoint.TreeSize)
		if string(o.Value) != want {
			t.Errorf("%s %s, not %s", o.Value, o.Refused, want)
		}
	}
	// Links of the whole log, in which tenants alternate, from the export.
	var export bytes.Buffer
	if err := reader.New(h.log, guard.New(h.log)).Export(context.Background(), &export, 0); err != nil {
		t.Fatal(err)
	}
	links = nil
	var previous any
	for line := range strings.Lines(export.String()) {
		if strings.HasPrefix(line, `{"checkpoint"`) {
			break
		}
		links = append(links, argument{Entry: json.RawMessage(line), Previous: previous})
		previous = json.RawMessage(line)
	}
	for i, o := range b.call("log.js", `(m, a) => m.verifyLink(a.entry, a.previous)`, links...) {
		if !strings.Contains(string(o.Value), `"chain":true`) {
			t.Errorf("line %d: %s %s", i+1, o.Value, o.Refused)
		}
	}
	// The example of the documentation.
	example := read(t, "../../docs/audit-example.jsonl")
	hashes := []any{}
	for line := range strings.Lines(example) {
		if !strings.HasPrefix(line, `{"checkpoint"`) {
			hashes = append(hashes, json.RawMessage(line))
		}
	}
	for i, o := range b.call("log.js", `(m, a) => m.verifyHash(a)`, hashes...) {
		if o.Refused != "" {
			t.Errorf("line %d of the example: %s", i+1, o.Refused)
		}
	}
}

// fields returns an entry as JSON that can be changed.
func fields(t testing.TB, e any) map[string]any {
	t.Helper()
	b, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	var f map[string]any
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	return f
}

// rehashed gives a changed entry the hash that it would have, as who forges it would.
func rehashed(t testing.TB, f map[string]any) map[string]any {
	t.Helper()
	b, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	var e audit.Entry
	if err := json.Unmarshal(b, &e); err != nil {
		t.Fatal(err)
	}
	canonical, err := e.JSON()
	if err != nil {
		t.Fatal(err)
	}
	core := strings.Replace(strings.Replace(string(canonical), `,"hash":"`+e.Hash+`"`, "", 1), `,"signature":"`+e.Signature+`"`, "", 1)
	hash := sha3.Sum256([]byte(core))
	f["hash"] = hex.EncodeToString(hash[:])
	return f
}

// flipped returns base64 with a bit of a byte changed.
func flipped(t testing.TB, text string, at int) string {
	t.Helper()
	b, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	b[(at+len(b))%len(b)] ^= 1
	return base64.StdEncoding.EncodeToString(b)
}

func TestTheBrowserRefusesEntriesThatWereChanged(t *testing.T) {
	b := newBench(t)
	h := filled(t)
	entries := h.entries(ownTenant)
	var alone, grouped audit.Entry
	for _, e := range entries {
		if len(e.Signature) > 4500 {
			grouped = e
		} else if len(e.Attributes) == 5 {
			alone = e
		}
	}
	if alone.Hash == "" || grouped.Hash == "" {
		t.Fatal("an entry is missing")
	}
	other := publicKeyOf(chainID, newIdentity(t).Public())
	type refusal struct {
		name, part string
		argument
	}
	var cases []refusal
	add := func(name, part string, e map[string]any, keys ...any) {
		if len(keys) == 0 {
			keys = []any{h.publicKey()}
		}
		cases = append(cases, refusal{name, part, argument{Entry: e, PublicKeys: keys}})
	}
	for which, e := range map[string]audit.Entry{"alone": alone, "in a group": grouped} {
		// Each member, changed: by itself, and with the hash that then fits.
		for name, value := range fields(t, e) {
			changed := map[string]any{}
			switch v := value.(type) {
			case string:
				changed["other"] = v + "0"
				changed["empty"] = ""
				changed["number"] = 1
				changed["null"] = nil
				if v == "" {
					delete(changed, "empty")
				}
			case float64:
				changed["next"] = v + 1
				changed["text"] = fmt.Sprint(v)
				changed["fraction"] = v + 0.5
				changed["negative"] = -v
				changed["beyond 2^53"] = json.RawMessage("9007199254740993")
			case map[string]any:
				more := maps.Clone(v)
				more["zz"] = "x"
				changed["more"] = more
				if len(v) > 0 {
					less := maps.Clone(v)
					delete(less, slices.Sorted(maps.Keys(less))[0])
					changed["less"] = less
				}
				changed["list"] = []any{}
			}
			for how, v := range changed {
				f := fields(t, e)
				f[name] = v
				part := "hash"
				switch how {
				case "number", "null", "text", "fraction", "negative", "beyond 2^53", "list":
					part = "form"
				case "more", "less":
					part = "hash form"
				default:
					if name == "signature" {
						part = "signature"
					}
				}
				add(which+": "+name+" "+how, part, f)
			}
			f := fields(t, e)
			delete(f, name)
			add(which+": without "+name, "form", f)
		}
		more := fields(t, e)
		more["more"] = "x"
		add(which+": a further member", "form", more)
		for name, v := range map[string]any{
			"outcome": "denied", "event_type": "CREDENTIAL_DELETED", "sequence": e.Sequence + 1, "tenant_id": string(foreignTenant), "timestamp": "2026-11-21T00:00:00.000000Z",
			"previous_hash": strings.Repeat("0", 64), "attributes": map[string]any{}, "actor": map[string]any{"id": "key_forged", "type": "api_key"}, "salt": "AAAAAAAAAAAAAAAAAAAAAA==",
		} {
			f := fields(t, e)
			f[name] = v
			add(which+": "+name+", and its hash", "signature", rehashed(t, f))
		}
		signature, err := base64.StdEncoding.DecodeString(e.Signature)
		if err != nil {
			t.Fatal(err)
		}
		random := mathrand.New(mathrand.NewPCG(1, 2))
		for _, at := range append([]int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 40, -1, -2}, random.Perm(len(signature))[:20]...) {
			f := fields(t, e)
			f["signature"] = flipped(t, e.Signature, at)
			add(fmt.Sprintf("%s: byte %d of the signature", which, at), "signature", f)
		}
		for name, text := range map[string]string{
			"cut": base64.StdEncoding.EncodeToString(signature[:len(signature)-1]), "longer": base64.StdEncoding.EncodeToString(append(bytes.Clone(signature), 0)),
			"a line break": e.Signature[:76] + "\n" + e.Signature[76:], "no base64": "x", "url": base64.URLEncoding.EncodeToString(signature), "without the path": base64.StdEncoding.EncodeToString(signature[max(0, len(signature)-dualsig.SignatureSize):]) + "",
		} {
			if text == e.Signature {
				continue
			}
			f := fields(t, e)
			f["signature"] = text
			add(which+": a signature "+name, "signature", f)
		}
		add(which+": under another key", "signature", fields(t, e), other)
		wrong := other
		wrong.Key.Kid = h.signer.Public().ID()
		add(which+": under another key that says it is the log's", "key", fields(t, e), wrong)
		foreign := h.publicKey()
		foreign.ChainId = "chain_other"
		add(which+": under the key of another log", "key", fields(t, e), foreign)
		add(which+": without a key", "key", fields(t, e), map[string]any{})
	}
	for _, v := range []any{nil, 1, "x", []any{}, map[string]any{}} {
		cases = append(cases, refusal{fmt.Sprintf("%v", v), "form", argument{Entry: v, PublicKeys: h.publicKey()}})
	}
	arguments := make([]any, len(cases))
	for i, c := range cases {
		arguments[i] = c.argument
	}
	for i, o := range b.call("log.js", `(m, a) => m.verifyEntry(a.entry, a.publicKeys)`, arguments...) {
		if o.Refused == "" || o.Part == "" || !strings.Contains(cases[i].part, o.Part) || !strings.HasSuffix(o.Refused, ".") {
			t.Errorf("%s: %s, %q, part %q and not %q", cases[i].name, o.Value, o.Refused, o.Part, cases[i].part)
		}
	}
	// The order of the members does not count, and half a character is refused.
	if o := b.call("log.js", `(m, a) => m.verifyEntry(Object.fromEntries(Object.entries(a.entry).reverse()), a.publicKeys)`, argument{Entry: alone, PublicKeys: h.publicKey()})[0]; o.Refused != "" {
		t.Error(o.Refused)
	}
	if o := b.call("log.js", `(m, a) => m.verifyEntry({...a.entry, request_id: '\ud800'}, a.publicKeys)`, argument{Entry: alone, PublicKeys: h.publicKey()})[0]; o.Part != "form" {
		t.Errorf("half a character: %+v", o)
	}
}

func TestTheBrowserRefusesLinksThatDoNotHold(t *testing.T) {
	b := newBench(t)
	h := filled(t)
	entries := h.entries(ownTenant)
	foreign := h.entries(foreignTenant)
	newest, before, first := entries[0], entries[1], entries[len(entries)-1]
	change := func(e audit.Entry, name string, value any) map[string]any {
		f := fields(t, e)
		f[name] = value
		return rehashed(t, f)
	}
	altered := fields(t, before)
	altered["outcome"] = "denied"
	cases := map[string]argument{
		"the one before was altered, but for its hash": {Entry: newest, Previous: altered},
		"the one before was altered":                   {Entry: newest, Previous: change(before, "outcome", "denied")},
		"the one before has a salt":                    {Entry: newest, Previous: change(before, "salt", "AAAAAAAAAAAAAAAAAAAAAA==")},
		"an entry is missing":                          {Entry: newest, Previous: entries[2]},
		"the same":                                     {Entry: newest, Previous: newest},
		"turned around":                                {Entry: before, Previous: newest},
		"another tenant's":                             {Entry: newest, Previous: foreign[len(foreign)-1]},
		"no first one":                                 {Entry: newest, Previous: nil},
		"a first one that is none":                     {Entry: change(first, "tenant_previous_hash", newest.Hash), Previous: nil},
		"another previous hash":                        {Entry: change(newest, "tenant_previous_hash", first.Hash), Previous: before},
		"another previous hash in the chain":           {Entry: change(newest, "previous_hash", first.Hash), Previous: before},
		"another key":                                  {Entry: change(newest, "key_id", strings.Repeat("0", 64)), Previous: before},
		"an earlier time":                              {Entry: change(newest, "timestamp", "2026-11-21T00:00:00.000000Z"), Previous: before},
		"no entry":                                     {Entry: map[string]any{}, Previous: before},
		"nothing before":                               {Entry: newest, Previous: map[string]any{}},
		"only the chain goes on":                       {Entry: change(newest, "tenant_sequence", newest.TenantSequence+1), Previous: before},
	}
	if newest.Sequence != before.Sequence+1 {
		t.Fatal("the newest two are not neighbours")
	}
	names := slices.Sorted(maps.Keys(cases))
	arguments := make([]any, len(names))
	for i, name := range names {
		arguments[i] = cases[name]
	}
	for i, o := range b.call("log.js", `(m, a) => m.verifyLink(a.entry, a.previous)`, arguments...) {
		if o.Part != "link" && o.Part != "form" || !strings.HasSuffix(o.Refused, ".") {
			t.Errorf("%s: %s, %q", names[i], o.Value, o.Refused)
		}
	}
}

func TestTheBrowserRefusesProofsThatDoNotHold(t *testing.T) {
	b := newBench(t)
	h := filled(t)
	older := h.checkpoint()
	h.group(5)
	checkpoint := h.checkpoint()
	entries := h.entries(ownTenant)
	entry := entries[20]
	if int64(entry.Sequence) > older.Sequence {
		t.Fatal("the entry is too young")
	}
	proof := h.inclusion(entry.Sequence, checkpoint.TreeSize)
	type set = map[string]any
	valid := func() set {
		return set{"entry": fields(t, entry), "proof": fields(t, proof), "checkpoint": fields(t, checkpoint), "publicKeys": h.publicKey()}
	}
	in := func(s set, part string) set { return s[part].(map[string]any) }
	cases := map[string]set{}
	add := func(name string, change func(set)) {
		s := valid()
		change(s)
		cases[name] = s
	}
	for i := range proof.Path {
		add(fmt.Sprintf("inclusion: hash %d of the path", i), func(s set) {
			p := slices.Clone(proof.Path)
			p[i] = flipped(t, p[i], i)
			in(s, "proof")["path"] = p
		})
	}
	add("inclusion: a shorter path", func(s set) { in(s, "proof")["path"] = proof.Path[1:] })
	add("inclusion: a shorter path, at the end", func(s set) { in(s, "proof")["path"] = proof.Path[:len(proof.Path)-1] })
	add("inclusion: a longer path", func(s set) { in(s, "proof")["path"] = append(slices.Clone(proof.Path), proof.Path[0]) })
	add("inclusion: no path", func(s set) { in(s, "proof")["path"] = nil })
	add("inclusion: hashes that are none", func(s set) { in(s, "proof")["path"] = []string{"AAAA"} })
	add("inclusion: an endless path", func(s set) { in(s, "proof")["path"] = slices.Repeat(proof.Path, 100) })
	add("inclusion: another place", func(s set) { in(s, "proof")["leaf_index"] = proof.LeafIndex + 1 })
	add("inclusion: no place", func(s set) { in(s, "proof")["leaf_index"] = -1 })
	add("inclusion: another size", func(s set) { in(s, "proof")["tree_size"] = proof.TreeSize - 1 })
	add("inclusion: another sequence", func(s set) { in(s, "proof")["sequence"] = proof.Sequence + 1 })
	add("inclusion: another hash", func(s set) { in(s, "proof")["hash"] = strings.Repeat("0", 64) })
	add("inclusion: the proof of an older tree", func(s set) { s["proof"] = h.inclusion(entry.Sequence, older.TreeSize) })
	add("inclusion: the proof of another entry", func(s set) { s["proof"] = h.inclusion(entries[21].Sequence, checkpoint.TreeSize) })
	add("inclusion: another entry", func(s set) { s["entry"] = fields(t, entries[21]) })
	add("inclusion: a changed entry", func(s set) { in(s, "entry")["outcome"] = "denied" })
	add("inclusion: a changed entry, with its hash", func(s set) {
		in(s, "entry")["outcome"] = "denied"
		in(s, "proof")["hash"] = rehashed(t, in(s, "entry"))["hash"]
	})
	add("inclusion: no proof", func(s set) { s["proof"] = nil })
	for name, value := range fields(t, checkpoint) {
		if name == "success" || name == "checkpoint" {
			continue
		}
		add("checkpoint: told another "+name, func(s set) {
			switch v := value.(type) {
			case string:
				in(s, "checkpoint")[name] = strings.Replace(v, v[10:12], "zz", 1)
			case float64:
				in(s, "checkpoint")[name] = v + 1
			}
		})
	}
	note := checkpoint.Checkpoint
	for name, changed := range map[string]string{
		"size": strings.Replace(note, fmt.Sprintf("\n%d\n", checkpoint.TreeSize), fmt.Sprintf("\n%d\n", checkpoint.TreeSize-1), 1), "root": strings.Replace(note, checkpoint.RootHash, older.RootHash, 1),
		"hash": strings.Replace(note, checkpoint.Hash, older.Hash, 1), "chain": strings.ReplaceAll(note, "/chain_test/", "/chain_else/"), "epoch": strings.ReplaceAll(note, "/chain_test/1", "/chain_test/2"),
		"name of the signer": strings.Replace(note, "— latticekeep.dev/log/chain_test/1", "— latticekeep.dev/log/chain_test/2", 1), "no signature": note[:strings.Index(note, "\n\n")+2],
		"cut": note[:len(note)-100], "another dash": strings.Replace(note, "—", "-", 1), "a line more": strings.Replace(note, "\n\n", "\nmore\n\n", 1), "a leading zero": strings.Replace(note, fmt.Sprintf("\n%d\n", checkpoint.TreeSize), fmt.Sprintf("\n0%d\n", checkpoint.TreeSize), 1),
		"carriage returns": strings.ReplaceAll(note, "\n", "\r\n"), "older signature": note[:strings.Index(note, "\n\n")] + older.Checkpoint[strings.Index(older.Checkpoint, "\n\n"):], "empty": "", "no newline": note[:len(note)-1],
	} {
		if changed == note {
			t.Fatalf("%s changes nothing", name)
		}
		if _, err := audit.ParseCheckpoint([]byte(changed), h.signer.Public()); err == nil {
			t.Fatalf("Go accepts the checkpoint with another %s", name)
		}
		add("checkpoint: "+name, func(s set) { in(s, "checkpoint")["checkpoint"] = changed })
		add("checkpoint: alone, "+name, func(s set) { s["checkpoint"] = changed })
	}
	random := mathrand.New(mathrand.NewPCG(3, 4))
	for _, at := range random.Perm(len(note))[:40] {
		changed := []byte(note)
		changed[at] ^= 1
		if _, err := audit.ParseCheckpoint(changed, h.signer.Public()); err == nil || !json.Valid([]byte(literal(changed))) || bytes.ContainsRune(changed, 0xfffd) || !bytes.Equal([]byte(strings.ToValidUTF8(string(changed), "?")), changed) {
			continue
		}
		add(fmt.Sprintf("checkpoint: byte %d", at), func(s set) { in(s, "checkpoint")["checkpoint"] = string(changed) })
	}
	add("checkpoint: under another key", func(s set) { s["publicKeys"] = publicKeyOf(chainID, newIdentity(t).Public()) })
	add("checkpoint: none", func(s set) { s["checkpoint"] = nil })

	names := slices.Sorted(maps.Keys(cases))
	arguments := []any{valid()}
	for _, name := range names {
		arguments = append(arguments, cases[name])
	}
	outcomes := b.call("log.js", `(m, a) => m.verifyInclusion(a)`, arguments...)
	if outcomes[0].Refused != "" {
		t.Fatal(outcomes[0].Refused)
	}
	for i, o := range outcomes[1:] {
		part, _, _ := strings.Cut(names[i], ":")
		if o.Part != part || !strings.HasSuffix(o.Refused, ".") {
			t.Errorf("%s: %s, %q, part %q", names[i], o.Value, o.Refused, o.Part)
		}
	}
	// A witness's line beside the log's own changes nothing, and neither does the one of a stranger.
	witnessed := note + "— witness.example/1 AAAAAAAA\n"
	if o := b.call("log.js", `(m, a) => m.verifyCheckpoint(a.checkpoint, a.publicKeys).size`, argument{Checkpoint: witnessed, PublicKeys: h.publicKey()})[0]; string(o.Value) != fmt.Sprint(checkpoint.TreeSize) {
		t.Errorf("%s %s", o.Value, o.Refused)
	}
}

// heads is a tree of which every size has a signed checkpoint.
type heads struct {
	t      testing.TB
	signer *dualsig.PrivateKey
	hashes []tlog.Hash // stored
	data   [][32]byte
}

// newHeads makes a tree of random hashes of n entries, but for those that are given by their place.
func newHeads(t testing.TB, n int64, given map[int64][32]byte) *heads {
	t.Helper()
	h := &heads{t: t, signer: newIdentity(t)}
	for i := range n {
		data, ok := given[i]
		if !ok {
			data = [32]byte(randomBytes(32))
		}
		stored, err := tlog.StoredHashes(i, data[:], h)
		if err != nil {
			t.Fatal(err)
		}
		h.hashes, h.data = append(h.hashes, stored...), append(h.data, data)
	}
	return h
}

// ReadHashes implements [tlog.HashReader].
func (h *heads) ReadHashes(indexes []int64) ([]tlog.Hash, error) {
	all := make([]tlog.Hash, len(indexes))
	for i, x := range indexes {
		all[i] = h.hashes[x]
	}
	return all, nil
}

func (h *heads) root(size int64) tlog.Hash {
	h.t.Helper()
	root, err := tlog.TreeHash(size, h)
	if err != nil {
		h.t.Fatal(err)
	}
	return root
}

func (h *heads) checkpoint(change func(*audit.Checkpoint), size int64) string {
	h.t.Helper()
	c := audit.Checkpoint{ChainID: chainID, Epoch: 1, Size: size, Root: h.root(size), Sequence: uint64(size), Hash: h.data[size-1], Time: madeAt.Add(time.Duration(size) * time.Second)}
	if change != nil {
		change(&c)
	}
	signed, err := audit.SignCheckpoint(c, h.signer)
	if err != nil {
		h.t.Fatal(err)
	}
	return string(signed)
}

func TestTheBrowserProvesThatTheLogGrew(t *testing.T) {
	b := newBench(t)
	sizes := []int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 31, 32, 33, 255, 256, 257, 300}
	h := newHeads(t, sizes[len(sizes)-1], nil)
	key := publicKeyOf(chainID, h.signer.Public())
	notes := map[int64]string{}
	for _, size := range sizes {
		notes[size] = h.checkpoint(nil, size)
	}
	var names []string
	var holds []bool
	var arguments []any
	add := func(name string, is bool, from, to any, proof any) {
		names, holds = append(names, name), append(holds, is)
		arguments = append(arguments, argument{From: from, To: to, Proof: proof, PublicKeys: key})
	}
	random := mathrand.New(mathrand.NewPCG(5, 6))
	for i, from := range sizes {
		for _, to := range sizes[i:] {
			proof, err := tlog.ProveTree(to, from, h)
			if err != nil {
				t.Fatal(err)
			}
			p := v2.ConsistencyProof{From: from, To: to, Path: hashPath(proof)}
			add(fmt.Sprintf("%d to %d", from, to), true, notes[from], notes[to], p)
			if len(proof) > 0 && random.IntN(4) == 0 {
				changed := slices.Clone(p.Path)
				at := random.IntN(len(changed))
				changed[at] = flipped(t, changed[at], 5)
				add(fmt.Sprintf("%d to %d, hash %d changed", from, to, at), false, notes[from], notes[to], v2.ConsistencyProof{From: from, To: to, Path: changed})
				add(fmt.Sprintf("%d to %d, cut", from, to), false, notes[from], notes[to], v2.ConsistencyProof{From: from, To: to, Path: p.Path[1:]})
				add(fmt.Sprintf("%d to %d, longer", from, to), false, notes[from], notes[to], v2.ConsistencyProof{From: from, To: to, Path: append(changed, changed[0])})
			}
		}
	}
	proof, err := tlog.ProveTree(300, 256, h)
	if err != nil {
		t.Fatal(err)
	}
	p := v2.ConsistencyProof{From: 256, To: 300, Path: hashPath(proof)}
	same := v2.ConsistencyProof{From: 256, To: 256, Path: []string{}}
	rewritten := h.checkpoint(func(c *audit.Checkpoint) { c.Root[0] ^= 1 }, 256)
	add("written anew", false, rewritten, notes[300], p)
	proof, err = tlog.ProveTree(300, 257, h)
	if err != nil {
		t.Fatal(err)
	}
	add("written anew, of a size that is no power of two", false, h.checkpoint(func(c *audit.Checkpoint) { c.Root[0] ^= 1 }, 257), notes[300], v2.ConsistencyProof{From: 257, To: 300, Path: hashPath(proof)})
	add("written anew, of one size", false, rewritten, notes[256], same)
	add("written anew, of one size, with one root", false, h.checkpoint(func(c *audit.Checkpoint) { c.Hash[0] ^= 1 }, 256), notes[256], same)
	add("another root", false, notes[256], h.checkpoint(func(c *audit.Checkpoint) { c.Root[0] ^= 1 }, 300), p)
	add("cut", false, notes[300], notes[256], p)
	add("cut, with its proof", false, notes[300], notes[256], v2.ConsistencyProof{From: 300, To: 256, Path: p.Path})
	add("another log", false, h.checkpoint(func(c *audit.Checkpoint) { c.ChainID = "chain_other" }, 256), notes[300], p)
	add("an earlier time", false, h.checkpoint(func(c *audit.Checkpoint) { c.Time = c.Time.Add(time.Hour) }, 256), notes[300], p)
	add("a later epoch", true, notes[256], h.checkpoint(func(c *audit.Checkpoint) { c.Epoch, c.Sequence = 2, 400 }, 300), p)
	add("an earlier epoch", false, h.checkpoint(func(c *audit.Checkpoint) { c.Epoch = 2 }, 256), notes[300], p)
	add("an earlier sequence", false, h.checkpoint(func(c *audit.Checkpoint) { c.Sequence = 301 }, 256), notes[300], p)
	add("the proof of others", false, notes[255], notes[300], p)
	add("no proof", false, notes[256], notes[300], nil)
	names, holds = append(names, "two logs of one key"), append(holds, false)
	arguments = append(arguments, argument{
		From: h.checkpoint(func(c *audit.Checkpoint) { c.ChainID = "chain_other" }, 256), To: notes[300], Proof: p, PublicKeys: []any{key, publicKeyOf("chain_other", h.signer.Public())},
	})
	for i, o := range b.call("log.js", `(m, a) => { m.verifyConsistency(a); return true; }`, arguments...) {
		if (o.Refused == "") != holds[i] {
			t.Errorf("%s: %s %q", names[i], o.Value, o.Refused)
		}
		if o.Refused != "" && (o.Part != "consistency" && o.Part != "checkpoint" || !strings.HasSuffix(o.Refused, ".")) {
			t.Errorf("%s: %q, part %q", names[i], o.Refused, o.Part)
		}
	}
}

// The checkpoints and proofs of a real log, across a rollback that was accepted.
func TestTheBrowserFollowsALogThroughARollback(t *testing.T) {
	b := newBench(t)
	h := filled(t)
	older := h.checkpoint()
	h.log.Halt(&audit.RollbackError{LostFrom: uint64(older.Sequence) + 1, LostTo: uint64(older.Sequence) + 40, Epoch: 1, Source: "a test"})
	if _, err := guard.New(h.log).AcceptRollback(context.Background(), principal(ownTenant), "a test"); err != nil {
		t.Skipf("a rollback cannot be accepted here: %v", err)
	}
	h.record(ownTenant, audit.CredentialSealed, nil)
	newer := h.checkpoint()
	if newer.Epoch != 2 || newer.Sequence <= newer.TreeSize {
		t.Fatalf("%+v", newer)
	}
	entry := h.entries(ownTenant)[0]
	for _, e := range h.entries(ownTenant) {
		if e.EventType == audit.CredentialSealed {
			entry = e
			break
		}
	}
	newer = h.checkpoint()
	outcomes := b.call("log.js", `(m, a) => a.from ? (m.verifyConsistency(a), true) : m.verifyInclusion(a)`,
		argument{From: older, To: newer, Proof: h.consistency(older.TreeSize, newer.TreeSize), PublicKeys: h.publicKey()},
		argument{Entry: entry, Proof: h.inclusion(entry.Sequence, newer.TreeSize), Checkpoint: newer, PublicKeys: h.publicKey()})
	for _, o := range outcomes {
		if o.Refused != "" {
			t.Error(o.Refused)
		}
	}
}

func TestTheBrowserRebuildsTheRootFromTiles(t *testing.T) {
	b := newBench(t)
	for _, size := range []int64{1, 2, 255, 256, 257, 300, 511, 512, 770} {
		h := newHeads(t, size, nil)
		tiles := map[string]string{}
		for level := 0; size>>(8*level) > 0; level++ {
			hashes := size >> (8 * level)
			if hashes%256 == 0 {
				continue
			}
			data, err := tlog.ReadTileData(tlog.Tile{H: 8, L: level, N: hashes / 256, W: int(hashes % 256)}, h)
			if err != nil {
				t.Fatal(err)
			}
			tiles[fmt.Sprintf("%d/%d?width=%d", level, hashes/256, hashes%256)] = base64.StdEncoding.EncodeToString(data)
		}
		changed := map[string]string{}
		for name, data := range tiles {
			changed[name] = flipped(t, data, 7)
		}
		short := map[string]string{}
		for name := range tiles {
			short[name] = "AAAA"
		}
		given := func(tiles map[string]string) any {
			return map[string]any{"checkpoint": h.checkpoint(nil, size), "publicKeys": publicKeyOf(chainID, h.signer.Public()), "tiles": tiles}
		}
		outcomes := b.call("log.js", `(m, a) => m.verifyTiles({...a, tile: async (level, index, width) => Uint8Array.from(atob(a.tiles[level + '/' + index + '?width=' + width]), c => c.charCodeAt(0))})`,
			given(tiles), given(changed), given(short))
		if string(outcomes[0].Value) != strconv.Itoa(len(tiles)) {
			t.Errorf("%d entries: %s %s", size, outcomes[0].Value, outcomes[0].Refused)
		}
		for _, o := range outcomes[1:] {
			if o.Part != "tiles" {
				t.Errorf("%d entries: %s %s", size, o.Value, o.Refused)
			}
		}
	}
}

// A proof that leads to the root says where an entry is. It is refused where that entry cannot be.
func TestTheBrowserKnowsWhichPlaceAnEntryCanHave(t *testing.T) {
	b := newBench(t)
	entry := filled(t).entries(ownTenant)[5]
	sequence, hash := int64(entry.Sequence), [32]byte{}
	if _, err := hex.Decode(hash[:], []byte(entry.Hash)); err != nil {
		t.Fatal(err)
	}
	type place struct {
		name   string
		index  int64
		size   int64
		is     bool
		change func(*audit.Checkpoint)
	}
	later := func(c *audit.Checkpoint) { c.Epoch, c.Sequence = 2, uint64(c.Size)+100 }
	places := []place{
		{"where it is", sequence - 1, sequence + 5, true, nil},
		{"the newest", sequence - 1, sequence, true, nil},
		{"another place", sequence - 3, sequence + 5, false, nil},
		{"another place after a rollback", sequence - 3, sequence + 5, true, later},
		{"behind its sequence", sequence, sequence + 5, false, later},
		{"the newest, but another hash", sequence - 1, sequence, false, func(c *audit.Checkpoint) { c.Hash[0] ^= 1 }},
		{"the newest, but another sequence", sequence - 1, sequence, false, func(c *audit.Checkpoint) { c.Sequence++ }},
		{"newer than the checkpoint", sequence - 6, sequence - 3, false, func(c *audit.Checkpoint) { c.Epoch = 2 }},
	}
	var arguments []any
	for _, p := range places {
		h := newHeads(t, p.size, map[int64][32]byte{p.index: hash})
		path, err := tlog.ProveRecord(p.size, p.index, h)
		if err != nil {
			t.Fatal(err)
		}
		arguments = append(arguments, argument{
			Entry: entry, Checkpoint: h.checkpoint(p.change, p.size), PublicKeys: publicKeyOf(chainID, h.signer.Public()),
			Proof: v2.InclusionProof{Success: true, Sequence: sequence, Hash: entry.Hash, LeafIndex: p.index, TreeSize: p.size, Path: hashPath(path)},
		})
	}
	for i, o := range b.call("log.js", `(m, a) => m.verifyInclusion(a)`, arguments...) {
		if (o.Refused == "") != places[i].is || o.Refused != "" && o.Part != "inclusion" {
			t.Errorf("%s: %s %q", places[i].name, o.Value, o.Refused)
		}
	}
}
