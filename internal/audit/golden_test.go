package audit_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// testdata/checkpoint is signed with a key whose seed is 32 zero bytes. It must always verify.
func TestTheGoldenCheckpointVerifies(t *testing.T) {
	signed, err := os.ReadFile(filepath.Join("testdata", "checkpoint"))
	if err != nil {
		t.Fatal(err)
	}
	key, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
	if err != nil {
		t.Fatal(err)
	}
	c, err := audit.ParseCheckpoint(signed, key.Public())
	if err != nil {
		t.Fatal(err)
	}
	b := &audit.TreeBuilder{}
	for b.Size < 300 {
		b.Add(audittest.Numbered(b.Size))
	}
	want := audit.Checkpoint{
		ChainID: "chain_golden", Epoch: 2, Size: 300, Root: b.Root(), Sequence: 310, Hash: audittest.Numbered(299),
		Time: time.Date(2026, 11, 21, 12, 0, 0, 123456000, time.UTC),
	}
	if c != want {
		t.Errorf("%+v, want %+v", c, want)
	}
	const text = "latticekeep.dev/log/chain_golden/2\n300\nSKDFlIOV/vOW8PH5pgUUDSOCTarNmyyZ0gVUxx4vCdg=\nsequence 310\n"
	if !bytes.HasPrefix(signed, []byte(text)) {
		t.Errorf("%s", signed)
	}
}
