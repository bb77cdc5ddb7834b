package compose

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

func parse(t testing.TB, template string) Template {
	t.Helper()
	parsed, err := Parse(template)
	if err != nil {
		t.Fatalf("parsing %q: %v", template, err)
	}
	return parsed
}

func TestRender(t *testing.T) {
	values := map[string]secret.Bytes{"user": secret.Bytes("shop"), "pass": secret.Bytes("p@ss:/w%rd"), "quote": secret.Bytes("a\"b\\c\n\x00é"),
		"bytes": {0xff, 0x00, 0x80}, "empty": {}, "a.b-C_9": secret.Bytes("all"), "placeholder": secret.Bytes("$(user)")}
	for _, c := range []struct {
		template string
		encoding Encoding
		want     string
	}{
		{"", "", ""},
		{"plain", Text, "plain"},
		{"$(user)", "", "shop"},
		{"$(user)$(user)-$(empty)$(a.b-C_9)", Text, "shopshop-all"},
		{"$(bytes)$(pass)", Text, "\xff\x00\x80p@ss:/w%rd"},
		{"postgres://$(user):$(pass)@db:5432/app?x=$(bytes)", URL, "postgres://shop:p%40ss%3A%2Fw%25rd@db:5432/app?x=%FF%00%80"},
		{`{"u":"$(user)","p":"x$(quote)y","n":[1,"$(empty)"]}`, JSON, `{"u":"shop","p":"xa\"b\\c\u000a\u0000éy","n":[1,""]}`},
		{`"$(pass)"`, JSON, `"p@ss:/w%rd"`},
		// A dollar that starts no placeholder, and a value that looks like a placeholder.
		{"$ $$ $user ${user} $)( (user) $", Text, "$ $$ $user ${user} $)( (user) $"},
		{"$$(user) $$(no key $$$(user) $$", Text, "$(user) $(no key $$(user) $$"},
		{"$(placeholder)", Text, "$(user)"},
	} {
		got, err := parse(t, c.template).Render(values, c.encoding)
		if err != nil || string(got) != c.want {
			t.Errorf("%q renders %q, not %q (%v)", c.template, string(got), c.want, err)
		}
		if cap(got) > len(got)+len(got)/4+8 { // the allocator rounds sizes up
			t.Errorf("%q: the buffer is not of the result's size: %d of %d", c.template, len(got), cap(got))
		}
	}
}

func TestKeysAreSortedAndEachOnce(t *testing.T) {
	if got := parse(t, "$(b)$(a)$$(c)$(b)").Keys(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("%v", got)
	}
	if got := parse(t, "text").Keys(); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

func TestMistakesInTemplates(t *testing.T) {
	for template, want := range map[string]string{
		"abc$(":                               "the $( at byte 3;",
		"$(user":                              "the $( at byte 0;",
		"$()":                                 "at byte 0",
		"é$(a b)":                             "at byte 2",
		"$(user $(pass)":                      "at byte 0",
		"$(ü)":                                "at byte 0",
		"$(" + strings.Repeat("a", 254) + ")": "at byte 0",
		"\xff":                                "not UTF-8",
		strings.Repeat("a", maxTemplate+1):    "has 16385 bytes; give it at most 16384",
		"$$$(a" + strings.Repeat("$(a)", 2) + "$(": "at byte 13",
	} {
		_, err := Parse(template)
		if !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), want) {
			t.Errorf("%.20q: %v, not %q", template, err, want)
		}
	}
	parse(t, strings.Repeat("a", maxTemplate))
	parse(t, "$("+strings.Repeat("a", 253)+")")
}

func TestMistakesInRenderingNameTheKeyAndQuoteNothing(t *testing.T) {
	const canary = "tr0ub4dor"
	values := map[string]secret.Bytes{"v": secret.Bytes(canary), "binary": secret.Bytes(canary + "\xff"),
		"large": bytes.Repeat([]byte("a"), maxResult), "wide": bytes.Repeat([]byte("%"), maxResult/3+1)}
	for _, c := range []struct {
		template string
		encoding Encoding
		want     string
	}{
		{"$(v)$(missing)", Text, "needs the data key missing"},
		{"$(v)", "text", "none of Text, URL and JSON"},
		{`{"a":"$(v)$(binary)"}`, JSON, "the data key binary is not UTF-8"},
		{"$(large)$(v)", Text, "more than 262144 bytes"},
		{"$(v)$(large)", Text, "more than 262144 bytes"},
		{"$(large)x", Text, "more than 262144 bytes"},
		{"$(wide)", URL, "more than 262144 bytes"},
		{strings.Repeat("$(large)", 1000), Text, "more than 262144 bytes"},
		// Templates that are not JSON, or have placeholders outside strings.
		{"$(v)", JSON, "inside of a string"},
		{`{"a":$(v)}`, JSON, "inside of a string"},
		{`{"a":1$(v)}`, JSON, "inside of a string"},
		{`["f",f$(v)lse]`, JSON, "inside of a string"},
		{`[1$(v)]`, JSON, "inside of a string"},
		{`{"a":"\$(v)"}`, JSON, "inside of a string"},
		{`{"a":"\u00$(v)"}`, JSON, "inside of a string"},
		{`{"a":"$(v)"`, JSON, "inside of a string"},
		{`{"a":"$(v)"} trailing`, JSON, "inside of a string"},
		{``, JSON, "inside of a string"},
	} {
		got, err := parse(t, c.template).Render(values, c.encoding)
		if got != nil || !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), c.want) {
			t.Errorf("%.40q: %v, not %q", c.template, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), canary) {
			t.Errorf("%.40q: the value is in the message", c.template)
		}
	}
	if got, err := parse(t, "$(large)").Render(values, Text); err != nil || len(got) != maxResult {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// FuzzValues checks for every value: a reader of the text gets back exactly that value, and the
// text around it is unchanged.
func FuzzValues(f *testing.F) {
	userinfo, object := parse(f, "https://$(user):$(v)@host/p?q=$(v)#f"), parse(f, `{"before":1,"v":"$(v)","both":["<$(v)$(user)>"]}`)
	f.Fuzz(func(t *testing.T, value []byte) {
		values := map[string]secret.Bytes{"v": value, "user": secret.Bytes("u")}
		if len(value) > 1000 {
			return
		}
		rendered, err := userinfo.Render(values, URL)
		if err != nil {
			t.Fatal(err)
		}
		u, err := url.Parse(string(rendered))
		if err != nil {
			t.Fatal(err)
		}
		password, _ := u.User.Password()
		if password != string(value) || u.Query().Get("q") != string(value) || u.User.Username() != "u" || u.Host != "host" || u.Path != "/p" || u.Fragment != "f" {
			t.Fatalf("the URL is read as %q", u)
		}

		rendered, err = object.Render(values, JSON)
		if !utf8.Valid(value) {
			if err == nil {
				t.Fatal("JSON with a value that is not UTF-8")
			}
			return
		}
		var got struct {
			Before int
			V      string
			Both   []string
		}
		decoder := json.NewDecoder(bytes.NewReader(rendered))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&got); err != nil || decoder.More() {
			t.Fatalf("the JSON is not read: %v", err)
		}
		if got.Before != 1 || got.V != string(value) || len(got.Both) != 1 || got.Both[0] != "<"+string(value)+"u>" {
			t.Fatalf("the JSON is read as %+v", got)
		}
	})
}

// FuzzParse checks for every template: the rendered text contains the template's text and
// placeholders, and a JSON template renders valid JSON with any values.
func FuzzParse(f *testing.F) {
	f.Fuzz(func(t *testing.T, template string, value []byte) {
		parsed, err := Parse(template)
		if err != nil {
			if !errors.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		if len(value) > 100 {
			return
		}
		names, values := make(map[string]secret.Bytes), make(map[string]secret.Bytes)
		for _, key := range parsed.Keys() {
			names[key], values[key] = secret.Bytes("$("+key+")"), value
		}
		// With each placeholder as its own value, only the escapes of $( differ.
		if got, err := parsed.Render(names, Text); err != nil || string(got) != strings.ReplaceAll(template, "$$(", "$(") {
			t.Fatalf("%q, %v", string(got), err)
		}
		rendered, err := parsed.Render(values, JSON)
		if err == nil && !json.Valid(rendered) {
			t.Fatalf("%q is not JSON", string(rendered))
		}
		if utf8.Valid(value) && (err == nil) != (parsed.Check(JSON) == nil) {
			t.Fatalf("checked differently without values: %v", err)
		}
	})
}

// A pull secret is made from a user name and a password. kubelet does not need the field auth.
func ExampleTemplate_dockerconfigjson() {
	template, err := Parse(`{"auths":{"registry.example.com":{"username":"$(user)","password":"$(password)"}}}`)
	if err != nil {
		panic(err)
	}
	rendered, err := template.Render(map[string]secret.Bytes{"user": secret.Bytes("shop"), "password": secret.Bytes(`s"cret`)}, JSON)
	if err != nil {
		panic(err)
	}
	defer rendered.Zero()
	fmt.Println(string(rendered))
	// Output: {"auths":{"registry.example.com":{"username":"shop","password":"s\"cret"}}}
}
