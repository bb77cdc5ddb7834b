package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

func TestParagraphsHaveOneLine(t *testing.T) {
	for before, after := range map[string]string{
		"":                                "",
		"one":                             "one",
		"one\ntwo":                        "one two",
		"one\ntwo\n\nthree\nfour":         "one two\n\nthree four",
		"either:\n- one\n- two\nor three": "either:\n- one\n- two\nor three",
		"code:\n\n\ta\n\tb\n\nend\nit":    "code:\n\n\ta\n\tb\n\nend it",
	} {
		if got := paragraphs(before); got != after {
			t.Errorf("%q becomes %q, want %q", before, got, after)
		}
	}
}

// Only descriptions change: not a property of that name, and nothing else of several lines.
func TestOnlyDescriptionsAreUnwrapped(t *testing.T) {
	got, err := unwrap([]byte(`---
properties:
  description: {type: string, description: "a\nb"}
  other: {pattern: "a\nb", description: "c\n\nd"}
`))
	const want = `---
properties:
  description:
    description: a b
    type: string
  other:
    description: |-
      c

      d
    pattern: |-
      a
      b
`
	if err != nil || string(got) != want {
		t.Errorf("%v\n%s", err, got)
	}
}

// What is generated has been unwrapped, and has the same content as before.
func TestTheDefinitionIsUnwrapped(t *testing.T) {
	const path = "../../config/crd/bases/latticekeep.dev_sealedcredentials.yaml"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	again, err := unwrap(text)
	if err != nil || !bytes.Equal(again, text) {
		t.Errorf("%s is wrapped (%v): run `make generate`", path, err)
	}
	var tree map[string]any
	if err := yaml.Unmarshal(text, &tree); err != nil || !strings.HasPrefix(string(text), "---\napiVersion: apiextensions.k8s.io/v1\n") {
		t.Errorf("%s is no definition: %v", path, err)
	}
}
