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

// action is a client's operation on the credentials of one name.
type action int

const (
	seal         action = iota // create a credential
	replace                    // replace its values
	rotate                     // store the same values in a new version
	remove                     // delete it
	unseal                     // unseal it by its id
	unsealNewest               // unseal the newest credential of the name
	list                       // list the existing credentials
)

func (a action) String() string {
	return []string{"seal", "replace", "rotate", "remove", "unseal", "unseal newest", "list"}[a]
}

// writes reports whether an action changes anything.
func (a action) writes() bool { return a <= remove }

// call is a request. No value is used twice, so a value identifies its writer.
type call struct {
	action
	name  string
	id    string // id of the credential; for a seal, as it is found out
	value string // value to write

	created int64 // creation time; for a seal, as it is found out
}

// sight is the part of an answer that describes a credential. A zero field says nothing.
type sight struct {
	id, value string
	version   uint64
	created   int64 // microseconds
}

// answer is the result that a client received. With unknown set it is open whether the write
// happened or will happen.
type answer struct {
	unknown bool
	unasked bool // no server could be reached
	denied  bool // no such credential
	seen    []sight
	all     []named // the credentials of all names, from a list
}

// history records the calls and answers of clients, with their times.
type history struct {
	began time.Time
	mu    sync.Mutex
	all   []porcupine.Operation
}

func newHistory() *history { return &history{began: time.Now()} }

// now returns the time since the history began, in nanoseconds.
func (h *history) now() int64 { return time.Since(h.began).Nanoseconds() }

// record makes a call and records it.
func (h *history) record(client int, c call, ask func(call) answer) answer {
	called := h.now()
	a := ask(c)
	h.add(client, c, a, called, h.now())
	return a
}

// add records a call.
func (h *history) add(client int, c call, a answer, called, returned int64) {
	if a.unasked || a.unknown && !c.writes() {
		return
	}
	if a.unknown {
		returned = math.MaxInt64 // it may take effect at any time, or never
	}
	a.all = nil
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, porcupine.Operation{ClientId: client, Input: c, Output: a, Call: called, Return: returned})
}

// count returns the number of calls and the number without an outcome.
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

// resolved returns the history with the id and the creation time in every seal. This includes a
// seal without an answer whose credential was seen later. It omits the writes without an outcome
// that nobody saw: they did not happen, or happened after everything else, which looks the same to
// every client. Each omitted write halves the work of the checker. A seal that was asked for again, after
// no answer, is one seal from the first call on, because it has an idempotency key.
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
	seals := make(map[string]int) // by value, the place in all
	for _, o := range h.all {
		c, unknown := o.Input.(call), o.Output.(answer).unknown
		switch {
		case c.action == seal:
			if c.id = ids[c.value]; c.id == "" {
				continue
			}
			c.created = created[c.id]
			o.Input = c
			if i, again := seals[c.value]; again && all[i].Output.(answer).unknown {
				o.Call = all[i].Call
				all[i] = o
				continue
			}
			seals[c.value] = len(all)
		case !unknown:
		case c.action == remove && removed[c.id]: // another client got the answer that it removed it
			continue
		case c.action != remove && newest[c.id] <= 1+answered[c.id]: // all its versions were answered
			continue
		}
		all = append(all, o)
	}
	return all
}

// model is the vault as clients may see it. For each name it has the existing credentials with
// their versions and values, ordered by id.
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

// step reports whether the answer is right in this state, and returns the next state.
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
		if at >= 0 || a.denied { // a second seal, or a refusal
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

// linearisable reports whether the calls can be ordered so that each answer is right and the order
// agrees with the calls' times.
func (h *history) linearisable() (bool, porcupine.LinearizationInfo, error) {
	const patience = 10 * time.Minute // seconds on an idle machine
	result, info := porcupine.CheckOperationsVerbose(model, h.resolved(), patience)
	if result == porcupine.Unknown {
		return false, info, fmt.Errorf("the history could not be judged in %s: record a shorter one", patience)
	}
	return result == porcupine.Ok, info, nil
}

// check fails the test if the history is not linearisable, and writes a picture of it. It returns a
// line for the transcript.
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

// A seal without an answer that is asked for again makes one credential.
func TestASealThatIsRepeatedIsOneSeal(t *testing.T) {
	first := call{action: seal, name: "n", value: "v"}
	made := answer{seen: []sight{{id: "a", version: 1, created: 1}}}
	h := newHistory()
	h.add(0, first, answer{unknown: true}, 1, 2)
	h.add(0, first, made, 3, 4)
	h.add(0, call{action: unseal, name: "n", id: "a"}, answer{seen: []sight{{"a", "v", 1, 1}}}, 5, 6)
	if ok, _, err := h.linearisable(); err != nil || !ok {
		t.Error("a repeated seal contradicts the history:", h.resolved(), err)
	}
	h.add(0, call{action: list, name: "n"}, answer{seen: nil}, 7, 8)
	if ok, _, err := h.linearisable(); err != nil || ok {
		t.Error("a credential that was made and is gone does not:", h.resolved(), err)
	}
}
