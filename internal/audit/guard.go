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

// Guard is what every call of a service passes: it decides whether a principal may act, and it
// records what was done, what was denied and what failed. A service holds a Guard in place of the
// log, so that it cannot answer without an entry:
//
//	if err := s.guard.Admit(ctx, p, action); err != nil { return err } // before any lookup
//	… // do the work
//	return s.guard.Record(ctx, event)                                  // before the answer
//
// A change uses [Guard.Append] instead of Record, so that the change and its entry are one commit.
// A Guard bounds how often refusals are recorded. It keeps that in memory: each process counts by
// itself. It is safe for concurrent use.
type Guard struct {
	log *Log

	strangers minuteLimit // refusals of callers without a principal
	known     minuteLimit // refusals of principals
	events    minuteLimit // events of which one in a minute is enough
}

// NewGuard returns a guard of the log.
func NewGuard(l *Log) *Guard { return &Guard{log: l, strangers: minuteLimit{most: maxStrangers}} }

// Ready reports whether an entry could be written now. Error: fault.Unavailable.
func (g *Guard) Ready(ctx context.Context) error { return g.log.Ready(ctx) }

// HaltedBy returns why the log takes no entries, and nil when it does.
func (g *Guard) HaltedBy() error { return g.log.HaltedBy() }

// CheckNotHalted returns what a caller is told while the log takes no entries, and nil while it does.
func (g *Guard) CheckNotHalted() error { return g.log.rollbacks.checkNotHalted() }

// Admit finds out, before anything is looked up, whether an entry could be written and whether p
// may do a. Errors: as of [Guard.Ready] and [Guard.Authorize].
func (g *Guard) Admit(ctx context.Context, p authz.Principal, a authz.Action) error {
	if err := g.Ready(ctx); err != nil {
		return err
	}
	return g.Authorize(ctx, p, a)
}

// errTrialEnded names the remedy, since only the operator of the service can help.
var errTrialEnded = fault.New(fault.Forbidden, "the trial has ended and the tenant is read-only: ask the operator of this service to activate it")

// Authorize reports whether p may do a. It records a refusal before it returns it. Errors:
// fault.Forbidden, or fault.Unavailable when the refusal could not be recorded.
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

// Append lets the event join the transaction of the change that it records, as [Log.Append] does.
func (g *Guard) Append(tx store.Tx, e Event) (*Receipt, error) { return g.log.Append(tx, e) }

// Record writes one event in a transaction of its own.
func (g *Guard) Record(ctx context.Context, e Event) error {
	if err := g.log.Record(ctx, e); err != nil {
		return fmt.Errorf("recording %s: %w", e.Type, err)
	}
	return nil
}

// Refuse records that e came to nothing, with the outcome and the reason, and returns the answer
// for the caller. Error: fault.Unavailable when that could not be recorded.
func (g *Guard) Refuse(ctx context.Context, e Event, o Outcome, reason string, answer error) error {
	e.Outcome, e.Attributes = o, map[string]string{AttributeReason: reason}
	if err := g.Record(ctx, e); err != nil {
		return err
	}
	return answer
}

// RecordAttempt records that p tried a and that it was not carried out. The reason is one of a few
// fixed words.
func (g *Guard) RecordAttempt(ctx context.Context, p authz.Principal, a authz.Action, o Outcome, reason string) error {
	tried := attempts[a]
	return g.Record(ctx, Event{
		Type: tried.event, Outcome: o, Principal: p,
		Resource:   Resource{Type: tried.resource},
		Attributes: map[string]string{AttributeReason: reason},
	})
}

// RecordAttemptOncePerMinute is [Guard.RecordAttempt], once a minute for each principal, action
// and reason.
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

// RecordRefusal records the refusal of a stranger, unless one of the same source and type was
// recorded in this minute, in whichever tenant's history: otherwise the time it takes would show
// which tenant has an account. The caller adds what the stranger asked for to the source where an
// address must not hide what it tries on another. A refusal because an account is slowed down
// counts by itself, since other refusals precede it in the same minute.
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

// RecordRateLimit records, once a minute, that a principal was over its rate.
func (g *Guard) RecordRateLimit(ctx context.Context, p authz.Principal) error {
	if !g.known.first(string(p.Tenant), p.ID, g.log.now()) {
		return nil
	}
	return g.Record(ctx, Event{
		Type: RateLimited, Outcome: Denied, Principal: p, Resource: Resource{Type: InterfaceResource},
	})
}

// RecordOncePerMinute records an event of which one says as much as many, unless one with the same
// principal, pod, type, outcome and attributes was recorded in this minute.
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

// AcceptRollback lets the log go on without entries that are lost, as [Log.AcceptRollback] does.
// Errors: also fault.Forbidden.
func (g *Guard) AcceptRollback(ctx context.Context, p authz.Principal, reason string) (Rollback, error) {
	if err := g.Authorize(ctx, p, authz.AcceptRollback); err != nil {
		return Rollback{}, err
	}
	return g.log.AcceptRollback(ctx, p, reason)
}

// maxStrangers bounds the refusals of strangers that are recorded in a minute, for each group.
const maxStrangers = 64

// minuteLimit picks the events to record: in each group the first of every source in a minute, and
// at most so many sources. For strangers the bound keeps a caller with many addresses from filling
// the log, and the groups keep a caller who is refused in one way from hiding what it tries in
// another. The request metric counts every refusal.
type minuteLimit struct {
	most int // sources in a group; 0: no bound

	mu       sync.Mutex
	minute   time.Time
	recorded map[string]map[string]bool // in this minute, by group and source
}

// first reports whether the event is the first of its source in this minute, and takes note of it.
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

// forget lets the next event of the source be recorded, because this one could not be.
func (r *minuteLimit) forget(group, source string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.recorded[group], source)
}

// Source returns the name of the host at an address for [Guard.RecordRefusal]: the network of 64 bits
// of an IPv6 address, since one host commonly has such a network, and anything else unchanged.
func Source(address string) string {
	if ip, err := netip.ParseAddr(address); err == nil && ip.Is6() && !ip.Is4In6() {
		network, _ := ip.Prefix(64) // an IPv6 address has one
		return network.Masked().String()
	}
	return address
}

// attempt names the event that records an action which was not carried out.
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
