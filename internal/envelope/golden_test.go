package envelope

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
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

// golden holds one sample of every format. Credential and Key can be made again from Random. Values
// are samples, because HPKE draws its own random bytes.
type golden struct {
	Credential goldenCredential
	Key        goldenKey
	Values     []goldenValue
}

type goldenCredential struct {
	WrappingKey hexBytes
	KeyVersion  uint32
	Context     Context
	Plaintext   string
	Random      hexBytes // seed ‖ r ‖ ML-KEM message ‖ salt ‖ nonce ‖ wrap nonce
	Body, Wrap  hexBytes
}

type goldenKey struct {
	WrappingKey hexBytes
	Context     string
	Key         hexBytes
	Random      hexBytes // salt ‖ nonce
	Blob        hexBytes
}

type goldenValue struct {
	Seed, PublicKey hexBytes
	Header          Header
	Key             string
	SealedAt        time.Time
	Plaintext       string
	Data            hexBytes
}

func loadGolden(t testing.TB) golden {
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
	if len(g.Values) != 6 || len(g.Credential.Body) == 0 || len(g.Key.Blob) == 0 {
		t.Fatal("golden vectors are missing")
	}
	return g
}

func (g *goldenCredential) seal(t testing.TB) (body, wrap []byte) {
	t.Helper()
	var random credentialRandom
	random.set((*[credentialRandomSize]byte)(g.Random))
	credential, wrap, err := sealCredential(g.WrappingKey, g.KeyVersion, g.Context, []byte(g.Plaintext), &random)
	if err != nil {
		t.Fatal(err)
	}
	body, err = credential.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	return body, wrap
}

func (g *goldenCredential) open(body, wrap []byte) ([]byte, error) {
	credential, err := ParseCredential(body)
	if err != nil {
		return nil, err
	}
	return OpenCredential(g.WrappingKey, g.Context, credential, wrap)
}

func (g *goldenKey) seal(t testing.TB) []byte {
	t.Helper()
	blob, err := sealKey(g.WrappingKey, g.Context, g.Key, (*[saltSize + nonceSize]byte)(g.Random))
	if err != nil {
		t.Fatal(err)
	}
	return blob
}

func TestGoldenVectorsAreMadeAgain(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	g := loadGolden(t)
	body, wrap := g.Credential.seal(t)
	if !bytes.Equal(body, g.Credential.Body) || !bytes.Equal(wrap, g.Credential.Wrap) {
		t.Error("sealing the golden credential gave other bytes")
	}
	if !bytes.Equal(g.Key.seal(t), g.Key.Blob) {
		t.Error("sealing the golden key gave other bytes")
	}
}

func TestGoldenVectorsOpen(t *testing.T) {
	g := loadGolden(t)
	if got, err := g.Credential.open(g.Credential.Body, g.Credential.Wrap); err != nil || string(got) != g.Credential.Plaintext {
		t.Errorf("credential: %v", err)
	}
	if got, err := OpenKey(g.Key.WrappingKey, g.Key.Context, g.Key.Blob); err != nil || !bytes.Equal(got, g.Key.Key) {
		t.Errorf("key: %v", err)
	}
	for _, v := range g.Values {
		k, err := ParseSealingKey(v.Header.Suite, v.Seed)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(k.Public().Bytes(), v.PublicKey) || k.Public().ID() != v.Header.KeyID {
			t.Errorf("%s: the seed gives another public key or id", v.Header.Suite)
		}
		if got, err := k.OpenValue(v.Header, v.Key, v.SealedAt, v.Data); err != nil || string(got) != v.Plaintext {
			t.Errorf("value %s %s: %v", v.Header.Suite, v.Header.Scope, err)
		}
	}
}

func TestAChangedByteAnywhereFails(t *testing.T) {
	g := loadGolden(t)
	for i := range g.Credential.Body {
		if _, err := g.Credential.open(flip(g.Credential.Body, i), g.Credential.Wrap); err == nil {
			t.Errorf("credential opened with byte %d of the body changed", i)
		}
	}
	for i := range g.Credential.Wrap {
		if _, err := g.Credential.open(g.Credential.Body, flip(g.Credential.Wrap, i)); err == nil {
			t.Errorf("credential opened with byte %d of the wrap changed", i)
		}
	}
	for i := range g.Key.Blob {
		if _, err := OpenKey(g.Key.WrappingKey, g.Key.Context, flip(g.Key.Blob, i)); err == nil {
			t.Errorf("key opened with byte %d changed", i)
		}
	}
	for _, v := range g.Values {
		if v.Header.Scope != ScopeStrict {
			continue // the scope is not in the data, so one value per suite is enough
		}
		k, err := ParseSealingKey(v.Header.Suite, v.Seed)
		if err != nil {
			t.Fatal(err)
		}
		for i := range v.Data {
			if _, err := k.OpenValue(v.Header, v.Key, v.SealedAt, flip(v.Data, i)); err == nil {
				t.Errorf("%s: value opened with byte %d changed", v.Header.Suite, i)
			}
		}
	}
}

func counting(n int, from byte) hexBytes {
	b := make([]byte, n)
	for i := range b {
		b[i] = from + byte(i)
	}
	return b
}

func writeGolden(t *testing.T) {
	g := golden{
		Credential: goldenCredential{
			WrappingKey: counting(KeySize, 1), KeyVersion: 3, Plaintext: `{"password":"correct horse"}`,
			Context: Context{Tenant: "ten_aaaaaaaaaaaaaaaaaaaaaaaaaa", ID: "cred_bbbbbbbbbbbbbbbbbbbbbbbbbb", Version: 258},
			Random:  counting(credentialRandomSize, 33),
		},
		Key: goldenKey{WrappingKey: counting(KeySize, 2), Context: "ten_aaaaaaaaaaaaaaaaaaaaaaaaaa/mac/1", Key: counting(64, 3), Random: counting(saltSize+nonceSize, 4)},
	}
	g.Credential.Body, g.Credential.Wrap = g.Credential.seal(t)
	g.Key.Blob = g.Key.seal(t)
	for i, suite := range suites {
		seedSize := []int{32, 64}[i]
		for _, scope := range []Scope{ScopeStrict, ScopeNamespace, ScopeCluster} {
			v := goldenValue{Seed: counting(seedSize, 5), Key: "password", SealedAt: testSealedAt, Plaintext: "correct horse"}
			k, err := ParseSealingKey(suite, v.Seed)
			if err != nil {
				t.Fatal(err)
			}
			v.PublicKey = k.Public().Bytes()
			v.Header = Header{suite, k.Public().ID(), scope, "shop", "db", "password"}
			if v.Data, err = k.Public().SealValue(v.Header, v.Key, v.SealedAt, []byte(v.Plaintext)); err != nil {
				t.Fatal(err)
			}
			g.Values = append(g.Values, v)
		}
	}
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
	writeSeeds(t, g)
}

// writeSeeds writes the corpus of every fuzz target: the golden blob, shortened and extended ones,
// and one with another version.
func writeSeeds(t *testing.T, g golden) {
	variants := func(blob []byte) [][]byte {
		return [][]byte{blob, blob[:len(blob)-1], append(bytes.Clone(blob), 0), flip(blob, len(blob)-1), append([]byte{2}, blob[1:]...), blob[:1], {}}
	}
	for i, body := range variants(g.Credential.Body) {
		writeSeed(t, "FuzzParseCredential", i, body)
		writeSeed(t, "FuzzOpenCredential", i, body, []byte(g.Credential.Wrap))
	}
	for i, wrap := range variants(g.Credential.Wrap) {
		writeSeed(t, "FuzzOpenCredential", 10+i, []byte(g.Credential.Body), wrap)
	}
	for i, blob := range variants(g.Key.Blob) {
		writeSeed(t, "FuzzOpenKey", i, blob)
	}
	for n, v := range g.Values {
		hybrid := v.Header.Suite == SuiteMLKEM768X25519
		for i, data := range variants(v.Data) {
			writeSeed(t, "FuzzOpenValue", 10*n+i, hybrid, data)
		}
		if v.Header.Scope == ScopeStrict {
			for i, b := range append(variants(v.PublicKey), variants(v.Seed)...) {
				writeSeed(t, "FuzzParseSealingKeys", 20*n+i, hybrid, b)
			}
		}
	}
}

func writeSeed(t *testing.T, target string, number int, args ...any) {
	t.Helper()
	dir := filepath.Join("testdata", "fuzz", target)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	text := "go test fuzz v1\n"
	for _, arg := range args {
		switch a := arg.(type) {
		case bool:
			text += fmt.Sprintf("bool(%v)\n", a)
		case []byte:
			text += fmt.Sprintf("[]byte(%q)\n", a)
		case hexBytes:
			text += fmt.Sprintf("[]byte(%q)\n", []byte(a))
		default:
			t.Fatalf("no encoding for %T", arg)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("seed-%03d", number)), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
