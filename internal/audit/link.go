package audit

import (
	"encoding/binary"
	"encoding/hex"
	"strings"
)

// link is a position in the chain or in a tenant's part of it. Encoded: sequence u64, Unix
// microseconds u64, 32 bytes hash.
type link struct {
	sequence uint64
	micros   int64
	hash     [32]byte
}

func (k link) encode() []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 48), k.sequence)
	b = binary.BigEndian.AppendUint64(b, uint64(k.micros))
	return append(b, k.hash[:]...)
}

func decodeLink(b []byte) (k link, err error) {
	if b == nil {
		return link{}, nil // there is no entry yet
	}
	if len(b) != 48 {
		return link{}, errDamagedLog
	}
	k.sequence = binary.BigEndian.Uint64(b)
	k.micros = int64(binary.BigEndian.Uint64(b[8:]))
	copy(k.hash[:], b[16:])
	return k, nil
}

func (k link) previous() string {
	if k.sequence == 0 {
		return zeroHash
	}
	return hex.EncodeToString(k.hash[:])
}

// zeroHash is the previous hash of a first entry.
var zeroHash = strings.Repeat("0", 64)

// maxInteger is the largest integer that every JSON reader keeps exact.
const maxInteger = 1<<53 - 1

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
	link
	epoch uint64
}

// newer reports whether k comes later in the log than o.
func (k Head) newer(o Head) bool {
	return k.epoch > o.epoch || k.epoch == o.epoch && k.sequence > o.sequence
}

// Receipt names the place that the log gave to an event. It is filled in when the Update that the
// event joined returns nil, and means nothing before. A closure that runs again gets another
// receipt, and only the last one counts. So a closure that keeps receipts must drop them whenever
// it starts.
type Receipt struct {
	Sequence uint64
	Hash     string // lower-case hex
}
