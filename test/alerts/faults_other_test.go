//go:build !linux

package alerts

import "testing"

func diskFills(t *testing.T) []string        { return linuxOnly(t) }
func postgresFills(t *testing.T) []string    { return linuxOnly(t) }
func diskFails(t *testing.T) []string        { return linuxOnly(t) }
func strangersConnect(t *testing.T) []string { return linuxOnly(t) }
func memoryShort(t *testing.T) []string      { return linuxOnly(t) }
func uploadStalls(t *testing.T) []string     { return linuxOnly(t) }

func linuxOnly(t *testing.T) []string {
	t.Helper()
	t.Skip("this fault is caused on Linux only")
	return nil
}
