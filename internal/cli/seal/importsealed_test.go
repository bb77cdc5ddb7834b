package seal

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"maps"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

const importCanary = "tr0ub4dor"

// oldController acts as a Sealed Secrets controller: it has a key with a backup, and seals values
// as kubeseal does.
type oldController struct {
	t      testing.TB
	key    *rsa.PrivateKey
	backup string // path
}

func newOldController(t testing.TB) *oldController {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	file := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	c := &oldController{t, key, filepath.Join(t.TempDir(), "backup.yaml")}
	c.write(c.backup, "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Secret\n  type: kubernetes.io/tls\n"+
		"  metadata: {name: sealed-secrets-key1, namespace: kube-system, labels: {sealedsecrets.bitnami.com/sealed-secrets-key: active}}\n"+
		"  data: {tls.crt: '', tls.key: "+base64.StdEncoding.EncodeToString(file)+"}\n")
	return c
}

func (c *oldController) write(path, text string) string {
	c.t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return path
}

func (c *oldController) value(label, value string) string {
	c.t.Helper()
	session := make([]byte, 32)
	rand.Read(session)
	wrapped, err := rsa.EncryptOAEP(sha256.New(), rand.Reader, &c.key.PublicKey, session, []byte(label))
	if err != nil {
		c.t.Fatal(err)
	}
	block, err := aes.NewCipher(session)
	if err != nil {
		c.t.Fatal(err)
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		c.t.Fatal(err)
	}
	out := append([]byte{byte(len(wrapped) >> 8), byte(len(wrapped))}, wrapped...)
	return base64.StdEncoding.EncodeToString(gcm.Seal(out, make([]byte, 12), []byte(value), nil))
}

// manifest returns a SealedSecret with one value. The template is JSON.
func (c *oldController) manifest(namespace, name, annotation, template, value string) string {
	c.t.Helper()
	label := namespace + "/" + name
	switch annotation {
	case "namespace-wide":
		label = namespace
	case "cluster-wide":
		label = ""
	}
	meta := map[string]any{"namespace": namespace, "name": name, "annotations": map[string]string{"sealedsecrets.bitnami.com/" + annotation: "true"}}
	b, err := json.Marshal(map[string]any{"apiVersion": "bitnami.com/v1alpha1", "kind": "SealedSecret", "metadata": meta,
		"spec": map[string]any{"encryptedData": map[string]string{"password": c.value(label, value)}, "template": json.RawMessage(template)}})
	if err != nil {
		c.t.Fatal(err)
	}
	return string(b) + "\n---\n"
}

// importSealed runs the command.
func importSealed(t *testing.T, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd := NewImportCommand()
	command.Strict(cmd)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(t.Context())
	said := out.String() + errs.String()
	if err != nil {
		said += err.Error()
	}
	if strings.Contains(said, importCanary) || strings.Contains(said, "PRIVATE KEY") {
		t.Errorf("a secret was printed:\n%s", said)
	}
	return out.String(), errs.String(), err
}

var goldenDocument = filepath.Join("..", "..", "sealing", "testdata", "document.json")

// opened opens a stream of SealedCredentials as the vault does, with the golden sealing key, whose
// seed is the bytes 0 to 31.
func opened(t *testing.T, stream string) (objects []*v1beta1.SealedCredential, passwords []string) {
	t.Helper()
	seed := make([]byte, 32)
	for i := range seed {
		seed[i] = byte(i)
	}
	key, err := envelope.ParseSealingKey(envelope.SuiteMLKEM768X25519, seed)
	if err != nil {
		t.Fatal(err)
	}
	docs, err := documents([]byte(stream))
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range docs {
		obj, err := decodeSealedCredential(doc)
		if err != nil || obj == nil {
			t.Fatalf("not a SealedCredential: %v\n%s", err, doc)
		}
		values, err := sealing.Open(obj, func(string) (*envelope.SealingKey, error) { return key, nil })
		if err != nil || len(values) != 1 {
			t.Fatalf("%s: %d values, %v", obj.Name, len(values), err)
		}
		objects, passwords = append(objects, obj), append(passwords, string(values["password"]))
	}
	return objects, passwords
}

func TestImportedSealedSecretsKeepTheirScopeAndSecret(t *testing.T) {
	c := newOldController(t)
	template := `{"type":"kubernetes.io/basic-auth","metadata":{"labels":{"app":"shop"},"annotations":{"team":"blue","sealedsecrets.bitnami.com/managed":"true"}}}`
	input := c.manifest("shop", "strict", "none", template, importCanary+"-1") +
		c.manifest("shop", "wide", "namespace-wide", `{"metadata":{"annotations":{"sealedsecrets.bitnami.com/skip-set-owner-references":"true"}}}`, importCanary+"-2") +
		c.manifest("shop", "cluster", "cluster-wide", `{"type":"Opaque","immutable":true}`, importCanary+"-3") +
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c"}}`
	stdout, stderr, err := importSealed(t, input, "--keys", c.backup, "--key", goldenDocument, "--type", "database", "-")
	if err != nil {
		t.Fatal(err)
	}
	if want := "skipped: -, document 4: objects of other kinds: 1\n"; stderr != want {
		t.Errorf("it says %q, not %q", stderr, want)
	}
	objects, passwords := opened(t, stdout)
	if want := []string{importCanary + "-1", importCanary + "-2", importCanary + "-3"}; !slices.Equal(passwords, want) {
		t.Fatalf("%d objects with other values", len(objects))
	}
	for i, want := range []struct {
		name   string
		scope  v1beta1.Scope
		target v1beta1.Target
	}{
		{"strict", v1beta1.ScopeStrict, v1beta1.Target{Name: "strict", Type: "kubernetes.io/basic-auth",
			Labels: map[string]string{"app": "shop"}, Annotations: map[string]string{"team": "blue"}}},
		{"wide", v1beta1.ScopeNamespace, v1beta1.Target{Name: "wide", DeletionPolicy: v1beta1.DeletionRetain}},
		{"cluster", v1beta1.ScopeCluster, v1beta1.Target{Name: "cluster", Type: "Opaque", Immutable: true}},
	} {
		obj := objects[i]
		if obj.Namespace != "shop" || obj.Name != want.name || obj.Spec.Sealed.Scope != want.scope || obj.Spec.CredentialType != "database" {
			t.Errorf("%s/%s has scope %s and type %s", obj.Namespace, obj.Name, obj.Spec.Sealed.Scope, obj.Spec.CredentialType)
		}
		got := *obj.Spec.Target
		if got.Name != want.target.Name || got.Type != want.target.Type || got.DeletionPolicy != want.target.DeletionPolicy ||
			!maps.Equal(got.Labels, want.target.Labels) || !maps.Equal(got.Annotations, want.target.Annotations) {
			t.Errorf("%s has the target %+v", obj.Name, got)
		}
	}
}

// Nothing is lost silently: each loss is named, the rest is written, and the command fails.
func TestWhatIsNotImportedIsNamedAndTheRestIsWritten(t *testing.T) {
	c, foreign := newOldController(t), newOldController(t)
	many := make(map[string]string)
	for i := range 65 {
		many[strings.Repeat("k", i+1)] = c.value("shop/many", "v")
	}
	manyValues, err := json.Marshal(many)
	if err != nil {
		t.Fatal(err)
	}
	widened := strings.Replace(c.manifest("shop", "widened", "none", `{}`, importCanary), "/none", "/cluster-wide", 1)
	for name, tc := range map[string]struct {
		input    string
		imported bool
		want     string
	}{
		"a missing key":        {foreign.manifest("shop", "a", "none", `{}`, importCanary), false, `shop/a: no key of the backup opens spec.encryptedData of "password"`},
		"a widened scope":      {widened, false, "shop/widened: no key of the backup opens"},
		"a renamed object":     {strings.Replace(c.manifest("shop", "b", "none", `{}`, importCanary), `"name":"b"`, `"name":"c"`, 1), false, "shop/c: no key"},
		"another type":         {c.manifest("shop", "a", "none", `{"type":"example.com/x"}`, importCanary), false, "shop/a: the target of a SealedCredential has no type \"example.com/x\""},
		"a token":              {c.manifest("shop", "a", "none", `{"type":"kubernetes.io/service-account-token"}`, importCanary), false, "shop/a: a token is not sealed"},
		"too many values":      {`{"apiVersion":"bitnami.com/v1alpha1","kind":"SealedSecret","metadata":{"namespace":"shop","name":"many"},"spec":{"encryptedData":` + string(manyValues) + `}}`, false, "shop/many: spec.sealed.values"},
		"too large values":     {c.manifest("shop", "a", "none", `{}`, strings.Repeat("v", 256<<10)), false, "shop/a: spec.sealed.values"},
		"an impossible name":   {c.manifest("shop", "A_b", "none", `{}`, importCanary), false, "shop/A_b: metadata.name"},
		"an unreadable file":   {"password: " + importCanary + "\npassword: x\n", false, "document 2: is not well-formed YAML or JSON (line 2)"},
		"a broken object":      {`{"apiVersion":"bitnami.com/v1alpha1","kind":"SealedSecret","metadata":{"name":"a"},"spec":{"encryptedData":{"k":["` + importCanary + `"]}}}`, false, "SealedSecret a: is not a valid"},
		"templates":            {c.manifest("shop", "a", "none", `{"data":{"url":"x{{ .password }}`+importCanary+`","gone":null}}`, importCanary), true, `a part of shop/a: spec.template.data: the key "url" is made by a template with functions`},
		"labels of Kubernetes": {c.manifest("shop", "a", "none", `{"metadata":{"labels":{"node.kubernetes.io/name":"x","ok":"y"}}}`, importCanary), true, `does not take the label "node.kubernetes.io/name"`},
		"our annotations":      {c.manifest("shop", "a", "none", `{"metadata":{"annotations":{"latticekeep.dev/owner":"x"}}}`, importCanary), true, `does not take the annotation "latticekeep.dev/owner"`},
		"a patch":              {c.manifest("shop", "a", "none", `{"metadata":{"annotations":{"sealedsecrets.bitnami.com/patch":"true"}}}`, importCanary), true, "merged into a Secret of others"},
	} {
		t.Run(name, func(t *testing.T) {
			good := c.manifest("shop", "good", "none", `{}`, "good")
			stdout, stderr, err := importSealed(t, good+tc.input, "--keys", c.backup, "--key", goldenDocument, "-")
			if err == nil || !strings.Contains(err.Error(), "named above") {
				t.Errorf("it does not fail: %v", err)
			}
			if !strings.Contains(stderr, "not imported: ") || !strings.Contains(stderr, tc.want) {
				t.Errorf("it says %q, not %q", stderr, tc.want)
			}
			objects, passwords := opened(t, strings.TrimSuffix(stdout, "---\n"))
			want := []string{"good"}
			if tc.imported {
				want = append(want, importCanary)
			}
			if !slices.Equal(passwords, want) {
				t.Errorf("%d objects are written, not %d", len(objects), len(want))
			}
			for _, obj := range objects {
				if target := obj.Spec.Target; target != nil && (len(target.Labels) > 1 || len(target.Annotations) > 0) {
					t.Errorf("the target is %+v", target)
				}
			}
		})
	}
}

func TestImportWritesNewFilesOnly(t *testing.T) {
	c := newOldController(t)
	folder := filepath.Join(t.TempDir(), "sealed")
	input := c.write(filepath.Join(t.TempDir(), "input.yaml"),
		c.manifest("shop", "db", "none", `{}`, importCanary)+strings.Replace(c.manifest("", "all", "cluster-wide", `{}`, importCanary), `"namespace":"",`, "", 1))
	run := func() (stderr string, err error) {
		stdout, stderr, err := importSealed(t, "", "--keys", c.backup, "--key", goldenDocument, "--output", folder, input)
		if stdout != "" {
			t.Errorf("it prints %q", stdout)
		}
		return stderr, err
	}
	if stderr, err := run(); err != nil || stderr != "" {
		t.Fatalf("%v: %s", err, stderr)
	}
	files := func() map[string]string {
		found := make(map[string]string)
		entries, err := os.ReadDir(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			b, err := os.ReadFile(filepath.Join(folder, e.Name()))
			if err != nil {
				t.Fatal(err)
			}
			found[e.Name()] = string(b)
		}
		return found
	}
	before := files()
	if got := slices.Sorted(maps.Keys(before)); !slices.Equal(got, []string{"all.yaml", "shop.db.yaml"}) {
		t.Fatalf("it wrote %v", got)
	}
	for name, text := range before {
		if objects, passwords := opened(t, text); len(objects) != 1 || passwords[0] != importCanary {
			t.Errorf("%s has %d objects", name, len(objects))
		}
		if strings.Contains(text, importCanary) {
			t.Errorf("%s has the plaintext", name)
		}
	}
	stderr, err := run()
	if err == nil || strings.Count(stderr, "exists and is not overwritten") != 2 || !maps.Equal(before, files()) {
		t.Errorf("a second run: %v: %s", err, stderr)
	}
}

func TestImportTrustsAFetchedKeyByItsIdentityOnly(t *testing.T) {
	c := newOldController(t)
	document, err := os.ReadFile(goldenDocument)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := sealing.ParseDocument(document)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(keyServer(t, document))
	t.Cleanup(server.Close)
	input := c.write(filepath.Join(t.TempDir(), "input.yaml"), c.manifest("shop", "db", "none", `{}`, importCanary))

	if stdout, _, err := importSealed(t, "", "--keys", c.backup, "--url", server.URL, input); err == nil || stdout != "" || !strings.Contains(err.Error(), "no identity is pinned") {
		t.Errorf("without a pin: %v", err)
	}
	stdout, _, err := importSealed(t, "", "--keys", c.backup, "--url", server.URL, "--identity", parsed.Identity(), input)
	if err != nil {
		t.Fatal(err)
	}
	if _, passwords := opened(t, stdout); !slices.Equal(passwords, []string{importCanary}) {
		t.Error("other values")
	}
	// The identity is pinned beside the manifests.
	c.write(filepath.Join(filepath.Dir(input), identityFile), "identity: "+parsed.Identity()+"\n")
	if _, _, err := importSealed(t, "", "--keys", c.backup, "--url", server.URL, input); err != nil {
		t.Error(err)
	}
}

func TestImportSaysWhatItIsMissing(t *testing.T) {
	c := newOldController(t)
	dir := t.TempDir()
	input := c.write(filepath.Join(dir, "input.yaml"), c.manifest("shop", "db", "none", `{}`, importCanary))
	unlabelled := c.write(filepath.Join(dir, "unlabelled.yaml"), "{apiVersion: v1, kind: Secret, metadata: {name: a}, data: {tls.key: dHIwdWI0ZG9y}}")
	broken := c.write(filepath.Join(dir, "broken.yaml"),
		"{apiVersion: v1, kind: Secret, metadata: {name: a, labels: {sealedsecrets.bitnami.com/sealed-secrets-key: active}}, data: {tls.key: dHIwdWI0ZG9y}}")
	other := c.write(filepath.Join(dir, "other.yaml"), "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}")
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--key", goldenDocument, input}, `--keys is needed`},
		{[]string{"--keys", c.backup, input}, "one of --key, --url and --from-cluster is needed"},
		{[]string{"--keys", c.backup, "--key", goldenDocument}, "needs FILE..."},
		{[]string{"--keys", c.backup, "--key", goldenDocument, "--output=", input}, "--output is empty"},
		{[]string{"--keys", "-", "--key", goldenDocument, "-"}, "standard input can be read only once"},
		{[]string{"--keys", filepath.Join(dir, "none"), "--key", goldenDocument, input}, "no such file"},
		{[]string{"--keys", unlabelled, "--key", goldenDocument, input}, "names no sealing key of Sealed Secrets"},
		{[]string{"--keys", broken, "--key", goldenDocument, input}, "Secret a: has no RSA private key"},
		{[]string{"--keys", c.backup, "--key", goldenDocument, other}, "the input has no SealedSecret"},
		{[]string{"--keys", c.backup, "--key", goldenDocument, filepath.Join(dir, "none")}, "named above"},
	} {
		stdout, _, err := importSealed(t, "", tc.args...)
		if err == nil || stdout != "" || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v: %v, not %q", tc.args, err, tc.want)
		}
	}
	// A missing file does not stop the import of the others. The backup may come from standard
	// input.
	backup, err := os.ReadFile(c.backup)
	if err != nil {
		t.Fatal(err)
	}
	stdout, stderr, err := importSealed(t, string(backup), "--keys", "-", "--key", goldenDocument, filepath.Join(dir, "none"), input)
	if err == nil || !strings.Contains(stderr, "no such file") {
		t.Errorf("%v: %s", err, stderr)
	}
	if _, passwords := opened(t, stdout); !slices.Equal(passwords, []string{importCanary}) {
		t.Error("other values")
	}
}
