// Package report renders what the compliance package has judged: for a person
// as PDF ([PDF]), for tools as OSCAL assessment results ([OSCAL]) and, of
// FedRAMP alone, as key security indicators ([KSI]); and the cryptographic
// inventory as a CycloneDX document ([CBOM]).
//
// All of it is pure: the same [compliance.Document] or [Inventory] gives the same
// bytes, on any machine and at any time. There is no clock and no randomness;
// dates are those of the head, and identifiers are UUIDs of version 5 derived
// from its hash. So who has the log can render a report again and compare.
//
// The words are part of the contract. A report says what the log is evidence
// for and what its controls relate to. It judges no organisation: that is for
// its reader.
package report

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// notice is on every report, whatever its format.
const notice = "This document says what a signed audit log is evidence for. It is no attestation, no certificate and no opinion of an auditor. " +
	"Most of a framework lies outside the service that wrote it."

// check refuses what cannot be rendered. A document without the time or the hash
// of its head would be rendered with that of the clock, or at random.
func check(d compliance.Document) error {
	h := d.Assessment.Head
	raw, err := hex.DecodeString(h.Hash)
	if err != nil || len(raw) != 32 || h.Sequence == 0 || h.Time.IsZero() {
		return fault.New(fault.Internal, "a report needs the head that it is of")
	}
	return nil
}

// unwatched is on every report of a log that nothing verifies.
const unwatched = "Nothing verified the whole chain: its verification is disabled in this deployment. The links of the tenant's own entries and " +
	"the signature of the newest of them hold. Verify an export of the log before you rely on this report."

// withheld reports whether there is no score because of the chain, and not for
// want of data.
func withheld(a compliance.Assessment) bool {
	return a.Score == nil && a.Proof.Status != compliance.Verified && a.Proof.Status != compliance.Disabled
}

// name is what the framework is called.
func name(d compliance.Document) string {
	if d.Name != "" {
		return d.Name
	}
	return string(d.Assessment.Framework)
}

// ids derives the identifiers of one report.
type ids struct{ root uuid.UUID }

// newIDs returns those of a report about the head. Edition, program and proof
// belong to it, since each can change what a report says.
func newIDs(d compliance.Document) ids {
	a := d.Assessment
	space := uuid.NewSHA1(uuid.NameSpaceURL, []byte("https://latticekeep.dev/ns/report/v1"))
	return ids{uuid.NewSHA1(space, joined(a.Head.Hash, string(d.Tenant), string(a.Framework), a.Version, d.Program, a.Proof.Status))}
}

// of returns the one of what the parts name. Different parts give different ones.
func (i ids) of(parts ...string) string { return uuid.NewSHA1(i.root, joined(parts...)).String() }

// joined is the parts with their lengths, so that no two lists are alike.
func joined(parts ...string) []byte {
	var b bytes.Buffer
	for _, p := range parts {
		fmt.Fprintf(&b, "%d:%s", len(p), p)
	}
	return b.Bytes()
}

// results are all of them, in the order in which they are shown.
var results = []compliance.Result{
	compliance.Pass, compliance.Fail, compliance.NoData, compliance.NotApplicable, compliance.Manual,
}

// count says how many controls have each result.
func count(controls []compliance.ControlResult) map[compliance.Result]int {
	n := make(map[compliance.Result]int)
	for _, c := range controls {
		n[c.Result]++
	}
	return n
}

// split parts the controls that were judged from those that a person judges.
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
	profile  string // "" when the framework has but one
	controls []compliance.ControlResult
}

// grouped parts the controls by profile, in the order of the document's
// profiles; those of profiles that it does not list come after them.
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

// quiet says that the tenant has not used what the service is for: its log holds
// nothing of a credential or a key. What the results say then comes from the
// state of the deployment and from the tenant's accounts.
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

// number prints n in its shortest form: 100, 87.5.
func number(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }

// encoded is v as indented JSON that ends with a newline.
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
