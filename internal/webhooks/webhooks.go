// Package webhooks tells addresses that a tenant names what happens in it, as Standard Webhooks
// (https://www.standardwebhooks.com, specification 1.0) describes.
//
// # Model
//
// A tenant has a few webhooks: each is a URL and a secret that the server makes. An event becomes one
// delivery for each webhook, which is put in the transaction of what it reports. Package outbox tries a
// delivery until the receiver answers with a status from 200 to 299, for about three days. After that
// it is a dead letter, which is listed and can be sent again.
//
// # Invariants
//
//   - A delivery is sent at least once, and always under the same webhook-id.
//   - A body has ids and times only: no name, and nothing of a value.
//   - URL and secret are in the database as ciphertext only, under the tenant's wrapping key. They are in
//     no log line, entry or error, and the secret is shown once. A URL may hold a token.
//   - Only somebody whom no policy limits sees and changes webhooks, since they tell of all paths.
//
// Package egress makes the calls.
package webhooks

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/egress"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/outbox"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Bounds.
const (
	maxWebhooks    = 10  // webhooks of a tenant
	maxDescription = 255 // bytes
	secretSize     = 32  // bytes; the specification has 24 to 64
)

// Webhook is an address that is told.
type Webhook struct {
	ID          string
	Host        string // host of the URL; the rest may hold a token, and is not shown
	Description string
	CreatedAt   time.Time
}

// Request is what a webhook is to be.
type Request struct {
	URL         string
	Description string
}

// Service keeps the webhooks of tenants and delivers to them. It is safe for concurrent use.
type Service struct {
	store  store.Store
	guard  *guard.Guard
	keys   *keyring.Ring
	rows   *records.Store
	outbox *outbox.Outbox
	now    func() time.Time
}

// waits are the times to the next attempt after the first failure, the second one and so on: those that
// the specification proposes.
var waits = []time.Duration{
	5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 14 * time.Hour, 20 * time.Hour, 24 * time.Hour,
}

// parallel is how many deliveries are sent at the same time. Receivers that do not answer hold up those of
// other tenants for some time.
const parallel = 16

func wait(failed int) time.Duration { return waits[min(failed, len(waits))-1] }

// New returns the webhooks in a store.
func New(s store.Store, guard *guard.Guard, keys *keyring.Ring, now func() time.Time) *Service {
	return &Service{store: s, guard: guard, keys: keys, rows: records.New(s, guard, keys), now: now, outbox: outbox.New(outbox.Config{
		Store: s, Noun: "webhook", Retrying: "a webhook could not be sent; retrying", GivingUp: "giving up on a webhook", Rows: OutboxFamily, Attempts: "webhook-attempt/",
		Timeout: 3 * egress.Timeout, Parallel: parallel, Wait: wait, Longest: waits[len(waits)-1], Now: now,
	})}
}

var (
	errTooMany     = fault.New(fault.Conflict, "the tenant has 10 webhooks: delete those that nobody needs")
	errDescription = fault.New(fault.Invalid, "description has at most 255 bytes")
	errWebhook     = fault.New(fault.NotFound, "there is no such webhook: list the webhooks for those there are")
	errDelivery    = fault.New(fault.NotFound, "there is no such delivery: list the deliveries of the webhook for those there are")
	errNotDead     = fault.New(fault.Conflict, "the delivery is not dead: it waits for its next attempt, or was delivered")
	errBusy        = fault.New(fault.Conflict, "10 deliveries of this webhook wait: send this once some of them are delivered or dead")
	errDenied      = fault.New(fault.Forbidden, "access denied")
)

// Reasons in audit entries.
const (
	reasonTooMany    = "too_many_webhooks"
	reasonNoWebhook  = "no_such_webhook"
	reasonNoDelivery = "no_such_delivery"
	reasonNotDead    = "not_dead"
	reasonBusy       = "too_many_waiting"
	reasonNoSuccess  = "no_success"
)

// attributeDelivery has the id of a delivery, which is its webhook-id.
const attributeDelivery = "delivery"

// Prefixes of ids.
const (
	idPrefix       = "hook"
	deliveryPrefix = "msg"
)

// secretPrefix begins a secret as it is shown.
const secretPrefix = "whsec_"

// Families of the rows of webhooks, of their deliveries, and of those that wait.
const (
	Family         = "webhook/"
	DeliveryFamily = "webhook-delivery/"
	OutboxFamily   = "webhook-outbox/"
)

// content is the plaintext of a webhook's row.
type content struct {
	URL         string    `json:"url"`
	Description string    `json:"description,omitempty"`
	Secret      []byte    `json:"secret"` // not secret.Bytes, which are redacted in JSON
	CreatedAt   time.Time `json:"created_at"`
}

func tenantPrefix(tenant authz.TenantID) []byte { return []byte(Family + string(tenant) + "/") }

func key(tenant authz.TenantID, id string) []byte { return append(tenantPrefix(tenant), id...) }

func deliveriesPrefix(tenant authz.TenantID, id string) []byte {
	return []byte(DeliveryFamily + string(tenant) + "/" + id + "/")
}

func event(t audit.EventType, p authz.Principal, id string) audit.Event {
	e := audit.Event{Type: t, Outcome: audit.Success, Principal: p, Resource: audit.Resource{Type: audit.WebhookResource}}
	if authz.ValidID(idPrefix, id) {
		e.Resource.ID = id
	}
	return e
}

// admit refuses everybody who may not do a, or whom a policy limits.
func (s *Service) admit(ctx context.Context, p authz.Principal, a authz.Action, e audit.Event) error {
	if err := s.guard.Admit(ctx, p, a); err != nil {
		return err
	}
	if p.Access.IsLimited() {
		return s.guard.Refuse(ctx, e, audit.Denied, string(authz.OutsidePolicy), errDenied)
	}
	return nil
}

// Create makes a webhook. It returns the secret of its signatures, "whsec_" and base64, which nobody
// can read again. Errors: fault.Invalid; fault.Forbidden, also for everybody whom a policy limits;
// fault.Conflict for too many webhooks; fault.Unavailable.
func (s *Service) Create(ctx context.Context, p authz.Principal, r Request) (made Webhook, signing string, err error) {
	id := authz.NewID(idPrefix)
	e := event(audit.WebhookCreated, p, "")
	if err := s.admit(ctx, p, authz.CreateWebhook, e); err != nil {
		return Webhook{}, "", err
	}
	if _, err := egress.ParseURL(r.URL); err != nil {
		return Webhook{}, "", err
	}
	if len(r.Description) > maxDescription {
		return Webhook{}, "", errDescription
	}
	c := content{r.URL, r.Description, make([]byte, secretSize), s.now().UTC()}
	_, _ = rand.Read(c.Secret) // never fails: crypto/rand aborts the program instead
	defer clear(c.Secret)
	row, err := s.seal(ctx, p.Tenant, id, c)
	if err != nil {
		return Webhook{}, "", fmt.Errorf("making a webhook: %w", err)
	}
	err = s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		ids, err := idsOf(tx, p.Tenant)
		if err == nil && len(ids) >= maxWebhooks {
			err = records.Refuse(reasonTooMany, errTooMany)
		}
		if err != nil {
			return err
		}
		e.Resource.ID = id
		return tx.Put(key(p.Tenant, id), row)
	})
	if err != nil {
		return Webhook{}, "", fmt.Errorf("making a webhook: %w", err)
	}
	return c.webhook(id), secretPrefix + base64.StdEncoding.EncodeToString(c.Secret), nil
}

// seal returns the row of a webhook: the version of the tenant's wrapping key (four bytes, big endian)
// and the sealed content, which is bound to the row's key.
func (s *Service) seal(ctx context.Context, tenant authz.TenantID, id string, c content) ([]byte, error) {
	keys, err := s.keys.Current(ctx, tenant)
	if err != nil {
		return nil, err
	}
	plain, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	defer secret.Bytes(plain).Zero()
	blob, err := envelope.SealKey(keys.Wrapping, string(key(tenant, id)), plain)
	if err != nil {
		return nil, err
	}
	return append(binary.BigEndian.AppendUint32(nil, keys.Version), blob...), nil
}

// open is the inverse of seal. Error: [envelope.ErrOpen] for a row that will never open.
func (s *Service) open(ctx context.Context, tenant authz.TenantID, id string, row []byte) (c content, err error) {
	if len(row) < 4 {
		return c, envelope.ErrOpen
	}
	keys, err := s.keys.Version(ctx, tenant, binary.BigEndian.Uint32(row))
	if err != nil {
		return c, err
	}
	plain, err := envelope.OpenKey(keys.Wrapping, string(key(tenant, id)), row[4:])
	if err != nil {
		return c, err
	}
	defer plain.Zero()
	if err := json.Unmarshal(plain, &c); err != nil {
		return c, envelope.ErrOpen
	}
	return c, nil
}

func (c content) webhook(id string) Webhook {
	w := Webhook{ID: id, Description: c.Description, CreatedAt: c.CreatedAt}
	if u, err := egress.ParseURL(c.URL); err == nil {
		w.Host = u.Host
	}
	return w
}

// idsOf returns the ids of a tenant's webhooks.
func idsOf(r store.Reader, tenant authz.TenantID) (ids []string, err error) {
	prefix := tenantPrefix(tenant)
	err = r.Scan(store.Prefix(prefix), func(k, _ []byte) bool {
		ids = append(ids, string(k[len(prefix):]))
		return true
	})
	return ids, err
}

// List returns the webhooks of p's tenant, oldest first. A row that cannot be opened has no host and no
// time, so it can be deleted. Errors: fault.Forbidden, fault.Unavailable.
func (s *Service) List(ctx context.Context, p authz.Principal) ([]Webhook, error) {
	e := event(audit.WebhookListed, p, "")
	if err := s.admit(ctx, p, authz.ListWebhooks, e); err != nil {
		return nil, err
	}
	rows := make(map[string][]byte)
	prefix := tenantPrefix(p.Tenant)
	err := s.store.View(ctx, func(r store.Reader) error {
		clear(rows)
		return r.Scan(store.Prefix(prefix), func(k, row []byte) bool {
			rows[string(k[len(prefix):])] = slices.Clone(row)
			return true
		})
	})
	all := []Webhook{}
	for id, row := range rows {
		c, bad := s.open(ctx, p.Tenant, id, row)
		if bad != nil && !errors.Is(bad, envelope.ErrOpen) && !errors.Is(bad, fault.Internal) {
			err = errors.Join(err, bad)
		}
		all = append(all, c.webhook(id))
		clear(c.Secret)
	}
	if err != nil {
		return nil, fmt.Errorf("listing webhooks: %w", err)
	}
	slices.SortFunc(all, func(a, b Webhook) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all, s.guard.Record(ctx, e)
}

// Delete deletes a webhook and its deliveries. An attempt in progress may still be made. Errors:
// fault.Forbidden, fault.NotFound, fault.Unavailable.
func (s *Service) Delete(ctx context.Context, p authz.Principal, id string) error {
	e := event(audit.WebhookDeleted, p, id)
	if err := s.admit(ctx, p, authz.DeleteWebhook, e); err != nil {
		return err
	}
	err := s.rows.Commit(ctx, e, func(tx store.Tx, e *audit.Event) error {
		if err := s.find(tx, p.Tenant, e.Resource.ID); err != nil {
			return err
		}
		prefix := deliveriesPrefix(p.Tenant, id)
		var failed error
		err := tx.Scan(store.Prefix(prefix), func(k, _ []byte) bool {
			msg := string(k[len(prefix):])
			failed = errors.Join(s.outbox.Delete(tx, msg), tx.Delete(slices.Clone(k)))
			return failed == nil
		})
		return errors.Join(err, failed, tx.Delete(key(p.Tenant, id)))
	})
	if err != nil {
		return fmt.Errorf("deleting a webhook: %w", err)
	}
	return nil
}

// find returns a refusal if a webhook does not exist. id is empty for one that cannot exist.
func (s *Service) find(r store.Reader, tenant authz.TenantID, id string) error {
	if id == "" {
		return records.Refuse(reasonNoWebhook, errWebhook)
	}
	row, err := r.Get(key(tenant, id))
	if err == nil && row == nil {
		err = records.Refuse(reasonNoWebhook, errWebhook)
	}
	return err
}
