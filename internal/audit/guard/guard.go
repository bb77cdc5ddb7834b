// Package guard is the one place where services authorize a call, record it and refuse it.
package guard

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
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
	log *writer.Log

	strangers limit // refusals of callers without a principal
	known     limit // refusals of principals
	retried   limit // refusals of principals that retry by themselves
	events    limit // events that are recorded once a minute at most
	repeats   repeats
}

// New returns a guard for the log.
func New(l *writer.Log) *Guard {
	return &Guard{
		log:       l,
		strangers: limit{period: time.Minute, most: maxStrangers},
		known:     limit{period: time.Minute},
		retried:   limit{period: time.Hour},
		events:    limit{period: time.Minute},
		repeats:   repeats{byKey: make(map[string]*repeated), tenants: make(map[authz.TenantID]int)},
	}
}

// Ready returns nil when an entry could be written now. Error: fault.Unavailable.
func (g *Guard) Ready(ctx context.Context) error { return g.log.Ready(ctx) }

// HaltedBy returns why the log takes no entries. It returns nil while the log takes entries.
func (g *Guard) HaltedBy() error { return g.log.HaltedBy() }

// CheckNotHalted is [writer.Log.CheckNotHalted].
func (g *Guard) CheckNotHalted() error { return g.log.CheckNotHalted() }

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
	if err := g.RecordAttempt(ctx, p, a, audit.Denied, string(why)); err != nil {
		return err
	}
	if why == authz.TrialEnded {
		return errTrialEnded
	}
	return fault.New(fault.Forbidden, "access denied")
}

// AuthorizePath refuses an action on a path that the policies of p do not allow, and records that. The
// answer is that of every refusal in the vault, and nobody looks whether something is there. Errors:
// fault.Forbidden, fault.Unavailable.
func (g *Guard) AuthorizePath(ctx context.Context, p authz.Principal, a authz.Action, name string) error {
	if p.Reaches(a, name) {
		return nil
	}
	if err := g.RecordAttempt(ctx, p, a, audit.Denied, string(authz.OutsidePolicy)); err != nil {
		return err
	}
	return fault.New(fault.Forbidden, "access denied")
}

// Append adds the event to the transaction of the change that it records, as [writer.Log.Append]
// does.
func (g *Guard) Append(tx store.Tx, e audit.Event) (*audit.Receipt, error) {
	return g.log.Append(tx, e)
}

// Record writes one event in a transaction of its own.
func (g *Guard) Record(ctx context.Context, e audit.Event) error {
	if err := g.log.Record(ctx, e); err != nil {
		return fmt.Errorf("recording %s: %w", e.Type, err)
	}
	return nil
}

// Refuse records that e was not carried out, with the outcome and the reason, and returns answer
// for the caller. Error: fault.Unavailable when the entry could not be written.
func (g *Guard) Refuse(ctx context.Context, e audit.Event, o audit.Outcome, reason string, answer error) error {
	e.Outcome, e.Attributes = o, map[string]string{audit.AttributeReason: reason}
	if err := g.Record(ctx, e); err != nil {
		return err
	}
	return answer
}

// RecordAttempt records that p tried a and that the action was not carried out. The reason is one
// of a few fixed words.
func (g *Guard) RecordAttempt(ctx context.Context, p authz.Principal, a authz.Action, o audit.Outcome, reason string) error {
	tried := attempts[a]
	return g.Record(ctx, audit.Event{
		Type: tried.event, Outcome: o, Principal: p,
		Resource:   audit.Resource{Type: tried.resource},
		Attributes: map[string]string{audit.AttributeReason: reason},
	})
}

// RecordAttemptOncePerMinute calls [Guard.RecordAttempt] at most once a minute for each principal,
// action and reason.
func (g *Guard) RecordAttemptOncePerMinute(ctx context.Context, p authz.Principal, a authz.Action, o audit.Outcome, reason string) error {
	return g.recordAttemptWithin(ctx, &g.known, p, a, o, reason)
}

// RecordAttemptOncePerHour calls [Guard.RecordAttempt] at most once an hour for each principal,
// action and reason. It is for a principal that retries by itself until somebody removes the cause.
func (g *Guard) RecordAttemptOncePerHour(ctx context.Context, p authz.Principal, a authz.Action, o audit.Outcome, reason string) error {
	return g.recordAttemptWithin(ctx, &g.retried, p, a, o, reason)
}

func (g *Guard) recordAttemptWithin(ctx context.Context, l *limit, p authz.Principal, a authz.Action, o audit.Outcome, reason string) error {
	group := "attempt/" + string(p.Tenant) + "/" + string(a) + "/" + reason
	if !l.first(group, p.ID, g.log.Now()) {
		return nil
	}
	err := g.RecordAttempt(ctx, p, a, o, reason)
	if err != nil {
		l.forget(group, p.ID)
	}
	return err
}

// RecordRefusal records the refusal of a stranger, a caller without a principal. It records one
// refusal for each source and event type in a minute, whatever the tenant: with a count for each
// tenant, response times would show which tenant has an account. The caller appends the requested
// name to source where one address must not be able to hide attempts on several names. Refusals
// with [audit.ReasonSlowedDown] are counted separately, because other refusals precede them in the
// same minute. A refusal that could not be written counts, too: while the store fails, a stranger
// causes no more writes than otherwise.
func (g *Guard) RecordRefusal(ctx context.Context, source string, e audit.Event) error {
	group := string(e.Type)
	if e.Attributes[audit.AttributeReason] == audit.ReasonSlowedDown {
		group += " " + audit.ReasonSlowedDown
	}
	if !g.strangers.first(group, source, g.log.Now()) {
		return nil
	}
	return g.Record(ctx, e)
}

// RecordRateLimit records, at most once a minute, that a principal exceeded its rate. An entry that
// could not be written counts, too, because a principal over its rate must cause little work.
func (g *Guard) RecordRateLimit(ctx context.Context, p authz.Principal) error {
	if !g.known.first(string(p.Tenant), p.ID, g.log.Now()) {
		return nil
	}
	return g.Record(ctx, audit.Event{
		Type: audit.RateLimited, Outcome: audit.Denied, Principal: p, Resource: audit.Resource{Type: audit.InterfaceResource},
	})
}

// RecordOncePerMinute records an event unless one with the same principal, pod, type, outcome and
// attributes was recorded in this minute. It is for events whose repetition adds no information.
func (g *Guard) RecordOncePerMinute(ctx context.Context, e audit.Event) error {
	p := e.Principal
	who := string(p.Tenant) + " " + p.ID + " " + p.Pod
	what := fmt.Sprint(e.Type, e.Outcome, e.Attributes)
	if !g.events.first(who, what, g.log.Now()) {
		return nil
	}
	err := g.Record(ctx, e)
	if err != nil {
		g.events.forget(who, what)
	}
	return err
}

// RecordRepeated records an event that callers cause again and again, once an hour for each principal, pod,
// resource and set of attributes. [audit.AttributeRepeats] of an entry says how many events it stands for:
// itself, and those that were only counted since the entry before. What is left at the end of an hour
// without another event is recorded by [Guard.RecordRepetitions].
func (g *Guard) RecordRepeated(ctx context.Context, e audit.Event) error {
	key := fmt.Sprint(e.Principal.Tenant, " ", e.Principal.ID, " ", e.Principal.Pod, " ", e.Type, e.Outcome, e.Resource, e.Attributes)
	hour := g.log.Now().Truncate(time.Hour)
	n, counted := g.repeats.countEvent(key, e, hour)
	if counted {
		return nil
	}
	err := g.Record(ctx, withRepeats(e, n))
	if err != nil {
		g.repeats.undoEntry(key, e, n-1) // the caller gets no answer
	}
	return err
}

// RecordRepetitions records the repetitions of the hours that are over, or at the end of the process those
// of this hour, too.
func (g *Guard) RecordRepetitions(ctx context.Context, all bool) error {
	var errs []error
	hour := g.log.Now().Truncate(time.Hour)
	for key, known := range g.repeats.takeDue(hour, all) {
		if err := g.Record(ctx, withRepeats(known.last, known.count)); err != nil {
			g.repeats.restoreDue(key, known)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// AcceptRollback begins a new epoch above the lost entries that an [audit.RollbackError] names, and
// ends the halt, if p may do that. Errors: those of [Guard.Authorize], fault.Invalid for the
// reason, fault.Conflict when nothing was lost, fault.Unavailable.
func (g *Guard) AcceptRollback(ctx context.Context, p authz.Principal, reason string) (audit.Rollback, error) {
	if err := g.Authorize(ctx, p, authz.AcceptRollback); err != nil {
		return audit.Rollback{}, err
	}
	return g.log.AcceptRollback(ctx, p, reason)
}

// maxStrangers is the highest number of sources in each group whose refusals are recorded in a
// minute.
const maxStrangers = 64

// limit selects the events to record. In each group it selects the first event of each source in a
// period, up to a maximum number of sources. For strangers, the maximum keeps a caller with many
// addresses from filling the log. The groups keep a caller who is refused in one way from hiding
// attempts of another kind. The request metric counts every refusal.
type limit struct {
	period time.Duration
	most   int // maximum number of sources in a group; 0: no maximum

	mu       sync.Mutex
	begun    time.Time                  // start of this period
	recorded map[string]map[string]bool // sources recorded in this period, by group
}

// first reports whether the event is the first one of its source in this period and within the
// maximum. If so, it counts the source as recorded.
func (r *limit) first(group, source string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if begun := now.Truncate(r.period); !begun.Equal(r.begun) {
		r.begun, r.recorded = begun, make(map[string]map[string]bool)
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
func (r *limit) forget(group, source string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.recorded[group], source)
}

// attempt is the event type and the resource type of an action that was not carried out.
type attempt struct {
	event    audit.EventType
	resource string
}

var attempts = map[authz.Action]attempt{
	authz.ListSealingKeys:    {audit.SealingKeyListed, audit.SealingKeyResource},
	authz.RotateSealingKey:   {audit.SealingKeyCreated, audit.SealingKeyResource},
	authz.RetireSealingKey:   {audit.SealingKeyRetired, audit.SealingKeyResource},
	authz.RestoreSealingKey:  {audit.SealingKeyRestored, audit.SealingKeyResource},
	authz.BackUp:             {audit.BackupTaken, audit.BackupResource},
	authz.ListKMSKeys:        {audit.KMSKeyListed, audit.KMSKeyResource},
	authz.RewrapKeys:         {audit.KMSRewrapped, audit.KMSKeyResource},
	authz.DestroyKMSKey:      {audit.KMSKeyDestroyed, audit.KMSKeyResource},
	authz.ResealManifest:     {audit.ManifestResealed, audit.ManifestResource},
	authz.CheckManifest:      {audit.ManifestChecked, audit.ManifestResource},
	authz.ReadMetrics:        {audit.MetricsRead, audit.InterfaceResource},
	authz.SealCredential:     {audit.CredentialSealed, audit.CredentialResource},
	authz.ListCredentials:    {audit.CredentialListed, audit.CredentialResource},
	authz.ListVersions:       {audit.CredentialListed, audit.CredentialResource},
	authz.UnsealCredential:   {audit.CredentialUnsealed, audit.CredentialResource},
	authz.ReplaceCredential:  {audit.CredentialRotated, audit.CredentialResource},
	authz.RotateCredential:   {audit.CredentialReencrypted, audit.CredentialResource},
	authz.RenameCredential:   {audit.CredentialReencrypted, audit.CredentialResource},
	authz.DescribeCredential: {audit.CredentialDescribed, audit.CredentialResource},
	authz.TrashCredential:    {audit.CredentialReencrypted, audit.CredentialResource},
	authz.RenewCredential:    {audit.CredentialReencrypted, audit.CredentialResource},
	authz.DeleteCredential:   {audit.CredentialDeleted, audit.CredentialResource},
	authz.EncryptData:        {audit.DataEncrypted, audit.DataResource},
	authz.DecryptData:        {audit.DataDecrypted, audit.DataResource},
	authz.RewrapData:         {audit.DataRewrapped, audit.DataResource},
	authz.SignData:           {audit.DataSigned, audit.DataResource},
	authz.VerifyData:         {audit.DataVerified, audit.DataResource},
	authz.ReadPublicKeys:     {audit.PublicKeyRead, audit.TenantResource},
	authz.CreateKey:          {audit.KeyCreated, audit.KeyResource},
	authz.ListKeys:           {audit.KeyListed, audit.KeyResource},
	authz.RotateKey:          {audit.KeyRotated, audit.KeyResource},
	authz.ReadAudit:          {audit.AuditRead, audit.LogResource},
	authz.ReadNames:          {audit.AuditRead, audit.LogResource},
	authz.ReadProof:          {audit.ProofRead, audit.LogResource},
	authz.ExportAudit:        {audit.AuditExported, audit.LogResource},
	authz.AcceptRollback:     {audit.RollbackAccepted, audit.ChainResource},
	authz.ReadScore:          {audit.ComplianceScored, audit.ComplianceResource},
	authz.ReadScoreHistory:   {audit.ComplianceHistoryRead, audit.ComplianceResource},
	authz.ReadReport:         {audit.ComplianceReported, audit.ComplianceResource},
	authz.ReadInventory:      {audit.InventoryRead, audit.ComplianceResource},
	authz.ReviewLog:          {audit.DenialsAcknowledged, audit.LogResource},
	authz.ReviewAccess:       {audit.AccessReviewed, audit.ComplianceResource},
	authz.ReviewInventory:    {audit.InventoryReviewed, audit.ComplianceResource},
	authz.EraseReviewNote:    {audit.ReviewNoteErased, audit.LogResource},
	authz.EraseNames:         {audit.NamesErased, audit.LogResource},
	authz.RecordNodeLog:      {audit.NodeLogRecorded, audit.NodeLogResource},
	authz.ListHistoryRules:   {audit.HistoryRuleListed, audit.TenantResource},
	authz.ChangeHistoryRule:  {audit.HistoryRuleChanged, audit.TenantResource},
	authz.ListWebhooks:       {audit.WebhookListed, audit.WebhookResource},
	authz.CreateWebhook:      {audit.WebhookCreated, audit.WebhookResource},
	authz.DeleteWebhook:      {audit.WebhookDeleted, audit.WebhookResource},
	authz.SendWebhook:        {audit.WebhookSent, audit.WebhookResource},
	authz.ReadSettings:       {audit.SettingsRead, audit.TenantResource},
	authz.ChangeSettings:     {audit.SettingsChanged, audit.TenantResource},
	authz.ListPolicies:       {audit.PolicyListed, audit.PolicyResource},
	authz.CreatePolicy:       {audit.PolicyCreated, audit.PolicyResource},
	authz.ChangePolicy:       {audit.PolicyChanged, audit.PolicyResource},
	authz.DeletePolicy:       {audit.PolicyDeleted, audit.PolicyResource},
	authz.BindPolicy:         {audit.PolicyBound, audit.PolicyResource},
	authz.UnbindPolicy:       {audit.PolicyUnbound, audit.PolicyResource},
	authz.ListGroups:         {audit.GroupListed, audit.GroupResource},
	authz.CreateGroup:        {audit.GroupCreated, audit.GroupResource},
	authz.ChangeGroup:        {audit.GroupChanged, audit.GroupResource},
	authz.DeleteGroup:        {audit.GroupDeleted, audit.GroupResource},
	authz.CheckAccess:        {audit.AccessChecked, audit.PolicyResource},
	authz.ListPermitted:      {audit.AccessChecked, audit.PolicyResource},
	authz.TryAccess:          {audit.AccessChecked, audit.PolicyResource},
	authz.CreateAPIKey:       {audit.APIKeyCreated, audit.APIKeyResource},
	authz.ListAPIKeys:        {audit.APIKeyListed, audit.APIKeyResource},
	authz.ApproveAPIKey:      {audit.APIKeyApproved, audit.APIKeyResource},
	authz.RevokeAPIKey:       {audit.APIKeyRevoked, audit.APIKeyResource},
	authz.InviteMember:       {audit.MemberInvited, audit.InvitationResource},
	authz.ListMembers:        {audit.MemberListed, audit.UserResource},
	authz.ChangeMember:       {audit.MemberChanged, audit.UserResource},
	authz.RemoveMember:       {audit.MemberRemoved, audit.UserResource},
	authz.RevokeInvitation:   {audit.InvitationRevoked, audit.InvitationResource},
	authz.ReadAccount:        {audit.AccountRead, audit.UserResource},
	authz.ReadOverview:       {audit.AccountRead, audit.UserResource},
	authz.ListSessions:       {audit.SessionListed, audit.SessionResource},
	authz.EndSession:         {audit.SessionEnded, audit.SessionResource},
	authz.SignOut:            {audit.UserSignedOut, audit.SessionResource},
	authz.ChangePassword:     {audit.PasswordChanged, audit.UserResource},
	authz.ResendVerification: {audit.VerificationRequested, audit.UserResource},
	authz.ListTenants:        {audit.TenantListed, audit.TenantResource},
	authz.CreateTenant:       {audit.TenantCreated, audit.TenantResource},
	authz.ActivateTenant:     {audit.TenantActivated, audit.TenantResource},
	authz.LimitTenant:        {audit.TenantLimited, audit.TenantResource},
	authz.CreateTenantAPIKey: {audit.APIKeyCreated, audit.APIKeyResource},

	authz.ListSealedCredentials: {audit.CredentialListed, audit.ManifestResource},
}
