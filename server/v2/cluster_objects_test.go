package v2_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// shown is what an operator knows, by tenant.
type shown map[authz.TenantID][]v1beta1.SealedCredential

func (o shown) SealedCredentials(_ context.Context, tenant authz.TenantID) ([]v1beta1.SealedCredential, error) {
	if o == nil {
		return nil, fault.Unavailable
	}
	return o[tenant], nil
}

const objectsPath = "/api/v2/cluster/sealed-credentials"

func TestObjectsAreShownWithoutTheirValues(t *testing.T) {
	known := shown{}
	s := newService(t, func(c *server.Config) { c.Cluster = known })
	current, err := s.Config.Keys.CurrentSealingKey(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := metav1.NewTime(time.Date(2027, 1, 20, 10, 0, 0, 0, time.UTC))
	sealed := func(key string) *v1beta1.Sealed {
		return &v1beta1.Sealed{Version: 1, KeyID: key, Values: map[string]v1beta1.SealedValue{"canary-key": {Data: "canary-value"}}}
	}
	known[s.Tenant] = []v1beta1.SealedCredential{
		{
			ObjectMeta: metav1.ObjectMeta{Namespace: "billing", Name: "db", Generation: 2, CreationTimestamp: at, Annotations: map[string]string{"a": "canary-annotation"}},
			Spec: v1beta1.SealedCredentialSpec{CredentialType: "database", Suspend: true, Sealed: sealed(current),
				Target: &v1beta1.Target{Keys: []v1beta1.TargetKey{{To: "url", Template: "canary-template"}}}},
			Status: v1beta1.SealedCredentialStatus{
				ObservedGeneration: 1, CredentialID: "cred_x", Version: 3, NextRotationTime: &at, ExpiresAt: &at,
				Conditions: []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Sealed", Message: "it is", LastTransitionTime: at}},
			},
		},
		{
			ObjectMeta: metav1.ObjectMeta{Namespace: "billing", Name: "made", CreationTimestamp: at},
			Spec:       v1beta1.SealedCredentialSpec{CredentialType: "t", Generate: []v1beta1.Generator{{Key: "canary-generated"}}, Target: &v1beta1.Target{Name: "other"}},
			Status:     v1beta1.SealedCredentialStatus{ObservedGeneration: -1},
		},
		{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "imported", CreationTimestamp: at},
			Spec:       v1beta1.SealedCredentialSpec{CredentialType: "t", ValuesFrom: &v1beta1.ValuesFrom{}},
		},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "lost", CreationTimestamp: at}, Spec: v1beta1.SealedCredentialSpec{CredentialType: "t", Sealed: sealed(strings.Repeat("0", 64))}},
	}
	known["ten_other"] = []v1beta1.SealedCredential{{ObjectMeta: metav1.ObjectMeta{Namespace: "foreign", Name: "canary-foreign"}}}

	r := s.Get(objectsPath)
	answer := r.Want(t, http.StatusOK)
	if strings.Contains(string(r.Body), "canary") {
		t.Errorf("%s", r.Body)
	}
	want := object{
		"success": true, "operator": true,
		"sealed_credentials": []any{
			object{"namespace": "billing", "name": "db", "credential_type": "database", "source": "sealed", "key_id": current, "scope": "Strict", "status": "Suspended", "suspended": true,
				"created_at": "2027-01-20T10:00:00Z", "generation": 2, "observed_generation": 1, "credential_id": "cred_x", "version": 3, "target_secret": "db",
				"next_rotation_at": "2027-01-20T10:00:00Z", "expires_at": "2027-01-20T10:00:00Z",
				"conditions": []any{object{"type": "Ready", "status": "True", "reason": "Sealed", "message": "it is", "last_transition_time": "2027-01-20T10:00:00Z"}}},
			object{"namespace": "billing", "name": "made", "credential_type": "t", "source": "generate", "status": "InProgress", "suspended": false, "created_at": "2027-01-20T10:00:00Z",
				"generation": 0, "observed_generation": -1, "version": 0, "target_secret": "other", "conditions": []any{}},
			object{"namespace": "shop", "name": "imported", "credential_type": "t", "source": "values_from", "status": "InProgress", "suspended": false, "created_at": "2027-01-20T10:00:00Z",
				"generation": 0, "observed_generation": 0, "version": 0, "conditions": []any{}},
			object{"namespace": "shop", "name": "lost", "credential_type": "t", "source": "sealed", "key_id": strings.Repeat("0", 64), "scope": "Strict", "status": "InProgress", "suspended": false,
				"created_at": "2027-01-20T10:00:00Z", "generation": 0, "observed_generation": 0, "version": 0, "conditions": []any{}},
		},
		"sealing_keys": []any{object{"key_id": current, "state": "current", "objects": 1}, object{"key_id": strings.Repeat("0", 64), "state": "unknown", "objects": 1}},
	}
	if servertest.Marshal(t, answer) != servertest.Marshal(t, want) {
		t.Errorf("%s\nwant\n%s", servertest.Marshal(t, answer), servertest.Marshal(t, want))
	}
	if e := s.Entries("event_type=CREDENTIAL_LISTED"); len(e) != 1 || e[0]["resource"].(object)["type"] != "manifest" {
		t.Error(e)
	}
	if _, err := s.Sealing.Rotate(context.Background(), administratorOf(authz.SystemTenant)); err != nil {
		t.Fatal(err)
	}
	use := s.Get(objectsPath+"?namespace=none").Want(t, http.StatusOK)
	if keys := use["sealing_keys"].([]any); len(keys) != 3 || keys[0].(object)["objects"] != 0.0 || keys[1].(object)["state"] != "former" || keys[1].(object)["key_id"] != current ||
		len(use["sealed_credentials"].([]any)) != 0 {
		t.Error(use)
	}
}

// administratorOf may do everything in a tenant.
func administratorOf(tenant authz.TenantID) authz.Principal {
	return authz.Principal{Tenant: tenant, Kind: authz.System, ID: "test", Scopes: append(authz.TenantScopes(), authz.SystemAdmin)}
}

func TestObjectsArePaged(t *testing.T) {
	known := shown{}
	s := newService(t, func(c *server.Config) { c.Cluster = known })
	for _, namespace := range []string{"a", "a-b", "b"} { // a name that begins with another comes behind all of that one's
		for i := range 25 {
			known[s.Tenant] = append(known[s.Tenant], v1beta1.SealedCredential{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("o%02d", i)}})
		}
	}
	for query, want := range map[string]int{"": 75, "namespace=a": 25, "namespace=b&limit=7": 25, "limit=1&namespace=a-b": 25, "limit=100": 75, "namespace=none": 0} {
		var found []string
		for cursor := ""; ; {
			page := s.Get(objectsPath+"?"+query+cursor).Want(t, http.StatusOK)
			for _, o := range page["sealed_credentials"].([]any) {
				found = append(found, o.(object)["namespace"].(string)+"/"+o.(object)["name"].(string))
			}
			next, ok := page["next_cursor"].(string)
			if !ok {
				break
			}
			cursor = "&cursor=" + next
		}
		seen := map[string]bool{}
		for _, name := range found {
			seen[name] = true
		}
		if len(found) != want || len(seen) != want {
			t.Errorf("%q: %d objects, %d of them once: %v", query, len(found), len(seen), found)
		}
	}
}

// The status follows from the conditions as kstatus says, and a list can be of one status.
func TestObjectsHaveAStatus(t *testing.T) {
	known := shown{}
	s := newService(t, func(c *server.Config) { c.Cluster = known })
	is := func(kinds ...string) (all []metav1.Condition) {
		for _, kind := range kinds {
			name, status, _ := strings.Cut(kind, "=")
			all = append(all, metav1.Condition{Type: name, Status: metav1.ConditionStatus(status)})
		}
		return all
	}
	for i, c := range []struct {
		status     string
		suspended  bool
		observed   int64
		conditions []metav1.Condition
	}{
		{"Current", false, 2, is("Ready=True")},
		{"Current", false, 2, is("Ready=True", "Stalled=False", "Reconciling=False", "Expiring=True")},
		{"InProgress", false, 1, is("Ready=True")}, // of an older generation
		{"InProgress", false, 1, is("Ready=False", "Stalled=True")},
		{"InProgress", false, -1, nil},
		{"InProgress", false, 2, nil},
		{"InProgress", false, 2, is("Ready=False")},
		{"InProgress", false, 2, is("Ready=Unknown")},
		{"InProgress", false, 2, is("Ready=True", "Reconciling=True")},
		{"Failed", false, 2, is("Ready=False", "Stalled=True", "TargetSynced=False")},
		{"Failed", false, 2, is("Ready=True", "Stalled=True")},
		{"Suspended", true, 2, is("Ready=False", "Stalled=True")},
		{"Suspended", true, 1, is("Ready=True")},
	} {
		known[s.Tenant] = append(known[s.Tenant], v1beta1.SealedCredential{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: fmt.Sprintf("o%02d-%s", i, c.status), Generation: 2},
			Spec:       v1beta1.SealedCredentialSpec{Suspend: c.suspended},
			Status:     v1beta1.SealedCredentialStatus{ObservedGeneration: c.observed, Conditions: c.conditions},
		})
	}
	found := 0
	for _, status := range []string{"Current", "InProgress", "Failed", "Suspended"} {
		for cursor := ""; ; {
			page := s.Get(objectsPath+"?limit=3&status="+status+cursor).Want(t, http.StatusOK)
			for _, o := range page["sealed_credentials"].([]any) {
				o := o.(object)
				if found++; o["status"] != status || !strings.HasSuffix(o["name"].(string), "-"+status) {
					t.Errorf("%s is %v in the list of %s", o["name"], o["status"], status)
				}
			}
			next, ok := page["next_cursor"].(string)
			if !ok {
				break
			}
			cursor = "&cursor=" + next
		}
	}
	if found != len(known[s.Tenant]) {
		t.Errorf("%d of %d objects have a status that can be asked for", found, len(known[s.Tenant]))
	}
	s.Get(objectsPath+"?status=current").Message(t, http.StatusBadRequest)
}

func TestWithoutAnOperatorThereAreNoObjects(t *testing.T) {
	answer := newService(t).Get(objectsPath).Want(t, http.StatusOK)
	if want := (object{"success": true, "operator": false, "sealed_credentials": []any{}, "sealing_keys": []any{}}); servertest.Marshal(t, answer) != servertest.Marshal(t, want) {
		t.Error(answer)
	}
	s := newService(t, func(c *server.Config) { c.Cluster = shown(nil) })
	s.Get(objectsPath).Message(t, http.StatusServiceUnavailable)
}
