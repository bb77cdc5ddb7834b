package cli

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// section returns a section of docs/reference/status.md.
func section(t *testing.T, title string) string {
	t.Helper()
	doc, err := os.ReadFile("../../docs/reference/status.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(doc), "\n## "+title+"\n")
	if !found {
		t.Fatalf("docs/reference/status.md has no section %q", title)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	return text
}

// sources parses the code of a package, without its tests.
func sources(t *testing.T, dir string) (files []*ast.File) {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(name string, _ fs.DirEntry, err error) error {
		if filepath.Ext(name) == ".go" {
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}

func literal(e ast.Expr) string {
	if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING {
		text, _ := strconv.Unquote(l.Value) // valid, because the parser read it
		return text
	}
	return ""
}

func TestEveryConditionAndReasonIsDocumented(t *testing.T) {
	// The first cell of a row names a condition, the second a reason.
	documented := map[string]map[string]bool{"Condition": {}, "Reason": {}}
	quoted := regexp.MustCompile("`(\\w+)`")
	for line := range strings.Lines(section(t, "Conditions")) {
		if cells := strings.Split(line, "|"); len(cells) == 6 {
			for i, kind := range []string{"Condition", "Reason"} {
				for _, name := range quoted.FindAllStringSubmatch(cells[i+1], -1) {
					documented[kind][name[1]] = true
				}
			}
		}
	}
	found := 0
	for _, file := range sources(t, "../../api/v1beta1") {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for i, name := range spec.Names {
				for kind, rows := range documented {
					if !strings.HasPrefix(name.Name, kind) || i >= len(spec.Values) {
						continue
					}
					found++
					if value := literal(spec.Values[i]); !rows[value] {
						t.Errorf("%s: no row of docs/reference/status.md has %q as its %s", name.Name, value, strings.ToLower(kind))
					}
				}
			}
			return true
		})
	}
	if found < 20 {
		t.Errorf("%d constants were found: this test looks for them in the wrong way", found)
	}
}

// eventReasons returns the reasons that a file passes to Eventf and recordEvent. They are literals,
// or strings with a reason's prefix that the file assigns or returns.
func eventReasons(file *ast.File) map[string]bool {
	reasons, prefixes, words := make(map[string]bool), make(map[string]bool), make(map[string]bool)
	position := map[string]int{"Eventf": 3, "recordEvent": 2, "warn()": 0}
	word := regexp.MustCompile(`^[A-Z][a-z]+$`)
	ast.Inspect(file, func(n ast.Node) bool {
		var values []ast.Expr
		switch n := n.(type) {
		case *ast.CallExpr:
			var name string
			switch called := n.Fun.(type) {
			case *ast.SelectorExpr:
				name = called.Sel.Name
			case *ast.Ident:
				name = called.Name + "()" // a function of the file itself
			}
			at, ok := position[name]
			if !ok || at >= len(n.Args) {
				break
			}
			if text := literal(n.Args[at]); text != "" {
				reasons[text] = true
			} else if sum, ok := n.Args[at].(*ast.BinaryExpr); ok {
				prefixes[literal(sum.X)] = true
			} else {
				prefixes[""] = true
			}
		case *ast.AssignStmt:
			values = n.Rhs
		case *ast.ReturnStmt:
			values = n.Results
		}
		for _, v := range values {
			if text := literal(v); word.MatchString(text) {
				words[text] = true
			}
		}
		return true
	})
	for prefix := range prefixes {
		for w := range words {
			reasons[prefix+w] = true
		}
	}
	return reasons
}

func TestEveryEventIsDocumented(t *testing.T) {
	rows := make(map[string]bool)
	quoted := regexp.MustCompile("`(\\w+)`")
	for line := range strings.Lines(section(t, "Events")) {
		if cells := strings.Split(line, "|"); len(cells) == 4 {
			for _, name := range quoted.FindAllStringSubmatch(cells[1], -1) {
				rows[name[1]] = true
			}
		}
	}
	found := make(map[string]bool)
	for _, file := range sources(t, "../../controllers") {
		for reason := range eventReasons(file) {
			found[reason] = true
		}
	}
	for _, known := range []string{"Sealed", "Rotated", "Imported", "TargetRepaired", "Released", "ValuesChanged", "TooManyNames"} {
		if !found[known] {
			t.Errorf("%s was not found: this test looks for events in the wrong way", known)
		}
	}
	delete(found, "TargetCreated") // the event for the version covers these two
	delete(found, "TargetUpdated")
	for reason := range found {
		if !rows[reason] {
			t.Errorf("the event %s has no row in docs/reference/status.md", reason)
		}
	}
	for _, condition := range []string{"Stalled", "Expiring", "ValuesStale"} {
		if !rows[condition] {
			t.Errorf("the event of the condition %s has no row in docs/reference/status.md", condition)
		}
	}
}
