// Package generate makes the values of a SealedCredential whose secrets are created inside the
// vault, so nobody has ever seen them. The values are random text and key pairs.
//
// Random text is drawn by rejection sampling, so every character of a charset is equally likely.
// Key pairs are PEM files: PKCS#8 for the private key, and SubjectPublicKeyInfo for the public key.
// Private keys of ML-DSA-65 and ML-KEM-768 are seeds (RFC 9881 §6, RFC 9935 §6).
//
// The package is pure except for crypto/rand, and the work of a call is bounded. It zeroes
// everything that it holds of a secret except the result. It cannot zero what the standard library
// keeps of a key internally.
package generate

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// Spec says what to make under a data key: exactly one of Random and KeyPair.
type Spec struct {
	Key     string
	Random  *Random
	KeyPair *KeyPair
}

// Random is text of characters drawn from a charset.
type Random struct {
	Length  int    // number of characters, 16 to 4096; 0 means 32
	Charset string // Alphanumeric (the default), Hex, Base64URL or ASCII
}

// KeyPair is a private key under the data key of its [Spec], and the public key under another data
// key.
type KeyPair struct {
	Algorithm     string // Ed25519, ECDSA-P256, ECDSA-P384, RSA-3072, RSA-4096, ML-DSA-65 or ML-KEM-768
	PublicKeyName string // data key of the public key; by default the private key's with ".pub" appended
}

const (
	maxSpecs   = 64
	maxRSAKeys = 2 // maximum per call: making one takes seconds

	minLength, maxLength, defaultLength = 16, 4096, 32

	// maxTotal is in bytes of data keys and random values, as in the vault. Key pairs are counted only
	// there, when they are made.
	maxTotal = 256 << 10

	defaultCharset = "Alphanumeric"
)

// charsets maps names to characters. ASCII has the printable characters without the space, because
// a space at the beginning or end of a value is easily lost when it is copied.
var charsets = map[string]string{
	defaultCharset: "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789",
	"Hex":          "0123456789abcdef",
	"Base64URL":    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_",
	"ASCII": "!\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`" +
		"abcdefghijklmnopqrstuvwxyz{|}~",
}

var dataKey = regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`)

// Names returns the data keys that s makes. The private key's comes before the public key's.
func Names(s Spec) []string {
	switch {
	case s.KeyPair == nil:
		return []string{s.Key}
	case s.KeyPair.PublicKeyName == "":
		return []string{s.Key, s.Key + ".pub"}
	default:
		return []string{s.Key, s.KeyPair.PublicKeyName}
	}
}

// Values makes the values that specs describe, by data key. A mistake in specs is a [fault.Invalid]
// that names the field and the remedy; then nothing is made. The caller owns the values and zeroes
// them.
func Values(specs []Spec) (map[string]secret.Bytes, error) {
	if err := Check(specs); err != nil {
		return nil, err
	}
	values := make(map[string]secret.Bytes)
	for i, s := range specs {
		names := Names(s)
		if s.Random != nil {
			values[names[0]] = text(*s.Random)
			continue
		}
		private, public, err := keyPairs[s.KeyPair.Algorithm]()
		if err != nil {
			for _, v := range values {
				v.Zero()
			}
			return nil, fmt.Errorf("making key pair of spec.generate[%d]: %w", i, err)
		}
		values[names[0]], values[names[1]] = private, public
	}
	return values, nil
}

// Heavy reports whether making specs keeps a core busy for seconds.
func Heavy(specs []Spec) bool { return slices.ContainsFunc(specs, Spec.isRSA) }

func (s Spec) isRSA() bool {
	return s.KeyPair != nil && strings.HasPrefix(s.KeyPair.Algorithm, "RSA-")
}

// Check returns the first mistake in specs, without making anything. It is a [fault.Invalid] whose
// message is the path of the field, a colon, and the remedy.
func Check(specs []Spec) error {
	if n := len(specs); n < 1 || n > maxSpecs {
		return invalid("spec.generate: has %d entries; give it 1 to %d", n, maxSpecs)
	}
	taken := make(map[string]bool)
	rsaKeys, total := 0, 0
	for i, s := range specs {
		at := fmt.Sprintf("spec.generate[%d]", i)
		if (s.Random == nil) == (s.KeyPair == nil) {
			return invalid("%s: needs exactly one of random and keyPair", at)
		}
		if s.Random != nil {
			if n := s.Random.Length; n != 0 && (n < minLength || n > maxLength) {
				return invalid("%s.random.length: is %d; give it %d to %d characters", at, n, minLength, maxLength)
			}
			if _, ok := charsets[s.Random.charset()]; !ok {
				return invalid("%s.random.charset: give it Alphanumeric, Hex, Base64URL or ASCII", at)
			}
		} else {
			if _, ok := keyPairs[s.KeyPair.Algorithm]; !ok {
				return invalid("%s.keyPair.algorithm: give it Ed25519, ECDSA-P256, ECDSA-P384, RSA-3072, RSA-4096, ML-DSA-65 or ML-KEM-768", at)
			}
			if s.isRSA() {
				rsaKeys++
			}
		}
		for j, name := range Names(s) {
			field := at + ".key"
			if j > 0 {
				field = at + ".keyPair.publicKeyName"
			}
			if !dataKey.MatchString(name) {
				return invalid("%s: give it 1 to 253 letters, digits, '-', '_' or '.'", field)
			}
			if taken[name] {
				return invalid("%s: the data key %s is made by another entry too; give one of them another name", field, name)
			}
			taken[name] = true
			total += len(name)
		}
		if s.Random != nil {
			total += cmp.Or(s.Random.Length, defaultLength)
		}
	}
	if total > maxTotal {
		return invalid("spec.generate: makes values of more than %d KiB in all; make them shorter, or split them over several objects", maxTotal>>10)
	}
	if rsaKeys > maxRSAKeys {
		return invalid("spec.generate: has %d RSA key pairs; give one object at most %d, or use another algorithm", rsaKeys, maxRSAKeys)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fault.New(fault.Invalid, fmt.Sprintf(format, args...))
}

func (r Random) charset() string {
	if r.Charset == "" {
		return defaultCharset
	}
	return r.Charset
}

// text returns random text as r describes it.
func text(r Random) secret.Bytes {
	length := r.Length
	if length == 0 {
		length = defaultLength
	}
	out := make(secret.Bytes, 0, length)
	var random [256]byte
	defer clear(random[:])
	for len(out) < length {
		rand.Read(random[:]) // never fails: crypto/rand ends the program instead
		out = draw(out, charsets[r.charset()], random[:])
	}
	return out
}

// draw fills out up to its capacity with characters of the alphabet, one for each random byte that
// it accepts. It rejects bytes at and above the largest multiple of the alphabet's size. They would
// make the first characters of the alphabet more likely than the others.
func draw(out []byte, alphabet string, random []byte) []byte {
	n := len(alphabet)
	for _, b := range random {
		if len(out) == cap(out) {
			break
		}
		if int(b) < 256-256%n {
			out = append(out, alphabet[int(b)%n])
		}
	}
	return out
}
