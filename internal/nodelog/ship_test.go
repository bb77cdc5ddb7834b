package nodelog

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// deployment records ranges as a server does.
type deployment struct {
	t        *testing.T
	receipts map[string]Receipt // by chain
	recorded []Range
	calls    int
	meet     func() // runs before the next call is answered
}

var errLost = errors.New("the answer was lost")

func (d *deployment) ship(_ context.Context, publicKey []byte, first, last *Entry) (Receipt, error) {
	d.calls++
	if meet := d.meet; meet != nil {
		d.meet = nil
		meet()
	}
	key, err := dualsig.ParsePublicKey(publicKey)
	must(d.t, err)
	must(d.t, errors.Join(first.Verify(key), last.Verify(key)))
	r := d.receipts[first.Chain]
	r.Recorded = false
	switch {
	case first.Sequence <= r.Sequence:
		return r, nil
	case first.Sequence == r.Sequence+1 && r.Sequence > 0 && first.Previous != r.Hash:
		return Receipt{}, errors.New("the previous hash is another one")
	}
	d.recorded = append(d.recorded, Range{first.Chain, first.Sequence, last.Sequence, first.Hash(), last.Hash(), last.Sequence - first.Sequence + 1})
	r = Receipt{last.Sequence, last.Hash(), true}
	d.receipts[first.Chain] = r
	return r, nil
}

func (d *deployment) loses(ctx context.Context, publicKey []byte, first, last *Entry) (Receipt, error) {
	_, err := d.ship(ctx, publicKey, first, last)
	return Receipt{}, errors.Join(errLost, err)
}

func newDeployment(t *testing.T) *deployment {
	return &deployment{t: t, receipts: map[string]Receipt{}}
}

func (n *node) ship(ship Ship) (Range, error) {
	return ShipAll(n.t.Context(), n.dir, n.key.Public().Bytes(), ship)
}

// ships fails unless the entries of this range are shipped; 0, 0: none.
func (n *node) ships(d *deployment, from, to uint64) {
	n.t.Helper()
	r, err := n.ship(d.ship)
	must(n.t, err)
	if r.From != from || r.To != to {
		n.t.Errorf("entries %d to %d were shipped, want %d to %d", r.From, r.To, from, to)
	}
}

// recordedAll fails unless the ranges of a deployment are whole, one after another, and no two have an
// entry in common.
func (d *deployment) recordedAll(until uint64) {
	d.t.Helper()
	next := uint64(1)
	for _, r := range d.recorded {
		if r.From != next || r.Count != r.To-r.From+1 {
			d.t.Errorf("the deployment has recorded %+v", d.recorded)
		}
		next = r.To + 1
	}
	if next != until+1 {
		d.t.Errorf("the deployment has entries until %d, want %d", next-1, until)
	}
}

func TestWhatIsNewIsShippedOnce(t *testing.T) {
	n, d := newNode(t, 8), newDeployment(t)
	n.append(6)
	n.ships(d, 1, 7)
	n.ships(d, 0, 0)
	if d.calls != 2 {
		t.Errorf("%d calls, want 2: the deployment says that there is nothing new", d.calls)
	}
	n.append(5) // what was shipped makes room
	n.ships(d, 8, 12)
	d.recordedAll(12)
	if s := n.verify(); d.recorded[1].LastHash != s.LastHash || d.recorded[1].Chain != s.Chain {
		t.Errorf("recorded %+v of the log %+v", d.recorded, s)
	}
}

func TestAnEmptyLogIsNotShipped(t *testing.T) {
	key := newKey(t, 7)
	d := newDeployment(t)
	if r, err := ShipAll(t.Context(), t.TempDir(), key.Public().Bytes(), d.ship); err != nil || r != (Range{}) || d.calls > 0 {
		t.Errorf("%+v, %v after %d calls", r, err, d.calls)
	}
}

func TestALostAnswerHasNothingRecordedTwice(t *testing.T) {
	n, d := newNode(t, 0), newDeployment(t)
	n.append(3)
	if _, err := n.ship(d.loses); !errors.Is(err, errLost) {
		t.Fatal(err)
	}
	n.append(2)
	n.ships(d, 5, 6)
	d.recordedAll(6)
	must(t, os.Remove(filepath.Join(n.folder(), shippedFile)))
	n.ships(d, 0, 0)
	d.recordedAll(6)
	if s := readShipped(n.folder()); s.Sequence != 6 {
		t.Errorf("the position is %+v", s)
	}
}

func TestTwoShipsAtOnceRecordNothingTwice(t *testing.T) {
	n, d := newNode(t, 0), newDeployment(t)
	n.append(3)
	d.meet = func() {
		n.append(1)
		n.ships(d, 1, 5)
	}
	n.ships(d, 0, 0)
	d.recordedAll(5)
}

// position returns the receipt of the chain of a node.
func (d *deployment) position(n *node) Receipt { return d.receipts[n.verify().Chain] }

func TestALogThatWasChangedAfterItWasShippedIsFound(t *testing.T) {
	for what, withRecord := range map[string]bool{"shipped.json": true, "the answer": false} {
		n, d := newNode(t, 0), newDeployment(t)
		n.append(3)
		fork := readFile(t, n.newest())
		n.append(2)
		n.ships(d, 1, 6)
		position := d.position(n)
		record := readFile(t, filepath.Join(n.folder(), shippedFile))

		// Somebody with the node's key goes back to entry 4 and writes others.
		writeFile(t, n.newest(), fork)
		if !withRecord {
			must(t, os.Remove(filepath.Join(n.folder(), shippedFile)))
		}
		_, err := n.ship(d.ship)
		refused(t, what+": a shorter log", err, "changed after it was shipped: it ends with entry 4, and the deployment has entry 6 with hash "+position.Hash)
		// A start that finds shipped.json sets this log aside.
		_ = os.Remove(filepath.Join(n.folder(), shippedFile))
		n.restart()
		if withRecord {
			writeFile(t, filepath.Join(n.folder(), shippedFile), record)
		}
		for _, more := range []int{1, 3} { // entry 6 is the last one, or is not
			n.append(more)
			here := entries(t, n)[5].Hash()
			_, err = n.ship(d.ship)
			refused(t, what+": another entry 6", err, "entry 6 has hash "+here+" here")
			refused(t, what+": another entry 6", err, position.Hash)
		}
		if len(d.recorded) != 1 {
			t.Errorf("%s: the deployment has recorded %+v", what, d.recorded)
		}
		_, err = os.Stat(filepath.Join(n.folder(), shippedFile))
		if withRecord && string(readFile(t, filepath.Join(n.folder(), shippedFile))) != string(record) || !withRecord && err == nil {
			t.Errorf("%s: shipped.json was written", what)
		}
	}
}

// Promise: where to begin is what the deployment says, not a file that whoever changes the log can change too.
func TestAForkIsFoundWhateverShippedJSONSays(t *testing.T) {
	n, d := newNode(t, 0), newDeployment(t)
	n.append(3)
	fork := readFile(t, n.newest())
	n.append(2)
	n.ships(d, 1, 6)
	writeFile(t, n.newest(), fork)
	must(t, os.Remove(filepath.Join(n.folder(), shippedFile)))
	n.restart()
	n.append(5)
	behind := entries(t, n)[6]
	must(t, (&shipped{formatVersion, behind.Chain, behind.Sequence, behind.Hash()}).write(n.folder()))
	_, err := n.ship(d.ship)
	refused(t, "a position behind the fork", err, "changed after it was shipped: entry 6 has hash")
	if len(d.recorded) != 1 {
		t.Errorf("recorded %+v", d.recorded)
	}
}

// Promise: a deployment that never records ends the call.
func TestADeploymentThatNeverRecordsIsGivenUp(t *testing.T) {
	n, calls := newNode(t, 0), 0
	n.append(9)
	_, err := n.ship(func(_ context.Context, _ []byte, first, _ *Entry) (Receipt, error) {
		calls++
		return Receipt{Sequence: first.Sequence, Hash: first.Hash()}, nil
	})
	refused(t, "one entry a call", err, "has recorded nothing in 4 requests")
	if calls != maxRounds {
		t.Errorf("%d calls", calls)
	}
}

func entries(t *testing.T, n *node) (all []*Entry) {
	t.Helper()
	w := &walk{key: n.key.Public(), visit: func(e *Entry) error { all = append(all, e); return nil }}
	must(t, w.readFolder(n.folder(), func(*os.File) error { return nil }))
	return all
}

func TestOnlyWhatVerifiesIsShipped(t *testing.T) {
	n, d := newNode(t, 0), newDeployment(t)
	n.append(4)
	b := readFile(t, n.newest())
	at := len(b) / 2
	b[at] ^= 1
	writeFile(t, n.newest(), b)
	if _, err := n.ship(d.ship); err == nil || d.calls > 0 {
		t.Errorf("a damaged log: %v after %d calls", err, d.calls)
	}
}

func TestAGapIsShippedAndAnotherChainFromItsStart(t *testing.T) {
	n, d := newNode(t, 8), newDeployment(t)
	n.append(3)
	n.ships(d, 1, 4)
	n.append(4)
	must(t, os.RemoveAll(filepath.Join(n.folder(), fileName(5))))
	n.log.perFile = 4
	n.append(1) // the newest file is gone: entry 9 begins another
	must(t, os.Remove(filepath.Join(n.folder(), fileName(1))))
	n.ships(d, 9, 9)

	n.log.Close()
	must(t, os.Remove(n.newest()))
	n.open()
	n.ships(d, 1, 1)
	if len(d.receipts) != 2 {
		t.Errorf("the deployment has %d chains, want 2", len(d.receipts))
	}
}

func TestAnAnswerThatCannotBeIsAnError(t *testing.T) {
	for what, x := range map[string]struct {
		receipt Receipt
		words   string
	}{
		"nothing recorded":  {Receipt{}, "has recorded nothing"},
		"another hash":      {Receipt{4, Genesis, true}, "was sent entries until 4"},
		"another sequence":  {Receipt{3, Genesis, true}, "was sent entries until 4"},
		"a position beyond": {Receipt{9, Genesis, false}, "it ends with entry 4"},
		"a position inside": {Receipt{2, Genesis, false}, "entry 2 has hash"},
	} {
		n := newNode(t, 0)
		n.append(3)
		_, err := n.ship(func(context.Context, []byte, *Entry, *Entry) (Receipt, error) { return x.receipt, nil })
		refused(t, what, err, x.words)
		if slices.Contains(names(t, n.folder()), shippedFile) {
			t.Errorf("%s: the position was written", what)
		}
	}
}

func names(t *testing.T, folder string) (all []string) {
	t.Helper()
	found, err := os.ReadDir(folder)
	must(t, err)
	for _, f := range found {
		all = append(all, f.Name())
	}
	return all
}
