package transit

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/keyring"
)

// MaxData bounds one item, in bytes. The API contract names the same number.
const MaxData = 700 << 10

const (
	idPrefix = "tkey"

	messageContext = "latticekeep/message/v1"
	labelSigned    = "latticekeep/message/signed/v1"

	// ciphertextVersion is the first byte of both Data and the joined form.
	ciphertextVersion = 1

	nonceSize  = 12
	tagSize    = 16
	idSize     = 16
	headerSize = 1 + idSize + 4 + 32 + 32 // start of Data, covered by the signature
	dataFixed  = headerSize + dualsig.DualSize + tagSize
	joinedSize = 1 + envelope.KEMCiphertextSize + nonceSize // length before Data in the joined form
)

// Ciphertext is encrypted data in the form that the caller keeps. Nothing of it is stored here.
// KeyID and KeyVersion repeat what Data says, for display only. They are never trusted.
type Ciphertext struct {
	KEM   []byte // ML-KEM-768 ciphertext, 1088 bytes
	Nonce []byte // 12 bytes
	Data  []byte // header, dual signature, AES-256-GCM ciphertext

	KeyID      string
	KeyVersion uint32
}

var errMalformed = errors.New("the bytes are not a ciphertext")

// MarshalBinary returns the joined form: version ‖ KEM ‖ nonce ‖ Data.
func (c Ciphertext) MarshalBinary() ([]byte, error) {
	if _, err := c.parse(); err != nil {
		return nil, fmt.Errorf("encoding ciphertext: %w", err)
	}
	b := append(make([]byte, 0, joinedSize+len(c.Data)), ciphertextVersion)
	return append(append(append(b, c.KEM...), c.Nonce...), c.Data...), nil
}

// ParseCiphertext is the inverse of MarshalBinary. The result shares no memory with b.
func ParseCiphertext(b []byte) (Ciphertext, error) {
	if len(b) < joinedSize+dataFixed || b[0] != ciphertextVersion {
		return Ciphertext{}, fmt.Errorf("decoding ciphertext: %w", errMalformed)
	}
	b = bytes.Clone(b[1:])
	nonce, data := b[envelope.KEMCiphertextSize:joinedSize-1:joinedSize-1], b[joinedSize-1:]
	c := Ciphertext{KEM: b[:envelope.KEMCiphertextSize:envelope.KEMCiphertextSize], Nonce: nonce, Data: data}
	s, err := c.parse()
	if err != nil {
		return Ciphertext{}, fmt.Errorf("decoding ciphertext: %w", err)
	}
	c.KeyID, c.KeyVersion = s.keyID, s.version
	return c, nil
}

// sealed is a parsed ciphertext.
type sealed struct {
	keyID     string
	version   uint32
	message   envelope.Message
	signature []byte
}

// parse splits c by its lengths and checks its version byte. Only the signature says whether the
// content is genuine.
func (c Ciphertext) parse() (*sealed, error) {
	if len(c.KEM) != envelope.KEMCiphertextSize || len(c.Nonce) != nonceSize ||
		len(c.Data) < dataFixed || len(c.Data) > dataFixed+MaxData || c.Data[0] != ciphertextVersion {
		return nil, errMalformed
	}
	rest := c.Data[1:]
	s := &sealed{keyID: authz.IDFromBytes(idPrefix, [idSize]byte(rest))}
	rest = rest[idSize:]
	s.version = binary.BigEndian.Uint32(rest)
	rest = rest[4:]
	rest = rest[copy(s.message.Salt[:], rest):]
	rest = rest[copy(s.message.Commitment[:], rest):]
	s.signature, s.message.Ciphertext = rest[:dualsig.DualSize], rest[dualsig.DualSize:]
	s.message.KEM = c.KEM
	copy(s.message.Nonce[:], c.Nonce)
	return s, nil
}

// header returns the start of Data. It fails for an invalid key id.
func (s *sealed) header() ([]byte, error) {
	id, ok := authz.IDBytes(idPrefix, s.keyID)
	if !ok {
		return nil, errors.New("not a key id")
	}
	b := append(make([]byte, 0, headerSize), ciphertextVersion)
	b = append(b, id[:]...)
	b = binary.BigEndian.AppendUint32(b, s.version)
	b = append(b, s.message.Salt[:]...)
	return append(b, s.message.Commitment[:]...), nil
}

// signed returns the bytes under the dual signature: all of the ciphertext, and the tenant.
func (s *sealed) signed(tenant authz.TenantID) ([]byte, error) {
	header, err := s.header()
	if err != nil {
		return nil, err
	}
	return frame.Join(labelSigned, header, []byte(tenant), s.message.KEM, s.message.Nonce[:], s.message.Ciphertext), nil
}

// join is the inverse of parse.
func (s *sealed) join() (Ciphertext, error) {
	data, err := s.header()
	if err != nil {
		return Ciphertext{}, err
	}
	data = append(append(data, s.signature...), s.message.Ciphertext...)
	return Ciphertext{KEM: s.message.KEM, Nonce: s.message.Nonce[:], Data: data, KeyID: s.keyID, KeyVersion: s.version}, nil
}

// decoy replaces a missing key, and the whole of a malformed ciphertext. It belongs to no tenant.
type decoy struct {
	kem    *envelope.KEMKey
	sealed sealed
}

// newDecoy makes a decoy from random bytes. It can only fail if a size is wrong, which is a defect.
func newDecoy() decoy {
	random := make([]byte, envelope.KEMSeedSize+dualsig.SeedSize+dualsig.MACKeySize)
	_, _ = rand.Read(random) // never fails
	seed, rest := random[:envelope.KEMSeedSize], random[envelope.KEMSeedSize:]
	kem, err := envelope.NewKEMKey(seed)
	signing, err2 := dualsig.NewKey(1, rest[:dualsig.SeedSize], rest[dualsig.SeedSize:])
	d := decoy{kem: kem, sealed: sealed{keyID: authz.NewID(idPrefix), version: 1}}
	message, err3 := kem.Seal(envelope.MessageContext{}, make([]byte, 64))
	signature, err4 := signing.Sign(messageContext, seed)
	if err := errors.Join(err, err2, err3, err4); err != nil {
		panic("transit: making a decoy: " + err.Error())
	}
	d.sealed.message, d.sealed.signature = *message, signature
	return d
}

// instead returns the decoy of a ciphertext. Its signature names the current keys, so verifying it
// costs no more than one verification.
func (d *decoy) instead(current *keyring.Keys) *sealed {
	s := d.sealed
	s.signature = append([]byte(nil), s.signature...)
	binary.BigEndian.PutUint32(s.signature[1:], current.Version)
	return &s
}
