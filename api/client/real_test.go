package client_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/quotedprintable"
	"net/http"
	"net/mail"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/latticekeep/latticekeep/api/openapi/v1"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/app"
)

// TestMain runs the examples and the tests of this file against a development server in this
// process.
func TestMain(m *testing.M) {
	code, err := withServer(m.Run)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func withServer(run func() int) (code int, err error) {
	dir, err := os.MkdirTemp("", "latticekeep-client-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	ctx, stop := context.WithCancel(context.Background())
	stdout, line := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := app.Dev(ctx, app.DevConfig{
			DataDir: filepath.Join(dir, "data"), Listen: "127.0.0.1:0", Stdout: line, Stderr: io.Discard,
			Patience: time.Minute, // a busy machine is slow at checking passwords
		})
		line.CloseWithError(errors.Join(err, io.EOF))
		done <- err
	}()
	defer func() { err = errors.Join(err, <-done) }()
	defer stop()
	var ready struct {
		BaseURL string `json:"base_url"`
		APIKey  string `json:"api_key"`
		DataDir string `json:"data_dir"`
	}
	if err := json.NewDecoder(stdout).Decode(&ready); err != nil {
		return 1, fmt.Errorf("no ready line: %w", err)
	}
	for name, value := range map[string]string{"BASE": ready.BaseURL, "KEY": ready.APIKey, "DATA": ready.DataDir} {
		if err := os.Setenv(name, value); err != nil {
			return 1, err
		}
	}
	return run(), nil
}

func connect(t *testing.T, options ...client.Option) *client.Client {
	t.Helper()
	c, err := client.New(os.Getenv("BASE"), options...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func withKey() client.Option { return client.WithAPIKey(os.Getenv("KEY")) }

// must returns the answer of a call that must succeed.
func must[T any](answer *T, err error) func(*testing.T) *T {
	return func(t *testing.T) *T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
}

func succeeds(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func fails(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%v, want: %v", err, want)
	}
}

func TestTheLifeOfACredential(t *testing.T) {
	ctx, c := t.Context(), connect(t, withKey())
	own, name := rand.Text(), "life-"+rand.Text()
	request := v2.SealRequest{Name: name, CredentialType: "database", Values: map[string]string{"password": "one"}}
	sealed := must(c.V2.SealCredential(ctx, request, &v2.SealCredentialParams{IdempotencyKey: &own}))(t)
	again := must(c.V2.SealCredential(ctx, request, &v2.SealCredentialParams{IdempotencyKey: &own}))(t)
	if again.CredentialId != sealed.CredentialId {
		t.Error("the same request made two credentials")
	}
	request.Name = "another"
	_, err := c.V2.SealCredential(ctx, request, &v2.SealCredentialParams{IdempotencyKey: &own})
	fails(t, err, client.ErrInvalid)

	id := sealed.CredentialId
	must(c.V2.ReplaceCredential(ctx, id, v2.ReplaceRequest{Values: map[string]string{"password": "two"}}))(t)
	must(c.V2.RotateCredential(ctx, id))(t)
	byName := must(c.V2.UnsealCredentialByName(ctx, name))(t)
	if byName.CredentialId != id || byName.Version != 3 || byName.Values["password"] != "two" {
		t.Errorf("%s version %d", byName.CredentialId, byName.Version)
	}
	versions := must(c.V2.ListCredentialVersions(ctx, id))(t).Versions
	if len(versions) != 3 || versions[0].Version != 3 || !versions[0].Current || versions[2].Current {
		t.Errorf("%+v", versions)
	}
	var tag string
	must(c.V2.GetCredentialMetadata(ctx, id, client.EntityTag(&tag)))(t)
	_, err = c.V2.UnsealCredential(ctx, id, client.OtherThan(tag), client.Wait(1))
	fails(t, err, client.ErrNotModified)
	must(c.V2.RotateCredential(ctx, id, client.IfMatch(tag)))(t)
	if next := must(c.V2.UnsealCredentialByName(ctx, name, client.OtherThan(tag), client.Wait(55)))(t); next.Version != 4 {
		t.Error("another version than the next:", next.Version)
	}
	_, err = c.V2.ReplaceCredential(ctx, id, v2.ReplaceRequest{Values: map[string]string{"password": "lost"}}, client.IfMatch(tag))
	fails(t, err, client.ErrPreconditionFailed)
	fails(t, c.V2.DeleteCredential(ctx, id, client.IfMatch(tag)), client.ErrPreconditionFailed)
	two := "two"
	must(c.V2.PatchCredential(ctx, id, v2.PatchRequest{Values: map[string]*string{"user": &two, "password": nil}}))(t)
	stored := must(c.V2.PutCredentialByName(ctx, name, v2.PutRequest{CredentialType: "database", Values: map[string]string{"password": "three"}}))(t)
	_, err = c.V2.PutCredentialByName(ctx, name, v2.PutRequest{CredentialType: "database", Values: map[string]string{"password": "lost"}}, client.IfNoneMatch())
	fails(t, err, client.ErrPreconditionFailed)
	if stored.CredentialId != id || stored.Version != 6 {
		t.Errorf("%s version %d", stored.CredentialId, stored.Version)
	}
	moved := must(c.V2.RenameCredential(ctx, id, v2.RenameRequest{Name: name + "/moved"}))(t)
	if moved.CredentialId != id || moved.Version != 7 || !moved.ExpiresAt.Equal(stored.ExpiresAt) {
		t.Errorf("renamed: %+v", moved)
	}
	if trashed := must(c.V2.TrashCredential(ctx, id))(t); trashed.Trashed == nil || trashed.Status != "expired" {
		t.Errorf("trashed: %+v", trashed)
	}
	if renewed := must(c.V2.RenewCredential(ctx, id, v2.RenewRequest{}))(t); renewed.Trashed != nil || renewed.Version != 9 {
		t.Errorf("renewed: %+v", renewed)
	}
	one := 1
	page := must(c.V2.ListCredentials(ctx, &v2.ListCredentialsParams{Limit: &one}))(t)
	if len(page.Credentials) != 1 {
		t.Errorf("a page of one has %d", len(page.Credentials))
	}
	entries := must(c.V2.QueryAuditLog(ctx, &v2.QueryAuditLogParams{Limit: &one}))(t)
	if len(entries.Entries) != 1 || entries.NextCursor == nil {
		t.Errorf("%d entries", len(entries.Entries))
	}
	succeeds(t, c.V2.DeleteCredential(ctx, id))
	_, err = c.V2.UnsealCredential(ctx, id)
	fails(t, err, client.ErrForbidden)
}

func TestACredentialMayHaveDotsInItsName(t *testing.T) {
	ctx, c := t.Context(), connect(t, withKey())
	for _, name := range []string{".", "..", "../" + rand.Text()} { // no name is made of dots, and none of them leads elsewhere
		_, err := c.V2.SealCredential(ctx, v2.SealRequest{Name: name, CredentialType: "database", Values: map[string]string{"k": name}}, nil)
		fails(t, err, client.ErrInvalid)
		_, err = c.V2.UnsealCredentialByName(ctx, name)
		fails(t, err, client.ErrForbidden)
	}
	for _, name := range []string{"..." + rand.Text(), "a/..b/" + rand.Text(), "%2E%2E" + rand.Text()} {
		sealed := must(c.V2.SealCredential(ctx, v2.SealRequest{Name: name, CredentialType: "database", Values: map[string]string{"k": name}}, nil))(t)
		if got := must(c.V2.UnsealCredentialByName(ctx, name))(t); got.CredentialId != sealed.CredentialId || got.Values["k"] != name {
			t.Errorf("%q is answered with another", name)
		}
	}
	_, err := c.V2.UnsealCredential(ctx, "..")
	fails(t, err, client.ErrForbidden)
	fails(t, c.V2.DeleteCredential(ctx, "."), client.ErrForbidden)
	_, err = c.V2.UnsealCredentialByName(ctx, "")
	fails(t, err, client.ErrInvalid)
}

func TestBatchesAnswerEachItem(t *testing.T) {
	ctx, c := t.Context(), connect(t, withKey())
	encrypted := must(c.V2.EncryptBatch(ctx, v2.EncryptBatchRequest{Items: []v2.EncryptItem{{Data: "a"}, {Data: "b"}}}))(t).Results
	items := make([]v2.DecryptRequest, len(encrypted))
	for i, e := range encrypted {
		items[i] = v2.DecryptRequest{CiphertextKem: e.CiphertextKem, CiphertextData: e.CiphertextData, Nonce: e.Nonce}
	}
	items = append(items, v2.DecryptRequest{CiphertextKem: items[0].CiphertextKem, CiphertextData: items[1].CiphertextData, Nonce: items[0].Nonce})
	opened := must(c.V2.DecryptBatch(ctx, v2.DecryptBatchRequest{Items: items}))(t).Results
	if len(opened) != 3 || *opened[0].Data != "a" || *opened[1].Data != "b" || opened[2].Data != nil || opened[2].Error == nil {
		t.Errorf("%d results", len(opened))
	}
	_, err := c.V2.DecryptData(ctx, items[2])
	fails(t, err, client.ErrInvalid)

	signed := must(c.V2.SignBatch(ctx, v2.SignBatchRequest{Items: []v2.SignRequest{{Data: "a"}}}))(t).Results
	checks := []v2.VerifyRequest{{Data: "a"}, {Data: "b"}}
	for i := range checks {
		checks[i].PqcSignature, checks[i].HmacSignature = signed[0].PqcSignature, signed[0].HmacSignature
	}
	verified := must(c.V2.VerifyBatch(ctx, v2.VerifyBatchRequest{Items: checks}))(t).Results
	if len(verified) != 2 || !verified[0].Valid || verified[1].Valid {
		t.Errorf("%+v", verified)
	}
	keys := must(c.V2.ListPublicKeys(ctx))(t).Keys
	if len(keys) == 0 || keys[0].Kid != signed[0].KeyId {
		t.Errorf("%d public keys, and not that of the signature", len(keys))
	}
}

func TestKeysOfVersion1(t *testing.T) {
	ctx, c := t.Context(), connect(t, withKey())
	days := 30
	key := must(c.V1.GenerateKey(ctx, v1.GenerateKeyRequest{Algorithm: "ML-KEM-768", Name: "monthly", RotationPeriod: &days}))(t)
	list := must(c.V1.ListKeys(ctx, nil))(t)
	if !slices.ContainsFunc(list.Keys, func(k v1.Key) bool { return k.KeyId == key.KeyId && k.RotationPeriod == days }) {
		t.Errorf("the key is not among %d", list.Total)
	}
	must(c.V1.QueryAuditLogs(ctx, nil))(t)
	_, err := c.V1.RotateKey(ctx, "tkey_of_nobody", v1.RotateKeyRequest{})
	fails(t, err, client.ErrNotFound)
	_, err = connect(t).V1.ListKeys(ctx, nil)
	fails(t, err, client.ErrUnauthenticated)
}

const password = "correct horse battery staple"

// person returns the address of a new user.
func person() string { return strings.ToLower(rand.Text()) + "@example.org" }

// mailed waits for an e-mail to an address and returns the token in it.
func mailed(t *testing.T, to string) string {
	t.Helper()
	look, end := time.NewTicker(20*time.Millisecond), time.After(time.Minute)
	defer look.Stop()
	for {
		files, err := filepath.Glob(filepath.Join(os.Getenv("DATA"), "mail", "*.eml"))
		succeeds(t, err)
		for _, file := range files {
			if token := tokenIn(t, file, to); token != "" {
				return token
			}
		}
		select {
		case <-look.C:
		case <-end:
			t.Fatal("there is no mail to ", to)
		}
	}
}

var token = regexp.MustCompile(`"token":"([^"]+)"`)

// tokenIn returns the token in an e-mail, or "" if the e-mail is for another recipient.
func tokenIn(t *testing.T, file, to string) string {
	t.Helper()
	f, err := os.Open(file)
	succeeds(t, err)
	defer f.Close()
	m, err := mail.ReadMessage(f)
	succeeds(t, err)
	if m.Header.Get("To") != "<"+to+">" {
		return ""
	}
	if m.Header.Get("Content-Transfer-Encoding") == "quoted-printable" {
		m.Body = quotedprintable.NewReader(m.Body)
	}
	text, err := io.ReadAll(m.Body)
	succeeds(t, err)
	found := token.FindSubmatch(text)
	if found == nil {
		t.Fatal("a mail without a token")
	}
	return string(found[1])
}

func TestTheLifeOfAUser(t *testing.T) {
	ctx, owner := t.Context(), connect(t)
	address, invited := person(), person()
	registered := must(owner.V2.RegisterUser(ctx, v2.RegisterRequest{Email: address, Password: password, TenantName: "Life"}))(t)
	_, err := owner.V2.RegisterUser(ctx, v2.RegisterRequest{Email: address, Password: password, TenantName: "Life"})
	fails(t, err, client.ErrConflict)
	_, err = owner.V2.Login(ctx, v2.LoginRequest{Email: address, Password: "wrong"})
	fails(t, err, client.ErrUnauthenticated)
	must(owner.V2.Login(ctx, v2.LoginRequest{Email: address, Password: password}))(t)

	succeeds(t, owner.V2.VerifyEmail(ctx, v2.TokenRequest{Token: mailed(t, address)}))
	if me := must(owner.V2.GetAccount(ctx))(t); me.User == nil || !me.User.EmailVerified || me.Tenant.TenantId != registered.Tenant.TenantId {
		t.Errorf("%+v", me)
	}
	must(owner.V2.InviteMember(ctx, v2.InviteRequest{Email: invited, Role: "member"}))(t)
	guest := connect(t)
	must(guest.V2.AcceptInvitation(ctx, v2.AcceptInvitationRequest{Token: mailed(t, invited), Password: password}))(t)
	must(guest.V2.Login(ctx, v2.LoginRequest{Email: invited, Password: password}))(t)
	members := must(owner.V2.ListMembers(ctx))(t)
	if len(members.Members) != 2 || len(members.Invitations) != 0 {
		t.Errorf("%+v", members)
	}
	fails(t, owner.V2.RemoveMember(ctx, registered.User.UserId), client.ErrConflict)

	key := must(owner.V2.CreateAPIKey(ctx, v2.CreateAPIKeyRequest{Name: "ci", Scopes: []v2.Scope{"vault:read"}}))(t)
	machine := connect(t, client.WithAPIKey(key.ApiKey))
	must(machine.V2.ListCredentials(ctx, nil))(t)
	_, err = machine.V2.ListMembers(ctx)
	fails(t, err, client.ErrForbidden)
	succeeds(t, owner.V2.RevokeAPIKey(ctx, key.KeyId))
	_, err = machine.V2.ListCredentials(ctx, nil)
	fails(t, err, client.ErrUnauthenticated)

	// Two clients of one user have a session each. A password change ends the other session.
	second := connect(t)
	must(second.V2.Login(ctx, v2.LoginRequest{Email: address, Password: password}))(t)
	if sessions := must(owner.V2.ListSessions(ctx))(t).Sessions; len(sessions) != 2 {
		t.Errorf("%d sessions", len(sessions))
	}
	succeeds(t, owner.V2.ChangePassword(ctx, v2.ChangePasswordRequest{CurrentPassword: password, NewPassword: password + "!"}))
	_, err = second.V2.GetAccount(ctx)
	fails(t, err, client.ErrUnauthenticated)
	must(owner.V2.GetAccount(ctx))(t)
	succeeds(t, owner.V2.Logout(ctx))
	_, err = owner.V2.GetAccount(ctx)
	fails(t, err, client.ErrUnauthenticated)
}

// TestManyCallsSurviveAnExpiredToken replaces the access token in transit, as if it had expired for
// all calls at once.
func TestManyCallsSurviveAnExpiredToken(t *testing.T) {
	spoil := &spoiler{}
	defer http.DefaultClient.CloseIdleConnections() // the server would wait for a connection that was opened and not used
	ctx, c := t.Context(), connect(t, client.WithHTTPClient(&http.Client{Transport: spoil}))
	address := person()
	must(c.V2.RegisterUser(ctx, v2.RegisterRequest{Email: address, Password: password, TenantName: "Many"}))(t)
	first := must(c.V2.Login(ctx, v2.LoginRequest{Email: address, Password: password}))(t)
	spoil.token("Bearer " + first.AccessToken)
	var calls sync.WaitGroup
	for range 20 {
		calls.Go(func() {
			if _, err := c.V2.GetAccount(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	calls.Wait()
	if sessions := must(c.V2.ListSessions(ctx))(t).Sessions; len(sessions) != 1 {
		t.Errorf("%d sessions", len(sessions))
	}
}

// spoiler replaces one Authorization header with a wrong one until the session is renewed.
type spoiler struct {
	mu  sync.Mutex
	bad string
}

func (s *spoiler) token(header string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bad = header
}

func (s *spoiler) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasSuffix(r.URL.Path, "/auth/refresh") {
		s.token("") // the next token of the same second may be identical
	}
	s.mu.Lock()
	bad := s.bad
	s.mu.Unlock()
	if bad != "" && r.Header.Get("Authorization") == bad {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", bad+"x")
	}
	return http.DefaultTransport.RoundTrip(r)
}

func TestOperationalEndpoints(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	must(c.V2.GetHealth(ctx))(t)
	must(c.V2.GetReadiness(ctx))(t)
	must(c.V2.GetSealingKey(ctx))(t)
	for name, call := range map[string]func(context.Context) (string, error){
		"contract of v1": c.V1.GetContract, "contract of v2": c.V2.GetContract,
	} {
		if text, err := call(ctx); err != nil || len(text) < 1000 {
			t.Errorf("%s: %d bytes, %v", name, len(text), err)
		}
	}
	_, err := c.V2.GetMetrics(ctx)
	fails(t, err, client.ErrUnauthenticated)
	_, err = connect(t, withKey()).V2.GetMetrics(ctx) // a tenant's key
	fails(t, err, client.ErrForbidden)
}
