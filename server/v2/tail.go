package v2

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/server/gate"
)

// These are the limits of tails. The log is read often enough that a revoked caller reads no entry
// written a second later.
const (
	tailsOfCaller = 4 // so that no single key takes all places of its tenant
	tailsOfTenant = 8
	tailsOfAll    = 64

	tailEvery = 400 * time.Millisecond
	tailPace  = 20 * time.Millisecond // pause between pages of older entries, to spare other callers
	tailBeat  = 15 * time.Second      // proxies close connections that are silent for longer
	tailLasts = 300                   // seconds, unless the caller asks for fewer
)

// TailAuditLog streams the entries of the caller's tenant as they are written. Before each read of
// the log, it looks up the caller again.
func (a *auditAPI) TailAuditLog(c *gin.Context, params api.TailAuditLogParams) {
	gate.Follow(c, "text/event-stream; charset=utf-8", func(ctx context.Context, call *gate.Call) (func(context.Context, io.Writer) error, error) { //nolint:contextcheck // the tail outlasts the context of the request
		ended, end := context.WithCancel(context.Background())
		connection := http.NewResponseController(c.Writer)
		done, err := a.tails.Take(ctx, call.Principal(), func() {
			end()
			_ = connection.SetWriteDeadline(time.Now().Add(gate.PlaceWait / 2)) // a client that reads nothing holds no place
		})
		if err != nil {
			return nil, cmp.Or(a.guard.RecordAttempt(ctx, call.Principal(), authz.ReadAudit, audit.Failure, "too_many_tails"), err)
		}
		var after *uint64
		if from := cmp.Or(params.LastEventID, params.After); from != nil {
			n := uint64(*from)
			after = &n
		}
		log, err := a.reader.Tail(ctx, call.Principal(), after)
		if err != nil {
			done()
			return nil, err
		}
		wait := tailLasts
		if params.Wait != nil {
			wait = *params.Wait
		}
		c.Header("X-Accel-Buffering", "no") // a proxy must not buffer a live stream
		return func(ctx context.Context, w io.Writer) error {
			defer done()
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			defer context.AfterFunc(ended, cancel)()
			look, pace, beat, end := time.NewTicker(tailEvery), time.NewTicker(tailPace), time.NewTicker(tailBeat), time.NewTimer(cmp.Or(time.Duration(wait)*time.Second, tailLasts*time.Second))
			defer look.Stop()
			defer pace.Stop()
			defer beat.Stop()
			defer end.Stop()
			t := tail{next: log.Next, still: func(ctx context.Context) error { return call.Still(ctx, c) }, look: look.C, pace: pace.C, beat: beat.C, end: end.C, once: wait == 0}
			return t.write(ctx, w)
		}, nil
	})
}

// tail is an open tail.
type tail struct {
	next  func(context.Context) ([]audit.Entry, error)
	still func(context.Context) error // returns an error if the caller may no longer read

	look, pace, beat, end <-chan time.Time
	once                  bool // ends when there are no more entries
}

// write writes events until the tail ends. The end is not an error, whatever its cause: the caller
// asks again and then learns the cause.
func (t *tail) write(ctx context.Context, w io.Writer) error {
	if _, err := io.WriteString(w, "retry: 2000\n\n"); err != nil {
		return err
	}
	for {
		if t.still(ctx) != nil {
			return nil
		}
		entries, err := t.next(ctx)
		if err != nil {
			return nil
		}
		if len(entries) > 0 {
			if err := writeEvents(w, entries); err != nil {
				return err
			}
			select {
			case <-t.end:
				return nil
			case <-ctx.Done():
				return nil
			case <-t.pace:
				continue
			}
		}
		if t.once {
			return nil
		}
		select {
		case <-t.look:
		case <-t.beat:
			if _, err := io.WriteString(w, ":\n\n"); err != nil {
				return err
			}
		case <-t.end:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// writeEvents writes entries as server-sent events. Their JSON is canonical, so it has no line
// breaks.
func writeEvents(w io.Writer, entries []audit.Entry) error {
	var b bytes.Buffer
	for i := range entries {
		data, err := entries[i].JSON()
		if err != nil {
			return fmt.Errorf("encoding an entry: %w", err)
		}
		fmt.Fprintf(&b, "id: %d\ndata: %s\n\n", entries[i].Sequence, data)
	}
	_, err := w.Write(b.Bytes())
	return err
}
