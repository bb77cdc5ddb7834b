package record

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/secret"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The golden record must decode for ever to the same fields and the same digest. Its keys are not
// stored anywhere.
func TestTheGoldenRecordDecodes(t *testing.T) {
	text, err := os.ReadFile("testdata/record.hex")
	must(t, err)
	row, err := hex.DecodeString(strings.TrimSpace(string(text)))
	must(t, err)
	r, err := Decode(row)
	must(t, err)
	sealed := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	if r.Tenant != "ten_3uwuw7ddlylqma7ylwr4qht4qy" || r.ID != "cred_fcnqzvug2xgjfhjfx72er2tyi4" || r.Version != 1 || r.Name != "db" || r.Type != "database" || r.TTLDays != 30 ||
		!r.CreatedAt.Equal(sealed) || !r.SealedAt.Equal(sealed) || !r.ExpiresAt.Equal(sealed.AddDate(0, 0, 30)) {
		t.Errorf("%+v", r)
	}
	if got := r.Digest(); got != "21be218a515ae5397199af85a94b65961618332dec3e66b08e3c24a40fb15580" {
		t.Errorf("digest %s", got)
	}
	if string(r.Encode()) != string(row) {
		t.Error("it does not encode to itself")
	}
	if wrapping, signing, err := r.KeyVersions(); err != nil || wrapping != 1 || signing != 1 {
		t.Error(wrapping, signing, err)
	}
}

// The plaintext of a record has one encoding.
func TestTheGoldenValuesEncode(t *testing.T) {
	const want = "01" + "0000000161" + "00000000" + "0000000162" + "0000000200ff"
	if got := hex.EncodeToString(EncodeValues(map[string]secret.Bytes{"b": secret.Bytes("\x00\xff"), "a": {}})); got != want {
		t.Errorf("%s", got)
	}
}

func FuzzDecode(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Decode(b)
		if err != nil {
			return
		}
		if !bytes.Equal(r.Encode(), b) {
			t.Fatal("decode and encode differ")
		}
		_ = r.Digest()
		_, _, _ = r.KeyVersions()
	})
}

func FuzzDecodeValues(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		values, err := decodeValues(b)
		if err == nil && !bytes.Equal(EncodeValues(values), b) {
			t.Fatal("decode and encode differ")
		}
	})
}
