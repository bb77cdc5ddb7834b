package state

import (
	"cmp"
	"crypto/sha256"
	"slices"
	"sort"
	"time"
)

// Bounds of the structure. A run is rewritten when it is folded, so its size is what a fold costs;
// the journal keeps about foldEvery changes for each run.
const (
	maxRun    = 2048 // records in a run: 64 KiB
	foldEvery = 512  // changed rows between two folds
)

// pastFor is how long earlier tags of changed rows are kept, for Views of an earlier commit. It is
// longer than any View.
const pastFor = 10 * time.Second

// table is the copy of the state that a process holds: the tag of each deciding row, as of one
// change. It is not safe for concurrent use.
type table struct {
	number uint64 // the newest change in the table; 0 at the beginning
	runs   []*run // in the order of their first ids; the first begins at the zero id
	debt   int    // changed rows since the last fold

	past    []past          // what the newest changes replaced, oldest first
	floor   uint64          // the change before the oldest in past
	changed map[id]struct{} // rows that changed since a scan began; nil when no scan is running
}

// run holds the records from an id up to the next run.
type run struct {
	from    id
	records []byte   // sorted, as of the fold; never changed
	changes []record // sorted, since the fold; an absent tag hides a record
	folded  uint64   // number of the change that folded the run last
}

// past is what a change replaced.
type past struct {
	number uint64
	record
	at time.Time
}

func newTable() *table { return &table{runs: []*run{new(run)}} }

// runOf returns the index of the run that holds an id.
func (t *table) runOf(i id) int {
	return sort.Search(len(t.runs), func(n int) bool { return t.runs[n].from.compare(i) > 0 }) - 1
}

// tagOf returns the newest tag of a row.
func (t *table) tagOf(i id) tag { return t.runs[t.runOf(i)].tagOf(i) }

func (r *run) tagOf(i id) tag {
	if n, found := r.change(i); found {
		return r.changes[n].tag
	}
	if n := r.search(i[:]); n < r.len() {
		if found := recordAt(r.records[n*recordSize:]); found.id == i {
			return found.tag
		}
	}
	return absent
}

func (r *run) len() int { return len(r.records) / recordSize }

func (r *run) change(i id) (int, bool) {
	return slices.BinarySearchFunc(r.changes, i, func(c record, i id) int { return c.id.compare(i) })
}

// search returns the index of the first record that is not before a prefix of an id.
func (r *run) search(prefix []byte) int {
	return sort.Search(r.len(), func(n int) bool { return string(r.records[n*recordSize:][:len(prefix)]) >= string(prefix) })
}

// set stores the tag of a row and returns the one before.
func (r *run) set(c record) (before tag) {
	before = r.tagOf(c.id)
	if n, found := r.change(c.id); found {
		r.changes[n].tag = c.tag
	} else {
		r.changes = slices.Insert(r.changes, n, c)
	}
	return before
}

// merged returns the records with the changes, and others that are not in the table yet, in place.
func (r *run) merged(others []record) []byte {
	changes := r.changes
	if len(others) > 0 {
		changed := run{changes: slices.Clone(r.changes)}
		for _, c := range others {
			if n, found := changed.change(c.id); found {
				changed.changes[n] = c
			} else {
				changed.changes = slices.Insert(changed.changes, n, c)
			}
		}
		changes = changed.changes
	}
	out := make([]byte, 0, len(r.records)+len(changes)*recordSize)
	rest := r.records
	for _, c := range changes {
		n := sort.Search(len(rest)/recordSize, func(n int) bool { return string(rest[n*recordSize:][:idSize]) >= string(c.id[:]) }) * recordSize
		out = append(out, rest[:n]...)
		if rest = rest[n:]; len(rest) > 0 && string(rest[:idSize]) == string(c.id[:]) {
			rest = rest[recordSize:]
		}
		if c.tag != absent {
			out = c.append(out)
		}
	}
	return append(out, rest...)
}

// count returns the number of present rows whose ids begin with a prefix.
func (t *table) count(prefix []byte) (n int) {
	var first id
	copy(first[:], prefix)
	for at := t.runOf(first); at < len(t.runs); at++ {
		r := t.runs[at]
		if string(r.from[:len(prefix)]) > string(prefix) {
			break
		}
		n += r.search(after(prefix)) - r.search(prefix)
		from, _ := r.change(first)
		for _, c := range r.changes[from:] {
			if string(c.id[:len(prefix)]) != string(prefix) {
				break
			}
			folded := run{records: r.records}
			switch was := folded.tagOf(c.id) != absent; {
			case c.tag != absent && !was:
				n++
			case c.tag == absent && was:
				n--
			}
		}
	}
	return n
}

// after returns the first byte string that is behind all with a prefix. The first byte of an id is
// the number of a family, which is never 255.
func after(prefix []byte) []byte {
	next := slices.Clone(prefix)
	for i := len(next) - 1; i >= 0; i-- {
		if next[i]++; next[i] != 0 {
			return next[:i+1]
		}
	}
	return slices.Repeat([]byte{0xff}, recordSize)
}

// apply makes the next change of the table.
func (t *table) apply(changes []record, folds []fold, now time.Time) {
	t.number++
	for _, c := range changes {
		before := t.runs[t.runOf(c.id)].set(c)
		t.past = append(t.past, past{t.number, record{c.id, before}, now})
		if t.changed != nil {
			t.changed[c.id] = struct{}{}
		}
	}
	for _, f := range folds {
		t.fold(f)
	}
	t.owe(len(changes), len(folds))
	old := 0
	for old < len(t.past) && now.Sub(t.past[old].at) > pastFor {
		t.floor = t.past[old].number
		old++
	}
	t.past = slices.Delete(t.past, 0, old)
}

// owe counts the changed rows that a fold is due for.
func (t *table) owe(changed, folds int) { t.debt = max(0, t.debt+changed-foldEvery*folds) }

// fold puts the pieces of a run in its place.
func (t *table) fold(f fold) {
	at := t.runOf(f[0].from)
	pieces := make([]*run, len(f))
	for i, p := range f {
		pieces[i] = &run{from: p.from, records: p.records, folded: t.number}
	}
	t.runs = slices.Replace(t.runs, at, at+1, pieces...)
}

// tagAt returns the tag of a row as of an earlier change. It reports whether that is still known.
func (t *table) tagAt(i id, number uint64) (tag, bool) {
	found := t.tagOf(i)
	for n := len(t.past) - 1; n >= 0 && t.past[n].number > number; n-- {
		if t.past[n].id == i {
			found = t.past[n].tag
		}
	}
	return found, number >= t.floor && number <= t.number
}

// countAt returns the number of rows whose ids begin with a prefix, as of an earlier change. It
// reports whether that is still known.
func (t *table) countAt(prefix []byte, number uint64) (int, bool) {
	n, seen := t.count(prefix), make(map[id]bool)
	for k := len(t.past) - 1; k >= 0 && t.past[k].number > number; k-- {
		p := t.past[k]
		if string(p.id[:len(prefix)]) != string(prefix) {
			continue
		}
		present, known := seen[p.id]
		if !known {
			present = t.tagOf(p.id) != absent
		}
		was := p.tag != absent
		switch {
		case was && !present:
			n++
		case !was && present:
			n--
		}
		seen[p.id] = was
	}
	return n, number >= t.floor && number <= t.number
}

// oldest returns the change that folded a run first of all runs. The journal needs no row before
// it.
func (t *table) oldest() uint64 {
	return slices.MinFunc(t.runs, func(a, b *run) int { return cmp.Compare(a.folded, b.folded) }).folded
}

// nextFolds returns the folds that come with changes that are not in the table yet. The runs that
// were folded first are folded next, so each has its turn.
func (t *table) nextFolds(changes []record) []fold {
	due := (t.debt + len(changes)) / foldEvery
	if t.number == 0 {
		due = 1 // the journal names every run
	}
	if due == 0 {
		return nil
	}
	order := make([]int, len(t.runs))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(t.runs[a].folded, t.runs[b].folded) })
	order = order[:min(due, len(order))]
	slices.Sort(order)
	own := make(map[int][]record)
	for _, c := range changes {
		at := t.runOf(c.id)
		own[at] = append(own[at], c)
	}
	var folds []fold
	for _, at := range order {
		folds = append(folds, t.runs[at].fold(own[at]))
	}
	return folds
}

// fold returns the run with its changes, and others that are not in the table yet, in pieces.
func (r *run) fold(others []record) fold {
	if len(r.changes)+len(others) == 0 {
		return fold{{from: r.from, records: r.records, same: r.folded > 0}}
	}
	merged := r.merged(others)
	n := len(merged) / recordSize
	parts := 1
	if n > maxRun {
		parts = (n + maxRun/2 - 1) / (maxRun / 2) // each has room to grow
	}
	var f fold
	for i := range parts {
		begin, end := n*i/parts*recordSize, n*(i+1)/parts*recordSize
		p := piece{from: r.from, records: merged[begin:end:end]}
		if i > 0 {
			p.from = recordAt(merged[begin:]).id
		}
		f = append(f, p)
	}
	return f
}

// fold replaces a run by one or more pieces, each a run of its own from then on.
type fold []piece

type piece struct {
	from    id
	records []byte
	same    bool // the row of the run needs no rewrite
}

// refold makes a fold of another process again.
func (t *table) refold(named []foldedRun) (fold, error) {
	at := t.runOf(named[0].from)
	if t.runs[at].from != named[0].from {
		return nil, errDamaged
	}
	rest := t.runs[at].merged(nil)
	var f fold
	for _, p := range named {
		n := int(p.len) * recordSize
		if n > len(rest) || sha256.Sum256(rest[:n]) != p.digest {
			return nil, errDamaged
		}
		f = append(f, piece{from: p.from, records: rest[:n:n]})
		rest = rest[n:]
	}
	if len(rest) > 0 {
		return nil, errDamaged
	}
	return f, nil
}
