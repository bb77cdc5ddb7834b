package audit

// Reader answers questions about the log. It records the reads of tenants, but not those of the
// service itself. It has no state.
type Reader struct {
	log      *Log
	chain    *Chain
	follower *Follower
	guard    *Guard
}

// NewReader returns the reader of a log that is bound to its store.
func NewReader(l *Log, g *Guard) *Reader {
	return &Reader{l, l.chain, NewFollower(l), g}
}
