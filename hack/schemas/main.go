// Command schemas writes the JSON schemas with which kubeconform checks the rendered chart and
// config/. It writes one strict file for each kind, in which an unknown field is an error.
//
// The kinds of Kubernetes come from the OpenAPI document of the k8s.io/kubernetes module that
// hack/k8s names, SealedCredential from its CRD. Those of Prometheus and cert-manager are written
// by hand in kinds/ and have only the fields that the chart uses, because the real schemas are in
// no module that the project has.
package main

import (
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

//go:embed kinds
var kinds embed.FS

func main() {
	swagger := flag.String("swagger", "", "OpenAPI document of Kubernetes (version 2)")
	crd := flag.String("crd", "", "CRD of SealedCredential")
	out := flag.String("out", "", "folder to write to")
	flag.Parse()
	if err := run(*swagger, *crd, *out); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(swagger, crd, out string) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	text, err := os.ReadFile(swagger)
	if err != nil {
		return err
	}
	var document struct{ Definitions map[string]any }
	if err := json.Unmarshal(text, &document); err != nil {
		return fmt.Errorf("reading %s: %w", swagger, err)
	}
	for name, definition := range document.Definitions {
		makeStrict(name, definition)
	}
	// All definitions are in one file. The file of each kind refers to it.
	if err := write(out, "definitions.json", map[string]any{"definitions": document.Definitions}); err != nil {
		return err
	}
	for name, definition := range document.Definitions {
		if err := writeKind(out, name, definition); err != nil {
			return err
		}
	}
	if err := writeCRD(out, crd); err != nil {
		return err
	}
	return writeHandwritten(out)
}

const (
	quantity    = "io.k8s.apimachinery.pkg.api.resource.Quantity"
	intOrString = "io.k8s.apimachinery.pkg.util.intstr.IntOrString"
	anyJSON     = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON"
	objectMeta  = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
)

// makeStrict closes every object whose fields are known. A quantity and an int-or-string may be a
// number or a string.
func makeStrict(name string, schema any) {
	s, ok := schema.(map[string]any)
	if !ok {
		return
	}
	switch name {
	case quantity, intOrString:
		s["type"] = []any{"string", "number"}
		delete(s, "format")
	case anyJSON:
		delete(s, "type")
	}
	closeObjects(s)
}

func closeObjects(node any) {
	switch n := node.(type) {
	case []any:
		for _, v := range n {
			closeObjects(v)
		}
	case map[string]any:
		if either, _ := n["x-kubernetes-int-or-string"].(bool); either {
			n["type"] = []any{"string", "integer"}
		}
		open, _ := n["x-kubernetes-preserve-unknown-fields"].(bool)
		fields, isObject := n["properties"].(map[string]any)
		if _, said := n["additionalProperties"]; isObject && !said && !open {
			n["additionalProperties"] = false
		}
		for _, v := range fields {
			closeObjects(v)
		}
		// A field may itself have the name properties, so not every key is a schema.
		for _, key := range []string{"additionalProperties", "items", "allOf", "anyOf", "oneOf", "definitions"} {
			closeObjects(n[key])
		}
	}
}

// writeKind writes the file for a definition that is a kind.
func writeKind(out, name string, definition any) error {
	d, _ := definition.(map[string]any)
	gvks, _ := d["x-kubernetes-group-version-kind"].([]any)
	if len(gvks) != 1 { // such as DeleteOptions, which belongs to every group
		return nil
	}
	gvk, _ := gvks[0].(map[string]any)
	group, _ := gvk["group"].(string)
	version, _ := gvk["version"].(string)
	kind, _ := gvk["kind"].(string)
	return write(out, fileName(group, version, kind), map[string]any{
		"allOf":    []any{map[string]any{"$ref": "definitions.json#/definitions/" + name}},
		"required": []any{"apiVersion", "kind"},
	})
}

// fileName returns the file name that hack/verify-chart.sh tells kubeconform to look for.
func fileName(group, version, kind string) string {
	if group == "" {
		group = version // kubeconform uses the version as the group of v1
	}
	return strings.ToLower(kind) + "_" + group + "_" + version + ".json"
}

func writeCRD(out, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var crd struct {
		Spec struct {
			Group    string
			Names    struct{ Kind string }
			Versions []struct {
				Name   string
				Schema struct {
					OpenAPIV3Schema map[string]any `json:"openAPIV3Schema"`
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &crd); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	if len(crd.Spec.Versions) == 0 {
		return errors.New("the CRD has no version")
	}
	for _, v := range crd.Spec.Versions {
		s := v.Schema.OpenAPIV3Schema
		closeObjects(s)
		properties, ok := s["properties"].(map[string]any)
		if !ok {
			return fmt.Errorf("the schema of version %s has no properties", v.Name)
		}
		properties["metadata"] = map[string]any{"$ref": "definitions.json#/definitions/" + objectMeta}
		if err := write(out, fileName(crd.Spec.Group, v.Name, crd.Spec.Names.Kind), s); err != nil {
			return err
		}
	}
	return nil
}

func writeHandwritten(out string) error {
	entries, err := kinds.ReadDir("kinds")
	if err != nil {
		return err
	}
	for _, e := range entries {
		text, err := kinds.ReadFile("kinds/" + e.Name())
		if err != nil {
			return err
		}
		var s map[string]any
		if err := json.Unmarshal(text, &s); err != nil {
			return fmt.Errorf("reading kinds/%s: %w", e.Name(), err)
		}
		closeObjects(s)
		if err := write(out, e.Name(), s); err != nil {
			return err
		}
	}
	return nil
}

func write(out, name string, schema any) error {
	text, err := json.Marshal(schema)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, name), text, 0o644)
}
