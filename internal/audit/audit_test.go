package audit

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

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// The first entry of a tenant, which has more attributes, and the entry of an event without
// attributes name the pod as well.
func TestEveryEntryOfAPodNamesIt(t *testing.T) {
	f := newFixture(t)
	pod := principal(tenantA)
	pod.Kind, pod.ID, pod.Pod = authz.ServiceAccount, "account", "pod"
	own := map[string]string{"count": "2"}
	f.record(Event{Type: CredentialListed, Outcome: Success, Principal: pod, Resource: Resource{Type: CredentialResource}, Attributes: own})
	f.record(Event{Type: RateLimited, Outcome: Denied, Principal: pod, Resource: Resource{Type: InterfaceResource}})
	if err := f.log.guard.RecordAttempt(t.Context(), pod, authz.UnsealCredential, Denied, "missing_scope"); err != nil {
		t.Fatal(err)
	}
	f.record(Event{Type: CredentialListed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{Type: CredentialResource}, Attributes: own})
	if len(own) != 1 {
		t.Errorf("the caller's own attributes became %v", own)
	}
	var got []string
	for line := range bytes.Lines(f.export()) {
		e, err := ParseEntry(bytes.TrimSuffix(line, []byte("\n")))
		if err == nil && e.TenantID == string(tenantA) {
			got = append(got, e.Actor.Type+" "+e.Attributes["pod_uid"])
		}
	}
	if want := []string{"service_account pod", "service_account pod", "service_account pod", "api_key "}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	if _, err := f.verify(); err != nil {
		t.Error(err)
	}
}

func TestConcurrentAppendsMakeOneWholeChain(t *testing.T) {
	f := newFixture(t)
	f.fill(120)
	report, err := f.verify()
	if err != nil {
		t.Fatal(err)
	}
	if report.Entries != 121 || report.Sequence != 121 || report.Pinned || report.ChainID != "chain_test" {
		t.Fatalf("%+v", report)
	}
	pinned, err := VerifyStore(t.Context(), f.store, Options{Fingerprint: f.log.Fingerprint(), PublicKey: report.PublicKey})
	if err != nil || !pinned.Pinned || pinned.Fingerprint != f.log.Fingerprint() {
		t.Fatal(pinned, err)
	}
	if _, err := VerifyStore(t.Context(), f.store, Options{Fingerprint: strings.Repeat("0", 64)}); err == nil {
		t.Fatal("a foreign fingerprint was accepted")
	}
	seed := make([]byte, dualsig.SeedSize)
	other, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := VerifyStore(t.Context(), f.store, Options{PublicKey: other.Public()}); err == nil {
		t.Fatal("a foreign public key was accepted")
	}
}

func TestTheReceiptNamesTheEntry(t *testing.T) {
	f := newFixture(t)
	var receipt *Receipt
	err := f.store.Update(t.Context(), func(tx store.Tx) (err error) {
		receipt, err = f.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	report, err := f.verify()
	if err != nil || receipt.Sequence != report.Sequence || receipt.Hash != report.Hash {
		t.Fatal(receipt, report, err)
	}
}

func TestAFailedTransactionLeavesNoEntry(t *testing.T) {
	f := newFixture(t)
	wrong := errors.New("wrong")
	err := f.store.Update(t.Context(), func(tx store.Tx) error {
		_, err := f.log.Append(tx, Event{Type: AuditRead, Outcome: Success, Principal: principal(tenantA)})
		return errors.Join(err, wrong)
	})
	if !errors.Is(err, wrong) {
		t.Fatal(err)
	}
	if report, err := f.verify(); err != nil || report.Entries != 1 {
		t.Fatal(report, err)
	}
}

func TestTimeNeverGoesBackAlongTheChain(t *testing.T) {
	f := newFixture(t)
	f.advance(-time.Hour)
	f.sealed(tenantA, "cred_a", "1", "00")
	if _, err := f.verify(); err != nil {
		t.Fatal(err)
	}
	entries, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 1})
	if err != nil || entries[0].Timestamp != "2026-11-21T12:00:00.123456Z" {
		t.Fatal(entries, err)
	}
}

// An implementation that is not part of the product verifies the signature of an entry: any FIPS
// 204 verifier can follow docs/formats.md.
func TestAnIndependentImplementationVerifiesEntries(t *testing.T) {
	f := newFixture(t)
	f.fill(5)
	key, err := mldsa.NewPublicKey(mldsa.MLDSA65(), f.log.signer.Public().Bytes())
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(bytes.TrimSpace(f.export()), []byte("\n"))
	for _, line := range lines[:len(lines)-1] {
		e, err := ParseEntry(line)
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
	f := newFixture(t)
	start := f.now()
	for i := range 10 {
		f.advance(time.Minute)
		e := Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: fmt.Sprint(i), Type: CredentialResource}}
		if i%2 == 0 {
			e.Type = CredentialListed
			e.Principal.ID = "key_other"
		}
		f.record(e)
		f.record(Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantB)})
	}
	ids := func(q Query) (got []string) {
		t.Helper()
		for {
			entries, next, err := f.log.Query(t.Context(), principal(tenantA), q)
			if err != nil {
				t.Fatal(err)
			}
			if len(entries) > q.Limit {
				t.Fatalf("%d entries on a page of %d", len(entries), q.Limit)
			}
			for _, e := range entries {
				if e.TenantID != string(tenantA) {
					t.Fatal("another tenant's entry")
				}
				if e.EventType != AuditRead { // the queries record themselves
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
	check("all", ids(Query{Limit: 100}), all)
	check("pages of three", ids(Query{Limit: 3}), all)
	check("pages of one", ids(Query{Limit: 1}), all)
	check("type", ids(Query{Limit: 2, EventType: string(CredentialUnsealed)}), []string{"9", "7", "5", "3", "1"})
	check("user", ids(Query{Limit: 2, UserID: "key_other"}), []string{"8", "6", "4", "2", "0"})
	check("range", ids(Query{Limit: 2, From: start.Add(3 * time.Minute).Truncate(time.Microsecond), To: start.Add(5 * time.Minute)}), []string{"4", "3", "2"})
	check("nothing", ids(Query{Limit: 2, EventType: "NO_SUCH"}), nil)
	if _, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 1, Cursor: "??"}); fault.Of(err) != fault.Invalid {
		t.Error("a junk cursor:", err)
	}
	if _, err := f.verify(); err != nil {
		t.Fatal(err)
	}
}

func TestADeniedReadIsRecordedAndShowsNothing(t *testing.T) {
	f := newFixture(t)
	p := principal(tenantA)
	p.Scopes = []authz.Scope{authz.VaultRead}
	entries, _, err := f.log.Query(t.Context(), p, Query{Limit: 10})
	if fault.Of(err) != fault.Forbidden || entries != nil {
		t.Fatal(entries, err)
	}
	entries, _, err = f.log.Query(t.Context(), principal(tenantA), Query{Limit: 10})
	if err != nil || len(entries) != 1 || entries[0].Outcome != Denied || entries[0].EventType != AuditRead {
		t.Fatal(entries, err)
	}
}

func TestATenantProvesItsOwnHistory(t *testing.T) {
	f := newFixture(t)
	f.fill(60)
	entries, _, err := f.log.Query(t.Context(), principal(tenantA), Query{Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(entries)
	report, err := VerifyTenant(entries, Options{Fingerprint: f.log.Fingerprint()})
	if err != nil || !report.Pinned || report.Entries != 40 {
		t.Fatal(report, err)
	}
	for name, forged := range map[string][]Entry{
		"first dropped":  entries[1:],
		"middle dropped": slices.Delete(slices.Clone(entries), 7, 8),
		"swapped":        append([]Entry{entries[0], entries[2], entries[1]}, entries[3:]...),
		"repeated":       slices.Insert(slices.Clone(entries), 5, entries[4]),
		"empty":          nil,
	} {
		if _, err := VerifyTenant(forged, Options{}); err == nil {
			t.Errorf("%s: accepted", name)
		} else if _, ok := IsBroken(err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAnAnchorNamesTheCurrentVersion(t *testing.T) {
	f := newFixture(t)
	f.sealed(tenantA, "cred_a", "1", "00")
	f.sealed(tenantA, "cred_a", "2", "01")
	report, err := f.verify()
	if err != nil {
		t.Fatal(err)
	}
	f.record(Event{Type: CredentialUnsealed, Outcome: Success, Principal: principal(tenantA), Resource: Resource{ID: "cred_a", Type: CredentialResource}})
	err = f.store.View(t.Context(), func(r store.Reader) error {
		anchor, err := Current(r, tenantA, "cred_a")
		if err != nil || anchor.Sequence != report.Sequence || anchor.Hash != report.Hash {
			t.Error(anchor, err)
		}
		if _, err := Current(r, tenantB, "cred_a"); err == nil {
			t.Error("an anchor of another tenant")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
