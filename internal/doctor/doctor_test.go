package doctor_test

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/doctor"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/bolt"
	"github.com/latticekeep/latticekeep/internal/transit"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// house is a deployment with rows of most families.
type house struct {
	t        *testing.T
	path     string
	kms      keyring.KMS
	bare     bool // without a state, as an earlier release leaves the store
	raw      *bolt.Store
	log      *writer.Log
	keys     *keyring.Ring
	identity *identity.Service
	vault    *vault.Vault
	transit  *transit.Transit

	tenant authz.TenantID
	owner  authz.Principal
	secret string // of the API key that is revoked later
	apiKey string // its id
	user   identity.User
	named  string // id of the named key
	creds  []string
}

const password = "correct horse battery"

var stranger = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.Stranger, RequestID: "req_1", SourceIP: "192.0.2.1"}

func newHouse(t *testing.T) *house { return newHouseWith(t, false) }

func newHouseWith(t *testing.T, bare bool) *house {
	t.Helper()
	dir := t.TempDir()
	h := &house{t: t, bare: bare, path: filepath.Join(dir, "h.db")}
	h.must(kms.CreateLocal(filepath.Join(dir, "kms.key")))
	k, err := kms.OpenLocal(filepath.Join(dir, "kms.key"))
	h.must(err)
	h.kms = k
	h.open()
	t.Cleanup(func() { _ = h.raw.Close() })
	ctx := t.Context()
	h.tenant, _, err = h.identity.Dev(ctx)
	h.must(err)
	h.owner = authz.Principal{Tenant: h.tenant, Kind: authz.System, ID: "test", Scopes: authz.TenantScopes()}
	made, secretOf, err := h.identity.CreateAPIKey(ctx, h.owner, identity.APIKeyRequest{Name: "k", Scopes: []authz.Scope{authz.VaultRead}})
	h.must(err)
	h.apiKey, h.secret = made.ID, secretOf
	h.user, _, err = h.identity.Register(ctx, stranger, "a@example.com", secret.Bytes(password), "Example Ltd")
	h.must(err)
	_, err = h.identity.SignIn(ctx, stranger, "a@example.com", secret.Bytes(password))
	h.must(err)
	for range 2 {
		c, err := h.vault.Seal(ctx, h.owner, vault.SealRequest{Name: "pay", Type: "t", Values: map[string]secret.Bytes{"v": secret.Bytes("x")}, IdempotencyKey: authz.NewID("idem")})
		h.must(err)
		h.creds = append(h.creds, c.ID)
	}
	_, err = h.vault.Rotate(ctx, h.owner, h.creds[0])
	h.must(err)
	operator := authz.Principal{Tenant: h.tenant, Kind: authz.Operator, ID: "uid-1", Scopes: authz.TenantScopes()}
	_, err = h.vault.Apply(ctx, operator, "uid-1", 0, vault.Desired{
		Object: vault.Object{Cluster: "cluster", Namespace: "ns", Name: "pay"}, Name: "pay", Type: "t", Overlap: time.Hour, Values: map[string]secret.Bytes{"v": secret.Bytes("y")},
	})
	h.must(err)
	key, err := h.transit.CreateKey(ctx, h.owner, "orders", 30)
	h.must(err)
	h.named = key.ID
	_, _, err = h.transit.RotateKey(ctx, h.owner, h.named, false)
	h.must(err)
	_, err = h.transit.Encrypt(ctx, h.owner, "", []secret.Bytes{secret.Bytes("x")})
	h.must(err)
	_, err = h.identity.NamespaceTenant(ctx, "cluster", "ns-uid")
	h.must(err)
	return h
}

func (h *house) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// open opens the store as a server does.
func (h *house) open() {
	h.t.Helper()
	bound := state.New(nil)
	h.log = writer.New(time.Now, bound)
	if h.bare {
		h.log = writer.New(time.Now, nil)
	}
	var err error
	h.raw, err = bolt.Open(h.path, bolt.Options{Hook: h.log.Commit})
	h.must(err)
	var s store.Store = bound.Guard(h.raw)
	if h.bare {
		s = h.raw
	}
	g := guard.New(h.log)
	h.identity, h.keys, err = identity.Open(h.t.Context(), s, h.log, g, h.kms, keyring.Config{CacheTTL: time.Hour})
	h.must(err)
	h.vault, h.transit = vault.New(s, g, h.keys, time.Now), transit.New(s, g, h.keys, time.Now)
}

// rows returns all rows but those of the log and the state.
func (h *house) rows() map[string][]byte {
	h.t.Helper()
	all := make(map[string][]byte)
	h.must(audit.ScanAll(h.t.Context(), h.raw, store.Range{}, func(key, value []byte) error {
		if !bytes.HasPrefix(key, []byte("audit/")) && !bytes.HasPrefix(key, []byte("state/")) {
			all[string(key)] = bytes.Clone(value)
		}
		return nil
	}))
	return all
}

// tamper writes rows as somebody does who has no key. A nil value deletes.
func (h *house) tamper(rows map[string][]byte) {
	h.t.Helper()
	h.must(h.raw.Update(context.Background(), func(tx store.Tx) error {
		for key, value := range rows {
			var err error
			if value == nil {
				err = tx.Delete([]byte(key))
			} else {
				err = tx.Put([]byte(key), value)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}))
}

func (h *house) examine(keys ...keyring.KMS) *doctor.Examination {
	h.t.Helper()
	return h.examineWith(doctor.Options{KMS: keys})
}

func (h *house) examineWith(o doctor.Options) *doctor.Examination {
	h.t.Helper()
	var err error
	o.Report, err = verify.Store(h.t.Context(), h.raw, verify.Options{})
	h.must(err)
	x, err := doctor.Examine(h.t.Context(), h.raw, o)
	h.must(err)
	return x
}

// of returns the finding about a row, or nil.
func of(x *doctor.Examination, key string) *doctor.Finding {
	for _, f := range x.Findings {
		if string(f.Key) == key {
			return f
		}
	}
	return nil
}

func TestAStoreThatIsWholeHasNoFindings(t *testing.T) {
	h := newHouse(t)
	for _, keys := range [][]keyring.KMS{nil, {h.kms}} {
		x := h.examine(keys...)
		for _, f := range x.Findings {
			t.Errorf("%s: %v", f.Row(), f.Problems)
		}
		if x.Keys != (len(keys) > 0) || x.State != (len(keys) > 0) {
			t.Errorf("with %d KMS keys: keys %v, state %v", len(keys), x.Keys, x.State)
		}
	}
	families := make(map[string]bool)
	for key := range h.rows() {
		f, ok := state.FamilyOf([]byte(key))
		if !ok {
			t.Errorf("%q is of no family", key)
		}
		families[f.Prefix] = true
	}
	t.Log(slices.Sorted(maps.Keys(families)))
}

// covered are the families whose rows an examination checks, and must find damaged or missing.
func covered(key string) (f state.Family, deciding bool) {
	f, _ = state.FamilyOf([]byte(key))
	return f, f.Deciding
}

// Each row of a whole store is changed by one bit.
func TestAFlippedBitOfAnyDecidingRowIsFound(t *testing.T) {
	h := newHouse(t)
	n := 0
	for key, value := range h.rows() {
		f, deciding := covered(key)
		if !deciding || len(value) == 0 {
			continue
		}
		n++
		changed := bytes.Clone(value)
		changed[n*7%len(changed)] ^= 1 << (n % 8)
		if _, err := h.keys.OpenRow([]byte(key), changed); f.HasMAC([]byte(key)) && !strings.Contains(fault.Message(err), "latticekeep doctor") {
			t.Errorf("the server does not say how %q is found: %v", key, err)
		}
		h.tamper(map[string][]byte{key: changed})
		found := of(h.examine(h.kms), key)
		h.tamper(map[string][]byte{key: value})
		switch {
		case found == nil:
			t.Errorf("%q was changed, and is not named", key)
		case found.Family != f.Prefix || found.Acceptable() && f.HasMAC([]byte(key)):
			t.Errorf("%q: family %s, acceptable %v", key, found.Family, found.Acceptable())
		}
	}
	if n < 40 {
		t.Errorf("only %d rows", n)
	}
	for _, owner := range []string{"system", string(h.tenant)} { // the number of a version has few bits, and each leads elsewhere
		key := "key/" + owner + "/current"
		value := h.rows()[key]
		for bit := range 8 * len(value) {
			changed := bytes.Clone(value)
			changed[bit/8] ^= 1 << (bit % 8)
			h.tamper(map[string][]byte{key: changed})
			if of(h.examine(h.kms), key) == nil {
				t.Errorf("%q is %x, and is not named", key, changed)
			}
		}
		h.tamper(map[string][]byte{key: value})
	}
	if x := h.examine(h.kms); len(x.Findings) > 0 {
		t.Errorf("at the end: %s", x.Findings[0].Row())
	}
}

// Without the KMS key the rows that the log names are compared all the same.
func TestWithoutAKeyTheRowsOfTheLogAreCompared(t *testing.T) {
	h := newHouse(t)
	before := h.rows()
	h.must(h.identity.RevokeAPIKey(t.Context(), h.owner, h.apiKey))
	after := h.rows()
	for key, value := range before {
		if after[key] != nil || !strings.HasPrefix(key, "apikey/hash/") {
			continue
		}
		h.tamper(map[string][]byte{key: value}) // only this row: the key works, and nobody can revoke it
		f := of(h.examine(), key)
		if f == nil || f.Entry == nil || f.Entry.Type != audit.APIKeyRevoked {
			t.Fatalf("the revoked key that works again: %+v", f)
		}
		h.tamper(map[string][]byte{key: nil})
	}
	for key, value := range after {
		for _, prefix := range []string{"key/system/00000001/audit", "key/" + string(h.tenant) + "/current", "key/" + string(h.tenant) + "/00000001/mac", "deployment", "apikey/hash/", "credential/"} {
			if !strings.HasPrefix(key, prefix) {
				continue
			}
			h.tamper(map[string][]byte{key: nil})
			if x := h.examine(); len(x.Findings) == 0 {
				t.Errorf("%q was removed, and nothing was found", key)
			}
			h.tamper(map[string][]byte{key: value})
		}
	}
}

// unnamed are families of which a missing row is not always named: their keys have a hash that only
// the row itself, or another one that is missing too, would tell.
var unnamed = map[string]bool{"user/email/": true, "ticket/of/": true, "ticket/hash/": true, "namespace-name/": true}

func TestAMissingRowIsFoundAndNamed(t *testing.T) {
	h := newHouse(t)
	for key, value := range h.rows() {
		f, deciding := covered(key)
		if !deciding {
			continue
		}
		h.tamper(map[string][]byte{key: nil})
		x := h.examine(h.kms)
		h.tamper(map[string][]byte{key: value})
		named := of(x, key)
		some := slices.ContainsFunc(x.Findings, func(g *doctor.Finding) bool { return g.Family == f.Prefix })
		owned := f.Prefix == "credential-name/" && !strings.HasSuffix(key, h.creds[0]) && !strings.HasSuffix(key, h.creds[1])
		if !some || named == nil && !unnamed[f.Prefix] && !owned {
			t.Errorf("%q is missing: named %v, family named %v", key, named != nil, some)
		}
	}
}

func TestARowThatWasPutBackIsNamedWithWhatContradictsIt(t *testing.T) {
	h := newHouse(t)
	before := h.rows()
	ctx := t.Context()
	h.must(h.identity.RevokeAPIKey(ctx, h.owner, h.apiKey))
	tokens, err := h.identity.SignIn(ctx, stranger, "a@example.com", secret.Bytes(password))
	h.must(err)
	caller, err := h.identity.AuthenticateToken(ctx, tokens.Access)
	h.must(err)
	h.must(h.identity.ChangePassword(ctx, caller, secret.Bytes(password), secret.Bytes("staple, and something else")))
	h.must(h.vault.Delete(ctx, h.owner, h.creds[0]))
	_, err = h.vault.Replace(ctx, h.owner, h.creds[1], vault.ReplaceRequest{Values: map[string]secret.Bytes{"v": secret.Bytes("z")}})
	h.must(err)
	_, _, err = h.transit.RotateKey(ctx, h.owner, h.named, false)
	h.must(err)
	after := h.rows()
	want := map[string]audit.EventType{
		"apikey/hash/": audit.APIKeyRevoked, "apikey/tenant/": audit.APIKeyRevoked, "user/row/": audit.PasswordChanged, "user/password/": audit.PasswordChanged,
		"credential/" + string(h.tenant) + "/" + h.creds[0]: audit.CredentialDeleted, "credential/" + string(h.tenant) + "/" + h.creds[1]: audit.CredentialRotated,
		"credential-version/" + string(h.tenant) + "/" + h.creds[0]: audit.CredentialDeleted, "transit/key/": audit.KeyRotated, "session/row/": "",
	}
	for prefix, event := range want {
		n := 0
		for key, value := range before {
			if !strings.HasPrefix(key, prefix) || bytes.Equal(after[key], value) {
				continue
			}
			n++
			h.tamper(map[string][]byte{key: value})
			f := of(h.examine(h.kms), key)
			h.tamper(map[string][]byte{key: after[key]})
			switch {
			case f == nil || f.Reason == "":
				t.Errorf("%q was put back: %+v", key, f)
			case event != "" && (f.Entry == nil || f.Entry.Type != event):
				t.Errorf("%q was put back, and %v is named, not a %s", key, f.Entry, event)
			}
		}
		if n == 0 {
			t.Errorf("no row under %s was put back", prefix)
		}
	}
}

// The rows of the state itself, and all of them.
func TestADamagedStateIsFound(t *testing.T) {
	h := newHouse(t)
	var keys []string
	values := make(map[string][]byte)
	h.must(audit.ScanAll(t.Context(), h.raw, store.Prefix([]byte("state/")), func(key, value []byte) error {
		keys, values[string(key)] = append(keys, string(key)), bytes.Clone(value)
		return nil
	}))
	gone := make(map[string][]byte)
	for _, key := range []string{keys[0], keys[len(keys)-1], "state/head"} {
		changed := bytes.Clone(values[key])
		changed[len(changed)-1] ^= 1
		h.tamper(map[string][]byte{key: changed})
		if x := h.examine(h.kms); of(x, "state/head") == nil || of(x, "state/head").Acceptable() {
			t.Errorf("%q was changed, and nothing was found", key)
		}
		h.tamper(map[string][]byte{key: values[key]})
	}
	for _, key := range keys {
		gone[key] = nil
	}
	h.tamper(gone)
	if x := h.examine(h.kms); of(x, "state/head") == nil || x.Stateless {
		t.Error("the whole state was removed, and nothing was found")
	}
}

// accept accepts rows as the command does, and returns what it did.
func (h *house) accept(reason string, rows ...string) (doctor.Resolved, error) {
	h.t.Helper()
	return h.change((*doctor.Examination).Accept, reason, rows)
}

// remove removes rows as the command does.
func (h *house) remove(reason string, rows ...string) (doctor.Resolved, error) {
	h.t.Helper()
	return h.change((*doctor.Examination).Remove, reason, rows)
}

func (h *house) change(do func(*doctor.Examination, context.Context, *writer.Log, []string, string) (doctor.Resolved, error), reason string, rows []string) (doctor.Resolved, error) {
	h.t.Helper()
	return do(h.examineToChange(), h.t.Context(), h.log, rows, reason)
}

// examineToChange examines the store as a command does that changes rows. The services do not use the
// store any more, until reopen.
func (h *house) examineToChange() *doctor.Examination {
	h.t.Helper()
	h.must(h.raw.Close())
	bound := state.New(nil)
	h.log = writer.New(time.Now, bound)
	var err error
	h.raw, err = bolt.Open(h.path, bolt.Options{Hook: h.log.Commit})
	h.must(err)
	return h.examineWith(doctor.Options{KMS: []keyring.KMS{h.kms}, State: bound})
}

func (h *house) reopen() {
	h.t.Helper()
	h.must(h.raw.Close())
	h.open()
}

func TestAnAcceptedRowIsTheOneThatCounts(t *testing.T) {
	h := newHouse(t)
	before := h.rows()
	ctx := t.Context()
	tokens, err := h.identity.SignIn(ctx, stranger, "a@example.com", secret.Bytes(password))
	h.must(err)
	caller, err := h.identity.AuthenticateToken(ctx, tokens.Access)
	h.must(err)
	h.must(h.identity.ChangePassword(ctx, caller, secret.Bytes(password), secret.Bytes("staple, and something else")))
	after := h.rows()
	back := make(map[string][]byte)
	for key, value := range before { // the change of the password is undone
		if strings.HasPrefix(key, "user/") && !bytes.Equal(after[key], value) {
			back[key] = value
		}
	}
	for key := range after {
		if strings.HasPrefix(key, "user/password/") && before[key] == nil {
			back[key] = nil
		}
	}
	h.tamper(back)
	if _, err := h.identity.SignIn(ctx, stranger, "a@example.com", secret.Bytes(password)); err == nil {
		t.Fatal("the earlier password is right")
	}
	var rows, named []string
	for _, f := range h.examine(h.kms).Findings {
		if !f.Acceptable() {
			t.Errorf("%s is not acceptable: %v", f.Row(), f.Problems)
		}
		rows, named = append(rows, f.Row()), append(named, f.Named())
	}
	if len(rows) != 3 {
		t.Fatalf("%q", rows)
	}
	if _, err := h.accept("", named...); err == nil {
		t.Error("rows were accepted without a reason")
	}
	if _, err := h.accept("checked by hand", `"user/row/none"@absent`); !errors.Is(err, doctor.ErrNoRow) {
		t.Error("a row that is not wrong was accepted")
	}
	done, err := h.accept("checked by hand", named...)
	h.must(err)
	x := h.examine(h.kms)
	for _, f := range x.Findings {
		t.Errorf("afterwards %s: %v", f.Row(), f.Problems)
	}
	var e *audit.Entry
	h.must(h.raw.View(ctx, func(r store.Reader) (err error) {
		e, err = entries.Read(r, done.First)
		return err
	}))
	if e.EventType != audit.StateRowsAccepted || e.TenantID != "system" || e.Attributes["reason"] != "checked by hand" || e.Attributes["rows"] != "3" ||
		len(e.Attributes["digest"]) != 64 || e.Attributes["row_1"] != rows[0] || e.Attributes["row_3"] != rows[2] || e.Attributes[audit.AttributeState] == "" || done.Last != done.First {
		t.Errorf("%+v %+v", done, e)
	}
	h.reopen()
	if _, err := h.identity.SignIn(ctx, stranger, "a@example.com", secret.Bytes(password)); err != nil {
		t.Error("the accepted password is wrong:", err)
	}
}

// A row that is damaged stays so, and one that contradicts an entry does as well.
func TestADamagedRowIsNotAccepted(t *testing.T) {
	h := newHouse(t)
	before := h.rows()
	h.must(h.identity.RevokeAPIKey(t.Context(), h.owner, h.apiKey))
	for key, value := range h.rows() {
		if strings.HasPrefix(key, "user/row/") {
			changed := bytes.Clone(value)
			changed[40] ^= 1
			h.tamper(map[string][]byte{key: changed})
		}
	}
	for key, value := range before {
		if strings.HasPrefix(key, "apikey/") && h.rows()[key] == nil && !strings.HasPrefix(key, "apikey/used/") {
			h.tamper(map[string][]byte{key: value})
		}
	}
	findings := h.examine(h.kms).Findings
	if len(findings) != 3 {
		t.Fatalf("%d findings", len(findings))
	}
	for _, f := range findings {
		if _, err := h.accept("why not", f.Named()); err == nil || !strings.Contains(err.Error(), "restore a backup") {
			t.Errorf("%s was accepted: %v", f.Row(), err)
		}
	}
}

// Many rows are named by several entries of one commit, and missing rows are accepted too.
func TestManyRowsAreAcceptedTogether(t *testing.T) {
	h := newHouse(t)
	gone := make(map[string][]byte)
	for i := range 40 {
		_, err := h.identity.NamespaceTenant(t.Context(), "cluster", "many-"+strings.Repeat("x", i))
		h.must(err)
	}
	for key := range h.rows() {
		if strings.HasPrefix(key, "namespace/cluster/many-") {
			gone[key] = nil
		}
	}
	h.tamper(gone)
	var rows []string
	for _, f := range h.examine(h.kms).Findings {
		rows = append(rows, f.Named())
	}
	done, err := h.accept("namespaces that are gone", rows...)
	h.must(err)
	if done.Rows != 40 || done.Last != done.First+1 {
		t.Errorf("%+v", done)
	}
	if x := h.examine(h.kms); len(x.Findings) > 0 {
		t.Errorf("afterwards %s: %v", x.Findings[0].Row(), x.Findings[0].Problems)
	}
}

func TestAnExplanationTellsWhatARevokedKeyDid(t *testing.T) {
	h := newHouse(t)
	before := h.rows()
	ctx := t.Context()
	caller, err := h.identity.Authenticate(ctx, h.secret)
	h.must(err)
	unseal := func() {
		t.Helper()
		if _, err := h.vault.Read(ctx, caller.Principal, vault.ByID(h.creds[0])); err != nil {
			t.Fatal(err)
		}
	}
	unseal()
	h.must(h.identity.RevokeAPIKey(ctx, h.owner, h.apiKey))
	var key string
	for k, value := range before {
		if strings.HasPrefix(k, "apikey/hash/") && strings.Contains(string(value), h.apiKey) {
			key = k
			h.tamper(map[string][]byte{k: value})
		}
	}
	unseal() // as before this release, whose servers refuse the row
	unseal()
	x := h.examine(h.kms)
	f := of(x, key)
	if f == nil {
		t.Fatal("the row is not found")
	}
	e, err := x.Explain(ctx, f.Row())
	h.must(err)
	if e.Resource != h.apiKey || e.State != "absent" || e.Activity == nil || e.Activity.Since.Type != audit.APIKeyRevoked || e.Activity.Types[audit.CredentialUnsealed] != 2 || e.Activity.Count() != 2 ||
		e.Activity.First != e.Activity.Last-1 || !strings.Contains(e.Stored, h.apiKey) || len(e.Entries) != 2 {
		t.Errorf("%+v %+v", e, e.Activity)
	}
	if strings.Contains(e.Stored, "hash") {
		t.Errorf("what is stored: %s", e.Stored)
	}
	for key := range h.rows() { // no row keeps it from answering, and no secret is in an answer
		e, err := x.Explain(ctx, key)
		if err != nil || e.Says == "" || e.Risk == "" || strings.Contains(e.Stored, "a@example.com") || strings.Contains(e.Stored, "$argon2") {
			t.Errorf("%q: %+v, %v", key, e, err)
		}
	}
}

// Which rows begin with a MAC is a table. It says the same as a whole store.
func TestTheTableOfMACsIsThatOfTheStore(t *testing.T) {
	h := newHouse(t)
	for key, value := range h.rows() {
		f, _ := state.FamilyOf([]byte(key))
		_, err := h.keys.OpenRow([]byte(key), value)
		if got := f.HasMAC([]byte(key)); got != (err == nil) {
			t.Errorf("%q: the table says %v", key, got)
		}
	}
}

// A store of an earlier release has no state. The keys and indexes show damage by themselves.
func TestAStoreWithoutAStateIsExaminedAllTheSame(t *testing.T) {
	h := newHouseWith(t, true)
	if x := h.examine(h.kms); len(x.Findings) > 0 || !x.Stateless || x.State || !x.Keys {
		t.Fatalf("%d findings, %+v", len(x.Findings), x)
	}
	alone := []string{"deployment", "key/", "sealing/", "transit/seed/", "credential/", "apikey/hash/", "apikey/tenant/"}
	for key, value := range h.rows() {
		f, _ := state.FamilyOf([]byte(key))
		if len(value) > 0 && (f.HasMAC([]byte(key)) || slices.ContainsFunc(alone, func(p string) bool { return strings.HasPrefix(key, p) })) {
			changed := bytes.Clone(value)
			changed[len(changed)/2] ^= 4
			h.tamper(map[string][]byte{key: changed})
			if x := h.examine(h.kms); key != "deployment" && of(x, key) == nil {
				t.Errorf("%q was changed, and is not named", key)
			}
		}
		indexed := strings.HasPrefix(key, "credential-name/")
		if indexed || slices.ContainsFunc(alone, func(p string) bool { return strings.HasPrefix(key, p) }) && !strings.HasSuffix(key, "/public") && !strings.HasPrefix(key, "sealing/") {
			h.tamper(map[string][]byte{key: nil})
			if x := h.examine(h.kms); len(x.Findings) == 0 {
				t.Errorf("%q was removed, and %d rows are named", key, len(x.Findings))
			}
		}
		if indexed { // the row of another credential's name, with a MAC of this deployment
			other := []byte(key)
			other[len(other)-30]++
			h.tamper(map[string][]byte{key: value, string(other): h.keys.SealRow(other, nil)})
			if x := h.examine(h.kms); of(x, string(other)) == nil {
				t.Errorf("%q was added to the index, and is not named", other)
			}
			h.tamper(map[string][]byte{string(other): nil})
		}
		h.tamper(map[string][]byte{key: value})
	}
	for _, added := range []string{"key/" + string(h.tenant) + "/00000002/mac", "transit/seed/" + string(h.tenant) + "/" + h.named + "/00000009/00000001", "key/ten_other/current"} {
		h.tamper(map[string][]byte{added: []byte("0123")})
		if x := h.examine(h.kms); of(x, added) == nil {
			t.Errorf("%q was added, and is not named", added)
		}
		h.tamper(map[string][]byte{added: nil})
	}
}

// Rows that only the deployment's own keys could have made, and rows that belong together.
func TestRowsThatDoNotBelongTogetherAreFound(t *testing.T) {
	h := newHouseWith(t, true)
	rows := h.rows()
	without := func(prefixes ...string) map[string][]byte {
		gone := make(map[string][]byte)
		for key := range rows {
			if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(key, p) }) {
				gone[key] = nil
			}
		}
		return gone
	}
	signed := make(map[string][]byte)
	for key, value := range rows {
		if strings.HasPrefix(key, "sealing/key/") { // another date, under a MAC of this deployment, and not signed
			signed[key] = h.keys.SealRow([]byte(key), bytes.Replace(value[32:], []byte(`"created_at":"2`), []byte(`"created_at":"1`), 1))
		}
	}
	for name, c := range map[string]struct {
		change map[string][]byte
		want   string
	}{
		"all keys of a tenant":     {without("key/" + string(h.tenant) + "/"), "key/" + string(h.tenant) + "/current"},
		"lists of API keys":        {without("apikey/tenant/"), "apikey/hash/"},
		"API keys that are listed": {without("apikey/hash/"), "apikey/hash/"},
		"a sealing key's document": {signed, "sealing/key/"},
	} {
		h.tamper(c.change)
		for _, keys := range [][]keyring.KMS{nil, {h.kms}} {
			if name == "a sealing key's document" && keys == nil {
				continue
			}
			if x := h.examine(keys...); !slices.ContainsFunc(x.Findings, func(f *doctor.Finding) bool { return strings.HasPrefix(string(f.Key), c.want) }) {
				t.Errorf("%s with %d KMS keys: %d findings", name, len(keys), len(x.Findings))
			}
		}
		h.tamper(rows)
	}
}
