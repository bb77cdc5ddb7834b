package transit

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
)

func TestEntriesOfKeysSayWhenTheyAreDue(t *testing.T) {
	f := newFixture(t, time.Minute)
	said := func(do func() Key, days string) {
		t.Helper()
		var k Key
		left := f.leaves(f.a, func() { k = do() })
		e := left[len(left)-1]
		at, err := time.Parse(time.RFC3339Nano, e.Attributes[audit.AttributeNextRotation])
		if err != nil || at.Location() != time.UTC || !at.Equal(k.NextRotation) || e.Attributes[audit.AttributeRotationDays] != days || e.Resource.ID != k.ID {
			t.Errorf("%s: %v, %v, want %s and %s days", e.EventType, e.Attributes, err, k.NextRotation, days)
		}
	}
	var k Key
	said(func() Key { k = f.create(f.a, "payments", 30); return k }, "30")
	f.advance(5)
	said(func() Key { next, _ := f.rotate(f.a, k.ID, false); return next }, "30")
	said(func() Key { next, _ := f.rotate(f.a, k.ID, true); return next }, "30")
}
