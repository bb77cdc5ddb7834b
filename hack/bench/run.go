package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
)

// run is one run of the program.
type run struct {
	binary        string
	dir           string // folder for everything that the servers write
	out           io.Writer
	roundCount    int
	load          load
	only          []string           // names of operations
	signing       []string           // how entries are signed: entry, batch
	credentials   int                // in the large store
	kmsOperations int                // minimum with a key-management service
	least         map[string]float64 // minimum share of primitives in the server's time, by operation
	syncs         bool               // count syncs
	peer          *peer              // nil: none

	bench           *bench
	alone, together []costs // costs of the primitives, by round
}

// cores is the number of cores that the servers, the client and everything else share.
var cores = runtime.NumCPU()

// machine describes the hardware and software of the measurement.
func machine() string {
	model := "unknown processor"
	text, err := os.ReadFile("/proc/cpuinfo")
	if err == nil {
		for line := range strings.Lines(string(text)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	return fmt.Sprintf("%s, %d cores, %s", model, cores, runtime.Version())
}
