package mail

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/outbox"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Transport hands a mail on. Send returns nil once another system is responsible for the mail, an
// error that wraps [ErrRefused] if no later attempt can succeed, and any other error if one may. It
// gives up when ctx ends. An error quotes neither the address nor the text. Calls are concurrent.
type Transport interface {
	Send(ctx context.Context, e Envelope) error
}

// Queued returns how many mails wait in a store; from 1,024 on perhaps more. Error: fault.Unavailable.
func Queued(ctx context.Context, s store.Store) (n int, err error) {
	if n, err = outbox.Queued(ctx, s, rowPrefix); err != nil {
		return 0, fmt.Errorf("counting the mails that wait: %w", err)
	}
	return n, nil
}

// Run sends what is in the outbox until ctx ends, and then returns nil. It may run in several
// replicas on one store: one of them sends each mail. It logs and retries failures of a mail, the
// mail server, the store or the KMS.
func (o *Outbox) Run(ctx context.Context, t Transport, opts Options) error {
	if t == nil || opts.PublicURL == "" || opts.From == "" {
		return errors.New("sending mails: transport, public URL and sender are required")
	}
	o.Outbox.Run(ctx, opts.Logger, o.deliver(t, opts))
	return nil
}

// deliver returns what sends a stored mail.
func (o *Outbox) deliver(t Transport, opts Options) outbox.Deliver {
	return func(ctx context.Context, i outbox.Item) outbox.Outcome {
		m, err := o.openRow(ctx, i)
		out := outbox.Outcome{Made: m.CreatedAt, Kind: string(m.Kind)}
		switch {
		case errors.Is(err, envelope.ErrOpen):
			out.Final, out.Err = true, errors.New("it was not sealed by this deployment, or is damaged")
		case err != nil:
			out.Err = err
		case m.To == "":
			out.Quiet = true
		case o.now().Sub(m.CreatedAt) > min(maxAge, templates[m.Kind].lasts):
			out.Final, out.Err = true, errors.New("it could not be delivered in time")
		default:
			out.Err = t.Send(ctx, render(i.ID, m, opts))
			out.Final = errors.Is(out.Err, ErrRefused)
		}
		return out
	}
}

// openRow returns the message of a row. Error: [envelope.ErrOpen] for a row that will never open.
func (o *Outbox) openRow(ctx context.Context, i outbox.Item) (stored, error) {
	version, blob, ok := decodeRow(i.Row)
	if !ok {
		return stored{}, envelope.ErrOpen
	}
	keys, err := o.keys.Version(ctx, authz.SystemTenant, version)
	if err != nil {
		return stored{}, fmt.Errorf("opening a mail: %w", err)
	}
	plain, err := envelope.OpenKey(keys.Wrapping, contextOf(i.Key), blob)
	if err != nil {
		return stored{}, err
	}
	defer plain.Zero()
	var m stored
	if err := json.Unmarshal(plain, &m); err != nil {
		return stored{}, envelope.ErrOpen
	}
	if _, known := templates[m.Kind]; !known {
		return stored{}, envelope.ErrOpen
	}
	return m, nil
}
