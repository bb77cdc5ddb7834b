// Package chaos holds tests of the whole program, and nothing else: they run it
// while processes are killed and frozen, disks fail, and databases and networks go
// away, and hold what its clients were told against what is there afterwards.
//
// Every run asks the same: nothing that was acknowledged is lost, no answer
// contradicts another one (the histories of the credentials are linearisable), the
// audit log verifies as a whole, and the program goes on by itself.
//
// The short forms are among the tests. The long ones run when CHAOS_LONG
// is set, which `make chaos` and `make chaos-syscalls` do.
package chaos
