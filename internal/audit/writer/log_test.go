package writer_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"filippo.io/mldsa"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/reader"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// The first entry of a tenant, which has more attributes, and the entry of an event without
// attributes name the pod as well.
func TestEveryEntryOfAPodNamesIt(t *testing.T) {
	f := audittest.NewFixture(t)
	pod := audittest.Principal(audittest.TenantA)
	pod.Kind, pod.ID, pod.Pod = authz.ServiceAccount, "account", "pod"
	own := map[string]string{"count": "2"}
	f.Record(audit.Event{Type: audit.CredentialListed, Outcome: audit.Success, Principal: pod, Resource: audit.Resource{Type: audit.CredentialResource}, Attributes: own})
	f.Record(audit.Event{Type: audit.RateLimited, Outcome: audit.Denied, Principal: pod, Resource: audit.Resource{Type: audit.InterfaceResource}})
	if err := f.Log.Guard.RecordAttempt(t.Context(), pod, authz.UnsealCredential, audit.Denied, "missing_scope"); err != nil {
		t.Fatal(err)
	}
	f.Record(audit.Event{Type: audit.CredentialListed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{Type: audit.CredentialResource}, Attributes: own})
	if len(own) != 1 {
		t.Errorf("the caller's own attributes became %v", own)
	}
	var got []string
	for line := range bytes.Lines(f.Export()) {
		e, err := audit.ParseEntry(bytes.TrimSuffix(line, []byte("\n")))
		if err == nil && e.TenantID == string(audittest.TenantA) {
			got = append(got, e.Actor.Type+" "+e.Attributes["pod_uid"])
		}
	}
	if want := []string{"service_account pod", "service_account pod", "service_account pod", "api_key "}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	if _, err := f.Verify(); err != nil {
		t.Error(err)
	}
}

func TestConcurrentAppendsMakeOneWholeChain(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(120)
	report, err := f.Verify()
	if err != nil {
		t.Fatal(err)
	}
	if report.Entries != 121 || report.Sequence != 121 || report.Pinned || report.ChainID != "chain_test" {
		t.Fatalf("%+v", report)
	}
	pinned, err := verify.Store(t.Context(), f.Store, verify.Options{Fingerprint: f.Log.Fingerprint(), PublicKey: report.PublicKey})
	if err != nil || !pinned.Pinned || pinned.Fingerprint != f.Log.Fingerprint() {
		t.Fatal(pinned, err)
	}
	if _, err := verify.Store(t.Context(), f.Store, verify.Options{Fingerprint: strings.Repeat("0", 64)}); err == nil {
		t.Fatal("a foreign fingerprint was accepted")
	}
	seed := make([]byte, dualsig.SeedSize)
	other, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := verify.Store(t.Context(), f.Store, verify.Options{PublicKey: other.Public()}); err == nil {
		t.Fatal("a foreign public key was accepted")
	}
}

func TestTheReceiptNamesTheEntry(t *testing.T) {
	f := audittest.NewFixture(t)
	var receipt *audit.Receipt
	err := f.Store.Update(t.Context(), func(tx store.Tx) (err error) {
		receipt, err = f.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	report, err := f.Verify()
	if err != nil || receipt.Sequence != report.Sequence || receipt.Hash != report.Hash {
		t.Fatal(receipt, report, err)
	}
}

func TestAFailedTransactionLeavesNoEntry(t *testing.T) {
	f := audittest.NewFixture(t)
	wrong := errors.New("wrong")
	err := f.Store.Update(t.Context(), func(tx store.Tx) error {
		_, err := f.Log.Append(tx, audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
		return errors.Join(err, wrong)
	})
	if !errors.Is(err, wrong) {
		t.Fatal(err)
	}
	if report, err := f.Verify(); err != nil || report.Entries != 1 {
		t.Fatal(report, err)
	}
}

func TestTimeNeverGoesBackAlongTheChain(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Advance(-time.Hour)
	f.Sealed(audittest.TenantA, "cred_a", "1", "00")
	if _, err := f.Verify(); err != nil {
		t.Fatal(err)
	}
	entries, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 1})
	if err != nil || entries[0].Timestamp != "2026-11-21T12:00:00.123456Z" {
		t.Fatal(entries, err)
	}
}

// An implementation that is not part of the product verifies the signature of an entry: any FIPS
// 204 verifier can follow docs/formats.md.
func TestAnIndependentImplementationVerifiesEntries(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Fill(5)
	key, err := mldsa.NewPublicKey(mldsa.MLDSA65(), f.Log.Signer.Public().Bytes())
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(bytes.TrimSpace(f.Export()), []byte("\n"))
	for _, line := range lines[:len(lines)-1] {
		e, err := audit.ParseEntry(line)
		if err != nil {
			t.Fatal(err)
		}
		hash, _ := hex.DecodeString(e.Hash)
		signature, _ := base64.StdEncoding.DecodeString(e.Signature)
		if err := mldsa.Verify(key, hash, signature, &mldsa.Options{Context: "latticekeep/audit/v1"}); err != nil {
			t.Fatalf("sequence %d: %v", e.Sequence, err)
		}
		if mldsa.Verify(key, hash, signature, &mldsa.Options{Context: "latticekeep/record/v1"}) == nil {
			t.Fatal("the context does not bind")
		}
	}
}

func TestQueryFiltersAndPages(t *testing.T) {
	f := audittest.NewFixture(t)
	start := f.Now()
	for i := range 10 {
		f.Advance(time.Minute)
		e := audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: fmt.Sprint(i), Type: audit.CredentialResource}}
		if i%2 == 0 {
			e.Type = audit.CredentialListed
			e.Principal.ID = "key_other"
		}
		f.Record(e)
		f.Record(audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantB)})
	}
	ids := func(q reader.Query) (got []string) {
		t.Helper()
		for {
			entries, next, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), q)
			if err != nil {
				t.Fatal(err)
			}
			if len(entries) > q.Limit {
				t.Fatalf("%d entries on a page of %d", len(entries), q.Limit)
			}
			for _, e := range entries {
				if e.TenantID != string(audittest.TenantA) {
					t.Fatal("another tenant's entry")
				}
				if e.EventType != audit.AuditRead { // the queries record themselves
					got = append(got, e.Resource.ID)
				}
			}
			if q.Cursor = next; next == "" {
				return got
			}
		}
	}
	check := func(name string, got, want []string) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	all := []string{"9", "8", "7", "6", "5", "4", "3", "2", "1", "0"}
	check("all", ids(reader.Query{Limit: 100}), all)
	check("pages of three", ids(reader.Query{Limit: 3}), all)
	check("pages of one", ids(reader.Query{Limit: 1}), all)
	check("type", ids(reader.Query{Limit: 2, EventType: string(audit.CredentialUnsealed)}), []string{"9", "7", "5", "3", "1"})
	check("user", ids(reader.Query{Limit: 2, UserID: "key_other"}), []string{"8", "6", "4", "2", "0"})
	check("range", ids(reader.Query{Limit: 2, From: start.Add(3 * time.Minute).Truncate(time.Microsecond), To: start.Add(5 * time.Minute)}), []string{"4", "3", "2"})
	check("nothing", ids(reader.Query{Limit: 2, EventType: "NO_SUCH"}), nil)
	if _, _, err := f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 1, Cursor: "??"}); fault.Of(err) != fault.Invalid {
		t.Error("a junk cursor:", err)
	}
	if _, err := f.Verify(); err != nil {
		t.Fatal(err)
	}
}

func TestADeniedReadIsRecordedAndShowsNothing(t *testing.T) {
	f := audittest.NewFixture(t)
	p := audittest.Principal(audittest.TenantA)
	p.Scopes = []authz.Scope{authz.VaultRead}
	entries, _, err := f.Log.Query(t.Context(), p, reader.Query{Limit: 10})
	if fault.Of(err) != fault.Forbidden || entries != nil {
		t.Fatal(entries, err)
	}
	entries, _, err = f.Log.Query(t.Context(), audittest.Principal(audittest.TenantA), reader.Query{Limit: 10})
	if err != nil || len(entries) != 1 || entries[0].Outcome != audit.Denied || entries[0].EventType != audit.AuditRead {
		t.Fatal(entries, err)
	}
}

func TestAnAnchorNamesTheCurrentVersion(t *testing.T) {
	f := audittest.NewFixture(t)
	f.Sealed(audittest.TenantA, "cred_a", "1", "00")
	f.Sealed(audittest.TenantA, "cred_a", "2", "01")
	report, err := f.Verify()
	if err != nil {
		t.Fatal(err)
	}
	f.Record(audit.Event{Type: audit.CredentialUnsealed, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA), Resource: audit.Resource{ID: "cred_a", Type: audit.CredentialResource}})
	err = f.Store.View(t.Context(), func(r store.Reader) error {
		anchor, err := chain.Current(r, audittest.TenantA, "cred_a")
		if err != nil || anchor.Sequence != report.Sequence || anchor.Hash != report.Hash {
			t.Error(anchor, err)
		}
		if _, err := chain.Current(r, audittest.TenantB, "cred_a"); err == nil {
			t.Error("an anchor of another tenant")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
