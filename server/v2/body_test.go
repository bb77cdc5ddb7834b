package v2

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func nested(depth int) string { return strings.Repeat("[", depth) + strings.Repeat("]", depth) }

func TestMalformedJSONIsRefused(t *testing.T) {
	for name, body := range map[string]string{
		"not JSON":             `nul`,
		"cut off":              `{"a":{"b":`,
		"blank":                "  \n",
		"trailing value":       `{} {}`,
		"trailing bracket":     `{}}`,
		"trailing NUL":         "{}\x00",
		"byte order mark":      "\xef\xbb\xbf{}",
		"duplicate name":       `{"a":1,"a":1}`,
		"duplicate, escaped":   `{"a":1,"\u0061":1}`,
		"duplicate, nested":    `{"x":{"a":1,"a":1}}`,
		"invalid UTF-8":        "{\"a\":\"\xff\"}",
		"overlong UTF-8":       "{\"a\":\"\xc0\x80\"}",
		"invalid UTF-8 name":   "{\"\xff\":1}",
		"lone high surrogate":  `{"a":"\ud800"}`,
		"lone low surrogate":   `{"a":"\udc00"}`,
		"swapped surrogates":   `{"a":"\udc00\ud800"}`,
		"lone surrogate name":  `{"\ud800":1}`,
		"encoded surrogate":    "{\"a\":\"\xed\xa0\x80\"}",
		"raw NUL":              "{\"a\":\"\x00\"}",
		"raw line feed":        "{\"a\":\"\n\"}",
		"leading zero":         `{"a":01}`,
		"not a number":         `{"a":NaN}`,
		"comment":              `{"a":1/**/}`,
		"trailing comma":       `{"a":1,}`,
		"single quotes":        `{'a':1}`,
		"nested too deeply":    nested(maxDepth + 1),
		"nested far too deep":  strings.Repeat("[", maxBody),
		"deep in an object":    `{"a":` + nested(maxDepth) + `}`,
		"two strings in a row": `"a""b"`,
	} {
		var r *refusal
		if err := checkJSON([]byte(body)); !errors.As(err, &r) || r.status != http.StatusBadRequest {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWellFormedJSONIsAccepted(t *testing.T) {
	for _, body := range []string{
		`{}`, ` {} `, `[]`, `"a"`, `null`, `1e999`, `-0.0`, nested(maxDepth), `{"a":"\u0000\ud83d\ude00"}`, `{"a":{"a":{"a":1}}}`,
	} {
		if err := checkJSON([]byte(body)); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestBodiesOfAnotherSchemaAreInvalid(t *testing.T) {
	for _, body := range []string{
		`null`, `[]`, `"a"`, `1`, `true`,
		`{"name":1}`, `{"name":null}`, `{"name":["a"]}`, `{"name":{}}`,
		`{"values":null}`, `{"values":[]}`, `{"values":"a"}`,
		`{"values":{"k":null}}`, `{"values":{"k":1}}`, `{"values":{"k":{}}}`, `{"values":{"k":["v"]}}`, `{"values":{"k":true}}`,
		`{"ttl_days":null}`, `{"ttl_days":"1"}`, `{"ttl_days":1.5}`, `{"ttl_days":1e999}`, `{"ttl_days":99999999999999999999}`, `{"ttl_days":[1]}`,
	} {
		var r sealRequest
		err := decode([]byte(body), &r)
		if fault.Of(err) != fault.Invalid {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestSchemaErrorsNameOnlyOurOwnFields(t *testing.T) {
	var r sealRequest
	err := decode([]byte(`{"canary-1":1,"values":{"canary-2":9876543}}`), &r)
	if got := fault.Message(err); !strings.HasSuffix(got, "check the type of values") {
		t.Errorf("message %q", got)
	}
	if strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "9876543") {
		t.Errorf("the error quotes the body: %v", err)
	}
}

func TestUnknownFieldsAreIgnoredAndNamesAreCaseSensitive(t *testing.T) {
	var r sealRequest
	if err := decode([]byte(`{"Name":1,"NAME":null,"other":{"a":[null]},"name":"n"}`), &r); err != nil {
		t.Fatal(err)
	}
	if r.Name != "n" {
		t.Errorf("name %q", r.Name)
	}
}

func TestValuesKeepEveryCharacter(t *testing.T) {
	const want = "a\x00\"\\\u2028<\U0001f600\x7f"
	quoted, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var r sealRequest
	if err := decode([]byte(`{"values":{"k":`+string(quoted)+`}}`), &r); err != nil {
		t.Fatal(err)
	}
	if got := string(r.Values["k"]); got != want {
		t.Fatalf("decoded %q", got)
	}
	out, err := json.Marshal(r.Values)
	if err != nil {
		t.Fatal(err)
	}
	var back map[string]string
	if err := json.Unmarshal(out, &back); err != nil || back["k"] != want {
		t.Fatalf("encoded %s: %v", out, err)
	}
}

func TestContentTypeOfABody(t *testing.T) {
	for value, accepted := range map[string]bool{
		"application/json":                          true,
		"Application/JSON":                          true,
		"application/json; charset=utf-8":           true,
		`application/json;charset="UTF-8"`:          true,
		"":                                          false,
		"application/json; charset=utf-16":          false,
		"application/json; charset=":                false,
		"application/json;;;":                       false,
		"text/plain":                                false,
		"text/json":                                 false,
		"application/jsonp":                         false,
		"application/problem+json":                  false,
		"application/x-www-form-urlencoded":         false,
		"application/json, text/plain":              false,
		"application/json; charset=a; charset=b":    false,
		"multipart/form-data; boundary=application": false,
	} {
		err := checkContentType(http.Header{"Content-Type": {value}})
		if (err == nil) != accepted {
			t.Errorf("%q: %v", value, err)
		}
	}
	for _, values := range [][]string{nil, {"application/json", "application/json"}} {
		if checkContentType(http.Header{"Content-Type": values}) == nil {
			t.Errorf("%q accepted", values)
		}
	}
}
