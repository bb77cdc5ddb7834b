// Package past keeps what things were called that have another name now, or are gone, for as many days as
// the settings of their tenant say. Whoever reads the log then still learns whom and what its entries are
// about. Each name is encrypted with a key of its tenant, which is derived from one of the deployment: so a
// name is kept in the commit that ends it, also while the KMS cannot be reached.
package past

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/settings"
	"github.com/latticekeep/latticekeep/internal/state"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/mac"
)

// MaxNames bounds how many past names of one thing are read, the newest ones.
const MaxNames = 20

// Name is a name that something had.
type Name struct {
	Type    string    `json:"type"` // type of resource in entries
	Name    string    `json:"name"`
	EndedAt time.Time `json:"-"`
}

// Names keeps and reads past names. It is safe for concurrent use.
type Names struct {
	rows mac.Rows
	now  func() time.Time
}

// New returns the past names of a deployment.
func New(keys *keyring.Ring, now func() time.Time) Names { return Names{mac.New(keys), now} }

// Family begins the keys of the rows.
const Family = "past-name/"

func prefix(tenant authz.TenantID, id string) []byte {
	return []byte(Family + string(tenant) + "/" + id + "/")
}

// keyOf returns the key of the row of a name that ended at a time.
func keyOf(tenant authz.TenantID, id string, ended time.Time) []byte {
	return binary.BigEndian.AppendUint64(prefix(tenant, id), uint64(ended.UnixMicro()))
}

// endOf returns when the name of a row ended, and its tenant.
func endOf(key []byte) (tenant authz.TenantID, ended time.Time, ok bool) {
	rest, found := strings.CutPrefix(string(key), Family)
	name, _, more := strings.Cut(rest, "/")
	if !found || !more || len(key) < 8 {
		return "", time.Time{}, false
	}
	return authz.TenantID(name), time.UnixMicro(int64(binary.BigEndian.Uint64(key[len(key)-8:]))), true
}

// Keep keeps a name that ends in this transaction, unless the tenant keeps none. Settings that are damaged
// keep none either: what ends a name must not fail for that.
func (n Names) Keep(tx store.Tx, tenant authz.TenantID, resource, id, name string) error {
	days, err := n.days(tx, tenant)
	if err != nil || days == 0 || name == "" {
		return err
	}
	key := keyOf(tenant, id, n.now())
	plain, err := json.Marshal(Name{Type: resource, Name: name})
	if err != nil {
		return err
	}
	// The nonce depends on what is encrypted, so a transaction that runs again writes the same. One key
	// never has one nonce for two texts.
	nonce := n.rows.KeyedHash("latticekeep/past-name-nonce/v1", key, plain)[:nonceSize]
	return tx.Put(key, n.aead(tenant).Seal(nonce, nonce, plain, key))
}

// Note keeps what something is called that has no row of its own, such as an account of a cluster, in place of
// an earlier note. It does nothing within a day of that one.
func (n Names) Note(tx store.Tx, tenant authz.TenantID, resource, id, name string) error {
	newest := store.Prefix(prefix(tenant, id))
	newest.Reverse = true
	var earlier [][]byte
	fresh := false
	err := tx.Scan(newest, func(key, _ []byte) bool {
		_, noted, ok := endOf(key)
		if fresh = ok && n.now().Before(noted.Add(24*time.Hour)); !fresh {
			earlier = append(earlier, bytes.Clone(key))
		}
		return !fresh
	})
	if err != nil || fresh {
		return err
	}
	for _, key := range earlier {
		err = errors.Join(err, tx.Delete(key))
	}
	return errors.Join(err, n.Keep(tx, tenant, resource, id, name))
}

const nonceSize = 12

// aead returns AES-256-GCM with the key of a tenant's past names.
func (n Names) aead(tenant authz.TenantID) cipher.AEAD {
	block, err := aes.NewCipher(n.rows.KeyedHash("latticekeep/past-name-key/v1", []byte(tenant)))
	if err != nil {
		panic(err) // the key has 32 bytes
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err) // AES has blocks of 16 bytes
	}
	return aead
}

// days returns how many days a tenant keeps names.
func (n Names) days(r store.Reader, tenant authz.TenantID) (int, error) {
	s, err := settings.Of(n.rows, r, tenant)
	if state.IsRefused(err) || errors.Is(err, fault.Internal) {
		return 0, nil
	}
	return s.NamesKeptDays(), err
}

// Of returns the past names of something, newest first. It leaves out those whose time is over, and rows
// that were not written by this deployment.
func (n Names) Of(r store.Reader, tenant authz.TenantID, id string) (all []Name, err error) {
	days, err := n.days(r, tenant)
	if err != nil || days == 0 {
		return nil, err
	}
	newest := store.Prefix(prefix(tenant, id))
	newest.Reverse = true
	aead := n.aead(tenant)
	err = r.Scan(newest, func(key, stored []byte) bool {
		_, ended, ok := endOf(key)
		if !ok || !n.keeps(days, ended) {
			return ok
		}
		var name Name
		if len(stored) >= nonceSize {
			plain, err := aead.Open(nil, stored[:nonceSize], stored[nonceSize:], key)
			if err == nil && json.Unmarshal(plain, &name) == nil {
				name.EndedAt = ended
				all = append(all, name)
			}
		}
		return len(all) < MaxNames
	})
	return all, err
}

func (n Names) keeps(days int, ended time.Time) bool {
	return n.now().Before(ended.Add(time.Duration(days) * 24 * time.Hour))
}

var (
	errNone    = fault.New(fault.NotFound, "no past name of this id is kept")
	errLimited = fault.New(fault.Forbidden, "your policies do not allow all paths, so past names are not yours to erase")
)

const reasonNone = "no_such_name"

// Erase erases all past names of something in p's tenant, with an entry. Errors: fault.Forbidden, also for
// everybody whom a policy limits; fault.NotFound if there are none; fault.Unavailable.
func (n Names) Erase(ctx context.Context, s store.Store, g *guard.Guard, p authz.Principal, id string) error {
	if err := g.Admit(ctx, p, authz.EraseNames); err != nil {
		return err
	}
	e := audit.Event{Type: audit.NamesErased, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.LogResource}}
	if p.Access.IsLimited() {
		return g.Refuse(ctx, e, audit.Denied, string(authz.OutsidePolicy), errLimited)
	}
	found := false
	err := s.Update(ctx, func(tx store.Tx) error {
		e := e
		var keys [][]byte
		err := tx.Scan(store.Prefix(prefix(p.Tenant, id)), func(key, _ []byte) bool {
			keys = append(keys, bytes.Clone(key))
			return true
		})
		for _, key := range keys {
			err = errors.Join(err, tx.Delete(key))
		}
		if found = len(keys) > 0; found {
			e.Attributes = map[string]string{attributeOf: id}
		} else {
			e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reasonNone}
		}
		_, failed := g.Append(tx, e)
		return errors.Join(err, failed)
	})
	if err != nil {
		return fmt.Errorf("erasing past names: %w", err)
	}
	if !found {
		return errNone
	}
	return nil
}

// attributeOf has the id whose names were erased.
const attributeOf = "names_of"

// Sweeper erases names whose time is over. One runs in each process.
type Sweeper struct {
	Names
	Store store.Store

	mu   sync.Mutex
	next []byte // where the next pass begins
}

// passRows is how many rows a pass reads.
const passRows = 2000

// Sweep looks at the next rows, and erases those whose time is over. Passes go round, so each row is looked
// at again and again. It returns how many it erased. Error: fault.Unavailable.
func (s *Sweeper) Sweep(ctx context.Context) (erased int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rng := store.Prefix([]byte(Family))
	if s.next != nil {
		rng.From = s.next
	}
	var due [][]byte
	var next []byte
	err = s.Store.View(ctx, func(r store.Reader) (err error) {
		due, next = nil, nil
		var ends []entry
		err = r.Scan(rng, func(key, _ []byte) bool {
			if len(ends) == passRows {
				next = append([]byte{}, key...)
				return false
			}
			tenant, ended, ok := endOf(key)
			ends = append(ends, entry{append([]byte{}, key...), tenant, ended, ok})
			return true
		})
		days := make(map[authz.TenantID]int)
		for _, e := range ends {
			kept, known := days[e.tenant]
			if !known && err == nil {
				kept, err = s.days(r, e.tenant)
				days[e.tenant] = kept
			}
			if !e.ok || !s.keeps(kept, e.ended) {
				due = append(due, e.key)
			}
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	if len(due) > 0 {
		err = s.Store.Update(ctx, func(tx store.Tx) (err error) {
			for _, key := range due {
				err = errors.Join(err, tx.Delete(key))
			}
			return err
		})
	}
	if err == nil {
		s.next, erased = next, len(due)
	}
	return erased, err
}

// entry is what a pass knows of a row.
type entry struct {
	key    []byte
	tenant authz.TenantID
	ended  time.Time
	ok     bool // false for a key of no such row
}
