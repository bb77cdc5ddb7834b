// Command gotest runs `go test` with the given arguments and prints its output. It then lists every
// skipped test with its reason, which go test does not do.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit status of go test.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stderr = stderr
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintf(stderr, "running go test: %v\n", err)
		return 1
	}
	skipped, reportErr := report(events, stdout)
	err = cmd.Wait()
	for _, s := range skipped {
		fmt.Fprintln(stdout, s)
	}
	switch {
	case err != nil:
		return max(1, cmd.ProcessState.ExitCode())
	case reportErr != nil:
		fmt.Fprintf(stderr, "reading the output of go test: %v\n", reportErr)
		return 1
	}
	return 0
}

// An event is a line of `go test -json`; see `go doc test2json`.
type event struct {
	Action, Package, Test, Output string
}

// report prints the events as go test does, and returns a line for each skipped test.
func report(events io.Reader, w io.Writer) (skipped []string, err error) {
	outputs := map[[2]string]*strings.Builder{} // output of each running test
	r := bufio.NewReader(events)
	for {
		line, err := r.ReadString('\n')
		if err == io.EOF {
			return skipped, nil
		}
		if err != nil {
			return skipped, err
		}
		var e event
		if json.Unmarshal([]byte(line), &e) != nil {
			fmt.Fprint(w, line) // go test itself printed it
			continue
		}
		test := [2]string{e.Package, e.Test}
		switch e.Action {
		case "build-output":
			fmt.Fprint(w, e.Output)
		case "output":
			switch {
			case e.Test != "":
				if outputs[test] == nil {
					outputs[test] = new(strings.Builder)
				}
				outputs[test].WriteString(e.Output)
			case e.Output != "PASS\n" && !strings.Contains(e.Output, "[no test files]"):
				fmt.Fprint(w, e.Output)
			}
		case "pass", "fail", "skip":
			output := ""
			if b := outputs[test]; b != nil {
				output = b.String()
				delete(outputs, test)
			}
			if e.Action == "fail" {
				fmt.Fprint(w, output)
			}
			if e.Action == "fail" && e.Test == "" {
				// A panic, a time-out or an exit ends the process without end events for the
				// running tests.
				for test, b := range outputs {
					if test[0] == e.Package {
						fmt.Fprint(w, b)
						delete(outputs, test)
					}
				}
			}
			if e.Action == "skip" && e.Test != "" {
				skipped = append(skipped, fmt.Sprintf("skipped %s %s: %s", e.Package, e.Test, reason(output)))
			}
		}
	}
}

// reason returns the log of a skipped test without the lines that go test adds around it.
func reason(output string) string {
	var lines []string
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, " ")
}
