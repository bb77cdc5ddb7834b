//go:build !linux

package clock

// Synchronised cannot be asked here.
func Synchronised() bool { return false }
