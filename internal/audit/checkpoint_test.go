package audit

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
)

func TestACheckpointIsReadInOneSpellingOnly(t *testing.T) {
	key, err := dualsig.NewPrivateKey(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	want := Checkpoint{ChainID: "chain_x", Epoch: 2, Size: 42, Sequence: 57, Time: time.UnixMicro(1_700_000_000_000_000).UTC()}
	want.Root[0], want.Hash[0] = 1, 2
	signed, err := SignCheckpoint(want, key)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseCheckpoint(signed, key.Public()); err != nil || got != want {
		t.Fatalf("%+v, %v", got, err)
	}
	other, _ := dualsig.NewPrivateKey([]byte(strings.Repeat("x", 32)))
	if _, err := ParseCheckpoint(signed, other.Public()); !errors.Is(err, ErrCheckpointUnverified) {
		t.Errorf("under another key: %v", err)
	}
	for i := range signed {
		changed := append([]byte(nil), signed...)
		changed[i] ^= 1
		if _, err := ParseCheckpoint(changed, key.Public()); err == nil {
			t.Fatalf("byte %d can be changed", i)
		}
	}
}

func TestTheTextOfACheckpointIsReadAsItWasCopied(t *testing.T) {
	key, err := dualsig.NewPrivateKey(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	want := Checkpoint{ChainID: "chain_x", Epoch: 1, Size: 42, Sequence: 42, Time: time.UnixMicro(1_700_000_000_000_000).UTC()}
	copied := "  " + strings.ReplaceAll(want.Text(), "\n", " \r\n")
	if got, signed, err := ParseKept([]byte(copied), key.Public()); err != nil || signed || got != want {
		t.Errorf("%+v, %v, %v", got, signed, err)
	}
	note, err := SignCheckpoint(want, key)
	if err != nil {
		t.Fatal(err)
	}
	if got, signed, err := ParseKept(note, key.Public()); err != nil || !signed || got != want {
		t.Errorf("%+v, %v, %v", got, signed, err)
	}
	for _, bad := range []string{"", "x", copied + "more", strings.Replace(copied, "sequence 42", "sequence 41", 1)} {
		if _, _, err := ParseKept([]byte(bad), key.Public()); !errors.Is(err, ErrCheckpointMalformed) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
