//go:build !linux

package clock

// Synchronised returns false, because only Linux can be asked.
func Synchronised() bool { return false }
