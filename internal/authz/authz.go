// Package authz defines principals and what they may do. It is pure: it uses no store, no clock and
// no transport.
//
// A principal may do what its scopes permit ([Principal.Denies]), and in the vault only on the paths
// that its policies allow ([Principal.Reaches]). A policy never adds a scope.
package authz

import (
	"crypto/rand"
	"encoding/base32"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// TenantID identifies a tenant: "ten_" and 128 random bits in base32.
type TenantID string

// SystemTenant owns what belongs to the deployment as a whole. It is not a well-formed tenant id,
// so no other tenant can have it.
const SystemTenant TenantID = "system"

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

const (
	idSize   = 16
	idLength = 26 // 128 bits in base32
)

// NewID returns prefix, "_" and 128 random bits in lower-case base32.
func NewID(prefix string) string {
	var b [idSize]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand aborts the program instead
	return IDFromBytes(prefix, b)
}

// IDFromBytes returns the id with these bits.
func IDFromBytes(prefix string, b [idSize]byte) string {
	return prefix + "_" + encoding.EncodeToString(b[:])
}

// IDBytes is the inverse of [IDFromBytes]. ok is the result of [ValidID].
func IDBytes(prefix, s string) (b [idSize]byte, ok bool) {
	body, ok := strings.CutPrefix(s, prefix+"_")
	if !ok || len(body) != idLength {
		return b, false
	}
	// 26 characters carry 130 bits. The two spare ones must be zero, so an id has one spelling.
	raw, err := encoding.DecodeString(body)
	if err != nil || len(raw) != idSize || encoding.EncodeToString(raw) != body {
		return b, false
	}
	return [idSize]byte(raw), true
}

// ValidID reports whether s has the form of [NewID]. Only well-formed ids are looked up or
// recorded.
func ValidID(prefix, s string) bool {
	_, ok := IDBytes(prefix, s)
	return ok
}

// Scope is a permission that an API key or a session carries.
type Scope string

// The scopes.
const (
	VaultRead      Scope = "vault:read"
	VaultWrite     Scope = "vault:write"
	CryptoEncrypt  Scope = "crypto:encrypt"
	CryptoDecrypt  Scope = "crypto:decrypt"
	CryptoSign     Scope = "crypto:sign"
	CryptoVerify   Scope = "crypto:verify"
	KeysRead       Scope = "keys:read"
	KeysWrite      Scope = "keys:write"
	AuditRead      Scope = "audit:read"
	AuditNames     Scope = "audit:names" // reads what the ids in the log are called
	AuditWrite     Scope = "audit:write" // adds what the logs of nodes hold
	ComplianceRead Scope = "compliance:read"
	AccountAdmin   Scope = "account:admin"
	SystemAdmin    Scope = "system:admin" // administers the deployment
	MetricsRead    Scope = "metrics:read" // reads the metrics and the diagnosis of the deployment, and nothing else
)

// TenantScopes returns every scope that a tenant's principal can hold.
func TenantScopes() []Scope {
	return []Scope{
		VaultRead, VaultWrite, CryptoEncrypt, CryptoDecrypt, CryptoSign, CryptoVerify,
		KeysRead, KeysWrite, AuditRead, AuditNames, AuditWrite, ComplianceRead, AccountAdmin,
	}
}

// SystemScopes returns the scopes that only keys of the system's tenant can carry.
func SystemScopes() []Scope { return []Scope{SystemAdmin, MetricsRead} }

// Scopes returns every scope.
func Scopes() []Scope { return append(TenantScopes(), SystemScopes()...) }

// Kind is the kind of a principal.
type Kind string

// The kinds of principal.
const (
	APIKey   Kind = "api_key"
	User     Kind = "user"     // a person with a session
	Operator Kind = "operator" // the reconciler, in the tenant of an object's namespace
	System   Kind = "system"   // the deployment itself
	// ServiceAccount is a pod of the cluster, in the tenant of its namespace.
	ServiceAccount Kind = "service_account"
	Stranger       Kind = "stranger" // an unknown caller; has no id
)

// Namespace is a namespace of a cluster. The cluster is identified by its UID.
type Namespace struct{ Cluster, Name string }

// Principal is who acts, and from where. It is an explicit argument right after the context, never
// inside it.
type Principal struct {
	Tenant   TenantID
	Kind     Kind
	ID       string // pseudonymous: a key id, a user id, an object's UID; never a name or an address
	Scopes   []Scope
	Access   Access // which paths the scopes of the vault are good for
	ReadOnly bool   // the tenant's trial has ended: only reading, deleting and revoking are allowed

	Namespace Namespace // namespace of a service account; zero for all others

	Pod       string // UID of the pod that a service account's token was made for; empty for all others
	RequestID string // identifies the request or reconcile in log, header and audit entry
	SourceIP  string // peer of the connection; empty inside the process
	Device    string // program and system of whoever signs in, in a few words; empty for all others
}

// Source returns what stands for the host of an address wherever callers are bounded by address. For
// an IPv6 address it is the /64 network, because one host commonly has such a network to itself. An
// IPv4 address is the same one when it is mapped to IPv6. Any other text is returned unchanged.
func Source(address string) string {
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return address
	}
	ip = ip.Unmap().WithZone("")
	if ip.Is4() {
		return ip.String()
	}
	network, _ := ip.Prefix(64) // no error: a prefix of 64 bits is valid for IPv6
	return network.String()
}

// Role is the role of a user in its tenant.
type Role string

// The roles. Each stands for scopes. An owner is an admin whom only owners can make, change and
// remove. A limited user always has a policy, and none that allows anything until one is bound.
const (
	Owner   Role = "owner"
	Admin   Role = "admin"
	Member  Role = "member"
	Limited Role = "limited"
	Auditor Role = "auditor"
)

// Roles returns all roles, strongest first.
func Roles() []Role { return []Role{Owner, Admin, Member, Limited, Auditor} }

// Scopes returns what a user of the role may do. An unknown role has no scopes.
func (r Role) Scopes() []Scope {
	switch r {
	case Owner, Admin:
		return TenantScopes()
	case Member:
		return []Scope{VaultRead, VaultWrite, CryptoEncrypt, CryptoDecrypt, CryptoSign, CryptoVerify, KeysRead}
	case Limited:
		return []Scope{VaultRead, VaultWrite}
	case Auditor:
		return []Scope{CryptoVerify, KeysRead, AuditRead, AuditNames, ComplianceRead}
	}
	return nil
}

// Action is something that a principal does to a resource.
type Action string

// The actions. [rules] says what each one requires.
const (
	SealCredential     Action = "seal"
	ListCredentials    Action = "list"
	ListVersions       Action = "list_versions"
	UnsealCredential   Action = "unseal"
	ReplaceCredential  Action = "replace"
	RotateCredential   Action = "rotate"
	RenameCredential   Action = "rename"
	DescribeCredential Action = "describe"
	TrashCredential    Action = "trash"
	RenewCredential    Action = "renew"
	DeleteCredential   Action = "delete"
	EncryptData        Action = "encrypt"
	DecryptData        Action = "decrypt"
	RewrapData         Action = "rewrap"
	SignData           Action = "sign"
	VerifyData         Action = "verify"
	ReadPublicKeys     Action = "read_public_keys"
	CreateKey          Action = "create_key"
	ListKeys           Action = "list_keys"
	RotateKey          Action = "rotate_key"
	ReadAudit          Action = "read_audit"
	ReadNames          Action = "read_names"
	EraseNames         Action = "erase_names" // past ones, of one thing
	RecordNodeLog      Action = "record_node_log"
	ReadProof          Action = "read_proof" // checkpoint, proofs, tiles and the audit key
	ExportAudit        Action = "export_audit"
	AcceptRollback     Action = "accept_rollback"
	ReadScore          Action = "read_score"
	ReadScoreHistory   Action = "read_score_history"
	ReadReport         Action = "read_report"
	ReadInventory      Action = "read_inventory"
	ReviewLog          Action = "review_log" // denials and failures
	ReviewAccess       Action = "review_access"
	ReviewInventory    Action = "review_inventory"
	EraseReviewNote    Action = "erase_review_note"
	ListHistoryRules   Action = "list_history_rules"
	ChangeHistoryRule  Action = "change_history_rule"
	ListWebhooks       Action = "list_webhooks"
	CreateWebhook      Action = "create_webhook"
	DeleteWebhook      Action = "delete_webhook"
	SendWebhook        Action = "send_webhook" // a test event, or a dead letter again
	ReadSettings       Action = "read_settings"
	ChangeSettings     Action = "change_settings"
	ListPolicies       Action = "list_policies"
	CreatePolicy       Action = "create_policy"
	ChangePolicy       Action = "change_policy"
	DeletePolicy       Action = "delete_policy"
	BindPolicy         Action = "bind_policy"
	UnbindPolicy       Action = "unbind_policy"
	ListGroups         Action = "list_groups"
	CreateGroup        Action = "create_group"
	ChangeGroup        Action = "change_group" // its name and its members
	DeleteGroup        Action = "delete_group"
	CheckAccess        Action = "check_access"
	ListPermitted      Action = "list_permitted" // the subjects that a path is open to
	TryAccess          Action = "try_access"     // a dry run of a change of policies, bindings or groups
	CreateAPIKey       Action = "create_api_key"
	ListAPIKeys        Action = "list_api_keys"
	ApproveAPIKey      Action = "approve_api_key" // only an owner, which internal/identity checks
	RevokeAPIKey       Action = "revoke_api_key"
	InviteMember       Action = "invite_member"
	ListMembers        Action = "list_members"
	ChangeMember       Action = "change_member"
	RemoveMember       Action = "remove_member"
	RevokeInvitation   Action = "revoke_invitation"
	ReadAccount        Action = "read_account"
	ReadOverview       Action = "read_overview" // each part of it has its own
	ListSessions       Action = "list_sessions"
	EndSession         Action = "end_session"
	SignOut            Action = "sign_out"
	ChangePassword     Action = "change_password"
	ResendVerification Action = "resend_verification"
	ListTenants        Action = "list_tenants"
	CreateTenant       Action = "create_tenant"
	ActivateTenant     Action = "activate_tenant"
	LimitTenant        Action = "limit_tenant"
	CreateTenantAPIKey Action = "create_tenant_api_key"
	ListSealingKeys    Action = "list_sealing_keys"
	RotateSealingKey   Action = "rotate_sealing_key"
	RetireSealingKey   Action = "retire_sealing_key"
	RestoreSealingKey  Action = "restore_sealing_key"
	BackUp             Action = "back_up"
	ListKMSKeys        Action = "list_kms_keys"
	RewrapKeys         Action = "rewrap_keys"
	DestroyKMSKey      Action = "destroy_kms_key"
	ResealManifest     Action = "reseal"
	CheckManifest      Action = "check"
	ReadMetrics        Action = "read_metrics"

	ListSealedCredentials Action = "list_sealed_credentials" // objects in the cluster
)

// rule says what an action requires.
type rule struct {
	scope   Scope // empty: none, any principal with a tenant
	user    bool  // only a user with a session, no program
	trialed bool  // allowed when the tenant's trial has ended
}

var rules = map[Action]rule{
	SealCredential:     {scope: VaultWrite},
	ListCredentials:    {scope: VaultRead, trialed: true},
	ListVersions:       {scope: VaultRead, trialed: true},
	UnsealCredential:   {scope: VaultRead, trialed: true},
	ReplaceCredential:  {scope: VaultWrite},
	RotateCredential:   {scope: VaultWrite},
	RenameCredential:   {scope: VaultWrite},
	DescribeCredential: {scope: VaultWrite},
	TrashCredential:    {scope: VaultWrite, trialed: true},
	RenewCredential:    {scope: VaultWrite},
	DeleteCredential:   {scope: VaultWrite, trialed: true},
	EncryptData:        {scope: CryptoEncrypt},
	DecryptData:        {scope: CryptoDecrypt, trialed: true},
	RewrapData:         {scope: CryptoEncrypt},
	SignData:           {scope: CryptoSign},
	VerifyData:         {scope: CryptoVerify, trialed: true},
	ReadPublicKeys:     {scope: CryptoVerify, trialed: true},
	CreateKey:          {scope: KeysWrite},
	ListKeys:           {scope: KeysRead, trialed: true},
	RotateKey:          {scope: KeysWrite},
	ReadAudit:          {scope: AuditRead, trialed: true},
	ReadNames:          {scope: AuditNames, trialed: true},
	EraseNames:         {scope: AccountAdmin, trialed: true},
	RecordNodeLog:      {scope: AuditWrite},
	ReadProof:          {scope: AuditRead, trialed: true},
	ExportAudit:        {scope: SystemAdmin},
	AcceptRollback:     {scope: SystemAdmin},
	ListKMSKeys:        {scope: SystemAdmin},
	RewrapKeys:         {scope: SystemAdmin},
	DestroyKMSKey:      {scope: SystemAdmin},
	ReadScore:          {scope: ComplianceRead, trialed: true},
	ReadScoreHistory:   {scope: ComplianceRead, trialed: true},
	ReadReport:         {scope: ComplianceRead, trialed: true},
	ReadInventory:      {scope: ComplianceRead, trialed: true},
	ReviewLog:          {scope: AuditRead, user: true, trialed: true},
	ReviewAccess:       {scope: AccountAdmin, user: true, trialed: true},
	ReviewInventory:    {scope: ComplianceRead, user: true, trialed: true},
	EraseReviewNote:    {scope: AccountAdmin, trialed: true},
	ListHistoryRules:   {scope: AccountAdmin, trialed: true},
	ChangeHistoryRule:  {scope: AccountAdmin},
	ListWebhooks:       {scope: AccountAdmin, trialed: true},
	CreateWebhook:      {scope: AccountAdmin},
	DeleteWebhook:      {scope: AccountAdmin, trialed: true},
	SendWebhook:        {scope: AccountAdmin},
	ReadSettings:       {scope: AccountAdmin, trialed: true},
	ChangeSettings:     {scope: AccountAdmin},
	ListPolicies:       {scope: AccountAdmin, trialed: true},
	CreatePolicy:       {scope: AccountAdmin},
	ChangePolicy:       {scope: AccountAdmin},
	DeletePolicy:       {scope: AccountAdmin, trialed: true},
	BindPolicy:         {scope: AccountAdmin},
	UnbindPolicy:       {scope: AccountAdmin},
	ListGroups:         {scope: AccountAdmin, trialed: true},
	CreateGroup:        {scope: AccountAdmin},
	ChangeGroup:        {scope: AccountAdmin},
	DeleteGroup:        {scope: AccountAdmin, trialed: true},
	CheckAccess:        {trialed: true},
	ListPermitted:      {scope: AccountAdmin, trialed: true},
	TryAccess:          {scope: AccountAdmin, trialed: true},
	CreateAPIKey:       {scope: AccountAdmin},
	ListAPIKeys:        {scope: AccountAdmin, trialed: true},
	ApproveAPIKey:      {scope: AccountAdmin, user: true},
	RevokeAPIKey:       {scope: AccountAdmin, trialed: true},
	InviteMember:       {scope: AccountAdmin},
	ListMembers:        {scope: AccountAdmin, trialed: true},
	ChangeMember:       {scope: AccountAdmin},
	RemoveMember:       {scope: AccountAdmin, trialed: true},
	RevokeInvitation:   {scope: AccountAdmin, trialed: true},
	ReadAccount:        {trialed: true},
	ReadOverview:       {trialed: true},
	ListSessions:       {user: true, trialed: true},
	EndSession:         {user: true, trialed: true},
	SignOut:            {user: true, trialed: true},
	ChangePassword:     {user: true, trialed: true},
	ResendVerification: {user: true, trialed: true},
	ListTenants:        {scope: SystemAdmin},
	CreateTenant:       {scope: SystemAdmin},
	ActivateTenant:     {scope: SystemAdmin},
	LimitTenant:        {scope: SystemAdmin},
	CreateTenantAPIKey: {scope: SystemAdmin},
	ListSealingKeys:    {scope: SystemAdmin},
	RotateSealingKey:   {scope: SystemAdmin},
	RetireSealingKey:   {scope: SystemAdmin},
	RestoreSealingKey:  {scope: SystemAdmin},
	BackUp:             {scope: SystemAdmin},
	ResealManifest:     {scope: VaultWrite},
	CheckManifest:      {scope: VaultWrite},
	ReadMetrics:        {scope: MetricsRead},

	ListSealedCredentials: {scope: VaultRead, trialed: true},
}

// verbs maps each action on a path to the verb that allows it.
var verbs = map[Action]Verb{
	ListCredentials:       ListPath,
	ListVersions:          ListPath,
	ListSealedCredentials: ListPath,
	UnsealCredential:      ReadPath,
	SealCredential:        WritePath,
	ReplaceCredential:     WritePath,
	RotateCredential:      WritePath,
	RenameCredential:      WritePath,
	DescribeCredential:    WritePath,
	ResealManifest:        WritePath,
	CheckManifest:         WritePath,
	RenewCredential:       WritePath,
	TrashCredential:       DeletePath,
	DeleteCredential:      DeletePath,
}

// Denial is the reason for refusing an action. It is empty if the action is allowed.
type Denial string

// The denials, as audit entries name them.
const (
	MissingScope Denial = "missing_scope"
	TrialEnded   Denial = "trial_ended"
	// OutsidePolicy is the reason for refusing an action on a path. [Principal.Reaches] decides it.
	OutsidePolicy Denial = "outside_policy"
)

// Denies returns why the principal may not do a, and "" if it may. An unknown action is refused.
func (p Principal) Denies(a Action) Denial {
	r, ok := rules[a]
	switch {
	case !ok, p.Tenant == "", r.scope != "" && !slices.Contains(p.Scopes, r.scope), r.user && p.Kind != User:
		return MissingScope
	case p.ReadOnly && !r.trialed:
		return TrialEnded
	}
	return ""
}

// Reaches reports whether the policies of the principal allow the action on the path of that name.
// It says nothing about the principal's scopes: [Principal.Denies] does, and both must agree. An
// action that is none on a path reaches no path of a limited principal.
func (p Principal) Reaches(a Action, name string) bool {
	if !p.Access.IsLimited() {
		return true
	}
	v, ok := verbs[a]
	return ok && p.Access.Allows(v, name)
}

// May reports whether the principal may do a.
func (p Principal) May(a Action) bool { return p.Denies(a) == "" }

// Holds reports whether the principal has all of the scopes. A principal may grant only what it
// holds itself. Whoever administers the deployment may also grant metrics:read, which system keys of
// earlier releases do not carry.
func (p Principal) Holds(scopes []Scope) bool {
	return !slices.ContainsFunc(scopes, func(s Scope) bool {
		return !slices.Contains(p.Scopes, s) && (s != MetricsRead || !slices.Contains(p.Scopes, SystemAdmin))
	})
}

// Required returns the scope that the action requires, empty for none, and whether only a user may
// do it.
func Required(a Action) (scope Scope, user bool) { return rules[a].scope, rules[a].user }

// Actions returns every action.
func Actions() []Action { return slices.Sorted(maps.Keys(rules)) }

// SystemPrincipal returns the deployment as the principal of what it does by itself in a tenant.
func SystemPrincipal(tenant TenantID) Principal {
	return Principal{Tenant: tenant, Kind: System, ID: "latticekeep", Scopes: TenantScopes()}
}
