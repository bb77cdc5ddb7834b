package v2

import "testing"

func TestReportsAreNamedByTheirType(t *testing.T) {
	for name, want := range map[string]string{
		"soc2-1-a.pdf": "application/pdf", "soc2-1-a.oscal.json": "application/json", "soc2-1-a.pdf.sig": "application/octet-stream", "a": "application/octet-stream",
	} {
		if got := reportType(name); got != want {
			t.Errorf("%s: %s", name, got)
		}
	}
}
