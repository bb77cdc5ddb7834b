package generate

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/mlkem"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/secret"
)

// update rewrites testdata from the code. Never use it to make a failing test pass.
var update = flag.Bool("update", false, "rewrite the golden key pairs")

// count returns the bytes 0 to n-1, the seed of the examples in appendix C of RFC 9881 and of RFC
// 9935.
func count(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i)
	}
	return b
}

// fixed returns functions that always make the same key pairs, for every algorithm except RSA.
func fixed() map[string]func() (secret.Bytes, secret.Bytes, error) {
	return map[string]func() (secret.Bytes, secret.Bytes, error){
		"Ed25519":    func() (secret.Bytes, secret.Bytes, error) { return ed25519Pair(count(32)) },
		"ML-DSA-65":  func() (secret.Bytes, secret.Bytes, error) { return mlDSA65Pair(count(32)) },
		"ML-KEM-768": func() (secret.Bytes, secret.Bytes, error) { return mlKEM768Pair(count(64)) },
		"ECDSA-P256": func() (secret.Bytes, secret.Bytes, error) {
			return classical(ecdsa.ParseRawPrivateKey(elliptic.P256(), count(32)))
		},
		"ECDSA-P384": func() (secret.Bytes, secret.Bytes, error) {
			return classical(ecdsa.ParseRawPrivateKey(elliptic.P384(), count(48)))
		},
	}
}

// The files of ML-DSA-65 and ML-KEM-768 are the examples of RFC 9881 and RFC 9935.
func TestGoldenKeyPairs(t *testing.T) {
	for name, pair := range fixed() {
		private, public, err := pair()
		if err != nil {
			t.Fatal(err)
		}
		for file, got := range map[string][]byte{name + ".pem": private, name + ".pub.pem": public} {
			path := filepath.Join("testdata", file)
			if *update {
				if err := os.WriteFile(path, got, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if want, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s differs (%v)", file, err)
			}
		}
	}
}

// RSA keys take seconds to make. This is their only test, with the smaller size.
func TestFreshKeyPairsAreReadByTheStandardLibrary(t *testing.T) {
	for _, name := range []string{"Ed25519", "ECDSA-P256", "ECDSA-P384", "RSA-3072"} {
		values, err := Values([]Spec{{Key: "k", KeyPair: &KeyPair{Algorithm: name}}})
		if err != nil {
			t.Fatal(err)
		}
		key, err := x509.ParsePKCS8PrivateKey(decode(t, values["k"], "PRIVATE KEY"))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		public, err := x509.ParsePKIXPublicKey(decode(t, values["k.pub"], "PUBLIC KEY"))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want := key.(crypto.Signer).Public()
		if !want.(interface{ Equal(crypto.PublicKey) bool }).Equal(public) {
			t.Errorf("%s: the public key is not the private one's", name)
		}
		if got := algorithm(key); got != name {
			t.Errorf("%s made a key of %s", name, got)
		}
	}
}

// algorithm returns the name of a key's algorithm as the specification has it.
func algorithm(key any) string {
	switch k := key.(type) {
	case ed25519.PrivateKey:
		return "Ed25519"
	case *ecdsa.PrivateKey:
		return "ECDSA-P" + strconv.Itoa(k.Curve.Params().BitSize)
	case *rsa.PrivateKey:
		return "RSA-" + strconv.Itoa(k.N.BitLen())
	}
	return "another algorithm"
}

// Other implementations derive the same public key from the seed in the file.
func TestFreshSeedsAreReadByOthers(t *testing.T) {
	values, err := Values([]Spec{{Key: "sign", KeyPair: &KeyPair{Algorithm: "ML-DSA-65"}}, {Key: "kem", KeyPair: &KeyPair{Algorithm: "ML-KEM-768"}}})
	if err != nil {
		t.Fatal(err)
	}
	seed := decode(t, values["sign"], "PRIVATE KEY")[len(mlDSA65Header):]
	sign, err := mldsa.NewPrivateKey(mldsa.MLDSA65(), seed)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasSuffix(decode(t, values["sign.pub"], "PUBLIC KEY"), sign.PublicKey().Bytes()) {
		t.Error("ML-DSA-65: the public key is not the seed's")
	}
	kem, err := mlkem.NewDecapsulationKey768(decode(t, values["kem"], "PRIVATE KEY")[len(mlKEM768Header):])
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasSuffix(decode(t, values["kem.pub"], "PUBLIC KEY"), kem.EncapsulationKey().Bytes()) {
		t.Error("ML-KEM-768: the public key is not the seed's")
	}
}

// openssl reads both files, writes the private key as we do, and derives the same public key.
func TestOpenSSLAgrees(t *testing.T) {
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Skip("openssl is not installed: the golden files are not held against it")
	}
	known := 0
	for name, pair := range fixed() {
		private, public, err := pair()
		if err != nil {
			t.Fatal(err)
		}
		run := func(input []byte, args ...string) ([]byte, error) {
			cmd := exec.CommandContext(t.Context(), openssl, append([]string{"pkey"}, args...)...)
			cmd.Stdin = bytes.NewReader(input)
			return cmd.Output()
		}
		again, err := run(private)
		if err != nil && strings.HasPrefix(name, "ML-") {
			continue // this openssl is older than 3.5
		}
		known++
		if err != nil || !strings.HasPrefix(name, "ML-") && !bytes.Equal(again, private) {
			t.Errorf("%s: openssl writes another private key (%v)", name, err)
		}
		if derived, err := run(private, "-pubout"); err != nil || !bytes.Equal(derived, public) {
			t.Errorf("%s: openssl derives another public key (%v)", name, err)
		}
		if _, err := run(public, "-pubin"); err != nil {
			t.Errorf("%s: openssl does not read the public key: %v", name, err)
		}
	}
	if known < 3 {
		t.Errorf("openssl knows %d of %v", known, slices.Sorted(maps.Keys(fixed())))
	}
}

func TestPEMIsThatOfTheStandardLibrary(t *testing.T) {
	for _, n := range []int{1, 47, 48, 49, 96, 1000} {
		got := encodePEM("PRIVATE KEY", count(n))
		want := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: count(n)})
		if !bytes.Equal(got, want) {
			t.Errorf("%d bytes differ", n)
		}
		if n == 1000 && cap(got) > len(got)+8 {
			t.Errorf("the buffer has %d bytes more than needed", cap(got)-len(got))
		}
	}
}

func decode(t *testing.T, file []byte, kind string) []byte {
	t.Helper()
	block, rest := pem.Decode(file)
	if block == nil || block.Type != kind || len(rest) != 0 || len(block.Headers) != 0 {
		t.Fatalf("not one PEM block of type %s", kind)
	}
	return block.Bytes
}
