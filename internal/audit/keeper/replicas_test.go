package keeper

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/authz"
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

// Replicas whose clocks differ by minutes write, follow and verify one log at the same time without
// an error.
func TestReplicasKeepOneLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		place := &shelf{name: "place"}
		var all []*running
		for i, r := range audittest.NewReplicas(t, 3) {
			r.Clock = func() time.Time { return time.Now().Add(time.Duration(i-1) * 5 * time.Minute) }
			all = append(all, run(t.Context(), r, place))
			time.Sleep(3 * time.Second) // synctest clock
		}
		for i := range 300 {
			all[i%3].Append(audit.AuditRead, []authz.TenantID{audittest.TenantA, audittest.TenantB}[i/3%2])
			time.Sleep(100 * time.Millisecond) // synctest clock
		}
		time.Sleep(2 * time.Minute) // synctest clock
		synctest.Wait()
		written := uint64(0)
		for _, r := range all {
			if lag := r.Log.Lag(); lag > 0 {
				t.Error("the lag is", lag)
			}
			if p := r.Log.Proof(); p.Status != verify.ProofVerified || p.VerifiedTo != 302 {
				t.Errorf("%+v", p)
			}
			_, counts, err := r.Log.Progress(t.Context())
			if err != nil {
				t.Error(err)
			}
			for _, n := range counts {
				written += n
			}
			said := strings.ReplaceAll(r.said.String(), "level=WARN msg=\"the anchor of the audit log keeps nothing", "")
			if strings.Contains(said, "level=WARN") || strings.Contains(said, "level=ERROR") {
				t.Error(said)
			}
			r.end()
		}
		report := all[0].Verified(t)
		if report.Entries != 302 || report.Sequence != 302 || written != 302 { // including the entry of the anchor's start
			t.Errorf("%d entries up to %d, of which %d were counted", report.Entries, report.Sequence, written)
		}
		checkpoints := all[0].Checkpoints(t, all[0].Log.Signer.Public())
		if n := len(checkpoints); n < 25 || n > 100 {
			t.Errorf("%d checkpoints in 30 s", n)
		}
		var before time.Time
		for i, at := range place.saved {
			if i > 0 && at.Sub(before) < 10*time.Second {
				t.Errorf("%v between two writes of the place", at.Sub(before))
			}
			before = at
		}
		if n := len(place.saved); n < 3 || n > 6 {
			t.Errorf("%d writes of the place", n)
		}
		if c, err := audit.ParseCheckpoint(place.kept(), all[0].Log.Signer.Public()); err != nil || c.Sequence != 302 {
			t.Errorf("the place keeps %+v, %v", c, err)
		}
	})
}

// The other replicas follow and anchor the entries of a replica that is gone.
func TestTheOthersFollowWhatADeadReplicaWrote(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		place := &shelf{name: "place"}
		replicas := audittest.NewReplicas(t, 3)
		first := run(t.Context(), replicas[0], place)
		time.Sleep(30 * time.Second) // synctest clock
		first.end()
		others := []*running{run(t.Context(), replicas[1], place), run(t.Context(), replicas[2], place)}
		time.Sleep(30 * time.Second) // synctest clock
		replicas[0].Append(audit.AuditRead, audittest.TenantA)
		time.Sleep(time.Second) // synctest clock
		synctest.Wait()
		if _, c, err := others[1].Log.Chain.NewestCheckpoint(t.Context()); err != nil || c.Sequence != 3 {
			t.Errorf("%+v, %v", c, err)
		}
		time.Sleep(20 * time.Second) // synctest clock
		synctest.Wait()
		if c, err := audit.ParseCheckpoint(place.kept(), first.Log.Signer.Public()); err != nil || c.Sequence != 3 {
			t.Errorf("the place keeps %+v, %v", c, err)
		}
		for _, r := range others {
			r.end()
		}
	})
}

// An older copy of the database replaces the newest one under running replicas. Each replica finds
// out at its next commit or look, and one acceptance lets all of them continue.
func TestARollbackUnderRunningReplicas(t *testing.T) {
	for name, c := range map[string]struct {
		forked bool // a new replica wrote to the older copy before the others looked
		more   bool // the loss is larger than the accepting replica knows
		wrote  bool // each replica finds out at a commit
		back   bool // the newest copy is restored
		place  bool // an anchor knows of the loss, too
	}{
		"found by commits":                      {wrote: true},
		"found by looking":                      {},
		"that a place knows too":                {place: true, wrote: true},
		"and another log in its place":          {forked: true, wrote: true},
		"of which the accepting knows less":     {more: true},
		"other entries, of which it knows less": {more: true, forked: true},
		"that is undone":                        {back: true, wrote: true, place: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				place := &shelf{name: "place"}
				var places []*shelf
				if c.place {
					places = append(places, place)
				}
				var all []*running
				for _, r := range audittest.NewReplicas(t, 3) {
					all = append(all, run(t.Context(), r, places...))
				}
				b := all[0].Table
				for i := range 30 {
					all[i%3].Append(audit.AuditRead, audittest.TenantA)
				}
				time.Sleep(time.Minute) // synctest clock
				synctest.Wait()
				older := b.Read()
				for i := range 30 {
					all[i%3].Append(audit.AuditRead, audittest.TenantB)
				}
				time.Sleep(time.Minute) // synctest clock
				synctest.Wait()
				if c.more { // the first replica does not see this
					all[2].Append(audit.AuditRead, audittest.TenantA)
					all[2].Append(audit.AuditRead, audittest.TenantA)
				}
				newest := b.Read()
				b.Put(older)
				if c.forked {
					stranger := b.Replica(t, all[0].Log.Signer)
					for range 70 {
						stranger.Append(audit.AuditRead, audittest.TenantB)
					}
				}
				before := b.Read()
				for _, r := range all {
					if !c.wrote {
						break
					}
					var lost *audit.RollbackError
					if err := r.Tries(audit.AuditRead, audittest.TenantA); !errors.Is(err, fault.Unavailable) || !errors.As(err, &lost) {
						t.Errorf("it is written to: %v", err)
					}
					_ = r.Refused() // checks the halt
				}
				time.Sleep(time.Second) // synctest clock
				if c.place {
					time.Sleep(10 * time.Second) // synctest clock; time for the next look
				}
				synctest.Wait()
				if b.Read() != before {
					t.Error("something was written")
				}
				from := uint64(32)
				if c.place {
					from++
				}
				if c.forked {
					from = 0
				}
				for _, r := range all {
					if lost := r.Refused(); lost != nil && (lost.LostFrom != from || lost.LostTo < 61) {
						t.Errorf("%+v", lost)
					}
					if _, err := r.Log.Follow(t.Context()); err == nil {
						t.Error("a checkpoint is signed")
					}
					if p, err := r.Log.Verify(t.Context()); err != nil || p.Status != verify.ProofBroken {
						t.Errorf("%+v, %v", p, err)
					}
				}
				if c.back {
					b.Put(newest)
				} else if _, err := all[0].Log.AcceptRollback(t.Context(), audittest.Admin(), "a test"); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second) // synctest clock
				if c.back && c.place {
					time.Sleep(10 * time.Second) // synctest clock; time for the next look at the anchor
				}
				synctest.Wait()
				for _, r := range all {
					if err := r.Log.Ready(t.Context()); err != nil {
						t.Error("it is refused still:", err)
						continue
					}
					r.Append(audit.AuditRead, audittest.TenantA)
					r.Append(audit.AuditRead, audittest.TenantB)
				}
				time.Sleep(time.Second) // synctest clock
				synctest.Wait()
				for _, r := range all {
					if lag := r.Log.Lag(); lag != 0 {
						t.Error("a second later the lag is", lag)
					}
				}
				time.Sleep(2 * time.Minute) // synctest clock
				synctest.Wait()
				want := 1
				if c.back {
					want = 0
				}
				report := b.Verified(t)
				if len(report.Rollbacks) != want {
					t.Errorf("%+v", report.Rollbacks)
				}
				for _, r := range all {
					if p := r.Log.Proof(); p.Status != verify.ProofVerified || p.VerifiedTo != report.Sequence {
						t.Errorf("%+v, the head is at %d", p, report.Sequence)
					}
					if lag := r.Log.Lag(); lag != 0 {
						t.Error("the lag is", lag)
					}
					if err := r.Log.HaltedBy(); err != nil {
						t.Error("it is refused again:", err)
					}
					if n := strings.Count(r.said.String(), "level=ERROR"); n > 4 {
						t.Errorf("%d errors are logged: %s", n, r.said)
					}
					r.end()
				}
				b.Checkpoints(t, all[0].Log.Signer.Public())
			})
		})
	}
}

// One acceptance covers all losses known at that moment, whichever replica found them.
func TestAnAcceptanceAsksWhatPlacesKnow(t *testing.T) {
	replicas := audittest.NewReplicas(t, 2)
	a, b, place := replicas[0], replicas[1], &shelf{name: "place"}
	older := a.Read()
	for range 20 {
		a.Append(audit.AuditRead, audittest.TenantA)
	}
	note := func() []byte {
		if _, err := a.Log.Follow(t.Context()); err != nil {
			t.Fatal(err)
		}
		return newestOf(t, a.Log)
	}
	_ = note()
	if _, err := b.Log.Follow(t.Context()); err != nil { // b has seen the log up to 21
		t.Fatal(err)
	}
	a.Append(audit.AuditRead, audittest.TenantA)
	place.put(note()) // checkpoint at 22
	a.Put(older)
	NewAnchorKeeper(b.Log.Log, b.Log.Guard, []Anchor{place}, AnchorOptions{Logger: quiet()})
	r, err := b.Log.AcceptRollback(t.Context(), audittest.Admin(), "a test") // no replica has looked before
	if err != nil || r.LostFrom != 2 || r.LostTo != 22 {
		t.Errorf("%+v, %v", r, err)
	}
	if err := a.Tries(audit.AuditRead, audittest.TenantA); err != nil {
		t.Error(err)
	}
	// The same for a loss that only this process has seen.
	a.Put(older)
	if r, err := a.Log.AcceptRollback(t.Context(), audittest.Admin(), "a test"); err != nil || r.LostFrom != 2 || r.LostTo < 23 || r.Epoch != 3 {
		t.Errorf("%+v, %v", r, err)
	}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
