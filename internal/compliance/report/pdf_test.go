package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/image/font/gofont/gobold"
	"golang.org/x/image/font/gofont/goitalic"
	"golang.org/x/image/font/gofont/gomono"
	"golang.org/x/image/font/gofont/goregular"
	"golang.org/x/image/font/sfnt"

	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
)

var update = flag.Bool("update", false, "rewrite the golden documents, the sample of docs/ and the seeds of the fuzz targets")

func documents() map[string]compliance.Document {
	all := map[string]compliance.Document{"soc2": soc2(), "fedramp": fedramp(), "withheld": broken(), "disabled": disabled(), "empty": empty()}
	if !testing.Short() { // most of the time; TestNothingLeavesThePage has it in any case
		all["huge"] = huge()
	}
	return all
}

func render(t testing.TB, d compliance.Document) []byte {
	t.Helper()
	b, err := PDF(d)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// pdftotext converts a PDF to text with poppler, which `make test` installs where it can.
func pdftotext(t *testing.T, pdf []byte, flags ...string) string {
	t.Helper()
	if _, err := exec.LookPath("pdftotext"); err != nil {
		t.Skip("pdftotext is not on the PATH, and `make test` installs it only as root on Debian: install poppler-utils")
	}
	file := filepath.Join(t.TempDir(), "report.pdf")
	if err := os.WriteFile(file, pdf, 0o600); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd := exec.Command("pdftotext", append(flags, "-enc", "UTF-8", file, "-")...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || stderr.Len() > 0 {
		t.Fatalf("pdftotext: %v %s", err, stderr.String())
	}
	return string(out)
}

// bare returns s without any space, because line breaks can be anywhere.
func bare(s string) string { return strings.Join(strings.Fields(s), "") }

func TestPDFSaysAllThatWasJudged(t *testing.T) {
	for name, d := range documents() {
		t.Run(name, func(t *testing.T) {
			text := pdftotext(t, render(t, d), "-layout")
			// A title or id across two pages has a header in between. TestNothingLeavesThePage
			// checks those of huge.
			var want []string
			a := d.Assessment
			want = append(want, "Evidence for", string(d.Tenant), a.Head.Hash, "sequence "+strconv.FormatUint(a.Head.Sequence, 10), d.ChainID, d.Fingerprint, d.KeyID,
				"21 November 2026, 10:00:00 UTC", d.Checkpoint, d.Command, d.Program, d.PublicKey, notice, sentence(d.Limits), a.Proof.Status)
			if name != "huge" {
				want = append(want, d.Name, a.Version)
				for _, c := range a.Controls {
					want = append(want, c.ID+" "+c.Title, labels[c.Result], strings.Join(c.Related, ", "))
					for _, p := range c.Probes {
						want = append(want, p.Title, sentence(p.Detail), "Probe "+p.Name, "Sample "+strconv.Itoa(p.Sample), "Window "+window(p.WindowDays), toDo(p))
					}
				}
			}
			if a.Score != nil {
				want = append(want, number(*a.Score))
			} else {
				want = append(want, "The score is withheld", sentence(a.Reason), "Until the chain holds again")
			}
			all := bare(text)
			for _, w := range want {
				if !strings.Contains(all, bare(w)) {
					t.Errorf("the report does not say %q", w)
				}
			}
			for _, c := range a.Controls {
				for _, p := range c.Probes {
					for _, e := range p.Evidence {
						if !regexp.MustCompile(fmt.Sprintf(`(?m)^ *%d +%s.* +%s *$`, e.Sequence, e.Event, e.Hash)).MatchString(text) {
							t.Fatalf("the report does not cite %d of %s on one line", e.Sequence, c.ID)
						}
					}
				}
			}
			for _, w := range []string{"Organisation Example Ltd", "Period", "probes look back", "CREDENTIAL_UNSEALED, 2026-11-19 06:00:00", "api_key key_mfrggzdfmztwq2lknnwg23tpoa"} {
				if name == "soc2" && !strings.Contains(all, bare(w)) {
					t.Errorf("the report does not say %q", w)
				}
			}
			if got := strings.Contains(text, "There is no data"); got != (name == "empty") {
				t.Errorf("that there is no data: %v", got)
			}
			if got := strings.Contains(all, bare(unwatched)); got != (name == "disabled") || got != strings.Contains(text, "disabled: nothing verified") {
				t.Errorf("that nothing verified the chain: %v", got)
			}
			if got := strings.Contains(text, "The score is withheld"); got != (a.Score == nil) {
				t.Errorf("that the score is withheld: %v", got)
			}
		})
	}
}

// The cover marks what the caller states as stated, and says that the score is not of the period.
func TestPDFSaysWhatIsStated(t *testing.T) {
	d := sample(t, compliance.SOC2, quarter())
	d.Stated, d.From = "Käsekontor Müller", d.Assessment.Head.Time.AddDate(0, 0, -30)
	text := pdftotext(t, render(t, d), "-layout")
	for _, says := range []string{"Made for, as stated Käsekontor Müller", "Period, as stated " + date(d.From) + " to " + date(d.Assessment.Head.Time) + "; the score is of its end",
		"are those of the head, at its end, and not of the period", "The log does not know that name"} {
		if !strings.Contains(bare(text), bare(says)) {
			t.Errorf("the report does not say %q", says)
		}
	}
}

// A score that is missing for lack of data is not blamed on the chain.
func TestPDFWithoutAScoreSaysWhy(t *testing.T) {
	d := empty()
	d.Assessment.Score, d.Assessment.Reason = nil, "there is no data to judge by yet"
	text := pdftotext(t, render(t, d))
	if !strings.Contains(text, "There is no score") || !strings.Contains(text, "There is no data to judge by yet.") || strings.Contains(text, "withheld\n") {
		t.Error("it does not say that there is no score for want of data")
	}
}

func TestPDFMarksAProvisionalScore(t *testing.T) {
	d := sample(t, compliance.SOC2, quarter())
	for _, provisional := range []bool{false, true} {
		d.Assessment.Provisional = provisional
		if got := strings.Contains(pdftotext(t, render(t, d)), "Provisional: the log has no"); got != provisional {
			t.Errorf("provisional is %v, and the report says so: %v", provisional, got)
		}
	}
}

// Each page shows the report, its head and its number. The contents list the pages of the chapters
// and controls.
func TestPDFNamesItsPages(t *testing.T) {
	for name, d := range documents() {
		if name == "huge" {
			continue // its titles go across pages
		}
		text := pdftotext(t, render(t, d), "-layout")
		pages := strings.Split(strings.TrimSuffix(text, "\f"), "\f")
		for i, p := range pages[1:] {
			for _, want := range []string{"Evidence for " + d.Name, string(d.Tenant), "Head 4211", d.Assessment.Head.Hash, fmt.Sprintf("Page %d of %d", i+2, len(pages))} {
				if !strings.Contains(p, want) {
					t.Errorf("%s: page %d does not say %q", name, i+2, want)
				}
			}
		}
		on := func(n, what string) {
			t.Helper()
			page, err := strconv.Atoi(n)
			if err != nil || page < 1 || page > len(pages) || !regexp.MustCompile(`(?m)^ *`+regexp.QuoteMeta(what)).MatchString(pages[page-1]) {
				t.Errorf("%s: %q is not on page %s", name, what, n)
			}
		}
		chapters := regexp.MustCompile(`(?m)^ *(\S.*?)(?: \(\d+\))? +(\d+) *$`)
		var seen []string
		for _, m := range chapters.FindAllStringSubmatch(pages[1], -1) {
			if slices.Contains([]string{"Scope and limits", "Summary", "Controls with evidence", "Manual controls", "Head of the chain", "How to verify this report", "Glossary"}, m[1]) {
				seen = append(seen, m[1])
				on(m[2], m[1])
			}
		}
		if len(seen) != 7 {
			t.Errorf("%s: the contents have %q", name, seen)
		}
		for _, c := range d.Assessment.Controls {
			m := regexp.MustCompile(`(?m)^ *` + regexp.QuoteMeta(c.ID) + ` .* (\d+) *$`).FindStringSubmatch(pages[1])
			if m == nil {
				t.Errorf("%s: %s is not at a glance", name, c.ID)
				continue
			}
			on(m[1], c.ID+" ")
		}
	}
}

// The same document gives the same bytes, wherever, whenever and however often it is rendered, and
// however far the log has grown since.
func TestRenderingIsTheSameBytes(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: renders every report twice")
	}
	local := time.Local
	t.Cleanup(func() { time.Local = local })
	for name, d := range documents() {
		for format, f := range map[string]compliance.Renderer{"pdf": PDF, "oscal": OSCAL, "ksi": KSI} {
			if format == "ksi" && d.Assessment.Framework != compliance.FedRAMP {
				continue
			}
			first, err := f(d)
			if err != nil {
				t.Fatal(err)
			}
			for i := range 2 {
				again := d
				time.Local = time.FixedZone("elsewhere", i*3600)
				again.Assessment.Head.Time = d.Assessment.Head.Time.In(time.Local)
				if d.Assessment.Proof.Status == compliance.Verified {
					again.Assessment.Proof.VerifiedTo += uint64(i)
				}
				again.Assessment.Proof.At = headTime.Add(time.Duration(i) * time.Hour)
				between := soc2() // with other glyphs than the other reports
				between.ChainID = string(rune('À' + i))
				if _, err := PDF(between); err != nil {
					t.Fatal(err)
				}
				if b, err := f(again); err != nil || !bytes.Equal(b, first) {
					t.Errorf("%s as %s is not the same the next time: %v", name, format, err)
				}
			}
			other := d
			other.Assessment.Head.Hash = hashOf(77)
			if b, err := f(other); err != nil || bytes.Equal(b, first) {
				t.Errorf("%s as %s does not depend on the head: %v", name, format, err)
			}
		}
	}
}

// Concurrent rendering does not change a report.
func TestRenderingTogether(t *testing.T) {
	want := [][]byte{render(t, soc2()), render(t, fedramp()), render(t, empty())}
	for range 4 {
		for i, d := range []compliance.Document{soc2(), fedramp(), empty()} {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				if !bytes.Equal(render(t, d), want[i]) {
					t.Error("it is not the same beside others")
				}
			})
		}
	}
}

// All text is between the margins, and lines do not overlap.
func TestNothingLeavesThePage(t *testing.T) {
	for name, d := range documents() {
		out := pdftotext(t, render(t, d), "-bbox")
		// poppler does not escape characters in a title that XML does not allow.
		out = regexp.MustCompile(`(?s)<head>.*?</head>`).ReplaceAllString(out, "")
		var doc struct {
			Pages []struct {
				Words []struct {
					XMin float64 `xml:"xMin,attr"`
					YMin float64 `xml:"yMin,attr"`
					XMax float64 `xml:"xMax,attr"`
					YMax float64 `xml:"yMax,attr"`
					Text string  `xml:",chardata"`
				} `xml:"word"`
			} `xml:"body>doc>page"`
		}
		if err := xml.Unmarshal([]byte(out), &doc); err != nil {
			t.Fatal(err)
		}
		if len(doc.Pages) < 8 {
			t.Fatalf("%s: %d pages were read back", name, len(doc.Pages))
		}
		const tolerance = 0.6 // millimetres: the box of a glyph is larger than its ink
		for n, page := range doc.Pages {
			for _, w := range page.Words {
				x1, x2, y2 := w.XMin*point, w.XMax*point, w.YMax*point
				if x1 < left-tolerance || x2 > left+width+tolerance || w.YMin*point < 5 || y2 > pageHeight-5 {
					t.Errorf("%s, page %d: %q stands at %.1f to %.1f mm, down to %.1f mm", name, n+1, w.Text, x1, x2, y2)
				}
				// Only the footer, and the cover's last lines, may be below the text.
				if footer := pageHeight - 15.0; n > 0 && y2 > bottom+1.5 && w.YMin*point < footer {
					t.Errorf("%s, page %d: %q runs into the footer", name, n+1, w.Text)
				}
			}
		}
	}
}

func TestReportNeedsAHead(t *testing.T) {
	for name, spoil := range map[string]func(*compliance.Head){
		"time":     func(h *compliance.Head) { h.Time = time.Time{} },
		"sequence": func(h *compliance.Head) { h.Sequence = 0 },
		"hash":     func(h *compliance.Head) { h.Hash = "5c2f" },
	} {
		d := fedramp()
		spoil(&d.Assessment.Head)
		for _, f := range []compliance.Renderer{PDF, OSCAL, KSI} {
			if b, err := f(d); b != nil || !errors.Is(err, fault.Internal) {
				t.Errorf("rendered without the head's %s: %v", name, err)
			}
		}
	}
}

// A report says what is evidence for what, and judges no organisation.
func TestWords(t *testing.T) {
	forbidden := regexp.MustCompile(`(?i)\b(non-?)?complian(t|ce)\b|\bcompl(y|ies)\b|\bsatisf|\bcertif(y|ied)|\bconform|\bguarantee`)
	// These names may contain the words: commands, types of events, and the format's own words.
	named := regexp.MustCompile(`latticekeep compliance score|COMPLIANCE_[A-Z_]+|"state": "(not-)?satisfied"`)
	for name, d := range documents() {
		oscal, err := OSCAL(d)
		if err != nil {
			t.Fatal(err)
		}
		texts := map[string]string{"oscal": string(oscal)}
		if name == "fedramp" {
			ksi, err := KSI(d)
			if err != nil {
				t.Fatal(err)
			}
			texts["ksi"] = string(ksi)
		}
		if _, err := exec.LookPath("pdftotext"); err == nil {
			texts["pdf"] = pdftotext(t, render(t, d))
		}
		for format, text := range texts {
			text = named.ReplaceAllString(strings.Join(strings.Fields(text), " "), "")
			if m := forbidden.FindStringIndex(text); m != nil {
				t.Errorf("%s as %s says %q", name, format, text[max(0, m[0]-40):min(len(text), m[1]+40)])
			}
		}
	}
}

// All four fonts contain every printable character.
func TestFontsHaveWhatIsPrintable(t *testing.T) {
	for name, ttf := range map[string][]byte{"regular": goregular.TTF, "bold": gobold.TTF, "italic": goitalic.TTF, "mono": gomono.TTF} {
		f, err := sfnt.Parse(ttf)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for r := rune(' '); r <= 0xffff; r++ {
			if printable(string(r)) != string(r) {
				continue
			}
			n++
			if g, err := f.GlyphIndex(new(sfnt.Buffer), r); err != nil || g == 0 {
				t.Errorf("%s lacks %U", name, r)
			}
		}
		if n < 400 {
			t.Errorf("only %d characters are printable", n)
		}
	}
	if got := printable("Größe, λ и €: \x00\u200b🔐漢\xff\ttab"); got != "Größe, λ и €: ????? tab" {
		t.Errorf("%q", got)
	}
}

func FuzzPDF(f *testing.F) {
	f.Add("CC6.1", "Access to protected assets", "1842 decisions were recorded", "ten_mfrggzdfmztwq2lknnwg23tpoa", 3, 85.7)
	f.Add("", "", "", "", 0, -1.0)
	f.Add(strings.Repeat("W", 300), strings.Repeat("unbroken", 400), "line\nline\n\n\nline", "\xff\xfe🔐\x00", 90, 1e300)
	f.Fuzz(func(t *testing.T, id, title, detail, tenant string, n int, score float64) {
		if len(id)+len(title)+len(detail)+len(tenant) > 1<<13 || strings.Count(detail, "\n") > 1000 {
			t.Skip("longer than any catalogue")
		}
		p := probe(id, title, compliance.Fail, n, n, detail)
		for i := range uint64(max(0, min(n, 100))) {
			p.Evidence = append(p.Evidence, refs2(i)...)
		}
		c := control(id, title, compliance.Fail, title, p, p)
		m := control(id, title, compliance.Manual, detail)
		d := document(compliance.SOC2, title, detail, &score, []compliance.ControlResult{c, m})
		d.ChainID, d.Checkpoint, d.Command, d.Limits, d.History = tenant, detail, detail, title, nil
		b := render(t, d)
		if !bytes.HasPrefix(b, []byte("%PDF-")) || !bytes.HasSuffix(bytes.TrimSpace(b), []byte("%%EOF")) {
			t.Fatal("it is no PDF")
		}
		if !bytes.Equal(b, render(t, d)) {
			t.Fatal("it is not the same twice")
		}
	})
}

func BenchmarkPDF(b *testing.B) {
	for name, d := range map[string]compliance.Document{"ordinary": soc2(), "huge": huge()} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				render(b, d)
			}
		})
	}
}
