package server

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/compliance"
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
	s := newService(t, func(c *Config) {
		slow.Reports = c.Reports.(compliance.Reports)
		c.Compliance = complianceOf(t, c, healthy(), slow)
	})
	slow.tenant = string(s.tenant)
	other := s.grantIn(s.stranger().Tenant, "compliance:read")
	s.verify()
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if r := s.get("/api/v2/compliance/report?framework=soc2"); r.status != http.StatusOK {
			t.Errorf("%d %s", r.status, r.body)
		}
	})
	<-slow.entered
	waiting.Go(func() {
		if r := s.get("/api/v2/compliance/score?framework=soc2"); r.status != http.StatusOK && r.status != http.StatusServiceUnavailable {
			t.Errorf("%d %s", r.status, r.body)
		}
	})
	for _, path := range []string{"score", "history", "report"} {
		r := s.call(request{method: "GET", path: "/api/v2/compliance/" + path + "?framework=soc2", key: other})
		if r.status != http.StatusOK {
			t.Errorf("%s of another tenant: %d %s", path, r.status, r.body)
		}
	}
	close(slow.opened)
	waiting.Wait()
}
