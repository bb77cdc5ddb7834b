package client

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

// wire is a network in memory, so that time in a synctest bubble passes only while a client waits.
// It keeps the requests.
type wire struct {
	answer func(w http.ResponseWriter, r *http.Request, n int) // n counts from 1
	broken error                                               // error instead of an answer, if not nil

	mu   sync.Mutex
	sent []sent
}

type sent struct {
	method, path, escaped, query, body string
	header                             http.Header
}

func (n *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	s := sent{method: r.Method, path: r.URL.Path, escaped: r.URL.EscapedPath(), query: r.URL.RawQuery, header: r.Header}
	if r.Body != nil {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		s.body = string(b)
	}
	n.mu.Lock()
	n.sent = append(n.sent, s)
	count := len(n.sent)
	n.mu.Unlock()
	if n.broken != nil {
		return nil, n.broken
	}
	w := httptest.NewRecorder()
	n.answer(w, r, count)
	if err := r.Context().Err(); err != nil { // the answer comes too late
		return nil, err
	}
	response := w.Result()
	response.Request = r
	return response, nil
}

// all returns the requests.
func (n *wire) all() []sent {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]sent(nil), n.sent...)
}

const testKey = "lk_live_test"

func (n *wire) client(t *testing.T, options ...Option) *Client {
	t.Helper()
	c, err := New("https://vault.example.org", append([]Option{WithHTTPClient(&http.Client{Transport: n}), WithAPIKey(testKey)}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// refusal answers with an error envelope of version 2.
func refusal(w http.ResponseWriter, status int) {
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"success":false,"error":{"code":%d,"message":"the reason","request_id":"req_1","timestamp":"2026-11-21T10:00:00Z"}}`, status)
}

func success(w http.ResponseWriter, fields map[string]any) {
	answer := map[string]any{"success": true}
	for k, v := range fields {
		answer[k] = v
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// always answers every request with the same status.
func always(status int) func(http.ResponseWriter, *http.Request, int) {
	return func(w http.ResponseWriter, _ *http.Request, _ int) {
		if status == http.StatusOK {
			success(w, nil)
			return
		}
		refusal(w, status)
	}
}
