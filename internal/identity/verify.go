package identity

import (
	"context"
	"fmt"
	"strings"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// VerifyStore compares the API keys and namespaces in s with the report of the log's verification.
// Every listed API key must have been made and not revoked, and every namespace with a tenant must
// have been mapped to it. It needs no secret key, so it checks where the rows are and not what they
// contain. An API key that went with the user who answered for it has no entry of its own. Nothing
// may write to the store meanwhile. An [audit.Broken] error names the first bad sequence.
func VerifyStore(ctx context.Context, s store.Store, report verify.Report) error {
	if report.APIKeys == nil {
		return nil // the report on a range does not say which rows must exist
	}
	var first *audit.Broken
	fault := func(sequence uint64, format string, args ...any) {
		if first == nil || sequence < first.Sequence {
			first = &audit.Broken{Sequence: sequence, Reason: fmt.Sprintf(format, args...)}
		}
	}
	const apiKeys, namespaces, rowMAC = "apikey/tenant/", "namespace/", 32
	err := audit.ScanAll(ctx, s, store.Prefix([]byte(apiKeys)), func(key, _ []byte) error {
		tenant, id, _ := strings.Cut(strings.TrimPrefix(string(key), apiKeys), "/")
		state, known := report.APIKeys[audit.APIKeyName{Tenant: authz.TenantID(tenant), ID: id}]
		switch {
		case !known:
			fault(report.Sequence, "API key %q of tenant %q has a row, and the log never recorded it, or has archived that it was revoked", id, tenant)
		case state.Revoked:
			fault(state.Sequence, "API key %s of tenant %s has a row, and the log recorded its revocation here", id, tenant)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading API keys: %w", err)
	}
	err = audit.ScanAll(ctx, s, store.Prefix([]byte(namespaces)), func(key, value []byte) error {
		cluster, namespace, _ := strings.Cut(strings.TrimPrefix(string(key), namespaces), "/")
		state, known := report.Namespaces[audit.NamespaceName{Cluster: cluster, Namespace: namespace}]
		switch {
		case !known:
			fault(report.Sequence, "namespace %q of cluster %q has a tenant, and the log never recorded it", namespace, cluster)
		case len(value) < rowMAC || string(value[rowMAC:]) != string(state.Tenant):
			fault(state.Sequence, "namespace %s of cluster %s is not part of the tenant that the log recorded here", namespace, cluster)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading namespaces: %w", err)
	}
	if first != nil {
		return first
	}
	return nil
}
