package listing

import (
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Cursors makes and reads the cursors of lists. A cursor encrypts the id that it continues after,
// because the caller may not be allowed to see that credential. It is bound to the tenant and the
// filter. It consists of a MAC over tenant, filter and id, and of the id XORed with a key stream
// derived from the MAC.
type Cursors struct{ mac.Rows }

// Sizes of the two parts of a cursor, in bytes.
const (
	cursorTagSize = 16
	cursorIDSize  = 16
)

// Encode returns the cursor for the credentials after an id.
func (c Cursors) Encode(tenant authz.TenantID, f Filter, after string) string {
	id, _ := authz.IDBytes(record.IDPrefix, after)
	tag := c.tag(tenant, f, id[:])
	return base64.RawURLEncoding.EncodeToString(append(tag, c.xor(tag, id[:])...))
}

// Decode is the inverse of Encode. ok reports whether the cursor belongs to this list.
func (c Cursors) Decode(tenant authz.TenantID, f Filter, cursor string) (after string, ok bool) {
	b, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil || len(b) != cursorTagSize+cursorIDSize ||
		base64.RawURLEncoding.EncodeToString(b) != cursor { // rejects another spelling of the same bytes
		return "", false
	}
	id := c.xor(b[:cursorTagSize], b[cursorTagSize:])
	if subtle.ConstantTimeCompare(b[:cursorTagSize], c.tag(tenant, f, id)) != 1 {
		return "", false
	}
	return authz.IDFromBytes(record.IDPrefix, [cursorIDSize]byte(id)), true
}

func (c Cursors) tag(tenant authz.TenantID, f Filter, id []byte) []byte {
	var before []byte
	if !f.ExpiresBefore.IsZero() {
		before = binary.BigEndian.AppendUint64(nil, uint64(f.ExpiresBefore.UnixMicro()))
	}
	return c.KeyedHash("latticekeep/list-cursor/v1", []byte(tenant), []byte(f.Text), []byte(f.Type),
		[]byte(f.Status), before, id)[:cursorTagSize]
}

func (c Cursors) xor(tag, id []byte) []byte {
	stream := c.KeyedHash("latticekeep/list-cursor-stream/v1", tag)
	out := make([]byte, cursorIDSize)
	subtle.XORBytes(out, id, stream)
	return out
}
