package app

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
)

// gcPercent is higher than Go's default because a server keeps little in memory and makes much
// garbage. With the default it collects many times a second and spends a fifth of its processor
// time on that.
const gcPercent = 400

// TuneGC lets the heap grow further before a collection, but collects sooner near the memory limit
// of the container. The variables GOGC and GOMEMLIMIT take precedence.
func TuneGC() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if limit := memoryLimit("/sys/fs/cgroup"); limit > 0 && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(limit / 10 * 8)
	}
}

// memoryLimit returns the bytes that the control groups below root allow the process, and 0 without
// a limit.
func memoryLimit(root string) int64 {
	for _, file := range []string{"memory.max", "memory/memory.limit_in_bytes"} { // cgroup version 2, then version 1
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			continue
		}
		limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err == nil && limit > 0 && limit < 1<<60 { // no limit is a huge number in version 1 and max in version 2
			return limit
		}
	}
	return 0
}
