// Package docs serves the reference page of the REST interface: Swagger UI on
// the OpenAPI documents that the server itself serves.
//
// The page calls no other host, and its content security policy holds it to
// that: scripts, styles and requests go to this server only, and nothing inline
// runs. Swagger UI is vendored, unchanged, in the directory swagger-ui, with its
// licence and version; page holds what is ours. The page needs no credential
// and keeps none: a key typed into it stays in the memory of the tab.
package docs

import (
	"embed"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/server/asset"
)

//go:embed page swagger-ui
var files embed.FS

// policy lets the page do what Swagger UI needs: its icons are data URLs in a
// style sheet, everything else comes from here. Forms never leave the page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// assets says what is served below /docs/assets.
var assets = []struct{ name, file, contentType string }{
	{"docs.css", "page/docs.css", "text/css; charset=utf-8"},
	{"docs.js", "page/docs.js", "text/javascript; charset=utf-8"},
	{"swagger-ui.css", "swagger-ui/swagger-ui.css", "text/css; charset=utf-8"},
	{"swagger-ui-bundle.js", "swagger-ui/swagger-ui-bundle.js", "text/javascript; charset=utf-8"},
	// Its first line refers to this one.
	{"swagger-ui-bundle.js.LICENSE.txt", "swagger-ui/swagger-ui-bundle.js.LICENSE.txt", "text/plain; charset=utf-8"},
}

// Register adds GET /docs, the page, and GET /docs/assets/…, one route for each
// file that it needs.
func Register(r gin.IRouter) {
	r.GET("/docs", protect, serve("page/index.html", "text/html; charset=utf-8"))
	for _, a := range assets {
		r.GET("/docs/assets/"+a.name, serve(a.file, a.contentType))
	}
}

// protect holds the page to what it needs.
func protect(c *gin.Context) {
	c.Header("Content-Security-Policy", policy)
	c.Header("Referrer-Policy", "no-referrer")
}

// serve answers one embedded file. Browsers keep it and ask whether it is still
// the same, so that a page is never put together from two releases.
func serve(file, contentType string) gin.HandlerFunc {
	content, err := files.ReadFile(file)
	if err != nil {
		panic("docs: " + err.Error()) // only a build without the file
	}
	a := asset.New(content, contentType)
	return func(c *gin.Context) {
		c.Header("Cache-Control", "public, no-cache")
		a.Write(c)
	}
}
