package report

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"unicode"

	"codeberg.org/go-pdf/fpdf"
	"golang.org/x/image/font/gofont/gobold"
	"golang.org/x/image/font/gofont/goitalic"
	"golang.org/x/image/font/gofont/gomono"
	"golang.org/x/image/font/gofont/goregular"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

// The page: A4, in millimetres.
const (
	pageWidth, pageHeight = 210.0, 297.0

	left   = 20.0
	width  = pageWidth - 2*left
	top    = 27.0
	bottom = pageHeight - 23.0

	point = 25.4 / 72 // a typographic point
)

// rgb is a colour.
type rgb struct{ r, g, b int }

var (
	white  = rgb{255, 255, 255}
	navy   = rgb{16, 33, 58}
	teal   = rgb{23, 112, 130}
	ink    = rgb{27, 39, 51}
	muted  = rgb{91, 107, 123}
	rule   = rgb{211, 220, 228}
	shade  = rgb{244, 247, 250}
	bright = rgb{126, 205, 219}
	dim    = rgb{41, 64, 96}
	haze   = rgb{196, 210, 224}
)

// colours maps results to colours. The colour is never the only sign: the word always stands beside
// it.
var colours = map[compliance.Result]rgb{
	compliance.Pass:          {30, 117, 76},
	compliance.Fail:          {176, 42, 34},
	compliance.NoData:        {147, 101, 0},
	compliance.NotApplicable: {107, 121, 135},
	compliance.Manual:        {72, 84, 140},
}

var labels = map[compliance.Result]string{
	compliance.Pass:          "Pass",
	compliance.Fail:          "Fail",
	compliance.NoData:        "No data",
	compliance.NotApplicable: "Not applicable",
	compliance.Manual:        "Manual",
}

// style is the style of a text. Size is in points; leading is the height of a line as a multiple of
// size.
type style struct {
	family, weight string
	size           float64
	colour         rgb
	leading        float64
}

var (
	body    = style{"go", "", 9.5, ink, 1.42}
	strong  = style{"go", "B", 9.5, ink, 1.42}
	small   = style{"go", "", 8, ink, 1.38}
	faint   = style{"go", "", 8, muted, 1.38}
	aside   = style{"go", "I", 8, muted, 1.38}
	caption = style{"go", "B", 7, muted, 1.4}
	mono    = style{"gomono", "", 7.2, ink, 1.45}
	title1  = style{"go", "B", 19, navy, 1.25}
	title2  = style{"go", "B", 11.5, navy, 1.35}
)

// in returns the style in another colour.
func (s style) in(c rgb) style { s.colour = c; return s }

// at returns the style in another size.
func (s style) at(size float64) style { s.size = size; return s }

// line returns the height of a line in millimetres.
func (s style) line() float64 { return s.size * s.leading * point }

// sheet is a document that is being written from top to bottom. y is the position of the next
// element.
//
// A document is laid out twice, because the contents list pages that come later. They use the page
// numbers of the first pass.
type sheet struct {
	f      *fpdf.Fpdf
	d      compliance.Document
	y      float64
	links  map[string]int
	marks  map[string]int // the page of each mark
	former map[string]int // marks of the previous pass; empty in the first pass
	total  int            // pages of the previous pass
	goesOn func()         // begins a new page in the middle of a block; nil outside a block
}

func newSheet(d compliance.Document, former map[string]int, total int) *sheet {
	f := fpdf.New("P", "mm", "A4", "")
	f.SetCreationDate(d.Assessment.Head.Time.UTC())
	f.SetModificationDate(d.Assessment.Head.Time.UTC())
	f.SetCatalogSort(true)
	f.SetProducer("Latticekeep", true)
	f.SetCreator(printable(d.Program), true)
	f.SetTitle(printable("Evidence for "+name(d)), true)
	f.SetSubject(printable(fmt.Sprintf("%s, as of sequence %d, %s", d.Tenant, d.Assessment.Head.Sequence, d.Assessment.Head.Hash)), true)
	f.SetLang("en")
	f.SetMargins(0, 0, 0)
	f.SetCellMargin(0)
	f.SetAutoPageBreak(false, 0)
	for _, font := range []struct {
		family, weight string
		ttf            []byte
	}{{"go", "", goregular.TTF}, {"go", "B", gobold.TTF}, {"go", "I", goitalic.TTF}, {"gomono", "", gomono.TTF}} {
		// fpdf modifies the bytes of a font when it extracts glyphs. With shared bytes a report
		// would depend on earlier reports.
		f.AddUTF8FontFromBytes(font.family, font.weight, bytes.Clone(font.ttf))
	}
	return &sheet{f: f, d: d, links: make(map[string]int), marks: make(map[string]int), former: former, total: total}
}

// page begins a new page, with its running header and footer.
func (s *sheet) page() {
	a := s.d.Assessment
	s.f.AddPage()
	s.put(left, 12, faint.at(7.5), "Evidence for "+name(s.d))
	s.right(left+width, 12, mono.at(6.5).in(muted), string(s.d.Tenant))
	s.line(left, 18, left+width, 18, rule, 0.2)
	y := pageHeight - 15.0
	s.line(left, y, left+width, y, rule, 0.2)
	x := left + s.put(left, y+2.2, faint.at(7), fmt.Sprintf("Head %d", a.Head.Sequence)) + 3
	s.put(x, y+2.35, mono.at(6).in(muted), a.Head.Hash)
	s.right(left+width, y+2.2, faint.at(7), fmt.Sprintf("Page %d of %d", s.f.PageNo(), s.total))
	s.y = top
	if s.goesOn != nil {
		s.goesOn()
	}
}

// need begins a new page when less than h is left on this one.
func (s *sheet) need(h float64) {
	if s.y+h > bottom && s.y > top {
		s.page()
	}
}

// mark registers this place for the contents, the bookmarks and links.
func (s *sheet) mark(key, bookmark string, level int) {
	s.marks[key] = s.f.PageNo()
	s.f.SetLink(s.link(key), max(0, s.y-3), s.f.PageNo())
	s.set(body)
	s.f.Bookmark(printable(bookmark), level, max(0, s.y-3))
}

// link returns the link to a mark, which may come later in the document.
func (s *sheet) link(key string) int {
	id, ok := s.links[key]
	if !ok {
		id = s.f.AddLink()
		s.links[key] = id
	}
	return id
}

func (s *sheet) set(st style) {
	s.f.SetFont(st.family, st.weight, st.size)
	s.f.SetTextColor(st.colour.r, st.colour.g, st.colour.b)
}

// put writes one line with its upper left corner at x, y and returns its width.
func (s *sheet) put(x, y float64, st style, text string) float64 {
	text = printable(text)
	s.set(st)
	// Shift the baseline so that capitals are centred in the line.
	s.f.Text(x, y+st.line()/2+0.355*st.size*point, text)
	return s.f.GetStringWidth(text)
}

func (s *sheet) right(x, y float64, st style, text string) {
	s.put(x-s.measure(st, text), y, st, text)
}

func (s *sheet) centred(x, y float64, st style, text string) {
	s.put(x-s.measure(st, text)/2, y, st, text)
}

func (s *sheet) measure(st style, text string) float64 {
	s.set(st)
	return s.f.GetStringWidth(printable(text))
}

// wrap breaks the text into lines of width w. It breaks a word only when the word does not fit on a
// line, and keeps the text's own line breaks.
func (s *sheet) wrap(st style, text string, w float64) []string {
	s.set(st)
	var lines []string
	for _, part := range strings.Split(printable(text), "\n") {
		if part = strings.TrimRight(part, " "); part == "" {
			lines = append(lines, "")
			continue
		}
		lines = append(lines, s.f.SplitText(part, w)...)
	}
	return lines
}

// flow writes a paragraph over the full width and across pages, with some space after it.
func (s *sheet) flow(st style, text string) { s.flowIn(left, width, st, text) }

func (s *sheet) flowIn(x, w float64, st style, text string) {
	lines := s.wrap(st, text, w)
	for i, l := range lines {
		if i == 0 && len(lines) > 1 { // no single first line at the end of a page
			s.need(2 * st.line())
		}
		s.need(st.line())
		s.put(x, s.y, st, l)
		s.y += st.line()
	}
	s.y += 0.45 * st.line()
}

// bullets writes a list.
func (s *sheet) bullets(items ...string) {
	for _, item := range items {
		s.need(2 * body.line())
		s.fill(teal)
		s.f.Circle(left+1.6, s.y+body.line()/2, 0.65, "F")
		s.flowIn(left+5, width-5, body, item)
	}
	s.y += 1
}

// section begins a chapter, on a new page unless there is room for its beginning, in mm.
func (s *sheet) section(key, heading string, room float64) {
	s.y += 8
	s.need(room)
	s.mark(key, heading, 0)
	s.put(left, s.y, title1, heading)
	s.y += title1.line() + 1
	s.bar(left, s.y, 14, 0.9, teal)
	s.y += 6
}

// heading begins a part of a chapter. It never stands at the end of a page.
func (s *sheet) heading(text string) {
	s.y += 2.5
	s.need(title2.line() + 14)
	s.put(left, s.y, title2, text)
	s.y += title2.line() + 1
}

// callout writes a paragraph that must not be overlooked.
func (s *sheet) callout(c rgb, heading, text string) {
	lines := s.wrap(body, text, width-14)
	h := strong.line() + float64(len(lines))*body.line() + 7
	s.need(h)
	s.bar(left, s.y, width, h, shade)
	s.bar(left, s.y, 1.4, h, c)
	y := s.y + 3.2
	s.put(left+7, y, strong.in(c), heading)
	y += strong.line() + 0.4
	for _, l := range lines {
		s.put(left+7, y, body, l)
		y += body.line()
	}
	s.y += h + 5
}

// facts writes pairs of name and value below each other, the values in style st. It omits pairs
// without a value.
func (s *sheet) facts(x, w, names float64, st style, pairs ...string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] == "" {
			continue
		}
		lines := s.wrap(st, pairs[i+1], w-names)
		h := max(small.line(), float64(len(lines))*st.line()) + 2.2
		s.need(h)
		s.put(x, s.y, faint, pairs[i])
		for j, l := range lines {
			s.put(x+names, s.y+float64(j)*st.line()+(small.line()-st.line())/2, st, l)
		}
		s.y += h
	}
}

// code writes text unchanged in a box, across pages.
func (s *sheet) code(st style, text string) {
	lines := s.wrap(st, text, width-8)
	h := st.line()
	const pad = 2.6
	for len(lines) > 0 {
		s.need(min(float64(len(lines)), 4)*h + 2*pad)
		n := min(len(lines), max(1, int((bottom-s.y-2*pad)/h)))
		s.bar(left, s.y, width, float64(n)*h+2*pad, shade)
		s.y += pad
		for _, l := range lines[:n] {
			s.put(left+4, s.y, st, l)
			s.y += h
		}
		s.y += pad
		lines = lines[n:]
	}
	s.y += 4
}

// badge draws a result at the upper left corner of a line.
func (s *sheet) badge(x, y float64, r compliance.Result) {
	st := caption.in(white)
	w := s.measure(st, labels[r]) + 4.4
	s.fill(colours[r])
	s.f.RoundedRect(x, y+0.1, w, 4.1, 1.1, "1234", "F")
	s.put(x+2.2, y+0.1+(4.1-st.line())/2, st, labels[r])
}

func (s *sheet) fill(c rgb) { s.f.SetFillColor(c.r, c.g, c.b) }

// bar fills a rectangle.
func (s *sheet) bar(x, y, w, h float64, c rgb) {
	s.fill(c)
	s.f.Rect(x, y, w, h, "F")
}

func (s *sheet) line(x1, y1, x2, y2 float64, c rgb, thick float64) {
	s.f.SetDrawColor(c.r, c.g, c.b)
	s.f.SetLineWidth(thick)
	s.f.Line(x1, y1, x2, y2)
}

// arc draws a part of a circle 5 mm thick, in degrees counterclockwise from three o'clock.
func (s *sheet) arc(x, y, radius, from, to float64, c rgb) {
	if math.Abs(to-from) < 0.01 {
		return
	}
	s.f.SetDrawColor(c.r, c.g, c.b)
	s.f.SetLineWidth(5)
	s.f.Arc(x, y, radius, radius, 0, from, to, "D")
}

// printable returns the text in the characters that the fonts have: Latin, Greek, Cyrillic and
// punctuation. Missing and invisible characters become question marks. The PDF writer supports only
// the first 65536 characters, and would fail on invalid UTF-8.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n':
			return r
		case unicode.IsSpace(r):
			return ' '
		case r >= ' ' && r <= '~', r >= 0xa1 && r <= 0x17f && r != 0xad, r >= 0x391 && r <= 0x3c9 && r != 0x3a2, r >= 0x401 && r <= 0x45f && r != 0x40d && r != 0x450:
			return r
		case strings.ContainsRune("–—‘’‚“”„†‡•…‰‹›€™−≤≥≠≈→←↑↓√∞·", r):
			return r
		}
		return '?'
	}, strings.ToValidUTF8(s, "?"))
}
