package envelope

import (
	"bytes"
	"fmt"
	"testing"
)

func TestKeyOpensToWhatWasSealed(t *testing.T) {
	for _, n := range []int{0, 1, 32, 64, maxKey} {
		key := bytes.Repeat([]byte{9}, n)
		blob, err := SealKey(testKey(1), "tenant/mac/1", key)
		if err != nil {
			t.Fatal(err)
		}
		again, err := SealKey(testKey(1), "tenant/mac/1", key)
		if err != nil || bytes.Equal(blob[:keyHeader], again[:keyHeader]) {
			t.Fatalf("two blobs of one key share salt and nonce (%v)", err)
		}
		got, err := OpenKey(testKey(1), "tenant/mac/1", blob)
		if err != nil || !bytes.Equal(got, key) {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
}

func TestKeyOpensOnlyWhereItWasSealed(t *testing.T) {
	blob, err := SealKey(testKey(1), "tenant/mac/1", testKey(9))
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		key     []byte
		context string
		blob    []byte
	}{
		"another context": {testKey(1), "tenant/mac/2", blob},
		"no context":      {testKey(1), "", blob},
		"another key":     {testKey(2), "tenant/mac/1", blob},
		"no key":          {nil, "tenant/mac/1", blob},
		"an AES-128 key":  {testKey(1)[:16], "tenant/mac/1", blob},
		"no blob":         {testKey(1), "tenant/mac/1", nil},
		"extended":        {testKey(1), "tenant/mac/1", append(bytes.Clone(blob), 0)},
		"too long":        {testKey(1), "tenant/mac/1", make([]byte, keyHeader+maxKey+tagSize+1)},
	}
	for n := range blob {
		cases[fmt.Sprint("cut to ", n)] = struct {
			key     []byte
			context string
			blob    []byte
		}{testKey(1), "tenant/mac/1", blob[:n]}
	}
	for name, c := range cases {
		if got, err := OpenKey(c.key, c.context, c.blob); err != ErrOpen || got != nil {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	if _, err := SealKey(testKey(1), "", make([]byte, maxKey+1)); err == nil {
		t.Error("sealed more than the limit")
	}
	for n := range 80 {
		if _, err := SealKey(make([]byte, n), "c", nil); (err == nil) != (n == KeySize) {
			t.Errorf("wrapping key of %d bytes: %v", n, err)
		}
	}
}

// A blob of one format is not a blob of another format under the same wrapping key.
func TestFormatsDoNotOpenAsEachOther(t *testing.T) {
	body, wrap := mustSeal(t, testKey(9))
	crafted := append([]byte{version}, body.Salt[:]...)
	crafted = append(crafted, wrap[5:]...) // the wrap in the layout of a key blob
	for _, context := range []string{"", string(testContext.frame(labelWrap)), string(testContext.frame(labelWrapKey))} {
		if _, err := OpenKey(testKey(1), context, crafted); err != ErrOpen {
			t.Errorf("a wrap opened as a key: %v", err)
		}
	}
}
