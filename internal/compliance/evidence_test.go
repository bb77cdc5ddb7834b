package compliance_test

import (
	"bytes"
	"iter"
	"reflect"
	"slices"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/story"
)

func TestInterruptedFoldsComeToTheSame(t *testing.T) {
	for _, tell := range []func(*story.Story) *story.Story{(*story.Story).Good, (*story.Story).Bad} {
		s, straight := pure(t)
		tell(s)
		e := compliance.NewEvidence()
		s = &story.Story{Clock: story.Start, Versions: make(map[string]int)}
		s.Record = func(event audit.Event) {
			check(t, e.Add(story.EntryOf(event, s.Clock, uint64(e.Count)+1)))
			b, err := e.Encode()
			check(t, err)
			e, err = compliance.DecodeEvidence(b)
			check(t, err)
		}
		tell(s)
		a, err := straight.Encode()
		check(t, err)
		b, err := e.Encode()
		check(t, err)
		if !bytes.Equal(a, b) {
			t.Errorf("interrupted:\n%s\nstraight:\n%s", b, a)
		}
	}
}

func TestFoldTakesOneTenantsEntriesInOrder(t *testing.T) {
	read := audit.Event{Type: audit.AuditRead, Principal: story.Owner}
	other := read
	other.Principal.Tenant = story.Theirs
	for name, entries := range map[string][]*audit.Entry{
		"not from the first": {story.EntryOf(read, story.Start, 2)},
		"with a gap":         {story.EntryOf(read, story.Start, 1), story.EntryOf(read, story.Start, 3)},
		"the same again":     {story.EntryOf(read, story.Start, 1), story.EntryOf(read, story.Start, 1)},
		"another tenant's":   {story.EntryOf(read, story.Start, 1), story.EntryOf(other, story.Start, 2)},
	} {
		if _, err := compliance.Derive(catalogues(t)[compliance.SOC2], sequence(entries), 0); fault.Of(err) != fault.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	one := []*audit.Entry{story.EntryOf(read, story.Start, 1)}
	for _, head := range []uint64{9, 11} {
		if _, err := compliance.Derive(catalogues(t)[compliance.SOC2], sequence(one), head); fault.Of(err) != fault.NotFound {
			t.Errorf("head %d: %v", head, err)
		}
	}
	if _, err := compliance.Derive(catalogues(t)[compliance.SOC2], sequence(nil), 0); fault.Of(err) != fault.NotFound {
		t.Error(err)
	}
}

func sequence(entries []*audit.Entry) iter.Seq2[*audit.Entry, error] {
	return func(yield func(*audit.Entry, error) bool) {
		for _, e := range entries {
			if !yield(e, nil) {
				return
			}
		}
	}
}

func TestStateSurvivesItsAttributes(t *testing.T) {
	s, _ := pure(t)
	good := s.GoodState()
	slices.Sort(good.Suites)
	good.Archive = compliance.ArchiveUnreadable
	if got := compliance.ParseState(good.Attributes()); !reflect.DeepEqual(got, good) || !got.Same(good) {
		t.Errorf("%+v\n%+v", got, good)
	}
	if got := compliance.ParseState(compliance.State{}.Attributes()); !got.Same(compliance.State{}) {
		t.Errorf("%+v", got)
	}
	for name := range good.Attributes() {
		a := good.Attributes()
		a[name] = "?"
		if compliance.ParseState(a).Same(good) && name != compliance.AttributeSuites {
			t.Errorf("%s is not read", name)
		}
	}
	if r, _ := compliance.ParseState(nil).Retained(compliance.YearDays); r != compliance.Fail {
		t.Error("a state that says nothing of retention keeps for ever")
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
