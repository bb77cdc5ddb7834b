package envelope

import (
	"bytes"
	"crypto/hpke"
	"encoding/hex"
	"fmt"
	"testing"
	"time"
)

var (
	suites       = []Suite{SuiteMLKEM768X25519, SuiteMLKEM768}
	testSealedAt = time.Date(2026, 9, 1, 12, 0, 0, 0, time.UTC)
)

func mustGenerate(t testing.TB, s Suite) (*SealingKey, Header) {
	t.Helper()
	k, err := GenerateSealingKey(s)
	if err != nil {
		t.Fatal(err)
	}
	return k, Header{Suite: s, KeyID: k.Public().ID(), Scope: ScopeStrict, Namespace: "shop", Name: "db", CredentialType: "password"}
}

func mustSealValue(t testing.TB, k *SealingKey, h Header, plaintext string) []byte {
	t.Helper()
	data, err := k.Public().SealValue(h, "password", testSealedAt, []byte(plaintext))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestSuitesAreFrozenByID(t *testing.T) {
	for suite, want := range map[Suite]struct {
		kem               uint16
		public, enc, seed int
	}{
		SuiteMLKEM768X25519: {0x647a, 1216, 1120, 32},
		SuiteMLKEM768:       {0x0041, 1184, 1088, 64},
	} {
		kem, encSize, err := suite.kem()
		if err != nil || kem.ID() != want.kem || encSize != want.enc {
			t.Errorf("%s: KEM %#04x, enc %d, %v", suite, kem.ID(), encSize, err)
		}
		k, _ := mustGenerate(t, suite)
		seed, err := k.Bytes()
		if err != nil || len(seed) != want.seed || len(k.Public().Bytes()) != want.public {
			t.Errorf("%s: seed %d, public key %d bytes, %v", suite, len(seed), len(k.Public().Bytes()), err)
		}
	}
	kdf, aead, err := kdfAndAEAD()
	if err != nil || kdf.ID() != 0x0003 || aead.ID() != 0x0002 {
		t.Errorf("KDF %#04x, AEAD %#04x, %v", kdf.ID(), aead.ID(), err)
	}
	if kdf.ID() != hpke.HKDFSHA512().ID() || aead.ID() != hpke.AES256GCM().ID() {
		t.Error("the identifiers are not those of HKDF-SHA-512 and AES-256-GCM")
	}
	for _, s := range []Suite{"", "mlkem768", "MLKEM1024", "MLKEM768-P256"} {
		if _, err := GenerateSealingKey(s); err == nil {
			t.Errorf("generated a key for suite %q", s)
		}
		if _, err := ParseSealingKey(s, make([]byte, 64)); err == nil {
			t.Errorf("parsed a key for suite %q", s)
		}
		if _, err := ParseSealingPublicKey(s, make([]byte, 1184)); err == nil {
			t.Errorf("parsed a public key for suite %q", s)
		}
	}
}

func TestValueOpensToWhatWasSealed(t *testing.T) {
	for _, suite := range suites {
		k, h := mustGenerate(t, suite)
		seed, err := k.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		private, err := ParseSealingKey(suite, seed)
		if err != nil {
			t.Fatal(err)
		}
		public, err := ParseSealingPublicKey(suite, k.Public().Bytes())
		if err != nil || public.ID() != private.Public().ID() || public.Suite() != suite || !bytes.Equal(public.Bytes(), private.Public().Bytes()) {
			t.Fatalf("%s: the parsed keys do not match: %v", suite, err)
		}
		for _, n := range []int{0, 1, 4096} {
			plaintext := bytes.Repeat([]byte{7}, n)
			data, err := public.SealValue(h, "password", testSealedAt, plaintext)
			if err != nil {
				t.Fatal(err)
			}
			_, encSize, _ := suite.kem()
			if want := 1 + encSize + n + 16; len(data) != want || data[0] != 1 {
				t.Errorf("%s: %d bytes sealed to %d, want %d, version %d", suite, n, len(data), want, data[0])
			}
			got, err := private.OpenValue(h, "password", testSealedAt.In(time.FixedZone("", 3600)), data)
			if err != nil || !bytes.Equal(got, plaintext) {
				t.Errorf("%s: opened to %d bytes, %v", suite, len(got), err)
			}
		}
	}
}

func TestZeroingTheExportedSeedLeavesTheKey(t *testing.T) {
	for _, suite := range suites {
		k, h := mustGenerate(t, suite)
		first, _ := k.Bytes()
		input := bytes.Clone(first)
		parsed, err := ParseSealingKey(suite, input)
		if err != nil {
			t.Fatal(err)
		}
		clear(input)
		want := bytes.Clone(first)
		first.Zero()
		for _, key := range []*SealingKey{k, parsed} {
			if again, _ := key.Bytes(); !bytes.Equal(again, want) {
				t.Errorf("%s: the key lost its seed", suite)
			}
			if got, err := key.OpenValue(h, "password", testSealedAt, mustSealValue(t, k, h, "v")); err != nil || string(got) != "v" {
				t.Errorf("%s: %v", suite, err)
			}
		}
		public := k.Public().Bytes()
		clear(public)
		if bytes.Equal(k.Public().Bytes(), public) {
			t.Errorf("%s: the public key shares its memory", suite)
		}
	}
}

func TestValueOpensOnlyWhereItBelongs(t *testing.T) {
	for _, suite := range suites {
		k, h := mustGenerate(t, suite)
		other, otherHeader := mustGenerate(t, suite)
		otherSuite := SuiteMLKEM768
		if suite == otherSuite {
			otherSuite = SuiteMLKEM768X25519
		}
		data := mustSealValue(t, k, h, "value")
		with := func(change func(*Header)) Header {
			changed := h
			change(&changed)
			return changed
		}
		for name, c := range map[string]struct {
			k    *SealingKey
			h    Header
			key  string
			at   time.Time
			data []byte
		}{
			"another name":               {k, with(func(h *Header) { h.Name = "db2" }), "password", testSealedAt, data},
			"another namespace":          {k, with(func(h *Header) { h.Namespace = "other" }), "password", testSealedAt, data},
			"namespace and name shifted": {k, with(func(h *Header) { h.Namespace, h.Name = "sho", "pdb" }), "password", testSealedAt, data},
			"another credential type":    {k, with(func(h *Header) { h.CredentialType = "token" }), "password", testSealedAt, data},
			"scope widened to Namespace": {k, with(func(h *Header) { h.Scope = ScopeNamespace }), "password", testSealedAt, data},
			"scope widened to Cluster":   {k, with(func(h *Header) { h.Scope = ScopeCluster }), "password", testSealedAt, data},
			"no scope":                   {k, with(func(h *Header) { h.Scope = "" }), "password", testSealedAt, data},
			"another suite":              {k, with(func(h *Header) { h.Suite = otherSuite }), "password", testSealedAt, data},
			"no suite":                   {k, with(func(h *Header) { h.Suite = "" }), "password", testSealedAt, data},
			"another key id":             {k, with(func(h *Header) { h.KeyID = otherHeader.KeyID }), "password", testSealedAt, data},
			"another sealing key":        {other, otherHeader, "password", testSealedAt, data},
			"the header's key is not it": {other, h, "password", testSealedAt, data},
			"another data key":           {k, h, "username", testSealedAt, data},
			"another sealedAt":           {k, h, "password", testSealedAt.Add(time.Second), data},
			"sealedAt with a fraction":   {k, h, "password", testSealedAt.Add(time.Millisecond), data},
			"extended":                   {k, h, "password", testSealedAt, append(bytes.Clone(data), 0)},
			"another version":            {k, h, "password", testSealedAt, append([]byte{2}, data[1:]...)},
			"no data":                    {k, h, "password", testSealedAt, nil},
			"too long":                   {k, h, "password", testSealedAt, make([]byte, maxPlaintext+4096)},
		} {
			if got, err := c.k.OpenValue(c.h, c.key, c.at, c.data); err != ErrOpen || got != nil {
				t.Errorf("%s, %s: %d bytes, %v", suite, name, len(got), err)
			}
		}
		for n := range data {
			if _, err := k.OpenValue(h, "password", testSealedAt, data[:n]); err != ErrOpen {
				t.Fatalf("%s: cut to %d bytes: %v", suite, n, err)
			}
		}
		if got, err := k.OpenValue(h, "password", testSealedAt, data); err != nil || string(got) != "value" {
			t.Errorf("%s: in its place: %v", suite, err)
		}
	}
}

// The truth table of scopes: which fields may differ between sealing and opening.
func TestScopeSaysHowFarAValueMoves(t *testing.T) {
	k, h := mustGenerate(t, SuiteMLKEM768X25519)
	for _, c := range []struct {
		scope                       Scope
		otherName, otherNS, otherTy bool
	}{
		{ScopeStrict, false, false, false},
		{ScopeNamespace, true, false, false},
		{ScopeCluster, true, true, false},
	} {
		h.Scope = c.scope
		data := mustSealValue(t, k, h, "value")
		for _, scope := range []Scope{ScopeStrict, ScopeNamespace, ScopeCluster} {
			opened := h
			opened.Scope = scope
			_, err := k.OpenValue(opened, "password", testSealedAt, data)
			if (err == nil) != (scope == c.scope) {
				t.Errorf("sealed %s, opened as %s: %v", c.scope, scope, err)
			}
		}
		for change, want := range map[string]bool{"name": c.otherName, "namespace": c.otherNS, "type": c.otherTy} {
			opened := h
			switch change {
			case "name":
				opened.Name = "another"
			case "namespace":
				opened.Namespace = "another"
			case "type":
				opened.CredentialType = "another"
			}
			if _, err := k.OpenValue(opened, "password", testSealedAt, data); (err == nil) != want {
				t.Errorf("%s with another %s: %v", c.scope, change, err)
			}
		}
	}
}

func TestSealValueRefusesWhatNobodyCouldOpen(t *testing.T) {
	k, h := mustGenerate(t, SuiteMLKEM768)
	for name, change := range map[string]func(h *Header, at *time.Time, plaintext *[]byte){
		"fraction":    func(_ *Header, at *time.Time, _ *[]byte) { *at = at.Add(1) },
		"suite":       func(h *Header, _ *time.Time, _ *[]byte) { h.Suite = SuiteMLKEM768X25519 },
		"key id":      func(h *Header, _ *time.Time, _ *[]byte) { h.KeyID = "" },
		"scope":       func(h *Header, _ *time.Time, _ *[]byte) { h.Scope = "strict" },
		"name":        func(h *Header, _ *time.Time, _ *[]byte) { h.Name = "" },
		"namespace":   func(h *Header, _ *time.Time, _ *[]byte) { h.Namespace = "" },
		"ns of scope": func(h *Header, _ *time.Time, _ *[]byte) { h.Scope, h.Namespace = ScopeNamespace, "" },
		"length":      func(_ *Header, _ *time.Time, p *[]byte) { *p = make([]byte, maxPlaintext+1) },
	} {
		header, at, plaintext := h, testSealedAt, []byte("v")
		change(&header, &at, &plaintext)
		if _, err := k.Public().SealValue(header, "password", at, plaintext); err == nil {
			t.Errorf("sealed with a wrong %s", name)
		}
	}
}

func TestZeroSealingKeysAreHarmless(t *testing.T) {
	for _, k := range []*SealingKey{nil, {}} {
		if _, err := k.OpenValue(Header{Scope: ScopeCluster}, "", testSealedAt, make([]byte, 2000)); err != ErrOpen {
			t.Errorf("OpenValue: %v", err)
		}
		if _, err := k.Bytes(); err == nil {
			t.Error("Bytes of nothing")
		}
		if k.Public() != nil {
			t.Error("Public of nothing")
		}
	}
	for _, k := range []*SealingPublicKey{nil, {}} {
		if _, err := k.SealValue(Header{Scope: ScopeCluster}, "", testSealedAt, nil); err == nil {
			t.Error("SealValue without a key")
		}
		if k.Suite() != "" || k.Bytes() != nil || k.ID() != "" {
			t.Error("a zero key has properties")
		}
	}
}

func TestSealingKeysOfWrongLengthsAreErrors(t *testing.T) {
	for _, suite := range suites {
		k, _ := mustGenerate(t, suite)
		seed, _ := k.Bytes()
		for n := range 130 {
			if _, err := ParseSealingKey(suite, make([]byte, n)); (err == nil) != (n == len(seed)) {
				t.Errorf("%s: seed of %d bytes: %v", suite, n, err)
			}
		}
		for n := range 1300 {
			b := make([]byte, n)
			copy(b, k.Public().Bytes())
			if _, err := ParseSealingPublicKey(suite, b); (err == nil) != (n == len(k.Public().Bytes())) {
				t.Errorf("%s: public key of %d bytes: %v", suite, n, err)
			}
		}
	}
}

// A coefficient of q or more (FIPS 203 §7.2) is refused at every position.
func TestPublicSealingKeysMustBeReduced(t *testing.T) {
	for _, suite := range suites {
		k, _ := mustGenerate(t, suite)
		for i := range 768 {
			b := k.Public().Bytes()
			at := i / 2 * 3 // two 12-bit coefficients in three bytes
			if i%2 == 0 {
				b[at], b[at+1] = 0x01, b[at+1]&0xf0|0x0d // 3329
			} else {
				b[at+1], b[at+2] = b[at+1]&0x0f|0x10, 0xd0
			}
			if _, err := ParseSealingPublicKey(suite, b); err == nil {
				t.Fatalf("%s: coefficient %d is 3329", suite, i)
			}
		}
	}
}

// lowOrderPoints returns the low-order points of Curve25519 (RFC 7748 §6.1;
// cr.yp.to/ecdh.html#validate). With any of them the X25519 shared secret would be zero.
func lowOrderPoints(t *testing.T) (points [][]byte) {
	for _, s := range []string{
		"0000000000000000000000000000000000000000000000000000000000000000",
		"0100000000000000000000000000000000000000000000000000000000000000",
		"e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
		"5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
		"ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
		"edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
		"eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
	} {
		b, err := hex.DecodeString(s)
		if err != nil {
			t.Fatal(err)
		}
		points = append(points, b, append(bytes.Clone(b[:31]), b[31]|0x80))
	}
	return points
}

func TestLowOrderPointsAreRefused(t *testing.T) {
	k, h := mustGenerate(t, SuiteMLKEM768X25519)
	data := mustSealValue(t, k, h, "value")
	for i, point := range lowOrderPoints(t) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			crafted := bytes.Clone(data)
			copy(crafted[1+1088:], point)
			if _, err := k.OpenValue(h, "password", testSealedAt, crafted); err != ErrOpen {
				t.Errorf("as the encapsulated key: %v", err)
			}
			public, err := ParseSealingPublicKey(SuiteMLKEM768X25519, append(k.Public().Bytes()[:1184:1184], point...))
			if err != nil {
				return
			}
			weak := h
			weak.KeyID = public.ID()
			if _, err := public.SealValue(weak, "password", testSealedAt, []byte("value")); err == nil {
				t.Error("sealed to a low-order key")
			}
		})
	}
}

// X25519 ignores the top bit of a point. The sealed value must bind it.
func TestTheIgnoredBitOfX25519IsBound(t *testing.T) {
	k, h := mustGenerate(t, SuiteMLKEM768X25519)
	data := mustSealValue(t, k, h, "value")
	data[1+1120-1] ^= 0x80
	if _, err := k.OpenValue(h, "password", testSealedAt, data); err != ErrOpen {
		t.Errorf("encapsulated key with the top bit changed: %v", err)
	}
	b := k.Public().Bytes()
	b[len(b)-1] ^= 0x80
	if twin, err := ParseSealingPublicKey(SuiteMLKEM768X25519, b); err == nil && twin.ID() == k.Public().ID() {
		t.Error("two encodings share one key id")
	}
}
