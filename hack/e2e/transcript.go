package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
)

// A transcript is Markdown with the commands and their output. It omits what differs each time or
// says where it ran. It is printed as it grows, and becomes a file only when it is complete.
type transcript struct {
	out  io.Writer
	text bytes.Buffer
	own  []string // pairs of text and replacement
}

func newTranscript(out io.Writer) *transcript { return &transcript{out: out} }

// hide replaces text with instead from now on.
func (t *transcript) hide(text, instead string) { t.own = append(t.own, text, instead) }

func (t *transcript) printf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	t.text.WriteString(text)
	_, _ = io.WriteString(t.out, text) // only the file must be complete
}

// say begins a step.
func (t *transcript) say(title, text string) { t.printf("\n## %s\n\n%s\n", title, text) }

// console writes a command and its output.
func (t *transcript) console(command, output string) {
	output = t.redact(strings.TrimRight(output, "\n"))
	if output != "" {
		output += "\n"
	}
	t.printf("\n```console\n$ %s\n%s```\n", t.redact(command), output)
}

// varying lists patterns of text that is secret or differs on each run, with their replacements. A
// replacement in a column keeps the column's width.
var varying = []struct {
	pattern *regexp.Regexp
	instead string
	column  bool
}{
	{pattern: regexp.MustCompile(`eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+`), instead: "<token>"},
	{pattern: regexp.MustCompile(`\b[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9]\d \d\d:\d\d:\d\d( [A-Z]+)? \d{4}`), instead: "<time>"},
	{pattern: regexp.MustCompile(`\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)?`), instead: "<time>"},
	{pattern: regexp.MustCompile(`\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`), instead: "<uid>"},
	{pattern: regexp.MustCompile(`(?m)^head: \d+ [0-9a-f]{64}$`), instead: "head: <sequence> <hash>"}, // printed by `latticekeep audit verify`
	// Printed by `latticekeep backup` and `latticekeep restore`.
	{pattern: regexp.MustCompile(`\bhead \d+ [0-9a-f]{64}\b`), instead: "head <sequence> <hash>"},
	{pattern: regexp.MustCompile(`\bv0\.0\.0-\d{14}-[0-9a-f]{12}(\+dirty)?|\(devel\)`), instead: "<version>"},
	{pattern: regexp.MustCompile(`sha256:[0-9a-f]{64}\b`), instead: "sha256:<hash>"}, // in metrics of the API server
	// Printed by `latticekeep kms-plugin`.
	{pattern: regexp.MustCompile(`\bkey set [0-9a-f]{64}\b`), instead: "key set <id>"},
	{pattern: regexp.MustCompile(`\bkey_set=[0-9a-f]{64} revision=1 key_id=1-[0-9a-f]+\b`), instead: "key_set=<id> revision=1 key_id=<key id>"},
	{pattern: regexp.MustCompile(`\b\d+ rows\b`), instead: "<count> rows"},
	{pattern: regexp.MustCompile(`\bcalling the server: [^"\n]*`), instead: "<cause>"}, // while the vault is down
	{pattern: regexp.MustCompile(`\bin=\d+s\b`), instead: "in=<pause>"},
	// How far the log has grown when `latticekeep audit verify` reads it.
	{pattern: regexp.MustCompile(`(?m)\b1 to \d+$`), instead: "1 to <sequence>"},
	{pattern: regexp.MustCompile(`(?m)^checkpoint: entry \d+ is in the tree of \d+ entries`), instead: "checkpoint: entry <sequence> is in the tree of <size> entries"},
	{pattern: regexp.MustCompile(`\bcred_[a-z2-7]+`), instead: "<credential>", column: true},
	// The end of the pod name of a DaemonSet, and of a Deployment.
	{pattern: regexp.MustCompile(`-provider-[bcdfghjklmnpqrstvwxz2456789]{5}\b`), instead: "-provider-<suffix>", column: true},
	{pattern: regexp.MustCompile(`-[bcdfghjklmnpqrstvwxz2456789]{8,10}-[bcdfghjklmnpqrstvwxz2456789]{5}\b`), instead: "-<suffix>", column: true},
}

var trailing = regexp.MustCompile(`(?m) +$`)

func (t *transcript) redact(text string) string {
	text = strings.NewReplacer(t.own...).Replace(text)
	for _, v := range varying {
		text = v.pattern.ReplaceAllStringFunc(text, func(found string) string {
			if !v.column {
				return v.instead
			}
			return fmt.Sprintf("%-*s", len(found), v.instead)
		})
	}
	return trailing.ReplaceAllString(text, "")
}

// resume begins with what the chapters before wrote.
func (t *transcript) resume(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the transcript so far: %w", err)
	}
	t.text.Write(text)
	return nil
}

func (t *transcript) write(path string) error {
	if err := os.WriteFile(path, t.text.Bytes(), 0o644); err != nil {
		return fmt.Errorf("writing the transcript: %w", err)
	}
	return nil
}
