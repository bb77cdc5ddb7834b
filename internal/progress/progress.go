// Package progress shows the progress of a long command on a terminal.
package progress

import (
	"fmt"
	"io"
	"os"
	"time"
)

// Progress reports the progress of a command on standard error. A nil Progress reports nothing.
type Progress struct {
	w        io.Writer
	terminal bool
	count    uint64 // entries written
	skipped  uint64 // entries already there before
	total    uint64 // entries to write; 0: unknown
	shown    time.Time
}

// progressEvery is the interval between two lines.
const progressEvery = time.Second

func New(w io.Writer, asked bool) *Progress {
	p := &Progress{w: w, shown: time.Now()}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		p.terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	if !p.terminal && !asked {
		return nil
	}
	return p
}

func (p *Progress) Expect(total uint64) {
	if p != nil {
		p.total = total
	}
}

func (p *Progress) Skip(n uint64) {
	if p != nil {
		p.skipped = n
	}
}

func (p *Progress) Add() {
	if p == nil {
		return
	}
	p.count++
	if now := time.Now(); now.Sub(p.shown) >= progressEvery {
		p.shown = now
		p.show("entries")
	}
}

// ShowFetched shows how many entries wait to be put in order.
func (p *Progress) ShowFetched(n, of uint64) {
	if p == nil {
		return
	}
	if now := time.Now(); now.Sub(p.shown) >= progressEvery {
		p.shown = now
		p.line("%d of %d entries fetched (%d%%)", n, of, min(100, 100*n/max(of, 1)))
	}
}

func (p *Progress) show(what string) {
	if p.total > p.skipped {
		p.line("%d %s (%d%%)", p.count, what, min(100, 100*p.count/(p.total-p.skipped)))
		return
	}
	p.line("%d %s", p.count, what)
}

func (p *Progress) line(format string, args ...any) {
	if p.terminal {
		fmt.Fprintf(p.w, "\r\033[K"+format, args...)
		return
	}
	fmt.Fprintf(p.w, format+"\n", args...)
}

func (p *Progress) End() {
	if p == nil {
		return
	}
	p.line("%d entries written", p.count)
	if p.terminal {
		fmt.Fprintln(p.w)
	}
}

// AddOf and EndOf are Add and End for things other than entries.
func (p *Progress) AddOf(what string) {
	if p == nil {
		return
	}
	p.count++
	if now := time.Now(); now.Sub(p.shown) >= progressEvery {
		p.shown = now
		p.show(what)
	}
}

func (p *Progress) EndOf(what string) {
	if p == nil {
		return
	}
	p.line("%d %s", p.count, what)
	if p.terminal {
		_, _ = io.WriteString(p.w, "\n")
	}
}

// Reader returns r, and shows how much of it was read. total is its size in bytes; 0: unknown. The
// line ends with the last byte.
func (p *Progress) Reader(r io.Reader, what string, total int64) io.Reader {
	if p == nil {
		return r
	}
	return &reader{Reader: r, p: p, what: what, total: total}
}

type reader struct {
	io.Reader
	p           *Progress
	what        string
	read, total int64
	ended       bool
}

// Read implements io.Reader.
func (r *reader) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	r.read += int64(n)
	if now := time.Now(); err == nil && now.Sub(r.p.shown) >= progressEvery {
		r.p.shown = now
		r.show()
	}
	if err != nil && !r.ended {
		r.ended = true
		r.show()
		if r.p.terminal {
			_, _ = io.WriteString(r.p.w, "\n")
		}
	}
	return n, err
}

func (r *reader) show() {
	const mega = 1e6
	if r.total > 0 {
		r.p.line("%.1f of %.1f MB %s (%d%%)", float64(r.read)/mega, float64(r.total)/mega, r.what, min(100, 100*r.read/r.total))
		return
	}
	r.p.line("%.1f MB %s", float64(r.read)/mega, r.what)
}

// Size returns the size of a file, and 0 if it is none of a known size.
func Size(f *os.File) int64 {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	return info.Size()
}
