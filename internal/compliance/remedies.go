package compliance

import (
	"slices"

	"github.com/latticekeep/latticekeep/internal/buildinfo"
)

// MaxObjects bounds the objects that a failing probe names.
const MaxObjects = 20

// Run evaluates the probe as of the newest entry.
func (p *Probe) Run(e *Evidence) ProbeResult {
	v := p.answer(e)
	r := ProbeResult{
		Name: p.Name, Title: p.Title, Result: v.result, Sample: v.sample, WindowDays: p.window, Detail: v.detail,
		Evidence: e.references(v.cite), Responsible: p.Responsible(),
	}
	if v.result == Fail {
		since := e.Last
		if first, ok := e.Failing[p.Name]; ok {
			since = first
		}
		at := since.Time()
		slices.Sort(v.objects)
		r.Since, r.Objects = &at, v.objects[:min(len(v.objects), MaxObjects)]
		r.Remedy, r.Guide = remedies[p.Name], buildinfo.Documentation+guide+p.Name
	}
	return r
}

// guide is the page of the documentation that says how to fix what fails, in a section for each probe.
const guide = "guides/fix-controls.md#"

// remedies say what fixes a failing probe.
var remedies = map[string]string{
	"credentials_current": "Renew these credentials, or delete those that are no longer used",
	"credentials_renewed": "Renew these credentials before they expire",
	"values_rotated":      "Store new values in these credentials",
	"keys_rotated":        "Rotate these keys",
	"key_periods":         "Create keys with a shorter rotation period, and encrypt with them",
	"disposal_timely":     "Delete these credentials",
	"deletion_final":      "Report this to the operator of the service: a deleted credential must not be readable",
	"changes_versioned":   "Report this to the operator of the service, and verify the log",
	"integrity_intact":    "Run latticekeep doctor, and restore what it names",

	"api_keys_bounded":         "Replace these API keys with keys that expire, and revoke them",
	"api_keys_rotated":         "Replace these API keys, and revoke them",
	"api_keys_used":            "Revoke these API keys",
	"least_privilege":          "Replace these API keys with keys that have only the scopes in use",
	"duties_separated":         "Use one API key for administration and another one for reading",
	"members_active":           "Remove these members, or ask them to sign in",
	"email_verified":           "Ask these members to verify their addresses, or remove them",
	"issuance_approved":        "Revoke what nobody approved, and find out who made it",
	"departed_locked_out":      "Report this to the operator of the service: a removed member or key must not act",
	"sign_in_failures_handled": "Change or reset the password of the account within a day, or acknowledge the sign-ins",

	"log_reviewed":       "Review the audit log once a month",
	"access_reviewed":    "Review the API keys and the members once a quarter",
	"denials_reviewed":   "Have a member who did not cause them acknowledge denials within a week",
	"failures_reviewed":  "Have a member who did not cause them acknowledge failures within a week",
	"inventory_reviewed": "Review the inventory of cryptography once a year",
	"events_complete":    "Report this to the operator of the service: each entry must be complete",
	"assessed_daily":     "Keep the service running, and look for errors of the daily assessment in its log",

	"keys_wrapped":           "Use a key-management service, or keep the key file away from the database",
	"transport_encrypted":    "Configure a certificate, or say that a proxy ends TLS",
	"transport_quantum_safe": "Set tls.pqRequired once all clients know X25519MLKEM768",
	"suites_quantum_safe":    "Update the service to a release that uses ML-KEM-768 and ML-DSA-65",
	"log_signed":             "Set audit.signing to entry or batch",
	"log_verified":           "Set audit.verification to 24h or less",
	"log_anchored":           "Configure an anchor outside the database",
	"log_retained":           "Make the archive readable again, and keep entries for a year",
	"log_retained_long":      "Make the archive readable again, and keep entries for six years",
	"retention_set":          "Set audit.retention.keep and audit.retention.archive, and keep the archive readable",
	"log_online":             "Set audit.retention.keep to 2160h or longer",
	"clock_synchronised":     "Run a time service such as chrony on the machine",
	"sealing_key_current":    "Set a lifetime of sealing keys, and keep the service running",
	"backup_recent":          "Take a backup at least once a week",
}

// Responsible returns whose job it is to fix what the probe finds.
func (p *Probe) Responsible() Responsible {
	of := func(one Probe) bool { return one.Name == p.Name }
	if slices.ContainsFunc(StateProbes, of) || p.Name == "assessed_daily" {
		return TheDeployment
	}
	switch p.Name {
	case "deletion_final", "changes_versioned", "departed_locked_out", "events_complete", "integrity_intact":
		return TheDeployment // properties of the service, which no tenant can fix
	}
	return TheTenant
}
