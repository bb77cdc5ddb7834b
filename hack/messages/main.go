// Command messages writes the texts that a program shows to people (errors, log lines, help) as
// Markdown for Vale. It writes one file for each Go file below the given folders, with each text on
// the line that it has in the code.
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: messages OUTPUT FOLDER…")
		os.Exit(2)
	}
	for _, folder := range os.Args[2:] {
		if err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, ".gen.go") {
				return err
			}
			return write(filepath.Join(os.Args[1], path+".md"), path)
		}); err != nil {
			fmt.Fprintln(os.Stderr, "messages:", err)
			os.Exit(1)
		}
	}
}

func write(output, source string) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, source, nil, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	texts := make(map[int][]string)
	last := 0
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec, *ast.Field:
			return false // paths and tags
		case *ast.BasicLit:
			if text, ok := prose(n); ok {
				last = max(last, files.Position(n.Pos()).Line)
				texts[files.Position(n.Pos()).Line] = append(texts[files.Position(n.Pos()).Line], text)
			}
		}
		return true
	})
	if last == 0 {
		return nil
	}
	var b strings.Builder
	for line := 1; line <= last; line++ {
		b.WriteString(strings.Join(texts[line], " ") + "\n")
	}
	if err := os.MkdirAll(filepath.Dir(output), 0o755); err != nil {
		return err
	}
	return os.WriteFile(output, []byte(b.String()), 0o644)
}

// prose returns a literal of three words or more as one line that ends with a period.
func prose(literal *ast.BasicLit) (string, bool) {
	if literal.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(literal.Value)
	words := strings.Fields(text)
	if err != nil || len(words) < 3 {
		return "", false
	}
	return strings.TrimRight(strings.Join(words, " "), ".:") + ".", true
}
