package cli

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/api/client"
)

// Somebody who has the public keys verifies a signature without the server and without this program, by RFC 7515
// §5.2 and RFC 9964.
func TestAJWSIsVerifiedWithoutTheServer(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	const payload = "{\"release\": \"1.2.3\"}\n"
	cmd := Command()
	var out bytes.Buffer
	cmd.SetArgs([]string{"sign", "--jws", "--url", server.BaseURL, "--api-key", server.APIKey})
	cmd.SetIn(strings.NewReader(payload))
	cmd.SetOut(&out)
	must(t, cmd.ExecuteContext(t.Context()))
	c, err := client.New(server.BaseURL, client.WithAPIKey(server.APIKey))
	must(t, err)
	keys, err := c.V2.ListPublicKeys(t.Context())
	must(t, err)

	parts := strings.Split(strings.TrimSuffix(out.String(), "\n"), ".")
	if len(parts) != 3 {
		t.Fatal(out.String())
	}
	var decoded [3][]byte
	for i, part := range parts {
		decoded[i], err = base64.RawURLEncoding.Strict().DecodeString(part)
		must(t, err)
	}
	var header struct{ Alg, Kid string }
	must(t, json.Unmarshal(decoded[0], &header))
	if header.Alg != "ML-DSA-65" || header.Kid != keys.Keys[0].Kid || string(decoded[1]) != payload {
		t.Errorf("%s %s", decoded[0], decoded[1])
	}
	public, err := base64.RawURLEncoding.DecodeString(keys.Keys[0].Pub)
	must(t, err)
	key, err := mldsa.NewPublicKey(mldsa.MLDSA65(), public)
	must(t, err)
	must(t, mldsa.Verify(key, []byte(parts[0]+"."+parts[1]), decoded[2], &mldsa.Options{}))
	if mldsa.Verify(key, []byte(parts[0]+"."+parts[1]+"A"), decoded[2], &mldsa.Options{}) == nil {
		t.Error("another payload has this signature, too")
	}
}
