package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// values holds one number per round.
type values []float64

// median returns the median of the rounds, and 0 without any.
func (v values) median() float64 {
	if len(v) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(v))
	if n := len(sorted); n%2 == 0 {
		return (sorted[n/2-1] + sorted[n/2]) / 2
	}
	return sorted[len(v)/2]
}

// over divides the values round by round.
func (v values) over(by values) (times values) {
	for i := range min(len(v), len(by)) {
		times = append(times, v[i]/by[i])
	}
	return times
}

// show formats the median and, in brackets, the smallest and the largest value.
func (v values) show(format string) string {
	if len(v) == 0 {
		return "–"
	}
	return fmt.Sprintf(format+" ("+format+" to "+format+")", v.median(), slices.Min(v), slices.Max(v))
}

// print writes a Markdown table.
func (r *run) print(rows [][]string) {
	for i, row := range rows {
		fmt.Fprintf(r.out, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			fmt.Fprintf(r.out, "|%s\n", strings.Repeat(" --- |", len(row)))
		}
	}
}

// note writes a line for the reader of the tables.
func (r *run) note(format string, args ...any) {
	fmt.Fprintf(r.out, "\n"+format+"\n", args...)
}

// progress writes a line on standard error.
func (r *run) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}
