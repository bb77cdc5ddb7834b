package tokenreview

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func question(n int) (d digest) {
	binary.BigEndian.PutUint64(d[:], uint64(n))
	return d
}

func TestAMemoIsBounded(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	m := newMemo[int](func() time.Time { return now })
	remember := func(from, to int) {
		for i := from; i < to; i++ {
			m.remember(question(i), i, now.Add(time.Hour))
		}
	}
	remember(0, maxKnown)
	if v, ok := m.recall(question(7)); !ok || v != 7 || len(m.known) != maxKnown {
		t.Fatal(v, ok, len(m.known))
	}
	now = now.Add(lifetime / 2)
	remember(maxKnown, 2*maxKnown) // no answer has expired yet
	if len(m.known) > maxKnown {
		t.Errorf("%d answers", len(m.known))
	}
	if _, ok := m.recall(question(2*maxKnown - 1)); !ok {
		t.Error("the newest is forgotten")
	}
	now = now.Add(lifetime)
	remember(0, 1)
	if len(m.known) != 1 {
		t.Errorf("%d answers, of which one has not ended", len(m.known))
	}
	m.remember(question(1), 1, now)
	m.remember(question(2), 2, time.Time{})
	if len(m.known) != 1 {
		t.Error("what has ended is remembered")
	}
}

func TestACallerWhoGivesUpLeavesTheAnswerForTheNext(t *testing.T) {
	m := newMemo[string](time.Now)
	began, release := make(chan struct{}), make(chan struct{})
	leaving, leave := context.WithCancel(t.Context())
	failed := make(chan error)
	find := func(ctx context.Context) (string, time.Time, error) {
		close(began)
		<-release
		return "yes", time.Now().Add(time.Hour), ctx.Err()
	}
	go func() {
		_, err := m.ask(leaving, question(1), find)
		failed <- err
	}()
	<-began
	leave()
	if err := <-failed; !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
	close(release)
	again := func(context.Context) (string, time.Time, error) { return "asked again", time.Now().Add(time.Hour), nil }
	if v, err := m.ask(t.Context(), question(1), again); v != "yes" || err != nil {
		t.Error(v, err)
	}
}

// Whatever a token claims, only one that names our audience and a ServiceAccount is reviewed.
func FuzzParse(f *testing.F) {
	r := &Reviewer{audience: audience}
	f.Fuzz(func(t *testing.T, token string) {
		claims, ok := r.parse(token)
		if ok && (!slices.Contains(claims.Audience, audience) || !strings.HasPrefix(claims.Subject, userPrefix) ||
			claims.IssuedAt == nil || claims.ExpiresAt == nil || strings.Count(token, ".") != 2) {
			t.Errorf("%+v", claims)
		}
	})
}
