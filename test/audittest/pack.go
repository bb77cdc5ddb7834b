package audittest

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"hash/crc32"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/store"
)

// EncodePack returns the pack of rows, by their sequences, which must be of one block. It packs
// damaged rows too, and has been written from docs/formats.md.
func EncodePack(rows map[uint64][]byte) []byte {
	var places uint32
	var lengths, items []byte
	var dictionary []byte
	for i := range uint64(entries.BlockSize) {
		for sequence, row := range rows {
			if (sequence-1)%entries.BlockSize != i {
				continue
			}
			head, core := row, []byte(nil)
			if c, _, err := audit.SplitRow(row); err == nil {
				head, core = row[:len(row)-len(c)], c
			}
			rest := bytes.NewBuffer(bytes.Clone(head))
			if places == 0 {
				dictionary = core
				rest.Write(core)
			} else if core != nil {
				z, _ := flate.NewWriterDict(rest, flate.BestCompression, dictionary)
				_, _ = z.Write(core)
				_ = z.Close()
			}
			places |= 1 << i
			lengths = binary.BigEndian.AppendUint32(lengths, uint32(4+rest.Len()))
			items = binary.BigEndian.AppendUint32(items, crc32.Checksum(rest.Bytes(), crc32.MakeTable(crc32.Castagnoli)))
			items = append(items, rest.Bytes()...)
		}
	}
	return append(append(binary.BigEndian.AppendUint32([]byte{1}, places), lengths...), items...)
}

// PackUpTo packs all entries up to a sequence, whether they are closed or not.
func PackUpTo(tx store.Tx, to uint64) error {
	blocks := make(map[uint64]map[uint64][]byte)
	err := tx.Scan(store.Range{From: audit.EntryKey(1), To: audit.EntryKey(to + 1)}, func(key, row []byte) bool {
		sequence := audit.SequenceOf(key[len(audit.EntryRange.From):])
		block := (sequence - 1) / entries.BlockSize
		if blocks[block] == nil {
			blocks[block] = make(map[uint64][]byte)
		}
		blocks[block][sequence] = bytes.Clone(row)
		return true
	})
	for block, rows := range blocks {
		if err == nil {
			err = tx.Put(entries.PackKey(block), EncodePack(rows))
		}
		for sequence := range rows {
			if err == nil {
				err = tx.Delete(audit.EntryKey(sequence))
			}
		}
	}
	return err
}

// UnpackedTx shows packed entries as if they had rows of their own. What is written to such a row
// changes the pack. So a test that tampers with a row tampers with its twin in a pack.
type UnpackedTx struct{ store.Tx }

func (tx UnpackedTx) Get(key []byte) ([]byte, error) {
	if rows, sequence, err := tx.packOf(key); rows != nil || err != nil {
		return rows[sequence], err
	}
	return tx.Tx.Get(key)
}

func (tx UnpackedTx) Scan(rng store.Range, visit func(key, value []byte) bool) error {
	if bytes.HasPrefix(rng.From, audit.EntryRange.From) {
		return entries.Scan(tx.Tx, rng, visit)
	}
	return tx.Tx.Scan(rng, visit)
}

func (tx UnpackedTx) Put(key, value []byte) error {
	rows, sequence, err := tx.packOf(key)
	if rows == nil || err != nil {
		if err == nil {
			err = tx.Tx.Put(key, value)
		}
		return err
	}
	rows[sequence] = append([]byte{}, value...)
	return tx.Tx.Put(entries.PackKey((sequence-1)/entries.BlockSize), EncodePack(rows))
}

func (tx UnpackedTx) Delete(key []byte) error {
	rows, sequence, err := tx.packOf(key)
	if rows == nil || err != nil {
		if err == nil {
			err = tx.Tx.Delete(key)
		}
		return err
	}
	delete(rows, sequence)
	if len(rows) == 0 {
		return tx.Tx.Delete(entries.PackKey((sequence - 1) / entries.BlockSize))
	}
	return tx.Tx.Put(entries.PackKey((sequence-1)/entries.BlockSize), EncodePack(rows))
}

// packOf returns the rows of the pack that an entry belongs in, by its key, and nil if there is none.
func (tx UnpackedTx) packOf(key []byte) (rows map[uint64][]byte, sequence uint64, err error) {
	if !bytes.HasPrefix(key, audit.EntryRange.From) || len(key) != len(audit.EntryRange.From)+8 {
		return nil, 0, nil
	}
	sequence = binary.BigEndian.Uint64(key[len(audit.EntryRange.From):])
	block := (sequence - 1) / entries.BlockSize
	if b, err := tx.Tx.Get(entries.PackKey(block)); b == nil || err != nil {
		return nil, 0, err
	}
	rows = make(map[uint64][]byte)
	for n := block*entries.BlockSize + 1; n <= (block+1)*entries.BlockSize; n++ {
		row, err := entries.ReadRow(tx.Tx, n)
		if err != nil {
			return nil, 0, err
		}
		if row != nil {
			rows[n] = bytes.Clone(row)
		}
	}
	return rows, sequence, nil
}

// OfBothKinds runs a test on entries with rows of their own, and on packed ones.
func OfBothKinds(t *testing.T, test func(t *testing.T, packed bool)) {
	t.Run("rows", func(t *testing.T) { test(t, false) })
	t.Run("packs", func(t *testing.T) { test(t, true) })
}
