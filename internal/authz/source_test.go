package authz

import "testing"

func TestAHostHasOneSource(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.1":                 "192.0.2.1",
		"::ffff:192.0.2.1":          "192.0.2.1",
		"::ffff:c000:201":           "192.0.2.1",
		"2001:db8::1":               "2001:db8::/64",
		"2001:0DB8:0:0:ffff::1":     "2001:db8::/64",
		"2001:db8:0:1::1":           "2001:db8:0:1::/64",
		"fe80::1%eth0":              "fe80::/64",
		"::1":                       "::/64",
		"":                          "",
		"no address, only a name":   "no address, only a name",
		"2001:db8::1 and something": "2001:db8::1 and something",
	} {
		if got := Source(address); got != want {
			t.Errorf("%q: %q, not %q", address, got, want)
		}
	}
}
