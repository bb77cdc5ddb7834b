package apikey

import (
	"testing"
	"time"
)

func TestAUseDuringAFlushIsWrittenByTheNext(t *testing.T) {
	var u LastUses
	n, start := Name{Tenant: "ten_x", ID: "key_x"}, time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	u.Note(n, start)
	flushed := u.All()
	u.Note(n, start.Add(time.Second))
	u.Note(n, start) // a slower request
	u.written(flushed)
	if got := u.All()[n]; !got.Equal(start.Add(time.Second)) {
		t.Error(got)
	}
}
