// Package nodelog is a node's log: what the KMS v2 plugin of a control-plane node has wrapped and opened.
// A log is a chain of hashes, and each entry is signed by the node's ML-DSA-65 key, so a log is verified
// with that key alone. The entries are lines of files in the directory of the plugin. One process appends
// ([Log]); others read meanwhile, verify ([VerifyFolder]) and ship to a deployment ([ShipAll]).
//
// What must stay true:
//   - an entry that was written can be neither changed nor removed from the middle without the node's
//     key; with the key, nothing can be changed before an entry whose hash is in a deployment's log;
//   - an entry is on disk when [Log.Append] returns without an error, and what has no entry is counted in
//     a later one, unless the process ends before;
//   - a sequence is never written with two hashes, whatever fails, so what was shipped stays true;
//   - the files have a bound, and only what a deployment says that it has recorded is removed.
package nodelog

import (
	"crypto/rand"
	"crypto/sha3"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// label is that of an entry's frame, and the context of its signature.
const label = "latticekeep/node-log-entry/v1"

// formatVersion is the version of an entry.
const formatVersion = 1

// Kind is what an entry records.
type Kind string

// All kinds.
const (
	Started Kind = "started" // a plugin begins to serve
	Wrapped Kind = "wrapped" // a seed was wrapped
	Opened  Kind = "opened"  // a seed was opened
	Dropped Kind = "dropped" // this many seeds were wrapped or opened without an entry
)

// Entry is one entry of a node's log.
type Entry struct {
	Version  int       `json:"version"`
	Node     string    `json:"node"`     // id of the node's key
	Chain    string    `json:"chain"`    // id of the log: 16 random bytes in lower-case hex
	Sequence uint64    `json:"sequence"` // 1 for the first, without a gap
	Previous string    `json:"previous"` // hash of the entry before, in lower-case hex; zeros for the first
	At       time.Time `json:"at"`       // UTC, in whole milliseconds
	Kind     Kind      `json:"kind"`
	KeyID    string    `json:"key_id,omitempty"` // generation that wrapped or opened
	Seed     string    `json:"seed,omitempty"`   // SHA3-256 of the wrapped seed's ciphertext, in lower-case hex
	Count    uint64    `json:"count,omitempty"`  // what was dropped

	Signature []byte `json:"signature"` // ML-DSA-65, of the hash
}

// Hash returns the SHA3-256 of the entry without its signature.
func (e *Entry) Hash() string {
	sum := e.sum()
	return hex.EncodeToString(sum[:])
}

func (e *Entry) sum() [32]byte {
	return sha3.Sum256(frame.Join(label, []byte(strconv.Itoa(e.Version)), []byte(e.Node), []byte(e.Chain),
		[]byte(strconv.FormatUint(e.Sequence, 10)), []byte(e.Previous), []byte(e.At.UTC().Format(time.RFC3339Nano)),
		[]byte(e.Kind), []byte(e.KeyID), []byte(e.Seed), []byte(strconv.FormatUint(e.Count, 10))))
}

// Genesis is the previous hash of the first entry.
var Genesis = hex.EncodeToString(make([]byte, 32))

// NewChain returns the id of a new log.
func NewChain() string {
	id := make([]byte, 16)
	rand.Read(id) // never fails: crypto/rand ends the program instead
	return hex.EncodeToString(id)
}

// Next returns the unsigned entry after last, which is nil for the first entry of a new log.
func Next(node string, last *Entry, now time.Time, kind Kind) *Entry {
	e := &Entry{Version: formatVersion, Node: node, Sequence: 1, Previous: Genesis, At: now.UTC().Truncate(time.Millisecond), Kind: kind}
	if last == nil {
		e.Chain = NewChain()
		return e
	}
	e.Chain, e.Sequence, e.Previous = last.Chain, last.Sequence+1, last.Hash()
	return e
}

// Sign signs the entry.
func (e *Entry) Sign(key *dualsig.PrivateKey) (err error) {
	sum := e.sum()
	e.Signature, err = key.Sign(label, sum[:])
	return err
}

// Verify checks the entry and its signature by the node's key.
func (e *Entry) Verify(key *dualsig.PublicKey) error {
	if err := e.check(); err != nil {
		return fmt.Errorf("entry %d: %w", e.Sequence, err)
	}
	if e.Node != key.ID() {
		return fmt.Errorf("entry %d is of another node's key, %s", e.Sequence, e.Node)
	}
	if sum := e.sum(); !key.Verify(label, sum[:], e.Signature) {
		return fmt.Errorf("the signature of entry %d does not hold", e.Sequence)
	}
	return nil
}

// Follows reports whether the entry is the one after last.
func (e *Entry) Follows(last *Entry) bool {
	return e.Node == last.Node && e.Chain == last.Chain && e.Sequence == last.Sequence+1 && e.Previous == last.Hash()
}

func (e *Entry) check() error {
	seed := e.Kind == Wrapped || e.Kind == Opened
	_, offset := e.At.Zone()
	switch {
	case e.Version != formatVersion:
		return fmt.Errorf("version %d is not known: use a newer release", e.Version)
	case !isHex(e.Node, 32), !isHex(e.Chain, 16), !isHex(e.Previous, 32):
		return errors.New("node, chain or previous is not in lower-case hex of its length")
	case e.Sequence == 0:
		return errors.New("it has no sequence")
	case (e.Sequence == 1) != (e.Previous == Genesis):
		return errors.New("the first entry alone has no previous one")
	case e.At.IsZero(), offset != 0, !e.At.Equal(e.At.Truncate(time.Millisecond)):
		return errors.New("its time is not UTC in whole milliseconds")
	case !seed && e.Kind != Started && e.Kind != Dropped:
		return fmt.Errorf("kind %.20q is not known: use a newer release", string(e.Kind))
	case seed != (e.KeyID != ""), seed != (e.Seed != ""), seed && !isHex(e.Seed, 32), len(e.KeyID) > 100:
		return errors.New("entries of seeds, and no others, have a key id and a digest of the seed")
	case (e.Kind == Dropped) != (e.Count > 0):
		return errors.New("entries of dropped seeds, and no others, have a count")
	}
	return nil
}

// isHex reports whether s is n bytes in lower-case hex.
func isHex(s string, n int) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(b) == n && hex.EncodeToString(b) == s
}
