// Package logs limits how often the log repeats an error: a fault that every request meets must not
// fill the disk, nor hide what else is in the log. Lines without an error, and those below warnings,
// are never left out.
package logs

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	// pause is the least time between two lines of the same error.
	pause = time.Second
	// maxCauses is how many errors of one message are told apart. The others count as one, so that a
	// text that changes each time, such as one with a port, is limited too.
	maxCauses = 4
)

// Limit returns a handler that passes records on to next, but repeats none in less than a second. A
// record repeats another if both have the same message and error, and are warnings or worse. The
// first is written at once. Of those that follow, the newest is written a second after the previous
// line, with the attribute left_out: how many between the two were not written.
//
// end writes what is still held back. After it, every record is passed on at once.
func Limit(next slog.Handler) (limited slog.Handler, end func()) {
	l := &limit{messages: make(map[string]map[string]*repeated)}
	return handler{next, l}, l.end
}

// limit is what the handlers of one log share.
type limit struct {
	mu       sync.Mutex
	messages map[string]map[string]*repeated // key: message, then error; only the last second
	ended    bool
}

// repeated is an error whose line was written less than a second ago.
type repeated struct {
	newest func(leftOut int) // writes the newest record; nil if there was none since the line
	count  int               // records since the line
	timer  *time.Timer
}

// write writes the newest record.
func (r *repeated) write() {
	r.newest(r.count - 1)
	r.newest, r.count = nil, 0
}

// holds reports whether a record repeats one of the last second. Such a record is kept back, and
// write is called for it later.
func (l *limit) holds(message, cause string, write func(leftOut int)) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return false
	}
	causes := l.messages[message]
	if causes == nil {
		causes = make(map[string]*repeated)
		l.messages[message] = causes
	}
	r := causes[cause]
	if r == nil && len(causes) >= maxCauses {
		cause = ""
		r = causes[cause]
	}
	if r != nil {
		r.newest = write
		r.count++
		return true
	}
	r = &repeated{}
	r.timer = time.AfterFunc(pause, func() { l.release(message, cause) })
	causes[cause] = r
	return false
}

// release writes the newest record that was held back, or forgets the error if there was none.
func (l *limit) release(message, cause string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	causes := l.messages[message]
	r := causes[cause]
	switch {
	case l.ended:
	case r.newest != nil:
		r.write()
		r.timer.Reset(pause)
	default:
		if delete(causes, cause); len(causes) == 0 {
			delete(l.messages, message)
		}
	}
}

func (l *limit) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	for _, causes := range l.messages {
		for _, r := range causes {
			r.timer.Stop()
			if r.newest != nil {
				r.write()
			}
		}
	}
	l.messages = nil
}

// handler is a slog.Handler whose records are limited.
type handler struct {
	slog.Handler
	limit *limit
}

// Handle implements slog.Handler.
func (h handler) Handle(ctx context.Context, r slog.Record) error {
	r = renamed(r)
	cause, failed := causeOf(r)
	if failed && h.limit.holds(r.Message, cause, func(leftOut int) { h.writeLater(ctx, r, leftOut) }) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// writeLater writes a record that was held back.
func (h handler) writeLater(ctx context.Context, r slog.Record, leftOut int) {
	r = r.Clone()
	if leftOut > 0 {
		r.AddAttrs(slog.Int("left_out", leftOut))
	}
	_ = h.Handler.Handle(context.WithoutCancel(ctx), r) // slog ignores it too
}

// WithAttrs implements slog.Handler.
func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return handler{h.Handler.WithAttrs(attrs), h.limit}
}

// WithGroup implements slog.Handler.
func (h handler) WithGroup(name string) slog.Handler {
	return handler{h.Handler.WithGroup(name), h.limit}
}

// ofLibraries is the key under which logr writes an error, such as those of controller-runtime.
const ofLibraries = "err"

// renamed returns a record whose error has the key that this program uses.
func renamed(r slog.Record) slog.Record {
	var attrs []slog.Attr
	found := false
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == ofLibraries {
			a.Key, found = "error", true
		}
		attrs = append(attrs, a)
		return true
	})
	if !found {
		return r
	}
	same := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
	same.AddAttrs(attrs...)
	return same
}

// causeOf returns the error of a record that may be left out.
func causeOf(r slog.Record) (cause string, failed bool) {
	if r.Level < slog.LevelWarn {
		return "", false
	}
	r.Attrs(func(a slog.Attr) bool {
		if failed = a.Key == "error"; failed {
			cause = a.Value.String()
		}
		return !failed
	})
	return cause, failed
}
