package server_test

import (
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"github.com/latticekeep/latticekeep/api/client"
	v1 "github.com/latticekeep/latticekeep/api/openapi/v1"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// tour makes calls through the Go client, holds them against the contract and
// notes which operations were answered well.
type tour struct {
	*service
	mu     sync.Mutex
	called map[string]int // by version and operation id
}

func newTour(t *testing.T, change ...func(*server.Config)) *tour {
	t.Helper()
	return &tour{service: newService(t, change...), called: make(map[string]int)}
}

func (o *tour) RoundTrip(r *http.Request) (*http.Response, error) {
	both := o.Client.Transport.(*servertest.Contract)
	route, _, unknown := both.DocumentOf(r.URL.Path).Router.FindRoute(r)
	resp, err := both.RoundTrip(r)
	if err == nil && unknown == nil && resp.StatusCode < 300 {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.called[versionOf(r.URL.Path)+route.Operation.OperationID]++
	}
	return resp, err
}

func versionOf(path string) string {
	if strings.HasPrefix(path, "/v1/") {
		return "v1 "
	}
	return "v2 "
}

// connect returns a client that sends every call once.
func (o *tour) connect(options ...client.Option) *client.Client {
	o.T.Helper()
	c, err := client.New(o.URL, append([]client.Option{client.WithHTTPClient(&http.Client{Transport: o}), client.WithRetries(0)}, options...)...)
	if err != nil {
		o.T.Fatal(err)
	}
	return c
}

// answered returns the answer of a call that has to succeed.
func answered[T any](answer T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
}

func succeeds(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func pointer[T any](v T) *T { return &v }

// seconds are methods of the client that are another way to ask for an operation.
var seconds = map[string]string{"v2 UnsealCredentialVersion": "v2 UnsealCredential"}

// Each operation of the two contracts, the operational ones included, works
// through its method of the Go client.
func TestEveryOperationWorksThroughTheClient(t *testing.T) {
	o := newTour(t)
	machine := o.connect(client.WithAPIKey(o.Key))
	t.Run("vault", func(t *testing.T) { o.vaultThrough(t, machine) })
	t.Run("encryption", func(t *testing.T) { o.encryptionThrough(t, machine) })
	t.Run("keys", func(t *testing.T) { o.keysThrough(t, machine) })
	t.Run("v1", func(t *testing.T) { o.version1Through(t, machine) })
	t.Run("account", o.accountThrough)
	t.Run("members", o.membersThrough)
	t.Run("API keys", func(t *testing.T) { o.apiKeysThrough(t, machine) })
	t.Run("system", o.systemThrough)
	t.Run("sealing keys", func(t *testing.T) { o.sealingThrough(t, machine) })
	t.Run("proofs", func(t *testing.T) { o.proofsThrough(t, machine) })
	t.Run("compliance", func(t *testing.T) { o.complianceThrough(t, machine) })
	t.Run("operational", o.operationalThrough)

	both := servertest.NewContract(t)
	methods := map[string]reflect.Type{"v1 ": reflect.TypeFor[*client.V1](), "v2 ": reflect.TypeFor[*client.V2]()}
	var named []string
	for version, doc := range map[string]servertest.Document{"v1 ": both.V1, "v2 ": both.V2} {
		for _, item := range doc.Paths.Map() {
			for _, op := range item.Operations() {
				name := strings.ToUpper(op.OperationID[:1]) + op.OperationID[1:]
				if _, ok := methods[version].MethodByName(name); !ok {
					t.Errorf("the client has no method for %s%s", version, op.OperationID)
				}
				if o.called[version+op.OperationID] == 0 {
					t.Errorf("%s%s was not called", version, op.OperationID)
				}
				named = append(named, version+name)
			}
		}
	}
	for version, of := range methods {
		for m := range of.Methods() {
			of := version + m.Name
			if first, ok := seconds[of]; ok {
				of = first
			}
			if !slices.Contains(named, of) {
				t.Errorf("the client's method %s%s is no operation", version, m.Name)
			}
		}
	}
	if len(o.called) != len(named) {
		t.Errorf("%d operations called, %d in the contracts: %v", len(o.called), len(named), slices.Sorted(maps.Keys(o.called)))
	}
}

func (o *tour) vaultThrough(t *testing.T, c *client.Client) {
	ctx := t.Context()
	seal := v2.SealRequest{Name: "payments", CredentialType: "api_key", Values: map[string]string{"k": "one"}, TtlDays: pointer(10)}
	sealed := answered(c.V2.SealCredential(ctx, seal, nil))(t)
	id := sealed.CredentialId
	if sealed.Version != 1 || sealed.ExpiresAt.Sub(sealed.SealedAt) != 10*24*time.Hour || sealed.Name != seal.Name || !sealed.Success {
		t.Errorf("sealed %+v", sealed)
	}
	put := answered(c.V2.PutCredentialByName(ctx, "put", v2.PutRequest{CredentialType: "t", Values: map[string]string{"k": "v"}}))(t)
	patched := answered(c.V2.PatchCredential(ctx, put.CredentialId, v2.PatchRequest{Values: map[string]*string{"more": pointer("x")}}))(t)
	if put.Version != 1 || patched.Version != 2 {
		t.Errorf("put %+v, patched %+v", put, patched)
	}
	if set := answered(c.V2.PutHistoryRule(ctx, v2.HistoryRuleRequest{Path: "put", VersionsKept: 2}))(t); len(set.Rules) != 1 {
		t.Errorf("rules %+v", set)
	}
	answered(c.V2.ReplaceCredential(ctx, put.CredentialId, v2.ReplaceRequest{Values: map[string]string{"k": "lost"}}))(t)
	undone := answered(c.V2.UndoCredential(ctx, put.CredentialId, v2.UndoRequest{Version: patched.Version}))(t)
	if got := answered(c.V2.UnsealCredential(ctx, put.CredentialId))(t); undone.Version != 4 || got.Values["k"] != "v" || got.Values["more"] != "x" {
		t.Errorf("undone %+v", undone)
	}
	if rules := answered(c.V2.ListHistoryRules(ctx))(t).Rules; !slices.Equal(rules, []v2.HistoryRule{{Path: "put", VersionsKept: 2}}) {
		t.Errorf("rules %+v", rules)
	}
	never := true
	request := v2.SealRequest{Name: "ci/lasting", CredentialType: "t", Values: map[string]string{"k": "v"}, NeverExpires: &never}
	if _, err := c.V2.SealCredential(ctx, request, nil); err == nil || !strings.Contains(err.Error(), "never_expires_paths") {
		t.Errorf("sealed where a credential must expire: %v", err)
	}
	if s := answered(c.V2.ChangeSettings(ctx, v2.SettingsRequest{NeverExpiresPaths: &[]string{"ci/**"}}))(t); !slices.Equal(s.NeverExpiresPaths, []string{"ci/**"}) {
		t.Errorf("settings %+v", s)
	}
	lasting := answered(c.V2.SealCredential(ctx, request, nil))(t)
	opened := answered(c.V2.UnsealCredential(ctx, lasting.CredentialId))(t)
	if lasting.NeverExpires == nil || opened.NeverExpires == nil || opened.ExpiresAt.Format(time.RFC3339) != "9999-12-31T23:59:59Z" {
		t.Errorf("sealed %+v, opened %+v", lasting, opened)
	}
	if s := answered(c.V2.GetVaultSummary(ctx, &v2.GetVaultSummaryParams{}))(t); s.NeverExpire == nil || *s.NeverExpire != 1 {
		t.Errorf("summary %+v", s)
	}
	if ended := answered(c.V2.RenewCredential(ctx, lasting.CredentialId, v2.RenewRequest{TtlDays: new(3)}))(t); ended.NeverExpires != nil {
		t.Errorf("renewed %+v", ended)
	}
	answered(c.V2.ChangeSettings(ctx, v2.SettingsRequest{NeverExpiresPaths: &[]string{}}))(t)
	if s := answered(c.V2.GetSettings(ctx))(t); len(s.NeverExpiresPaths) != 0 {
		t.Errorf("settings %+v", s)
	}
	if err := c.V2.DeleteCredential(ctx, lasting.CredentialId); err != nil {
		t.Error(err)
	}
	if left := answered(c.V2.DeleteHistoryRule(ctx, &v2.DeleteHistoryRuleParams{Path: "put"}))(t); len(left.Rules) != 0 {
		t.Errorf("rules %+v", left)
	}
	trashed := answered(c.V2.TrashCredential(ctx, put.CredentialId))(t)
	if _, err := c.V2.UnsealCredential(ctx, put.CredentialId); !errors.Is(err, client.ErrForbidden) || trashed.Trashed == nil || trashed.Status != v2.CredentialAnswerStatusExpired {
		t.Errorf("trashed %+v, then %v", trashed, err)
	}
	if renewed := answered(c.V2.RenewCredential(ctx, put.CredentialId, v2.RenewRequest{TtlDays: pointer(3)}))(t); renewed.Version != 6 || renewed.Trashed != nil || renewed.Status != v2.CredentialAnswerStatusActive {
		t.Errorf("renewed %+v", renewed)
	}
	if err := c.V2.DeleteCredential(ctx, put.CredentialId); err != nil {
		t.Error(err)
	}
	replaced := answered(c.V2.ReplaceCredential(ctx, id, v2.ReplaceRequest{Values: map[string]string{"k": "two"}}))(t)
	rotated := answered(c.V2.RotateCredential(ctx, id))(t)
	if replaced.Version != 2 || rotated.Version != 3 {
		t.Errorf("versions %d and %d", replaced.Version, rotated.Version)
	}
	contact, tags := "ops@example.org", []string{"pci"}
	if said := answered(c.V2.DescribeCredential(ctx, id, v2.DetailsRequest{Contact: &contact, Tags: &tags}))(t); said.Contact == nil || *said.Contact != contact || said.Tags == nil {
		t.Errorf("described: %+v", said)
	}
	if moved := answered(c.V2.RenameCredential(ctx, id, v2.RenameRequest{Name: "moved"}))(t); moved.Version != 4 || moved.Name != "moved" {
		t.Errorf("renamed: %+v", moved)
	}
	answered(c.V2.RenameCredential(ctx, id, v2.RenameRequest{Name: seal.Name}))(t)
	byID, byName := answered(c.V2.UnsealCredential(ctx, id))(t), answered(c.V2.UnsealCredentialByName(ctx, seal.Name))(t)
	if !reflect.DeepEqual(byID, byName) || byID.Values["k"] != "two" || byID.Version != 5 {
		t.Errorf("unsealed %+v and by name %+v", byID, byName)
	}
	if byVersion := answered(c.V2.UnsealCredentialVersion(ctx, id, 5))(t); !reflect.DeepEqual(byVersion, byID) {
		t.Errorf("unsealed %+v and by version %+v", byID, byVersion)
	}
	if _, err := c.V2.UnsealCredentialVersion(ctx, id, 2); !errors.Is(err, client.ErrForbidden) {
		t.Errorf("a version that was replaced: %v", err)
	}
	versions := answered(c.V2.ListCredentialVersions(ctx, id))(t).Versions
	var changes []string
	for _, v := range versions {
		changes = append(changes, string(v.Change))
	}
	if !slices.Equal(changes, []string{"reencrypted", "reencrypted", "reencrypted", "rotated", "sealed"}) || !versions[0].Current {
		t.Errorf("versions %+v", versions)
	}
	answered(c.V2.SealCredential(ctx, seal, nil))(t) // another credential: each call has a key of its own
	first := answered(c.V2.ListCredentials(ctx, &v2.ListCredentialsParams{Limit: pointer(1)}))(t)
	if first.NextCursor == nil {
		t.Fatal("two credentials are one page of one")
	}
	second := answered(c.V2.ListCredentials(ctx, &v2.ListCredentialsParams{Limit: pointer(1), Cursor: first.NextCursor}))(t)
	if len(first.Credentials) != 1 || len(second.Credentials) != 1 || first.Credentials[0] == second.Credentials[0] || second.NextCursor != nil {
		t.Errorf("pages %+v and %+v", first, second)
	}
	active, expired := v2.ListCredentialsParamsStatusActive, v2.ListCredentialsParamsStatusExpired
	both := answered(c.V2.ListCredentials(ctx, &v2.ListCredentialsParams{Q: pointer("MENT"), Status: &active, CredentialType: &seal.CredentialType}))(t)
	order := v2.ListCredentialsParamsSortUpdated
	if newest := answered(c.V2.ListCredentials(ctx, &v2.ListCredentialsParams{Limit: pointer(1), Sort: &order, Total: pointer(true)}))(t); *newest.Total < 2 || !*newest.TotalComplete || newest.NextCursor == nil {
		t.Errorf("by the time of change: %+v", newest)
	}
	none := answered(c.V2.ListCredentials(ctx, &v2.ListCredentialsParams{Status: &expired, ExpiresBefore: &sealed.SealedAt}))(t)
	if len(both.Credentials) != 2 || len(none.Credentials) != 0 {
		t.Errorf("found %+v and %+v", both, none)
	}
	summary := answered(c.V2.GetVaultSummary(ctx, &v2.GetVaultSummaryParams{ExpiringWithinDays: pointer(11)}))(t)
	for i := range both.Credentials { // the summary has no details
		both.Credentials[i].Contact, both.Credentials[i].Tags = nil, nil
	}
	if summary.Total != 2 || summary.ExpiringSoon != 2 || !summary.Complete || !reflect.DeepEqual(summary.NextToExpire, both.Credentials) {
		t.Errorf("summary %+v", summary)
	}
	one := answered(c.V2.GetCredentialMetadata(ctx, id))(t)
	if !slices.ContainsFunc(both.Credentials, func(c v2.Credential) bool { return c.CredentialId == id && c.Version == one.Version }) || one.Name != seal.Name {
		t.Errorf("metadata %+v", one)
	}
	succeeds(t, c.V2.DeleteCredential(ctx, id))
	entries := answered(c.V2.QueryAuditLog(ctx, &v2.QueryAuditLogParams{Limit: pointer(1)}))(t)
	if len(entries.Entries) != 1 || entries.Entries[0].EventType != "CREDENTIAL_DELETED" || entries.Entries[0].Resource.Id != id {
		t.Errorf("entries %+v", entries.Entries)
	}
}

func (o *tour) encryptionThrough(t *testing.T, c *client.Client) {
	ctx := t.Context()
	const text = "größer than \x00 ASCII"
	e := answered(c.V2.EncryptData(ctx, v2.EncryptRequest{Data: text}))(t)
	own := v2.DecryptRequest{CiphertextKem: e.CiphertextKem, CiphertextData: e.CiphertextData, Nonce: e.Nonce}
	if got := answered(c.V2.DecryptData(ctx, own))(t).Data; got != text {
		t.Errorf("decrypted %q", got)
	}
	batch := answered(c.V2.EncryptBatch(ctx, v2.EncryptBatchRequest{Items: []v2.EncryptItem{{Data: "a"}, {Data: "b"}}}))(t).Results
	opened := answered(c.V2.DecryptBatch(ctx, v2.DecryptBatchRequest{Items: []v2.DecryptRequest{
		{CiphertextKem: batch[1].CiphertextKem, CiphertextData: batch[1].CiphertextData, Nonce: batch[1].Nonce},
		{CiphertextKem: batch[1].CiphertextKem, CiphertextData: batch[0].CiphertextData, Nonce: batch[1].Nonce}, // mixed
		own,
	}}))(t).Results
	if len(opened) != 3 || *opened[0].Data != "b" || opened[1].Data != nil || opened[1].Error.Code != 400 || *opened[2].Data != text {
		t.Errorf("results %+v", opened)
	}
	s := answered(c.V2.SignData(ctx, v2.SignRequest{Data: text}))(t)
	verify := v2.VerifyRequest{Data: text, PqcSignature: s.PqcSignature, HmacSignature: s.HmacSignature}
	if !answered(c.V2.VerifyData(ctx, verify))(t).Valid {
		t.Error("a signature is not valid")
	}
	signed := answered(c.V2.SignBatch(ctx, v2.SignBatchRequest{Items: []v2.SignRequest{{Data: "a"}, {Data: "b"}}}))(t).Results
	items := []v2.VerifyRequest{verify, {Data: "b", PqcSignature: signed[0].PqcSignature, HmacSignature: signed[0].HmacSignature}}
	verified := answered(c.V2.VerifyBatch(ctx, v2.VerifyBatchRequest{Items: items}))(t).Results
	if len(verified) != 2 || !verified[0].Valid || verified[1].Valid {
		t.Errorf("verified %+v", verified)
	}
	if keys := answered(c.V2.ListPublicKeys(ctx))(t).Keys; len(keys) == 0 || keys[0].Kid != s.KeyId {
		t.Errorf("public keys %+v", keys)
	}
}

func (o *tour) keysThrough(t *testing.T, c *client.Client) {
	ctx := t.Context()
	o.Clock.Advance(time.Second) // since the default key was made
	made := answered(c.V2.CreateKey(ctx, v2.CreateKeyRequest{Name: "orders", RotationPeriod: pointer(30)}))(t).Key
	o.Clock.Advance(time.Second)
	rotated := answered(c.V2.RotateKey(ctx, made.KeyId, v2.RotateKeyRequest{ReEncryptData: pointer(true)}))(t)
	if made.Version != 1 || made.RotationPeriod != 30 || rotated.Key.Version != 2 || rotated.ReEncryptedVersions != 1 {
		t.Errorf("key %+v, rotated %+v", made, rotated)
	}
	one := answered(c.V2.GetKey(ctx, made.KeyId))(t)
	if one.Key != rotated.Key || len(one.Versions) != 2 || one.Versions[0].Number != 2 || !one.Versions[0].Current || one.Versions[1].Current ||
		!one.Versions[0].CreatedAt.Equal(rotated.Key.RotatedAt) || !one.Versions[1].CreatedAt.Equal(made.CreatedAt) {
		t.Errorf("key %+v", one)
	}
	e := answered(c.V2.EncryptData(ctx, v2.EncryptRequest{Data: "hello", KeyId: &made.KeyId}))(t)
	batch := answered(c.V2.EncryptBatch(ctx, v2.EncryptBatchRequest{KeyId: &made.KeyId, Items: []v2.EncryptItem{{Data: "a"}, {Data: "b"}}}))(t).Results
	if e.KeyId != made.KeyId || e.KeyVersion != 2 || len(batch) != 2 || batch[0].KeyId != made.KeyId || batch[1].KeyId != made.KeyId {
		t.Errorf("encrypted %+v and %+v, not with the key %s", e, batch, made.KeyId)
	}
	if got := answered(c.V2.DecryptData(ctx, v2.DecryptRequest{CiphertextKem: e.CiphertextKem, CiphertextData: e.CiphertextData, Nonce: e.Nonce}))(t); got.Data != "hello" {
		t.Errorf("decrypted %q", got.Data)
	}
	var listed []v2.EncryptionKey
	for p := (&v2.ListKeysParams{Limit: pointer(1)}); ; {
		page := answered(c.V2.ListKeys(ctx, p))(t)
		listed = append(listed, page.Keys...)
		if p.Cursor = page.NextCursor; p.Cursor == nil {
			break
		}
	}
	if len(listed) < 2 || !listed[0].Default || !slices.Contains(listed, one.Key) { // the default key was made before
		t.Errorf("keys %+v", listed)
	}
	if _, err := c.V2.GetKey(ctx, authz.NewID("tkey")); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("a key that is not there: %v", err)
	}
}

func (o *tour) version1Through(t *testing.T, c *client.Client) {
	ctx := t.Context()
	key := answered(c.V1.GenerateKey(ctx, v1.GenerateKeyRequest{Algorithm: "ML-KEM-768", Name: "orders", RotationPeriod: pointer(30)}))(t)
	old := answered(c.V1.EncryptData(ctx, v1.EncryptRequest{Algorithm: "ML-KEM-768", Data: "hello", KeyId: &key.KeyId}))(t)
	rotated := answered(c.V1.RotateKey(ctx, key.KeyId, v1.RotateKeyRequest{ReEncryptData: pointer(true)}))(t)
	if key.Version != 1 || key.RotationPeriod != 30 || rotated.Version != 2 || rotated.ReEncryptedVersions != 1 {
		t.Errorf("key %+v, rotated %+v", key, rotated)
	}
	rewrapped := answered(c.V1.RewrapData(ctx, v1.DecryptRequest{EncryptedData: old.EncryptedData, KeyId: key.KeyId}))(t)
	for version, data := range map[int64]string{1: old.EncryptedData, 2: rewrapped.EncryptedData} {
		d := answered(c.V1.DecryptData(ctx, v1.DecryptRequest{EncryptedData: data, KeyId: key.KeyId}))(t)
		if d.Data != "hello" || d.KeyVersion != version || d.KeyId != key.KeyId {
			t.Errorf("version %d: %+v", version, d)
		}
	}
	list := answered(c.V1.ListKeys(ctx, &v1.ListKeysParams{Page: pointer(1), Limit: pointer(100)}))(t)
	if !slices.ContainsFunc(list.Keys, func(k v1.Key) bool { return k.KeyId == key.KeyId && k.Version == 2 }) || list.Total != len(list.Keys) {
		t.Errorf("keys %+v", list)
	}
	page := answered(c.V1.QueryAuditLogs(ctx, &v1.QueryAuditLogsParams{Limit: pointer(1)}))(t)
	rest := answered(c.V1.QueryAuditLogs(ctx, &v1.QueryAuditLogsParams{Cursor: page.NextCursor}))(t)
	if len(page.Logs) != 1 || page.Logs[0].EventType != "KEY_LISTED" || len(rest.Logs) == 0 || rest.Logs[0].Sequence >= page.Logs[0].Sequence {
		t.Errorf("logs %+v", page.Logs)
	}
	if text := answered(c.V1.GetContract(ctx))(t); !strings.HasPrefix(text, "openapi: 3.0") {
		t.Errorf("contract of v1: %.20q", text)
	}
}

func (o *tour) accountThrough(t *testing.T) {
	ctx, c := t.Context(), o.connect()
	const email = "tour@example.org"
	registered := answered(c.V2.RegisterUser(ctx, v2.RegisterRequest{Email: email, Password: servertest.Password, TenantName: "Tour"}))(t)
	first := answered(c.V2.Login(ctx, v2.LoginRequest{Email: email, Password: servertest.Password}))(t)
	succeeds(t, c.V2.ResendVerification(ctx))
	succeeds(t, c.V2.VerifyEmail(ctx, v2.TokenRequest{Token: o.TokenMailedTo(email, 1)}))
	o.Clock.Advance(time.Second) // tokens tell whole seconds
	second := answered(c.V2.RefreshSession(ctx))(t)
	if second.AccessToken == first.AccessToken || second.TokenType != "Bearer" || second.ExpiresIn != 1800 {
		t.Errorf("refreshed %+v", second)
	}
	me := answered(c.V2.GetAccount(ctx))(t)
	if me.User == nil || !me.User.EmailVerified || me.User.UserId != registered.User.UserId ||
		me.Tenant.TenantId != registered.Tenant.TenantId || me.Tenant.Status != "trial" {
		t.Errorf("me %+v", me)
	}
	other := o.connect()
	answered(other.V2.Login(ctx, v2.LoginRequest{Email: email, Password: servertest.Password}))(t)
	for _, s := range answered(c.V2.ListSessions(ctx))(t).Sessions {
		if !s.Current {
			succeeds(t, c.V2.EndSession(ctx, s.SessionId))
		}
	}
	if _, err := other.V2.GetAccount(ctx); !errors.Is(err, client.ErrUnauthenticated) {
		t.Errorf("an ended session: %v", err)
	}
	succeeds(t, c.V2.ChangePassword(ctx, v2.ChangePasswordRequest{CurrentPassword: servertest.Password, NewPassword: servertest.Password + "!"}))
	succeeds(t, c.V2.RequestPasswordReset(ctx, v2.EmailRequest{Email: email}))
	succeeds(t, c.V2.ResetPassword(ctx, v2.ResetPasswordRequest{Token: o.ResetTokenMailedTo(email), NewPassword: servertest.Password}))
	answered(c.V2.Login(ctx, v2.LoginRequest{Email: email, Password: servertest.Password}))(t)
	succeeds(t, c.V2.Logout(ctx))
	if _, err := c.V2.GetAccount(ctx); !errors.Is(err, client.ErrUnauthenticated) {
		t.Errorf("after logout: %v", err)
	}
}

func (o *tour) membersThrough(t *testing.T) {
	ctx, owner := t.Context(), o.connect()
	const email, guest = "host@example.org", "guest@example.org"
	answered(owner.V2.RegisterUser(ctx, v2.RegisterRequest{Email: email, Password: servertest.Password, TenantName: "Members"}))(t)
	succeeds(t, owner.V2.VerifyEmail(ctx, v2.TokenRequest{Token: o.TokenMailedTo(email, 1)}))
	answered(owner.V2.Login(ctx, v2.LoginRequest{Email: email, Password: servertest.Password}))(t)

	revoked := answered(owner.V2.InviteMember(ctx, v2.InviteRequest{Email: "nobody@example.org", Role: "auditor"}))(t)
	answered(owner.V2.InviteMember(ctx, v2.InviteRequest{Email: guest, Role: "member"}))(t)
	succeeds(t, owner.V2.RevokeInvitation(ctx, revoked.InvitationId))
	joined := answered(o.connect().V2.AcceptInvitation(ctx, v2.AcceptInvitationRequest{Token: o.TokenMailedTo(guest, 1), Password: servertest.Password}))(t)
	changed := answered(owner.V2.ChangeMember(ctx, joined.User.UserId, v2.RoleRequest{Role: "auditor"}))(t)
	if joined.User.Role != "member" || changed.User.Role != "auditor" || changed.User.UserId != joined.User.UserId {
		t.Errorf("joined %+v, changed %+v", joined, changed)
	}
	if called := answered(owner.V2.FindNames(ctx, joined.User.UserId))(t); len(called.Names) != 1 || called.Names[0].Name != string(joined.User.Email) {
		t.Errorf("%+v", called)
	}
	waiting := answered(owner.V2.GetReviews(ctx))(t)
	review := answered(owner.V2.CreateReview(ctx, v2.ReviewRequest{Subject: v2.ReviewSubjectDenials, From: &waiting.From, To: &waiting.To, Note: pointer("seen")}))(t)
	if review.Sequence == 0 || review.Denials != waiting.Denials {
		t.Errorf("%+v of %+v", review, waiting)
	}
	if note := answered(owner.V2.GetReviewNote(ctx, *review.NoteId))(t); note.Note != "seen" || len(note.Salt) != 32 {
		t.Errorf("%+v", note)
	}
	succeeds(t, owner.V2.EraseReviewNote(ctx, *review.NoteId))
	var log v2.NodeLogRequest
	succeeds(t, json.Unmarshal([]byte(servertest.Marshal(t, o.nodeLog())), &log))
	if at := answered(owner.V2.RecordNodeLog(ctx, log))(t); at.Sequence != 1 || !at.Recorded {
		t.Errorf("%+v", at)
	}
	if o := answered(owner.V2.GetOverview(ctx))(t); o.Credentials == nil || o.Health == nil || o.Setup.Email == nil {
		t.Errorf("%+v", o)
	}
	me := answered(owner.V2.GetAccount(ctx))(t)
	asked := answered(o.connect(client.WithAPIKey(o.SystemKey())).V2.CreateTenantAPIKey(ctx, me.Tenant.TenantId, v2.CreateAPIKeyRequest{Name: "ops", Scopes: []v2.Scope{"vault:read"}}))(t)
	if asked.Status != v2.APIKeyStatusPending {
		t.Errorf("asked for %+v", asked)
	}
	if _, err := o.connect(client.WithAPIKey(asked.ApiKey)).V2.ListCredentials(ctx, nil); !errors.Is(err, client.ErrUnauthenticated) {
		t.Errorf("a key that waits for approval: %v", err)
	}
	succeeds(t, owner.V2.ApproveAPIKey(ctx, asked.KeyId))
	answered(o.connect(client.WithAPIKey(asked.ApiKey)).V2.ListCredentials(ctx, nil))(t)
	list := answered(owner.V2.ListMembers(ctx))(t)
	if len(list.Members) != 2 || len(list.Invitations) != 0 {
		t.Errorf("members %+v", list)
	}
	rules := []v2.PolicyRuleRequest{{Path: "shop/*", Verbs: []v2.PathVerb{"list"}}}
	made := answered(owner.V2.CreatePolicy(ctx, v2.PolicyRequest{Name: "shop", Rules: rules}))(t).Policy
	rules[0].Verbs = append(rules[0].Verbs, "read")
	answered(owner.V2.ChangePolicy(ctx, made.PolicyId, v2.PolicyRequest{Name: "shop", Rules: rules}))(t)
	if p := answered(owner.V2.GetPolicy(ctx, made.PolicyId))(t).Policy; !slices.Equal(p.Rules[0].Verbs, rules[0].Verbs) {
		t.Errorf("%+v", p)
	}
	answered(owner.V2.BindPolicies(ctx, joined.User.UserId, v2.BindingRequest{Policies: []string{made.PolicyId}}))(t)
	if all := answered(owner.V2.ListPolicies(ctx))(t); len(all.Policies) != 1 || len(all.Bindings) != 1 || all.Bindings[0].Policies[0] != made.PolicyId {
		t.Errorf("%+v", all)
	}
	judged := answered(owner.V2.CheckAccess(ctx, v2.AccessCheckRequest{Path: "other", Verb: "read", Subject: &joined.User.UserId}))(t)
	if judged.Allowed || *judged.Reason != "outside_policy" && *judged.Reason != "missing_scope" {
		t.Errorf("%+v", judged)
	}
	group := answered(owner.V2.CreateGroup(ctx, v2.GroupRequest{Name: "developers"}))(t).Group
	answered(owner.V2.BindPolicies(ctx, group.GroupId, v2.BindingRequest{Policies: []string{made.PolicyId}}))(t)
	answered(owner.V2.RenameGroup(ctx, group.GroupId, v2.GroupRequest{Name: "shop developers"}))(t)
	answered(owner.V2.AddGroupMember(ctx, group.GroupId, joined.User.UserId))(t)
	if g := answered(owner.V2.GetGroup(ctx, group.GroupId))(t).Group; g.Name != "shop developers" || !slices.Equal(g.Members, []string{joined.User.UserId}) || !slices.Equal(g.Policies, []string{made.PolicyId}) {
		t.Errorf("%+v", g)
	}
	judged = answered(owner.V2.CheckAccess(ctx, v2.AccessCheckRequest{Path: "shop/a", Verb: "list", Subject: &joined.User.UserId}))(t)
	if judged.Groups != nil && !slices.Equal(*judged.Groups, []string{group.GroupId}) {
		t.Errorf("%+v", judged)
	}
	permitted := answered(owner.V2.ListPermitted(ctx, v2.PermittedRequest{Path: "shop/a", Verb: "list"}))(t)
	if !slices.ContainsFunc(permitted.Subjects, func(s v2.PermittedSubject) bool { return s.Kind == v2.PermittedSubjectKindUser && s.Name != nil }) {
		t.Errorf("%+v", permitted)
	}
	if tried := answered(owner.V2.TryAccessChange(ctx, v2.AccessChange{Change: v2.AccessChangeChangeDeleteGroup, GroupId: &group.GroupId}))(t); len(tried.Losses) != 0 || tried.NextCursor != nil {
		t.Errorf("%+v", tried)
	}
	answered(owner.V2.RemoveGroupMember(ctx, group.GroupId, joined.User.UserId))(t)
	if all := answered(owner.V2.ListGroups(ctx))(t); len(all.Groups) != 1 || len(all.Groups[0].Members) != 0 {
		t.Errorf("%+v", all)
	}
	succeeds(t, owner.V2.DeleteGroup(ctx, group.GroupId))
	succeeds(t, owner.V2.EraseNames(ctx, group.GroupId))
	hook := answered(owner.V2.CreateWebhook(ctx, v2.WebhookRequest{Url: "https://hooks.example.com/token", Description: pointer("on call")}))(t)
	if all := answered(owner.V2.ListWebhooks(ctx))(t); len(all.Webhooks) != 1 || all.Webhooks[0] != hook.Webhook || hook.Webhook.Host != "hooks.example.com" || !strings.HasPrefix(hook.Secret, "whsec_") {
		t.Errorf("%+v", all)
	}
	sent := answered(owner.V2.TestWebhook(ctx, hook.Webhook.WebhookId))(t).Delivery
	if all := answered(owner.V2.ListDeliveries(ctx, hook.Webhook.WebhookId))(t); len(all.Deliveries) != 1 || all.Deliveries[0].DeliveryId != sent.DeliveryId || sent.State != v2.DeliveryStateWaiting {
		t.Errorf("%+v", all)
	}
	if _, err := owner.V2.ResendDelivery(ctx, hook.Webhook.WebhookId, sent.DeliveryId); !errors.Is(err, client.ErrConflict) {
		t.Error(err)
	}
	o.kill(authz.TenantID(answered(owner.V2.GetAccount(ctx))(t).Tenant.TenantId), hook.Webhook.WebhookId, sent.DeliveryId)
	if again := answered(owner.V2.ResendDelivery(ctx, hook.Webhook.WebhookId, sent.DeliveryId))(t).Delivery; again.DeliveryId != sent.DeliveryId || again.State != v2.DeliveryStateWaiting {
		t.Errorf("%+v", again)
	}
	succeeds(t, owner.V2.DeleteWebhook(ctx, hook.Webhook.WebhookId))
	succeeds(t, owner.V2.UnbindPolicies(ctx, joined.User.UserId))
	succeeds(t, owner.V2.DeletePolicy(ctx, made.PolicyId))
	succeeds(t, owner.V2.RemoveMember(ctx, joined.User.UserId))
}

func (o *tour) apiKeysThrough(t *testing.T, c *client.Client) {
	ctx := t.Context()
	made := answered(c.V2.CreateAPIKey(ctx, v2.CreateAPIKeyRequest{Name: "ci", Scopes: []v2.Scope{"vault:read"}, ExpiresInDays: pointer(1)}))(t)
	if me := answered(o.connect(client.WithAPIKey(made.ApiKey)).V2.GetAccount(ctx))(t); me.Principal.Id != made.KeyId || me.User != nil {
		t.Errorf("me %+v", me)
	}
	listed := answered(c.V2.ListAPIKeys(ctx))(t).ApiKeys
	if !slices.ContainsFunc(listed, func(k v2.APIKey) bool { return k.KeyId == made.KeyId && k.LastUsedAt != nil }) {
		t.Errorf("keys %+v", listed)
	}
	succeeds(t, c.V2.RevokeAPIKey(ctx, made.KeyId))
}

func (o *tour) systemThrough(t *testing.T) {
	ctx, operator := t.Context(), o.connect(client.WithAPIKey(o.SystemKey()))
	made := answered(operator.V2.CreateTenant(ctx, v2.CreateTenantRequest{Name: "Made"}))(t).Tenant
	limited := answered(operator.V2.SetTenantLimits(ctx, made.TenantId, v2.LimitTenantRequest{V2: pointer(7)}))(t).Tenant
	if limited.Limits == nil || *limited.Limits.V2 != 7 || limited.Limits.V1 != nil {
		t.Errorf("limits %+v", limited.Limits)
	}
	if active := answered(operator.V2.ActivateTenant(ctx, made.TenantId))(t).Tenant; active.Status != "active" || active.Name != "Made" {
		t.Errorf("activated %+v", active)
	}
	key := answered(operator.V2.CreateTenantAPIKey(ctx, made.TenantId, v2.CreateAPIKeyRequest{Name: "first", Scopes: []v2.Scope{"account:admin"}}))(t)
	if me := answered(o.connect(client.WithAPIKey(key.ApiKey)).V2.GetAccount(ctx))(t); me.Tenant.TenantId != made.TenantId {
		t.Errorf("a key of another tenant: %+v", me)
	}
	o.kmsThrough(t, operator)
	seen := 0
	for params := (&v2.ListTenantsParams{Limit: pointer(1)}); ; {
		page := answered(operator.V2.ListTenants(ctx, params))(t)
		if seen += len(page.Tenants); page.NextCursor == nil {
			break
		}
		params.Cursor = page.NextCursor
	}
	if seen < 2 {
		t.Errorf("%d tenants", seen)
	}
	copied := answered(operator.V2.TakeBackup(ctx, v2.BackupRequest{Recipient: servertest.BackupIdentity(t).Recipient().String()}))(t)
	defer copied.Close()
	in, err := backup.Open(backup.Split(copied), []backup.Identity{servertest.BackupIdentity(t)})
	if err != nil {
		t.Fatal(err)
	}
	if rows, err := in.Rows(func(_, _ []byte) error { return nil }); err != nil || rows == 0 || in.Header.Identity.ID() != o.Keys.Identity().ID() {
		t.Errorf("a backup of %d rows, header %+v, %v", rows, in.Header, err)
	}
}

func (o *tour) sealingThrough(t *testing.T, c *client.Client) {
	ctx, operator := t.Context(), o.connect(client.WithAPIKey(o.SystemKey()))
	first := answered(c.V2.GetSealingKey(ctx))(t).KeyId
	m := o.Manifest(t, "shop", "db", servertest.Canary)
	made := answered(operator.V2.RotateSealingKey(ctx))(t).SealingKey
	if made.State != v2.SealingKeyStateCurrent || made.KeyId == first || made.KeyId != answered(c.V2.GetSealingKey(ctx))(t).KeyId {
		t.Errorf("made %+v", made)
	}
	again := answered(c.V2.ResealManifest(ctx, m))(t).Sealed
	if again.KeyId != made.KeyId || again.Values["password"].Data == m.Sealed.Values["password"].Data || *again.Scope != *m.Sealed.Scope ||
		!again.Values["password"].SealedAt.Equal(m.Sealed.Values["password"].SealedAt) {
		t.Errorf("resealed %+v", again)
	}
	retired := answered(operator.V2.RetireSealingKey(ctx, first))(t).SealingKey
	if retired.State != v2.SealingKeyStateRetired || retired.RetiredAt == nil {
		t.Errorf("retired %+v", retired)
	}
	check := func(sealed v2.SealedValues) *v2.CheckAnswer {
		return answered(c.V2.CheckManifest(ctx, v2.CheckRequest{Namespace: "shop", Name: "db", CredentialType: "database", Sealed: &sealed}))(t)
	}
	if v := check(again); !v.Accepted || v.Code != nil || v.Message != nil {
		t.Errorf("resealed: %+v", v)
	}
	if v := check(m.Sealed); v.Accepted || *v.Code != v2.CheckAnswerCodeRetiredKey || !strings.Contains(*v.Message, "retired") {
		t.Errorf("sealed for a retired key: %+v", v)
	}
	if restored := answered(operator.V2.RestoreSealingKey(ctx, first))(t).SealingKey; restored.State != v2.SealingKeyStateEarlier || restored.RetiredAt != nil {
		t.Errorf("restored %+v", restored)
	}
	if v := check(m.Sealed); !v.Accepted {
		t.Errorf("sealed for a restored key: %+v", v)
	}
	keys := answered(operator.V2.ListSealingKeys(ctx))(t).SealingKeys
	if len(keys) != 2 || keys[0].KeyId != made.KeyId || keys[1].KeyId != first || keys[0].State != v2.SealingKeyStateCurrent {
		t.Errorf("keys %+v", keys)
	}
	if _, err := operator.V2.RetireSealingKey(ctx, made.KeyId); !errors.Is(err, client.ErrConflict) {
		t.Errorf("the current key: %v", err)
	}
}

func (o *tour) kmsThrough(t *testing.T, operator *client.Client) {
	ctx := t.Context()
	listed := answered(operator.V2.ListKMSKeys(ctx))(t)
	if len(listed.KmsKeys) != 2 || listed.KmsKeys[0].State != v2.KMSKeyStateCurrent || listed.KmsKeys[0].Sets < 2 || listed.DamagedSets != 0 ||
		listed.KmsKeys[1] != (v2.KMSKey{KeyId: o.KMS[1].ID(), State: v2.KMSKeyStateFormer}) {
		t.Errorf("KMS keys %+v", listed)
	}
	if moved := answered(operator.V2.RewrapKeys(ctx, v2.RewrapKeysRequest{}))(t); moved.Moved != 0 || moved.Remaining != 0 {
		t.Errorf("moved %+v", moved)
	}
	o.Clock.Advance(time.Second)
	before := o.Clock.Now()
	if moved := answered(operator.V2.RewrapKeys(ctx, v2.RewrapKeysRequest{WrappedBefore: &before}))(t); moved.Moved == 0 || moved.Moved+moved.Remaining != listed.KmsKeys[0].Sets {
		t.Errorf("moved anew %+v", moved)
	}
	if _, err := operator.V2.DestroyKMSKey(ctx, v2.DestroyKMSKeyRequest{KeyId: listed.KmsKeys[0].KeyId}); !errors.Is(err, client.ErrConflict) {
		t.Errorf("the current key: %v", err)
	}
	gone := answered(operator.V2.DestroyKMSKey(ctx, v2.DestroyKMSKeyRequest{KeyId: o.KMS[1].ID()}))(t)
	if gone.KeyId != o.KMS[1].ID() || gone.FinalAt == nil || gone.Undo == nil || gone.Left != nil {
		t.Errorf("destroyed %+v", gone)
	}
}

func (o *tour) proofsThrough(t *testing.T, c *client.Client) {
	ctx, operator := t.Context(), o.connect(client.WithAPIKey(o.SystemKey()))
	own := o.FirstEntryOf(o.Tenant)
	o.FollowLog()
	head := answered(c.V2.GetCheckpoint(ctx))(t)
	root, err := tlog.ParseHash(head.RootHash)
	if err != nil || !strings.Contains(head.Checkpoint, "\n"+head.RootHash+"\n") || head.Epoch != 1 {
		t.Errorf("checkpoint %+v, %v", head, err)
	}
	if one := answered(c.V2.GetAuditEntry(ctx, int64(own.Sequence)))(t).Entry; one.Hash != own.Hash {
		t.Errorf("%+v", one)
	}
	of := answered(c.V2.TailAuditLog(ctx, &v2.TailAuditLogParams{After: pointer(int64(own.Sequence) - 1), Wait: pointer(0)}))(t)
	first := answered(of.Next())(t)
	for e, err := first, error(nil); ; e, err = of.Next() {
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || e.TenantId != own.TenantID {
			t.Fatal(e, err)
		}
	}
	if err := of.Close(); err != nil || first.Hash != own.Hash {
		t.Errorf("%+v %v", first, err)
	}
	if objects := answered(c.V2.ListSealedCredentials(ctx, nil))(t); objects.Operator {
		t.Errorf("%+v", objects)
	}
	included := answered(c.V2.ProveInclusion(ctx, &v2.ProveInclusionParams{Sequence: int64(own.Sequence), TreeSize: &head.TreeSize}))(t)
	if err := tlog.CheckRecord(servertest.ParseHashes(t, included.Path), head.TreeSize, root, included.LeafIndex, servertest.LeafHash(t, own.Hash)); err != nil {
		t.Errorf("inclusion %+v: %v", included, err)
	}
	grown := answered(c.V2.ProveConsistency(ctx, &v2.ProveConsistencyParams{From: 1, To: &head.TreeSize}))(t)
	if err := tlog.CheckTree(servertest.ParseHashes(t, grown.Path), head.TreeSize, root, 1, servertest.LeafHash(t, o.AllEntries(1)[0].Hash)); err != nil {
		t.Errorf("consistency %+v: %v", grown, err)
	}
	if key := answered(c.V2.GetAuditPublicKey(ctx))(t); key.Fingerprint != o.Audit.Fingerprint() || !strings.HasPrefix(key.Verifier, "latticekeep.dev/log/"+key.ChainId) {
		t.Errorf("key %+v", key)
	}
	if tile := answered(c.V2.GetTile(ctx, "entries", 0, &v2.GetTileParams{Width: pointer(2)}))(t); len(tile) != 68 {
		t.Errorf("a bundle of two has %d bytes", len(tile))
	}
	if _, err := c.V2.GetTile(ctx, "7", 0, nil); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("a tile that is not there: %v", err)
	}
	exported := answered(operator.V2.ExportAuditLog(ctx, nil))(t)
	defer exported.Close()
	if report, err := verify.Export(exported, verify.Options{Fingerprint: o.Audit.Fingerprint()}); err != nil || report.Entries == 0 {
		t.Errorf("export: %+v, %v", report, err)
	}
	accept := v2.AcceptRollbackRequest{Reason: "the disk failed"}
	if _, err := operator.V2.AcceptRollback(ctx, accept); !errors.Is(err, client.ErrConflict) {
		t.Errorf("nothing is lost: %v", err)
	}
	o.LoseEntries()
	if _, err := c.V2.ListCredentials(ctx, nil); !errors.Is(err, client.ErrUnavailable) {
		t.Errorf("after a loss: %v", err)
	}
	if accepted := answered(operator.V2.AcceptRollback(ctx, accept))(t); accepted.Epoch != 2 || accepted.LostTo-accepted.LostFrom != 9 {
		t.Errorf("accepted %+v", accepted)
	}
	answered(c.V2.ListCredentials(ctx, nil))(t)
}

func (o *tour) complianceThrough(t *testing.T, c *client.Client) {
	ctx := t.Context()
	o.VerifyLog()
	score := answered(c.V2.GetComplianceScore(ctx, &v2.GetComplianceScoreParams{Framework: v2.FrameworkHipaa}))(t)
	if score.Score == nil || len(score.Controls) == 0 || score.Framework != v2.FrameworkHipaa {
		t.Errorf("score %+v", score)
	}
	history := answered(c.V2.GetComplianceHistory(ctx, &v2.GetComplianceHistoryParams{Framework: v2.FrameworkHipaa}))(t)
	if all := answered(c.V2.GetComplianceScores(ctx))(t); len(all.Scores) != 9 || all.Scores[3].Framework != v2.FrameworkHipaa || *all.Scores[3].Score != *score.Score || len(all.Probes) == 0 {
		t.Errorf("scores %+v", all.Scores)
	}
	if len(history.Scores) != 1 || history.Scores[0].Score != *score.Score || history.Scores[0].Sequence != score.Head.Sequence {
		t.Errorf("history %+v", history)
	}
	made := answered(c.V2.GetComplianceReport(ctx, &v2.GetComplianceReportParams{
		Framework: v2.FrameworkHipaa, Head: &score.Head.Sequence, Format: pointer(v2.GetComplianceReportParamsFormatOscal),
	}))(t)
	fetch := func(c *client.Client, signed string) ([]byte, error) {
		u, err := url.Parse(signed)
		if err != nil {
			t.Fatal(err)
		}
		return c.V2.DownloadReport(ctx, u)
	}
	report := answered(fetch(o.connect(), made.Url))(t)
	if !o.Keys.Identity().Verify("latticekeep/report/v1", report, answered(fetch(c, made.SignatureUrl))(t)) || made.Head != score.Head {
		t.Errorf("a report of %d bytes at %+v", len(report), made)
	}
	if _, err := fetch(c, made.Url+"a"); !errors.Is(err, client.ErrForbidden) {
		t.Errorf("an altered URL: %v", err)
	}
	if bom := answered(c.V2.GetInventory(ctx))(t); !strings.Contains(string(bom), `"CycloneDX"`) {
		t.Errorf("inventory %.100s", bom)
	}
}

func (o *tour) operationalThrough(t *testing.T) {
	ctx, c := t.Context(), o.connect()
	if answered(c.V2.GetHealth(ctx))(t).Status != "ok" || answered(c.V2.GetReadiness(ctx))(t).Status != "ok" {
		t.Error("the service is not well")
	}
	if len(answered(c.V2.GetSealingKey(ctx))(t).PublicKey) == 0 {
		t.Error("no sealing key")
	}
	reader := o.connect(client.WithAPIKey(o.GrantKeyIn(authz.SystemTenant, authz.MetricsRead)))
	if text := answered(reader.V2.GetMetrics(ctx))(t); !strings.Contains(text, "latticekeep_build_info") {
		t.Errorf("metrics: %d bytes", len(text))
	}
	if d := answered(reader.V2.GetDiagnosis(ctx))(t); d.Status != v2.PartStatusOk || d.Time.IsZero() {
		t.Errorf("diagnosis: %+v", d)
	}
	if text := answered(c.V2.GetContract(ctx))(t); !strings.HasPrefix(text, "openapi: 3.0") {
		t.Errorf("contract of v2: %.20q", text)
	}
}

// A name goes through the path of a URL and back without a change.
func TestACredentialIsFoundByWhateverItIsCalled(t *testing.T) {
	o := newTour(t)
	ctx, c := t.Context(), o.connect(client.WithAPIKey(o.Key))
	for _, name := range []string{
		"a b", "a+b", "a%20b", "a%2Fb", "a/b", "a/b/c", "a?b", "a#b", "a;b,c", "größer", "日本", "a&b=c", "a:b@c", `a"b\c`,
		"list", "seal", "...", "%", strings.Repeat("n", 255),
	} {
		sealed := answered(c.V2.SealCredential(ctx, v2.SealRequest{Name: name, CredentialType: "t", Values: map[string]string{"k": name}}, nil))(t)
		found, err := c.V2.UnsealCredentialByName(ctx, name)
		if err != nil || found.CredentialId != sealed.CredentialId || found.Name != name || found.Values["k"] != name {
			t.Errorf("%q: %+v, %v", name, found, err)
		}
	}
}

// Every refusal of the real service is the error that its documentation says.
func TestTheClientTellsRefusalsApart(t *testing.T) {
	o := newTour(t)
	ctx, c, weak := t.Context(), o.connect(client.WithAPIKey(o.Key)), o.connect(client.WithAPIKey(o.GrantKey(authz.ComplianceRead)))
	taken := v2.RegisterRequest{Email: "taken@example.org", Password: servertest.Password, TenantName: "Taken"}
	answered(c.V2.RegisterUser(ctx, taken))(t)
	limited := o.connect(client.WithAPIKey(o.GrantKeyIn(o.Stranger().Tenant, authz.VaultRead)))
	operator := o.connect(client.WithAPIKey(o.SystemKey()))
	answered(operator.V2.SetTenantLimits(ctx, string(o.Stranger().Tenant), v2.LimitTenantRequest{V2: pointer(1)}))(t)
	answered(limited.V2.ListCredentials(ctx, nil))(t)
	all := []error{
		client.ErrInvalid, client.ErrUnauthenticated, client.ErrForbidden, client.ErrNotFound, client.ErrConflict,
		client.ErrRateLimited, client.ErrUnavailable,
	}
	check := func(name string, err error, want error, status int) {
		t.Helper()
		var e *client.Error
		if !errors.As(err, &e) {
			t.Errorf("%s: %v", name, err)
			return
		}
		if e.Status != status || e.Code != status || e.Message == "" || !authz.ValidID("req", e.RequestID) || (e.RetryAfter > 0) != (status == 429) {
			t.Errorf("%s: %+v", name, e)
		}
		for _, other := range all {
			if errors.Is(err, other) != (other == want) {
				t.Errorf("%s: %v is %v", name, err, other)
			}
		}
	}
	_, err := c.V1.EncryptData(ctx, v1.EncryptRequest{Algorithm: "RSA", Data: "x"})
	check("a wrong request of v1", err, client.ErrInvalid, 400)
	_, err = c.V2.SealCredential(ctx, v2.SealRequest{}, nil)
	check("a wrong request of v2", err, client.ErrInvalid, 422)
	_, err = c.V2.EncryptData(ctx, v2.EncryptRequest{Data: strings.Repeat("x", servertest.TooLarge)})
	check("a huge request", err, client.ErrInvalid, 413)
	_, err = o.connect(client.WithAPIKey("lk_live_x")).V2.ListCredentials(ctx, nil)
	check("no credential", err, client.ErrUnauthenticated, 401)
	_, err = weak.V2.ListCredentials(ctx, nil)
	check("no scope", err, client.ErrForbidden, 403)
	_, err = c.V2.UnsealCredential(ctx, authz.NewID("cred"))
	check("no such credential", err, client.ErrForbidden, 403)
	check("no such API key", c.V2.RevokeAPIKey(ctx, authz.NewID("key")), client.ErrNotFound, 404)
	_, err = c.V2.RegisterUser(ctx, taken)
	check("a taken address", err, client.ErrConflict, 409)
	_, err = limited.V2.ListCredentials(ctx, nil)
	check("over the limit", err, client.ErrRateLimited, 429)
	succeeds(t, o.Store.Close())
	_, err = c.V2.ListCredentials(ctx, nil)
	check("no store", err, client.ErrUnavailable, 503)
}

// An access token that expires while many calls are under way is renewed once;
// when the session is over, the calls say so.
func TestTheClientOutlivesItsAccessToken(t *testing.T) {
	o := newTour(t)
	ctx, c := t.Context(), o.connect()
	o.Register("long@example.org")
	answered(c.V2.Login(ctx, v2.LoginRequest{Email: "long@example.org", Password: servertest.Password}))(t)
	for range 3 {
		o.Clock.Advance(31 * time.Minute)
		before := o.called["v2 refreshSession"]
		var calls sync.WaitGroup
		for range 20 {
			calls.Go(func() {
				if _, err := c.V2.ListCredentials(ctx, nil); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
		if n := o.called["v2 refreshSession"] - before; n != 1 {
			t.Errorf("%d refreshes for 20 calls", n)
		}
	}
	o.Clock.Advance(7 * 24 * time.Hour)
	if _, err := c.V2.ListCredentials(ctx, nil); !errors.Is(err, client.ErrUnauthenticated) {
		t.Errorf("after the session: %v", err)
	}
}
