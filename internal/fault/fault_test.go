package fault

import (
	"errors"
	"fmt"
	"testing"
)

func TestKindSurvivesWrapping(t *testing.T) {
	cause := errors.New("disk: secret-path")
	err := fmt.Errorf("sealing: %w", Wrap(Unavailable, "the store could not be written", cause))
	if Of(err) != Unavailable || !errors.Is(err, Unavailable) || !errors.Is(err, cause) {
		t.Fatalf("kind or cause lost: %v", err)
	}
	if errors.Is(err, NotFound) {
		t.Fatal("an error has one kind")
	}
	if got := Message(err); got != "the store could not be written" {
		t.Fatalf("message %q", got)
	}
}

func TestAnOutageHasOneOfFewReasons(t *testing.T) {
	err := fmt.Errorf("sealing: %w", Outage(ReasonKMS, "no keys", Outage(ReasonStore, "no store", nil)))
	if ReasonOf(err) != ReasonKMS || Of(err) != Unavailable || Message(err) != "no keys" {
		t.Error(ReasonOf(err), Of(err), Message(err))
	}
	for _, none := range []error{nil, errors.New("x"), New(Unavailable, "x")} {
		if r := ReasonOf(none); r != ReasonOther {
			t.Errorf("%v: %s", none, r)
		}
	}
}

func TestNothingIsSaidTwice(t *testing.T) {
	err := Outage(ReasonLog, Unavailable.Error(), Wrap(Unavailable, Unavailable.Error(), errors.New("the database lacks entries")))
	if got := err.Error(); got != "service temporarily unavailable: the database lacks entries" {
		t.Error(got)
	}
}

func TestTheOutermostKindDecides(t *testing.T) {
	err := Wrap(Forbidden, "access denied", New(NotFound, "no such row"))
	if Of(err) != Forbidden || Message(err) != "access denied" {
		t.Fatalf("%v %q", Of(err), Message(err))
	}
}

func TestAnUnclassifiedErrorShowsNothing(t *testing.T) {
	err := errors.New("pq: password authentication failed")
	if Of(err) != Internal || Message(err) != "internal error" {
		t.Fatalf("%v %q", Of(err), Message(err))
	}
	if Of(NotFound) != NotFound || Message(NotFound) != "not found" {
		t.Fatal("a bare kind keeps its own message")
	}
	if Kind(200).Error() != "internal error" {
		t.Fatal("an unknown kind is internal")
	}
}
