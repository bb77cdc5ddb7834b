package kmsplugin

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/kmsplugin/etcd"
)

// joined returns the directory of a second node that the key set of first names.
func joined(t testing.TB, c *Custody, first, url string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "cp-2")
	n, err := NewNode(t.Context(), c, dir, "cp-2", url)
	must(t, err)
	_, err = AddNode(t.Context(), c, first, n.Node)
	must(t, err)
	copyKeySet(t, first, dir)
	return dir
}

// loaded has the plugin of a node load its key set.
func loaded(t testing.TB, c *Custody, dir string) {
	t.Helper()
	k, err := load(t.Context(), c, dir, nil)
	must(t, err)
	must(t, (&plugin{dir: dir}).serveKeys(k))
}

func acknowledged(t testing.TB, c *Custody, dir string) Acknowledgement {
	t.Helper()
	loaded(t, c, dir)
	a, err := Acknowledge(t.Context(), c, dir, time.Now())
	must(t, err)
	return a
}

func TestPromotionNeedsEveryNode(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	first := initialized(t, c, url)
	second := joined(t, c, first, url)
	promote := func(given ...Acknowledgement) error {
		_, _, err := Promote(t.Context(), c, first, given, false)
		return err
	}
	refused(t, "without a pending generation", promote(), "no pending generation")

	_, err := Rotate(t.Context(), c, first, "", "")
	must(t, err)
	_, err = Acknowledge(t.Context(), c, first, time.Now())
	refused(t, "acknowledging what the plugin has not loaded", err, "has not loaded revision 3")
	copyKeySet(t, first, second)
	replaced := acknowledged(t, c, second)

	_, err = Rotate(t.Context(), c, first, "", "") // replaces the pending generation
	must(t, err)
	if s := read(t, first); len(s.Generations) != 2 || s.pending().Number != 3 {
		t.Fatalf("the pending generation was not replaced by one of a new number: %v", s.pending())
	}
	_, err = Acknowledge(t.Context(), c, first, time.Now())
	refused(t, "acknowledging what the plugin has not loaded", err, "has not loaded revision 4")
	copyKeySet(t, first, second)
	one, two := acknowledged(t, c, first), acknowledged(t, c, second)

	other := initialized(t, c, url)
	_, err = Rotate(t.Context(), c, other, "", "")
	must(t, err)
	foreign := acknowledged(t, c, other)
	inTheNameOf := func(a Acknowledgement, edit func(*Acknowledgement)) Acknowledgement {
		edit(&a)
		return a
	}
	for name, x := range map[string]struct {
		given []Acknowledgement
		words string
	}{
		"nobody":                {nil, "no acknowledgement from cp-1, cp-2"},
		"one of two":            {[]Acknowledgement{two}, "no acknowledgement from cp-1:"},
		"one twice":             {[]Acknowledgement{one, one}, "no acknowledgement from cp-2:"},
		"an earlier file":       {[]Acknowledgement{one, replaced}, "of revision 3, and this has revision 4"},
		"another key set":       {[]Acknowledgement{foreign, two}, "acknowledges key set"},
		"an unknown node":       {[]Acknowledgement{inTheNameOf(one, func(a *Acknowledgement) { a.Node = "cp-3" })}, "does not name it"},
		"another node's key":    {[]Acknowledgement{one, inTheNameOf(one, func(a *Acknowledgement) { a.Node = "cp-2" })}, "signature"},
		"an earlier file's":     {[]Acknowledgement{one, inTheNameOf(replaced, func(a *Acknowledgement) { a.Digest = two.Digest })}, "signature"},
		"another key set's":     {[]Acknowledgement{inTheNameOf(foreign, func(a *Acknowledgement) { a.KeySet, a.Digest = one.KeySet, one.Digest }), two}, "signature"},
		"another time":          {[]Acknowledgement{one, inTheNameOf(two, func(a *Acknowledgement) { a.At = a.At.Add(-time.Hour) })}, "signature"},
		"without its signature": {[]Acknowledgement{one, inTheNameOf(two, func(a *Acknowledgement) { a.Signature = nil })}, "signature"},
	} {
		refused(t, name, promote(x.given...), x.words)
	}
	var missing *MissingError
	if err := promote(one); !errors.As(err, &missing) || !slices.Equal(missing.Nodes, []string{"cp-2"}) {
		t.Errorf("missing: %v", err)
	}
	must(t, promote(two, one))
	s := read(t, first)
	if s.Revision != 5 || s.current().Number != 3 || s.Generations[0].State != Previous || s.pending() != nil {
		t.Errorf("after the promotion: revision %d, generations %v", s.Revision, s.Generations)
	}
}

func TestAGenerationIsRetiredOnceNothingNeedsIt(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	first := initialized(t, c, url)
	second := joined(t, c, first, url)
	_, err := Rotate(t.Context(), c, first, "", "")
	must(t, err)
	copyKeySet(t, first, second)
	early := acknowledged(t, c, second)
	_, _, err = Promote(t.Context(), c, first, nil, true)
	must(t, err)
	copyKeySet(t, first, second)
	one, two := acknowledged(t, c, first), acknowledged(t, c, second)
	former := read(t, first).Generations[0]
	before, err := os.ReadFile(filepath.Join(first, keySetFile))
	must(t, err)

	used := map[string]etcd.Use{}
	var failed error
	asked := 0
	retire := func(number uint64, after time.Duration, given ...Acknowledgement) (*KeySet, string, error) {
		return Retire(t.Context(), c, first, Retirement{number, given, time.Now().Add(after), func() (map[string]etcd.Use, error) {
			asked++
			return used, failed
		}})
	}
	for name, x := range map[string]struct {
		number uint64
		after  time.Duration
		given  []Acknowledgement
		words  string
	}{
		"the current one":      {2, time.Minute * 6, []Acknowledgement{one, two}, "no previous generation 2"},
		"none":                 {3, time.Minute * 6, []Acknowledgement{one, two}, "no previous generation 3"},
		"one of two":           {1, time.Minute * 6, []Acknowledgement{one}, "no acknowledgement from cp-2"},
		"before the promotion": {1, time.Minute * 6, []Acknowledgement{one, early}, "of revision 3, and this has revision 4"},
		"too soon":             {1, 4 * time.Minute, []Acknowledgement{one, two}, "try again after"},
		"too late":             {1, 61 * time.Minute, []Acknowledgement{one, two}, "older than an hour"},
	} {
		_, _, err := retire(x.number, x.after, x.given...)
		refused(t, name, err, x.words)
	}
	if asked != 0 {
		t.Error("etcd was read in vain")
	}
	failed = errors.New("no answer")
	_, _, err = retire(1, 6*time.Minute, one, two)
	refused(t, "without etcd", err, "no answer")
	failed, used[former.KeyID] = nil, etcd.Use{Objects: 3, Example: "/registry/secrets/shop/db"}
	_, _, err = retire(1, 6*time.Minute, one, two)
	refused(t, "with objects", err, "3 objects in etcd still name generation 1, such as /registry/secrets/shop/db")
	if s := read(t, first); s.Revision != 4 || len(s.Generations) != 2 {
		t.Errorf("a refusal changed the key set: revision %d", s.Revision)
	}

	delete(used, former.KeyID)
	used["2-of-another-cluster"] = etcd.Use{Objects: 9}
	_, _, err = retire(1, 6*time.Minute, one, two)
	refused(t, "with another etcd", err, "no object in etcd names the current generation")
	used[read(t, first).current().KeyID] = etcd.Use{Objects: 1}
	s, kept, err := retire(1, 6*time.Minute, one, two)
	must(t, err)
	if s.Revision != 5 || len(s.Generations) != 1 || s.current().Number != 2 {
		t.Errorf("revision %d, generations %v", s.Revision, s.Generations)
	}
	if after, err := os.ReadFile(kept); err != nil || !slices.Equal(after, before) {
		t.Errorf("the previous key set is not kept at %s: %v", kept, err)
	}
	s, err = Rotate(t.Context(), c, first, "", "")
	must(t, err)
	if s.pending().Number != 3 {
		t.Errorf("a number was used again: %d", s.pending().Number)
	}
}

func TestANodeIsRemoved(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	first := initialized(t, c, url)
	second := joined(t, c, first, url)
	_, err := RemoveNode(t.Context(), c, first, "cp-3")
	refused(t, "an unknown node", err, "names no node")
	_, err = RemoveNode(t.Context(), c, first, "cp-2")
	must(t, err)
	copyKeySet(t, first, second)
	_, err = load(t.Context(), c, second, nil)
	refused(t, "on the node that was removed", err, "does not name this node")
	_, err = RemoveNode(t.Context(), c, first, "cp-1")
	refused(t, "the last node", err, "the only one")
}

func TestForceNamesWhoIsMissing(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	first := initialized(t, c, url)
	joined(t, c, first, url)
	_, err := Rotate(t.Context(), c, first, "", "")
	must(t, err)
	s, missing, err := Promote(t.Context(), c, first, []Acknowledgement{acknowledged(t, c, first)}, true)
	must(t, err)
	if !slices.Equal(missing, []string{"cp-2"}) || s.current().Number != 2 {
		t.Errorf("missing %v, generation %d", missing, s.current().Number)
	}
}

// Every command and the plugin refuse what the node must not go back to.
func TestAnOlderOrForeignKeySetIsRefused(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	first := initialized(t, c, url)
	second := joined(t, c, first, url)
	loaded(t, c, second) // revision 2
	fork := t.TempDir()
	copyKeySet(t, first, fork)

	_, err := Rotate(t.Context(), c, first, "", "")
	must(t, err)
	copyKeySet(t, first, second)
	loaded(t, c, second) // revision 3
	_, _, err = Promote(t.Context(), c, first, nil, true)
	must(t, err)
	copyKeySet(t, first, second)
	loaded(t, c, second) // revision 4, generation 2

	older := t.TempDir()
	copyKeySet(t, fork, older) // revision 2
	for range 2 {              // revision 4, made from revision 2
		_, err = Rotate(t.Context(), c, fork, "", "")
		must(t, err)
	}
	former := read(t, first) // revision 9, generation 1
	former.Revision = 9
	former.Generations[0].State, former.Generations[1].State = Current, Pending
	backward := t.TempDir()
	must(t, os.WriteFile(filepath.Join(backward, keySetFile), forge(t, c, former), 0o600))

	copied := t.TempDir() // a copy of revision 2, changed as if what came after it had never been
	copyKeySet(t, older, copied)
	_, err = Rotate(t.Context(), c, copied, "", "")
	must(t, err)
	_, _, err = Promote(t.Context(), c, copied, nil, true)
	must(t, err)
	_, err = Rotate(t.Context(), c, copied, "", "") // revision 5, whose generation 2 has other keys
	must(t, err)

	for name, x := range map[string]struct{ from, words string }{
		"a change of an old copy": {copied, "under which this node has written"},
		"an older revision":       {older, "has revision 2, and this node has loaded revision 4: copy the newest keyset.json"},
		"another of the revision": {fork, "changed in two places"},
		"an older generation":     {backward, "has served generation 2"},
		"another key set":         {initialized(t, c, url), "this node has served"},
	} {
		copyKeySet(t, x.from, second)
		_, err := load(t.Context(), c, second, nil)
		refused(t, name, err, x.words)
		_, err = Rotate(t.Context(), c, second, "", "")
		refused(t, name+", rotate", err, x.words)
		_, err = Read(second)
		refused(t, name+", show", err, x.words)
	}
	copyKeySet(t, first, second)
	loaded(t, c, second)
}

func TestANodeIsRefused(t *testing.T) {
	c, url := newCustody(t), newKMS(t)
	first := initialized(t, c, url)
	stranger := filepath.Join(t.TempDir(), "cp-2")
	n, err := NewNode(t.Context(), c, stranger, "cp-2", url)
	must(t, err)
	_, err = load(t.Context(), c, stranger, nil)
	refused(t, "no key set", err, "kms-plugin init, or copy keyset.json")
	copyKeySet(t, first, stranger)
	_, err = load(t.Context(), c, stranger, nil)
	refused(t, "a node that the key set does not name", err, "kms-plugin add-node")

	namesake := filepath.Join(t.TempDir(), "cp-1")
	_, err = NewNode(t.Context(), c, namesake, "cp-1", url)
	must(t, err)
	copyKeySet(t, first, namesake)
	_, err = load(t.Context(), c, namesake, nil)
	refused(t, "a node of that name with another key", err, "does not name this node")

	bare := t.TempDir()
	copyKeySet(t, first, bare)
	_, err = load(t.Context(), c, bare, nil)
	refused(t, "no identity", err, "kms-plugin node --dir")

	_, err = AddNode(t.Context(), c, first, n.Node)
	must(t, err)
	_, err = AddNode(t.Context(), c, first, n.Node)
	refused(t, "a node twice", err, "names node cp-2 already")
	again, err := NewNode(t.Context(), c, stranger, "cp-2", url)
	must(t, err)
	if !bytes.Equal(again.Node.PublicKey, n.Node.PublicKey) {
		t.Error("the identity of the node is not printed again")
	}
	_, err = NewNode(t.Context(), c, stranger, "cp-3", url)
	refused(t, "a second identity", err, "has an identity")
	_, err = NewNode(t.Context(), c, filepath.Join(t.TempDir(), "x"), "CP 3", url)
	refused(t, "a bad name", err, "no name of a node")
	_, err = Init(t.Context(), c, first, "cp-1", url, envelope.MLKEM768)
	refused(t, "a second key set", err, "has a key set")
	_, err = Init(t.Context(), c, filepath.Join(t.TempDir(), "x"), "cp-1", url, "RSA")
	refused(t, "another algorithm", err, "unknown algorithm")
	_, err = Rotate(t.Context(), c, first, "azurekeyvault://x", "")
	refused(t, "another KMS", err, "azurekeyvault")
}
