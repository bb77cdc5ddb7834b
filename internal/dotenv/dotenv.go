// Package dotenv reads and writes .env files.
//
// A line is NAME=VALUE, and "export " may stand before it. Empty lines and lines that begin with # say
// nothing. A value without quotes ends with the line, or before a # that follows a space. One in single
// quotes is what stands between them; in double quotes \n, \r, \t, \", \\, \$ and \` are escapes. Both may
// go over several lines. Nothing is expanded: $NAME is a part of the value, as passwords have dollars.
package dotenv

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// Variable is one line of a file, or several that a quoted value spans.
type Variable struct {
	Line  int // number of the first line, from 1
	Name  string
	Value string
}

// Error says what is wrong with a line. It has no part of the value.
type Error struct {
	Line int
	Rule string
}

// Error implements error.
func (e *Error) Error() string { return fmt.Sprintf("line %d: %s", e.Line, e.Rule) }

var name = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]*$`)

// Parse returns the variables in their order. Its error joins an [*Error] for each line that cannot be
// read; the variables are then those of the other lines.
func Parse(text []byte) (all []Variable, err error) {
	var errs []error
	p := parser{rest: string(bytes.TrimPrefix(text, []byte("\ufeff"))), line: 1}
	lines := make(map[string]int)
	for p.rest != "" {
		v, err := p.next()
		switch {
		case err != nil:
			errs = append(errs, err)
		case v.Name == "":
		case lines[v.Name] > 0:
			errs = append(errs, &Error{v.Line, fmt.Sprintf("%s stands in line %d already", v.Name, lines[v.Name])})
		default:
			lines[v.Name] = v.Line
			all = append(all, v)
		}
	}
	return all, errors.Join(errs...)
}

// parser is where a file is read.
type parser struct {
	rest string
	line int // number of the line that rest begins with
}

// next reads a line, or the lines of a quoted value. A line without a variable is one without a name.
func (p *parser) next() (v Variable, err error) {
	v.Line = p.line
	fail := func(rule string) (Variable, error) {
		p.skip()
		return Variable{}, &Error{v.Line, rule}
	}
	line, _, _ := strings.Cut(p.rest, "\n")
	if trimmed := strings.TrimSpace(line); trimmed == "" || trimmed[0] == '#' {
		p.skip()
		return v, nil
	}
	left, _, found := strings.Cut(line, "=")
	if !found {
		return fail("it has no =: write NAME=VALUE")
	}
	v.Name = strings.TrimSpace(left)
	if after, exported := strings.CutPrefix(v.Name, "export "); exported {
		v.Name = strings.TrimSpace(after)
	}
	if !name.MatchString(v.Name) {
		v.Name = ""
		return fail("what stands before = is no name: use letters, digits and . _ - and begin with a letter or _")
	}
	p.rest = strings.TrimLeft(p.rest[len(left)+1:], " \t")
	quote := byte(0)
	if p.rest != "" {
		quote = p.rest[0]
	}
	switch quote {
	case '\'', '"':
		value, n, ok := unquote(p.rest)
		if !ok {
			return fail("the quote that its value begins with does not end")
		}
		v.Value = value
		p.line += strings.Count(p.rest[:n], "\n")
		p.rest = p.rest[n:]
		after, _, _ := strings.Cut(p.rest, "\n")
		if after = strings.TrimSpace(after); after != "" && after[0] != '#' {
			return fail("something follows the quote that ends its value")
		}
	default:
		v.Value, _, _ = strings.Cut(p.rest, "\n")
		if i := comment.FindStringIndex(v.Value); i != nil {
			v.Value = v.Value[:i[0]]
		}
		v.Value = strings.TrimSpace(v.Value)
	}
	p.skip()
	if !utf8.ValidString(v.Value) {
		return Variable{}, &Error{v.Line, "its value is not UTF-8"}
	}
	return v, nil
}

// comment matches what ends a value without quotes.
var comment = regexp.MustCompile(`(^|[ \t])#`)

// skip goes behind the line that rest begins with.
func (p *parser) skip() {
	_, p.rest, _ = strings.Cut(p.rest, "\n")
	p.line++
}

// unquote returns the value that text begins with, and the number of bytes that it and its quotes
// have.
func unquote(text string) (value string, n int, ok bool) {
	quote := text[0]
	var b strings.Builder
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == quote:
			return b.String(), i + 1, true
		case c == '\\' && quote == '"' && i+1 < len(text):
			i++
			if plain := strings.IndexByte("nrt\"\\$`", text[i]); plain >= 0 {
				b.WriteByte("\n\r\t\"\\$`"[plain])
			} else {
				b.WriteString(text[i-1 : i+1])
			}
		default:
			b.WriteByte(c)
		}
	}
	return "", 0, false
}
