package mail

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/store"
)

// attempt is what is known of the tries of a mail, in a row of its own: none before
// the first. Whoever is about to send a mail claims it there, so that of several
// replicas one does.
//
// A claim ends when whoever made it is done, and else by being watched: the others
// take over one that they have seen unchanged for claimTime by their own clocks,
// since those of other machines may be minutes apart.
type attempt struct {
	Claim    string    `json:"claim,omitempty"` // of the try that is going on, or was when its process ended
	Failures int       `json:"failures,omitempty"`
	Next     time.Time `json:"next,omitzero"` // before this nobody tries
}

// claimTime is longer than a try takes, by as much as its outcome may take to be
// stored.
const claimTime = 2 * sendTimeout

const attemptPrefix = "mail-attempt/"

func (l letter) attemptKey() []byte { return []byte(attemptPrefix + l.id()) }

// sighting is a claim of another replica, and since when it has been seen here.
type sighting struct {
	row   string
	since time.Time
}

// sightings are the claims of others that are watched. Only [Outbox.Run] uses them.
type sightings map[string]sighting // by mail

// wait returns for how long the mail is not ours to send. After a restart every mail
// is tried at once, whenever it was to be tried next: what kept it back may be mended.
func (s sightings) wait(l letter, now time.Time, restarted bool) time.Duration {
	var a attempt
	if l.attempt == nil || json.Unmarshal(l.attempt, &a) != nil { // what is damaged keeps no mail back
		return 0
	}
	if a.Claim == "" {
		if restarted {
			return 0
		}
		return min(a.Next.Sub(now), lastRetry) // a longer one is of a clock that was wrong
	}
	seen, known := s[l.id()]
	if !known || seen.row != string(l.attempt) || now.Before(seen.since) {
		seen = sighting{string(l.attempt), now}
		s[l.id()] = seen
	}
	return seen.since.Add(claimTime).Sub(now)
}

// claim makes a mail this replica's to send, unless another one was faster.
func (c *courier) claim(ctx context.Context, l *letter) (claimed bool, err error) {
	var a attempt
	if l.attempt != nil && json.Unmarshal(l.attempt, &a) != nil {
		a = attempt{}
	}
	a.Claim, a.Next = authz.NewID("claim"), time.Time{}
	row, err := json.Marshal(a)
	if err != nil {
		return false, err
	}
	err = c.store.Update(ctx, func(tx store.Tx) error {
		claimed = false
		mail, err := tx.Get(l.key)
		if err != nil || mail == nil {
			return err
		}
		now, err := tx.Get(l.attemptKey())
		if err != nil || !bytes.Equal(now, l.attempt) {
			return err
		}
		claimed = true
		return tx.Put(l.attemptKey(), row)
	})
	if err != nil {
		return false, fmt.Errorf("claiming a mail: %w", err)
	}
	if claimed {
		l.attempt, l.failures = row, a.Failures
	}
	return claimed, nil
}

// release ends the claim on a mail that was not sent, unless another replica has
// taken it over.
func (c *courier) release(ctx context.Context, l letter, a attempt) error {
	row, err := json.Marshal(a)
	if err != nil {
		return err
	}
	err = c.store.Update(ctx, func(tx store.Tx) error {
		now, err := tx.Get(l.attemptKey())
		if err != nil || !bytes.Equal(now, l.attempt) {
			return err
		}
		return tx.Put(l.attemptKey(), row)
	})
	if err != nil {
		return fmt.Errorf("releasing a mail: %w", err)
	}
	return nil
}
