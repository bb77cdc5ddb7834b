package report

import (
	"time"

	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// ksiSchema identifies the format of [KSI]. It changes when a reader of the previous format would
// misread the new one.
const ksiSchema = "https://latticekeep.dev/schema/ksi/v1"

// ksiProfile is the part of FedRAMP's catalogue that contains the indicators.
const ksiProfile = "20x"

type ksiReport struct {
	Schema     string         `json:"schema"`
	Notice     string         `json:"notice"`
	Generator  string         `json:"generator"`
	Framework  string         `json:"framework"`
	Edition    string         `json:"edition"`
	Tenant     string         `json:"tenant"`
	ID         string         `json:"id"`
	Head       ksiHead        `json:"head"`
	Chain      ksiChain       `json:"chain"`
	Proof      ksiProof       `json:"proof"`
	Summary    map[string]int `json:"summary"`
	Indicators []ksiIndicator `json:"indicators"`
	Verify     string         `json:"verify"`
}

type ksiHead struct {
	Sequence uint64 `json:"sequence"`
	Hash     string `json:"hash"`
	Time     string `json:"timestamp"`
}

type ksiChain struct {
	ID          string `json:"id"`
	Fingerprint string `json:"fingerprint"`
	KeyID       string `json:"key_id"`
	Checkpoint  string `json:"checkpoint"`
}

type ksiProof struct {
	Status     string `json:"status"`
	VerifiedTo uint64 `json:"verified_to"`
	Reason     string `json:"reason,omitempty"`
}

type ksiIndicator struct {
	ID          string          `json:"id"`
	Title       string          `json:"title"`
	Status      string          `json:"status"`
	Automated   bool            `json:"automated"`
	Related     []string        `json:"related_controls"`
	Validations []ksiValidation `json:"validations"`
}

type ksiValidation struct {
	ID         string                 `json:"id"`
	Name       string                 `json:"name"`
	Title      string                 `json:"title"`
	Status     string                 `json:"status"`
	Sample     int                    `json:"sample"`
	WindowDays int                    `json:"window_days"`
	Detail     string                 `json:"detail"`
	Evidence   []compliance.Reference `json:"evidence"`
}

// KSI renders FedRAMP's key security indicators for which the log is evidence, as JSON. FedRAMP
// requires a machine-readable form but does not define one, so this form is our own:
//
//	schema      https://latticekeep.dev/schema/ksi/v1
//	notice      what this is and is not
//	generator   program that wrote it
//	framework   "fedramp"
//	edition     of the framework
//	tenant      whose entries were read
//	id          UUID of version 5, derived from the head
//	head        sequence, hash (SHA3-256, hex) and timestamp (RFC 3339, UTC) of
//	            the newest entry that was judged
//	chain       id, fingerprint and key_id (hex) of the log, and the text of the
//	            checkpoint at the head, unsigned
//	proof       status: verified, verifying, broken or disabled; verified_to: the
//	            chain holds up to this sequence; reason, when results count for
//	            nothing because it does not hold, or nothing verified it
//	summary     how many indicators have each status
//	indicators  id ("KSI-SVC-ASM"), title (ours), status, automated (false when a
//	            person judges it), related_controls (NIST SP 800-53 rev. 5), and
//	            validations: id (UUID), name, title, status, sample (things
//	            looked at), window_days (0 is the state at the head), detail, and
//	            evidence: sequence and hash of entries
//	verify      the command that computes it again from an export of the log
//
// A status is pass, fail, no_data (no data to judge by yet), not_applicable or, for an indicator,
// manual. All members except reason are always present, and lists may be empty. For any other
// framework KSI returns [fault.Invalid].
func KSI(d compliance.Document) ([]byte, error) {
	a := d.Assessment
	if a.Framework != compliance.FedRAMP {
		return nil, fault.New(fault.Invalid, "key security indicators exist for the framework fedramp alone: ask for the format pdf or oscal")
	}
	if err := check(d); err != nil {
		return nil, err
	}
	ids := newIDs(d)
	out := ksiReport{
		Schema: ksiSchema, Notice: notice, Generator: d.Program,
		Framework: string(a.Framework), Edition: a.Version, Tenant: string(d.Tenant), ID: ids.of("ksi"),
		Head:       ksiHead{Sequence: a.Head.Sequence, Hash: a.Head.Hash, Time: a.Head.Time.UTC().Format(time.RFC3339Nano)},
		Chain:      ksiChain{ID: d.ChainID, Fingerprint: d.Fingerprint, KeyID: d.KeyID, Checkpoint: d.Checkpoint},
		Proof:      ksiProof{Status: a.Proof.Status, VerifiedTo: verifiedTo(a)},
		Summary:    make(map[string]int),
		Indicators: []ksiIndicator{},
		Verify:     d.Command,
	}
	if a.Score == nil {
		out.Proof.Reason = a.Reason
	}
	if a.Proof.Status == compliance.Disabled {
		out.Proof.Reason = unwatched
	}
	for _, r := range results {
		out.Summary[string(r)] = 0
	}
	for _, c := range a.Controls {
		if c.Profile != ksiProfile {
			continue
		}
		indicator := ksiIndicator{
			ID: c.ID, Title: c.Title, Status: string(c.Result), Automated: c.Result != compliance.Manual,
			Related: append([]string{}, c.Related...), Validations: []ksiValidation{},
		}
		for _, p := range c.Probes {
			indicator.Validations = append(indicator.Validations, ksiValidation{
				ID: ids.of("observation", c.Profile, c.ID, p.Name), Name: p.Name, Title: p.Title, Status: string(p.Result),
				Sample: p.Sample, WindowDays: p.WindowDays, Detail: p.Detail,
				Evidence: append([]compliance.Reference{}, p.Evidence...),
			})
		}
		out.Summary[indicator.Status]++
		out.Indicators = append(out.Indicators, indicator)
	}
	return encoded(out)
}

// verifiedTo returns how far the chain was verified, but at most up to the head: the same head must
// give the same report, however far the log has grown since.
func verifiedTo(a compliance.Assessment) uint64 { return min(a.Proof.VerifiedTo, a.Head.Sequence) }
