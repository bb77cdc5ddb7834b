package report

import "github.com/latticekeep/latticekeep/internal/compliance"

// column is a column of a table. A column of width 0 takes the remaining width.
type column struct {
	heading string
	width   float64
	style   style
	right   bool // aligns the text at the right
}

// cell is a cell of a table: a text or a result.
type cell struct {
	text   string
	result compliance.Result
	link   string // mark to link to; "" for none
}

func cells(texts ...string) []cell {
	row := make([]cell, len(texts))
	for i, t := range texts {
		row[i].text = t
	}
	return row
}

const (
	gutter  = 3.0 // between columns
	headPad = 1.2 // above and below the headings
)

// table describes a table. If keep is set, a short table stays on one page.
type table struct {
	x, w    float64
	pad     float64 // above and below the text of a row
	keep    bool
	columns []column
}

// wide returns a table over the full width of the page.
func wide(columns ...column) table { return table{x: left, w: width, pad: 1.5, columns: columns} }

func (t table) head() float64 { return caption.line() + 2*headPad }

// fit gives the column of width 0 the remaining width.
func (t *table) fit() {
	rest, open := t.w-gutter*float64(len(t.columns)-1), -1
	for i, c := range t.columns {
		rest -= c.width
		if c.width == 0 {
			open = i
		}
	}
	if open >= 0 {
		t.columns[open].width = rest
	}
}

// table writes rows below their headings, which it repeats on each page. A row stays together if it
// fits on a page; otherwise it continues on the next.
func (s *sheet) table(t table, rows [][]cell) {
	if len(rows) == 0 {
		return
	}
	t.fit()
	if t.keep {
		if h := s.tableHeight(t, rows); h <= keepable {
			s.need(h)
		}
	}
	for i, row := range rows {
		lines, h := s.measureRow(t, row)
		if i == 0 {
			s.need(t.head() + min(h, bottom-top-t.head()-20))
			s.headings(t)
		}
		for done := 0; ; {
			if s.y+h > bottom && h <= bottom-top-t.head()-10 || s.y+2*t.pad+body.line() > bottom {
				s.page()
				s.headings(t)
			}
			if done, h = s.row(t, row, lines, done, h); h == 0 {
				break
			}
		}
		s.line(t.x, s.y, t.x+t.w, s.y, rule, 0.15)
	}
	s.y += 3
}

// keepable is the largest height of a table that is kept on one page.
const keepable = 70.0

// tableHeight returns the height of the table with its headings.
func (s *sheet) tableHeight(t table, rows [][]cell) float64 {
	t.fit()
	total := t.head()
	for _, row := range rows {
		_, h := s.measureRow(t, row)
		total += h
	}
	return total
}

func (s *sheet) headings(t table) {
	s.bar(t.x, s.y, t.w, t.head(), shade)
	at := t.x
	for i, c := range t.columns {
		if c.right {
			s.right(at+c.width, s.y+headPad, caption, c.heading)
		} else {
			s.put(at+indent(i), s.y+headPad, caption, c.heading)
		}
		at += c.width + gutter
	}
	s.y += t.head()
}

// indent returns the space between the edge of a table and its first column.
func indent(i int) float64 {
	if i == 0 {
		return 1.5
	}
	return 0
}

const badgeHeight = 4.2

// measureRow breaks the cells into lines, and returns the height of the row.
func (s *sheet) measureRow(t table, row []cell) (lines [][]string, h float64) {
	lines = make([][]string, len(row))
	for i, c := range t.columns {
		if row[i].result != "" {
			h = max(h, badgeHeight)
			continue
		}
		lines[i] = s.wrap(c.style, row[i].text, c.width-indent(i))
		h = max(h, float64(len(lines[i]))*c.style.line())
	}
	return lines, h + 2*t.pad
}

// row writes the lines of a row from index done, as many as fit on the page. It returns how many it
// wrote, and the height of the rest; 0 when nothing is left.
func (s *sheet) row(t table, row []cell, lines [][]string, done int, h float64) (int, float64) {
	n := 0 // number of lines that fit in every column
	for i, c := range t.columns {
		if len(lines[i]) > done {
			if fit := max(1, int((bottom-s.y-2*t.pad+0.01)/c.style.line())); n == 0 || fit < n {
				n = fit
			}
		}
	}
	at, used, rest := t.x, 0.0, 0.0
	for i, c := range t.columns {
		if r := row[i].result; r != "" {
			if done == 0 {
				s.badge(at+indent(i), s.y+t.pad-0.2, r)
				used = max(used, badgeHeight)
			}
		} else {
			for j := done; j < min(done+n, len(lines[i])); j++ {
				y := s.y + t.pad + float64(j-done)*c.style.line()
				if c.right {
					s.right(at+c.width, y, c.style, lines[i][j])
				} else {
					s.put(at+indent(i), y, c.style, lines[i][j])
				}
				used = max(used, float64(j-done+1)*c.style.line())
			}
			rest = max(rest, float64(len(lines[i])-done-n)*c.style.line())
		}
		if row[i].link != "" {
			s.f.Link(at, s.y, c.width, min(h, bottom-s.y), s.link(row[i].link))
		}
		at += c.width + gutter
	}
	s.y += used + 2*t.pad
	if rest <= 0 {
		return 0, 0
	}
	return done + n, rest + 2*t.pad
}
