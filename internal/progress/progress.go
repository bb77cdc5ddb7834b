// Package progress shows the progress of a long command on a terminal.
package progress

import (
	"fmt"
	"io"
	"os"
	"time"
)

// Progress reports the progress of an export on standard error. A nil Progress reports nothing.
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
