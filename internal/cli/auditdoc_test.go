package cli

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha3"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/tlog"
)

// The example in docs/audit.md is a real log, and all claims of the page about it hold. They are
// computed here from its bytes without code of the product.
func TestTheExampleOfTheDocumentationIsTrue(t *testing.T) {
	const example = "../../docs/audit-example.jsonl"
	page := readText(t, "../../docs/audit.md")
	says := func(what, text string) {
		t.Helper()
		if !strings.Contains(page, text) {
			t.Errorf("the page does not have %s: %s", what, text)
		}
	}
	log, err := os.ReadFile(example)
	if err != nil {
		t.Fatal(err)
	}
	var hashes []tlog.Hash // hashes in the tree's storage
	read := tlog.HashReaderFunc(func(indexes []int64) (out []tlog.Hash, err error) {
		for _, i := range indexes {
			out = append(out, hashes[i])
		}
		return out, nil
	})
	var leaves []tlog.Hash
	var key []byte
	var chain, note string
	for i, line := range bytes.Split(bytes.TrimSuffix(log, []byte("\n")), []byte("\n")) {
		var e map[string]json.RawMessage
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatal(err)
		}
		if checkpoint, ok := e["checkpoint"]; ok {
			if err := json.Unmarshal(checkpoint, &note); err != nil {
				t.Fatal(err)
			}
			continue
		}
		// The line stays canonical without hash and signature.
		core := line
		for _, name := range []string{"hash", "signature"} {
			core = bytes.Replace(core, fmt.Appendf(nil, `"%s":%s,`, name, e[name]), nil, 1)
		}
		sum := sha3.Sum256(core)
		if got := hex.EncodeToString(sum[:]); `"`+got+`"` != string(e["hash"]) {
			t.Fatalf("line %d has another hash: %s", i+1, got)
		}
		says("the hash of a line", hex.EncodeToString(sum[:]))
		if i == 4 {
			says("what the hash is of", "\n"+string(core)+"\n")
			says("its length", fmt.Sprintf("these %d bytes", len(core)))
		}
		if i == 0 {
			var attributes struct {
				ChainID   string `json:"chain_id"`
				PublicKey []byte `json:"public_key"`
			}
			if err := json.Unmarshal(e["attributes"], &attributes); err != nil {
				t.Fatal(err)
			}
			chain, key = attributes.ChainID, attributes.PublicKey
		}
		stored, err := tlog.StoredHashes(int64(i), sum[:], read)
		if err != nil {
			t.Fatal(err)
		}
		hashes, leaves = append(hashes, stored...), append(leaves, tlog.RecordHash(sum[:]))
		if i >= 2 && i <= 4 {
			says("the leaf of a line", fmt.Sprintf("leaf of line %d   %x", i+1, leaves[i][:]))
		}
	}
	framed := func(label string, fields ...[]byte) string {
		b := []byte{}
		for _, f := range append([][]byte{[]byte(label)}, fields...) {
			b = append(binary.BigEndian.AppendUint32(b, uint32(len(f))), f...)
		}
		sum := sha3.Sum256(b)
		return hex.EncodeToString(sum[:])
	}
	says("the fingerprint", framed("latticekeep/chain/v1", []byte(chain), key))
	says("the key's id", framed("ML-DSA-65", key))

	node := tlog.NodeHash(leaves[2], leaves[3])
	root := tlog.NodeHash(node, leaves[4])
	says("the node of the group", fmt.Sprintf("node(3, 4)       %x", node[:]))
	says("the root of the group", fmt.Sprintf("root             %x", root[:]))

	whole, err := tlog.TreeHash(int64(len(leaves)), read)
	if err != nil {
		t.Fatal(err)
	}
	if byHand := tlog.NodeHash(tlog.NodeHash(tlog.NodeHash(leaves[0], leaves[1]), node), tlog.NodeHash(leaves[4], leaves[5])); byHand != whole {
		t.Error("the page adds up another tree")
	}
	says("the root in hex", hex.EncodeToString(whole[:]))
	text, signature, _ := strings.Cut(note, "\n\n")
	says("the checkpoint", "```\n"+text+"\n\n"+signature[:strings.LastIndex(signature, " ")+1])
	if lines := strings.Split(text, "\n"); lines[1] != fmt.Sprint(len(leaves)) || lines[2] != whole.String() {
		t.Error("the checkpoint is of another tree")
	}
	encoded := strings.TrimSuffix(signature[strings.LastIndex(signature, " ")+1:], "\n")
	raw, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		t.Fatal(err)
	}
	origin, _, _ := strings.Cut(text, "\n")
	id := sha256.Sum256([]byte(origin + "\n\xfflatticekeep.dev/ml-dsa-65/checkpoint/v1" + string(key)))
	if !bytes.Equal(raw[:4], id[:4]) {
		t.Error("the signature has another key hash")
	}
	says("the key hash", fmt.Sprintf("`%x` ‖ 3309 bytes", id[:4]))
	says("the beginning of the signature", encoded[:8]+"…")

	if out := mustRun(t, "audit", "verify", "--file", example, "--fingerprint", framed("latticekeep/chain/v1", []byte(chain), key)); !strings.Contains(out, "ok: the whole log: 6 entries") {
		t.Error(out)
	}
}
