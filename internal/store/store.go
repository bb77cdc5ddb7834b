// Package store is the contract between the product and whatever keeps its
// data: one ordered key-value space with serialisable transactions, written as
// closures.
//
// # Model
//
// There is one logical writer. Update closures run one after the other, each
// seeing what the earlier ones wrote, and many of them share one physical
// commit. What depends on the order of that commit (sequence numbers, the links
// of the audit chain) happens in a single [Hook] that the store calls once per
// physical commit. View closures read a snapshot of the last commit and block
// nobody.
//
// # Invariants
//
//   - A nil error from Update means durable: it survives kill -9 and power loss.
//   - A group's writes and those of its hook are one atomic change.
//   - Nobody reads what is not committed, except the closures of the same group,
//     whose answers all wait for that commit.
//   - A failed commit is answered as a success only when it is known to have
//     persisted, and it is never applied twice.
//   - A store that a failure has stopped works again soon after its cause is gone,
//     without any call.
//
// The package knows no schema, no encryption and no tenants, and retries
// nothing: whoever gets fault.Unavailable decides whether to ask again.
package store

import "context"

// Store is one open database. All methods may be called concurrently.
//
// Errors are of these kinds: fault.Unavailable when the store cannot answer now
// (retrying helps), fault.Internal when the data is damaged or a closure broke
// this contract, fault.Invalid for a key that is empty or longer than
// [MaxKeySize]. Errors of closures come back as they are.
type Store interface {
	// View runs fn once over a snapshot of the last commit, which is taken when
	// fn first reads at the latest, and returns fn's error. Two seconds after it
	// began, or when ctx ends, the Reader answers every call with
	// fault.Unavailable. fn must not call the Store.
	View(ctx context.Context, fn func(Reader) error) error

	// Update runs fn in the serial order of all Updates and returns after the
	// commit. When fn fails, panics or exits, none of its writes and events
	// remain; the error is returned, the panic continues in the caller, and
	// the other members of the group are not affected.
	//
	// fn may run again (a backend may need to retry a group, or rehearse fn to
	// find out what it reads), and what it captures is that of its last run. So
	// it makes no network call, reads no clock and draws no randomness. It must
	// not call the Store. The run that counts is not at the same time as other
	// closures, so it should only compare and put.
	//
	// When ctx ends before that run, nothing of fn remains. When it ends later,
	// Update returns fault.Unavailable without waiting for the commit, and the
	// outcome is unknown: a caller that asks again compares a version first.
	// Either way fn, the hook and the events are done with when Update returns.
	Update(ctx context.Context, fn func(Tx) error) error

	// Ready returns nil while Views are answered and commits succeed. After a
	// failure it tries an empty commit, so that its answer is of now; and it
	// fails when a commit has been hanging for more than 750 ms.
	Ready(ctx context.Context) error

	// Close waits for everything queued and in flight, Views included, and
	// releases the database. Later calls of Update, View and Ready fail with
	// fault.Unavailable; a second Close returns nil.
	Close() error
}

// Database is a Store as the process that has opened it knows it.
type Database interface {
	Store

	// Copy hands all rows to emit, so that applied in order they make the state
	// of one commit, which is not older than the call. A key may come several
	// times; a nil value says that the row is to be deleted. emit may take its
	// time, within ctx, and owns the slices; its error ends the copy and is
	// returned. Commits go on meanwhile. Errors: fault.Conflict while another
	// copy of this process is running, fault.Unavailable.
	Copy(ctx context.Context, emit func(key, value []byte) error) error

	// Commits returns the number of physical commits of this process.
	Commits() uint64
}

// MaxKeySize is the length of the longest key in bytes.
const MaxKeySize = 1024

// Reader reads one consistent state. It is valid only inside its closure and
// for one goroutine at a time. The slices it returns are valid only inside the
// closure and must not be modified.
type Reader interface {
	// Get returns the value of key: nil without an error when there is none,
	// and a non-nil slice of length 0 when the value is empty.
	Get(key []byte) ([]byte, error)

	// Scan calls visit for each pair of r, in bytewise order of the keys, until
	// visit returns false. In a Tx visit may write: each step goes on from the
	// key just visited, in the state that visit left behind.
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
	return Range{From: p} // empty, or nothing but 0xff: no key sorts after all of them
}

// Tx is a Reader that sees its own writes and those of earlier closures.
type Tx interface {
	Reader

	// Put stores a copy of value under a copy of key.
	Put(key, value []byte) error

	// Delete removes key; removing an absent key is no error. An embedded
	// backend wipes the old bytes from its files within five seconds of the
	// commit, even if it answered fault.Unavailable; while the disk fails, of
	// its recovery. Overwriting by Put starts no such wipe: a value that must
	// be gone is deleted, and its successor has a key of its own.
	Delete(key []byte) error

	// Enqueue hands an event to the hook of the commit that this closure joins.
	// A closure that only enqueues is committed too.
	Enqueue(event any)

	// OnCommit has do called once the commit that this closure, or the hook, joins is
	// known to be durable: before any member of its group is answered, and neither at
	// the same time as a closure whose run counts nor as a hook. Of a run that does not
	// count, a commit that failed, and one whose outcome stays unknown it is never
	// called. It returns at once and does not call the Store.
	OnCommit(do func())
}

// Hook runs once per physical commit, before it, with the events of the closures
// that succeeded, in commit order. It reads and writes in the same transaction
// (Enqueue does nothing there), does not run concurrently with itself or with
// any closure, and is bound by the rules of Update closures except that it may
// read a clock and draw randomness. Its error fails every member of the group.
type Hook func(tx Tx, events []any) error
