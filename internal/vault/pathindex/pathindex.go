// Package pathindex lists credentials in the order of their names, so that a list reads only what the
// caller may see.
//
// A row is `credential-path/<tenant>/<name>` ‖ 0 ‖ id, with an empty value. The name is in the form in
// which policies compare names, and is cut after [maxName] bytes. A row decides nothing: it counts only
// when the record that it leads to has the name and the caller's policies allow it. It changes in the
// transaction of the record. [Builder] makes the rows of a store of an earlier release.
package pathindex

import (
	"bytes"
	"strings"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// maxName bounds a name in a row, so that a cursor can hold it. Names have at most 255 bytes and are
// longer only with letters that form C takes apart, which are few.
const maxName = 320

// MaxPosition is the length of the longest position of a row among those of its tenant.
const MaxPosition = maxName + 1 + 31

const family = "credential-path/"

func prefix(tenant authz.TenantID) string { return family + string(tenant) + "/" }

// path returns a name as rows have it.
func path(name string) string {
	name = authz.NormalizeName(name)
	return name[:min(len(name), maxName)]
}

// HoldsFolder reports whether rows tell the names in a folder, which ends with "/", from all others.
func HoldsFolder(folder string) bool { return len(folder) <= maxName }

// Behind returns the position behind all credentials in a folder that [HoldsFolder] accepts.
func Behind(folder string) string { return strings.TrimSuffix(folder, "/") + string('/'+1) }

// Key returns the key of the row of a credential.
func Key(tenant authz.TenantID, name, id string) []byte {
	return []byte(prefix(tenant) + path(name) + "\x00" + id)
}

// Leads reports whether the row with a path leads to a record.
func Leads(to *record.Record, at string) bool { return path(to.Name) == at }

// Walk says which rows [Walk.Read] visits.
type Walk struct {
	Tenant authz.TenantID
	Access authz.Access // paths that it does not let anybody list are skipped
	Prefix string       // what the names begin with
	After  string       // position of the row before the first one; empty for none

	// Looks bounds the rows outside Access that are looked at: one for each segment in the place of a "*".
	// Walks over one page share them.
	Looks *int
}

// Read visits rows in the order of their names until visit returns false. The name that visit gets is
// the one of the row. left reports that Looks were used up before the end, and from which position on
// rows were not looked at.
func (w Walk) Read(rd store.Reader, visit func(position, name, id string) bool) (left string, err error) {
	all := prefix(w.Tenant)
	rng := store.Prefix([]byte(all + path(w.Prefix)))
	from := string(rng.From[len(all):])
	if w.After != "" {
		from = max(from, w.After+"\x00")
	}
	for again := true; again && err == nil; {
		again = false
		next, ok := w.next(from)
		if rng.From = []byte(all + next); !ok || bytes.Compare(rng.From, rng.To) >= 0 {
			return "", nil
		}
		err = rd.Scan(rng, func(key, _ []byte) bool {
			position := string(key[len(all):])
			name, id, _ := strings.Cut(position, "\x00")
			if w.Access.Allows(authz.ListPath, name) {
				return visit(position, name, id)
			}
			if *w.Looks--; *w.Looks < 0 {
				left = position
				return false
			}
			from, again = position+"\x00", true
			return false
		})
	}
	return left, err
}

// next returns where to look from a position on. Behind the position of a credential that may be listed,
// others of its name follow.
func (w Walk) next(from string) (next string, ok bool) {
	if name, _, inside := strings.Cut(from, "\x00"); inside && w.Access.Allows(authz.ListPath, name) {
		return from, true
	}
	return w.Access.Next(authz.ListPath, from)
}

// Remove deletes the rows of a credential whose name is not known any more.
func Remove(tx store.Tx, tenant authz.TenantID, id string) error {
	var keys [][]byte
	err := tx.Scan(store.Prefix([]byte(prefix(tenant))), func(key, _ []byte) bool {
		if bytes.HasSuffix(key, []byte("\x00"+id)) {
			keys = append(keys, bytes.Clone(key))
		}
		return true
	})
	for _, key := range keys {
		if err == nil {
			err = tx.Delete(key)
		}
	}
	return err
}
