package identity

import (
	"context"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/guard"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/identity/access"
	"github.com/latticekeep/latticekeep/internal/identity/records"
	"github.com/latticekeep/latticekeep/internal/keyring"
	"github.com/latticekeep/latticekeep/internal/names/past"
	"github.com/latticekeep/latticekeep/internal/store"
)

// deps is what every part works with.
type deps struct {
	store store.Store
	guard *guard.Guard
	keys  *keyring.Ring
	rows  *records.Store
	now   func() time.Time

	policies *access.Store
	past     past.Names
}

// deny records that p may not do a, and returns err.
func (d *deps) deny(ctx context.Context, p authz.Principal, a authz.Action, reason string, err error) error {
	if failed := d.guard.RecordAttempt(ctx, p, a, audit.Denied, reason); failed != nil {
		return failed
	}
	return err
}

// refuseStranger records that an unknown caller was refused, once per source and minute, and
// returns err. The entry belongs to the system's tenant unless from names another.
func (d *deps) refuseStranger(ctx context.Context, from authz.Principal, t audit.EventType, resource, reason string, err error) error {
	return d.refuseAbout(ctx, "", from, t, resource, reason, err)
}

// refuseAbout is refuseStranger, but records once per source, minute and about, which identifies
// what was asked for.
func (d *deps) refuseAbout(ctx context.Context, about string, from authz.Principal, t audit.EventType, resource, reason string, err error) error {
	failed := d.guard.RecordRefusal(ctx, authz.Source(from.SourceIP)+" "+about, audit.Event{
		Type: t, Outcome: audit.Denied, Principal: from, Resource: audit.Resource{Type: resource},
		Attributes: map[string]string{audit.AttributeReason: reason},
	})
	if failed != nil {
		return failed
	}
	return err
}
