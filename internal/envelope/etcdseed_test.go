package envelope

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"testing"
)

const goldenEtcdFile = "testdata/etcdseed.json"

// goldenEtcdSeed can be made again from Random: ML-KEM message ‖ salt ‖ nonce.
type goldenEtcdSeed struct {
	Algorithm             KEM
	Seed, Secret          hexBytes // both parts of the key
	KeyID                 string
	Plaintext, Random     hexBytes
	Ciphertext, Annotated hexBytes // Annotated is the ML-KEM ciphertext
}

func (g *goldenEtcdSeed) key(t testing.TB) *EtcdKey {
	t.Helper()
	return mustEtcdKey(t, g.Algorithm, g.Seed, g.Secret)
}

func mustEtcdKey(t testing.TB, a KEM, seed, mixed []byte) *EtcdKey {
	t.Helper()
	k, err := NewEtcdKey(a, seed, mixed)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func loadGoldenEtcdSeeds(t testing.TB) []goldenEtcdSeed {
	t.Helper()
	b, err := os.ReadFile(goldenEtcdFile)
	if err != nil {
		t.Fatal(err)
	}
	var all []goldenEtcdSeed
	decoder := json.NewDecoder(bytes.NewReader(b))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&all); err != nil {
		t.Fatal(err)
	}
	if len(all) != 2 || all[0].Algorithm != MLKEM768 || all[1].Algorithm != MLKEM1024 {
		t.Fatal("golden vectors are missing")
	}
	return all
}

func writeGoldenEtcdSeeds(t *testing.T) {
	t.Helper()
	var all []goldenEtcdSeed
	for i, a := range []KEM{MLKEM768, MLKEM1024} {
		g := goldenEtcdSeed{
			Algorithm: a, Seed: counting(KEMSeedSize, 8), Secret: counting(EtcdSecretSize, 9), KeyID: "1-aaaa",
			Plaintext: counting(32, 10), Random: counting(len(messageRandom{}), 11),
		}
		random := messageRandom(g.Random)
		var err error
		if g.Ciphertext, g.Annotated, err = g.key(t).wrap(g.KeyID, g.Plaintext, &random); err != nil {
			t.Fatal(err)
		}
		all = append(all, g)
		last := len(g.Ciphertext) - 1
		for n, parts := range [][2][]byte{
			{g.Ciphertext, g.Annotated},
			{flip(g.Ciphertext, last), g.Annotated}, {g.Ciphertext[:last], g.Annotated}, {flip(g.Ciphertext, 0), g.Annotated},
			{g.Ciphertext, flip(g.Annotated, 0)}, {g.Ciphertext, g.Annotated[1:]}, {{}, {}},
		} {
			writeSeed(t, "FuzzOpenEtcdSeed", 10*i+n, parts[0], parts[1])
		}
	}
	b, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(goldenEtcdFile, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

func etcdSeedMustNotOpen(t testing.TB, what string, k *EtcdKey, keyID string, ciphertext, kem []byte) {
	t.Helper()
	if got, err := k.Open(keyID, ciphertext, kem); err != ErrOpen || got != nil {
		t.Errorf("%s: %d bytes, %v; want ErrOpen", what, len(got), err)
	}
}

func TestTheGoldenEtcdSeedsAreMadeAgainAndOpen(t *testing.T) {
	if *update {
		writeGoldenEtcdSeeds(t)
	}
	for _, g := range loadGoldenEtcdSeeds(t) {
		k, random := g.key(t), messageRandom(g.Random)
		ciphertext, kem, err := k.wrap(g.KeyID, g.Plaintext, &random)
		if err != nil || !bytes.Equal(ciphertext, g.Ciphertext) || !bytes.Equal(kem, g.Annotated) {
			t.Errorf("%s: wrapping the golden seed gave other bytes (%v)", g.Algorithm, err)
		}
		if got, err := k.Open(g.KeyID, g.Ciphertext, g.Annotated); err != nil || !bytes.Equal(got, g.Plaintext) {
			t.Errorf("%s: %v", g.Algorithm, err)
		}
		for i := range g.Ciphertext {
			etcdSeedMustNotOpen(t, fmt.Sprint(g.Algorithm, ": byte ", i, " of the ciphertext"), k, g.KeyID, flip(g.Ciphertext, i), g.Annotated)
		}
		for i := range g.Annotated {
			etcdSeedMustNotOpen(t, fmt.Sprint(g.Algorithm, ": byte ", i, " of the KEM ciphertext"), k, g.KeyID, g.Ciphertext, flip(g.Annotated, i))
		}
	}
}

func TestAnEtcdSeedOpensWithItsKeyAndKeyIDOnly(t *testing.T) {
	seed, mixed := counting(KEMSeedSize, 1), counting(EtcdSecretSize, 2)
	for _, a := range []KEM{MLKEM768, MLKEM1024} {
		k := mustEtcdKey(t, a, seed, mixed)
		ciphertext, kem, err := k.Wrap("1-a", []byte("a seed of kube-apiserver"))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := k.Open("1-a", ciphertext, kem); err != nil || string(got) != "a seed of kube-apiserver" {
			t.Fatalf("%s: %q, %v", a, got, err)
		}
		etcdSeedMustNotOpen(t, "another key id", k, "2-a", ciphertext, kem)
		etcdSeedMustNotOpen(t, "another KEM seed", mustEtcdKey(t, a, counting(KEMSeedSize, 3), mixed), "1-a", ciphertext, kem)
		etcdSeedMustNotOpen(t, "another secret", mustEtcdKey(t, a, seed, counting(EtcdSecretSize, 3)), "1-a", ciphertext, kem)
		etcdSeedMustNotOpen(t, "no KEM ciphertext", k, "1-a", ciphertext, nil)
		etcdSeedMustNotOpen(t, "a longer KEM ciphertext", k, "1-a", ciphertext, append(kem, 0))
		etcdSeedMustNotOpen(t, "a header alone", k, "1-a", ciphertext[:etcdHeader+tagSize-1], kem)
		etcdSeedMustNotOpen(t, "a zero key", new(EtcdKey), "1-a", ciphertext, kem)
	}
}

// Whoever has the public key alone must guess the secret.
func TestAnEtcdSeedThatWasMadeWithThePublicKeyAloneDoesNotOpen(t *testing.T) {
	k := mustEtcdKey(t, MLKEM768, counting(KEMSeedSize, 1), counting(EtcdSecretSize, 2))
	for _, guess := range [][]byte{make([]byte, EtcdSecretSize), bytes.Repeat([]byte{0xff}, EtcdSecretSize), counting(EtcdSecretSize, 3)} {
		forger := *k
		forger.private, forger.secret = nil, [EtcdSecretSize]byte(guess)
		ciphertext, kem, err := forger.Wrap("1-a", counting(32, 4))
		if err != nil {
			t.Fatal(err)
		}
		etcdSeedMustNotOpen(t, "a guessed secret", k, "1-a", ciphertext, kem)
	}
}

func TestAnEtcdSeedFitsIntoKubeAPIServersLimits(t *testing.T) {
	for _, a := range []KEM{MLKEM768, MLKEM1024} {
		k := mustEtcdKey(t, a, counting(KEMSeedSize, 1), counting(EtcdSecretSize, 2))
		ciphertext, kem, err := k.Wrap("1-a", make([]byte, MaxEtcdSeed))
		if err != nil || len(ciphertext) >= 1<<10 || len(kem) >= 32<<10 {
			t.Errorf("%s: %d bytes of ciphertext and %d of KEM ciphertext (%v)", a, len(ciphertext), len(kem), err)
		}
		if _, _, err := k.Wrap("1-a", make([]byte, MaxEtcdSeed+1)); err == nil {
			t.Errorf("%s: a seed of %d bytes was wrapped", a, MaxEtcdSeed+1)
		}
	}
}

func TestAnEtcdKeyIsRefused(t *testing.T) {
	seed, mixed := counting(KEMSeedSize, 1), counting(EtcdSecretSize, 2)
	for name, c := range map[string]struct {
		a           KEM
		seed, mixed []byte
	}{
		"no algorithm":      {"", seed, mixed},
		"ML-KEM-512":        {"ML-KEM-512", seed, mixed},
		"a short seed":      {MLKEM768, seed[1:], mixed},
		"a short secret":    {MLKEM768, seed, mixed[1:]},
		"secret and seed":   {MLKEM1024, mixed, seed},
		"no seed or secret": {MLKEM1024, nil, nil},
	} {
		if k, err := NewEtcdKey(c.a, c.seed, c.mixed); err == nil || k != nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, _, err := new(EtcdKey).Wrap("1-a", seed); err == nil {
		t.Error("a zero key wrapped a seed")
	}
}

func FuzzOpenEtcdSeed(f *testing.F) {
	golden := loadGoldenEtcdSeeds(f)
	f.Fuzz(func(t *testing.T, ciphertext, kem []byte) {
		for _, g := range golden {
			seed, err := g.key(t).Open(g.KeyID, ciphertext, kem)
			switch {
			case err == nil && !(bytes.Equal(ciphertext, g.Ciphertext) && bytes.Equal(kem, g.Annotated)):
				t.Fatal("a forgery opened")
			case err != nil && (err != ErrOpen || seed != nil):
				t.Fatalf("%d bytes with %v", len(seed), err)
			}
		}
	})
}

// A wrong commitment puts zeros in the place of the key. What anybody can encrypt under zeros must not open.
func TestEtcdSeedUnderZerosDoesNotOpen(t *testing.T) {
	k, err := NewEtcdKey(MLKEM768, make([]byte, KEMSeedSize), make([]byte, EtcdSecretSize))
	if err != nil {
		t.Fatal(err)
	}
	ciphertext, encapsulated, err := k.Wrap("1-ab", []byte("a seed"))
	if err != nil {
		t.Fatal(err)
	}
	zeros, err := newGCM(make([]byte, KeySize))
	if err != nil {
		t.Fatal(err)
	}
	forged := append([]byte{}, ciphertext[:etcdHeader]...)
	forged[1+saltSize] ^= 1 // the commitment
	nonce := forged[etcdHeader-nonceSize:]
	forged = append(forged, zeros.Seal(nil, nonce, []byte("planted"), k.frame(labelEtcdData, "1-ab", encapsulated))...)
	if seed, err := k.Open("1-ab", forged, encapsulated); err == nil {
		t.Errorf("it opens as %q", seed)
	}
}
