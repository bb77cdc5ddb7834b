package audit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/go-json-experiment/json"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// errNothingToExport rejects an export that starts after the head.
var errNothingToExport = fault.New(fault.Invalid, "the log does not go that far: export from an earlier sequence")

// Export writes the log as JSON lines: each entry in canonical form, oldest first, then the
// checkpoint of the last one. The export begins with the sequence from, so an interrupted export
// can be resumed; 0 means the first entry that is not archived. Export verifies entries before it
// writes them, up to the head at the time of the call. It signs nothing about a log that is broken
// and returns a [Broken] instead. Other errors: fault.Conflict if entries were archived before they
// were read, fault.Invalid, fault.Unavailable.
func (rd *Reader) Export(ctx context.Context, w io.Writer, from uint64) error {
	if err := rd.export(ctx, w, from); err != nil {
		return fmt.Errorf("exporting the log: %w", err)
	}
	return nil
}

func (rd *Reader) export(ctx context.Context, w io.Writer, from uint64) error {
	head, err := rd.chain.verifiedHead(ctx)
	if err != nil {
		return err
	}
	v, first, err := rd.verifierFrom(ctx, from)
	if err != nil {
		return err
	}
	if first > head.sequence && head.sequence > 0 {
		return errNothingToExport
	}
	if err := rd.exportRange(ctx, w, v, first, max(head.sequence, 1)); err != nil {
		return err
	}
	if v.head != head.link {
		return &Broken{v.head.sequence, "the head of the chain is not the last entry"}
	}
	return nil
}

// verifierFrom returns a verifier that begins at a sequence, or at the first entry that is not
// archived.
func (rd *Reader) verifierFrom(ctx context.Context, from uint64) (*Verifier, uint64, error) {
	base, err := rd.chain.readBase(ctx)
	if err != nil {
		return nil, 0, err
	}
	o, first := Options{PublicKey: rd.chain.key, Base: base}, uint64(1)
	if base != nil {
		first = base.Sequence() + 1
	}
	if from > first {
		o.Base, o.From, first = nil, from, from
	}
	return NewVerifier(o), first, nil
}

// errMeanwhile reports that entries were archived before an export read them.
var errMeanwhile = fault.New(fault.Conflict, "entries were archived while they were exported: export again")

// exportRange writes the entries from one sequence to another, both included, and the checkpoint of
// the last one. The verifier must have seen the entries before the range, or begin with it.
// Afterwards it has seen everything that was written. Errors: a [Broken], or fault.Conflict if the
// missing entries were archived meanwhile.
func (rd *Reader) exportRange(ctx context.Context, w io.Writer, v *Verifier, from, to uint64) error {
	err := rd.writeRange(ctx, w, v, from, to)
	missing := to
	if broken, ok := IsBroken(err); ok {
		missing = broken.Sequence
	} else if !errors.Is(err, errNoEntry) {
		return err
	}
	if moved, failed := rd.chain.movedPast(ctx, missing); failed != nil {
		return failed
	} else if moved {
		return errMeanwhile
	}
	return err
}

func (rd *Reader) writeRange(ctx context.Context, w io.Writer, v *Verifier, from, to uint64) error {
	out := bufio.NewWriterSize(w, 1<<16)
	v.encode = true
	v.emit = func(items []item) error {
		for i := range items {
			if _, err := out.Write(append(items[i].json, '\n')); err != nil {
				return err
			}
		}
		return nil
	}
	defer func() { v.encode, v.emit = false, nil }()
	rng := store.Range{From: entryKey(from), To: entryKey(to + 1)}
	err := v.addRange(ctx, rd.chain.store, rng)
	// Always wait for the verifier, because it writes to out.
	if bad := v.Wait(); bad != nil || err != nil {
		if bad == nil {
			bad = err
		}
		return bad
	}
	if v.head.sequence != to {
		return &Broken{v.next(), fmt.Sprintf("the log was cut: its head is at %d", to)}
	}
	c := v.checkpoint()
	if !v.whole {
		if c, err = rd.CheckpointAt(ctx, to); err != nil {
			return err
		}
		if c.Hash != v.head.hash {
			return &Broken{to, "the stored tree does not agree with the entry"}
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

func (rd *Reader) closing(c Checkpoint) ([]byte, error) {
	signed, err := SignCheckpoint(c, rd.log.signer)
	if err != nil {
		return nil, err
	}
	return json.Marshal(closingLine{string(signed)})
}
