// Package mlog stands in for the module of this name, which the module proxy does not have. The Secrets Store
// CSI driver uses it to set up klog; klog's own defaults do for tests.
package mlog

import (
	"context"
	"fmt"
	"os"
)

// LogFormat is how lines are written.
type LogFormat string

// The formats. Both are klog's text here.
const (
	FormatText LogFormat = "text"
	FormatJSON LogFormat = "json"
)

// Setup does nothing.
func Setup() func() { return func() {} }

// ValidateAndSetKlogLevelAndFormatGlobally does nothing.
func ValidateAndSetKlogLevelAndFormatGlobally(_ context.Context, _ any, _ LogFormat) error {
	return nil
}

// Error writes a line.
func Error(message string, err error) { fmt.Fprintln(os.Stderr, message, err) }

// Fatal writes a line and ends the program.
func Fatal(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
