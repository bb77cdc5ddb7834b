package keeper

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// shelf is an [Anchor] in memory that compares before it writes, as a ConfigMap does.
type shelf struct {
	name string

	mu     sync.Mutex
	note   []byte
	aside  [][]byte
	seen   []byte // the note that Load returned last
	err    error  // returned by every call
	hangs  bool   // every call waits until its context ends
	onSave func() // called after each Save
	onLoad func()
	saved  []time.Time
}

func (s *shelf) Name() string { return s.name }

func (s *shelf) answers(ctx context.Context) error {
	if s.hangs {
		<-ctx.Done()
		return fault.Wrap(fault.Unavailable, "no answer", ctx.Err())
	}
	return s.err
}

func (s *shelf) Load(ctx context.Context) ([]byte, error) {
	if s.onLoad != nil {
		s.onLoad()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.answers(ctx); err != nil {
		return nil, err
	}
	s.seen = s.note
	return bytes.Clone(s.note), nil
}

func (s *shelf) Save(ctx context.Context, note []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.answers(ctx); err != nil {
		return err
	}
	if !bytes.Equal(s.seen, s.note) {
		return fault.New(fault.Conflict, "it was changed meanwhile")
	}
	s.note, s.saved = note, append(s.saved, time.Now())
	if s.onSave != nil {
		s.onSave()
	}
	return nil
}

func (s *shelf) SetAside(ctx context.Context, note []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.aside = append(s.aside, note)
	return s.answers(ctx)
}

// put writes to the place without the keeper.
func (s *shelf) put(note []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note = note
}

func (s *shelf) kept() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.note
}

// anchored is a log with its keeper.
type anchored struct {
	*audittest.Fixture
	keeper *AnchorKeeper
	said   *bytes.Buffer
}

func anchoredAt(f *audittest.Fixture, places ...Anchor) *anchored {
	a := &anchored{Fixture: f, said: new(bytes.Buffer)}
	a.keeper = NewAnchorKeeper(f.Log.Log, f.Log.Guard, places, AnchorOptions{Logger: slog.New(slog.NewTextHandler(a.said, nil)), Now: f.Now, Timeout: time.Minute})
	return a
}

// keep follows the chain and visits every place, as the keeper does every ten seconds.
func (a *anchored) keep() {
	a.T.Helper()
	if a.Log.HaltedBy() == nil {
		a.Follow()
	}
	for _, p := range a.keeper.anchors {
		a.keeper.visit(a.T.Context(), p, writeNewer)
	}
}

var rollbackAdmin = authz.Principal{Tenant: authz.SystemTenant, Kind: authz.APIKey, ID: "key_system", Scopes: []authz.Scope{authz.SystemAdmin}}

func (a *anchored) accept() audit.Rollback {
	a.T.Helper()
	r, err := a.Log.AcceptRollback(a.T.Context(), rollbackAdmin, "restored from a backup")
	if err != nil {
		a.T.Fatal(err)
	}
	return r
}

// refused checks that the log is halted and names the lost entries.
func (a *anchored) refused(from, to uint64) {
	a.T.Helper()
	var lost *audit.RollbackError
	if err := a.keeper.Check(a.T.Context()); !errors.As(err, &lost) || lost.LostFrom != from || lost.LostTo != to {
		a.T.Fatalf("got %v, want the loss of %d to %d\n%s", err, from, to, a.said)
	}
	if err := a.Log.Ready(a.T.Context()); !errors.Is(err, fault.Unavailable) {
		a.T.Errorf("the log is ready: %v", err)
	}
	err := a.Log.Record(a.T.Context(), audit.Event{Type: audit.AuditRead, Outcome: audit.Success, Principal: audittest.Principal(audittest.TenantA)})
	if !errors.Is(err, fault.Unavailable) || strings.Contains(fault.Message(err), "lost") {
		a.T.Errorf("an entry is written, or the caller told why not: %v", err)
	}
}

// goesOn checks that the log works as if nothing had happened, also after a restart.
func (a *anchored) goesOn() {
	a.T.Helper()
	if err := a.keeper.Check(a.T.Context()); err != nil {
		a.T.Fatalf("%v\n%s", err, a.said)
	}
	a.Fill(3)
	a.Follow()
	if _, err := a.Verify(); err != nil {
		a.T.Error(err)
	}
}

func (a *anchored) states() (all []AnchorState) {
	for _, s := range a.keeper.Status() {
		all = append(all, s.State)
	}
	return all
}

func (a *anchored) checkStates(want ...AnchorState) {
	a.T.Helper()
	if got := a.states(); !slices.Equal(got, want) {
		a.T.Errorf("the places are %v, want %v\n%s", got, want, a.said)
	}
}

func TestANewPlaceIsWrittenAndThenKeptCurrent(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	a := anchoredAt(f, place)
	a.keep()
	a.said.Reset()
	a.Fill(5)
	newest := a.Follow()
	a.keep()
	if c, err := audit.ParseCheckpoint(place.kept(), f.Log.Signer.Public()); err != nil || c != newest {
		t.Errorf("%+v is kept, %v; the newest is %+v", c, err, newest)
	}
	a.keep()
	if len(place.saved) != 2 {
		t.Errorf("%d writes for two checkpoints", len(place.saved))
	}
	a.checkStates(AnchorOK)
	if s := a.keeper.Status()[0]; s.Sequence != newest.Sequence || !s.Time.Equal(newest.Time) || !s.Checked.Equal(f.Now()) || s.Refused != 0 || s.Name != "place" {
		t.Errorf("%+v", s)
	}
	if a.said.Len() > 0 {
		t.Errorf("it is told of what is as it should be: %s", a.said)
	}
}

func (a *anchored) checkBegun(warnings int, want ...string) {
	a.T.Helper()
	if got := begun(a.Fixture); !slices.Equal(got, want) {
		a.T.Errorf("the log says that %q are begun, want %q", got, want)
	}
	if n := strings.Count(a.said.String(), "level=WARN"); n != warnings {
		a.T.Errorf("%d warnings, want %d:\n%s", n, warnings, a.said)
	}
}

// An attacker who starts an older database may remove the anchor that shows it. The older log then
// records a second beginning of the place, and the anchor covers that entry.
func TestARemovedAnchorLeavesATrace(t *testing.T) {
	f, place, other := audittest.NewFixture(t), &shelf{name: "place"}, &shelf{name: "other"}
	a := anchoredAt(f, place, other)
	if err := a.keeper.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.checkBegun(0) // a check writes nothing
	for range 3 {
		a.Fill(1)
		a.keep()
	}
	a.checkBegun(2, "place 2", "other 2")
	backup := a.Copied()
	a.Fill(7)
	a.keep()

	place.put(nil)
	other.put(nil)
	f.Advance(time.Hour)
	b := anchoredAt(f.Opened(backup), place, other)
	if err := b.keeper.Check(t.Context()); err != nil {
		t.Fatal(err) // no witness of the loss is left
	}
	b.keep()
	again := b.keeper.Status()[0].Sequence
	b.Fill(1)
	b.keep()
	b.checkBegun(2, "place 2", "other 2", fmt.Sprint("place ", again), fmt.Sprint("other ", again))
	if c, err := audit.ParseCheckpoint(place.kept(), f.Log.Signer.Public()); err != nil || c.Sequence <= again {
		t.Errorf("the trace is not anchored: %+v %v", c, err)
	}

	// The next start finds no fault.
	c := anchoredAt(f.Opened(b.Copied()), place, other)
	c.keep()
	c.checkBegun(0, begun(b.Fixture)...)

	// The same works in a running process, and again before the next check.
	for range 2 {
		place.put(nil)
		c.keep()
	}
	c.keep()
	if n := len(begun(c.Fixture)); n != 6 {
		t.Errorf("the places were begun %d times, want 6", n)
	}
}

// A place that cannot be written does not fill the log.
func TestABeginningThatCannotBeSavedIsToldOnce(t *testing.T) {
	f, place := audittest.NewFixture(t), &unsaved{shelf: shelf{name: "place"}, fails: true}
	a := anchoredAt(f, place)
	for range 5 {
		a.keep()
		a.checkStates(AnchorUnreachable)
	}
	a.checkBegun(2, "place 1") // one for the beginning, one for the failure
	place.fails = false
	a.keep()
	a.keep()
	a.checkStates(AnchorOK)
	a.checkBegun(2, "place 1")

	// A place is not begun when the log cannot record it.
	place.put(nil)
	kept := f.Store
	f.Log.Chain.Store = closing{kept}
	a.keeper.visit(t.Context(), a.keeper.anchors[0], writeNewer)
	f.Log.Chain.Store = kept
	if place.kept() != nil {
		t.Error("it is begun, and the log does not say so")
	}
	a.keep()
	a.checkBegun(4, "place 1", fmt.Sprint("place ", a.keeper.Status()[0].Sequence))
}

// unsaved is a shelf that can be read. It cannot be written while fails is set.
type unsaved struct {
	shelf
	fails bool
}

func (u *unsaved) Save(ctx context.Context, note []byte) error {
	if u.fails {
		return fault.New(fault.Unavailable, "read-only")
	}
	return u.shelf.Save(ctx, note)
}

// closing is a store that can still be read, but not written.
type closing struct{ store.Store }

func (closing) Update(context.Context, func(store.Tx) error) error {
	return fault.New(fault.Unavailable, "closing")
}

// Each write to a place loads a control plane, so the keeper must limit its writes.
func TestThePaceIsAWriteInTenSecondsAlsoAcrossStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, place := audittest.NewFixture(t), &shelf{name: "place"}
		f.Follow()
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			keeper := NewAnchorKeeper(f.Log.Log, f.Log.Guard, []Anchor{place}, AnchorOptions{Now: time.Now})
			if err := keeper.Check(ctx); err != nil {
				t.Fatal(err)
			}
			var done sync.WaitGroup
			done.Go(func() { keeper.Keep(ctx) })
			for range 45 {
				f.Fill(1)
				f.Follow()
				time.Sleep(time.Second) // the clock of the synctest bubble
			}
			cancel()
			done.Wait()
		}
		if n := len(place.saved); n < 12 || n > 14 {
			t.Errorf("%d writes in 135 s", n)
		}
		for i := range place.saved[1:] {
			if pause := place.saved[i+1].Sub(place.saved[i]); pause < 10*time.Second {
				t.Errorf("%v between two writes", pause)
			}
		}
	})
}

// newestOf returns the newest checkpoint of a log.
func newestOf(t *testing.T, l *audittest.Parts) []byte {
	t.Helper()
	signed, _, err := l.Chain.NewestCheckpoint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return signed
}

// A note that does not belong to this log proves nothing about it. If such a note stopped the
// server, anyone who can write one ConfigMap could stop it.
func TestWhatIsNoneOfThisLogStopsNothing(t *testing.T) {
	seed := make([]byte, dualsig.SeedSize)
	_, _ = rand.Read(seed)
	stranger, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	for why, note := range map[string]func(f *audittest.Fixture, c audit.Checkpoint) []byte{
		anchorMalformed: func(*audittest.Fixture, audit.Checkpoint) []byte { return []byte("not a note") },
		anchorUnverified: func(_ *audittest.Fixture, c audit.Checkpoint) []byte {
			c.Sequence, c.Size = 1000, 1000
			signed, _ := audit.SignCheckpoint(c, stranger)
			return signed
		},
		anchorOtherChain: func(f *audittest.Fixture, c audit.Checkpoint) []byte {
			c.ChainID, c.Sequence, c.Size = "chain_other", 1000, 1000
			signed, _ := audit.SignCheckpoint(c, f.Log.Signer)
			return signed
		},
		"empty": func(*audittest.Fixture, audit.Checkpoint) []byte { return []byte{} },
	} {
		t.Run(why, func(t *testing.T) {
			f, place := audittest.NewFixture(t), &shelf{name: "place"}
			bad := note(f, f.Follow())
			place.put(bad)
			a := anchoredAt(f, place)
			if err := a.keeper.Check(t.Context()); err != nil {
				t.Fatal(err)
			}
			a.checkStates(AnchorRefused)
			if !bytes.Equal(place.kept(), bad) {
				t.Error("a look changes the place")
			}
			a.keep()
			a.checkStates(AnchorRefused)
			if len(place.aside) != 1 || !bytes.Equal(place.aside[0], bad) {
				t.Errorf("%d notes are set aside", len(place.aside))
			}
			if _, err := audit.ParseCheckpoint(place.kept(), f.Log.Signer.Public()); err != nil {
				t.Error("ours is not written:", err)
			}
			a.keep()
			a.checkStates(AnchorOK)
			if n := strings.Count(a.said.String(), "level=ERROR"); n != 1 || a.keeper.Status()[0].Refused != 1 {
				t.Errorf("%d alarms, %+v", n, a.keeper.Status())
			}
			var recorded []string
			for _, e := range f.Entries() {
				if e.EventType == audit.AnchorRefused && e.TenantID == string(authz.SystemTenant) {
					recorded = append(recorded, e.Attributes[audit.AttributePlace]+" "+e.Attributes[audit.AttributeReason])
				}
			}
			want := "place " + why
			if why == "empty" {
				want = "place " + anchorMalformed
			}
			if !slices.Equal(recorded, []string{want}) {
				t.Errorf("the log says %q", recorded)
			}
		})
	}
}

// The refusal is recorded durably before the evidence is overwritten.
func TestWhatIsRefusedStaysUntilItIsRecorded(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place", note: []byte("forged")}
	a := anchoredAt(f, place)
	a.Follow()
	f.Log.Halt(errors.New("for a test"))
	a.keep()
	a.checkStates(AnchorRefused)
	if !bytes.Equal(place.kept(), []byte("forged")) {
		t.Error("it is gone")
	}
	f.Log.Halt(nil)
	a.keep()
	if len(place.aside) != 1 || a.keeper.Status()[0].Refused != 1 {
		t.Errorf("set aside %d, %+v", len(place.aside), a.keeper.Status())
	}
}

func TestAPlaceThatCannotBeReachedStopsNothingAndIsNotWrittenUnread(t *testing.T) {
	f := audittest.NewFixture(t)
	down := &shelf{name: "down", err: fault.New(fault.Unavailable, "not now")}
	slow := &shelf{name: "slow", hangs: true}
	up := &shelf{name: "up"}
	a := anchoredAt(f, down, slow, up)
	a.keeper.Timeout = 20 * time.Millisecond
	for range 3 {
		if err := a.keeper.Check(t.Context()); err != nil {
			t.Fatal(err)
		}
		a.checkStates(AnchorUnreachable, AnchorUnreachable, AnchorOK)
	}
	a.keeper.Timeout = time.Minute
	if n := strings.Count(a.said.String(), "level=WARN"); n != 2 {
		t.Errorf("%d warnings:\n%s", n, a.said)
	}
	slow.hangs = false
	slow.put([]byte("read first"))
	a.keep()
	if _, err := audit.ParseCheckpoint(up.kept(), f.Log.Signer.Public()); err != nil {
		t.Error("one that is down keeps others from being written:", err)
	}
	if !bytes.Equal(slow.aside[0], []byte("read first")) {
		t.Error("what came meanwhile was written over unread")
	}
	down.err = nil
	a.keep()
	a.checkStates(AnchorOK, AnchorOK, AnchorOK)
	if n := strings.Count(a.said.String(), "is reached again"); n != 2 {
		t.Errorf("%d are told to be back:\n%s", n, a.said)
	}
}

func TestWhatAnotherHasWrittenMeanwhileIsReadFirst(t *testing.T) {
	f := audittest.NewFixture(t)
	further := f.Opened(f.Copied())
	further.Fill(5)
	further.Follow()
	newer := newestOf(t, further.Log)
	place := &racingPlace{shelf: &shelf{name: "place"}, note: newer}
	a := anchoredAt(f, place)
	a.keep()
	a.checkStates(AnchorRollback)
	if !bytes.Equal(place.kept(), newer) {
		t.Error("what another has written was written over unread")
	}
}

// racingPlace is a place that another process writes right after the first read.
type racingPlace struct {
	*shelf
	note []byte
}

func (r *racingPlace) Load(ctx context.Context) ([]byte, error) {
	note, err := r.shelf.Load(ctx)
	if r.note != nil {
		r.put(r.note)
		r.note = nil
	}
	return note, err
}

// The process may end before, during or after a write: the database always has what the anchor has.
func TestAnAnchorIsNeverAheadOfTheDatabase(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	a := anchoredAt(f, place)
	var disks []string
	snapshot := func() { disks = append(disks, f.Copied()) }
	place.onLoad, place.onSave = snapshot, snapshot
	for range 3 {
		a.Fill(2)
		a.keep()
		disk := disks[len(disks)-1]
		disks = nil
		after := &shelf{name: "place", note: place.kept()}
		if err := anchoredAt(f.Opened(disk), after).keeper.Check(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if len(place.saved) != 3 {
		t.Errorf("%d writes", len(place.saved))
	}
}

func TestABucketKeepsTheNewestAndWhatWasRefused(t *testing.T) {
	f := audittest.NewFixture(t)
	dir := t.TempDir()
	bucket, err := objects.Open(t.Context(), "file://"+dir, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bucket.Close() })
	place := NewBucketAnchor(f.Log.ChainID(), bucket)
	a := anchoredAt(f, place)
	a.keep()
	a.checkStates(AnchorOK)
	signed := newestOf(t, f.Log)
	if got, err := bucket.Get(t.Context(), "anchor/chain_test/checkpoint"); err != nil || !bytes.Equal(got, signed) {
		t.Errorf("the bucket keeps %q, %v", got, err)
	}
	for range 2 {
		if err := bucket.Put(t.Context(), "anchor/chain_test/checkpoint", []byte("forged")); err != nil {
			t.Fatal(err)
		}
		a.keep()
		a.keep()
	}
	names, err := filepath.Glob(filepath.Join(dir, "anchor", "chain_test", "refused-*"))
	if err != nil || len(names) != 1 {
		t.Errorf("set aside: %v, %v", names, err)
	}
	a.checkStates(AnchorOK)
	if err := bucket.Put(t.Context(), "anchor/chain_test/checkpoint", nil); err != nil {
		t.Fatal(err)
	}
	a.keep()
	if n := a.keeper.Status()[0].Refused; n != 3 {
		t.Errorf("%d were refused", n)
	}
}

// begun returns the places that the log records as begun, with the sequences of their first
// checkpoints.
func begun(f *audittest.Fixture) (places []string) {
	f.T.Helper()
	for _, e := range f.Entries() {
		if e.EventType == audit.AnchorStarted && e.TenantID == string(authz.SystemTenant) && e.Outcome == audit.Success && e.Resource == (audit.Resource{ID: "chain_test", Type: audit.ChainResource}) {
			places = append(places, e.Attributes[audit.AttributePlace]+" "+e.Attributes[audit.AttributeSequence])
		}
	}
	return places
}

// inside lets another process act while one reads an anchor.
type inside struct {
	Anchor
	do func()
}

func (p *inside) Load(ctx context.Context) ([]byte, error) {
	note, err := p.Anchor.Load(ctx)
	if do := p.do; do != nil {
		p.do = nil
		do()
	}
	return note, err
}

// If two replicas find an anchor empty at the same time, one of them starts it.
func TestAPlaceIsBegunOnce(t *testing.T) {
	f, place := audittest.NewFixture(t), &shelf{name: "place"}
	f.Follow()
	other := f.Another(f.Store)
	second := NewAnchorKeeper(other.Log, other.Guard, []Anchor{&seat{shelf: place}}, AnchorOptions{Logger: quiet(), Now: f.Now})
	a := anchoredAt(f, &inside{Anchor: &seat{shelf: place}, do: func() { second.visit(t.Context(), second.anchors[0], writeFirst) }})
	a.keeper.visit(t.Context(), a.keeper.anchors[0], writeFirst)
	a.checkBegun(0, "place 1")
	a.checkStates(AnchorOK)
	if n := len(place.saved); n != 1 {
		t.Errorf("%d writes", n)
	}
}

// An anchor keeps a signed note. The reader bounds its size, because anyone with write access to
// the anchor chooses it.
func TestALongAnchorIsNotReadWhole(t *testing.T) {
	f := audittest.NewFixture(t)
	dir := t.TempDir()
	bucket, err := objects.Open(t.Context(), "file://"+dir, objects.SigningOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { bucket.Close() })
	a := anchoredAt(f, NewBucketAnchor(f.Log.ChainID(), bucket))
	a.keep()
	signed := newestOf(t, f.Log)
	// A note may also carry the signatures of others.
	others := bytes.Repeat([]byte("\u2014 other AAAAAAAA\n"), maxNote/20)
	if _, why := a.keeper.readAnchor(append(bytes.Clone(signed), others...)); why != anchorMalformed {
		t.Errorf("a long note is refused as %q", why)
	}
	for _, long := range [][]byte{bytes.Repeat([]byte("x"), 1<<20), append(bytes.Clone(signed), bytes.Repeat([]byte("\n"), 1<<20)...)} {
		if err := bucket.Put(t.Context(), "anchor/chain_test/checkpoint", long); err != nil {
			t.Fatal(err)
		}
		a.Fill(1)
		a.Follow()
		a.keep()
		a.keep()
		a.checkStates(AnchorOK)
	}
	if n := a.keeper.Status()[0].Refused; n != 2 {
		t.Errorf("%d were refused", n)
	}
	names, err := filepath.Glob(filepath.Join(dir, "anchor", "chain_test", "refused-*"))
	if err != nil || len(names) != 2 {
		t.Fatalf("set aside: %v, %v", names, err)
	}
	for _, name := range names {
		if info, err := os.Stat(name); err != nil || info.Size() > maxNote+1 {
			t.Errorf("%d bytes were set aside: %v", info.Size(), err)
		}
	}
}
