// Package chaos contains only tests of the whole program. They run it while processes are killed
// and frozen, disks fail, and databases and networks become unreachable. They then compare the
// answers that clients received with the stored state.
//
// Every run checks the same four promises: no acknowledged write is lost, no answer contradicts
// another one (the histories of the credentials are linearisable), the whole audit log verifies,
// and the program recovers by itself.
//
// The short forms run with the other tests. The long ones run when CHAOS_LONG is set, which `make
// chaos` and `make chaos-syscalls` do.
package chaos
