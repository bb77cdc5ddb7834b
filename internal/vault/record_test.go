package vault

import (
	"encoding/hex"
	"os"
	"strings"
	"testing"
	"time"
)

// The golden record must decode for ever to the same fields and the same digest. Its keys are not
// stored anywhere.
func TestTheGoldenRecordDecodes(t *testing.T) {
	text, err := os.ReadFile("testdata/record.hex")
	must(t, err)
	row, err := hex.DecodeString(strings.TrimSpace(string(text)))
	must(t, err)
	r, err := decodeRecord(row)
	must(t, err)
	sealed := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	if r.tenant != "ten_3uwuw7ddlylqma7ylwr4qht4qy" || r.id != "cred_fcnqzvug2xgjfhjfx72er2tyi4" || r.version != 1 || r.name != "db" || r.kind != "database" || r.ttlDays != 30 ||
		!r.createdAt.Equal(sealed) || !r.sealedAt.Equal(sealed) || !r.expiresAt.Equal(sealed.AddDate(0, 0, 30)) {
		t.Errorf("%+v", r.credential(sealed, false))
	}
	if got := r.digest(); got != "21be218a515ae5397199af85a94b65961618332dec3e66b08e3c24a40fb15580" {
		t.Errorf("digest %s", got)
	}
	if string(r.encode()) != string(row) {
		t.Error("it does not encode to itself")
	}
	if wrapping, signing, err := r.keyVersions(); err != nil || wrapping != 1 || signing != 1 {
		t.Error(wrapping, signing, err)
	}
}

// The plaintext of a record has one encoding.
func TestTheGoldenValuesEncode(t *testing.T) {
	const want = "01" + "0000000161" + "00000000" + "0000000162" + "0000000200ff"
	if got := hex.EncodeToString(encodeValues(secrets(map[string]string{"b": "\x00\xff", "a": ""}))); got != want {
		t.Errorf("%s", got)
	}
}
