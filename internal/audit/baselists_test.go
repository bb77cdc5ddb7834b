package audit

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/go-json-experiment/json"
)

// listed is a list with its rows, and what it must contain.
type listed struct {
	t    *testing.T
	rows map[string][]byte
	root listNode
	want map[[64]byte][]byte
}

func (l *listed) trie() *listTrie {
	return &listTrie{list: listCredentials, get: func(key []byte) ([]byte, error) { return l.rows[string(key)], nil }, changed: make(map[string][]byte)}
}

func credentialItem(n, version int) listItem {
	id := fmt.Sprintf("cred_%d", n)
	text := fmt.Appendf(nil, `{"credential":%q,"current":{"hash":"","micros":0,"sequence":0},"digest":"","sequence":%d,"tenant":"ten","version":""}`, id, version)
	return listItem{itemPath(listCredentials, "ten", id), text}
}

// change applies changes, and checks that the rows are those of a list that was made at once.
func (l *listed) change(changes ...listItem) {
	l.t.Helper()
	slices.SortFunc(changes, func(a, b listItem) int { return bytes.Compare(a.path[:], b.path[:]) })
	t := l.trie()
	root, err := t.update(nil, l.root, changes)
	if err != nil {
		l.t.Fatal(err)
	}
	l.root = root
	for key, row := range t.changed {
		if l.rows[key] = row; row == nil {
			delete(l.rows, key)
		}
	}
	for _, c := range changes {
		if l.want[c.path] = c.text; c.text == nil {
			delete(l.want, c.path)
		}
	}
	var items []listItem
	for path, text := range l.want {
		items = append(items, listItem{path, text})
	}
	slices.SortFunc(items, func(a, b listItem) int { return bytes.Compare(a.path[:], b.path[:]) })
	anew := l.trie()
	if root := anew.build(nil, items, false); root != l.root || !maps.EqualFunc(anew.changed, l.rows, bytes.Equal) {
		l.t.Fatalf("%d items have %d rows, and %d when they are made at once", len(items), len(l.rows), len(anew.changed))
	}
}

// Equal lists have equal rows, however they came about, and a change touches few of them.
func TestAListHasOneForm(t *testing.T) {
	l := &listed{t: t, rows: make(map[string][]byte), want: make(map[[64]byte][]byte)}
	random := rand.New(rand.NewPCG(1, 2))
	for step := range 60 {
		var changes []listItem
		for n := range 400 {
			switch random.IntN(12) {
			case 0, 1:
				changes = append(changes, credentialItem(n, step))
			case 2:
				if step > 30 || random.IntN(3) == 0 {
					changes = append(changes, listItem{path: credentialItem(n, 0).path}) // removed, or not there
				}
			}
		}
		l.change(changes...)
	}
	for n := range 400 {
		item := credentialItem(n, 0)
		if text, err := l.trie().find(l.root, item.path); err != nil || !bytes.Equal(text, l.want[item.path]) {
			t.Fatalf("item %d is %s, want %s: %v", n, text, l.want[item.path], err)
		}
	}
	one := l.trie()
	if _, err := one.update(nil, l.root, []listItem{credentialItem(1, 99)}); err != nil || len(one.changed) > 4 {
		t.Errorf("one change touches %d of %d rows: %v", len(one.changed), len(l.rows), err)
	}
	var all []listItem
	for path := range l.want {
		all = append(all, listItem{path: path})
	}
	l.change(all...)
	if len(l.rows) > 0 || l.root != (listNode{}) {
		t.Errorf("an empty list has %d rows", len(l.rows))
	}
}

// Every bit of every row counts.
func TestARowOfAListIsTheOneThatTheBaseCommitsTo(t *testing.T) {
	l := &listed{t: t, rows: make(map[string][]byte), want: make(map[[64]byte][]byte)}
	var items []listItem
	for n := range 100 {
		items = append(items, credentialItem(n, 0))
	}
	l.change(items...)
	for key, row := range l.rows {
		for _, changed := range [][]byte{nil, {}, row[:len(row)-1], append(bytes.Clone(row), 0), flipped(row)} {
			l.rows[key] = changed
			failed := 0
			for _, it := range items {
				text, err := l.trie().find(l.root, it.path)
				if errors.Is(err, ErrBase) {
					failed++
				} else if err != nil || !bytes.Equal(text, it.text) {
					t.Fatalf("%s: %s %v", key, text, err)
				}
			}
			if failed == 0 {
				t.Errorf("%s was changed, and no item fails", key)
			}
		}
		l.rows[key] = row
	}
}

func flipped(row []byte) []byte {
	row = bytes.Clone(row)
	row[len(row)/2] ^= 1
	return row
}

// BenchmarkBaseLists says what a cut of 4,096 entries writes of the list of credentials, when it changes
// none, 40, or 4096 of them, and what the one row of earlier releases would have.
func BenchmarkBaseLists(b *testing.B) {
	for _, n := range []int{10_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			item := func(i, version int) listItem {
				c := baseCredential{
					Credential: fmt.Sprintf("cred_%026d", i), Tenant: fmt.Sprintf("ten_%026d", i%1000), Digest: strings.Repeat("a", 64), Version: "1",
					Sequence: uint64(i + version), Current: basePosition{strings.Repeat("b", 64), 1795000000000000, uint64(i)},
				}
				text, _ := json.Marshal(c)
				return listItem{itemPath(listCredentials, c.Tenant, c.Credential), text}
			}
			items, former := make([]listItem, n), 0
			for i := range items {
				items[i] = item(i, 0)
				former += len(items[i].text) + 1
			}
			slices.SortFunc(items, func(a, b listItem) int { return bytes.Compare(a.path[:], b.path[:]) })
			rows := make(map[string][]byte)
			t := &listTrie{list: listCredentials, changed: rows}
			root := t.build(nil, items, false)
			total := 0
			for _, row := range rows {
				total += len(row)
			}
			for b.Loop() {
				for _, changed := range []int{0, 40, 4096} {
					var changes []listItem
					for i := range changed {
						changes = append(changes, item(i*(n/max(changed, 1)), 1))
					}
					slices.SortFunc(changes, func(a, b listItem) int { return bytes.Compare(a.path[:], b.path[:]) })
					t := &listTrie{list: listCredentials, get: func(key []byte) ([]byte, error) { return rows[string(key)], nil }, changed: make(map[string][]byte)}
					if _, err := t.update(nil, root, changes); err != nil {
						b.Fatal(err)
					}
					size := 0
					for _, row := range t.changed {
						size += len(row)
					}
					b.ReportMetric(float64(size), fmt.Sprintf("%d-B/cut", changed))
					b.ReportMetric(float64(len(t.changed)), fmt.Sprintf("%d-rows/cut", changed))
				}
			}
			b.ReportMetric(float64(former), "former-B/cut")
			b.ReportMetric(float64(total), "rows-B")
			b.ReportMetric(float64(len(rows)), "rows")
		})
	}
}
