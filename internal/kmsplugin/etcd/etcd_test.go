package etcd

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

// encrypted returns the value of an object as kube-apiserver writes it.
func encrypted(id string) []byte {
	b := []byte("k8s:enc:kms:v2:plugin:")
	b = protowire.AppendTag(b, 1, protowire.BytesType)
	b = protowire.AppendBytes(b, []byte{1, 2, 3})
	b = protowire.AppendTag(b, 2, protowire.BytesType)
	b = protowire.AppendString(b, id)
	b = protowire.AppendTag(b, 5, protowire.VarintType)
	return protowire.AppendVarint(b, 1)
}

func TestKeyIDOfAnObject(t *testing.T) {
	for name, x := range map[string]struct{ value, id, words string }{
		"by a plugin":           {string(encrypted("7-ab")), "7-ab", ""},
		"not encrypted":         {"k8s\x00\n\x0c", "", ""},
		"by another provider":   {"k8s:enc:aescbc:v1:key1:\x12\x01a", "", ""},
		"by a KMS v1 plugin":    {"k8s:enc:kms:v1:plugin:\x12\x01a", "", ""},
		"empty":                 {"", "", ""},
		"without a name":        {"k8s:enc:kms:v2:plugin", "", "does not end"},
		"without a key id":      {string(encrypted("")), "", "none"},
		"cut off":               {strings.TrimSuffix(string(encrypted("7-ab")), "\x01"), "", "unexpected EOF"},
		"a key id of type int":  {"k8s:enc:kms:v2:plugin:\x10\x07", "", "none"},
		"two key ids, the last": {string(encrypted("7-ab")) + "\x12\x018", "8", ""},
	} {
		id, err := keyID([]byte(x.value))
		if id != x.id || (err == nil) != (x.words == "") || err != nil && !strings.Contains(err.Error(), x.words) {
			t.Errorf("%s: %q, %v", name, id, err)
		}
	}
}

func TestURLsThatAreRefused(t *testing.T) {
	for _, text := range []string{"", "127.0.0.1:2379", "unix:///run/etcd", "https://u:p@127.0.0.1:2379", "https://127.0.0.1:2379/v3", "https://"} {
		if _, err := KeyIDs(t.Context(), Config{}, []string{text}); err == nil || !strings.Contains(err.Error(), "https://HOST:PORT") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func FuzzKeyID(f *testing.F) {
	f.Fuzz(func(t *testing.T, value []byte) {
		if id, err := keyID(value); err == nil && id != "" && !strings.HasPrefix(string(value), string(prefix)) {
			t.Errorf("%q for a value without the prefix", id)
		}
	})
}
