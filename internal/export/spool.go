package export

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/progress"
)

// timeFormat is the time format of entries. It always has six decimals.
const timeFormat = "2006-01-02T15:04:05.000000Z"

// entryOf converts an entry of an API response to an audit.Entry.
func entryOf(e *v2.AuditEntry) *audit.Entry {
	return &audit.Entry{
		Actor: audit.Actor{ID: e.Actor.Id, Type: string(e.Actor.Type)}, Attributes: e.Attributes, EventType: audit.EventType(e.EventType),
		Hash: e.Hash, KeyID: e.KeyId, Outcome: audit.Outcome(e.Outcome), PreviousHash: e.PreviousHash, RequestID: e.RequestId,
		Resource: audit.Resource{ID: e.Resource.Id, Type: string(e.Resource.Type)}, Salt: base64.StdEncoding.EncodeToString(e.Salt),
		Sequence: uint64(e.Sequence), Signature: base64.StdEncoding.EncodeToString(e.Signature), SourceIP: e.SourceIp, TenantID: e.TenantId,
		TenantPreviousHash: e.TenantPreviousHash, TenantSequence: uint64(e.TenantSequence), Timestamp: e.Timestamp.UTC().Format(timeFormat),
	}
}

// spool keeps the fetched entries of a tenant, newest first as the API lists them, until they are
// put in order. It holds a line for each entry, and after each page a line with the cursor of the
// next page. A run after an interruption continues after the last page.
type spool struct {
	f               *os.File
	unlinked        bool   // skip the hash links; a later verification names the entries that do not fit
	newest, oldest  uint64 // tenant sequences; 0: none
	previous        string // hash that the next entry must have
	cursor          string
	begun, complete bool
	size            int64
}

// pageEnd is the line after a page.
type pageEnd struct {
	Cursor string `json:"cursor"` // empty after the last page
}

var pagePrefix = []byte(`{"cursor":`)

var errOtherPart = errors.New("what an export that was broken off had fetched does not link up with the server's log: remove the .part file and export again")

func openSpool(path string) (s *spool, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the file of what was fetched: %w", err)
	}
	s = &spool{f: f}
	if err := s.find(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

// find restores the state from the complete pages in the file and cuts off the rest.
func (s *spool) find() error {
	in := bufio.NewReaderSize(s.f, 1<<20)
	page, at := *s, int64(0)
	for {
		line, err := in.ReadSlice('\n')
		if err == io.EOF {
			break
		}
		if err != nil {
			return errOtherPart
		}
		at += int64(len(line))
		line = line[:len(line)-1]
		if !bytes.HasPrefix(line, pagePrefix) {
			e, err := audit.ParseEntry(line)
			if err != nil || page.take(e) != nil {
				return errOtherPart
			}
			continue
		}
		var end pageEnd
		if err := json.Unmarshal(line, &end); err != nil {
			return errOtherPart
		}
		page.begun, page.cursor, page.complete, page.size = true, end.Cursor, end.Cursor == "", at
		*s = page
	}
	if err := s.f.Truncate(s.size); err != nil {
		return fmt.Errorf("cutting what was fetched: %w", err)
	}
	_, err := s.f.Seek(s.size, io.SeekStart)
	return err
}

// take records an entry. It must be the one directly before the entry taken last.
func (s *spool) take(e *audit.Entry) error {
	switch {
	case s.oldest == 0:
		s.newest = e.TenantSequence
	case e.TenantSequence >= s.oldest, !s.unlinked && (e.TenantSequence != s.oldest-1 || e.Hash != s.previous):
		return &audit.Broken{Sequence: e.Sequence, Reason: "the server does not list the tenant's entries newest first and without a gap"}
	}
	s.oldest, s.previous = e.TenantSequence, e.TenantPreviousHash
	return nil
}

// fetch reads pages until it has the tenant's entry `to`, or an entry of the log before the
// sequence from, or the log ends.
func (s *spool) fetch(ctx context.Context, c *client.V2, to, from uint64, p *progress.Progress) error {
	limit := 100
	resumed, sequence := s.begun, from
	for !s.complete && (s.oldest == 0 || s.oldest > to && sequence >= from) {
		params := &v2.QueryAuditLogParams{Limit: &limit}
		if s.cursor != "" {
			params.Cursor = &s.cursor
		}
		page, err := c.QueryAuditLog(ctx, params)
		if errors.Is(err, client.ErrForbidden) {
			err = fmt.Errorf("the key needs the scope audit:read: %w", err)
		}
		if err != nil {
			return fmt.Errorf("reading the audit log: %w", err)
		}
		var lines bytes.Buffer
		for i := range page.Entries {
			e := entryOf(&page.Entries[i])
			sequence = e.Sequence
			if err := s.take(e); err != nil {
				if resumed {
					return errOtherPart
				}
				return err
			}
			line, err := e.JSON()
			if err != nil {
				return fmt.Errorf("reading the audit log: %w", err)
			}
			lines.Write(append(line, '\n'))
		}
		s.cursor = ""
		if page.NextCursor != nil {
			s.cursor = *page.NextCursor
		}
		end, err := json.Marshal(pageEnd{s.cursor})
		if err != nil {
			return fmt.Errorf("reading the audit log: %w", err)
		}
		lines.Write(append(end, '\n'))
		if _, err := s.f.Write(lines.Bytes()); err != nil {
			return fmt.Errorf("keeping what was fetched: %w", err)
		}
		s.begun, s.complete, s.size = true, s.cursor == "", s.size+int64(lines.Len())
		resumed = false
		p.ShowFetched(s.newest-s.oldest+1, s.newest-min(to, s.newest))
	}
	return nil
}

// inOrder visits the lines of entries, oldest first.
func (s *spool) inOrder(visit func(line []byte) error) error {
	return backwards(s.f, s.size, func(line []byte) error {
		if bytes.HasPrefix(line, pagePrefix) {
			return nil
		}
		return visit(line)
	})
}
