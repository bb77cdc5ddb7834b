package backup

import (
	"bufio"
	"bytes"
	"crypto/sha3"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Reader reads a backup once, from its beginning to its end.
type Reader struct {
	Header  Header   // not trusted before Rows has returned nil
	KMSKeys [][]byte // not trusted either; secret key files, the current one first, empty when only previous ones are files

	in   *bufio.Reader
	sum  hash.Hash
	rows uint64
}

var (
	errCut     = fault.New(fault.Invalid, "the backup is cut off: it was not finished, or its end was lost; use another one")
	errChanged = fault.New(fault.Invalid, "the backup was changed since it was written: use another one")

	errNoBackup = fault.New(fault.Invalid, "the file is not a backup that this program reads: name another one, or use the release that wrote it")
	errFormer   = fault.New(fault.Invalid, "the backup is of an earlier release, and not encrypted: restore it with that release, and take a new one with this")
)

// newReader reads the plaintext of a backup up to its rows. Errors: fault.Invalid for a file that
// is not a backup, and any error of r.
func newReader(r io.Reader) (*Reader, error) {
	in := &Reader{in: bufio.NewReaderSize(r, 64<<10), sum: sha3.New256()}
	start := make([]byte, len(magic))
	if err := in.read(start); err != nil && !errors.Is(err, errCut) {
		return nil, err
	}
	var format []byte
	switch string(start) {
	case magic:
	case raisedMagic:
		var b bytes.Buffer
		if err := in.field(&b, 2, 1, maxFormat); err != nil {
			return nil, err
		}
		format = b.Bytes()
	default:
		return nil, errNoBackup
	}
	fixed := make([]byte, chainSize+dualsig.PublicKeySize+8+1)
	if err := in.read(fixed); err != nil {
		return nil, err
	}
	program := make([]byte, fixed[len(fixed)-1])
	if err := in.read(program); err != nil {
		return nil, err
	}
	identity, err := dualsig.ParsePublicKey(fixed[chainSize : chainSize+dualsig.PublicKeySize])
	if err != nil {
		return nil, fmt.Errorf("reading the identity of the backup: %w", err)
	}
	created := binary.BigEndian.Uint64(fixed[chainSize+dualsig.PublicKeySize:])
	if created > maxTime || !printable(program) {
		return nil, errChanged
	}
	in.Header = Header{
		Chain: hex.EncodeToString(fixed[:chainSize]), Identity: identity,
		CreatedAt: time.Unix(int64(created), 0).UTC(), Program: string(program), Format: format,
	}
	return in, in.keys()
}

func (r *Reader) keys() error {
	n, err := r.number(1)
	if err != nil {
		return err
	}
	if n > maxKeys {
		return errChanged
	}
	var file bytes.Buffer
	for i := range int(n) {
		if err := r.field(&file, 4, uint64(leastKeyFile(i, int(n))), maxKeyFile); err != nil {
			return err
		}
		r.KMSKeys = append(r.KMSKeys, bytes.Clone(file.Bytes()))
	}
	clear(file.Bytes())
	return nil
}

// maxTime is the end of the year 9999, so that every time can be printed.
const maxTime = 253402300799

// Rows calls visit for each row. A nil value is a deletion. It returns the number of rows after it
// has verified the trailer and the end of the file. After an error, the caller must use neither the
// header nor any row. The slices are valid only during the call. Errors: fault.Invalid for a file
// that is not whole, and any error of the file or of visit.
func (r *Reader) Rows(visit func(key, value []byte) error) (rows uint64, err error) {
	var key, value bytes.Buffer
	for {
		tag, err := r.number(1)
		if err != nil {
			return 0, err
		}
		switch tag {
		case tagEnd:
			return r.rows, r.end()
		case tagPut, tagDelete:
		default:
			return 0, errChanged
		}
		if err := r.field(&key, 2, 1, store.MaxKeySize); err != nil {
			return 0, err
		}
		given := []byte(nil)
		if tag == tagPut {
			if err := r.field(&value, 4, 0, MaxValue); err != nil {
				return 0, err
			}
			if given = value.Bytes(); given == nil {
				given = []byte{}
			}
		}
		r.rows++
		if err := visit(key.Bytes(), given); err != nil {
			return 0, err
		}
	}
}

// end verifies the rest of the trailer after its tag, and that nothing follows.
func (r *Reader) end() error {
	rows, err := r.number(8)
	if err != nil {
		return err
	}
	sum := r.sum.Sum(nil)
	trailer := make([]byte, sumSize+dualsig.SignatureSize)
	if err := r.read(trailer); err != nil {
		return err
	}
	written, signature := trailer[:sumSize], trailer[sumSize:]
	if rows != r.rows || subtle.ConstantTimeCompare(written, sum) != 1 || !r.Header.Identity.Verify(SigningContext, signed(sum), signature) {
		return errChanged
	}
	if _, err := r.in.ReadByte(); err == nil {
		return fault.New(fault.Invalid, "something follows the end of the backup: use another one")
	} else if !errors.Is(err, io.EOF) {
		return fmt.Errorf("reading the backup: %w", err)
	}
	return nil
}

// read fills b and hashes it.
func (r *Reader) read(b []byte) error {
	if _, err := io.ReadFull(r.in, b); err != nil {
		return cut(err)
	}
	_, _ = r.sum.Write(b) // a hash never fails
	return nil
}

func cut(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errCut
	}
	return fmt.Errorf("reading the backup: %w", err)
}

func (r *Reader) number(size int) (uint64, error) {
	var b [8]byte
	if err := r.read(b[8-size:]); err != nil {
		return 0, err
	}
	return binary.BigEndian.Uint64(b[:]), nil
}

// field reads a length of size bytes, which must be within the bounds, and then as many bytes.
// Memory grows with the bytes that are present, not with the length that is claimed.
func (r *Reader) field(into *bytes.Buffer, size int, least, most uint64) error {
	n, err := r.number(size)
	if err != nil {
		return err
	}
	if n < least || n > most {
		return errChanged
	}
	into.Reset()
	if _, err := io.CopyN(io.MultiWriter(into, r.sum), r.in, int64(n)); err != nil {
		return cut(err)
	}
	return nil
}
