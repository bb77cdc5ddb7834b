package compliance

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// Limits of the probes on who has access.
const (
	maxAPIKeyAge  = 365 // days
	idleDays      = 90  // days without use
	verifyDays    = 7   // days for verifying an e-mail address
	departureDays = 90  // days; window
	signInDays    = 90  // days; window
	issueDays     = 90  // days; window
)

var accessProbes = []Probe{
	{Name: "api_keys_bounded", Title: "Every API key expires", judge: func(e *Evidence, now time.Time) verdict {
		return judgeAPIKeys(e, now, "without an expiry", func(k *apiKey) bool { return k.Expires == 0 })
	}},
	{Name: "api_keys_rotated", Title: "No API key is older than a year", judge: func(e *Evidence, now time.Time) verdict {
		oldest := now.AddDate(0, 0, -maxAPIKeyAge)
		return judgeAPIKeys(e, now, fmt.Sprintf("older than %d days", maxAPIKeyAge), func(k *apiKey) bool { return before(k.Created.Micros, oldest) })
	}},
	{Name: "api_keys_used", Title: "No API key lies unused", window: idleDays, judge: func(e *Evidence, now time.Time) verdict {
		since := now.AddDate(0, 0, -idleDays)
		return judgeAPIKeys(e, now, fmt.Sprintf("unused for %d days", idleDays), func(k *apiKey) bool {
			return before(k.Created.Micros, since) && before(k.Used.Micros, since)
		})
	}},
	{Name: "least_privilege", Title: "API keys use the privileges that they have", window: idleDays, judge: func(e *Evidence, now time.Time) verdict {
		since := now.AddDate(0, 0, -idleDays)
		return judgeAPIKeys(e, now, fmt.Sprintf("with a privilege unused for %d days", idleDays), func(k *apiKey) bool {
			return before(k.Created.Micros, since) && slices.ContainsFunc(k.Scopes, func(scope string) bool {
				return slices.Contains(watchedScopes, scope) && before(k.Uses[scope], since)
			})
		})
	}},
	{Name: "duties_separated", Title: "No API key both administers access and reads what is protected", judge: func(e *Evidence, now time.Time) verdict {
		return judgeAPIKeys(e, now, "that do both", func(k *apiKey) bool {
			return slices.Contains(k.Scopes, string(authz.AccountAdmin)) &&
				(slices.Contains(k.Scopes, string(authz.VaultRead)) || slices.Contains(k.Scopes, string(authz.CryptoDecrypt)))
		})
	}},
	{Name: "members_active", Title: "No member is inactive", window: idleDays, judge: func(e *Evidence, now time.Time) verdict {
		all := e.Users
		if len(all) == 0 {
			return nothing("there are no members")
		}
		since := now.AddDate(0, 0, -idleDays)
		idle, cite := split(all, func(u *user) mark { return u.Active }, func(u *user) bool { return before(u.Active.Micros, since) })
		return decidedBy(len(all), idle, fmt.Sprintf("%s, %d inactive for %d days", plural(len(all), "member"), len(idle), idleDays), cite)
	}},
	{Name: "email_verified", Title: "The e-mail address of each member is verified", judge: func(e *Evidence, now time.Time) verdict {
		since := now.AddDate(0, 0, -verifyDays)
		all := make(map[string]*user)
		for id, u := range e.Users {
			if u.Verified || before(u.Joined.Micros, since) {
				all[id] = u
			}
		}
		switch {
		case len(e.Users) == 0:
			return nothing("there are no members")
		case len(all) == 0:
			return verdict{result: NoData, detail: fmt.Sprintf("whoever joined has %d days for it", verifyDays)}
		}
		open, cite := split(all, func(u *user) mark { return u.Joined }, func(u *user) bool { return !u.Verified })
		return decidedBy(len(all), open, fmt.Sprintf("%s, %d not verified after %d days", plural(len(all), "member"), len(open), verifyDays), cite)
	}},
	{Name: "issuance_approved", Title: "API keys and memberships come from somebody who may give them", window: issueDays, judge: func(e *Evidence, _ time.Time) verdict {
		issued, cite := e.within(anIssue, issueDays)
		unapproved, unapprovedCited := e.within(anUnapproved, issueDays)
		if issued == 0 {
			return nothing("no API key was made and nobody joined in the window")
		}
		if unapproved > 0 {
			cite = unapprovedCited
		}
		return decided(issued, unapproved, fmt.Sprintf("%d issued, %d without an identified issuer or an invitation", issued, unapproved), cite)
	}},
	{Name: "departed_locked_out", Title: "Removed members and ended API keys do nothing any more", window: departureDays, judge: func(e *Evidence, _ time.Time) verdict {
		left, cite := e.within(aDeparture, departureDays)
		used, usedCited := e.within(aDepartedUse, departureDays)
		if left+used == 0 {
			return nothing("nobody was removed and no API key ended in the window")
		}
		if used > 0 {
			cite = usedCited
		}
		return decided(left, used, fmt.Sprintf("%s, active afterwards: %d", plural(left, "departure"), used), cite)
	}},
	{Name: "sign_in_failures_handled", Title: "Repeated failed sign-ins are followed by a reaction within a day", window: signInDays, judge: judgeBursts},
}

// judgeAPIKeys judges the API keys that are neither pending, revoked nor expired.
func judgeAPIKeys(e *Evidence, now time.Time, what string, wrong func(*apiKey) bool) verdict {
	all := make(map[string]*apiKey)
	for id, k := range e.APIKeys {
		if !k.Pending && (k.Expires == 0 || before(now.UnixMicro(), time.UnixMicro(k.Expires))) {
			all[id] = k
		}
	}
	if len(all) == 0 {
		return nothing("there are no API keys")
	}
	ids, cite := split(all, func(k *apiKey) mark { return k.Created }, wrong)
	return decidedBy(len(all), ids, fmt.Sprintf("%s, %d %s", plural(len(all), "API key"), len(ids), what), cite)
}

func judgeBursts(e *Evidence, now time.Time) verdict {
	seen, unhandled, open := 0, 0, 0
	var cite, bad []mark
	for _, b := range e.Bursts {
		if dayOf(b.At.Micros) < dayOf(now.UnixMicro())-signInDays {
			continue
		}
		seen++
		deadline := b.At.Time().Add(reactionTime)
		switch {
		case b.Reaction != nil && !b.Reaction.Time().After(deadline):
			cite = append(cite, b.At, *b.Reaction)
		case b.Reaction == nil && !now.After(deadline):
			open++
			cite = append(cite, b.At)
		default:
			unhandled++
			bad = append(bad, b.At)
		}
	}
	if seen == 0 && len(e.Users) == 0 {
		return nothing("there are no members, and nobody tried to sign in again and again")
	}
	parts := []string{fmt.Sprintf("%d series of failed sign-ins", seen), fmt.Sprintf("%d without a reaction in time", unhandled)}
	if seen == 0 {
		parts = []string{"no series of failed sign-ins"}
	}
	if open > 0 {
		parts = append(parts, fmt.Sprintf("%d still within the day", open))
	}
	if unhandled > 0 {
		cite = bad
	}
	if open == seen && open > 0 {
		return verdict{result: NoData, sample: seen, detail: strings.Join(parts, ", "), cite: cite}
	}
	return decided(seen, unhandled, strings.Join(parts, ", "), cite)
}
