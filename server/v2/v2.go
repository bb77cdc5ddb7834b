// Package v2 is version 2 of the REST interface, as defined in api/openapi/v2.yaml. Each endpoint
// decodes the request, calls one service and encodes the answer. Routes and types are generated
// from the contract. Package gate checks a request before an endpoint sees it.
package v2

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/latticekeep/latticekeep/api/openapi"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/custody"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/dryrun"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/names"
	"github.com/latticekeep/latticekeep/internal/nodelog/receiver"
	"github.com/latticekeep/latticekeep/internal/overview"
	"github.com/latticekeep/latticekeep/internal/sealingkey"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/webhooks"
	"github.com/latticekeep/latticekeep/server/gate"
	"github.com/latticekeep/latticekeep/server/v2/accessapi"
	"github.com/latticekeep/latticekeep/server/v2/credentials"
	"github.com/latticekeep/latticekeep/server/v2/webhookapi"
)

// Services are the services that the endpoints call. All except Reports and Cluster are required.
type Services struct {
	Vault      *vault.Vault
	Transit    *transit.Transit
	Webhooks   *webhooks.Service
	Identity   *identity.Service
	Audit      *writer.Log
	Reader     *reader.Reader
	Names      *names.Names
	NodeLogs   *receiver.Service
	DryRun     *dryrun.DryRun
	Guard      *guard.Guard
	Compliance *assessor.Service
	Reports    Reports // nil if the storage serves the reports itself
	Keys       *keyring.Ring
	Sealing    *sealingkey.Service
	Custody    *custody.Service
	Cluster    Cluster // the operator's view; nil without an operator
}

// Config configures the endpoints.
type Config struct {
	Services
	Backups Backups
	Program string // program version, which backups state
	Now     func() time.Time

	// Diagnosis says how some parts of the deployment are, without any all of them.
	Diagnosis func(context.Context, ...diagnosis.Part) diagnosis.Report

	SecureCookies bool // cookies require encrypted connections
}

// endpoints implements all endpoints, with one type for each resource.
type endpoints struct {
	*credentials.API
	*webhookapi.Endpoints
	*cryptoAPI
	*accountAPI
	*accessapi.Access
	*auditAPI
	*backupAPI
	*overviewAPI
	*complianceAPI
	*clusterAPI
	*sealingAPI
	*kmsAPI
}

var _ ServerInterface = (*endpoints)(nil)

func newEndpoints(c Config) *endpoints {
	return &endpoints{
		credentials.New(c.Vault, c.Guard),
		webhookapi.New(c.Webhooks),
		&cryptoAPI{c.Transit},
		&accountAPI{identity: c.Identity, now: c.Now, secureCookies: c.SecureCookies},
		accessapi.New(c.Identity, c.DryRun),
		&auditAPI{audit: c.Audit, reader: c.Reader, names: c.Names, nodeLogs: c.NodeLogs, guard: c.Guard, tails: gate.NewPlaces(tailsOfCaller, tailsOfTenant, tailsOfAll), now: c.Now},
		&backupAPI{Backups: c.Backups, audit: c.Audit, guard: c.Guard, keys: c.Keys, program: c.Program, now: c.Now},
		&overviewAPI{overview.New(overview.Services{
			Guard: c.Guard, Vault: c.Vault, Transit: c.Transit, Identity: c.Identity, Reader: c.Reader, Compliance: c.Compliance, Diagnosis: c.Diagnosis, Now: c.Now,
		})},
		&complianceAPI{compliance: c.Compliance, reports: c.Reports, guard: c.Guard, computing: fair.NewSemaphore[authz.TenantID](0, 1)},
		&clusterAPI{cluster: c.Cluster, guard: c.Guard, keys: c.Keys},
		&sealingAPI{sealing: c.Sealing, keys: c.Keys},
		&kmsAPI{custody: c.Custody, now: c.Now},
	}
}

// Operations returns the action, the admission and the options of every operation in the contract.
func Operations() map[string]gate.Operation {
	public := gate.Operation{Auth: gate.Public}
	return map[string]gate.Operation{
		"sealCredential":         {Action: authz.SealCredential},
		"listCredentials":        {Action: authz.ListCredentials},
		"getVaultSummary":        {Action: authz.ListCredentials},
		"getCredentialMetadata":  {Action: authz.ListCredentials},
		"unsealCredential":       {Action: authz.UnsealCredential},
		"unsealCredentialByName": {Action: authz.UnsealCredential, Object: "name"},
		"replaceCredential":      {Action: authz.ReplaceCredential},
		"patchCredential":        {Action: authz.ReplaceCredential},
		"putCredentialByName":    {Action: authz.SealCredential},
		"rotateCredential":       {Action: authz.RotateCredential},
		"renameCredential":       {Action: authz.RenameCredential},
		"describeCredential":     {Action: authz.DescribeCredential},
		"undoCredential":         {Action: authz.ReplaceCredential},
		"trashCredential":        {Action: authz.TrashCredential},
		"renewCredential":        {Action: authz.RenewCredential},
		"deleteCredential":       {Action: authz.DeleteCredential},
		"listCredentialVersions": {Action: authz.ListVersions},
		"listHistoryRules":       {Action: authz.ListHistoryRules},
		"putHistoryRule":         {Action: authz.ChangeHistoryRule},
		"deleteHistoryRule":      {Action: authz.ChangeHistoryRule},

		"encryptData":    {Action: authz.EncryptData},
		"encryptBatch":   {Action: authz.EncryptData},
		"decryptData":    {Action: authz.DecryptData},
		"decryptBatch":   {Action: authz.DecryptData},
		"signData":       {Action: authz.SignData},
		"signBatch":      {Action: authz.SignData},
		"verifyData":     {Action: authz.VerifyData},
		"verifyBatch":    {Action: authz.VerifyData},
		"listPublicKeys": {Action: authz.ReadPublicKeys},

		"listKeys":  {Action: authz.ListKeys},
		"createKey": {Action: authz.CreateKey},
		"getKey":    {Action: authz.ListKeys},
		"rotateKey": {Action: authz.RotateKey},

		"registerUser":         {Auth: gate.Public, Registers: true},
		"login":                public,
		"refreshSession":       public, // authenticated by its own cookie
		"verifyEmail":          public,
		"requestPasswordReset": public,
		"resetPassword":        public,
		"acceptInvitation":     public,
		"logout":               {Action: authz.SignOut, Auth: gate.Optional}, // or authenticated by the refresh cookie
		"resendVerification":   {Action: authz.ResendVerification},
		"changePassword":       {Action: authz.ChangePassword},
		"getAccount":           {Action: authz.ReadAccount},
		"getOverview":          {Action: authz.ReadOverview, Patience: overviewTime},
		"listSessions":         {Action: authz.ListSessions},
		"endSession":           {Action: authz.EndSession},

		"listMembers":      {Action: authz.ListMembers},
		"inviteMember":     {Action: authz.InviteMember},
		"changeMember":     {Action: authz.ChangeMember},
		"removeMember":     {Action: authz.RemoveMember},
		"revokeInvitation": {Action: authz.RevokeInvitation},

		"getSettings":    {Action: authz.ReadSettings},
		"changeSettings": {Action: authz.ChangeSettings},

		"listPolicies":   {Action: authz.ListPolicies},
		"createPolicy":   {Action: authz.CreatePolicy},
		"getPolicy":      {Action: authz.ListPolicies},
		"changePolicy":   {Action: authz.ChangePolicy},
		"deletePolicy":   {Action: authz.DeletePolicy},
		"bindPolicies":   {Action: authz.BindPolicy},
		"unbindPolicies": {Action: authz.UnbindPolicy},
		"checkAccess":    {Action: authz.CheckAccess},

		"listPermitted":   {Action: authz.ListPermitted},
		"tryAccessChange": {Action: authz.TryAccess, Patience: accessapi.DryRunTime},

		"listGroups":        {Action: authz.ListGroups},
		"createGroup":       {Action: authz.CreateGroup},
		"getGroup":          {Action: authz.ListGroups},
		"renameGroup":       {Action: authz.ChangeGroup},
		"deleteGroup":       {Action: authz.DeleteGroup},
		"addGroupMember":    {Action: authz.ChangeGroup},
		"removeGroupMember": {Action: authz.ChangeGroup},

		"listWebhooks":   {Action: authz.ListWebhooks},
		"createWebhook":  {Action: authz.CreateWebhook},
		"deleteWebhook":  {Action: authz.DeleteWebhook},
		"testWebhook":    {Action: authz.SendWebhook},
		"listDeliveries": {Action: authz.ListWebhooks},
		"resendDelivery": {Action: authz.SendWebhook},

		"createAPIKey":  {Action: authz.CreateAPIKey},
		"listAPIKeys":   {Action: authz.ListAPIKeys},
		"approveAPIKey": {Action: authz.ApproveAPIKey},
		"revokeAPIKey":  {Action: authz.RevokeAPIKey},

		"listTenants":        {Action: authz.ListTenants},
		"createTenant":       {Action: authz.CreateTenant},
		"activateTenant":     {Action: authz.ActivateTenant},
		"setTenantLimits":    {Action: authz.LimitTenant},
		"createTenantAPIKey": {Action: authz.CreateTenantAPIKey},

		"queryAuditLog":     {Action: authz.ReadAudit},
		"findNames":         {Action: authz.ReadNames},
		"eraseNames":        {Action: authz.EraseNames},
		"recordNodeLog":     {Action: authz.RecordNodeLog},
		"getReviews":        {Action: authz.ReadAudit, Patience: scoreTime},
		"createReview":      {Action: authz.ReviewLog, Patience: scoreTime},
		"getReviewNote":     {Action: authz.ReadAudit},
		"eraseReviewNote":   {Action: authz.EraseReviewNote},
		"getAuditEntry":     {Action: authz.ReadAudit},
		"tailAuditLog":      {Action: authz.ReadAudit},
		"getCheckpoint":     {Action: authz.ReadProof},
		"proveInclusion":    {Action: authz.ReadProof},
		"proveConsistency":  {Action: authz.ReadProof},
		"getAuditPublicKey": {Action: authz.ReadProof},
		"getTile":           {Action: authz.ReadProof},
		"exportAuditLog":    {Action: authz.ExportAudit},
		"acceptRollback":    {Action: authz.AcceptRollback, Recovers: true},
		"takeBackup":        {Action: authz.BackUp},

		"getComplianceScore":   {Action: authz.ReadScore, Patience: scoreTime},
		"getComplianceScores":  {Action: authz.ReadScore, Patience: scoreTime},
		"getComplianceHistory": {Action: authz.ReadScoreHistory, Patience: scoreTime},
		"getComplianceReport":  {Action: authz.ReadReport, Patience: reportTime},
		"getInventory":         {Action: authz.ReadInventory},
		"downloadReport":       {Auth: gate.Public, Signed: true, Patience: reportTime},

		"listSealedCredentials": {Action: authz.ListSealedCredentials},

		"getSealingKey":     public,
		"resealManifest":    {Action: authz.ResealManifest, Reviews: true},
		"checkManifest":     {Action: authz.CheckManifest, Reviews: true},
		"listSealingKeys":   {Action: authz.ListSealingKeys},
		"rotateSealingKey":  {Action: authz.RotateSealingKey},
		"retireSealingKey":  {Action: authz.RetireSealingKey},
		"restoreSealingKey": {Action: authz.RestoreSealingKey},

		"listKMSKeys":   {Action: authz.ListKMSKeys},
		"rewrapKeys":    {Action: authz.RewrapKeys, Patience: rewrapTime},
		"destroyKMSKey": {Action: authz.DestroyKMSKey, Patience: destroyTime},

		"getDiagnosis": {Action: authz.ReadMetrics, Recovers: true}, // its handler is the server's, too
		"getMetrics":   {Action: authz.ReadMetrics, Recovers: true}, // its handler is the server's
	}
}

var contract = gate.ReadContract(openapi.V2())

// Register adds the endpoints to r, behind g. It returns the version, because the rest of the
// server uses its envelopes too.
func Register(r gin.IRouter, g *gate.Gate, config Config) (*gate.Version, error) {
	v, err := g.Version(gate.Definition{
		Name: "v2", Contract: contract, Scheme: gate.KeyOrUser, Operations: Operations(),
		Envelope: envelope, Schema: http.StatusUnprocessableEntity,
	})
	if err != nil {
		return nil, err
	}
	RegisterHandlersWithOptions(r.Group("", v.Checks()), newEndpoints(config), GinServerOptions{ErrorHandler: v.Fail})
	return v, nil
}

// errorBody is the error envelope of version 2.
type errorBody struct {
	Success bool        `json:"success"`
	Error   errorDetail `json:"error"`
}

type errorDetail struct {
	Code      int    `json:"code"`
	Message   string `json:"message"`
	RequestID string `json:"request_id"`
	Timestamp string `json:"timestamp"`
}

func envelope(p gate.Problem) any {
	return errorBody{Error: errorDetail{Code: p.Code, Message: p.Details, RequestID: p.RequestID, Timestamp: p.Timestamp}}
}
