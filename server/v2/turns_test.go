package v2_test

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/server"
	"github.com/latticekeep/latticekeep/test/servertest"
)

// slowReports keep the reports of one tenant waiting, as a bucket that hangs does.
type slowReports struct {
	compliance.Reports
	tenant          string
	entered, opened chan struct{}
	once            sync.Once
}

func (r *slowReports) Put(ctx context.Context, name string, data []byte) error {
	if strings.Contains(name, r.tenant) {
		r.once.Do(func() { close(r.entered) })
		<-r.opened
	}
	return r.Reports.Put(ctx, name, data)
}

// However slowly one tenant's report is stored, another's is made meanwhile, and its
// own next one after it.
func TestOneTenantsReportKeepsNoOtherWaiting(t *testing.T) {
	slow := &slowReports{entered: make(chan struct{}), opened: make(chan struct{})}
	s := newService(t, func(c *server.Config) {
		slow.Reports = c.Reports.(compliance.Reports)
		c.Compliance = servertest.NewCompliance(t, c, verify.NewLiveVerifier(c.Audit), servertest.HealthyState(), slow)
	})
	slow.tenant = string(s.Tenant)
	other := s.GrantKeyIn(s.Stranger().Tenant, "compliance:read")
	s.VerifyLog()
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if r := s.Get("/api/v2/compliance/report?framework=soc2"); r.Status != http.StatusOK {
			t.Errorf("%d %s", r.Status, r.Body)
		}
	})
	<-slow.entered
	waiting.Go(func() {
		if r := s.Get("/api/v2/compliance/score?framework=soc2"); r.Status != http.StatusOK && r.Status != http.StatusServiceUnavailable {
			t.Errorf("%d %s", r.Status, r.Body)
		}
	})
	for _, path := range []string{"score", "history", "report"} {
		r := s.Call(servertest.Request{Method: "GET", Path: "/api/v2/compliance/" + path + "?framework=soc2", Key: other})
		if r.Status != http.StatusOK {
			t.Errorf("%s of another tenant: %d %s", path, r.Status, r.Body)
		}
	}
	close(slow.opened)
	waiting.Wait()
}
