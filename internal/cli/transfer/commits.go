package transfer

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/backup/commits"
	"github.com/latticekeep/latticekeep/internal/backup/restore"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/internal/store"
)

// ownBackup matches the name of a backup that a server has taken by itself: what comes before, and the
// id of the chain.
var ownBackup = regexp.MustCompile(`^(|.*/)backup/([^/]+)/[0-9]{8}-[0-9]{6}\.backup$`)

// logFolder returns the bucket of a backup that a server has taken by itself, and the folder of the
// logs of commits in it. ok is false for any other backup.
func logFolder(input string) (bucket, folder string, ok bool) {
	bucket, name, isObject := objectOf(input)
	if !isObject {
		path, err := filepath.Abs(input)
		if err != nil {
			return "", "", false
		}
		name = path
	}
	parts := ownBackup.FindStringSubmatch(name)
	if parts == nil {
		return "", "", false
	}
	if isObject {
		return bucket, parts[1] + commits.Folder(parts[2]), true
	}
	return (&url.URL{Scheme: "file", Path: filepath.Clean(parts[1])}).String(), commits.Folder(parts[2]), true
}

// objectOf returns the URL of the bucket and the name of the object that --input names.
func objectOf(input string) (bucket, name string, ok bool) {
	u, err := url.Parse(input)
	if err != nil || u.Scheme != "s3" && u.Scheme != "gs" {
		return "", "", false
	}
	name = strings.TrimPrefix(u.Path, "/")
	u.Path, u.RawPath = "", ""
	return u.String(), name, true
}

// openLog returns a reader of the commits that the backup in s does not have, and nil when there are
// none to look for.
func openLog(ctx context.Context, s store.Store, from *backup.Reader, input string, identities []backup.Identity) (*commits.Reader, error) {
	bucket, folder, ok := logFolder(input)
	if !ok {
		return nil, nil
	}
	l := commits.Log{Folder: folder, Chain: from.Header.Chain, Identity: from.Header.Identity, Identities: identities}
	ok, err := readPlace(ctx, s, &l)
	if err != nil || !ok {
		return nil, err
	}
	if l.Bucket, err = objects.OpenExisting(ctx, bucket); err != nil {
		return nil, fmt.Errorf("opening the bucket of the log of commits: %w", err)
	}
	return commits.NewReader(l), nil
}

// readPlace reads from a store up to where it has a log, and reports whether it names one.
func readPlace(ctx context.Context, s store.Store, l *commits.Log) (there bool, err error) {
	err = s.View(ctx, func(r store.Reader) (err error) {
		if l.Place, there, err = commits.ReadPlace(r); err == nil {
			l.From, err = commits.ReadHead(r)
		}
		return err
	})
	return there, err
}

// replay applies the commits that the backup in s does not have. It returns up to where, and what to
// tell people.
func replay(ctx context.Context, s store.Store, id string, from *backup.Reader, input string, identities []backup.Identity) (reached commits.Reached, text string, err error) {
	log, err := openLog(ctx, s, from, input, identities)
	if err != nil || log == nil {
		return reached, "", err
	}
	if err := restore.Replay(ctx, s, log, id); err != nil {
		return reached, "", fmt.Errorf("%w: to restore without it, give --backup-only", err)
	}
	others, err := log.Others(ctx)
	if err != nil {
		return reached, "", fmt.Errorf("looking for other logs of commits: %w", err)
	}
	reached, text = log.Reached(), "commits: the log has none that the backup does not have\n"
	if !reached.Time.IsZero() {
		text = fmt.Sprintf("commits: applied up to %s, the last one in the log\n", reached.Time.Format(time.RFC3339))
	}
	if len(others) > 0 {
		text += fmt.Sprintf("The log of commits ends there, and another one goes on at %s: a backup that was taken after that has more.\n", others[0].Began.Format(time.RFC3339))
	}
	return reached, text, nil
}
