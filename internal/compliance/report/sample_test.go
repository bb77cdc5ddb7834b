package report

import (
	"cmp"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/compliance"
)

// diary makes the entries of a fictional tenant as the log would, but unsigned. The sample report
// is about them.
type diary struct {
	clock   time.Time
	random  *rand.Rand
	entries []*audit.Entry
}

const (
	sampleTenant = "ten_mfrggzdfmztwq2lknnwg23tpoa"
	sampleChain  = "chain_nbswy3dpeb3w64tmmqqg64tmmq"
	sampleKeyID  = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c0b0f00a08a"
)

// samplePublicKey returns a key with the length of an ML-DSA-65 public key.
func samplePublicKey() []byte {
	key := make([]byte, 0, 1952)
	for i := range uint64(61) {
		b, _ := hex.DecodeString(hashOf(i))
		key = append(key, b...)
	}
	return key
}

func (d *diary) days(n int) *diary { d.clock = d.clock.AddDate(0, 0, n); return d }

func (d *diary) after(t time.Duration) *diary { d.clock = d.clock.Add(t); return d }

func (d *diary) add(t audit.EventType, o audit.Outcome, kind authz.Kind, actor, resource, id string, attributes ...string) *diary {
	a := make(map[string]string)
	for i := 0; i < len(attributes); i += 2 {
		a[attributes[i]] = attributes[i+1]
	}
	n, sequence := uint64(len(d.entries)+1), uint64(9)
	if n == 1 {
		a["chain_id"], a["public_key"] = sampleChain, base64.StdEncoding.EncodeToString(samplePublicKey())
	} else { // entries of other tenants come in between
		sequence = d.entries[n-2].Sequence + 1 + d.random.Uint64N(9)
	}
	d.after(time.Duration(1+d.random.IntN(90)) * time.Second)
	d.entries = append(d.entries, &audit.Entry{
		Actor: audit.Actor{ID: actor, Type: string(kind)}, Attributes: a, EventType: t, Outcome: o, Resource: audit.Resource{Type: resource, ID: id},
		TenantID: sampleTenant, TenantSequence: n, Sequence: sequence, Hash: hashOf(sequence), KeyID: sampleKeyID,
		Timestamp: d.clock.UTC().Format("2006-01-02T15:04:05.000000Z"),
	})
	return d
}

func (d *diary) owner(t audit.EventType, resource, id string, attributes ...string) *diary {
	return d.add(t, audit.Success, authz.User, "usr_owner", resource, id, attributes...)
}

func (d *diary) client(t audit.EventType, o audit.Outcome, id string, attributes ...string) *diary {
	return d.add(t, o, authz.APIKey, "key_deploy", audit.CredentialResource, id, attributes...)
}

// version adds an entry for a new version of a credential.
func (d *diary) version(t audit.EventType, id string, version, ttl int) *diary {
	return d.client(t, audit.Success, id, audit.AttributeVersion, strconv.Itoa(version), audit.AttributeDigest, strings.Repeat("ab", 32),
		audit.AttributeTTLDays, strconv.Itoa(ttl), audit.AttributeExpiresAt, d.clock.AddDate(0, 0, ttl).UTC().Format(time.RFC3339Nano))
}

// quarter is a quarter of a tenant that manages most things well. One credential expired, and
// nobody reacted to a series of failed sign-ins.
func quarter() *diary {
	d := &diary{clock: time.Date(2026, 8, 17, 8, 0, 0, 0, time.UTC), random: rand.New(rand.NewPCG(1, 2))}
	d.add(audit.TenantCreated, audit.Success, authz.System, "latticekeep", audit.TenantResource, sampleTenant)
	d.owner(audit.UserRegistered, audit.UserResource, "usr_owner").after(time.Hour).owner(audit.EmailVerified, audit.UserResource, "usr_owner")
	d.owner(audit.APIKeyCreated, audit.APIKeyResource, "key_deploy", audit.AttributeScopes, "vault:read vault:write", audit.AttributeUser, "usr_owner",
		audit.AttributeExpiresAt, d.clock.AddDate(0, 6, 0).Format(time.RFC3339Nano))
	for i, ttl := range []int{30, 60, 90, 90} {
		d.version(audit.CredentialSealed, fmt.Sprintf("cred_%d", i), 1, ttl)
	}
	d.owner(audit.KeyCreated, audit.KeyResource, "ekey_orders", audit.AttributeRotationDays, "60", audit.AttributeNextRotation, d.clock.AddDate(0, 0, 60).Format(time.RFC3339Nano))
	for day := 1; day <= 96; day++ {
		d.days(1)
		for range 3 + d.random.IntN(4) {
			d.after(time.Hour).client(audit.CredentialUnsealed, audit.Success, fmt.Sprintf("cred_%d", 1+d.random.IntN(3)), audit.AttributeVersion, "1")
		}
		switch {
		case day == 28:
			d.version(audit.CredentialRotated, "cred_0", 2, 30)
		case day == 55:
			d.version(audit.CredentialReencrypted, "cred_1", 2, 60)
		case day == 58:
			d.owner(audit.KeyRotated, audit.KeyResource, "ekey_orders", audit.AttributeRotationDays, "60", audit.AttributeNextRotation, d.clock.AddDate(0, 0, 60).Format(time.RFC3339Nano))
		case day == 70:
			d.client(audit.CredentialUnsealed, audit.Denied, "", audit.AttributeReason, "missing")
		case day == 84:
			d.version(audit.CredentialReencrypted, "cred_2", 2, 90).version(audit.CredentialRotated, "cred_3", 2, 90)
		case day == 86: // nobody reacts
			for range 6 {
				d.add(audit.UserSignedIn, audit.Denied, authz.Stranger, "", audit.UserResource, "", audit.AttributeReason, "credentials")
			}
		case day%13 == 0 && day < 86:
			d.owner(audit.AuditRead, audit.LogResource, "").owner(audit.APIKeyListed, audit.APIKeyResource, "").owner(audit.MemberListed, audit.UserResource, "")
		}
		backup := d.clock.Add(-time.Hour)
		d.clock = d.clock.Truncate(24 * time.Hour).Add(22 * time.Hour)
		state := []string{
			"key_custody", compliance.CustodyLocal, "transport", compliance.TransportTLS13Quantum, "signing", "entry", "verify_every_seconds", "86400", "retention_days", "400",
			"archive", compliance.ArchiveReadable, "anchored", "true", "sealing_key_created", d.clock.AddDate(0, 0, -(day % 30)).Format(time.RFC3339), "sealing_key_lifetime_seconds", "2592000",
			"clock_synchronised", "true", "suites", "AES-256-GCM HKDF-SHA-512 HMAC-SHA-512 ML-DSA-65 ML-KEM-768 SHA3-256",
		}
		if day > 4 {
			state = append(state, "last_backup", backup.Format(time.RFC3339))
		}
		d.add(audit.ComplianceAssessed, audit.Success, authz.System, "assessment", audit.ComplianceResource, "", state...)
		head := strconv.FormatUint(d.entries[len(d.entries)-1].Sequence, 10)
		d.add(audit.ComplianceScored, audit.Success, authz.System, "assessment", audit.ComplianceResource, "", "head", head)
		d.clock = d.clock.Truncate(24 * time.Hour).Add(8 * time.Hour)
	}
	return d
}

// sample returns the document that the service would make from the diary.
func sample(t testing.TB, f compliance.Framework, d *diary) compliance.Document {
	t.Helper()
	catalogues, err := compliance.LoadCatalogues("")
	if err != nil {
		t.Fatal(err)
	}
	c := catalogues[f]
	derive := func(n int) compliance.Assessment {
		a, err := compliance.Derive(c, all(d.entries[:n]), 0)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	doc := compliance.Document{
		Tenant: sampleTenant, Subject: compliance.Subject{Organisation: "Example Ltd"}, Assessment: derive(len(d.entries)), Name: c.Name, Limits: c.Limits, Profiles: c.Profiles(),
		ChainID: sampleChain, Fingerprint: audit.Fingerprint(sampleChain, samplePublicKey()), KeyID: sampleKeyID,
		PublicKey: base64.StdEncoding.EncodeToString(samplePublicKey()), Program: "latticekeep",
	}
	head := doc.Assessment.Head
	doc.Command = fmt.Sprintf("latticekeep compliance score --file export.jsonl --fingerprint %s --tenant %s --framework %s --head %d",
		doc.Fingerprint, sampleTenant, f, head.Sequence)
	hash, err := hex.DecodeString(head.Hash)
	if err != nil {
		t.Fatal(err)
	}
	doc.Checkpoint = audit.Checkpoint{
		ChainID: sampleChain, Epoch: 1, Size: int64(head.Sequence), Root: [32]byte(samplePublicKey()), Sequence: head.Sequence, Hash: [32]byte(hash), Time: head.Time,
	}.Text()

	tallies := map[string]*compliance.Activity{"": {}}
	for i, e := range d.entries {
		at := compliance.Reference{Sequence: e.Sequence, Hash: e.Hash, Event: string(e.EventType), Actor: e.Actor.Type + " " + e.Actor.ID, Time: e.Time()}
		for _, event := range []string{"", string(e.EventType)} {
			a := tallies[event]
			if a == nil {
				a = &compliance.Activity{Event: event}
				tallies[event] = a
			}
			if a.Count++; a.Count == 1 {
				a.First = at
			}
			a.Last = at
		}
		if e.EventType != audit.ComplianceAssessed {
			continue
		}
		if a := derive(i + 1); a.Score != nil {
			doc.History = append(doc.History, compliance.DayScore{Date: e.Time().Format(time.DateOnly), Score: *a.Score, Sequence: e.Sequence})
		}
	}
	for _, a := range tallies {
		doc.Activity = append(doc.Activity, *a)
	}
	slices.SortFunc(doc.Activity, func(a, b compliance.Activity) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Event, b.Event))
	})
	return doc
}

func all(entries []*audit.Entry) iter.Seq2[*audit.Entry, error] {
	return func(yield func(*audit.Entry, error) bool) {
		for _, e := range entries {
			if !yield(e, nil) {
				return
			}
		}
	}
}

// The sample in the documentation is what the program writes with the current catalogue and the
// current probes.
func TestSampleIsCurrent(t *testing.T) {
	golden(t, "../../../docs/sample-report.pdf", render(t, sample(t, compliance.SOC2, quarter())))
}

// Every catalogue can be rendered in every format, and its control ids stay distinct in OSCAL.
func TestEveryFrameworkIsRendered(t *testing.T) {
	d := quarter()
	for _, f := range compliance.Frameworks() {
		doc := sample(t, f, d)
		render(t, doc)
		b, _ := assessmentResults(t, doc)
		validOSCAL(t, b)
		ids := make(map[string]string)
		for _, c := range doc.Assessment.Controls {
			id := ControlID(f, c)
			if other, taken := ids[id]; taken {
				t.Errorf("%s: %s and %s are both %s", f, other, c.ID, id)
			}
			ids[id] = c.ID
		}
		if f != compliance.FedRAMP {
			continue
		}
		ksi, err := KSI(doc)
		if err != nil || strings.Count(string(ksi), `"KSI-`) < 5 {
			t.Errorf("the indicators of the catalogue are not there: %v", err)
		}
	}
}
