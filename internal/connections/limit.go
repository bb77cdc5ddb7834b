package connections

import "runtime/debug"

const (
	// memoryEach is more than an idle connection takes: buffers, TLS and two goroutines.
	memoryEach = 32 << 10
	// least is how many connections there may be however little the process has.
	least = 64
)

// Most returns how many connections the process should have. They may take three quarters of its
// files, since stores, clusters and logs need some, and a quarter of its memory limit.
func Most() int {
	most := debug.SetMemoryLimit(-1) / 4 / memoryEach
	if files := int64(maxFiles()); files > 0 {
		most = min(most, files/4*3)
	}
	return int(max(least, min(most, 1<<30)))
}
