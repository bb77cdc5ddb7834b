package sealing

import (
	"bytes"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// MaxDocumentBytes bounds the encoding of a [Document]. A document has about 9 KiB.
const MaxDocumentBytes = 16 << 10

const (
	documentVersion   = 1
	documentContext   = "latticekeep/sealing-key/v1" // context of the signature, and label of the frame that it covers
	identityAlgorithm = "ML-DSA-65"
	timeLayout        = "2006-01-02T15:04:05Z" // UTC, whole seconds
)

// Document is a public sealing key, signed with the deployment's identity key. Only [Sign] and
// [ParseDocument] make one, so the signature of a Document always verifies. The signature says that
// the document is intact, not whose it is: trust a document from a network only after
// [Document.CheckIdentity].
type Document struct {
	key       *envelope.SealingPublicKey
	createdAt time.Time
	identity  *dualsig.PublicKey
	signature []byte
}

// wireDocument is the JSON form. Its field order is part of the format.
type wireDocument struct {
	Version   int          `json:"version"`
	Suite     string       `json:"suite"`
	KeyID     string       `json:"key_id"`
	PublicKey []byte       `json:"public_key"`
	CreatedAt string       `json:"created_at"`
	Identity  wireIdentity `json:"identity"`
	Signature []byte       `json:"signature"`
}

type wireIdentity struct {
	Algorithm string `json:"algorithm"`
	PublicKey []byte `json:"public_key"`
}

// Sign returns the document of key. It keeps createdAt in whole seconds.
func Sign(identity *dualsig.PrivateKey, key *envelope.SealingPublicKey, createdAt time.Time) (Document, error) {
	d := Document{key: key, createdAt: createdAt.UTC().Truncate(time.Second), identity: identity.Public()}
	sig, err := identity.Sign(documentContext, d.signed())
	if err != nil {
		return Document{}, fmt.Errorf("signing sealing key %s: %w", key.ID(), err)
	}
	d.signature = sig
	return d, nil
}

// ParseDocument reads the JSON form of a document and verifies it. Every field must be present, in
// order and in its canonical encoding; only white space between tokens is free. key_id must be the
// id of public_key, and the signature must be from the identity key inside the document.
func ParseDocument(b []byte) (Document, error) {
	if len(b) > MaxDocumentBytes {
		return Document{}, fmt.Errorf("a sealing key document is at most %d bytes: this is another file", MaxDocumentBytes)
	}
	var w wireDocument
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&w); err != nil {
		return Document{}, fmt.Errorf("decoding sealing key document: %w", err)
	}
	if w.Version != documentVersion {
		return Document{}, fmt.Errorf("the sealing key document has version %d and this program reads version %d: upgrade it", w.Version, documentVersion)
	}
	// Comparing with the canonical encoding refuses duplicate keys, other spellings of a key and
	// lenient base64 in one step.
	var compact bytes.Buffer
	if err := json.Compact(&compact, b); err != nil {
		return Document{}, fmt.Errorf("decoding sealing key document: %w", err)
	}
	if canonical, err := json.Marshal(w); err != nil || !bytes.Equal(canonical, compact.Bytes()) {
		return Document{}, errors.New("the sealing key document was changed since it was written: fetch it again")
	}
	if w.Identity.Algorithm != identityAlgorithm {
		return Document{}, errors.New("the sealing key document's identity algorithm is not " + identityAlgorithm)
	}
	key, err := envelope.ParseSealingPublicKey(envelope.Suite(w.Suite), w.PublicKey)
	if err != nil {
		return Document{}, fmt.Errorf("parsing public_key of sealing key document: %w", err)
	}
	if key.ID() != w.KeyID {
		return Document{}, errors.New("the sealing key document's key_id is not that of its public_key: fetch it again")
	}
	createdAt, err := time.Parse(timeLayout, w.CreatedAt)
	// time.Parse accepts a fraction that the layout does not have.
	if err != nil || createdAt.Format(timeLayout) != w.CreatedAt {
		return Document{}, errors.New("the sealing key document's created_at is not a UTC time in whole seconds")
	}
	identity, err := dualsig.ParsePublicKey(w.Identity.PublicKey)
	if err != nil {
		return Document{}, fmt.Errorf("parsing identity of sealing key document: %w", err)
	}
	d := Document{key: key, createdAt: createdAt, identity: identity, signature: w.Signature}
	if !identity.Verify(documentContext, d.signed(), w.Signature) {
		return Document{}, errors.New("the sealing key document's signature does not verify: it was changed; fetch it again")
	}
	return d, nil
}

// signed returns the message under the signature: every field except the signature.
func (d Document) signed() []byte {
	return frame.Join(documentContext,
		frame.Uint64(documentVersion),
		[]byte(d.key.Suite()),
		[]byte(d.key.ID()),
		d.key.Bytes(),
		frame.Uint64(uint64(d.createdAt.Unix())),
		[]byte(identityAlgorithm),
		d.identity.Bytes(),
	)
}

// MarshalJSON writes the form that [ParseDocument] reads.
func (d Document) MarshalJSON() ([]byte, error) {
	if d.key == nil {
		return nil, errors.New("an empty sealing key document has no encoding")
	}
	return json.Marshal(wireDocument{
		Version:   documentVersion,
		Suite:     string(d.key.Suite()),
		KeyID:     d.key.ID(),
		PublicKey: d.key.Bytes(),
		CreatedAt: d.createdAt.Format(timeLayout),
		Identity:  wireIdentity{Algorithm: identityAlgorithm, PublicKey: d.identity.Bytes()},
		Signature: d.signature,
	})
}

// Key returns the sealing key.
func (d Document) Key() *envelope.SealingPublicKey { return d.key }

// CreatedAt returns when the sealing key was created.
func (d Document) CreatedAt() time.Time { return d.createdAt }

// Identity returns the fingerprint of the identity key that signed the document, in lower-case hex.
func (d Document) Identity() string { return d.identity.ID() }

// CheckIdentity returns nil when pinned is the fingerprint of the identity that signed the
// document. Otherwise it returns an error that names the actual fingerprint and the remedy. It
// compares in constant time.
func (d Document) CheckIdentity(pinned string) error {
	if b, err := hex.DecodeString(pinned); err != nil || len(b) != 32 || hex.EncodeToString(b) != pinned {
		return errors.New("the pinned identity is not a fingerprint: it has 64 lower-case hexadecimal digits")
	}
	if subtle.ConstantTimeCompare([]byte(pinned), []byte(d.Identity())) != 1 {
		return fmt.Errorf("the sealing key is signed by identity %s, which is not the pinned one: this is another deployment or "+
			"someone in between; do not seal for it unless its operator confirms the new fingerprint over another channel", d.Identity())
	}
	return nil
}
