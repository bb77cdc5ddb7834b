// Package app is the process: it wires the parts together and is the only package that does. [Serve]
// runs a production server, [Dev] a development server, and [Webhook] the admission webhook.
package app

import (
	"log/slog"
	"net"
	"time"

	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/backup"
	"github.com/latticekeep/latticekeep/internal/compliance/assessor"
	"github.com/latticekeep/latticekeep/internal/mail"
	"github.com/latticekeep/latticekeep/internal/quota"
)

// service is everything that runs beside each other, whether in development or
// in production.
type service struct {
	*deployment
	logger  *slog.Logger
	now     func() time.Time
	mails   mail.Transport
	sender  string                    // of mails
	cluster *rest.Config              // nil: there is no operator
	tenants map[string]authz.TenantID // by namespace

	operator   controllers.Options // as far as they are configured
	operations net.Listener        // nil: what it serves is on the other one
	tracing    *tracing            // nil: there are no traces
	clock      *sharedClock        // of the database that replicas share; nil: there is one replica
	lender     *quota.Shared       // of requests, likewise

	dev        bool               // a development server, which hides nothing from whoever administers it
	recipients []backup.Recipient // of backups over the interface; empty: any, and then no KMS key goes with them

	sealingLifetime time.Duration // of a sealing key until a new one is made; 0: for ever

	evidence   *evidence // of the log
	compliance *assessor.Service
}

// audience is what pods request the tokens for that they present here.
const audience = "latticekeep"

func (s *service) closeOperations() error {
	if s.operations == nil {
		return nil
	}
	return s.operations.Close()
}
