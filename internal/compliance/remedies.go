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
		at, how := since.Time(), remedies[p.Name]
		slices.Sort(v.objects)
		r.Since, r.Objects = &at, v.objects[:min(len(v.objects), MaxObjects)]
		r.Remedy, r.Guide = how.text, buildinfo.Documentation+how.guide
	}
	return r
}

// remedy says what mends a failing probe, and which page of the documentation says how.
type remedy struct{ text, guide string }

var remedies = map[string]remedy{
	"credentials_current": {"Renew these credentials, or delete those that are no longer used", "guides/workloads.md"},
	"credentials_renewed": {"Renew these credentials before they expire", "guides/workloads.md"},
	"values_rotated":      {"Store new values in these credentials", "guides/workloads.md"},
	"keys_rotated":        {"Rotate these keys", "reference/interface.md"},
	"key_periods":         {"Create keys with a shorter rotation period, and encrypt with them", "reference/interface.md"},
	"disposal_timely":     {"Delete these credentials", "guides/workloads.md"},
	"deletion_final":      {"Report this to the operator of the service: a deleted credential must not be readable", "guides/verify-the-log.md"},
	"changes_versioned":   {"Report this to the operator of the service, and verify the log", "guides/verify-the-log.md"},
	"integrity_intact":    {"Run latticekeep doctor, and restore what it names", "guides/backup.md"},

	"api_keys_bounded":         {"Replace these API keys with keys that expire, and revoke them", "guides/dashboard.md"},
	"api_keys_rotated":         {"Replace these API keys, and revoke them", "guides/dashboard.md"},
	"api_keys_used":            {"Revoke these API keys", "guides/dashboard.md"},
	"least_privilege":          {"Replace these API keys with keys that have only the scopes in use", "guides/dashboard.md"},
	"duties_separated":         {"Use one API key for administration and another one for reading", "guides/dashboard.md"},
	"members_active":           {"Remove these members, or ask them to sign in", "guides/dashboard.md"},
	"email_verified":           {"Ask these members to verify their addresses, or remove them", "guides/dashboard.md"},
	"issuance_approved":        {"Revoke what nobody approved, and find out who made it", "guides/verify-the-log.md"},
	"departed_locked_out":      {"Report this to the operator of the service: a removed member or key must not act", "guides/verify-the-log.md"},
	"sign_in_failures_handled": {"Change or reset the password of the account within a day, or acknowledge the sign-ins", "guides/dashboard.md"},

	"log_reviewed":       {"Review the audit log once a month", "compliance.md"},
	"access_reviewed":    {"Review the API keys and the members once a quarter", "compliance.md"},
	"denials_reviewed":   {"Have a member who did not cause them acknowledge denials within a week", "compliance.md"},
	"failures_reviewed":  {"Have a member who did not cause them acknowledge failures within a week", "compliance.md"},
	"inventory_reviewed": {"Review the inventory of cryptography once a year", "compliance.md"},
	"events_complete":    {"Report this to the operator of the service: each entry must be complete", "guides/verify-the-log.md"},
	"assessed_daily":     {"Keep the service running, and look for errors of the daily assessment in its log", "guides/monitor.md"},

	"keys_wrapped":           {"Use a key-management service, or keep the key file away from the database", "guides/kms.md"},
	"transport_encrypted":    {"Configure a certificate, or say that a proxy ends TLS", "guides/certificates.md"},
	"transport_quantum_safe": {"Set tls.pqRequired once all clients know X25519MLKEM768", "guides/certificates.md"},
	"suites_quantum_safe":    {"Update the service to a release that uses ML-KEM-768 and ML-DSA-65", "guides/upgrade.md"},
	"log_signed":             {"Set audit.signing to entry or batch", "reference/configuration.md"},
	"log_verified":           {"Set audit.verification to 24h or less", "reference/configuration.md"},
	"log_anchored":           {"Configure an anchor outside the database", "guides/anchors.md"},
	"log_retained":           {"Make the archive readable again, and keep entries for a year", "guides/anchors.md"},
	"log_retained_long":      {"Make the archive readable again, and keep entries for six years", "guides/anchors.md"},
	"retention_set":          {"Set audit.retention.keep and audit.retention.archive, and keep the archive readable", "guides/anchors.md"},
	"log_online":             {"Set audit.retention.keep to 2160h or longer", "guides/anchors.md"},
	"clock_synchronised":     {"Run a time service such as chrony on the machine", "guides/standalone.md"},
	"sealing_key_current":    {"Set a lifetime of sealing keys, and keep the service running", "guides/sealing-keys.md"},
	"backup_recent":          {"Take a backup at least once a week", "guides/backup.md"},
}

// Responsible returns whose job it is to mend what the probe finds.
func (p *Probe) Responsible() Responsible {
	of := func(one Probe) bool { return one.Name == p.Name }
	if slices.ContainsFunc(StateProbes, of) || p.Name == "assessed_daily" {
		return TheDeployment
	}
	switch p.Name {
	case "deletion_final", "changes_versioned", "departed_locked_out", "events_complete", "integrity_intact":
		return TheDeployment // properties of the service, which no tenant can mend
	}
	return TheTenant
}
