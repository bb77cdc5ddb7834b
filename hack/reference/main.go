// Command reference writes the pages of docs/reference that are generated from code: configuration,
// commands, custom resource, chart and REST API. `make generate` runs it at the root of the
// repository. With -man it writes manual pages of the commands.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	var err error
	switch {
	case len(os.Args) == 2:
		err = write(os.Args[1])
	case len(os.Args) == 3 && os.Args[1] == "-man":
		err = writeManPages(os.Args[2])
	default:
		fmt.Fprintln(os.Stderr, "usage: reference [-man] FOLDER")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "reference:", err)
		os.Exit(1)
	}
}

// page is one generated page without its head.
type page struct {
	file, title, source string
	weight              int
	body                func() (string, error)
}

var pages = []page{
	{"configuration.md", "Configuration", "internal/config", 1, configuration},
	{"cli.md", "Commands", "the help of the program", 2, commands},
	{"sealedcredential.md", "SealedCredential", crdFile, 3, customResource},
	{"chart.md", "Chart", valuesFile, 5, chart},
	{"api.md", "REST API", "api/openapi", 6, api},
}

func write(folder string) error {
	for _, p := range pages {
		body, err := p.body()
		if err != nil {
			return fmt.Errorf("writing %s: %w", p.file, err)
		}
		head := fmt.Sprintf("---\ntitle: %s\nweight: %d\n---\n\n<!-- Generated from %s by `make generate`. Do not edit. -->\n\n# %s\n\n",
			p.title, p.weight, p.source, p.title)
		if err := os.WriteFile(filepath.Join(folder, p.file), []byte(head+body), 0o644); err != nil {
			return err
		}
	}
	return nil
}
