package kubetest

import (
	"errors"
	"os/exec"
	"strings"
	"testing"
)

// The rights in config/rbac are generated from markers. These are rights that the operator must
// never get, and rights that it needs.
func TestOperatorHasLeastPrivilege(t *testing.T) {
	c := ForTest(t)
	root, err := repositoryRoot()
	if err != nil {
		t.Fatal(err)
	}
	kubectl(t, c, "", "apply", "-k", root+"/config/rbac")
	for _, tc := range []struct {
		may  bool
		what string
	}{
		{true, "watch sealedcredentials.latticekeep.dev --all-namespaces"},
		{true, "patch sealedcredentials.latticekeep.dev --subresource=status --namespace=default"},
		{true, "patch configmaps/latticekeep-sealing-key --namespace=latticekeep-system"},
		{true, "create events.events.k8s.io --namespace=default"},
		{false, "list secrets --all-namespaces"},
		{false, "watch secrets --namespace=latticekeep-system"},
		{true, "get secrets --namespace=default"}, // one at a time, by name
		{true, "patch secrets --namespace=default"},
		{false, "create sealedcredentials.latticekeep.dev --namespace=default"},
		{false, "delete sealedcredentials.latticekeep.dev --namespace=default"},
		{false, "patch configmaps/other --namespace=latticekeep-system"},
		{false, "create configmaps --namespace=default"},
		{true, "list namespaces"},
		{false, "patch namespaces"},
		{false, "patch deployments.apps --namespace=default"},
		{true, "create subjectaccessreviews.authorization.k8s.io"},
		{false, "impersonate users"},
		{false, "create clusterrolebindings.rbac.authorization.k8s.io"},
		{false, "create serviceaccounts --subresource=token --namespace=latticekeep-system"},
		{false, "* *"},
	} {
		args := append([]string{"auth", "can-i", "--as=system:serviceaccount:latticekeep-system:latticekeep"}, strings.Fields(tc.what)...)
		out, err := c.Kubectl(t.Context(), args...).Output()
		if exit := new(exec.ExitError); err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) { // status 1 means no
			t.Fatalf("kubectl %s: %v", strings.Join(args, " "), err)
		}
		if got := strings.TrimSpace(string(out)); (got == "yes") != tc.may || (got == "no") == tc.may {
			t.Errorf("can it %s? %s", tc.what, got)
		}
	}
}
