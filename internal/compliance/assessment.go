// Package compliance assesses what a tenant's part of the audit log is evidence for.
//
// A score is a pure function of a catalogue and of the tenant's entries up to a head entry
// ([Derive]), so anybody with an export can compute it again. Facts that the log does not contain
// by itself, such as the custody of keys and the security of the transport, enter it as an entry of
// type COMPLIANCE_ASSESSED ([State]). Ages and deadlines are judged by the time of the head. So the
// same head always gives the same assessment.
//
// The catalogues are data. They list controls of a framework under our own titles. Each control has
// probes, which are small named functions over the evidence, or is marked as manual. A score says
// how much of what this service can see is in order. It does not say that the framework's
// requirements are met: most of a framework lies outside this service.
package compliance

import (
	"context"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
)

// Framework identifies a compliance framework that has a catalogue.
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

// Frameworks returns all frameworks, in the order of the documentation.
func Frameworks() []Framework {
	return []Framework{SOC2, ISO27001, PCIDSS, HIPAA, GDPR, NISTCSF, FedRAMP, APRA, NIST80053}
}

// Format is the format of a report and the end of its name.
type Format string

// The formats.
const (
	PDF   Format = "pdf"
	OSCAL Format = "oscal" // assessment results, JSON
	KSI   Format = "ksi"   // FedRAMP's key security indicators, JSON; only for that framework
)

// Extension returns the file extension for the format.
func (f Format) Extension() string {
	if f == PDF {
		return "pdf"
	}
	return string(f) + ".json"
}

// Result is the result of a probe or of a control.
type Result string

// The results.
const (
	Pass          Result = "pass"
	Fail          Result = "fail"
	NoData        Result = "no_data"        // no data to judge by yet; not scored
	NotApplicable Result = "not_applicable" // not scored
	Manual        Result = "manual"         // only for controls: a person judges it, outside this service
)

// Statuses of a [Proof].
const (
	Verified  = verify.ProofVerified  // the chain holds up to the head
	Verifying = verify.ProofVerifying // the chain holds as far as it was checked, which is not yet the head
	Broken    = verify.ProofBroken    // the chain does not hold
	Disabled  = verify.ProofDisabled  // verification is off; only the tenant's own entries were checked against each other
)

// Head is the newest entry that an assessment takes into account.
type Head struct {
	Sequence uint64    `json:"sequence"`
	Hash     string    `json:"hash"` // lower-case hex
	Time     time.Time `json:"timestamp"`
}

// Reference cites an entry as evidence.
type Reference struct {
	Sequence uint64    `json:"sequence"`
	Hash     string    `json:"hash"` // lower-case hex
	Event    string    `json:"event_type"`
	Actor    string    `json:"actor"` // kind and pseudonymous id, with a space between
	Time     time.Time `json:"timestamp"`
}

// Proof says how far the chain was verified.
type Proof struct {
	Status     string    `json:"status"`
	VerifiedTo uint64    `json:"verified_to"`
	Hash       string    `json:"hash,omitempty"` // hash of the entry VerifiedTo
	At         time.Time `json:"verified_at,omitzero"`
}

// Coverage says for how many controls of the catalogue this service has evidence.
type Coverage struct {
	Controls  int     `json:"controls"`
	Evidenced int     `json:"evidenced"` // controls that are not manual
	Percent   float64 `json:"percent"`   // one decimal
}

// Assessment is the judgement of a framework as of a head. All fields except Proof follow from the
// catalogue and the entries up to the head.
type Assessment struct {
	Framework Framework `json:"framework"`
	Version   string    `json:"version"`          // edition of the framework
	Score     *float64  `json:"score"`            // 0 to 100 with one decimal; nil when withheld
	Reason    string    `json:"reason,omitempty"` // reason for withholding the score
	// Provisional is set while the log has no assessment of the deployment yet. Its probes then have
	// no data, and a score that leaves them out is no better than that of a tenant that has them.
	Provisional bool            `json:"provisional"`
	Coverage    Coverage        `json:"coverage"`
	Proof       Proof           `json:"proof"`
	Head        Head            `json:"head"`
	Controls    []ControlResult `json:"controls"` // in the order of the catalogue
}

// Withhold removes the score and all results that would reveal it.
func (a *Assessment) Withhold(status, reason string) {
	a.Score, a.Reason, a.Controls = nil, reason, []ControlResult{}
	a.Proof.Status = status
}

// ControlResult is the result of a control. The control fails when one of its probes fails. It
// passes when at least one probe passes and none fails.
type ControlResult struct {
	ID      string        `json:"id"`
	Title   string        `json:"title"`             // our title, not the standard's
	Profile string        `json:"profile,omitempty"` // part of the catalogue, such as FedRAMP's "rev5" and "20x"
	Related []string      `json:"related"`           // related controls of NIST SP 800-53 rev. 5
	Weight  float64       `json:"weight"`
	Result  Result        `json:"result"`
	Probes  []ProbeResult `json:"probes"` // empty for a manual control
}

// ProbeResult is the result of one probe.
type ProbeResult struct {
	Name       string      `json:"name"`
	Title      string      `json:"title"`
	Result     Result      `json:"result"`
	Sample     int         `json:"sample"`      // number of things judged
	WindowDays int         `json:"window_days"` // days that the probe looks back; 0: the state at the head
	Detail     string      `json:"detail"`      // one sentence, no full stop
	Evidence   []Reference `json:"evidence"`    // some of the entries judged, ascending, at most MaxEvidence

	Responsible Responsible `json:"responsible"`

	// The rest is only there when the probe fails.
	Since   *time.Time `json:"since,omitempty"`   // entry as of which it was first found failing; days are compared, in UTC
	Objects []string   `json:"objects,omitempty"` // ids of what it fails for, sorted, at most MaxObjects
	Remedy  string     `json:"remedy,omitempty"`  // what fixes it, one sentence
	Guide   string     `json:"guide,omitempty"`   // URL of the page that says how
}

// Responsible says whose job it is to fix what a probe finds.
type Responsible string

// Who is responsible.
const (
	TheTenant     Responsible = "tenant"     // its owners and members
	TheDeployment Responsible = "deployment" // whoever operates the service
)

// DayScore is the last score of a day in UTC.
type DayScore struct {
	Date     string  `json:"date"` // 2006-01-02
	Score    float64 `json:"score"`
	Sequence uint64  `json:"sequence"` // sequence of the head
}

// Activity summarises the entries of one type of event.
type Activity struct {
	Event       string // "" for all types together
	Count       int
	First, Last Reference
}

// Document is the input for rendering a report. The same head, the same name of the tenant and the
// same [About] give the same document.
type Document struct {
	Tenant authz.TenantID
	Subject
	Assessment  Assessment // complete; verified up to the head, or with verification disabled
	Name        string     // name of the framework
	Limits      string     // what the catalogue does not cover, in a few sentences
	Profiles    []string   // profiles of the controls, in the order of the catalogue; empty when there is only one
	ChainID     string
	Fingerprint string // fingerprint of the log, which identifies the chain
	KeyID       string // id of the key that signs the log
	PublicKey   string // public key of the log, base64
	Checkpoint  string // text of the checkpoint at the head, unsigned
	History     []DayScore
	Activity    []Activity // all entries up to the head, by type, most frequent first
	Command     string     // command that computes the assessment again from an export
	Program     string     // name and version of the program that wrote the document
}

// Subject says whom a document is about, and for which period.
type Subject struct {
	Organisation string    // name of the tenant as it is now, since the log has no names; "": not known
	Stated       string    // name of the organisation as the caller states it; "": none is stated
	From         time.Time // first day of the period that the caller asks for; zero: none is asked for
}

// About is what a caller states for a report. It changes nothing in the results.
type About struct {
	Organisation string    // "": the name of the tenant
	From         time.Time // first day of the period, which ends with the head; zero: no period is stated
}

// Renderer renders a document. It is pure: the same document gives the same bytes.
type Renderer func(Document) ([]byte, error)

// Reports stores rendered reports. Errors: fault.Unavailable. Get also returns fault.NotFound when
// there is no report with the name.
type Reports interface {
	Get(ctx context.Context, name string) ([]byte, error)
	Put(ctx context.Context, name string, data []byte) error
	SignedURL(ctx context.Context, name string, lifetime time.Duration) (string, error)
}

// Link holds the URLs of a report and of its signature.
type Link struct {
	URL, SignatureURL string
	ExpiresAt         time.Time
	Head              Head
}
