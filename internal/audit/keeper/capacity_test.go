package keeper

import (
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/test/audittest"
)

const capacityGuide = "../../../docs/guides/capacity.md"

// documented returns the rows of the table of the guide whose first heading is that, without
// headings.
func documented(t *testing.T, heading string) (rows [][]string) {
	t.Helper()
	page, err := os.ReadFile(capacityGuide)
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "\n| "+heading+" |")
	for line := range strings.Lines(table) {
		if line == "\n" {
			break
		}
		cells := strings.Split(strings.Trim(line, "| \n"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		rows = append(rows, cells)
	}
	if len(rows) < 3 {
		t.Fatalf("the guide has no table %q", heading)
	}
	return rows[2:]
}

func number(t *testing.T, cell string) float64 {
	t.Helper()
	n, err := strconv.ParseFloat(strings.ReplaceAll(cell, ",", ""), 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// documentedBytes returns how many bytes the guide says that something takes.
func documentedBytes(t *testing.T, what string) float64 {
	t.Helper()
	for _, row := range documented(t, "what") {
		if row[0] == what {
			return number(t, row[1])
		}
	}
	t.Fatalf("the guide does not say what %q takes", what)
	return 0
}

// An entry takes what the guide says, in the database and in the archive.
func TestEntriesTakeWhatTheCapacityGuideSays(t *testing.T) {
	for _, c := range []struct {
		mode               writer.Signing
		group              int
		database, archived string
	}{
		{writer.SignEntries, 50, "an entry, `audit.signing: entry`", "an entry in the archive: `entry`"},
		{writer.SignBatches, 8, "an entry, `batch`, with 8 entries a commit", "an entry in the archive: `batch`, 8 a commit"},
		{writer.SignBatches, 50, "an entry, `batch`, with 50 entries a commit", "an entry in the archive: `batch`, 50 a commit"},
	} {
		f := audittest.NewFixture(t)
		f.Log.SetSigning(c.mode)
		g := newGrowth(t, f, &Packer{Log: f.Log.Log, Fresh: 1, Logger: slog.New(slog.DiscardHandler)})
		g.groups(4500/c.group, c.group)
		compare := func(what string, measured float64) {
			t.Helper()
			if said := documentedBytes(t, what); measured > said || measured < 0.7*said {
				t.Errorf("%s takes %.0f bytes, and %s says %.0f", what, measured, filepath.Base(capacityGuide), said)
			}
		}
		compare(c.database, g.cost())
		f.Advance(2 * audittest.Keep)
		a, dir := f.Folder()
		n, err := (&Cutter{Log: f.Log.Log, Reader: f.Log.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		size := int64(0)
		err = fs.WalkDir(os.DirFS(dir), ".", func(_ string, d fs.DirEntry, err error) error {
			if info, ierr := d.Info(); err == nil && ierr == nil && info.Mode().IsRegular() {
				size += info.Size()
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		compare(c.archived, float64(size)/float64(n))
	}
}

// The table of the guide follows from its formula.
func TestTheCapacityTableFollowsFromItsFormula(t *testing.T) {
	const (
		day               = 86400.0
		reserve           = 330e6
		scratch           = 1.5 // of the rows
		free              = 0.2 // of the volume
		most, days, least = 1e6, 90.0, 3600.0
	)
	kinds := map[string][2]string{
		"`entry`":             {"an entry, `audit.signing: entry`", "an entry in the archive: `entry`"},
		"`batch`, 8 a commit": {"an entry, `batch`, with 8 entries a commit", "an entry in the archive: `batch`, 8 a commit"},
		"`batch`, 50 a commit": {
			"an entry, `batch`, with 50 entries a commit", "an entry in the archive: `batch`, 50 a commit",
		},
	}
	for _, row := range documented(t, "entries a second") {
		rate, bytes, archived := number(t, row[0]), documentedBytes(t, kinds[row[1]][0]), documentedBytes(t, kinds[row[1]][1])
		kept := min(rate*day*days, max(most, rate*least)) * bytes
		for i, want := range []float64{
			rate * day * bytes, rate * day * 30 * bytes, rate * day * 90 * bytes, rate * day * 365 * bytes,
			kept, rate * day * 365 * archived, (kept*(1+scratch) + reserve) / (1 - free),
		} {
			digits := 1
			if want >= 100e9 {
				digits = 0
			}
			if got := strings.ReplaceAll(row[2+i], ",", ""); got != fmt.Sprintf("%.*f", digits, want/1e9) {
				t.Errorf("%s entries a second, %s, column %d: %s GB, want %.*f", row[0], row[1], 3+i, got, digits, want/1e9)
			}
		}
	}
}
