package nodelog_test

import (
	"bytes"
	"crypto/sha3"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/nodelog"
)

// field is a field of a frame as docs/formats.md defines it.
func field(s string) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(len(s)))) + s
}

// documented verifies a file of a node's log as docs/formats.md says, and returns the kinds.
func documented(t *testing.T, file, publicKey []byte, node string) (kinds []string) {
	t.Helper()
	key, err := mldsa.NewPublicKey(mldsa.MLDSA65(), publicKey)
	if err != nil {
		t.Fatal(err)
	}
	const label = "latticekeep/node-log-entry/v1"
	previous, chain := strings.Repeat("0", 64), ""
	for i, line := range strings.Split(strings.TrimSuffix(string(file), "\n"), "\n") {
		var e map[string]any
		d := json.NewDecoder(strings.NewReader(line))
		d.UseNumber()
		if err := d.Decode(&e); err != nil {
			t.Fatal(err)
		}
		text := func(name, absent string) string {
			switch v := e[name].(type) {
			case string:
				return v
			case json.Number:
				return v.String()
			}
			return absent
		}
		framed := field(label)
		for _, name := range []string{"version", "node", "chain", "sequence", "previous", "at", "kind", "key_id", "seed"} {
			framed += field(text(name, ""))
		}
		framed += field(text("count", "0"))
		hash := sha3.Sum256([]byte(framed))
		signature, err := base64.StdEncoding.Strict().DecodeString(text("signature", ""))
		if err != nil {
			t.Fatal(err)
		}
		if err := mldsa.Verify(key, hash[:], signature, &mldsa.Options{Context: label}); err != nil {
			t.Errorf("entry %d: %v", i+1, err)
		}
		if chain == "" {
			chain = text("chain", "")
		}
		if text("previous", "") != previous || text("sequence", "") != strconv.Itoa(i+1) || text("chain", "") != chain || len(chain) != 32 ||
			text("node", "") != node || text("version", "") != "1" {
			t.Errorf("entry %d is %s", i+1, line)
		}
		if at, err := time.Parse("2006-01-02T15:04:05.999Z", text("at", "")); err != nil || at.IsZero() {
			t.Errorf("entry %d has the time %s", i+1, text("at", ""))
		}
		previous = hex.EncodeToString(hash[:])
		kinds = append(kinds, text("kind", ""))
	}
	return kinds
}

func TestALogVerifiesFromTheDocumentation(t *testing.T) {
	dir := t.TempDir()
	key, err := dualsig.NewPrivateKey(bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	log := nodelog.Open(dir, key, nodelog.Options{})
	if err := errors.Join(log.Append(nodelog.Wrapped, "1-ab", []byte("a")), log.Append(nodelog.Opened, "2-ab", []byte("b"))); err != nil {
		t.Fatal(err)
	}
	log.Close()
	public := key.Public().Bytes()
	hash := sha3.Sum256([]byte(field("ML-DSA-65") + field(string(public))))
	node := hex.EncodeToString(hash[:])
	file, err := os.ReadFile(dir + "/log/" + node + "/00000000000000000001.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if kinds := strings.Join(documented(t, file, public, node), " "); kinds != "started wrapped opened" {
		t.Errorf("the log has %s", kinds)
	}
	if seed := sha3.Sum256([]byte("a")); !bytes.Contains(file, []byte(`"key_id":"1-ab","seed":"`+hex.EncodeToString(seed[:])+`"`)) {
		t.Error("the entry has not the digest of the ciphertext")
	}

	e := nodelog.Next(node, nil, time.Now(), nodelog.Dropped)
	e.Count = 12
	if err := e.Sign(key); err != nil {
		t.Fatal(err)
	}
	line, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	if kinds := documented(t, line, public, node); kinds[0] != "dropped" || !bytes.Contains(line, []byte(`"count":12`)) {
		t.Errorf("the entry is %s", line)
	}
}
