package envelope

import (
	"bytes"
	"crypto/mlkem"
	"encoding/json"
	"io/fs"
	"testing"

	"github.com/c2sp/wycheproof"
	"github.com/cloudflare/circl/kem/mlkem/mlkem768"
)

// wycheproofCase holds the fields of all files used here. A case has the fields of its own file.
type wycheproofCase struct {
	ID     int    `json:"tcId"`
	Result string `json:"result"`

	Seed, EK, DK, M, C, K         hexBytes // ML-KEM
	Key, IV, AAD, Msg, CT, Tag    hexBytes // AES-GCM
	IKM, Salt, Info, OKM          hexBytes // HKDF
	Size                          int
	keySize, ivSize, groupTagSize int
}

// runWycheproof calls run with each case of file. It logs a case that run cannot execute, with the
// reason. It fails when fewer than want cases were executed.
func runWycheproof(t *testing.T, file string, want int, run func(*testing.T, *wycheproofCase) (skipped string)) {
	t.Helper()
	b, err := fs.ReadFile(wycheproof.TestVectors, file)
	if err != nil {
		t.Fatal(err)
	}
	var vectors struct {
		NumberOfTests int
		TestGroups    []struct {
			KeySize, IVSize, TagSize int
			Tests                    []wycheproofCase
		}
	}
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	executed, seen, skipped := 0, 0, map[string]int{}
	for _, group := range vectors.TestGroups {
		for _, c := range group.Tests {
			seen++
			c.keySize, c.ivSize, c.groupTagSize = group.KeySize, group.IVSize, group.TagSize
			if c.Result != "valid" && c.Result != "invalid" {
				t.Fatalf("case %d has result %q", c.ID, c.Result)
			}
			if reason := run(t, &c); reason != "" {
				skipped[reason]++
				continue
			}
			executed++
		}
	}
	if seen != vectors.NumberOfTests {
		t.Errorf("read %d of %d cases", seen, vectors.NumberOfTests)
	}
	if executed < want {
		t.Errorf("executed %d cases, expected %d", executed, want)
	}
	t.Logf("%s: executed %d of %d", file, executed, seen)
	for reason, n := range skipped {
		t.Logf("%s: skipped %d: %s", file, n, reason)
	}
}

// check compares a case's expected result with the actual one.
func (c *wycheproofCase) check(t *testing.T, what string, holds bool) {
	t.Helper()
	if holds != (c.Result == "valid") {
		t.Errorf("case %d, %s: %v, but the vector is %s", c.ID, what, holds, c.Result)
	}
}

func TestWycheproofMLKEMKeyGeneration(t *testing.T) {
	runWycheproof(t, "mlkem_768_keygen_seed_test.json", 100, func(t *testing.T, c *wycheproofCase) string {
		pk, sk := mlkem768.NewKeyFromSeed(c.Seed)
		var ek [mlkem768.PublicKeySize]byte
		pk.Pack(ek[:])
		var dk [mlkem768.PrivateKeySize]byte
		sk.Pack(dk[:])
		c.check(t, "circl", bytes.Equal(ek[:], c.EK) && bytes.Equal(dk[:], c.DK))

		k, err := ParseSealingKey(SuiteMLKEM768, c.Seed)
		c.check(t, "sealing key", err == nil && bytes.Equal(k.Public().Bytes(), c.EK))
		return ""
	})
}

func TestWycheproofMLKEMEncapsulation(t *testing.T) {
	runWycheproof(t, "mlkem_768_encaps_test.json", 265, func(t *testing.T, c *wycheproofCase) string {
		_, err := ParseSealingPublicKey(SuiteMLKEM768, c.EK)
		c.check(t, "sealing key", err == nil)
		_, err = ParseSealingPublicKey(SuiteMLKEM768X25519, append(c.EK[:len(c.EK):len(c.EK)], make([]byte, 32)...))
		c.check(t, "hybrid sealing key", err == nil)

		pk := new(mlkem768.PublicKey)
		if err := pk.Unpack(c.EK); err != nil {
			c.check(t, "circl", false)
			return ""
		}
		ct, ss := make([]byte, mlkem768.CiphertextSize), make([]byte, mlkem768.SharedKeySize)
		pk.EncapsulateTo(ct, ss, c.M)
		c.check(t, "circl", bytes.Equal(ct, c.C) && bytes.Equal(ss, c.K))
		return ""
	})
}

// The test checks lengths as OpenCredential does, because circl panics on wrong ones.
func TestWycheproofMLKEMDecapsulation(t *testing.T) {
	runWycheproof(t, "mlkem_768_test.json", 201, func(t *testing.T, c *wycheproofCase) string {
		body := Credential{KEM: c.C, Ciphertext: make([]byte, tagSize)}
		holds := false
		if len(c.Seed) == seedSize && body.check() == nil {
			pk, sk := mlkem768.NewKeyFromSeed(c.Seed)
			var ek [mlkem768.PublicKeySize]byte
			pk.Pack(ek[:])
			var ss [mlkem768.SharedKeySize]byte
			sk.DecapsulateTo(ss[:], c.C)
			holds = bytes.Equal(ss[:], c.K) && (c.EK == nil || bytes.Equal(ek[:], c.EK))
		}
		c.check(t, "circl", holds)

		// crypto/hpke decapsulates with crypto/mlkem.
		holds = false
		if k, err := mlkem.NewDecapsulationKey768(c.Seed); err == nil {
			ss, err := k.Decapsulate(c.C)
			holds = err == nil && bytes.Equal(ss, c.K)
		}
		c.check(t, "standard library", holds)
		_, err := ParseSealingKey(SuiteMLKEM768, c.Seed)
		if (err == nil) != (len(c.Seed) == seedSize) {
			t.Errorf("case %d: seed of %d bytes: %v", c.ID, len(c.Seed), err)
		}
		return ""
	})
}

func TestWycheproofAESGCM(t *testing.T) {
	runWycheproof(t, "aes_gcm_test.json", 66, func(t *testing.T, c *wycheproofCase) string {
		gcm, err := newGCM(c.Key)
		if c.keySize != 256 {
			if err == nil {
				t.Errorf("case %d: a %d-bit key was accepted", c.ID, c.keySize)
			}
			return "only 256-bit keys are used"
		}
		if err != nil {
			t.Fatal(err)
		}
		if c.ivSize != 8*nonceSize {
			return "only 96-bit nonces are used"
		}
		if c.groupTagSize != 8*tagSize {
			return "only 128-bit tags are used"
		}
		sealed := append(bytes.Clone(c.CT), c.Tag...)
		plaintext, err := gcm.Open(nil, c.IV, sealed, c.AAD)
		c.check(t, "open", err == nil && bytes.Equal(plaintext, c.Msg))
		if c.Result == "valid" {
			c.check(t, "seal", bytes.Equal(gcm.Seal(nil, c.IV, c.Msg, c.AAD), sealed))
		}
		return ""
	})
}

func TestWycheproofHKDF(t *testing.T) {
	runWycheproof(t, "hkdf_sha512_test.json", 83, func(t *testing.T, c *wycheproofCase) string {
		okm, err := derive(c.IKM, c.Salt, c.Info, c.Size)
		c.check(t, "derive", err == nil && bytes.Equal(okm, c.OKM))
		return ""
	})
}

// The vectors of expanded keys (FIPS 203 §6.1) cannot run, because every expanded key is refused.
func TestWycheproofExpandedKeysAreNotAccepted(t *testing.T) {
	runWycheproof(t, "mlkem_768_semi_expanded_decaps_test.json", 9, func(t *testing.T, c *wycheproofCase) string {
		for _, suite := range suites {
			if _, err := ParseSealingKey(suite, c.DK); err == nil {
				t.Errorf("case %d: an expanded key of %d bytes was accepted", c.ID, len(c.DK))
			}
		}
		return ""
	})
}
