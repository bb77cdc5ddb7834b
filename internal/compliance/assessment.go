// Package compliance says what a tenant's part of the audit log is evidence for.
//
// A score is a pure function of a catalogue and of the tenant's entries up to a
// head entry ([Derive]): whoever has an export computes it again. What is not in
// the log by itself, such as how keys are kept and how the transport is secured,
// enters it as an entry of type COMPLIANCE_ASSESSED ([State]), and the time by
// which things are judged is that of the head. So the same head always gives the
// same assessment.
//
// The catalogues are data: controls of a framework under our own titles, each
// with probes, small named functions over the evidence, or listed as manual. A
// score says how much of what can be seen here went well. It does not say that
// a framework is met: most of one lies outside this service.
package compliance

import (
	"context"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

// Framework is one that there is a catalogue of.
type Framework string

// The frameworks.
const (
	SOC2      Framework = "soc2"
	ISO27001  Framework = "iso27001"
	PCIDSS    Framework = "pci_dss"
	HIPAA     Framework = "hipaa"
	GDPR      Framework = "gdpr"
	NISTCSF   Framework = "nist_csf"
	FedRAMP   Framework = "fedramp"
	APRA      Framework = "apra"
	NIST80053 Framework = "nist_800_53"
)

// Frameworks returns all of them, in the order of the documentation.
func Frameworks() []Framework {
	return []Framework{SOC2, ISO27001, PCIDSS, HIPAA, GDPR, NISTCSF, FedRAMP, APRA, NIST80053}
}

// Format is what a report is rendered as; it is also the ending of its name.
type Format string

// The formats.
const (
	PDF   Format = "pdf"
	OSCAL Format = "oscal" // assessment results, JSON
	KSI   Format = "ksi"   // FedRAMP's key security indicators, JSON, for that framework alone
)

// Extension returns the extension of a report's name.
func (f Format) Extension() string {
	if f == PDF {
		return "pdf"
	}
	return string(f) + ".json"
}

// Result of a probe or of a control.
type Result string

// The results.
const (
	Pass          Result = "pass"
	Fail          Result = "fail"
	NoData        Result = "no_data"        // nothing to judge by, yet; not scored
	NotApplicable Result = "not_applicable" // not scored
	Manual        Result = "manual"         // of controls alone: a person judges it, outside this service
)

// Statuses of a [Proof].
const (
	Verified  = audit.ProofVerified  // the chain holds up to the head
	Verifying = audit.ProofVerifying // it holds as far as it was looked at, which is not yet the head
	Broken    = audit.ProofBroken    // it does not hold
	Disabled  = audit.ProofDisabled  // nothing verifies it; the tenant's own entries were held against each other
)

// Head is the entry as of which is judged.
type Head struct {
	Sequence uint64    `json:"sequence"`
	Hash     string    `json:"hash"` // lower-case hex
	Time     time.Time `json:"timestamp"`
}

// Reference is an entry that says so.
type Reference struct {
	Sequence uint64 `json:"sequence"`
	Hash     string `json:"hash"` // lower-case hex
}

// Proof is how far the chain was verified.
type Proof struct {
	Status     string    `json:"status"`
	VerifiedTo uint64    `json:"verified_to"`
	Hash       string    `json:"hash,omitempty"` // of the entry VerifiedTo
	At         time.Time `json:"verified_at,omitzero"`
}

// Coverage is how much of the catalogue this service has evidence for.
type Coverage struct {
	Controls  int     `json:"controls"`
	Evidenced int     `json:"evidenced"` // those that are not manual
	Percent   float64 `json:"percent"`   // with one decimal
}

// Assessment is a framework judged as of a head. All of it but Proof follows from
// the catalogue and the entries up to the head.
type Assessment struct {
	Framework Framework       `json:"framework"`
	Version   string          `json:"version"`          // edition of the framework
	Score     *float64        `json:"score"`            // 0 to 100 with one decimal; nil when it is withheld
	Reason    string          `json:"reason,omitempty"` // why it is withheld
	Coverage  Coverage        `json:"coverage"`
	Proof     Proof           `json:"proof"`
	Head      Head            `json:"head"`
	Controls  []ControlResult `json:"controls"` // in the catalogue's order
}

// Withhold removes the score and everything that would lead to one.
func (a *Assessment) Withhold(status, reason string) {
	a.Score, a.Reason, a.Controls = nil, reason, []ControlResult{}
	a.Proof.Status = status
}

// ControlResult is a control judged: it fails when one of its probes fails, and
// passes when at least one passes and none fails.
type ControlResult struct {
	ID      string        `json:"id"`
	Title   string        `json:"title"`             // ours, not the standard's
	Profile string        `json:"profile,omitempty"` // part of the catalogue that it is of: FedRAMP's "rev5" and "20x"
	Related []string      `json:"related"`           // controls of NIST SP 800-53 rev. 5 that it relates to
	Weight  float64       `json:"weight"`
	Result  Result        `json:"result"`
	Probes  []ProbeResult `json:"probes"` // none of a manual one
}

// ProbeResult is what one probe says.
type ProbeResult struct {
	Name       string      `json:"name"`
	Title      string      `json:"title"`
	Result     Result      `json:"result"`
	Sample     int         `json:"sample"`      // how many things were looked at
	WindowDays int         `json:"window_days"` // how far back; 0 is the state at the head
	Detail     string      `json:"detail"`      // one sentence, no full stop
	Evidence   []Reference `json:"evidence"`    // some of the entries that it was judged by, ascending, at most maxEvidence
}

// DayScore is the last score of a day in UTC.
type DayScore struct {
	Date     string  `json:"date"` // 2006-01-02
	Score    float64 `json:"score"`
	Sequence uint64  `json:"sequence"` // of the head that it was judged by
}

// Activity is what the evidence holds of one type of event.
type Activity struct {
	Event       string // "" for all together
	Count       int
	First, Last Reference
}

// Document is what a report is rendered from. The same head gives the same one.
type Document struct {
	Tenant      authz.TenantID
	Assessment  Assessment // whole; verified up to the head, or with the verification disabled
	Name        string     // of the framework
	Limits      string     // what the catalogue does not look at, some sentences
	Profiles    []string   // of the controls, in the catalogue's order; none when it has but one
	ChainID     string
	Fingerprint string // of the log: whose chain it is
	KeyID       string // of the key that the log is signed with
	PublicKey   string // of the log, base64
	Checkpoint  string // text of the one at the head, unsigned
	History     []DayScore
	Activity    []Activity // all entries up to the head, by type, the commonest first
	Command     string     // that computes it again from an export
	Program     string     // name and version of what wrote it
}

// Renderer writes a document. It is pure: the same document gives the same bytes.
type Renderer func(Document) ([]byte, error)

// Reports keeps rendered reports. Errors: fault.Unavailable, and of Get
// fault.NotFound when there is none of the name.
type Reports interface {
	Get(ctx context.Context, name string) ([]byte, error)
	Put(ctx context.Context, name string, data []byte) error
	SignedURL(ctx context.Context, name string, lifetime time.Duration) (string, error)
}

// Link is where a report lies.
type Link struct {
	URL, SignatureURL string
	ExpiresAt         time.Time
	Head              Head
}
