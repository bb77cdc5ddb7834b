// Package docs serves the reference page of the REST interface: Swagger UI for the OpenAPI
// documents that the server itself serves.
//
// The page calls no other host, and its content security policy enforces that: scripts, styles and
// requests go to this server only, and nothing inline runs. Swagger UI is vendored, unchanged, in
// the directory swagger-ui, with its licence and version; the directory page holds our own files.
// The page needs no credential and stores none: a key typed into it stays in the memory of the tab.
package docs

import (
	"embed"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/server/asset"
)

//go:embed page swagger-ui
var files embed.FS

// policy allows the page what Swagger UI needs. The icons are data URLs in a style sheet;
// everything else comes from this server. Forms never leave the page.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// assets are the files served below /docs/assets.
var assets = []struct{ name, file, contentType string }{
	{"docs.css", "page/docs.css", "text/css; charset=utf-8"},
	{"docs.js", "page/docs.js", "text/javascript; charset=utf-8"},
	{"swagger-ui.css", "swagger-ui/swagger-ui.css", "text/css; charset=utf-8"},
	{"swagger-ui-bundle.js", "swagger-ui/swagger-ui-bundle.js", "text/javascript; charset=utf-8"},
	// The first line of the bundle refers to this file.
	{"swagger-ui-bundle.js.LICENSE.txt", "swagger-ui/swagger-ui-bundle.js.LICENSE.txt", "text/plain; charset=utf-8"},
}

// Register adds GET /docs, the page, and GET /docs/assets/…, with one route for each file.
func Register(r gin.IRouter) {
	r.GET("/docs", protect, serve("page/index.html", "text/html; charset=utf-8"))
	for _, a := range assets {
		r.GET("/docs/assets/"+a.name, serve(a.file, a.contentType))
	}
}

// protect sets the headers that restrict the page to what it needs.
func protect(c *gin.Context) {
	c.Header("Content-Security-Policy", policy)
	c.Header("Referrer-Policy", "no-referrer")
}

// serve answers with one embedded file. Browsers keep it but revalidate it, so that a page never
// mixes files of two releases.
func serve(file, contentType string) gin.HandlerFunc {
	content, err := files.ReadFile(file)
	if err != nil {
		panic("docs: " + err.Error()) // happens only in a build without the file
	}
	a := asset.New(content, contentType)
	return func(c *gin.Context) {
		c.Header("Cache-Control", "public, no-cache")
		a.Write(c)
	}
}
