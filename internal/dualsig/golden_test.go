package dualsig

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// update rewrites testdata from the code. Use it only for a new version of a format, never to make
// a failing test pass.
var update = flag.Bool("update", false, "rewrite the golden vectors and the seeds of the fuzz targets")

const goldenFile = "testdata/golden.json"

type hexBytes []byte

func (h hexBytes) MarshalText() ([]byte, error) { return []byte(hex.EncodeToString(h)), nil }

func (h *hexBytes) UnmarshalText(text []byte) (err error) {
	*h, err = hex.DecodeString(string(text))
	return err
}

// golden holds one sample of every format. Signing is randomised, so the test only verifies
// signatures and does not make them again.
type golden struct {
	Seed, MACKey hexBytes
	KeyVersion   uint32
	Context      string
	Message      string
	Dual, Single hexBytes
	PublicKey    hexBytes
	KeyID        string
	PEM          string
}

func loadGolden(t testing.TB) (golden, *Key) {
	t.Helper()
	b, err := os.ReadFile(goldenFile)
	if err != nil {
		t.Fatal(err)
	}
	var g golden
	decoder := json.NewDecoder(bytes.NewReader(b))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&g); err != nil {
		t.Fatal(err)
	}
	k, err := NewKey(g.KeyVersion, g.Seed, g.MACKey)
	if err != nil {
		t.Fatal(err)
	}
	return g, k
}

func TestGoldenVectorsHold(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	g, k := loadGolden(t)
	msg := []byte(g.Message)
	if !bytes.Equal(k.Public().Bytes(), g.PublicKey) || k.Public().ID() != g.KeyID || string(k.Public().MarshalPEM()) != g.PEM {
		t.Error("the seed gives another public key, id or file")
	}
	if parsed, err := ParsePEM([]byte(g.PEM)); err != nil || parsed.ID() != g.KeyID {
		t.Errorf("the public key file: %v", err)
	}
	if !k.Verify(g.Context, msg, g.Dual) {
		t.Error("the dual signature does not verify")
	}
	if !k.Public().Verify(g.Context, msg, g.Single) {
		t.Error("the single signature does not verify")
	}
	flip := func(b []byte, i int) []byte {
		b = bytes.Clone(b)
		b[i] ^= 0x80
		return b
	}
	for i := range g.Dual {
		if k.Verify(g.Context, msg, flip(g.Dual, i)) {
			t.Errorf("the dual signature verifies with byte %d changed", i)
		}
	}
	for i := range g.Single {
		if k.Public().Verify(g.Context, msg, flip(g.Single, i)) {
			t.Errorf("the single signature verifies with byte %d changed", i)
		}
	}
	for i := range msg {
		if k.Verify(g.Context, flip(msg, i), g.Dual) || k.Public().Verify(g.Context, flip(msg, i), g.Single) {
			t.Errorf("a signature verifies with byte %d of the message changed", i)
		}
	}
	for i := range g.PEM {
		if parsed, err := ParsePEM(flip([]byte(g.PEM), i)); err == nil && parsed.ID() == g.KeyID {
			t.Errorf("the file with byte %d changed is the same key", i)
		}
	}
}

func writeGolden(t *testing.T) {
	g := golden{Seed: fill(SeedSize, 1), MACKey: fill(MACKeySize, 2), KeyVersion: 258, Context: recordContext, Message: "message"}
	k, err := NewKey(g.KeyVersion, g.Seed, g.MACKey)
	if err != nil {
		t.Fatal(err)
	}
	g.Dual = mustSign(t, k, g.Context, []byte(g.Message))
	if g.Single, err = k.private.Sign(g.Context, []byte(g.Message)); err != nil {
		t.Fatal(err)
	}
	g.PublicKey, g.KeyID, g.PEM = k.Public().Bytes(), k.Public().ID(), string(k.Public().MarshalPEM())
	b, err := json.MarshalIndent(g, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(goldenFile), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(goldenFile, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	for target, good := range map[string][]byte{
		"FuzzVerifyDual": g.Dual, "FuzzVerifySingle": g.Single, "FuzzParsePublicKey": g.PublicKey, "FuzzParsePEM": []byte(g.PEM),
	} {
		dir := filepath.Join("testdata", "fuzz", target)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		last := bytes.Clone(good)
		last[len(last)-1] ^= 1
		for i, seed := range [][]byte{good, good[:len(good)-1], append(bytes.Clone(good), 0), append([]byte{2}, good[1:]...), last, good[:5], {}} {
			text := fmt.Sprintf("go test fuzz v1\n[]byte(%q)\n", seed)
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("seed-%03d", i)), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}
