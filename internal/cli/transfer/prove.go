package transfer

import (
	"bytes"
	"context"
	"crypto/sha3"
	"encoding/binary"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
)

// contents are the properties that two equal stores share.
type contents struct {
	rows   uint64
	digest [32]byte // SHA3-256 over all rows in the order of their keys
	head   string
}

type storedRow struct{ key, value []byte }

// readRows returns the first rows of a range, without the mark, and reports whether there may be
// more.
func readRows(ctx context.Context, s store.Store, in store.Range) (page []storedRow, more bool, err error) {
	err = s.View(ctx, func(r store.Reader) error {
		size := 0
		page, more = nil, false
		return r.Scan(in, func(key, value []byte) bool {
			if bytes.Equal(key, offline.MarkRow) {
				return true
			}
			page = append(page, storedRow{bytes.Clone(key), append([]byte{}, value...)})
			size += len(key) + len(value)
			more = len(page) == offline.BatchRows || size >= offline.BatchBytes
			return !more
		})
	})
	return page, more, err
}

func headOf(r verify.Report) string { return fmt.Sprintf("%d %s", r.Sequence, r.Hash) }

// summarize hashes all rows. For each row it hashes u32(length) ‖ key ‖ u32(length) ‖ value.
func summarize(ctx context.Context, s store.Store, w *contents) error {
	sum := sha3.New256()
	w.rows = 0
	for rest := (store.Range{}); ; {
		page, more, err := readRows(ctx, s, rest)
		if err != nil {
			return err
		}
		for _, row := range page {
			for _, part := range [][]byte{row.key, row.value} {
				_, _ = sum.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part)))) // a hash never fails
				_, _ = sum.Write(part)
			}
		}
		w.rows += uint64(len(page))
		if !more {
			sum.Sum(w.digest[:0])
			return nil
		}
		rest.From = append(page[len(page)-1].key, 0)
	}
}
