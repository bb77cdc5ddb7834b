package audit

import (
	"fmt"
	"testing"
	"time"
)

func TestAStrangerIsRecordedOnceAMinute(t *testing.T) {
	var r refusals
	now := time.Date(2026, 11, 21, 10, 0, 5, 0, time.UTC)
	count := func(source string) (n int) {
		for range 100 {
			if r.first(source, now) {
				n++
			}
		}
		return n
	}
	if count("192.0.2.1") != 1 || count("192.0.2.2") != 1 || count("192.0.2.1") != 0 {
		t.Error("not once per source")
	}
	if count("2001:db8::1") != 1 || count("2001:db8::2") != 0 || count("2001:db8:0:1::1") != 1 {
		t.Error("not once per IPv6 network")
	}
	now = now.Add(time.Minute)
	if count("192.0.2.1") != 1 {
		t.Error("not once per minute")
	}
	recorded := 1
	for i := range 10 * maxSources {
		if r.first(fmt.Sprint("source ", i), now) {
			recorded++
		}
	}
	if recorded != maxSources {
		t.Errorf("%d recorded in a minute, however many the sources", recorded)
	}
}
