// Package state knows which value each deciding row of the store has, and has it committed to the
// signed log.
//
// A process holds a record of each deciding row in memory: an id and a tag, both keyed hashes. A
// [Store] compares every row that is read with its record. A commit appends one row to a journal,
// the attribute `state` of its last entry is the hash of that row, and the head of the state names
// that change together with the newest entry of the log. docs/adr/0016-state.md says why, and
// docs/formats.md has the bytes. Three things always hold: no deciding row changes without an entry,
// the head of the state is of the newest entry of the log, and a View is judged by the state of its
// own snapshot. Before [State.Use], and until [State.Build] has ended, everything passes; what was
// put back before then is not found.
//
// A row decides if an old value of it, put back by somebody who can write the database, gives
// anybody anything or undoes anything: a revoked API key that works again, a role that was taken
// away, an earlier value of a credential. A row also decides if the same follows from its absence,
// as with a mark that a KMS key was given up. All other rows are counters and caches, or an index
// whose rows are compared with a deciding row before they count.
//
// A closure that changes a deciding row appends an audit entry.
package state

import (
	"bytes"
	"slices"
	"strings"
)

// Family is a kind of row of the store.
type Family struct {
	// Prefix begins the keys of the rows. Without a '/' at its end it is the key of the only row.
	Prefix string
	// Deciding reports whether the rows decide who may see or do what.
	Deciding bool
	// Number stands for a deciding family in the ids of its rows. It never changes, and no other
	// family ever gets it. 0: the family does not decide.
	Number byte
	// MAC reports whether each row begins with the keyring's MAC. See [Family.HasMAC].
	MAC bool
	// Group is the number of '/' in the common prefix of the rows that are decided on together, such
	// as a user's sessions or the credentials of one name: their number counts, or the newest one, or
	// each of them is deleted. It is 0 when each row stands alone. A row with fewer '/' in its key
	// stands alone too.
	Group int
	// Whole reports whether a scan of all rows of the family, or of those of all families that begin
	// with its prefix, decides something: whether a KMS key or a sealing key may be destroyed.
	Whole bool
	// Own reports whether the rows are of the deployment itself. When one of them is put back, no
	// tenant can be served, so the whole deployment stops.
	Own bool
	// Says is what a row says, for an operator who looks at one.
	Says string
	// Risk is what follows when somebody puts back an old value of a row, or removes the row.
	Risk string
}

// Families are all kinds of rows.
var Families = []Family{
	{Prefix: "deployment", Deciding: true, Number: 1, Own: true,
		Says: "which deployment it is: its chain, its format, and the KMS key that its own keys are under",
		Risk: "the deployment takes an earlier KMS key for that of its own keys"},
	{Prefix: "dev", Deciding: true, Number: 2, MAC: true, Own: true,
		Says: "which API key a development server made at its last start",
		Risk: "the key of the previous start is not revoked at the next one"},
	{Prefix: "key/", Deciding: true, Number: 3, Group: 3, Whole: true,
		Says: "the keys of a tenant, under the KMS key, and which version of them is used",
		Risk: "a key that was rotated, or moved to another KMS key, is used again; without a row the KMS key of a set seems unused and may be destroyed"},
	{Prefix: "key/system/", Deciding: true, Number: 4, Group: 3, Own: true,
		Says: "the keys of the deployment, under the KMS key, and which version of them is used",
		Risk: "as for a tenant: keys are used again, or their KMS key seems unused"},
	{Prefix: "kms/given-up/", Deciding: true, Number: 5, Own: true,
		Says: "that a KMS key is being destroyed, so nothing may be put under it",
		Risk: "new keys are wrapped with a KMS key that is being destroyed"},
	{Prefix: "kms/moved-from/", Deciding: true, Number: 6, Own: true,
		Says: "that keys were moved away from a KMS key, so it may be destroyed",
		Risk: "a KMS key that nothing was moved from may be destroyed"},
	{Prefix: "sealing/current", Deciding: true, Number: 7, MAC: true, Own: true,
		Says: "which sealing key is published",
		Risk: "an earlier sealing key is published, and values are sealed for it"},
	{Prefix: "sealing/key/", Deciding: true, Number: 8, MAC: true, Group: 2, Own: true,
		Says: "a sealing key, and whether it is retired",
		Risk: "a retired sealing key opens values again"},
	{Prefix: "tenant/", Deciding: true, Number: 9, MAC: true,
		Says: "a tenant: its trial and its limits",
		Risk: "a trial that ended goes on, or earlier limits of requests return"},
	{Prefix: "tenant/system", Deciding: true, Number: 10, MAC: true, Own: true,
		Says: "the tenant of the deployment itself: its limits",
		Risk: "earlier limits of requests return"},
	{Prefix: "namespace/", Deciding: true, Number: 11, MAC: true,
		Says: "which tenant a Kubernetes namespace is part of",
		Risk: "a namespace is part of another tenant"},
	{Prefix: "namespace-name/", Deciding: true, Number: 12, MAC: true,
		Says: "which namespace a name of the configuration stood for first",
		Risk: "a namespace that was made again under a configured name enters the tenant of that name"},
	// A tenant's members are counted, listed and searched for the last owner.
	{Prefix: "user/row/", Deciding: true, Number: 13, MAC: true, Group: 3,
		Says: "a member of a tenant: role, and whether the address is verified",
		Risk: "a member has an earlier role, or a removed one is back"},
	{Prefix: "user/email/", Deciding: true, Number: 14, MAC: true,
		Says: "which account an address signs in to",
		Risk: "an address leads to an account that it does not belong to"},
	{Prefix: "user/password/", Deciding: true, Number: 15, MAC: true,
		Says: "the hash of a user's password",
		Risk: "an earlier password is right"},
	// A user's sessions end together.
	{Prefix: "session/row/", Deciding: true, Number: 16, MAC: true, Group: 3,
		Says: "a session of a user, and which refresh token is its newest",
		Risk: "a session that was ended goes on, or a used refresh token is new"},
	{Prefix: "session/selector/", Deciding: true, Number: 17, MAC: true,
		Says: "which session a refresh token is of",
		Risk: "a refresh token leads to another session"},
	{Prefix: "ticket/hash/", Deciding: true, Number: 18, MAC: true,
		Says: "a token that was mailed, and when it ends",
		Risk: "a used or replaced token of a mail counts"},
	{Prefix: "ticket/of/", Deciding: true, Number: 19, MAC: true,
		Says: "which mailed token of a user counts",
		Risk: "a used or replaced token of a mail counts"},
	// A tenant's invitations are counted, and a user's end together.
	{Prefix: "invitation/", Deciding: true, Number: 20, MAC: true, Group: 2,
		Says: "an invitation into a tenant: role, and when it ends",
		Risk: "a withdrawn invitation is accepted"},
	{Prefix: "apikey/hash/", Deciding: true, Number: 21, MAC: true,
		Says: "an API key: whoever presents it acts for the tenant, with these scopes",
		Risk: "a revoked API key works"},
	// A tenant's keys are counted, and a user's end together.
	{Prefix: "apikey/tenant/", Deciding: true, Number: 22, MAC: true, Group: 3,
		Says: "that a tenant has an API key, which can be listed and revoked",
		Risk: "a revoked API key is listed, or one that works is not and cannot be revoked"},
	// A tenant's policies are counted, and their names compared.
	{Prefix: "access/policy/", Deciding: true, Number: 34, MAC: true, Group: 3,
		Says: "a policy of a tenant: what it allows on which paths",
		Risk: "a policy allows what it allowed earlier"},
	// A tenant's bindings are counted, and searched for those of a policy.
	{Prefix: "access/binding/", Deciding: true, Number: 35, MAC: true, Group: 3,
		Says: "which policies limit a user, an API key or a ServiceAccount, or what a group adds for its members",
		Risk: "it has its earlier policies, or none and reaches all paths"},
	// A tenant's groups are counted, and their names compared.
	{Prefix: "access/group/", Deciding: true, Number: 41, MAC: true, Group: 3,
		Says: "a group of a tenant",
		Risk: "a deleted group is back, without members or policies"},
	// A group's members are counted, and all of them leave it when it is deleted.
	{Prefix: "access/member/", Deciding: true, Number: 42, MAC: true, Group: 3,
		Says: "which groups a user or a ServiceAccount is a member of",
		Risk: "it has policies of a group that it was removed from"},
	// The newest version is the current one.
	{Prefix: "credential/", Deciding: true, Number: 23, Group: 3,
		Says: "the current version of a credential",
		Risk: "a deleted or replaced value is served"},
	// All previous versions of a credential are deleted together.
	{Prefix: "former/", Deciding: true, Number: 24, Group: 3,
		Says: "the previous version of a credential",
		Risk: "a version that ended, or another record, stands for the previous version of an object's credential"},
	// All kept versions of a credential are deleted together, and their number counts.
	{Prefix: "kept/", Deciding: true, Number: 36, Group: 3,
		Says: "a earlier version of a credential that a rule keeps",
		Risk: "values that were erased are readable again"},
	{Prefix: "kept-rules/", Deciding: true, Number: 37, MAC: true,
		Says: "how many earlier versions a tenant keeps on which paths",
		Risk: "versions are kept that a later rule erases, or erased that one keeps"},
	// A list reads all of a tenant, if they are few.
	{Prefix: "details/", Deciding: true, Number: 43, MAC: true, Group: 2,
		Says: "what people say of a credential: description, contact, tags",
		Risk: "somebody is told an earlier contact, or finds a credential by an earlier tag"},
	{Prefix: "settings/", Deciding: true, Number: 38, MAC: true,
		Says: "what the admins of a tenant decided for all of it: on which paths credentials may never expire",
		Risk: "credentials may never expire on a path that was withdrawn"},
	{Prefix: "credential-version/", Deciding: true, Number: 25, MAC: true, Group: 3,
		Says: "a line in the history of a credential, and its place in the index of names",
		Risk: "a credential has another history, whose newest line also says where the index of names has it"},
	// The newest credential of a name is the answer.
	{Prefix: "credential-name/", Deciding: true, Number: 26, MAC: true, Group: 3,
		Says: "which credential a name leads to",
		Risk: "a name leads to another credential"},
	{Prefix: "owner/", Deciding: true, Number: 27,
		Says: "which object owns a credential",
		Risk: "a credential has another owner or none, so others see and change it"},
	{Prefix: "owned/", Deciding: true, Number: 28, MAC: true, Whole: true,
		Says: "what the operator made of an object: its credential, version and previous version",
		Risk: "an object has an earlier version, and its previous version is readable again"},
	{Prefix: "released/", Deciding: true, Number: 33, MAC: true,
		Says: "what the operator made of the previous owner of a credential that was kept",
		Risk: "an object goes on with the credential under an earlier spec than the last one"},
	// A tenant's keys are counted and listed.
	{Prefix: "transit/key/", Deciding: true, Number: 29, MAC: true, Group: 3,
		Says: "a named key: its newest version, and when it rotates",
		Risk: "a named key has an earlier version as its newest one"},
	{Prefix: "transit/default/", Deciding: true, Number: 30, MAC: true,
		Says: "which named key a tenant encrypts with by default",
		Risk: "data is encrypted under a key that is no longer the default"},
	// The newest row of a version counts.
	{Prefix: "transit/seed/", Deciding: true, Number: 31, Group: 5,
		Says: "the secret of one version of a named key, under the tenant's wrapping key",
		Risk: "a seed that was encrypted again is back under the earlier wrapping key"},
	{Prefix: "transit/version/", Deciding: true, Number: 32, MAC: true, Group: 4,
		Says: "when a version of a named key was made",
		Risk: "the list of a key's versions has other times"},

	// The rows that follow decide nothing.

	{Prefix: "audit/",
		Says: "an entry of the log, or what is derived from the entries",
		Risk: "none: the log verifies itself"},
	{Prefix: "state/",
		Says: "digests of the deciding rows",
		Risk: "none: the log verifies them"},
	{Prefix: "backup/schedule",
		Says: "when the server took its last backup, and which replica takes the next one",
		Risk: "a backup is taken earlier or later, and the metrics say when"},
	{Prefix: "backup/commits",
		Says: "which log of commits goes on after a backup of the store",
		Risk: "a restore refuses the log, which has other entries than the backup"},
	{Prefix: "compliance/",
		Says: "what the scores of a tenant are made of",
		Risk: "none: the rows are functions of the log, or keep replicas from recording an assessment twice"},
	{Prefix: "apikey/used/", MAC: true,
		Says: "when an API key was last used",
		Risk: "none: it is shown only"},
	{Prefix: "invited/", MAC: true,
		Says: "how many invitations a tenant has mailed in an hour",
		Risk: "the tenant may mail more of them, each with a row of its own"},
	{Prefix: "review-note/", MAC: true,
		Says: "the note of a review; its entry has a salted hash of it",
		Risk: "a note that was erased is shown again, to those who may read the log"},
	{Prefix: "node-log/", MAC: true,
		Says: "which entries of a node's logs are recorded",
		Risk: "entries of a node are recorded again"},
	{Prefix: "quota/",
		Says: "requests of a minute",
		Risk: "a tenant may make more of them"},
	{Prefix: "slowdown/", MAC: true,
		Says: "failed sign-ins of an account",
		Risk: "more guesses at its password are allowed, at one argon2id run each"},
	{Prefix: "mail/",
		Says: "a mail that waits",
		Risk: "it is sent again to the same address, and the token in it counts only as long as its ticket does"},
	{Prefix: "mail-attempt/",
		Says: "the attempts to send a mail",
		Risk: "it is sent later, or again"},
	{Prefix: "past-name/",
		Says: "what something was called that has another name or is gone, encrypted",
		Risk: "a name that was erased is shown again, to those who may read names in the log"},
	{Prefix: "last-read/",
		Says: "in which hour a credential was read last",
		Risk: "none: it is shown only, and the log has each read"},
	{Prefix: "webhook/",
		Says: "a webhook of a tenant: its URL and its secret, under the tenant's wrapping key",
		Risk: "an address that a tenant has deleted is told the ids of its credentials that expire"},
	{Prefix: "webhook-delivery/", MAC: true,
		Says: "an event for a webhook, and what became of it: ids and times",
		Risk: "an event is shown again, or is no longer"},
	{Prefix: "webhook-outbox/",
		Says: "a delivery that waits",
		Risk: "an event is sent again under the same webhook-id, to the webhook that it was for"},
	{Prefix: "webhook-attempt/",
		Says: "the attempts at a delivery",
		Risk: "it is sent later, or again"},
	{Prefix: "lifetime/run", MAC: true,
		Says: "since when the deployment has erased expired credentials after their grace, without a long pause",
		Risk: "an expired credential is erased earlier or later"},
	{Prefix: "lifetime/reminded/", MAC: true,
		Says: "when a tenant was reminded of what expires soon",
		Risk: "it is reminded again, or a week later"},
	{Prefix: "idempotency/key/", MAC: true,
		Says: "which credential a repeated request is answered with: id, name and times, no value",
		Risk: "the request makes another credential, as a new one may"},
	{Prefix: "idempotency/request/", MAC: true,
		Says: "which request made a credential",
		Risk: "the request makes another credential, as a new one may"},
	{Prefix: "idempotency/due/",
		Says: "when the row of a repeated request ends",
		Risk: "the row stays, or ends earlier"},
	{Prefix: "transit/due/",
		Says: "when a named key is due to rotate",
		Risk: "none: the key itself says whether it is due"},
	{Prefix: "former-end/",
		Says: "when a previous version ends",
		Risk: "none: the row of the object says whether it is due"},
	{Prefix: "credential-path/",
		Says: "the place of a credential in lists by name",
		Risk: "a credential is missing in such lists; its record decides the rest"},
	{Prefix: "credential-paths",
		Says: "that all credentials have their places in lists by name",
		Risk: "such lists miss credentials, or are not served"},
	{Prefix: "credential-indexed/",
		Says: "a mark of an earlier release",
		Risk: "none: nothing reads it"},
	{Prefix: "maintenance",
		Says: "that the store is not to be served",
		Risk: "none: a server finds that deciding rows are missing"},
	{Prefix: "format",
		Says: "which releases may open the store",
		Risk: "a release that does not know the format opens it, and verifies what it reads"},
}

// bySegment holds the families by the first segment of their prefix, the longest prefix first.
var bySegment = func() map[string][]Family {
	m := map[string][]Family{}
	for _, f := range Families {
		first, _, _ := strings.Cut(f.Prefix, "/")
		m[first] = append(m[first], f)
	}
	for _, all := range m {
		slices.SortFunc(all, func(a, b Family) int { return len(b.Prefix) - len(a.Prefix) })
	}
	return m
}()

// FamilyOf returns the family of a row's key, and false for a key of no family. Among families whose
// prefixes begin the key, the longest prefix wins.
func FamilyOf(key []byte) (Family, bool) {
	first, _, _ := bytes.Cut(key, []byte{'/'})
	for _, f := range bySegment[string(first)] {
		if f.has(key) {
			return f, true
		}
	}
	return Family{}, false
}

func (f Family) has(key []byte) bool {
	n := len(f.Prefix)
	return len(key) >= n && string(key[:n]) == f.Prefix && (f.Prefix[n-1] == '/' || len(key) == n)
}

// HasMAC reports whether the row of a key begins with the keyring's MAC. Among the rows of a
// tenant's keys only the public one does: the others are encrypted.
func (f Family) HasMAC(key []byte) bool {
	return f.MAC || f.Prefix == "key/" && bytes.HasSuffix(key, []byte("/public"))
}

// GroupOf returns the common prefix of the rows that a row of the family is decided on together
// with, or nil if it stands alone. The result shares the key's memory.
func (f Family) GroupOf(key []byte) []byte {
	n := 0
	for range f.Group {
		i := bytes.IndexByte(key[n:], '/')
		if i < 0 {
			return nil
		}
		n += i + 1
	}
	if n == 0 {
		return nil
	}
	return key[:n]
}
