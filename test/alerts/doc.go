// Package alerts tests the alerts of the chart: Prometheus evaluates them over what real servers
// answer at /metrics before and while something fails. It has tests only.
package alerts
