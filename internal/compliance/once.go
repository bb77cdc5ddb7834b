package compliance

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Replicas that assess a tenant at the same time find the same entry missing. Each
// is written by one of them, with a row under the keyring's MAC that says so: of the
// state that was recorded last, and of the day whose scores were.

func statedKey(tenant authz.TenantID) []byte { return []byte("compliance/stated/" + string(tenant)) }

func dailyKey(tenant authz.TenantID) []byte { return []byte("compliance/daily/" + string(tenant)) }

// stated is what a row says of the state that was recorded last.
type stated struct {
	At     time.Time `json:"at"`
	Digest []byte    `json:"digest"` // of the attributes
}

func (s State) digest() []byte {
	b, _ := json.Marshal(s.attributes()) // a map of strings, in the order of its keys
	sum := sha256.Sum256(b)
	return sum[:]
}

// errWritten says that another replica has written the entry.
var errWritten = errors.New("another replica was faster")

// recordOnce records an event, with a row that says so, unless there is one that
// says that somebody else has.
func (s *Service) recordOnce(ctx context.Context, e audit.Event, key, content []byte, written func(content []byte) bool) error {
	row := s.seal(key, content)
	return s.store.Update(ctx, func(tx store.Tx) error {
		before, err := tx.Get(key)
		if err != nil {
			return err
		}
		if before != nil {
			// What is not ours says nothing.
			if content, err := s.unseal(key, before); err == nil && written(content) {
				return errWritten
			}
		}
		if err := tx.Put(key, row); err != nil {
			return err
		}
		_, err = s.guard.Append(tx, e)
		return err
	})
}

// recordState records the state of the deployment in the tenant's part, unless
// another replica has recorded the same one since then. Error: errWritten.
func (s *Service) recordState(ctx context.Context, tenant authz.TenantID, state State, since time.Time) error {
	own := stated{s.now().UTC(), state.digest()}
	content, err := json.Marshal(own)
	if err != nil {
		return fault.Wrap(fault.Internal, fault.Internal.Error(), err)
	}
	e := audit.Event{
		Type: audit.ComplianceAssessed, Outcome: audit.Success, Principal: assessor(tenant),
		Resource: audit.Resource{Type: audit.ComplianceResource}, Attributes: state.attributes(),
	}
	return s.recordOnce(ctx, e, statedKey(tenant), content, func(content []byte) bool {
		var last stated
		return json.Unmarshal(content, &last) == nil && bytes.Equal(last.Digest, own.Digest) && !last.At.Before(since)
	})
}

// recordScores records the scores of a day, unless another replica has. Error:
// errWritten.
func (s *Service) recordScores(ctx context.Context, tenant authz.TenantID, all []Assessment, today time.Time) error {
	content := []byte(today.Format(time.DateOnly))
	return s.recordOnce(ctx, scoredAll(tenant, all), dailyKey(tenant), content, func(last []byte) bool { return bytes.Equal(last, content) })
}
