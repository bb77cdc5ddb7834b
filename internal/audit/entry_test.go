package audit

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/go-json-experiment/json/jsontext"
)

// sample returns an entry with every field set to plain strings.
func sample() *Entry {
	return &Entry{
		Actor:              Actor{ID: "key_1", Type: "api_key"},
		Attributes:         map[string]string{"digest": "00", "pod_uid": "p", "version": "1"},
		EventType:          CredentialSealed,
		Hash:               strings.Repeat("a", 64),
		KeyID:              strings.Repeat("b", 64),
		Outcome:            Success,
		PreviousHash:       strings.Repeat("c", 64),
		RequestID:          "req",
		Resource:           Resource{ID: "cred_1", Type: CredentialResource},
		Salt:               "AAAAAAAAAAAAAAAAAAAAAA==",
		Sequence:           7,
		Signature:          strings.Repeat("A", 4412),
		SourceIP:           "127.0.0.1",
		TenantID:           string("tenant_a"),
		TenantPreviousHash: ZeroHash,
		TenantSequence:     MaxInteger,
		Timestamp:          "2026-11-21T12:00:00.123456Z",
	}
}

func line(t testing.TB, e *Entry, whole bool) []byte {
	t.Helper()
	b, err := e.Canonical(nil, whole)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The fast parser leaves exactly those strings to the general one that need escapes in JSON or are
// not ASCII.
func TestPlainStringsAreTheirOwnJSON(t *testing.T) {
	for c := range 256 {
		s := "a" + string([]byte{byte(c)})
		quoted, err := jsontext.AppendQuote(nil, s)
		if plain(s) == len(s) && (err != nil || string(quoted) != `"`+s+`"`) {
			t.Errorf("%q is taken for plain", s)
		}
		if c >= ' ' && c <= '~' && c != '"' && c != '\\' && plain(s) != len(s) {
			t.Errorf("%q is not taken for plain", s)
		}
	}
}

func TestTheParserReadsWhatEntriesAreMadeOf(t *testing.T) {
	for _, whole := range []bool{true, false} {
		want := sample()
		if !whole {
			want.Hash, want.Signature = "", ""
		}
		p := parser{text: string(line(t, want, whole))}
		if !p.entry(whole) {
			t.Fatal("it gave up on a plain entry")
		}
		if !reflect.DeepEqual(&p.e, want) {
			t.Errorf("got %+v\nwant %+v", p.e, *want)
		}
	}
	e := sample()
	e.Attributes = map[string]string{}
	if p := (parser{text: string(line(t, e, true))}); !p.entry(true) || p.e.Attributes == nil {
		t.Error("no attributes")
	}
	e.Actor.ID, e.RequestID = "Zoë \u2028", "a\\\"\n\x7f" // strings for the general parser
	got, err := ParseEntry(line(t, e, true))
	if err != nil || !reflect.DeepEqual(got, e) {
		t.Error(got, err)
	}
}

// Both parsers reject every spelling but one.
func TestOneSpellingOfAnEntryIsRead(t *testing.T) {
	good := string(line(t, sample(), true))
	for name, edit := range map[string][2]string{
		"a space":                 {`,"hash"`, `, "hash"`},
		"an escape":               {`"req"`, `"\u0072eq"`},
		"a leading zero":          {`"sequence":7`, `"sequence":07`},
		"a sign":                  {`"sequence":7`, `"sequence":-7`},
		"a fraction":              {`"sequence":7`, `"sequence":7.0`},
		"an exponent":             {`"sequence":7`, `"sequence":7e0`},
		"no number":               {`"sequence":7`, `"sequence":`},
		"a number in quotes":      {`"sequence":7`, `"sequence":"7"`},
		"a large number":          {`9007199254740991`, `9007199254740992`},
		"a larger number":         {`9007199254740991`, `99999999999999999999999`},
		"another order":           {`"id":"key_1","type":"api_key"`, `"type":"api_key","id":"key_1"`},
		"attributes not in order": {`"digest":"00","pod_uid":"p"`, `"pod_uid":"p","digest":"00"`},
		"an attribute twice":      {`"pod_uid":"p"`, `"pod_uid":"p","pod_uid":"p"`},
		"a comma too many":        {`"version":"1"`, `"version":"1",`},
		"a comma at first":        {`{"digest"`, `{,"digest"`},
		"a field too many":        {`,"salt"`, `,"rest":"","salt"`},
		"a field missing":         {`"outcome":"success",`, ``},
		"attributes null":         {`{"digest":"00","pod_uid":"p","version":"1"}`, `null`},
		"another case":            {`"salt"`, `"Salt"`},
		"a control character":     {`"req"`, "\"re\tq\""},
		"not UTF-8":               {`"req"`, "\"re\xffq\""},
		"something after it":      {`Z"}`, `Z"} `},
		"cut":                     {`Z"}`, `Z"`},
	} {
		t.Run(name, func(t *testing.T) {
			bad := strings.Replace(good, edit[0], edit[1], 1)
			if bad == good {
				t.Fatal("nothing was edited")
			}
			if p := (parser{text: bad}); p.entry(true) {
				t.Error("read")
			}
			if _, err := parse([]byte(bad), true); err == nil {
				t.Error("read")
			}
			if _, _, err := ParseWithDigest([]byte(bad)); err == nil {
				t.Error("read")
			}
		})
	}
	for i := range good {
		if _, err := ParseEntry([]byte(good[:i])); err == nil {
			t.Fatalf("read when cut at %d", i)
		}
	}
}

// FuzzParse compares the fast parser with the general one.
func FuzzParse(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, whole bool) {
		want, err := parseAny(b, whole)
		p := parser{text: string(b)}
		if p.entry(whole) {
			if err != nil {
				t.Fatal("read what is not canonical")
			}
			if !reflect.DeepEqual(&p.e, want) {
				t.Fatalf("got %+v\nwant %+v", p.e, *want)
			}
		} else if err == nil && isPlain(b) {
			t.Fatal("gave up on a plain entry")
		}
		if err != nil || !whole {
			return
		}
		got, sum, err := ParseWithDigest(b)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatal(got, err)
		}
		if digest, err := want.Digest(); err != nil || digest != sum {
			t.Fatal("the digest is another one", err)
		}
	})
}

// isPlain reports whether no string of a JSON text needs the general parser.
func isPlain(b []byte) bool {
	return json.Valid(b) && !bytes.ContainsFunc(b, func(r rune) bool { return r < ' ' || r > '~' || r == '\\' })
}

func BenchmarkParse(b *testing.B) {
	e := sample()
	core, whole := line(b, e, false), line(b, e, true)
	b.Run("row", func(b *testing.B) {
		row := slices.Concat([]byte{PlainRow}, make([]byte, 3309), core)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := DecodeStoredEntry(row, nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("line", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, _, err := ParseWithDigest(whole); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("general", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := parseAny(core, false); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := e.Canonical(make([]byte, 0, 1024), false); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func FuzzParseEntry(f *testing.F) {
	f.Fuzz(func(t *testing.T, line []byte) {
		e, err := ParseEntry(line)
		if err != nil {
			return
		}
		again, err := e.JSON()
		if err != nil || !bytes.Equal(again, line) {
			t.Fatal("parse and encode differ", err)
		}
	})
}
