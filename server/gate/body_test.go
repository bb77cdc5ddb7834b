package gate

import (
	"errors"
	"net/http"
	"strings"
	"testing"
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

func TestBase64HasOneSpelling(t *testing.T) {
	if b, err := DecodeBase64("AQI="); err != nil || string(b) != "\x01\x02" {
		t.Error(b, err)
	}
	for _, bad := range []string{"AQI", "AQJ=", "AQI=\n", "AQ\nI=", "AQI==", "AQI= ", "_-8="} {
		if b, err := DecodeBase64(bad); err == nil || b != nil {
			t.Errorf("%q: %v", bad, b)
		}
	}
}
