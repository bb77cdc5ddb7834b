package doctor

import (
	"bytes"

	"github.com/latticekeep/latticekeep/internal/state"
)

// family says what a kind of row is for, and whether its rows begin with the keyring's MAC.
type family struct {
	decides string
	mac     bool
}

// families has all deciding families and, of the others, those under a MAC, by their prefixes.
var families = map[string]family{
	"deployment":          {decides: "which deployment it is: its chain, its format, and the KMS key that its own keys are under"},
	"dev":                 {"which API key a development server made at its last start", true},
	"key/":                {decides: "the keys of a tenant, under the KMS key, and which version of them is used"},
	"key/system/":         {decides: "the keys of the deployment, under the KMS key, and which version of them is used"},
	"kms/given-up/":       {decides: "that a KMS key is being destroyed, so nothing may be put under it"},
	"kms/moved-from/":     {decides: "that keys were moved away from a KMS key, so it may be destroyed"},
	"sealing/current":     {"which sealing key is published", true},
	"sealing/key/":        {"a sealing key, and whether it is retired", true},
	"tenant/":             {"a tenant: its trial and its limits", true},
	"tenant/system":       {"the tenant of the deployment itself: its limits", true},
	"namespace/":          {"which tenant a Kubernetes namespace is part of", true},
	"namespace-name/":     {"which namespace a name of the configuration stood for first", true},
	"user/row/":           {"a member of a tenant: role, and whether the address is verified", true},
	"user/email/":         {"which account an address signs in to", true},
	"user/password/":      {"the hash of a user's password", true},
	"session/row/":        {"a session of a user, and which refresh token is its newest", true},
	"session/selector/":   {"which session a refresh token is of", true},
	"ticket/hash/":        {"a token that was mailed, and when it ends", true},
	"ticket/of/":          {"which mailed token of a user counts", true},
	"invitation/":         {"an invitation into a tenant: role, and when it ends", true},
	"apikey/hash/":        {"an API key: whoever presents it acts for the tenant, with these scopes", true},
	"apikey/tenant/":      {"that a tenant has an API key, which can be listed and revoked", true},
	"credential/":         {decides: "the current version of a credential"},
	"former/":             {decides: "the previous version of a credential"},
	"credential-version/": {"a line in the history of a credential, and its place in the index of names", true},
	"credential-name/":    {"which credential a name leads to", true},
	"owner/":              {decides: "which object owns a credential"},
	"owned/":              {"what the operator made of an object: its credential, version and previous version", true},
	"transit/key/":        {"a named key: its newest version, and when it rotates", true},
	"transit/default/":    {"which named key a tenant encrypts with by default", true},
	"transit/seed/":       {decides: "the secret of one version of a named key, under the tenant's wrapping key"},
	"transit/version/":    {"when a version of a named key was made", true},

	"apikey/used/":         {"when an API key was last used; nobody gains anything by it", true},
	"invited/":             {"how many invitations a tenant has mailed in an hour; nobody gains anything by it", true},
	"slowdown/":            {"failed sign-ins of an account; more of them are possible without it", true},
	"idempotency/key/":     {"which credential a repeated request is answered with; nobody gains anything by it", true},
	"idempotency/request/": {"which request made a credential; nobody gains anything by it", true},
}

// hasMAC reports whether a row begins with a MAC.
func hasMAC(f state.Family, key []byte) bool { return families[f.Prefix].mac || isPublicKey(key) }

func isPublicKey(key []byte) bool {
	return bytes.HasPrefix(key, []byte("key/")) && bytes.HasSuffix(key, []byte("/public"))
}
