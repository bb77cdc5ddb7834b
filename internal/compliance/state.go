package compliance

import (
	"crypto/sha256"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// Levels of [State.Custody], weakest first.
const (
	CustodyDevelopment = "dev"   // a development key beside the database
	CustodyLocal       = "local" // a local key file outside the database's folder
	CustodyKMS         = "kms"   // a key-management service
)

// States of [State.Archive].
const (
	ArchiveNone       = "none"       // no archive: nothing leaves the database
	ArchiveReadable   = "readable"   // older entries move to the archive, and archived entries can be read
	ArchiveUnreadable = "unreadable" // archived entries could not be read at the last check
)

// Kinds of [State.Transport].
const (
	TransportPlaintext    = "plaintext"
	TransportTerminated   = "terminated" // a proxy before the service ends TLS, so the negotiated algorithms are unknown
	TransportTLS13        = "tls13"      // X25519MLKEM768 is preferred, but an older client may go without it
	TransportTLS13Quantum = "tls13-pq"   // X25519MLKEM768 only
)

// Assessor returns the principal that acts for the deployment in a tenant's part of the log.
func Assessor(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.System, ID: "assessment"}
}

// State describes the deployment in its own words. It enters a tenant's chain as the attributes of
// COMPLIANCE_ASSESSED, with times to the second.
type State struct {
	Custody            string        // one of the levels above
	Transport          string        // one of the kinds above
	Signing            string        // how audit entries are signed: entry or batch
	VerifyEvery        time.Duration // interval between background verifications of the whole chain; 0: none
	RetentionDays      int           // how long entries stay in the database; 0: for ever
	Archive            string        // one of the states above
	Anchored           bool          // an anchor keeps a checkpoint that was verified against the log within the last day
	LastBackup         time.Time     // start of the last backup; zero when there was none
	SealingKeyCreated  time.Time     // creation of the newest sealing key; zero when there is none
	SealingKeyLifetime time.Duration // age at which the next sealing key is created; 0: never
	ClockSynchronised  bool          // as the system's clock reports
	Suites             []string      // algorithms in use, such as ML-KEM-768
}

// Attributes of COMPLIANCE_ASSESSED.
const (
	attributeCustody         = "key_custody"
	attributeTransport       = "transport"
	attributeSigning         = "signing"
	attributeVerifyEvery     = "verify_every_seconds"
	attributeRetention       = "retention_days"
	attributeArchive         = "archive"
	attributeAnchored        = "anchored"
	attributeLastBackup      = "last_backup" // absent when there was no backup
	attributeSealingCreated  = "sealing_key_created"
	attributeSealingLifetime = "sealing_key_lifetime_seconds"
	attributeClock           = "clock_synchronised"
	AttributeSuites          = "suites" // sorted, separated by spaces
)

// Attributes of COMPLIANCE_SCORED and COMPLIANCE_REPORTED. The scores of all frameworks, which the
// deployment records each day and others ask for, are one COMPLIANCE_SCORED entry without a
// framework attribute. It has one attribute per framework, named after it, with the score to one
// decimal or "withheld".
const (
	AttributeFramework = "framework"
	AttributeScore     = "score"    // with one decimal
	AttributeWithheld  = "withheld" // instead of the score: the status of the proof
	AttributeHead      = "head"     // sequence of the head
	AttributePinned    = "pinned"   // "true" when the caller chose the head
	AttributeFormat    = "format"

	Withheld = "withheld" // instead of a score of a day
)

func (s State) Attributes() map[string]string {
	suites := slices.Sorted(slices.Values(s.Suites))
	a := map[string]string{
		attributeCustody:         s.Custody,
		attributeTransport:       s.Transport,
		attributeSigning:         s.Signing,
		attributeVerifyEvery:     seconds(s.VerifyEvery),
		attributeRetention:       strconv.Itoa(s.RetentionDays),
		attributeArchive:         s.Archive,
		attributeAnchored:        strconv.FormatBool(s.Anchored),
		attributeSealingLifetime: seconds(s.SealingKeyLifetime),
		attributeClock:           strconv.FormatBool(s.ClockSynchronised),
		AttributeSuites:          strings.Join(slices.Compact(suites), " "),
	}
	for name, t := range map[string]time.Time{attributeLastBackup: s.LastBackup, attributeSealingCreated: s.SealingKeyCreated} {
		if !t.IsZero() {
			a[name] = t.UTC().Format(time.RFC3339)
		}
	}
	return a
}

func seconds(d time.Duration) string { return strconv.FormatInt(int64(d/time.Second), 10) }

// ParseState parses the attributes of a state. A missing or malformed attribute becomes the value
// that counts as the worst.
func ParseState(a map[string]string) State {
	duration := func(name string) time.Duration {
		n, _ := strconv.ParseUint(a[name], 10, 31)
		return time.Duration(n) * time.Second
	}
	at := func(name string) time.Time {
		t, _ := time.Parse(time.RFC3339, a[name])
		return t.UTC()
	}
	days, err := strconv.Atoi(a[attributeRetention])
	if err != nil || days < 0 {
		days = 1 // because 0 would mean for ever
	}
	return State{
		Custody: a[attributeCustody], Transport: a[attributeTransport], Signing: a[attributeSigning],
		VerifyEvery: duration(attributeVerifyEvery), RetentionDays: days,
		Archive: a[attributeArchive], Anchored: a[attributeAnchored] == "true",
		LastBackup: at(attributeLastBackup), SealingKeyCreated: at(attributeSealingCreated),
		SealingKeyLifetime: duration(attributeSealingLifetime), ClockSynchronised: a[attributeClock] == "true",
		Suites: strings.Fields(a[AttributeSuites]),
	}
}

// Digest returns SHA-256 over the attributes.
func (s State) Digest() []byte {
	b, _ := json.Marshal(s.Attributes()) // json.Marshal sorts the keys of a map
	sum := sha256.Sum256(b)
	return sum[:]
}

// Same reports whether both states give the same entry.
func (s State) Same(other State) bool { return maps.Equal(s.Attributes(), other.Attributes()) }
