package compliance

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Limits of the probes on reviews and records.
const (
	logReviewDays    = 30
	accessReviewDays = 90
	recordDays       = 90
	inventoryDays    = 365
	assessmentHours  = 48
)

var reviewProbes = []Probe{
	{Name: "log_reviewed", Title: "A member acknowledges the audit log at least once a month", window: logReviewDays, deadline: logReviewDays, judge: func(e *Evidence, now time.Time) verdict {
		return reviewedWithin(e.Log, now, logReviewDays, "the log")
	}},
	{Name: "access_reviewed", Title: "A member reviews API keys and members at least once a quarter", window: accessReviewDays, deadline: accessReviewDays, judge: func(e *Evidence, now time.Time) verdict {
		if len(e.APIKeys)+len(e.Users) == 0 {
			return nothing("there are no API keys and no members")
		}
		return reviewedWithin(e.Access, now, accessReviewDays, "API keys and members")
	}},
	{Name: "denials_reviewed", Title: "A member who did not cause it acknowledges each denied access within a week", window: recordDays, judge: func(e *Evidence, now time.Time) verdict {
		return e.acknowledgedInTime(now, aDenial, aLateDenial, "denial")
	}},
	{Name: "failures_reviewed", Title: "A member who did not cause it acknowledges each failure within a week", window: recordDays, judge: func(e *Evidence, now time.Time) verdict {
		return e.acknowledgedInTime(now, aFailure, aLateFailure, "failure")
	}},
	{Name: "inventory_reviewed", Title: "A member reviews the inventory of cryptography at least once a year", window: inventoryDays, deadline: inventoryDays, judge: func(e *Evidence, now time.Time) verdict {
		return reviewedWithin(e.Inventory, now, inventoryDays, "the inventory")
	}},
}

// reviewedWithin judges the age of the last review.
func reviewedWithin(last mark, now time.Time, days int, what string) verdict {
	if last == (mark{}) || before(last.Micros, now.AddDate(0, 0, -days)) {
		return verdict{result: NoData, detail: fmt.Sprintf("no member reviewed %s in %d days", what, days)}
	}
	return verdict{result: Pass, sample: 1, detail: fmt.Sprintf("a member reviewed %s on %s", what, last.Time().Format(time.DateOnly)), cite: []mark{last}}
}

// acknowledgedInTime judges whether members acknowledged the denials or failures in time.
func (e *Evidence) acknowledgedInTime(now time.Time, what, late aspect, noun string) verdict {
	n, cite := e.within(what, recordDays)
	tardy, tardyCited := e.within(late, recordDays)
	var oldest mark
	waiting := 0
	for _, g := range e.Open {
		if g.Kind != what {
			continue
		}
		waiting += g.Tally.Count
		if oldest == (mark{}) || g.Tally.First.Sequence < oldest.Sequence {
			oldest = g.Tally.First
		}
	}
	var open []mark
	if waiting > 0 && now.Sub(oldest.Time()) > reviewTime {
		open = []mark{oldest}
	}
	if n == 0 && len(open) == 0 {
		return nothing("no " + noun + " in the window")
	}
	detail := fmt.Sprintf("%s, %d not acknowledged yet, late acknowledgements: %d", plural(n, noun), waiting, tardy)
	if tardy+len(open) > 0 {
		if len(open) > 0 {
			detail += fmt.Sprintf("; the oldest waits since %s", oldest.Time().Format(time.DateOnly))
		}
		return verdict{result: Fail, sample: n, detail: detail, cite: append(open, tardyCited...)}
	}
	if waiting >= n { // all of them can still be acknowledged in time
		return verdict{result: NoData, sample: n, detail: detail, cite: cite}
	}
	_, acknowledged := e.within(anAcknowledgement, recordDays)
	return verdict{result: Pass, sample: n, detail: detail, cite: append(cite, acknowledged...)}
}

var recordProbes = []Probe{
	{Name: "events_complete", Title: "Every entry says who did what, when, to what, and with what result", window: recordDays, judge: func(e *Evidence, _ time.Time) verdict {
		n, cite := e.within(anEntry, recordDays)
		lacking, lackingCited := e.within(anIncomplete, recordDays)
		if lacking > 0 {
			cite = lackingCited
		}
		return decided(n, lacking, fmt.Sprintf("%s, %d incomplete", entries(n), lacking), cite)
	}},
	// The probe uses the scores that the deployment records by itself. A score on demand also
	// records the state, but is no daily assessment.
	{Name: "assessed_daily", Title: "The deployment assesses itself every day", deadline: 2, judge: func(e *Evidence, now time.Time) verdict {
		if e.Daily == (mark{}) {
			return verdict{result: NoData, detail: "there was no daily assessment yet"}
		}
		stale := 0
		if now.Sub(e.Daily.Time()) > assessmentHours*time.Hour {
			stale = 1
		}
		return decided(1, stale, "the last daily assessment is of "+e.Daily.Time().Format(time.DateOnly), []mark{e.Daily})
	}},
}

func entries(n int) string {
	if n == 1 {
		return "1 entry"
	}
	return fmt.Sprintf("%d entries", n)
}

// Limits of the probes on the deployment's state.
const (
	maxVerifyEvery  = 24 * time.Hour
	YearDays        = 365
	onlineDays      = 90
	sixYearsDays    = 6*365 + 2
	backupDays      = 7
	sealingKeyGrace = 24 * time.Hour
)

// ofState returns a probe of the state that the deployment last recorded. A state that is too old
// gives no data.
func ofState(name, title string, judge func(s State, now time.Time) (Result, string)) Probe {
	return Probe{Name: name, Title: title, deadline: 2, judge: func(e *Evidence, now time.Time) verdict {
		if e.State == nil || now.Sub(e.State.At.Time()) > assessmentHours*time.Hour {
			return verdict{result: NoData, detail: fmt.Sprintf("the state was not assessed in %d hours", assessmentHours)}
		}
		result, detail := judge(e.State.State, now)
		sample := 1
		if result == NotApplicable {
			sample = 0
		}
		return verdict{result: result, sample: sample, detail: detail, cite: []mark{e.State.At}}
	}}
}

func yes(ok bool, good, bad string) (Result, string) {
	if ok {
		return Pass, good
	}
	return Fail, bad
}

// terminated is the detail of transport probes when a proxy ends TLS.
const terminated = "a proxy before the service ends TLS: look there"

var StateProbes = []Probe{
	ofState("keys_wrapped", "The keys of tenants are wrapped by one that is kept elsewhere", func(s State, _ time.Time) (Result, string) {
		switch s.Custody {
		case CustodyLocal:
			return Pass, "of the wrapping key: a local key file holds it, outside the database's folder"
		case CustodyKMS:
			return Pass, "of the wrapping key: a key management service holds it"
		}
		return Fail, "of the wrapping key: a development key lies beside the database"
	}),
	ofState("transport_encrypted", "The transport is encrypted with TLS 1.3", func(s State, _ time.Time) (Result, string) {
		if s.Transport == TransportTerminated {
			return NotApplicable, terminated
		}
		return yes(s.Transport == TransportTLS13 || s.Transport == TransportTLS13Quantum, "TLS 1.3 alone is spoken", "the transport is not encrypted")
	}),
	ofState("transport_quantum_safe", "The transport's key agreement withstands quantum computers", func(s State, _ time.Time) (Result, string) {
		if s.Transport == TransportTerminated {
			return NotApplicable, terminated
		}
		return yes(s.Transport == TransportTLS13Quantum, "keys are agreed on with X25519MLKEM768 and in no other way", "a client may agree on a key without X25519MLKEM768")
	}),
	ofState("suites_quantum_safe", "Data and signatures are protected by quantum-safe algorithms", func(s State, _ time.Time) (Result, string) {
		return yes(slices.Contains(s.Suites, "ML-KEM-768") && slices.Contains(s.Suites, "ML-DSA-65"),
			"in use: "+strings.Join(s.Suites, ", "), "ML-KEM-768 and ML-DSA-65 are not both in use")
	}),
	ofState("log_signed", "Every audit entry is signed", func(s State, _ time.Time) (Result, string) {
		return yes(s.Signing == "entry" || s.Signing == "batch", "entries are signed with ML-DSA-65, mode "+s.Signing, "entries are not signed")
	}),
	ofState("log_verified", "The whole audit chain is verified at least once a day", func(s State, _ time.Time) (Result, string) {
		return yes(s.VerifyEvery > 0 && s.VerifyEvery <= maxVerifyEvery, "it is verified every "+period(s.VerifyEvery),
			"the verification in the background is off, or less often than daily")
	}),
	ofState("log_anchored", "A checkpoint of the log is kept outside the database, and checked every day", func(s State, _ time.Time) (Result, string) {
		return yes(s.Anchored, "a place outside the database keeps a checkpoint, which was verified within the last day",
			"no place outside the database has a checkpoint that was verified within the last day: a cut tail would not be noticed")
	}),
	ofState("log_retained", "Audit entries are kept for a year or longer", func(s State, _ time.Time) (Result, string) {
		return s.Retained(YearDays)
	}),
	ofState("log_retained_long", "Audit entries are kept for six years or longer", func(s State, _ time.Time) (Result, string) {
		return s.Retained(sixYearsDays)
	}),
	ofState("retention_set", "Audit entries move to an archive at an age that is set", func(s State, _ time.Time) (Result, string) {
		switch {
		case s.Archive == ArchiveUnreadable:
			return Fail, unreadable
		case s.RetentionDays == 0:
			return Fail, "no retention is set: entries stay in the database for ever"
		}
		return yes(s.Archive == ArchiveReadable, "entries move to an archive after "+kept(s.RetentionDays), "no archive is set")
	}),
	ofState("log_online", "Audit entries of three months can be queried at once", func(s State, _ time.Time) (Result, string) {
		return yes(s.RetentionDays == 0 || s.RetentionDays >= onlineDays, "kept in the database: "+kept(s.RetentionDays), "kept in the database: "+kept(s.RetentionDays))
	}),
	ofState("clock_synchronised", "The clock is synchronised", func(s State, _ time.Time) (Result, string) {
		return yes(s.ClockSynchronised, "the system says that its clock is synchronised", "the system does not say that its clock is synchronised")
	}),
	ofState("sealing_key_current", "The sealing key is renewed within its lifetime", func(s State, now time.Time) (Result, string) {
		switch {
		case s.SealingKeyLifetime == 0:
			return Fail, "sealing keys are never renewed by themselves"
		case s.SealingKeyCreated.IsZero():
			return Fail, "there is no sealing key"
		}
		made := s.SealingKeyCreated.Format(time.DateOnly)
		return yes(now.Sub(s.SealingKeyCreated) <= s.SealingKeyLifetime+sealingKeyGrace,
			"the newest sealing key is of "+made, "the newest sealing key is past its lifetime: it is of "+made)
	}),
	backupProbe,
}

// backupProbe has its own deadline, because a new deployment has no backup yet.
var backupProbe = func() Probe {
	p := ofState("backup_recent", "The last backup was begun at most a week ago", func(s State, now time.Time) (Result, string) {
		if s.LastBackup.IsZero() {
			return NoData, "no backup was begun yet"
		}
		of := "the last backup was begun on " + s.LastBackup.Format(time.DateOnly)
		return yes(now.Sub(s.LastBackup) <= backupDays*Day, of, of)
	})
	p.deadline = backupDays
	return p
}()

const unreadable = "the archive could not be read"

// Retained judges how long entries are kept, in the database or in an archive that is never pruned.
func (s State) Retained(days int) (Result, string) {
	switch {
	case s.Archive != ArchiveNone && s.Archive != ArchiveReadable:
		return Fail, unreadable
	case s.RetentionDays == 0:
		return Pass, "entries stay in the database for ever"
	case s.Archive == ArchiveReadable:
		return Pass, "entries move to an archive after " + kept(s.RetentionDays) + ", which can be read"
	}
	return yes(s.RetentionDays >= days, "entries are kept for "+kept(s.RetentionDays), "entries are kept for "+kept(s.RetentionDays)+" only")
}

// period formats the interval between two events in whole units.
func period(d time.Duration) string {
	switch {
	case d%time.Hour == 0:
		return plural(int(d/time.Hour), "hour")
	case d%time.Minute == 0:
		return plural(int(d/time.Minute), "minute")
	}
	return plural(int(d/time.Second), "second")
}

func kept(days int) string {
	if days == 0 {
		return "for ever"
	}
	return plural(days, "day")
}
