package audit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// AnchorPlace keeps the newest checkpoint where the database cannot reach. All
// methods may be called concurrently, and end with their context. Errors:
// fault.Conflict when another has written meanwhile, fault.Unavailable.
type AnchorPlace interface {
	// Name is what metrics and entries call it, such as configmap: a fixed word.
	Name() string
	// Load returns what is kept: nil without an error when there is nothing.
	Load(ctx context.Context) ([]byte, error)
	// Save replaces what Load returned last, and nothing else as far as the
	// place can tell.
	Save(ctx context.Context, note []byte) error
	// SetAside keeps note, which Load returned and which is none of this log,
	// for whoever looks into it: before the next Save has replaced it, or with it.
	SetAside(ctx context.Context, note []byte) error
}

// AnchorOptions of an [AnchorKeeper]. The zero value is fit for use.
type AnchorOptions struct {
	Every   time.Duration    // the least time between two writes of a place, and the time between two looks; default 10 s
	Timeout time.Duration    // of one look, the write after it included; default 3 s
	Logger  *slog.Logger     // default slog.Default()
	Now     func() time.Time // default time.Now
}

// PlaceState is what was found at a place last.
type PlaceState string

// The states.
const (
	PlaceOK          PlaceState = "ok"          // it keeps a checkpoint that the log goes on from, or none yet
	PlaceUnreachable PlaceState = "unreachable" // it could not be read, compared or written: what it knows is not known
	PlaceRefused     PlaceState = "refused"     // it kept what is none of this log
	PlaceRollback    PlaceState = "rollback"    // it knows of entries that the database does not have
)

// PlaceStatus is a place as it was found last.
type PlaceStatus struct {
	Place    string
	State    PlaceState
	Sequence uint64    // of the checkpoint there, which verified; 0 when none did
	Time     time.Time // the same
	Checked  time.Time // when it could be read last; zero when never
	Refused  uint64    // how often it kept something that was refused, since the start of the process
}

// AnchorKeeper keeps the newest checkpoint of a log in places outside of the
// database, and compares what they keep with the database, before each write and
// at each look.
//
// A checkpoint that verifies and that the log does not go on from means that the
// database was replaced by an older or another one: the log is refused, so that
// it takes no entries until somebody accepts the loss ([Log.AcceptRollback]). What
// does not verify, or is of another chain, says nothing of this log: it is told,
// set aside and written over, and stops nothing. A place that cannot be reached
// stops nothing either, and is never written unread.
//
// Only what is committed is ever written to a place, so that a crash at any
// moment leaves places that are behind the database, never ahead of it.
type AnchorKeeper struct {
	log    *Log
	guard  *Guard
	places []*anchorState
	AnchorOptions

	logged *RollbackError // was logged last; of who decides what is lost

	mu sync.Mutex // guards the status of all places
}

// anchorState is a place, and what is known of it. There is one visitor at a time.
type anchorState struct {
	AnchorPlace
	status PlaceStatus

	// A checkpoint that the log does not go on from stays known until it does or that
	// is accepted, whatever lies in its place by then. Who decides has both.
	lossSource
	lostOf Checkpoint

	// Of the visitor.
	looked   bool              // there was a visit before
	last     Checkpoint        // which lay there at it; the zero one for none
	met      bool              // something lay there at a visit, or was written then
	told     [sha256.Size]byte // the note that was refused last
	recorded bool              // which the log says
	started  bool              // the log says that the place is begun, and nothing was seen there since
	failure  string            // the trouble that was logged last
}

// NewAnchorKeeper returns the keeper of a log, which knows nothing of any place
// before its first look. A log has one keeper at a time.
func NewAnchorKeeper(l *Log, g *Guard, places []AnchorPlace, o AnchorOptions) *AnchorKeeper {
	if o.Every == 0 {
		o.Every = 10 * time.Second
	}
	if o.Timeout == 0 {
		o.Timeout = 3 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	k := &AnchorKeeper{log: l, guard: g, AnchorOptions: o}
	for _, p := range places {
		a := &anchorState{AnchorPlace: p, lossSource: lossSource{place: "the " + p.Name()}, status: PlaceStatus{Place: p.Name(), State: PlaceUnreachable}}
		k.places = append(k.places, a)
	}
	l.rollbacks.mu.Lock()
	defer l.rollbacks.mu.Unlock()
	l.rollbacks.places, l.rollbacks.askPlaces = nil, func(ctx context.Context) { _ = k.Check(ctx) }
	for _, a := range k.places {
		l.rollbacks.places = append(l.rollbacks.places, &a.lossSource)
	}
	return k
}

// Check looks at every place, at all at once and for the timeout of one look at
// most, and writes to none. It is called before anything is served. Error: why
// the log is refused then; trouble with a place is only logged.
func (k *AnchorKeeper) Check(ctx context.Context) error {
	var looks sync.WaitGroup
	for _, a := range k.places {
		looks.Go(func() { k.visit(ctx, a, lookOnly) })
	}
	looks.Wait()
	k.checkDatabase(ctx)
	return k.log.rollbacks.HaltedBy()
}

// Keep keeps every place until ctx ends. A place that has nothing yet is written
// at once. Any other one is written for the first time after AnchorOptions.Every,
// so that a process that is started again and again keeps the pace, too.
func (k *AnchorKeeper) Keep(ctx context.Context) {
	var keepers sync.WaitGroup
	for _, a := range k.places {
		keepers.Go(func() {
			for k.visit(ctx, a, writeFirst); ; k.visit(ctx, a, writeNewer) {
				timer := time.NewTimer(k.Every)
				select {
				case <-timer.C:
				case <-ctx.Done():
					timer.Stop()
					return
				}
			}
		})
	}
	keepers.Wait()
}

// Status returns the places, in the order in which they were given.
func (k *AnchorKeeper) Status() []PlaceStatus {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make([]PlaceStatus, 0, len(k.places))
	for _, a := range k.places {
		all = append(all, a.status)
	}
	return all
}

// What a visit may write.
type visitKind int

const (
	lookOnly   visitKind = iota
	writeFirst           // to a place that has nothing
	writeNewer           // and to one that has what is older, or none of this log
)

// visit looks at a place once, writes to it when that is due, and notes and logs
// how it went.
func (k *AnchorKeeper) visit(ctx context.Context, a *anchorState, kind visitKind) {
	ctx, cancel := context.WithTimeout(ctx, k.Timeout)
	defer cancel()
	state, err := k.lookOnce(ctx, a, kind)
	if errors.Is(err, fault.Conflict) {
		state, err = k.lookOnce(ctx, a, kind) // at what another has written
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return // the process ends
	}
	if state == "" {
		state = PlaceUnreachable
	}
	if k.knowsOfLoss(a) {
		state = PlaceRollback // which an unreachable place does not change
	}
	k.mu.Lock()
	a.status.State = state
	if err == nil {
		a.status.Checked = k.Now()
	}
	k.mu.Unlock()
	switch {
	case err == nil && a.failure != "":
		k.Logger.InfoContext(ctx, "the anchor of the audit log is reached again", "place", a.Name())
		a.failure = ""
	case err != nil && a.failure != fault.Message(err): // once for each kind of trouble
		a.failure = fault.Message(err)
		k.Logger.WarnContext(ctx, "the anchor of the audit log cannot be kept; retrying", "place", a.Name(), "err", err)
	}
}

// lookOnce is one visit, without its bookkeeping.
func (k *AnchorKeeper) lookOnce(ctx context.Context, a *anchorState, kind visitKind) (PlaceState, error) {
	note, err := a.Load(ctx)
	if err != nil {
		return "", fmt.Errorf("reading the anchor: %w", err)
	}
	state, theirs, why := PlaceOK, Checkpoint{}, ""
	if note != nil {
		a.started, a.met = false, true
		theirs, why = k.readAnchor(note)
	}
	if why != "" {
		state = PlaceRefused
		if err := k.recordForeign(ctx, a, note, why); err != nil {
			return state, err
		}
	} else {
		a.told = [sha256.Size]byte{} // it may come again
	}
	lost, err := k.compare(ctx, a, theirs)
	if err != nil {
		return "", err
	}
	k.mu.Lock()
	a.status.Sequence, a.status.Time = theirs.Sequence, theirs.Time
	k.mu.Unlock()
	// One of several replicas keeps a place, and the others look: each writes only
	// what has not moved since its last visit, which was as long ago as two writes are
	// apart. What is older than it was then was put there by nobody who keeps it.
	another := a.looked && theirs.Head().newer(a.last.Head())
	if a.last, a.looked = theirs, true; lost {
		return PlaceRollback, nil
	}
	if kind == lookOnly || kind == writeFirst && note != nil || k.log.rollbacks.HaltedBy() != nil || another {
		return state, nil
	}
	signed, newest, err := k.log.chain.NewestCheckpoint(ctx)
	if errors.Is(err, errNoCheckpoint) || err == nil && !newest.Head().newer(theirs.Head()) {
		return state, nil // nothing is newer
	}
	if err != nil {
		return "", err
	}
	if note == nil {
		if err := k.recordStart(ctx, a, newest); err != nil {
			return "", err
		}
	}
	if why != "" {
		if err := a.SetAside(ctx, note); err != nil {
			return "", fmt.Errorf("setting aside what the anchor kept: %w", err)
		}
	}
	if err := a.Save(ctx, signed); err != nil {
		return "", fmt.Errorf("writing the anchor: %w", err)
	}
	a.started, a.met, a.last = false, true, newest
	k.mu.Lock()
	a.status.Sequence, a.status.Time = newest.Sequence, newest.Time
	k.mu.Unlock()
	return state, nil
}

// Why a note is refused.
const (
	anchorMalformed  = "malformed"
	anchorOtherChain = "other_chain"
	anchorUnverified = "unverified"
)

// readAnchor returns the checkpoint of a note, or why it is none of this log.
func (k *AnchorKeeper) readAnchor(note []byte) (c Checkpoint, why string) {
	c, err := peekCheckpoint(note)
	switch {
	case err != nil || len(note) > maxNote:
		return Checkpoint{}, anchorMalformed
	case c.ChainID != k.log.chain.chainID:
		return Checkpoint{}, anchorOtherChain
	}
	if c, err = ParseCheckpoint(note, k.log.chain.key); err != nil {
		return Checkpoint{}, anchorUnverified
	}
	return c, ""
}

// recordStart tells that a place is begun which keeps nothing, before it is written: an
// anchor that was removed so leaves a second beginning of its place in the log.
// What cannot be saved is told once, and so is what replicas begin that start at the
// same time.
func (k *AnchorKeeper) recordStart(ctx context.Context, a *anchorState, c Checkpoint) error {
	if a.started {
		return nil
	}
	e := keeperEvent(k.log.ChainID(), AnchorStarted, Success, map[string]string{
		attributePlace: a.Name(), attributeSequence: strconv.FormatUint(c.Sequence, 10),
	})
	told, now := false, k.log.now()
	err := k.log.chain.store.Update(ctx, func(tx store.Tx) (err error) {
		if told = false; !a.met {
			told, err = begunLately(tx, a.Name(), now)
		}
		if err == nil && !told {
			_, err = k.log.Append(tx, e)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("recording that the anchor is begun: %w", err)
	}
	if a.started = true; told {
		return nil
	}
	k.Logger.WarnContext(ctx, "the anchor of the audit log keeps nothing and is begun: if it was kept before, find out who removed it",
		"place", a.Name(), "sequence", c.Sequence)
	return nil
}

// lately is how long ago another replica may have begun a place at the same time, by
// clocks that are minutes apart.
const lately = 15 * time.Minute

// begunLately reports whether the log says so of a place. It looks at no more entries
// of the system's than replicas write that are starting.
func begunLately(r store.Reader, place string, now time.Time) (begun bool, err error) {
	head, err := readHead(r)
	if err != nil {
		return false, err
	}
	since := max(now.UnixMicro(), head.micros) - lately.Microseconds()
	rng := store.Prefix(tenantPrefix(string(authz.SystemTenant)))
	rng.Reverse = true
	var found []uint64
	var bad error
	left := 64
	err = r.Scan(rng, func(_, value []byte) bool {
		var row indexRow
		if row, bad = decodeIndexRow(value); bad != nil || row.micros < since {
			return false
		}
		if row.eventType == AnchorStarted {
			found = append(found, row.sequence)
		}
		left--
		return left > 0
	})
	err = errors.Join(err, bad)
	for _, sequence := range found {
		if err != nil || begun {
			break
		}
		var e *Entry
		if e, err = readEntry(r, sequence); err == nil {
			begun = e.Attributes[attributePlace] == place
		}
	}
	return begun, err
}

// keeperEvent is one of the service's own.
func keeperEvent(chainID string, t EventType, o Outcome, attributes map[string]string) Event {
	return Event{
		Type: t, Outcome: o,
		Principal:  authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "latticekeep"},
		Resource:   Resource{Type: ChainResource, ID: chainID},
		Attributes: attributes,
	}
}

// recordForeign tells, once for each note, that a place keeps what is none of this log.
// It fails when that could not be recorded, so that the note stays until it is.
func (k *AnchorKeeper) recordForeign(ctx context.Context, a *anchorState, note []byte, why string) error {
	if sum := sha256.Sum256(note); a.told != sum {
		a.told, a.recorded = sum, false
		k.mu.Lock()
		a.status.Refused++
		k.mu.Unlock()
		k.Logger.ErrorContext(ctx, "the anchor of the audit log keeps what is none of this log: it is set aside, find out who wrote it",
			"place", a.Name(), "reason", why, "sha256", hex.EncodeToString(sum[:]))
	}
	if a.recorded {
		return nil
	}
	err := k.guard.RecordOncePerMinute(ctx, keeperEvent(k.log.ChainID(), AnchorRefused, Failure, map[string]string{attributePlace: a.Name(), AttributeReason: why}))
	if err != nil {
		return fmt.Errorf("recording that the anchor is refused: %w", err)
	}
	a.recorded = true
	return nil
}
