package guard

import "time"

const MaxStrangers = maxStrangers

type MinuteLimit = minuteLimit

// NewMinuteLimit returns a limit of so many sources in a group, or of any number for 0.
func NewMinuteLimit(most int) *MinuteLimit { return &minuteLimit{most: most} }

func (r *minuteLimit) First(group, source string, now time.Time) bool {
	return r.first(group, source, now)
}
