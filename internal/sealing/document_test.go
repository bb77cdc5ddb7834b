package sealing

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
)

// goldenKeys returns the keys of the golden files. The seed of the sealing key (suite
// MLKEM768-X25519) is the bytes 0 to 31, and the seed of the identity is 64 to 95.
func goldenKeys(t testing.TB) (*dualsig.PrivateKey, *envelope.SealingKey) {
	t.Helper()
	key, err := envelope.ParseSealingKey(envelope.SuiteMLKEM768X25519, count(0))
	if err != nil {
		t.Fatal(err)
	}
	return newIdentity(t, 64), key
}

func newIdentity(t testing.TB, first byte) *dualsig.PrivateKey {
	t.Helper()
	identity, err := dualsig.NewPrivateKey(count(first))
	if err != nil {
		t.Fatal(err)
	}
	return identity
}

// count returns 32 bytes that count up from first.
func count(first byte) []byte {
	b := make([]byte, 32)
	for i := range b {
		b[i] = first + byte(i)
	}
	return b
}

var goldenTime = time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC)

func golden(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGoldenDocument(t *testing.T) {
	identity, key := goldenKeys(t)
	b := golden(t, "document.json")
	d, err := ParseDocument(b)
	if err != nil {
		t.Fatal(err)
	}
	if d.Key().ID() != key.Public().ID() || !d.CreatedAt().Equal(goldenTime) || d.Identity() != identity.Public().ID() {
		t.Fatalf("other content: key %s, created %s, identity %s", d.Key().ID(), d.CreatedAt(), d.Identity())
	}
	const fingerprint = "12563f9da1f9677066fab3ef1e9b6c3e41db3468b345c72c9bcdd64781d458da"
	if d.Identity() != fingerprint {
		t.Fatalf("identity %s, not %s", d.Identity(), fingerprint)
	}
	again, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(append(again, '\n'), b) {
		t.Fatal("parse and marshal is not the identity")
	}
}

func TestSignedDocumentIsRead(t *testing.T) {
	identity := newIdentity(t, 1)
	for _, suite := range []envelope.Suite{envelope.SuiteMLKEM768X25519, envelope.SuiteMLKEM768} {
		key, err := envelope.GenerateSealingKey(suite)
		if err != nil {
			t.Fatal(err)
		}
		d, err := Sign(identity, key.Public(), goldenTime.Add(time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.MarshalIndent(d, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		got, err := ParseDocument(b)
		if err != nil {
			t.Fatalf("%s, indented: %v", suite, err)
		}
		if got.Key().ID() != key.Public().ID() || got.Key().Suite() != suite || !got.CreatedAt().Equal(goldenTime) {
			t.Fatalf("%s: other content", suite)
		}
	}
}

func TestEmptyDocumentIsNotWritten(t *testing.T) {
	if b, err := json.Marshal(Document{}); err == nil {
		t.Fatalf("wrote %s", b)
	}
}

func TestChangedDocumentIsRefused(t *testing.T) {
	doc := string(golden(t, "document.json"))
	other, err := Sign(newIdentity(t, 2), mustGenerate(t).Public(), goldenTime)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := json.Marshal(other)
	if err != nil {
		t.Fatal(err)
	}
	field := func(doc, name string) string {
		_, rest, _ := strings.Cut(doc, `"`+name+`":"`)
		value, _, _ := strings.Cut(rest, `"`)
		return value
	}
	with := func(name string) string { // the golden document with one field of the foreign one
		return strings.Replace(doc, field(doc, name), field(string(foreign), name), 1)
	}
	for name, tc := range map[string]struct{ doc, want string }{
		"empty":                {"", "decoding"},
		"not json":             {"age1pq", "decoding"},
		"null":                 {"null", "version 0"},
		"too large":            {doc + strings.Repeat(" ", MaxDocumentBytes), "at most"},
		"unknown field":        {strings.Replace(doc, `{"version"`, `{"success":true,"version"`, 1), "unknown field"},
		"duplicate field":      {strings.Replace(doc, `{"version":1,`, `{"version":1,"version":1,`, 1), "changed"},
		"other spelling":       {strings.Replace(doc, `"suite"`, `"Suite"`, 1), "changed"},
		"other order":          {strings.Replace(strings.Replace(doc, `"version":1,`, "", 1), `,"signature"`, `,"version":1,"signature"`, 1), "changed"},
		"second value":         {doc + "{}", "decoding"},
		"version":              {strings.Replace(doc, `"version":1`, `"version":2`, 1), "version 2"},
		"suite":                {strings.Replace(doc, "MLKEM768-X25519", "MLKEM768", 1), "public_key"},
		"unknown suite":        {strings.Replace(doc, "MLKEM768-X25519", "RSA", 1), "public_key"},
		"key id":               {with("key_id"), "key_id"},
		"public key":           {with("public_key"), "key_id"},
		"both":                 {strings.Replace(with("public_key"), field(doc, "key_id"), field(string(foreign), "key_id"), 1), "signature"},
		"created at":           {strings.Replace(doc, "10:30:00", "10:30:01", 1), "signature"},
		"created at fraction":  {strings.Replace(doc, "10:30:00", "10:30:00.5", 1), "created_at"},
		"created at zone":      {strings.Replace(doc, "10:30:00Z", "10:30:00+00:00", 1), "created_at"},
		"algorithm":            {strings.Replace(doc, "ML-DSA-65", "ML-DSA-44", 1), "algorithm"},
		"signature of another": {with("signature"), "signature"},
		"short signature":      {strings.Replace(doc, field(doc, "signature"), "AAAA", 1), "signature"},
		"no signature":         {strings.Replace(doc, `,"signature":"`+field(doc, "signature")+`"`, "", 1), "changed"},
		"lenient base64":       {strings.Replace(doc, field(doc, "signature"), `\n`+field(doc, "signature"), 1), "changed"},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.doc == doc {
				t.Fatal("the case changes nothing")
			}
			_, err := ParseDocument([]byte(tc.doc))
			if err == nil {
				t.Fatal("accepted")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("%v does not speak of %s", err, tc.want)
			}
		})
	}
}

func TestEveryBitOfADocumentCounts(t *testing.T) {
	doc := golden(t, "document.json")
	doc = bytes.TrimSpace(doc)
	for i := 0; i < len(doc); i += 7 {
		b := bytes.Clone(doc)
		b[i] ^= 1
		if _, err := ParseDocument(b); err == nil {
			t.Fatalf("accepted with a bit of byte %d flipped", i)
		}
	}
}

func TestOnlyThePinnedIdentityIsTrusted(t *testing.T) {
	d, err := ParseDocument(golden(t, "document.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := d.CheckIdentity(d.Identity()); err != nil {
		t.Fatal(err)
	}
	err = d.CheckIdentity(newIdentity(t, 3).Public().ID())
	if err == nil || !strings.Contains(err.Error(), d.Identity()) || !strings.Contains(err.Error(), "operator") {
		t.Fatalf("a foreign identity: %v", err)
	}
	for _, pin := range []string{"", "abc", d.Identity()[:63], d.Identity() + "0", strings.ToUpper(d.Identity()), " " + d.Identity()} {
		if err := d.CheckIdentity(pin); err == nil || !strings.Contains(err.Error(), "64 lower-case") {
			t.Fatalf("pin %q: %v", pin, err)
		}
	}
}

func FuzzParseDocument(f *testing.F) {
	f.Add(golden(f, "document.json"))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := ParseDocument(b)
		if err != nil {
			return
		}
		again, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		var compact bytes.Buffer
		if err := json.Compact(&compact, b); err != nil || !bytes.Equal(compact.Bytes(), again) {
			t.Fatalf("parse and marshal is not the identity: %v", err)
		}
	})
}

func mustGenerate(t testing.TB) *envelope.SealingKey {
	t.Helper()
	key, err := envelope.GenerateSealingKey(envelope.SuiteMLKEM768X25519)
	if err != nil {
		t.Fatal(err)
	}
	return key
}
