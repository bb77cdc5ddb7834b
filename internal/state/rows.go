package state

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// The rows of the structure. docs/formats.md has their bytes.
var (
	// HeadKey is the key of the row that says which change is the newest.
	HeadKey    = []byte("state/head")
	journal    = []byte("state/change/")
	runs       = []byte("state/run/")
	ownRows    = store.Prefix([]byte("state/"))
	runRows    = store.Prefix(runs)
	cursorKey  = []byte("state/building")
	errDamaged = fault.New(fault.Internal, "the rows of the state do not fit together: restore a backup")
)

const rowVersion = 1

func changeKey(number uint64) []byte {
	return binary.BigEndian.AppendUint64(bytes.Clone(journal), number)
}

func runKey(from id) []byte { return append(bytes.Clone(runs), from[:]...) }

// commitment is the hash of a change and, through it, of all changes before.
type commitment [sha256.Size]byte

// change is a row of the journal: what one commit changed.
type change struct {
	previous commitment
	records  []record
	folds    [][]foldedRun
}

// foldedRun names a run as a fold has left it.
type foldedRun struct {
	from   id
	len    uint32 // number of records
	digest [sha256.Size]byte
}

func (p piece) folded() foldedRun {
	return foldedRun{p.from, uint32(len(p.records) / recordSize), sha256.Sum256(p.records)}
}

const foldedSize = idSize + 4 + sha256.Size

func (c change) encode() []byte {
	b := append([]byte{rowVersion}, c.previous[:]...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(c.records)))
	for _, r := range c.records {
		b = r.append(b)
	}
	for _, f := range c.folds {
		b = binary.BigEndian.AppendUint32(b, uint32(len(f)))
		for _, p := range f {
			b = append(b, p.from[:]...)
			b = binary.BigEndian.AppendUint32(b, p.len)
			b = append(b, p.digest[:]...)
		}
	}
	return b
}

func decodeChange(b []byte) (c change, err error) {
	if len(b) < 1+len(c.previous)+4 || b[0] != rowVersion {
		return c, errDamaged
	}
	copy(c.previous[:], b[1:])
	b = b[1+len(c.previous):]
	n := int(binary.BigEndian.Uint32(b))
	if b = b[4:]; n > len(b)/recordSize {
		return c, errDamaged
	}
	c.records = make([]record, n)
	for i := range c.records {
		c.records[i] = recordAt(b[i*recordSize:])
	}
	for b = b[n*recordSize:]; len(b) > 0; {
		if len(b) < 4 {
			return c, errDamaged
		}
		n := int(binary.BigEndian.Uint32(b))
		if b = b[4:]; n == 0 || n > len(b)/foldedSize {
			return c, errDamaged
		}
		f := make([]foldedRun, n)
		for i := range f {
			at := b[i*foldedSize:]
			copy(f[i].from[:], at)
			f[i].len = binary.BigEndian.Uint32(at[idSize:])
			copy(f[i].digest[:], at[idSize+4:])
		}
		c.folds, b = append(c.folds, f), b[n*foldedSize:]
	}
	return c, nil
}

// commit returns the commitment of a row of the journal.
func commit(number uint64, row []byte) commitment {
	return sha256.Sum256(frame.Join("latticekeep/state/v1", frame.Uint64(number), row))
}

// head is the row that binds the newest change to the newest entry of the log. Each commit writes
// it.
type head struct {
	complete   bool   // all deciding rows are in the state; else it is being built
	number     uint64 // the newest change
	oldest     uint64 // number of the first change that the journal keeps
	commitment commitment
	entry      uint64         // sequence of the entry that names the commitment; 0 for none
	log        audit.Position // newest entry of the log
}

const headSize = 1 + 1 + 8 + 8 + 32 + 8 + 48 + sha256.Size

func (h *hasher) encodeHead(d head) []byte {
	b := make([]byte, 0, headSize)
	b = append(b, rowVersion, 0)
	if d.complete {
		b[1] = 1
	}
	b = binary.BigEndian.AppendUint64(b, d.number)
	b = binary.BigEndian.AppendUint64(b, d.oldest)
	b = append(b, d.commitment[:]...)
	b = binary.BigEndian.AppendUint64(b, d.entry)
	b = append(b, d.log.Encode()...)
	mac := sum(h.heads, "latticekeep/state-head/v1", b)
	return append(b, mac[:]...)
}

func (h *hasher) decodeHead(b []byte) (d head, err error) {
	if len(b) != headSize || b[0] != rowVersion || b[1] > 1 {
		return d, fmt.Errorf("%w: %s is not of this format", errDamaged, HeadKey)
	}
	body := b[:headSize-sha256.Size]
	if mac := sum(h.heads, "latticekeep/state-head/v1", body); !hmac.Equal(mac[:], b[len(body):]) {
		return d, fmt.Errorf("%w: this deployment did not write %s", errDamaged, HeadKey)
	}
	d.complete = b[1] == 1
	d.number = binary.BigEndian.Uint64(b[2:])
	d.oldest = binary.BigEndian.Uint64(b[10:])
	copy(d.commitment[:], b[18:])
	d.entry = binary.BigEndian.Uint64(b[50:])
	d.log, err = audit.DecodePosition(body[58:])
	return d, err
}

// journalReader reads the journal, and verifies that each change follows the one before.
type journalReader struct {
	next     uint64     // number of the first change that was not read yet
	previous commitment // the commitment of the change before next
	begun    bool       // previous is known
}

// read passes the changes up to that of a head to visit, and verifies that the last has the head's
// commitment. It stops after about limit bytes unless limit is 0, and reports whether there are
// more. Error: errDamaged.
func (j *journalReader) read(r store.Reader, h head, limit int, visit func(number uint64, c change)) (more bool, err error) {
	size := 0
	var bad error
	err = r.Scan(store.Range{From: changeKey(j.next), To: changeKey(h.number + 1)}, func(key, row []byte) bool {
		if more = limit > 0 && size >= limit; more {
			return false
		}
		var c change
		switch c, bad = decodeChange(row); {
		case bad != nil:
		case !bytes.Equal(key, changeKey(j.next)):
			bad = fmt.Errorf("%w: change %d is not there", errDamaged, j.next)
		case j.begun && c.previous != j.previous:
			bad = fmt.Errorf("%w: change %d does not follow the one before", errDamaged, j.next)
		default:
			visit(j.next, c)
			j.previous, j.begun = commit(j.next, row), true
			j.next++
			size += len(row)
		}
		return bad == nil
	})
	if err != nil || bad != nil || more {
		return more, errors.Join(err, bad)
	}
	if j.next != h.number+1 || j.previous != h.commitment {
		return false, fmt.Errorf("%w: change %d is not the one that %s names", errDamaged, j.next-1, HeadKey)
	}
	return false, nil
}

// HeadOf returns the number and the commitment of the newest change, as the row of the head says them.
// It verifies nothing, and ok is false for a row of another form.
func HeadOf(row []byte) (number uint64, commitment [32]byte, ok bool) {
	if len(row) != headSize || row[0] != rowVersion {
		return 0, commitment, false
	}
	copy(commitment[:], row[18:])
	return binary.BigEndian.Uint64(row[2:]), commitment, true
}
