package report

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

// summary writes the overview: three separate numbers that are never combined, the results, the
// history, the controls, and the contents of the log.
func (s *sheet) summary() {
	a := s.d.Assessment
	s.section("summary", "Summary", 150)
	const gap = 5.0
	w, h := (width-2*gap)/3, 62.0
	for i, panel := range []struct {
		heading string
		draw    func(x, y, w float64)
	}{{"SCORE", s.gauge}, {"COVERAGE", s.coverage}, {"PROOF", s.proof}} {
		x := left + float64(i)*(w+gap)
		s.fill(shade)
		s.f.RoundedRect(x, s.y, w, h, 1.6, "1234", "F")
		s.put(x+5, s.y+4, caption.at(7.5), panel.heading)
		panel.draw(x, s.y+10, w)
	}
	s.y += h + 6
	if a.Score == nil {
		s.withheld(" Until the chain holds again, the results below count for nothing.")
	}
	s.unwatched()
	if quiet(s.d) {
		s.noData()
	}
	s.heading("Results of the controls")
	s.resultBars()
	s.heading("History of the score")
	s.trend()
	s.activity()
}

// gauge draws the score on a half circle, or writes that there is none.
func (s *sheet) gauge(x, y, w float64) {
	a := s.d.Assessment
	cx, cy, radius := x+w/2, y+28, 19.0
	s.arc(cx, cy, radius, 0, 180, rule)
	if a.Score == nil {
		word, c := "none", colours[compliance.NoData]
		if withheld(a) {
			word, c = "withheld", colours[compliance.Fail]
		}
		s.centred(cx, cy-12, title1.at(15).in(c), word)
	} else {
		share := min(100, max(0, *a.Score)) / 100
		s.arc(cx, cy, radius, 180-180*share, 180, teal)
		s.centred(cx, cy-13, title1.at(22), number(*a.Score))
		s.centred(cx, cy-2, faint, "of 100")
	}
	s.put(cx-radius-1.2, cy+1.2, faint.at(7), "0")
	s.right(cx+radius+2.2, cy+1.2, faint.at(7), "100")
	text := "Weight of the controls that passed, of those that passed or failed"
	if a.Provisional && a.Score != nil {
		text = "Provisional: the log has no assessment of the deployment yet, so its controls are left out"
	}
	s.note(x, y+35, w, text)
}

// coverage draws for how many of the controls the log has evidence.
func (s *sheet) coverage(x, y, w float64) {
	c := s.d.Assessment.Coverage
	cx, cy, radius := x+w/2, y+17, 13.5
	s.arc(cx, cy, radius, 0, 360, rule)
	if share := min(100, max(0, c.Percent)) / 100; share > 0 {
		s.arc(cx, cy, radius, 90-360*share, 90, navy)
	}
	s.centred(cx, cy-3.4, title1.at(13), number(c.Percent)+" %")
	s.note(x, y+35, w, fmt.Sprintf("%d of the %d controls listed have evidence here; the others are manual", c.Evidenced, c.Controls))
}

// proof draws whether the chain was verified.
func (s *sheet) proof(x, y, w float64) {
	p := s.d.Assessment.Proof
	cx, cy := x+w/2, y+14.0
	c := colours[compliance.NoData]
	note := "The chain holds up to sequence " + strconv.FormatUint(verifiedTo(s.d.Assessment), 10)
	switch p.Status {
	case compliance.Verified:
		c = colours[compliance.Pass]
		note = "Hashes, links and signatures hold up to the head"
		if verifiedTo(s.d.Assessment) < s.d.Assessment.Head.Sequence {
			note = "The chain holds up to sequence " + strconv.FormatUint(p.VerifiedTo, 10)
		}
	case compliance.Broken:
		c = colours[compliance.Fail]
		note = "The chain holds up to sequence " + strconv.FormatUint(verifiedTo(s.d.Assessment), 10) + " and not beyond"
	case compliance.Disabled:
		note = "Nothing verified the whole chain"
	}
	s.fill(white)
	s.f.SetDrawColor(c.r, c.g, c.b)
	s.f.SetLineWidth(1.6)
	s.f.Circle(cx, cy, 10, "FD")
	s.f.SetLineCapStyle("round")
	switch p.Status {
	case compliance.Verified:
		s.line(cx-4.6, cy+0.4, cx-1.4, cy+3.8, c, 1.9)
		s.line(cx-1.4, cy+3.8, cx+4.8, cy-3.4, c, 1.9)
	case compliance.Broken:
		s.line(cx-3.6, cy-3.6, cx+3.6, cy+3.6, c, 1.9)
		s.line(cx-3.6, cy+3.6, cx+3.6, cy-3.6, c, 1.9)
	default:
		for i := -1.0; i <= 1; i++ {
			s.fill(c)
			s.f.Circle(cx+i*4, cy, 1, "F")
		}
	}
	s.f.SetLineCapStyle("butt")
	s.centred(cx, cy+12.6, strong.at(11).in(c), p.Status)
	s.note(x, y+35, w, note)
}

// note writes a line or two below the drawing of a panel.
func (s *sheet) note(x, y, w float64, text string) {
	for i, l := range s.wrap(faint, text, w-10) {
		s.centred(x+w/2, y+float64(i)*faint.line(), faint, l)
	}
}

// resultBars draws the number of controls with each result: one bar for all results together, and
// one bar for each.
func (s *sheet) resultBars() {
	counts := count(s.d.Assessment.Controls)
	total, most := len(s.d.Assessment.Controls), 1
	for _, n := range counts {
		most = max(most, n)
	}
	s.need(50)
	x := left
	for _, r := range results {
		if w := width * float64(counts[r]) / float64(max(1, total)); w > 0 {
			s.bar(x, s.y, w, 4.5, colours[r])
			x += w
		}
	}
	s.y += 8
	const names, numbers = 32.0, 12.0
	for _, r := range results {
		s.put(left, s.y, small, labels[r])
		s.right(left+names+numbers-4, s.y, strong.at(8), strconv.Itoa(counts[r]))
		room := width - names - numbers
		s.bar(left+names+numbers, s.y+0.6, room, 3, shade)
		s.bar(left+names+numbers, s.y+0.6, room*float64(counts[r])/float64(most), 3, colours[r])
		s.y += 5.6
	}
	s.y += 2
}

// trend draws the score of each day that has one.
func (s *sheet) trend() {
	type dot struct {
		at    time.Time
		score float64
	}
	var dots []dot
	for _, h := range s.d.History {
		if at, err := time.Parse(time.DateOnly, h.Date); err == nil {
			dots = append(dots, dot{at, min(100, max(0, h.Score))})
		}
	}
	slices.SortStableFunc(dots, func(a, b dot) int { return a.at.Compare(b.at) })
	if len(dots) == 0 {
		s.flow(faint, "The log holds no earlier score of this framework.")
		return
	}
	const h, axis = 34.0, 9.0
	s.need(h + 12)
	x, w, y := left+axis, width-axis-4, s.y+2
	for _, v := range []float64{0, 25, 50, 75, 100} {
		at := y + h - h*v/100
		s.line(x, at, x+w, at, rule, 0.15)
		s.right(x-2, at-faint.at(6.5).line()/2, faint.at(6.5), number(v))
	}
	first, last := dots[0].at, dots[len(dots)-1].at
	place := func(d dot) (float64, float64) {
		px := x + w/2
		if span := last.Sub(first); span > 0 {
			px = x + 3 + (w-6)*float64(d.at.Sub(first))/float64(span)
		}
		return px, y + h - h*d.score/100
	}
	s.f.SetLineJoinStyle("round")
	for i := 1; i < len(dots); i++ {
		x1, y1 := place(dots[i-1])
		x2, y2 := place(dots[i])
		s.line(x1, y1, x2, y2, teal, 0.6)
	}
	for i, d := range dots {
		px, py := place(d)
		if len(dots) <= 62 || i == len(dots)-1 {
			s.fill(teal)
			s.f.Circle(px, py, 0.8, "F")
		}
	}
	px, py := place(dots[len(dots)-1])
	label := number(dots[len(dots)-1].score)
	ly := py - 5
	if ly < y-2 {
		ly = py + 1.2
	}
	s.right(min(px+s.measure(strong.at(7.5), label)/2, x+w), ly, strong.at(7.5).in(teal), label)
	s.y = y + h + 1.5
	if len(dots) == 1 {
		s.centred(px, s.y, faint.at(7), first.Format(time.DateOnly))
	} else {
		s.put(x, s.y, faint.at(7), first.Format(time.DateOnly))
		s.right(x+w, s.y, faint.at(7), last.Format(time.DateOnly))
		s.centred(x+w/2, s.y, faint.at(7), fmt.Sprintf("%d days with a score", len(dots)))
	}
	s.y += 7
}

// glance lists all controls with their results and with links to their sections.
func (s *sheet) glance() {
	s.heading("Controls at a glance")
	for _, g := range grouped(s.d, s.d.Assessment.Controls) {
		if g.profile != "" {
			s.need(30)
			s.put(left, s.y, strong.in(navy), profile(g.profile))
			s.y += strong.line() + 1.5
		}
		idWidth := 18.0
		for _, c := range g.controls {
			idWidth = min(44, max(idWidth, s.measure(strong.at(8), c.ID)+2))
		}
		rows := make([][]cell, len(g.controls))
		for i, c := range g.controls {
			key := controlKey(c)
			if c.Result == compliance.Manual {
				key = "manual"
			}
			rows[i] = []cell{{text: c.ID, link: key}, {text: c.Title, link: key}, {result: c.Result}, {text: strconv.Itoa(s.former[key]), link: key}}
		}
		t := wide(
			column{heading: "Control", width: idWidth, style: strong.at(8)},
			column{heading: "Our title", style: small},
			column{heading: "Result", width: 26, style: small},
			column{heading: "Page", width: 10, style: small, right: true})
		t.pad = 0.9
		s.table(t, rows)
	}
}

// activity lists the tenant's entries in the log by type of event.
func (s *sheet) activity() {
	if len(s.d.Activity) == 0 {
		return
	}
	s.heading("What the log holds of the tenant")
	var rows [][]cell
	for _, a := range s.d.Activity {
		event := a.Event
		if event == "" {
			event = "All entries"
		}
		first, last := a.First, a.Last
		if first == last {
			rows = append(rows, cells(event, strconv.Itoa(a.Count), strconv.FormatUint(first.Sequence, 10), first.Hash))
			continue
		}
		rows = append(rows, cells(event, strconv.Itoa(a.Count),
			fmt.Sprintf("%d\n%d", first.Sequence, last.Sequence), first.Hash+"\n"+last.Hash))
	}
	t := wide(
		column{heading: "Event", style: small.at(7.2)},
		column{heading: "Count", width: 10, style: small.at(7.2), right: true},
		column{heading: "Sequence", width: 17, style: mono.at(6.6), right: true},
		column{heading: "Hash of the first and of the last entry (SHA3-256)", width: 91, style: mono.at(6.6)})
	t.pad = 1
	s.table(t, rows)
}
