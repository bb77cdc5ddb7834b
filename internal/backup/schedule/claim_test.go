package schedule

import (
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/backup/commits"
)

// Beside a log of commits only one process takes backups. So the claim of another one is over, such as
// the claim in a store that was restored from the backup that was taken under it.
func TestTheClaimOfAnotherProcessIsOverBesideALog(t *testing.T) {
	now := time.Date(2026, 11, 26, 3, 0, 0, 0, time.UTC)
	claimed := row{Taken: now.Add(-48 * time.Hour), By: "one", Until: now.Add(lease)}
	for name, c := range map[string]struct {
		log  *commits.Shipper
		by   string
		want bool
	}{
		"another process, beside a log": {new(commits.Shipper), "", true},
		"a later attempt of this one":   {new(commits.Shipper), "two", true},
		"this process, beside a log":    {new(commits.Shipper), "one", false},
		"replicas without a log":        {nil, "", false},
	} {
		s := New(c.log, Config{Every: 24 * time.Hour})
		s.by = c.by
		if s.due(claimed, now) != c.want {
			t.Errorf("%s: due is %v", name, !c.want)
		}
	}
}
