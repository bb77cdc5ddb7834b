package envelope

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/cloudflare/circl/kem/mlkem/mlkem768"
)

const goldenMessageFile = "testdata/message.json"

// goldenMessage can be made again from Random: ML-KEM message ‖ salt ‖ nonce.
type goldenMessage struct {
	Seed      hexBytes
	Context   MessageContext
	Plaintext string
	Random    hexBytes

	Salt, KEM, Commitment, Nonce, Ciphertext hexBytes
}

func (g *goldenMessage) message() *Message {
	return &Message{
		Salt: [saltSize]byte(g.Salt), KEM: g.KEM, Commitment: [commitmentSize]byte(g.Commitment),
		Nonce: [nonceSize]byte(g.Nonce), Ciphertext: g.Ciphertext,
	}
}

func (g *goldenMessage) seal(t testing.TB) *Message {
	t.Helper()
	random := messageRandom(g.Random)
	m, err := mustKEMKey(t, g.Seed).seal(g.Context, []byte(g.Plaintext), &random)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func loadGoldenMessage(t testing.TB) *goldenMessage {
	t.Helper()
	b, err := os.ReadFile(goldenMessageFile)
	if err != nil {
		t.Fatal(err)
	}
	g := new(goldenMessage)
	decoder := json.NewDecoder(bytes.NewReader(b))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(g); err != nil {
		t.Fatal(err)
	}
	return g
}

func writeGoldenMessage(t *testing.T) {
	t.Helper()
	g := &goldenMessage{
		Seed: counting(KEMSeedSize, 6), Random: counting(len(messageRandom{}), 7), Plaintext: "correct horse",
		Context: MessageContext{Tenant: "ten_aaaaaaaaaaaaaaaaaaaaaaaaaa", KeyID: "tkey_cccccccccccccccccccccccccc", Version: 258},
	}
	m := g.seal(t)
	g.Salt, g.KEM, g.Commitment, g.Nonce, g.Ciphertext = m.Salt[:], m.KEM, m.Commitment[:], m.Nonce[:], m.Ciphertext
	b, err := json.MarshalIndent(g, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(goldenMessageFile, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	good := [][]byte{g.KEM, bytes.Join([][]byte{g.Salt, g.Commitment, g.Nonce}, nil), g.Ciphertext}
	for i := range 3 * len(good) {
		parts := [][]byte{good[0], good[1], good[2]}
		part := parts[i%3]
		parts[i%3] = [][]byte{flip(part, len(part)-1), part[:len(part)-1], append(bytes.Clone(part), 0)}[i/3]
		writeSeed(t, "FuzzOpenMessage", i, parts[0], parts[1], parts[2])
	}
	writeSeed(t, "FuzzOpenMessage", 9, good[0], good[1], good[2])
	writeSeed(t, "FuzzOpenMessage", 10, []byte{}, []byte{}, []byte{})
}

func mustKEMKey(t testing.TB, seed []byte) *KEMKey {
	t.Helper()
	k, err := NewKEMKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

var testMessageContext = MessageContext{Tenant: "ten_a", KeyID: "tkey_1", Version: 7}

func mustSealMessage(t testing.TB, k *KEMKey, plaintext []byte) *Message {
	t.Helper()
	m, err := k.Seal(testMessageContext, plaintext)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func messageMustNotOpen(t testing.TB, what string, k *KEMKey, c MessageContext, m *Message) {
	t.Helper()
	if got, err := k.Open(c, m); err != ErrOpen || got != nil {
		t.Errorf("%s: %d bytes, %v; want ErrOpen", what, len(got), err)
	}
}

func TestTheGoldenMessageIsMadeAgainAndOpens(t *testing.T) {
	if *update {
		writeGoldenMessage(t)
	}
	g := loadGoldenMessage(t)
	m := g.seal(t)
	if !bytes.Equal(m.Salt[:], g.Salt) || !bytes.Equal(m.KEM, g.KEM) || !bytes.Equal(m.Commitment[:], g.Commitment) ||
		!bytes.Equal(m.Nonce[:], g.Nonce) || !bytes.Equal(m.Ciphertext, g.Ciphertext) {
		t.Error("sealing the golden message gave other bytes")
	}
	k := mustKEMKey(t, g.Seed)
	if got, err := k.Open(g.Context, g.message()); err != nil || string(got) != g.Plaintext {
		t.Error(err)
	}
	for name, part := range map[string]func(*goldenMessage) *hexBytes{
		"salt":       func(g *goldenMessage) *hexBytes { return &g.Salt },
		"KEM":        func(g *goldenMessage) *hexBytes { return &g.KEM },
		"commitment": func(g *goldenMessage) *hexBytes { return &g.Commitment },
		"nonce":      func(g *goldenMessage) *hexBytes { return &g.Nonce },
		"ciphertext": func(g *goldenMessage) *hexBytes { return &g.Ciphertext },
	} {
		for i := range *part(g) {
			changed := *g
			*part(&changed) = flip(*part(g), i)
			messageMustNotOpen(t, fmt.Sprint("byte ", i, " of the ", name), k, g.Context, changed.message())
		}
	}
}

func TestAMessageOpensToWhatWasSealed(t *testing.T) {
	k := mustKEMKey(t, counting(KEMSeedSize, 1))
	again := mustKEMKey(t, counting(KEMSeedSize, 1))
	for _, n := range []int{0, 1, 16, 1024, 1 << 20} {
		plaintext := make([]byte, n)
		rand.Read(plaintext)
		m := mustSealMessage(t, k, plaintext)
		if len(m.KEM) != KEMCiphertextSize || len(m.Ciphertext) != n+tagSize {
			t.Fatal(len(m.KEM), len(m.Ciphertext))
		}
		if got, err := again.Open(testMessageContext, m); err != nil || !bytes.Equal(got, plaintext) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestMessagesToOneKeyShareNothing(t *testing.T) {
	k := mustKEMKey(t, counting(KEMSeedSize, 1))
	a, b := mustSealMessage(t, k, []byte("same")), mustSealMessage(t, k, []byte("same"))
	if a.Salt == b.Salt || a.Nonce == b.Nonce || a.Commitment == b.Commitment || bytes.Equal(a.KEM, b.KEM) || bytes.Equal(a.Ciphertext, b.Ciphertext) {
		t.Fatal("two messages share a random part")
	}
	for name, mix := range map[string]func(m *Message){
		"salt":       func(m *Message) { m.Salt = b.Salt },
		"KEM":        func(m *Message) { m.KEM = b.KEM },
		"commitment": func(m *Message) { m.Commitment = b.Commitment },
		"nonce":      func(m *Message) { m.Nonce = b.Nonce },
		"ciphertext": func(m *Message) { m.Ciphertext = b.Ciphertext },
		"truncated":  func(m *Message) { m.Ciphertext = m.Ciphertext[:len(m.Ciphertext)-1] },
		"extended":   func(m *Message) { m.Ciphertext = append(bytes.Clone(m.Ciphertext), 0) },
	} {
		mixed := *a
		mix(&mixed)
		messageMustNotOpen(t, name, k, testMessageContext, &mixed)
	}
}

func TestAMessageOpensOnlyForItsKey(t *testing.T) {
	k := mustKEMKey(t, counting(KEMSeedSize, 1))
	m := mustSealMessage(t, k, []byte("value"))
	messageMustNotOpen(t, "another key", mustKEMKey(t, counting(KEMSeedSize, 2)), testMessageContext, m)
	messageMustNotOpen(t, "another tenant", k, MessageContext{"ten_b", "tkey_1", 7}, m)
	messageMustNotOpen(t, "another key id", k, MessageContext{"ten_a", "tkey_2", 7}, m)
	messageMustNotOpen(t, "another version", k, MessageContext{"ten_a", "tkey_1", 8}, m)
	messageMustNotOpen(t, "tenant and id joined elsewhere", k, MessageContext{"ten_atkey", "_1", 7}, m)
}

func TestWrongLengthsOfMessagesAreErrorsNotPanics(t *testing.T) {
	for n := range 130 {
		if _, err := NewKEMKey(make([]byte, n)); (err == nil) != (n == KEMSeedSize) {
			t.Errorf("seed of %d bytes: %v", n, err)
		}
	}
	k := mustKEMKey(t, counting(KEMSeedSize, 1))
	m := mustSealMessage(t, k, []byte("value"))
	messageMustNotOpen(t, "nothing", k, testMessageContext, nil)
	messageMustNotOpen(t, "a zero message", k, testMessageContext, new(Message))
	for _, n := range []int{0, 1, 1087, 1089, 1184} {
		resized := *m
		resized.KEM = make([]byte, n)
		messageMustNotOpen(t, fmt.Sprint("KEM ciphertext of ", n), k, testMessageContext, &resized)
	}
	for _, n := range []int{0, 1, tagSize - 1, maxPlaintext + tagSize + 1} {
		resized := *m
		resized.Ciphertext = make([]byte, n)
		messageMustNotOpen(t, fmt.Sprint("ciphertext of ", n), k, testMessageContext, &resized)
	}
	if _, err := k.Seal(testMessageContext, make([]byte, maxPlaintext+1)); err == nil {
		t.Error("sealed more than the limit")
	}
	for _, zero := range []*KEMKey{nil, {}} {
		if _, err := zero.Seal(testMessageContext, nil); err == nil {
			t.Error("a zero key seals")
		}
		messageMustNotOpen(t, "a zero key", zero, testMessageContext, m)
	}
}

// Every step of opening allocates, so an early return shows as fewer allocations.
func TestAllFailuresOfAMessageDoTheSameWork(t *testing.T) {
	k := mustKEMKey(t, counting(KEMSeedSize, 1))
	m := mustSealMessage(t, k, make([]byte, 1024))
	tampered := func(change func(*Message)) func() error {
		changed := *m
		change(&changed)
		return func() error { _, err := k.Open(testMessageContext, &changed); return err }
	}
	failures := map[string]func() error{
		"context": func() error { _, err := k.Open(MessageContext{"ten_b", "tkey_1", 7}, m); return err },
		"another key": func(other *KEMKey) func() error {
			return func() error { _, err := other.Open(testMessageContext, m); return err }
		}(mustKEMKey(t, counting(KEMSeedSize, 2))),
		"salt":       tampered(func(m *Message) { m.Salt[0] ^= 1 }),
		"KEM":        tampered(func(m *Message) { m.KEM = flip(m.KEM, 0) }),
		"commitment": tampered(func(m *Message) { m.Commitment[31] ^= 1 }),
		"nonce":      tampered(func(m *Message) { m.Nonce[0] ^= 1 }),
		"ciphertext": tampered(func(m *Message) { m.Ciphertext = flip(m.Ciphertext, 0) }),
	}
	allocations := map[string]float64{}
	for name, fail := range failures {
		if err := fail(); err != ErrOpen {
			t.Fatalf("%s: %v", name, err)
		}
		allocations[name] = leastAllocations(func() { _ = fail() })
	}
	for name, n := range allocations {
		if n != allocations["ciphertext"] {
			t.Errorf("%s fails with %v allocations, a tampered ciphertext with %v", name, n, allocations["ciphertext"])
		}
	}
}

// One AES-GCM ciphertext can open under the keys of two messages if one sender made both. Only the
// key with the commitment opens it.
func TestInvisibleSalamanderInAMessage(t *testing.T) {
	k := mustKEMKey(t, counting(KEMSeedSize, 1))
	derived := func(encapsulation byte) (*Message, [KeySize]byte) {
		m := &Message{KEM: make([]byte, mlkem768.CiphertextSize)}
		var ss [mlkem768.SharedKeySize]byte
		k.public.EncapsulateTo(m.KEM, ss[:], counting(mlkem768.EncapsulationSeedSize, encapsulation))
		var key [KeySize]byte
		if err := k.derive(&key, &m.Commitment, &ss, m, testMessageContext); err != nil {
			t.Fatal(err)
		}
		return m, key
	}
	one, keyOne := derived(1)
	two, keyTwo := derived(2)
	one.Ciphertext = twoKeyCiphertext(t, keyOne[:], keyTwo[:], one.Nonce[:], testMessageContext.frame(labelMessageData))
	two.Ciphertext = one.Ciphertext
	for name, m := range map[string]*Message{"one": one, "two": two} { // each is valid, with its own commitment
		if _, err := k.Open(testMessageContext, m); err != nil {
			t.Fatalf("the crafted ciphertext does not open under key %s: %v", name, err)
		}
	}
	two.Commitment = one.Commitment
	messageMustNotOpen(t, "under a key that is not the committed one", k, testMessageContext, two)
}

func TestAKEMKeyIsSafeForConcurrentUse(t *testing.T) {
	k := mustKEMKey(t, counting(KEMSeedSize, 1))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 8 {
				m, err := k.Seal(testMessageContext, fmt.Append(nil, i))
				if err != nil {
					t.Error(err)
					return
				}
				if got, err := k.Open(testMessageContext, m); err != nil || string(got) != fmt.Sprint(i) {
					t.Errorf("%d: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
}

// Only the golden parts open.
func FuzzOpenMessage(f *testing.F) {
	g := loadGoldenMessage(f)
	k := mustKEMKey(f, g.Seed)
	f.Fuzz(func(t *testing.T, kem, fixed, ciphertext []byte) {
		if len(fixed) != saltSize+commitmentSize+nonceSize {
			return
		}
		m := &Message{KEM: kem, Ciphertext: ciphertext}
		rest := fixed[copy(m.Salt[:], fixed):]
		copy(m.Nonce[:], rest[copy(m.Commitment[:], rest):])
		plaintext, err := k.Open(g.Context, m)
		if err != nil {
			if err != ErrOpen || plaintext != nil {
				t.Fatalf("%d bytes with %v", len(plaintext), err)
			}
			return
		}
		golden := g.message()
		if !bytes.Equal(kem, g.KEM) || m.Salt != golden.Salt || m.Commitment != golden.Commitment || m.Nonce != golden.Nonce || !bytes.Equal(ciphertext, g.Ciphertext) {
			t.Fatal("a forgery opened")
		}
	})
}
