package dashboard_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/cli/seal"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// cluster is what the interface answers of the objects of a cluster, which no test of this package has.
func (e *estate) cluster() string {
	now := time.Now().UTC().Truncate(time.Second)
	at := func(days int) *time.Time { t := now.Add(time.Duration(days) * day); return &t }
	strict, former := v2.SealedCredentialScopeStrict, "c41d"+e.sealing[4:]
	ready := func(ok v2.ObjectConditionStatus, reason, message string) v2.ObjectCondition {
		return v2.ObjectCondition{Type: "Ready", Status: ok, Reason: reason, Message: message, LastTransitionTime: *at(-3)}
	}
	target := func(ok v2.ObjectConditionStatus, reason, message string) v2.ObjectCondition {
		return v2.ObjectCondition{Type: "TargetSynced", Status: ok, Reason: reason, Message: message, LastTransitionTime: *at(-3)}
	}
	holds := ready("True", "Sealed", "The vault entry holds what the spec says.")
	stalled := v2.ObjectCondition{Type: "Stalled", Status: "True", Reason: "InvalidSealed", Message: "The value key does not open with any key of this deployment. Seal it again.", LastTransitionTime: *at(-1)}
	conflict := "The Secret stripe-webhooks is there and belongs to nobody. Annotate it, or choose another name."
	return encoded(v2.SealedCredentialList{
		Success: true, Operator: true,
		SealedCredentials: []v2.SealedCredential{
			{Namespace: "billing", Name: "stripe", CredentialType: "api_key", Source: "sealed", Status: v2.ObjectStatusCurrent, KeyId: &e.sealing, Scope: &strict, CreatedAt: *at(-40), Generation: 3, ObservedGeneration: 3,
				CredentialId: &e.credential, Version: 3, TargetSecret: new("stripe"), NextRotationAt: at(27), ExpiresAt: at(57),
				Conditions: []v2.ObjectCondition{holds, target("True", "Synced", "The Secret holds the values of version 3.")}},
			{Namespace: "billing", Name: "stripe-webhooks", CredentialType: "webhook_secret", Source: "sealed", Status: v2.ObjectStatusFailed, KeyId: &e.sealing, Scope: &strict, CreatedAt: *at(-2), Generation: 1, ObservedGeneration: 1,
				CredentialId: &e.credential, Version: 1, TargetSecret: new("stripe-webhooks"), NextRotationAt: at(58), ExpiresAt: at(88),
				Conditions: []v2.ObjectCondition{ready("False", "TargetConflict", conflict), {Type: "Stalled", Status: "True", Reason: "TargetConflict", Message: conflict, LastTransitionTime: *at(-2)}, target("False", "TargetConflict", conflict)}},
			{Namespace: "billing", Name: "timescale", CredentialType: "database", Source: "generate", Status: v2.ObjectStatusInProgress, CreatedAt: *at(-12), Generation: 2, ObservedGeneration: 1,
				CredentialId: &e.credential, Version: 1, TargetSecret: new("timescale"), NextRotationAt: at(18), ExpiresAt: at(48),
				Conditions: []v2.ObjectCondition{holds, target("True", "Synced", "The Secret holds the values of version 1.")}},
			{Namespace: "portal", Name: "legacy-sso", CredentialType: "oauth_client", Source: "values_from", Status: v2.ObjectStatusSuspended, Suspended: true, CreatedAt: *at(-200), Generation: 5, ObservedGeneration: 5,
				CredentialId: &e.credential, Version: 2, ExpiresAt: at(3), Conditions: []v2.ObjectCondition{ready("True", "Suspended", "spec.suspend is set: nothing is changed.")}},
			{Namespace: "portal", Name: "session-key", CredentialType: "webhook_secret", Source: "sealed", Status: v2.ObjectStatusFailed, KeyId: &former, Scope: &strict, CreatedAt: *at(-90), Generation: 2, ObservedGeneration: 2,
				Conditions: []v2.ObjectCondition{ready("False", "InvalidSealed", stalled.Message), stalled}},
		},
		SealingKeys: []v2.SealingKeyUse{{KeyId: e.sealing, State: "current", Objects: 1}, {KeyId: former, State: "former", Objects: 1}},
	})
}

// encoded is a value as JSON.
func encoded(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // an answer of the interface can be written
	}
	return string(text)
}

// secrets are Secrets as people have them.
var secrets = map[string]string{
	"text and base64": "# made by hand\n---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: db\n  namespace: shop\n  labels: {app: db, app.kubernetes.io/name: db, latticekeep.dev/scope: x}\n" +
		"data:\n  username: YXBw\n  password: d3Jvbmc=\n  blob: AAH/gA==\nstringData:\n  password: tr0ub4dor\n  lines: |\n    a\n    b: c\n  \"yes\": \"no\"\n  day: 2026-11-27\n",
	"with a type": "apiVersion: v1\nkind: Secret\ntype: kubernetes.io/tls\nimmutable: true\nmetadata:\n  name: web\n  namespace: shop\n  creationTimestamp: null\n  managedFields: []\n" +
		"  annotations:\n    kubectl.kubernetes.io/last-applied-configuration: |\n      {\"stringData\":{\"tls.key\":\"plain\"}}\n    note: \"true\"\n    owner: Größe \"x\"\ndata:\n  tls.crt: |\n    Yw\n    ==\n  tls.key: aw==\n",
	"as JSON":        `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"db","namespace":"shop","labels":{"a":"1"}},"type":"Opaque","data":{"k":"dg=="}}`,
	"another type":   "apiVersion: v1\nkind: Secret\ntype: example.org/odd\nmetadata: {name: odd, namespace: shop}\nstringData: {k: v}\n",
	"with an anchor": "apiVersion: v1\nkind: Secret\nmetadata: {name: db, namespace: shop}\nstringData: {k: &here v, l: 'w'}\n",
	"crlf":           "apiVersion: v1\r\nkind: Secret\r\nmetadata: {name: db, namespace: shop}\r\nstringData:\r\n  k: \"a\\r\\nb\\0\"\r\n",
}

// A Secret that is pasted becomes what latticekeep seal makes of the same file.
func TestAPastedSecretBecomesWhatTheCommandMakes(t *testing.T) {
	b := newBench(t)
	key := newSealingKey(t, envelope.SuiteMLKEM768X25519)
	document := documentOf(t, newIdentity(t), key.Public())
	folder := t.TempDir()
	keyFile := filepath.Join(folder, "key.json")
	if err := os.WriteFile(keyFile, []byte(document), 0o600); err != nil {
		t.Fatal(err)
	}
	read := fmt.Sprintf(`async (m, {text, document}) => {
		const [{name, namespace, values, target, left}] = m.readSecrets(text);
		const sealing = await import(%q);
		return {left, manifest: sealing.sealManifest({key: await sealing.readSealingKey(document), name, namespace, values, target, credentialType: 'database'})};
	}`, b.assets+"/crypto/sealing.js")
	for what, text := range secrets {
		file := filepath.Join(folder, "secret.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var stdout, stderr bytes.Buffer
		command := seal.NewSealCommand()
		command.SetArgs([]string{"-f", file, "--type", "database", "--key", keyFile})
		command.SetOut(&stdout)
		command.SetErr(&stderr)
		if err := command.ExecuteContext(t.Context()); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		var page struct {
			Left     []string
			Manifest string
		}
		o := b.call("../lib/kubesecret.js", read, map[string]string{"text": text, "document": document})[0]
		if err := json.Unmarshal(o.Value, &page); err != nil {
			t.Errorf("%s: %s", what, o.Refused)
			continue
		}
		var objects [2]v1beta1.SealedCredential
		var opened [2]map[string]secret.Bytes
		for i, manifest := range []string{page.Manifest, stdout.String()} {
			if err := yaml.UnmarshalStrict([]byte(manifest), &objects[i]); err != nil {
				t.Fatalf("%s: %v\n%s", what, err, manifest)
			}
			var err error
			if opened[i], err = sealing.Open(&objects[i], func(string) (*envelope.SealingKey, error) { return key, nil }); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			for k, v := range objects[i].Spec.Sealed.Values {
				objects[i].Spec.Sealed.Values[k] = v1beta1.SealedValue{Data: strconv.Itoa(len(v.Data))}
			}
		}
		if !reflect.DeepEqual(objects[0], objects[1]) {
			t.Errorf("%s: the page makes\n%s\nand the command\n%s", what, page.Manifest, &stdout)
		}
		if !maps.EqualFunc(opened[0], opened[1], func(a, b secret.Bytes) bool { return bytes.Equal(a, b) }) {
			t.Errorf("%s: other values come out", what)
		}
		if said := strings.Count(stderr.String(), "left out"); said != len(page.Left) {
			t.Errorf("%s: the page leaves out %q, and the command says\n%s", what, page.Left, &stderr)
		}
	}
}

// A text that is no Secret is refused. The message names the line, and the document where there are several, and repeats nothing of the text.
func TestWhatIsNotASecretIsRefusedByItsLine(t *testing.T) {
	b := newBench(t)
	const head, plain = "apiVersion: v1\nkind: Secret\nmetadata: {name: db}\n", "tr0ub4dor"
	cases := []struct{ text, says string }{
		{"", "There is nothing in it yet"},
		{"---\n# nothing\n", "There is nothing in it yet"},
		{plain, "Line 1 is not what is expected"},
		{"- " + plain, "Line 1 is not what is expected"},
		{"apiVersion: v1\nkind: ConfigMap\ndata: {k: " + plain + "}\n", "Line 2 is not a v1 Secret"},
		{"apiVersion: v1\nkind: List\nitems: []\n", "Line 3 has no Secrets"},
		{"apiVersion: v1\nkind: List\nitems: {a: " + plain + "}\n", "Line 3 has no Secrets"},
		{"apiVersion: v1\nkind: List\nitem: []\n", "Line 3 has a field"},
		{"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Secret, metadata: {name: a}, stringData: {k: v}}\n- {apiVersion: v1, kind: Secret, metadata: {name: b}, stringData: {k: 1}}\n", "The list, item 2: Line 5 has no text"},
		{"kind: Secret\nstringData: {k: " + plain + "}\n", "Line 1 is not a v1 Secret"},
		{head + "stringData: {k: " + plain + "}\n---\n" + head, "Document 2: The Secret has no values"},
		{head + "stringData: {k: " + plain + "}\n---\napiVersion: v1\nkind: ConfigMap\n", "Document 2: Line 7 is not a v1 Secret"},
		{head + "stringData: {k: " + plain + "}\n---\n# nothing\n---\nkind: [\n", "Document 2: Line 9 cannot be read as YAML"},
		{head + "stringData: {k: v}\n---\n" + head + "stringData: {k: v}\n", "Document 2: Another Secret has this name and namespace"},
		{head + "stringData: {k: v}\n---\napiVersion: v1\nkind: Secret\nstringData: {k: v}\n", "Document 2: The Secret has no metadata.name"},
		{head + "stringData:\n  k: &a " + plain + "\n  l: *a\n", "Line 6 has an alias"},
		{head + "stringData:\n  k: !!binary dHIw\n", "Line 5 has a tag"},
		{head + "stringData:\n  k: !x " + plain + "\n", "Line 5 has a tag"},
		{head + "data:\n  k: " + plain + "!\n", "Line 5 is not base64: data.k"},
		{head + "stringData:\n  k: 4711\n", "Line 5 has no text: stringData.k is to be text. Put it in quotes"},
		{head + "stringData:\n  k: yes\n", "Line 5 has no text"},
		{head + "stringData:\n  k:\n", "Line 5 has no text"},
		{head + "stringData:\n  k: [" + plain + "]\n", "Line 5 has no text"},
		{head + "stringData:\n  k: " + plain + "\n  k: w\n", "Line 6 has a key that is there already"},
		{head + "stringDate:\n  k: " + plain + "\n", "Line 4 has a field that a Secret has not"},
		{head + "stringData:\n  1: " + plain + "\n", "Line 5 has a key that is not text"},
		{head + "stringData:\n\tk: " + plain + "\n", "cannot be read as YAML"},
		{head + "stringData: {k: " + plain + "\n", "cannot be read as YAML"},
		{head + "immutable: maybe\nstringData: {k: " + plain + "}\n", "Line 4 is neither true nor false"},
		{head + "stringData: {}\n", "The Secret has no values"},
		{head + "type: kubernetes.io/service-account-token\nstringData: {token: " + plain + "}\n", "A ServiceAccount token is not sealed"},
		{head + "type: bootstrap.kubernetes.io/token\nstringData: {token: " + plain + "}\n", "A bootstrap token is not sealed"},
		{strings.Repeat("[", 20000), "cannot be read as YAML"},
		{strings.Repeat("x", 1<<20+1), "longer than 1 MiB"},
	}
	texts := make([]any, len(cases))
	for i, c := range cases {
		texts[i] = c.text
	}
	for i, o := range b.call("../lib/kubesecret.js", `(m, text) => m.readSecrets(text)`, texts...) {
		if !strings.Contains(o.Refused, cases[i].says) || strings.Contains(o.Refused, plain) {
			t.Errorf("%.200q: the page says %q, not %q; and makes %.100s", cases[i].text, o.Refused, cases[i].says, o.Value)
		}
	}
}

// A whole Secret is sealed in the page: what reads it is loaded when it is pasted, and nothing of it is sent.
func TestAPastedSecretDoesNotLeaveThePage(t *testing.T) {
	p := start(t)
	b := p.tab()
	b.signIn(p.register("Pasting", "nils@example.org"), "/cluster/seal")
	loaded := func(file string) bool {
		return slices.ContainsFunc(b.requested(), func(r string) bool { return strings.HasSuffix(r, file) })
	}
	if loaded("/vendor/yaml.js") {
		t.Error("what reads YAML is loaded before somebody pastes")
	}
	const plain = "only the vault reads this"
	b.press("Paste a Secret")
	b.accessible()
	before := len(b.requested())
	b.fill("A Kubernetes Secret, as YAML or JSON", "apiVersion: v1\nkind: Secret\ndata: {k: "+plain+"}")
	b.press("Use this Secret")
	b.sees("Line 3 is not base64")
	b.accessible()
	b.fill("A Kubernetes Secret, as YAML or JSON", "apiVersion: v1\nkind: Secret\ntype: kubernetes.io/basic-auth\nmetadata:\n  name: db\n  namespace: shop\n  labels: {team: shop, kubernetes.io/x: odd}\n"+
		"data:\n  blob: AAH/gA==\nstringData:\n  username: app\n  password: "+plain+"\n")
	b.press("Use this Secret")
	b.sees("4 bytes, which are sealed as they are")
	b.sees("The label kubernetes.io/x is left out")
	if name, namespace := b.holds("Name"), b.holds("Namespace"); name != "db" || namespace != "shop" {
		t.Errorf("the form has %q in %q", name, namespace)
	}
	if _, label := b.focused(); label != "Credential type" {
		t.Errorf("the focus is on %q, and not where something is missing", label)
	}
	b.fill("Credential type", "database")
	b.press("Seal")
	b.sees("Sealed. No plaintext left this page")
	b.accessible()
	asked := b.requested()[before:]
	if len(asked) != 2 || !slices.ContainsFunc(asked, func(r string) bool { return strings.HasSuffix(r, "/lib/kubesecret.js") }) || !loaded("/vendor/yaml.js") {
		t.Errorf("pasting and sealing asked for %q", asked)
	}
	manifest := value[string](b, `document.querySelector('pre').textContent`)
	for _, has := range []string{"name: db", "namespace: shop", "blob:", "password:", "username:", `type: "kubernetes.io/basic-auth"`, "team: shop"} {
		if !strings.Contains(manifest, has) {
			t.Errorf("the manifest lacks %q:\n%s", has, manifest)
		}
	}
	for _, not := range []string{plain, "kubernetes.io/x", "AAH/gA=="} {
		if strings.Contains(manifest, not) {
			t.Errorf("the manifest has %q", not)
		}
	}
	b.click("checkbox", "Have the operator make this Secret of the values (spec.target)")
	b.press("Seal")
	b.until(`!document.querySelector('pre').textContent.includes('target:')`)
	b.press("Forget the values")
	b.gone("which are sealed as they are")
}

// Several Secrets that are pasted at once become as many objects, each with its own values, name and namespace.
func TestSeveralSecretsArePastedAtOnce(t *testing.T) {
	p := start(t)
	b := p.tab()
	b.signIn(p.register("Pasting", "nils@example.org"), "/cluster/seal")
	b.press("Paste a Secret")
	b.fill("A Kubernetes Secret, as YAML or JSON", "apiVersion: v1\nkind: Secret\nmetadata: {name: db, namespace: shop}\nstringData: {password: tr0ub4dor}\n---\napiVersion: v1\nkind: List\nitems:\n"+
		"- {apiVersion: v1, kind: Secret, type: kubernetes.io/basic-auth, metadata: {name: web}, data: {blob: AAH/gA==}}\n"+
		"- {apiVersion: v1, kind: Secret, metadata: {name: mail, namespace: post}, stringData: {password: battery}}\n- {apiVersion: v1, kind: Secret, metadata: {name: Odd}, stringData: {k: v}}\n")
	b.press("Use this Secret")
	b.sees("4 Secrets")
	b.sees("web 1 value, type kubernetes.io/basic-auth")
	b.accessible()
	b.fill("Credential type", "database")
	b.press("Seal")
	b.sees("The namespace is missing")
	b.fill("Namespace", "front")
	b.press("Seal")
	b.sees("Odd: The name is not one for an object")
	b.press("Remove the Secret Odd")
	b.sees("3 Secrets")
	b.press("Seal")
	b.sees("Sealed. No plaintext left this page")
	b.accessible()
	downloads := b.downloads()
	b.press("Download")
	var got []string
	for _, manifest := range strings.Split(string(downloads("sealed-credentials.yaml")), "---\n") {
		var object v1beta1.SealedCredential
		if err := yaml.UnmarshalStrict([]byte(manifest), &object); err != nil {
			t.Fatalf("%v\n%s", err, manifest)
		}
		got = append(got, fmt.Sprint(object.Namespace, "/", object.Name, " ", object.Spec.Target.Type, slices.Sorted(maps.Keys(object.Spec.Sealed.Values))))
	}
	if want := []string{"shop/db [password]", "front/web kubernetes.io/basic-auth[blob]", "post/mail [password]"}; !slices.Equal(got, want) {
		t.Errorf("the objects are %q, not %q", got, want)
	}
	b.press("Forget the values")
	b.until(`document.querySelectorAll('.pair').length === 1`)
}

// Each object of the cluster is one line, with its status and the state of its target; what is wrong is whole, and the rest unfolds.
func TestObjectsOfTheClusterAreOneLineEach(t *testing.T) {
	e := &estate{program: start(t), credential: "cred_mfrggzdfmztwq2lknnwg23tpoa", sealing: strings.Repeat("5f0c", 16)}
	b := e.tab()
	stop := b.answer("GET", "/api/v2/cluster/sealed-credentials*", reply{status: 200, body: e.cluster()})
	defer stop()
	b.size(1366, 768)
	b.signIn(e.register("Objects", "nils@example.org"), "/cluster")
	b.narrow()
	rows := value[[]string](b, `[...document.querySelectorAll('tbody tr')].map(r => r.innerText.replace(/\s+/g, ' ').trim())`)
	want := []string{
		"stripe in billing ✓ Current ✓ in step stripe version 3", "stripe-webhooks in billing ✕ Failed ! drift stripe-webhooks version 1 The Secret stripe-webhooks is there",
		"timescale in billing ! In progress ✓ in step timescale version 1 The newest change", "legacy-sso in portal • Suspended none version 2",
		"session-key in portal ✕ Failed none none yet The value key does not open",
	}
	if len(rows) != len(want) {
		t.Fatalf("the rows are %q", rows)
	}
	for i := range want {
		if !strings.HasPrefix(rows[i], want[i]) {
			t.Errorf("the row says %q, not %q", rows[i], want[i])
		}
	}
	for _, height := range value[[]float64](b, `[...document.querySelectorAll('tbody tr')].filter(r => r.querySelector('td.message').innerText === '').map(r => r.getBoundingClientRect().height)`) {
		if height > 48 {
			t.Errorf("a row is %.0f pixels high, which is more than a line", height)
		}
	}
	if cut := value[[]string](b, `[...document.querySelectorAll('td.message, .tag')].filter(e => e.scrollWidth > e.clientWidth + 1 || e.matches('.tag') && getComputedStyle(e).paddingLeft === '0px').map(e => e.innerText)`); len(cut) > 0 {
		t.Errorf("cut, or at the border: %q", cut)
	}
	b.press("Details of stripe-webhooks in billing")
	b.sees("The Secret is not in step")
	b.sees("sealed values, scope Strict")
	b.accessible()
	b.press("Details of stripe-webhooks in billing")
	b.gone("The Secret is not in step")

	before := len(b.requested())
	b.choose("Status", "Failed")
	b.until(`new URLSearchParams(location.search).get('status') === 'Failed'`)
	b.settled()
	if asked := b.asked(before); !slices.ContainsFunc(asked, func(r string) bool { return strings.Contains(r, "sealed-credentials?status=Failed") }) {
		t.Errorf("the page asked for %q", asked)
	}
}
