package report

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

// PDF renders the report for people: cover, contents, scope and limits, summary with charts, each
// control with its probes and the entries that they cite, the manual controls, the head of the
// chain with its checkpoint, and how to verify all of it.
func PDF(d compliance.Document) ([]byte, error) {
	if err := check(d); err != nil {
		return nil, err
	}
	// The first pass finds the page numbers, and the second one writes them.
	first := newSheet(d, nil, 0)
	first.write()
	s := newSheet(d, first.marks, first.f.PageCount())
	s.write()
	var b bytes.Buffer
	if err := s.f.Output(&b); err != nil {
		return nil, fmt.Errorf("writing the report: %w", err)
	}
	return b.Bytes(), nil
}

func (s *sheet) write() {
	s.cover()
	s.contents()
	s.scope()
	s.summary()
	s.controls()
	s.manual()
	s.head()
	s.verify()
	s.glossary()
}

// moment formats a time for reports.
func moment(t time.Time) string { return t.UTC().Format("2 January 2006, 15:04:05 UTC") }

// cover writes the title page. The lattice on it shows the head: one dot for each of the 256 bits
// of its hash.
func (s *sheet) cover() {
	a := s.d.Assessment
	s.f.AddPage()
	s.set(body)
	s.f.Bookmark("Cover", 0, 0)
	const band = 140.0
	s.bar(0, 0, pageWidth, band, navy)
	s.lattice(124, 18, 66)
	s.put(left, 24, caption.at(8.5).in(bright), "LATTICEKEEP  ·  EVIDENCE REPORT")
	y := 83.0
	s.put(left, y, body.at(13).in(haze), "Evidence for")
	y += 9
	title := style{"go", "B", 29, white, 1.2}
	for s.measure(title, name(s.d)) > width && title.size > 15 {
		title.size--
	}
	for _, l := range s.wrap(title, name(s.d), width) {
		s.put(left, y, title, l)
		y += title.line()
	}
	s.bar(left, y+3, 22, 1.2, bright)
	y += 8
	for _, l := range s.wrap(body.at(10.5), a.Version, width) {
		s.put(left, y, body.at(10.5).in(haze), l)
		y += body.at(10.5).line()
	}

	s.y = band + 14
	about := []string{"Tenant", string(s.d.Tenant)}
	if s.d.Organisation != "" {
		about = append([]string{"Organisation", printable(s.d.Organisation)}, about...)
	}
	if s.d.Stated != "" {
		about = append([]string{"Made for, as stated", printable(s.d.Stated)}, about...)
	}
	if !s.d.From.IsZero() {
		about = append(about, "Period, as stated", date(s.d.From)+" to "+date(a.Head.Time)+"; the score is of its end")
	}
	if len(s.d.Activity) > 0 {
		about = append(about, "Period", s.period())
	}
	s.facts(left, width, 34, strong, append(about, "As of", moment(a.Head.Time), "Head", "sequence "+strconv.FormatUint(a.Head.Sequence, 10))...)
	s.facts(left, width, 34, mono.at(7.8), "Hash of the head", a.Head.Hash, "Chain", s.d.ChainID, "Fingerprint", s.d.Fingerprint)
	s.y += 4
	switch {
	case a.Score == nil:
		s.withheld("")
	case quiet(s.d):
		s.noData()
	}
	s.unwatched()

	lines := s.wrap(small, notice+" Whoever relies on it judges; how to check every word of it is at its end.", width)
	y = pageHeight - 20 - float64(len(lines))*small.line()
	s.line(left, y-4, left+width, y-4, rule, 0.2)
	for _, l := range lines {
		s.put(left, y, small.in(muted), l)
		y += small.line()
	}
	s.put(left, pageHeight-15, faint.at(7), "Written by "+s.d.Program+" from the audit log, without an editor")
}

// period says which entries the report is about, and how far its probes look back.
func (s *sheet) period() string {
	days := 0
	for _, c := range s.d.Assessment.Controls {
		for _, p := range c.Probes {
			days = max(days, p.WindowDays)
		}
	}
	text := fmt.Sprintf("%s to %s", date(s.d.Activity[0].First.Time), date(s.d.Assessment.Head.Time))
	if days > 0 {
		text += fmt.Sprintf("; probes look back %d days at most", days)
	}
	return text
}

func date(t time.Time) string { return t.UTC().Format("2 January 2006") }

// lattice draws the hash of the head as a lattice of sixteen by sixteen points.
func (s *sheet) lattice(x, y, side float64) {
	bits, _ := hex.DecodeString(s.d.Assessment.Head.Hash) // [check] has decoded it before
	step := side / 15
	at := func(i, j int) (float64, float64) {
		return x + float64(j)*step - float64(i)*step*0.28 + 8, y + float64(i)*step*0.92
	}
	set := func(i, j int) bool { return bits[i*2+j/8]>>(7-j%8)&1 == 1 }
	for i := range 16 {
		for j := range 16 {
			if !set(i, j) {
				continue
			}
			x1, y1 := at(i, j)
			if j < 15 && set(i, j+1) {
				x2, y2 := at(i, j+1)
				s.line(x1, y1, x2, y2, dim, 0.35)
			}
			if i < 15 && set(i+1, j) {
				x2, y2 := at(i+1, j)
				s.line(x1, y1, x2, y2, dim, 0.35)
			}
		}
	}
	for i := range 16 {
		for j := range 16 {
			px, py := at(i, j)
			radius := 0.32
			s.fill(dim)
			if set(i, j) {
				s.fill(bright)
				radius = 0.78
			}
			s.f.Circle(px, py, radius, "F")
		}
	}
}

// contents lists the chapters with their pages.
func (s *sheet) contents() {
	s.page()
	s.put(left, s.y, title1, "Contents")
	s.y += title1.line() + 1
	s.bar(left, s.y, 14, 0.9, teal)
	s.y += 7
	judged, manual := split(s.d.Assessment.Controls)
	entry := func(key, text string, indent float64, st style) {
		x := left + indent
		end := x + s.put(x, s.y, st, text) + 2
		number := strconv.Itoa(s.former[key])
		s.right(left+width, s.y, st, number)
		s.f.SetDashPattern([]float64{0.25, 1.4}, 0)
		s.line(end, s.y+st.line()*0.68, left+width-s.measure(st, number)-2, s.y+st.line()*0.68, muted, 0.25)
		s.f.SetDashPattern(nil, 0)
		s.f.Link(x, s.y, width-indent, st.line(), s.link(key))
		s.y += st.line() + 1.3
	}
	entry("scope", "Scope and limits", 0, strong)
	entry("summary", "Summary", 0, strong)
	entry("controls", fmt.Sprintf("Controls with evidence (%d)", len(judged)), 0, strong)
	for _, g := range grouped(s.d, judged) {
		if g.profile != "" {
			entry("controls/"+g.profile, fmt.Sprintf("%s (%d)", profile(g.profile), len(g.controls)), 6, body)
		}
	}
	entry("manual", fmt.Sprintf("Manual controls (%d)", len(manual)), 0, strong)
	entry("head", "Head of the chain", 0, strong)
	entry("verify", "How to verify this report", 0, strong)
	entry("glossary", "Glossary", 0, strong)
	s.y += 4
	s.glance()
}
