// Package backup defines the format of a backup. A backup holds the rows of a store in the order in
// which they are applied. A header before them says whose they are, and a trailer after them is
// signed with the deployment's identity key. All of it is encrypted to a post-quantum recipient of
// age.
//
// Rows are copied as the store has them, so keys in them are wrapped. If the KMS key that unwraps
// them is a file, the backup contains it too, and the identity of the recipient is enough to
// restore. The package does not know what a row means.
//
// # Invariants
//
//   - Without the identity of the recipient, a reader learns only the size of a backup and what its
//     [Statement] says, which is public: whose it is, when it was taken, and how many rows it has.
//   - Nothing in a file is trusted before its trailer is verified. [Reader.Rows] passes rows on
//     before that, and its error means that they must be discarded. Anybody can make a file that
//     opens, because recipients are public.
//   - The signature says that the holder of the identity key made the whole file. It does not say
//     whose identity that is: compare [Header.Identity] with a pinned one, or with the deployment's
//     after its keys are open.
//   - Reading takes as much memory as the largest row.
//   - A backup has one encoding: apart from the signature, Reader accepts exactly the bytes that
//     the writer would produce.
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
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/frame"
	"github.com/latticekeep/latticekeep/internal/store"
)

// SigningContext is the context of the signature, and the label of the frame that it covers.
const SigningContext = "latticekeep/backup/v1"

const (
	magic       = "latticekeep-backup-2\n"
	raisedMagic = "latticekeep-backup-3\n" // names the format of a store that not every release reads
	formerMagic = "latticekeep-backup-1\n" // the format before encryption, which is no longer read
	chainSize   = 32
	sumSize     = 32

	// MaxValue is the maximal length of a value in bytes. It is twice that of the largest possible
	// credential.
	MaxValue = 32 << 20

	maxKeys    = 16   // number of files with KMS keys
	maxKeyFile = 4096 // bytes per file
	maxFormat  = 1024 // bytes of the row `format`
)

// Tags at the beginning of a row or of the trailer.
const (
	tagEnd    = 0
	tagPut    = 1
	tagDelete = 2
)

// Header says whose backup it is.
type Header struct {
	Chain     string             // fingerprint of the audit chain: 64 lower-case hex digits
	Identity  *dualsig.PublicKey // the deployment's key; it verifies the signature
	CreatedAt time.Time          // UTC, in whole seconds
	Program   string             // version of the program that wrote it: at most 255 printable ASCII characters
	Format    []byte             // row `format` of a store that not every release reads; nil for any other store
}

// marshal returns magic ‖ chain ‖ identity ‖ u64(created at) ‖ u8(length) ‖ program. With a format
// it returns raisedMagic ‖ u16(length) ‖ format ‖ chain and so on, which earlier releases refuse.
func (h Header) marshal() ([]byte, error) {
	chain, err := hex.DecodeString(h.Chain)
	switch {
	case err != nil || len(chain) != chainSize || hex.EncodeToString(chain) != h.Chain:
		return nil, errors.New("writing the header: the chain is not a fingerprint")
	case h.Identity == nil:
		return nil, errors.New("writing the header: there is no identity key")
	case h.CreatedAt.Unix() < 0:
		return nil, errors.New("writing the header: the time is before 1970")
	case len(h.Program) > 255 || !printable([]byte(h.Program)):
		return nil, errors.New("writing the header: the version is not printable")
	case h.Format != nil && len(h.Format) == 0 || len(h.Format) > maxFormat:
		return nil, fmt.Errorf("writing the header: the format has %d bytes", len(h.Format))
	}
	b := []byte(magic)
	if h.Format != nil {
		b = append(binary.BigEndian.AppendUint16([]byte(raisedMagic), uint16(len(h.Format))), h.Format...)
	}
	b = append(b, chain...)
	b = append(b, h.Identity.Bytes()...)
	b = binary.BigEndian.AppendUint64(b, uint64(h.CreatedAt.Unix()))
	return append(append(b, byte(len(h.Program))), h.Program...), nil
}

func printable(b []byte) bool {
	return !bytes.ContainsFunc(b, func(r rune) bool { return r < ' ' || r > '~' })
}

// Source is a store that can be copied while it is in use. emit gets rows that make one state of
// the store when they are applied in order. A nil value is a deletion.
type Source interface {
	Copy(ctx context.Context, emit func(key, value []byte) error) error
}

// writePlain writes the plaintext of a backup and returns the number of its rows.
func writePlain(ctx context.Context, w io.Writer, s Source, h Header, keys [][]byte, signer Signer) (rows uint64, err error) {
	out, err := newWriter(w, h)
	if err != nil {
		return 0, err
	}
	if err := out.keys(keys); err != nil {
		return 0, err
	}
	if err := s.Copy(ctx, out.row); err != nil {
		return 0, fmt.Errorf("copying the store: %w", err)
	}
	return out.rows, out.end(signer.SignBackup)
}

// writer hashes everything that it writes.
type writer struct {
	out  *bufio.Writer
	sum  hash.Hash
	rows uint64
}

func newWriter(w io.Writer, h Header) (*writer, error) {
	header, err := h.marshal()
	if err != nil {
		return nil, err
	}
	out := &writer{out: bufio.NewWriterSize(w, 64<<10), sum: sha3.New256()}
	return out, out.write(header)
}

func (w *writer) write(b []byte) error {
	_, _ = w.sum.Write(b) // a hash never fails
	if _, err := w.out.Write(b); err != nil {
		return fmt.Errorf("writing the backup: %w", err)
	}
	return nil
}

// keys writes u8(number) ‖ u32(length) ‖ file ‖ …. The first file is empty when the current key is
// not a file but a previous one is.
func (w *writer) keys(files [][]byte) error {
	if len(files) > maxKeys {
		return fmt.Errorf("writing the KMS keys: there are %d, and at most %d fit", len(files), maxKeys)
	}
	if err := w.write([]byte{byte(len(files))}); err != nil {
		return err
	}
	for i, file := range files {
		if len(file) < leastKeyFile(i, len(files)) || len(file) > maxKeyFile {
			return fmt.Errorf("writing the KMS keys: a file of %d bytes is none of a key", len(file))
		}
		if err := errors.Join(w.write(binary.BigEndian.AppendUint32(nil, uint32(len(file)))), w.write(file)); err != nil {
			return err
		}
	}
	return nil
}

// leastKeyFile returns the minimal length of the i-th of n key files.
func leastKeyFile(i, n int) int {
	if i == 0 && n > 1 {
		return 0
	}
	return 1
}

// row writes tag ‖ u16(length) ‖ key, and for a value also u32(length) ‖ value.
func (w *writer) row(key, value []byte) error {
	if len(key) == 0 || len(key) > store.MaxKeySize || len(value) > MaxValue {
		return fault.Wrap(fault.Internal, "internal error", fmt.Errorf("a row of %d and %d bytes does not fit a backup", len(key), len(value)))
	}
	tag := byte(tagPut)
	if value == nil {
		tag = tagDelete
	}
	b := append(binary.BigEndian.AppendUint16([]byte{tag}, uint16(len(key))), key...)
	if value != nil {
		b = binary.BigEndian.AppendUint32(b, uint32(len(value)))
	}
	w.rows++
	if err := w.write(b); err != nil {
		return err
	}
	return w.write(value)
}

// end writes the trailer: tag ‖ u64(rows) ‖ hash of everything before ‖ signature.
func (w *writer) end(sign func(message []byte) ([]byte, error)) error {
	if err := w.write(binary.BigEndian.AppendUint64([]byte{tagEnd}, w.rows)); err != nil {
		return err
	}
	sum := w.sum.Sum(nil)
	signature, err := sign(signed(sum))
	if err != nil {
		return fmt.Errorf("signing the backup: %w", err)
	}
	if err := w.write(append(sum, signature...)); err != nil {
		return err
	}
	if err := w.out.Flush(); err != nil {
		return fmt.Errorf("writing the backup: %w", err)
	}
	return nil
}

func signed(sum []byte) []byte { return frame.Join(SigningContext, sum) }

// Signer signs with the identity key of a deployment. A keyring implements it.
type Signer interface {
	SignBackup(message []byte) ([]byte, error)     // signs for SigningContext
	SignBackupFile(message []byte) ([]byte, error) // signs for FileContext
}
