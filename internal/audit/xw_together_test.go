package audit

import (
	"errors"
	"testing"
)

// If another process follows and archives the entries that a step is reading, the step does not
// report damage.
func TestAStepThatIsArchivedUnderneathFindsNoDamage(t *testing.T) {
	outrun := 0
	for at := int64(1); ; at++ {
		f := newFixture(t)
		a, _ := f.folder()
		f.old()
		other := f.another(f.store)
		s := &between{Store: f.store, at: at, do: func() error {
			_, err := (&Cutter{Log: other.Log, Reader: other.Reader, Archive: a, Keep: keep}).Run(t.Context())
			return err
		}}
		f.log.chain.store = s
		if _, err := f.log.step(t.Context()); errors.Is(err, errOutrun) {
			outrun++
		} else if err != nil {
			t.Errorf("archived before look %d: %v", at, err)
		}
		f.log.chain.store = f.store
		if _, err := f.log.Follow(t.Context()); err != nil {
			t.Errorf("archived before look %d: %v", at, err)
		}
		if s.views.Load() < at {
			break
		}
	}
	if outrun == 0 {
		t.Error("no step was outrun")
	}
}
