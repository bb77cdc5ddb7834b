// Command pythonclient writes the generated part of the Python client: the types and the
// operations of both contracts. What it writes into a folder depends on the contracts alone.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/latticekeep/latticekeep/api/openapi"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: pythonclient FOLDER")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(folder string) error {
	files, err := generate()
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil { //nolint:gosec // source, for everyone to read
			return err
		}
	}
	return nil
}

// generate returns the generated files by name.
func generate() (map[string]string, error) {
	files := map[string]string{}
	for version, text := range map[string]string{"1": openapi.V1(), "2": openapi.V2()} {
		doc, err := openapi3.NewLoader().LoadFromData([]byte(text))
		if err != nil {
			return nil, fmt.Errorf("reading the contract of version %s: %w", version, err)
		}
		types, err1 := typesOf(doc, version)
		operations, err2 := operationsOf(doc, version)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("generating version %s: %w", version, err)
		}
		files["_types_v"+version+".py"] = types
		files["_operations_v"+version+".py"] = operations
	}
	return files, nil
}
