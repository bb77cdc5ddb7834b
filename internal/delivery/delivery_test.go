package delivery

import (
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const everyKind = `
- {path: password, credential: db, key: password, mode: 0400}
- {path: conf/url, credential: db, encoding: URL, template: "postgres://$(username):$(password)@db/orders"}
- {path: .env, credential: mail, format: env}
- {path: mail, credential: mail}
`

var values = map[string]map[string]secret.Bytes{
	"db":   {"username": secret.Bytes("orders"), "password": secret.Bytes("a/b\n")},
	"mail": {"USER": secret.Bytes("m"), "KEY": {0xc3, 0xa9}},
}

func TestFilesAreMadeOfValues(t *testing.T) {
	p, err := Parse(everyKind, 0o440)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(p.Credentials()); got != "[db mail]" {
		t.Error(got)
	}
	files, err := p.Render(values)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range files {
		got = append(got, fmt.Sprintf("%s %04o %q", f.Path, f.Mode, []byte(f.Content)))
	}
	want := []string{
		`.env 0440 "KEY='é'\nUSER=m\n"`, `conf/url 0440 "postgres://orders:a%2Fb%0A@db/orders"`,
		`mail/KEY 0440 "é"`, `mail/USER 0440 "m"`, `password 0400 "a/b\n"`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	Zero(files)
	if string(values["db"]["password"]) != "a/b\n" {
		t.Error("the files share memory with the values")
	}
}

// A plan that cannot be is refused with the entry and the field.
func TestAPlanSaysWhatIsWrongWithIt(t *testing.T) {
	entry := func(fields string) string { return "- {path: a, credential: c, " + fields + "}" }
	for text, named := range map[string]string{
		``: "is empty",
		"- {path: a/" + strings.Repeat("b", maxPart+1) + ", credential: c}": "files[0].path: a part",
		"- {path: a, credential: c}\n---\n[]":                               "one document",
		`path: a`:                                                           "not YAML of this form",
		`- {path: a, credential: c, mod: "0400"}`:                           "mod",
		`- {credential: c}`:                                                 "files[0].path",
		`- {path: a}`:                                                       "files[0].credential",
		`- {path: /etc/passwd, credential: c}`:                              "files[0].path",
		`- {path: a/../b, credential: c}`:                                   "files[0].path",
		`- {path: ../b, credential: c}`:                                     "files[0].path",
		`- {path: ..data, credential: c}`:                                   "kubelet",
		`- {path: 'a\b', credential: c}`:                                    "files[0].path",
		`- {path: "a\nb", credential: c}`:                                   "files[0].path",
		`- {path: ., credential: c}`:                                        "files[0].path",
		"- {path: a, credential: c}\n- {path: a, credential: d}":            "files[1].path",
		"- {path: a/b, credential: c}\n- {path: a, credential: d}":          "files[1].path",
		"- {path: a, credential: c}\n- {path: a/b, credential: d}":          "files[1].path",
		entry(`mode: "0999"`):                                               "files[0].mode",
		entry(`mode: "04755"`):                                              "files[0].mode",
		entry(`mode: "0200"`):                                               "files[0].mode",
		entry(`key: k, format: env`):                                        "exclude each other",
		entry(`encoding: URL`):                                              "files[0].encoding",
		entry(`format: json`):                                               "files[0].format",
		entry(`template: "$("`):                                             "files[0].template",
		entry(`template: "{$(a)}", encoding: JSON`):                         "files[0].template",
		entry(`template: "x", encoding: XML`):                               "files[0].template",
		strings.Repeat("- {path: a, credential: c}\n", maxEntries+1):        "at most",
	} {
		if _, err := Parse(text, 0o440); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), named) {
			t.Errorf("%.60q: %v, want %s", text, err, named)
		}
	}
}

// A plan is written by whoever has the pod, and read beside those of others.
func TestAPlanTakesLittleMemory(t *testing.T) {
	for _, text := range []string{"- {path: a, credential: c}" + strings.Repeat("\n", maxText), "[" + strings.Repeat("a,", maxText/2-1) + "]"} {
		if _, err := Parse(text, 0o440); fault.Of(err) != fault.Invalid || len(err.Error()) > 1000 {
			t.Errorf("%.60q: %.200v", text, err)
		}
	}
	var text strings.Builder
	for i := range maxEntries {
		fmt.Fprintf(&text, "- {path: f%d, credential: c, format: env}\n", i)
	}
	p, err := Parse(text.String(), 0o440)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Render(map[string]map[string]secret.Bytes{"c": {"K": secret.Bytes(strings.Repeat("x", maxContent/4))}}); err == nil || !strings.Contains(err.Error(), "up to files[3] ") {
		t.Error("more than the room for files is made: ", err)
	}
}

// No file is made when one cannot be, and no error has a value.
func TestRenderMakesAllOrNothing(t *testing.T) {
	for text, named := range map[string]string{
		"- {path: a, credential: db, key: username}\n- {path: b, credential: db, key: none}": "it has password, username",
		`- {path: b, credential: other, key: none}`:                                          "it has none",
		`- {path: b, credential: db, template: "$(none)"}`:                                   "none",
		`- {path: b, credential: dots}`:                                                      `".."`,
		`- {path: b, credential: large}`:                                                     "room for",
		`- {path: b, credential: mail, format: env}`:                                         "",
		`- {path: b, credential: dots, format: env}`:                                         "files[0].format",
	} {
		p, err := Parse(text, 0o440)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]map[string]secret.Bytes{
			"db": values["db"], "mail": values["mail"], "dots": {"..": secret.Bytes("s3cret")},
			"large": {"a": make(secret.Bytes, maxContent), "b": secret.Bytes("s3cret")},
		}
		files, err := p.Render(all)
		if named == "" {
			if err != nil {
				t.Error(err)
			}
			continue
		}
		if fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), named) || strings.Contains(err.Error(), "s3cret") || files != nil {
			t.Errorf("%s: %v %v, want %s", text, files, err, named)
		}
	}
}

// The text names what can be pasted.
func TestADenialSaysWhatToDo(t *testing.T) {
	text := account{"shop", "orders"}.denial("orders-database")
	if want := "kubectl create role unseal-orders-database-orders --namespace shop --verb=unseal --resource=sealedcredentials.latticekeep.dev --resource-name=orders-database && " +
		"kubectl create rolebinding unseal-orders-database-orders --namespace shop --role=unseal-orders-database-orders --serviceaccount=shop:orders"; !strings.HasSuffix(text, want) {
		t.Error(text)
	}
	if text := (account{"shop", "orders"}).denial("it's $HOME"); !strings.Contains(text, `--resource-name='it'\''s $HOME' `) || !strings.Contains(text, "role unseal-2a6de119-orders ") {
		t.Error(text)
	}
}

// Whatever answers in the place of a vault, little of it is kept.
func TestALongAnswerIsNotRead(t *testing.T) {
	chunk := make([]byte, 64<<10)
	var sent atomic.Int64
	endless := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for {
			n, err := w.Write(chunk)
			if sent.Add(int64(n)); err != nil {
				return
			}
		}
	}))
	defer endless.Close()
	s, err := NewServer(endless.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(t.Context(), "t", "db"); fault.Of(err) != fault.Unavailable || !strings.Contains(err.Error(), "it is no vault's") {
		t.Error(err)
	}
}

// A server cannot have the caller wait: in the CSI provider, another one waits behind it.
func TestAReadIsOneAttempt(t *testing.T) {
	var reads atomic.Int32
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		reads.Add(1)
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
	}))
	defer busy.Close()
	s, err := NewServer(busy.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(t.Context(), "t", "db"); fault.Of(err) != fault.Exhausted || reads.Load() != 1 {
		t.Error(err, reads.Load())
	}
}

func TestARefusalNamesWhoseTokenItIs(t *testing.T) {
	s := &Server{url: "https://vault.example.org"}
	for token, want := range map[string]string{
		"e30.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6c2hvcDpvcmRlcnMifQ.c2ln": "ServiceAccount shop/orders", "e30.e30.c2ln": "no ServiceAccount", "": "the API key",
	} {
		for _, status := range []int{http.StatusUnauthorized, http.StatusForbidden} {
			if err := s.explain(&client.Error{Status: status}, "db", token); !strings.Contains(err.Error(), want) {
				t.Errorf("%d to %q: %v", status, token, err)
			}
		}
	}
}

func TestATokenNamesItsAccount(t *testing.T) {
	for token, want := range map[string]account{
		"e30.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6c2hvcDpvcmRlcnMifQ.c2ln": {"shop", "orders"},
		"e30.e30.c2ln": {}, "e30.!.c2ln": {}, "ak_x": {}, "": {},
	} {
		if got := accountOf(token); got != want {
			t.Errorf("%s: %v", token, got)
		}
	}
}

// Whatever the text is, files stay in their folder.
func FuzzParse(f *testing.F) {
	f.Add(everyKind)
	f.Add(`- {path: a, credential: c, template: "$$($(a)"}`)
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse(text, 0o440)
		if err != nil {
			if fault.Of(err) != fault.Invalid {
				t.Fatal(err)
			}
			return
		}
		all := make(map[string]map[string]secret.Bytes)
		for _, name := range p.Credentials() {
			all[name] = map[string]secret.Bytes{"a": secret.Bytes("1"), "..": secret.Bytes("2")}
		}
		files, _ := p.Render(all)
		for _, file := range files {
			if !fs.ValidPath(file.Path) || strings.HasPrefix(file.Path, "..") || file.Mode > 0o777 {
				t.Fatalf("%q %o", file.Path, file.Mode)
			}
		}
	})
}
