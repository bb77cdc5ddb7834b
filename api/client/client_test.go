package client

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/latticekeep/latticekeep/api/openapi"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

func TestNewRefusesAddressesThatCannotBeMeant(t *testing.T) {
	for base, says := range map[string]string{
		"https://vault.example.org":      "",
		"https://vault.example.org/lk/":  "",
		"http://127.0.0.1:8080":          "",
		"http://[::1]:8080":              "",
		"http://localhost":               "",
		"http://vault.example.org":       "https",
		"http://127.0.0.1.example.org":   "https",
		"http://localhost.example.org":   "https",
		"vault.example.org":              "not one like",
		"":                               "not one like",
		"ftp://vault.example.org":        "not one like",
		"https://":                       "not one like",
		"https://user:pw@vault.example":  "leave them out",
		"https://user:pw@vault:port":     "not one like",
		"https://vault.example.org?a=b":  "leave them out",
		"https://vault.example.org/#top": "leave them out",
	} {
		_, err := New(base)
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%s: %v, want %q", base, err, says)
		}
		if err != nil && strings.Contains(err.Error(), "pw") {
			t.Errorf("%s: the password is quoted", base)
		}
	}
	if _, err := New("http://vault.example.org", WithPlainHTTP()); err != nil {
		t.Error(err)
	}
	if _, err := New("https://vault.example.org", WithRetries(-1)); err == nil {
		t.Error("a negative number of retries")
	}
}

func TestEachCallCarriesOneCredentialAndOnlyWhereItIsNeeded(t *testing.T) {
	s := &sessions{}
	n := &wire{answer: func(w http.ResponseWriter, r *http.Request, i int) {
		if strings.HasPrefix(r.URL.Path, "/api/v2/auth/log") {
			s.answer(w, r, i)
			return
		}
		success(w, nil)
	}}
	c := n.client(t)
	call := func(f func()) http.Header {
		t.Helper()
		f()
		all := n.all()
		return all[len(all)-1].header
	}
	is := func(h http.Header, key, authorization, cookie string) {
		t.Helper()
		if h.Get("X-API-Key") != key || h.Get("Authorization") != authorization || h.Get("Cookie") != cookie {
			t.Errorf("%v", h)
		}
		if h.Get("User-Agent") != userAgent {
			t.Errorf("user agent %q", h.Get("User-Agent"))
		}
	}
	list1 := func() { _, _ = c.V1.ListKeys(t.Context(), nil) }
	list2 := func() { _, _ = c.V2.ListCredentials(t.Context(), nil) }
	reset := func() { _ = c.V2.RequestPasswordReset(t.Context(), v2.EmailRequest{}) }
	is(call(list1), "", "Bearer "+testKey, "")
	is(call(list2), testKey, "", "")
	is(call(reset), "", "", "")
	is(call(func() { login(t, c) }), "", "", "")
	is(call(list2), "", "Bearer access-1", "")
	is(call(list1), "", "Bearer "+testKey, "") // version 1 accepts API keys only
	is(call(reset), "", "", "")
	is(call(func() { _ = c.V2.Logout(t.Context()) }), "", "Bearer access-1", "refreshToken=refresh-1")
	is(call(list2), testKey, "", "")
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	asked := false
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer other.Close()
	server := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer server.Close()
	c, err := New(server.URL, WithAPIKey(testKey))
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.V2.ListCredentials(t.Context(), nil)
	if e, ok := err.(*Error); !ok || e.Status != http.StatusTemporaryRedirect || asked {
		t.Error(err, asked)
	}
}

func TestAGivenHTTPClientIsNotChanged(t *testing.T) {
	n := &wire{answer: always(http.StatusOK)}
	jar := emptyJar{}
	given := &http.Client{Transport: n, Jar: jar}
	c, err := New("https://vault.example.org", WithHTTPClient(given))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.V2.ListCredentials(t.Context(), nil); err != nil || n.all()[0].header.Get("Cookie") != "" {
		t.Error(err, "its cookies are sent")
	}
	if given.Jar != jar || given.CheckRedirect != nil {
		t.Error("it was changed")
	}
}

type emptyJar struct{}

func (emptyJar) SetCookies(*url.URL, []*http.Cookie) {}
func (emptyJar) Cookies(*url.URL) []*http.Cookie {
	return []*http.Cookie{{Name: "refreshToken", Value: "of another program"}}
}

func TestABaseURLMayHaveAPath(t *testing.T) {
	n := &wire{answer: always(http.StatusOK)}
	for _, base := range []string{"https://example.org/lk", "https://example.org/lk/"} {
		c, err := New(base, WithHTTPClient(&http.Client{Transport: n}))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.V2.ListCredentials(t.Context(), nil)
		all := n.all()
		if got := all[len(all)-1].path; got != "/lk/api/v2/vault/list" {
			t.Errorf("%s: %s", base, got)
		}
	}
}

// others lists methods that use the operation of another method's name.
var others = []string{"UnsealCredentialVersion"}

// TestEveryOperationOfTheContractsHasItsMethod calls each method with zero values and compares the
// request with the operation of the same name.
func TestEveryOperationOfTheContractsHasItsMethod(t *testing.T) {
	for name, version := range map[string]struct {
		document string
		methods  func(*Client) any
	}{
		"v1": {openapi.V1(), func(c *Client) any { return c.V1 }},
		"v2": {openapi.V2(), func(c *Client) any { return c.V2 }},
	} {
		t.Run(name, func(t *testing.T) {
			document, err := openapi3.NewLoader().LoadFromData([]byte(version.document))
			if err != nil {
				t.Fatal(err)
			}
			var operations []string
			for path, item := range document.Paths.Map() {
				for method, operation := range item.Operations() {
					id := strings.ToUpper(operation.OperationID[:1]) + operation.OperationID[1:]
					operations = append(operations, id)
					n := &wire{answer: always(http.StatusOK)}
					c := n.client(t)
					c.V2.session.begin("access", "refresh")
					m := reflect.ValueOf(version.methods(c)).MethodByName(id)
					if !m.IsValid() {
						t.Errorf("%s has no method", id)
						continue
					}
					m.Call(arguments(t, m.Type(), "an/id"))
					template := strings.NewReplacer(`\{index\}`, "0", `\{sequence\}`, "0").Replace(regexp.QuoteMeta(path)) // number parameters
					template = regexp.MustCompile(`\\\{[^}]*\\\}`).ReplaceAllString(template, "an%2Fid")
					sent := n.all()
					if len(sent) != 1 || sent[0].method != method || !regexp.MustCompile("^"+template+"$").MatchString(sent[0].escaped) {
						t.Errorf("%s sends %+v, want %s %s", id, sent, method, path)
					}
					if len(sent) == 1 && operation.RequestBody != nil && sent[0].header.Get("Content-Type") != "application/json" {
						t.Errorf("%s sends no JSON", id)
					}
				}
			}
			if len(operations) < 8 {
				t.Fatalf("the contract has only %v", operations)
			}
			methods := reflect.TypeOf(version.methods(&Client{V1: &V1{}, V2: &V2{}}))
			for i := range methods.NumMethod() {
				if id := methods.Method(i).Name; !slices.Contains(operations, id) && !slices.Contains(others, id) {
					t.Errorf("%s is no operation", id)
				}
			}
		})
	}
}

// The contract says which operations may be repeated, for the clients of all languages.
func TestWhatIsRepeatedIsWhatTheContractCallsRepeatable(t *testing.T) {
	for name, version := range map[string]struct {
		document string
		methods  func(*Client) any
	}{
		"v1": {openapi.V1(), func(c *Client) any { return c.V1 }},
		"v2": {openapi.V2(), func(c *Client) any { return c.V2 }},
	} {
		document, err := openapi3.NewLoader().LoadFromData([]byte(version.document))
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range document.Paths.Map() {
			for method, operation := range item.Operations() {
				_, marked := operation.Extensions["x-repeatable"].(bool)
				probes := []string{"getHealth", "getReadiness", "getDiagnosis", "getMetrics"}
				want := (marked || method == http.MethodGet || operation.OperationID == "sealCredential") && !slices.Contains(probes, operation.OperationID)
				synctest.Test(t, func(t *testing.T) {
					n := &wire{answer: always(http.StatusServiceUnavailable)}
					c := n.client(t, WithRetries(1))
					id := strings.ToUpper(operation.OperationID[:1]) + operation.OperationID[1:]
					m := reflect.ValueOf(version.methods(c)).MethodByName(id)
					m.Call(arguments(t, m.Type(), "id"))
					if repeated := len(n.all()) == 2; repeated != want {
						t.Errorf("%s: %s is repeated: %v, want %v", name, id, repeated, want)
					}
				})
			}
		}
	}
}

// A version is requested from the operation that returns the newest one, with the version only in
// the query.
func TestAVersionOfACredentialIsAskedForInTheQuery(t *testing.T) {
	n := &wire{answer: always(http.StatusOK)}
	c := n.client(t)
	for _, err := range []error{
		second(c.V2.UnsealCredential(t.Context(), "an/id")), second(c.V2.UnsealCredentialVersion(t.Context(), "an/id", 7)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for i, query := range []string{"", "version=7"} {
		if s := n.all()[i]; s.method != http.MethodGet || s.escaped != "/api/v2/vault/an%2Fid" || s.query != query || s.body != "" {
			t.Errorf("sends %+v, want the query %q", s, query)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// arguments returns zero values, and id for a string.
func arguments(t *testing.T, method reflect.Type, id string) []reflect.Value {
	t.Helper()
	args := []reflect.Value{reflect.ValueOf(t.Context())}
	for i := 1; i < method.NumIn(); i++ {
		in := method.In(i)
		if method.IsVariadic() && i == method.NumIn()-1 {
			break
		}
		if in.Kind() == reflect.String {
			args = append(args, reflect.ValueOf(id).Convert(in))
			continue
		}
		if in == reflect.TypeFor[*url.URL]() {
			args = append(args, reflect.ValueOf(&url.URL{Scheme: "https", Host: "elsewhere.example.org", Path: "/api/v2/compliance/download"}))
			continue
		}
		args = append(args, reflect.Zero(in))
	}
	return args
}

// Another host may store a report: the request to it contains the URL and nothing that identifies
// the caller.
func TestAReportIsFetchedWithoutACredential(t *testing.T) {
	n := &wire{answer: func(w http.ResponseWriter, r *http.Request, _ int) {
		if r.URL.Query().Get("X-Amz-Signature") != "a+b/c=" {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		_, _ = w.Write([]byte("%PDF"))
	}}
	for _, signedIn := range []bool{false, true} {
		c := n.client(t)
		if signedIn {
			c.V2.session.begin("access", "refresh")
		}
		const signed = "https://bucket.example.org/reports/a%2Fb.pdf?X-Amz-Signature=a%2Bb%2Fc%3D"
		u, err := url.Parse(signed)
		if err != nil {
			t.Fatal(err)
		}
		got, err := c.V2.DownloadReport(t.Context(), u)
		if err != nil || string(got) != "%PDF" {
			t.Errorf("%q, %v", got, err)
		}
		all := n.all()
		s := all[len(all)-1]
		if s.method != http.MethodGet || s.escaped != "/reports/a%2Fb.pdf" || s.query != u.RawQuery || s.body != "" {
			t.Errorf("sends %+v", s)
		}
		for _, name := range []string{"X-API-Key", "Authorization", "Cookie"} {
			if s.header.Get(name) != "" {
				t.Errorf("sends %s", name)
			}
		}
		u.RawQuery = "X-Amz-Signature=x"
		if _, err := c.V2.DownloadReport(t.Context(), u); !errors.Is(err, ErrForbidden) {
			t.Error(err)
		}
	}
	before := len(n.all())
	for _, text := range []string{"", "/api/v2/compliance/download", "ftp://a.example/x", "http://bucket.example.org/x", "https://user:pw@bucket.example.org/x"} {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.client(t).V2.DownloadReport(t.Context(), u); !errors.Is(err, ErrInvalid) || strings.Contains(err.Error(), "pw") {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := n.client(t).V2.DownloadReport(t.Context(), nil); !errors.Is(err, ErrInvalid) || len(n.all()) != before {
		t.Error(err, len(n.all())-before)
	}
	plain := &url.URL{Scheme: "http", Host: "minio", Path: "/x", RawQuery: "X-Amz-Signature=a%2Bb%2Fc%3D"}
	if _, err := n.client(t, WithPlainHTTP()).V2.DownloadReport(t.Context(), plain); err != nil {
		t.Error(err)
	}
}
