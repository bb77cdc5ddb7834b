// Package webhookapi has the endpoints of webhooks of version 2.
package webhookapi

import (
	"context"
	"net/http"

	"github.com/gin-gonic/gin"

	api "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/webhooks"
	"github.com/latticekeep/latticekeep/server/gate"
)

// Endpoints implements the endpoints.
type Endpoints struct{ webhooks *webhooks.Service }

// New returns the endpoints of s.
func New(s *webhooks.Service) *Endpoints { return &Endpoints{s} }

func webhook(w webhooks.Webhook) api.Webhook {
	return api.Webhook{WebhookId: w.ID, Host: w.Host, Description: w.Description, CreatedAt: w.CreatedAt.UTC()}
}

func delivery(d webhooks.Delivery) api.Delivery {
	answer := api.Delivery{
		DeliveryId: d.ID, Event: d.Event, State: api.DeliveryState(d.State), Attempts: d.Attempts,
		Status: gate.NonZero(d.Status), Reason: gate.NonZero(api.DeliveryReason(d.Reason)), CreatedAt: d.CreatedAt.UTC(),
	}
	if !d.TriedAt.IsZero() {
		answer.TriedAt = &d.TriedAt
	}
	if !d.NextAt.IsZero() {
		answer.NextAt = &d.NextAt
	}
	return answer
}

func deliveryAnswer(d webhooks.Delivery, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return api.DeliveryAnswer{Success: true, Delivery: delivery(d)}, nil
}

// ListWebhooks returns the webhooks of the tenant.
func (e *Endpoints) ListWebhooks(c *gin.Context) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		found, err := e.webhooks.List(ctx, call.Principal())
		if err != nil {
			return nil, err
		}
		answer := api.WebhookList{Success: true, Webhooks: make([]api.Webhook, len(found))}
		for i, w := range found {
			answer.Webhooks[i] = webhook(w)
		}
		return answer, nil
	})
}

// CreateWebhook makes a webhook, and answers its secret once.
func (e *Endpoints) CreateWebhook(c *gin.Context) {
	gate.Answer(c, http.StatusCreated, func(ctx context.Context, call *gate.Call) (any, error) {
		var body api.WebhookRequest
		if err := call.Decode(&body); err != nil {
			return nil, err
		}
		made, secret, err := e.webhooks.Create(ctx, call.Principal(), webhooks.Request{URL: body.Url, Description: gate.Value(body.Description)})
		if err != nil {
			return nil, err
		}
		return api.CreatedWebhook{Success: true, Webhook: webhook(made), Secret: secret}, nil
	})
}

// DeleteWebhook deletes a webhook and its deliveries.
func (e *Endpoints) DeleteWebhook(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		if err := e.webhooks.Delete(ctx, call.Principal(), id); err != nil {
			return nil, err
		}
		return api.DeletedWebhook{Success: true, WebhookId: id}, nil
	})
}

// TestWebhook sends a test event.
func (e *Endpoints) TestWebhook(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return deliveryAnswer(e.webhooks.Test(ctx, call.Principal(), id))
	})
}

// ListDeliveries returns what became of the events of a webhook.
func (e *Endpoints) ListDeliveries(c *gin.Context, id string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		found, err := e.webhooks.Deliveries(ctx, call.Principal(), id)
		if err != nil {
			return nil, err
		}
		answer := api.DeliveryList{Success: true, Deliveries: make([]api.Delivery, len(found))}
		for i, d := range found {
			answer.Deliveries[i] = delivery(d)
		}
		return answer, nil
	})
}

// ResendDelivery sends a dead delivery again.
func (e *Endpoints) ResendDelivery(c *gin.Context, id, msg string) {
	gate.Answer(c, http.StatusOK, func(ctx context.Context, call *gate.Call) (any, error) {
		return deliveryAnswer(e.webhooks.Resend(ctx, call.Principal(), id, msg))
	})
}
