package vault

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
)

func TestEntriesOfVersionsSayWhenTheyExpire(t *testing.T) {
	f := newFixture(t, time.Minute)
	said := func(c Credential, ttl string) {
		t.Helper()
		e := f.last(f.a)
		at, err := time.Parse(time.RFC3339Nano, e.Attributes[audit.AttributeExpiresAt])
		if err != nil || at.Location() != time.UTC || !at.Equal(c.ExpiresAt) || e.Attributes[audit.AttributeTTLDays] != ttl || e.Resource.ID != c.ID {
			t.Errorf("%s: %v, %v, want %s and %s days", e.EventType, e.Attributes, err, c.ExpiresAt, ttl)
		}
	}
	c := f.seal(f.a, login)
	said(c, "30")
	f.advance(day)
	said(f.replace(c.ID, 7, login), "7")
	f.advance(day)
	renewed, err := f.vault.Rotate(t.Context(), f.a, c.ID)
	must(t, err)
	said(renewed, "7")
	o, err := f.vault.Apply(t.Context(), f.operator(), "uid-evidence", 0, f.desired(login, "spec"))
	must(t, err)
	said(o.Credential, "30")
}
