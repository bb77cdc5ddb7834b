package server_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// event is the documented type of every operation's entry.
var event = map[string]string{
	"v1 encryptData": "DATA_ENCRYPTED", "v1 decryptData": "DATA_DECRYPTED", "v1 rewrapData": "DATA_REWRAPPED",
	"v1 generateKey": "KEY_CREATED", "v1 listKeys": "KEY_LISTED", "v1 rotateKey": "KEY_ROTATED", "v1 queryAuditLogs": "AUDIT_READ",
	"v2 sealCredential": "CREDENTIAL_SEALED", "v2 listCredentials": "CREDENTIAL_LISTED", "v2 listCredentialVersions": "CREDENTIAL_LISTED",
	"v2 getVaultSummary": "CREDENTIAL_LISTED", "v2 getCredentialMetadata": "CREDENTIAL_LISTED",
	"v2 listKeys": "KEY_LISTED", "v2 createKey": "KEY_CREATED", "v2 getKey": "KEY_LISTED", "v2 rotateKey": "KEY_ROTATED",
	"v2 unsealCredential": "CREDENTIAL_UNSEALED", "v2 unsealCredentialByName": "CREDENTIAL_UNSEALED",
	"v2 replaceCredential": "CREDENTIAL_ROTATED", "v2 rotateCredential": "CREDENTIAL_REENCRYPTED", "v2 renameCredential": "CREDENTIAL_REENCRYPTED", "v2 describeCredential": "CREDENTIAL_DESCRIBED", "v2 trashCredential": "CREDENTIAL_REENCRYPTED", "v2 renewCredential": "CREDENTIAL_REENCRYPTED", "v2 patchCredential": "CREDENTIAL_ROTATED", "v2 undoCredential": "CREDENTIAL_ROTATED", "v2 putCredentialByName": "CREDENTIAL_SEALED", "v2 deleteCredential": "CREDENTIAL_DELETED",
	"v2 encryptData": "DATA_ENCRYPTED", "v2 encryptBatch": "DATA_ENCRYPTED", "v2 decryptData": "DATA_DECRYPTED", "v2 decryptBatch": "DATA_DECRYPTED",
	"v2 signData": "DATA_SIGNED", "v2 signBatch": "DATA_SIGNED", "v2 verifyData": "DATA_VERIFIED", "v2 verifyBatch": "DATA_VERIFIED",
	"v2 listPublicKeys": "PUBLIC_KEY_READ",
	"v2 registerUser":   "USER_REGISTERED", "v2 login": "USER_SIGNED_IN", "v2 refreshSession": "SESSION_REFRESHED", "v2 logout": "USER_SIGNED_OUT",
	"v2 verifyEmail": "EMAIL_VERIFIED", "v2 resendVerification": "VERIFICATION_REQUESTED", "v2 changePassword": "PASSWORD_CHANGED",
	"v2 requestPasswordReset": "PASSWORD_RESET_REQUESTED", "v2 resetPassword": "PASSWORD_RESET", "v2 acceptInvitation": "MEMBER_JOINED",
	"v2 getAccount": "ACCOUNT_READ", "v2 getOverview": "ACCOUNT_READ", "v2 listSessions": "SESSION_LISTED", "v2 endSession": "SESSION_ENDED",
	"v2 listMembers": "MEMBER_LISTED", "v2 inviteMember": "MEMBER_INVITED", "v2 changeMember": "MEMBER_CHANGED",
	"v2 removeMember": "MEMBER_REMOVED", "v2 revokeInvitation": "INVITATION_REVOKED",
	"v2 listHistoryRules": "HISTORY_RULE_LISTED", "v2 putHistoryRule": "HISTORY_RULE_CHANGED", "v2 deleteHistoryRule": "HISTORY_RULE_CHANGED",
	"v2 listWebhooks": "WEBHOOK_LISTED", "v2 createWebhook": "WEBHOOK_CREATED", "v2 deleteWebhook": "WEBHOOK_DELETED",
	"v2 testWebhook": "WEBHOOK_SENT", "v2 listDeliveries": "WEBHOOK_LISTED", "v2 resendDelivery": "WEBHOOK_SENT",
	"v2 getSettings": "SETTINGS_READ", "v2 changeSettings": "SETTINGS_CHANGED",
	"v2 listPolicies": "POLICY_LISTED", "v2 createPolicy": "POLICY_CREATED", "v2 getPolicy": "POLICY_LISTED", "v2 changePolicy": "POLICY_CHANGED",
	"v2 deletePolicy": "POLICY_DELETED", "v2 bindPolicies": "POLICY_BOUND", "v2 unbindPolicies": "POLICY_UNBOUND", "v2 checkAccess": "ACCESS_CHECKED", "v2 tryAccessChange": "ACCESS_CHECKED", "v2 listPermitted": "ACCESS_CHECKED",
	"v2 listGroups": "GROUP_LISTED", "v2 createGroup": "GROUP_CREATED", "v2 getGroup": "GROUP_LISTED", "v2 renameGroup": "GROUP_CHANGED",
	"v2 deleteGroup": "GROUP_DELETED", "v2 addGroupMember": "GROUP_CHANGED", "v2 removeGroupMember": "GROUP_CHANGED",
	"v2 createAPIKey": "API_KEY_CREATED", "v2 approveAPIKey": "API_KEY_APPROVED", "v2 listAPIKeys": "API_KEY_LISTED", "v2 revokeAPIKey": "API_KEY_REVOKED",
	"v2 listTenants": "TENANT_LISTED", "v2 createTenant": "TENANT_CREATED", "v2 activateTenant": "TENANT_ACTIVATED",
	"v2 setTenantLimits": "TENANT_LIMITED", "v2 createTenantAPIKey": "API_KEY_CREATED", "v2 queryAuditLog": "AUDIT_READ",
	"v2 getAuditEntry": "AUDIT_READ", "v2 tailAuditLog": "AUDIT_READ", "v2 listSealedCredentials": "CREDENTIAL_LISTED",
	"v2 listSealingKeys": "SEALING_KEY_LISTED", "v2 rotateSealingKey": "SEALING_KEY_CREATED", "v2 retireSealingKey": "SEALING_KEY_RETIRED",
	"v2 restoreSealingKey": "SEALING_KEY_RESTORED", "v2 resealManifest": "MANIFEST_RESEALED", "v2 checkManifest": "MANIFEST_CHECKED",
	"v2 takeBackup": "BACKUP_TAKEN", "v2 exportAuditLog": "AUDIT_EXPORTED", "v2 acceptRollback": "ROLLBACK_ACCEPTED",
	"v2 listKMSKeys": "KMS_KEY_LISTED", "v2 rewrapKeys": "KMS_REWRAPPED", "v2 destroyKMSKey": "KMS_KEY_DESTROYED",
	"v2 getCheckpoint": "PROOF_READ", "v2 proveInclusion": "PROOF_READ", "v2 proveConsistency": "PROOF_READ",
	"v2 getAuditPublicKey": "PROOF_READ", "v2 getTile": "PROOF_READ",
	"v2 getComplianceScore": "COMPLIANCE_SCORED", "v2 getComplianceScores": "COMPLIANCE_SCORED", "v2 getComplianceHistory": "COMPLIANCE_HISTORY_READ",
	"v2 getComplianceReport": "COMPLIANCE_REPORTED", "v2 getInventory": "INVENTORY_READ",
	"v2 findNames": "AUDIT_READ", "v2 eraseNames": "NAMES_ERASED", "v2 recordNodeLog": "NODE_LOG_RECORDED",
	"v2 getReviews": "AUDIT_READ", "v2 createReview": "DENIALS_ACKNOWLEDGED",
	"v2 getReviewNote": "AUDIT_READ", "v2 eraseReviewNote": "REVIEW_NOTE_ERASED",
}

// leaves sends a request and fails the test unless it is answered with the
// status and leaves the one entry, of that request.
func (w *world) leaves(o operation, what string, r servertest.Request, status int, outcome audit.Outcome, reason string) {
	w.T.Helper()
	next := w.NextSequence()
	got := w.Call(r)
	if got.Status != status {
		w.T.Errorf("%s, %s: %d, want %d: %s", o.name, what, got.Status, status, got.Body)
		return
	}
	entries := w.AllEntries(next)
	// A tenant's history says, once a day and when it changes, what scores are judged by.
	entries = slices.DeleteFunc(entries, func(e audit.Entry) bool { return e.EventType == audit.ComplianceAssessed })
	if o.name == "v2 acceptRollback" && outcome == audit.Success { // sequences jump
		next += 10
		entries = w.AllEntries(next)
	}
	if o.name == "v2 registerUser" && outcome == audit.Success { // it begins a tenant, whose history begins with that
		if len(entries) == 0 || entries[0].EventType != audit.TenantCreated || entries[0].RequestID != got.Header.Get("X-Request-ID") {
			w.T.Errorf("%s: the tenant's history does not begin: %v", o.name, servertest.Summaries(entries))
			return
		}
		entries = entries[1:]
	}
	if len(entries) != 1 {
		w.T.Errorf("%s, %s: %d entries: %v", o.name, what, len(entries), servertest.Summaries(entries))
		return
	}
	e := entries[0]
	if string(e.EventType) != event[o.name] || e.Outcome != outcome || e.Attributes[audit.AttributeReason] != reason {
		w.T.Errorf("%s, %s: %v, want %s %s %q", o.name, what, servertest.Summaries(entries), event[o.name], outcome, reason)
	}
	if e.RequestID != got.Header.Get("X-Request-ID") || e.SourceIP != "127.0.0.1" {
		w.T.Errorf("%s, %s: the entry is of request %s from %q", o.name, what, e.RequestID, e.SourceIP)
	}
	known := r.Key != "" || r.Bearer != "" || r.Header.Get("Cookie") != ""
	if known && (e.Actor.ID == "" || e.Actor.Type == string(authz.Stranger)) {
		w.T.Errorf("%s, %s: the actor is %v", o.name, what, e.Actor)
	}
}

func TestEverySuccessLeavesOneEntry(t *testing.T) {
	w := newWorld(t, "plain")
	w.envelope() // makes the default key
	for name, o := range operations(t) {
		r := w.authorized(o, examples[name](w, o))
		status := http.StatusOK
		if o.Responses.Value("201") != nil {
			status = http.StatusCreated
		}
		if event[name] == "" { // it is everybody's, or the report's that has its entry
			before := len(w.AllEntries(1))
			if got := w.Call(r); got.Status != status || len(w.AllEntries(1)) != before {
				t.Errorf("%s: %d, and what is public left %d entries", name, got.Status, len(w.AllEntries(1))-before)
			}
			continue
		}
		reason := ""
		if r.LogLost {
			reason = "the disk failed" // that the caller gives
		}
		w.leaves(o, "success", r, status, audit.Success, reason)
	}
}

func TestEveryRefusalOfAKnownCallerLeavesOneEntry(t *testing.T) {
	w := newWorld(t, "plain")
	huge := strings.Repeat("x", servertest.TooLarge)
	for name, o := range operations(t) {
		rule := strings.TrimSuffix(access[name], "!")
		if rule == "public" || rule == "refresh" {
			continue
		}
		may := w.authorized(o, servertest.Request{Method: o.method, Path: o.at("x")})
		as := func(r servertest.Request) servertest.Request {
			r.Method, r.Path, r.Key, r.Bearer = may.Method, may.Path+r.Path, may.Key, may.Bearer
			return r
		}
		if rule != "any" {
			weak := servertest.Request{Method: o.method, Path: o.at("x")}
			scope := "compliance:read"
			if rule == scope {
				scope = "keys:read"
			}
			apiKey(o, &weak, w.keys[scope])
			w.leaves(o, "no scope", weak, http.StatusForbidden, audit.Denied, "missing_scope")
		}
		const invalid = "invalid_request"
		schema := http.StatusUnprocessableEntity
		if o.v1() {
			schema = http.StatusBadRequest
		}
		w.leaves(o, "size", as(servertest.Request{Body: huge}), http.StatusRequestEntityTooLarge, audit.Failure, invalid)
		w.leaves(o, "content type", as(servertest.Request{Body: "{}", ContentType: "text/plain"}), http.StatusUnsupportedMediaType, audit.Failure, invalid)
		w.leaves(o, "malformed", as(servertest.Request{Body: "{"}), http.StatusBadRequest, audit.Failure, invalid)
		w.leaves(o, "query string", as(servertest.Request{Path: "?%zz"}), http.StatusBadRequest, audit.Failure, invalid)
		if o.RequestBody != nil {
			w.leaves(o, "schema", as(servertest.Request{Body: "[]"}), schema, audit.Failure, invalid)
			if o.RequestBody.Value.Required {
				w.leaves(o, "no body", as(servertest.Request{}), http.StatusBadRequest, audit.Failure, invalid)
			}
		}
		for _, p := range o.parameters {
			switch p.Value.In {
			case "query":
				w.leaves(o, "parameter "+p.Value.Name, as(servertest.Request{Path: "?" + p.Value.Name + "="}), http.StatusBadRequest, audit.Failure, invalid)
			case "header":
				w.leaves(o, "header "+p.Value.Name, as(servertest.Request{Header: http.Header{p.Value.Name: {""}}}), http.StatusBadRequest, audit.Failure, invalid)
			}
		}
		if o.method != http.MethodGet && !o.v1() && rule != "system:admin" {
			h := servertest.Cookies("accessToken", w.owner.Access)
			h.Set("Sec-Fetch-Site", "cross-site")
			w.leaves(o, "another origin", servertest.Request{Method: o.method, Path: o.at("x"), Header: h}, http.StatusForbidden, audit.Denied, "cross_origin")
		}
	}
}

// What the services refuse, each once.
func TestEveryRefusalOfAServiceLeavesOneEntry(t *testing.T) {
	w := newWorld(t, "plain")
	all := operations(t)
	const invalid = "invalid_request"
	noKey, noUser := authz.NewID("tkey"), authz.NewID("usr")
	owner := w.caller(w.owner).ID
	unverified := w.Login(w.newUser(), w.password())
	junk := object{"ciphertext_kem": "AAAA", "ciphertext_data": "AAAA", "nonce": "AAAA"}
	apiKey := object{"name": "n", "scopes": []string{"vault:read"}}
	admin := w.join(w.tenant, "admin@example.org", "admin")
	for _, c := range []struct {
		name, id string
		body     object
		query    string
		status   int
		outcome  audit.Outcome
		reason   string
		bearer   string
	}{
		{name: "v1 encryptData", body: object{"data": "x", "algorithm": "ML-KEM-768", "key_id": noKey}, status: 404, reason: "no_such_key"},
		{name: "v1 encryptData", body: object{"data": "x", "algorithm": "ML-KEM-768", "key_id": "x"}, status: 404, reason: "no_such_key"},
		{name: "v1 decryptData", body: object{"encrypted_data": "AAAA", "key_id": noKey}, status: 404, reason: "no_such_key"},
		{name: "v1 decryptData", body: object{"encrypted_data": "AAAA", "key_id": w.namedKey()}, status: 400, reason: "does_not_open"},
		{name: "v1 rewrapData", body: object{"encrypted_data": "AAAA", "key_id": noKey}, status: 404, reason: "no_such_key"},
		{name: "v1 rewrapData", body: object{"encrypted_data": "AAAA", "key_id": w.namedKey()}, status: 400, reason: "does_not_open"},
		{name: "v1 rotateKey", id: noKey, status: 404, reason: "no_such_key"},
		{name: "v1 rotateKey", id: "x", status: 404, reason: "no_such_key"},
		{name: "v1 generateKey", body: object{"algorithm": "ML-KEM-768", "name": "\x00"}, status: 400, reason: invalid},
		{name: "v1 queryAuditLogs", query: "?cursor=x", status: 400, reason: invalid},
		{name: "v2 queryAuditLog", query: "?cursor=x", status: 400, reason: invalid},
		{name: "v2 queryAuditLog", query: "?hours=1&from=2026-11-21T10:00:00Z", status: 400, reason: invalid},
		{name: "v2 getAuditEntry", id: "9007199254740991", status: 404, reason: "no_such_entry"},
		{name: "v2 getAuditEntry", id: "1", status: 404, reason: "no_such_entry"}, // of the deployment
		{name: "v2 getAuditEntry", id: "0", status: 404, reason: "no_such_entry"},
		{name: "v2 getAuditEntry", id: "-1", status: 404, reason: "no_such_entry"},
		{name: "v2 getAuditEntry", id: "1e2", status: 400, reason: invalid},
		{name: "v2 listSealedCredentials", query: "?cursor=x", status: 400, reason: invalid},
		{name: "v2 listCredentials", query: "?cursor=x", status: 400, reason: invalid},
		{name: "v2 listCredentials", query: "?q=a%ff", status: 400, reason: invalid},
		{name: "v2 listCredentials", query: "?q=" + strings.Repeat("%c3%bc", 256), status: 400, reason: invalid},
		{name: "v2 listCredentials", query: "?status=gone", status: 400, reason: invalid},
		{name: "v2 listCredentials", query: "?expires_before=tomorrow", status: 400, reason: invalid},
		{name: "v2 getVaultSummary", query: "?expiring_within_days=0", status: 400, reason: invalid},
		{name: "v2 getVaultSummary", query: "?expiring_within_days=3651", status: 400, reason: invalid},
		{name: "v2 getCredentialMetadata", id: "x", status: 403, reason: "no_such_credential"},
		{name: "v2 getCredentialMetadata", id: authz.NewID("cred"), status: 403, reason: "no_such_credential"},
		{name: "v2 listKeys", query: "?cursor=x", status: 400, reason: invalid},
		{name: "v2 createKey", body: object{"name": "\x00"}, status: 422, reason: invalid},
		{name: "v2 createKey", body: object{"name": "n", "rotation_period": 3651}, status: 422, reason: invalid},
		{name: "v2 getKey", id: noKey, status: 404, reason: "no_such_key"},
		{name: "v2 getKey", id: "x", status: 404, reason: "no_such_key"},
		{name: "v2 rotateKey", id: noKey, status: 404, reason: "no_such_key"},
		{name: "v2 listTenants", query: "?cursor=x", status: 400, reason: invalid},
		{name: "v2 sealCredential", body: object{"name": "a/../b", "credential_type": "t", "values": object{"k": "v"}}, status: 422, reason: invalid},
		{name: "v2 sealCredential", body: object{"name": "\x00", "credential_type": "t", "values": object{"k": "v"}}, status: 422, reason: invalid},
		{name: "v2 unsealCredential", id: "x", status: 403, reason: "no_such_credential"},
		{name: "v2 unsealCredential", id: authz.NewID("cred"), status: 403, reason: "no_such_credential"},
		{name: "v2 unsealCredential", id: w.credential(), query: "?version=2", status: 403, reason: "no_such_credential"},
		{name: "v2 unsealCredential", id: "x", query: "?version=1", status: 403, reason: "no_such_credential"},
		{name: "v2 unsealCredentialByName", id: "x", status: 403, reason: "no_such_credential"},
		{name: "v2 listCredentialVersions", id: "x", status: 403, reason: "no_such_credential"},
		{name: "v2 replaceCredential", id: "x", body: object{"values": object{"k": "v"}}, status: 403, reason: "no_such_credential"},
		{name: "v2 replaceCredential", id: w.credential(), body: object{"values": object{"/": "v"}}, status: 422, reason: invalid},
		{name: "v2 patchCredential", id: "x", body: object{"values": object{"k": "v"}}, status: 403, reason: "missing_scope"},
		{name: "v2 patchCredential", id: "x", body: object{"values": object{"k": "v"}}, status: 403, reason: "no_such_credential", bearer: w.owner.Access},
		{name: "v2 patchCredential", id: w.credential(), body: object{"values": object{"/": "v"}}, status: 422, reason: invalid, bearer: w.owner.Access},
		{name: "v2 patchCredential", id: w.credential(), body: object{"values": object{w.word: nil}}, status: 422, reason: invalid, bearer: w.owner.Access},
		{name: "v2 putCredentialByName", id: "a%2F%2Fb", body: object{"credential_type": "t", "values": object{"k": "v"}}, status: 422, reason: invalid, bearer: w.owner.Access},
		{name: "v2 rotateCredential", id: "x", status: 403, reason: "no_such_credential"},
		{name: "v2 renameCredential", id: "x", body: object{"name": "x"}, status: 403, reason: "missing_scope"},
		{name: "v2 renameCredential", id: "x", body: object{"name": "x"}, status: 403, reason: "no_such_credential", bearer: w.owner.Access},
		{name: "v2 renameCredential", id: w.credential(), body: object{"name": "a//b"}, status: 422, reason: invalid},
		{name: "v2 describeCredential", id: "x", body: object{"tags": []string{"t"}}, status: 403, reason: "no_such_credential"},
		{name: "v2 describeCredential", id: w.credential(), body: object{"tags": []string{"a b"}}, status: 422, reason: invalid},
		{name: "v2 trashCredential", id: "x", status: 403, reason: "no_such_credential"},
		{name: "v2 renewCredential", id: "x", body: object{}, status: 403, reason: "missing_scope"},
		{name: "v2 renewCredential", id: "x", body: object{}, status: 403, reason: "no_such_credential", bearer: w.owner.Access},
		{name: "v2 renewCredential", id: w.credential(), body: object{"ttl_days": 3651}, status: 422, reason: invalid, bearer: w.owner.Access},
		{name: "v2 undoCredential", id: "x", body: object{"version": 1}, status: 403, reason: "missing_scope"},
		{name: "v2 undoCredential", id: "x", body: object{"version": 1}, status: 403, reason: "no_such_credential", bearer: w.owner.Access},
		{name: "v2 undoCredential", id: w.credential(), body: object{"version": 7}, status: 422, reason: invalid, bearer: w.owner.Access},
		{name: "v2 putHistoryRule", body: object{"path": "a//b", "versions_kept": 1}, status: 422, reason: invalid},
		{name: "v2 changeSettings", body: object{"never_expires_paths": []string{"a//b"}}, status: 422, reason: invalid},
		{name: "v2 sealCredential", body: object{"name": "x", "credential_type": "t", "values": object{"k": "v"}, "never_expires": true}, status: 422, reason: invalid},
		{name: "v2 sealCredential", body: object{"name": "x", "credential_type": "t", "values": object{"k": "v"}, "never_expires": true, "ttl_days": 1}, status: 422, reason: invalid},
		{name: "v2 deleteCredential", id: "x", status: 403, reason: "no_such_credential"},
		{name: "v2 decryptData", body: junk, status: 400, reason: "does_not_open"},
		{name: "v2 changePassword", body: object{"current_password": "x", "new_password": servertest.Password}, status: 403, reason: "wrong_password"},
		{name: "v2 changePassword", body: object{"current_password": "x", "new_password": strings.Repeat("é", 1000)}, status: 422, reason: invalid},
		{name: "v2 endSession", id: authz.NewID("ses"), status: 404, reason: "no_such_session"},
		{name: "v2 endSession", id: "x", status: 404, reason: "no_such_session"},
		{name: "v2 inviteMember", body: object{"email": "owner@example.org", "role": "member"}, status: 409, reason: "email_taken"},
		{name: "v2 inviteMember", body: object{"email": "new@example.org", "role": "owner"}, bearer: admin.Access, status: 403, reason: "role_beyond_own"},
		{name: "v2 inviteMember", body: object{"email": "not one", "role": "member"}, status: 422, reason: invalid},
		{name: "v2 inviteMember", body: object{"email": "new@example.org", "role": "member"}, bearer: unverified.Access,
			status: 403, reason: "email_not_verified"},
		{name: "v2 changeMember", id: noUser, body: object{"role": "member"}, status: 404, reason: "no_such_member"},
		{name: "v2 changeMember", id: "x", body: object{"role": "member"}, status: 404, reason: "no_such_member"},
		{name: "v2 changeMember", id: owner, body: object{"role": "member"}, bearer: w.owner.Access, status: 409, reason: "last_owner"},
		{name: "v2 changeMember", id: owner, body: object{"role": "member"}, bearer: admin.Access, status: 403, reason: "role_beyond_own"},
		{name: "v2 removeMember", id: noUser, status: 404, reason: "no_such_member"},
		{name: "v2 removeMember", id: owner, bearer: w.owner.Access, status: 409, reason: "last_owner"},
		{name: "v2 revokeInvitation", id: authz.NewID("inv"), status: 404, reason: "no_such_invitation"},
		{name: "v2 createWebhook", body: object{"url": "http://example.org"}, status: 422, reason: invalid},
		{name: "v2 deleteWebhook", id: "x", status: 404, reason: "no_such_webhook"},
		{name: "v2 testWebhook", id: authz.NewID("hook"), status: 404, reason: "no_such_webhook"},
		{name: "v2 listDeliveries", id: authz.NewID("hook"), status: 404, reason: "no_such_webhook"},
		{name: "v2 resendDelivery", id: "x", status: 404, reason: "no_such_webhook"},
		{name: "v2 resendDelivery", id: w.webhook(), status: 404, reason: "no_such_delivery"},
		{name: "v2 createPolicy", body: object{"name": "n", "rules": []object{{"path": "a//b", "verbs": []string{"read"}}}}, status: 422, reason: invalid},
		{name: "v2 getPolicy", id: authz.NewID("pol"), status: 404, reason: "no_such_policy"},
		{name: "v2 getPolicy", id: "x", status: 404, reason: "no_such_policy"},
		{name: "v2 changePolicy", id: "x", body: object{"name": "n", "rules": []object{}}, status: 404, reason: "no_such_policy"},
		{name: "v2 deletePolicy", id: "x", status: 404, reason: "no_such_policy"},
		{name: "v2 deletePolicy", id: w.boundPolicy(), status: 409, reason: "policy_bound"},
		{name: "v2 bindPolicies", id: "x", body: object{"policies": []string{}}, status: 404, reason: "no_such_subject"},
		{name: "v2 bindPolicies", id: owner, body: object{"policies": []string{}}, status: 409, reason: "owner"},
		{name: "v2 bindPolicies", id: w.member(), body: object{"policies": []string{"x"}}, status: 404, reason: "no_such_policy"},
		{name: "v2 unbindPolicies", id: noUser, status: 404, reason: "no_such_subject"},
		{name: "v2 unbindPolicies", id: owner, status: 404, reason: "no_such_binding"},
		{name: "v2 createGroup", body: object{"name": "a\nb"}, status: 422, reason: invalid},
		{name: "v2 getGroup", id: authz.NewID("grp"), status: 404, reason: "no_such_group"},
		{name: "v2 getGroup", id: "x", status: 404, reason: "no_such_group"},
		{name: "v2 renameGroup", id: "x", body: object{"name": "n"}, status: 404, reason: "no_such_group"},
		{name: "v2 deleteGroup", id: "x", status: 404, reason: "no_such_group"},
		{name: "v2 addGroupMember", id: "x/members/" + owner, status: 404, reason: "no_such_group"},
		{name: "v2 addGroupMember", id: w.groupPath("x"), status: 404, reason: "no_such_subject"},
		{name: "v2 addGroupMember", id: w.groupPath(authz.NewID("key")), status: 404, reason: "no_such_subject"},
		{name: "v2 removeGroupMember", id: w.groupPath(owner), status: 404, reason: "no_such_member"},
		{name: "v2 checkAccess", body: object{"path": "a", "verb": "read", "subject": "x"}, status: 403, reason: "missing_scope"},
		{name: "v2 checkAccess", body: object{"path": "a", "verb": "read", "subject": "x"}, bearer: w.owner.Access, status: 404, reason: "no_such_subject"},
		{name: "v2 tryAccessChange", body: object{"change": "unbind_policies", "subject": "x"}, bearer: w.owner.Access, status: 404, reason: "no_such_subject"},
		{name: "v2 createAPIKey", body: apiKey, status: 403, reason: "scopes_beyond_own"},
		{name: "v2 createAPIKey", body: object{"name": "\x00", "scopes": []string{"account:admin"}}, status: 422, reason: invalid},
		{name: "v2 revokeAPIKey", id: authz.NewID("key"), status: 404, reason: "no_such_api_key"},
		{name: "v2 revokeAPIKey", id: "x", status: 404, reason: "no_such_api_key"},
		{name: "v2 approveAPIKey", id: "x", status: 404, reason: "no_such_api_key", bearer: w.owner.Access},
		{name: "v2 approveAPIKey", id: authz.NewID("key"), status: 404, reason: "no_such_api_key", bearer: admin.Access},
		{name: "v2 eraseNames", id: "cred_x", status: 404, reason: "no_such_name"},
		{name: "v2 getReviewNote", id: "x", status: 404, reason: "no_such_note"},
		{name: "v2 eraseReviewNote", id: strings.Repeat("0", 64), status: 404, reason: "no_such_note"},
		{name: "v2 createTenant", body: object{"name": "\x00"}, status: 422, reason: invalid},
		{name: "v2 activateTenant", id: authz.NewID("ten"), status: 404, reason: "no_such_tenant"},
		{name: "v2 activateTenant", id: "system", status: 404, reason: "no_such_tenant"},
		{name: "v2 setTenantLimits", id: authz.NewID("ten"), body: object{}, status: 404, reason: "no_such_tenant"},
		{name: "v2 createTenantAPIKey", id: authz.NewID("ten"), body: apiKey, status: 404, reason: "no_such_tenant"},
		{name: "v2 createTenantAPIKey", id: "system", body: apiKey, status: 404, reason: "no_such_tenant"},
		{name: "v2 createTenantAPIKey", id: w.newTenant(), body: object{"name": "n", "scopes": []string{"system:admin"}},
			status: 403, reason: "scopes_beyond_own"},
		{name: "v2 retireSealingKey", id: "x", status: 404, reason: "no_such_sealing_key"},
		{name: "v2 retireSealingKey", id: strings.Repeat("0", 64), status: 404, reason: "no_such_sealing_key"},
		{name: "v2 retireSealingKey", id: w.neededSealingKey(), status: 409, reason: "key_needed"},
		{name: "v2 retireSealingKey", id: w.sealingKey(), status: 409, reason: "current_key"},
		{name: "v2 restoreSealingKey", id: "x", status: 404, reason: "no_such_sealing_key"},
		{name: "v2 restoreSealingKey", id: strings.Repeat("0", 64), status: 404, reason: "no_such_sealing_key"},
		{name: "v2 rewrapKeys", body: object{"wrapped_before": "2030-01-01T00:00:00Z"}, status: 422, reason: invalid},
		{name: "v2 destroyKMSKey", body: object{"key_id": "local:none"}, status: 404, reason: "no_such_kms_key"},
		{name: "v2 destroyKMSKey", body: object{"key_id": w.kmsKey()}, status: 409, reason: "current_key"},
		{name: "v2 takeBackup", body: object{"recipient": "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"}, status: 422, reason: invalid},
		{name: "v2 takeBackup", body: object{}, status: 422, reason: invalid},
		{name: "v2 acceptRollback", body: object{"reason": "the disk failed"}, status: 409, reason: "nothing_lost"},
		{name: "v2 acceptRollback", body: object{"reason": "größer"}, status: 422, reason: invalid},
		{name: "v2 proveInclusion", query: "?sequence=9007199254740991", status: 404, reason: "no_such_entry"},
		{name: "v2 proveInclusion", query: "?sequence=1", status: 404, reason: "no_such_entry"}, // of the deployment
		{name: "v2 proveInclusion", query: "?sequence=1&tree_size=9007199254740991", status: 400, reason: invalid},
		{name: "v2 proveConsistency", query: "?from=9007199254740991", status: 400, reason: invalid},
		{name: "v2 proveConsistency", query: "?from=2&to=1", status: 400, reason: invalid},
		{name: "v2 getTile", id: "8", status: 400, reason: invalid},
		{name: "v2 getTile", id: "7", query: "?width=1", status: 404, reason: "no_such_tile"},
		{name: "v2 exportAuditLog", query: "?from=9007199254740991", status: 400, reason: invalid},
		{name: "v2 getComplianceScore", query: "?framework=soc2&head=9007199254740991", status: 404, reason: "no_such_head"},
		{name: "v2 getComplianceScore", query: "?framework=soc3", status: 400, reason: invalid},
		{name: "v2 getComplianceScore", status: 400, reason: invalid},
		{name: "v2 getComplianceHistory", query: "?framework=SOC2", status: 400, reason: invalid},
		{name: "v2 getComplianceReport", query: "?framework=soc2&head=1", status: 404, reason: "no_such_head"}, // of the deployment
		{name: "v2 getComplianceReport", query: "?framework=soc2&format=doc", status: 400, reason: invalid},
		{name: "v2 getComplianceReport", query: "?framework=soc2&format=ksi", status: 400, reason: invalid},
		{name: "v2 resealManifest", body: w.moved(), status: 400, reason: "does_not_open"},
		{name: "v2 resealManifest", body: w.manifestWith("suite", "RSA"), status: 422, reason: invalid},
	} {
		o := all[c.name]
		if event[o.name] == string(audit.ProofRead) { // is recorded once a minute
			w.Clock.Advance(time.Minute)
			w.FollowLog()
		}
		r := w.send(o, c.id, c.body)
		r.Path += c.query
		r.Bearer = c.bearer
		outcome := audit.Denied
		if c.reason == invalid || c.reason == "does_not_open" {
			outcome = audit.Failure
		}
		w.leaves(o, fmt.Sprint(c.id, c.body, c.query), w.authorized(o, r), c.status, outcome, c.reason)
	}

	// A change whose condition does not hold is refused to a reader with a status of its own.
	for _, name := range []string{"v2 replaceCredential", "v2 patchCredential", "v2 rotateCredential", "v2 renameCredential", "v2 undoCredential", "v2 trashCredential", "v2 renewCredential", "v2 deleteCredential"} {
		o := all[name]
		r := examples[name](w, o)
		r.Header = http.Header{"If-Match": {`"x"`}}
		r.Bearer = w.owner.Access
		w.leaves(o, "condition", r, http.StatusPreconditionFailed, audit.Denied, "condition_failed")
	}

	put := w.authorized(all["v2 putCredentialByName"], examples["v2 putCredentialByName"](w, all["v2 putCredentialByName"]))
	w.Call(put)
	put.Header = http.Header{"If-None-Match": {"*"}}
	w.leaves(all["v2 putCredentialByName"], "taken", put, http.StatusPreconditionFailed, audit.Denied, "condition_failed")

	// A seal that is sent again is answered from memory, and says so; with
	// another body it is a mistake.
	o := all["v2 sealCredential"]
	r := w.authorized(o, examples[o.name](w, o))
	w.leaves(o, "first", r, http.StatusCreated, audit.Success, "")
	next := w.NextSequence()
	w.Call(r).Want(t, http.StatusCreated)
	e := w.AllEntries(next)
	if len(e) != 1 || e[0].EventType != audit.CredentialListed || !maps.Equal(e[0].Attributes, map[string]string{"replay": "true"}) {
		t.Errorf("sent again: %v", servertest.Summaries(e))
	}
	r.Body = strings.Replace(r.Body, "30", "31", 1)
	w.leaves(o, "another body", r, http.StatusUnprocessableEntity, audit.Failure, invalid)
}

// A batch is one entry, which counts; wrong signatures are an answer.
func TestABatchIsOneEntryThatCounts(t *testing.T) {
	w := newWorld(t, "plain")
	all := operations(t)
	junk := object{"ciphertext_kem": "AAAA", "ciphertext_data": "AAAA", "nonce": "AAAA"}
	forged := w.signed()
	forged["data"] = "other"
	for name, body := range map[string]object{
		"v2 encryptBatch": {"items": []any{object{"data": "a"}, object{"data": "b"}, object{"data": "c"}}},
		"v2 decryptBatch": {"items": []any{w.envelope(), junk, junk}},
		"v2 signBatch":    {"items": []any{object{"data": "a"}, object{"data": "b"}, object{"data": "c"}}},
		"v2 verifyBatch":  {"items": []any{w.signed(), forged, w.signed()}},
	} {
		next := w.NextSequence()
		w.Call(w.authorized(all[name], w.send(all[name], "", body))).Want(t, http.StatusOK)
		e := w.AllEntries(next)
		if len(e) != 1 || string(e[0].EventType) != event[name] || e[0].Attributes["count"] != "3" {
			t.Errorf("%s: %v", name, servertest.Summaries(e))
		}
		failed := map[string]string{"v2 decryptBatch": "2", "v2 verifyBatch": "1"}[name]
		if len(e) == 1 && failed != "" && e[0].Attributes["failed"] != failed {
			t.Errorf("%s: %v", name, servertest.Summaries(e))
		}
	}
}

// Strangers do not fill the log, whatever they try.
func TestStrangersLeaveOneEntryOfASortAMinute(t *testing.T) {
	w := newWorld(t, "plain")
	all := operations(t)
	bad := map[string]object{
		"v2 registerUser":         {"email": "owner@example.org", "password": servertest.Password, "tenant_name": "n"},
		"v2 login":                {"email": "nobody@example.org", "password": "x"},
		"v2 verifyEmail":          {"token": "x"},
		"v2 requestPasswordReset": {"email": "nobody@example.org"},
		"v2 resetPassword":        {"token": "x", "new_password": servertest.Password},
		"v2 acceptInvitation":     {"token": "x", "password": servertest.Password},
	}
	for minute := range 2 {
		w.Clock.Advance(time.Minute)
		next := w.NextSequence()
		for _, o := range all {
			body := bad[o.name]
			for range 2 {
				w.Call(w.send(o, "x", body))
				w.Call(servertest.Request{Method: o.method, Path: o.at("x"), Body: "{"})
				w.Call(servertest.Request{Method: o.method, Path: o.at("x"), Header: servertest.Cookies("accessToken", "x", "refreshToken", "x")})
			}
		}
		var left []string // one of each sort
		e := w.AllEntries(next)
		for _, e := range e {
			left = append(left, string(e.EventType+" ")+string(e.Outcome))
		}
		slices.Sort(left)
		if !slices.Equal(left, []string{
			"ACCESS_REFUSED denied", "PASSWORD_RESET_REQUESTED denied", "SESSION_REFRESHED denied",
			"USER_REGISTERED denied", "USER_SIGNED_IN denied", "USER_SIGNED_OUT denied",
		}) {
			t.Errorf("minute %d: %v", minute, servertest.Summaries(e))
		}
	}
	// Each of them alone leaves one of its own kind, and a token that is none
	// leaves nothing.
	for name, want := range map[string]string{
		"v2 registerUser": "USER_REGISTERED", "v2 login": "USER_SIGNED_IN", "v2 requestPasswordReset": "PASSWORD_RESET_REQUESTED",
		"v2 verifyEmail": "", "v2 resetPassword": "", "v2 acceptInvitation": "",
		"v2 refreshSession": "SESSION_REFRESHED", "v2 logout": "USER_SIGNED_OUT", "v2 listCredentials": "ACCESS_REFUSED",
	} {
		w.Clock.Advance(time.Minute)
		next := w.NextSequence()
		r := w.send(all[name], "", bad[name])
		r.Header = servertest.Cookies("refreshToken", "x")
		w.Call(r)
		e := w.AllEntries(next)
		one := len(e) == 1 && string(e[0].EventType) == want && e[0].Actor.Type == string(authz.Stranger)
		if want == "" && len(e) > 0 || want != "" && !one {
			t.Errorf("%s: %v, want %q", name, servertest.Summaries(e), want)
		}
	}
}

// A proof that is read again and again is one entry a minute.
func TestReadsOfProofsLeaveOneEntryAMinute(t *testing.T) {
	s := newService(t)
	s.FollowLog()
	before := s.NextSequence()
	for range 5 {
		s.Get("/api/v2/audit/checkpoint").Want(t, http.StatusOK)
	}
	if left := s.AllEntries(before); len(left) != 1 || left[0].EventType != audit.ProofRead || left[0].TenantID != string(s.Tenant) {
		t.Errorf("%v", servertest.Summaries(left))
	}
	s.Clock.Advance(time.Minute)
	s.Get("/api/v2/audit/checkpoint").Want(t, http.StatusOK)
	if left := s.AllEntries(before); len(left) != 2 {
		t.Errorf("%v", servertest.Summaries(left))
	}
}
