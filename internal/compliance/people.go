package compliance

import (
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
)

type apiKey struct {
	Created mark             `json:"created"`
	User    string           `json:"user,omitempty"`
	Scopes  []string         `json:"scopes"`
	Expires int64            `json:"expires,omitempty"` // Unix microseconds; 0: never
	Pending bool             `json:"pending,omitempty"` // opens nothing before its approval
	Used    mark             `json:"used,omitzero"`
	Uses    map[string]int64 `json:"uses,omitempty"` // last use of each scope, Unix microseconds
}

type user struct {
	Joined   mark   `json:"joined"`
	Role     string `json:"role"`
	Verified bool   `json:"verified"`
	Active   mark   `json:"active"`
}

// burst is a group of failed sign-ins close together, with the reaction to it.
type burst struct {
	At       mark   `json:"at"` // the sign-in that completed the burst
	Tenant   uint64 `json:"s"`  // its tenant sequence
	Reaction *mark  `json:"reaction,omitempty"`
}

// Size and duration of a burst, and the time in which there should be a reaction.
const (
	burstSize    = 5
	burstTime    = time.Hour
	reactionTime = 24 * time.Hour
)

// inFlight is the time for which a request may still act that was admitted before its principal
// departed.
const inFlight = time.Minute

// scopeOf maps an event to the scope that its principal used, for events that reveal or change
// something.
var scopeOf = map[audit.EventType]authz.Scope{
	audit.CredentialUnsealed: authz.VaultRead, audit.CredentialListed: authz.VaultRead,
	audit.CredentialSealed: authz.VaultWrite, audit.CredentialRotated: authz.VaultWrite,
	audit.CredentialReencrypted: authz.VaultWrite, audit.CredentialDescribed: authz.VaultWrite, audit.CredentialDeleted: authz.VaultWrite,
	audit.ManifestResealed: authz.VaultWrite, audit.ManifestChecked: authz.VaultWrite,
	audit.DataDecrypted: authz.CryptoDecrypt, audit.DataSigned: authz.CryptoSign,
	audit.KeyCreated: authz.KeysWrite, audit.KeyRotated: authz.KeysWrite,
	audit.APIKeyCreated: authz.AccountAdmin, audit.APIKeyListed: authz.AccountAdmin, audit.APIKeyRevoked: authz.AccountAdmin,
	audit.APIKeyApproved: authz.AccountAdmin, audit.ReviewNoteErased: authz.AccountAdmin, audit.NamesErased: authz.AccountAdmin, audit.NodeLogRecorded: authz.AuditWrite,
	audit.MemberListed: authz.AccountAdmin, audit.MemberInvited: authz.AccountAdmin, audit.MemberChanged: authz.AccountAdmin,
	audit.MemberRemoved: authz.AccountAdmin, audit.InvitationRevoked: authz.AccountAdmin,
	audit.HistoryRuleListed: authz.AccountAdmin, audit.HistoryRuleChanged: authz.AccountAdmin,
	audit.WebhookListed: authz.AccountAdmin, audit.WebhookCreated: authz.AccountAdmin, audit.WebhookDeleted: authz.AccountAdmin, audit.WebhookSent: authz.AccountAdmin,
	audit.SettingsRead: authz.AccountAdmin, audit.SettingsChanged: authz.AccountAdmin,
	audit.PolicyListed: authz.AccountAdmin, audit.PolicyCreated: authz.AccountAdmin, audit.PolicyChanged: authz.AccountAdmin,
	audit.PolicyDeleted: authz.AccountAdmin, audit.PolicyBound: authz.AccountAdmin, audit.PolicyUnbound: authz.AccountAdmin,
	audit.GroupListed: authz.AccountAdmin, audit.GroupCreated: authz.AccountAdmin, audit.GroupChanged: authz.AccountAdmin,
	audit.GroupDeleted: authz.AccountAdmin,
}

// watchedScopes are the scopes whose use scopeOf can show.
var watchedScopes = func() (scopes []string) {
	for _, s := range scopeOf {
		scopes = append(scopes, string(s))
	}
	slices.Sort(scopes)
	return slices.Compact(scopes)
}()

// actor records who is active, and detects principals that should no longer be.
func (e *Evidence) actor(a *audit.Entry, m mark) {
	if a.Outcome != audit.Success {
		return
	}
	if left, ok := e.Departed[a.Actor.ID]; ok && m.Micros > left.Micros+inFlight.Microseconds() {
		e.count(aDepartedUse, m)
	}
	switch a.Actor.Type {
	case string(authz.APIKey):
		k := e.APIKeys[a.Actor.ID]
		if k == nil {
			return
		}
		if k.Expires != 0 && m.Micros > k.Expires+inFlight.Microseconds() {
			e.count(aDepartedUse, m)
		}
		k.Used = m
		if scope := string(scopeOf[a.EventType]); scope != "" {
			if k.Uses == nil {
				k.Uses = make(map[string]int64)
			}
			k.Uses[scope] = m.Micros
		}
	case string(authz.User):
		if u := e.Users[a.Actor.ID]; u != nil {
			u.Active = m
		}
	}
}

// account tracks API keys, members and invitations.
func (e *Evidence) account(a *audit.Entry, m mark) {
	if a.Outcome != audit.Success {
		return
	}
	id := a.Resource.ID
	byWhom := a.Actor.ID != "" && a.Actor.Type != string(authz.Stranger)
	switch a.EventType {
	case audit.APIKeyCreated:
		pending := a.Attributes[audit.AttributePending] == "true"
		if !pending {
			e.issue(m, byWhom)
		}
		e.made(a)
		e.APIKeys[id] = &apiKey{
			Created: m, User: a.Attributes[audit.AttributeUser], Pending: pending,
			Scopes: strings.Fields(a.Attributes[audit.AttributeScopes]), Expires: microsOf(a, audit.AttributeExpiresAt),
		}
	case audit.APIKeyApproved:
		e.issue(m, byWhom)
		e.made(a)
		if k := e.APIKeys[id]; k != nil {
			k.User, k.Pending = a.Attributes[audit.AttributeUser], false
		}
	case audit.APIKeySuspended:
		if k := e.APIKeys[id]; k != nil {
			k.Pending = true
		}
	case audit.APIKeyRevoked:
		if k := e.APIKeys[id]; k == nil || !k.Pending {
			e.depart(id, m)
		}
		delete(e.APIKeys, id)
	case audit.UserRegistered:
		e.Users[id] = &user{Joined: m, Role: string(authz.Owner), Active: m}
	case audit.EmailVerified, audit.PasswordReset:
		// A user verifies an address with a token that was mailed to it. Nobody else can, so an entry
		// with another actor does not count.
		verified := a.EventType == audit.EmailVerified || a.Attributes["email_verified"] == "true"
		if u := e.Users[id]; u != nil && verified && a.Actor.ID == id {
			u.Verified = true
		}
	case audit.MemberInvited:
		e.Invitations[id] = m
	case audit.MemberJoined:
		_, invited := e.Invitations[a.Attributes["invitation"]]
		delete(e.Invitations, a.Attributes["invitation"])
		e.issue(m, invited)
		e.Users[id] = &user{Joined: m, Role: a.Attributes["role"], Verified: true, Active: m}
	case audit.MemberChanged:
		if u := e.Users[id]; u != nil {
			u.Role = a.Attributes["role"]
		}
		e.dropKeys(id, m, authz.Role(a.Attributes["role"]))
	case audit.MemberRemoved:
		delete(e.Users, id)
		e.depart(id, m)
		e.dropKeys(id, m, "")
	}
}

func (e *Evidence) issue(m mark, approved bool) {
	if e.count(anIssue, m); !approved {
		e.count(anUnapproved, m)
	}
}

func (e *Evidence) depart(id string, m mark) {
	e.count(aDeparture, m)
	e.Departed[id] = m
}

// dropKeys ends the API keys of a user that have scopes beyond the role, as the service does.
func (e *Evidence) dropKeys(user string, m mark, role authz.Role) {
	holder := authz.Principal{Scopes: role.Scopes()}
	for id, k := range e.APIKeys {
		beyond := slices.ContainsFunc(k.Scopes, func(s string) bool { return !holder.Holds([]authz.Scope{authz.Scope(s)}) })
		if k.User == user && (beyond || role == "") {
			delete(e.APIKeys, id)
			e.depart(id, m)
		}
	}
}

// reactions are the events that count as a reaction to guessed passwords when a user causes them.
// An acknowledgement that covers the sign-ins is one too. Signing out is none: every user does it.
var reactions = []audit.EventType{audit.PasswordChanged, audit.PasswordReset, audit.MemberRemoved, audit.MemberChanged}

// watch tracks failed sign-ins, the reactions to them, and openings of protected data.
func (e *Evidence) watch(a *audit.Entry, m mark) {
	switch {
	case a.EventType == audit.UserSignedIn && a.Outcome == audit.Denied:
		e.failedSignIn(a, m)
	case a.EventType == audit.DataDecrypted || a.EventType == audit.DataVerified:
		e.count(anOpening, m)
	case a.Outcome == audit.Success && a.Actor.Type == string(authz.User) && slices.Contains(reactions, a.EventType):
		e.FailedSignIns = nil
		for i := range e.Bursts {
			if e.Bursts[i].Reaction == nil {
				e.Bursts[i].Reaction = &m
			}
		}
	}
}

// failedSignIn records a failed sign-in. The log records the slow-down of an account only after
// many failures, and most of these have no entry of their own: only the first one in a minute has.
func (e *Evidence) failedSignIn(a *audit.Entry, m mark) {
	slowedDown := a.Attributes[audit.AttributeReason] == audit.ReasonSlowedDown
	e.FailedSignIns = append(e.FailedSignIns, m)
	if n := len(e.FailedSignIns); n > burstSize {
		e.FailedSignIns = e.FailedSignIns[n-burstSize:]
	}
	open := len(e.Bursts) > 0 && e.Bursts[len(e.Bursts)-1].Reaction == nil
	many := len(e.FailedSignIns) == burstSize && m.Micros-e.FailedSignIns[0].Micros <= burstTime.Microseconds()
	if !open && (many || slowedDown) {
		e.Bursts = append(e.Bursts, burst{At: m, Tenant: a.TenantSequence})
	}
}
