package compliance

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// MaxEvidence bounds the entries that a probe cites. It cites the newest ones.
const MaxEvidence = 8

// Probe is one question about the evidence.
type Probe struct {
	Name   string
	Title  string // statement that is true when the probe passes
	window int    // days that the probe looks back; 0: the state at the head
	// deadline is the age of a tenant's history, in days, after which no_data counts as a failure,
	// because the expected action did not happen in time. 0: never.
	deadline int
	judge    func(e *Evidence, now time.Time) verdict
}

// verdict is the answer of a probe.
type verdict struct {
	result  Result
	sample  int
	detail  string
	cite    []mark
	objects []string // ids of the objects for which the probe fails
}

// decided returns Fail if wrong is over 0, and Pass otherwise.
func decided(sample, wrong int, detail string, cite []mark) verdict {
	if wrong > 0 {
		return verdict{result: Fail, sample: sample, detail: detail, cite: cite}
	}
	return verdict{result: Pass, sample: sample, detail: detail, cite: cite}
}

// decidedBy returns the verdict on objects of which some are wrong.
func decidedBy(sample int, wrong []string, detail string, cite []mark) verdict {
	v := decided(sample, len(wrong), detail, cite)
	v.objects = wrong
	return v
}

func nothing(detail string) verdict { return verdict{result: NotApplicable, detail: detail} }

// answer judges as of the newest entry. Behind the deadline, no data is a failure.
func (p *Probe) answer(e *Evidence) verdict {
	now := e.Last.Time()
	v := p.judge(e, now)
	if due := e.First.Time().AddDate(0, 0, p.deadline); v.result == NoData && p.deadline > 0 && now.After(due) {
		v.result = Fail
		v.detail += fmt.Sprintf("; it was due by %s", due.Format(time.DateOnly))
	}
	return v
}

// references returns the newest of the marks, ascending and without duplicates.
func (e *Evidence) references(cite []mark) []Reference {
	cite = slices.DeleteFunc(slices.Clone(cite), func(m mark) bool { return m.Sequence == 0 })
	slices.SortFunc(cite, func(a, b mark) int { return cmp.Compare(a.Sequence, b.Sequence) })
	cite = slices.Compact(cite)
	cite = cite[max(0, len(cite)-MaxEvidence):]
	all := make([]Reference, len(cite))
	for i, m := range cite {
		all[i] = e.reference(m)
	}
	return all
}

// live returns the credentials that are neither deleted nor in the trash, by id.
func (e *Evidence) live() map[string]*credential {
	all := e.stored()
	maps.DeleteFunc(all, func(_ string, c *credential) bool { return c.Trashed })
	return all
}

// expiring returns the live credentials that expire, by id, and what a verdict says of the others. Those
// prove nothing about expiry, so they must not make a share look better; values_rotated judges them.
func (e *Evidence) expiring() (all map[string]*credential, others string) {
	all = e.live()
	before := len(all)
	maps.DeleteFunc(all, func(_ string, c *credential) bool { return c.neverExpires() })
	if n := before - len(all); n > 0 {
		others = fmt.Sprintf("; %d more never expire", n)
	}
	return all, others
}

// stored returns the credentials that are not deleted, by id.
func (e *Evidence) stored() map[string]*credential {
	all := make(map[string]*credential, len(e.Credentials))
	for id, c := range e.Credentials {
		if c.Deleted == nil {
			all[id] = c
		}
	}
	return all
}

// split returns the ids of the objects for which wrong returns true, and the entries to cite: those
// of the wrong objects, or those of all objects if none is wrong.
func split[T any](all map[string]T, at func(T) mark, wrong func(T) bool) (ids []string, cite []mark) {
	var good, bad []mark
	for id, one := range all {
		if wrong(one) {
			ids, bad = append(ids, id), append(bad, at(one))
		} else {
			good = append(good, at(one))
		}
	}
	if len(bad) > 0 {
		return ids, bad
	}
	return nil, good
}

const Day = 24 * time.Hour

func before(micros int64, t time.Time) bool { return micros < t.UnixMicro() }

// Limits of the probes on credentials and named keys.
const (
	maxValueAge   = 365 // days; age of a credential's values
	renewalShare  = 10  // a renewal is overdue in the last tenth of the lifetime
	disposalDays  = 30  // days in which an expired credential should be deleted
	maxKeyPeriod  = 730 // days; rotation period of a named key
	rotationGrace = Day // after a named key's rotation was due
	overlapGrace  = Day // after a previous version should have ended
	integrityDays = 90  // days; window
	changeDays    = 90  // days; window
)

var credentialProbes = []Probe{
	{Name: "credentials_current", Title: "No credential is past its expiry", judge: func(e *Evidence, now time.Time) verdict {
		all, others := e.expiring()
		if len(all) == 0 {
			return nothing("there are no credentials" + others)
		}
		expired, cite := split(all, renewed, func(c *credential) bool { return c.Expires != 0 && !before(now.UnixMicro(), time.UnixMicro(c.Expires)) })
		return decidedBy(len(all), expired, fmt.Sprintf("%s, %d past the expiry%s", plural(len(all), "live credential"), len(expired), others), cite)
	}},
	{Name: "credentials_renewed", Title: "Credentials are renewed before they expire", window: changeDays, judge: func(e *Evidence, now time.Time) verdict {
		all, others := e.expiring()
		renewals, cited := e.within(aRenewal, changeDays)
		late, lateCited := e.within(aLateRenewal, changeDays)
		if len(all)+renewals == 0 {
			return nothing("there are no credentials" + others)
		}
		overdue, cite := split(all, renewed, func(c *credential) bool { return c.overdue(now) })
		if late > 0 {
			cite = append(cite, lateCited...)
		} else if len(overdue) == 0 {
			cite = append(cite, cited...)
		}
		v := decided(len(all)+renewals, len(overdue)+late, fmt.Sprintf("%s, %d overdue for renewal; %s in the window, %d after the expiry%s",
			plural(len(all), "live credential"), len(overdue), plural(renewals, "renewal"), late, others), cite)
		v.objects = overdue
		return v
	}},
	{Name: "values_rotated", Title: "The values of credentials are changed at least once a year", judge: func(e *Evidence, now time.Time) verdict {
		all := e.live() // also those that never expire
		if len(all) == 0 {
			return nothing("there are no credentials")
		}
		oldest := now.AddDate(0, 0, -maxValueAge)
		old, cite := split(all, func(c *credential) mark { return c.Changed }, func(c *credential) bool { return before(c.Changed.Micros, oldest) })
		return decidedBy(len(all), old, fmt.Sprintf("%s, %d with values older than %d days", plural(len(all), "live credential"), len(old), maxValueAge), cite)
	}},
	{Name: "keys_rotated", Title: "No named key is past its rotation period", judge: func(e *Evidence, now time.Time) verdict {
		all := e.Keys
		if len(all) == 0 {
			return nothing("there are no named keys")
		}
		late, cite := split(all, rotated, func(k *namedKey) bool { return before(k.Next, now.Add(-rotationGrace)) })
		return decidedBy(len(all), late, fmt.Sprintf("%s, %d past the period", plural(len(all), "named key"), len(late)), cite)
	}},
	{Name: "key_periods", Title: "The rotation period of named keys is at most two years", judge: func(e *Evidence, _ time.Time) verdict {
		all := e.Keys
		if len(all) == 0 {
			return nothing("there are no named keys")
		}
		long, cite := split(all, rotated, func(k *namedKey) bool { return k.Period > maxKeyPeriod })
		return decidedBy(len(all), long, fmt.Sprintf("%s, %d with a period over %d days", plural(len(all), "named key"), len(long), maxKeyPeriod), cite)
	}},
	{Name: "disposal_timely", Title: "What has ended is deleted", window: changeDays, judge: func(e *Evidence, now time.Time) verdict {
		all := e.stored()
		deletions, cited := e.within(aDeletion, changeDays)
		left, cite := split(all, renewed, func(c *credential) bool {
			return c.Expires != 0 && before(c.Expires, now.AddDate(0, 0, -disposalDays)) || c.Overlap != 0 && before(c.Overlap, now.Add(-overlapGrace))
		})
		if len(all)+deletions == 0 {
			return nothing("there are no credentials, and none was deleted")
		}
		if len(left) == 0 && deletions > 0 {
			cite = cited
		}
		return decidedBy(len(all)+deletions, left, fmt.Sprintf("%s in the window; %d of %s kept more than %d days past the expiry, or with a former version that should have ended",
			plural(deletions, "deletion"), len(left), plural(len(all), "live credential"), disposalDays), cite)
	}},
	{Name: "deletion_final", Title: "What was deleted is not readable again", window: changeDays, judge: func(e *Evidence, _ time.Time) verdict {
		deletions, cite := e.within(aDeletion, changeDays)
		used, usedCited := e.within(aDeletedUse, changeDays)
		if deletions+used == 0 {
			return nothing("nothing was deleted in the window")
		}
		if used > 0 {
			cite = usedCited
		}
		return decided(deletions, used, fmt.Sprintf("%s, read again afterwards: %d", plural(deletions, "deletion"), used), cite)
	}},
	{Name: "changes_versioned", Title: "Each change of a credential is recorded as the next version, with a digest", window: changeDays, judge: func(e *Evidence, _ time.Time) verdict {
		changes, cite := e.within(aChange, changeDays)
		gaps, gapsCited := e.within(aVersionGap, changeDays)
		if changes == 0 {
			return nothing("no credential was changed in the window")
		}
		if gaps > 0 {
			cite = gapsCited
		}
		return decided(changes, gaps, fmt.Sprintf("%s, %d out of order or without a digest", plural(changes, "change"), gaps), cite)
	}},
	{Name: "integrity_intact", Title: "Nothing that was opened was damaged", window: integrityDays, judge: func(e *Evidence, _ time.Time) verdict {
		opened, cite := e.within(anOpening, integrityDays)
		damaged, damagedCited := e.within(anIntegrity, integrityDays)
		if opened+damaged == 0 {
			return nothing("nothing was opened in the window")
		}
		if damaged > 0 {
			cite = damagedCited
		}
		return decided(opened, damaged, fmt.Sprintf("%s of protected data, %d found damaged", plural(opened, "opening"), damaged), cite)
	}},
}

// neverExpires reports whether a credential has the time of those that never expire, 9999-12-31T23:59:59Z.
func (c *credential) neverExpires() bool {
	return c.Expires == time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC).UnixMicro()
}

func renewed(c *credential) mark { return c.Renewed }
func rotated(k *namedKey) mark   { return k.Rotated }

// overdue reports whether a credential is in the last tenth of its lifetime. Automatic renewal
// happens earlier.
func (c *credential) overdue(now time.Time) bool {
	if c.Expires == 0 {
		return false
	}
	lifetime := c.Expires - c.Renewed.Micros
	return now.UnixMicro() >= c.Expires-lifetime/renewalShare
}
