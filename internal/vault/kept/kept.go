// Package kept keeps earlier versions of credentials with their values, where a tenant asks for it.
//
// A rule says how many earlier versions of the credentials on the paths of a glob stay readable. Of the
// rules that match a name the most specific one counts, and without one no version is kept. The rule of
// a credential's present name decides about all its versions. What a rule no longer keeps is not
// readable from the commit of the rule on; its rows are deleted in that commit, and in further ones if
// they are many.
//
// A kept version is the record of that version, under a key of its own. An object's credential has none.
package kept

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// Bounds of a tenant's rules.
const (
	MaxRules    = 100
	MaxVersions = 20 // that a rule keeps
)

// Rule says how many earlier versions are kept of the credentials on the paths of a glob.
type Rule struct {
	Path     string `json:"path"` // as given; [authz.ParseGlob] reads it
	Versions int    `json:"versions"`
}

// rulesRow is what a tenant's row of rules holds.
type rulesRow struct {
	Rules []Rule `json:"rules"` // by path
	// Erasing says that there may be rows that no rule keeps, after a change of the rules.
	Erasing bool `json:"erasing,omitempty"`
	// Changes counts the changes of the rules. An erasure that meets another count begins again.
	Changes uint64 `json:"changes,omitempty"`
}

// count returns how many earlier versions are kept of the credential with a name.
func (r *rulesRow) count(name string) int {
	if r == nil {
		return 0
	}
	n, best := 0, (*authz.Glob)(nil)
	for _, rule := range r.Rules {
		g, err := authz.ParseGlob(rule.Path)
		if err == nil && g.Matches(name) && (best == nil || g.IsNarrower(*best)) {
			n, best = rule.Versions, &g
		}
	}
	return n
}

// RulesFamily begins the keys of the rows of rules, one for each tenant.
const RulesFamily = "kept-rules/"

func rulesKey(tenant authz.TenantID) []byte { return []byte(RulesFamily + string(tenant)) }

// Family begins the keys of all kept versions.
const Family = "kept/"

func tenantPrefix(tenant authz.TenantID) []byte { return []byte(Family + string(tenant) + "/") }

// Prefix begins the keys of the kept versions of a credential.
func Prefix(tenant authz.TenantID, id string) []byte {
	return append(tenantPrefix(tenant), id+"/"...)
}

// Key returns the key of a kept version.
func Key(tenant authz.TenantID, id string, version uint64) []byte {
	return binary.BigEndian.AppendUint64(Prefix(tenant, id), version)
}

// At decodes a kept version. Error: record.ErrDamaged, also for a row under the key of another one.
func At(key, stored []byte) (*record.Record, error) {
	r, err := record.Decode(stored)
	if err != nil || !bytes.Equal(Key(r.Tenant, r.ID, r.Version), key) {
		return nil, record.ErrDamaged
	}
	return r, nil
}

// Rows reads and writes kept versions. It is safe for concurrent use.
type Rows struct{ mac.Rows }

func (k Rows) rules(rd store.Reader, tenant authz.TenantID) (*rulesRow, error) {
	return mac.Get[rulesRow](k.Rows, rd, rulesKey(tenant))
}

func (k Rows) putRules(tx store.Tx, tenant authz.TenantID, row *rulesRow) error {
	return mac.Put(k.Rows, tx, rulesKey(tenant), *row)
}

// Find returns a kept version of a credential, or nil if it is not kept. current is the credential's
// record, nil for none. It reads the same rows for every credential of a tenant, whatever there is.
// Error: record.ErrDamaged.
func (k Rows) Find(rd store.Reader, current *record.Record, tenant authz.TenantID, id string, version uint64) (*record.Record, error) {
	key := Key(tenant, id, version)
	stored, err := rd.Get(key)
	if err != nil {
		return nil, err
	}
	stored = bytes.Clone(stored)
	name := ""
	if current != nil {
		name = current.Name
	}
	versions, err := k.Versions(rd, tenant, id, name) // a row that no rule keeps may not be erased yet
	if err != nil || stored == nil || current == nil || !slices.Contains(versions, version) {
		return nil, err
	}
	return At(key, stored)
}

// Versions returns which earlier versions are kept of the credential that has a name, oldest first.
func (k Rows) Versions(rd store.Reader, tenant authz.TenantID, id, name string) (versions []uint64, err error) {
	rules, err := k.rules(rd, tenant)
	if err != nil || rules == nil {
		return nil, err
	}
	prefix := Prefix(tenant, id)
	err = rd.Scan(store.Prefix(prefix), func(key, _ []byte) bool {
		if len(key) == len(prefix)+8 {
			versions = append(versions, binary.BigEndian.Uint64(key[len(prefix):]))
		}
		return true
	})
	return versions[max(0, len(versions)-rules.count(name)):], err
}

// Replaced is called when next replaces old. It keeps old, if that had other values and a rule says so,
// and deletes the versions that are too many.
func (k Rows) Replaced(tx store.Tx, old, next *record.Record, otherValues bool) error {
	rules, err := k.rules(tx, next.Tenant)
	if err != nil || rules == nil {
		return err
	}
	n := rules.count(next.Name)
	if otherValues && n > 0 {
		err = tx.Put(Key(old.Tenant, old.ID, old.Version), old.Encode())
	}
	if err != nil {
		return err
	}
	_, err = trim(tx, next.Tenant, next.ID, n)
	return err
}

// trim deletes all but the newest n kept versions of a credential.
func trim(tx store.Tx, tenant authz.TenantID, id string, n int) (deleted int, err error) {
	var keys [][]byte
	err = tx.Scan(store.Prefix(Prefix(tenant, id)), func(key, _ []byte) bool {
		keys = append(keys, bytes.Clone(key))
		return true
	})
	if err != nil || len(keys) <= n {
		return 0, err
	}
	keys = keys[:len(keys)-n]
	for _, key := range keys {
		err = errors.Join(err, tx.Delete(key))
	}
	return len(keys), err
}

// All returns the kept versions of a credential, oldest first. Error: record.ErrDamaged.
func (k Rows) All(rd store.Reader, current *record.Record) (all []*record.Record, err error) {
	versions, err := k.Versions(rd, current.Tenant, current.ID, current.Name)
	for _, version := range versions {
		key := Key(current.Tenant, current.ID, version)
		stored, err := rd.Get(key)
		if err != nil {
			return nil, err
		}
		r, err := At(key, stored)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, err
}

// PutAgain stores kept versions that were encrypted again, as far as they are still kept.
func (k Rows) PutAgain(tx store.Tx, all []*record.Record) error {
	for _, r := range all {
		key := Key(r.Tenant, r.ID, r.Version)
		stored, err := tx.Get(key)
		if err != nil {
			return err
		}
		if stored == nil {
			continue
		}
		if err := tx.Put(key, r.Encode()); err != nil {
			return err
		}
	}
	return nil
}
