package server

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// FuzzServer drives the whole service with requests of any form. Whatever is
// sent, the answer is no 5xx, and it is as the contract says.
func FuzzServer(f *testing.F) {
	s := assemble(f)
	valid := newContract(f)
	f.Fuzz(func(t *testing.T, method, target, contentType string, withKey, chunked bool, body []byte) {
		u, err := url.ParseRequestURI(target)
		if err != nil || !strings.HasPrefix(target, "/") || strings.Trim(method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "" || method == "" {
			t.Skip("net/http refuses it")
		}
		r := &http.Request{
			Method: method, URL: u, RequestURI: target, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)), RemoteAddr: "192.0.2.1:1234",
		}
		if chunked {
			r.ContentLength = -1
		}
		if contentType != "" {
			r.Header.Set("Content-Type", contentType)
		}
		if withKey {
			r.Header.Set("X-API-Key", s.key)
		}
		w := httptest.NewRecorder()
		s.server.engine.ServeHTTP(w, r.WithContext(t.Context()))
		if w.Code >= 500 {
			t.Errorf("%s %q: %d %s", method, target, w.Code, w.Body)
		}
		if !authz.ValidID("req", w.Header().Get("X-Request-ID")) {
			t.Errorf("%s %q: no request id", method, target)
		}
		if r.Method == http.MethodHead {
			return
		}
		valid.t = t
		r.Body = io.NopCloser(bytes.NewReader(body))
		valid.check(r, w.Code, w.Header(), w.Body.Bytes())
	})
}
