package transit

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/mlkem"
	"crypto/sha3"
	"crypto/sha512"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
)

// update rewrites testdata from the code. Use it only for a new version of a format, never to make
// a failing test pass.
var update = flag.Bool("update", false, "rewrite the golden ciphertext and the seeds of the fuzz targets")

const goldenFile = "testdata/golden.json"

// golden is a sample. Signing is randomised, so the sample is not made again.
type golden struct {
	Seed, SigningSeed, MACKey string // hexadecimal
	SigningVersion            uint32
	Tenant, KeyID             string
	KeyVersion                uint32
	Data                      string
	Ciphertext                string // joined form, hexadecimal
}

func counting(n int, from byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = from + byte(i)
	}
	return b
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	must(t, err)
	return b
}

func (g *golden) key(t testing.TB) *sealingKey {
	t.Helper()
	kem, err := envelope.NewKEMKey(unhex(t, g.Seed))
	must(t, err)
	signing, err := dualsig.NewKey(g.SigningVersion, unhex(t, g.SigningSeed), unhex(t, g.MACKey))
	must(t, err)
	return &sealingKey{authz.TenantID(g.Tenant), g.KeyID, g.KeyVersion, kem, signing}
}

func loadGolden(t testing.TB) *golden {
	t.Helper()
	b, err := os.ReadFile(goldenFile)
	must(t, err)
	g := new(golden)
	decoder := json.NewDecoder(bytes.NewReader(b))
	decoder.DisallowUnknownFields()
	must(t, decoder.Decode(g))
	return g
}

func writeGolden(t *testing.T) {
	t.Helper()
	g := &golden{
		Seed: hex.EncodeToString(counting(64, 1)), SigningSeed: hex.EncodeToString(counting(32, 2)), MACKey: hex.EncodeToString(counting(64, 3)),
		SigningVersion: 3, Tenant: "ten_aaaaaaaaaaaaaaaaaaaaaaaaaa",
		KeyID: authz.IDFromBytes(idPrefix, [idSize]byte(counting(idSize, 4))), KeyVersion: 258, Data: "correct horse",
	}
	c, err := g.key(t).seal([]byte(g.Data))
	must(t, err)
	b, err := c.MarshalBinary()
	must(t, err)
	g.Ciphertext = hex.EncodeToString(b)
	encoded, err := json.MarshalIndent(g, "", "  ")
	must(t, err)
	must(t, os.MkdirAll(filepath.Dir(goldenFile), 0o755))
	must(t, os.WriteFile(goldenFile, append(encoded, '\n'), 0o644))
	dir := filepath.Join("testdata", "fuzz", "FuzzParseCiphertext")
	must(t, os.MkdirAll(dir, 0o755))
	for i, seed := range [][]byte{b, b[:len(b)-1], append(bytes.Clone(b), 0), flip(b, 0), flip(b, joinedSize), b[:joinedSize+dataFixed], b[:joinedSize], {}} {
		text := fmt.Sprintf("go test fuzz v1\n[]byte(%q)\n", seed)
		must(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("seed-%03d", i)), []byte(text), 0o644))
	}
}

// The golden ciphertext opens with the standard library, another ML-DSA implementation, and the
// bytes of docs/formats.md written out.
func TestCiphertextOpensFromTheDocumentation(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	g := loadGolden(t)
	b := unhex(t, g.Ciphertext)
	if want := 1 + 1088 + 12 + 1 + 16 + 4 + 32 + 32 + 3378 + len(g.Data) + 16; len(b) != want || b[0] != 1 || b[1101] != 1 {
		t.Fatalf("%d bytes, want %d", len(b), want)
	}
	kem, nonce, data := b[1:1089], b[1089:1101], b[1101:]
	header, signature, ciphertext := data[:85], data[85:85+3378], data[85+3378:]
	id := "tkey_" + base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding).EncodeToString(header[1:17])
	if id != g.KeyID || !bytes.Equal(header[17:21], []byte{0, 0, 1, 2}) {
		t.Fatal(id)
	}

	field := func(b []byte) string { return u32(len(b)) + string(b) }
	signed := field([]byte("latticekeep/message/signed/v1")) + field(header) + field([]byte(g.Tenant)) + field(kem) + field(nonce) + field(ciphertext)
	theirs, err := mldsa.NewPrivateKey(mldsa.MLDSA65(), unhex(t, g.SigningSeed))
	must(t, err)
	public := theirs.PublicKey().Bytes()
	keyHash := sha3.Sum256([]byte(field([]byte("ML-DSA-65")) + field(public)))
	framed := field([]byte("latticekeep/dual-signature/v1")) + field([]byte("ML-DSA-65+HMAC-SHA-512")) + field([]byte{0, 0, 0, 3}) +
		field(keyHash[:]) + field([]byte("latticekeep/message/v1")) + field([]byte(signed))
	pqc, tag := signature[5:5+3309], signature[5+3309:]
	verifier, err := mldsa.NewPublicKey(mldsa.MLDSA65(), public)
	must(t, err)
	if err := mldsa.Verify(verifier, []byte(framed), pqc, &mldsa.Options{Context: "latticekeep/message/v1"}); err != nil || !bytes.Equal(signature[:5], []byte{1, 0, 0, 0, 3}) {
		t.Fatal("the ML-DSA-65 signature:", err)
	}
	h := hmac.New(sha512.New, unhex(t, g.MACKey))
	h.Write([]byte(field([]byte("latticekeep/dual-signature/mac/v1")) + field([]byte(framed)) + field(pqc)))
	if !hmac.Equal(h.Sum(nil), tag) {
		t.Fatal("the MAC differs")
	}

	private, err := mlkem.NewDecapsulationKey768(unhex(t, g.Seed))
	must(t, err)
	shared, err := private.Decapsulate(kem)
	must(t, err)
	context := field([]byte(g.Tenant)) + field([]byte(g.KeyID)) + field([]byte{0, 0, 0, 0, 0, 0, 1, 2})
	ekHash := sha3.Sum256(private.EncapsulationKey().Bytes())
	info := field([]byte("latticekeep/message/key/v1")) + context + field(ekHash[:]) + field(kem)
	derived, err := hkdf.Key(sha512.New, shared, header[21:53], info, 64)
	must(t, err)
	if !bytes.Equal(derived[32:], header[53:85]) {
		t.Fatal("the commitment differs")
	}
	block, err := aes.NewCipher(derived[:32])
	must(t, err)
	gcm, err := cipher.NewGCM(block)
	must(t, err)
	plaintext, err := gcm.Open(nil, nonce, ciphertext, []byte(field([]byte("latticekeep/message/data/v1"))+context))
	if err != nil || string(plaintext) != g.Data {
		t.Fatalf("%q, %v", plaintext, err)
	}
}

func u32(n int) string { return string([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}) }

func TestOnlyCiphertextsParse(t *testing.T) {
	b := unhex(t, loadGolden(t).Ciphertext)
	long := append(bytes.Clone(b[:joinedSize+dataFixed]), make([]byte, MaxData)...)
	if _, err := ParseCiphertext(long); err != nil {
		t.Error("the largest:", err)
	}
	for name, bad := range map[string][]byte{
		"nothing": nil, "one byte": {1}, "too long": append(long, 0), "cut": b[:joinedSize+dataFixed-1],
		"another version": append([]byte{2}, b[1:]...), "another version inside": flip(b, joinedSize),
	} {
		if _, err := ParseCiphertext(bad); err == nil {
			t.Errorf("%s: parsed", name)
		}
	}
	for name, c := range map[string]Ciphertext{
		"zero": {}, "no KEM": {Nonce: b[1089:1101], Data: b[1101:]}, "no nonce": {KEM: b[1:1089], Data: b[1101:]},
	} {
		if _, err := c.MarshalBinary(); err == nil {
			t.Errorf("%s: marshalled", name)
		}
	}
}

func FuzzParseCiphertext(f *testing.F) {
	g := loadGolden(f)
	key := g.key(f)
	want, err := ParseCiphertext(unhex(f, g.Ciphertext))
	must(f, err)
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseCiphertext(b)
		if err != nil {
			return
		}
		again, err := c.MarshalBinary()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("parse and marshal changed %d bytes to %d (%v)", len(b), len(again), err)
		}
		s, err := c.parse()
		if err != nil || s.keyID != c.KeyID || !strings.HasPrefix(c.KeyID, "tkey_") || !authz.ValidID(idPrefix, c.KeyID) {
			t.Fatalf("key id %q (%v)", c.KeyID, err)
		}
		joined, err := s.join()
		if err != nil || !bytes.Equal(joined.Data, c.Data) {
			t.Fatalf("taking apart and joining changed it (%v)", err)
		}
		signed, err := s.signed(key.tenant)
		if err != nil {
			t.Fatal(err)
		}
		same := bytes.Equal(c.KEM, want.KEM) && bytes.Equal(c.Nonce, want.Nonce) && bytes.Equal(c.Data, want.Data)
		if key.signing.Verify(messageContext, signed, s.signature) != same {
			t.Fatal("a forgery verifies, or the golden ciphertext does not")
		}
	})
}
