//go:build !linux

package dumps

// Forbid does nothing: only Linux has the calls.
func Forbid() error { return nil }
