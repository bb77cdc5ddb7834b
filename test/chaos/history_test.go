package chaos

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// action is what a client asks of the credentials of one name.
type action int

const (
	seal         action = iota // a new one
	replace                    // its values
	rotate                     // the same values, in a new version
	remove                     // it
	unseal                     // it, by its id
	unsealNewest               // the one that was created last, by the name
	list                       // those that there are
)

func (a action) String() string {
	return []string{"seal", "replace", "rotate", "remove", "unseal", "unseal newest", "list"}[a]
}

// writes tells whether an action changes anything.
func (a action) writes() bool { return a <= remove }

// call is a request. Values are never used twice, so that a value tells who wrote it.
type call struct {
	action
	name  string
	id    string // of the credential; of one that is sealed, as it is found out
	value string // that is written

	created int64 // of one that is sealed, as it is found out
}

// sight is what an answer says of a credential. The zero value of a field says nothing.
type sight struct {
	id, value string
	version   uint64
	created   int64 // in microseconds
}

// answer is what a client was told. An unknown one leaves open whether a write
// has happened, or will.
type answer struct {
	unknown bool
	unasked bool // nobody was there to be asked
	denied  bool // there is no such credential
	seen    []sight
	all     []named // by a list, of all names
}

// history is what clients asked and were told, and when.
type history struct {
	began time.Time
	mu    sync.Mutex
	all   []porcupine.Operation
}

func newHistory() *history { return &history{began: time.Now()} }

// now is the time of the history.
func (h *history) now() int64 { return time.Since(h.began).Nanoseconds() }

// record makes a call and remembers it.
func (h *history) record(client int, c call, ask func(call) answer) answer {
	called := h.now()
	a := ask(c)
	h.add(client, c, a, called, h.now())
	return a
}

// add remembers a call.
func (h *history) add(client int, c call, a answer, called, returned int64) {
	if a.unasked || a.unknown && !c.writes() {
		return
	}
	if a.unknown {
		returned = math.MaxInt64 // it may take effect at any time, or at the end, which is never
	}
	a.all = nil
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, porcupine.Operation{ClientId: client, Input: c, Output: a, Call: called, Return: returned})
}

// count returns how many calls there were and how many had no outcome.
func (h *history) count() (all, unknown int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, o := range h.all {
		if o.Output.(answer).unknown {
			unknown++
		}
	}
	return len(h.all), unknown
}

// resolved is the history with the id and the time of every credential at its
// seal, also of a seal that was not answered but whose credential was seen. It
// leaves out the writes without an outcome of which nobody saw anything: those
// did not happen, or after everything else, which is the same to everybody. Each
// one fewer halves what the judge has to look at.
func (h *history) resolved() []porcupine.Operation {
	h.mu.Lock()
	defer h.mu.Unlock()
	ids, created := make(map[string]string), make(map[string]int64)
	newest, answered, removed := make(map[string]uint64), make(map[string]uint64), make(map[string]bool)
	for _, o := range h.all {
		c, a := o.Input.(call), o.Output.(answer)
		for _, s := range a.seen {
			if s.value != "" {
				ids[s.value] = s.id
			}
			if s.created != 0 {
				created[s.id] = s.created
			}
			newest[s.id] = max(newest[s.id], s.version)
		}
		switch {
		case a.unknown || a.denied:
		case c.action == replace || c.action == rotate:
			answered[c.id]++
		case c.action == remove:
			removed[c.id] = true
		}
	}
	var all []porcupine.Operation
	for _, o := range h.all {
		c, unknown := o.Input.(call), o.Output.(answer).unknown
		switch {
		case c.action == seal:
			if c.id = ids[c.value]; c.id == "" {
				continue
			}
			c.created = created[c.id]
			o.Input = c
		case !unknown:
		case c.action == remove && removed[c.id]: // by somebody else, who was told so
			continue
		case c.action != remove && newest[c.id] <= 1+answered[c.id]: // all its versions were answered
			continue
		}
		all = append(all, o)
	}
	return all
}

// model is the vault as its clients may see it: for each name the credentials
// that there are, with their versions and values, in the order of their ids.
var model = porcupine.Model{
	Partition: func(all []porcupine.Operation) [][]porcupine.Operation {
		names := make(map[string][]porcupine.Operation)
		for _, o := range all {
			name := o.Input.(call).name
			names[name] = append(names[name], o)
		}
		return slices.Collect(maps.Values(names))
	},
	Init:  func() any { return []sight(nil) },
	Equal: func(a, b any) bool { return slices.Equal(a.([]sight), b.([]sight)) },
	Step: func(state, input, output any) (bool, any) {
		return step(state.([]sight), input.(call), output.(answer))
	},
	DescribeOperation: func(input, output any) string {
		c, a := input.(call), output.(answer)
		text := fmt.Sprintf("%s %s %s", c.action, c.id, c.value)
		switch {
		case a.unknown:
			return text + " → ?"
		case a.denied:
			return text + " → denied"
		}
		for _, s := range a.seen {
			text += fmt.Sprintf(" → %s v%d %s", s.id, s.version, s.value)
		}
		return text
	},
	DescribeState: func(state any) string { return fmt.Sprint(state) },
}

// step tells whether the answer is right in this state, and what the state is then.
func step(live []sight, c call, a answer) (bool, []sight) {
	at := slices.IndexFunc(live, func(s sight) bool { return s.id == c.id })
	then := func(now sight) (bool, []sight) {
		if !a.unknown && a.seen[0].version != now.version {
			return false, live
		}
		next := slices.Clone(live)
		next[at] = now
		return true, next
	}
	switch c.action {
	case seal:
		if at >= 0 || a.denied { // sealed twice, or refused
			return false, live
		}
		now := append(slices.Clone(live), sight{c.id, c.value, 1, c.created})
		slices.SortFunc(now, func(a, b sight) int { return cmp.Compare(a.id, b.id) })
		return a.unknown || a.seen[0].version == 1, now
	case unsealNewest:
		if a.denied || len(live) == 0 {
			return a.denied && len(live) == 0, live
		}
		newest := slices.MaxFunc(live, func(a, b sight) int {
			return cmp.Or(cmp.Compare(a.created, b.created), cmp.Compare(a.id, b.id))
		})
		return a.seen[0] == newest, live
	case list:
		same := slices.EqualFunc(live, a.seen, func(s, seen sight) bool { return s.id == seen.id && s.version == seen.version })
		return same, live
	}
	if at < 0 || a.denied {
		return at < 0 && (a.denied || a.unknown), live
	}
	now := live[at]
	switch c.action {
	case replace:
		now.value = c.value
		now.version++
		return then(now)
	case rotate:
		now.version++
		return then(now)
	case remove:
		return true, slices.Delete(slices.Clone(live), at, at+1)
	default: // unseal
		return a.seen[0] == now, live
	}
}

// linearisable tells whether there is an order of the calls in which each answer
// is right, and which agrees with the order in which they were made.
func (h *history) linearisable() (bool, porcupine.LinearizationInfo, error) {
	result, info := porcupine.CheckOperationsVerbose(model, h.resolved(), time.Minute)
	if result == porcupine.Unknown {
		return false, info, fmt.Errorf("the history could not be judged in a minute: record a shorter one")
	}
	return result == porcupine.Ok, info, nil
}

// check fails the test when the history is not linearisable, and leaves a picture
// of it. It returns a line for the transcript.
func (h *history) check(t *testing.T) string {
	t.Helper()
	ok, info, err := h.linearisable()
	switch {
	case err != nil:
		t.Error(err)
		return err.Error()
	case !ok:
		path := filepath.Join(os.TempDir(), "latticekeep-history.html")
		t.Errorf("the history is not linearisable; open %s: %v", path, porcupine.VisualizePath(model, info, path))
		return "not linearisable"
	}
	all, unknown := h.count()
	return fmt.Sprintf("%d calls, of them %d without an outcome: linearisable", all, unknown)
}
