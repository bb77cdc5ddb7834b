package docs

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
)

func get(t *testing.T, path string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	Register(engine)
	request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	engine.ServeHTTP(w, request)
	return w
}

// loaded matches what a browser fetches by itself for a page.
var loaded = regexp.MustCompile(`(?:<link[^>]* href|<(?:script|img|iframe)[^>]* src)="([^"]*)"`)

func TestEveryAssetThatThePageNamesIsServed(t *testing.T) {
	page := get(t, "/docs")
	if page.Code != http.StatusOK || page.Header().Get("Content-Type") != "text/html; charset=utf-8" {
		t.Fatal(page.Code, page.Header())
	}
	named := loaded.FindAllStringSubmatch(page.Body.String(), -1)
	if len(named) != 5 {
		t.Fatalf("the page names %d assets: %v", len(named), named)
	}
	for _, m := range named {
		if strings.HasPrefix(m[1], "data:") {
			continue // an icon that is none keeps browsers from asking for one
		}
		if w := get(t, m[1]); w.Code != http.StatusOK || w.Body.Len() == 0 {
			t.Errorf("%s: %d", m[1], w.Code)
		}
	}
	for _, a := range assets {
		w := get(t, "/docs/assets/"+a.name)
		if w.Code != http.StatusOK || w.Header().Get("Content-Type") != a.contentType {
			t.Errorf("%s: %d %v", a.name, w.Code, w.Header())
		}
	}
	for _, path := range []string{"/docs/assets/", "/docs/assets/VERSION", "/docs/assets/../docs.go", "/docs/page/index.html"} {
		if w := get(t, path); w.Code != http.StatusNotFound {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
}

func TestThePageOffersBothVersions(t *testing.T) {
	page, script := get(t, "/docs").Body.String(), get(t, "/docs/assets/docs.js").Body.String()
	for _, want := range []string{`href="/docs?version=v1"`, `href="/docs?version=v2"`} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %s", want)
		}
	}
	for _, want := range []string{`"/v1/openapi.yaml"`, `"/api/v2/openapi.yaml"`} {
		if !strings.Contains(script, want) {
			t.Errorf("the script has no %s", want)
		}
	}
}

func TestThePageMayCallNoOtherHostAndRunsNothingInline(t *testing.T) {
	page := get(t, "/docs")
	policy := map[string]string{}
	for directive := range strings.SplitSeq(page.Header().Get("Content-Security-Policy"), ";") {
		name, sources, _ := strings.Cut(strings.TrimSpace(directive), " ")
		policy[name] = sources
	}
	want := map[string]string{
		"default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self' data:", "connect-src": "'self'",
		"base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
	}
	if len(policy) != len(want) {
		t.Errorf("%v", policy)
	}
	for name, sources := range want {
		if policy[name] != sources {
			t.Errorf("%s %s, want %s", name, policy[name], sources)
		}
	}
	html := page.Body.String()
	for _, tag := range regexp.MustCompile(`<script[^>]*>|<style|<[^>]* style=|<[^>]* on[a-z]+=|javascript:`).FindAllString(html, -1) {
		if !strings.Contains(tag, " src=") {
			t.Errorf("inline: %s", tag)
		}
	}
	// What is ours names no other host at all. Of Swagger UI's two files, the
	// style sheet fetches nothing, and the script only what it is told to.
	absolute := regexp.MustCompile(`(?i)(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}`)
	for _, ours := range []string{html, get(t, "/docs/assets/docs.js").Body.String(), get(t, "/docs/assets/docs.css").Body.String()} {
		if url := absolute.FindString(ours); url != "" {
			t.Errorf("names another host: %s", url)
		}
	}
	css := get(t, "/docs/assets/swagger-ui.css").Body.String()
	for _, m := range regexp.MustCompile(`(?i)@import|url\(["']?(.{5})`).FindAllStringSubmatch(css, -1) {
		if m[1] != "data:" {
			t.Errorf("the style sheet of Swagger UI fetches %s", m[0])
		}
	}
	script := get(t, "/docs/assets/docs.js").Body.String()
	for _, setting := range []string{"validatorUrl: null", "queryConfigEnabled: false", "persistAuthorization: false"} {
		if !strings.Contains(script, setting) {
			t.Errorf("the script does not set %s", setting)
		}
	}
}

func TestAssetsAreCompressedAndRevalidated(t *testing.T) {
	const path = "/docs/assets/swagger-ui.css"
	plain := get(t, path)
	packed := get(t, path, "Accept-Encoding", "br, gzip;q=0.8")
	if plain.Header().Get("Content-Encoding") != "" || packed.Header().Get("Content-Encoding") != "gzip" {
		t.Fatal(plain.Header(), packed.Header())
	}
	if packed.Body.Len() > plain.Body.Len()/2 {
		t.Errorf("%d of %d bytes", packed.Body.Len(), plain.Body.Len())
	}
	r, err := gzip.NewReader(packed.Body)
	if err != nil {
		t.Fatal(err)
	}
	if unpacked, err := io.ReadAll(r); err != nil || !bytes.Equal(unpacked, plain.Body.Bytes()) {
		t.Fatal("another content:", err)
	}
	if plain.Header().Get("ETag") == packed.Header().Get("ETag") {
		t.Error("one strong tag for two representations")
	}
	for _, w := range []*httptest.ResponseRecorder{plain, packed} {
		if w.Header().Get("Vary") != "Accept-Encoding" || w.Header().Get("Cache-Control") != "public, no-cache" {
			t.Error(w.Header())
		}
	}
	if w := get(t, path, "If-None-Match", plain.Header().Get("ETag")); w.Code != http.StatusNotModified || w.Body.Len() != 0 {
		t.Error("the same:", w.Code)
	}
	if w := get(t, path, "If-None-Match", `"another"`); w.Code != http.StatusOK {
		t.Error("another:", w.Code)
	}
}

func TestSwaggerUIIsAsPublished(t *testing.T) {
	version, err := files.ReadFile("swagger-ui/VERSION")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{"VERSION": true}
	for lines := bufio.NewScanner(bytes.NewReader(version)); lines.Scan(); {
		sum, name, ok := strings.Cut(lines.Text(), "  ")
		if !ok || len(sum) != 2*sha256.Size {
			continue
		}
		listed[name] = true
		content, err := files.ReadFile("swagger-ui/" + name)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := sha256.Sum256(content); hex.EncodeToString(got[:]) != sum {
			t.Errorf("%s was changed", name)
		}
	}
	vendored, err := files.ReadDir("swagger-ui")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range vendored {
		if !listed[f.Name()] {
			t.Errorf("%s is not listed in VERSION", f.Name())
		}
	}
	if !listed["LICENSE"] || !listed["NOTICE"] {
		t.Error("the licence is missing")
	}
}
