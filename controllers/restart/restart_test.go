package restart

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/latticekeep/latticekeep/controllers/requeue"
)

func TestARestartWaitsTenSecondsForFurtherValues(t *testing.T) {
	epoch := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	now := epoch
	clock := func() time.Time { return now }
	r := &restarter{schedule: requeue.NewSchedule(clock), now: clock}
	workload := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "app"}}
	for second := range 20 {
		now = epoch.Add(time.Duration(second) * time.Second)
		if due := r.schedule.Due(); len(due) > 0 != (second == 10) {
			t.Errorf("after %d seconds %v are due", second, due)
		}
		if second < 10 { // values change each second
			delayedHandler{r}.enqueue(workload)
		}
	}
}
