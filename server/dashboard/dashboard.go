// Package dashboard serves the web dashboard: one page, at the address of each of its views, and
// the scripts and styles that it loads.
//
// The page reaches data only through /api/v2, with the cookies of a session. Its content security
// policy restricts it to this server: no inline script or style, no other host, no text that
// becomes markup. It needs no build chain: the files in the directory static are served as written.
// The files below static/vendor are from third parties, with their licences.
package dashboard

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/binary"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"sync"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/server/asset"
)

//go:embed static
var files embed.FS

// pages are the addresses of the dashboard. static/app.js decides what the page shows at each.
var pages = []string{
	"/",
	"/vault", "/vault/new", "/vault/:credential_id",
	"/crypto",
	"/keys", "/keys/:key_id",
	"/compliance", "/compliance/:framework",
	"/audit", "/audit/:sequence",
	"/cluster", "/cluster/seal",
	"/settings", "/settings/api-keys", "/settings/members", "/settings/policies", "/settings/groups", "/settings/webhooks", "/settings/rules",
	"/settings/profile", "/settings/password", "/settings/sessions", "/settings/plan",
	"/sign-in", "/register", "/verify", "/forgot", "/reset", "/join",
}

// policy restricts the page to scripts and styles of this server. With Trusted Types, and no policy
// allowed for them, the page cannot pass text to the browser as markup or script.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; " +
	"base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// permissions denies the page every browser feature except writing to the clipboard.
const permissions = "accelerometer=(), autoplay=(), camera=(), clipboard-read=(), clipboard-write=(self), display-capture=(), encrypted-media=(), " +
	"fullscreen=(), geolocation=(), gyroscope=(), hid=(), idle-detection=(), magnetometer=(), microphone=(), midi=(), payment=(), " +
	"picture-in-picture=(), publickey-credentials-get=(), screen-wake-lock=(), serial=(), usb=(), xr-spatial-tracking=()"

// contentTypes are the content types by file extension. A file without one is a licence.
var contentTypes = map[string]string{
	".js":   "text/javascript; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".svg":  "image/svg+xml",
	".ico":  "image/x-icon",
	".json": "application/json",
	".txt":  "text/plain; charset=utf-8",
	".md":   "text/plain; charset=utf-8",
	"":      "text/plain; charset=utf-8",
}

// site holds everything that is served.
type site struct {
	page    *asset.Asset
	version string                  // its first half names the assets' directory, so their content never changes
	assets  map[string]*asset.Asset // keyed by name below static
}

// loadSite reads the files of this build, once for all servers of the process.
var loadSite = sync.OnceValue(func() *site { return load(files) })

// Missing answers a browser that asks for an address that does not exist, with the page and status
// 404. It returns false, and answers nothing, for everybody else: programs get the errors of the
// interface.
func Missing(c *gin.Context) bool {
	p, method := c.Request.URL.Path, c.Request.Method
	isInterface := strings.HasPrefix(p, "/api/") || strings.HasPrefix(p, "/v1/") || p == "/api" || p == "/v1"
	if isInterface || method != http.MethodGet && method != http.MethodHead || !strings.Contains(c.GetHeader("Accept"), "text/html") {
		return false
	}
	s := loadSite()
	s.setPolicies(c)
	c.Header("Cross-Origin-Resource-Policy", "same-origin")
	s.page.WriteStatus(c, http.StatusNotFound)
	return true
}

// Register adds the page at each of its addresses, the assets below /assets/ and the icon for clients
// that do not read the page. missing answers requests for an unknown asset.
func Register(r gin.IRouter, missing gin.HandlerFunc) {
	s := loadSite()
	for _, p := range pages {
		r.GET(p, s.servePage)
		r.HEAD(p, s.servePage)
	}
	serve := func(c *gin.Context) {
		a, ok := s.assets[strings.TrimPrefix(c.Param("file"), "/")]
		if !ok || c.Param("version") != s.version {
			missing(c)
			return
		}
		s.serveAsset(c, a)
	}
	icon := func(c *gin.Context) {
		c.Header("Cache-Control", "public, max-age=86400")
		write(c, s.assets["favicon.ico"])
	}
	r.GET("/favicon.ico", icon)
	r.HEAD("/favicon.ico", icon)
	r.GET("/assets/:version/*file", serve)
	r.HEAD("/assets/:version/*file", serve)
}

// load reads and compresses the files of a build.
func load(tree fs.FS) *site {
	s := &site{assets: map[string]*asset.Asset{}}
	all := sha256.New()
	err := fs.WalkDir(tree, "static", func(p string, d fs.DirEntry, err error) error { // walks in the order of names
		if err != nil || d.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, p)
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(p, "static/")
		if name == "index.html" {
			return nil
		}
		contentType, ok := contentTypes[path.Ext(name)]
		if !ok {
			panic("dashboard: " + name + " has no content type")
		}
		_, _ = all.Write(binary.BigEndian.AppendUint64([]byte(name+"\x00"), uint64(len(content)))) // a write to a hash cannot fail
		_, _ = all.Write(content)
		s.assets[name] = asset.New(content, contentType)
		return nil
	})
	if err != nil {
		panic("dashboard: " + err.Error()) // happens only in a build without the files
	}
	s.version = hex.EncodeToString(all.Sum(nil)[:8])
	index, err := fs.ReadFile(tree, "static/index.html")
	if err != nil {
		panic("dashboard: " + err.Error())
	}
	s.page = asset.New(bytes.ReplaceAll(index, []byte("{{assets}}"), []byte("/assets/"+s.version)), "text/html; charset=utf-8")
	return s
}

// servePage answers with the page. The page is the same for everyone: only what it fetches shows
// whether a user is signed in.
func (s *site) servePage(c *gin.Context) {
	s.setPolicies(c)
	write(c, s.page)
}

// setPolicies sets the security headers of the page.
func (s *site) setPolicies(c *gin.Context) {
	h := c.Writer.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("Permissions-Policy", permissions)
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Cache-Control", "no-store") // the page names the assets of this build
}

// serveAsset answers with a file that never changes at its address: another build uses another
// address.
func (s *site) serveAsset(c *gin.Context, a *asset.Asset) {
	c.Header("Cache-Control", "public, max-age=31536000, immutable")
	write(c, a)
}

// write answers with an asset that no page of another origin may embed.
func write(c *gin.Context, a *asset.Asset) {
	c.Header("Cross-Origin-Resource-Policy", "same-origin")
	a.Write(c)
}
