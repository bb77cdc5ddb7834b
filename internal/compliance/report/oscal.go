package report

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	oscal "github.com/defenseunicorns/go-oscal/src/types/oscal-1-1-3"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

const (
	oscalVersion = "1.1.3"
	// oscalNamespace is the namespace of properties for which OSCAL has no name.
	oscalNamespace = "https://latticekeep.dev/ns/oscal"
)

// OSCAL renders assessment results in NIST's OSCAL 1.1.3, as JSON: an observation for each probe,
// with the cited entries as relevant evidence (properties sequence and hash), and a finding for
// each control with the result pass, fail or no_data. Controls that a person judges, and controls
// that do not apply, are among the reviewed controls and have no finding. There is no assessment
// plan, and a resource of the back matter says so.
//
// Control ids of NIST SP 800-53 are spelled as in NIST's catalogue (AC-2(4) is ac-2.4). Ids of
// frameworks without a catalogue become tokens that begin with the framework's name, and the
// property label holds the original spelling.
func OSCAL(d compliance.Document) ([]byte, error) {
	if err := check(d); err != nil {
		return nil, err
	}
	r := assessment{Document: d, ids: newIDs(d), end: d.Assessment.Head.Time.UTC()}
	return encoded(oscal.OscalModels{AssessmentResults: &oscal.AssessmentResults{
		UUID:     r.ids.of("assessment-results"),
		Metadata: r.metadata(),
		ImportAp: oscal.ImportAp{
			Href:    "#" + r.ids.of("no-plan"),
			Remarks: "There is no assessment plan. The resource says by what was assessed.",
		},
		Results:    []oscal.Result{r.result()},
		BackMatter: &oscal.BackMatter{Resources: new(r.resources())},
	}})
}

type assessment struct {
	compliance.Document
	ids ids
	end time.Time
}

func (r assessment) metadata() oscal.Metadata {
	tenant := r.ids.of("tenant")
	return oscal.Metadata{
		Title:        line("Evidence for " + name(r.Document)),
		LastModified: r.end,
		Version:      strconv.FormatUint(r.Assessment.Head.Sequence, 10),
		OscalVersion: oscalVersion,
		Props: props(
			"framework", string(r.Assessment.Framework),
			"framework-edition", r.Assessment.Version,
			"program", r.Program,
			"period-start", day(r.From),
			"period-end", r.periodEnd(),
		),
		Roles: &[]oscal.Role{{ID: "assessed", Title: "Whose entries of the audit log were read"}},
		Parties: &[]oscal.Party{{
			UUID: tenant, Type: "organization", Name: line(cmp.Or(r.Stated, r.Organisation, string(r.Tenant))),
			Props:   props("tenant", string(r.Tenant), "tenant-name", line(r.Organisation)),
			Remarks: r.about(),
		}},
		ResponsibleParties: &[]oscal.ResponsibleParty{{RoleId: "assessed", PartyUuids: []string{tenant}}},
		Remarks:            notice,
	}
}

// about says where the name of the assessed party is from, and what a stated period means.
func (r assessment) about() string {
	text := "The log knows a tenant by the id in the property tenant and by no name. The name is that of the tenant's account."
	if r.Stated != "" {
		text = "The log knows a tenant by the id in the property tenant and by no name. Who asked for the report stated the name."
	}
	if !r.From.IsZero() {
		text += " The properties period-start and period-end are the period that was asked for: the results are those of its end, and each observation says how far it looks back."
	}
	return text
}

func (r assessment) periodEnd() string {
	if r.From.IsZero() {
		return ""
	}
	return day(r.end)
}

func (r assessment) result() oscal.Result {
	a := r.Assessment
	result := oscal.Result{
		UUID:        r.ids.of("result"),
		Title:       line(fmt.Sprintf("%s as of sequence %d", name(r.Document), a.Head.Sequence)),
		Description: "Probes over the entries of the tenant up to the head, and over the state that the log holds of the deployment.",
		Start:       r.end.AddDate(0, 0, -longestWindow(a.Controls)),
		End:         &r.end,
		Props: props(
			"head-sequence", strconv.FormatUint(a.Head.Sequence, 10),
			"head-hash", a.Head.Hash,
			"chain-id", r.ChainID,
			"chain-fingerprint", r.Fingerprint,
			"audit-key-id", r.KeyID,
			"score", scoreText(a),
			"coverage-controls", strconv.Itoa(a.Coverage.Controls),
			"coverage-evidenced", strconv.Itoa(a.Coverage.Evidenced),
			"coverage-percent", number(a.Coverage.Percent),
			"proof-status", a.Proof.Status,
			"proof-verified-to", strconv.FormatUint(verifiedTo(a), 10),
		),
		LocalDefinitions: &oscal.LocalDefinitions{Components: &[]oscal.SystemComponent{{
			UUID: r.ids.of("tool"), Type: "software", Title: line(r.Program),
			Description: "The service that keeps the log, and whose probes read it.",
			Status:      oscal.SystemComponentStatus{State: "operational"},
		}}},
		ReviewedControls: r.reviewed(),
	}
	switch {
	case withheld(a):
		result.Remarks = line("The score is withheld, and findings count for nothing: " + a.Reason)
	case a.Score == nil:
		result.Remarks = line("There is no score: " + a.Reason)
	}
	if a.Proof.Status == compliance.Disabled {
		result.Remarks = strings.TrimSpace(result.Remarks + "\n\n" + unwatched)
	}
	var observations []oscal.Observation
	var findings []oscal.Finding
	for _, c := range a.Controls {
		var related []oscal.RelatedObservation
		for _, p := range c.Probes {
			o := r.observation(c, p)
			observations = append(observations, o)
			related = append(related, oscal.RelatedObservation{ObservationUuid: o.UUID})
		}
		if status, ok := objectiveStatus(c.Result); ok {
			findings = append(findings, r.finding(c, status, related))
		}
	}
	if len(observations) > 0 {
		result.Observations = &observations
	}
	if len(findings) > 0 {
		result.Findings = &findings
	}
	return result
}

// reviewed lists all controls of the catalogue, with the manual ones in a separate selection.
func (r assessment) reviewed() oscal.ReviewedControls {
	judged, manual := split(r.Assessment.Controls)
	var selections []oscal.AssessedControls
	add := func(description string, controls []compliance.ControlResult) {
		if len(controls) == 0 {
			return
		}
		include := make([]oscal.AssessedControlsSelectControlById, len(controls))
		for i, c := range controls {
			include[i].ControlId = ControlID(r.Assessment.Framework, c)
		}
		selections = append(selections, oscal.AssessedControls{Description: description, IncludeControls: &include})
	}
	add("Controls that the log is evidence for.", judged)
	add("Controls that a person judges, outside the service. Nothing is said about them here.", manual)
	if selections == nil { // a catalogue is never empty, but the format requires a selection
		selections = []oscal.AssessedControls{{Description: "No controls."}}
	}
	return oscal.ReviewedControls{ControlSelections: selections, Remarks: text(r.Limits)}
}

func (r assessment) observation(c compliance.ControlResult, p compliance.ProbeResult) oscal.Observation {
	o := oscal.Observation{
		UUID:        r.ids.of("observation", c.Profile, c.ID, p.Name),
		Title:       line(p.Title),
		Description: text(p.Detail),
		Methods:     []string{"TEST"},
		Types:       &[]string{"control-objective"},
		Collected:   r.end,
		Origins:     r.origins(),
		Props: props(
			"control", c.ID,
			"probe", p.Name,
			"result", string(p.Result),
			"sample", strconv.Itoa(p.Sample),
			"window-days", strconv.Itoa(p.WindowDays),
		),
	}
	var evidence []oscal.RelevantEvidence
	for _, e := range p.Evidence {
		sequence := strconv.FormatUint(e.Sequence, 10)
		evidence = append(evidence, oscal.RelevantEvidence{
			Description: "Entry " + sequence + " of the audit log.",
			Props:       props("sequence", sequence, "hash", e.Hash),
		})
	}
	if len(evidence) > 0 {
		o.RelevantEvidence = &evidence
	}
	return o
}

func (r assessment) finding(c compliance.ControlResult, status oscal.ObjectiveStatus, related []oscal.RelatedObservation) oscal.Finding {
	f := oscal.Finding{
		UUID:        r.ids.of("finding", c.Profile, c.ID),
		Title:       line(c.ID + " " + c.Title),
		Description: "What the probes of this control say together.",
		Origins:     r.origins(),
		Props: props(append([]string{
			"label", c.ID,
			"profile", c.Profile,
			"result", string(c.Result),
			"weight", number(c.Weight),
		}, each("relates-to", c.Related)...)...),
		Target: oscal.FindingTarget{Type: "objective-id", TargetId: ControlID(r.Assessment.Framework, c), Status: status},
	}
	if len(related) > 0 {
		f.RelatedObservations = &related
	}
	return f
}

func (r assessment) origins() *[]oscal.Origin {
	return &[]oscal.Origin{{Actors: []oscal.OriginActor{{Type: "tool", ActorUuid: r.ids.of("tool")}}}}
}

func (r assessment) resources() []oscal.Resource {
	resources := []oscal.Resource{{
		UUID:  r.ids.of("no-plan"),
		Title: "No assessment plan",
		Description: "These results come from the probes of a program and follow no assessment plan. " +
			"What is looked at is in the program's catalogue of the framework; who plans an assessment may cite them as evidence.",
	}, {
		UUID:        r.ids.of("verification"),
		Title:       "How to compute it again",
		Description: text("From an export of the log: " + r.Command),
	}}
	if r.Checkpoint != "" {
		resources = append(resources, oscal.Resource{
			UUID: r.ids.of("checkpoint"), Title: "Checkpoint of the log at the head", Description: text(r.Checkpoint),
		})
	}
	return resources
}

// objectiveStatus maps a result to one of OSCAL's two statuses; the remarks explain the meaning. It
// returns false for the other results.
func objectiveStatus(r compliance.Result) (oscal.ObjectiveStatus, bool) {
	switch r {
	case compliance.Pass:
		return oscal.ObjectiveStatus{State: "satisfied", Reason: "pass",
			Remarks: "The format's word. It says that the log is evidence for the control, and no more."}, true
	case compliance.Fail:
		return oscal.ObjectiveStatus{State: "not-satisfied", Reason: "fail",
			Remarks: "The format's word. It says that the log is evidence against the control."}, true
	case compliance.NoData:
		return oscal.ObjectiveStatus{State: "not-satisfied", Reason: "other",
			Remarks: "The format has no word for it: the log holds nothing to judge by, yet."}, true
	}
	return oscal.ObjectiveStatus{}, false
}

var (
	hubControl = regexp.MustCompile(`^[A-Z]{2}-[0-9]+(\([0-9]+\))?$`) // control of NIST SP 800-53
	noToken    = regexp.MustCompile(`[^\pL\pN.\-_]+`)
	tokenStart = regexp.MustCompile(`^[\pL_]`)
)

// ControlID returns the control's id as an OSCAL token.
func ControlID(f compliance.Framework, c compliance.ControlResult) string {
	id := c.ID
	switch {
	case (f == compliance.NIST80053 || f == compliance.FedRAMP) && hubControl.MatchString(id):
		id = strings.ToLower(strings.NewReplacer("(", ".", ")", "").Replace(id))
	case f != compliance.FedRAMP:
		id = string(f) + "_" + id
	}
	id = strings.Trim(noToken.ReplaceAllString(id, "_"), "_")
	if !tokenStart.MatchString(id) {
		id = "_" + id
	}
	return id
}

// props returns properties for pairs of name and value. It omits empty values, which OSCAL does not
// allow.
func props(pairs ...string) *[]oscal.Property {
	var out []oscal.Property
	for pair := range slices.Chunk(pairs, 2) {
		if v := line(pair[1]); v != "" {
			out = append(out, oscal.Property{Name: pair[0], Ns: oscalNamespace, Value: v})
		}
	}
	if out == nil {
		return nil
	}
	return &out
}

// each returns pairs of the name with each value.
func each(name string, values []string) []string {
	var out []string
	for _, v := range values {
		out = append(out, name, v)
	}
	return out
}

// longestWindow returns the largest number of days that a probe looks back.
func longestWindow(controls []compliance.ControlResult) int {
	days := 0
	for _, c := range controls {
		for _, p := range c.Probes {
			days = max(days, p.WindowDays)
		}
	}
	return days
}

func scoreText(a compliance.Assessment) string {
	switch {
	case a.Score != nil:
		return number(*a.Score)
	case withheld(a):
		return "withheld"
	}
	return "none"
}

// line returns s on one line, without space at its ends.
func line(s string) string { return strings.Join(strings.Fields(clean(s)), " ") }

// text returns s without space at its ends, which OSCAL rejects.
func text(s string) string { return strings.TrimSpace(clean(s)) }

// clean replaces characters that are not text. Readers may convert OSCAL to XML or YAML, which do
// not allow control characters.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) && !unicode.IsSpace(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}
