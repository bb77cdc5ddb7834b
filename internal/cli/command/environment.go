package command

import (
	"maps"
	"os"
	"slices"
	"strings"
)

// Environment returns the environment for a program that a command starts. In it, added replaces variables of the same
// name, and the API key is missing: the program is to have what it is started with, and not all that the key opens.
func Environment(added map[string]string) []string {
	all := slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		_, ok := added[name]
		return ok || name == KeyVariable
	})
	for _, name := range slices.Sorted(maps.Keys(added)) {
		all = append(all, name+"="+added[name])
	}
	return all
}
