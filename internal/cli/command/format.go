package command

import (
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// Format is the form of an answer: table for people, and others for programs.
type Format struct {
	name  string
	names []string
}

// Register defines the flag. Table, JSON and YAML are there always.
func (f *Format) Register(cmd *cobra.Command, more ...string) {
	f.names = append([]string{"table", "json", "yaml"}, more...)
	defer Choices(cmd, "output", f.names...)
	cmd.Flags().StringVarP(&f.name, "output", "o", "table", "form of the answer: "+strings.Join(f.names, ", "))
}

// Check fails for a form that there is not. A command calls it before it does anything.
func (f *Format) Check() error {
	if !slices.Contains(f.names, f.name) {
		return UsageError("--output takes one of " + strings.Join(f.names, ", "))
	}
	return nil
}

// Is reports whether the form is this one.
func (f *Format) Is(name string) bool { return f.name == name }

// Print writes an answer as JSON or YAML, or has table write it.
func (f *Format) Print(out io.Writer, answer any, table func(io.Writer)) error {
	switch f.name {
	case "json":
		return PrintJSON(out, answer)
	case "yaml":
		text, err := yaml.Marshal(answer)
		if err == nil {
			_, err = out.Write(text)
		}
		return err
	}
	table(out)
	return nil
}
