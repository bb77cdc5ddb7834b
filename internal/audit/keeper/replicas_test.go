package keeper

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/audittest"
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
	*audittest.Replica
	keeper *AnchorKeeper
	said   *bytes.Buffer
	end    func()
}

func run(ctx context.Context, r *audittest.Replica, shelves ...*shelf) *running {
	ctx, cancel := context.WithCancel(ctx)
	var places []Anchor
	for _, s := range shelves {
		places = append(places, &seat{shelf: s})
	}
	n := &running{Replica: r, said: new(bytes.Buffer)}
	logger := slog.New(slog.NewTextHandler(&audittest.LockedWriter{W: n.said}, nil))
	n.keeper = NewAnchorKeeper(r.Log.Log, r.Log.Guard, places, AnchorOptions{Logger: logger, Now: time.Now})
	_ = n.keeper.Check(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { r.Log.KeepFollowing(ctx, logger) })
	wg.Go(func() { r.Log.KeepVerified(ctx, time.Hour, logger) })
	wg.Go(func() { n.keeper.Keep(ctx) })
	n.end = sync.OnceFunc(func() { cancel(); wg.Wait() })
	return n
}
