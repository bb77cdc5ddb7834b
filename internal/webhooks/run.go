package webhooks

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/egress"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/outbox"
	"github.com/latticekeep/latticekeep/internal/store"
)

// lasts is how long attempts are made: until the last of waits is over, if none comes early.
const lasts = 76 * time.Hour

// sign returns the value of the header webhook-signature.
func sign(secret []byte, id, timestamp string, body []byte) string {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte(id + "." + timestamp + ".")) // never fails; neither part has a dot
	h.Write(body)
	return "v1," + base64.StdEncoding.EncodeToString(h.Sum(nil))
}

// Run delivers what waits until ctx ends. It may run in several replicas on one store: one of them sends
// each delivery. A nil logger is the default one.
func (s *Service) Run(ctx context.Context, client *egress.Client, logger *slog.Logger) {
	s.outbox.Run(ctx, logger, s.deliver(client))
}

// Notify tells [Service.Run] that deliveries were stored. It never blocks.
func (s *Service) Notify() { s.outbox.Notify() }

// deliver returns what tries a delivery once.
func (s *Service) deliver(client *egress.Client) outbox.Deliver {
	return func(ctx context.Context, i outbox.Item) outbox.Outcome {
		tenant, id, _ := strings.Cut(string(i.Row), "/")
		t := try{service: s, tenant: authz.TenantID(tenant), webhook: id, msg: i.ID, failed: i.Failed}
		hook, err := t.load(ctx)
		out := outbox.Outcome{Made: t.row.CreatedAt, Kind: t.row.Event}
		switch {
		case errors.Is(err, errDelivery): // it, or its webhook, was deleted
			out.Quiet = true
			return out
		case errors.Is(err, envelope.ErrOpen), errors.Is(err, fault.Internal):
			return t.die(out, errors.New("it, or its webhook, is damaged"))
		case t.row.Event != "" && s.now().Sub(t.row.Since) > lasts: // after an outage, or of a backup
			return t.die(out, errors.New("it could not be delivered in time"))
		case err != nil: // the store or the KMS does not answer
			out.Err = err
			return out
		}
		defer clear(hook.Secret)
		return t.send(ctx, client, hook, out)
	}
}

// try is an attempt at a delivery.
type try struct {
	service *Service
	tenant  authz.TenantID
	webhook string
	msg     string
	failed  int
	row     deliveryRow
}

func (t *try) key() []byte { return deliveryKey(t.tenant, t.webhook, t.msg) }

// load reads the delivery and its webhook. Errors: errDelivery if one of them is gone;
// [envelope.ErrOpen] and fault.Internal for rows that will never open.
func (t *try) load(ctx context.Context) (hook content, err error) {
	s := t.service
	var sealed []byte
	err = s.store.View(ctx, func(r store.Reader) error {
		row, err := r.Get(key(t.tenant, t.webhook))
		sealed = slices.Clone(row)
		if err != nil {
			return err
		}
		if row == nil {
			return errDelivery
		}
		t.row = deliveryRow{}
		found, err := s.rows.Get(r, t.key(), &t.row)
		if err == nil && !found {
			err = errDelivery
		}
		return err
	})
	if err != nil {
		return hook, err
	}
	return s.open(ctx, t.tenant, t.webhook, sealed)
}

func (t *try) send(ctx context.Context, client *egress.Client, hook content, out outbox.Outcome) outbox.Outcome {
	s := t.service
	now := s.now().UTC()
	timestamp := strconv.FormatInt(now.Unix(), 10)
	status, err := client.Post(ctx, hook.URL, http.Header{
		"Content-Type":      {"application/json"},
		"User-Agent":        {"latticekeep"},
		"Webhook-Id":        {t.msg},
		"Webhook-Timestamp": {timestamp},
		"Webhook-Signature": {sign(hook.Secret, t.msg, timestamp, t.row.Body)},
	}, t.row.Body)
	t.row.Attempts, t.row.TriedAt, t.row.Status, t.row.Reason = t.row.Attempts+1, now, status, ""
	failure := new(egress.Error)
	switch {
	case errors.As(err, &failure):
		t.row.Reason = string(failure.Reason)
	case err == nil && status >= 200 && status <= 299:
		t.row.State = Delivered
		out.Note = t.note
		return out
	case err == nil:
		err = fmt.Errorf("the receiver answers with the status %d", status)
	}
	if ctx.Err() == nil && now.Add(wait(t.failed+1)).After(t.row.Since.Add(lasts)) {
		return t.die(out, err)
	}
	out.Err, out.Note = err, t.note
	return out
}

// note stores the outcome of an attempt, unless the webhook was deleted meanwhile, or another replica has
// stored the end of the delivery.
func (t *try) note(tx store.Tx) error {
	if waits, err := t.waits(tx); err != nil || !waits {
		return err
	}
	return t.service.rows.Put(tx, t.key(), t.row)
}

// waits reports whether the delivery is as it was before the attempt. A damaged one is.
func (t *try) waits(r store.Reader) (bool, error) {
	var now deliveryRow
	found, err := t.service.rows.Get(r, t.key(), &now)
	if errors.Is(err, fault.Internal) {
		return true, nil
	}
	return found && now.State == Waiting && now.Since.Equal(t.row.Since), err
}

// die makes a dead letter of a delivery, with an entry.
func (t *try) die(out outbox.Outcome, err error) outbox.Outcome {
	out.Err, out.Final = err, true
	out.Note = func(tx store.Tx) error {
		if waits, err := t.waits(tx); err != nil || !waits {
			return err
		}
		e := event(audit.WebhookFailed, authz.SystemPrincipal(t.tenant), t.webhook)
		e.Outcome, e.Attributes = audit.Failure, map[string]string{audit.AttributeReason: reasonNoSuccess, attributeDelivery: t.msg}
		_, failed := t.service.guard.Append(tx, e)
		if t.row.Event == "" { // damaged: it cannot be sent again
			return errors.Join(failed, tx.Delete(t.key()))
		}
		t.row.State = Dead
		return errors.Join(failed, t.note(tx))
	}
	return out
}
