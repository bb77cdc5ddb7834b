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
	cursorPathSize = 2 + pathindex.MaxPosition // its length, and the position, filled up with zeros
)

// labels of the MAC and of the key stream, by whether the list is in the order of names.
var labels = map[bool][2]string{
	false: {"latticekeep/list-cursor/v1", "latticekeep/list-cursor-stream/v1"},
	true:  {"latticekeep/path-cursor/v1", "latticekeep/path-cursor-stream/v1"},
}

// Encode returns the cursor for the credentials after a position. byName says that it is one of the
// index of paths, and otherwise it is an id.
func (c Cursors) Encode(tenant authz.TenantID, f Filter, byName bool, after string) string {
	var plain []byte
	if byName {
		plain = make([]byte, cursorPathSize)
		binary.BigEndian.PutUint16(plain, uint16(len(after)))
		copy(plain[2:], after)
	} else {
		id, _ := authz.IDBytes(record.IDPrefix, after)
		plain = id[:]
	}
	tag := c.tag(tenant, f, byName, plain)
	return base64.RawURLEncoding.EncodeToString(append(tag, c.xor(tag, byName, plain)...))
}

// Decode is the inverse of Encode. ok reports whether the cursor belongs to this list.
func (c Cursors) Decode(tenant authz.TenantID, f Filter, byName bool, cursor string) (after string, ok bool) {
	size := cursorIDSize
	if byName {
		size = cursorPathSize
	}
	b, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil || len(b) != cursorTagSize+size ||
		base64.RawURLEncoding.EncodeToString(b) != cursor { // rejects another spelling of the same bytes
		return "", false
	}
	plain := c.xor(b[:cursorTagSize], byName, b[cursorTagSize:])
	if subtle.ConstantTimeCompare(b[:cursorTagSize], c.tag(tenant, f, byName, plain)) != 1 {
		return "", false
	}
	if !byName {
		return authz.IDFromBytes(record.IDPrefix, [cursorIDSize]byte(plain)), true
	}
	return string(plain[2:][:binary.BigEndian.Uint16(plain)]), true
}

func (c Cursors) tag(tenant authz.TenantID, f Filter, byName bool, plain []byte) []byte {
	var before []byte
	if !f.ExpiresBefore.IsZero() {
		before = binary.BigEndian.AppendUint64(nil, uint64(f.ExpiresBefore.UnixMicro()))
	}
	fields := [][]byte{[]byte(tenant), []byte(f.Text), []byte(f.Type), []byte(f.Status), before, plain}
	if f.Prefix != "" {
		fields = append(fields, []byte(f.Prefix))
	}
	return c.KeyedHash(labels[byName][0], fields...)[:cursorTagSize]
}

func (c Cursors) xor(tag []byte, byName bool, in []byte) []byte {
	out := make([]byte, 0, len(in))
	for block := 0; len(out) < len(in); block++ {
		fields := [][]byte{tag}
		if byName {
			fields = append(fields, binary.BigEndian.AppendUint16(nil, uint16(block)))
		}
		for _, k := range c.KeyedHash(labels[byName][1], fields...) {
			if len(out) < len(in) {
				out = append(out, in[len(out)]^k)
			}
		}
	}
	return out
}
