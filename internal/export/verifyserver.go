package export

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
)

// VerifyServer verifies what a running server shows. This is the whole log, or the tenant's part
// and its proofs against the newest checkpoint. proven has one line for each proof.
func (v *Verifier) VerifyServer(ctx context.Context, c *client.V2, whole bool, a verify.Options) (report verify.Report, proven []string, err error) {
	pinned := a.Fingerprint
	if a.From > 1 {
		if err := pinKey(ctx, c, &a, a.From); err != nil {
			return verify.Report{}, nil, err
		}
	}
	dir, err := os.MkdirTemp("", "latticekeep-verify-")
	if err != nil {
		return verify.Report{}, nil, fmt.Errorf("making a temporary folder: %w", err)
	}
	defer os.RemoveAll(dir)
	f, err := os.OpenFile(filepath.Join(dir, "log.jsonl"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return verify.Report{}, nil, fmt.Errorf("keeping what the server sends: %w", err)
	}
	defer f.Close()
	if whole {
		params := &v2.ExportAuditLogParams{}
		if a.From > 1 {
			from := int64(a.From)
			params.From = &from
		}
		err = fetchLog(ctx, c, params, func(r io.Reader) error {
			_, err := io.Copy(f, r)
			return err
		})
		if err != nil {
			return verify.Report{}, nil, err
		}
		first, err := Input{f}.First()
		if err != nil {
			return verify.Report{}, nil, err
		}
		if first != nil && first.Sequence > 1 && a.From <= 1 && a.Since == nil && v.Archive == "" {
			line, err := archivedBefore(Input{f}, first)
			if err != nil {
				return verify.Report{}, nil, err
			}
			if err := pinKey(ctx, c, &a, first.Sequence); err != nil {
				return verify.Report{}, nil, err
			}
			proven = append(proven, line)
		}
		report, err := v.verifyOpen(ctx, Input{f}, a)
		return report, proven, err
	}
	if err := fetchTenant(ctx, c, f, filepath.Join(dir, "part"), a.From); err != nil {
		return verify.Report{}, nil, err
	}
	// A tenant's export cannot show the entries of other tenants in the older checkpoint, so prove
	// checks that checkpoint through the tree alone.
	since := a.Since
	a.Tenant, a.Unclosed, a.Since = true, true, nil
	var archived []string
	first, err := Input{f}.First()
	if err != nil {
		return verify.Report{}, nil, err
	}
	if first != nil && first.TenantSequence > 1 && a.From <= 1 {
		if err := pinKey(ctx, c, &a, first.Sequence); err != nil {
			return verify.Report{}, nil, err
		}
		archived = append(archived, fmt.Sprintf("not verified: the tenant's first %d entries, which the server does not have in its database any more: they are in its archive, and in the exports that you kept", first.TenantSequence-1))
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return verify.Report{}, nil, fmt.Errorf("reading what the server sent: %w", err)
	}
	if report, err = verify.Export(f, a); err != nil {
		return verify.Report{}, nil, err
	}
	proven, err = prove(ctx, c, &report, pinned, since)
	return report, append(proven, archived...), err
}

// pinKey has the part of the log from a sequence on verified with the key of the server, or with the
// given one. Such a part names no key itself.
func pinKey(ctx context.Context, c *client.V2, a *verify.Options, from uint64) error {
	a.From = from
	if a.PublicKey != nil {
		return nil
	}
	key, err := FetchLogKey(ctx, c)
	if err != nil {
		return err
	}
	if a.PublicKey = key.Public; a.Fingerprint != "" {
		if a.Fingerprint != key.Fingerprint() {
			return errAnotherLog(from)
		}
		a.Fingerprint = "" // the given key is already the pinned one
	}
	return nil
}

// prove compares the newest verified entry with the server's newest checkpoint, and that checkpoint
// with an older one if since is set.
func prove(ctx context.Context, c *client.V2, report *verify.Report, fingerprint string, since []byte) (proven []string, err error) {
	bad := func(format string, args ...any) error {
		return &audit.Broken{Sequence: report.Sequence, Reason: fmt.Sprintf(format, args...)}
	}
	answer, err := coveringCheckpoint(ctx, c, report.Sequence)
	if err != nil {
		return nil, err
	}
	newest, err := audit.ParseCheckpoint([]byte(answer.Checkpoint), report.PublicKey)
	if err != nil || report.ChainID != "" && newest.ChainID != report.ChainID {
		return nil, bad("the server's newest checkpoint is not signed with the log's key, or is of another log")
	}
	if report.ChainID == "" {
		report.ChainID, report.Fingerprint = newest.ChainID, audit.Fingerprint(newest.ChainID, report.PublicKey.Bytes())
		if fingerprint != "" && fingerprint != report.Fingerprint {
			return nil, errAnotherLog(report.From)
		}
	}
	if newest.Sequence < report.Sequence {
		return nil, bad("the server's newest checkpoint does not cover it")
	}
	inclusion, err := c.ProveInclusion(ctx, &v2.ProveInclusionParams{Sequence: int64(report.Sequence), TreeSize: &newest.Size})
	if err != nil {
		return nil, fmt.Errorf("asking for the proof that entry %d is in the log: %w", report.Sequence, err)
	}
	path, err := hashesOf(inclusion.Path)
	hash, err2 := hex.DecodeString(report.Hash)
	index := inclusion.LeafIndex
	// Only accepted losses skip sequences, and nothing skips indexes.
	placed := index >= 0 && uint64(index) < report.Sequence && (newest.Epoch > 1 || uint64(index) == report.Sequence-1)
	if err != nil || err2 != nil || !placed || tlog.CheckRecord(path, newest.Size, newest.Root, index, tlog.RecordHash(hash)) != nil {
		return nil, bad("the server does not prove that its newest checkpoint covers it")
	}
	proven = append(proven, fmt.Sprintf("checkpoint: entry %d is in the tree of %d entries, epoch %d, signed at %s",
		report.Sequence, newest.Size, newest.Epoch, newest.Time.Format(time.RFC3339)))
	if since == nil {
		return proven, nil
	}
	older, err := proveSince(ctx, c, newest, since, report)
	if err != nil {
		return nil, err
	}
	report.Since = &older
	return proven, nil
}

// proveSince asks the server to prove that the tree of the newest checkpoint extends the tree of an
// older one.
func proveSince(ctx context.Context, c *client.V2, newest audit.Checkpoint, since []byte, report *verify.Report) (older audit.Checkpoint, err error) {
	older, _, err = audit.ParseKept(since, report.PublicKey)
	if err != nil {
		return older, fmt.Errorf("the older checkpoint: %w: give the signed note of this log as it was kept", err)
	}
	forked := &audit.Broken{Sequence: older.Sequence, Reason: fmt.Sprintf("the log does not go on from the older checkpoint, which is of epoch %d and %d entries", older.Epoch, older.Size)}
	if newest.Epoch > older.Epoch {
		forked.Reason += fmt.Sprintf("; it is in epoch %d by now, so whoever runs it has accepted that entries were lost: ask for the entry ROLLBACK_ACCEPTED", newest.Epoch)
	}
	switch {
	case older.ChainID != newest.ChainID:
		return older, fmt.Errorf("the older checkpoint is of another log")
	case older.Size > newest.Size, older.Epoch > newest.Epoch, older.Sequence > newest.Sequence:
		return older, &audit.Broken{Sequence: newest.Sequence + 1, Reason: fmt.Sprintf("the log was cut: the older checkpoint knows entries up to %d", older.Sequence)}
	case older.Size == newest.Size:
		if older.Root != newest.Root || older.Hash != newest.Hash || older.Sequence != newest.Sequence {
			return older, forked
		}
		return older, nil
	}
	proof, err := c.ProveConsistency(ctx, &v2.ProveConsistencyParams{From: older.Size, To: &newest.Size})
	if err != nil {
		return older, fmt.Errorf("asking for the proof that the log only grew: %w", err)
	}
	path, err := hashesOf(proof.Path)
	if err != nil || tlog.CheckTree(path, newest.Size, newest.Root, older.Size, older.Root) != nil {
		return older, forked
	}
	return older, nil
}

// hashesOf parses the hashes of a proof.
func hashesOf(path v2.HashPath) (hashes []tlog.Hash, err error) {
	for _, text := range path {
		h, err := tlog.ParseHash(text)
		if err != nil {
			return nil, fmt.Errorf("reading a proof: %w", err)
		}
		hashes = append(hashes, h)
	}
	return hashes, nil
}
