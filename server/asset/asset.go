// Package asset answers files that are embedded in the program, compressed for
// clients that take that, and with a tag by which they can be asked for again.
package asset

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
)

// Asset is a file. It is safe for concurrent use.
type Asset struct {
	content     []byte
	contentType string
	tag         string
	compressed  func() []byte // once it is asked for
}

// New returns an asset, which takes over content.
func New(content []byte, contentType string) *Asset {
	digest := sha256.Sum256(content)
	return &Asset{content, contentType, hex.EncodeToString(digest[:16]), sync.OnceValue(func() []byte { return compress(content) })}
}

// Content returns the asset as it is, and Compressed as gzip has it (RFC 1952). Neither
// may be changed.
func (a *Asset) Content() []byte    { return a.content }
func (a *Asset) Compressed() []byte { return a.compressed() }

// Write answers with the asset. Whoever calls it says how long it may be kept.
func (a *Asset) Write(c *gin.Context) {
	body, tag := a.content, a.tag
	h := c.Writer.Header()
	if acceptsGzip(c.GetHeader("Accept-Encoding")) {
		body, tag = a.compressed(), tag+"-gzip"
		h.Set("Content-Encoding", "gzip")
	}
	h.Set("Content-Type", a.contentType)
	h.Set("ETag", `"`+tag+`"`)
	h.Set("Vary", "Accept-Encoding")
	h.Set("X-Content-Type-Options", "nosniff")
	http.ServeContent(c.Writer, c.Request, "", time.Time{}, bytes.NewReader(body))
}

func compress(b []byte) []byte {
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, gzip.BestCompression) // the level is one
	_, _ = w.Write(b)                                       // into memory: it cannot fail
	_ = w.Close()
	return out.Bytes()
}

// acceptsGzip reads an Accept-Encoding header (RFC 9110 §12.5.3).
func acceptsGzip(header string) bool {
	for part := range strings.SplitSeq(header, ",") {
		coding, weight, _ := strings.Cut(part, ";")
		if !strings.EqualFold(strings.TrimSpace(coding), "gzip") {
			continue
		}
		value, weighted := strings.CutPrefix(strings.TrimSpace(weight), "q=")
		q, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		return !weighted || err == nil && q > 0
	}
	return false
}
