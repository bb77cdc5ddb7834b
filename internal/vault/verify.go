package vault

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// parseCredentialKey returns the credential that a row's key names.
func parseCredentialKey(key []byte) (id audit.CredentialKey) {
	parts := strings.SplitN(string(key), "/", 4)
	if len(parts) == 4 {
		id = audit.CredentialKey{Tenant: authz.TenantID(parts[1]), Credential: parts[2]}
	}
	return id
}

// VerifyStore verifies the audit log in s and compares every credential row with it. Each row must
// be the version that the log recorded last, each recorded credential must have its row, and a
// deleted credential must have none. A previous version must be one that the log says was kept and
// that has not ended; it may also be missing. VerifyStore needs no secret key. With a range of the
// log it verifies only the entries of the range. Nothing may write to the store meanwhile. An
// [audit.Broken] error names the first bad sequence number.
func VerifyStore(ctx context.Context, s store.Store, o verify.Options) (verify.Report, error) {
	report, err := verify.Store(ctx, s, o)
	if err != nil {
		return verify.Report{}, err
	}
	if report.Credentials == nil {
		return report, nil // a range does not say which credentials must exist
	}
	var first *audit.Broken
	fault := func(sequence uint64, format string, args ...any) {
		if first == nil || sequence < first.Sequence {
			first = &audit.Broken{Sequence: sequence, Reason: fmt.Sprintf(format, args...)}
		}
	}
	seen := make(map[audit.CredentialKey]bool)
	err = audit.ScanAll(ctx, s, store.Prefix([]byte("credential/")), func(key, value []byte) error {
		r, err := record.At(key, value)
		if err != nil {
			id := parseCredentialKey(key)
			sequence := report.Sequence
			if state, known := report.Credentials[id]; known {
				sequence, seen[id] = state.Sequence, true
			}
			fault(sequence, "the row of credential %q of tenant %q is damaged or under a wrong key", id.Credential, id.Tenant)
			return nil
		}
		id := audit.CredentialKey{Tenant: r.Tenant, Credential: r.ID}
		state, known := report.Credentials[id]
		switch {
		case !known:
			fault(report.Sequence, "credential %s of tenant %s has a row, but the log never recorded it, or its deletion is archived", r.ID, r.Tenant)
		case state.Deleted:
			fault(state.Sequence, "credential %s of tenant %s has a row, but the log recorded its deletion here", r.ID, r.Tenant)
		case state.Version != strconv.FormatUint(r.Version, 10) || state.Digest != r.Digest() || seen[id]:
			fault(state.Sequence, "credential %s of tenant %s is not the version that the log recorded here", r.ID, r.Tenant)
		}
		seen[id] = true
		return nil
	})
	if err != nil {
		return verify.Report{}, fmt.Errorf("reading credentials: %w", err)
	}
	err = audit.ScanAll(ctx, s, store.Prefix([]byte("former/")), func(key, value []byte) error {
		id := parseCredentialKey(key)
		state := report.Credentials[id]
		r, err := previousAt(key, value)
		if err != nil || state.Previous != (audit.PreviousVersion{Version: strconv.FormatUint(r.Version, 10), Digest: r.Digest()}) {
			fault(cmp.Or(state.Sequence, report.Sequence),
				"the previous version of credential %q of tenant %q is not one that the log says is kept", id.Credential, id.Tenant)
		}
		return nil
	})
	if err != nil {
		return verify.Report{}, fmt.Errorf("reading previous versions: %w", err)
	}
	for id, state := range report.Credentials {
		if !state.Deleted && !seen[id] {
			fault(state.Sequence, "credential %s of tenant %s has no row, but the log recorded it here", id.Credential, id.Tenant)
		}
	}
	if first != nil {
		return verify.Report{}, first
	}
	return report, nil
}
