package secret

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

func TestBytesRedactThemselves(t *testing.T) {
	const canary = "tr0ub4dor"
	b := Bytes(canary)
	nested := struct{ V map[string]Bytes }{map[string]Bytes{"k": b}}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%08b"} {
		fmt.Fprintf(&out, verb, b)
		fmt.Fprintf(&out, verb, nested)
	}
	slog.New(slog.NewJSONHandler(&out, nil)).Info("m", "v", b, "n", nested)
	slog.New(slog.NewTextHandler(&out, nil)).Info("m", "v", b, "n", nested)
	j, err := json.Marshal(nested)
	if err != nil {
		t.Fatal(err)
	}
	out.Write(j)
	hexed := fmt.Sprintf("%x", canary)
	if s := out.String(); strings.Contains(s, canary) || strings.Contains(strings.ToLower(s), hexed) || strings.Contains(s, "116 114 48") {
		t.Fatalf("the secret leaked: %s", s)
	}
	b.Zero()
	if !bytes.Equal(b, make([]byte, len(canary))) {
		t.Fatal("Zero left something")
	}
}
