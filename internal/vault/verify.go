package vault

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ownerOfRow tells from a row's key whose it is.
func ownerOfRow(key []byte) (id audit.CredentialKey) {
	parts := strings.SplitN(string(key), "/", 4)
	if len(parts) == 4 {
		id = audit.CredentialKey{Tenant: authz.TenantID(parts[1]), Credential: parts[2]}
	}
	return id
}

// VerifyStore verifies the audit log in s and holds every credential row
// against it: each row is the version that the log recorded last, each
// recorded one has its row, and nothing deleted is back. A former version that
// is there is the one that the log says was kept, and has not ended; it may
// also be gone. It needs no key that is secret. With a range of the log only its
// entries are verified. Nothing may write to the store meanwhile. An
// [audit.Broken] error names the first bad sequence.
func VerifyStore(ctx context.Context, s store.Store, o audit.Options) (audit.Report, error) {
	report, err := audit.VerifyStore(ctx, s, o)
	if err != nil {
		return audit.Report{}, err
	}
	if report.Credentials == nil {
		return report, nil // of a range, which does not say what there must be
	}
	var first *audit.Broken
	fault := func(sequence uint64, format string, args ...any) {
		if first == nil || sequence < first.Sequence {
			first = &audit.Broken{Sequence: sequence, Reason: fmt.Sprintf(format, args...)}
		}
	}
	seen := make(map[audit.CredentialKey]bool)
	err = audit.ScanAll(ctx, s, store.Prefix([]byte("credential/")), func(key, value []byte) error {
		r, err := recordAt(key, value)
		if err != nil {
			id := ownerOfRow(key)
			sequence := report.Sequence
			if state, known := report.Credentials[id]; known {
				sequence, seen[id] = state.Sequence, true
			}
			fault(sequence, "the row of credential %q of tenant %q is damaged or stands where it does not belong", id.Credential, id.Tenant)
			return nil
		}
		id := audit.CredentialKey{Tenant: r.tenant, Credential: r.id}
		state, known := report.Credentials[id]
		switch {
		case !known:
			fault(report.Sequence, "credential %s of tenant %s has a row, and the log never recorded it, or has archived that it was deleted", r.id, r.tenant)
		case state.Deleted:
			fault(state.Sequence, "credential %s of tenant %s has a row, and the log recorded its deletion here", r.id, r.tenant)
		case state.Version != strconv.FormatUint(r.version, 10) || state.Digest != r.digest() || seen[id]:
			fault(state.Sequence, "credential %s of tenant %s is not the version that the log recorded here", r.id, r.tenant)
		}
		seen[id] = true
		return nil
	})
	if err != nil {
		return audit.Report{}, fmt.Errorf("reading credentials: %w", err)
	}
	err = audit.ScanAll(ctx, s, store.Prefix([]byte("former/")), func(key, value []byte) error {
		id := ownerOfRow(key)
		state := report.Credentials[id]
		r, err := formerAt(key, value)
		if err != nil || state.Former != (audit.Former{Version: strconv.FormatUint(r.version, 10), Digest: r.digest()}) {
			fault(cmp.Or(state.Sequence, report.Sequence),
				"the former version of credential %q of tenant %q is not one that the log says is kept", id.Credential, id.Tenant)
		}
		return nil
	})
	if err != nil {
		return audit.Report{}, fmt.Errorf("reading former versions: %w", err)
	}
	for id, state := range report.Credentials {
		if !state.Deleted && !seen[id] {
			fault(state.Sequence, "credential %s of tenant %s has no row, and the log recorded it here", id.Credential, id.Tenant)
		}
	}
	if first != nil {
		return audit.Report{}, first
	}
	return report, nil
}
