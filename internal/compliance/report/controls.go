package report

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

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
	s.section("controls", "Controls with evidence", 120)
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
		rows[i] = cells(strconv.FormatUint(e.Sequence, 10), e.Event+", "+e.Time.UTC().Format(time.DateTime)+"\n"+e.Actor, e.Hash)
	}
	return table{x: probeX, w: probeWidth, pad: 0.75, keep: true, columns: []column{
		{heading: "Sequence", width: 22, style: mono.at(5.8)},
		{heading: "Event, time (UTC) and actor", width: 61, style: small.at(6.8)},
		{heading: "Hash of the entry (SHA3-256)", style: mono.at(5.6)},
	}}, rows
}

// probeHeight returns the height that must be free on a page for the probe: its whole height,
// unless it is unusually long.
func (s *sheet) probeHeight(p compliance.ProbeResult) float64 {
	t, rows := citations(p)
	text := float64(len(s.wrap(probeTitle, p.Title, probeText)))*probeTitle.line() +
		float64(len(s.wrap(small, sentence(p.Detail), probeText))+len(s.wrap(small, toDo(p), probeText))+2)*small.line() + 8
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
	if p.Result == compliance.Fail {
		s.flowIn(x, probeText, small, toDo(p))
	}
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

// toDo says of a failing probe since when it fails, for which objects, whose job it is to fix it,
// and how. It is empty for any other probe.
func toDo(p compliance.ProbeResult) string {
	if p.Since == nil {
		return ""
	}
	who := "the tenant"
	if p.Responsible == compliance.TheDeployment {
		who = "whoever operates the service"
	}
	text := fmt.Sprintf("Failing since %s. To be fixed by %s: %s", p.Since.UTC().Format(time.DateOnly), who, sentence(p.Remedy))
	if len(p.Objects) > 0 {
		text += " Failing for: " + strings.Join(p.Objects, ", ") + "."
	}
	return text
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
