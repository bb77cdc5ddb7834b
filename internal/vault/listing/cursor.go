package listing

import (
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/pathindex"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Cursors makes and reads the cursors of lists. A cursor encrypts the position that it continues
// after, because the caller may not be allowed to see that credential. It is bound to the tenant, the
// filter and the order, and all cursors of an order have one length. It consists of a MAC over all of
// that, and of the position XORed with a key stream derived from the MAC.
type Cursors struct{ mac.Rows }

// Sizes of the parts of a cursor, in bytes.
const (
	cursorTagSize  = 16
	cursorIDSize   = 16
	cursorTimeSize = 8 + cursorIDSize
	cursorPathSize = 2 + pathindex.MaxPosition // its length, and the position, filled up with zeros
)

// kind is what differs between the cursors of orders: the labels of MAC and key stream, and how many bytes
// a position has.
type kind struct {
	label, stream string
	size          int
}

func kindOf(o Order) kind {
	switch {
	case o == ByName:
		return kind{"latticekeep/path-cursor/v1", "latticekeep/path-cursor-stream/v1", cursorPathSize}
	case o.ofTimes():
		return kind{"latticekeep/time-cursor/v1", "latticekeep/time-cursor-stream/v1", cursorTimeSize}
	}
	return kind{"latticekeep/list-cursor/v1", "latticekeep/list-cursor-stream/v1", cursorIDSize}
}

// Encode returns the cursor for the credentials after a position, which is an id, a position in the index
// of paths, or one of an order of times.
func (c Cursors) Encode(tenant authz.TenantID, f Filter, o Order, after string) string {
	plain := make([]byte, 0, kindOf(o).size)
	if o == ByName {
		plain = binary.BigEndian.AppendUint16(plain, uint16(len(after)))
		plain = append(plain, after...)[:cursorPathSize]
	} else {
		at := len(after) - idLength
		id, _ := authz.IDBytes(record.IDPrefix, after[max(at, 0):])
		plain = append(append(plain, after[:max(at, 0)]...), id[:]...)
	}
	tag := c.tag(tenant, f, o, plain)
	return base64.RawURLEncoding.EncodeToString(append(tag, c.xor(tag, o, plain)...))
}

// idLength is the length of the id of a credential.
var idLength = len(authz.IDFromBytes(record.IDPrefix, [cursorIDSize]byte{}))

// Decode is the inverse of Encode. ok reports whether the cursor belongs to this list.
func (c Cursors) Decode(tenant authz.TenantID, f Filter, o Order, cursor string) (after string, ok bool) {
	b, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil || len(b) != cursorTagSize+kindOf(o).size ||
		base64.RawURLEncoding.EncodeToString(b) != cursor { // rejects another spelling of the same bytes
		return "", false
	}
	plain := c.xor(b[:cursorTagSize], o, b[cursorTagSize:])
	if subtle.ConstantTimeCompare(b[:cursorTagSize], c.tag(tenant, f, o, plain)) != 1 {
		return "", false
	}
	if o == ByName {
		return string(plain[2:][:min(int(binary.BigEndian.Uint16(plain)), pathindex.MaxPosition)]), true
	}
	at := len(plain) - cursorIDSize
	return string(plain[:at]) + authz.IDFromBytes(record.IDPrefix, [cursorIDSize]byte(plain[at:])), true
}

func (c Cursors) tag(tenant authz.TenantID, f Filter, o Order, plain []byte) []byte {
	var before []byte
	if !f.ExpiresBefore.IsZero() {
		before = binary.BigEndian.AppendUint64(nil, uint64(f.ExpiresBefore.UnixMicro()))
	}
	fields := [][]byte{[]byte(tenant), []byte(f.Text), []byte(f.Type), []byte(f.Status), before, plain}
	if f.Prefix != "" {
		fields = append(fields, []byte(f.Prefix))
	}
	if o.ofTimes() {
		fields = append(fields, []byte(o))
	}
	if f.Tag != "" { // the number of the fields says which of them there are
		fields = append(fields, nil, []byte(f.Tag))
	}
	if f.Folders {
		fields = append(fields, nil, nil, nil)
	}
	return c.KeyedHash(kindOf(o).label, fields...)[:cursorTagSize]
}

func (c Cursors) xor(tag []byte, o Order, in []byte) []byte {
	out := make([]byte, 0, len(in))
	for block := 0; len(out) < len(in); block++ {
		fields := [][]byte{tag}
		if o != ByID {
			fields = append(fields, binary.BigEndian.AppendUint16(nil, uint16(block)))
		}
		for _, k := range c.KeyedHash(kindOf(o).stream, fields...) {
			if len(out) < len(in) {
				out = append(out, in[len(out)]^k)
			}
		}
	}
	return out
}
