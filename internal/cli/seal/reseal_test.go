package seal

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

// An answer of the server that does not fit the request is refused, and the file stays unchanged.
func TestAnAnswerThatIsNotForTheSameThingsIsRefused(t *testing.T) {
	identity, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
	if err != nil {
		t.Fatal(err)
	}
	newest, err := envelope.GenerateSealingKey(envelope.SuiteMLKEM768X25519)
	if err != nil {
		t.Fatal(err)
	}
	document, err := sealing.Sign(identity, newest.Public(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	published, err := document.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	obj := goldenSealed("db", "password", "user")
	good := func() v2.SealedValues {
		other := goldenSealed("db", "password", "user") // other ciphertexts of the right size
		answer := resealRequest(other).Sealed
		answer.KeyId, answer.Suite = newest.Public().ID(), string(newest.Public().Suite())
		return answer
	}
	if again, err := resealed(obj, good(), newest.Public()); err != nil || again.Spec.Sealed.Scope != v1beta1.ScopeStrict {
		t.Fatal(err)
	}
	value := func(s *v2.SealedValues, f func(*v2.SealedValue)) {
		v := s.Values["password"]
		f(&v)
		s.Values["password"] = v
	}
	for name, change := range map[string]func(*v2.SealedValues){
		"wider":           func(s *v2.SealedValues) { *s.Scope = v2.SealedValuesScopeNamespace },
		"widest":          func(s *v2.SealedValues) { *s.Scope = v2.SealedValuesScopeCluster },
		"another key":     func(s *v2.SealedValues) { s.KeyId = obj.Spec.Sealed.KeyID },
		"another suite":   func(s *v2.SealedValues) { s.Suite = "MLKEM768" },
		"another version": func(s *v2.SealedValues) { s.Version = 2 },
		"a value less":    func(s *v2.SealedValues) { delete(s.Values, "user") },
		"a value more":    func(s *v2.SealedValues) { s.Values["more"] = s.Values["user"] },
		"another data key": func(s *v2.SealedValues) {
			s.Values["usr"] = s.Values["user"]
			delete(s.Values, "user")
		},
		"another time": func(s *v2.SealedValues) {
			value(s, func(v *v2.SealedValue) { v.SealedAt = v.SealedAt.Add(time.Second) })
		},
		"no base64": func(s *v2.SealedValues) { value(s, func(v *v2.SealedValue) { v.Data = "\"\n- x" }) },
		"nothing":   func(s *v2.SealedValues) { value(s, func(v *v2.SealedValue) { v.Data = "" }) },
		"no values": func(s *v2.SealedValues) { s.Values = nil },
	} {
		t.Run(name, func(t *testing.T) {
			answer := good()
			change(&answer)
			mux := http.NewServeMux()
			mux.HandleFunc("GET "+sealingKeyPath, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(published) })
			mux.HandleFunc("POST "+sealingKeyPath+"/reseal", func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				_ = json.NewEncoder(w).Encode(v2.ResealedValues{Success: true, Sealed: answer})
			})
			server := httptest.NewServer(mux)
			defer server.Close()
			path := filepath.Join(t.TempDir(), "m.yaml")
			text := byHand(obj)
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			o := resealOptions{server: command.Server{URL: server.URL, Key: "lk_live_x"}, identity: document.Identity()}
			var out strings.Builder
			if err := o.run(t.Context(), []string{path}, &out, &out); !errors.Is(err, errAnswer) {
				t.Error(err)
			}
			if b, err := os.ReadFile(path); err != nil || string(b) != text || out.Len() > 0 {
				t.Errorf("it is changed: %s", out.String())
			}
		})
	}
}
