package main

import (
	"strings"
)

// row returns a row of a table.
func row(cells ...string) string {
	for i, c := range cells {
		cells[i] = cellEscapes.Replace(strings.Join(strings.Fields(c), " "))
	}
	return "| " + strings.Join(cells, " | ") + " |\n"
}

// code returns text as inline code, and "" for an empty text.
func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}

var cellEscapes = strings.NewReplacer("|", `\|`, "<", "&lt;")
