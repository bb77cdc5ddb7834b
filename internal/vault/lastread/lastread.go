// Package lastread keeps in which hour a credential was read last. The row is written in the commit of the
// hour's first read, so it is as true as the entry of that read, and the other reads of the hour write no
// row. It is shown only.
package lastread

import (
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Family begins the keys of the rows.
const Family = "last-read/"

// layout is the content of a row: the hour, in UTC.
const layout = "2006-01-02T15"

// Key returns the key of the row of a credential.
func Key(tenant authz.TenantID, id string) []byte {
	return []byte(Family + string(tenant) + "/" + id)
}

// At returns when the hour began in which a credential was read last, the zero time for never. A row
// that holds no hour counts as never: nothing depends on it.
func At(rd store.Reader, tenant authz.TenantID, id string) (time.Time, error) {
	stored, err := rd.Get(Key(tenant, id))
	if err != nil {
		return time.Time{}, err
	}
	return hourOf(stored), nil
}

func hourOf(stored []byte) time.Time {
	hour, err := time.Parse(layout, string(stored))
	if err != nil {
		return time.Time{}
	}
	return hour
}

// All returns what [At] returns for each credential of a tenant that was read, by id. It returns false
// when there are more than most.
func All(rd store.Reader, tenant authz.TenantID, most int) (at map[string]time.Time, whole bool, err error) {
	at, whole = make(map[string]time.Time), true
	prefix := Key(tenant, "")
	err = rd.Scan(store.Prefix(prefix), func(key, value []byte) bool {
		if whole = len(at) < most; whole {
			at[string(key[len(prefix):])] = hourOf(value)
		}
		return whole
	})
	return at, whole, err
}

// IsNoted reports whether the hour of now, or a later one, is what [At] returned.
func IsNoted(at, now time.Time) bool { return now.Before(at.Add(time.Hour)) }

// Note makes the hour of now the one of the last read, unless a later one is.
func Note(tx store.Tx, tenant authz.TenantID, id string, now time.Time) error {
	at, err := At(tx, tenant, id)
	if err != nil || IsNoted(at, now) {
		return err
	}
	return tx.Put(Key(tenant, id), []byte(now.UTC().Format(layout)))
}
