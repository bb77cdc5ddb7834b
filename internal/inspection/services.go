package inspection

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/backup/schedule"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/kms"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/offline"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/volume"
)

// tryKMS has the current key wrap and open a random value and open the deployment's own key. The
// previous keys only open.
func (s *opened) tryKMS(ctx context.Context, keys []*kms.Key) []diagnosis.Line {
	current, previous := keys[0], make([]keyring.KMS, 0, len(keys))
	for _, k := range keys[1:] {
		previous = append(previous, k)
	}
	if err := tryKey(ctx, current); err != nil {
		return []diagnosis.Line{kmsFailure(err)}
	}
	var lines []diagnosis.Line
	if missing := 1 + len(s.Config.KMS.Former) - len(keys); missing > 0 && s.Config.KMS.URL != "" {
		lines = append(lines, diagnosis.Warn("give it back, or move away from it with latticekeep kms rewrap", "%d of the keys in kms.former could not be opened at the start", missing))
	}
	text := fmt.Sprintf("kms.url (%s) wraps and opens", current.ID())
	if s.store == nil || !s.made {
		return append(lines, diagnosis.Well("%s; whether it is the key of the store was not looked at: %s", text, cmp.Or(s.why, "there is no deployment yet")))
	}
	if err := keyring.CheckKMS(ctx, s.store, current, previous); err != nil {
		if fault.ReasonOf(err) == fault.ReasonStore {
			return append(lines, diagnosis.Well("%s; whether it is the key of the store was not looked at: the store does not answer", text))
		}
		return append(lines, kmsFailure(err))
	}
	if len(previous) > 0 {
		text += fmt.Sprintf(", and so do %d of kms.former", len(previous))
	}
	return append(lines, diagnosis.Well("%s; the deployment's own key opens", text))
}

// kmsContext is what the random value is bound to.
const kmsContext = "latticekeep/diagnosis"

func tryKey(ctx context.Context, k keyring.KMS) error {
	value := make([]byte, 32)
	_, _ = rand.Read(value) // never fails
	wrapped, err := k.Wrap(ctx, kmsContext, value)
	if err != nil {
		return err
	}
	back, err := k.Unwrap(ctx, kmsContext, wrapped)
	if err == nil && !bytes.Equal(back, value) {
		err = errors.New("the key-management service has opened another value than it has wrapped")
	}
	return err
}

func kmsFailure(err error) diagnosis.Line {
	remedy := "look at the key-management service and the network to it"
	switch {
	case errors.Is(err, kms.ErrCredentials):
		remedy = "give this process credentials that work (kms.tokenFile, or those of its platform)"
	case fault.Of(err) == fault.Forbidden:
		remedy = "enable the key, and let the credentials use it"
	case fault.Of(err) == fault.Invalid:
		remedy = "do what the message says"
	}
	return diagnosis.Fail(remedy, fmt.Errorf("kms.url: %w", err))
}

// openKMS opens the keys of the configuration. A key file that the first start makes is none yet.
func (s *opened) openKMS(ctx context.Context) (keys []*kms.Key, lines []diagnosis.Line) {
	c := s.Config.KMS
	if path, ok := offline.KMSFile(c.URL); ok && s.fresh && !isFile(path) {
		if _, err := os.Stat(filepath.Dir(path)); err != nil {
			return nil, []diagnosis.Line{kmsFailure(fmt.Errorf("the first start makes the key file, and its folder is not there: %w", err))}
		}
		return nil, []diagnosis.Line{diagnosis.Well("kms.url: the first start makes the key file")}
	}
	for i, text := range append([]string{c.URL}, c.Former...) {
		k, err := kms.Open(ctx, text, kms.Options{TokenFile: c.TokenFile, PQRequired: s.Config.TLS.PQRequired})
		switch {
		case err != nil && i == 0:
			return nil, []diagnosis.Line{kmsFailure(err)}
		case err != nil: // a start goes on without it
			lines = append(lines, diagnosis.Warn("give it back, or move away from it with latticekeep kms rewrap", "kms.former: %v", err))
			continue
		}
		keys = append(keys, k)
	}
	return keys, lines
}

// kms opens the keys, tries them and closes them.
func (s *opened) kms(ctx context.Context) []diagnosis.Line {
	keys, lines := s.openKMS(ctx)
	if keys == nil {
		return lines
	}
	defer closeKeys(keys)
	s.Config.KMS.Former = s.Config.KMS.Former[:0:0] // what does not open has a line already
	return append(lines, s.tryKMS(ctx, keys)...)
}

func closeKeys(keys []*kms.Key) {
	for _, k := range keys {
		_ = k.Close() // nothing is left to do on an error
	}
}

func (s *opened) archive(ctx context.Context) diagnosis.Line {
	c := s.Config.Audit.Retention
	if c.Archive == "" {
		return diagnosis.Well("not used: all entries stay in the database (audit.retention.archive is not set)")
	}
	if err := s.reach(ctx, "audit.retention.archive", c.Archive); err != nil {
		return diagnosis.Fail(bucketRemedy, err)
	}
	if s.store == nil {
		return diagnosis.Well("it can be read; whether it has its oldest segment was not looked at: %s", s.why)
	}
	var segments []audit.Segment
	err := s.store.View(ctx, func(r store.Reader) (err error) {
		segments, err = audit.Segments(r)
		return err
	})
	if err != nil {
		return diagnosis.Fail("look at the line of the store", err)
	}
	if len(segments) > 0 {
		b, err := objects.OpenExisting(ctx, c.Archive)
		there := false
		if err == nil {
			defer b.Close()
			there, err = b.Exists(ctx, segments[0].Name)
		}
		switch {
		case err != nil:
			return diagnosis.Fail(bucketRemedy, fmt.Errorf("audit.retention.archive: %w", err))
		case !there:
			return diagnosis.Fail("restore it from the versions of the bucket, and exclude the archive from rules that delete",
				fmt.Errorf("audit.retention.archive lacks its oldest segment, %s", segments[0].Name))
		}
	}
	if s.oldest != nil && c.Keep > 0 {
		oldest, err := s.oldest(ctx)
		if behind := time.Since(oldest) - c.Keep; err == nil && !oldest.IsZero() && behind > 2*24*time.Hour {
			return diagnosis.Warn("see the log of the server: moving audit entries to the archive fails, or no server runs",
				"entries are in the database %s longer than audit.retention.keep", age(behind))
		}
	}
	return diagnosis.Well("it can be read, and has its oldest segment of %d", len(segments))
}

// scratchPart is how much room verifying a backup takes, as a part of the database.
const scratchPart = 3.0 / 2

// backups judges the bucket, the room and the age of the newest backups.
func (s *opened) backups(ctx context.Context) []diagnosis.Line {
	c := s.Config.Backup
	if c.Bucket == "" {
		return []diagnosis.Line{diagnosis.Warn("set backup.bucket and backup.recipients, or see that something else takes backups",
			"the server takes no backups by itself (backup.bucket is not set)")}
	}
	var lines []diagnosis.Line
	if err := s.reach(ctx, "backup.bucket", c.Bucket); err != nil {
		lines = append(lines, diagnosis.Fail(bucketRemedy, err))
	}
	if s.store == nil || !s.made {
		if len(lines) == 0 {
			lines = append(lines, diagnosis.Well("backup.bucket can be read; how old the newest backup is was not looked at: %s", cmp.Or(s.why, "there is no deployment yet")))
		}
		return lines
	}
	if u, err := s.store.Usage(ctx); err == nil {
		need := int64(float64(u.Size) * scratchPart)
		dir := cmp.Or(c.Scratch, s.Config.DataDir)
		if path, _, err := existing(dir); err != nil {
			lines = append(lines, diagnosis.Fail("check the path, and that its volume is mounted", fmt.Errorf("backup.scratch: %w", err)))
		} else if _, free, _, err := volume.OfPath(path); err == nil && free < need {
			lines = append(lines, diagnosis.Warn("make room, or name another folder in backup.scratch",
				"backup.scratch has %s free, and verifying a backup takes about %s", size(free), size(need)))
		}
	}
	status, err := schedule.New(nil, schedule.Config{Store: s.store, Place: c.Bucket}).Status(ctx)
	if err != nil {
		return append(lines, diagnosis.Fail("look at the line of the store", err))
	}
	return append(lines, judgeBackups(status, c.Every, time.Now()))
}

// judgeBackups judges the age of the newest backups, as the alert LatticekeepBackupOld does.
func judgeBackups(s schedule.Status, every time.Duration, now time.Time) diagnosis.Line {
	const remedy = "see the log of the server for taking or verifying a backup, and take one by hand meanwhile: latticekeep backup"
	switch old := now.Sub(s.Verified); {
	case s.Taken.IsZero():
		return diagnosis.Warn("start the server, which takes the first one within minutes; otherwise see its log", "there is no backup in backup.bucket yet")
	case s.Verified.IsZero():
		return diagnosis.Warn(remedy, "the newest backup, of %s, was not verified, and no other one was", instant(s.Taken))
	case old > 2*every:
		return diagnosis.Fail(remedy, fmt.Errorf("the newest verified backup is of %s, %s ago, and one is due every %s", instant(s.Verified), age(old), age(every)))
	case s.Taken.After(s.Verified):
		return diagnosis.Warn(remedy, "the newest backup, of %s, is not verified; the newest that is, is of %s", instant(s.Taken), instant(s.Verified))
	}
	return diagnosis.Well("the newest one is of %s, %s ago, verified, %s", instant(s.Taken), age(now.Sub(s.Taken)), size(s.Bytes))
}

// waiting is how long an e-mail may wait, as the alert LatticekeepMailWaits has it.
const waiting = 15 * time.Minute

// mail judges the mail server and the outbox. stats is what a running server knows of it, or nil.
func (s *opened) mail(ctx context.Context, stats *mail.Stats) []diagnosis.Line {
	address := s.Config.Mail.SMTP.Address
	if address == "" {
		return []diagnosis.Line{diagnosis.Well("not used: no mail server is configured")}
	}
	var lines []diagnosis.Line
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		lines = append(lines, diagnosis.Warn("look at the mail server and the network to it; e-mails wait in the database meanwhile", "the mail server cannot be reached: %v", err))
	} else {
		_ = conn.Close()
	}
	queued := 0
	switch {
	case stats != nil:
		queued = stats.Queued
		if waits := time.Since(stats.Oldest); !stats.Oldest.IsZero() && waits > waiting {
			lines = append(lines, diagnosis.Warn("see the log of the server for sending an e-mail", "the oldest e-mail that could not be sent waits for %s", age(waits)))
		}
	case s.store != nil:
		if queued, err = mail.Queued(ctx, s.store); err != nil {
			return append(lines, diagnosis.Fail("look at the line of the store", err))
		}
	}
	if len(lines) == 0 {
		lines = append(lines, diagnosis.Well("the mail server accepts connections; e-mails that wait: %d", queued))
	}
	return lines
}
