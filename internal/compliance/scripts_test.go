package compliance_test

import (
	"cmp"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/test/story"
)

// automated are the probes that a program may turn green, because the act itself is what they ask
// for. The table in docs/compliance.md says what limit remains of each.
var automated = []string{
	"credentials_current", "credentials_renewed", "values_rotated", "disposal_timely", // the operator and any writer renew, rotate and delete
	"keys_rotated", "key_periods",
	"api_keys_bounded", "api_keys_rotated", "duties_separated", // an API key with account:admin replaces others
	"api_keys_used", "least_privilege", "members_active", // any use
}

// writer does everything that an API key with all scopes can do to the objects of the cases. It also
// writes, as that key, the entries that the service writes only for itself and for users: they must not
// count.
func writer(s *story.Story) {
	key := story.As(authz.APIKey, "k_script")
	for _, id := range []string{"a", "b", "c", "d"} {
		if s.Versions[id] > 0 {
			s.Version(audit.CredentialRotated, id, 60).Credential(audit.CredentialVersionEnded, audit.Success, id)
		}
	}
	for _, id := range []string{"k", "l"} {
		s.Key(audit.KeyRotated, id, 90)
		s.Tell(audit.APIKeyRevoked, audit.Success, key, audit.Resource{Type: audit.APIKeyResource, ID: id})
	}
	s.Tell(audit.APIKeyCreated, audit.Success, key, audit.Resource{Type: audit.APIKeyResource, ID: "new"},
		audit.AttributeScopes, "vault:read", audit.AttributeExpiresAt, s.In(story.InDays(30)), audit.AttributeUser, story.Owner.ID)
	state := s.GoodState()
	var attributes []string
	for k, v := range state.Attributes() {
		attributes = append(attributes, k, v)
	}
	of := audit.Resource{Type: audit.ComplianceResource}
	s.Tell(audit.ComplianceAssessed, audit.Success, key, of, attributes...)
	s.Tell(audit.ComplianceScored, audit.Success, key, of, compliance.AttributeHead, "1", "soc2", "100.0")
	s.Tell(audit.EmailVerified, audit.Success, key, audit.Resource{Type: audit.UserResource, ID: story.Owner.ID})
	s.Tell(audit.PasswordReset, audit.Success, key, audit.Resource{Type: audit.UserResource, ID: story.Owner.ID}, "email_verified", "true")
	everything(s, key)
}

// user uses each API key of the cases once for each scope, and an account once.
func user(s *story.Story) {
	for _, id := range []string{"k", "l"} {
		for _, t := range []audit.EventType{
			audit.CredentialUnsealed, audit.CredentialSealed, audit.DataDecrypted, audit.DataSigned, audit.KeyRotated, audit.APIKeyListed,
		} {
			s.Used(t, story.As(authz.APIKey, id))
		}
	}
	s.Used(audit.AccountRead, story.Owner)
}

// It takes each state of a tenant in which a probe is not green, and lets every program do what it can.
func TestProgramsTurnOnlyAutomatedProbesGreen(t *testing.T) {
	all := map[string]func(*story.Story){"a writer": writer, "a user of keys": user}
	for who, act := range programs {
		all[who] = act
	}
	turned := make(map[string]bool)
	for i := range compliance.Probes {
		p := &compliance.Probes[i]
		tried := false
		for _, c := range probeCases[p.Name] {
			if c.want != compliance.Fail && c.want != compliance.NoData {
				continue
			}
			tried = true
			for who, act := range all {
				s, e := pure(t)
				s.Began()
				c.tell(s)
				act(s)
				got := p.Run(e)
				if got.Result != compliance.Pass {
					continue
				}
				if turned[p.Name] = true; !slices.Contains(automated, p.Name) {
					t.Errorf("%s, %s: %s turns it green: %s", p.Name, c.name, who, got.Detail)
				}
			}
		}
		if !tried {
			t.Errorf("%s: no case in which it is not green", p.Name)
		}
	}
	for _, name := range automated {
		if !turned[name] {
			t.Errorf("no program turns %s green: it does not belong in the list", name)
		}
	}
}

// The table of docs/compliance.md names the same probes as those that a program may turn green.
func TestTheTableOfProbesSaysWhichAProgramCanTurnGreen(t *testing.T) {
	doc, err := os.ReadFile("../../docs/compliance.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(doc), "### Who can make a probe pass")
	for i := range compliance.Probes {
		name := compliance.Probes[i].Name
		_, row, _ := strings.Cut(table, "\n| `"+name+"` | ")
		columns := strings.Split(row, " | ")
		if len(columns) < 3 {
			t.Errorf("%s has no row", name)
			continue
		}
		program := false
		for _, who := range []string{"whoever has", "the API key", "also by a page"} {
			program = program || strings.Contains(columns[1], who)
		}
		// A program makes these two pass, and cannot turn a failure into a pass: it stays in the log.
		onlyAtFirst := name == "integrity_intact" || name == "issuance_approved"
		if program != slices.Contains(automated, name) && !onlyAtFirst {
			t.Errorf("the table says of %s that %q can cause it", name, columns[1])
		}
	}
}

// A key that waits for an owner's approval opens nothing and nobody of the tenant made it. So whoever
// holds a system key turns no probe with it, neither green nor red.
func TestAPendingKeyCountsInNoProbe(t *testing.T) {
	probes := make(map[string]*compliance.Probe)
	for _, name := range []string{
		"api_keys_bounded", "api_keys_rotated", "api_keys_used", "least_privilege", "duties_separated", "issuance_approved", "departed_locked_out",
	} {
		for i := range compliance.Probes {
			if p := &compliance.Probes[i]; p.Name == name {
				probes[name] = p
			}
		}
	}
	s, e := pure(t)
	s.Began()
	results := func(when string, want map[string]compliance.Result) {
		t.Helper()
		for name, p := range probes {
			if got := p.Run(e); got.Result != cmp.Or(want[name], compliance.NotApplicable) {
				t.Errorf("%s: %s is %s: %s", when, name, got.Result, got.Detail)
			}
		}
	}
	ask := func(id string) {
		s.Tell(audit.APIKeyCreated, audit.Success, story.As(authz.APIKey, "key_system"), audit.Resource{Type: audit.APIKeyResource, ID: id},
			audit.AttributeScopes, "vault:read account:admin", audit.AttributePending, "true")
	}
	results("before", nil)
	ask("k")
	ask("l")
	s.Days(30)
	s.ReadLog()
	results("pending", nil)
	s.Tell(audit.APIKeyRevoked, audit.Success, story.Owner, audit.Resource{Type: audit.APIKeyResource, ID: "l"})
	results("refused", nil)
	s.Tell(audit.APIKeyApproved, audit.Success, story.Owner, audit.Resource{Type: audit.APIKeyResource, ID: "k"},
		audit.AttributeScopes, "vault:read account:admin", audit.AttributeUser, story.Owner.ID)
	results("approved", map[string]compliance.Result{
		"api_keys_bounded": compliance.Fail, "api_keys_rotated": compliance.Pass, "api_keys_used": compliance.Pass, "least_privilege": compliance.Pass,
		"duties_separated": compliance.Fail, "issuance_approved": compliance.Pass,
	})
}
