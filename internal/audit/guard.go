package audit

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Guard stands in front of every service: it decides whether a principal may act, and it records
// what was done, what was denied and what failed. A service has a Guard instead of the log, so it
// cannot answer without an entry:
//
//	if err := s.guard.Admit(ctx, p, action); err != nil { return err } // before any lookup
//	… // do the work
//	return s.guard.Record(ctx, event)                                  // before the answer
//
// A change uses [Guard.Append] instead of Record, so that the change and its entry are one commit.
// A Guard limits how often refusals are recorded. It counts in memory, so each process counts by
// itself. A Guard is safe for concurrent use.
type Guard struct {
	log *Log

	strangers minuteLimit // refusals of callers without a principal
	known     minuteLimit // refusals of principals
	events    minuteLimit // events that are recorded once a minute at most
}

// NewGuard returns a guard for the log.
func NewGuard(l *Log) *Guard { return &Guard{log: l, strangers: minuteLimit{most: maxStrangers}} }

// Ready returns nil when an entry could be written now. Error: fault.Unavailable.
func (g *Guard) Ready(ctx context.Context) error { return g.log.Ready(ctx) }

// HaltedBy returns why the log takes no entries. It returns nil while the log takes entries.
func (g *Guard) HaltedBy() error { return g.log.HaltedBy() }

// CheckNotHalted returns the error for callers while the log is halted, and nil while it takes
// entries.
func (g *Guard) CheckNotHalted() error { return g.log.rollbacks.checkNotHalted() }

// Admit checks that an entry could be written and that p may do a. Services call it before they
// look anything up. Errors: those of [Guard.Ready] and [Guard.Authorize].
func (g *Guard) Admit(ctx context.Context, p authz.Principal, a authz.Action) error {
	if err := g.Ready(ctx); err != nil {
		return err
	}
	return g.Authorize(ctx, p, a)
}

// errTrialEnded tells the caller to ask the operator of the service, because nobody else can
// activate a tenant.
var errTrialEnded = fault.New(fault.Forbidden, "the trial has ended and the tenant is read-only: ask the operator of this service to activate it")

// Authorize returns nil if p may do a. Otherwise it records the refusal and then returns it.
// Errors: fault.Forbidden, or fault.Unavailable when the refusal could not be recorded.
func (g *Guard) Authorize(ctx context.Context, p authz.Principal, a authz.Action) error {
	why := p.Denies(a)
	if why == "" {
		return nil
	}
	if err := g.RecordAttempt(ctx, p, a, Denied, string(why)); err != nil {
		return err
	}
	if why == authz.TrialEnded {
		return errTrialEnded
	}
	return fault.New(fault.Forbidden, "access denied")
}

// Append adds the event to the transaction of the change that it records, as [Log.Append] does.
func (g *Guard) Append(tx store.Tx, e Event) (*Receipt, error) { return g.log.Append(tx, e) }

// Record writes one event in a transaction of its own.
func (g *Guard) Record(ctx context.Context, e Event) error {
	if err := g.log.Record(ctx, e); err != nil {
		return fmt.Errorf("recording %s: %w", e.Type, err)
	}
	return nil
}

// Refuse records that e was not carried out, with the outcome and the reason, and returns answer
// for the caller. Error: fault.Unavailable when the entry could not be written.
func (g *Guard) Refuse(ctx context.Context, e Event, o Outcome, reason string, answer error) error {
	e.Outcome, e.Attributes = o, map[string]string{AttributeReason: reason}
	if err := g.Record(ctx, e); err != nil {
		return err
	}
	return answer
}

// RecordAttempt records that p tried a and that the action was not carried out. The reason is one
// of a few fixed words.
func (g *Guard) RecordAttempt(ctx context.Context, p authz.Principal, a authz.Action, o Outcome, reason string) error {
	tried := attempts[a]
	return g.Record(ctx, Event{
		Type: tried.event, Outcome: o, Principal: p,
		Resource:   Resource{Type: tried.resource},
		Attributes: map[string]string{AttributeReason: reason},
	})
}

// RecordAttemptOncePerMinute calls [Guard.RecordAttempt] at most once a minute for each principal,
// action and reason.
func (g *Guard) RecordAttemptOncePerMinute(ctx context.Context, p authz.Principal, a authz.Action, o Outcome, reason string) error {
	group := "attempt/" + string(p.Tenant) + "/" + string(a) + "/" + reason
	if !g.known.first(group, p.ID, g.log.now()) {
		return nil
	}
	err := g.RecordAttempt(ctx, p, a, o, reason)
	if err != nil {
		g.known.forget(group, p.ID)
	}
	return err
}

// RecordRefusal records the refusal of a stranger, a caller without a principal. It records one
// refusal for each source and event type in a minute, whatever the tenant: with a count for each
// tenant, response times would show which tenant has an account. The caller appends the requested
// name to source where one address must not be able to hide attempts on several names. Refusals
// with [ReasonSlowedDown] are counted separately, because other refusals precede them in the same
// minute.
func (g *Guard) RecordRefusal(ctx context.Context, source string, e Event) error {
	group := string(e.Type)
	if e.Attributes[AttributeReason] == ReasonSlowedDown {
		group += " " + ReasonSlowedDown
	}
	if !g.strangers.first(group, source, g.log.now()) {
		return nil
	}
	return g.Record(ctx, e)
}

// RecordRateLimit records, at most once a minute, that a principal exceeded its rate.
func (g *Guard) RecordRateLimit(ctx context.Context, p authz.Principal) error {
	if !g.known.first(string(p.Tenant), p.ID, g.log.now()) {
		return nil
	}
	return g.Record(ctx, Event{
		Type: RateLimited, Outcome: Denied, Principal: p, Resource: Resource{Type: InterfaceResource},
	})
}

// RecordOncePerMinute records an event unless one with the same principal, pod, type, outcome and
// attributes was recorded in this minute. It is for events whose repetition adds no information.
func (g *Guard) RecordOncePerMinute(ctx context.Context, e Event) error {
	p := e.Principal
	who := string(p.Tenant) + " " + p.ID + " " + p.Pod
	what := fmt.Sprint(e.Type, e.Outcome, e.Attributes)
	if !g.events.first(who, what, g.log.now()) {
		return nil
	}
	err := g.Record(ctx, e)
	if err != nil {
		g.events.forget(who, what)
	}
	return err
}

// AcceptRollback begins a new epoch above the lost entries that a [RollbackError] names, and ends
// the halt, if p may do that. Errors: those of [Guard.Authorize], fault.Invalid for the reason,
// fault.Conflict when nothing was lost, fault.Unavailable.
func (g *Guard) AcceptRollback(ctx context.Context, p authz.Principal, reason string) (Rollback, error) {
	if err := g.Authorize(ctx, p, authz.AcceptRollback); err != nil {
		return Rollback{}, err
	}
	return g.log.acceptRollback(ctx, p, reason)
}

// maxStrangers is the highest number of sources in each group whose refusals are recorded in a
// minute.
const maxStrangers = 64

// minuteLimit selects the events to record. In each group it selects the first event of each source
// in a minute, up to a maximum number of sources. For strangers, the maximum keeps a caller with
// many addresses from filling the log. The groups keep a caller who is refused in one way from
// hiding attempts of another kind. The request metric counts every refusal.
type minuteLimit struct {
	most int // maximum number of sources in a group; 0: no maximum

	mu       sync.Mutex
	minute   time.Time
	recorded map[string]map[string]bool // sources recorded in this minute, by group
}

// first reports whether the event is the first one of its source in this minute and within the
// maximum. If so, it counts the source as recorded.
func (r *minuteLimit) first(group, source string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if minute := now.Truncate(time.Minute); !minute.Equal(r.minute) {
		r.minute, r.recorded = minute, make(map[string]map[string]bool)
	}
	sources := r.recorded[group]
	if sources[source] || r.most > 0 && len(sources) == r.most {
		return false
	}
	if sources == nil {
		sources = make(map[string]bool)
		r.recorded[group] = sources
	}
	sources[source] = true
	return true
}

// forget lets the next event of the source be recorded, because this one could not be written.
func (r *minuteLimit) forget(group, source string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.recorded[group], source)
}

// Source returns the name of a host for [Guard.RecordRefusal]. For an IPv6 address it returns the
// /64 network, because one host commonly has such a network to itself. It returns any other address
// unchanged.
func Source(address string) string {
	if ip, err := netip.ParseAddr(address); err == nil && ip.Is6() && !ip.Is4In6() {
		network, _ := ip.Prefix(64) // no error: a prefix of 64 bits is valid for IPv6
		return network.Masked().String()
	}
	return address
}

// attempt is the event type and the resource type of an action that was not carried out.
type attempt struct {
	event    EventType
	resource string
}

var attempts = map[authz.Action]attempt{
	authz.ListSealingKeys:    {SealingKeyListed, SealingKeyResource},
	authz.RotateSealingKey:   {SealingKeyCreated, SealingKeyResource},
	authz.RetireSealingKey:   {SealingKeyRetired, SealingKeyResource},
	authz.RestoreSealingKey:  {SealingKeyRestored, SealingKeyResource},
	authz.BackUp:             {BackupTaken, BackupResource},
	authz.ListKMSKeys:        {KMSKeyListed, KMSKeyResource},
	authz.RewrapKeys:         {KMSRewrapped, KMSKeyResource},
	authz.DestroyKMSKey:      {KMSKeyDestroyed, KMSKeyResource},
	authz.ResealManifest:     {ManifestResealed, ManifestResource},
	authz.CheckManifest:      {ManifestChecked, ManifestResource},
	authz.SealCredential:     {CredentialSealed, CredentialResource},
	authz.ListCredentials:    {CredentialListed, CredentialResource},
	authz.ListVersions:       {CredentialListed, CredentialResource},
	authz.UnsealCredential:   {CredentialUnsealed, CredentialResource},
	authz.ReplaceCredential:  {CredentialRotated, CredentialResource},
	authz.RotateCredential:   {CredentialReencrypted, CredentialResource},
	authz.DeleteCredential:   {CredentialDeleted, CredentialResource},
	authz.EncryptData:        {DataEncrypted, DataResource},
	authz.DecryptData:        {DataDecrypted, DataResource},
	authz.RewrapData:         {DataRewrapped, DataResource},
	authz.SignData:           {DataSigned, DataResource},
	authz.VerifyData:         {DataVerified, DataResource},
	authz.ReadPublicKeys:     {PublicKeyRead, TenantResource},
	authz.CreateKey:          {KeyCreated, KeyResource},
	authz.ListKeys:           {KeyListed, KeyResource},
	authz.RotateKey:          {KeyRotated, KeyResource},
	authz.ReadAudit:          {AuditRead, LogResource},
	authz.ReadProof:          {ProofRead, LogResource},
	authz.ExportAudit:        {AuditExported, LogResource},
	authz.AcceptRollback:     {RollbackAccepted, ChainResource},
	authz.ReadScore:          {ComplianceScored, ComplianceResource},
	authz.ReadScoreHistory:   {ComplianceHistoryRead, ComplianceResource},
	authz.ReadReport:         {ComplianceReported, ComplianceResource},
	authz.ReadInventory:      {InventoryRead, ComplianceResource},
	authz.CreateAPIKey:       {APIKeyCreated, APIKeyResource},
	authz.ListAPIKeys:        {APIKeyListed, APIKeyResource},
	authz.RevokeAPIKey:       {APIKeyRevoked, APIKeyResource},
	authz.InviteMember:       {MemberInvited, InvitationResource},
	authz.ListMembers:        {MemberListed, UserResource},
	authz.ChangeMember:       {MemberChanged, UserResource},
	authz.RemoveMember:       {MemberRemoved, UserResource},
	authz.RevokeInvitation:   {InvitationRevoked, InvitationResource},
	authz.ReadAccount:        {AccountRead, UserResource},
	authz.ListSessions:       {SessionListed, SessionResource},
	authz.EndSession:         {SessionEnded, SessionResource},
	authz.SignOut:            {UserSignedOut, SessionResource},
	authz.ChangePassword:     {PasswordChanged, UserResource},
	authz.ResendVerification: {VerificationRequested, UserResource},
	authz.ListTenants:        {TenantListed, TenantResource},
	authz.CreateTenant:       {TenantCreated, TenantResource},
	authz.ActivateTenant:     {TenantActivated, TenantResource},
	authz.LimitTenant:        {TenantLimited, TenantResource},
	authz.CreateTenantAPIKey: {APIKeyCreated, APIKeyResource},

	authz.ListSealedCredentials: {CredentialListed, ManifestResource},
}
