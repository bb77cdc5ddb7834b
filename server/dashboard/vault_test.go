package dashboard_test

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"
	"sigs.k8s.io/yaml"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/dotenv"
)

// The list has folders until somebody searches or sorts, and the address says where one is.
func TestTheVaultIsATree(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Trees", "tess@example.org")
	var db string
	for _, name := range []string{"shop/prod/db", "shop/prod/mail", "shop/dev/db", "token"} {
		id := p.seal(o, name, "database", "password", "one", 30)
		if name == "shop/prod/db" {
			db = id
		}
	}
	p.must(o.DescribeCredential(t.Context(), db, v2.DetailsRequest{Tags: &[]string{"pci"}}))
	b := p.tab()
	b.signIn(o, "/vault")
	b.sees("1 folder, 1 credential")
	b.size(390, 844)
	if labels := value[[]string](b, `[...document.querySelectorAll('tbody tr')].map(r => getComputedStyle(r.cells[0], '::before').content)`); !slices.Equal(labels, []string{"none", `attr(data-title)`}) && !slices.Equal(labels, []string{"none", `"Name"`}) {
		t.Errorf("on a phone the names have the labels %q", labels)
	}
	b.size(1280, 900)
	b.follow("shop/")
	b.sees("2 folders")
	b.follow("prod/")
	b.sees("2 credentials")
	if at := b.path(); at != "/vault?folder=shop%2Fprod%2F" {
		t.Errorf("the folder is at %s", at)
	}
	b.follow("db")
	b.titled("shop/prod/db")
	b.sees("pci")
	b.follow("← shop/prod/")
	b.sees("2 credentials")
	b.follow("shop")
	b.sees("2 folders")
	b.fill("Search by name", "db")
	b.sees("2 credentials")
	b.follow("shop/prod/db") // by its whole name
	b.titled("shop/prod/db")
	b.follow("pci")
	b.sees("1 credential")

	b.open("/vault")
	b.press("Updated")
	b.sees("4 credentials")
	if sorted := value[string](b, `document.querySelector('th[aria-sort]').innerText + document.querySelector('th[aria-sort]').ariaSort`); !strings.Contains(sorted, "Updated") || !strings.Contains(sorted, "descending") {
		t.Errorf("the list says that it is in the order %q", sorted)
	}
}

// Whoever edits values sees what would change before it is stored, and is told of what somebody else has stored.
func TestEditsAreReviewedAndConflictsShown(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Edits", "edda@example.org")
	id := p.seal(o, "shop/db", "database", "password", "one", 30)
	p.must(o.PatchCredential(t.Context(), id, v2.PatchRequest{Values: map[string]*string{"user": new("app")}}))
	b := p.tab()
	b.signIn(o, "/vault/"+id)
	b.press("Edit values")
	b.until(`document.querySelectorAll('.pair').length === 2`)
	b.press("Review changes")
	b.sees("Nothing is changed")
	b.press("Back to the editor")
	b.press("Remove value 2")
	b.fill("Value", "two")
	b.press("Add a value")
	b.script(`document.querySelectorAll('.pair input')[1].focus()`)
	b.script(`document.execCommand('insertText', false, 'host')`)
	b.press("Review changes")
	b.sees("3 changes")
	b.sees("added host")
	b.sees("changed password")
	b.sees("removed user")
	b.gone("two")
	b.press("Show the change of password")
	b.sees("two")

	p.must(o.PatchCredential(t.Context(), id, v2.PatchRequest{Values: map[string]*string{"port": new("5432")}}))
	b.press("Save as version 3")
	b.sees("Somebody stored another version since you opened the editor.")
	b.press("Compare with the newest")
	b.sees("removed port")
	b.press("Save as version 4")
	b.sees("Saved as version 4")
	now, err := o.UnsealCredential(t.Context(), id)
	if err != nil || fmt.Sprint(now.Values) != "map[host: password:two]" {
		t.Errorf("%v %v", now, err)
	}
	b.takeErrors() // the browser's own, of the 412
}

// Values that were read are copied as the manifest of an object, sealed in the page: it opens with the deployment's key as that object, and no
// request has a value.
func TestACredentialIsCopiedAsSealedCredential(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Copies", "cora@example.org")
	const plain = "only the vault reads this"
	id := p.seal(o, "shop/Prod DB", "database", "password", plain, 30)
	b := p.tab()
	b.signIn(o, "/vault/"+id)
	b.script(`window.copied = [], navigator.clipboard.writeText = async text => { window.copied.push(text) }`)
	b.press("Read values")
	b.sees("until the page forgets this")
	b.settled()
	before := len(b.requested())
	b.press("Copy as SealedCredential")
	b.until(`document.activeElement.labels?.[0].innerText === 'Namespace'`)
	b.accessible()
	if name := b.holds("Name"); name != "prod-db" {
		t.Errorf("the name is %q", name)
	}
	b.press("Seal and copy")
	b.sees("The namespace is missing")
	b.accessible()
	b.fill("Namespace", "shop")
	b.keys(kb.Enter)
	b.sees("Copied. The manifest is safe to keep in git")
	b.until(`!document.querySelector('dialog[open]')`)
	copied := value[[]string](b, `window.copied`)
	if len(copied) != 1 || strings.Contains(copied[0], plain) {
		t.Fatalf("copied: %q", copied)
	}
	for _, asked := range b.calls(before) {
		if asked != "GET /api/v2/sealing-key" {
			t.Errorf("copying asked for %s", asked)
		}
	}
	var object v1beta1.SealedCredential
	if err := yaml.UnmarshalStrict([]byte(copied[0]), &object); err != nil {
		t.Fatal(err)
	}
	if object.Name != "prod-db" || object.Namespace != "shop" || object.Spec.CredentialType != "database" || object.Spec.Sealed.Scope != v1beta1.ScopeStrict || object.Spec.Target == nil {
		t.Errorf("the manifest is %s", copied[0])
	}
	scope := v2.SealedValuesScope(object.Spec.Sealed.Scope)
	sealed := v2.SealedValues{KeyId: object.Spec.Sealed.KeyID, Scope: &scope, Suite: string(object.Spec.Sealed.Suite), Version: v2.SealedValuesVersion(object.Spec.Sealed.Version), Values: map[string]v2.SealedValue{}}
	for key, value := range object.Spec.Sealed.Values {
		sealed.Values[key] = v2.SealedValue{Data: value.Data, SealedAt: value.SealedAt.Time}
	}
	for _, namespace := range []string{"shop", "other"} {
		_, err := o.ResealManifest(t.Context(), v2.ResealRequest{CredentialType: "database", Name: "prod-db", Namespace: &namespace, Sealed: sealed})
		if opens := err == nil; opens != (namespace == "shop") {
			t.Errorf("in the namespace %s: %v", namespace, err)
		}
	}
}

// A kept version is compared with the current one, and restored.
func TestAnEarlierVersionIsComparedAndRestored(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("Histories", "hedda@example.org")
	p.must(o.PutHistoryRule(t.Context(), v2.HistoryRuleRequest{Path: "**", VersionsKept: 5}))
	id := p.seal(o, "shop/db", "database", "password", "one", 30)
	p.must(o.ReplaceCredential(t.Context(), id, v2.ReplaceRequest{Values: map[string]string{"password": "two"}}))
	b := p.tab()
	b.signIn(o, "/vault/"+id)
	b.press("Compare version 1")
	b.sees("changed password")
	b.press("Show the change of password")
	b.sees("Before one After two")
	b.press("Restore version 1")
	b.sees("Restore version 1?")
	b.press("Restore")
	b.sees("Restored as version 3")
	if now, err := o.UnsealCredential(t.Context(), id); err != nil || now.Values["password"] != "one" {
		t.Errorf("%v %v", now, err)
	}
	b.press("Edit details")
	b.fill("Description (optional)", "the orders of the shop")
	b.fill("Tags (optional)", "pci, shop")
	b.press("Save")
	b.sees("the orders of the shop")
	b.press("Rename")
	b.fill("New name", "shop/orders")
	b.click("button", "Rename")
	b.titled("shop/orders")
	b.press("Show")
	b.sees("user (you) hedda@example.org role and policies")
	b.press("Look it up")
	b.sees("hedda@example.org")
}

// The log is looked at by what is asked most, and what repeats has one line.
func TestTheLogHasPresetsAndFoldsWhatRepeats(t *testing.T) {
	t.Parallel()
	p := start(t)
	o := p.register("=Presets", "petra@example.org")
	id := p.seal(o, "=cmd|' /C calc'!A0", "database", "password", "one", 30)
	for range 4 {
		p.must(o.UnsealCredential(t.Context(), id))
	}
	b := p.tab()
	b.signIn(o, "/audit?show=secrets")
	b.until(`document.querySelectorAll('main tbody tr').length === 1`)
	b.press("Show all 4 entries: Credential read")
	b.until(`document.querySelectorAll('main tbody tr').length === 4`)
	b.follow("Changes")
	b.sees("Credential created")
	b.gone("Credential read")
	b.gone("Audit read")
	b.press("Verify this page")
	b.sees("verified: hash, signature, inclusion.")

	b.open("/audit")
	b.settled()
	b.activate("DisclosureTriangle", "Timeline")
	b.until(`document.querySelector('.chart svg')`)
	b.activate("DisclosureTriangle", "As a table")
	b.script(`document.querySelector('.tall tbody a').click()`) // today
	b.until(`location.search.startsWith('?from=') && ` + still)
	b.follow("Access to secrets")
	b.until(`location.search.startsWith('?show=secrets&from=')`)
	b.sees("4 entries")
	b.accessible()

	b.open("/audit?show=secrets")
	b.settled()
	downloads := b.downloads()
	b.press("Export")
	b.press("CSV")
	rows, err := csv.NewReader(strings.NewReader(string(downloads(".csv")))).ReadAll()
	if err != nil || len(rows) != 5 || rows[1][2] != "CREDENTIAL_UNSEALED" || rows[1][9] != "'=cmd|' /C calc'!A0" {
		t.Errorf("%q %v", rows, err)
	}
	b.press("Export")
	b.press("NDJSON")
	var entry audit.Entry
	if err := json.Unmarshal(downloads(".ndjson")[:strings.IndexByte(string(downloads(".ndjson")), '\n')], &entry); err != nil || entry.EventType != audit.CredentialUnsealed {
		t.Errorf("%v %v", entry, err)
	}
}

// What is copied as a .env file is read alike by the command line, and runs nothing in a shell; a cell of a spreadsheet is
// no formula, wherever it splits the line.
func TestCopiedTextRunsNothing(t *testing.T) {
	t.Parallel()
	p := start(t)
	b := p.tab()
	b.open("/sign-in")
	b.titled("Sign in")
	script := func(name string) string {
		return value[string](b, fmt.Sprintf(`new URL(%s, document.querySelector('script[src]').src).href`, quoted(name)))
	}
	values := map[string]string{"PASSWORD": "$(touch /tmp/ran)`id`$HOME \"x\"", "PLAIN": "a-b_1", "QUOTE": "it's", "LINES": "a\nb", "EMPTY": ""}
	given, err := json.Marshal(values)
	p.must(nil, err)
	file := value[string](b, fmt.Sprintf(`import(%s).then(r => r.asEnv(%s))`, quoted(script("lib/rows.js")), given))
	read, err := dotenv.Parse([]byte(file))
	if err != nil || len(read) != len(values) {
		t.Fatalf("%q: %v", file, err)
	}
	out, err := exec.Command("sh", "-c", "set -eu; "+file+`printf '%s|%s|%s|%s|%s' "$PASSWORD" "$PLAIN" "$QUOTE" "$LINES" "$EMPTY"`).Output()
	if want := strings.Join([]string{values["PASSWORD"], values["PLAIN"], values["QUOTE"], values["LINES"], values["EMPTY"]}, "|"); err != nil || string(out) != want {
		t.Errorf("a shell reads %q, %v", out, err)
	}
	for _, refused := range []string{`{"a.b":"x"}`, `{"-x":"y"}`, `{"A":"'$(id)"}`, `{"A":"x\\"}`} {
		if said := value[string](b, fmt.Sprintf(`import(%s).then(r => r.asEnv(%s)).catch(e => 'refused: ' + e.message)`, quoted(script("lib/rows.js")), refused)); !strings.HasPrefix(said, "refused: ") {
			t.Errorf("%s becomes %q", refused, said)
		}
	}
	entry := `{actor: {type: 'user', id: 'u'}, resource: {type: 'credential', id: 'c'}, event_type: 'E', outcome: 'success'}`
	for name, want := range map[string]string{"=1+1": "'=1+1", "x;=1+1;y": `"x;'=1+1;y"`, "  @SUM(A1)": "'  @SUM(A1)", "\uff1d1": "'\uff1d1", "plain": "plain"} {
		line := value[string](b, fmt.Sprintf(`import(%s).then(r => r.asCSV([%s], new Map([['c', {name: %s}]])).split('\r\n')[1])`, quoted(script("lib/export.js")), entry, quoted(name)))
		if !strings.Contains(line, ","+want+",") && !strings.Contains(line, want) {
			t.Errorf("%q becomes %s", name, line)
		}
	}
}

// The page knows by itself which types of events are in which category, for entries that it follows.
func TestThePageSortsEventsAsTheLogDoes(t *testing.T) {
	t.Parallel()
	p := start(t)
	b := p.tab()
	b.open("/sign-in")
	b.titled("Sign in")
	script := value[string](b, `new URL('lib/words.js', document.querySelector('script[src]').src).href`)
	for _, c := range []audit.Category{audit.Changes, audit.Secrets} {
		got := value[[]string](b, fmt.Sprintf(`import(%s).then(w => w.eventTypes.map(([type]) => type).filter(w.isOf[%s]).sort())`, quoted(script), quoted(string(c))))
		want := map[string]bool{}
		for _, e := range c.Types() {
			want[string(e)] = true
		}
		for _, e := range got {
			if !want[e] {
				t.Errorf("the page has %s in %s", e, c)
			}
			delete(want, e)
		}
		if len(want) > 0 {
			t.Errorf("the page lacks %v in %s", want, c)
		}
	}
}
