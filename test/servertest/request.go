package servertest

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// Request is a request that a test sends. Zero fields send nothing.
type Request struct {
	Method, Path string
	Key          string // X-API-Key
	Bearer       string // Authorization
	Body         string
	ContentType  string // default application/json when there is a body
	Chunked      bool   // no Content-Length
	Header       http.Header
	LogLost      bool // the log is halted because it lacks entries that an anchor knows
}

// Reply is a response with its whole body.
type Reply struct {
	Status int
	Header http.Header
	Body   []byte
}

// WithoutWait changes the path of a tail so that it ends after the existing entries. It returns
// other paths unchanged.
func WithoutWait(path string) string {
	query, ok := strings.CutPrefix(path, "/api/v2/audit/tail")
	switch {
	case !ok || strings.Contains(query, "wait=") || strings.HasPrefix(query, "/"):
		return path
	case query == "":
		return path + "?wait=0"
	}
	return path + "&wait=0"
}

// Call sends a request and returns the answer.
func (s *Service) Call(r Request) Reply {
	s.T.Helper()
	if r.LogLost {
		s.LoseEntries()
		defer s.Audit.Halt(nil)
	}
	var body io.Reader
	if r.Body != "" {
		body = strings.NewReader(r.Body)
		if r.Chunked {
			body = io.MultiReader(body) // hides the length
		}
	}
	req, err := http.NewRequest(r.Method, s.URL+WithoutWait(r.Path), body)
	if err != nil {
		s.T.Fatal(err)
	}
	for name, values := range r.Header {
		req.Header[http.CanonicalHeaderKey(name)] = values
	}
	if r.Key != "" {
		req.Header.Set("X-API-Key", r.Key)
	}
	if r.Bearer != "" {
		req.Header.Set("Authorization", "Bearer "+r.Bearer)
	}
	if r.Body != "" && r.ContentType == "" {
		r.ContentType = "application/json"
	}
	if r.ContentType != "" {
		req.Header.Set("Content-Type", r.ContentType)
	}
	resp, err := s.Client.Do(req)
	if err != nil {
		s.T.Fatalf("%s %s: %v", r.Method, r.Path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.T.Fatalf("%s %s: %v", r.Method, r.Path, err)
	}
	return Reply{resp.StatusCode, resp.Header, b}
}

// Get sends a GET with the key that has all scopes.
func (s *Service) Get(path string) Reply {
	s.T.Helper()
	return s.Call(Request{Method: "GET", Path: path, Key: s.Key})
}

// Metrics returns the metrics of the service, which has no listener for operations.
func (s *Service) Metrics() string {
	s.T.Helper()
	r := s.Call(Request{Method: "GET", Path: "/metrics", Key: s.GrantKeyIn(authz.SystemTenant, authz.MetricsRead)})
	if r.Status != http.StatusOK {
		s.T.Fatalf("reading the metrics: %d %s", r.Status, r.Body)
	}
	return string(r.Body)
}

// Post sends a POST with the key that has all scopes.
func (s *Service) Post(path, body string) Reply {
	s.T.Helper()
	return s.Call(Request{Method: "POST", Path: path, Key: s.Key, Body: body})
}

// Delete sends a DELETE with the key that has all scopes.
func (s *Service) Delete(path string) Reply {
	s.T.Helper()
	return s.Call(Request{Method: "DELETE", Path: path, Key: s.Key})
}

// Want fails the test unless the reply has the status, and returns its decoded body.
func (r Reply) Want(t testing.TB, status int) map[string]any {
	t.Helper()
	if r.Status != status {
		t.Fatalf("status %d, want %d: %s", r.Status, status, r.Body)
	}
	var fields map[string]any
	if err := json.Unmarshal(r.Body, &fields); err != nil {
		t.Fatalf("body %q: %v", r.Body, err)
	}
	return fields
}

// Message returns the message of an error reply.
func (r Reply) Message(t testing.TB, status int) string {
	t.Helper()
	fields := r.Want(t, status)
	detail, ok := fields["error"].(map[string]any)
	if !ok || fields["success"] != false || detail["code"] != float64(status) {
		t.Fatalf("no error envelope: %s", r.Body)
	}
	return detail["message"].(string)
}

// Seal stores a credential with one value and returns its id.
func (s *Service) Seal(value string) string {
	s.T.Helper()
	body, err := json.Marshal(map[string]any{
		"name": "n", "credential_type": "api_key", "values": map[string]string{"key": value}, "ttl_days": 10,
	})
	if err != nil {
		s.T.Fatal(err)
	}
	return s.Post("/api/v2/vault/seal", string(body)).Want(s.T, http.StatusCreated)["credential_id"].(string)
}

// Entries returns the answer to a query of the audit log.
func (s *Service) Entries(query string) []map[string]any {
	s.T.Helper()
	var entries []map[string]any
	for _, e := range s.Get("/api/v2/audit/logs?"+query).Want(s.T, http.StatusOK)["entries"].([]any) {
		entries = append(entries, e.(map[string]any))
	}
	return entries
}

// GetStatus returns the status and the body of a GET that bypasses the service's client.
func GetStatus(t *testing.T, url string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(b)
}

// Decode returns the body of a successful reply.
func Decode[T any](t testing.TB, r Reply) T {
	t.Helper()
	r.Want(t, http.StatusOK)
	var v T
	if err := json.Unmarshal(r.Body, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// Marshal returns v as JSON.
func Marshal(t testing.TB, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Cookie returns a cookie that the reply sets.
func (r Reply) Cookie(t testing.TB, name string) *http.Cookie {
	t.Helper()
	for _, c := range (&http.Response{Header: r.Header}).Cookies() {
		if c.Name == name {
			return c
		}
	}
	t.Fatalf("no cookie %s: %v", name, r.Header)
	return nil
}

// Cookies returns a Cookie header for pairs of names and values.
func Cookies(pairs ...string) http.Header {
	var parts []string
	for i := 0; i < len(pairs); i += 2 {
		parts = append(parts, pairs[i]+"="+pairs[i+1])
	}
	return http.Header{"Cookie": {strings.Join(parts, "; ")}}
}

// WithoutRequest returns the body of an error without the request id and the time.
func WithoutRequest(t *testing.T, r Reply) string {
	t.Helper()
	var body struct {
		Success *bool                      `json:"success"`
		Error   map[string]json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(r.Body, &body); err != nil {
		t.Fatalf("%q: %v", r.Body, err)
	}
	out := string(r.Body)
	for _, field := range []string{"request_id", "timestamp"} {
		if len(body.Error[field]) < 20 {
			t.Fatalf("no %s in %s", field, r.Body)
		}
		out = strings.Replace(out, string(body.Error[field]), "x", 1)
	}
	return out
}

// Canary is part of every hostile request. No refusal may repeat it.
const Canary = "c4n4ry"

// TooLarge is one byte more than the maximum body size.
const TooLarge = 1<<20 + 1

// WantIndistinct sends each case several times in random order. It fails unless all answers have
// the same status, the same headers and, apart from the request id, the same body. The clock stands
// still.
func (s *Service) WantIndistinct(t *testing.T, question string, status int, cases map[string]Request) {
	t.Helper()
	const rounds = 3
	var order []string
	for range rounds {
		for name := range cases {
			order = append(order, name)
		}
	}
	rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	want, wanted, remaining := "", "", 0
	for i, name := range order {
		r := s.Call(cases[name])
		if r.Status != status {
			t.Errorf("%s, %s: %d, want %d: %s", question, name, r.Status, status, r.Body)
			continue
		}
		left, err := strconv.Atoi(r.Header.Get("X-RateLimit-Remaining"))
		if err != nil || i > 0 && left != remaining-1 {
			t.Errorf("%s, %s: %d requests remain after %d: %v", question, name, left, remaining, err)
		}
		remaining = left
		if got := r.Mask(t); want == "" {
			want, wanted = got, name
		} else if got != want {
			t.Errorf("%s\n%s: %s\n%s: %s", question, name, got, wanted, want)
		}
	}
}

// Mask returns the whole answer without the parts that differ in every answer.
func (r Reply) Mask(t testing.TB) string {
	t.Helper()
	id := r.Header.Get("X-Request-ID")
	header := r.Header.Clone()
	for _, own := range []string{"X-Request-ID", "X-RateLimit-Remaining", "Date"} {
		if header.Get(own) == "" {
			t.Errorf("no header %s", own)
		}
		header.Del(own)
	}
	return fmt.Sprint(r.Status, header, strings.ReplaceAll(string(r.Body), id, "its own"))
}
