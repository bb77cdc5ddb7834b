package dualsig

import (
	"bytes"
	"crypto/hmac"
	"encoding/json"
	"io/fs"
	"testing"

	"github.com/c2sp/wycheproof"
)

type wycheproofGroup struct {
	PrivateSeed, PrivateKey, PublicKey hexBytes // ML-DSA
	TagSize                            int      // HMAC, in bits
}

type wycheproofCase struct {
	ID     int    `json:"tcId"`
	Result string `json:"result"`

	Msg, Ctx, Mu, Rnd, Sig hexBytes // ML-DSA
	Key, Tag               hexBytes // HMAC
}

// runWycheproof calls run with each case of file. It logs a case that run cannot execute, with the
// reason. It fails when fewer than want cases were executed.
func runWycheproof(t *testing.T, file string, want int, run func(*testing.T, *wycheproofGroup, *wycheproofCase) (skipped string)) {
	t.Helper()
	b, err := fs.ReadFile(wycheproof.TestVectors, file)
	if err != nil {
		t.Fatal(err)
	}
	var vectors struct {
		NumberOfTests int
		TestGroups    []struct {
			wycheproofGroup
			Tests []wycheproofCase
		}
	}
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	executed, seen, skipped := 0, 0, map[string]int{}
	for _, group := range vectors.TestGroups {
		for _, c := range group.Tests {
			seen++
			if c.Result != "valid" && c.Result != "invalid" {
				t.Fatalf("case %d has result %q", c.ID, c.Result)
			}
			if reason := run(t, &group.wycheproofGroup, &c); reason != "" {
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

const muOnly = "the case gives only the message representative μ, which circl's API does not take"

func TestWycheproofMLDSASigning(t *testing.T) {
	runWycheproof(t, "mldsa_65_sign_seed_test.json", 88, func(t *testing.T, g *wycheproofGroup, c *wycheproofCase) string {
		k, err := NewPrivateKey(g.PrivateSeed)
		if err != nil {
			c.check(t, "key", false)
			return ""
		}
		if !bytes.Equal(k.Public().Bytes(), g.PublicKey) {
			t.Errorf("case %d: the seed gives another public key", c.ID)
		}
		if c.Msg == nil {
			return muOnly
		}
		sig := make([]byte, SignatureSize)
		if err := k.sign(string(c.Ctx), c.Msg, false, sig); err != nil {
			c.check(t, "sign", false)
			return ""
		}
		if c.Rnd == nil { // a hedged signature with given randomness can only be verified
			c.check(t, "sign", bytes.Equal(sig, c.Sig))
		}
		c.check(t, "verify", k.Public().Verify(string(c.Ctx), c.Msg, c.Sig))
		return ""
	})
}

// Expanded private keys are not accepted. Two of them have values out of range, and circl imports
// them. The signatures of the others can still be verified.
func TestWycheproofMLDSAExpandedKeys(t *testing.T) {
	runWycheproof(t, "mldsa_65_sign_noseed_test.json", 68, func(t *testing.T, g *wycheproofGroup, c *wycheproofCase) string {
		if _, err := NewPrivateKey(g.PrivateKey); err == nil {
			t.Errorf("case %d: an expanded key of %d bytes was accepted", c.ID, len(g.PrivateKey))
		}
		if c.Result == "invalid" {
			return ""
		}
		if c.Msg == nil {
			return muOnly
		}
		k, err := ParsePublicKey(g.PublicKey)
		c.check(t, "verify", err == nil && k.Verify(string(c.Ctx), c.Msg, c.Sig))
		return ""
	})
}

func TestWycheproofMLDSAVerification(t *testing.T) {
	runWycheproof(t, "mldsa_65_verify_test.json", 210, func(t *testing.T, g *wycheproofGroup, c *wycheproofCase) string {
		k, err := ParsePublicKey(g.PublicKey)
		c.check(t, "verify", err == nil && k.Verify(string(c.Ctx), c.Msg, c.Sig))
		return ""
	})
}

func TestWycheproofHMAC(t *testing.T) {
	runWycheproof(t, "hmac_sha512_test.json", 174, func(t *testing.T, g *wycheproofGroup, c *wycheproofCase) string {
		c.check(t, "mac", hmac.Equal(mac(c.Key, c.Msg)[:g.TagSize/8], c.Tag))
		return ""
	})
}
