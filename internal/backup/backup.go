// Package backup is the format of a backup: the rows of a store, in the order in
// which they are to be applied, between a header that says whose they are and a
// trailer that the deployment's identity key has signed.
//
// Rows are as the store has them, so nothing in a backup is plaintext that is not
// in the store: keys are wrapped, and the key of the KMS is not among them. The
// package does not know what a row means.
//
// # Invariants
//
//   - Nothing in a file is to be believed before its trailer has been verified:
//     [Reader.Rows] hands on rows before that, and takes them back with its error.
//   - The signature says that whoever has the identity key made the file whole. It
//     does not say whose identity that is: [Header.Identity] is compared with a
//     pinned one, or with that of the deployment once its keys are open.
//   - Reading takes as much memory as the largest row.
//   - What is read is, byte for byte, what would be written, but for the signature.
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

// SigningContext is that of the signature, and the label of the frame it covers.
const SigningContext = "latticekeep/backup/v1"

const (
	magic     = "latticekeep-backup-1\n"
	chainSize = 32
	sumSize   = 32

	// MaxValue is the length of the longest value in bytes: twice the largest
	// credential that there can be.
	MaxValue = 32 << 20
)

// What a row begins with, and what the trailer begins with.
const (
	tagEnd    = 0
	tagPut    = 1
	tagDelete = 2
)

// Header says whose backup it is.
type Header struct {
	Chain     string             // fingerprint of the audit chain: 64 lower-case hex digits
	Identity  *dualsig.PublicKey // of the deployment; it verifies the signature
	CreatedAt time.Time          // UTC, in whole seconds
	Program   string             // version of the program that wrote it: at most 255 printable ASCII characters
}

// marshal returns magic ‖ chain ‖ identity ‖ u64(created at) ‖ u8(length) ‖ program.
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
	}
	b := append([]byte(magic), chain...)
	b = append(b, h.Identity.Bytes()...)
	b = binary.BigEndian.AppendUint64(b, uint64(h.CreatedAt.Unix()))
	return append(append(b, byte(len(h.Program))), h.Program...), nil
}

func printable(b []byte) bool {
	return !bytes.ContainsFunc(b, func(r rune) bool { return r < ' ' || r > '~' })
}

// Source is a store that can be copied while it is in use: emit gets rows that,
// applied in order, make one state of the store. A nil value is a deletion.
type Source interface {
	Copy(ctx context.Context, emit func(key, value []byte) error) error
}

// Write writes a backup of s. sign signs a message with the identity key of the
// header, for [SigningContext]. When it fails, what it has written is no backup.
func Write(ctx context.Context, w io.Writer, s Source, h Header, sign func(message []byte) ([]byte, error)) error {
	out, err := newWriter(w, h)
	if err != nil {
		return err
	}
	if err := s.Copy(ctx, out.row); err != nil {
		return fmt.Errorf("copying the store: %w", err)
	}
	return out.end(sign)
}

// writer hashes what it writes.
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

// row writes tag ‖ u16(length) ‖ key, and unless it is a deletion u32(length) ‖ value.
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

// end writes the trailer: tag ‖ u64(rows) ‖ hash of all that is before ‖ signature.
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
