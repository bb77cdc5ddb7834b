package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/vault/lifetime"
)

// State is what became of a delivery.
type State string

// The states.
const (
	Waiting   State = "waiting"   // for its first or next attempt
	Delivered State = "delivered" // the receiver answered with a status from 200 to 299
	Dead      State = "dead"      // given up; it can be sent again
)

// Types of events.
const (
	ExpiresSoon = "credential.expires_soon"
	TestEvent   = "webhook.test"
)

// Delivery is one event on its way to one webhook.
type Delivery struct {
	ID        string // its webhook-id
	Event     string // type of the event
	State     State
	Attempts  int
	Status    int       // status of the last answer; 0: there was none
	Reason    string    // why there was none; empty otherwise
	CreatedAt time.Time // when the event happened
	TriedAt   time.Time // the last attempt; zero: none
	NextAt    time.Time // no attempt before this; zero: at once, or none
}

// Bounds of the deliveries of a webhook.
const (
	maxDeliveries = 100 // kept deliveries; those that wait always stay
	maxWaiting    = 10  // beyond this nobody adds some by hand
	keepFor       = 30 * 24 * time.Hour
	maxNamed      = 100 // credentials in one event
)

// deliveryRow is a stored delivery. Its MAC keeps others from having a body of theirs signed.
type deliveryRow struct {
	Event     string          `json:"event"`
	Body      json.RawMessage `json:"body"`
	State     State           `json:"state"`
	Attempts  int             `json:"attempts,omitempty"`
	Status    int             `json:"status,omitempty"`
	Reason    string          `json:"reason,omitempty"`
	CreatedAt time.Time       `json:"created_at"`
	Since     time.Time       `json:"since"` // attempts end some days after this; later than created_at once it was sent again
	TriedAt   time.Time       `json:"tried_at,omitzero"`
}

func deliveryKey(tenant authz.TenantID, id, msg string) []byte {
	return append(deliveriesPrefix(tenant, id), msg...)
}

func (d deliveryRow) delivery(id string) Delivery {
	return Delivery{
		ID: id, Event: d.Event, State: d.State, Attempts: d.Attempts, Status: d.Status, Reason: d.Reason,
		CreatedAt: d.CreatedAt, TriedAt: d.TriedAt,
	}
}

// payload is the body of an event.
type payload struct {
	Type      string    `json:"type"`
	Timestamp time.Time `json:"timestamp"`
	Data      data      `json:"data"`
}

type data struct {
	TenantID    authz.TenantID `json:"tenant_id"`
	Credentials []expiring     `json:"credentials,omitempty"`
	More        bool           `json:"more,omitempty"` // there are more than maxNamed
}

type expiring struct {
	ID        string    `json:"credential_id"`
	ExpiresAt time.Time `json:"expires_at"`
	Days      int       `json:"days"` // 30, 7 or 1: it expires within so many
}

// newDelivery returns a delivery of an event that happens now.
func (s *Service) newDelivery(event string, d data) (deliveryRow, error) {
	now := s.now().UTC()
	body, err := json.Marshal(payload{event, now.Truncate(time.Second), d})
	return deliveryRow{Event: event, Body: body, State: Waiting, CreatedAt: now, Since: now}, err
}

// put stores a delivery to a webhook and has it sent. It forgets deliveries that are old or too many.
func (s *Service) put(tx store.Tx, tenant authz.TenantID, id, msg string, d deliveryRow) error {
	return errors.Join(
		s.prune(tx, tenant, id),
		s.rows.Put(tx, deliveryKey(tenant, id, msg), d),
		s.outbox.Put(tx, msg, []byte(string(tenant)+"/"+id)),
	)
}

// stored is a delivery with its id.
type stored struct {
	id string
	deliveryRow
}

// deliveriesOf returns the deliveries of a webhook, newest first, without damaged ones.
func (s *Service) deliveriesOf(r store.Reader, tenant authz.TenantID, id string) (all []stored, err error) {
	prefix := deliveriesPrefix(tenant, id)
	err = r.Scan(store.Prefix(prefix), func(k, row []byte) bool {
		d := stored{id: string(k[len(prefix):])}
		if s.rows.Decode(k, row, &d.deliveryRow) == nil {
			all = append(all, d)
		}
		return true
	})
	slices.SortFunc(all, func(a, b stored) int {
		if c := b.CreatedAt.Compare(a.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.id, b.id)
	})
	return all, err
}

// isOld reports whether a delivery that is over is no longer shown.
func (s *Service) isOld(d deliveryRow) bool {
	return d.State != Waiting && s.now().Sub(d.Since) > keepFor
}

// prune makes room for another delivery of a webhook. Those that wait stay.
func (s *Service) prune(tx store.Tx, tenant authz.TenantID, id string) error {
	all, err := s.deliveriesOf(tx, tenant, id)
	for i, d := range all {
		if d.State != Waiting && (i >= maxDeliveries-1 || s.isOld(d.deliveryRow)) {
			err = errors.Join(err, tx.Delete(deliveryKey(tenant, id, d.id)))
		}
	}
	return err
}

// Deliveries returns the deliveries of a webhook in the last 30 days, newest first, and at most 100 of
// those that are over. Errors: fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) Deliveries(ctx context.Context, p authz.Principal, id string) ([]Delivery, error) {
	e := event(audit.WebhookListed, p, id)
	if err := s.admit(ctx, p, authz.ListWebhooks, e); err != nil {
		return nil, err
	}
	all := []Delivery{}
	err := s.store.View(ctx, func(r store.Reader) error {
		all = all[:0]
		if err := s.find(r, p.Tenant, e.Resource.ID); err != nil {
			return err
		}
		found, err := s.deliveriesOf(r, p.Tenant, id)
		for _, d := range found {
			if s.isOld(d.deliveryRow) {
				continue
			}
			one := d.delivery(d.id)
			if d.State == Waiting {
				next, bad := s.outbox.Next(r, d.id)
				one.NextAt, err = next, errors.Join(err, bad)
			}
			all = append(all, one)
		}
		return err
	})
	if errors.Is(err, errWebhook) {
		return nil, s.guard.Refuse(ctx, e, audit.Denied, reasonNoWebhook, errWebhook)
	}
	if err != nil {
		return nil, fmt.Errorf("listing deliveries: %w", err)
	}
	return all, s.guard.Record(ctx, e)
}

// Test sends a test event to a webhook, which says nothing but that it is one. Errors: fault.Forbidden,
// fault.NotFound, fault.Conflict if too many deliveries wait, fault.Unavailable.
func (s *Service) Test(ctx context.Context, p authz.Principal, id string) (Delivery, error) {
	d, err := s.newDelivery(TestEvent, data{TenantID: p.Tenant})
	if err != nil {
		return Delivery{}, err
	}
	return s.send(ctx, p, id, authz.NewID(deliveryPrefix), func(store.Reader) (deliveryRow, error) { return d, nil })
}

// Resend sends a dead letter again, under the same webhook-id. Errors: those of [Service.Test], and
// fault.Conflict for a delivery that is not dead.
func (s *Service) Resend(ctx context.Context, p authz.Principal, id, msg string) (Delivery, error) {
	now := s.now().UTC()
	if !authz.ValidID(deliveryPrefix, msg) {
		msg = ""
	}
	return s.send(ctx, p, id, msg, func(r store.Reader) (d deliveryRow, err error) {
		found := msg != ""
		if found {
			found, err = s.rows.Get(r, deliveryKey(p.Tenant, id, msg), &d)
		}
		switch {
		case err != nil:
			return d, err
		case !found || s.isOld(d):
			return d, records.Refuse(reasonNoDelivery, errDelivery)
		case d.State != Dead:
			return d, records.Refuse(reasonNotDead, errNotDead)
		}
		d.State, d.Since = Waiting, now
		return d, nil
	})
}

// send puts a delivery that somebody asks for.
func (s *Service) send(ctx context.Context, p authz.Principal, id, msg string, get func(store.Reader) (deliveryRow, error)) (d Delivery, err error) {
	e := event(audit.WebhookSent, p, id)
	if err := s.admit(ctx, p, authz.SendWebhook, e); err != nil {
		return d, err
	}
	err = s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		if err := s.find(tx, p.Tenant, e.Resource.ID); err != nil {
			return err
		}
		row, err := get(tx)
		if err != nil {
			return err
		}
		all, err := s.deliveriesOf(tx, p.Tenant, id)
		if err != nil {
			return err
		}
		if n := len(slices.DeleteFunc(all, func(d stored) bool { return d.State != Waiting })); n >= maxWaiting {
			return records.Refuse(reasonBusy, errBusy)
		}
		d = row.delivery(msg)
		e.Attributes = map[string]string{attributeDelivery: msg}
		return s.put(tx, p.Tenant, id, msg, row)
	})
	if err != nil {
		return Delivery{}, fmt.Errorf("sending to a webhook: %w", err)
	}
	s.outbox.Notify()
	return d, nil
}

// Remind prepares a delivery to each webhook of a tenant that credentials expire soon. soon returns
// them; it is called only if there is a webhook. The result stores the deliveries. Errors: those of soon,
// fault.Unavailable.
func (s *Service) Remind(ctx context.Context, tenant authz.TenantID, soon lifetime.Find) (put func(store.Tx) error, err error) {
	var ids []string
	err = s.store.View(ctx, func(r store.Reader) error {
		ids, err = idsOf(r, tenant)
		return err
	})
	if err != nil || len(ids) == 0 {
		return func(store.Tx) error { return nil }, err
	}
	all, err := soon(ctx)
	if err != nil || len(all) == 0 { // renewed meanwhile
		return func(store.Tx) error { return nil }, err
	}
	d, err := s.newDelivery(ExpiresSoon, named(tenant, all))
	if err != nil {
		return nil, err
	}
	msgs := make(map[string]string)
	for _, id := range ids {
		msgs[id] = authz.NewID(deliveryPrefix)
	}
	return func(tx store.Tx) error {
		for _, id := range ids {
			row, err := tx.Get(key(tenant, id))
			if err == nil && row != nil {
				err = s.put(tx, tenant, id, msgs[id], d)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// named returns the data of an event about credentials.
func named(tenant authz.TenantID, all []lifetime.Soon) data {
	d := data{TenantID: tenant, Credentials: []expiring{}}
	for i, one := range all {
		if d.More = i == maxNamed; d.More {
			break
		}
		d.Credentials = append(d.Credentials, expiring{one.ID, one.ExpiresAt.UTC(), one.Days})
	}
	return d
}
