package audit

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha3"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// Checkpoint states the extent of the log: the head of the hash chain, and the size and root of the
// RFC 6962 tree over the hashes of all entries. A signed checkpoint is a C2SP signed note in the
// form of tlog-checkpoint:
//
//	latticekeep.dev/log/<chain id>/<epoch>
//	<size>
//	<base64 of the root>
//	sequence <sequence>
//	hash <hex of the hash>
//	time <timestamp>
//
// The note ends with a line that has the signature. Each epoch is a separate log for its followers,
// because entries that a rollback lost exist only in the earlier epoch.
type Checkpoint struct {
	ChainID  string
	Epoch    uint64 // starts at 1
	Size     int64  // number of entries in the tree
	Root     tlog.Hash
	Sequence uint64   // newest entry
	Hash     [32]byte // SHA3-256 of the newest entry
	Time     time.Time
}

const (
	originPrefix      = "latticekeep.dev/log/"
	checkpointContext = "latticekeep/checkpoint/v1"

	// checkpointKeyType is the type of the signature: 0xff and an identifier of our own, because
	// C2SP has assigned no type to ML-DSA-65 with a context.
	checkpointKeyType = "\xfflatticekeep.dev/ml-dsa-65/checkpoint/v1"
)

// The errors of [ParseCheckpoint].
var (
	// ErrCheckpointMalformed means that the input is not a checkpoint in this format.
	ErrCheckpointMalformed = errors.New("it is not a checkpoint of a latticekeep log")
	// ErrCheckpointUnverified means that the note is not signed with the key.
	ErrCheckpointUnverified = errors.New("its signature does not verify")
)

// Origin returns the name of the log that the checkpoint describes.
func (c Checkpoint) Origin() string { return origin(c.ChainID, c.Epoch) }

func origin(chainID string, epoch uint64) string {
	return originPrefix + chainID + "/" + strconv.FormatUint(epoch, 10)
}

// Text returns the signed text of the checkpoint.
func (c Checkpoint) Text() string {
	return fmt.Sprintf("%s\n%d\n%s\nsequence %d\nhash %x\ntime %s\n",
		c.Origin(), c.Size, c.Root, c.Sequence, c.Hash, c.Time.UTC().Format(TimeFormat))
}

// parseText parses the text of a checkpoint. It accepts only the canonical spelling.
func parseText(text string) (c Checkpoint, err error) {
	lines := strings.Split(text, "\n")
	if len(lines) != 7 {
		return Checkpoint{}, ErrCheckpointMalformed
	}
	name, ok := strings.CutPrefix(lines[0], originPrefix)
	if !ok {
		return Checkpoint{}, ErrCheckpointMalformed
	}
	chain, epoch, _ := strings.Cut(name, "/")
	root, err1 := tlog.ParseHash(lines[2])
	hash, err2 := hex.DecodeString(strings.TrimPrefix(lines[4], "hash "))
	if err1 != nil || err2 != nil || len(hash) != len(c.Hash) {
		return Checkpoint{}, ErrCheckpointMalformed
	}
	c.ChainID, c.Root, c.Hash = chain, root, [32]byte(hash)
	c.Epoch, err = strconv.ParseUint(epoch, 10, 64)
	c.Size, err1 = strconv.ParseInt(lines[1], 10, 64)
	c.Sequence, err2 = strconv.ParseUint(strings.TrimPrefix(lines[3], "sequence "), 10, 64)
	at, err3 := time.Parse(TimeFormat, strings.TrimPrefix(lines[5], "time "))
	c.Time = at
	if errors.Join(err, err1, err2, err3) != nil || c.Epoch == 0 || c.Size < 1 || c.Sequence < uint64(c.Size) ||
		c.Sequence > MaxInteger || c.Text() != text {
		return Checkpoint{}, ErrCheckpointMalformed
	}
	return c, nil
}

// SignCheckpoint returns the checkpoint as a signed note.
func SignCheckpoint(c Checkpoint, key *dualsig.PrivateKey) ([]byte, error) {
	signed, err := note.Sign(&note.Note{Text: c.Text()}, noteSigner{noteKey{c.Origin(), key.Public()}, key})
	if err != nil {
		return nil, fmt.Errorf("signing a checkpoint: %w", err)
	}
	return signed, nil
}

// ParseCheckpoint parses a note and verifies the log's signature. Other signatures, such as
// cosignatures of witnesses, may stand beside it. Errors: [ErrCheckpointMalformed],
// [ErrCheckpointUnverified].
func ParseCheckpoint(signed []byte, key *dualsig.PublicKey) (Checkpoint, error) {
	c, err := PeekCheckpoint(signed)
	if err != nil {
		return Checkpoint{}, err
	}
	opened, err := note.Open(signed, note.VerifierList(noteKey{c.Origin(), key}))
	if err != nil || opened.Text != c.Text() {
		return Checkpoint{}, ErrCheckpointUnverified
	}
	return c, nil
}

// ParseKept parses a checkpoint that a person kept: a signed note, or only its text as a report
// prints it, with any white space at the ends of lines. Plain text has no signature, so signed is
// false and the caller must trust its source. Errors: those of [ParseCheckpoint].
func ParseKept(kept []byte, key *dualsig.PublicKey) (c Checkpoint, signed bool, err error) {
	if bytes.Contains(kept, []byte("\n\n")) {
		c, err = ParseCheckpoint(kept, key)
		return c, true, err
	}
	lines := strings.Split(strings.TrimSpace(string(kept)), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	c, err = parseText(strings.Join(lines, "\n") + "\n")
	return c, false, err
}

// PeekCheckpoint parses a note without verifying it.
func PeekCheckpoint(signed []byte) (Checkpoint, error) {
	text, _, ok := strings.Cut(string(signed), "\n\n")
	if !ok {
		return Checkpoint{}, ErrCheckpointMalformed
	}
	return parseText(text + "\n")
}

// VerifierKey returns the public key for checkpoints of an epoch in the format of C2SP signed
// notes: name, key id, and base64 of type and key.
func VerifierKey(chainID string, epoch uint64, key *dualsig.PublicKey) string {
	k := noteKey{origin(chainID, epoch), key}
	return fmt.Sprintf("%s+%08x+%s", k.name, k.KeyHash(), base64.StdEncoding.EncodeToString(k.typed()))
}

// noteKey is the [note.Verifier] of checkpoints.
type noteKey struct {
	name string
	key  *dualsig.PublicKey
}

func (k noteKey) typed() []byte { return append([]byte(checkpointKeyType), k.key.Bytes()...) }

// Name implements [note.Verifier].
func (k noteKey) Name() string { return k.name }

// KeyHash implements [note.Verifier]. It returns the first four bytes of the SHA-256 hash of the
// name, a newline and the typed key.
func (k noteKey) KeyHash() uint32 {
	h := sha256.New()
	h.Write([]byte(k.name + "\n"))
	h.Write(k.typed())
	return binary.BigEndian.Uint32(h.Sum(nil))
}

// Verify implements [note.Verifier].
func (k noteKey) Verify(text, signature []byte) bool {
	return k.key.Verify(checkpointContext, text, signature)
}

// noteSigner is the [note.Signer] of checkpoints.
type noteSigner struct {
	noteKey
	private *dualsig.PrivateKey
}

// Sign implements [note.Signer].
func (s noteSigner) Sign(text []byte) ([]byte, error) { return s.private.Sign(checkpointContext, text) }

// Fingerprint identifies a chain by the content of its first entry: 64 lower-case hex digits.
// Pinning the fingerprint pins the log that is verified.
func Fingerprint(chainID string, publicKey []byte) string {
	sum := sha3.Sum256(frame.Join("latticekeep/chain/v1", []byte(chainID), publicKey))
	return hex.EncodeToString(sum[:])
}

// Head returns the entry at which the checkpoint was made.
func (c Checkpoint) Head() Head {
	return Head{Position{c.Sequence, c.Time.UnixMicro(), c.Hash}, c.Epoch}
}

// EqualIgnoringTime reports whether two checkpoints are equal except for their times.
func (c Checkpoint) EqualIgnoringTime(d Checkpoint) bool {
	c.Time = d.Time
	return c == d
}

// ParseOwnCheckpoint is [ParseCheckpoint] for a checkpoint that the log keeps itself. It accepts
// only canonical base64, and no signature but the log's.
func ParseOwnCheckpoint(signed []byte, key *dualsig.PublicKey) (Checkpoint, error) {
	c, err := ParseCheckpoint(signed, key)
	if err != nil {
		return Checkpoint{}, err
	}
	_, signature, _ := strings.Cut(string(signed), "\n\n")
	fields := strings.Split(strings.TrimSuffix(signature, "\n"), " ")
	if _, ok := DecodeBase64(fields[len(fields)-1]); !ok || strings.Count(signature, "\n") != 1 {
		return Checkpoint{}, ErrCheckpointMalformed
	}
	return c, nil
}
