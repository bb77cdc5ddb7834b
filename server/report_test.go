package server

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/latticekeep/latticekeep/internal/health"
)

func TestProbesOfStrangersShareAReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		var failing error
		m := health.New(health.Check{Name: "store", Scope: health.Replica, Stops: health.Classes(), Ask: func(context.Context) error {
			runs++
			return failing
		}})
		r := &sharedReport{of: m.Report}
		var asked sync.WaitGroup
		for range 100 {
			asked.Go(func() {
				gone, leave := context.WithCancel(t.Context())
				leave() // which stops no check for the others
				if err := r.get(gone).Ready(); err != nil {
					t.Error(err)
				}
			})
		}
		asked.Wait()
		if runs != 1 {
			t.Errorf("the checks ran %d times", runs)
		}
		failing = errors.New("broken")
		time.Sleep(reportAge)
		if r.get(t.Context()).Ready() == nil || runs != 2 {
			t.Errorf("the report is old, after %d runs", runs)
		}
	})
}
