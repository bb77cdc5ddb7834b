package export

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/download"
	"github.com/latticekeep/latticekeep/internal/progress"
)

// DownloadLog adds the whole log of a running server, from the last entry in the export on.
func DownloadLog(ctx context.Context, c *client.V2, x *Writer, p *progress.Progress) error {
	params := &v2.ExportAuditLogParams{}
	if x.Last != nil {
		from := int64(x.Last.Sequence)
		params.From = &from
		p.Skip(x.Last.Sequence)
	}
	if newest, err := c.GetCheckpoint(ctx); err == nil { // on an error the progress has no percentage
		p.Expect(uint64(newest.Sequence))
	}
	return fetchLog(ctx, c, params, x.addAll)
}

// fetchLog passes the server's export of the whole log to use.
func fetchLog(ctx context.Context, c *client.V2, params *v2.ExportAuditLogParams, use func(io.Reader) error) error {
	body, err := download.Open(ctx, func(ctx context.Context) (io.ReadCloser, error) { return c.ExportAuditLog(ctx, params) })
	if err != nil {
		return fmt.Errorf("exporting the log: %w", err)
	}
	defer body.Close()
	return use(body)
}

// DownloadTenant adds the entries of the API key's tenant, and closes the export with a checkpoint
// that covers them. It keeps fetched entries in the file part. The caller removes that file once
// the export is on disk.
func DownloadTenant(ctx context.Context, c *client.V2, x *Writer, part string, p *progress.Progress) (err error) {
	s, err := openSpool(part)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.f.Close()) }()
	have := uint64(0)
	if x.Last != nil {
		have = x.Last.TenantSequence
	}
	if err := s.fetch(ctx, c, have, 0, p); err != nil {
		return err
	}
	if s.newest >= have {
		p.Expect(s.newest - have)
	}
	err = s.inOrder(func(line []byte) error { return x.add(bytes.Clone(line)) })
	switch {
	case err != nil:
		return err
	case x.Last == nil:
		return errors.New("the tenant has no entry in the log yet")
	case !x.began:
		return errOtherLog
	}
	if !x.closed {
		newest, err := coveringCheckpoint(ctx, c, x.Last.Sequence)
		if err != nil {
			return err
		}
		line, err := checkpointLine(newest.Checkpoint)
		if err != nil {
			return err
		}
		if err := x.close(line); err != nil {
			return err
		}
	}
	return nil
}

// A checkpoint is at most one second behind the log.
const (
	checkpointPatience = 15 * time.Second
	checkpointPause    = 100 * time.Millisecond
)

// coveringCheckpoint returns the server's newest checkpoint once it covers the entry.
func coveringCheckpoint(ctx context.Context, c *client.V2, sequence uint64) (*v2.CheckpointAnswer, error) {
	ctx, cancel := context.WithTimeout(ctx, checkpointPatience)
	defer cancel()
	for {
		newest, err := c.GetCheckpoint(ctx)
		if err != nil {
			return nil, fmt.Errorf("reading the newest checkpoint: %w", err)
		}
		if uint64(newest.Sequence) >= sequence {
			return newest, nil
		}
		select {
		case <-ctx.Done():
			return nil, &audit.Broken{Sequence: sequence, Reason: "the server's newest checkpoint does not cover it, which it has to within a second"}
		case <-time.After(checkpointPause):
		}
	}
}

// fetchTenant writes the tenant's entries, oldest first.
func fetchTenant(ctx context.Context, c *client.V2, w io.Writer, part string, from uint64) error {
	s, err := openSpool(part)
	if err != nil {
		return err
	}
	defer s.f.Close()
	s.unlinked = true
	if err := s.fetch(ctx, c, 0, from, nil); err != nil {
		return err
	}
	return s.inOrder(func(line []byte) error {
		_, err := w.Write(append(line[:len(line):len(line)], '\n'))
		return err
	})
}
