package backup

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha3"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"time"

	"filippo.io/age"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
)

// FileContext is the context of the signature of a [Statement], and the label of the frame that it
// covers.
const FileContext = "latticekeep/backup-file/v1"

// CommitsContext is the context of the signature of a segment of the log of commits, and the label of
// the frame that it covers (see package commits).
const CommitsContext = "latticekeep/commits/v1"

const (
	statementMagic = "latticekeep-backup-signature-1\n"
	saidSize       = sumSize + 8 + chainSize + dualsig.PublicKeySize + 8 + 8 + 1

	// StatementSize is the length of a statement in bytes.
	StatementSize = len(statementMagic) + saidSize + dualsig.SignatureSize
)

// Statement is what a deployment says about an encrypted backup. With it, a holder who cannot open
// the file can check that it is complete and unchanged.
type Statement struct {
	Digest    [sumSize]byte // SHA3-256 of the encrypted file
	Size      uint64        // size of the encrypted file in bytes
	Chain     string        // same as in Header
	Identity  *dualsig.PublicKey
	CreatedAt time.Time
	Rows      uint64
	HasKMSKey bool // the file of the current KMS key is inside
}

// said returns the bytes that the signature covers.
func (s Statement) said() ([]byte, error) {
	chain, err := hex.DecodeString(s.Chain)
	if err != nil || len(chain) != chainSize {
		return nil, errors.New("writing the statement: the chain is not a fingerprint")
	}
	b := binary.BigEndian.AppendUint64(bytes.Clone(s.Digest[:]), s.Size)
	b = append(append(b, chain...), s.Identity.Bytes()...)
	b = binary.BigEndian.AppendUint64(b, uint64(s.CreatedAt.Unix()))
	b = binary.BigEndian.AppendUint64(b, s.Rows)
	if s.HasKMSKey {
		return append(b, 1), nil
	}
	return append(b, 0), nil
}

// ParseStatement reads a statement and verifies its signature with the identity that it names. The
// caller compares that identity with a pinned one. Error: fault.Invalid.
func ParseStatement(b []byte) (Statement, error) {
	rest, ok := bytes.CutPrefix(b, []byte(statementMagic))
	if !ok || len(rest) != saidSize+dualsig.SignatureSize {
		return Statement{}, fault.New(fault.Invalid, "this is not the signature of a backup: name the file .sig that was written beside it")
	}
	said, signature := rest[:saidSize], rest[saidSize:]
	next := func(n int) []byte {
		part := rest[:n]
		rest = rest[n:]
		return part
	}
	var s Statement
	copy(s.Digest[:], next(sumSize))
	s.Size = binary.BigEndian.Uint64(next(8))
	s.Chain = hex.EncodeToString(next(chainSize))
	identity, err := dualsig.ParsePublicKey(next(dualsig.PublicKeySize))
	created := binary.BigEndian.Uint64(next(8))
	s.Rows = binary.BigEndian.Uint64(next(8))
	has := next(1)[0]
	s.HasKMSKey = has == 1
	if err != nil || created > maxTime || has > 1 || !identity.Verify(FileContext, frame.Join(FileContext, said), signature) {
		return Statement{}, fault.New(fault.Invalid, "the signature of the backup does not verify: it was changed, or belongs to nothing; use another backup")
	}
	s.Identity, s.CreatedAt = identity, time.Unix(int64(created), 0).UTC()
	return s, nil
}

// Check reads an encrypted backup and compares it with the statement. Errors: fault.Invalid, and
// any error of r.
func (s Statement) Check(r io.Reader) error {
	sum := sha3.New256()
	n, err := io.Copy(sum, r)
	if err != nil {
		return fmt.Errorf("reading the backup: %w", err)
	}
	return s.compare(uint64(n), sum)
}

func (s Statement) compare(size uint64, sum hash.Hash) error {
	switch {
	case size < s.Size:
		return errCut
	case size != s.Size || !bytes.Equal(sum.Sum(nil), s.Digest[:]):
		return errChanged
	}
	return nil
}

// Write writes a backup of s that only to can open, followed by the statement of signer. keys are
// the key files that [Reader] returns as KMSKeys: the KMS keys that wrap the keys in the store.
// After an error, the bytes that were written are not a backup.
func Write(ctx context.Context, w io.Writer, s Source, h Header, keys [][]byte, to Recipient, signer Signer) error {
	written, err := WriteFile(ctx, w, s, h, keys, []Recipient{to}, signer)
	if err != nil {
		return err
	}
	written.Wipe()
	if _, err := w.Write(written.Statement); err != nil {
		return fmt.Errorf("writing the backup: %w", err)
	}
	return nil
}

// Written is a backup that this process has written. Until [Written.Wipe] the process can open the
// file, as the recipients can.
type Written struct {
	Statement []byte // statement of the file
	opener    opener
}

// WriteFile is [Write] for any number of recipients, each of whom can open the file. It does not write
// the statement but returns it.
func WriteFile(ctx context.Context, w io.Writer, s Source, h Header, keys [][]byte, to []Recipient, signer Signer) (*Written, error) {
	if len(to) == 0 {
		return nil, errors.New("encrypting the backup: there is no recipient")
	}
	sum := sha3.New256()
	size := counter(0)
	written := new(Written)
	recipients := []age.Recipient{witness{to[0].age, &written.opener}}
	for _, r := range to[1:] {
		recipients = append(recipients, r.age)
	}
	out := bufio.NewWriterSize(w, 64<<10) // so an early error of the store sends nothing
	file, err := age.Encrypt(io.MultiWriter(out, sum, &size), recipients...)
	if err != nil {
		return nil, fmt.Errorf("encrypting the backup: %w", err)
	}
	rows, err := writePlain(ctx, file, s, h, keys, signer)
	if err != nil {
		return nil, err
	}
	if err := file.Close(); err != nil {
		return nil, fmt.Errorf("encrypting the backup: %w", err)
	}
	statement := Statement{Size: uint64(size), Chain: h.Chain, Identity: h.Identity, CreatedAt: h.CreatedAt, Rows: rows, HasKMSKey: hasCurrent(keys)}
	sum.Sum(statement.Digest[:0])
	said, err := statement.said()
	if err != nil {
		return nil, err
	}
	signature, err := signer.SignBackupFile(frame.Join(FileContext, said))
	if err != nil {
		return nil, fmt.Errorf("signing the backup: %w", err)
	}
	if err := out.Flush(); err != nil {
		return nil, fmt.Errorf("writing the backup: %w", err)
	}
	written.Statement = slices.Concat([]byte(statementMagic), said, signature)
	return written, nil
}

// Open reads the header of the file from r, as [Open] does with an identity.
func (w *Written) Open(r io.Reader) (*Reader, error) { return open(r, &w.opener) }

// Wipe removes what opens the file from memory.
func (w *Written) Wipe() {
	clear(w.opener.key)
	w.opener.key = nil
}

// opener opens one file with its file key.
type opener struct{ key []byte }

// Unwrap implements age.Identity. age compares the key with the header of the file, and takes a copy.
func (o *opener) Unwrap([]*age.Stanza) ([]byte, error) {
	if o.key == nil {
		return nil, age.ErrIncorrectIdentity
	}
	return bytes.Clone(o.key), nil
}

// witness is a recipient that hands the file key to an opener, too.
type witness struct {
	*age.HybridRecipient
	opener *opener
}

// Wrap implements age.Recipient.
func (w witness) Wrap(fileKey []byte) ([]*age.Stanza, error) {
	stanzas, _, err := w.WrapWithLabels(fileKey)
	return stanzas, err
}

// WrapWithLabels implements age.RecipientWithLabels.
func (w witness) WrapWithLabels(fileKey []byte) (stanzas []*age.Stanza, labels []string, err error) {
	w.opener.key = bytes.Clone(fileKey)
	return w.HybridRecipient.WrapWithLabels(fileKey)
}

func hasCurrent(keys [][]byte) bool { return len(keys) > 0 && len(keys[0]) > 0 }

type counter uint64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}

// Open reads the header of an encrypted backup. Errors: fault.Invalid for a file that is not a
// backup or that no identity opens, and any error of r. The caller trusts what it reads afterwards
// only as [Reader] says.
func Open(r io.Reader, identities []Identity) (*Reader, error) {
	return open(r, ageIdentities(identities)...)
}

// Encrypt returns a writer that encrypts to recipients what is written to it, as a backup is. Close
// ends the file, and does not close w.
func Encrypt(w io.Writer, to []Recipient) (io.WriteCloser, error) {
	recipients := make([]age.Recipient, len(to))
	for i, r := range to {
		recipients[i] = r.age
	}
	out, err := age.Encrypt(w, recipients...)
	if err != nil {
		return nil, fmt.Errorf("encrypting: %w", err)
	}
	return out, nil
}

// Decrypt returns a reader of what [Encrypt] encrypted. Its errors are those of [Open], at the first
// byte that is not what was encrypted.
func Decrypt(r io.Reader, identities []Identity) (io.Reader, error) {
	plain, err := age.Decrypt(&reader{Reader: r}, ageIdentities(identities)...)
	if err != nil {
		return nil, opening(err)
	}
	return &reader{Reader: plain, encrypted: true}, nil
}

func ageIdentities(identities []Identity) []age.Identity {
	all := make([]age.Identity, len(identities))
	for i, identity := range identities {
		all[i] = identity.age
	}
	return all
}

func open(r io.Reader, identities ...age.Identity) (*Reader, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	start, err := in.Peek(max(len(ageMagic), len(formerMagic)))
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return nil, fmt.Errorf("reading the backup: %w", err)
	case bytes.HasPrefix(start, []byte(formerMagic)):
		return nil, errFormer
	case !bytes.HasPrefix(start, []byte(ageMagic)):
		return nil, errNoBackup
	}
	plain, err := age.Decrypt(&reader{Reader: in}, identities...)
	if err != nil {
		return nil, opening(err)
	}
	return newReader(&reader{Reader: plain, encrypted: true})
}

// reader separates errors of the file itself from errors that age reports about its content.
// encrypted means that Reader returns what age decrypts.
type reader struct {
	io.Reader
	encrypted bool
}

type readError struct{ error }

func (e readError) Unwrap() error { return e.error }

func (r *reader) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	switch {
	case err == nil || err == io.EOF:
		return n, err
	case r.encrypted:
		return n, opening(err)
	case errors.Is(err, io.ErrUnexpectedEOF): // a broken connection counts as a cut-off file
		return n, err
	}
	return n, readError{err}
}

// opening returns the error to report for an error of age.
func opening(err error) error {
	var failed readError
	var other *age.NoIdentityMatchError
	switch {
	case errors.As(err, &failed):
		return fmt.Errorf("reading the backup: %w", failed.error)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return errCut
	case errors.As(err, &other):
		return fault.New(fault.Invalid, "the identity does not open the backup, which is encrypted to another recipient: name the identity that belongs to it")
	}
	return fault.Wrap(fault.Invalid, "the backup was changed since it was written, or is cut off: use another one", err)
}

// Parts reads an encrypted backup, which a statement may follow.
type Parts struct {
	in        io.Reader
	buffer    []byte
	held      []byte // bytes that were read but not returned yet
	ended     bool
	statement []byte
	size      uint64
	sum       hash.Hash
	err       error
}

// Split returns a reader of the encrypted file alone, without the statement.
func Split(r io.Reader) *Parts {
	return &Parts{in: r, sum: sha3.New256(), buffer: make([]byte, StatementSize+64<<10)}
}

// Read reads the encrypted file. At its end it fails when a statement follows that is not valid for
// the file.
func (p *Parts) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	for !p.ended && len(p.held) <= StatementSize {
		if err := p.fill(); err != nil {
			return 0, err
		}
	}
	free := len(p.held)
	if !p.ended {
		free -= StatementSize
	}
	if free == 0 {
		return 0, p.end()
	}
	n := copy(b, p.held[:free])
	p.held = p.held[n:]
	_, _ = p.sum.Write(b[:n]) // a hash never fails
	p.size += uint64(n)
	return n, nil
}

func (p *Parts) fill() error {
	kept := copy(p.buffer, p.held)
	n, err := p.in.Read(p.buffer[kept:])
	p.held = p.buffer[:kept+n]
	if err == io.EOF {
		p.ended = true
		if at := len(p.held) - StatementSize; at >= 0 && bytes.HasPrefix(p.held[at:], []byte(statementMagic)) {
			p.held, p.statement = p.held[:at], p.held[at:]
		}
		return nil
	}
	return err
}

func (p *Parts) end() error {
	if p.err == nil {
		p.err = io.EOF
		if p.statement != nil {
			s, err := ParseStatement(p.statement)
			if err == nil {
				err = s.compare(p.size, p.sum)
			}
			if err != nil {
				p.err = err
			}
		}
	}
	return p.err
}

// Statement returns the bytes of the statement after the file was read to its end, or nil when it
// has none.
func (p *Parts) Statement() []byte { return p.statement }
