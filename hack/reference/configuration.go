package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/latticekeep/latticekeep/internal/config"
)

const configurationHead = `The server reads a YAML file (` + "`latticekeep server --config FILE`" + `), then variables of the environment, then the flags
` + "`--listen`, `--data-dir` and `--kubeconfig`" + `. The later one wins. A setting, or a variable that begins with ` + "`LATTICEKEEP_`" + `,
that does not exist ends the start with its name. So does a combination that cannot run. Variables that Kubernetes sets
for a Service of that name, and those of other commands, are left alone. In a variable a list is written with commas, and
a map as ` + "`name=value`" + ` with commas. [Run without a cluster](../guides/standalone.md) has an example.

| setting | variable | default | what it is |
| --- | --- | --- | --- |
`

// configuration lists every setting with the comment of its field.
func configuration() (string, error) {
	comments, err := fieldComments("internal/config")
	if err != nil {
		return "", err
	}
	defaults := make(map[string]string)
	var names []string
	settings(reflect.ValueOf(config.Default()), "", func(name string, value reflect.Value) {
		names = append(names, name)
		if !value.IsZero() {
			defaults[name] = strings.NewReplacer("h0m0s", "h", "m0s", "m").Replace(fmt.Sprint(value.Interface()))
		}
	})
	if missing := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return comments[name] != "" }); len(missing) > 0 {
		return "", fmt.Errorf("no comment stands above the fields of %s", strings.Join(missing, ", "))
	}
	quoted := regexp.MustCompile(`\b(` + strings.Join(slices.Sorted(maps.Keys(dotted(names))), "|") + `)\b|\S+://[^\s.,;:)]*(?:[.,:/][^\s.,;:)]+)*…?`)
	var b strings.Builder
	b.WriteString(configurationHead)
	for _, name := range names {
		text := quoted.ReplaceAllString(comments[name], "`$0`")
		b.WriteString(row(code(name), code(config.Variable(name)), code(defaults[name]), text))
	}
	return b.String(), nil
}

// dotted returns patterns for the names that are no ordinary words, because they contain a dot or a
// capital letter.
func dotted(names []string) map[string]bool {
	patterns := make(map[string]bool)
	for _, name := range names {
		if strings.Contains(name, ".") || name != strings.ToLower(name) {
			patterns[regexp.QuoteMeta(name)] = true
		}
	}
	return patterns
}

// settings calls f for each setting in field order.
func settings(v reflect.Value, path string, f func(name string, value reflect.Value)) {
	if v.Kind() != reflect.Struct {
		f(path, v)
		return
	}
	for i := range v.NumField() {
		settings(v.Field(i), strings.TrimPrefix(path+"."+v.Type().Field(i).Tag.Get("yaml"), "."), f)
	}
}

// fieldComments returns the comment above the field of each setting, without the field's name.
func fieldComments(folder string) (map[string]string, error) {
	names, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	types := make(map[string]*ast.StructType)
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.TypeSpec); ok {
				if s, ok := spec.Type.(*ast.StructType); ok {
					types[spec.Name.Name] = s
				}
			}
			return true
		})
	}
	comments := make(map[string]string)
	var walk func(s *ast.StructType, path string)
	walk = func(s *ast.StructType, path string) {
		for _, field := range s.Fields.List {
			if field.Tag == nil || len(field.Names) != 1 {
				continue
			}
			name := strings.TrimPrefix(path+"."+reflect.StructTag(strings.Trim(field.Tag.Value, "`")).Get("yaml"), ".")
			inner, ok := field.Type.(*ast.StructType)
			if named, isNamed := field.Type.(*ast.Ident); isNamed {
				inner, ok = types[named.Name], types[named.Name] != nil
			}
			if ok {
				walk(inner, name)
			} else {
				comments[name] = withoutName(field.Names[0].Name, field.Doc.Text())
			}
		}
	}
	walk(types["Config"], "")
	return comments, nil
}

// withoutName returns a comment that begins with the name of its field and a verb, without the
// name.
func withoutName(name, comment string) string {
	short := sentence(name, comment)
	if rest, ok := strings.CutPrefix(short, name+" "); ok && rest != "" {
		return strings.ToUpper(rest[:1]) + rest[1:]
	}
	return short
}
