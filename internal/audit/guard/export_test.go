package guard

import "time"

const (
	MaxStrangers       = maxStrangers
	MaxRepeatsOfTenant = maxRepeatsOfTenant
)

type Limit = limit

// NewMinuteLimit returns a limit of so many sources in a group and minute, or of any number for 0.
func NewMinuteLimit(most int) *Limit { return &limit{period: time.Minute, most: most} }

func (r *limit) First(group, source string, now time.Time) bool {
	return r.first(group, source, now)
}
