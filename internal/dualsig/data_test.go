package dualsig

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/latticekeep/latticekeep/internal/frame"
)

const goldenDataFile = "testdata/data.json"

// goldenData is a sample. Signing is randomised, so the sample is not made again.
type goldenData struct {
	Seed, MACKey hexBytes
	KeyVersion   uint32
	Data         string
	PQC, Tag     hexBytes
}

func loadGoldenData(t testing.TB) (goldenData, *Key) {
	t.Helper()
	b, err := os.ReadFile(goldenDataFile)
	if err != nil {
		t.Fatal(err)
	}
	var g goldenData
	if err := json.Unmarshal(b, &g); err != nil {
		t.Fatal(err)
	}
	k, err := NewKey(g.KeyVersion, g.Seed, g.MACKey)
	if err != nil {
		t.Fatal(err)
	}
	return g, k
}

func writeGoldenData(t *testing.T) {
	t.Helper()
	g := goldenData{Seed: fill(SeedSize, 1), MACKey: fill(MACKeySize, 2), KeyVersion: 258, Data: "data"}
	k, err := NewKey(g.KeyVersion, g.Seed, g.MACKey)
	if err != nil {
		t.Fatal(err)
	}
	pqc, tag := mustSignData(t, k, []byte(g.Data))
	g.PQC, g.Tag = pqc, tag
	b, err := json.MarshalIndent(g, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(goldenDataFile, append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join("testdata", "fuzz", "FuzzVerifyData")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for i, seed := range [][2][]byte{{pqc, tag}, {flipped(pqc, 0), tag}, {pqc, flipped(tag, 0)}, {pqc, flipped(tag, 4)}, {tag, pqc}, {pqc[:1], tag}, {nil, nil}} {
		text := fmt.Sprintf("go test fuzz v1\n[]byte(%q)\n[]byte(%q)\n", seed[0], seed[1])
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("seed-%03d", i)), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func flipped(b []byte, i int) []byte {
	b = bytes.Clone(b)
	b[i] ^= 1
	return b
}

func mustSignData(t testing.TB, k *Key, data []byte) (pqc, tag []byte) {
	t.Helper()
	pqc, tag, err := k.SignData(data)
	if err != nil {
		t.Fatal(err)
	}
	return pqc, tag
}

func TestTheGoldenDataSignatureHolds(t *testing.T) {
	if *update {
		writeGoldenData(t)
	}
	g, k := loadGoldenData(t)
	data := []byte(g.Data)
	if v, err := DataKeyVersion(g.Tag); err != nil || v != g.KeyVersion || !k.VerifyData(data, g.PQC, g.Tag) {
		t.Fatal(v, err)
	}
	for i := range g.PQC {
		if k.VerifyData(data, flipped(g.PQC, i), g.Tag) {
			t.Errorf("verifies with byte %d of the ML-DSA-65 signature changed", i)
		}
	}
	for i := range g.Tag {
		if k.VerifyData(data, g.PQC, flipped(g.Tag, i)) {
			t.Errorf("verifies with byte %d of the tag changed", i)
		}
	}
	for i := range data {
		if k.VerifyData(flipped(data, i), g.PQC, g.Tag) {
			t.Errorf("verifies with byte %d of the data changed", i)
		}
	}
}

func TestDataSignaturesHoldForWhatWasSigned(t *testing.T) {
	k := mustKey(t, 258, 1, 2)
	for _, n := range []int{0, 1, 64, 100_000} {
		data := fill(n, 7)
		pqc, tag := mustSignData(t, k, data)
		again, tagAgain := mustSignData(t, k, data)
		if len(pqc) != SignatureSize || len(tag) != DataTagSize || !bytes.Equal(tag[:5], []byte{1, 0, 0, 1, 2}) || bytes.Equal(pqc, again) {
			t.Fatalf("%d and %d bytes, header %x, hedged %v", len(pqc), len(tag), tag[:5], !bytes.Equal(pqc, again))
		}
		if !k.VerifyData(data, pqc, tag) || !k.VerifyData(data, again, tagAgain) || !k.Public().Verify("", data, pqc) {
			t.Errorf("%d bytes do not verify", n)
		}
		if k.VerifyData(append(bytes.Clone(data), 0), pqc, tag) || k.VerifyData(data, pqc, tagAgain) || k.VerifyData(data, again, tag) {
			t.Error("verifies for other data, or with the other signature's part")
		}
	}
}

// Every combination of the two parts: each is valid, changed, or made by an attacker with only one
// of the keys. Only two valid parts verify.
func TestBothPartsOfADataSignatureMustHold(t *testing.T) {
	k, data := mustKey(t, 1, 1, 2), []byte("data")
	tagOver := func(macKey byte, data, pqc []byte) []byte {
		framed := frame.Join(labelData, []byte(algorithms), []byte{0, 0, 0, 1}, k.id, data, pqc)
		return join([]byte{1, 0, 0, 0, 1}, mac(fill(MACKeySize, macKey), framed))
	}
	valid, _ := mustSignData(t, k, data)
	foreign, _ := mustSignData(t, mustKey(t, 1, 9, 2), data)
	otherData, _ := mustSignData(t, k, []byte("other"))
	inContext, err := k.private.Sign(recordContext, data)
	if err != nil {
		t.Fatal(err)
	}
	for _, pqc := range []struct {
		name  string
		bytes []byte
		holds bool
	}{
		{"valid", valid, true}, {"changed", flipped(valid, 0), false}, {"foreign", foreign, false},
		{"of other data", otherData, false}, {"in a context", inContext, false}, {"zero", make([]byte, SignatureSize), false},
	} {
		for _, tag := range []struct {
			name  string
			bytes []byte
			holds bool
		}{
			{"valid", tagOver(2, data, pqc.bytes), true},
			{"foreign", tagOver(3, data, pqc.bytes), false},
			{"of other data", tagOver(2, []byte("other"), pqc.bytes), false},
			{"of another signature", tagOver(2, data, otherData[:SignatureSize-1]), false},
			{"zero", join([]byte{1, 0, 0, 0, 1}, make([]byte, MACSize)), false},
		} {
			if got, want := k.VerifyData(data, pqc.bytes, tag.bytes), pqc.holds && tag.holds; got != want {
				t.Errorf("ML-DSA-65 %s, tag %s: %v, want %v", pqc.name, tag.name, got, want)
			}
		}
	}
}

func TestTheKeyVersionOfADataSignatureIsBound(t *testing.T) {
	one, two := mustKey(t, 1, 1, 2), mustKey(t, 2, 1, 2)
	pqc, tag := mustSignData(t, one, []byte("data"))
	if two.VerifyData([]byte("data"), pqc, tag) {
		t.Error("verifies under another version")
	}
	binary.BigEndian.PutUint32(tag[1:], 2)
	if two.VerifyData([]byte("data"), pqc, tag) {
		t.Error("verifies under another version after rewriting the header")
	}
}

// A caller who chooses the data cannot get a signature of anything else.
func TestASignatureOfDataIsNoDualSignature(t *testing.T) {
	k := mustKey(t, 1, 1, 2)
	data := k.frame(recordContext, []byte("a forged record"))
	pqc, tag := mustSignData(t, k, data)
	if k.Verify(recordContext, []byte("a forged record"), join([]byte{1, 0, 0, 0, 1}, pqc, tag[dualHeader:])) {
		t.Error("data that looks like a framed record was signed as one")
	}
	for _, context := range contexts {
		if k.Public().Verify(context, data, pqc) {
			t.Errorf("verifies for %s", context)
		}
		dual := mustSign(t, k, context, []byte("data"))
		if k.VerifyData([]byte("data"), dual[dualHeader:dualHeader+SignatureSize], join(dual[:dualHeader], dual[dualHeader+SignatureSize:])) {
			t.Errorf("a dual signature for %s verifies as one of data", context)
		}
	}
}

func TestWrongLengthsOfDataSignaturesDoNotHold(t *testing.T) {
	k := mustKey(t, 1, 1, 2)
	pqc, tag := mustSignData(t, k, []byte("data"))
	for n := range DataTagSize + 2 {
		resized := append(bytes.Clone(tag), 0)[:min(n, DataTagSize+1)]
		if n != DataTagSize && k.VerifyData([]byte("data"), pqc, resized) {
			t.Errorf("verifies with a tag of %d bytes", n)
		}
		if _, err := DataKeyVersion(resized); (err == nil) != (n == DataTagSize) {
			t.Errorf("key version of a tag of %d bytes: %v", n, err)
		}
	}
	for _, n := range []int{0, 1, SignatureSize - 1, SignatureSize + 1} {
		if k.VerifyData([]byte("data"), append(bytes.Clone(pqc), 0)[:n], tag) {
			t.Errorf("verifies with an ML-DSA-65 signature of %d bytes", n)
		}
	}
	long := make([]byte, maxMessage+1)
	if _, _, err := k.SignData(long); err == nil || k.VerifyData(long, pqc, tag) {
		t.Error("more than the limit")
	}
	for _, zero := range []*Key{nil, {}} {
		if _, _, err := zero.SignData(nil); err == nil || zero.VerifyData([]byte("data"), pqc, tag) {
			t.Error("a zero key signs or verifies")
		}
	}
}

// Both parts are evaluated once each, over the whole input, whatever is wrong.
func TestBothPartsOfADataSignatureAreAlwaysEvaluated(t *testing.T) {
	k, data := mustKey(t, 258, 1, 2), []byte("data")
	pqc, tag := mustSignData(t, k, data)
	for name, c := range map[string]struct {
		pqc, tag []byte
		holds    bool
	}{
		"valid":                {pqc, tag, true},
		"changed ML-DSA-65":    {flipped(pqc, 0), tag, false},
		"changed tag":          {pqc, flipped(tag, DataTagSize-1), false},
		"no ML-DSA-65":         {nil, tag, false},
		"cut ML-DSA-65":        {pqc[:SignatureSize-1], tag, false},
		"long ML-DSA-65":       {append(bytes.Clone(pqc), 0), tag, false},
		"no tag":               {pqc, nil, false},
		"cut tag":              {pqc, tag[:DataTagSize-1], false},
		"long tag":             {pqc, append(bytes.Clone(tag), 0), false},
		"another format":       {pqc, flipped(tag, 0), false},
		"another key version":  {pqc, flipped(tag, 4), false},
		"nothing":              {nil, nil, false},
		"the two interchanged": {tag, pqc, false},
	} {
		verified, summed := 0, 0
		holds := k.verifyData(data, c.pqc, c.tag, func(context string, msg, sig []byte) bool {
			verified++
			if context != "" || !bytes.Equal(msg, data) || len(sig) != SignatureSize {
				t.Errorf("%s: ML-DSA-65 over other inputs", name)
			}
			return k.private.public.Verify(context, msg, sig)
		}, func(data, sig []byte) []byte {
			summed++
			return k.dataMAC(data, sig)
		})
		if holds != c.holds || verified != 1 || summed != 1 || k.VerifyData(data, c.pqc, c.tag) != c.holds {
			t.Errorf("%s: holds %v after %d and %d evaluations", name, holds, verified, summed)
		}
	}
	// A wrong length or version fails even if both evaluations succeed.
	yes := func(string, []byte, []byte) bool { return true }
	none := func(_, _ []byte) []byte { return make([]byte, MACSize) }
	zero := []byte{1, 0, 0, 1, 2}
	if !k.verifyData(data, pqc, join(zero, make([]byte, MACSize)), yes, none) {
		t.Error("the stand-ins do not hold")
	}
	for name, c := range map[string][2][]byte{
		"no ML-DSA-65": {nil, join(zero, make([]byte, MACSize))}, "no tag": {pqc, nil}, "cut tag": {pqc, join(zero, make([]byte, MACSize-1))},
		"another key version": {pqc, join(flipped(zero, 4), make([]byte, MACSize))}, "another format": {pqc, join(flipped(zero, 0), make([]byte, MACSize))},
	} {
		if k.verifyData(data, c[0], c[1], yes, none) {
			t.Errorf("%s: holds", name)
		}
	}
}

func TestThePublicKeyIDNeedsNoParsedKey(t *testing.T) {
	public := mustKey(t, 1, 1, 2).Public()
	if id, err := PublicKeyID(public.Bytes()); err != nil || id != public.ID() {
		t.Error(id, err)
	}
	for _, n := range []int{0, PublicKeySize - 1, PublicKeySize + 1} {
		if id, err := PublicKeyID(make([]byte, n)); err == nil {
			t.Errorf("%d bytes have id %s", n, id)
		}
	}
}

func FuzzVerifyData(f *testing.F) {
	g, k := loadGoldenData(f)
	f.Fuzz(func(t *testing.T, pqc, tag []byte) {
		if v, err := DataKeyVersion(tag); err == nil && len(tag) != DataTagSize {
			t.Fatalf("%d bytes have key version %d", len(tag), v)
		}
		if k.VerifyData([]byte(g.Data), pqc, tag) && (!bytes.Equal(pqc, g.PQC) || !bytes.Equal(tag, g.Tag)) {
			t.Fatal("a forgery verifies")
		}
	})
}
