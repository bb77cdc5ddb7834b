package report

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
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
	s.facts(left, width, 34, strong, "Tenant", string(s.d.Tenant), "As of", moment(a.Head.Time), "Head", "sequence "+strconv.FormatUint(a.Head.Sequence, 10))
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

// noData writes that the tenant has not used the vault.
func (s *sheet) noData() {
	s.callout(colours[compliance.NoData], "There is no data", "The log holds no use of the vault by this tenant: no credential, no key, nothing encrypted and nothing signed. "+
		"What could be judged is the state of the deployment and the tenant's accounts.")
}

// withheld writes why there is no score.
func (s *sheet) withheld(consequence string) {
	a := s.d.Assessment
	if !withheld(a) { // nothing could be judged
		s.callout(colours[compliance.NoData], "There is no score", sentence(a.Reason))
		return
	}
	s.callout(colours[compliance.Fail], "The score is withheld", sentence(a.Reason)+consequence)
}

// unwatched writes that the chain was not verified, if verification is disabled.
func (s *sheet) unwatched() {
	if s.d.Assessment.Proof.Status == compliance.Disabled {
		s.callout(colours[compliance.NoData], "The chain was not verified", unwatched)
	}
}

// profile returns the display name of a part of a catalogue.
func profile(p string) string {
	switch p {
	case "rev5":
		return "Revision 5, Moderate baseline"
	case "rev5-high":
		return "Revision 5, High baseline alone"
	case "20x":
		return "20x key security indicators"
	}
	return p
}

// controls writes each judged control with its probes.
func (s *sheet) controls() {
	judged, _ := split(s.d.Assessment.Controls)
	s.section("controls", "Controls with evidence", true)
	s.flow(body, "Each control with the probes that it was judged by. A citation names an entry of the log by its sequence and its SHA3-256 hash; where a probe read "+
		"many entries, some of them stand for all.")
	s.meanings()
	if len(judged) == 0 {
		s.callout(muted, "None", "The catalogue lists no control of this framework that the log could be evidence for.")
	}
	for _, g := range grouped(s.d, judged) {
		if g.profile != "" {
			s.y += 3
			s.need(50)
			s.mark("controls/"+g.profile, profile(g.profile), 1)
			s.put(left, s.y, title2.at(14), profile(g.profile))
			s.y += title2.at(14).line() + 2
		}
		for _, c := range g.controls {
			s.control(c)
		}
	}
}

func controlKey(c compliance.ControlResult) string { return "control/" + c.Profile + "/" + c.ID }

// control writes one control and keeps it together with the beginning of its first probe.
func (s *sheet) control(c compliance.ControlResult) {
	title := strong.at(10)
	ids := s.wrap(title2, c.ID, width-40)
	titleX, titleW := left+4+s.measure(title2, c.ID)+3.5, width-4-s.measure(title2, c.ID)-3.5-34
	inline := len(ids) == 1 && titleW > 80 // a long id gets lines of its own
	if !inline {
		titleX, titleW = left+4, width-4-34
	}
	lines := s.wrap(title, c.Title, titleW)
	var rest []string // rest of a title that does not fit in a heading
	if len(lines) > 12 {
		lines, rest = lines[:12], lines[12:]
	}
	h := float64(len(lines))*title.line() + 5
	if !inline {
		h += float64(len(ids)) * title2.line()
	}
	s.y += 3
	first := 30.0
	if len(c.Probes) > 0 {
		first = s.probeHeight(c.Probes[0])
	}
	s.need(h + 2*small.line() + 4 + first)
	s.mark(controlKey(c), c.ID+" "+c.Title, level(c))

	s.bar(left, s.y, width, h, shade)
	s.bar(left, s.y, 1.4, h, colours[c.Result])
	s.badge(left+width-3-s.measure(caption, labels[c.Result])-4.4, s.y+2.6, c.Result)
	y := s.y + 2.5
	for i, l := range ids {
		s.put(left+4, y-0.25+float64(i)*title2.line(), title2, l)
	}
	if !inline {
		y += float64(len(ids)) * title2.line()
	}
	for i, l := range lines {
		s.put(titleX, y+float64(i)*title.line(), title, l)
	}
	s.y += h + 2

	s.goesOn = func() {
		id := s.wrap(aside, c.ID, width-40)
		if len(id) > 1 {
			id[0] += "…"
		}
		s.put(left, s.y, aside, id[0]+", continued")
		s.y += aside.line() + 2
	}
	defer func() { s.goesOn = nil }()
	if rest != nil {
		s.flowIn(left+4, width-4, title, strings.Join(rest, "\n"))
	}
	s.put(left+width-3-s.measure(small, number(c.Weight))-s.measure(faint, "Weight ")-1, s.y, faint, "Weight")
	s.right(left+width-3, s.y, small, number(c.Weight))
	if len(c.Related) > 0 {
		s.facts(left+4, width-4-26, 30, small, "Relates to 800-53", strings.Join(c.Related, ", "))
	} else {
		s.y += small.line() + 2.2
	}
	for _, p := range c.Probes {
		s.probe(p)
	}
	s.y += 2
}

// level returns the level of the control's bookmark.
func level(c compliance.ControlResult) int {
	if c.Profile != "" {
		return 2
	}
	return 1
}

// Position and width of a probe and of its title.
const (
	probeX, probeWidth = left + 4, width - 4
	probeText          = probeWidth - 28 // leaves room for the result beside it
)

var probeTitle = strong.at(9)

// citations returns the table of the entries that a probe cites.
func citations(p compliance.ProbeResult) (table, [][]cell) {
	rows := make([][]cell, len(p.Evidence))
	for i, e := range p.Evidence {
		rows[i] = cells(strconv.FormatUint(e.Sequence, 10), e.Hash)
	}
	return table{x: probeX, w: probeWidth, pad: 0.75, keep: true, columns: []column{
		{heading: "Sequence", width: 26, style: mono},
		{heading: "Hash of the entry (SHA3-256)", style: mono},
	}}, rows
}

// probeHeight returns the height that must be free on a page for the probe: its whole height,
// unless it is unusually long.
func (s *sheet) probeHeight(p compliance.ProbeResult) float64 {
	t, rows := citations(p)
	text := float64(len(s.wrap(probeTitle, p.Title, probeText)))*probeTitle.line() +
		float64(len(s.wrap(small, sentence(p.Detail), probeText))+2)*small.line() + 8
	return min(text, 60) + min(s.tableHeight(t, rows), keepable)
}

func (s *sheet) probe(p compliance.ProbeResult) {
	const x = probeX
	s.need(s.probeHeight(p))
	s.line(x, s.y, left+width, s.y, rule, 0.2)
	s.y += 2
	for i, l := range s.wrap(probeTitle, p.Title, probeText) {
		s.need(probeTitle.line())
		s.put(x, s.y, probeTitle, l)
		if i == 0 {
			s.badge(left+width-3-s.measure(caption, labels[p.Result])-4.4, s.y, p.Result)
		}
		s.y += probeTitle.line()
	}
	s.flowIn(x, probeText, small, sentence(p.Detail))
	s.y -= 0.6
	s.need(small.line())
	at := x
	for _, f := range []struct {
		name, value string
		st          style
	}{{"Probe", p.Name, mono}, {"Sample", strconv.Itoa(p.Sample), small}, {"Window", window(p.WindowDays), small}} {
		at += s.put(at, s.y, faint, f.name) + 2
		at += s.put(at, s.y, f.st.at(7.6), f.value) + 7
	}
	s.y += small.line() + 1.4
	if len(p.Evidence) == 0 {
		s.put(x, s.y, aside, "No entries are cited.")
		s.y += aside.line() + 2.5
		return
	}
	s.table(citations(p))
}

// window returns how far back a probe looks, in words.
func window(days int) string {
	switch days {
	case 0:
		return "state at the head"
	case 1:
		return "1 day"
	}
	return strconv.Itoa(days) + " days"
}

// sentence returns s with an initial capital and a full stop.
func sentence(s string) string {
	if s = strings.TrimSpace(s); s == "" {
		return ""
	}
	if s[0] >= 'a' && s[0] <= 'z' {
		s = string(s[0]-'a'+'A') + s[1:]
	}
	if !strings.ContainsAny(s[len(s)-1:], ".!?") {
		s += "."
	}
	return s
}
