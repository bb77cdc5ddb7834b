package memory

import "runtime/debug"

// Deployment is the part of a deployment that takes memory for as long as a server runs. Everything
// else is read from the store when it is needed, the entries of the audit log above all.
type Deployment struct {
	Credentials int // current versions
	Rows        int // rows that decide who may see or do what, those of credentials included
	Tenants     int
	Objects     int // SealedCredentials of the cluster
}

// A server needs this many bytes, as docs/guides/standalone.md says too. A test in test/chaos compares
// the first with a real server, and each of the others has a test where it is taken.
const (
	needAlone      = 112 << 20 // the program itself, requests at work, a backup, an export and a verification
	needCredential = 1 << 10   // its part in the evidence of a score, which is also encoded and decoded
	needRow        = 64        // its record in the state, and that record's part in a scan
	needTenant     = 128 << 10 // its keys, for kms.cacheTTL after their last use
	needObject     = 12 << 10  // the operator's copy, with some three values
)

// Need returns how many bytes a server needs to serve the deployment.
func (d Deployment) Need() int64 {
	return needAlone + needCredential*int64(d.Credentials) + needRow*int64(d.Rows) + needTenant*int64(d.Tenants) + needObject*int64(d.Objects)
}

// Share returns how many things that take so many bytes each may be in memory at the same time, at
// least 1 and at most most, so that they take at most one part of the limit of the Go runtime.
func Share(part, each int64, most int) int {
	return int(max(1, min(int64(most), debug.SetMemoryLimit(-1)/part/each)))
}
