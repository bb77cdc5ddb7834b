// Package alerts tests what somebody on call sees of a fault: it is caused in a real server, whose
// readiness, metrics, log and answers are compared with what the fault must show, while it is on and
// after its end. Prometheus evaluates the alerts of the chart over what the server answers at
// /metrics, by a clock of its own. It has tests only.
//
// The quick faults run with the other tests. All of them run when CHAOS_LONG is set, which `make
// chaos` does, and then each leaves a row in docs/chaos.md.
package alerts
