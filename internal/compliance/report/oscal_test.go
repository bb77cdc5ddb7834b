package report

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/defenseunicorns/go-oscal/src/pkg/validation"
	oscal "github.com/defenseunicorns/go-oscal/src/types/oscal-1-1-3"

	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// golden compares got with a committed file, or writes the file.
func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what is rendered: look at the difference, and write it with go test ./internal/compliance/report -update", file)
	}
}

func assessmentResults(t *testing.T, d compliance.Document) ([]byte, oscal.AssessmentResults) {
	t.Helper()
	b, err := OSCAL(d)
	if err != nil {
		t.Fatal(err)
	}
	var m oscal.OscalModels
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return b, *m.AssessmentResults
}

// validOSCAL checks a document against NIST's schema, which the module go-oscal contains.
func validOSCAL(t *testing.T, document []byte) {
	t.Helper()
	v, err := validation.NewValidator(document)
	if err != nil {
		t.Fatal(err)
	}
	if v.GetSchemaVersion() != oscalVersion || v.GetModelType() != "assessment-results" {
		t.Fatalf("validated as %s of %s", v.GetModelType(), v.GetSchemaVersion())
	}
	if err := v.Validate(); err != nil {
		result, _ := v.GetValidationResult()
		t.Fatalf("%v\n%+v", err, result.Errors)
	}
}

func TestOSCALIsValid(t *testing.T) {
	for name, d := range documents() {
		t.Run(name, func(t *testing.T) {
			b, _ := assessmentResults(t, d)
			validOSCAL(t, b)
		})
	}
	t.Run("bare", func(t *testing.T) { // without any optional part
		d := compliance.Document{Assessment: compliance.Assessment{
			Framework: compliance.SOC2, Head: soc2().Assessment.Head, Proof: compliance.Proof{Status: compliance.Disabled},
		}}
		b, _ := assessmentResults(t, d)
		validOSCAL(t, b)
	})
	t.Run("refused", func(t *testing.T) { // proves that the schema is applied
		b, _ := assessmentResults(t, soc2())
		v, err := validation.NewValidator(bytes.Replace(b, []byte(`"state": "satisfied"`), []byte(`"state": "fine"`), 1))
		if err != nil {
			t.Fatal(err)
		}
		if v.Validate() == nil {
			t.Error("a state that OSCAL does not have is valid")
		}
	})
}

func TestOSCALHoldsAllThatWasJudged(t *testing.T) {
	for name, d := range documents() {
		_, r := assessmentResults(t, d)
		result := r.Results[0]
		prop := func(props *[]oscal.Property, name string) string {
			if props != nil {
				for _, p := range *props {
					if p.Name == name {
						return p.Value
					}
				}
			}
			return ""
		}
		a := d.Assessment
		if prop(result.Props, "head-hash") != a.Head.Hash || prop(result.Props, "head-sequence") != "4211" || prop(result.Props, "chain-fingerprint") != d.Fingerprint ||
			prop(result.Props, "score") != scoreText(a) || prop(result.Props, "proof-status") != a.Proof.Status {
			t.Errorf("%s: the properties of the result are %v", name, *result.Props)
		}
		if a.Score == nil && !strings.Contains(result.Remarks, a.Reason) {
			t.Errorf("%s: it does not say why the score is withheld", name)
		}

		if strings.Contains(result.Remarks, unwatched) != (name == "disabled") {
			t.Errorf("%s: whether the chain was verified is not said: %q", name, result.Remarks)
		}
		plan := strings.TrimPrefix(r.ImportAp.Href, "#")
		if !slices.ContainsFunc(*r.BackMatter.Resources, func(o oscal.Resource) bool { return o.UUID == plan && o.Title == "No assessment plan" }) {
			t.Errorf("%s: the plan is not the resource that says that there is none", name)
		}

		// Every control is reviewed once. Those with a result have a finding that leads to the
		// observations and the entries.
		var reviewed []string
		for _, s := range result.ReviewedControls.ControlSelections {
			for _, c := range *s.IncludeControls {
				reviewed = append(reviewed, c.ControlId)
			}
		}
		if len(reviewed) != len(a.Controls) || len(slices.Compact(slices.Sorted(slices.Values(reviewed)))) != len(a.Controls) {
			t.Errorf("%s: %d controls are reviewed, of %d", name, len(reviewed), len(a.Controls))
		}
		observations := make(map[string]oscal.Observation)
		for _, o := range *result.Observations {
			observations[o.UUID] = o
		}
		findings := make(map[string]oscal.Finding)
		for _, f := range *result.Findings {
			findings[prop(f.Props, "profile")+" "+prop(f.Props, "label")] = f
		}
		states := map[compliance.Result]string{compliance.Pass: "satisfied pass", compliance.Fail: "not-satisfied fail", compliance.NoData: "not-satisfied other"}
		want := 0
		for _, c := range a.Controls {
			f, ok := findings[c.Profile+" "+c.ID]
			if states[c.Result] == "" {
				if ok {
					t.Errorf("%s: %s came to no result and has a finding", name, c.ID)
				}
				continue
			}
			want++
			if f.Target.Status.State+" "+f.Target.Status.Reason != states[c.Result] || f.Target.TargetId != ControlID(a.Framework, c) || !slices.Contains(reviewed, f.Target.TargetId) {
				t.Errorf("%s: the finding of %s is %+v", name, c.ID, f.Target)
			}
			if len(c.Probes) == 0 {
				continue
			}
			for i, p := range c.Probes {
				o, ok := observations[(*f.RelatedObservations)[i].ObservationUuid]
				if !ok || prop(o.Props, "probe") != p.Name || prop(o.Props, "result") != string(p.Result) || prop(o.Props, "sample") != strconv.Itoa(p.Sample) {
					t.Fatalf("%s: the observation of %s, %s is %+v", name, c.ID, p.Name, o)
				}
				if (o.RelevantEvidence == nil) != (len(p.Evidence) == 0) {
					t.Fatalf("%s: the evidence of %s, %s", name, c.ID, p.Name)
				}
				for j, e := range p.Evidence {
					got := (*o.RelevantEvidence)[j]
					if prop(got.Props, "sequence") != strconv.FormatUint(e.Sequence, 10) || prop(got.Props, "hash") != e.Hash {
						t.Fatalf("%s: the evidence of %s, %s is %+v", name, c.ID, p.Name, got)
					}
				}
			}
		}
		if len(findings) != want {
			t.Errorf("%s: %d findings, not %d", name, len(findings), want)
		}
	}
}

func TestControlIDs(t *testing.T) {
	for _, test := range []struct {
		framework compliance.Framework
		id, want  string
	}{
		{compliance.NIST80053, "AC-2(4)", "ac-2.4"},
		{compliance.NIST80053, "AU-10", "au-10"},
		{compliance.FedRAMP, "IA-5(6)", "ia-5.6"},
		{compliance.FedRAMP, "KSI-SVC-ASM", "KSI-SVC-ASM"},
		{compliance.SOC2, "CC6.1", "soc2_CC6.1"},
		{compliance.PCIDSS, "10.2.1.1", "pci_dss_10.2.1.1"},
		{compliance.HIPAA, "308(a)(1)(ii)(D)", "hipaa_308_a_1_ii_D"},
		{compliance.GDPR, "5(1)(e)", "gdpr_5_1_e"},
		{compliance.NISTCSF, "PR.AA-01", "nist_csf_PR.AA-01"},
	} {
		if got := ControlID(test.framework, compliance.ControlResult{ID: test.id}); got != test.want {
			t.Errorf("%s %s is %s", test.framework, test.id, got)
		}
	}
}

func TestGoldenDocuments(t *testing.T) {
	b, _ := assessmentResults(t, soc2())
	golden(t, "testdata/soc2.oscal.json", b)
	ksi, err := KSI(fedramp())
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/fedramp.ksi.json", ksi)
}

func TestKSI(t *testing.T) {
	for _, f := range compliance.Frameworks() {
		d := fedramp()
		d.Assessment.Framework = f
		if b, err := KSI(d); (err == nil) != (f == compliance.FedRAMP) || err != nil && (fault.Of(err) != fault.Invalid || b != nil) {
			t.Errorf("%s: %v", f, err)
		}
	}
	d := fedramp()
	b, err := KSI(d)
	if err != nil {
		t.Fatal(err)
	}
	var got ksiReport
	strict := json.NewDecoder(bytes.NewReader(b))
	strict.DisallowUnknownFields()
	if err := strict.Decode(&got); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, i := range got.Indicators {
		names = append(names, i.ID+" "+i.Status)
	}
	if want := []string{"KSI-SVC-ASM fail", "KSI-MLA-OSM pass", "KSI-SVC-VRI pass", "KSI-CMT-LMC no_data", "CMU-CSO-CMD manual", "KSI-IAM-SNU not_applicable"}; !slices.Equal(names, want) {
		t.Errorf("the indicators are %q", names)
	}
	if e := got.Indicators[0].Validations[0].Evidence; !slices.Equal(e, refs2(2977, 3012, 3340)) {
		t.Errorf("the evidence is %v", e)
	}
	if got.Head.Hash != d.Assessment.Head.Hash || got.Summary["pass"] != 2 || got.Summary["manual"] != 1 || got.Indicators[4].Automated || got.Proof.VerifiedTo != 4211 {
		t.Errorf("%+v", got)
	}
	if strings.Contains(string(b), "null") {
		t.Error("lists are empty, not null")
	}
	d.Assessment.Score, d.Assessment.Reason = nil, "the chain does not verify"
	if b, err := KSI(d); err != nil || !strings.Contains(string(b), `"reason": "the chain does not verify"`) {
		t.Errorf("it does not say why its results count for nothing: %v", err)
	}
	if b, err := KSI(disabled()); err != nil || !strings.Contains(string(b), `"reason": "`+unwatched) || !strings.Contains(string(b), `"verified_to": 0`) {
		t.Errorf("it does not say that nothing verified the chain: %v", err)
	}
}

func FuzzOSCAL(f *testing.F) {
	f.Add("AC-2(4)", "Access to protected assets", "1842 decisions were recorded", "fedramp", 3)
	f.Add("", "", "", "", 0)
	f.Add("(((", " \u00a0leading and trailing\n\n", "\xff\xfe🔐\x00\u2028\u0085", "soc2", -1)
	f.Fuzz(func(t *testing.T, id, title, detail, framework string, n int) {
		score := float64(n)
		n = max(0, min(n, 3000))
		c := control(id, title, compliance.Pass, title, probe(id, title, compliance.Pass, n, n, detail, 1, 2))
		d := document(compliance.Framework(framework), title, detail, &score, []compliance.ControlResult{c})
		d.Tenant, d.ChainID, d.Limits, d.Command, d.Program = "ten_a", detail, detail, detail, title
		b, _ := assessmentResults(t, d)
		validOSCAL(t, b)
	})
}
