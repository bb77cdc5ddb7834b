package audit

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// seat is a [shelf] as one of several processes uses it. Each process compares the content with
// what it has seen there itself.
type seat struct {
	*shelf
	seen []byte
}

func (s *seat) Load(ctx context.Context) (note []byte, err error) {
	note, err = s.shelf.Load(ctx)
	s.seen = note
	return note, err
}

func (s *seat) Save(_ context.Context, note []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !bytes.Equal(s.seen, s.note) {
		return fault.New(fault.Conflict, "it was changed meanwhile")
	}
	s.note, s.saved = note, append(s.saved, time.Now())
	return nil
}

// running lets each replica do what the server does with its log, in a synctest bubble.
type running struct {
	*replica
	keeper *AnchorKeeper
	said   *bytes.Buffer
	end    func()
}

func run(ctx context.Context, r *replica, shelves ...*shelf) *running {
	ctx, cancel := context.WithCancel(ctx)
	var places []AnchorPlace
	for _, s := range shelves {
		places = append(places, &seat{shelf: s})
	}
	n := &running{replica: r, said: new(bytes.Buffer)}
	logger := slog.New(slog.NewTextHandler(&lockedWriter{w: n.said}, nil))
	n.keeper = NewAnchorKeeper(r.log.Log, r.log.guard, places, AnchorOptions{Logger: logger, Now: time.Now})
	_ = n.keeper.Check(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { r.log.KeepFollowing(ctx, logger) })
	wg.Go(func() { r.log.KeepVerified(ctx, time.Hour, logger) })
	wg.Go(func() { n.keeper.Keep(ctx) })
	n.end = sync.OnceFunc(func() { cancel(); wg.Wait() })
	return n
}
