package server_test

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/nodelog"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/settings"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
	"github.com/latticekeep/latticekeep/internal/vault/kept"
	"github.com/latticekeep/latticekeep/internal/webhooks"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// world is a service with a tenant on trial in which an example of every
// operation can be carried out. All text in the examples is made of one word.
type world struct {
	*service
	word   string
	tenant authz.TenantID
	owner  servertest.Account
	keys   map[string]string // API keys by their one scope
	hooks  []string          // webhooks that examples made, oldest first
	spare  []string          // addresses of users that nothing was done with
	n      int
}

func newWorld(t *testing.T, word string) *world {
	t.Helper()
	w := &world{service: newService(t), word: word, keys: make(map[string]string)}
	w.owner = w.Register("owner@example.org")
	w.tenant = w.TenantOf(w.owner)
	w.verify("owner@example.org")
	for _, scope := range strings.Fields(servertest.EveryScope) {
		w.keys[scope] = w.GrantKeyIn(w.tenant, authz.Scope(scope))
	}
	w.keys["system:admin"] = w.GrantKeyIn(authz.SystemTenant, authz.SystemAdmin)
	w.keys["metrics:read"] = w.GrantKeyIn(authz.SystemTenant, authz.MetricsRead)
	return w
}

func (w *world) verify(email string) {
	w.T.Helper()
	body := servertest.Marshal(w.T, map[string]string{"token": w.TokenMailedTo(email, 1)})
	w.Call(servertest.Request{Method: "POST", Path: "/api/v2/auth/verify-email", Body: body}).Want(w.T, http.StatusOK)
}

// authorized adds the credential of the least principal that may, unless the
// request has its own.
func (w *world) authorized(o operation, r servertest.Request) servertest.Request {
	rule := strings.TrimSuffix(access[o.name], "!")
	switch {
	case rule == "public" || rule == "refresh" || r.Key != "" || r.Bearer != "":
	case strings.HasPrefix(rule, "user"), o.name == "v2 inviteMember", o.name == "v2 changeMember": // nobody grants a role beyond their own
		r.Bearer = w.owner.Access
	case rule == "any":
		r.Key = w.keys["compliance:read"]
	default:
		apiKey(o, &r, w.keys[rule])
	}
	return r
}

func (w *world) system() authz.Principal {
	return authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "test", Scopes: []authz.Scope{authz.SystemAdmin}}
}

// caller returns the user of an account as the services know it.
func (w *world) caller(a servertest.Account) identity.Caller {
	w.T.Helper()
	c, err := w.Identity.AuthenticateToken(context.Background(), a.Access)
	if err != nil {
		w.T.Fatal(err)
	}
	return c
}

// examples is a request for every operation that succeeds for whoever may,
// and carries the word of the world wherever text is free.
var examples = map[string]func(*world, operation) servertest.Request{
	"v1 encryptData": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"data": w.word, "algorithm": "ML-KEM-768", "key_id": w.namedKey()})
	},
	"v1 decryptData": (*world).exampleCiphertext,
	"v1 rewrapData":  (*world).exampleCiphertext,
	"v1 generateKey": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"algorithm": "ML-KEM-768", "name": w.word, "rotation_period": 30})
	},
	"v1 listKeys": example("?page=1&limit=10", nil),
	"v1 rotateKey": func(w *world, o operation) servertest.Request {
		return w.send(o, w.namedKey(), object{"re_encrypt_data": true})
	},
	"v1 queryAuditLogs": example("?start_date=2026-11-21&limit=100", nil),

	"v2 sealCredential": func(w *world, o operation) servertest.Request {
		r := w.send(o, "", object{"name": w.word, "credential_type": w.word, "values": object{w.word: w.word}, "ttl_days": 30})
		r.Header = http.Header{"Idempotency-Key": {w.unique()}}
		return r
	},
	"v2 listCredentials":        example("?limit=100&q=a&status=active&credential_type=t&expires_before=2030-01-01T00:00:00Z", nil),
	"v2 getVaultSummary":        example("?expiring_within_days=30", nil),
	"v2 getCredentialMetadata":  (*world).exampleCredential,
	"v2 unsealCredential":       (*world).exampleCredential,
	"v2 unsealCredentialByName": func(w *world, o operation) servertest.Request { w.credential(); return w.send(o, w.word, nil) },
	"v2 listCredentialVersions": (*world).exampleCredential,
	"v2 replaceCredential": func(w *world, o operation) servertest.Request {
		return w.send(o, w.credential(), object{"values": object{w.word: w.word}, "ttl_days": 30})
	},
	"v2 patchCredential": func(w *world, o operation) servertest.Request {
		r := w.send(o, w.credential(), object{"values": object{w.word: w.word, "gone": nil}, "ttl_days": 30})
		r.Bearer = w.owner.Access
		return r
	},
	"v2 putCredentialByName": func(w *world, o operation) servertest.Request {
		r := w.send(o, "p"+w.unique(), object{"credential_type": w.word, "values": object{w.word: w.word}, "ttl_days": 30})
		r.Bearer = w.owner.Access
		return r
	},
	"v2 rotateCredential": (*world).exampleCredential,
	"v2 renameCredential": func(w *world, o operation) servertest.Request {
		r := w.send(o, w.credential(), object{"name": w.word + "/" + w.unique()})
		r.Bearer = w.owner.Access
		return r
	},
	"v2 describeCredential": func(w *world, o operation) servertest.Request {
		return w.send(o, w.credential(), object{"description": w.word, "contact": w.word, "tags": []string{w.word}})
	},
	"v2 undoCredential": func(w *world, o operation) servertest.Request {
		r := w.send(o, w.keptCredential(), object{"version": 1})
		r.Bearer = w.owner.Access
		return r
	},
	"v2 trashCredential": (*world).exampleCredential,
	"v2 renewCredential": func(w *world, o operation) servertest.Request {
		r := w.send(o, w.credential(), object{"ttl_days": 30})
		r.Bearer = w.owner.Access
		return r
	},
	"v2 deleteCredential": (*world).exampleCredential,
	"v2 listHistoryRules": func(w *world, o operation) servertest.Request { w.keptCredential(); return w.send(o, "", nil) },
	"v2 putHistoryRule":   example("", object{"path": "example/**", "versions_kept": 5}),
	"v2 getSettings":      func(w *world, o operation) servertest.Request { w.allowNeverExpires(); return w.send(o, "", nil) },
	"v2 changeSettings": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"never_expires_paths": []string{w.word + "/**"}})
	},
	"v2 deleteHistoryRule": func(w *world, o operation) servertest.Request {
		return example("?path="+w.word+"/**", nil)(w, o)
	},

	"v2 encryptData": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"data": w.word, "algorithm": "ML-KEM-768", "key_id": w.namedKey()})
	},
	"v2 encryptBatch": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"key_id": w.namedKey(), "items": []object{{"data": w.word}}})
	},
	"v2 decryptData":  func(w *world, o operation) servertest.Request { return w.send(o, "", w.envelope()) },
	"v2 decryptBatch": func(w *world, o operation) servertest.Request { return w.send(o, "", items(w.envelope())) },
	"v2 signData":     func(w *world, o operation) servertest.Request { return w.send(o, "", object{"data": w.word}) },
	"v2 signBatch":    func(w *world, o operation) servertest.Request { return w.send(o, "", items(object{"data": w.word})) },
	"v2 verifyData":   func(w *world, o operation) servertest.Request { return w.send(o, "", w.signed()) },
	"v2 verifyBatch":  func(w *world, o operation) servertest.Request { return w.send(o, "", items(w.signed())) },

	"v2 listKeys": example("?limit=10", nil),
	"v2 createKey": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"name": w.word, "rotation_period": 30})
	},
	"v2 getKey": func(w *world, o operation) servertest.Request { return w.send(o, w.namedKey(), nil) },
	"v2 rotateKey": func(w *world, o operation) servertest.Request {
		return w.send(o, w.namedKey(), object{"re_encrypt_data": true})
	},

	"v2 listPublicKeys": example("", nil),
	"v2 registerUser": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"email": w.address(), "password": w.password(), "tenant_name": w.word})
	},
	"v2 login": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"email": w.newUser(), "password": w.password()})
	},
	"v2 refreshSession": func(w *world, o operation) servertest.Request {
		r := w.send(o, "", nil)
		r.Header = servertest.Cookies("refreshToken", w.Login(w.newUser(), w.password()).Refresh)
		return r
	},
	"v2 logout": (*world).exampleOfUser,
	"v2 verifyEmail": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"token": w.TokenMailedTo(w.newUser(), 1)})
	},
	"v2 resendVerification": (*world).exampleOfUser,
	"v2 changePassword": func(w *world, o operation) servertest.Request {
		r := w.exampleOfUser(o)
		r.Body = servertest.Marshal(w.T, object{"current_password": w.password(), "new_password": w.password() + " 2"})
		return r
	},
	"v2 requestPasswordReset": func(w *world, o operation) servertest.Request { return w.send(o, "", object{"email": w.newUser()}) },
	"v2 resetPassword": func(w *world, o operation) servertest.Request {
		email := w.newUser()
		w.must(w.Identity.RequestPasswordReset(context.Background(), nobody, email))
		return w.send(o, "", object{"token": w.TokenMailedTo(email, 2), "new_password": w.password() + " 2"})
	},
	"v2 acceptInvitation": func(w *world, o operation) servertest.Request {
		email, _ := w.invitation()
		return w.send(o, "", object{"token": w.TokenMailedTo(email, 1), "password": w.password()})
	},
	"v2 getAccount":   example("", nil),
	"v2 getOverview":  example("", nil),
	"v2 listSessions": example("", nil),
	"v2 endSession": func(w *world, o operation) servertest.Request {
		return w.send(o, w.caller(w.Login(w.owner.Email, servertest.Password)).Session, nil)
	},

	"v2 listMembers": example("", nil),
	"v2 inviteMember": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"email": w.address(), "role": "auditor"})
	},
	"v2 changeMember": func(w *world, o operation) servertest.Request {
		return w.send(o, w.member(), object{"role": "auditor"})
	},
	"v2 removeMember": func(w *world, o operation) servertest.Request { return w.send(o, w.member(), nil) },
	"v2 revokeInvitation": func(w *world, o operation) servertest.Request {
		_, id := w.invitation()
		return w.send(o, id, nil)
	},
	"v2 listPolicies": example("", nil),
	"v2 createPolicy": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"name": w.policyName(), "rules": []object{{"path": w.word + "/**", "verbs": []string{"read"}}}})
	},
	"v2 listWebhooks": func(w *world, o operation) servertest.Request { w.webhook(); return w.send(o, "", nil) },
	"v2 createWebhook": func(w *world, o operation) servertest.Request {
		w.webhook()
		return w.send(o, "", object{"url": "https://hooks.example.com/" + w.word, "description": w.word})
	},
	"v2 deleteWebhook":  func(w *world, o operation) servertest.Request { return w.send(o, w.webhook(), nil) },
	"v2 testWebhook":    func(w *world, o operation) servertest.Request { return w.send(o, w.webhook(), nil) },
	"v2 listDeliveries": func(w *world, o operation) servertest.Request { return w.send(o, w.webhook(), nil) },
	"v2 resendDelivery": func(w *world, o operation) servertest.Request {
		id, msg := w.deadDelivery()
		return servertest.Request{Method: o.method, Path: "/api/v2/webhooks/" + id + "/deliveries/" + msg + "/resend"}
	},
	"v2 getPolicy": func(w *world, o operation) servertest.Request { return w.send(o, w.policy(), nil) },
	"v2 changePolicy": func(w *world, o operation) servertest.Request {
		return w.send(o, w.policy(), object{"name": w.policyName(), "rules": []object{{"path": "*", "verbs": []string{"list", "write"}}}})
	},
	"v2 deletePolicy": func(w *world, o operation) servertest.Request { return w.send(o, w.policy(), nil) },
	"v2 bindPolicies": func(w *world, o operation) servertest.Request {
		return w.send(o, w.member(), object{"policies": []string{w.policy()}})
	},
	"v2 unbindPolicies": func(w *world, o operation) servertest.Request {
		member := w.member()
		_, err := w.Identity.Access.Bind(context.Background(), administrator(w.tenant), member, []string{w.policy()})
		w.must(err)
		return w.send(o, member, nil)
	},
	"v2 listGroups":  example("", nil),
	"v2 createGroup": func(w *world, o operation) servertest.Request { return w.send(o, "", object{"name": w.policyName()}) },
	"v2 getGroup":    func(w *world, o operation) servertest.Request { return w.send(o, w.group(), nil) },
	"v2 renameGroup": func(w *world, o operation) servertest.Request {
		return w.send(o, w.group(), object{"name": w.policyName()})
	},
	"v2 deleteGroup": func(w *world, o operation) servertest.Request { return w.send(o, w.group(), nil) },
	"v2 addGroupMember": func(w *world, o operation) servertest.Request {
		return w.send(o, w.groupPath(w.member()), nil)
	},
	"v2 removeGroupMember": func(w *world, o operation) servertest.Request {
		group, member := w.group(), w.member()
		_, err := w.Identity.Access.AddMember(context.Background(), administrator(w.tenant), group, member)
		w.must(err)
		return w.send(o, group+"/members/"+member, nil)
	},
	"v2 checkAccess":   example("", object{"path": "shop/prod/db", "verb": "read"}),
	"v2 listPermitted": example("", object{"path": "shop/prod/db", "verb": "read"}),
	"v2 tryAccessChange": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"change": "delete_group", "group_id": w.group()})
	},
	"v2 createAPIKey": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"name": w.word, "scopes": []string{"account:admin"}, "expires_in_days": 30})
	},
	"v2 listAPIKeys": example("", nil),
	"v2 revokeAPIKey": func(w *world, o operation) servertest.Request {
		k, _, err := w.Identity.CreateAPIKey(context.Background(), administrator(w.tenant),
			identity.APIKeyRequest{Name: w.word, Scopes: []authz.Scope{authz.VaultRead}})
		w.must(err)
		return w.send(o, k.ID, nil)
	},

	"v2 approveAPIKey": func(w *world, o operation) servertest.Request {
		if _, u, err := w.Identity.Account(context.Background(), w.caller(w.owner)); err != nil || !u.EmailVerified {
			w.verify(w.owner.Email)
		}
		k, _, err := w.Identity.CreateTenantAPIKey(context.Background(), w.system(), w.tenant,
			identity.APIKeyRequest{Name: w.word, Scopes: []authz.Scope{authz.VaultRead}})
		w.must(err)
		return w.send(o, k.ID, nil)
	},

	"v2 listTenants":    example("?limit=100", nil),
	"v2 createTenant":   func(w *world, o operation) servertest.Request { return w.send(o, "", object{"name": w.word}) },
	"v2 activateTenant": func(w *world, o operation) servertest.Request { return w.send(o, w.newTenant(), nil) },
	"v2 setTenantLimits": func(w *world, o operation) servertest.Request {
		return w.send(o, w.newTenant(), object{"v1": 10, "v2": nil})
	},
	"v2 createTenantAPIKey": func(w *world, o operation) servertest.Request {
		return w.send(o, w.newTenant(), object{"name": w.word, "scopes": []string{"vault:read"}, "expires_in_days": 30})
	},

	"v2 queryAuditLog": example("?event_type=AUDIT_READ&outcome=success&hours=24&limit=100", nil),
	"v2 getAuditEntry": func(w *world, o operation) servertest.Request {
		return w.send(o, fmt.Sprint(w.FirstEntryOf(w.tenant).Sequence), nil)
	},
	"v2 findNames": example("", object{"ids": []string{"cred_mfrggzdfmztwq2lknnwg23tpoa"}}),
	"v2 eraseNames": func(w *world, o operation) servertest.Request {
		group := w.group()
		w.must(w.Identity.Access.DeleteGroup(context.Background(), administrator(w.tenant), group))
		return w.send(o, group, nil)
	},
	"v2 recordNodeLog":         func(w *world, o operation) servertest.Request { return w.send(o, "", w.nodeLog()) },
	"v2 getReviews":            example("", nil),
	"v2 createReview":          example("", object{"subject": "denials", "from": 1, "to": 1, "note": "nothing to see"}),
	"v2 getReviewNote":         func(w *world, o operation) servertest.Request { return w.send(o, w.note(), nil) },
	"v2 eraseReviewNote":       func(w *world, o operation) servertest.Request { return w.send(o, w.note(), nil) },
	"v2 tailAuditLog":          example("?after=0&wait=0", nil),
	"v2 listSealedCredentials": example("?limit=100", nil),
	"v2 getSealingKey":         example("", nil),

	"v2 listSealingKeys":  example("", nil),
	"v2 rotateSealingKey": example("", nil),
	"v2 retireSealingKey": func(w *world, o operation) servertest.Request { return w.send(o, w.formerSealingKey(), nil) },
	"v2 restoreSealingKey": func(w *world, o operation) servertest.Request {
		id := w.formerSealingKey()
		_, err := w.Sealing.Retire(context.Background(), w.system(), id)
		w.must(err)
		return w.send(o, id, nil)
	},
	"v2 resealManifest": func(w *world, o operation) servertest.Request { return w.send(o, "", w.manifest()) },
	"v2 checkManifest":  func(w *world, o operation) servertest.Request { return w.send(o, "", w.manifest()) },

	"v2 takeBackup": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"recipient": servertest.BackupIdentity(w.T).Recipient().String()})
	},

	"v2 listKMSKeys": example("", nil),
	"v2 rewrapKeys":  example("", object{}),
	"v2 destroyKMSKey": func(w *world, o operation) servertest.Request {
		return w.send(o, "", object{"key_id": w.KMS[1].ID()})
	},

	"v2 getCheckpoint": exampleProof("", ""),
	"v2 proveInclusion": func(w *world, o operation) servertest.Request {
		return exampleProof("", fmt.Sprintf("?sequence=%d", w.FirstEntryOf(w.tenant).Sequence))(w, o)
	},
	"v2 proveConsistency":  exampleProof("", "?from=1"),
	"v2 getAuditPublicKey": exampleProof("", ""),
	"v2 getTile":           exampleProof("0", "?width=1"),
	"v2 exportAuditLog": func(w *world, o operation) servertest.Request {
		return example(fmt.Sprintf("?from=%d", w.NextSequence()-1), nil)(w, o) // the last entry and that of the export
	},
	"v2 acceptRollback": func(w *world, o operation) servertest.Request {
		r := w.send(o, "", object{"reason": "the disk failed"})
		r.LogLost = true
		return r
	},

	"v2 getComplianceScore":   example("?framework=soc2", nil),
	"v2 getComplianceScores":  example("", nil),
	"v2 getComplianceHistory": example("?framework=soc2", nil),
	"v2 getComplianceReport":  example("?framework=soc2&format=pdf", nil),
	"v2 getInventory":         example("", nil),
	"v2 downloadReport": func(w *world, o operation) servertest.Request {
		l, err := w.Config.Compliance.Report(context.Background(), administrator(w.tenant), compliance.SOC2, 0, compliance.OSCAL, compliance.About{})
		w.must(err)
		r := w.send(o, "", nil)
		r.Path = strings.TrimPrefix(l.URL, w.URL)
		return r
	},
}

type object = map[string]any

func items(one any) object { return object{"items": []any{one}} }

func example(query string, body object) func(*world, operation) servertest.Request {
	return func(w *world, o operation) servertest.Request {
		r := w.send(o, "", body)
		r.Path += query
		return r
	}
}

// exampleProof asks for what follows from a log that has a checkpoint, in another
// minute than the last: reads of proofs leave an entry in each.
func exampleProof(id, query string) func(*world, operation) servertest.Request {
	return func(w *world, o operation) servertest.Request {
		w.Clock.Advance(time.Minute)
		w.FollowLog()
		r := w.send(o, id, nil)
		r.Path += query
		return r
	}
}

// nobody is who asks before it is known who it is.
var nobody = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.Stranger}

func (w *world) must(err error) {
	w.T.Helper()
	if err != nil {
		w.T.Fatal(err)
	}
}

func (w *world) send(o operation, id string, body object) servertest.Request {
	r := servertest.Request{Method: o.method, Path: o.at(id)}
	if body != nil {
		r.Body = servertest.Marshal(w.T, body)
	}
	return r
}

func (w *world) exampleCredential(o operation) servertest.Request {
	return w.send(o, w.credential(), nil)
}

func (w *world) exampleCiphertext(o operation) servertest.Request {
	id := w.namedKey()
	sealed, err := w.Transit.Encrypt(context.Background(), administrator(w.tenant), id, []secret.Bytes{secret.Bytes(w.word)})
	w.must(err)
	b, err := sealed[0].MarshalBinary()
	w.must(err)
	return w.send(o, "", object{"encrypted_data": base64.StdEncoding.EncodeToString(b), "key_id": id})
}

// exampleOfUser asks as a user that nobody else is.
func (w *world) exampleOfUser(o operation) servertest.Request {
	r := w.send(o, "", nil)
	if len(w.spare) == 0 {
		w.spare = append(w.spare, w.newUser())
	}
	r.Bearer = w.Login(w.spare[0], w.password()).Access
	w.spare = w.spare[1:]
	return r
}

func (w *world) unique() string   { w.n++; return fmt.Sprintf("%s-%d", w.word, w.n) }
func (w *world) address() string  { return w.unique() + "@example.org" }
func (w *world) password() string { return w.word + " of twelve bytes" }

func (w *world) namedKey() string {
	k, err := w.Transit.CreateKey(context.Background(), administrator(w.tenant), w.word, 0)
	w.must(err)
	return k.ID
}

func (w *world) credential() string {
	c, err := w.Vault.Seal(context.Background(), administrator(w.tenant), vault.SealRequest{
		Name: w.word, Type: w.word, Values: map[string]secret.Bytes{w.word: secret.Bytes(w.word)},
	})
	w.must(err)
	return c.ID
}

// allowNeverExpires lets credentials of the word never expire.
func (w *world) allowNeverExpires() {
	_, err := w.Vault.Settings.Change(context.Background(), administrator(w.tenant), settings.Change{NeverExpires: &[]string{w.word + "/**"}})
	w.must(err)
}

// keptCredential returns the id of a credential whose first version is kept.
func (w *world) keptCredential() string {
	ctx, by := context.Background(), administrator(w.tenant)
	_, err := w.Vault.Rules.Set(ctx, by, kept.Rule{Path: w.word, Versions: 1})
	w.must(err)
	id := w.credential()
	_, err = w.Vault.Replace(ctx, by, id, vault.ReplaceRequest{Values: map[string]secret.Bytes{w.word: secret.Bytes("next")}})
	w.must(err)
	return id
}

func (w *world) envelope() object {
	sealed, err := w.Transit.Encrypt(context.Background(), administrator(w.tenant), "", []secret.Bytes{secret.Bytes(w.word)})
	w.must(err)
	return object{
		"ciphertext_kem":  base64.StdEncoding.EncodeToString(sealed[0].KEM),
		"ciphertext_data": base64.StdEncoding.EncodeToString(sealed[0].Data),
		"nonce":           base64.StdEncoding.EncodeToString(sealed[0].Nonce),
	}
}

func (w *world) signed() object {
	var signed []transit.Signatures
	signed, err := w.Transit.Sign(context.Background(), administrator(w.tenant), []secret.Bytes{secret.Bytes(w.word)})
	w.must(err)
	return object{
		"data":           w.word,
		"pqc_signature":  base64.StdEncoding.EncodeToString(signed[0].PQC),
		"hmac_signature": base64.StdEncoding.EncodeToString(signed[0].HMAC),
	}
}

// sealingKey returns the id of the current sealing key.
func (w *world) sealingKey() string {
	document, err := w.service.Keys.SealingDocument(context.Background())
	w.must(err)
	return document.Key().ID()
}

// formerSealingKey returns the id of a sealing key that is not the current one,
// and that nothing was sealed for.
func (w *world) formerSealingKey() string {
	former, err := w.Sealing.Rotate(context.Background(), w.system())
	w.must(err)
	_, err = w.Sealing.Rotate(context.Background(), w.system())
	w.must(err)
	return former.ID
}

// neededSealingKey returns the id of a sealing key that is not the current one
// and that an object has values for.
func (w *world) neededSealingKey() string {
	id := w.formerSealingKey()
	_, err := w.Vault.Apply(context.Background(), administrator(w.tenant), w.unique(), 0, vault.Desired{
		Name: w.unique(), Type: w.word, Values: map[string]secret.Bytes{w.word: secret.Bytes(w.word)}, SealingKey: id,
	})
	w.must(err)
	return id
}

// manifest returns what requests say of a manifest that opens.
// kmsKey returns the id of the current KMS key.
func (w *world) kmsKey() string {
	keys, err := w.service.Keys.KMSKeys(context.Background(), time.Time{})
	w.must(err)
	return keys.Keys[0].ID
}

func (w *world) manifest() object {
	document, err := w.service.Keys.SealingDocument(context.Background())
	w.must(err)
	obj, err := sealing.Seal(document.Key(), sealing.Request{
		Namespace: "shop", Name: w.word, CredentialType: w.word, Values: map[string]secret.Bytes{w.word: secret.Bytes(w.word)},
	}, w.Clock.Now())
	w.must(err)
	sealed := obj.Spec.Sealed
	values := object{}
	for k, v := range sealed.Values {
		values[k] = object{"sealed_at": v.SealedAt.UTC().Format(time.RFC3339), "data": v.Data}
	}
	return object{"namespace": "shop", "name": w.word, "credential_type": w.word, "sealed": object{
		"version": 1, "suite": sealed.Suite, "key_id": sealed.KeyID, "scope": sealed.Scope, "values": values,
	}}
}

// moved returns a manifest whose values were sealed for another namespace.
func (w *world) moved() object {
	m := w.manifest()
	m["namespace"] = "elsewhere"
	return m
}

// manifestWith returns a manifest with another value in spec.sealed.
func (w *world) manifestWith(field string, value any) object {
	m := w.manifest()
	m["sealed"].(object)[field] = value
	return m
}

// newUser registers a user with a tenant of its own.
func (w *world) newUser() string {
	email := w.address()
	_, _, err := w.Identity.Register(context.Background(), nobody, email, secret.Bytes(w.password()), w.word)
	w.must(err)
	return email
}

func (w *world) invitation() (email, id string) {
	email = w.address()
	i, err := w.Identity.Invite(context.Background(), administrator(w.tenant), email, authz.Member)
	w.must(err)
	return email, i.ID
}

func (w *world) member() string {
	email, _ := w.invitation()
	u, _, err := w.Identity.AcceptInvitation(context.Background(), nobody, w.TokenMailedTo(email, 1), secret.Bytes(w.password()))
	w.must(err)
	return u.ID
}

// policyName returns a name that no policy has.
func (w *world) policyName() string { return w.word + " " + authz.NewID("x") }

// webhook returns the id of a new webhook. It deletes older ones, since a tenant has few.
func (w *world) webhook() string {
	ctx, by := context.Background(), administrator(w.tenant)
	all, err := w.Webhooks.List(ctx, by)
	w.must(err)
	for _, old := range all {
		if len(all) > 7 && !slices.Contains(w.hooks[max(0, len(w.hooks)-6):], old.ID) {
			w.must(w.Webhooks.Delete(ctx, by, old.ID))
		}
	}
	made, _, err := w.Webhooks.Create(ctx, by, webhooks.Request{URL: "https://hooks.example.com/" + w.word, Description: w.word})
	w.must(err)
	w.hooks = append(w.hooks, made.ID)
	return made.ID
}

// deadDelivery returns the ids of a webhook and of a delivery to it that was given up.
func (w *world) deadDelivery() (id, msg string) {
	id = w.webhook()
	d, err := w.Webhooks.Test(context.Background(), administrator(w.tenant), id)
	w.must(err)
	w.kill(w.tenant, id, d.ID)
	return id, d.ID
}

// kill makes a dead letter of a delivery.
func (s *service) kill(tenant authz.TenantID, id, msg string) {
	s.T.Helper()
	key := []byte(webhooks.DeliveryFamily + string(tenant) + "/" + id + "/" + msg)
	rows := records.New(s.Store, s.Guard, s.Keys)
	err := s.Store.Update(context.Background(), func(tx store.Tx) error {
		var row object
		_, err := rows.Get(tx, key, &row)
		if err != nil {
			return err
		}
		row["state"] = webhooks.Dead
		return rows.Put(tx, key, row)
	})
	if err != nil {
		s.T.Fatal(err)
	}
}

// policy returns the id of a new policy.
func (w *world) policy() string {
	made, err := w.Identity.Access.CreatePolicy(context.Background(), administrator(w.tenant), identity.PolicyRequest{
		Name: w.policyName(), Rules: []authz.Rule{{Path: w.word + "/**", Verbs: authz.Verbs()}},
	})
	w.must(err)
	return made.ID
}

// group returns the id of a new group.
func (w *world) group() string {
	made, err := w.Identity.Access.CreateGroup(context.Background(), administrator(w.tenant), w.policyName())
	w.must(err)
	return made.ID
}

// groupPath returns the end of the path of a member of a new group.
func (w *world) groupPath(member string) string { return w.group() + "/members/" + member }

// boundPolicy returns the id of a policy that a member has.
func (w *world) boundPolicy() string {
	id := w.policy()
	_, err := w.Identity.Access.Bind(context.Background(), administrator(w.tenant), w.member(), []string{id})
	w.must(err)
	return id
}

// note returns the id of the note of a new review.
// nodeLog is the first entry of the log of a new node.
func (s *service) nodeLog() object {
	seed := make([]byte, dualsig.SeedSize)
	rand.Read(seed) // never fails: crypto/rand ends the program instead
	key, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		s.T.Fatal(err)
	}
	e := nodelog.Next(key.Public().ID(), nil, s.Clock.Now(), nodelog.Started)
	if err := e.Sign(key); err != nil {
		s.T.Fatal(err)
	}
	return object{"public_key": key.Public().Bytes(), "first": e, "last": e}
}

func (w *world) note() string {
	return w.Call(servertest.Request{Method: "POST", Path: "/api/v2/audit/reviews", Bearer: w.owner.Access,
		Body: servertest.Marshal(w.T, object{"subject": "inventory", "note": w.word})}).Want(w.T, http.StatusCreated)["note_id"].(string)
}

func (w *world) newTenant() string {
	t, err := w.Identity.CreateTenant(context.Background(), w.system(), w.word)
	w.must(err)
	return string(t.ID)
}
