package main_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const wireStrings = "testdata/wire-strings.txt"

// TestWireStrings holds every string of the product that may be stored, signed, hashed or sent to a committed list: row
// keys, labels, JSON and YAML fields, event types, reasons, metrics, configuration keys, flags, headers and paths. Data
// that is stored and clients that are deployed depend on them, so a refactoring changes none.
//
// The test cannot tell where a string goes, so it takes every literal without a space, which leaves out prose. Literals
// with a space that are no prose (SQL, headers, lines of a signed text) were entered into the list by hand: the test sees
// when one of them disappears, not when one is added.
//
// After a deliberate change, WIRE_STRINGS=update rewrites the list. The commit shows the difference and says the reason.
func TestWireStrings(t *testing.T) {
	list := readWireStrings(t)
	found, candidates := literals(t)
	if os.Getenv("WIRE_STRINGS") == "update" {
		for _, line := range list {
			if _, ok := found[line]; ok {
				candidates[line] = found[line]
			}
		}
		text := strings.Join(slices.Sorted(maps.Keys(candidates)), "\n") + "\n"
		if err := os.WriteFile(wireStrings, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	var changes int
	for _, line := range list {
		if _, ok := found[line]; !ok {
			changes++
			t.Errorf("%s is in no literal any more. If it was stored, signed, hashed or sent, put it back.", line)
		}
	}
	for _, line := range slices.Sorted(maps.Keys(candidates)) {
		if !slices.Contains(list, line) {
			changes++
			t.Errorf("%s: %s is not in the list. If it replaces a string of the list, put that one back.",
				candidates[line], line)
		}
	}
	if changes > 0 {
		t.Errorf("%d strings differ from %s. If each difference is deliberate, or the string never leaves the process, "+
			"run WIRE_STRINGS=update go test -run TestWireStrings . and give the reason in the commit.", changes, wireStrings)
	}
}

func readWireStrings(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile(wireStrings)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
}

// literals returns the position of each string literal and of each field of an encoded struct, by the line of the list
// that stands for it. All literals of the product are in found, those that may be wire strings also in candidates.
func literals(t *testing.T) (found, candidates map[string]token.Position) {
	t.Helper()
	found, candidates = map[string]token.Position{}, map[string]token.Position{}
	files := token.NewFileSet()
	for _, path := range productFiles(t) {
		file, err := parser.ParseFile(files, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		if ast.IsGenerated(file) {
			continue
		}
		prose := map[*ast.BasicLit]bool{}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ImportSpec:
				return false
			case *ast.StructType:
				for _, line := range encodedFields(n) {
					found[line], candidates[line] = files.Position(n.Pos()), files.Position(n.Pos())
				}
			case *ast.KeyValueExpr:
				if line := commandName(n); line != "" {
					found[line], candidates[line] = files.Position(n.Pos()), files.Position(n.Pos())
				}
			case *ast.Field:
				if n.Tag != nil {
					prose[n.Tag] = true // encodedFields has read it
				}
			case *ast.CallExpr:
				if i := messageArgument(n); i >= 0 {
					if literal, ok := n.Args[i].(*ast.BasicLit); ok {
						prose[literal] = true
					}
				}
			case *ast.BasicLit:
				if n.Kind != token.STRING {
					return true
				}
				value, err := strconv.Unquote(n.Value)
				if err != nil {
					t.Fatalf("%s: unquoting a literal: %v", files.Position(n.Pos()), err)
				}
				line := strconv.Quote(value)
				found[line] = files.Position(n.Pos())
				if !prose[n] && !strings.Contains(value, " ") && strings.ContainsFunc(value, isWordRune) {
					candidates[line] = files.Position(n.Pos())
				}
			}
			return true
		})
	}
	return found, candidates
}

// isWordRune leaves out literals of punctuation alone, which separate words of a message.
func isWordRune(r rune) bool {
	return r < ' ' && r != '\n' && r != '\t' || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' || r > '~'
}

// encodedFields names the fields of a struct in JSON, YAML, XML and queries: their tags and, in a struct with tags, the
// names of the exported fields without one.
func encodedFields(s *ast.StructType) []string {
	var lines, untagged []string
	for _, field := range s.Fields.List {
		if field.Tag == nil {
			for _, name := range field.Names {
				if name.IsExported() {
					untagged = append(untagged, "field "+name.Name)
				}
			}
			continue
		}
		raw, err := strconv.Unquote(field.Tag.Value)
		if err != nil {
			continue // the compiler says so
		}
		for _, key := range []string{"json", "yaml", "xml", "form"} {
			if value, ok := reflect.StructTag(raw).Lookup(key); ok {
				lines = append(lines, fmt.Sprintf("%s:%q", key, value))
			}
		}
	}
	if lines == nil {
		return nil
	}
	return append(lines, untagged...)
}

// commandName returns the line of a command of the CLI whose usage also names its arguments: Use: "retire KEY_ID".
func commandName(field *ast.KeyValueExpr) string {
	key, ok := field.Key.(*ast.Ident)
	if !ok || key.Name != "Use" {
		return ""
	}
	usage, ok := field.Value.(*ast.BasicLit)
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(strings.Trim(usage.Value, `"`), " ")
	return strconv.Quote(name)
}

// messageArgument returns the index of the argument of a call that is a message for a reader, or -1.
func messageArgument(call *ast.CallExpr) int {
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || len(call.Args) == 0 {
		return -1
	}
	receiver, _ := selector.X.(*ast.Ident)
	switch name := selector.Sel.Name; {
	case receiver != nil && (receiver.Name == "errors" && name == "New" || receiver.Name == "fmt" && name == "Errorf"):
		return 0
	case name == "Debug" || name == "Info" || name == "Warn" || name == "Error":
		return 0
	case len(call.Args) > 1 && (name == "DebugContext" || name == "InfoContext" || name == "WarnContext" || name == "ErrorContext"):
		return 1
	}
	return -1
}

// productFiles are the files of the packages that the program is made of, on every operating system.
func productFiles(t *testing.T) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-json=ImportPath,Dir,GoFiles,IgnoredGoFiles", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	root, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath, Dir         string
			GoFiles, IgnoredGoFiles []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return paths
		} else if err != nil {
			t.Fatalf("reading the output of go list: %v", err)
		}
		if !within(p.ImportPath, module) {
			continue
		}
		for _, name := range append(p.GoFiles, p.IgnoredGoFiles...) {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			path, err := filepath.Rel(root, filepath.Join(p.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			paths = append(paths, path)
		}
	}
}
