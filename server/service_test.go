package server_test

import (
	"testing"

	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// service is the whole service, with what only the tests of this package ask of it.
type service struct{ *servertest.Service }

// newService starts a service and stops it with the test.
func newService(t testing.TB, change ...func(*server.Config)) *service {
	t.Helper()
	return &service{servertest.Start(t, change...)}
}

// assemble makes a service that listens nowhere yet.
func assemble(t testing.TB, change ...func(*server.Config)) *service {
	t.Helper()
	return &service{servertest.Assemble(t, change...)}
}

type fields = map[string]any
