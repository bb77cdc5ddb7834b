package inspection

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/chain"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/state/watch"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

// describeStore judges an open store: its mark, its format and its room.
func (s *opened) describeStore(ctx context.Context) diagnosis.Line {
	if err := offline.CheckUnmarked(ctx, s.store); err != nil {
		return diagnosis.Fail("do what the message says", err)
	}
	f, err := format.Of(ctx, s.store)
	if err == nil {
		err = f.CheckWriter()
	}
	if err != nil {
		return diagnosis.Fail("install the release that the message names", err)
	}
	if !s.made {
		return diagnosis.Well("it is empty: the first start makes a deployment in it")
	}
	u, err := s.store.Usage(ctx)
	if err != nil {
		return diagnosis.Fail("look at the disk or at PostgreSQL", err)
	}
	free := ""
	if u.Free >= 0 {
		free = fmt.Sprintf(", %s of them free for the next commits", size(u.Free))
	}
	return diagnosis.Well("format %d, which programs open that read %d or newer (this one: %d) and change that write %d or newer; %s%s",
		f.Writer, f.Reader, format.Reads, f.Writer, size(u.Size), free)
}

func (s *opened) describePostgres(ctx context.Context) diagnosis.Line {
	switch {
	case s.Config.Store.URL == "":
		return diagnosis.Well("not used: the database is the embedded one")
	case s.postgres == nil:
		return s.absent
	}
	d, err := s.postgres.Describe(ctx)
	if err != nil {
		return diagnosis.Fail("look at PostgreSQL and the network to it", err)
	}
	standbys := "no synchronous standby (a failover may lose the newest commits)"
	if d.Standbys != "" {
		standbys = fmt.Sprintf("synchronous standbys %q", d.Standbys)
	}
	text := fmt.Sprintf("version %s, fsync on, %s, %d sessions in this database of %d that the server takes", d.Version, standbys, d.Sessions, d.MaxSessions)
	if stats := s.postgres.Stats(); stats.Waits > 0 {
		text += fmt.Sprintf("; reads waited %d times for one of %d connections", stats.Waits, stats.Limit)
	}
	return diagnosis.Well("%s", text)
}

const noPostgres = "PostgreSQL does not answer"

// replicas says which formats the programs read that use the database now.
func (s *opened) replicas(ctx context.Context) diagnosis.Line {
	switch {
	case s.Config.Store.URL == "":
		return diagnosis.Well("one at a time, since the database is the embedded one; this is latticekeep %s", s.Version)
	case s.postgres == nil:
		return s.skip()
	}
	d, err := s.postgres.Describe(ctx)
	if err != nil {
		return diagnosis.Skip(noPostgres)
	}
	return judgeReaders(d.Readers, s.Version)
}

// judgeReaders judges the formats that programs read, by their sessions.
func judgeReaders(readers map[int]int, version string) diagnosis.Line {
	var formats []string
	all := append(slices.Collect(maps.Keys(readers)), format.Reads) // what this program reads
	slices.Sort(all)
	for _, f := range slices.Compact(all) {
		formats = append(formats, fmt.Sprint(f))
	}
	text := fmt.Sprintf("programs that use the database read store formats up to %s; this is latticekeep %s, which reads up to %d", strings.Join(formats, " and "), version, format.Reads)
	if len(formats) > 1 {
		return diagnosis.Warn("finish the upgrade: end the replicas of the older release", "%s", text)
	}
	return diagnosis.Well("%s", text)
}

// Differences of clocks. Beyond an hour a server does not serve (package clock).
const (
	tolerable = 5 * time.Second
	hopeless  = time.Hour
)

// clock compares this machine's clock with the database's and with the newest entry.
func (s *opened) clock(ctx context.Context) diagnosis.Line {
	if s.store == nil {
		return s.skip()
	}
	now, against := time.Now(), "the newest entry"
	var apart time.Duration
	if s.postgres != nil {
		shared, err := s.postgres.Time(ctx)
		if err != nil {
			return diagnosis.Skip(noPostgres)
		}
		now = time.Now()
		apart, against = now.Sub(shared), "PostgreSQL's and the newest entry"
		now = shared // entries have its time
	}
	var head audit.Position
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		head, err = audit.ReadHead(r)
		return err
	})
	if err != nil {
		return diagnosis.Skip("the store does not answer")
	}
	return judgeClock(now, apart, against, head)
}

func judgeClock(now time.Time, apart time.Duration, against string, head audit.Position) diagnosis.Line {
	newest := time.UnixMicro(head.Micros)
	ahead := newest.Sub(now)
	switch {
	case apart.Abs() > hopeless:
		return diagnosis.Fail("set the wrong clock right: a server does not serve with it", fmt.Errorf("this machine's clock and PostgreSQL's are %s apart", age(apart)))
	case head.Sequence > 0 && ahead > tolerable:
		return diagnosis.Fail("set the clock right. New entries get the time of the newest one until it is past; what expires, expires by the clock",
			fmt.Errorf("the newest entry, %d, is of %s, which is %s in the future: the clock was set back, or was wrong when it was written", head.Sequence, instant(newest), age(ahead)))
	case apart.Abs() > tolerable:
		return diagnosis.Warn("see that both machines keep their time (chrony, systemd-timesyncd)", "this machine's clock and PostgreSQL's are %s apart", age(apart))
	}
	return diagnosis.Well("it agrees with %s", against)
}

// judgeRows judges the rows by what a running server has seen of them.
func judgeRows(w *watch.Watcher) diagnosis.Line {
	const remedy = "the log of the server names the row: stop the server and run latticekeep doctor --config FILE"
	scan := w.LastScan()
	switch halted := w.State.Halted(); {
	case halted != nil:
		return diagnosis.Fail(remedy, halted)
	case scan.Wrong > 0:
		return diagnosis.Fail(remedy, fmt.Errorf("the scan of %s found rows that are not those that the log commits to: %d", instant(scan.At), scan.Wrong))
	case !w.State.Complete():
		return diagnosis.Warn("finish the upgrade: rows are bound to the log once no replica of an earlier release runs", "the stored rows are not bound to the audit log yet")
	case scan.At.IsZero():
		return diagnosis.Well("every row that was read is the one that the log commits to; the first scan of all rows is not over")
	}
	return diagnosis.Well("the scan of %s found every row to be the one that the log commits to", instant(scan.At))
}

// judgeProof judges the log by how far a running server has verified it.
func (d Deployment) judgeProof(log *writer.Log, p verify.Proof) diagnosis.Line {
	head := fmt.Sprintf("the head is entry %d", log.Newest())
	if halted := log.HaltedBy(); halted != nil {
		return diagnosis.Fail("start the newer copy of the database, or accept the loss: latticekeep audit accept-rollback", halted)
	}
	switch p.Status {
	case verify.ProofBroken:
		return diagnosis.Fail("restore a backup from before, and find out who can write the database: latticekeep audit verify", p.Broken)
	case verify.ProofDisabled:
		return diagnosis.Warn("set audit.verification", "%s; the log is not verified while the server runs (audit.verification is 0s)", head)
	case verify.ProofVerified:
		return diagnosis.Well("%s, and the log is verified up to entry %d, as of %s", head, p.VerifiedTo, instant(p.At))
	}
	return diagnosis.Well("%s; this process has verified up to entry %d so far", head, p.VerifiedTo)
}

var noAnchor = diagnosis.Warn("set audit.anchor.bucket to a place outside of the database and of its machine",
	"no place keeps a checkpoint: an older copy of the database that is put back is not noticed")

// judgeAnchors judges the places by the last look of a running server. newest is the sequence of the
// newest entry.
func (d Deployment) judgeAnchors(all []keeper.AnchorStatus, newest uint64) (lines []diagnosis.Line) {
	for _, a := range all {
		text := fmt.Sprintf("%s: its checkpoint is of entry %d, and the head is entry %d", a.Name, a.Sequence, newest)
		switch a.State {
		case keeper.AnchorOK:
			if a.Sequence == 0 {
				lines = append(lines, diagnosis.Well("%s: it can be read, and keeps no checkpoint yet", a.Name))
				continue
			}
			lines = append(lines, judgeLag(a.Name, a.Sequence, a.Time, newest, time.Now()))
		case keeper.AnchorRollback:
			lines = append(lines, diagnosis.Fail(rollbackRemedy, errors.New(text+": the database is an older copy, or another one")))
		case keeper.AnchorRefused:
			lines = append(lines, diagnosis.Fail(foreignRemedy, fmt.Errorf("%s: %w", a.Name, errForeign)))
		default:
			lines = append(lines, diagnosis.Fail(bucketRemedy, fmt.Errorf("%s: it could not be read or written at the last look", a.Name)))
		}
	}
	if len(lines) == 0 {
		lines = append(lines, noAnchor)
	}
	return lines
}

const (
	rollbackRemedy = "start the newer copy of the database if there is one; otherwise accept the loss: latticekeep audit accept-rollback"
	foreignRemedy  = "find out who wrote there; give each deployment a place of its own"
	bucketRemedy   = "bring the place back, and check its URL, its credentials and the network"
)

var errForeign = errors.New("it keeps what is no checkpoint of this log")

// lag is how old an anchored checkpoint may be while there are newer entries, as the alert
// LatticekeepAnchorBehind has it.
const lag = 15 * time.Minute

// judgeLag judges a checkpoint that the log has. until is now, or when the newest entry was written to
// a stopped deployment.
func judgeLag(name string, sequence uint64, at time.Time, newest uint64, until time.Time) diagnosis.Line {
	text := fmt.Sprintf("%s: its checkpoint is of entry %d, %d behind the head", name, sequence, newest-min(newest, sequence))
	if sequence < newest && until.Sub(at) > lag {
		return diagnosis.Warn("see the log of the server for keeping the anchor", "%s, and of %s", text, instant(at))
	}
	return diagnosis.Well("%s", text)
}

// anchors compares the checkpoints in the places with a store that no server uses.
func (s *opened) anchors(ctx context.Context) (lines []diagnosis.Line) {
	c := s.Config.Audit.Anchor
	if (s.ConfigMap == nil || c.ConfigMap == "") && c.Bucket == "" {
		return []diagnosis.Line{noAnchor}
	}
	switch {
	case s.chain == nil && s.fresh && c.Bucket != "":
		if err := s.reach(ctx, "audit.anchor.bucket", c.Bucket); err != nil {
			return []diagnosis.Line{diagnosis.Fail(bucketRemedy, err)}
		}
		return []diagnosis.Line{diagnosis.Well("the first start begins them")}
	case s.chain == nil:
		return []diagnosis.Line{diagnosis.Skip(cmp.Or(s.why, "there is no log that a checkpoint could be compared with"))}
	}
	if s.ConfigMap != nil && c.ConfigMap != "" {
		a, err := s.ConfigMap(s.chain.ChainID)
		lines = append(lines, s.compareAnchor(ctx, "configmap", a, err))
	}
	if c.Bucket != "" {
		b, err := objects.OpenExisting(ctx, c.Bucket)
		if err != nil {
			return append(lines, diagnosis.Fail(bucketRemedy, fmt.Errorf("bucket: %w", err)))
		}
		defer b.Close()
		lines = append(lines, s.compareAnchor(ctx, "bucket", keeper.NewBucketAnchor(s.chain.ChainID, b), nil))
	}
	return lines
}

func (s *opened) compareAnchor(ctx context.Context, name string, a keeper.Anchor, err error) diagnosis.Line {
	var note []byte
	if err == nil {
		note, err = a.Load(ctx)
	}
	if err != nil {
		return diagnosis.Fail(bucketRemedy, fmt.Errorf("%s: %w", name, err))
	}
	if note == nil {
		return diagnosis.Warn("start the server, which writes one; if it was kept before, find out who removed it", "%s: it can be read, and keeps no checkpoint of this log", name)
	}
	c, err := audit.ParseCheckpoint(note, s.chain.Key)
	if err != nil || c.ChainID != s.chain.ChainID {
		return diagnosis.Fail(foreignRemedy, fmt.Errorf("%s: %w", name, errForeign))
	}
	var state chain.LogState
	var lost *audit.RollbackError
	err = s.store.View(ctx, func(r store.Reader) (err error) {
		if state, err = s.chain.ReadState(r); err == nil {
			lost, err = s.chain.FindLossOf(r, state, c)
		}
		return err
	})
	switch {
	case err != nil:
		return diagnosis.Fail("look at the line of the chain", fmt.Errorf("comparing the checkpoint of the %s with the log: %w", name, err))
	case lost != nil:
		return diagnosis.Fail(rollbackRemedy, fmt.Errorf("%s: its checkpoint is of entry %d, and the head is entry %d: %w", name, c.Sequence, state.Head.Sequence, lost))
	}
	return judgeLag(name, c.Sequence, c.Time, state.Head.Sequence, time.UnixMicro(state.Head.Micros))
}
