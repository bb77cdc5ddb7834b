package app

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
)

// A server keeps little in memory and makes much garbage: with Go's default it
// collects many times a second, which takes a fifth of its processor time.
const gcPercent = 400

// TuneGC lets the heap of the process grow further before it is collected, and
// sooner again when it comes near the limit of its container. GOGC and GOMEMLIMIT, if
// they are set, go before.
func TuneGC() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if limit := memoryLimit("/sys/fs/cgroup"); limit > 0 && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(limit / 10 * 8)
	}
}

// memoryLimit returns the bytes that the control groups at root allow the process; 0
// when they do not say.
func memoryLimit(root string) int64 {
	for _, file := range []string{"memory.max", "memory/memory.limit_in_bytes"} { // of version 2, and of 1
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			continue
		}
		limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err == nil && limit > 0 && limit < 1<<60 { // version 1 says a number beyond that for no limit, and version 2 max
			return limit
		}
	}
	return 0
}
