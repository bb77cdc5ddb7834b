// Package secret carries plaintext through the program without letting it
// reach a log by accident.
//
// It does not protect memory: the Go runtime may have copied a value before it
// is zeroed. It keeps a secret out of fmt, slog, JSON and text, and lets the
// owner overwrite it when done.
package secret

import (
	"fmt"
	"log/slog"
)

const redacted = "[redacted]"

// Bytes is plaintext. Whoever creates it owns it and calls Zero when done.
type Bytes []byte

// Format writes "[redacted]" for every verb, flags included.
func (Bytes) Format(s fmt.State, _ rune) { _, _ = s.Write([]byte(redacted)) }

// LogValue implements [slog.LogValuer].
func (Bytes) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText redacts the value in JSON, YAML and other text encodings. What
// really must leave the program is converted to a string where it leaves.
func (Bytes) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Zero overwrites the value.
func (b Bytes) Zero() { clear(b) }
