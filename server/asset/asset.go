// Package asset serves files embedded in the program. It compresses them for clients that accept
// that, and sets an ETag for revalidation.
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

// Asset is a file to serve. It is safe for concurrent use.
type Asset struct {
	content     []byte
	contentType string
	tag         string
	compressed  func() []byte // compresses at the first call
}

// New returns an asset, which owns content from then on.
func New(content []byte, contentType string) *Asset {
	digest := sha256.Sum256(content)
	return &Asset{content, contentType, hex.EncodeToString(digest[:16]), sync.OnceValue(func() []byte { return compress(content) })}
}

// Write answers with the asset. The caller sets how long clients may cache it.
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

// WriteStatus answers with the asset under a status that is not a success.
func (a *Asset) WriteStatus(c *gin.Context, status int) {
	c.Header("X-Content-Type-Options", "nosniff")
	c.Data(status, a.contentType, a.content)
}

func compress(b []byte) []byte {
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, gzip.BestCompression) // the level is valid
	_, _ = w.Write(b)                                       // a write to memory cannot fail
	_ = w.Close()
	return out.Bytes()
}

// acceptsGzip reports whether an Accept-Encoding header accepts gzip (RFC 9110 §12.5.3).
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
