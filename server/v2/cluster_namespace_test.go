package v2_test

import (
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// Several namespaces may be of one tenant: to a ServiceAccount the objects of the others
// are not there, nor counted.
func TestAServiceAccountSeesTheObjectsOfItsNamespace(t *testing.T) {
	known := shown{}
	s := newService(t, func(c *server.Config) { c.Cluster = known })
	p := s.UsePods(s.Tenant)
	p.Allow(servertest.AllowAll)
	key := strings.Repeat("0", 64)
	for _, namespace := range []string{"billing", "shop", "shop-b"} {
		known[s.Tenant] = append(known[s.Tenant], v1beta1.SealedCredential{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "of-" + namespace},
			Spec:       v1beta1.SealedCredentialSpec{CredentialType: "t", Sealed: &v1beta1.Sealed{KeyID: key}},
		})
	}
	for _, query := range []string{"", "?namespace=billing", "?namespace=shop", "?limit=1"} {
		answer := s.Call(servertest.Request{Method: http.MethodGet, Path: objectsPath + query, Bearer: servertest.ShopToken}).Want(t, http.StatusOK)
		for _, o := range answer["sealed_credentials"].([]any) {
			if o.(object)["namespace"] != "shop" {
				t.Errorf("%q shows %v", query, o)
			}
		}
		if n := len(answer["sealed_credentials"].([]any)); n != 1 && query != "?namespace=billing" {
			t.Errorf("%q shows %d objects", query, n)
		}
		for _, use := range answer["sealing_keys"].([]any) {
			if use := use.(object); use["key_id"] == key && use["objects"] != 1.0 {
				t.Errorf("%q counts %v", query, use)
			}
		}
	}
	if answer := s.Get(objectsPath).Want(t, http.StatusOK); len(answer["sealed_credentials"].([]any)) != 3 {
		t.Error("a key sees", answer)
	}
}
