// Package compare compares the rows of the vault with what the audit log says of them. It needs no secret
// key and changes nothing.
package compare

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/history"
	"github.com/latticekeep/latticekeep/internal/vault/kept"
	"github.com/latticekeep/latticekeep/internal/vault/nameindex"
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

// Store verifies the audit log in s and compares the rows with it, as [Rows] does. With
// a range of the log it verifies only the entries of the range. Nothing may write to the store
// meanwhile. An [audit.Broken] error names the first bad sequence number.
func Store(ctx context.Context, s store.Store, o verify.Options) (verify.Report, error) {
	report, err := verify.Store(ctx, s, o)
	if err != nil {
		return verify.Report{}, err
	}
	found, first := audit.FirstFault()
	if err := Rows(ctx, s, report, found); err != nil {
		return verify.Report{}, err
	}
	return report, first()
}

// Rows compares every credential row in s with the report of the log's verification, and
// passes each fault to found. Each row must be the version that the log recorded last, each recorded
// credential must have its row, and a deleted credential must have none. A previous version must be
// one that the log says was kept and that has not ended; it may also be missing. A kept version must be
// an earlier one of a credential that is there; the state says which rows there are. The index of names
// must lead to each credential and to no other. Rows needs no secret key, so it does not check
// the MACs of the index, nor the names of credentials that objects own. The report on a range does
// not say which credentials must exist, so then nothing is compared.
func Rows(ctx context.Context, s store.Store, report verify.Report, found func(audit.RowFault)) error {
	if report.Credentials == nil {
		return nil
	}
	fault := func(key []byte, sequence uint64, format string, args ...any) {
		found(audit.RowFault{Key: key, Sequence: sequence, Reason: fmt.Sprintf(format, args...)})
	}
	seen := make(map[audit.CredentialKey]bool)
	expected := make(expectedNames)
	err := audit.ScanAll(ctx, s, store.Prefix([]byte("credential/")), func(key, value []byte) error {
		r, err := record.At(key, value)
		if err != nil {
			id := parseCredentialKey(key)
			sequence := report.Sequence
			if state, known := report.Credentials[id]; known {
				sequence, seen[id] = state.Sequence, true
			}
			fault(key, sequence, "the row of credential %q of tenant %q is damaged or under a wrong key", id.Credential, id.Tenant)
			return nil
		}
		id := audit.CredentialKey{Tenant: r.Tenant, Credential: r.ID}
		state, known := report.Credentials[id]
		switch {
		case !known:
			fault(key, report.Sequence, "credential %s of tenant %s has a row, but the log never recorded it, or its deletion is archived", r.ID, r.Tenant)
		case state.Deleted:
			fault(key, state.Sequence, "credential %s of tenant %s has a row, but the log recorded its deletion here", r.ID, r.Tenant)
		case state.Version != strconv.FormatUint(r.Version, 10) || state.Digest != r.Digest() || seen[id]:
			fault(key, state.Sequence, "credential %s of tenant %s is not the version that the log recorded here", r.ID, r.Tenant)
		}
		seen[id] = true
		expected[id] = &expectedName{Record: record.Record{Tenant: r.Tenant, ID: r.ID, Version: r.Version, CreatedAt: r.CreatedAt, ExpiresAt: r.ExpiresAt}}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading credentials: %w", err)
	}
	err = audit.ScanAll(ctx, s, store.Prefix([]byte(history.PreviousFamily)), func(key, value []byte) error {
		id := parseCredentialKey(key)
		state := report.Credentials[id]
		r, err := history.PreviousAt(key, value)
		if err != nil || state.Previous != (audit.PreviousVersion{Version: strconv.FormatUint(r.Version, 10), Digest: r.Digest()}) {
			fault(key, cmp.Or(state.Sequence, report.Sequence),
				"the previous version of credential %q of tenant %q is not one that the log says is kept", id.Credential, id.Tenant)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading previous versions: %w", err)
	}
	err = audit.ScanAll(ctx, s, store.Prefix([]byte(kept.Family)), func(key, value []byte) error {
		id := parseCredentialKey(key)
		state, known := report.Credentials[id]
		current, _ := strconv.ParseUint(state.Version, 10, 64) // the log's own spelling
		if r, err := kept.At(key, value); err != nil || !known || state.Deleted || r.Version >= current {
			fault(key, cmp.Or(state.Sequence, report.Sequence),
				"the row of a kept version is damaged, or credential %q of tenant %q can have no such version", id.Credential, id.Tenant)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading kept versions: %w", err)
	}
	for id, state := range report.Credentials {
		if !state.Deleted && !seen[id] {
			version, _ := strconv.ParseUint(state.Version, 10, 64) // the log's own spelling
			fault(record.Key(id.Tenant, id.Credential, version), state.Sequence, "credential %s of tenant %s has no row, but the log recorded it here", id.Credential, id.Tenant)
		}
	}
	return expected.verify(ctx, s, func(key []byte, id audit.CredentialKey, what string) {
		fault(key, cmp.Or(report.Credentials[id].Sequence, report.Sequence), "credential %q of tenant %q %s", id.Credential, id.Tenant, what)
	})
}

// expectedName says where the index of names must have a credential.
type expectedName struct {
	record.Record        // without its values
	hash          string // keyed hash of the name, from the version's line in the history
	owned         bool   // an object owns it
	rows          int    // found in the index
}

type expectedNames map[audit.CredentialKey]*expectedName

// verify calls fault for every credential that the index of names does not lead to as it must, or
// that it leads to and that does not exist.
func (expected expectedNames) verify(ctx context.Context, s store.Store, fault func(key []byte, id audit.CredentialKey, what string)) error {
	const rowMAC = 32 // bytes
	owned := audit.ScanAll(ctx, s, store.Prefix([]byte("owner/")), func(key, _ []byte) error {
		if n := expected[parseCredentialKey(append(key, '/'))]; n != nil {
			n.owned = true
		}
		return nil
	})
	lines := audit.ScanAll(ctx, s, store.Prefix([]byte(history.Family)), func(key, value []byte) error {
		n := expected[parseCredentialKey(key)]
		var row history.Line
		if n != nil && string(history.Key(n.Tenant, n.ID, n.Version)) == string(key) && len(value) > rowMAC && json.Unmarshal(value[rowMAC:], &row) == nil {
			n.hash = row.Name
		}
		return nil
	})
	index := audit.ScanAll(ctx, s, store.Prefix([]byte("credential-name/")), func(key, value []byte) error {
		parts := strings.SplitN(string(key), "/", 4) // family, tenant, section, two times and the id
		last := parts[len(parts)-1]
		id := audit.CredentialKey{Tenant: authz.TenantID(parts[1]), Credential: last[min(16, len(last)):]}
		n, section := expected[id], parts[min(2, len(parts)-1)]
		switch {
		case n == nil:
			fault(key, id, "is in the index of names and does not exist")
		case string(nameindex.Key(n.Tenant, section, n.ExpiresAt, n.CreatedAt, n.ID)) != string(key):
			fault(key, id, "is in the index of names as another version")
		case n.hash != "" && n.owned == (section == n.hash):
			fault(key, id, "is in the index of names under another name")
		case len(value) != rowMAC:
			fault(key, id, "has a damaged row in the index of names")
		default:
			n.rows++
		}
		return nil
	})
	if err := errors.Join(owned, lines, index); err != nil {
		return fmt.Errorf("reading the index of names: %w", err)
	}
	for id, n := range expected {
		want := 1
		if n.owned {
			want = 2 // section of all objects, section of the namespace
		}
		switch {
		case n.hash == "":
			fault(record.Key(n.Tenant, n.ID, n.Version), id, "has no line in its history")
		case n.rows != want:
			fault(record.Key(n.Tenant, n.ID, n.Version), id, fmt.Sprintf("has %d rows in the index of names, and needs %d", n.rows, want))
		}
	}
	return nil
}
