// Command crd puts every paragraph of the descriptions in CustomResourceDefinitions on one line.
// controller-gen copies them from Go comments, which are wrapped, and kubectl explain would break
// the lines in the same places and in its own.
package main

import (
	"fmt"
	"os"
	"strings"

	"sigs.k8s.io/yaml"
)

func main() {
	for _, path := range os.Args[1:] {
		if err := rewrite(path); err != nil {
			fmt.Fprintln(os.Stderr, "crd:", err)
			os.Exit(1)
		}
	}
}

func rewrite(path string) error {
	before, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	after, err := unwrap(before)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.WriteFile(path, after, 0o644) //nolint:gosec // generated code is for everyone
}

// unwrap returns a manifest with unwrapped descriptions, in the form that controller-gen writes.
func unwrap(manifest []byte) ([]byte, error) {
	var tree any
	if err := yaml.Unmarshal(manifest, &tree); err != nil {
		return nil, err
	}
	walk(tree)
	text, err := yaml.Marshal(tree)
	return append([]byte("---\n"), text...), err
}

// walk changes the descriptions below a node. A property may be called description, and its schema
// is no text.
func walk(node any) {
	switch n := node.(type) {
	case map[string]any:
		for key, child := range n {
			if text, is := child.(string); is && key == "description" {
				n[key] = paragraphs(text)
			}
			walk(child)
		}
	case []any:
		for _, child := range n {
			walk(child)
		}
	}
}

// paragraphs joins the lines of each paragraph. Indented lines and items of a list stay as they are.
func paragraphs(text string) string {
	var b strings.Builder
	joins := false // the line before was one of a paragraph
	for i, line := range strings.Split(text, "\n") {
		is := line != "" && !strings.ContainsAny(line[:1], " \t-*")
		switch {
		case joins && is:
			b.WriteByte(' ')
		case i > 0:
			b.WriteByte('\n')
		}
		b.WriteString(line)
		joins = is
	}
	return b.String()
}
