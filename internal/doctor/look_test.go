package doctor_test

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/doctor"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault"
)

// failing is a store that does not answer one of its Views.
type failing struct {
	store.Store
	views int // left until the one that fails
}

func (s *failing) View(ctx context.Context, fn func(store.Reader) error) error {
	if s.views--; s.views == 0 {
		return fault.New(fault.Unavailable, "the store does not answer")
	}
	return s.Store.View(ctx, fn)
}

// Whatever part of an examination fails, it says so and finds nothing.
func TestAStoreThatDoesNotAnswerIsNoFinding(t *testing.T) {
	h := newHouse(t)
	rows := h.rows()
	h.tamper(map[string][]byte{h.key(rows, "user/password/", ""): nil, h.key(rows, "owner/", ""): []byte("uid-2")})
	report, err := verify.Store(t.Context(), h.raw, verify.Options{})
	h.must(err)
	for name, keys := range map[string][]keyring.KMS{"with": {h.kms}, "without": nil} {
		for n := 1; ; n++ {
			s := &failing{h.raw, n}
			x, err := doctor.Examine(t.Context(), s, doctor.Options{Report: report, KMS: keys})
			if s.views > 0 { // all Views were answered
				h.must(err)
				if n < 8 {
					t.Errorf("%s the KMS key: only %d Views", name, n)
				}
				break
			}
			if fault.Of(err) != fault.Unavailable || x != nil {
				t.Errorf("%s the KMS key, View %d fails: %v, %v", name, n, x, err)
			}
		}
	}
}

// A copy of a log has no keys, and lacks none. A store with a part of them does.
func TestKeysAreMissingOnlyWhereSomeAre(t *testing.T) {
	h := newHouse(t)
	rows := h.rows()
	for name, c := range map[string]struct {
		stays string
		want  string // row that is missing
	}{
		"the log alone":          {"", ""},
		"the deployment alone":   {"deployment", "key/system/current"},
		"the keys of one tenant": {"key/" + string(h.tenant) + "/", "deployment"},
		"the keys alone":         {"key/", "deployment"},
	} {
		gone := make(map[string][]byte)
		for key := range rows {
			if c.stays == "" || !strings.HasPrefix(key, c.stays) {
				gone[key] = nil
			}
		}
		h.tamper(gone)
		x := h.examine()
		if c.want != "" && of(x, c.want) == nil {
			t.Errorf("%s: %q is missing, and is not named", name, c.want)
		}
		for _, f := range x.Findings {
			if c.want == "" && (string(f.Key) == "deployment" || bytes.HasPrefix(f.Key, []byte("key/"))) {
				t.Errorf("%s: %s: %v", name, f.Row(), f.Problems)
			}
		}
		h.tamper(rows)
	}
}

// A tenant that has no API key needs its keys for its credentials, unless all were deleted.
func TestTheKeysOfALiveCredentialAreMissed(t *testing.T) {
	h := newHouse(t)
	ctx := t.Context()
	tenant, err := h.identity.NamespaceTenant(ctx, "cluster", "ns-uid")
	h.must(err)
	owner := h.owner
	owner.Tenant = tenant
	c, err := h.vault.Seal(ctx, owner, vault.SealRequest{Name: "pay", Type: "t", Values: map[string]secret.Bytes{"v": secret.Bytes("x")}})
	h.must(err)
	missing := func() *doctor.Finding {
		t.Helper()
		rows, gone := h.rows(), make(map[string][]byte)
		for key := range rows {
			if strings.HasPrefix(key, "key/"+string(tenant)+"/") {
				gone[key] = nil
			}
		}
		h.tamper(gone)
		defer h.tamper(rows)
		return of(h.examine(), "key/"+string(tenant)+"/current")
	}
	if missing() == nil {
		t.Error("the keys of a tenant with a credential were removed, and are not named")
	}
	h.must(h.vault.Delete(ctx, owner, c.ID))
	if f := missing(); f != nil {
		t.Errorf("the tenant has nothing: %+v", f)
	}
}

func TestAReasonIsPrintableAndRowsAreNamed(t *testing.T) {
	h := newHouse(t)
	row := h.key(h.rows(), "owner/", "")
	h.tamper(map[string][]byte{row: []byte("uid-2")})
	f := of(h.examine(h.kms), row)
	for _, reason := range []string{"", "a\nb", "a\x7f", "\u00e9", strings.Repeat("x", 201)} {
		done, err := h.accept(reason, f.Named())
		h.refuses(done, err, fault.Invalid, "the reason has 1 to 200 printable ASCII characters")
	}
	if done, err := h.accept("why"); err == nil || !strings.Contains(err.Error(), "no row is named") || done != (doctor.Resolved{}) {
		t.Errorf("no row: %+v, %v", done, err)
	}
	if _, err := h.accept(strings.Repeat("~", 199)+" ", f.Named()); err != nil {
		t.Error(err)
	}
}

// Several entries may contradict rows. The lowest is where the rows left the log.
func TestTheLowestEntryThatContradictsARowIsBroken(t *testing.T) {
	h := newHouse(t)
	before := h.rows()
	h.must(h.identity.RevokeAPIKey(t.Context(), h.owner, h.apiKey))
	revoked := h.newest().Sequence
	h.must(h.vault.Delete(t.Context(), h.owner, h.creds[0]))
	deleted := h.newest().Sequence
	if b := h.examine(h.kms).Broken(); b != nil {
		t.Errorf("nothing is wrong: %v", b)
	}
	for _, c := range []struct {
		row  string
		want uint64
	}{{h.key(before, "credential/", h.creds[0]), deleted}, {h.key(before, "apikey/hash/", h.apiKey), revoked}} {
		h.tamper(map[string][]byte{c.row: before[c.row]})
		x := h.examine(h.kms)
		if b := x.Broken(); b == nil || b.Sequence != c.want || b.Reason == "" {
			t.Errorf("%q was put back: %+v, want entry %d", c.row, b, c.want)
		}
		if f := of(x, c.row); f == nil || f.Entry == nil || f.Entry.Sequence != c.want {
			t.Errorf("%q was put back: %+v", c.row, f)
		}
	}
}

// Without a state nothing can be accepted or removed, so no row has a digest.
func TestARowOfAStoreWithoutAStateHasNoDigest(t *testing.T) {
	h := newHouseWith(t, true)
	row := h.key(h.rows(), "user/password/", "")
	h.tamper(map[string][]byte{row: []byte("0123")})
	if f := of(h.examine(h.kms), row); f == nil || f.Digest != "" || f.Acceptable() || f.Removable() {
		t.Errorf("%+v", f)
	}
}

// A row is named by what else is stored and by entries, also next to rows that name nothing.
func TestAMissingRowIsNamedNextToDamagedOnes(t *testing.T) {
	h := newHouse(t)
	rows := h.rows()
	hash, name := h.key(rows, "apikey/hash/", h.apiKey), h.key(rows, "credential-name/", h.creds[0])
	h.tamper(map[string][]byte{hash: nil, name: nil, "credential-version/x": []byte("junk"), "credential-version/x/y/z": []byte("junk")})
	for _, keys := range [][]keyring.KMS{{h.kms}, nil} {
		x := h.examine(keys...)
		if f := of(x, hash); f == nil || f.Entry == nil || f.Entry.Type != audit.APIKeyCreated {
			t.Errorf("with %d KMS keys: the API key is missing: %+v", len(keys), f)
		}
		if f := of(x, name); keys != nil && (f == nil || f.Reason != state.Removed || f.Digest != state.Absent) {
			t.Errorf("the name is missing: %+v", f)
		}
	}
}
