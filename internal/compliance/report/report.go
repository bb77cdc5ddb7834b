// Package report renders the judgements of package compliance: as PDF for people ([PDF]), as OSCAL
// assessment results for tools ([OSCAL]) and, for FedRAMP only, as key security indicators ([KSI]).
// It also renders the cryptographic inventory as a CycloneDX document ([CBOM]).
//
// All renderers are pure: the same [compliance.Document] or [Inventory] gives the same bytes, on
// any machine and at any time. They use no clock and no randomness. Dates are those of the head,
// and identifiers are UUIDs of version 5 derived from its hash. So anybody with the log can render
// a report again and compare.
//
// The wording is part of the contract. A report says what the log is evidence for and to which
// requirements its controls relate. It does not judge an organisation; that is left to the reader.
package report

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// notice appears in every report, in every format.
const notice = "This document says what a signed audit log is evidence for. It is no attestation, no certificate and no opinion of an auditor. " +
	"Most of a framework lies outside the service that wrote it."

// check rejects a document that cannot be rendered. Without the time or the hash of the head, the
// report would depend on the clock or on chance.
func check(d compliance.Document) error {
	h := d.Assessment.Head
	raw, err := hex.DecodeString(h.Hash)
	if err != nil || len(raw) != 32 || h.Sequence == 0 || h.Time.IsZero() {
		return fault.New(fault.Internal, "a report needs the head that it is of")
	}
	return nil
}

// unwatched appears in every report about a log that nothing verifies.
const unwatched = "Nothing verified the whole chain: its verification is disabled in this deployment. The links of the tenant's own entries and " +
	"the signature of the newest of them hold. Verify an export of the log before you rely on this report."

// withheld reports whether the score is missing because of the chain rather than for lack of data.
func withheld(a compliance.Assessment) bool {
	return a.Score == nil && a.Proof.Status != compliance.Verified && a.Proof.Status != compliance.Disabled
}

// name returns the name of the framework.
func name(d compliance.Document) string {
	if d.Name != "" {
		return d.Name
	}
	return string(d.Assessment.Framework)
}

// ids derives the identifiers of one report.
type ids struct{ root uuid.UUID }

// newIDs returns the identifiers of a report about the head. Edition, program and proof are part of
// the input, because each can change the contents of a report.
func newIDs(d compliance.Document) ids {
	a := d.Assessment
	space := uuid.NewSHA1(uuid.NameSpaceURL, []byte("https://latticekeep.dev/ns/report/v1"))
	return ids{uuid.NewSHA1(space, joined(a.Head.Hash, string(d.Tenant), string(a.Framework), a.Version, d.Program, a.Proof.Status, d.Organisation, d.Stated, day(d.From)))}
}

// day returns a day in UTC, or "" for the zero time.
func day(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.DateOnly)
}

// of returns the identifier for a list of parts. Different lists give different identifiers.
func (i ids) of(parts ...string) string { return uuid.NewSHA1(i.root, joined(parts...)).String() }

// joined encodes the parts with their lengths, so that no two lists encode alike.
func joined(parts ...string) []byte {
	var b bytes.Buffer
	for _, p := range parts {
		fmt.Fprintf(&b, "%d:%s", len(p), p)
	}
	return b.Bytes()
}

// results holds all results, in the order of display.
var results = []compliance.Result{
	compliance.Pass, compliance.Fail, compliance.NoData, compliance.NotApplicable, compliance.Manual,
}

// count returns the number of controls for each result.
func count(controls []compliance.ControlResult) map[compliance.Result]int {
	n := make(map[compliance.Result]int)
	for _, c := range controls {
		n[c.Result]++
	}
	return n
}

// split separates the controls that were judged from those that a person judges.
func split(controls []compliance.ControlResult) (judged, manual []compliance.ControlResult) {
	for _, c := range controls {
		if c.Result == compliance.Manual {
			manual = append(manual, c)
		} else {
			judged = append(judged, c)
		}
	}
	return judged, manual
}

// group is the controls of one profile.
type group struct {
	profile  string // "" when the framework has only one
	controls []compliance.ControlResult
}

// grouped groups the controls by profile, in the order of the document's profiles. Other profiles
// come last.
func grouped(d compliance.Document, controls []compliance.ControlResult) []group {
	var groups []group
	at := make(map[string]int)
	for _, c := range controls {
		i, ok := at[c.Profile]
		if !ok {
			i = len(groups)
			at[c.Profile], groups = i, append(groups, group{profile: c.Profile})
		}
		groups[i].controls = append(groups[i].controls, c)
	}
	rank := func(g group) int {
		if i := slices.Index(d.Profiles, g.profile); i >= 0 {
			return i
		}
		return len(d.Profiles)
	}
	slices.SortStableFunc(groups, func(a, b group) int { return rank(a) - rank(b) })
	return groups
}

// quiet reports whether the tenant has not used the vault: its log contains no entry about a
// credential or a key. The results then reflect only the state of the deployment and the tenant's
// accounts.
func quiet(d compliance.Document) bool {
	for _, a := range d.Activity {
		for _, prefix := range []string{"CREDENTIAL_", "KEY_", "DATA_", "MANIFEST_"} {
			if strings.HasPrefix(a.Event, prefix) && a.Count > 0 {
				return false
			}
		}
	}
	return true
}

// number formats n in its shortest form: 100, 87.5.
func number(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }

// encoded returns v as indented JSON that ends with a newline.
func encoded(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("encoding a report: %w", err)
	}
	return b.Bytes(), nil
}

// sentence returns s with an initial capital and a full stop.
func sentence(s string) string {
	if s = strings.TrimSpace(s); s == "" {
		return ""
	}
	if s[0] >= 'a' && s[0] <= 'z' {
		s = string(s[0]-'a'+'A') + s[1:]
	}
	if !strings.ContainsAny(s[len(s)-1:], ".!?") {
		s += "."
	}
	return s
}
