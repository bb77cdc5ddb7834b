package postgres

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/store"
)

// statement is one of the few statements that the store runs all the time. Each session prepares it
// on first use.
type statement int

const (
	begin statement = iota
	snapshot
	rollback
	commit
	exclude
	lock
	get
	ahead // a page of a range: ascending, with an upper bound
	aheadOpen
	back
	backOpen
	upsert
	remove
	advance
	sign
	lookup
	raise
	statements
)

var sql = [statements]string{
	begin:     "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
	snapshot:  "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
	rollback:  "ROLLBACK",
	commit:    "COMMIT",
	lock:      "SELECT fence, (SELECT version FROM latticekeep_schema WHERE id = 1), commit_id FROM latticekeep_head WHERE id = 1 FOR UPDATE",
	exclude:   "LOCK TABLE latticekeep_head IN EXCLUSIVE MODE",
	get:       "SELECT key, value FROM latticekeep_kv WHERE key = ANY ($1::bytea[])",
	ahead:     "SELECT key, value FROM latticekeep_kv WHERE key >= $1::bytea AND key < $2::bytea ORDER BY key LIMIT $3::bigint",
	aheadOpen: "SELECT key, value FROM latticekeep_kv WHERE key >= $1::bytea ORDER BY key LIMIT $2::bigint",
	back:      "SELECT key, value FROM latticekeep_kv WHERE key >= $1::bytea AND key < $2::bytea ORDER BY key DESC LIMIT $3::bigint",
	backOpen:  "SELECT key, value FROM latticekeep_kv WHERE key >= $1::bytea ORDER BY key DESC LIMIT $2::bigint",
	upsert: "INSERT INTO latticekeep_kv (key, value) SELECT unnest($1::bytea[]), unnest($2::bytea[]) " +
		"ON CONFLICT (key) DO UPDATE SET value = excluded.value",
	remove:  "DELETE FROM latticekeep_kv WHERE key = ANY ($1::bytea[])",
	advance: "UPDATE latticekeep_head SET fence = $1::bigint, commit_id = $2::bytea WHERE id = 1",
	sign: "INSERT INTO latticekeep_commit (slot, fence, id) VALUES ($1::integer, $2::bigint, $3::bytea) " +
		"ON CONFLICT (slot) DO UPDATE SET fence = excluded.fence, id = excluded.id",
	lookup: "SELECT fence, id FROM latticekeep_commit WHERE slot = $1::integer",
	raise:  "UPDATE latticekeep_schema SET version = $1::bigint WHERE id = 1",
}

// conn is a session. One goroutine uses it at a time.
type conn struct {
	pg       *pgconn.PgConn
	prepared [statements]*pgconn.StatementDescription
	late     bool   // the server did not answer in time
	warning  string // last warning that the server gave for what was run
}

// kill closes the connection at once. The server rolls back the session's open transaction when it
// notices.
//
//nolint:contextcheck // whoever gives up a connection may have no time left
func (c *conn) kill() {
	_ = c.pg.Conn().Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.pg.Close(ctx)
}

// exec runs a statement that is not one of the prepared ones.
//
//nolint:contextcheck // the connection has the deadline
func (c *conn) exec(within time.Duration, text string) error {
	if err := c.pg.Conn().SetDeadline(time.Now().Add(within)); err != nil {
		return failed(err)
	}
	if err := c.pg.Exec(context.Background(), text).Close(); err != nil {
		return failed(err)
	}
	return nil
}

// step is one statement of a batch, with its parameters in binary.
type step struct {
	statement
	params [][]byte
	row    func(values [][]byte) error // gets each row; the values are valid only during the call
	tag    pgconn.CommandTag           // set afterwards
}

var binaryFormat = []int16{1}

// run sends all steps in one round trip and returns the error of the first one that failed. No step
// runs after that one.
//
//nolint:contextcheck // the connection has the deadline
func (c *conn) run(within time.Duration, steps []step) error {
	if err := c.prepare(within, steps); err != nil {
		return failed(err)
	}
	if err := c.pg.Conn().SetDeadline(time.Now().Add(within)); err != nil {
		return failed(err)
	}
	c.warning = ""
	var batch pgconn.Batch
	for i := range steps {
		batch.ExecStatement(c.prepared[steps[i].statement], steps[i].params, binaryFormat, binaryFormat)
	}
	results := c.pg.ExecBatch(context.Background(), &batch)
	var broken error
	for i := 0; results.NextResult(); i++ {
		r := results.ResultReader()
		for r.NextRow() {
			if broken == nil && i < len(steps) && steps[i].row != nil {
				broken = steps[i].row(r.Values())
			}
		}
		tag, err := r.Close()
		if err != nil {
			break // Close below returns the error again
		}
		if i < len(steps) {
			steps[i].tag = tag
		}
	}
	if err := results.Close(); err != nil {
		c.late = c.late || errors.Is(err, os.ErrDeadlineExceeded)
		return failed(err)
	}
	return broken
}

// prepare prepares the statements of steps that the session has not prepared yet.
//
//nolint:contextcheck // the connection has the deadline
func (c *conn) prepare(within time.Duration, steps []step) error {
	for i := range steps {
		if s := steps[i].statement; c.prepared[s] == nil {
			if err := c.pg.Conn().SetDeadline(time.Now().Add(within)); err != nil {
				return err
			}
			d, err := c.pg.Prepare(context.Background(), fmt.Sprintf("latticekeep_%d", s), sql[s], nil)
			if err != nil {
				return err
			}
			c.prepared[s] = d
		}
	}
	return nil
}

// row is a key with its value.
type row struct{ key, value []byte }

// ask is one thing to read: the value of a key, or a page of a range.
type ask struct {
	key   []byte
	rg    store.Range // valid when limit is not 0
	limit int

	value []byte // nil when the key is absent
	rows  []row
	err   error
	done  chan struct{} // closed when the answer is ready
}

func newGet(key []byte) *ask { return &ask{key: key, done: make(chan struct{})} }

func newPage(rg store.Range, limit int) *ask {
	return &ask{rg: rg, limit: limit, done: make(chan struct{})}
}

// tell answers asks with err.
func tell(asks []*ask, err error) {
	for _, a := range asks {
		a.err = err
		close(a.done)
	}
}

// read answers all asks in one round trip, after the steps in before. It reads what several asks
// want only once. It does not close their channels.
func (c *conn) read(within time.Duration, before []step, asks []*ask) error {
	steps := before
	keys, pages := make(map[string][]*ask), make(map[pageName][]*ask)
	var list [][]byte
	for _, a := range asks {
		a.value, a.rows = nil, nil // drop the results of a failed attempt
		if a.limit > 0 {
			name := a.pageName()
			if pages[name] == nil {
				steps = append(steps, a.page())
			}
			pages[name] = append(pages[name], a)
			continue
		}
		if keys[string(a.key)] == nil {
			list = append(list, a.key)
		}
		keys[string(a.key)] = append(keys[string(a.key)], a)
	}
	if len(list) > 0 {
		steps = append(steps, step{statement: get, params: [][]byte{byteaArray(list)}, row: func(v [][]byte) error {
			value := clone(v[1])
			for _, a := range keys[string(v[0])] {
				a.value = value
			}
			return nil
		}})
	}
	if err := c.run(within, steps); err != nil {
		return err
	}
	for _, same := range pages {
		for _, a := range same[1:] {
			a.rows = same[0].rows
		}
	}
	return nil
}

// pageName identifies a page.
type pageName struct {
	from, to      string
	open, reverse bool
	limit         int
}

func (a *ask) pageName() pageName {
	return pageName{string(a.rg.From), string(a.rg.To), a.rg.To == nil, a.rg.Reverse, a.limit}
}

func (a *ask) page() step {
	from, limit := a.rg.From, binary.BigEndian.AppendUint64(nil, uint64(a.limit))
	if from == nil {
		from = []byte{}
	}
	s := step{statement: aheadOpen, params: [][]byte{from, limit}, row: func(v [][]byte) error {
		a.rows = append(a.rows, row{clone(v[0]), clone(v[1])})
		return nil
	}}
	switch {
	case a.rg.To != nil && a.rg.Reverse:
		s.statement, s.params = back, [][]byte{from, a.rg.To, limit}
	case a.rg.To != nil:
		s.statement, s.params = ahead, [][]byte{from, a.rg.To, limit}
	case a.rg.Reverse:
		s.statement = backOpen
	}
	return s
}

// clone copies b. The copy is never nil, because nil would read as absent.
func clone(b []byte) []byte { return append([]byte{}, b...) }

// byteaArray encodes bytea[] in PostgreSQL's binary format: the number of dimensions, a flag for
// nulls, the type of the elements, their number, the index of the first, and each element with its
// length (src/backend/utils/adt/arrayfuncs.c, array_recv).
func byteaArray(elements [][]byte) []byte {
	const bytea = 17
	size := 20
	for _, e := range elements {
		size += 4 + len(e)
	}
	b := make([]byte, 0, size)
	for _, n := range []uint32{1, 0, bytea, uint32(len(elements)), 1} {
		b = binary.BigEndian.AppendUint32(b, n)
	}
	for _, e := range elements {
		b = binary.BigEndian.AppendUint32(b, uint32(len(e)))
		b = append(b, e...)
	}
	return b
}

// number reads an integer column of 2, 4 or 8 bytes.
func number(b []byte) (int64, error) {
	switch len(b) {
	case 4:
		return int64(int32(binary.BigEndian.Uint32(b))), nil
	case 8:
		return int64(binary.BigEndian.Uint64(b)), nil
	}
	return 0, errors.New("a column is not of its type")
}

// longestGathering is about half the duration of a commit.
const longestGathering = 2 * time.Millisecond

// gather yields to other goroutines for as long as that makes a group grow, so that their requests
// travel with it. Yielding costs nothing when no goroutine can run, and does not wait for blocked
// ones. When very many can run, one turn lasts until all of them have run, so gather also stops
// after longestGathering.
func gather(size func() int) {
	const enough = 32 // turns without a new request; a turn takes well under a microsecond when nobody else can run
	began := time.Now()
	for last, idle := 0, 0; idle < enough && time.Since(began) < longestGathering; {
		runtime.Gosched()
		if n := size(); n > last {
			last, idle = n, 0
		} else {
			idle++
		}
	}
}

// poke wakes the goroutine that waits on c, now or when it next waits.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
