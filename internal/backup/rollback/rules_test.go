package rollback

import (
	"testing"

	"github.com/latticekeep/latticekeep/internal/vault/kept"
)

// Rules that keep at least as much everywhere take nothing away. Exceptions may.
func TestRulesThatKeepLess(t *testing.T) {
	before := []kept.Rule{{Path: "**", Versions: 2}, {Path: "shop/**", Versions: 5}}
	for _, c := range []struct {
		later []kept.Rule
		want  bool
	}{
		{before, true},
		{[]kept.Rule{{Path: "**", Versions: 3}, {Path: "shop/**", Versions: 5}}, true},
		{[]kept.Rule{{Path: "**", Versions: 2}, {Path: "shop/**", Versions: 5}, {Path: "a", Versions: 5}}, true},
		{[]kept.Rule{{Path: "**", Versions: 2}, {Path: "shop/**", Versions: 5}, {Path: "shop/db", Versions: 4}}, false},
		{[]kept.Rule{{Path: "**", Versions: 2}, {Path: "shop/**", Versions: 4}}, false},
		{[]kept.Rule{{Path: "shop/**", Versions: 5}}, false},
		{nil, false},
	} {
		if got := keepsAtLeast(c.later, before); got != c.want {
			t.Errorf("%v after %v: %v", c.later, before, got)
		}
	}
}
