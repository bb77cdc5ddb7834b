package identity

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity/apikey"
	"github.com/latticekeep/latticekeep/internal/store"
)

// VerifyStore is [CompareRows] for a caller that wants the first fault only. An [audit.Broken]
// error names the first bad sequence.
func VerifyStore(ctx context.Context, s store.Store, report verify.Report) error {
	found, first := audit.FirstFault()
	if err := CompareRows(ctx, s, report, found); err != nil {
		return err
	}
	return first()
}

// CompareRows compares the API keys and namespaces in s with the report of the log's verification,
// and passes each fault to found. Every API key that is listed or that authenticates must have been
// made and not revoked, and must have both rows: the one in the list of its tenant and the one under
// its hash. Every namespace with a tenant must have been mapped to it. CompareRows needs no secret
// key, so it reads the rows and does not check their MACs. An API key that went with the user who
// answered for it has no entry of its own. Nothing may write to the store meanwhile.
func CompareRows(ctx context.Context, s store.Store, report verify.Report, found func(audit.RowFault)) error {
	if report.APIKeys == nil {
		return nil // the report on a range does not say which rows must exist
	}
	fault := func(key []byte, sequence uint64, format string, args ...any) {
		found(audit.RowFault{Key: key, Sequence: sequence, Reason: fmt.Sprintf(format, args...)})
	}
	if err := compareAPIKeys(ctx, s, report, fault); err != nil {
		return err
	}
	const namespaces = "namespace/"
	err := audit.ScanAll(ctx, s, store.Prefix([]byte(namespaces)), func(key, value []byte) error {
		cluster, namespace, _ := strings.Cut(strings.TrimPrefix(string(key), namespaces), "/")
		state, known := report.Namespaces[audit.NamespaceName{Cluster: cluster, Namespace: namespace}]
		switch {
		case !known:
			fault(key, report.Sequence, "namespace %q of cluster %q has a tenant, and the log never recorded it", namespace, cluster)
		case len(value) < rowMAC || string(value[rowMAC:]) != string(state.Tenant):
			fault(key, state.Sequence, "namespace %s of cluster %s is not part of the tenant that the log recorded here", namespace, cluster)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading namespaces: %w", err)
	}
	return nil
}

// rowMAC is the length of the MAC at the beginning of a row, in bytes.
const rowMAC = 32

// decodeUnverified reads the JSON behind the MAC of a row, which it does not check.
func decodeUnverified(value []byte, row any) bool {
	return len(value) > rowMAC && json.Unmarshal(value[rowMAC:], row) == nil
}

// compareAPIKeys calls fault for every API key whose rows contradict the report or each other.
func compareAPIKeys(ctx context.Context, s store.Store, report verify.Report, fault func(key []byte, sequence uint64, format string, args ...any)) error {
	exists := func(key []byte, n apikey.Name) (sequence uint64, ok bool) {
		state, known := report.APIKeys[audit.APIKeyName(n)]
		switch {
		case !known:
			fault(key, report.Sequence, "API key %q of tenant %q has a row, and the log never recorded it, or has archived that it was revoked", n.ID, n.Tenant)
		case state.Revoked:
			fault(key, state.Sequence, "API key %s of tenant %s has a row, and the log recorded its revocation here", n.ID, n.Tenant)
		}
		return state.Sequence, known && !state.Revoked
	}
	const list = "apikey/tenant/"
	hashes := make(map[apikey.Name]string) // hashes of the listed keys, until their other row is read
	err := audit.ScanAll(ctx, s, store.Prefix([]byte(list)), func(key, value []byte) error {
		tenant, id, _ := strings.Cut(strings.TrimPrefix(string(key), list), "/")
		n := apikey.Name{Tenant: authz.TenantID(tenant), ID: id}
		if sequence, ok := exists(key, n); ok {
			var hash string
			if !decodeUnverified(value, &hash) {
				fault(key, sequence, "the row of API key %s in the list of tenant %s is damaged", id, tenant)
			}
			hashes[n] = hash
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading the lists of API keys: %w", err)
	}
	err = audit.ScanAll(ctx, s, store.Prefix([]byte("apikey/hash/")), func(key, value []byte) error {
		var row apikey.Row
		if !decodeUnverified(value, &row) {
			fault(key, report.Sequence, "the row of an API key under its hash is damaged")
			return nil
		}
		n := apikey.Name{Tenant: row.Tenant, ID: row.ID}
		sequence, ok := exists(key, n)
		hash, listed := hashes[n]
		switch {
		case !ok:
		case !listed || string(apikey.HashKey(hash)) != string(key):
			fault(key, sequence, "API key %s of tenant %s authenticates and is not in the list of its tenant", n.ID, n.Tenant)
		default:
			delete(hashes, n)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading API keys: %w", err)
	}
	for n, hash := range hashes {
		fault(apikey.HashKey(hash), report.APIKeys[audit.APIKeyName(n)].Sequence, "API key %s of tenant %s is in the list of its tenant and has no row under its hash", n.ID, n.Tenant)
	}
	return nil
}
