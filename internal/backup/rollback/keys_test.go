package rollback_test

import (
	"net/http"
	"testing"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity"
)

// A key that was bound and revoked since limits those that it made, as before.
func TestAKeyThatIsGoneLimitsThoseThatItMade(t *testing.T) {
	w := newWorld(t)
	made := w.Send("POST", "/api/v2/api-keys", w.owner.Access, fields{"name": "maker", "scopes": []string{"vault:read", "account:admin"}}).Want(t, http.StatusCreated)
	maker := made["key_id"].(string)
	by, err := w.Identity.Authenticate(t.Context(), made["api_key"].(string))
	must(t, err)
	_, key, err := w.Identity.CreateAPIKey(t.Context(), by.Principal, identity.APIKeyRequest{Name: "made", Scopes: []authz.Scope{authz.VaultRead}})
	must(t, err)
	policy := w.policy("a/*")
	at := w.snapshot()
	w.bind(maker, policy)
	w.send("DELETE", "/api/v2/api-keys/"+maker, nil, http.StatusOK)
	r := w.restore(at, w.snapshot(), nil)
	if reads := r.reads(key, "a/x", "b/x"); reads != "a/x " || len(r.result.Unkept) != 0 {
		t.Errorf("after the rollback it reads %q; %d were not kept", reads, len(r.result.Unkept))
	}
}
