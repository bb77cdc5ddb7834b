// Package memory finds how much memory the process may use, keeps the Go runtime within it, and says
// how much a server needs.
package memory

import (
	"math"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
)

// gcPercent is higher than Go's default because the program keeps little in memory and makes much
// garbage. With the default it collects many times a second and spends a fifth of its processor
// time on that.
const gcPercent = 400

// forFiles is the part of a small limit that is left to pages of files. Without the most used ones of
// the program and of the database in memory, the process would mostly wait for the disk.
const forFiles = 48 << 20

// Tune lets the heap grow further before a collection, but collects sooner near the memory limit of
// the process. A fifth of the limit is left to pages of files, or more if that is little. The
// variables GOGC and GOMEMLIMIT take precedence.
func Tune() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if limit := limitOf("/"); limit > 0 && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(limit - max(limit/5, min(limit/2, forFiles)))
	}
}

// Limit returns how many bytes the process may use, and 0 without a limit: what its control groups
// allow, or GOMEMLIMIT if that is less.
func Limit() int64 {
	limit := limitOf("/")
	if own := debug.SetMemoryLimit(-1); os.Getenv("GOMEMLIMIT") != "" && own < math.MaxInt64 && (limit == 0 || own < limit) {
		limit = own
	}
	return limit
}

// limitOf returns the bytes that control groups allow the process, and 0 without a limit: the
// smallest limit of its own group and of the groups above it. root is the root of the file system.
//
// The files of a group lie below a mount point, which need not be the root of the hierarchy. In a
// container the mount shows its own group only. Where systemd or a container with the groups of its
// host has the limit, the group lies far below the mount point (cgroups(7), proc_pid_mountinfo(5)).
func limitOf(root string) int64 {
	own := make(map[string]string) // group of the process by the file that has its limit
	for _, line := range readLines(root, "proc/self/cgroup") {
		parts := strings.SplitN(line, ":", 3)
		switch {
		case len(parts) != 3:
		case parts[0] == "0":
			own["memory.max"] = parts[2]
		case slices.Contains(strings.Split(parts[1], ","), "memory"):
			own["memory.limit_in_bytes"] = parts[2]
		}
	}
	smallest := int64(math.MaxInt64)
	for _, line := range readLines(root, "proc/self/mountinfo") {
		left, right, _ := strings.Cut(line, " - ")
		mount, kind := strings.Fields(left), strings.Fields(right)
		if len(mount) < 5 || len(kind) < 3 {
			continue
		}
		file := ""
		switch {
		case kind[0] == "cgroup2":
			file = "memory.max"
		case kind[0] == "cgroup" && slices.Contains(strings.Split(kind[2], ","), "memory"):
			file = "memory.limit_in_bytes"
		}
		group, has := own[file]
		if !has {
			continue
		}
		for below := groupBelow(unescapeMount.Replace(mount[3]), group); ; below = path.Dir(below) {
			smallest = min(smallest, readLimit(filepath.Join(root, unescapeMount.Replace(mount[4]), below, file)))
			if below == "/" {
				break
			}
		}
	}
	if smallest == math.MaxInt64 {
		return 0
	}
	return smallest
}

// unescapeMount decodes a path in mountinfo.
var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// groupBelow returns the path of a group below the group that is mounted. A mounted group that is not
// above it is the only one that can be seen.
func groupBelow(mounted, group string) string {
	if mounted == "/" {
		return path.Clean("/" + group)
	}
	below, found := strings.CutPrefix(group, mounted)
	if !found || below != "" && below[0] != '/' {
		return "/"
	}
	return path.Clean("/" + below)
}

// readLimit returns the limit in a file, and math.MaxInt64 without one.
func readLimit(file string) int64 {
	text, err := os.ReadFile(file)
	if err != nil {
		return math.MaxInt64
	}
	limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil || limit <= 0 || limit >= 1<<60 { // no limit is a huge number in version 1, and max in version 2
		return math.MaxInt64
	}
	return limit
}

func readLines(root, file string) []string {
	text, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return nil // another system than Linux, or no control groups
	}
	return strings.Split(string(text), "\n")
}
