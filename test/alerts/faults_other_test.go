//go:build !linux

package alerts

import "testing"

func diskFills(t *testing.T) []string {
	t.Skip("a volume that fills is mounted on Linux only")
	return nil
}
