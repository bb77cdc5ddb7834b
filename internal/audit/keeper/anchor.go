// Package keeper keeps the log beyond its database: an [AnchorKeeper] writes checkpoints to
// anchors and compares the log with them, and a [Cutter] moves old entries to an archive. A [Packer]
// makes the ones that stay smaller.
package keeper

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

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/entries"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Anchor is a place outside of the database that keeps the newest checkpoint. Its methods are safe
// for concurrent use and return when their context ends. Errors: fault.Conflict when another
// process wrote in the meantime, fault.Unavailable.
type Anchor interface {
	// Name returns the fixed word that metrics and entries use for the anchor, such as configmap.
	Name() string
	// Load returns the note in the anchor. It returns nil and no error when the anchor is empty.
	Load(ctx context.Context) ([]byte, error)
	// Save replaces the note that Load returned last. If the anchor can detect that another process
	// has replaced that note, Save fails.
	Save(ctx context.Context, note []byte) error
	// SetAside keeps a copy for investigation of a note that Load returned and that does not belong
	// to this log. The copy is made before the next Save replaces the note, or together with it.
	SetAside(ctx context.Context, note []byte) error
}

// AnchorOptions configures an [AnchorKeeper]. The zero value is ready for use.
type AnchorOptions struct {
	Every   time.Duration    // time between checks, and at least between writes; default 10 s
	Timeout time.Duration    // limit for one check, including the write after it; default 3 s
	Logger  *slog.Logger     // default slog.Default()
	Now     func() time.Time // default time.Now
}

// AnchorState is the result of the last check of an anchor.
type AnchorState string

// The states.
const (
	AnchorOK          AnchorState = "ok"          // empty, or a checkpoint that the log contains
	AnchorUnreachable AnchorState = "unreachable" // not read, compared or written; content unknown
	AnchorRefused     AnchorState = "refused"     // a note that does not belong to this log
	AnchorRollback    AnchorState = "rollback"    // a checkpoint of entries that the database lacks
)

// AnchorStatus is the status of an anchor after the last check.
type AnchorStatus struct {
	Name     string
	State    AnchorState
	Sequence uint64    // sequence of the verified checkpoint in the anchor; 0 for none
	Time     time.Time // time of that checkpoint
	Checked  time.Time // last time that the anchor could be read; zero for never
	Refused  uint64    // number of refused notes since the process started
}

// AnchorKeeper keeps the newest checkpoint of a log in anchors outside of the database. It compares
// what the anchors keep with the database at each check and before each write.
//
// If the log does not contain a checkpoint that verifies, the database was replaced by an older or
// another one. The keeper then halts the log until the loss is accepted
// ([guard.Guard.AcceptRollback]). A note that does not verify, or that belongs to another chain,
// proves nothing about this log: the keeper records it, sets it aside, overwrites it, and does not
// halt the log. An unreachable anchor does not halt the log either. The keeper never writes to an
// anchor before it has read it.
//
// Only committed checkpoints are written to an anchor. So a crash at any moment leaves anchors
// behind the database, never ahead.
type AnchorKeeper struct {
	log     *writer.Log
	guard   *guard.Guard
	anchors []*keptAnchor
	AnchorOptions

	logging sync.Mutex           // guards logged
	logged  *audit.RollbackError // the loss that was logged last

	mu sync.Mutex // guards the status of all anchors
}

// keptAnchor is an anchor and what the keeper knows about it. Only one visit runs at a time.
type keptAnchor struct {
	Anchor
	status AnchorStatus

	// A checkpoint that the log does not contain stays known until the log contains it or the loss
	// is accepted, even if the anchor changes in the meantime. The detector's lock guards both
	// fields.
	writer.LossSource
	lostOf audit.Checkpoint

	// The fields below belong to the running visit. What the earlier visits found:
	hasLast bool             // last is set, because a visit has read the anchor
	last    audit.Checkpoint // found or written at the last visit; zero if the anchor was empty
	hadNote bool             // a visit found or wrote a note, so an empty anchor was emptied

	// What they recorded and logged, so that it is done once:
	startRecorded   bool              // the log has the entry about the start of this empty anchor
	refusedNote     [sha256.Size]byte // SHA-256 of the note that was refused last
	refusalRecorded bool              // the log has the entry about that note
	loggedFailure   string            // message of the error that was logged last
}

// NewAnchorKeeper returns the keeper of a log. The keeper knows nothing about the anchors before
// its first check. A log has one keeper at a time.
func NewAnchorKeeper(l *writer.Log, g *guard.Guard, anchors []Anchor, o AnchorOptions) *AnchorKeeper {
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
	for _, p := range anchors {
		a := &keptAnchor{Anchor: p, LossSource: writer.LossSource{Name: "the " + p.Name()}, status: AnchorStatus{Name: p.Name(), State: AnchorUnreachable}}
		k.anchors = append(k.anchors, a)
	}
	var sources []*writer.LossSource
	for _, a := range k.anchors {
		sources = append(sources, &a.LossSource)
	}
	l.Detector.SetAnchors(sources, func(ctx context.Context) { _ = k.Check(ctx) })
	return k
}

// Check reads all anchors at the same time and writes to none. It takes at most the timeout of one
// check. The server calls it before it serves anything. Error: why the log is halted. Trouble with
// an anchor is only logged.
func (k *AnchorKeeper) Check(ctx context.Context) error {
	var looks sync.WaitGroup
	for _, a := range k.anchors {
		looks.Go(func() { k.visit(ctx, a, lookOnly) })
	}
	looks.Wait()
	k.checkDatabase(ctx)
	return k.log.Detector.HaltedBy()
}

// Keep keeps every anchor current until ctx ends. It writes to an empty anchor at once. It first
// writes to any other anchor after AnchorOptions.Every, so that a process in a restart loop does
// not write more often.
func (k *AnchorKeeper) Keep(ctx context.Context) {
	var keepers sync.WaitGroup
	for _, a := range k.anchors {
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

// Status returns the status of the anchors, in the order in which they were given.
func (k *AnchorKeeper) Status() []AnchorStatus {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make([]AnchorStatus, 0, len(k.anchors))
	for _, a := range k.anchors {
		all = append(all, a.status)
	}
	return all
}

// visitKind says what a visit may write.
type visitKind int

const (
	lookOnly   visitKind = iota
	writeFirst           // writes only to an empty anchor
	writeNewer           // also replaces an older note, or one that does not belong to this log
)

// visit checks an anchor once, writes to it when that is due, and records and logs the result.
func (k *AnchorKeeper) visit(ctx context.Context, a *keptAnchor, kind visitKind) {
	ctx, cancel := context.WithTimeout(ctx, k.Timeout)
	defer cancel()
	state, err := k.lookOnce(ctx, a, kind)
	if errors.Is(err, fault.Conflict) {
		state, err = k.lookOnce(ctx, a, kind) // look at the other process's note
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return // the process is stopping
	}
	if state == "" {
		state = AnchorUnreachable
	}
	if k.log.Detector.HasLoss(&a.LossSource) {
		state = AnchorRollback // an unreachable anchor does not end a rollback
	}
	k.mu.Lock()
	a.status.State = state
	if err == nil {
		a.status.Checked = k.Now()
	}
	k.mu.Unlock()
	switch {
	case err == nil && a.loggedFailure != "":
		k.Logger.InfoContext(ctx, "the anchor of the audit log is reached again", "place", a.Anchor.Name())
		a.loggedFailure = ""
	case err != nil && a.loggedFailure != fault.Message(err): // logged once for each message
		a.loggedFailure = fault.Message(err)
		k.Logger.WarnContext(ctx, "the anchor of the audit log cannot be kept; retrying", "place", a.Anchor.Name(), "error", err)
	}
}

// lookOnce does the work of one visit, without updating the state and logging trouble.
func (k *AnchorKeeper) lookOnce(ctx context.Context, a *keptAnchor, kind visitKind) (AnchorState, error) {
	note, err := a.Load(ctx)
	if err != nil {
		return "", fmt.Errorf("reading the anchor: %w", err)
	}
	state, theirs, why := AnchorOK, audit.Checkpoint{}, ""
	if note != nil {
		a.startRecorded, a.hadNote = false, true
		theirs, why = k.readAnchor(note)
	}
	if why != "" {
		state = AnchorRefused
		if err := k.recordForeign(ctx, a, note, why); err != nil {
			return state, err
		}
	} else {
		a.refusedNote = [sha256.Size]byte{} // the same note may come again
	}
	lost, err := k.compare(ctx, a, theirs)
	if err != nil {
		return "", err
	}
	k.mu.Lock()
	a.status.Sequence, a.status.Time = theirs.Sequence, theirs.Time
	k.mu.Unlock()
	// One of several replicas writes to an anchor, and the others only check: a replica writes only
	// if the anchor has not moved on since its own last visit, one interval ago. An older
	// checkpoint than at the last visit does not count as a move, because no replica writes one.
	another := a.hasLast && theirs.Head().Newer(a.last.Head())
	if a.last, a.hasLast = theirs, true; lost {
		return AnchorRollback, nil
	}
	if kind == lookOnly || kind == writeFirst && note != nil || k.log.Detector.HaltedBy() != nil || another {
		return state, nil
	}
	signed, newest, err := k.log.Chain.NewestCheckpoint(ctx)
	if errors.Is(err, chain.ErrNoCheckpoint) || err == nil && !newest.Head().Newer(theirs.Head()) {
		return state, nil // the log has no newer checkpoint
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
	a.startRecorded, a.hadNote, a.last = false, true, newest
	k.mu.Lock()
	a.status.Sequence, a.status.Time = newest.Sequence, newest.Time
	k.mu.Unlock()
	return state, nil
}

// The reasons for refusing a note.
const (
	anchorMalformed  = "malformed"
	anchorOtherChain = "other_chain"
	anchorUnverified = "unverified"
)

// readAnchor returns the checkpoint of a note, or the reason why the note does not belong to this
// log.
func (k *AnchorKeeper) readAnchor(note []byte) (c audit.Checkpoint, why string) {
	c, err := audit.PeekCheckpoint(note)
	switch {
	case err != nil || len(note) > maxNote:
		return audit.Checkpoint{}, anchorMalformed
	case c.ChainID != k.log.Chain.ChainID:
		return audit.Checkpoint{}, anchorOtherChain
	}
	if c, err = audit.ParseCheckpoint(note, k.log.Chain.Key); err != nil {
		return audit.Checkpoint{}, anchorUnverified
	}
	return c, ""
}

// recordStart records, before the first write, that an empty anchor is begun. So an anchor that was
// removed leaves a second beginning of its anchor in the log. There is one entry even if the write
// fails and is retried, and one entry for replicas that start at the same time.
func (k *AnchorKeeper) recordStart(ctx context.Context, a *keptAnchor, c audit.Checkpoint) error {
	if a.startRecorded {
		return nil
	}
	e := keeperEvent(k.log.ChainID(), audit.AnchorStarted, audit.Success, map[string]string{
		audit.AttributePlace: a.Anchor.Name(), audit.AttributeSequence: strconv.FormatUint(c.Sequence, 10),
	})
	told, now := false, k.log.Now()
	err := k.log.Chain.Store.Update(ctx, func(tx store.Tx) (err error) {
		if told = false; !a.hadNote {
			told, err = wasStartedLately(tx, a.Anchor.Name(), now)
		}
		if err == nil && !told {
			_, err = k.log.Append(tx, e)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("recording that the anchor is begun: %w", err)
	}
	if a.startRecorded = true; told {
		return nil
	}
	k.Logger.WarnContext(ctx, "the anchor of the audit log keeps nothing and is begun: if it was kept before, find out who removed it",
		"place", a.Anchor.Name(), "sequence", c.Sequence)
	return nil
}

// lately is how far back begunLately looks for another replica's entry. It allows for clocks that
// differ by minutes.
const lately = 15 * time.Minute

// wasStartedLately reports whether the log recorded the beginning of an anchor within the last 15
// minutes. It reads at most 64 entries of the system tenant, which is enough for the entries of
// replicas that are starting.
func wasStartedLately(r store.Reader, place string, now time.Time) (begun bool, err error) {
	head, err := audit.ReadHead(r)
	if err != nil {
		return false, err
	}
	since := max(now.UnixMicro(), head.Micros) - lately.Microseconds()
	rng := store.Prefix(audit.TenantPrefix(string(authz.SystemTenant)))
	rng.Reverse = true
	var found []uint64
	var bad error
	left := 64
	err = r.Scan(rng, func(_, value []byte) bool {
		var row audit.IndexRow
		if row, bad = audit.DecodeIndexRow(value); bad != nil || row.Micros < since {
			return false
		}
		if row.EventType == audit.AnchorStarted {
			found = append(found, row.Sequence)
		}
		left--
		return left > 0
	})
	err = errors.Join(err, bad)
	for _, sequence := range found {
		if err != nil || begun {
			break
		}
		var e *audit.Entry
		if e, err = entries.Read(r, sequence); err == nil {
			begun = e.Attributes[audit.AttributePlace] == place
		}
	}
	return begun, err
}

// keeperEvent returns an event of the service itself.
func keeperEvent(chainID string, t audit.EventType, o audit.Outcome, attributes map[string]string) audit.Event {
	return audit.Event{
		Type: t, Outcome: o,
		Principal:  authz.Principal{Tenant: authz.SystemTenant, Kind: authz.System, ID: "latticekeep"},
		Resource:   audit.Resource{Type: audit.ChainResource, ID: chainID},
		Attributes: attributes,
	}
}

// recordForeign logs and records, once for each note, that an anchor keeps a note that does not
// belong to this log. It fails when the entry could not be written, so that the note stays in place
// until it is recorded.
func (k *AnchorKeeper) recordForeign(ctx context.Context, a *keptAnchor, note []byte, why string) error {
	if sum := sha256.Sum256(note); a.refusedNote != sum {
		a.refusedNote, a.refusalRecorded = sum, false
		k.mu.Lock()
		a.status.Refused++
		k.mu.Unlock()
		k.Logger.ErrorContext(ctx, "the anchor of the audit log keeps what is none of this log: it is set aside, find out who wrote it",
			"place", a.Anchor.Name(), "reason", why, "sha256", hex.EncodeToString(sum[:]))
	}
	if a.refusalRecorded {
		return nil
	}
	err := k.guard.RecordOncePerMinute(ctx, keeperEvent(k.log.ChainID(), audit.AnchorRefused, audit.Failure, map[string]string{audit.AttributePlace: a.Anchor.Name(), audit.AttributeReason: why}))
	if err != nil {
		return fmt.Errorf("recording that the anchor is refused: %w", err)
	}
	a.refusalRecorded = true
	return nil
}

// compare compares the checkpoint of an anchor with the database. The checkpoint must be verified,
// or zero if the anchor has none. If the database does not continue from the checkpoint, compare
// halts the log. It reports whether the anchor knows of a loss.
func (k *AnchorKeeper) compare(ctx context.Context, a *keptAnchor, theirs audit.Checkpoint) (lost bool, err error) {
	err = k.log.Detector.Decide(ctx, func(r store.Reader, s chain.LogState) (func(), error) {
		found, err := k.log.Chain.FindLossOf(r, s, theirs)
		if err != nil {
			return nil, err
		}
		known := a.lostOf // the loss stays known, whatever the anchor keeps by then
		still, err := k.log.Chain.FindLossOf(r, s, known)
		return func() {
			if still == nil && err == nil {
				a.ClearLoss()
			}
			if a.NoteWorseLoss(found, s) {
				a.lostOf = theirs
			}
		}, audit.IgnoreDamage(err)
	})
	k.logLoss(ctx)
	if err != nil {
		return false, fmt.Errorf("comparing the anchor with the database: %w", err)
	}
	return k.log.Detector.HasLoss(&a.LossSource), nil
}

// checkDatabase is compare for the checkpoint in the database and for the entries that this process
// has seen. It writes nothing.
func (k *AnchorKeeper) checkDatabase(ctx context.Context) {
	if _, err := k.log.Detector.CheckForRollback(ctx); err != nil {
		k.Logger.WarnContext(ctx, "the newest checkpoint of the audit log cannot be held against its entries", "error", err)
	}
	k.logLoss(ctx)
}

// logLoss logs once for each loss that the log is halted.
func (k *AnchorKeeper) logLoss(ctx context.Context) {
	k.logging.Lock()
	defer k.logging.Unlock()
	lost := k.log.Detector.HaltingLoss()
	if lost == nil || lost == k.logged {
		return
	}
	k.logged = lost
	k.Logger.ErrorContext(ctx, "entries of the audit log are lost, and nothing is served until that is accepted", "error", lost,
		"lost_from", lost.LostFrom, "lost_to", lost.LostTo, "place", lost.Source)
}
