package compliance_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

// required lists the controls that each catalogue must contain.
var required = map[compliance.Framework]string{
	compliance.SOC2:     "CC4.1 CC6.1 CC6.2 CC6.3 CC6.6 CC6.7 CC7.1 CC7.2 CC7.3 CC7.4 CC8.1 C1.1 C1.2 A1.2",
	compliance.ISO27001: "5.15 5.16 5.17 5.18 5.28 5.33 8.2 8.3 8.5 8.10 8.13 8.15 8.16 8.17 8.24 8.32",
	compliance.PCIDSS: "3.6.1.1 3.6.1.2 3.6.1.4 3.7.1 3.7.4 3.7.5 3.7.6 3.7.7 4.2.1 4.2.1.1 7.2.1 7.2.5 7.3.3 8.3.2 8.6.2 8.6.3 10.2.1.1 10.2.1.2 10.2.1.3 10.2.1.4 " +
		"10.2.1.5 10.2.1.6 10.2.1.7 10.2.2 10.3.2 10.3.4 10.4.1.1 10.5.1 10.6.1 10.7.2 12.3.3",
	compliance.HIPAA: "164.308(a)(1)(ii)(D) 164.308(a)(3)(ii)(C) 164.308(a)(4) 164.308(a)(5)(ii)(C) 164.308(a)(5)(ii)(D) 164.308(a)(6)(ii) 164.308(a)(7)(ii)(A) " +
		"164.312(a)(2)(i) 164.312(a)(2)(iv) 164.312(b) 164.312(c)(1) 164.312(c)(2) 164.312(d) 164.312(e)(2)(ii) 164.316(b)(2)(i)",
	compliance.GDPR: "5(1)(e) 5(1)(f) 5(2) 17 25(1) 25(2) 28(3)(h) 30(1)(g) 30(2)(d) 32(1)(a) 32(1)(b) 32(1)(c) 32(1)(d) 33(5) 34(3)(a)",
	compliance.NISTCSF: "ID.AM-07 ID.AM-08 PR.AA-01 PR.AA-03 PR.AA-04 PR.AA-05 PR.DS-01 PR.DS-02 PR.DS-10 PR.DS-11 PR.PS-01 PR.PS-04 DE.CM-03 DE.CM-09 DE.AE-02 " +
		"DE.AE-03 DE.AE-06 RS.AN-06 RS.AN-07 RC.RP-03",
	compliance.FedRAMP: "AC-2(4) AC-6(9) AU-2 AU-3(1) AU-12 AU-6(1) AU-7(1) AU-8 AU-11 AU-9(4) IA-5(6) IA-5(7) SC-8(1) SC-28(1) SC-12 SC-13 SI-7(1) CM-3 " +
		"AU-9(3) AU-10 AU-5(1) AU-5(2) AU-12(1) AU-12(3) SC-12(1) " +
		"KSI-SVC-ASM KSI-MLA-LET KSI-MLA-RVL KSI-MLA-OSM KSI-MLA-ALA KSI-IAM-SNU KSI-SVC-SIN CMU-CSO-CMD CMU-CSO-UVM KSI-SVC-VRI KSI-CMT-LMC",
	compliance.APRA: "16 20 21 22 23 25 26 27 28 29 32 34 35 36",
	compliance.NIST80053: "AC-2 AC-3 AC-5 AC-6(9) AU-2 AU-3 AU-4 AU-5 AU-6 AU-7 AU-8 AU-9(2) AU-9(3) AU-9(4) AU-10 AU-11 AU-12 CA-7 CM-3 CM-6 CP-9(8) IA-3 " +
		"IA-5(1) IA-5(2) IA-5(6) IA-5(7) IR-5 SC-8(1) SC-12(1) SC-12(2) SC-12(3) SC-13 SC-17 SC-28(1) SC-28(3) SI-7(1) SI-7(6)",
}

func catalogues(t testing.TB) map[compliance.Framework]*compliance.Catalogue {
	t.Helper()
	all, err := compliance.LoadCatalogues("")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestCataloguesListTheControls(t *testing.T) {
	all := catalogues(t)
	used := make(map[string]bool)
	for _, f := range compliance.Frameworks() {
		c := all[f]
		var ids []string
		live := false
		for _, control := range c.Controls {
			ids = append(ids, control.ID)
			for _, p := range control.Probes {
				used[p] = true
				live = live || slices.ContainsFunc(compliance.StateProbes, func(s compliance.Probe) bool { return s.Name == p })
			}
			if words := len(strings.Fields(control.Title)); words < 1 || words > 14 {
				t.Errorf("%s %s: a title of %d words", f, control.ID, words)
			}
		}
		for _, id := range strings.Fields(required[f]) {
			if !slices.Contains(ids, id) {
				t.Errorf("%s lacks %s", f, id)
			}
		}
		if !live {
			t.Errorf("%s has no probe of live state, so that an empty tenant has no number", f)
		}
		for _, word := range []string{"compliant", "satisf"} {
			if strings.Contains(strings.ToLower(c.Limits), word) {
				t.Errorf("%s says %s", f, word)
			}
		}
	}
	for i := range compliance.Probes {
		if !used[compliance.Probes[i].Name] {
			t.Errorf("no catalogue asks %s", compliance.Probes[i].Name)
		}
	}
	if got := all[compliance.FedRAMP].Profiles(); !slices.Equal(got, []string{"rev5", "rev5-high", "20x"}) {
		t.Error(got)
	}
}

const smallCatalogue = `framework: soc2
name: SOC 2
version: "1"
limits: Much.
controls:
  - id: A
    title: One
    related: [AC-2, AC-2(4)]
    weight: 2.5
    probes: [keys_wrapped]
  - id: B
    title: Two
    related: [AU-2]
    manual: true
`

func TestMalformedCataloguesNameTheirLine(t *testing.T) {
	if _, err := compliance.ParseCatalogue("c.yaml", []byte(smallCatalogue)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ old, new, want string }{
		{smallCatalogue, "", "c.yaml:1: the file is empty"},
		{smallCatalogue, "- a\n", "c.yaml:1: here belongs a mapping"},
		{"version: \"1\"", "version: [", "c.yaml:"},
		{"framework: soc2", "framework: soc3", "c.yaml:1: there is no such framework"},
		{"framework: soc2\n", "", "c.yaml:1: framework is missing"},
		{"name: SOC 2", "nam: SOC 2", "c.yaml:2: unknown key"},
		{"name: SOC 2", "name:", "c.yaml:2: name is not a text"},
		{"name: SOC 2", "name: [a]", "c.yaml:2: name is not a text"},
		{"name: SOC 2", "name: a\nname: b", "c.yaml:3: "},
		{"limits: Much.\n", "", "c.yaml:1: limits is missing"},
		{"    title: One\n", "", "c.yaml:6: title is missing"},
		{"title: Two", "title: ' '", "c.yaml:12: title is not a text"},
		{"id: B", "id: A", "c.yaml:11: the id is that of an earlier control"},
		{"AC-2(4)", "AC-2 (4)", "c.yaml:8: it is not the id"},
		{"related: [AU-2]", "related: []", "c.yaml:13: related is not a list"},
		{"    related: [AU-2]\n", "", "c.yaml:11: related is missing"},
		{"weight: 2.5", "weight: 0", "c.yaml:9: weight"},
		{"weight: 2.5", "weight: .nan", "c.yaml:9: weight"},
		{"weight: 2.5", "weight: 11", "c.yaml:9: weight"},
		{"[keys_wrapped]", "[keys_rapped]", "c.yaml:10: there is no such probe"},
		{"[keys_wrapped]", "[keys_wrapped, keys_wrapped]", "c.yaml:10: the probe is here twice"},
		{"[keys_wrapped]", "[]", "c.yaml:10: probes is not a list"},
		{"    probes: [keys_wrapped]\n", "", "c.yaml:6: the control has neither"},
		{"manual: true", "manual: yes", "c.yaml:14: manual is true, or absent"},
		{"manual: true", "manual: true\n    probes: [keys_wrapped]", "c.yaml:15: a control has probes or is manual"},
		{"manual: true", "manual: true\n    note: x", "c.yaml:15: unknown key"},
	} {
		_, err := compliance.ParseCatalogue("c.yaml", []byte(strings.Replace(smallCatalogue, c.old, c.new, 1)))
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%q: %v, want %s", c.new, err, c.want)
		}
	}
}

func TestDirectoryReplacesCatalogues(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("soc2.yaml", smallCatalogue)
	all, err := compliance.LoadCatalogues(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(all[compliance.SOC2].Controls) != 2 || len(all) != len(compliance.Frameworks()) || len(all[compliance.GDPR].Controls) < 10 {
		t.Errorf("%d controls", len(all[compliance.SOC2].Controls))
	}
	if all[compliance.SOC2].Digest == catalogues(t)[compliance.SOC2].Digest {
		t.Error("another catalogue has the same digest")
	}
	path := write("gdpr.yaml", smallCatalogue)
	if _, err := compliance.LoadCatalogues(dir); err == nil || !strings.HasPrefix(err.Error(), path+":1: ") {
		t.Error(err)
	}
	path = write("gdpr.yaml", "framework: gdpr\nnaem: x\n")
	if _, err := compliance.LoadCatalogues(dir); err == nil || !strings.HasPrefix(err.Error(), path+":2: unknown key") {
		t.Error(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	path = write("soc3.yaml", smallCatalogue)
	if _, err := compliance.LoadCatalogues(dir); err == nil || !strings.HasPrefix(err.Error(), path) {
		t.Error(err)
	}
	if _, err := compliance.LoadCatalogues(filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that is not there was taken for none")
	}
}

func FuzzCatalogue(f *testing.F) {
	f.Add([]byte(smallCatalogue))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := compliance.ParseCatalogue("c.yaml", b)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "c.yaml:") {
				t.Errorf("no line: %v", err)
			}
			return
		}
		s, e := pure(t)
		s.Good()
		if a := c.Assess(e); a.Score != nil && (*a.Score < 0 || *a.Score > 100) {
			t.Errorf("a score of %v", *a.Score)
		}
	})
}
