// Package secret carries plaintext through the program and keeps it out of logs.
//
// It does not protect memory: the Go runtime may have copied a value before it is zeroed. It
// redacts a secret in fmt, slog, JSON and text, and lets the owner overwrite it after use.
package secret

import (
	"fmt"
	"log/slog"
)

const redacted = "[redacted]"

// Bytes is plaintext. The code that creates it owns it and calls Zero after use.
type Bytes []byte

// Format writes "[redacted]" for every verb, flags included.
func (Bytes) Format(s fmt.State, _ rune) { _, _ = s.Write([]byte(redacted)) }

// LogValue implements [slog.LogValuer].
func (Bytes) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText redacts the value in JSON, YAML and other text encodings. Code that must send a
// secret out of the program converts it to a string at that point.
func (Bytes) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Zero overwrites the value.
func (b Bytes) Zero() { clear(b) }

// ZeroAll overwrites the values of a credential.
func ZeroAll(values map[string]Bytes) {
	for _, value := range values {
		value.Zero()
	}
}
