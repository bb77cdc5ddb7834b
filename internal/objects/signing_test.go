package objects_test

import (
	"bytes"
	"net/url"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
)

var (
	noon    = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	signing = objects.SigningOptions{
		BaseURL: "https://vault.example.com/api/v2/compliance/download",
		Secret:  bytes.Repeat([]byte{7}, 32),
		Now:     func() time.Time { return noon },
	}
)

const golden = "https://vault.example.com/api/v2/compliance/download?expiry=1795266000&method=GET&obj=reports%2Fa.pdf" +
	"&signature=i8x0sSIBP4_O6_cct1fnjBdE7BrqIuj9Llnezk4n73c"

func parse(t testing.TB, rawURL string) *url.URL {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestASignedURLHasOneForm(t *testing.T) {
	b := open(t, "file://"+t.TempDir(), signing)
	got, err := b.SignedURL(t.Context(), "reports/a.pdf", time.Hour)
	if err != nil || got != golden {
		t.Fatalf("got  %s\nwant %s: %v", got, golden, err)
	}
	// Servers see only the path and the query.
	for _, u := range []string{golden, "/" + "?" + parse(t, golden).RawQuery} {
		if name, err := b.Verify(parse(t, u)); err != nil || name != "reports/a.pdf" {
			t.Errorf("got %q: %v", name, err)
		}
	}
}

func TestASignedURLEndsWithItsLifetime(t *testing.T) {
	now, o := noon, signing
	o.Now = func() time.Time { return now }
	b := open(t, "file://"+t.TempDir(), o)
	for at, good := range map[time.Duration]bool{0: true, time.Hour - time.Second: true, time.Hour: false, 1000 * time.Hour: false} {
		now = noon.Add(at)
		_, err := b.Verify(parse(t, golden))
		if good != (err == nil) {
			t.Errorf("after %s: %v", at, err)
		}
	}
	for _, lifetime := range []time.Duration{-time.Hour, 0, time.Second - 1, 7*24*time.Hour + 1} {
		if _, err := b.SignedURL(t.Context(), "a", lifetime); fault.Of(err) != fault.Invalid {
			t.Errorf("lifetime %s: %v", lifetime, err)
		}
	}
}

// The answer is the same for every alteration.
func TestAnAlteredURLIsForbidden(t *testing.T) {
	b := open(t, "file://"+t.TempDir(), signing)
	alter := func(f func(q url.Values)) string {
		u := parse(t, golden)
		q := u.Query()
		f(q)
		u.RawQuery = q.Encode()
		return u.String()
	}
	set := func(key, value string) string { return alter(func(q url.Values) { q.Set(key, value) }) }
	signature := parse(t, golden).Query().Get("signature")
	cases := map[string]string{
		"nothing":                 "https://vault.example.com/api/v2/compliance/download",
		"another object":          set("obj", "reports/b.pdf"),
		"an object outside":       set("obj", "../a.pdf"),
		"later":                   set("expiry", "1795266001"),
		"an expiry spelt anew":    set("expiry", "+1795266000"),
		"no number":               set("expiry", "never"),
		"another method":          set("method", "DELETE"),
		"a parameter more":        set("versionId", "1"),
		"an empty signature":      set("signature", ""),
		"half a signature":        set("signature", signature[:20]),
		"a longer signature":      set("signature", signature+"A"),
		"a repeated object":       alter(func(q url.Values) { q.Add("obj", "reports/b.pdf") }),
		"a repeated signature":    alter(func(q url.Values) { q.Add("signature", signature) }),
		"a query that is no such": golden + "&%zz",
		"a semicolon":             golden + ";a=b",
	}
	for i := range signature {
		flipped := []byte(signature)
		flipped[i] ^= 1
		cases["the signature at "+string(rune('0'+i))] = set("signature", string(flipped))
	}
	for _, key := range []string{"obj", "expiry", "method", "signature"} {
		cases["without "+key] = alter(func(q url.Values) { q.Del(key) })
	}
	for what, u := range cases {
		name, err := b.Verify(parse(t, u))
		if name != "" || fault.Of(err) != fault.Forbidden || fault.Message(err) != "access denied" {
			t.Errorf("%s: %q %v", what, name, err)
		}
	}
	otherSecret, otherBase := signing, signing
	otherSecret.Secret = bytes.Repeat([]byte{8}, 32)
	otherBase.BaseURL += "s"
	for _, o := range []objects.SigningOptions{otherSecret, otherBase, {}} {
		if _, err := open(t, "file://"+t.TempDir(), o).Verify(parse(t, golden)); fault.Of(err) != fault.Forbidden {
			t.Errorf("with %+v: %v", o, err)
		}
	}
}

func TestSigningOptionsAreStrict(t *testing.T) {
	secret := make([]byte, 32)
	for _, o := range []objects.SigningOptions{
		{BaseURL: "https://a.example/d"}, {Secret: secret}, {BaseURL: "https://a.example/d", Secret: secret[:31]}, {BaseURL: "/d", Secret: secret},
		{BaseURL: "https://a.example/d?x=y", Secret: secret}, {BaseURL: "ftp://a.example/d", Secret: secret}, {BaseURL: "https://u@a.example/d", Secret: secret},
	} {
		if b, err := objects.Open(t.Context(), "file://"+t.TempDir(), o); fault.Of(err) != fault.Invalid {
			t.Errorf("%q with %d bytes: %v", o.BaseURL, len(o.Secret), err)
			if b != nil {
				b.Close()
			}
		}
	}
	b := open(t, "file://"+t.TempDir(), objects.SigningOptions{})
	if _, err := b.SignedURL(t.Context(), "a", time.Hour); fault.Of(err) != fault.Internal {
		t.Errorf("without options: %v", err)
	}
}

// Every accepted URL equals the issued one, parameter for parameter.
func FuzzVerify(f *testing.F) {
	b, err := objects.Open(f.Context(), "file://"+f.TempDir(), signing)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { b.Close() })
	given := parse(f, golden).Query().Encode()
	f.Add(given)
	f.Add("expiry=1795266000&method=GET&obj=a&signature=")
	f.Fuzz(func(t *testing.T, query string) {
		u := &url.URL{Path: "/", RawQuery: query}
		name, err := b.Verify(u)
		if err == nil && (name != "reports/a.pdf" || u.Query().Encode() != given) {
			t.Errorf("accepted %q as %q", query, name)
		}
	})
}
