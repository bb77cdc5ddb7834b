package reader

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// errNothingToExport rejects an export that starts after the head.
var errNothingToExport = fault.New(fault.Invalid, "the log does not go that far: export from an earlier sequence")

// Export writes the log as JSON lines: each entry in canonical form, oldest first, then the
// checkpoint of the last one. The export begins with the sequence from, so an interrupted export
// can be resumed; 0 means the first entry that is not archived. Export verifies entries before it
// writes them, up to the head at the time of the call. It signs nothing about a log that is broken
// and returns an [audit.Broken] instead. Other errors: fault.Conflict if entries were archived
// before they were read, fault.Invalid, fault.Unavailable.
func (rd *Reader) Export(ctx context.Context, w io.Writer, from uint64) error {
	if err := rd.export(ctx, w, from); err != nil {
		return fmt.Errorf("exporting the log: %w", err)
	}
	return nil
}

func (rd *Reader) export(ctx context.Context, w io.Writer, from uint64) error {
	head, err := rd.chain.VerifiedHead(ctx)
	if err != nil {
		return err
	}
	v, first, err := rd.verifierFrom(ctx, from)
	if err != nil {
		return err
	}
	if first > head.Sequence && head.Sequence > 0 {
		return errNothingToExport
	}
	if err := rd.ExportRange(ctx, w, v, first, max(head.Sequence, 1)); err != nil {
		return err
	}
	if v.Head != head.Position {
		return &audit.Broken{Sequence: v.Head.Sequence, Reason: "the head of the chain is not the last entry"}
	}
	return nil
}

// verifierFrom returns a verifier that begins at a sequence, or at the first entry that is not
// archived.
func (rd *Reader) verifierFrom(ctx context.Context, from uint64) (*verify.Verifier, uint64, error) {
	base, err := rd.chain.LoadBase(ctx, audit.TenantsList) // nothing but the links is needed of it
	if err != nil {
		return nil, 0, err
	}
	o, first := verify.Options{PublicKey: rd.chain.Key, Base: base}, uint64(1)
	if base != nil {
		first = base.Sequence() + 1
	}
	if from > first {
		o.Base, o.From, first = nil, from, from
	}
	return verify.NewVerifier(o), first, nil
}

// errMeanwhile reports that entries were archived before an export read them.
var errMeanwhile = fault.New(fault.Conflict, "entries were archived while they were exported: export again")

// ExportRange writes the entries from one sequence to another, both included, and the checkpoint of
// the last one. The verifier must have seen the entries before the range, or begin with it.
// Afterwards it has seen everything that was written. Errors: an [audit.Broken], or fault.Conflict
// if the missing entries were archived meanwhile.
func (rd *Reader) ExportRange(ctx context.Context, w io.Writer, v *verify.Verifier, from, to uint64) error {
	err := rd.writeRange(ctx, w, v, from, to)
	missing := to
	if broken, ok := audit.IsBroken(err); ok {
		missing = broken.Sequence
	} else if !errors.Is(err, audit.ErrNoEntry) {
		return err
	}
	if moved, failed := rd.chain.IsArchived(ctx, missing); failed != nil {
		return failed
	} else if moved {
		return errMeanwhile
	}
	return err
}

func (rd *Reader) writeRange(ctx context.Context, w io.Writer, v *verify.Verifier, from, to uint64) error {
	out := bufio.NewWriterSize(w, 1<<16)
	v.Encode = true
	v.Emit = func(items []verify.Item) error {
		for i := range items {
			if _, err := out.Write(append(items[i].JSON, '\n')); err != nil {
				return err
			}
		}
		return nil
	}
	defer func() { v.Encode, v.Emit = false, nil }()
	rng := store.Range{From: audit.EntryKey(from), To: audit.EntryKey(to + 1)}
	err := v.AddRange(ctx, rd.chain.Store, rng)
	// Always wait for the verifier, because it writes to out.
	if bad := v.Wait(); bad != nil || err != nil {
		if bad == nil {
			bad = err
		}
		return bad
	}
	if v.Head.Sequence != to {
		return &audit.Broken{Sequence: v.Next(), Reason: fmt.Sprintf("the log was cut: its head is at %d", to)}
	}
	c := v.Checkpoint()
	if !v.IsComplete {
		if c, err = rd.CheckpointAt(ctx, to); err != nil {
			return err
		}
		if c.Hash != v.Head.Hash {
			return &audit.Broken{Sequence: to, Reason: "the stored tree does not agree with the entry"}
		}
	}
	line, err := rd.closing(c)
	if err != nil {
		return err
	}
	if _, err := out.Write(append(line, '\n')); err != nil {
		return err
	}
	return out.Flush()
}

func (rd *Reader) closing(c audit.Checkpoint) ([]byte, error) {
	signed, err := rd.log.SignCheckpoint(c)
	if err != nil {
		return nil, err
	}
	return json.Marshal(verify.ClosingLine{Checkpoint: string(signed)})
}
