package dashboard_test

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// asked returns the requests to the interface since a number of requests, without the origin and without those for who is signed in.
func (b *tab) asked(since int) (all []string) {
	for _, r := range b.requested()[since:] {
		if method, path, _ := strings.Cut(strings.Replace(r, b.origin, "", 1), " "); strings.HasPrefix(path, "/api/") && path != "/api/v2/auth/me" {
			all = append(all, method+" "+path)
		}
	}
	return all
}

// entriesOf returns how many entries of a type the newest hundred have.
func (o owner) entriesOf(p *program, event v2.EventType) int {
	p.t.Helper()
	list, err := o.QueryAuditLog(p.t.Context(), &v2.QueryAuditLogParams{EventType: &event, Limit: new(100)})
	p.must(list, err)
	return len(list.Entries)
}

// neglected is a tenant with an expired credential, and an API key that never expires.
func neglected(t testing.TB) (*program, owner, string) {
	t.Helper()
	p := startAt(t, -12*day)
	o := p.register("Neglect", "nora@example.org")
	p.verify(o)
	p.must(p.operator().ActivateTenant(t.Context(), p.tenant(o)))
	id := p.seal(o, "shop/old-database", "database", "password", "s3cret", 10)
	p.must(o.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "forever", Scopes: []v2.Scope{v2.ScopeVaultRead}}))
	p.advance(12 * day)
	p.must(o.Login(t.Context(), v2.LoginRequest{Email: o.email, Password: o.password}))
	return p, o, id
}

// A visit to the page of compliance asks once for all frameworks, and leaves one entry.
func TestAllFrameworksAreOneRequestAndOneEntry(t *testing.T) {
	p, o, _ := neglected(t)
	b := p.tab()
	b.signIn(o, "/vault")
	before, entries := len(b.requested()), o.entriesOf(p, v2.EventTypeCOMPLIANCESCORED)
	b.follow("Compliance")
	b.titled("Compliance")
	b.sees("What your organisation has to fix")
	b.until(shows("shop/old-database")) // names have come, too
	asked := b.asked(before)
	slices.Sort(asked)
	if want := []string{"GET /api/v2/compliance/scores", "POST /api/v2/audit/names"}; !slices.Equal(asked, want) {
		t.Errorf("the page asked for %q, want %q", asked, want)
	}
	if n := o.entriesOf(p, v2.EventTypeCOMPLIANCESCORED) - entries; n != 1 {
		t.Errorf("%d entries of scores", n)
	}
	all, err := o.GetComplianceScores(t.Context())
	p.must(all, err)
	rows := value[[]string](b, `[...document.querySelectorAll('tbody tr')].map(r => r.innerText.replace(/\s+/g, ' '))`)
	if len(rows) != 9 {
		t.Fatalf("%d frameworks: %q", len(rows), rows)
	}
	failing := map[string]v2.ComplianceProbeResponsible{}
	for _, probe := range all.Probes {
		if probe.Result == v2.ProbeResultFail {
			failing[probe.Name] = probe.Responsible
		}
	}
	for i, s := range all.Scores {
		own, operator := 0, 0
		for _, c := range s.Controls {
			of := func(who v2.ComplianceProbeResponsible) bool {
				return slices.ContainsFunc(c.Probes, func(name string) bool { return failing[name] == who })
			}
			if of(v2.ComplianceProbeResponsibleTenant) {
				own++
			}
			if of(v2.ComplianceProbeResponsibleDeployment) {
				operator++
			}
		}
		for _, has := range []string{fmt.Sprint(*s.Score), fmt.Sprintf("%d of %d", s.Coverage.Evidenced, s.Coverage.Controls), fmt.Sprintf("%d control", own), fmt.Sprintf("%d control", operator)} {
			if !strings.Contains(rows[i], has) {
				t.Errorf("%s: the page says %q, which lacks %q", s.Framework, rows[i], has)
			}
		}
	}
	b.accessible()
}

// The page lists each failing probe once: whose job it is, how to fix it, and which things fail by name. The operator's
// probes are a group of their own.
func TestWhatFailsIsSaidOnceWithHowToFixIt(t *testing.T) {
	p, o, id := neglected(t)
	b := p.tab()
	b.signIn(o, "/compliance")
	all, err := o.GetComplianceScores(t.Context())
	p.must(all, err)
	groups := value[map[string][]string](b, `Object.fromEntries([...document.querySelectorAll('section')].filter(s => s.querySelector('.failures')).map(s => [s.querySelector('h2').innerText.replace(/ \(.*/, ''), [...s.querySelectorAll('h3')].map(h => h.innerText)]))`)
	want := map[string][]string{}
	for _, probe := range all.Probes {
		if probe.Result == v2.ProbeResultFail {
			group := map[v2.ComplianceProbeResponsible]string{"tenant": "What your organisation has to fix", "deployment": "What the operator of this service has to fix"}[probe.Responsible]
			want[group] = append(want[group], probe.Title)
		}
	}
	for group, titles := range want {
		got := groups[group]
		slices.Sort(got)
		slices.Sort(titles)
		if !slices.Equal(got, titles) {
			t.Errorf("%s: %q, want %q", group, got, titles)
		}
	}
	if len(want) != 2 || value[string](b, `document.querySelector('.failures').closest('section').querySelector('h2').innerText.replace(/ \(.*/, '')`) != "What your organisation has to fix" {
		t.Errorf("the groups are %v", groups)
	}
	b.sees("The operator of the service has to do this. Your organisation cannot")
	b.sees("Renew these credentials, or delete those that are no longer used.")
	b.sees("began to fail")
	b.sees("forever")
	if guides := value[int](b, `[...document.querySelectorAll('.failures > li')].filter(l => l.querySelector('a[target=_blank][href^="https://"]')).length`); guides != len(groups["What your organisation has to fix"])+len(groups["What the operator of this service has to fix"]) {
		t.Errorf("%d guides", guides)
	}
	if fails := value[[]string](b, `[...document.querySelectorAll('article')].filter(a => a.ariaLabel === 'No credential is past its expiry').map(a => a.querySelector('details').textContent)`); len(fails) != 1 ||
		!strings.Contains(fails[0], "frameworks") || !strings.Contains(fails[0], "CC6.1") {
		t.Errorf("what it fails: %q", fails)
	}
	b.script(`[...document.querySelectorAll('.things a')].find(a => a.innerText === 'shop/old-database').click()`) // two probes name it
	b.titled("shop/old-database")
	if path := b.path(); path != "/vault/"+id {
		t.Error(path)
	}

	// An auditor may not read the vault, and reads the name without a link.
	p.must(o.InviteMember(t.Context(), v2.InviteRequest{Email: "axel@example.org", Role: v2.RoleAuditor}))
	_, token, _ := strings.Cut(p.link("axel@example.org", "/join"), "#token=")
	p.must(p.newClient().AcceptInvitation(t.Context(), v2.AcceptInvitationRequest{Token: token, Password: "another quite long password"}))
	b = p.tab()
	b.signIn(owner{p.newClient(), "axel@example.org", "another quite long password"}, "/compliance")
	b.sees("shop/old-database")
	if links := value[int](b, `document.querySelectorAll('.things a').length`); links != 0 {
		t.Errorf("an auditor has %d links to what an auditor may not see", links)
	}
}

// The trend is a chart whose axes say days and scores. A table says the same, and leads to the score of a day.
func TestTheTrendHasAxes(t *testing.T) {
	p := startAt(t, -8*day)
	o := p.register("Trends", "tilda@example.org")
	p.must(p.operator().ActivateTenant(t.Context(), p.tenant(o)))
	for range 3 {
		p.must(o.GetComplianceScore(t.Context(), &v2.GetComplianceScoreParams{Framework: v2.FrameworkSoc2}))
		p.advance(4 * day)
		p.must(o.Login(t.Context(), v2.LoginRequest{Email: o.email, Password: o.password}))
	}
	b := p.tab()
	b.signIn(o, "/compliance/soc2") // one more day with a score
	b.until(`document.querySelector('.chart svg')`)
	history, err := o.GetComplianceHistory(t.Context(), &v2.GetComplianceHistoryParams{Framework: v2.FrameworkSoc2})
	p.must(history, err)
	days := history.Scores
	words := func(at time.Time) string { return at.Format("Jan 2, 2006") }
	want := fmt.Sprintf("100 50 0 %s %s %s, UTC", words(days[0].Date.Time), days[0].Date.AddDate(0, 0, 6).Format("Jan 2"), words(days[len(days)-1].Date.Time))
	if got := value[string](b, `document.querySelector('.chart').innerText.trim().replace(/\s+/g, ' ')`); got != want {
		t.Errorf("the axes say %q, not %q", got, want)
	}
	if got := value[string](b, `document.querySelector('.chart svg').ariaLabel`); !strings.HasPrefix(got, "SOC 2, of 100: from ") || !strings.Contains(got, words(days[0].Date.Time)) {
		t.Errorf("the picture is called %q", got)
	}
	if dots := value[int](b, `document.querySelectorAll('.chart .dot').length`); dots != len(days) {
		t.Errorf("%d dots for %d days", dots, len(days))
	}
	b.activate("DisclosureTriangle", "As a table")
	b.accessible()
	b.script(`[...document.querySelectorAll('.tall tbody tr')].at(-1).querySelector('a').click()`)
	b.until(fmt.Sprintf(`location.search === '?head=%d'`, days[0].Sequence))
}

// A report is made of what its preview says: framework, period, organisation and head.
func TestAReportIsPreviewedAndMade(t *testing.T) {
	p, o, _ := neglected(t)
	b := p.tab()
	b.signIn(o, "/compliance/report?framework=iso27001")
	b.titled("Report for an auditor")
	b.sees("ISO 27001, 2022")
	b.sees("The score and the results are those of the head, at the end of the period, and not of the period.")
	b.accessible()
	if b.holds("Organisation (optional)") != "Neglect" {
		t.Errorf("the organisation is %q", b.holds("Organisation (optional)"))
	}
	score, err := o.GetComplianceScore(t.Context(), &v2.GetComplianceScoreParams{Framework: v2.FrameworkIso27001})
	p.must(score, err)
	b.sees(fmt.Sprintf("%d controls:", score.Coverage.Controls))
	b.choose("Framework", "SOC 2")
	b.sees("You have changed what the report is of")
	b.fill("Organisation (optional)", "Neglect Holding AG")
	first := time.Now().UTC().Add(-5 * day).Format(time.DateOnly)
	set := func(label, value string) {
		b.script(fmt.Sprintf(`(() => { const l = [...document.querySelectorAll('label')].find(l => l.innerText.startsWith(%s)); const i = document.getElementById(l.htmlFor); i.value = %s; i.dispatchEvent(new Event('input', {bubbles: true})); })()`, quoted(label), quoted(value)))
	}
	set("First day", "2999-01-01")
	b.press("Preview")
	b.sees("The period begins after its end.")
	set("First day", first)
	b.press("Preview")
	b.sees("stated by you")
	b.sees("The history of the score begins with the period.")
	b.settled() // until then the buttons are those of the last preview
	before := len(b.requested())
	b.press("Make the OSCAL report")
	b.sees("Links expire in 60 minutes")
	b.accessible()
	asked := b.asked(before)
	if len(asked) != 1 {
		t.Fatalf("making a report asked for %q", asked)
	}
	at, err := url.Parse(strings.TrimPrefix(asked[0], "GET "))
	if err != nil {
		t.Fatal(err)
	}
	if q := at.Query(); q.Get("framework") != "soc2" || q.Get("format") != "oscal" || q.Get("organisation") != "Neglect Holding AG" || q.Get("from") != first || q.Get("head") == "" {
		t.Errorf("the report is of %v", q)
	}
	downloads := b.downloads()
	b.follow("Download OSCAL")
	if report := string(downloads(".json")); !strings.Contains(report, "Neglect Holding AG") || !strings.Contains(report, first) {
		t.Errorf("the report lacks what was stated: %.300s", report)
	}

	// A day that is over is judged as of its last entry.
	set("First day", "")
	set("Last day", time.Now().UTC().Add(-6*day).Format(time.DateOnly))
	b.press("Preview")
	b.sees("Up to " + time.Now().UTC().Add(-12*day).Format("Jan 2, 2006"))
	set("Last day", "2001-01-01")
	b.press("Preview")
	b.sees("There is nothing to report")
}
