package seal

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// goldenSealed returns a manifest that is sealed for the golden sealing key.
func goldenSealed(name string, values ...string) *v1beta1.SealedCredential {
	seed := make([]byte, 32)
	for i := range seed {
		seed[i] = byte(i)
	}
	key, err := envelope.ParseSealingKey(envelope.SuiteMLKEM768X25519, seed)
	if err != nil {
		panic(err)
	}
	r := sealing.Request{Namespace: "shop", Name: name, CredentialType: "database", TTLDays: 30, Values: make(map[string]secret.Bytes)}
	for _, k := range values {
		r.Values[k] = secret.Bytes("value of " + k)
	}
	obj, err := sealing.Seal(key.Public(), r, time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC))
	if err != nil {
		panic(err)
	}
	return obj
}

// byHand formats a manifest as a person might, with comments, in another order and with some
// quotes.
func byHand(obj *v1beta1.SealedCredential) string {
	var b strings.Builder
	sealed := obj.Spec.Sealed
	fmt.Fprintf(&b, "# why it is here\nkind: SealedCredential # ours\napiVersion: %s\nmetadata: {name: %s, namespace: \"shop\"}\n\n\nspec:\n", v1beta1.GroupVersion, obj.Name)
	fmt.Fprintf(&b, "    sealed:\n        scope:   Strict\n        values:\n")
	for _, k := range slices.Sorted(maps.Keys(sealed.Values)) {
		v := sealed.Values[k]
		fmt.Fprintf(&b, "            # of the database\n            %s:\n                data:   '%s' # long\n                sealedAt: %q\n", k, v.Data, v.SealedAt.UTC().Format("2006-01-02T15:04:05Z"))
	}
	fmt.Fprintf(&b, "            # nothing below\n        keyID: %s\n        suite: %q\n        version: 1\n    credentialType:  database\n    ttlDays: 30\n", sealed.KeyID, sealed.Suite)
	return b.String()
}

func makeManifest(ts *testscript.TestScript, _ bool, args []string) {
	text := byHand(goldenSealed("db", "password", "user")) + "---\n# not ours\nkind: ConfigMap\napiVersion: v1\nmetadata:\n  name:   other\n---\n" + byHand(goldenSealed("cache", "password"))
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text), 0o600))
}

// onlySealedDiffers compares two files without sealed data and times.
func onlySealedDiffers(ts *testscript.TestScript, _ bool, args []string) {
	strip := func(file string) string {
		text := regexp.MustCompile(`[A-Za-z0-9+/=]{100,}`).ReplaceAllString(ts.ReadFile(file), "DATA")
		text = regexp.MustCompile(`"20[0-9-]+T[0-9:]+Z"`).ReplaceAllString(text, "TIME")
		return strings.Replace(text, "            \"123\":\n                sealedAt: TIME\n                data: DATA\n", "", 1)
	}
	if a, b := strip(args[0]), strip(args[1]); a != b {
		ts.Fatalf("they differ:\n%s\n%s", a, b)
	}
	if ts.ReadFile(args[0]) == ts.ReadFile(args[1]) {
		ts.Fatalf("nothing was changed")
	}
}

func toJSON(ts *testscript.TestScript, _ bool, args []string) {
	b, err := yaml.YAMLToJSON([]byte(ts.ReadFile(args[0])))
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), b, 0o600))
}

func otherKey(ts *testscript.TestScript, _ bool, args []string) {
	text := regexp.MustCompile(`keyID: .*`).ReplaceAllString(ts.ReadFile(args[0]), "keyID: "+strings.Repeat("ab", 32))
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(text), 0o600))
}

func folded(ts *testscript.TestScript, _ bool, args []string) {
	text := regexp.MustCompile(`data: (.*)`).ReplaceAllString(ts.ReadFile(args[0]), "data: >-\n          $1")
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), []byte(text), 0o600))
}

// Whatever a manifest looks like, an edit produces exactly the intended object, or nothing is
// written.
func TestAnEditChangesNothingButWhatWasMeant(t *testing.T) {
	fresh := goldenSealed("db", "password", "true", "1e3", "zz").Spec.Sealed.Values
	for k, v := range fresh {
		v.SealedAt.Time = v.SealedAt.AddDate(0, 0, 1)
		fresh[k] = v
	}
	hand := byHand(goldenSealed("db", "password", "user"))
	plainYAML, err := yaml.Marshal(goldenSealed("db", "password", "user"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"as seal writes it":     string(plainYAML),
		"by hand":               hand,
		"the version before":    strings.Replace(hand, "/v1beta1", "/v1alpha1", 1),
		"with Windows' breaks":  strings.ReplaceAll(hand, "\n", "\r\n"),
		"no break at the end":   strings.TrimSuffix(moveValuesLast(hand), "\n"),
		"a document before":     "# first\n---\nkind: Secret\napiVersion: v1\n---\n" + hand,
		"documents with dots":   "---\n" + hand + "...\n",
		"other letters":         "# größer\n" + strings.Replace(hand, "{name:", "{labels: {ö: é}, name:", 1),
		"values on one line":    flowValues(hand),
		"everything on one":     strings.ReplaceAll(jsonOf(t, hand), "\n", " "),
		"indented JSON":         jsonOf(t, hand),
		"a string like the key": strings.Replace(hand, "# ours", "# keyID: "+strings.Repeat("0", 64), 1),
	} {
		path := filepath.Join(t.TempDir(), "m.yaml")
		if err := os.WriteFile(path, []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
		m, err := readManifests(path)
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, text)
			continue
		}
		d := m.sealed()[0]
		if _, _, err := m.merge(d, fresh); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if err := m.write(); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		again, err := readManifests(path)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := again.sealed()[0].obj.Spec.Sealed.Values
		if len(got) != 5 || got["password"].Data != fresh["password"].Data || !got["password"].SealedAt.Time.Equal(fresh["password"].SealedAt.Time) ||
			got["1e3"].Data != fresh["1e3"].Data || got["user"].Data != d.obj.Spec.Sealed.Values["user"].Data {
			t.Errorf("%s: other values", name)
		}
		written, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(text) {
			if strings.Contains(line, "#") && !strings.Contains(line, "data:") && !bytes.Contains(written, []byte(line)) {
				t.Errorf("%s: a comment is gone: %s", name, line)
			}
		}
		left, err := os.ReadDir(filepath.Dir(path))
		if err != nil || len(left) != 1 {
			t.Errorf("%s: files are left: %v %v", name, left, err)
		}
	}
}

// The result is parsed before it is written. A wrong result changes nothing.
func TestAnEditThatCameOutOtherwiseIsNotWritten(t *testing.T) {
	text := byHand(goldenSealed("db", "password"))
	path := filepath.Join(t.TempDir(), "m.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	at := strings.Index(text, "ttlDays: 30")
	for name, edits := range map[string][]edit{
		"another object":   {{at, at + len("ttlDays: 30"), "ttlDays: 31"}},
		"no object":        {{at, at + len("ttlDays: 30"), "unknown: 30"}},
		"no YAML":          {{at, at, "\""}},
		"another document": {{len(text), len(text), "---\n" + text}},
		"on top":           {{at, at + 5, "ttlDa"}, {at + 2, at + 6, "lDay"}},
	} {
		m, err := readManifests(path)
		if err != nil {
			t.Fatal(err)
		}
		m.edits = edits
		if err := m.write(); !errors.Is(err, errLayout) {
			t.Errorf("%s: %v", name, err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != text {
			t.Errorf("%s: it is written", name)
		}
	}
}

// moveValuesLast puts the values at the end of the file.
func moveValuesLast(text string) string {
	from, to := strings.Index(text, "        values:\n"), strings.Index(text, "            # nothing below")
	values := text[from:to]
	text = strings.Replace(strings.Replace(text, values, "", 1), "            # nothing below\n", "", 1)
	spec := strings.Index(text, "    credentialType")
	return text[:strings.Index(text, "    sealed:")] + text[spec:] + text[strings.Index(text, "    sealed:"):spec] + values
}

func flowValues(text string) string {
	value := regexp.MustCompile(`(\w+):\n +data: +('[^']*') # long\n +sealedAt: ("[^"]*")`)
	return value.ReplaceAllString(text, "$1: {data: $2, sealedAt: $3}")
}

func jsonOf(t *testing.T, text string) string {
	t.Helper()
	b, err := yaml.YAMLToJSON([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(b), `,"`, ",\n\"")
}

// A file that cannot be replaced stays as it is.
func TestAFailedReplacementLeavesTheFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.yaml")
	if err := durable.Replace(path, []byte("x")); err == nil {
		t.Error("a file that is not there was replaced")
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := durable.Replace(path, []byte("x")); err == nil {
		t.Error("a folder was replaced")
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("files are left: %v %v", left, err)
	}
}

func FuzzManifestsAreEditedAsMeantOrNotAtAll(f *testing.F) {
	hand := byHand(goldenSealed("db", "password", "user"))
	f.Add([]byte(hand))
	f.Add([]byte(flowValues(hand)))
	f.Add([]byte(strings.ReplaceAll(hand, "\n", "\r\n")))
	fresh := goldenSealed("db", "password", "more").Spec.Sealed.Values
	path := filepath.Join(f.TempDir(), "m.yaml")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := readManifests(path)
		if err != nil || len(m.sealed()) == 0 {
			return
		}
		d := m.sealed()[0]
		if _, _, err := m.merge(d, fresh); err != nil || m.write() != nil {
			if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, text) {
				t.Fatal("an edit that failed changed the file")
			}
			return
		}
		again, err := readManifests(path)
		if err != nil || again.sealed()[0].obj.Spec.Sealed.Values["more"].Data != fresh["more"].Data {
			t.Fatal("not what was meant")
		}
	})
}
