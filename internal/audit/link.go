package audit

import (
	"encoding/binary"
	"encoding/hex"
	"strings"
)

// link is a position in the chain or in a tenant's part of it: sequence u64,
// Unix microseconds u64, 32 bytes hash.
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
		return link{}, nil // nothing before the first entry
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

// zeroHash stands for the predecessor of a first entry.
var zeroHash = strings.Repeat("0", 64)

// maxInteger is the largest integer that every JSON reader keeps exact.
const maxInteger = 1<<53 - 1

// Several processes may write one log: each has the key, and the store runs their
// hooks one after the other. So the head that a commit finds is the one that this
// process has proposed last, or the one before if that commit failed, or one that
// another process has written since. That is gone on from only when it is signed
// with the log's key and the log still has the newest entry that this process knows
// it to have had, or an epoch was accepted since: then entries may be missing.
// Whatever else is there was put in the place of the log, as an older copy of the
// database, or by hand: nothing is signed on top of it.

// Head is an entry that the store had, and the number of its epoch.
type Head struct {
	link
	epoch uint64
}

// newer reports whether k comes later in the log than o.
func (k Head) newer(o Head) bool {
	return k.epoch > o.epoch || k.epoch == o.epoch && k.sequence > o.sequence
}

// Receipt tells the place that an event was given. It is filled in when the
// Update it joined has returned nil, and means nothing before. A closure that runs
// again gets another one: only that of its last run counts, and so whoever keeps it
// forgets it at the beginning of each.
type Receipt struct {
	Sequence uint64
	Hash     string // lower-case hex
}
