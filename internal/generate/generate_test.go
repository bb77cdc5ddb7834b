package generate

import (
	"bytes"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
)

func TestRandomTextHasTheLengthAndCharset(t *testing.T) {
	for _, c := range []struct {
		random  Random
		length  int
		charset string
	}{
		{Random{}, 32, "Alphanumeric"},
		{Random{Length: 16, Charset: "Alphanumeric"}, 16, "Alphanumeric"},
		{Random{Length: 4096, Charset: "Hex"}, 4096, "Hex"},
		{Random{Length: 4096, Charset: "Base64URL"}, 4096, "Base64URL"},
		{Random{Length: 4096, Charset: "ASCII"}, 4096, "ASCII"},
	} {
		values, err := Values([]Spec{{Key: "a", Random: &c.random}, {Key: "b", Random: &c.random}})
		if err != nil {
			t.Fatal(err)
		}
		a, b := values["a"], values["b"]
		if len(values) != 2 || len(a) != c.length || len(b) != c.length {
			t.Fatalf("%+v: %d values of %d and %d characters", c.random, len(values), len(a), len(b))
		}
		if bytes.Equal(a, b) {
			t.Errorf("%+v: two values are equal", c.random)
		}
		if strings.Trim(string(a)+string(b), charsets[c.charset]) != "" {
			t.Errorf("%+v: a character is not of the charset", c.random)
		}
	}
}

// Every value of a random byte is equally likely. So the draw has no bias when the characters of a
// charset share the accepted bytes equally.
func TestCharactersAreEquallyLikely(t *testing.T) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	sizes := map[string]int{"Alphanumeric": 62, "Hex": 16, "Base64URL": 64, "ASCII": 94}
	if !slices.Equal(slices.Sorted(maps.Keys(sizes)), slices.Sorted(maps.Keys(charsets))) {
		t.Fatal("the charsets are others than this test knows")
	}
	for name, size := range sizes {
		counts := make(map[byte]int)
		for _, c := range draw(make([]byte, 0, 256), charsets[name], every) {
			counts[c]++
		}
		if len(counts) != size {
			t.Errorf("%s draws %d characters, not %d", name, len(counts), size)
		}
		for c, n := range counts {
			if n != 256/size {
				t.Errorf("%s draws %q of %d bytes, not %d", name, c, n, 256/size)
			}
		}
	}
}

func TestNames(t *testing.T) {
	for _, c := range []struct {
		spec Spec
		want []string
	}{
		{Spec{Key: "password", Random: &Random{}}, []string{"password"}},
		{Spec{Key: "id", KeyPair: &KeyPair{Algorithm: "Ed25519"}}, []string{"id", "id.pub"}},
		{Spec{Key: "id", KeyPair: &KeyPair{Algorithm: "Ed25519", PublicKeyName: "public"}}, []string{"id", "public"}},
	} {
		if got := Names(c.spec); !slices.Equal(got, c.want) {
			t.Errorf("%v, not %v", got, c.want)
			continue
		}
		values, err := Values([]Spec{c.spec})
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.Sorted(maps.Keys(values)); !slices.Equal(got, c.want) {
			t.Errorf("made %v, not %v", got, c.want)
		}
	}
}

func TestMistakesNameTheFieldAndTheRemedy(t *testing.T) {
	random, pair := &Random{}, &KeyPair{Algorithm: "Ed25519"}
	many := func(n int, of func(key string) Spec) (specs []Spec) {
		for i := range n {
			specs = append(specs, of("k"+strconv.Itoa(i)))
		}
		return specs
	}
	for _, c := range []struct {
		specs []Spec
		want  string
	}{
		{nil, "spec.generate: has 0 entries; give it 1 to 64"},
		{many(65, func(k string) Spec { return Spec{Key: k, Random: random} }), "spec.generate: has 65 entries"},
		{many(3, func(k string) Spec { return Spec{Key: k, KeyPair: &KeyPair{Algorithm: "RSA-4096"}} }), "spec.generate: has 3 RSA key pairs; give one object at most 2"},
		{many(64, func(k string) Spec { return Spec{Key: k, Random: &Random{Length: 4096}} }), "spec.generate: makes values of more than 256 KiB in all; make them shorter"},
		{[]Spec{{Key: "a"}}, "spec.generate[0]: needs exactly one of random and keyPair"},
		{[]Spec{{Key: "a", Random: random, KeyPair: pair}}, "spec.generate[0]: needs exactly one"},
		{[]Spec{{Key: "a", Random: random}, {Key: "", Random: random}}, "spec.generate[1].key: give it 1 to 253"},
		{[]Spec{{Key: "a b", Random: random}}, "spec.generate[0].key: give it"},
		{[]Spec{{Key: strings.Repeat("a", 254), Random: random}}, "spec.generate[0].key: give it"},
		{[]Spec{{Key: strings.Repeat("a", 250), KeyPair: pair}}, "spec.generate[0].keyPair.publicKeyName: give it"},
		{[]Spec{{Key: "a", KeyPair: &KeyPair{Algorithm: "Ed25519", PublicKeyName: "a/b"}}}, "spec.generate[0].keyPair.publicKeyName: give it"},
		{[]Spec{{Key: "a", Random: random}, {Key: "a", Random: random}}, "spec.generate[1].key: the data key a is made by another entry too"},
		{[]Spec{{Key: "a", KeyPair: pair}, {Key: "a.pub", Random: random}}, "spec.generate[1].key: the data key a.pub"},
		{[]Spec{{Key: "a", KeyPair: &KeyPair{Algorithm: "Ed25519", PublicKeyName: "a"}}}, "spec.generate[0].keyPair.publicKeyName: the data key a"},
		{[]Spec{{Key: "a", Random: &Random{Length: 15}}}, "spec.generate[0].random.length: is 15; give it 16 to 4096"},
		{[]Spec{{Key: "a", Random: &Random{Length: 4097}}}, "random.length: is 4097"},
		{[]Spec{{Key: "a", Random: &Random{Length: -1}}}, "random.length: is -1"},
		{[]Spec{{Key: "a", Random: &Random{Charset: "hex"}}}, "spec.generate[0].random.charset: give it Alphanumeric"},
		{[]Spec{{Key: "a", KeyPair: &KeyPair{}}}, "spec.generate[0].keyPair.algorithm: give it Ed25519"},
		{[]Spec{{Key: "a", KeyPair: &KeyPair{Algorithm: "RSA-2048"}}}, "keyPair.algorithm: give it"},
	} {
		values, err := Values(c.specs)
		if values != nil || !errors.Is(err, fault.Invalid) || !strings.Contains(fault.Message(err), c.want) {
			t.Errorf("%v %v, not %q", values, err, c.want)
		}
	}
}

func TestOnlyRSAIsHeavy(t *testing.T) {
	light := []Spec{{Key: "a", Random: &Random{}}, {Key: "b", KeyPair: &KeyPair{Algorithm: "ECDSA-P384"}}}
	heavy := append(slices.Clone(light), Spec{Key: "c", KeyPair: &KeyPair{Algorithm: "RSA-3072"}}, Spec{Key: "d", KeyPair: &KeyPair{Algorithm: "RSA-4096"}})
	if Heavy(nil) || Heavy(light) || !Heavy(heavy[:3]) || !Heavy(heavy) || !Heavy(heavy[3:]) {
		t.Error("it is told wrongly what takes long")
	}
	if err := Check(heavy); err != nil {
		t.Error("two RSA key pairs are refused:", err)
	}
}

func TestEveryAlgorithmIsNamedInTheMessage(t *testing.T) {
	_, err := Values([]Spec{{Key: "a", KeyPair: &KeyPair{}}})
	for name := range keyPairs {
		if !strings.Contains(fault.Message(err), name) {
			t.Errorf("%s is missing in %v", name, err)
		}
	}
}

func TestNothingIsLeftWhenAKeyPairFails(t *testing.T) {
	private, public := secret.Bytes("private"), secret.Bytes("public")
	keyPairs["kept"] = func() (secret.Bytes, secret.Bytes, error) { return private, public, nil }
	keyPairs["broken"] = func() (secret.Bytes, secret.Bytes, error) { return nil, nil, errors.New("no luck") }
	defer delete(keyPairs, "kept")
	defer delete(keyPairs, "broken")

	values, err := Values([]Spec{{Key: "a", KeyPair: &KeyPair{Algorithm: "kept"}}, {Key: "b", KeyPair: &KeyPair{Algorithm: "broken"}}})
	if values != nil || err == nil || errors.Is(err, fault.Invalid) {
		t.Fatalf("%v, %v", values, err)
	}
	if !bytes.Equal(private, make([]byte, 7)) || !bytes.Equal(public, make([]byte, 6)) {
		t.Error("a value was left behind")
	}
}
