// Package buildinfo identifies the build of the running program.
package buildinfo

import (
	"cmp"
	"runtime"
	"runtime/debug"
	"time"
)

// Info is what the toolchain has written into the program.
type Info struct {
	// Version is the module's version, or the commit for a build from a checkout that has none.
	Version string `json:"version"`

	// Commit, CommitTime and Modified describe the checkout. They are absent from a program that
	// was not built from one, such as by `go install module@version`.
	Commit     string     `json:"commit,omitempty"`
	CommitTime *time.Time `json:"commit_time,omitempty"`
	// Modified says that the checkout had files that differ from the commit.
	Modified bool `json:"modified"`

	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// Documentation is the folder of the documentation, with a slash at its end.
const Documentation = "https://github.com/latticekeep/latticekeep/blob/main/docs/"

// Version returns the module's version, or the commit for a build from a checkout.
func Version() string { return Read().Version }

// Read returns the description of the running program.
func Read() Info {
	i := Info{Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		i.Version = info.Main.Version
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				i.Commit = s.Value
			case "vcs.time":
				if at, err := time.Parse(time.RFC3339, s.Value); err == nil {
					i.CommitTime = &at
				}
			case "vcs.modified":
				i.Modified = s.Value == "true"
			}
		}
	}
	if i.Version == "(devel)" && i.Commit != "" {
		i.Version = i.Commit
	}
	i.Version = cmp.Or(i.Version, i.Commit, "unknown")
	return i
}
