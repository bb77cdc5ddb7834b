// Package store is the contract between the product and its database: one ordered key-value space
// with serialisable transactions, written as closures.
//
// # Model
//
// There is one logical writer. Update closures run one after the other. Each sees what the earlier
// ones wrote, and many of them share one physical commit. A single [Hook], which the store calls
// once per physical commit, computes what depends on the order of commits: sequence numbers and the
// links of the audit chain. View closures read a snapshot of the last commit and block nobody.
//
// # Invariants
//
//   - A nil error from Update means durable: the writes survive kill -9 and power loss.
//   - A group's writes and those of its hook are one atomic change.
//   - Uncommitted writes are visible only to closures of the same group, whose answers all wait
//     for that commit.
//   - The store reports a failed commit as a success only when it knows that the commit
//     persisted. It never applies a commit twice.
//   - A store that a failure has stopped works again soon after the cause is gone. It needs no
//     call for that.
//
// The package knows no schema, no encryption and no tenants. It retries nothing: a caller that gets
// fault.Unavailable decides whether to try again.
package store

import (
	"context"
	"time"
)

// Store is one open database. All methods may be called concurrently.
//
// Errors have these kinds: fault.Unavailable when the store cannot answer now (retrying helps),
// fault.Internal when the data is damaged or a closure broke this contract, and fault.Invalid for a
// key that is empty or longer than [MaxKeySize]. Errors of closures are returned unchanged.
type Store interface {
	// View runs fn once over a snapshot of the last commit and returns fn's error. The snapshot is
	// taken at fn's first read at the latest. Two seconds after View began, or when ctx ends, the
	// Reader answers every call with fault.Unavailable. fn must not call the Store.
	View(ctx context.Context, fn func(Reader) error) error

	// Update runs fn in the serial order of all Updates and returns after the commit. When fn
	// fails, panics or exits, its writes and events are dropped. Update returns fn's error, a panic
	// continues in the caller, and the other members of the group are not affected.
	//
	// fn may run more than once: a backend may retry a group, or rehearse fn to find out what it
	// reads. The variables that fn captures hold the results of its last run. So fn must make no
	// network call, read no clock and draw no randomness. It must not call the Store. The run that
	// counts never overlaps with another closure, so fn should only compare and put.
	//
	// When ctx ends before that run, nothing of fn remains. When ctx ends later, Update returns
	// fault.Unavailable without waiting for the commit, and the outcome is unknown: a caller that
	// tries again must compare a version first. In both cases fn, the hook and the events are no
	// longer in use when Update returns.
	Update(ctx context.Context, fn func(Tx) error) error

	// Ready returns nil while Views are answered and commits succeed. After a failure it tries a
	// commit, so its answer describes the present; an embedded backend's commit has the size of an
	// audit entry. Ready fails when a commit has been hanging for more than 750 ms.
	Ready(ctx context.Context) error

	// Close waits for everything queued and in flight, Views included, and releases the database.
	// Later calls of Update, View and Ready fail with fault.Unavailable. A second Close returns
	// nil.
	Close() error
}

// Database is a Store with the methods of the process that opened it.
type Database interface {
	Store

	// Copy passes all rows to emit. Applied in order, they make the state of one commit, which is
	// not older than the call. A key may come several times; a nil value means that the row must be
	// deleted. emit may be slow, within ctx, and owns the slices. An error of emit ends the copy
	// and is returned. Commits continue meanwhile. Errors: fault.Conflict while another copy of
	// this process is running, fault.Unavailable.
	Copy(ctx context.Context, emit func(key, value []byte) error) error

	// Commits returns the number of physical commits of this process.
	Commits() uint64

	// ReplicasRead reports whether all processes that use the database now, this one included, read
	// the format least (see package format). Error: fault.Unavailable.
	ReplicasRead(ctx context.Context, least int) (bool, error)

	// Usage returns how much room the rows take. It reads no rows, so it takes the same time for
	// any number of them. Error: fault.Unavailable.
	Usage(ctx context.Context) (Usage, error)
}

// Usage is how much room the rows of a database take, in bytes.
type Usage struct {
	Size int64 // size of the file, or of the tables with their indexes
	Free int64 // part of Size that the next commits use before the database grows; -1: unknown

	Reserve  int64 // what is left of the reserve for reads and removals on a full disk; 0: there is none
	Reserved bool  // the disk is full, and changes are refused

	Returned  int64     // bytes that compactions of this process gave back to the file system
	Compacted time.Time // when the last one ended; zero: none yet
}

// MaxKeySize is the length of the longest key in bytes.
const MaxKeySize = 1024

// Reader reads one consistent state. It is valid only inside its closure and for one goroutine at a
// time. The slices it returns are valid only inside the closure and must not be modified.
type Reader interface {
	// Get returns the value of key. It returns nil without an error when the key is absent, and a
	// non-nil slice of length 0 when the value is empty.
	Get(key []byte) ([]byte, error)

	// Scan calls visit for each pair of r, in bytewise order of the keys, until visit returns
	// false. In a Tx visit may write: each step continues from the key just visited and sees what
	// visit wrote.
	Scan(r Range, visit func(key, value []byte) bool) error
}

// Range is the half-open interval [From, To) of keys in bytewise order.
type Range struct {
	From    []byte // inclusive; nil is the beginning
	To      []byte // exclusive; nil is unbounded
	Reverse bool   // largest key first
}

// Prefix returns the range of all keys that begin with p.
func Prefix(p []byte) Range {
	for i := len(p) - 1; i >= 0; i-- {
		if p[i] != 0xff {
			to := append([]byte(nil), p[:i+1]...)
			to[i]++
			return Range{From: p, To: to}
		}
	}
	return Range{From: p} // p is empty or all 0xff: no key sorts after its prefix
}

// Tx is a Reader that sees its own writes and those of earlier closures.
type Tx interface {
	Reader

	// Put stores a copy of value under a copy of key.
	Put(key, value []byte) error

	// Delete removes key; removing an absent key is no error. An embedded backend wipes the old
	// bytes from its files within five seconds of the commit, even if it answered
	// fault.Unavailable. While the disk fails, the five seconds start at its recovery. Overwriting
	// with Put starts no wipe: to erase a value, delete it and store its successor under another
	// key.
	Delete(key []byte) error

	// Wrote reports whether this closure, or an earlier one of its group, has put or deleted key.
	Wrote(key []byte) bool

	// Written calls visit once for each key with a prefix that [Tx.Wrote] is true of, in no order,
	// and tells whether the key is absent now. visit must not use the Tx.
	Written(prefix []byte, visit func(key []byte, absent bool)) error

	// Enqueue passes an event to the hook of the commit that this closure joins. A closure that
	// only enqueues is committed too.
	Enqueue(event any)

	// OnCommit registers do. The store calls do once the commit that this closure or hook joins is
	// known to be durable. do runs before any member of the group gets its answer, and never at the
	// same time as a hook or a closure whose run counts. The store does not call do for a run that
	// does not count, for a failed commit, or for a commit whose outcome stays unknown. do must
	// return at once and must not call the Store.
	OnCommit(do func())
}

// Hook runs once per physical commit, before it, with the events of the closures that succeeded, in
// commit order. It reads and writes in the same transaction; Enqueue does nothing there. It does
// not run concurrently with itself or with any closure. The rules of Update closures bind it,
// except that it may read a clock and draw randomness. Its error fails every member of the group.
type Hook func(tx Tx, events []any) error

// Commit is one attempt to commit a group of Updates, as an [Observer] sees it.
type Commit struct {
	Updates int           // members of the group
	Took    time.Duration // begins with the group's first closure, or its wait for the lock
	Err     error         // nil when the commit is durable
}

// Observer is called after each attempt to commit, before any member of the group gets its answer.
// It must return at once and must not call the Store. Groups that changed nothing are not observed,
// unless the store failed before that was known.
type Observer func(Commit)
