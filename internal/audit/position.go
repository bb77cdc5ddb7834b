package audit

import (
	"encoding/binary"
	"encoding/hex"
	"strings"
)

// Position names an entry by its place in the chain, its time and its hash. Encoded: sequence u64,
// Unix microseconds u64, 32 bytes hash.
type Position struct {
	Sequence uint64
	Micros   int64
	Hash     [32]byte
}

// Encode returns the 48 bytes of the position.
func (k Position) Encode() []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 48), k.Sequence)
	b = binary.BigEndian.AppendUint64(b, uint64(k.Micros))
	return append(b, k.Hash[:]...)
}

// DecodePosition parses an encoded position; nil is the zero position, that of an empty log. Error:
// [ErrDamagedLog].
func DecodePosition(b []byte) (k Position, err error) {
	if b == nil {
		return Position{}, nil // there is no entry yet
	}
	if len(b) != 48 {
		return Position{}, ErrDamagedLog
	}
	k.Sequence = binary.BigEndian.Uint64(b)
	k.Micros = int64(binary.BigEndian.Uint64(b[8:]))
	copy(k.Hash[:], b[16:])
	return k, nil
}

// PreviousHash returns the previous_hash of the entry that follows.
func (k Position) PreviousHash() string {
	if k.Sequence == 0 {
		return ZeroHash
	}
	return hex.EncodeToString(k.Hash[:])
}

// ZeroHash is the previous hash of a first entry.
var ZeroHash = strings.Repeat("0", 64)

// MaxInteger is the largest integer that every JSON reader keeps exact.
const MaxInteger = 1<<53 - 1

// Several processes may write one log. Each has the key, and the store runs their hooks one after
// the other. So a commit finds one of three heads: the one that this process proposed last, the one
// before if that commit failed, or one that another process has written since. The process
// continues from a head of another process only under two conditions. The head must be signed with
// the log's key. And the log must still have the newest entry that this process knows of, unless a
// new epoch was accepted since, because entries may then be missing. Any other head was put in
// place of the log, by an older copy of the database or by hand. The process signs nothing after
// such a head.

// Head is an entry that the store had, with the number of its epoch.
type Head struct {
	Position
	Epoch uint64
}

// Newer reports whether k comes later in the log than o.
func (k Head) Newer(o Head) bool {
	return k.Epoch > o.Epoch || k.Epoch == o.Epoch && k.Sequence > o.Sequence
}

// Receipt names the entry that the log made of an event. It is filled in when the Update that the
// event joined returns nil, and means nothing before. A closure that runs again gets another
// receipt, and only the last one counts. So a closure that keeps receipts must drop them whenever
// it starts.
type Receipt struct {
	Sequence uint64
	Hash     string // lower-case hex
}
