package command

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/diagnosis"
)

// Output is the form of a report.
type Output struct{ form string }

// Register defines the flag.
func (o *Output) Register(cmd *cobra.Command, use string) {
	cmd.Flags().StringVar(&o.form, "output", "text", use+"text for people, or json, whose fields the guide Monitor describes")
	Choices(cmd, "output", "text", "json")
}

// Check fails for a form that is none, and for one without a report.
func (o *Output) Check(cmd *cobra.Command, reports bool) error {
	if !reports && cmd.Flags().Changed("output") {
		return UsageError("--output is for a report, and there is none")
	}
	if o.form != "text" && o.form != "json" {
		return UsageError("--output takes text or json")
	}
	return nil
}

// Print writes a report, and returns an error that names the parts that have failed.
func (o *Output) Print(cmd *cobra.Command, r diagnosis.Report) error {
	out := cmd.OutOrStdout()
	var err error
	if o.form == "json" {
		err = PrintJSON(out, r)
	} else {
		err = r.Print(out)
	}
	failed := r.Errors()
	if err != nil || len(failed) == 0 {
		return err
	}
	var parts []string
	for _, l := range r.Lines {
		if l.Status == diagnosis.Failed && !slices.Contains(parts, string(l.Part)) {
			parts = append(parts, string(l.Part))
		}
	}
	return &StatusError{statusOfAll(failed), fmt.Errorf("not well: %s", strings.Join(parts, ", "))}
}

// statusOfAll returns the status for several failures: what does not hold counts before what refuses,
// and that before what does not answer.
func statusOfAll(errs []error) int {
	for _, status := range []int{StatusFailed, StatusUsage, StatusRefused} {
		if slices.ContainsFunc(errs, func(err error) bool { return Status(err) == status }) {
			return status
		}
	}
	return StatusUnreachable
}

// ConfigurationReport returns a report of a configuration that cannot be used.
func ConfigurationReport(version string, faults []error) diagnosis.Report {
	r := diagnosis.Run(context.Background(), version, 0)
	for _, err := range faults {
		r.Add(diagnosis.Configuration, diagnosis.Fail("correct it", &StatusError{StatusUsage, err}))
	}
	return r
}
