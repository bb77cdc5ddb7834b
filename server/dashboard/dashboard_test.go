package dashboard

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/server/asset"
)

// noAsset is what the server answers for what is not there.
func noAsset(c *gin.Context) { c.String(http.StatusNotFound, "missing") }

var engine = func() *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	e.RedirectTrailingSlash, e.UseEscapedPath, e.UnescapePathValues = false, true, false // as the server's
	Register(e, noAsset)
	return e
}()

func do(t *testing.T, method, target string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	request := httptest.NewRequestWithContext(t.Context(), method, target, nil)
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	engine.ServeHTTP(w, request)
	return w
}

func get(t *testing.T, target string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	return do(t, http.MethodGet, target, header...)
}

// addresses are one of each page.
func addresses() []string {
	var all []string
	for _, p := range pages {
		for _, parameter := range []string{":credential_id", ":key_id", ":framework", ":sequence"} {
			p = strings.Replace(p, parameter, "a%2Fb%3Cscript%3E", 1)
		}
		all = append(all, p)
	}
	return all
}

func TestThePageIsAtEachOfItsAddresses(t *testing.T) {
	want := get(t, "/").Body.String()
	if !strings.Contains(want, `<div id="app">`) || strings.Contains(want, "{{") || strings.Contains(want, "script>alert") {
		t.Fatal(want)
	}
	for _, address := range addresses() {
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			w := do(t, method, address)
			if w.Code != http.StatusOK || w.Header().Get("Content-Type") != "text/html; charset=utf-8" {
				t.Errorf("%s %s: %d %v", method, address, w.Code, w.Header())
			}
			if got := w.Body.String(); method == http.MethodGet && got != want || method == http.MethodHead && got != "" {
				t.Errorf("%s %s: another page", method, address)
			}
		}
	}
	for _, elsewhere := range []string{
		"/index.html", "/vault/", "/vault/a/b", "/settings/", "/settings/else", "/api", "/api/v2/vault/list", "/v1/keys", "/healthz", "/metrics",
		"/static/index.html", "/assets", "/verify/", "/robots.txt",
	} {
		if w := get(t, elsewhere); w.Code != http.StatusNotFound {
			t.Errorf("%s: %d", elsewhere, w.Code)
		}
	}
}

func TestThePageMayDoOnlyWhatItNeeds(t *testing.T) {
	for _, address := range addresses() {
		h := get(t, address).Header()
		policy := map[string]string{}
		for directive := range strings.SplitSeq(h.Get("Content-Security-Policy"), ";") {
			name, sources, _ := strings.Cut(strings.TrimSpace(directive), " ")
			policy[name] = sources
		}
		want := map[string]string{
			"default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self'", "connect-src": "'self'",
			"form-action": "'self'", "base-uri": "'none'", "frame-ancestors": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "'none'",
		}
		if len(policy) != len(want) {
			t.Errorf("%v", policy)
		}
		for name, sources := range want {
			if policy[name] != sources {
				t.Errorf("%s %s, want %s", name, policy[name], sources)
			}
		}
		for name, value := range map[string]string{
			"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin",
			"Cross-Origin-Resource-Policy": "same-origin", "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff",
		} {
			if h.Get(name) != value {
				t.Errorf("%s: %s %q", address, name, h.Get(name))
			}
		}
		for power := range strings.SplitSeq(h.Get("Permissions-Policy"), ", ") {
			if power != "clipboard-write=(self)" && !strings.HasSuffix(power, "=()") {
				t.Errorf("the page may %s", power)
			}
		}
		if !strings.Contains(h.Get("Permissions-Policy"), "clipboard-write=(self)") {
			t.Error("the page may not copy")
		}
	}
}

func TestAssetsAreKeptForeverAndCompressed(t *testing.T) {
	s := load(files)
	if len(s.version) != 16 || len(s.assets) < 10 {
		t.Fatal(s.version, len(s.assets))
	}
	for name := range s.assets {
		target := "/assets/" + s.version + "/" + name
		content, err := files.ReadFile("static/" + name)
		if err != nil {
			t.Fatal(err)
		}
		plain := get(t, target)
		packed := get(t, target, "Accept-Encoding", "br, gzip;q=0.8")
		if plain.Code != http.StatusOK || !bytes.Equal(plain.Body.Bytes(), content) || plain.Header().Get("Content-Encoding") != "" {
			t.Errorf("%s: %d %v", name, plain.Code, plain.Header())
		}
		r, err := gzip.NewReader(packed.Body)
		if err != nil || packed.Header().Get("Content-Encoding") != "gzip" {
			t.Fatal(name, err, packed.Header())
		}
		if unpacked, err := io.ReadAll(r); err != nil || !bytes.Equal(unpacked, content) {
			t.Errorf("%s: another content: %v", name, err)
		}
		for _, w := range []*httptest.ResponseRecorder{plain, packed} {
			for header, want := range map[string]string{
				"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding", "Content-Type": contentTypes[path.Ext(name)],
				"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
			} {
				if w.Header().Get(header) != want {
					t.Errorf("%s: %s %q", name, header, w.Header().Get(header))
				}
			}
		}
		if plain.Header().Get("ETag") == packed.Header().Get("ETag") {
			t.Errorf("%s: one strong tag for two representations", name)
		}
		if w := get(t, target, "If-None-Match", plain.Header().Get("ETag")); w.Code != http.StatusNotModified || w.Body.Len() != 0 {
			t.Errorf("%s: the same: %d", name, w.Code)
		}
		if w := do(t, http.MethodHead, target); w.Code != http.StatusOK || w.Body.Len() != 0 {
			t.Errorf("%s: HEAD: %d", name, w.Code)
		}
	}
}

func TestWhatIsNotAnAssetOfThisBuildIsMissing(t *testing.T) {
	version := "/assets/" + load(files).version
	for _, target := range []string{
		"/assets/0000000000000000/app.js", version + "/", version + "/index.html", version + "/lib", version + "/lib/", version + "/else.js",
		version + "//app.js", version + "/../app.js", version + "/%2e%2e/dashboard.go", version + "/static/app.js", "/assets/" + version + "/app.js",
	} {
		if w := get(t, target); w.Code != http.StatusNotFound || strings.Contains(w.Header().Get("Cache-Control"), "immutable") {
			t.Errorf("%s: %d %v", target, w.Code, w.Header())
		}
	}
}

// served returns the bytes with which an asset answers a client that accepts an encoding.
func served(a *asset.Asset, encoding string) []byte {
	w := httptest.NewRecorder()
	c, _ := gin.CreateTestContext(w)
	c.Request = httptest.NewRequest(http.MethodGet, "/", nil)
	c.Request.Header.Set("Accept-Encoding", encoding)
	a.Write(c)
	return w.Body.Bytes()
}

// Two builds share an address only if all of their files are the same.
func TestAnyChangeMovesEveryAsset(t *testing.T) {
	build := func(files map[string]string) string {
		tree := fstest.MapFS{"static/index.html": {Data: []byte(`<link href="{{assets}}/a.css">`)}}
		for name, content := range files {
			tree["static/"+name] = &fstest.MapFile{Data: []byte(content)}
		}
		s := load(tree)
		if want := `<link href="/assets/` + s.version + `/a.css">`; string(served(s.page, "identity")) != want {
			t.Errorf("%s, want %s", served(s.page, "identity"), want)
		}
		return s.version
	}
	seen := map[string]bool{}
	builds := []map[string]string{
		{"a.js": "1", "b.js": "2"}, {"a.js": "1"}, {"a.js": "1", "b.js": "3"}, {"a.js": "1", "c.js": "2"}, {"a.js": "12", "b.js": ""}, {"lib/a.js": "1", "b.js": "2"},
	}
	for _, b := range builds {
		seen[build(b)] = true
	}
	if len(seen) != len(builds) {
		t.Errorf("%d versions of %d builds", len(seen), len(builds))
	}
	if once, again := build(builds[0]), build(builds[0]); once != again {
		t.Error("the version is another for the same files")
	}
}

var (
	// loaded matches what a browser fetches by itself for a page.
	loaded = regexp.MustCompile(`(?:<link[^>]* href|<(?:script|img|iframe)[^>]* src)="([^"]*)"`)
	// static matches the imports of a module that are fetched before it runs, dynamic the others.
	static  = regexp.MustCompile(`(?m)(?:^|[;}])\s*(?:import|export)\b(?:[^'"();]*\bfrom)?\s*['"]([^'"]+)['"]`)
	dynamic = regexp.MustCompile(`\bimport\(\s*['"]([^'"]+)['"]`)
)

// imports are the names of the assets that a module names.
func imports(name string, content []byte, kind *regexp.Regexp) []string {
	var all []string
	for _, m := range kind.FindAllSubmatch(content, -1) {
		target := string(m[1])
		if strings.HasPrefix(target, "./") || strings.HasPrefix(target, "../") {
			target = path.Join(path.Dir(name), target)
		}
		all = append(all, target)
	}
	return all
}

func TestEverythingThatIsNamedIsServed(t *testing.T) {
	s := load(files)
	for _, m := range loaded.FindAllSubmatch(served(s.page, "identity"), -1) {
		name, ok := strings.CutPrefix(string(m[1]), "/assets/"+s.version+"/")
		if _, there := s.assets[name]; !ok || !there {
			t.Errorf("the page names %s", m[1])
		}
	}
	for name, a := range s.assets {
		if path.Ext(name) != ".js" {
			continue
		}
		for _, target := range append(imports(name, served(a, "identity"), static), imports(name, served(a, "identity"), dynamic)...) {
			if _, there := s.assets[target]; !there {
				t.Errorf("%s imports %s", name, target)
			}
		}
	}
}

// firstLoad is what may be fetched, compressed, before the page shows anything.
const firstLoad = 60 << 10

func TestTheFirstLoadIsSmall(t *testing.T) {
	s := load(files)
	all, first := len(served(s.page, "gzip")), map[string]int{}
	var add func(name string)
	add = func(name string) {
		if _, counted := first[name]; counted {
			return
		}
		a := s.assets[name]
		first[name] = len(served(a, "gzip"))
		all += len(served(a, "gzip"))
		if path.Ext(name) == ".js" {
			for _, target := range imports(name, served(a, "identity"), static) {
				add(target)
			}
		}
	}
	for _, m := range loaded.FindAllSubmatch(served(s.page, "identity"), -1) {
		add(strings.TrimPrefix(string(m[1]), "/assets/"+s.version+"/"))
	}
	t.Logf("%d bytes: %v", all, first)
	if all > firstLoad {
		t.Errorf("%d bytes: %v", all, first)
	}
	if _, ok := first["app.js"]; !ok {
		t.Error("nothing starts")
	}
}

// What is ours runs nothing inline, makes no markup or code of text, and names no other
// host. The policy would stop it too, where a browser knows the policy.
func TestNothingInlineAndNoMarkupOfText(t *testing.T) {
	s := load(files)
	for _, tag := range regexp.MustCompile(`<script[^>]*>|<style|<[^>]* style=|<[^>]* on[a-z]+=|javascript:`).FindAllString(string(served(s.page, "identity")), -1) {
		if !strings.Contains(tag, " src=") {
			t.Errorf("inline: %s", tag)
		}
	}
	never := regexp.MustCompile(`innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(|new Function\b|createPolicy|srcdoc|\bstyle="|@import`)
	host := regexp.MustCompile(`(?i)(?:https?|wss?)://[a-z0-9.-]+\.[a-z]{2,}`)
	check := func(name string, content []byte) {
		for _, found := range never.FindAllString(string(content), -1) {
			t.Errorf("%s has %s", name, found)
		}
		for _, url := range host.FindAllString(string(content), -1) {
			if url != "http://www.w3.org" { // the name of a vocabulary
				t.Errorf("%s names another host: %s", name, url)
			}
		}
	}
	check("index.html", served(s.page, "identity"))
	for name, a := range s.assets {
		if !strings.HasPrefix(name, "vendor/") {
			check(name, served(a, "identity"))
		}
	}
}

// Names of ids are looked up in one place.
func TestOnePlaceLooksUpNames(t *testing.T) {
	for name, a := range load(files).assets {
		if text := string(served(a, "identity")); path.Ext(name) == ".js" && strings.Contains(text, "audit/names") && name != "lib/names.js" {
			t.Errorf("%s looks up names: lib/names.js does that", name)
		}
	}
}

func TestImportsAreFound(t *testing.T) {
	module := []byte("import './a.js';\nimport x, {\n  y,\n} from \"./b.js\";export {z} from '../c.js'\nexport const q = 'from';\nconst w = () => import('./d.js');\n" +
		"// import {no} from nowhere\nimport * as e from './e.js'")
	if got, want := imports("lib/m.js", module, static), []string{"lib/a.js", "lib/b.js", "c.js", "lib/e.js"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got, want := imports("lib/m.js", module, dynamic), []string{"lib/d.js"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
