// Command make runs the program of an earlier commit through its command line, its REST API and a
// Kubernetes control plane until its data directory contains every kind of row. It then writes the
// fixture of test/upgrade. README.md there says how to run it.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v1 "github.com/latticekeep/latticekeep/api/openapi/v1"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/test/kubetest"
	"github.com/latticekeep/latticekeep/test/upgrade"
)

const patience = 2 * time.Minute // time for anything to become ready

func main() {
	var m maker
	flag.StringVar(&m.binary, "binary", "", "program of the earlier commit")
	flag.StringVar(&m.impatient, "impatient", "", "the same, built to wait less (README.md)")
	flag.StringVar(&m.known.Commit, "commit", "", "that commit")
	flag.StringVar(&m.output, "output", "test/upgrade/testdata", "folder to write the fixture to")
	flag.Parse()
	if err := m.run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

type maker struct {
	binary, impatient, output string

	dir   string // working directory
	plane *kubetest.ControlPlane
	known upgrade.Known

	keyFile string // current KMS key
	more    string // additional lines of the configuration
	system  *client.Client
}

func (m *maker) path(names ...string) string {
	return filepath.Join(append([]string{m.dir}, names...)...)
}

func (m *maker) run(ctx context.Context) (err error) {
	m.known.MadeAt = time.Now().UTC().Truncate(time.Second)
	m.known.APIKeys = map[string]string{}
	if m.dir, err = os.MkdirTemp("", "latticekeep-fixture-"); err != nil {
		return err
	}
	defer os.RemoveAll(m.dir)
	if err := errors.Join(os.Mkdir(m.path("keys"), 0o700), os.Mkdir(m.path("archive"), 0o700), os.Mkdir(m.path("anchors"), 0o700)); err != nil {
		return err
	}
	if m.plane, err = kubetest.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.plane.Stop()) }()
	for _, step := range []func(context.Context) error{m.develop, m.backUp, m.archive, m.rollBack, m.assessDay, m.produce, m.write} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// server is a server of the earlier program.
type server struct {
	process *kubetest.Process
	log     string
	ready   struct {
		BaseURL  string `json:"base_url"`
		TenantID string `json:"tenant_id"`
		APIKey   string `json:"api_key"`
		Identity string `json:"identity"`
		Chain    string `json:"chain"`
	}
}

func (m *maker) serve(ctx context.Context, binary string, args ...string) (*server, error) {
	s := &server{log: m.path("server.log")}
	stdout, err := os.Create(m.path("ready.json"))
	if err != nil {
		return nil, err
	}
	defer stdout.Close()
	stderr, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer stderr.Close()
	cmd := exec.Command(binary, append([]string{"server", "--listen", "127.0.0.1:0"}, args...)...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if s.process, err = kubetest.StartProcess(cmd); err != nil {
		return nil, err
	}
	err = until(ctx, "the server to be ready", func() (bool, error) {
		select {
		case <-s.process.Done():
			return false, errors.New("the server ended")
		default:
		}
		line, err := os.ReadFile(stdout.Name())
		return err == nil && bytes.HasSuffix(line, []byte("\n")) && json.Unmarshal(line, &s.ready) == nil, nil
	})
	if err != nil {
		text, _ := os.ReadFile(s.log)
		return nil, fmt.Errorf("%w\n%s", err, text)
	}
	return s, nil
}

func (s *server) stop() error { return s.process.Stop(30 * time.Second) }

func until(ctx context.Context, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		if ok, err := done(); err != nil || ok {
			return err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, ctx.Err())
		}
	}
}

func connect(s *server, key string) (*client.Client, error) {
	return client.New(s.ready.BaseURL, client.WithAPIKey(key))
}

func (m *maker) cli(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, m.binary, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return out, nil
}

func (m *maker) kubectl(ctx context.Context, stdin []byte, args ...string) ([]byte, error) {
	cmd := m.plane.Kubectl(ctx, args...)
	cmd.Stdin = bytes.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return out, nil
}

// seal seals credentials over REST.
func (m *maker) seal(ctx context.Context, c *client.Client, tenant, name string, key *string) (upgrade.Credential, error) {
	values := map[string]string{"user": name, "password": "throw-away " + name}
	sealed, err := c.V2.SealCredential(ctx, v2.SealRequest{Name: name, CredentialType: "database", TtlDays: new(3650), Values: values},
		&v2.SealCredentialParams{IdempotencyKey: key})
	if err != nil {
		return upgrade.Credential{}, err
	}
	return upgrade.Credential{Tenant: tenant, ID: sealed.CredentialId, Name: name, Version: sealed.Version, ExpiresAt: sealed.ExpiresAt, Values: values}, nil
}

// develop begins the deployment as a development server with an operator. Its accounts' e-mails are
// files, and it has credentials that belong to objects.
func (m *maker) develop(ctx context.Context) error {
	if _, err := m.kubectl(ctx, nil, "create", "namespace", "shop"); err != nil {
		return err
	}
	s, err := m.serve(ctx, m.binary, "--dev", "--data-dir", m.path("data"), "--kubeconfig", m.plane.Kubeconfig)
	if err != nil {
		return err
	}
	defer func() { _ = s.process.Stop(0) }() // the result is known by then
	c, err := connect(s, s.ready.APIKey)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(s.log)
	if err != nil {
		return err
	}
	m.known.Identity, m.known.Chain = lineAfter(text, "identity: "), lineAfter(text, "chain: ")
	m.known.SystemKey = lineAfter(text, "  export SYSTEM_KEY=")
	dev := s.ready.TenantID
	longLived, err := c.V2.CreateAPIKey(ctx, v2.CreateAPIKeyRequest{Name: "fixture", Scopes: tenantScopes})
	if err != nil {
		return fmt.Errorf("making an API key: %w", err)
	}
	m.known.APIKeys[dev] = longLived.ApiKey
	revoked, err := c.V2.CreateAPIKey(ctx, v2.CreateAPIKeyRequest{Name: "revoked", Scopes: tenantScopes, ExpiresInDays: new(30)})
	if err != nil {
		return err
	}
	m.known.RevokedKey = revoked.ApiKey
	if err := c.V2.RevokeAPIKey(ctx, revoked.KeyId); err != nil {
		return err
	}
	first, err := m.seal(ctx, c, dev, "first", nil)
	if err != nil {
		return err
	}
	m.known.Credentials = append(m.known.Credentials, first)
	m.known.Backup = upgrade.BackupSummary{Credential: first, APIKey: longLived.ApiKey}

	if err := m.makeAccounts(ctx, s); err != nil {
		return err
	}
	if err := m.applyObjects(ctx, s, dev); err != nil {
		text, _ := m.kubectl(ctx, nil, "get", "sealedcredentials", "-A", "-o", "yaml")
		return fmt.Errorf("%w\n%s", err, text)
	}
	return s.stop()
}

var tenantScopes = []v2.Scope{"vault:read", "vault:write", "audit:read", "account:admin", "compliance:read",
	"crypto:encrypt", "crypto:decrypt", "crypto:sign", "crypto:verify", "keys:read", "keys:write"}

func lineAfter(text []byte, prefix string) string {
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// mailedToken waits for the e-mail with a token.
func (m *maker) mailedToken(ctx context.Context, kind string) (token string, err error) {
	pattern := regexp.MustCompile(`lk_` + kind + `_[a-z2-7]{40,}`)
	err = until(ctx, "a mail", func() (bool, error) {
		files, err := filepath.Glob(m.path("data", "mail", "*.eml"))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				return false, err
			}
			text = bytes.ReplaceAll(bytes.ReplaceAll(text, []byte("=\r\n"), nil), []byte("=3D"), []byte("="))
			if found := pattern.Find(text); found != nil {
				token = string(found)
				return true, os.Remove(file)
			}
		}
		return false, err
	})
	return token, err
}

func (m *maker) makeAccounts(ctx context.Context, s *server) error {
	owner := upgrade.User{Email: "owner@fixture.example", Password: "throw-away password of the owner", Role: "owner"}
	c, err := client.New(s.ready.BaseURL)
	if err != nil {
		return err
	}
	registered, err := c.V2.RegisterUser(ctx, v2.RegisterRequest{Email: owner.Email, Password: owner.Password, TenantName: "registered"})
	if err != nil {
		return fmt.Errorf("registering: %w", err)
	}
	owner.Tenant = registered.Tenant.TenantId
	token, err := m.mailedToken(ctx, "verify")
	if err != nil {
		return err
	}
	if err := c.V2.VerifyEmail(ctx, v2.TokenRequest{Token: token}); err != nil {
		return err
	}
	if _, err := c.V2.Login(ctx, v2.LoginRequest{Email: owner.Email, Password: owner.Password}); err != nil {
		return err
	}
	auditor := upgrade.User{Tenant: owner.Tenant, Email: "auditor@fixture.example", Password: "throw-away password of the auditor", Role: "auditor"}
	if _, err := c.V2.InviteMember(ctx, v2.InviteRequest{Email: auditor.Email, Role: "auditor"}); err != nil {
		return err
	}
	if token, err = m.mailedToken(ctx, "invite"); err != nil {
		return err
	}
	if _, err := c.V2.AcceptInvitation(ctx, v2.AcceptInvitationRequest{Token: token, Password: auditor.Password}); err != nil {
		return err
	}
	key, err := c.V2.CreateAPIKey(ctx, v2.CreateAPIKeyRequest{Name: "of the owner", Scopes: []v2.Scope{"vault:read", "vault:write"}})
	if err != nil {
		return err
	}
	m.known.APIKeys[owner.Tenant] = key.ApiKey
	m.known.Users = append(m.known.Users, owner, auditor)
	withKey, err := connect(s, key.ApiKey)
	if err != nil {
		return err
	}
	of, err := m.seal(ctx, withKey, owner.Tenant, "of-the-owner", nil)
	m.known.Credentials = append(m.known.Credentials, of)
	return err
}

// applyObjects creates one SealedCredential for each source of values.
func (m *maker) applyObjects(ctx context.Context, s *server, tenant string) error {
	secret := []byte("apiVersion: v1\nkind: Secret\nmetadata: {name: sealed, namespace: default}\nstringData: {password: throw-away sealed}\n")
	if err := os.WriteFile(m.path("secret.yaml"), secret, 0o600); err != nil {
		return err
	}
	manifest, err := m.cli(ctx, "seal", "-f", m.path("secret.yaml"), "--type", "database", "--ttl-days", "3650", "--url", s.ready.BaseURL, "--identity", m.known.Identity)
	if err != nil {
		return err
	}
	m.known.Sealing.Manifest = string(manifest)
	rest := `
apiVersion: v1
kind: Secret
metadata: {name: legacy, namespace: default, annotations: {latticekeep.dev/import: imported}}
stringData: {token: throw-away imported}
---
apiVersion: latticekeep.dev/v1alpha1
kind: SealedCredential
metadata: {name: imported, namespace: default}
spec:
  credentialType: api-key
  ttlDays: 3650
  valuesFrom: {secretRef: {name: legacy}}
---
apiVersion: latticekeep.dev/v1alpha1
kind: SealedCredential
metadata: {name: generated, namespace: default}
spec:
  credentialType: session-key
  ttlDays: 3650
  generate:
  - key: password
    random: {length: 40, charset: ASCII}
  target:
    name: generated
    keys:
    - {to: password, from: password}
  rotation: {policy: Regenerate, before: 720h, overlap: 80000h, trigger: %s}
---
apiVersion: latticekeep.dev/v1alpha1
kind: SealedCredential
metadata: {name: in-shop, namespace: shop}
spec:
  credentialType: session-key
  ttlDays: 3650
  generate:
  - key: password
    random: {length: 40, charset: ASCII}
`
	if _, err := m.kubectl(ctx, manifest, "apply", "-f", "-"); err != nil {
		return err
	}
	for _, trigger := range []string{"once", "twice"} {
		if _, err := m.kubectl(ctx, fmt.Appendf(nil, rest, trigger), "apply", "-f", "-"); err != nil {
			return err
		}
		if _, err := m.kubectl(ctx, nil, "wait", "--for=condition=Ready", "sealedcredential", "--all", "-A", "--timeout=120s"); err != nil {
			return err
		}
	}
	c, err := connect(s, m.known.APIKeys[tenant])
	if err != nil {
		return err
	}
	for _, name := range []string{"sealed", "imported", "generated"} {
		var id []byte
		err := until(ctx, name, func() (bool, error) {
			id, err = m.kubectl(ctx, nil, "get", "sealedcredential", name, "-n", "default", "-o", "jsonpath={.status.credentialID} {.status.version}")
			return err == nil && (name != "generated" || bytes.HasSuffix(id, []byte(" 2"))), err
		})
		if err != nil {
			return err
		}
		credential, _, _ := strings.Cut(string(id), " ")
		got, err := c.V2.UnsealCredential(ctx, credential)
		if err != nil {
			return fmt.Errorf("unsealing %s: %w", name, err)
		}
		m.known.Credentials = append(m.known.Credentials, upgrade.Credential{
			Tenant: tenant, ID: credential, Name: got.Name, Version: got.Version, ExpiresAt: got.ExpiresAt, Values: got.Values})
		if name != "generated" {
			continue
		}
		before, err := c.V2.UnsealCredentialVersion(ctx, credential, 1)
		if err != nil {
			return fmt.Errorf("unsealing the previous version of %s: %w", name, err)
		}
		m.known.Credentials = append(m.known.Credentials, upgrade.Credential{
			Tenant: tenant, ID: credential, Name: got.Name, Version: before.Version, ExpiresAt: m.known.MadeAt.Add(79999 * time.Hour), Values: before.Values})
	}
	return nil
}

// backUp moves the KMS key out of the data directory and takes a backup while the log is short.
func (m *maker) backUp(ctx context.Context) error {
	m.keyFile = m.path("keys", "kms-1.key")
	if err := os.Rename(m.path("data", "kms.key"), m.keyFile); err != nil {
		return err
	}
	recipient, err := m.cli(ctx, "backup", "keygen", "--output", m.path("backup.identity"))
	if err != nil {
		return err
	}
	_, err = m.cli(ctx, "backup", "--data-dir", m.path("data"), "--kms-key-file", m.keyFile,
		"--recipient", strings.TrimSpace(string(recipient)), "--output", m.path("first.backup"))
	return err
}

// production starts a production server.
func (m *maker) production(ctx context.Context, binary, keep string) (*server, error) {
	config := fmt.Sprintf(`
listen: 127.0.0.1:0
publicURL: http://127.0.0.1:8200
dataDir: %q
systemKeyFile: %q
mail: {from: fixture@fixture.example, smtp: {address: "127.0.0.1:1", security: none}}
audit:
  signing: batch
  anchor: {bucket: "file://%s"}
  retention: {keep: %s, archive: "file://%s"}
kubernetes: {kubeconfig: %q, webhook: false%s}
`, m.path("data"), m.path("system.key"), m.path("anchors"), keep, m.path("archive"), m.plane.Kubeconfig, m.more)
	former, err := filepath.Glob(m.path("keys", "*.key"))
	if err != nil {
		return nil, err
	}
	former = slices.DeleteFunc(former, func(file string) bool { return file == m.keyFile })
	for i := range former {
		former[i] = fmt.Sprintf("%q", "file://"+former[i])
	}
	config += fmt.Sprintf("kms: {url: %q, former: [%s]}\n", "file://"+m.keyFile, strings.Join(former, ", "))
	if err := os.WriteFile(m.path("config.yaml"), []byte(config), 0o600); err != nil {
		return nil, err
	}
	s, err := m.serve(ctx, binary, "--config", m.path("config.yaml"))
	if err != nil {
		return nil, err
	}
	m.system, err = connect(s, m.known.SystemKey)
	return s, err
}

// archive moves the entries so far out of the database.
func (m *maker) archive(ctx context.Context) error {
	s, err := m.production(ctx, m.impatient, "1s")
	if err != nil {
		return err
	}
	defer func() { _ = s.process.Stop(0) }() // the result is known by then
	err = until(ctx, "an archived segment", func() (found bool, err error) {
		err = filepath.WalkDir(m.path("archive"), func(path string, _ fs.DirEntry, err error) error {
			found = found || strings.HasSuffix(path, ".jsonl.gz")
			return err
		})
		return found, err
	})
	if err != nil {
		text, _ := os.ReadFile(s.log)
		return fmt.Errorf("%w\n%s", err, text)
	}
	time.Sleep(5 * time.Second) // time to write the rows that name the object, and to remove the entries
	return s.stop()
}

// rollBack loses entries that the anchor knows, and accepts the loss.
func (m *maker) rollBack(ctx context.Context) error {
	copied := m.path("copy.db")
	if err := copyFile(m.path("data", "latticekeep.db"), copied); err != nil {
		return err
	}
	s, err := m.production(ctx, m.binary, "8760h")
	if err != nil {
		return err
	}
	defer func() { _ = s.process.Stop(0) }()
	if _, err := m.system.V2.CreateTenant(ctx, v2.CreateTenantRequest{Name: "lost"}); err != nil {
		return err
	}
	lost, err := m.system.V2.GetCheckpoint(ctx)
	if err != nil {
		return err
	}
	time.Sleep(15 * time.Second) // the anchor is written every ten seconds
	if err := s.stop(); err != nil {
		return err
	}
	if err := copyFile(copied, m.path("data", "latticekeep.db")); err != nil {
		return err
	}
	log.Printf("rolling back behind sequence %d", lost.Sequence)
	if s, err = m.production(ctx, m.binary, "8760h"); err != nil {
		return err
	}
	if _, err := m.cli(ctx, "audit", "accept-rollback", "--url", s.ready.BaseURL, "--api-key", m.known.SystemKey, "--reason", "fixture"); err != nil {
		return err
	}
	return s.stop()
}

// assessDay lets the daily assessment run, which covers the tenants that are a day old.
func (m *maker) assessDay(ctx context.Context) error {
	s, err := m.production(ctx, m.impatient, "8760h")
	if err != nil {
		return err
	}
	defer func() { _ = s.process.Stop(0) }() // the result is known by then
	time.Sleep(15 * time.Second)             // time for the first verification and the following maintenance
	return s.stop()
}

// produce creates the remaining rows over REST and the command line.
func (m *maker) produce(ctx context.Context) error {
	s, err := m.production(ctx, m.binary, "8760h")
	if err != nil {
		return err
	}
	defer func() { _ = s.process.Stop(0) }()
	made, err := m.system.V2.CreateTenant(ctx, v2.CreateTenantRequest{Name: "produced"})
	if err != nil {
		return err
	}
	tenant := made.Tenant.TenantId
	if _, err := m.system.V2.SetTenantLimits(ctx, tenant, v2.LimitTenantRequest{V2: new(4000)}); err != nil {
		return err
	}
	if _, err := m.system.V2.ActivateTenant(ctx, m.known.Users[0].Tenant); err != nil {
		return err
	}
	key, err := m.system.V2.CreateTenantAPIKey(ctx, tenant, v2.CreateAPIKeyRequest{Name: "fixture", Scopes: tenantScopes})
	if err != nil {
		return err
	}
	m.known.APIKeys[tenant] = key.ApiKey
	if err := s.stop(); err != nil {
		return err
	}

	// A second KMS key, and a namespace that belongs to the tenant.
	if m.keyFile, err = m.newKeyFile(); err != nil {
		return err
	}
	if _, err := m.kubectl(ctx, nil, "create", "namespace", "billing"); err != nil {
		return err
	}
	m.more = fmt.Sprintf(", namespaces: {billing: %s}", tenant)
	if s, err = m.production(ctx, m.binary, "8760h"); err != nil {
		return err
	}
	if _, err := m.cli(ctx, "kms", "rewrap", "--url", s.ready.BaseURL, "--api-key", m.known.SystemKey, "--destroy-old", "--yes"); err != nil {
		return err
	}
	c, err := connect(s, key.ApiKey)
	if err != nil {
		return err
	}
	if err := m.fillVault(ctx, c, tenant); err != nil {
		return fmt.Errorf("filling the vault: %w", err)
	}
	if err := m.fillTransit(ctx, c, tenant); err != nil {
		return fmt.Errorf("filling transit: %w", err)
	}
	if err := m.rotateSealingKeys(ctx); err != nil {
		return err
	}
	if err := m.assess(ctx, c); err != nil {
		return err
	}
	object := `
apiVersion: latticekeep.dev/v1alpha1
kind: SealedCredential
metadata: {name: in-billing, namespace: billing}
spec:
  credentialType: session-key
  ttlDays: 3650
  generate:
  - key: password
    random: {length: 40, charset: ASCII}
`
	if _, err := m.kubectl(ctx, []byte(object), "apply", "-f", "-"); err != nil {
		return err
	}
	if _, err := m.kubectl(ctx, nil, "wait", "--for=condition=Ready", "sealedcredential", "--all", "-n", "billing", "--timeout=120s"); err != nil {
		return err
	}
	if err := m.fillIdentity(ctx, s, c); err != nil {
		return err
	}
	time.Sleep(15 * time.Second) // time for the anchor, the follower and the daily work
	return s.stop()
}

func (m *maker) newKeyFile() (string, error) {
	file := m.path("keys", "kms-2.key")
	key := make([]byte, 32)
	for i := range key {
		key[i] = byte(i) // throw-away key
	}
	return file, os.WriteFile(file, []byte("latticekeep-kms-key-1:"+base64.StdEncoding.EncodeToString(key)+"\n"), 0o600)
}

func (m *maker) fillVault(ctx context.Context, c *client.Client, tenant string) error {
	for i, key := range []*string{nil, new("idempotent-1"), new("idempotent-2")} {
		sealed, err := m.seal(ctx, c, tenant, fmt.Sprint("credential-", i), key)
		if err != nil {
			return err
		}
		m.known.Credentials = append(m.known.Credentials, sealed)
	}
	replaced, err := m.seal(ctx, c, tenant, "replaced", nil)
	if err != nil {
		return err
	}
	replaced.Values = map[string]string{"password": "throw-away replacement"}
	again, err := c.V2.ReplaceCredential(ctx, replaced.ID, v2.ReplaceRequest{TtlDays: new(3650), Values: replaced.Values})
	if err != nil {
		return err
	}
	rotated, err := c.V2.RotateCredential(ctx, replaced.ID)
	if err != nil {
		return err
	}
	replaced.Version, replaced.ExpiresAt = rotated.Version, again.ExpiresAt
	m.known.Credentials = append(m.known.Credentials, replaced)
	deleted, err := m.seal(ctx, c, tenant, "deleted", nil)
	if err != nil {
		return err
	}
	m.known.Deleted = append(m.known.Deleted, deleted)
	if err := c.V2.DeleteCredential(ctx, deleted.ID); err != nil {
		return err
	}
	// Enough entries for a summary, in few commits.
	var group sync.WaitGroup
	errs := make([]error, 300)
	for i := range errs {
		group.Go(func() { _, errs[i] = c.V2.UnsealCredential(ctx, replaced.ID) })
	}
	group.Wait()
	return errors.Join(errs...)
}

func (m *maker) fillTransit(ctx context.Context, c *client.Client, tenant string) error {
	named, err := c.V2.CreateKey(ctx, v2.CreateKeyRequest{Name: "named", RotationPeriod: new(3650)})
	if err != nil {
		return err
	}
	other, err := c.V1.GenerateKey(ctx, v1.GenerateKeyRequest{Name: "of-version-1", Algorithm: v1.AlgorithmMLKEM768, RotationPeriod: new(3650)})
	if err != nil {
		return err
	}
	plain := base64.StdEncoding.EncodeToString([]byte("throw-away plaintext"))
	for range 2 { // one under each version of the keys
		encrypted, err := c.V2.EncryptData(ctx, v2.EncryptRequest{Data: plain})
		if err != nil {
			return err
		}
		first, err := c.V1.EncryptData(ctx, v1.EncryptRequest{Algorithm: v1.AlgorithmMLKEM768, Data: plain, KeyId: &other.KeyId})
		if err != nil {
			return err
		}
		m.known.Ciphertexts = append(m.known.Ciphertexts,
			upgrade.Ciphertext{Tenant: tenant, Interface: 2, KEM: encrypted.CiphertextKem, Nonce: encrypted.Nonce, Data: encrypted.CiphertextData, Plaintext: plain},
			upgrade.Ciphertext{Tenant: tenant, Interface: 1, Data: first.EncryptedData, Key: other.KeyId, Plaintext: plain})
		keys, err := c.V2.ListKeys(ctx, nil)
		if err != nil {
			return err
		}
		log.Printf("%d named keys, such as %s", len(keys.Keys), named.Key.KeyId)
		for _, k := range keys.Keys {
			if _, err := c.V2.RotateKey(ctx, k.KeyId, v2.RotateKeyRequest{}); err != nil {
				return err
			}
		}
	}
	signed, err := c.V2.SignData(ctx, v2.SignRequest{Data: plain})
	if err != nil {
		return err
	}
	m.known.Signatures = append(m.known.Signatures, upgrade.Signature{Tenant: tenant, Data: plain, PQC: signed.PqcSignature, HMAC: signed.HmacSignature})
	return nil
}

// rotateSealingKeys leaves one sealing key in each state. An object still needs the first one.
func (m *maker) rotateSealingKeys(ctx context.Context) error {
	retired, err := m.system.V2.RotateSealingKey(ctx)
	if err != nil {
		return err
	}
	if _, err := m.system.V2.RotateSealingKey(ctx); err != nil {
		return err
	}
	if _, err := m.system.V2.RetireSealingKey(ctx, retired.SealingKey.KeyId); err != nil {
		return err
	}
	list, err := m.system.V2.ListSealingKeys(ctx)
	if err != nil {
		return err
	}
	for _, k := range list.SealingKeys {
		m.known.Sealing.Keys = append(m.known.Sealing.Keys, upgrade.SealingKey{ID: k.KeyId, State: string(k.State)})
	}
	return nil
}

func (m *maker) assess(ctx context.Context, c *client.Client) error {
	if _, err := c.V2.GetComplianceScore(ctx, &v2.GetComplianceScoreParams{Framework: v2.FrameworkSoc2}); err != nil {
		return err
	}
	if _, err := c.V2.GetComplianceReport(ctx, &v2.GetComplianceReportParams{Framework: v2.FrameworkSoc2, Format: new(v2.GetComplianceReportParamsFormatOscal)}); err != nil {
		return err
	}
	checkpoint, err := m.system.V2.GetCheckpoint(ctx)
	if err != nil {
		return err
	}
	m.known.Checkpoint = checkpoint.Checkpoint
	return nil
}

// fillIdentity creates rows that expire: sessions, invitations with unsent e-mails, tickets and
// failures.
func (m *maker) fillIdentity(ctx context.Context, s *server, c *client.Client) error {
	if _, err := c.V2.InviteMember(ctx, v2.InviteRequest{Email: "nobody@fixture.example", Role: "member"}); err != nil {
		return err
	}
	user, err := client.New(s.ready.BaseURL)
	if err != nil {
		return err
	}
	owner := m.known.Users[0]
	if _, err := user.V2.Login(ctx, v2.LoginRequest{Email: owner.Email, Password: owner.Password}); err != nil {
		return err
	}
	if _, err := user.V2.RegisterUser(ctx, v2.RegisterRequest{Email: "trial@fixture.example", Password: "throw-away password on trial", TenantName: "trial"}); err != nil {
		return err
	}
	if err := user.V2.RequestPasswordReset(ctx, v2.EmailRequest{Email: "auditor@fixture.example"}); err != nil {
		return err
	}
	stranger, err := client.New(s.ready.BaseURL, client.WithRetries(0))
	if err != nil {
		return err
	}
	for range 3 {
		if _, err := stranger.V2.Login(ctx, v2.LoginRequest{Email: "trial@fixture.example", Password: "a wrong password"}); err == nil {
			return errors.New("a wrong password signs in")
		}
	}
	return nil
}

// write packs the fixture.
func (m *maker) write(context.Context) error {
	known, err := json.MarshalIndent(m.known, "", "  ")
	if err != nil {
		return err
	}
	if err := errors.Join(os.MkdirAll(m.output, 0o755), os.WriteFile(filepath.Join(m.output, "known.json"), append(known, '\n'), 0o644)); err != nil {
		return err
	}
	file, err := os.Create(filepath.Join(m.output, "fixture.tar.gz"))
	if err != nil {
		return err
	}
	zipped, err := gzip.NewWriterLevel(file, gzip.BestCompression)
	if err != nil {
		return err
	}
	packed := tar.NewWriter(zipped)
	for _, name := range []string{"data/latticekeep.db", "data/reports", "keys/kms-2.key", "archive", "anchors", "first.backup", "first.backup.sig", "backup.identity"} {
		err := filepath.WalkDir(m.path(name), func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			relative, err := filepath.Rel(m.dir, path)
			if err != nil {
				return err
			}
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			log.Printf("%8d %s", len(content), relative)
			return errors.Join(packed.WriteHeader(&tar.Header{Name: relative, Mode: 0o600, Size: int64(len(content))}), write(packed, content))
		})
		if err != nil {
			return err
		}
	}
	return errors.Join(packed.Close(), zipped.Close(), file.Close())
}

func write(w io.Writer, content []byte) error {
	_, err := w.Write(content)
	return err
}

func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, content, 0o600)
}
