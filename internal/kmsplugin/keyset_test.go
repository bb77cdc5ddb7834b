package kmsplugin

import (
	"bytes"
	"crypto/sha3"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/canonical"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// update rewrites testdata from the code. Use it only for a new version of a format, never to make
// a failing test pass.
var update = flag.Bool("update", false, "rewrite the golden files and the seeds of the fuzz targets")

const goldenFolder = "testdata/golden"

func golden(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(goldenFolder, name))
	must(t, err)
	return b
}

// writeGolden makes a key set of two nodes and two generations, and an acknowledgement.
func writeGolden(t *testing.T) {
	t.Helper()
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	n, err := NewNode(t.Context(), c, filepath.Join(t.TempDir(), "cp-2"), "cp-2", newKMS(t))
	must(t, err)
	_, err = AddNode(t.Context(), c, dir, n.Node)
	must(t, err)
	_, err = Rotate(t.Context(), c, dir, "", "ML-KEM-1024")
	must(t, err)
	p := start(t, dir)
	must(t, p.stop())
	a, err := Acknowledge(t.Context(), c, dir, time.Now())
	must(t, err)
	must(t, os.MkdirAll(goldenFolder, 0o755))
	set, err := os.ReadFile(filepath.Join(dir, keySetFile))
	must(t, err)
	must(t, os.WriteFile(filepath.Join(goldenFolder, "keyset.json"), set, 0o644))
	for name, v := range map[string]any{"node.json": n, "acknowledgement.json": a} {
		b, err := canonical.Encode(v)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(goldenFolder, name), b, 0o644))
	}
}

// The hashed and signed bytes are written out here, and another implementation verifies, as
// docs/formats.md says.
func TestKeySetIsVerifiedFromTheDocumentation(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	var file struct {
		KeySet    json.RawMessage `json:"key_set"`
		Signature []byte          `json:"signature"`
	}
	must(t, json.Unmarshal(golden(t, "keyset.json"), &file))
	var set struct {
		ID     string `json:"id"`
		Signer struct {
			PublicKey []byte `json:"public_key"`
		} `json:"signer"`
		Nodes []struct {
			Name      string `json:"name"`
			PublicKey []byte `json:"public_key"`
		} `json:"nodes"`
		Generations []struct {
			KeyID     string `json:"key_id"`
			Algorithm string `json:"algorithm"`
			PublicKey []byte `json:"public_key"`
			Wrapped   []byte `json:"wrapped_secrets"`
		} `json:"generations"`
	}
	must(t, json.Unmarshal(file.KeySet, &set))
	framed := func(parts ...string) string {
		text := ""
		for _, p := range parts {
			n := len(p)
			text += string([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}) + p
		}
		return text
	}
	hash := func(text string) string {
		sum := sha3.Sum256([]byte(text))
		return hex.EncodeToString(sum[:])
	}
	verify := func(public []byte, context, message string, signature []byte) {
		t.Helper()
		key, err := mldsa.NewPublicKey(mldsa.MLDSA65(), public)
		must(t, err)
		must(t, mldsa.Verify(key, []byte(message), signature, &mldsa.Options{Context: context}))
	}
	if set.ID != hash(framed("ML-DSA-65", string(set.Signer.PublicKey))) {
		t.Error("the id of the key set differs")
	}
	verify(set.Signer.PublicKey, "latticekeep/key-set/v1", framed("latticekeep/key-set/v1", string(file.KeySet)), file.Signature)
	for i, g := range set.Generations {
		kms := string(g.Wrapped[3 : 3+int(g.Wrapped[1])<<8+int(g.Wrapped[2])])
		want := []string{"1-", "2-"}[i] + hash(framed("latticekeep/etcd-key-id/v1", g.Algorithm, string(g.PublicKey), kms))
		if g.KeyID != want {
			t.Errorf("generation %d has key id %s, want %s", i+1, g.KeyID, want)
		}
	}
	var a struct {
		KeySet    string `json:"key_set"`
		Digest    string `json:"digest"`
		Node      string `json:"node"`
		At        string `json:"at"`
		Signature []byte `json:"signature"`
	}
	must(t, json.Unmarshal(golden(t, "acknowledgement.json"), &a))
	verify(set.Nodes[0].PublicKey, "latticekeep/key-set-acknowledgement/v1", framed("latticekeep/key-set-acknowledgement/v1", set.ID, "3", hash(string(golden(t, "keyset.json"))), "cp-1", a.At), a.Signature)
	if a.KeySet != set.ID || a.Digest != hash(string(golden(t, "keyset.json"))) || a.Node != "cp-1" {
		t.Errorf("the acknowledgement is of %s, %s, %s", a.KeySet, a.Digest, a.Node)
	}
}

func TestTheGoldenFilesAreRead(t *testing.T) {
	s, err := ParseKeySet(golden(t, "keyset.json"))
	must(t, err)
	n, err := ParseNode(golden(t, "node.json"))
	must(t, err)
	if !bytes.Equal(s.Nodes[1].PublicKey, n.Node.PublicKey) {
		t.Error("the key set has another key of cp-2")
	}
	a, err := ParseAcknowledgement(golden(t, "acknowledgement.json"))
	must(t, err)
	must(t, s.verify(a, digestOf(golden(t, "keyset.json"))))
}

func TestAChangedKeySetIsRefused(t *testing.T) {
	good := golden(t, "keyset.json")
	replaced := func(from, to string) []byte {
		t.Helper()
		b := bytes.Replace(good, []byte(from), []byte(to), 1)
		if bytes.Equal(b, good) {
			t.Fatalf("the golden key set has no %s", from)
		}
		return b
	}
	for name, x := range map[string]struct {
		file  []byte
		words string
	}{
		"an empty file":      {nil, "decoding key set"},
		"no JSON":            {[]byte("apiVersion: v1\n"), "decoding key set"},
		"null":               {[]byte("null\n"), "not as this program writes it"},
		"a shorter file":     {good[:len(good)-1], "not as this program writes it"},
		"a longer file":      {append(bytes.Clone(good), '\n'), "not as this program writes it"},
		"white space":        {replaced(`:`, `: `), "not as this program writes it"},
		"an unknown field":   {replaced(`{"key_set"`, `{"x":1,"key_set"`), "not as this program writes it"},
		"one inside":         {replaced(`{"version"`, `{"x":1,"version"`), "not as this program writes it"},
		"a repeated field":   {replaced(`"revision":3`, `"revision":2,"revision":3`), "not as this program writes it"},
		"another revision":   {replaced(`"revision":3`, `"revision":4`), "signature"},
		"another state":      {replaced(`"state":"pending"`, `"state":"current"`), "signature"},
		"another name":       {replaced(`"name":"cp-2"`, `"name":"cp-3"`), "signature"},
		"another KMS key":    {replaced(`kms.key`, `kms.kez`), "signature"},
		"an empty signature": {append(bytes.Clone(good[:bytes.Index(good, []byte(`"signature"`))]), "\"signature\":\"\"}\n"...), "signature"},
	} {
		_, err := ParseKeySet(x.file)
		refused(t, name, err, x.words)
	}
}

// The signature says who made a key set, and not that it is consistent.
func TestAnInconsistentKeySetIsRefusedThoughItIsSigned(t *testing.T) {
	c := newCustody(t)
	dir := initialized(t, c, newKMS(t))
	_, err := Rotate(t.Context(), c, dir, "", "")
	must(t, err)
	other := read(t, initialized(t, c, newKMS(t)))
	for name, x := range map[string]struct {
		edit  func(*KeySet)
		words string
	}{
		"another version":            {func(s *KeySet) { s.Version = 2 }, "version 2"},
		"another id":                 {func(s *KeySet) { s.ID = other.ID }, "id is not that of its signer"},
		"no revision":                {func(s *KeySet) { s.Revision = 0 }, "no revision"},
		"no node":                    {func(s *KeySet) { s.Nodes = []Node{} }, "names no node"},
		"a node twice":               {func(s *KeySet) { s.Nodes = append(s.Nodes, s.Nodes[0]) }, "cp-1 twice"},
		"a node's name":              {func(s *KeySet) { s.Nodes[0].Name = "../cp" }, "no name of a node"},
		"a node without a key":       {func(s *KeySet) { s.Nodes[0].PublicKey = []byte{} }, "public key"},
		"no generation":              {func(s *KeySet) { s.Generations = []Generation{} }, "no current generation"},
		"only a pending generation":  {func(s *KeySet) { s.Generations = s.Generations[1:] }, "cannot be"},
		"only a previous one":        {func(s *KeySet) { s.Generations = s.Generations[:1]; s.Generations[0].State = Previous }, "no current generation"},
		"two current generations":    {func(s *KeySet) { s.Generations[1].State = Current }, "cannot be"},
		"a pending one first":        {func(s *KeySet) { s.Generations[0].State, s.Generations[1].State = Pending, Current }, "cannot be"},
		"a previous one last":        {func(s *KeySet) { s.Generations[1].State = Previous }, "cannot be"},
		"an unknown state":           {func(s *KeySet) { s.Generations[1].State = "retired" }, "cannot be"},
		"generations out of order":   {func(s *KeySet) { slices.Reverse(s.Generations) }, "cannot be"},
		"a number of zero":           {func(s *KeySet) { s.Generations[0].Number = 0 }, "not in order"},
		"a number twice":             {func(s *KeySet) { s.Generations[1].Number = 1 }, "not in order"},
		"the key id of another":      {func(s *KeySet) { s.Generations[0].KeyID = other.Generations[0].KeyID }, "key id"},
		"the public key of another":  {func(s *KeySet) { s.Generations[0].PublicKey = other.Generations[0].PublicKey }, "key id"},
		"the wrapped keys of others": {func(s *KeySet) { s.Generations[0].Wrapped = other.Generations[0].Wrapped }, "key id"},
		"no wrapped keys":            {func(s *KeySet) { s.Generations[0].Wrapped = []byte{} }, "key id"},
	} {
		s := read(t, dir)
		x.edit(s)
		_, err := ParseKeySet(forge(t, c, s))
		refused(t, name, err, x.words)
	}
}

// What only the KMS can tell is found when the keys are opened.
func TestWrappedKeysAreBoundToTheirPlace(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	dir := initialized(t, c, url)
	_, err := Rotate(t.Context(), c, dir, "", "")
	must(t, err)
	for name, edit := range map[string]func(*KeySet){
		"those of another generation": func(s *KeySet) { s.Generations[0].Wrapped = s.Generations[1].Wrapped },
		"those of another key set":    func(s *KeySet) { s.Generations[0].Wrapped = read(t, initialized(t, c, url)).Generations[0].Wrapped },
		"those of the signer":         func(s *KeySet) { s.Generations[0].Wrapped = s.Signer.Wrapped },
	} {
		s := read(t, dir)
		edit(s)
		_, err := c.openGeneration(t.Context(), s.ID, s.Generations[0])
		refused(t, name, err, "unwrapping generation 1")
	}
	s := read(t, dir)
	s.Generations[0].PublicKey = s.Generations[1].PublicKey
	_, err = c.openGeneration(t.Context(), s.ID, s.Generations[0])
	refused(t, "another public key", err, "another public key")
	_, err = c.openSigningKey(t.Context(), s.Signer.KMS, signerContext, make([]byte, dualsig.PublicKeySize), s.Signer.Wrapped)
	refused(t, "another signer", err, "unwrapping signing key")
}

func TestFilesHaveNoCredentialsAndNoPlainKeys(t *testing.T) {
	c := newCustody(t)
	_, err := Init(t.Context(), c, filepath.Join(t.TempDir(), "x"), "cp-1", "hashivault://user:password@key?engine=transit", "ML-KEM-768")
	refused(t, "a URL with a password", err, "must not have credentials")
	if strings.Contains(err.Error(), "password@") {
		t.Errorf("the error has the password: %v", err)
	}
	dir := initialized(t, c, newKMS(t))
	for _, name := range []string{keySetFile, nodeFile} {
		info, err := os.Stat(filepath.Join(dir, name))
		must(t, err)
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %04o", name, info.Mode().Perm())
		}
	}
}

func FuzzParseKeySet(f *testing.F) {
	good := golden(f, "keyset.json")
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := ParseKeySet(b); err == nil && !bytes.Equal(b, good) {
			t.Fatalf("a key set of revision %d was forged", s.Revision)
		}
	})
}

func FuzzParseAcknowledgement(f *testing.F) {
	s, err := ParseKeySet(golden(f, "keyset.json"))
	must(f, err)
	good := golden(f, "acknowledgement.json")
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := ParseAcknowledgement(b)
		if err != nil {
			return
		}
		if again, err := Encode(a); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("parsing and encoding changed it (%v)", err)
		}
		if s.verify(a, digestOf(golden(t, "keyset.json"))) == nil && !bytes.Equal(b, good) {
			t.Fatal("an acknowledgement was forged")
		}
	})
}
