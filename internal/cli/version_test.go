package cli

import (
	"encoding/json"
	"runtime"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// A script learns of the build what a person does, and which stores the program opens. Which commit a
// program says is for the tests of buildinfo: a test program has none.
func TestVersionAsJSON(t *testing.T) {
	var v struct {
		Version, Go, Platform string
		Modified              *bool
		Formats               struct{ Reads, Writes int } `json:"store_formats"`
	}
	out := mustRun(t, "version", "--json")
	must(t, json.Unmarshal([]byte(out), &v))
	if v.Version != buildinfo.Version() || v.Go != runtime.Version() || v.Platform != runtime.GOOS+"/"+runtime.GOARCH || v.Modified == nil {
		t.Errorf("version --json printed %s", out)
	}
	if !slices.Equal([]int{v.Formats.Reads, v.Formats.Writes}, []int{format.Reads, format.Writes}) {
		t.Errorf("formats %+v, want %d and %d", v.Formats, format.Reads, format.Writes)
	}
}
